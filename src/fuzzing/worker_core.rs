//! The worker's decisions, with a leader and engines that order and report anything.

use std::collections::BTreeMap;
use std::time::Duration;

use kvferry_core::{
    BatchId, GroupBounds, MemoryBounds, RUNNING_COPIES_MAX, Worker, WorkerEffect, WorkerEvent,
    WorkerSettings,
};
use kvferry_types::{
    Anchor, AttachId, DeviceEnd, DomainId, Edge, EndedCopy, EngineId, Epoch, Fingerprint,
    FragmentPair, GroupId, MemoryId, PageList, PageRun, PerTier, Record, RequestId, ResetId, Scope,
    Stored, TierId, Time, Transfer, TransferId, User,
};

use super::Input;
use super::allocated::most_held;

/// Pages of a group of the engine's memory, and of the depot of each tier.
const DEVICE_PAGES: u32 = 16;
const ARENA: [(TierId, u32); 2] = [(TierId::Host, 24), (TierId::Disk, 40)];
const PAGE_BYTES: u64 = 64;
const RUNNING_MAX: usize = 2;
const FENCE: Duration = Duration::from_secs(10);
/// Memory that the worker may hold beside a multiple of the input: ends of copies and abandoned requests.
const HELD_BYTES: usize = 8 << 20;
/// Operations of one input; the rest is ignored, because each takes time.
const OPERATIONS_MAX: usize = 600;

/// A copy that runs.
struct Running {
    transfer: Transfer,
    stopped: Option<Time>,
}

struct World {
    worker: Worker,
    now: Time,
    /// The registered engine.
    engine: Option<EngineId>,
    running: BTreeMap<TransferId, Running>,
    next_batch: u64,
    next_transfer: u64,
    last_attach: u64,
    last_memory: u64,
    last_tiers: u64,
    epoch: Epoch,
    ended: bool,
}

/// Operations on a worker.
pub fn worker_core(bytes: &[u8]) {
    let ((), held) = most_held(|| run(&mut Input::new(bytes)));
    assert!(held <= HELD_BYTES + 1024 * bytes.len(), "{held} bytes held");
}

fn run(input: &mut Input<'_>) {
    let mut settings = WorkerSettings::new(RUNNING_MAX);
    settings.fence = FENCE;
    let mut world = World {
        worker: Worker::new(settings),
        now: Time(1_000_000_000),
        engine: None,
        running: BTreeMap::new(),
        next_batch: 0,
        next_transfer: 0,
        last_attach: 0,
        last_memory: 0,
        last_tiers: 0,
        epoch: Epoch(0),
        ended: false,
    };
    if input.flag() {
        world.serve();
    }
    for _ in 0..OPERATIONS_MAX {
        if input.is_empty() || world.ended {
            break;
        }
        let event = world.event(input);
        world.step(event);
    }
    world.end();
}

fn engine_id(number: usize) -> EngineId {
    EngineId([number as u8; 16])
}

fn arena_pages() -> PerTier<u32> {
    ARENA.into_iter().collect()
}

fn bounds() -> MemoryBounds {
    let group = GroupBounds {
        device_pages: DEVICE_PAGES,
        page_bytes: PAGE_BYTES,
    };
    MemoryBounds {
        groups: vec![group],
    }
}

fn list(input: &mut Input<'_>) -> PageList {
    match input.below(8) {
        0 => PageList::default(),
        1 => PageList::run(input.number32(), input.number32()),
        _ => PageList::run(input.below(20) as u32, 1 + input.below(3) as u32),
    }
}

fn pair(input: &mut Input<'_>) -> FragmentPair {
    let src = list(input);
    let dst = match input.below(6) {
        0 => list(input),
        _ => {
            let pages = u32::try_from(src.pages()).unwrap_or(u32::MAX);
            PageList::run(input.below(24) as u32, pages)
        }
    };
    FragmentPair { src, dst }
}

