//! The worker's queues in virtual time: 16 GB of stores are ready, and loads arrive.
//!
//! The copier moves the bytes of running copies at [`LINK_BYTES_PER_S`] in each direction, and copies that run at one
//! time share their direction. A worker copies a store as a whole, in one part, so that the largest part of a running
//! copy has the 8 MiB of the largest store, and takes 336 us on an idle link.

use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::time::Duration;

use kvferry_core::{
    BatchId, GroupBounds, MemoryBounds, PACE_BURST, RUNNING_COPIES_MAX, Worker, WorkerEffect,
    WorkerEvent, WorkerSettings,
};
use kvferry_types::{
    AttachId, DeviceEnd, Edge, EndedCopy, EngineId, Epoch, FragmentPair, GroupId, MemoryId,
    PageList, PerTier, RequestId, Time, Transfer, TransferId,
};

use super::{LINK_BYTES_PER_S, LINK_LATENCY};
use crate::links::{BandwidthLinkId, FlowId, FlowSpec, Links};

const ENGINE: EngineId = EngineId([1; 16]);
const PAGE_BYTES: u64 = 1 << 20;
/// Pages of the largest store, and of each load.
const PAGES_MAX: u32 = 8;
const QUEUED_BYTES: u64 = 16_000_000_000;
/// Time of the largest part of a running copy on an idle link.
const PART: Duration =
    Duration::from_nanos(PAGES_MAX as u64 * PAGE_BYTES * 1_000_000_000 / LINK_BYTES_PER_S);
/// Loads, one every 20 ms from the time at which the stores are queued. The stores take 640 ms.
const LOADS: u64 = 30;
const LOAD_EVERY: Duration = Duration::from_millis(20);

/// A copy that ended.
#[derive(Debug, Clone, Copy)]
struct Log {
    bytes: u64,
    ordered: Time,
    started: Time,
    ended: Time,
}

/// A worker with a copier in virtual time.
struct Bench {
    worker: Worker,
    links: Links,
    by_edge: BTreeMap<Edge, BandwidthLinkId>,
    flows: BTreeMap<FlowId, TransferId>,
    /// Copies, in the order of their ids.
    log: BTreeMap<TransferId, (Edge, Log)>,
    now: Time,
}

impl Bench {
    fn new(store_bytes_per_s: Option<u64>) -> Self {
        let mut settings = WorkerSettings::new(RUNNING_COPIES_MAX);
        let rate = store_bytes_per_s.and_then(NonZeroU64::new);
        settings.bytes_per_s = rate.map(|rate| (Edge::STORE, rate)).into_iter().collect();
        let mut links = Links::new();
        let mut link = || links.add_link(LINK_BYTES_PER_S).expect("a rate");
        let by_edge = BTreeMap::from([(Edge::STORE, link()), (Edge::LOAD, link())]);
        let mut bench = Self {
            worker: Worker::new(settings),
            links,
            by_edge,
            flows: BTreeMap::new(),
            log: BTreeMap::new(),
            now: Time(0),
        };
        let (engine, after) = (ENGINE, RequestId(0));
        let group = GroupBounds {
            device_pages: PAGES_MAX,
            page_bytes: PAGE_BYTES,
        };
        let bounds = MemoryBounds {
            groups: vec![group],
        };
        let (attach, through) = (AttachId(1), RequestId(1));
        for event in [
            WorkerEvent::DepotReady,
            WorkerEvent::Registered {
                engine,
                abandoned_through: after,
                bounds,
            },
            WorkerEvent::LeaderFound(Epoch(1)),
            WorkerEvent::Admitted {
                attach,
                after: Some(TransferId(0)),
            },
            WorkerEvent::MemoryAdmitted {
                number: MemoryId(1),
                after: Some(TransferId(0)),
            },
            WorkerEvent::Written { engine, through },
        ] {
            bench.step(event);
        }
        bench
    }

    /// Orders a copy, all of whose pages are written.
    fn order(&mut self, edge: Edge, pages: u32) {
        let id = TransferId(self.log.len() as u64 + 1);
        let pair = FragmentPair {
            src: PageList::run(0, pages),
            dst: PageList::run(0, pages),
        };
        let device = DeviceEnd {
            group: GroupId(0),
            engine: ENGINE,
            request: RequestId(1),
            after: RequestId(1),
        };
        let transfer = Transfer {
            id,
            edge,
            device: Some(device),
            page_bytes: PAGE_BYTES,
            pairs: vec![pair],
            record: None,
            deadline: Time::NEVER,
        };
        let log = Log {
            bytes: u64::from(pages) * PAGE_BYTES,
            ordered: self.now,
            started: Time::NEVER,
            ended: Time::NEVER,
        };
        self.log.insert(id, (edge, log));
        self.step(WorkerEvent::Ordered {
            epoch: Epoch(1),
            batch: BatchId(id.0),
            transfers: vec![transfer],
            arena_pages: PerTier::host(PAGES_MAX),
        });
    }

