//! Naive reference model of the links with exact fractions.

use num_bigint::BigInt;
use num_rational::BigRational;

use super::Transfer;

pub(super) fn whole(number: u64) -> BigRational {
    BigRational::from_integer(BigInt::from(number))
}

struct Active {
    index: usize,
    left: BigRational,
}

/// Max-min fair rates in bytes per nanosecond: repeatedly raises all flows that can rise by the smallest step that a
/// link or a cap allows.
fn rates(capacities: &[u64], transfers: &[Transfer], active: &[Active]) -> Vec<BigRational> {
    let giga = whole(1_000_000_000);
    let mut rates = vec![whole(0); active.len()];
    let mut rising = vec![true; active.len()];
    let mut room: Vec<BigRational> = capacities.iter().map(|rate| whole(*rate) / &giga).collect();
    while rising.contains(&true) {
        let weight_on = |link: usize| {
            let on = active
                .iter()
                .zip(&rising)
                .filter(|(flow, rising)| **rising && transfers[flow.index].links.contains(&link));
            on.map(|(flow, _)| u64::from(transfers[flow.index].weight))
                .sum::<u64>()
        };
        let by_links = (0..capacities.len())
            .filter(|link| weight_on(*link) > 0)
            .map(|link| &room[link] / whole(weight_on(link)));
        let by_caps = (0..active.len()).filter(|at| rising[*at]).filter_map(|at| {
            let transfer = &transfers[active[at].index];
            let cap = whole(transfer.cap?) / &giga;
            Some((cap - &rates[at]) / whole(u64::from(transfer.weight)))
        });
        let step = by_links.chain(by_caps).min().expect("something rises");
        let weights: Vec<u64> = (0..capacities.len()).map(weight_on).collect();
        for (link, weight) in weights.into_iter().enumerate() {
            room[link] -= &step * whole(weight);
        }
        for at in 0..active.len() {
            let transfer = &transfers[active[at].index];
            if rising[at] {
                rates[at] += &step * whole(u64::from(transfer.weight));
            }
        }
        for at in 0..active.len() {
            let transfer = &transfers[active[at].index];
            let full = transfer.links.iter().any(|link| room[*link] == whole(0));
            let capped = transfer
                .cap
                .is_some_and(|cap| rates[at] == whole(cap) / &giga);
            rising[at] &= !full && !capped;
        }
    }
    rates
}

/// End times of transfers, in nanoseconds.
pub(super) fn ends(capacities: &[u64], transfers: &[Transfer]) -> Vec<BigRational> {
    let mut joins: Vec<(u64, usize)> = transfers
        .iter()
        .enumerate()
        .map(|(index, transfer)| (transfer.start_ns + transfer.latency_ns, index))
        .collect();
    joins.sort_unstable();
    let mut joins = joins.into_iter().peekable();
    let mut active: Vec<Active> = Vec::new();
    let mut ends = vec![whole(0); transfers.len()];
    let mut now = whole(0);
    while !active.is_empty() || joins.peek().is_some() {
        let rates = rates(capacities, transfers, &active);
        let spans = active
            .iter()
            .zip(&rates)
            .map(|(flow, rate)| &flow.left / rate);
        let mut next = spans.min().map(|span| &now + span);
        if let Some((at, _)) = joins.peek() {
            let at = whole(*at);
            next = Some(next.map_or(at.clone(), |next| next.min(at)));
        }
        let next = next.expect("an event");
        for (flow, rate) in active.iter_mut().zip(&rates) {
            flow.left -= rate * (&next - &now);
        }
        now = next;
        active.retain(|flow| {
            let over = flow.left == whole(0);
            if over {
                ends[flow.index] = now.clone();
            }
            !over
        });
        while let Some((_, index)) = joins.next_if(|(at, _)| whole(*at) == now) {
            let left = whole(transfers[index].bytes);
            active.push(Active { index, left });
        }
    }
    ends
}
