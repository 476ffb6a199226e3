use num_rational::BigRational;
use proptest::prelude::*;

use super::exact::whole;
use super::*;

fn transfer(links: usize, span_ns: u64, bytes: u64) -> impl Strategy<Value = Transfer> {
    let over = prop::sample::subsequence((0..links).collect::<Vec<_>>(), 1..=links);
    let cap = prop::option::weighted(0.3, 1_u64..2_000_000_000);
    let parts = (0..span_ns, 0..span_ns / 4, over, 1..bytes, 1_u32..5, cap);
    parts.prop_map(
        |(start_ns, latency_ns, links, bytes, weight, cap)| Transfer {
            start_ns,
            latency_ns,
            links,
            bytes,
            weight,
            cap,
        },
    )
}

fn mixed() -> impl Strategy<Value = (Vec<u64>, Vec<Transfer>)> {
    (1_usize..4).prop_flat_map(|links| {
        let capacities = prop::collection::vec(1_000_000_u64..3_000_000_000, links);
        let transfers = prop::collection::vec(transfer(links, 2_000, 4_000), 1..14);
        (capacities, transfers.prop_map(sorted))
    })
}

fn sorted(mut transfers: Vec<Transfer>) -> Vec<Transfer> {
    transfers.sort_by_key(|transfer| transfer.start_ns);
    transfers
}

/// Flows over one link without caps.
fn alone() -> impl Strategy<Value = Vec<Transfer>> {
    let transfers = prop::collection::vec(transfer(1, 100_000, 50_000), 1..60);
    transfers.prop_map(|mut transfers| {
        for transfer in &mut transfers {
            transfer.cap = None;
        }
        sorted(transfers)
    })
}