    fn step(&mut self, event: WorkerEvent) {
        let mut effects = Vec::new();
        self.worker.step(self.now, event, &mut effects);
        for effect in effects {
            match effect {
                WorkerEffect::Start { copies, .. } => {
                    copies.iter().for_each(|copy| self.start(copy))
                }
                WorkerEffect::Stop(transfer) => panic!("{transfer} is stopped"),
                _ => {}
            }
        }
    }

    fn start(&mut self, copy: &Transfer) {
        let (edge, log) = self.log.get_mut(&copy.id).expect("ordered");
        log.started = self.now;
        let flow = FlowSpec {
            links: &[self.by_edge[edge]],
            bytes: log.bytes,
            weight: 1,
            cap: None,
            latency: LINK_LATENCY,
        };
        let flow = self.links.start(self.now, &flow).expect("a flow");
        self.flows.insert(flow, copy.id);
    }

    /// When something happens next by itself.
    fn next_event(&mut self) -> Option<Time> {
        let timer = self
            .worker
            .next_timeout()
            .filter(|next| *next != Time::NEVER);
        timer.into_iter().chain(self.links.next_event()).min()
    }

    /// Lets everything happen that is due at `now`.
    fn advance(&mut self, now: Time) {
        assert!(self.now < now, "time passes");
        self.now = now;
        let mut over = Vec::new();
        self.links.advance(now, &mut over);
        for (at, flow) in over {
            let transfer = self.flows.remove(&flow).expect("a copy");
            let (_, log) = self.log.get_mut(&transfer).expect("ordered");
            log.ended = at;
            let ended = EndedCopy {
                bytes: log.bytes,
                ..EndedCopy::complete(transfer)
            };
            self.step(WorkerEvent::CopiesEnded(vec![ended]));
        }
        if self.worker.next_timeout().is_some_and(|next| next <= now) {
            self.step(WorkerEvent::Tick);
        }
    }

    fn logs(&self, edge: Edge) -> Vec<Log> {
        let logs = self.log.values().filter(|(of, _)| *of == edge);
        logs.map(|(_, log)| *log).collect()
    }
}

/// Queues the stores, orders loads while they run, and runs everything to its end.
fn run(store_bytes_per_s: Option<u64>) -> Bench {
    let mut bench = Bench::new(store_bytes_per_s);
    let mut queued = 0;
    for pages in (1..=PAGES_MAX).cycle() {
        if queued >= QUEUED_BYTES {
            break;
        }
        bench.order(Edge::STORE, pages);
        queued += u64::from(pages) * PAGE_BYTES;
    }
    bench.order(Edge::LOAD, PAGES_MAX);
    let mut loads = (1..LOADS).map(|number| Time(0) + LOAD_EVERY * number as u32);
    let mut load = loads.next();
    while let Some(next) = bench.next_event().into_iter().chain(load).min() {
        bench.advance(next);
        if load == Some(next) {
            bench.order(Edge::LOAD, PAGES_MAX);
            load = loads.next();
        }
    }
    bench
}

/// Every load starts within a part, although some stores still wait, and then takes as long as on an idle machine.
fn check_loads(bench: &Bench) {
    let last = bench.logs(Edge::STORE).iter().map(|log| log.started).max();
    let loads = bench.logs(Edge::LOAD);
    assert_eq!(loads.len() as u64, LOADS);
    for load in loads {
        assert!(Some(load.ordered) < last, "no store waits: {load:?}");
        let wait = load.ordered.until(load.started);
        assert!(wait <= PART, "a load waited for {wait:?}");
        let took = load.started.until(load.ended);
        let alone = LINK_LATENCY + PART;
        assert!(took <= alone + Duration::from_micros(1), "{took:?}");
    }
}

#[test]
fn a_load_starts_within_a_part_while_16_gb_of_stores_are_queued() {
    check_loads(&run(None));
}

#[test]
fn a_load_starts_within_a_part_while_stores_wait_for_their_rate() {
    // Less than the loads move, which a rate of their own would therefore hold.
    const RATE: u64 = 250_000_000;
    let bench = run(Some(RATE));
    check_loads(&bench);
    let stores = bench.logs(Edge::STORE);
    let seconds = |bytes: u64| bytes as f64 / RATE as f64;
    let moved = seconds(stores.iter().map(|log| log.bytes).sum());
    let last = stores.iter().map(|log| log.ended).max().expect("stores");
    // The last copy starts when those before it are paid for.
    let largest = seconds(u64::from(PAGES_MAX) * PAGE_BYTES);
    let least = moved - largest - PACE_BURST.as_secs_f64();
    let took = last.0 as f64 / 1e9;
    assert!(
        (least..moved + 0.001).contains(&took),
        "{took} s, {moved} s by the rate"
    );
}
