//! The leader's decisions, with workers and engines that state, request and report anything.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kvferry_core::{
    AnchorKey, AttachRequest, AttachedDepot, Leader, LeaderEffect, LeaderEvent, LeaderSettings,
    MemoryStatement, Model, MoveEdge, TiersStatement, WorkerMemory,
};
use kvferry_types::{
    Anchor, AttachId, Attention, DepotId, DomainId, Edge, EndedCopy, EngineId, Epoch, Fingerprint,
    FlushId, GroupGeometry, GroupId, MemoryGeometry, MemoryId, PageHashes, PageList, PageRecord,
    PageRun, Part, PerTier, Rank, Ratio, Replica, Request, RequestId, ResetId, ResetScope,
    Sharding, SlotId, Stored, TierId, TierLayout, Time, Transfer, TransferId, WorkerId,
};

use super::Input;
use super::allocated::most_held;

const EPOCH: Epoch = Epoch(4);
const RANKS: u16 = 2;
const REPLICAS: u16 = 2;
/// Bytes of a depot in each tier: the leader derives from it how many pages a worker may state.
const DEPOT_BYTES: u64 = 32 << 10;
/// Memory that the leader may hold, whatever its peers send: pools of such depots, 4,096 answers of each engine, and the
/// first part of the change log.
const HELD_BYTES: usize = 24 << 20;
/// Operations of one input; the rest is ignored, because each takes time.
const OPERATIONS_MAX: usize = 400;

struct World {
    leader: Leader,
    now: Time,
    next_request: u64,
    next_attach: u64,
    /// How often each request was sent, and answered.
    requests: BTreeMap<(EngineId, RequestId), (u32, u32)>,
    /// The last statement of each worker that was admitted.
    stated: BTreeMap<WorkerId, WorkerMemory>,
    /// The last statement of each worker, with its number.
    last_stated: BTreeMap<WorkerId, (MemoryId, Option<WorkerMemory>)>,
    last_tiers: BTreeMap<WorkerId, TiersStatement>,
    /// Copies that workers owe.
    owed: BTreeMap<TransferId, BTreeSet<WorkerId>>,
    last_transfer: TransferId,
    /// Requests to workers that were not answered.
    reads: Vec<(WorkerId, DepotId, u64, u32)>,
    resets: Vec<(WorkerId, ResetId)>,
    flushes: Vec<(WorkerId, FlushId)>,
}

/// Settings, and operations.
pub fn leader_core(bytes: &[u8]) {
    let ((), held) = most_held(|| run(&mut Input::new(bytes)));
    assert!(held <= HELD_BYTES, "{held} bytes held");
}

fn run(input: &mut Input<'_>) {
    let mut world = World::new(settings(input));
    if input.flag() {
        world.arrive();
    }
    for _ in 0..OPERATIONS_MAX {
        if input.is_empty() {
            break;
        }
        let event = world.event(input);
        world.step(event);
    }
    world.end();
}

fn settings(input: &mut Input<'_>) -> LeaderSettings {
    let ratio = Ratio::new(input.one_of(&[1, 2, 4, 7])).expect("in bounds");
    let mut settings = LeaderSettings::new(EPOCH, RANKS, ratio, AnchorKey::new([3; 32]));
    settings.replicas = REPLICAS;
    settings.sharding = Sharding::new(RANKS, input.one_of(&[1, 2])).expect("shards divide ranks");
    settings.page_index = input.flag();
    settings.reset_slice_pages = 16;
    settings.open_requests_max = 20;
    settings.depot_bytes.insert(TierId::Host, DEPOT_BYTES);
    if input.flag() {
        settings.tiers.push(TierId::Disk);
        settings.depot_bytes.insert(TierId::Disk, DEPOT_BYTES);
        let both = [(TierId::Host, TierId::Disk), (TierId::Disk, TierId::Host)];
        settings.moves = both
            .map(|(from, to)| MoveEdge {
                edge: Edge { from, to },
                running_max: 4,
                deadline: MoveEdge::DEADLINE,
            })
            .to_vec();
    }
    settings
}

fn engine_id(number: u8) -> EngineId {
    EngineId([number + 1; 16])
}

fn worker_id(replica: u16, rank: u16) -> WorkerId {
    WorkerId {
        replica: Replica(replica),
        rank: Rank(rank),
    }
}

fn all_workers() -> impl Iterator<Item = WorkerId> {
    (0..REPLICAS).flat_map(|replica| (0..RANKS).map(move |rank| worker_id(replica, rank)))
}