fn record(input: &mut Input<'_>, pairs: &[FragmentPair]) -> Record {
    let pages: u64 = pairs.iter().map(|pair| pair.dst.pages()).sum();
    let first = pairs.first().and_then(|pair| pair.dst.0.first());
    let start = first.map_or(0, |run| run.start);
    let listed = match input.rarely() {
        true => input.below(9),
        false => usize::try_from(pages.min(4096)).unwrap_or(0),
    };
    let skipped = match input.below(4) {
        0 => input.number16(),
        _ => 0,
    };
    Record {
        anchor: Anchor(1),
        domain: DomainId(2),
        block_start: match input.rarely() {
            true => input.number32(),
            false => start.wrapping_sub(u32::from(skipped)),
        },
        first: skipped,
        phase: input.number16(),
        stored: Stored::default(),
        fingerprints: vec![Fingerprint(3); listed],
    }
}

impl World {
    /// A leader and an engine arrive, as without faults.
    fn serve(&mut self) {
        self.step(WorkerEvent::DepotReady);
        let (after, bounds) = (RequestId(0), bounds());
        self.engine = Some(engine_id(1));
        self.step(WorkerEvent::Registered {
            engine: engine_id(1),
            abandoned_through: after,
            bounds,
        });
        self.epoch = Epoch(1);
        self.step(WorkerEvent::LeaderFound(self.epoch));
        let after = Some(TransferId(0));
        let attach = AttachId(self.last_attach);
        self.step(WorkerEvent::Admitted { attach, after });
        let number = MemoryId(self.last_memory);
        self.step(WorkerEvent::MemoryAdmitted { number, after });
    }

    fn event(&mut self, input: &mut Input<'_>) -> WorkerEvent {
        let epoch = match input.rarely() {
            true => Epoch(input.number()),
            false => self.epoch,
        };
        match input.below(24) {
            0 if input.flag() => {
                self.epoch = Epoch(self.epoch.0 + u64::from(input.flag()));
                WorkerEvent::LeaderFound(self.epoch)
            }
            1 if input.flag() => WorkerEvent::LeaderLost,
            2 => match input.flag() {
                true => WorkerEvent::DepotReady,
                false => WorkerEvent::TiersChanged,
            },
            3 => WorkerEvent::Admitted {
                attach: AttachId(if input.rarely() {
                    input.number()
                } else {
                    self.last_attach
                }),
                after: (!input.rarely()).then(|| TransferId(input.below(9) as u64)),
            },
            4 => WorkerEvent::MemoryAdmitted {
                number: MemoryId(if input.rarely() {
                    input.number()
                } else {
                    self.last_memory
                }),
                after: (!input.rarely()).then(|| TransferId(input.below(9) as u64)),
            },
            5 if input.rarely() => WorkerEvent::TiersAdmitted {
                number: MemoryId(if input.rarely() {
                    input.number()
                } else {
                    self.last_tiers
                }),
                known: !input.rarely(),
            },
            5 if input.flag() => self.register(input),
            6 if input.flag() => self.memory_gone(input),
            7 | 8 => WorkerEvent::Written {
                engine: engine_id(1 + input.below(2)),
                through: RequestId(input.number()),
            },
            9 if input.rarely() => WorkerEvent::AbandonThrough {
                engine: engine_id(1 + input.below(2)),
                user: User::Own,
                number: input.number(),
                through: RequestId(input.number()),
            },
            9 => WorkerEvent::Abandon {
                engine: engine_id(1 + input.below(2)),
                user: User::Own,
                number: input.number(),
                requests: (0..input.below(6))
                    .map(|_| RequestId(input.number()))
                    .collect(),
            },
            10 => WorkerEvent::Invalidate {
                epoch,
                id: ResetId(input.number()),
                scope: Scope::Everything,
                tier: None,
                through: TransferId(input.number()),
                deadline: self.now,
            },
            11 | 12 => WorkerEvent::Cancel {
                epoch,
                batch: self.batch(input),
                transfers: (0..input.below(5))
                    .map(|_| self.transfer_id(input))
                    .collect(),
            },
            13 => {
                let ms = input.one_of(&[0_u64, 1, 100, 1000, 9000, 10_001]);
                self.now = self.now + Duration::from_millis(ms);
                WorkerEvent::Tick
            }
            14..=16 => WorkerEvent::CopiesEnded(self.ends(input)),
            _ => WorkerEvent::Ordered {
                epoch,
                batch: self.batch(input),
                transfers: (0..input.below(4)).map(|_| self.transfer(input)).collect(),
                arena_pages: arena_pages(),
            },
        }
    }

