//! The leader under random orders of requests, reports, deaths and timers: every request has one answer and one effect,
//! and nothing is left at the end.

#![expect(clippy::expect_used, reason = "a test says what it expects")]

mod accounts;
mod cancel;
mod cases;
mod edges;
mod faults;
mod flush;
mod gate;
mod groups;
mod inventory;
mod late;
mod log;
mod memories;
mod moves;
mod resets;
mod settings;
mod shared;
mod tier;
mod tier_resets;
mod tiers;
mod uses;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kvferry_core::{
    AnchorKey, AttachRequest, AttachedDepot, Leader, LeaderEffect, LeaderEvent, LeaderSettings,
    MemoryStatement, OPEN_REQUESTS_MAX, Refusal, WorkerMemory,
};
use kvferry_types::{
    Answer, AttachId, CancelStoresAnswer, DepotId, Direction, EndedCopy, EngineId, Epoch,
    GroupGeometry, GroupId, LoadAnswer, LookupAnswer, MemoryId, PageHashes, PageList, Part,
    PerTier, Rank, Ratio, Replica, Request, RequestId, ResetAnswer, ResetScope, SlotId,
    StoreAnswer, Time, TransferId, WorkerId,
};
use proptest::prelude::*;

const RANKS: u16 = 3;
const EPOCH: Epoch = Epoch(4);

#[derive(Debug, Clone)]
enum Step {
    Lookup {
        engine: u8,
        slot: u64,
        name: u8,
        pages: usize,
        device_pages: u32,
    },
    Load {
        engine: u8,
        slot: u64,
    },
    Store {
        engine: u8,
        slot: u64,
    },
    Finish {
        engine: u8,
        slot: u64,
    },
    CancelStores {
        engine: u8,
        slot: Option<u64>,
    },
    Retry(usize),
    Report {
        which: usize,
        rank: u16,
        complete: bool,
        epoch: u64,
    },
    Wait(u64),
    /// The connection breaks and is restored within the grace time.
    Reconnect(u8),
    Die(u8, u16),
}

fn step() -> impl Strategy<Value = Step> {
    let who = || (0_u8..2, 0_u64..3);
    prop_oneof![
        6 => (who(), 0_u8..4, 1_usize..40, 0_u32..6).prop_map(|((engine, slot), name, pages, device_pages)| {
            Step::Lookup { engine, slot, name, pages, device_pages: device_pages.min(pages as u32) }
        }),
        4 => who().prop_map(|(engine, slot)| Step::Load { engine, slot }),
        6 => who().prop_map(|(engine, slot)| Step::Store { engine, slot }),
        3 => who().prop_map(|(engine, slot)| Step::Finish { engine, slot }),
        1 => (0_u8..2, prop::option::of(0_u64..3)).prop_map(|(engine, slot)| Step::CancelStores { engine, slot }),
        3 => any::<usize>().prop_map(Step::Retry),
        30 => (any::<usize>(), 0..RANKS, prop::bool::weighted(0.9), prop_oneof![9 => Just(4_u64), 1 => Just(3)])
            .prop_map(|(which, rank, complete, epoch)| Step::Report { which, rank, complete, epoch }),
        3 => (1_u64..20).prop_map(Step::Wait),
        1 => (0_u8..2).prop_map(Step::Reconnect),
        1 => (0_u8..2, 0..RANKS).prop_map(|(engine, rank)| Step::Die(engine, rank)),
    ]
}

fn engine_id(engine: u8) -> EngineId {
    EngineId([engine; 16])
}