fn a_worker(input: &mut Input<'_>) -> WorkerId {
    let number = input.below(usize::from(RANKS * REPLICAS)) as u16;
    worker_id(number / RANKS, number % RANKS)
}

/// Memory as an honest engine has it.
fn honest(engine: EngineId) -> WorkerMemory {
    let group = GroupGeometry {
        group: GroupId(0),
        engine_page_tokens: 16,
        layers: 1,
        page_bytes: 256,
        device_pages: 64,
        layout_fingerprint: [1; 16],
        ..GroupGeometry::default()
    };
    WorkerMemory {
        engine,
        geometry: group.into(),
        arena_pages: [(TierId::Host, 60), (TierId::Disk, 80)]
            .into_iter()
            .collect(),
    }
}

/// The pages of this memory.
fn layout_of(memory: &WorkerMemory) -> Option<TierLayout> {
    let model = Model::new(memory.geometry.clone());
    model.ok().map(|model| model.tier_layout())
}

/// Memory with numbers that need not fit together.
fn hostile(input: &mut Input<'_>, engine: EngineId) -> WorkerMemory {
    let attentions = [
        Attention::Full,
        Attention::SlidingWindow,
        Attention::ChunkedLocal,
        Attention::State,
        Attention::Other,
    ];
    let groups = (0..input.below(3)).map(|number| GroupGeometry {
        group: GroupId(if input.rarely() {
            input.byte()
        } else {
            number as u8
        }),
        attention: input.one_of(&attentions),
        window_tokens: input.one_of(&[0, 1, 16, 32, 33, u32::MAX]),
        eagle: input.flag(),
        engine_page_tokens: input.one_of(&[16, 16, 32, 8, 0, 1, u32::MAX]),
        layers: input.one_of(&[1, 1, 0, u32::MAX]),
        page_bytes: input.one_of(&[256, 128, 0, 1, u64::MAX, 1 << 30]),
        device_pages: input.one_of(&[64, 64, 0, 1, u32::MAX]),
        content_digest: [input.one_of(&[0, 1]); 16],
        layout_fingerprint: [input.one_of(&[1, 2]); 16],
    });
    let groups: Vec<GroupGeometry> = groups.collect();
    let rooms = [60, 60, 0, 1, 400, u32::MAX - 1, u32::MAX];
    let mut arena_pages = PerTier::default();
    for tier in TierId::ALL {
        if input.below(4) > 0 {
            arena_pages.insert(tier, input.one_of(&rooms));
        }
    }
    WorkerMemory {
        engine,
        geometry: MemoryGeometry {
            hash_tokens: input.one_of(&[16, 16, 8, 0, 1, 3, u32::MAX]),
            hit_tokens: input.one_of(&[16, 32, 8, 0, u32::MAX]),
            groups,
        },
        arena_pages,
    }
}

fn depots(input: &mut Input<'_>, worker: WorkerId) -> PerTier<AttachedDepot> {
    let mut depots = PerTier::default();
    for tier in TierId::ALL {
        let named = matches!(tier, TierId::Host | TierId::Disk);
        if named != input.rarely() {
            let shared = u128::from(worker.rank.0) + 10 * u128::from(tier.number());
            let depot = AttachedDepot {
                depot: DepotId(if input.rarely() {
                    input.number().into()
                } else {
                    shared
                }),
                epoch: Epoch(if input.rarely() { input.number() } else { 0 }),
            };
            depots.insert(tier, depot);
        }
    }
    depots
}

/// The hashes of a sequence; names share their first pages.
fn sequence(name: u8, pages: usize) -> PageHashes {
    let page = |page: usize| {
        let branch = if page < 5 { 0 } else { name };
        let mut hash = [1; 16];
        (hash[0], hash[15]) = (branch, page as u8);
        hash
    };
    PageHashes::packed(16, (0..pages).flat_map(page).collect()).expect("16 bytes a page")
}

fn pages(input: &mut Input<'_>) -> PageList {
    match input.below(8) {
        0 => PageList::default(),
        1 => PageList::run(input.number32(), input.number32()),
        2 => (0..input.below(6)).map(|_| input.number32()).collect(),
        _ => PageList::run(input.below(40) as u32, 1 + input.below(24) as u32),
    }
}