    /// A host registers memory only after the copies of other memory have ended.
    fn register(&mut self, input: &mut Input<'_>) -> WorkerEvent {
        let engine = engine_id(1 + input.below(2));
        let other = |running: &Running| {
            let device = running.transfer.device;
            device.is_some_and(|device| device.engine != engine)
        };
        if self.running.values().any(other) {
            return WorkerEvent::Tick;
        }
        self.engine = Some(engine);
        WorkerEvent::Registered {
            engine,
            abandoned_through: RequestId(input.number()),
            bounds: bounds(),
        }
    }

    fn memory_gone(&mut self, input: &mut Input<'_>) -> WorkerEvent {
        let engine = engine_id(1 + input.below(2));
        if self.engine == Some(engine) {
            self.engine = None;
        }
        WorkerEvent::MemoryGone(engine)
    }

    fn batch(&mut self, input: &mut Input<'_>) -> BatchId {
        if !input.rarely() {
            self.next_batch += 1;
        }
        BatchId(self.next_batch)
    }

    /// A new number most of the time, or an earlier one.
    fn transfer_id(&mut self, input: &mut Input<'_>) -> TransferId {
        match input.below(6) {
            0 => TransferId(input.number()),
            1 | 2 => TransferId(self.next_transfer.saturating_sub(input.below(6) as u64)),
            _ => {
                self.next_transfer += 1;
                TransferId(self.next_transfer)
            }
        }
    }

    fn transfer(&mut self, input: &mut Input<'_>) -> Transfer {
        let between = Edge {
            from: TierId::Host,
            to: TierId::Disk,
        };
        let edge = match input.below(8) {
            0 => Edge {
                from: input.one_of(&TierId::ALL),
                to: input.one_of(&TierId::ALL),
            },
            1 => between,
            2..=4 => Edge::LOAD,
            _ => Edge::STORE,
        };
        let engine = engine_id(1 + usize::from(input.rarely()));
        let request = RequestId(input.number());
        let device = DeviceEnd {
            engine,
            group: GroupId(u8::from(input.rarely())),
            request,
            after: if input.flag() {
                request
            } else {
                RequestId(input.number())
            },
        };
        let pairs: Vec<FragmentPair> = (0..1 + input.below(3)).map(|_| pair(input)).collect();
        let listed = edge.to != TierId::Device && input.flag();
        let record = (listed || input.rarely()).then(|| record(input, &pairs));
        Transfer {
            id: self.transfer_id(input),
            edge,
            device: (edge.touches(TierId::Device) != input.rarely()).then_some(device),
            page_bytes: if input.rarely() {
                input.number()
            } else {
                PAGE_BYTES
            },
            pairs,
            record,
            deadline: self.now + Duration::from_millis(input.one_of(&[0, 1, 100, 5000, 60_000])),
        }
    }

    /// The ends of some copies that run, and sometimes of one that does not.
    fn ends(&mut self, input: &mut Input<'_>) -> Vec<EndedCopy> {
        let mut ids: Vec<TransferId> = self
            .running
            .keys()
            .copied()
            .filter(|_| input.flag())
            .collect();
        self.running.retain(|id, _| !ids.contains(id));
        if input.rarely() {
            // No copy has this number.
            ids.push(TransferId(self.next_transfer.saturating_add(1000)));
        }
        ids.into_iter()
            .map(|transfer| EndedCopy {
                complete_pages: input.number32(),
                bytes: input.number(),
                copy_us: input.number(),
                bad_source: input.rarely(),
                faulty_page: input.rarely().then(|| input.number32()),
                ..EndedCopy::new(transfer, input.below(4) > 0)
            })
            .collect()
    }

    fn step(&mut self, event: WorkerEvent) {
        let mut effects = Vec::new();
        self.worker.step(self.now, event, &mut effects);
        for effect in effects {
            self.effect(effect);
        }
        self.worker.check().expect("the second count agrees");
    }

