//! Integer arithmetic of the links: fixed-point numbers with 32 fraction bits.
//!
//! Times count nanoseconds, work counts nanobytes (10^-9 bytes), rates count bytes per second, which is nanobytes per
//! nanosecond: a rate times a time is work, without a factor.

use kvferry_types::Time;

/// Number of fraction bits.
const FRACTION_BITS: u32 = 32;
/// The number 1.
pub(super) const ONE: u128 = 1 << FRACTION_BITS;
/// Work of one byte, in nanobytes.
const BYTE: u128 = 1_000_000_000 * ONE;
/// Excess that is ignored when an end is rounded up to whole nanoseconds (2^-10 ns): more than all rounding errors of
/// some million events together, so that an end at a whole nanosecond is reported there, and not one later.
const SNAP: u128 = ONE >> 10;
/// Excess that is ignored when remaining bytes are rounded up: 2^-22 bytes.
const SNAP_BYTES: u128 = BYTE >> 22;

/// Converts a point in time.
pub(super) fn from_time(time: Time) -> u128 {
    u128::from(time.0) << FRACTION_BITS
}

/// Returns the first whole nanosecond at or after a point in time, ignoring an excess of up to [`SNAP`];
/// [`Time::NEVER`] when there is none.
pub(super) fn to_time(at: u128) -> Time {
    let nanos = at.saturating_sub(SNAP).div_ceil(ONE);
    u64::try_from(nanos).map_or(Time::NEVER, Time)
}

/// Work of moving `bytes`. Below 2^126.
pub(super) fn from_bytes(bytes: u64) -> u128 {
    u128::from(bytes) * BYTE
}

/// Converts work to bytes, rounded up.
pub(super) fn to_bytes(work: u128) -> u64 {
    let bytes = work.saturating_sub(SNAP_BYTES).div_ceil(BYTE);
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

/// Converts a rate in bytes per second.
pub(super) fn from_rate(bytes_per_s: u64) -> u128 {
    u128::from(bytes_per_s) << FRACTION_BITS
}

/// Returns `a x b / c`, rounded down, and whether a remainder was cut off. Exact: the product has 192 bits. Saturates.
fn mul_div(a: u128, b: u64, c: u64) -> (u128, bool) {
    let (b, c) = (u128::from(b), u128::from(c));
    let low = (a & u128::from(u64::MAX)) * b;
    let high = (a >> 64) * b + (low >> 64);
    let low = low & u128::from(u64::MAX);
    let (head, rest) = (high / c, high % c);
    let rest = (rest << 64) | low;
    match u64::try_from(head) {
        Ok(head) => (
            (u128::from(head) << 64) | (rest / c),
            !rest.is_multiple_of(c),
        ),
        Err(_) => (u128::MAX, false),
    }
}

/// Work for each unit of weight that a link of `capacity` does in `span` for flows of `weight` together.
pub(super) fn shared_work(span: u128, capacity: u64, weight: u64) -> u128 {
    mul_div(span, capacity, weight).0
}

/// Time in which a link of `capacity` does `work` for each unit of `weight`, rounded up.
pub(super) fn shared_span(work: u128, capacity: u64, weight: u64) -> u128 {
    let (span, cut) = mul_div(work, weight, capacity);
    span.saturating_add(u128::from(cut))
}

/// Work that a rate does in `span`. Rounded down by less than 2^-31 nanobytes.
pub(super) fn work(rate: u128, span: u128) -> u128 {
    let (whole, part) = (span / ONE, span % ONE);
    let whole = rate.saturating_mul(whole);
    whole.saturating_add(rate.saturating_mul(part) / ONE)
}

/// Time in which a rate does `work`, rounded up; `None` at a rate of zero.
pub(super) fn span(work: u128, rate: u128) -> Option<u128> {
    let (whole, rest) = (work.checked_div(rate)?, work % rate);
    let part = rest.saturating_mul(ONE).div_ceil(rate);
    Some(whole.saturating_mul(ONE).saturating_add(part))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_end_is_reported_at_the_first_whole_nanosecond_behind_it() {
        assert_eq!(to_time(5 * ONE), Time(5));
        assert_eq!(to_time(5 * ONE + 1), Time(5), "rounding is no time");
        assert_eq!(to_time(5 * ONE + ONE / 512), Time(6));
        assert_eq!(to_time(0), Time(0));
        assert_eq!(to_time(u128::MAX), Time::NEVER);
    }

    #[test]
    fn long_products_are_exact() {
        assert_eq!(mul_div(u128::MAX, 7, 7), (u128::MAX, false));
        assert_eq!(mul_div(u128::MAX, 1, 2), (u128::MAX / 2, true));
        assert_eq!(mul_div(u128::MAX, 3, 2), (u128::MAX, false), "saturates");
        let (a, b, c) = (1_u128 << 120, 1 << 60, (1 << 60) - 1);
        let (quotient, cut) = mul_div(a, b, c);
        assert_eq!(quotient, a + (1 << 60) + 1);
        assert!(cut);
    }

    proptest! {
        #[test]
        fn a_span_is_the_shortest_that_does_the_work(
            amount in 0_u128..1 << 110, rate in 1_u128..1 << 80, capacity in 1_u64..1 << 40, weight in 1_u64..1 << 30,
        ) {
            if let Some(needed) = span(amount, rate) {
                prop_assert!(work(rate, needed) >= amount || needed == u128::MAX);
                prop_assert!(needed < 1 || work(rate, needed - 1) <= amount);
            }
            let needed = shared_span(amount, capacity, weight);
            prop_assert!(shared_work(needed, capacity, weight) >= amount);
            prop_assert!(needed == 0 || shared_work(needed - 1, capacity, weight) < amount.max(1));
        }
    }
}
