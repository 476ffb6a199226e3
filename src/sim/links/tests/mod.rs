mod exact;
mod properties;

use super::*;

pub(super) const SECOND: u64 = 1_000_000_000;

/// A flow for both the model and the exact reference.
#[derive(Debug, Clone)]
pub(super) struct Transfer {
    pub(super) start_ns: u64,
    pub(super) latency_ns: u64,
    pub(super) links: Vec<usize>,
    pub(super) bytes: u64,
    pub(super) weight: u32,
    pub(super) cap: Option<u64>,
}

impl Transfer {
    pub(super) fn new(start_ns: u64, links: &[usize], bytes: u64) -> Self {
        Self {
            start_ns,
            latency_ns: 0,
            links: links.to_vec(),
            bytes,
            weight: 1,
            cap: None,
        }
    }
}

pub(super) fn links(capacities: &[u64]) -> (Links, Vec<BandwidthLinkId>) {
    let mut links = Links::new();
    let ids = capacities
        .iter()
        .map(|capacity| links.add_link(*capacity).expect("a capacity"))
        .collect();
    (links, ids)
}

pub(super) fn start(links: &mut Links, ids: &[BandwidthLinkId], transfer: &Transfer) -> FlowId {
    let over: Vec<BandwidthLinkId> = transfer.links.iter().map(|link| ids[*link]).collect();
    let flow = FlowSpec {
        links: &over,
        bytes: transfer.bytes,
        weight: transfer.weight,
        cap: transfer.cap,
        latency: Duration::from_nanos(transfer.latency_ns),
    };
    links.start(Time(transfer.start_ns), &flow).expect("a flow")
}

/// End times of all transfers, which are sorted by their starts. Advances the model `looks` times between two events.
pub(super) fn ends(capacities: &[u64], transfers: &[Transfer], looks: u64) -> Vec<u64> {
    let (mut model, ids) = links(capacities);
    let mut ended = Vec::new();
    let mut before = 0;
    for transfer in transfers {
        for look in 1..=looks {
            let at = before + (transfer.start_ns - before) * look / (looks + 1);
            model.advance(Time(at), &mut ended);
        }
        before = transfer.start_ns;
        start(&mut model, &ids, transfer);
    }
    while let Some(at) = model.next_event() {
        assert!(at < Time::NEVER, "a flow never ends");
        // An end that was reached while a flow was started is already due.
        let at = at.max(Time(before));
        for look in 1..=looks {
            let between = before + (at.0 - before) * look / (looks + 1);
            model.advance(Time(between), &mut ended);
        }
        model.advance(at, &mut ended);
        before = at.0;
    }
    assert!(
        ended.is_sorted(),
        "ends come in the order of time, then of ids"
    );
    assert_eq!(model.open_flows(), 0);
    let mut by_flow = vec![u64::MAX; transfers.len()];
    for (at, FlowId(id)) in ended {
        by_flow[id as usize] = at.0;
    }
    by_flow
}

#[test]
fn three_overlapping_flows_share_one_link() {
    let transfers = [
        Transfer::new(0, &[0], 100),
        Transfer::new(2 * SECOND, &[0], 60),
        Transfer::new(4 * SECOND, &[0], 30),
    ];
    assert_eq!(
        ends(&[10], &transfers, 0),
        [19 * SECOND, 17 * SECOND, 13 * SECOND]
    );
    let ms = 1_000_000;
    let transfers = [
        Transfer::new(0, &[0], 1_000_000_000),
        Transfer::new(10 * ms, &[0], 500_000_000),
        Transfer::new(20 * ms, &[0], 250_000_000),
    ];
    assert_eq!(
        ends(&[25_000_000_000], &transfers, 0),
        [70 * ms, 60 * ms, 50 * ms]
    );
}

#[test]
fn a_flow_over_two_links_leaves_the_rest_to_others() {
    let transfers = [
        Transfer::new(0, &[0, 1], 12),
        Transfer::new(0, &[1], 50),
        Transfer::new(SECOND, &[0], 6),
    ];
    let b = (53 * SECOND).div_ceil(22);
    assert_eq!(ends(&[6, 25], &transfers, 0), [3 * SECOND, b, 3 * SECOND]);
}

#[test]
fn capacity_that_a_bottleneck_leaves_goes_to_the_other_flow() {
    let transfers = [
        Transfer::new(0, &[0, 1], 8),
        Transfer::new(0, &[0], 24),
        Transfer::new(SECOND, &[1], 4),
    ];
    assert_eq!(
        ends(&[10, 4], &transfers, 0),
        [3 * SECOND, 16 * SECOND / 5, 3 * SECOND]
    );
}

#[test]
fn weights_and_caps_are_observed() {
    let mut transfers = [
        Transfer::new(0, &[0], 60),
        Transfer::new(0, &[0], 30),
        Transfer::new(3 * SECOND, &[0], 6),
    ];
    transfers[0].weight = 2;
    transfers[2].cap = Some(1);
    let both = (87 * SECOND).div_ceil(11);
    assert_eq!(ends(&[12], &transfers, 0), [both, both, 9 * SECOND]);
}