    fn effect(&mut self, effect: WorkerEffect) {
        match effect {
            WorkerEffect::Attach { attach } => {
                assert!(attach.0 >= self.last_attach, "{attach} is old");
                assert!(self.running.is_empty(), "attached while copies run");
                self.last_attach = attach.0;
            }
            WorkerEffect::StateMemory { number } => self.last_memory = number.0,
            WorkerEffect::StateTiers { number } => self.last_tiers = number.0,
            WorkerEffect::Start { edge, copies } => {
                for transfer in copies {
                    assert_eq!(transfer.edge, edge);
                    self.start(transfer);
                }
            }
            WorkerEffect::Stop(id) => {
                let now = self.now;
                let running = self.running.get_mut(&id).expect("a copy that runs");
                assert!(running.stopped.replace(now).is_none(), "{id} stops twice");
            }
            WorkerEffect::Unlist { tier, run } => inside(tier, &run),
            WorkerEffect::List { tier, record } => {
                for page in record.pages() {
                    let run = PageRun::one(page.page);
                    inside(tier, &run);
                }
                assert_eq!(record.pages().count(), record.fingerprints.len());
            }
            WorkerEffect::Report { batch, copies } => {
                let mut ends = BTreeMap::new();
                for copy in &copies {
                    // A cancel may name a copy twice.
                    let before = ends.insert(copy.transfer, *copy);
                    assert!(
                        before.is_none_or(|end| end == *copy),
                        "two ends in {batch:?}"
                    );
                    let runs = self.running.contains_key(&copy.transfer);
                    assert!(!runs, "{} is reported while it runs", copy.transfer);
                }
            }
            WorkerEffect::ExitProcess => {
                let stuck = self
                    .running
                    .values()
                    .any(|running| running.stopped.is_some_and(|at| self.now >= at + FENCE));
                assert!(stuck, "no copy is stuck");
                self.ended = true;
            }
            WorkerEffect::Registered { .. }
            | WorkerEffect::Await { .. }
            | WorkerEffect::Invalidate { .. }
            | WorkerEffect::Refuse(_)
            | WorkerEffect::Invalid { .. }
            | WorkerEffect::Abandoned { .. } => {}
        }
    }

    /// A copy reads and writes pages of its memories only, and the engine's only while it is registered.
    fn start(&mut self, transfer: Transfer) {
        let pages = |tier: TierId, list: &PageList| match tier {
            TierId::Device => {
                let device = transfer.device.expect("the engine of a copy");
                assert_eq!(Some(device.engine), self.engine, "memory of another engine");
                assert_eq!(device.group, GroupId(0));
                for run in &list.0 {
                    assert!(
                        run.end() <= u64::from(DEVICE_PAGES),
                        "{run:?} on the device"
                    );
                }
            }
            tier => list.0.iter().for_each(|run| inside(tier, run)),
        };
        for pair in &transfer.pairs {
            pages(transfer.edge.from, &pair.src);
            pages(transfer.edge.to, &pair.dst);
            assert_eq!(pair.src.pages(), pair.dst.pages());
            assert!(pair.src.pages() > 0);
        }
        let same = |running: &&Running| running.transfer.edge == transfer.edge;
        let edge = self.running.values().filter(same).count();
        assert!(edge < RUNNING_MAX.min(RUNNING_COPIES_MAX), "too many run");
        let (id, stopped) = (transfer.id, None);
        let before = self.running.insert(id, Running { transfer, stopped });
        assert!(before.is_none(), "{id} started twice");
    }

    /// The leader and the engine leave, and every copy ends: nothing is left.
    fn end(&mut self) {
        if self.ended {
            return;
        }
        self.step(WorkerEvent::LeaderLost);
        if let Some(engine) = self.engine.take() {
            self.step(WorkerEvent::MemoryGone(engine));
        }
        let running = std::mem::take(&mut self.running);
        let ends = running.into_keys().map(EndedCopy::complete);
        self.step(WorkerEvent::CopiesEnded(ends.collect()));
        assert_eq!(self.worker.open_copies(), 0, "copies are left");
    }
}

/// Checks that a page range lies within the depot of a tier.
fn inside(tier: TierId, run: &PageRun) {
    let room = arena_pages().get(tier).copied();
    let room = room.expect("a tier that the worker has");
    assert!(run.end() <= u64::from(room), "{run:?} of {tier}");
}