/// The hashes of a sequence. Names come in pairs that share their first 6 pages.
fn sequence(name: u8, pages: usize) -> PageHashes {
    let page = |page: usize| {
        let branch = if page < 6 { name / 2 } else { name };
        [page as u8, branch, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    };
    PageHashes::packed(16, (0..pages).flat_map(page).collect()).expect("16 bytes a page")
}

type Reply = Result<Answer, Refusal>;

struct World {
    leader: Leader,
    now: Time,
    next_id: u64,
    /// Requests, by engine and id, with their answers.
    requests: BTreeMap<(u8, RequestId), (Request, Option<Reply>)>,
    /// Running copies: direction, engine, and the ranks on which the copy has not ended.
    open: BTreeMap<TransferId, (Direction, u8, BTreeSet<u16>)>,
    attaches: u64,
    slots: BTreeMap<(u8, u64), (usize, u32, u32)>,
    cancelled: BTreeSet<TransferId>,
}

fn worker(engine: u8, rank: u16) -> WorkerId {
    WorkerId {
        replica: Replica(engine.into()),
        rank: Rank(rank),
    }
}

fn geometry() -> GroupGeometry {
    GroupGeometry {
        group: GroupId(0),
        engine_page_tokens: 16,
        layers: 1,
        page_bytes: 64,
        device_pages: 64,
        content_digest: [0; 16],
        layout_fingerprint: [1; 16],
        ..GroupGeometry::default()
    }
}

/// The verdict about a worker that arrived, or that stated its memory: the first refusal, else the last admission.
fn admission(effects: &[LeaderEffect]) -> Result<TransferId, Refusal> {
    let verdicts = effects.iter().filter_map(|effect| match effect {
        LeaderEffect::Admit { verdict, .. } | LeaderEffect::AdmitMemory { verdict, .. } => {
            Some(verdict.clone())
        }
        _ => None,
    });
    let verdict = verdicts.reduce(|first, second| first.and(second));
    verdict.expect("a verdict")
}

fn settings() -> LeaderSettings {
    let ratio = Ratio::new(8).expect("in bounds");
    let mut settings = LeaderSettings::new(EPOCH, RANKS, ratio, AnchorKey::new([3; 32]));
    settings.replicas = 2;
    settings
}

impl World {
    /// A world with two engines, each with all its ranks.
    fn new() -> Self {
        let mut world = Self::without_workers();
        world.begin();
        world
    }

    fn begin(&mut self) {
        for engine in 0..2 {
            self.event(LeaderEvent::EngineOpened(engine_id(engine)));
            (0..RANKS).for_each(|rank| self.attach(engine, rank));
        }
        assert!(self.leader.is_ready());
    }

    fn with_limit(open_requests_max: usize) -> Self {
        let mut world = Self::without_workers();
        let mut settings = settings();
        settings.open_requests_max = open_requests_max;
        world.leader = Leader::new(settings);
        world.begin();
        world
    }

    fn without_workers() -> Self {
        let mut world = Self {
            leader: Leader::new(settings()),
            now: Time(0),
            next_id: 0,
            requests: BTreeMap::new(),
            open: BTreeMap::new(),
            attaches: 0,
            slots: BTreeMap::new(),
            cancelled: BTreeSet::new(),
        };
        for engine in 0..2 {
            world.event(LeaderEvent::EngineOpened(engine_id(engine)));
        }
        world
    }

    fn attach(&mut self, engine: u8, rank: u16) {
        let geometry = geometry();
        self.attaches += 1;
        let arrival = LeaderEvent::arrival(
            AttachRequest {
                worker: worker(engine, rank),
                ranks: RANKS,
                shards: RANKS,
                attach: AttachId(self.attaches),
                depots: PerTier::host(AttachedDepot {
                    depot: DepotId(rank.into()),
                    epoch: Epoch(0),
                }),
            },
            WorkerMemory {
                engine: engine_id(engine),
                geometry: geometry.into(),
                arena_pages: PerTier::host(60),
            },
        );
        for event in arrival {
            self.event(event);
        }
    }

    fn request(&mut self, engine: u8, request: Request) {
        self.next_id += 1;
        self.request_as(engine, RequestId(self.next_id), request);
    }

    /// Sends a request under an id of its own, as an engine does whose messages arrive late.
    fn request_as(&mut self, engine: u8, id: RequestId, request: Request) {
        self.requests.insert((engine, id), (request.clone(), None));
        self.send(engine, id, request);
    }

    fn send(&mut self, engine: u8, id: RequestId, request: Request) {
        let deadline = self.now + Duration::from_secs(5);
        self.event(LeaderEvent::Request {
            engine: engine_id(engine),
            id,
            deadline,
            request,
        });
    }

    fn event(&mut self, event: LeaderEvent) {
        let mut effects = Vec::new();
        self.leader.step(self.now, event, &mut effects);
        for effect in effects {
            match effect {
                LeaderEffect::Answer { engine, id, answer } => {
                    self.answered(engine.0[0], id, answer)
                }
                LeaderEffect::Transfer { workers, transfer } => {
                    let replica = workers[0].replica;
                    assert!(workers.iter().all(|worker| worker.replica == replica));
                    let device = transfer.device.expect("an end is the device");
                    assert_eq!(
                        device.engine,
                        engine_id(replica.0 as u8),
                        "another engine's workers"
                    );
                    for pair in &transfer.pairs {
                        assert_eq!(pair.src.pages(), pair.dst.pages());
                        assert!(pair.src.pages() > 0, "nothing is copied");
                    }
                    let ranks = workers.iter().map(|worker| worker.rank.0).collect();
                    let direction = transfer.edge.direction().expect("an end is the device");
                    let open = (direction, replica.0 as u8, ranks);
                    let before = self.open.insert(transfer.id, open);
                    assert!(before.is_none(), "{} was given twice", transfer.id);
                }
                LeaderEffect::Cancel { transfers, .. } => {
                    for transfer in transfers {
                        assert!(
                            self.open.contains_key(&transfer),
                            "{transfer} was cancelled after its end"
                        );
                        self.cancelled.insert(transfer);
                    }
                }
                LeaderEffect::Admit { verdict, .. } | LeaderEffect::AdmitMemory { verdict, .. } => {
                    assert!(verdict.is_ok());
                }
                LeaderEffect::AdmitTiers { .. } => {}
                LeaderEffect::ReadInventory {
                    worker,
                    depot,
                    read_id: reading,
                    from,
                    ..
                } => self.event(LeaderEvent::Inventory {
                    worker,
                    depot,
                    read_id: reading,
                    from,
                    next: None,
                    records: Vec::new(),
                }),
                LeaderEffect::Invalidate { worker, id, .. } => {
                    let epoch = EPOCH;
                    self.event(LeaderEvent::Invalidated { worker, epoch, id });
                }
                LeaderEffect::FlushTier { .. } | LeaderEffect::OpenTiers { .. } => {
                    unreachable!("there is no disk")
                }
                LeaderEffect::FenceWorker(fenced) => {
                    let stuck = self.open.values().any(|(_, engine, ranks)| {
                        ranks.iter().any(|rank| worker(*engine, *rank) == fenced)
                    });
                    assert!(stuck, "{fenced} owes nothing");
                }
            }
        }
        self.leader.check().expect("the second count agrees");
        assert_eq!(self.leader.copies_under_way(), self.open.len());
    }

    fn answered(&mut self, engine: u8, id: RequestId, answer: Reply) {
        let (request, known) = self
            .requests
            .get_mut(&(engine, id))
            .expect("a request that was asked");
        match known {
            Some(known) => assert_eq!(*known, answer, "a retry got another answer"),
            None => *known = Some(answer.clone()),
        }
        if let (
            Request::CancelStores { slot },
            Ok(Answer::CancelStores(CancelStoresAnswer { .. })),
        ) = (&*request, &answer)
        {
            let wanted = *slot;
            let before = self.requests.range((engine, RequestId(0))..(engine, id));
            for (key, (request, answer)) in before {
                let meant = match request {
                    Request::Store { slot, .. } => wanted.is_none_or(|wanted| wanted == *slot),
                    _ => false,
                };
                assert!(
                    !meant || answer.is_some(),
                    "{key:?} was cancelled and may go on"
                );
            }
            return;
        }
        if let (
            Request::Lookup {
                slot,
                hashes,
                have_pages: device_pages,
                ..
            },
            Ok(Answer::Lookup(LookupAnswer { hit_pages, .. })),
        ) = (request, answer)
        {
            self.slots
                .insert((engine, slot.0), (hashes.len(), *device_pages, hit_pages));
        }
    }

    fn report(&mut self, transfer: TransferId, rank: u16, complete: bool, epoch: Epoch) {
        self.report_part(transfer, rank, complete, 0, epoch);
    }

    fn report_part(
        &mut self,
        transfer: TransferId,
        rank: u16,
        complete: bool,
        complete_pages: u32,
        epoch: Epoch,
    ) {
        let Some((_, engine, ranks)) = self.open.get_mut(&transfer) else {
            return;
        };
        let engine = *engine;
        if epoch == EPOCH {
            ranks.remove(&rank);
            if ranks.is_empty() {
                self.open.remove(&transfer);
            }
        }
        let ended = EndedCopy {
            complete_pages,
            bytes: 64,
            copy_us: 1,
            ..EndedCopy::new(transfer, complete)
        };
        self.event(LeaderEvent::Ended {
            worker: worker(engine, rank),
            epoch,
            copies: vec![ended, ended],
        });
    }

    /// Ends all copies of a rank: its process is dead, and a new one attaches.
    fn die(&mut self, engine: u8, rank: u16) {
        self.open.retain(|_, (_, owner, ranks)| {
            if *owner == engine {
                ranks.remove(&rank);
            }
            !ranks.is_empty()
        });
        self.event(LeaderEvent::WorkerDead(worker(engine, rank)));
        assert!(!self.leader.is_attached(worker(engine, rank)));
        self.attach(engine, rank);
    }

    fn take(&mut self, step: Step) {
        match step {
            Step::Lookup {
                engine,
                slot,
                name,
                pages,
                device_pages,
            } => {
                let hashes = sequence(name, pages);
                let (slot, namespace) = (SlotId(slot), vec![engine % 2]);
                self.request(
                    engine,
                    Request::Lookup {
                        slot,
                        namespace,
                        hashes,
                        have_pages: device_pages,
                        limit_pages: None,
                    },
                );
            }
            Step::Load { engine, slot } => {
                let found = self.slots.get(&(engine, slot)).copied();
                let (_, first_page, pages) = found.unwrap_or((0, 0, 1));
                let destination = PageList::run(0, pages.max(1));
                self.request(
                    engine,
                    Request::Load {
                        slot: SlotId(slot),
                        parts: vec![Part::new(GroupId(0), first_page, destination)],
                        after: RequestId(0),
                    },
                );
            }
            Step::Store { engine, slot } => {
                let pages = self
                    .slots
                    .get(&(engine, slot))
                    .map_or(1, |(pages, _, _)| *pages);
                let source = PageList::run(1, pages as u32);
                let (slot, first_page, more) = (SlotId(slot), 0, None);
                self.request(
                    engine,
                    Request::Store {
                        slot,
                        parts: vec![Part::new(GroupId(0), first_page, source)],
                        more,
                        after: RequestId(0),
                    },
                );
            }
            Step::Finish { engine, slot } => {
                self.request(engine, Request::Finish { slot: SlotId(slot) })
            }
            Step::CancelStores { engine, slot } => {
                let slot = slot.map(SlotId);
                self.request(engine, Request::CancelStores { slot });
            }
            Step::Retry(which) if !self.requests.is_empty() => {
                let (key, (request, _)) = self
                    .requests
                    .iter()
                    .nth(which % self.requests.len())
                    .expect("a request");
                let ((engine, id), request) = (*key, request.clone());
                let copies = self.open.len();
                self.send(engine, id, request);
                assert_eq!(self.open.len(), copies, "a retry copied again");
            }
            Step::Report {
                which,
                rank,
                complete,
                epoch,
            } if !self.open.is_empty() => {
                let transfer = *self
                    .open
                    .keys()
                    .nth(which % self.open.len())
                    .expect("a copy");
                self.report(transfer, rank, complete, Epoch(epoch));
            }
            Step::Wait(seconds) => {
                self.now = self.now + Duration::from_secs(seconds);
                self.event(LeaderEvent::Tick);
            }
            Step::Reconnect(engine) => {
                self.event(LeaderEvent::EngineClosed(engine_id(engine)));
                self.take(Step::Wait(9));
                self.event(LeaderEvent::EngineOpened(engine_id(engine)));
            }
            Step::Die(engine, rank) => self.die(engine, rank),
            Step::Retry(_) | Step::Report { .. } => {}
        }
    }

    /// Ends all copies and lets all holds expire, then checks that every request is answered and nothing is left.
    fn settle(&mut self) {
        while let Some((transfer, rank)) = self
            .open
            .iter()
            .next()
            .and_then(|(transfer, (_, _, ranks))| Some((*transfer, *ranks.first()?)))
        {
            self.report(transfer, rank, true, EPOCH);
        }
        self.now = self.now + Duration::from_secs(3600);
        self.event(LeaderEvent::Tick);
        let pool = self.leader.pool().expect("a pool");
        assert_eq!(pool.pins(), 0, "a hold outlived its expiry");
        let states = pool.page_states();
        assert_eq!(
            states.free + states.ready,
            pool.capacity_pages(),
            "{states:?}"
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn every_request_is_answered_once_and_nothing_is_left(
        steps in prop::collection::vec(step(), 1..120),
    ) {
        let mut world = World::new();
        for step in steps {
            world.take(step);
            accounts::check_balance(&world);
        }
        world.settle();
        accounts::check_balance(&world);
        for ((engine, id), (request, answer)) in &world.requests {
            prop_assert!(answer.is_some(), "engine {} {}: {:?} was never answered", engine, id, request);
        }
    }
}