#[test]
fn a_flow_joins_its_links_when_its_latency_is_over() {
    let mut transfers = [Transfer::new(0, &[0], 1_000), Transfer::new(0, &[0], 1_000)];
    transfers[1].latency_ns = 400;
    // Alone for 400 ns, then at half the rate until the first ends, 1,200 ns later.
    assert_eq!(ends(&[SECOND], &transfers, 0), [1_600, 2_000]);
    let (mut model, ids) = links(&[SECOND]);
    let id = start(&mut model, &ids, &transfers[1]);
    assert_eq!(model.next_event(), Some(Time(400)));
    assert_eq!(model.rate(id), Some(0));
    assert_eq!(model.cancel(Time(100), id), Some(1_000));
    assert_eq!(model.next_event(), None);
    assert_eq!(model.utilisation(ids[0]), Utilisation::default());
}

#[test]
fn a_cancelled_flow_gives_back_its_rest_and_its_share() {
    let (mut model, ids) = links(&[100]);
    let a = start(&mut model, &ids, &Transfer::new(0, &[0], 1_000));
    let b = start(&mut model, &ids, &Transfer::new(0, &[0], 1_000));
    assert_eq!((model.rate(a), model.rate(b)), (Some(50), Some(50)));
    assert_eq!(model.cancel(Time(4 * SECOND), b), Some(800));
    assert_eq!(model.cancel(Time(4 * SECOND), b), None);
    assert_eq!(model.next_event(), Some(Time(12 * SECOND)));
    let mut ended = Vec::new();
    model.advance(Time(20 * SECOND), &mut ended);
    assert_eq!(ended, [(Time(12 * SECOND), a)]);
    let used = model.utilisation(ids[0]);
    assert_eq!((used.bytes, used.busy_ns), (1_200, 12 * SECOND));
}

#[test]
fn an_end_during_the_start_of_another_flow_is_not_lost() {
    let (mut model, ids) = links(&[SECOND]);
    let a = start(&mut model, &ids, &Transfer::new(0, &[0], 10));
    let b = start(&mut model, &ids, &Transfer::new(50, &[0], 0));
    assert_eq!(model.next_event(), Some(Time(10)));
    let mut ended = Vec::new();
    model.advance(Time(50), &mut ended);
    assert_eq!(ended, [(Time(10), a), (Time(50), b)]);
}

#[test]
fn links_fall_apart_when_the_flow_between_them_ends() {
    let (mut model, ids) = links(&[10, 10]);
    let a = start(&mut model, &ids, &Transfer::new(0, &[0], 1_000));
    let b = start(&mut model, &ids, &Transfer::new(0, &[1], 1_000));
    let both = start(&mut model, &ids, &Transfer::new(0, &[0, 1], 10));
    assert_eq!(model.rate(both), Some(5));
    let mut ended = Vec::new();
    model.advance(Time(2 * SECOND), &mut ended);
    assert_eq!(ended, [(Time(2 * SECOND), both)]);
    assert_eq!((model.rate(a), model.rate(b)), (Some(10), Some(10)));
    assert!(model.groups[0].coupled.is_empty() && model.groups[1].coupled.is_empty());
    assert_eq!((model.links[0].group, model.links[1].group), (0, 1));
}

#[test]
fn impossible_flows_and_links_are_refused() {
    let (mut model, ids) = links(&[1]);
    assert_eq!(model.add_link(0), Err(LinksError::NoCapacity));
    let good = FlowSpec {
        links: &ids,
        bytes: 1,
        weight: 1,
        cap: None,
        latency: Duration::ZERO,
    };
    let mut refuse = |flow: FlowSpec<'_>| model.start(Time(0), &flow).expect_err("refused");
    let (none, twice, unknown) = ([], [ids[0]; 2], [BandwidthLinkId(1)]);
    let cases = [
        (
            FlowSpec {
                weight: 0,
                ..good.clone()
            },
            LinksError::NoWeight,
        ),
        (
            FlowSpec {
                cap: Some(0),
                ..good.clone()
            },
            LinksError::NoRate,
        ),
        (
            FlowSpec {
                links: &none,
                ..good.clone()
            },
            LinksError::LinkCount(0),
        ),
        (
            FlowSpec {
                links: &[ids[0]; 9],
                ..good.clone()
            },
            LinksError::LinkCount(9),
        ),
        (
            FlowSpec {
                links: &twice,
                ..good.clone()
            },
            LinksError::LinkName(0),
        ),
        (
            FlowSpec {
                links: &unknown,
                ..good.clone()
            },
            LinksError::LinkName(1),
        ),
    ];
    for (flow, error) in cases {
        assert_eq!(refuse(flow), error);
    }
    assert_eq!(model.open_flows(), 0);
}