fn parts(input: &mut Input<'_>) -> Vec<Part> {
    let count = 1 + usize::from(input.rarely()) * input.below(3);
    let part = |input: &mut Input<'_>| {
        let first_page = match input.below(3) {
            0 => input.number32(),
            _ => 0,
        };
        let group = GroupId(if input.rarely() { input.byte() } else { 0 });
        Part {
            priority: if input.rarely() { input.byte() } else { 4 },
            ..Part::new(group, first_page, pages(input))
        }
    };
    (0..count).map(|_| part(input)).collect()
}

impl World {
    fn new(settings: LeaderSettings) -> Self {
        Self {
            leader: Leader::new(settings),
            now: Time(1_000_000_000),
            next_request: 0,
            next_attach: 0,
            requests: BTreeMap::new(),
            stated: BTreeMap::new(),
            last_stated: BTreeMap::new(),
            last_tiers: BTreeMap::new(),
            owed: BTreeMap::new(),
            last_transfer: TransferId(0),
            reads: Vec::new(),
            resets: Vec::new(),
            flushes: Vec::new(),
        }
    }

    /// Every worker arrives with an engine, as without faults.
    fn arrive(&mut self) {
        for worker in all_workers() {
            let engine = engine_id(worker.replica.0 as u8);
            self.uncounted_step(LeaderEvent::EngineOpened(engine));
            let attach = self.attach(&mut Input::new(&[]), worker);
            self.uncounted_step(attach);
            let stated = self.statement(worker, Some(honest(engine)));
            self.uncounted_step(stated);
        }
        while let Some(read) = self.reads.pop() {
            let (worker, depot, read_id, from) = read;
            self.uncounted_step(LeaderEvent::Inventory {
                worker,
                depot,
                read_id,
                from,
                next: None,
                records: Vec::new(),
            });
        }
        self.count();
    }

    fn attach(&mut self, input: &mut Input<'_>, worker: WorkerId) -> LeaderEvent {
        self.next_attach += 1;
        let shards = self.leader.sharding().shards();
        LeaderEvent::Attach(AttachRequest {
            worker,
            ranks: if input.rarely() {
                input.number16()
            } else {
                RANKS
            },
            shards: if input.rarely() {
                input.number16()
            } else {
                shards
            },
            attach: AttachId(if input.rarely() {
                input.number()
            } else {
                self.next_attach
            }),
            depots: depots(input, worker),
        })
    }

    fn statement(&mut self, worker: WorkerId, memory: Option<WorkerMemory>) -> LeaderEvent {
        self.next_attach += 1;
        let number = MemoryId(self.next_attach);
        self.last_stated.insert(worker, (number, memory.clone()));
        LeaderEvent::Memory(MemoryStatement {
            worker,
            number,
            memory,
        })
    }

    /// A statement of a worker's disk, of the pages of an honest engine or of others.
    fn tiers(&mut self, input: &mut Input<'_>, worker: WorkerId) -> LeaderEvent {
        self.next_attach += 1;
        let honest = layout_of(&honest(engine_id(1)));
        let stated = TiersStatement {
            worker,
            number: MemoryId(self.next_attach),
            layout: match input.rarely() {
                true => TierLayout::default(),
                false => honest.unwrap_or_default(),
            },
            pages: [(TierId::Disk, input.one_of(&[0, 40, 80]))]
                .into_iter()
                .collect(),
        };
        self.last_tiers.insert(worker, stated.clone());
        LeaderEvent::Tiers(stated)
    }

    /// The next event.
    fn event(&mut self, input: &mut Input<'_>) -> LeaderEvent {
        let engine = engine_id(input.below(3) as u8);
        let worker = a_worker(input);
        match input.below(24) {
            0 => LeaderEvent::EngineOpened(engine),
            1 if input.rarely() => LeaderEvent::EngineClosed(engine),
            2 if input.flag() => self.attach(input, worker),
            3 => {
                let memory = match input.below(4) {
                    0 => Some(hostile(input, engine)),
                    1 => None,
                    _ => Some(honest(engine)),
                };
                self.statement(worker, memory)
            }
            4 if input.rarely() => LeaderEvent::WorkerLost(worker),
            5 if input.rarely() => LeaderEvent::WorkerDead(worker),
            6 | 7 => self.inventory(input, worker),
            8 => self.confirm(input, worker),
            9..=12 => self.ended(input, worker),
            13 => self.unsent(input, worker),
            14 if input.rarely() => self.tiers(input, worker),
            14 => LeaderEvent::Writable {
                worker,
                tier: input.one_of(&TierId::ALL),
                writable: input.flag(),
            },
            15 => {
                let ms = input.one_of(&[0_u64, 1, 100, 2600, 10_000, 31_000, 121_000]);
                self.now = self.now + Duration::from_millis(ms);
                LeaderEvent::Tick
            }
            _ => self.request(input, engine),
        }
    }

