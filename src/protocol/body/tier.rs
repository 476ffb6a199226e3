//! The numbers of tiers in messages that may name one.

use super::ErrorBody;
use crate::error::ErrorCode;
use kvferry_types::TierId;

/// The tier of a number in a message; `None` for 0, which stands for all tiers.
pub(crate) fn tier_of(field: &str, number: u8) -> Result<Option<TierId>, ErrorBody> {
    match TierId::of_number(number) {
        _ if number == 0 => Ok(None),
        Some(tier) if tier != TierId::Device => Ok(Some(tier)),
        _ => {
            let text = format!(
                "{field} is {number}: name 2 for host memory, 3 for the disk, or 0 for all tiers"
            );
            Err(ErrorBody::new(ErrorCode::Invalid, text))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_names_a_tier_below_the_device_or_all_of_them() {
        let of = |number| tier_of("tier", number).map_err(|error| error.message);
        assert_eq!(of(0), Ok(None));
        assert_eq!(of(2), Ok(Some(TierId::Host)));
        assert_eq!(of(3), Ok(Some(TierId::Disk)));
        assert_eq!(of(4), Ok(Some(TierId::Remote)));
        for number in [1, 5, 255] {
            let text = format!(
                "tier is {number}: name 2 for host memory, 3 for the disk, or 0 for all tiers"
            );
            assert_eq!(of(number), Err(text));
        }
    }
}