/// Checks that reported ends are the exact ones rounded up: at most 2^-10 ns early, and less than 1 ns late.
fn agree(ends: &[u64], exact: &[BigRational]) -> Result<(), TestCaseError> {
    for (index, (end, exact)) in ends.iter().zip(exact).enumerate() {
        let behind = whole(*end) - exact;
        let tolerance = whole(1) / whole(1_000);
        prop_assert!(behind > -&tolerance, "{index}: {end} is before {exact}");
        prop_assert!(behind < whole(1), "{index}: {end} is behind {exact}");
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn ends_are_those_of_exact_fractions((capacities, transfers) in mixed()) {
        let exact = exact::ends(&capacities, &transfers);
        agree(&ends(&capacities, &transfers, 0), &exact)?;
    }

    #[test]
    fn ends_on_one_link_are_those_of_exact_fractions(
        capacity in 1_000_u64..1_000_000_000_000, transfers in alone(),
    ) {
        let exact = exact::ends(&[capacity], &transfers);
        agree(&ends(&[capacity], &transfers, 0), &exact)?;
    }

    #[test]
    fn the_number_of_advances_changes_nothing((capacities, transfers) in mixed(), looks in 1_u64..20) {
        prop_assert_eq!(ends(&capacities, &transfers, 0), ends(&capacities, &transfers, looks));
    }

    #[test]
    fn links_are_full_where_they_limit_and_never_more((capacities, transfers) in mixed(), upto in 0_usize..14) {
        let (mut model, ids) = links(&capacities);
        let mut flows = Vec::new();
        for transfer in transfers.iter().take(upto + 1) {
            flows.push((start(&mut model, &ids, transfer), transfer));
        }
        let last = flows.last().map_or(0, |(_, transfer)| transfer.start_ns + transfer.latency_ns);
        model.advance(Time(last), &mut Vec::new());
        model.settle();
        let rates: Vec<(u128, &Transfer)> = flows
            .iter()
            .filter_map(|(id, transfer)| model.exact_rate(*id).map(|rate| (rate, *transfer)))
            .filter(|(rate, _)| *rate > 0)
            .collect();
        // Each flow's rate is rounded down, by less than its weight.
        let rounding: u128 = 1_000;
        let full = |link: usize| {
            let sum: u128 = rates.iter().filter(|(_, t)| t.links.contains(&link)).map(|(rate, _)| rate).sum();
            (sum, fixed::from_rate(capacities[link]))
        };
        for link in 0..capacities.len() {
            let (sum, capacity) = full(link);
            prop_assert!(sum <= capacity, "link {link} is overfull");
        }
        for (rate, transfer) in &rates {
            let cap = transfer.cap.map_or(u128::MAX, fixed::from_rate);
            prop_assert!(*rate <= cap);
            // A flow below its cap is limited by a full link on which no flow has more for its weight.
            let held = transfer.links.iter().any(|link| {
                let (sum, capacity) = full(*link);
                let most = rates.iter().filter(|(_, t)| t.links.contains(link));
                let most = most.map(|(rate, t)| rate / u128::from(t.weight)).max().unwrap_or(0);
                sum + rounding >= capacity && rate / u128::from(transfer.weight) + rounding >= most
            });
            prop_assert!(*rate == cap || held, "{transfer:?} could have more than {rate}");
        }
    }

    #[test]
    fn a_link_that_is_never_idle_ends_when_its_bytes_by_its_capacity_are_over(
        capacity in 1_u64..1_000_000_000_000, mut transfers in alone(),
    ) {
        for transfer in &mut transfers {
            (transfer.start_ns, transfer.latency_ns) = (0, 0);
        }
        let bytes: u64 = transfers.iter().map(|transfer| transfer.bytes).sum();
        let exact = whole(bytes) * whole(SECOND) / whole(capacity);
        let last = ends(&[capacity], &transfers, 0).into_iter().max();
        agree(&[last.unwrap_or(0)], &[exact])?;
    }

    #[test]
    fn equal_weights_end_in_the_order_of_what_is_left(
        capacity in 1_000_u64..1_000_000_000, mut transfers in alone(), look in 0_u64..1_000_000,
    ) {
        for transfer in &mut transfers {
            transfer.weight = 1;
        }
        let ends = ends(&[capacity], &transfers, 0);
        let (mut model, ids) = links(&[capacity]);
        let flows: Vec<FlowId> = transfers.iter().map(|transfer| start(&mut model, &ids, transfer)).collect();
        let joined = transfers.iter().map(|t| t.start_ns + t.latency_ns).max().unwrap_or(0);
        let at = Time(joined + look);
        let mut left: Vec<(u64, u64)> = Vec::new();
        model.advance(at, &mut Vec::new());
        for (flow, end) in flows.iter().zip(&ends) {
            if let Some(Flow { stage: Stage::Single { tag }, .. }) = model.flows.get(flow) {
                left.push((u64::try_from(tag >> 40).expect("small"), *end));
            }
        }
        left.sort_unstable();
        prop_assert!(left.is_sorted_by_key(|(_, end)| *end));
    }

    #[test]
    fn a_cancel_gives_back_what_did_not_move((capacities, transfers) in mixed(), which in 0_usize..14, later in 0_u64..4_000) {
        let (mut model, ids) = links(&capacities);
        let flows: Vec<FlowId> = transfers.iter().map(|transfer| start(&mut model, &ids, transfer)).collect();
        let which = which % flows.len();
        let last = transfers.iter().map(|transfer| transfer.start_ns).max().unwrap_or(0);
        let mut ended = Vec::new();
        let left = model.cancel(Time(last + later), flows[which]);
        while let Some(at) = model.next_event() {
            model.advance(at, &mut ended);
        }
        let end = ended.iter().find(|(_, id)| *id == flows[which]);
        prop_assert!(left.is_some() != end.is_some(), "ended, or given back");
        prop_assert_eq!(ended.len() + usize::from(left.is_some()), flows.len());
        prop_assert!(left.unwrap_or(0) <= transfers[which].bytes);
        for (index, id) in ids.iter().enumerate() {
            let on = |transfer: &&Transfer| transfer.links.contains(&index);
            let bytes: u64 = transfers.iter().filter(on).map(|transfer| transfer.bytes).sum();
            let back = if on(&&transfers[which]) { left.unwrap_or(0) } else { 0 };
            prop_assert_eq!(model.utilisation(*id).bytes, bytes - back);
        }
    }
}

/// A random generator that keeps all its state in `state`: Knuth's constants for 64 bits.
fn next(state: &mut u64, below: u64) -> u64 {
    *state = state
        .wrapping_mul(6_364_136_223_846_793_005)
        .wrapping_add(1_442_695_040_888_963_407);
    (*state >> 33) % below
}

/// End times on one link by a sweep over the served bytes, with 512 fraction bits: a reference for thousands of flows,
/// for which exact fractions grow too long.
fn long_ends(capacity: u64, transfers: &[Transfer]) -> Vec<BigRational> {
    use num_bigint::BigInt;
    let bits = 512;
    let one: BigInt = BigInt::from(1) << bits;
    let mut clock = BigInt::from(0);
    let mut now = BigInt::from(0);
    let mut tags: Vec<(BigInt, usize)> = Vec::new();
    let mut ends = vec![whole(0); transfers.len()];
    let mut weight = 0_u64;
    let rate = BigInt::from(capacity);
    let mut starts = transfers.iter().enumerate().peekable();
    while starts.peek().is_some() || !tags.is_empty() {
        let first = tags.iter().min().cloned();
        let end = first.map(|(tag, index)| {
            let span = (&tag - &clock) * BigInt::from(weight) / &rate;
            (&now + span, index)
        });
        let join = starts
            .peek()
            .map(|(_, transfer)| BigInt::from(transfer.start_ns) * &one);
        let ends_first = match (&end, &join) {
            (Some((end, _)), Some(join)) => end <= join,
            (Some(_), None) => true,
            _ => false,
        };
        if ends_first && let Some((at, index)) = end {
            let position = tags
                .iter()
                .position(|(_, other)| *other == index)
                .expect("there");
            clock = tags.swap_remove(position).0;
            weight -= u64::from(transfers[index].weight);
            ends[index] = BigRational::new(at.clone(), one.clone());
            now = at;
        } else if let (Some(at), Some((index, transfer))) = (join, starts.next()) {
            if weight > 0 {
                clock += (&at - &now) * &rate / BigInt::from(weight);
            }
            now = at;
            let work = BigInt::from(transfer.bytes) * BigInt::from(SECOND) * &one;
            tags.push((&clock + work / BigInt::from(transfer.weight), index));
            weight += u64::from(transfer.weight);
        }
    }
    ends
}

#[test]
fn thousands_of_flows_end_within_a_nanosecond() {
    let mut state = 1;
    for (capacity, mean_ns) in [(12_000_000_000, 90_000), (1_000_007, 1_100_000_000)] {
        let mut at = 0;
        let mut transfers = Vec::new();
        for _ in 0..4_000 {
            at += next(&mut state, 2 * mean_ns);
            let mut transfer = Transfer::new(at, &[0], 1 + next(&mut state, 2_000_000));
            transfer.weight = 1 + next(&mut state, 7) as u32;
            transfers.push(transfer);
        }
        let exact = long_ends(capacity, &transfers);
        let found = ends(&[capacity], &transfers, 0);
        agree(&found, &exact).expect("within a nanosecond");
    }
}

#[test]
fn the_largest_numbers_do_not_overflow() {
    let (bytes, flows, capacity) = (1_000_000_000_000_000, 10_000, 1_000_000_000_000);
    let transfers: Vec<Transfer> = (0..flows).map(|_| Transfer::new(0, &[0], bytes)).collect();
    let end = bytes / capacity * flows * SECOND;
    assert!(ends(&[capacity], &transfers, 0).iter().all(|at| *at == end));
    // All flows over two links: the narrower one limits them.
    let transfers: Vec<Transfer> = (0..100).map(|_| Transfer::new(0, &[0, 1], bytes)).collect();
    let end = bytes / capacity * 100 * SECOND;
    let found = ends(&[capacity, 2 * capacity], &transfers, 0);
    assert!(found.iter().all(|at| *at == end), "{:?}", &found[..2]);
    let one = [Transfer::new(0, &[0], u64::MAX)];
    assert_eq!(ends(&[u64::MAX], &one, 0), [SECOND]);
}

#[test]
fn an_event_costs_the_logarithm_of_the_flows() {
    // Each event touches one entry of an ordered set and no other flow: the tags of the others stay the same.
    let (mut model, ids) = links(&[1_000_000_000]);
    for at in 0..1_000 {
        start(&mut model, &ids, &Transfer::new(at, &[0], 1_000_000 + at));
    }
    let before = model.links[0].singles.clone();
    let late = start(&mut model, &ids, &Transfer::new(2_000, &[0], 5));
    let mut ended = Vec::new();
    while ended.is_empty() {
        let at = model.next_event().expect("an end");
        model.advance(at, &mut ended);
    }
    assert_eq!(ended[0].1, late);
    assert_eq!(model.links[0].singles, before);
}