    /// A worker that is lost states its memory again.
    fn lost(&mut self, worker: WorkerId) {
        self.stated.remove(&worker);
    }

    /// A worker that is dead owes nothing.
    fn dead(&mut self, worker: WorkerId) {
        self.owed.retain(|_, workers| {
            workers.remove(&worker);
            !workers.is_empty()
        });
    }

    fn inventory(&mut self, input: &mut Input<'_>, worker: WorkerId) -> LeaderEvent {
        let asked = self.reads.len().checked_sub(1 + input.below(2));
        let asked = asked.map(|place| self.reads.swap_remove(place));
        let (worker, depot, read_id, from) = match asked.filter(|_| !input.rarely()) {
            Some(asked) => asked,
            None => (
                worker,
                DepotId(input.number().into()),
                input.number(),
                input.number32(),
            ),
        };
        let mut page = from;
        let records = (0..input.below(12)).map(|_| {
            let record = record(input, page);
            page = record.page.saturating_add(1);
            record
        });
        let records: Vec<PageRecord> = records.collect();
        let next = match input.below(4) {
            0 => Some(page),
            1 => Some(input.number32()),
            _ => None,
        };
        LeaderEvent::Inventory {
            worker,
            depot,
            read_id,
            from,
            next,
            records,
        }
    }

    /// A confirmation of a reset or a flush.
    fn confirm(&mut self, input: &mut Input<'_>, worker: WorkerId) -> LeaderEvent {
        let epoch = Epoch(if input.rarely() {
            input.number()
        } else {
            EPOCH.0
        });
        let asked = !input.rarely();
        if input.flag() {
            let (worker, id) = match self.resets.pop().filter(|_| asked) {
                Some(asked) => asked,
                None => (worker, ResetId(input.number())),
            };
            LeaderEvent::Invalidated { worker, epoch, id }
        } else {
            let (worker, id) = match self.flushes.pop().filter(|_| asked) {
                Some(asked) => asked,
                None => (worker, FlushId(input.number())),
            };
            LeaderEvent::TierFlushed { worker, epoch, id }
        }
    }

    /// Ends of copies, of those that a worker owes most of the time.
    fn ended(&mut self, input: &mut Input<'_>, worker: WorkerId) -> LeaderEvent {
        let epoch = Epoch(if input.rarely() {
            input.number()
        } else {
            EPOCH.0
        });
        let all = input.below(4) > 0;
        let some = input.byte();
        let owed: Vec<TransferId> = self
            .owed
            .iter()
            .filter(|(_, workers)| workers.contains(&worker))
            .map(|(id, _)| *id)
            .filter(|id| all || id.0 % 3 == u64::from(some) % 3)
            .collect();
        let mut copies: Vec<EndedCopy> = owed.iter().map(|id| end(input, *id)).collect();
        if input.rarely() {
            let id = TransferId(input.number());
            copies.push(end(input, id));
            copies.push(end(input, id));
        }
        if epoch == EPOCH {
            self.no_longer_owed(worker, &copies);
        }
        LeaderEvent::Ended {
            worker,
            epoch,
            copies,
        }
    }

    fn no_longer_owed(&mut self, worker: WorkerId, copies: &[EndedCopy]) {
        for copy in copies {
            if let Some(workers) = self.owed.get_mut(&copy.transfer) {
                workers.remove(&worker);
                if workers.is_empty() {
                    self.owed.remove(&copy.transfer);
                }
            }
        }
    }

    /// The last order could not be sent to a worker.
    fn unsent(&mut self, input: &mut Input<'_>, worker: WorkerId) -> LeaderEvent {
        let last = self.owed.last_key_value();
        let owed = last.filter(|(_, workers)| workers.contains(&worker));
        let id = owed.map(|(id, _)| *id);
        let copies = id.map(|id| EndedCopy {
            complete: false,
            ..end(input, id)
        });
        let copies: Vec<EndedCopy> = copies.into_iter().collect();
        self.no_longer_owed(worker, &copies);
        LeaderEvent::Unsent { worker, copies }
    }

    fn request(&mut self, input: &mut Input<'_>, engine: EngineId) -> LeaderEvent {
        let slot = SlotId(input.below(3) as u64);
        let request = match input.below(16) {
            0..=4 => Request::Lookup {
                slot,
                namespace: vec![input.below(2) as u8],
                hashes: sequence(input.below(4) as u8, input.below(40)),
                have_pages: match input.rarely() {
                    true => input.number32(),
                    false => input.below(3) as u32,
                },
                limit_pages: input.rarely().then(|| input.number32()),
            },
            5 | 6 => Request::Load {
                slot,
                parts: parts(input),
                after: RequestId(input.number()),
            },
            7..=10 => Request::Store {
                slot,
                parts: parts(input),
                more: match input.below(4) {
                    0 => {
                        let hashes = sequence(input.below(4) as u8, input.below(40));
                        Some((input.number32(), hashes))
                    }
                    _ => None,
                },
                after: RequestId(input.number()),
            },
            11 => Request::Reset {
                scope: match input.below(3) {
                    0 => ResetScope::Everything,
                    1 => ResetScope::Namespace(vec![input.below(2) as u8]),
                    _ => {
                        let hashes = sequence(input.below(4) as u8, input.below(40));
                        ResetScope::Pages(vec![input.below(2) as u8], hashes)
                    }
                },
                tier: input.rarely().then(|| input.one_of(&TierId::ALL)),
            },
            12 => Request::Flush,
            13 => Request::CancelStores {
                slot: input.flag().then_some(slot),
            },
            _ => Request::Finish { slot },
        };
        let id = match input.below(12) {
            0 => RequestId(input.number()),
            1 => RequestId(self.next_request),
            _ => {
                self.next_request += 1;
                RequestId(self.next_request)
            }
        };
        self.requests.entry((engine, id)).or_default().0 += 1;
        LeaderEvent::Request {
            engine,
            id,
            deadline: self.now + Duration::from_millis(input.one_of(&[1, 5000, 60_000, 1 << 32])),
            request,
        }
    }

    /// A step, and the second count after it.
    fn step(&mut self, event: LeaderEvent) {
        self.uncounted_step(event);
        self.count();
    }

    fn count(&self) {
        self.leader.check().expect("the second count agrees");
    }

    fn uncounted_step(&mut self, event: LeaderEvent) {
        let (lost, dead) = match event {
            LeaderEvent::WorkerLost(worker) => (Some(worker), None),
            LeaderEvent::WorkerDead(worker) => (Some(worker), Some(worker)),
            _ => (None, None),
        };
        let mut effects = Vec::new();
        self.leader.step(self.now, event, &mut effects);
        // Timers fire before the event, and may order copies from a worker that it ends.
        for effect in effects {
            self.effect(effect);
        }
        if let Some(worker) = lost {
            self.lost(worker);
        }
        if let Some(worker) = dead {
            self.dead(worker);
        }
        // An attach request or a statement of memory ends copies, too.
        assert!(self.leader.copies_under_way() <= self.owed.len());
    }

    fn effect(&mut self, effect: LeaderEffect) {
        match effect {
            LeaderEffect::Answer { engine, id, .. } => {
                let counts = self.requests.get_mut(&(engine, id));
                let (sent, answered) = counts.expect("an answer to a request that was sent");
                *answered += 1;
                assert!(*answered <= *sent, "{id} was answered twice");
            }
            LeaderEffect::Admit { .. } => {}
            LeaderEffect::AdmitMemory {
                worker,
                number,
                verdict,
            } => {
                self.stated.remove(&worker);
                let last = self.last_stated.get(&worker).expect("a statement");
                if let (Ok(_), (last, Some(memory))) = (verdict, last)
                    && *last == number
                {
                    self.stated.insert(worker, memory.clone());
                }
            }
            LeaderEffect::AdmitTiers {
                worker,
                number,
                verdict,
            } => {
                let last = self.last_tiers.get(&worker).expect("a statement");
                if let (Ok(()), Some(memory)) = (verdict, self.stated.get_mut(&worker))
                    && last.number == number
                {
                    let same = layout_of(memory) == Some(last.layout);
                    let pages = last.pages.get(TierId::Disk).filter(|_| same);
                    let pages = pages.copied().unwrap_or(0);
                    memory.arena_pages.insert(TierId::Disk, pages);
                }
            }
            LeaderEffect::Transfer { workers, transfer } => self.ordered(&workers, &transfer),
            LeaderEffect::Cancel { worker, transfers } => {
                for transfer in transfers {
                    let owed = self.owed.get(&transfer);
                    let owed = owed.is_some_and(|workers| workers.contains(&worker));
                    assert!(
                        owed,
                        "{transfer} is cancelled on {worker}, which has ended it"
                    );
                }
            }
            LeaderEffect::ReadInventory {
                worker,
                depot,
                read_id,
                from,
                ..
            } => self.reads.push((worker, depot, read_id, from)),
            LeaderEffect::Invalidate { worker, id, .. } => self.resets.push((worker, id)),
            LeaderEffect::FlushTier { worker, id, .. } => self.flushes.push((worker, id)),
            LeaderEffect::OpenTiers { worker, .. } => {
                assert!(!self.stated.contains_key(&worker), "{worker} has an engine");
            }
            LeaderEffect::FenceWorker(_) => {}
        }
    }

    /// An order names pages that each of its workers has stated.
    fn ordered(&mut self, workers: &[WorkerId], transfer: &Transfer) {
        assert!(transfer.id > self.last_transfer, "{} is old", transfer.id);
        self.last_transfer = transfer.id;
        assert!(!workers.is_empty() && !transfer.pairs.is_empty());
        for pair in &transfer.pairs {
            assert_eq!(pair.src.pages(), pair.dst.pages());
            assert!(pair.src.pages() > 0, "nothing is copied");
        }
        for worker in workers {
            let memory = self.stated.get(worker);
            let Some(memory) = memory else {
                // A worker without an engine moves pages between tiers, too.
                assert_eq!(transfer.device, None, "{worker} has no memory");
                continue;
            };
            if let Some(device) = transfer.device {
                assert_eq!(device.engine, memory.engine, "the memory of another engine");
            }
            let room = |tier: TierId| match tier {
                TierId::Device => {
                    let device = transfer.device.expect("an engine");
                    memory.geometry.device_pages(device.group)
                }
                tier => memory.pages_of(tier),
            };
            let (from, to) = (room(transfer.edge.from), room(transfer.edge.to));
            let within = |list: &PageList, room: u32| {
                list.0
                    .iter()
                    .all(|run: &PageRun| run.end() <= u64::from(room))
            };
            for pair in &transfer.pairs {
                assert!(within(&pair.src, from), "{pair:?} beyond {from}");
                assert!(within(&pair.dst, to), "{pair:?} beyond {to}");
            }
        }
        let owing = workers.iter().copied().collect();
        assert!(self.owed.insert(transfer.id, owing).is_none());
    }

    /// Every worker ends, every engine leaves, and time passes: nothing is left.
    fn end(&mut self) {
        for worker in all_workers() {
            self.uncounted_step(LeaderEvent::WorkerDead(worker));
        }
        for engine in 0..3 {
            self.uncounted_step(LeaderEvent::EngineClosed(engine_id(engine)));
        }
        for _ in 0..4 {
            self.now = self.now + Duration::from_secs(300);
            self.uncounted_step(LeaderEvent::Tick);
        }
        self.count();
        assert_eq!(self.leader.copies_under_way(), 0, "copies are left");
        assert_eq!(self.leader.open_requests(), 0, "requests are left");
        assert_eq!(self.leader.parked_requests(), 0, "parked requests are left");
        assert_eq!(self.leader.slots(), 0, "slots are left");
    }
}

fn end(input: &mut Input<'_>, transfer: TransferId) -> EndedCopy {
    let complete = input.below(4) > 0;
    EndedCopy {
        complete_pages: if complete { 0 } else { input.number32() },
        bytes: input.number(),
        copy_us: input.number(),
        bad_source: input.rarely(),
        faulty_page: input.rarely().then(|| input.number32()),
        ..EndedCopy::new(transfer, complete)
    }
}

fn record(input: &mut Input<'_>, page: u32) -> PageRecord {
    let page = match input.rarely() {
        true => input.number32(),
        false => page.saturating_add(input.below(3) as u32),
    };
    let index = match input.below(4) {
        0 => input.number16(),
        _ => input.below(4) as u16,
    };
    let block_start = match input.below(4) {
        0 => input.number32(),
        _ => page.saturating_sub(u32::from(index)),
    };
    PageRecord {
        page,
        anchor: Anchor(input.below(4) as u128),
        domain: DomainId(input.below(3) as u128),
        block_start,
        index,
        phase: match input.rarely() {
            true => input.number16(),
            false => input.below(4) as u16,
        },
        stored: Stored {
            epoch: Epoch(input.below(6) as u64),
            transfer: TransferId(input.number()),
        },
        fingerprint: Fingerprint(input.below(5) as u128),
    }
}
