//! The leader under random orders of requests, reports, deaths and time: one answer each, one effect each, nothing left.

#![expect(clippy::expect_used, reason = "a test says what it expects")]

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kvferry::core::{
    AnchorKey, Attached, Effect, EngineMemory, Event, Leader, LeaderSettings, Refusal,
};
use kvferry::types::{
    Answer, AttachId, DepotId, Direction, EndedCopy, EngineId, Epoch, GroupGeometry, GroupId, OpId,
    PageHashes, PageList, Rank, Ratio, Replica, Request, RequestId, ResetScope, SlotId, Time,
    WorkerId,
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
    Retry(usize),
    Report {
        which: usize,
        rank: u16,
        whole: bool,
        epoch: u64,
    },
    Wait(u64),
    /// The connection breaks and is back within the grace time.
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
        3 => any::<usize>().prop_map(Step::Retry),
        30 => (any::<usize>(), 0..RANKS, prop::bool::weighted(0.9), prop_oneof![9 => Just(4_u64), 1 => Just(3)])
            .prop_map(|(which, rank, whole, epoch)| Step::Report { which, rank, whole, epoch }),
        3 => (1_u64..20).prop_map(Step::Wait),
        1 => (0_u8..2).prop_map(Step::Reconnect),
        1 => (0_u8..2, 0..RANKS).prop_map(|(engine, rank)| Step::Die(engine, rank)),
    ]
}

fn engine_id(engine: u8) -> EngineId {
    EngineId([engine; 16])
}

/// Names share their first pages in pairs.
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
    /// Requests with their answers.
    asked: BTreeMap<(u8, RequestId), (Request, Option<Reply>)>,
    /// Copies that have not ended on these ranks of an engine's replica.
    open: BTreeMap<OpId, (Direction, u8, BTreeSet<u16>)>,
    attaches: u64,
    slots: BTreeMap<(u8, u64), (usize, u32, u32)>,
    cancelled: BTreeSet<OpId>,
}

fn worker(engine: u8, rank: u16) -> WorkerId {
    WorkerId {
        replica: Replica(engine.into()),
        rank: Rank(rank),
    }
}

fn settings() -> LeaderSettings {
    let ratio = Ratio::new(8).expect("in bounds");
    let mut settings = LeaderSettings::new(EPOCH, RANKS, ratio, AnchorKey([3; 32]));
    settings.replicas = 2;
    settings
}

impl World {
    /// Two engines, each with all its ranks.
    fn new() -> Self {
        let mut world = Self::without_workers();
        world.begin();
        world
    }

    fn begin(&mut self) {
        for engine in 0..2 {
            self.event(Event::EngineOpened(engine_id(engine)));
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
            asked: BTreeMap::new(),
            open: BTreeMap::new(),
            attaches: 0,
            slots: BTreeMap::new(),
            cancelled: BTreeSet::new(),
        };
        for engine in 0..2 {
            world.event(Event::EngineOpened(engine_id(engine)));
        }
        world
    }

    fn attach(&mut self, engine: u8, rank: u16) {
        let geometry = GroupGeometry {
            group: GroupId(0),
            engine_page_tokens: 16,
            layers: 1,
            page_bytes: 64,
            device_pages: 64,
            layout_fingerprint: [1; 16],
        };
        self.attaches += 1;
        self.event(Event::Attached(Attached {
            worker: worker(engine, rank),
            attach: AttachId(self.attaches),
            depot: DepotId(rank.into()),
            memory: Some(EngineMemory {
                engine: engine_id(engine),
                geometry,
                arena_pages: 60,
            }),
        }));
    }

    fn ask(&mut self, engine: u8, request: Request) {
        self.next_id += 1;
        let id = RequestId(self.next_id);
        self.asked.insert((engine, id), (request.clone(), None));
        self.send(engine, id, request);
    }

    fn send(&mut self, engine: u8, id: RequestId, request: Request) {
        let deadline = self.now + Duration::from_secs(5);
        self.event(Event::Request {
            engine: engine_id(engine),
            id,
            deadline,
            request,
        });
    }

    fn event(&mut self, event: Event) {
        let mut effects = Vec::new();
        self.leader.step(self.now, event, &mut effects);
        for effect in effects {
            match effect {
                Effect::Answer { engine, id, answer } => self.answered(engine.0[0], id, answer),
                Effect::Copy {
                    replica,
                    ranks,
                    copy,
                } => {
                    assert_eq!(
                        copy.engine,
                        engine_id(replica.0 as u8),
                        "another engine's workers"
                    );
                    for pair in &copy.pairs {
                        assert_eq!(pair.src.pages(), pair.dst.pages());
                    }
                    let ranks = ranks.iter().map(|rank| rank.0).collect();
                    let open = (copy.direction, replica.0 as u8, ranks);
                    let before = self.open.insert(copy.op, open);
                    assert!(before.is_none(), "{} was given twice", copy.op);
                }
                Effect::Cancel { op, .. } => {
                    assert!(
                        self.open.contains_key(&op),
                        "{op} was cancelled after its end"
                    );
                    self.cancelled.insert(op);
                }
                Effect::Admit { verdict, .. } => assert!(verdict.is_ok()),
                Effect::ReadInventory { shard, depot } => self.event(Event::Inventory {
                    shard,
                    depot,
                    records: Vec::new(),
                }),
                Effect::Strike { worker, id, .. } => self.event(Event::Struck { worker, id }),
                Effect::Expel(expelled) => {
                    let stuck = self.open.values().any(|(_, engine, ranks)| {
                        ranks.iter().any(|rank| worker(*engine, *rank) == expelled)
                    });
                    assert!(stuck, "{expelled} owes nothing");
                }
            }
        }
        self.leader.check().expect("the second count agrees");
        assert_eq!(self.leader.copies_under_way(), self.open.len());
    }

    fn answered(&mut self, engine: u8, id: RequestId, answer: Reply) {
        let (request, known) = self
            .asked
            .get_mut(&(engine, id))
            .expect("a request that was asked");
        match known {
            Some(known) => assert_eq!(*known, answer, "a retry got another answer"),
            None => *known = Some(answer.clone()),
        }
        if let (
            Request::Lookup {
                slot,
                hashes,
                device_pages,
                ..
            },
            Ok(Answer::Lookup { hit_pages, .. }),
        ) = (request, answer)
        {
            self.slots
                .insert((engine, slot.0), (hashes.len(), *device_pages, hit_pages));
        }
    }

    fn report(&mut self, op: OpId, rank: u16, whole: bool, epoch: Epoch) {
        let Some((_, engine, ranks)) = self.open.get_mut(&op) else {
            return;
        };
        let engine = *engine;
        if epoch == EPOCH {
            ranks.remove(&rank);
            if ranks.is_empty() {
                self.open.remove(&op);
            }
        }
        let ended = EndedCopy {
            op,
            whole,
            bytes: 64,
            busy_us: 1,
        };
        self.event(Event::Ended {
            worker: worker(engine, rank),
            epoch,
            copies: vec![ended, ended],
        });
    }

    /// Everything of a rank has ended: its process is dead, and a new one attaches.
    fn die(&mut self, engine: u8, rank: u16) {
        self.open.retain(|_, (_, owner, ranks)| {
            if *owner == engine {
                ranks.remove(&rank);
            }
            !ranks.is_empty()
        });
        self.event(Event::WorkerDead(worker(engine, rank)));
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
                self.ask(
                    engine,
                    Request::Lookup {
                        slot,
                        namespace,
                        hashes,
                        device_pages,
                    },
                );
            }
            Step::Load { engine, slot } => {
                let found = self.slots.get(&(engine, slot)).copied();
                let (_, first_page, pages) = found.unwrap_or((0, 0, 1));
                let destination = PageList::run(0, pages.max(1));
                self.ask(
                    engine,
                    Request::Load {
                        slot: SlotId(slot),
                        first_page,
                        destination,
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
                self.ask(
                    engine,
                    Request::Store {
                        slot,
                        first_page,
                        more,
                        source,
                    },
                );
            }
            Step::Finish { engine, slot } => {
                self.ask(engine, Request::Finish { slot: SlotId(slot) })
            }
            Step::Retry(which) if !self.asked.is_empty() => {
                let (key, (request, _)) = self
                    .asked
                    .iter()
                    .nth(which % self.asked.len())
                    .expect("a request");
                let ((engine, id), request) = (*key, request.clone());
                let copies = self.open.len();
                self.send(engine, id, request);
                assert_eq!(self.open.len(), copies, "a retry copied again");
            }
            Step::Report {
                which,
                rank,
                whole,
                epoch,
            } if !self.open.is_empty() => {
                let op = *self
                    .open
                    .keys()
                    .nth(which % self.open.len())
                    .expect("a copy");
                self.report(op, rank, whole, Epoch(epoch));
            }
            Step::Wait(seconds) => {
                self.now = self.now + Duration::from_secs(seconds);
                self.event(Event::Tick);
            }
            Step::Reconnect(engine) => {
                self.event(Event::EngineClosed(engine_id(engine)));
                self.take(Step::Wait(9));
                self.event(Event::EngineOpened(engine_id(engine)));
            }
            Step::Die(engine, rank) => self.die(engine, rank),
            Step::Retry(_) | Step::Report { .. } => {}
        }
    }

    /// All copies end, all holds expire: then everything is answered and nothing is left.
    fn settle(&mut self) {
        while let Some((op, rank)) = self
            .open
            .iter()
            .next()
            .and_then(|(op, (_, _, ranks))| Some((*op, *ranks.first()?)))
        {
            self.report(op, rank, true, EPOCH);
        }
        self.now = self.now + Duration::from_secs(3600);
        self.event(Event::Tick);
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
        }
        world.settle();
        for ((engine, id), (request, answer)) in &world.asked {
            prop_assert!(answer.is_some(), "engine {} {}: {:?} was never answered", engine, id, request);
        }
    }
}

/// Looks up and stores a sequence; the copies are left open.
fn store(world: &mut World, engine: u8, slot: u64, namespace: u8, pages: usize) -> RequestId {
    let hashes = sequence(0, pages);
    let lookup = Request::Lookup {
        slot: SlotId(slot),
        namespace: vec![namespace],
        hashes,
        device_pages: 0,
    };
    world.ask(engine, lookup);
    world.take(Step::Store { engine, slot });
    RequestId(world.next_id)
}

fn answer(world: &World, engine: u8, id: RequestId) -> Option<Reply> {
    world
        .asked
        .get(&(engine, id))
        .and_then(|(_, answer)| answer.clone())
}

#[test]
fn two_stores_of_the_same_pages_copy_once_and_both_are_answered() {
    let mut world = World::new();
    let first = store(&mut world, 0, 0, 7, 8);
    let second = store(&mut world, 1, 0, 7, 8);
    assert_eq!(world.open.len(), 1, "one copy for both");
    let op = *world.open.keys().next().expect("a copy");
    for rank in 0..RANKS {
        assert_eq!(
            answer(&world, 0, first),
            None,
            "answered before rank {rank} ended"
        );
        world.report(op, rank, true, EPOCH);
    }
    let stored = |stored_pages, present_pages| {
        Some(Ok(Answer::Store {
            stored_pages,
            present_pages,
            refused_pages: 0,
            failed_pages: 0,
        }))
    };
    assert_eq!(answer(&world, 0, first), stored(8, 0));
    assert_eq!(answer(&world, 1, second), stored(0, 8));
}

#[test]
fn a_late_copy_is_cancelled_and_its_pages_stay_until_every_rank_has_ended() {
    let mut world = World::new();
    let id = store(&mut world, 0, 0, 7, 8);
    let op = *world.open.keys().next().expect("a copy");
    world.report(op, 0, true, EPOCH);
    world.take(Step::Wait(6));
    assert!(world.cancelled.contains(&op));
    let quarantined = |world: &World| {
        world
            .leader
            .pool()
            .expect("a pool")
            .page_states()
            .quarantined
    };
    assert_eq!(quarantined(&world), 8);
    world.report(op, 1, false, EPOCH);
    assert_eq!(
        (quarantined(&world), answer(&world, 0, id)),
        (8, None),
        "rank 2 may still write"
    );
    world.report(op, 2, false, EPOCH);
    assert_eq!(quarantined(&world), 0);
    let failed = Answer::Store {
        stored_pages: 0,
        present_pages: 0,
        refused_pages: 0,
        failed_pages: 8,
    };
    assert_eq!(answer(&world, 0, id), Some(Ok(failed)));
}

#[test]
fn a_load_is_reported_failed_only_when_no_rank_writes_any_more() {
    let mut world = World::new();
    store(&mut world, 0, 0, 7, 8);
    let op = *world.open.keys().next().expect("a copy");
    (0..RANKS).for_each(|rank| world.report(op, rank, true, EPOCH));
    let hashes = sequence(0, 8);
    world.ask(
        0,
        Request::Lookup {
            slot: SlotId(1),
            namespace: vec![7],
            hashes,
            device_pages: 0,
        },
    );
    world.take(Step::Load { engine: 0, slot: 1 });
    let id = RequestId(world.next_id);
    let op = *world.open.keys().next().expect("a copy");
    world.report(op, 0, false, EPOCH);
    world.report(op, 1, true, EPOCH);
    assert_eq!(answer(&world, 0, id), None, "rank 2 may still write");
    world.report(op, 2, true, EPOCH);
    assert_eq!(answer(&world, 0, id), Some(Err(Refusal::CopyFailed(1))));
}

#[test]
fn an_engine_that_stays_away_is_forgotten_with_all_it_held() {
    let mut world = World::new();
    store(&mut world, 0, 0, 7, 8);
    let op = *world.open.keys().next().expect("a copy");
    (0..RANKS).for_each(|rank| world.report(op, rank, true, EPOCH));
    let hashes = sequence(0, 8);
    world.ask(
        0,
        Request::Lookup {
            slot: SlotId(1),
            namespace: vec![7],
            hashes,
            device_pages: 0,
        },
    );
    assert_eq!(world.leader.pool().expect("a pool").pins(), 1);
    world.event(Event::EngineClosed(engine_id(0)));
    world.take(Step::Wait(11));
    assert_eq!(world.leader.pool().expect("a pool").pins(), 0);
    assert_eq!(world.leader.slots(), 0);
}

#[test]
fn what_names_engine_pages_is_refused_only_when_nothing_of_an_older_leader_can_touch_them() {
    let mut world = World::without_workers();
    let (slot, destination) = (SlotId(9), PageList::run(0, 1));
    let (first_page, more, source) = (0, None, destination.clone());
    world.ask(
        0,
        Request::Load {
            slot,
            first_page,
            destination,
        },
    );
    let load = RequestId(world.next_id);
    world.ask(
        0,
        Request::Store {
            slot,
            first_page,
            more,
            source,
        },
    );
    let store = RequestId(world.next_id);
    for (engine, rank) in [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)] {
        world.attach(engine, rank);
    }
    assert_eq!(
        answer(&world, 0, load),
        None,
        "the last worker may still copy"
    );
    world.event(Event::WorkerDead(worker(1, 2)));
    let refused = Some(Err(Refusal::UnknownSlot(slot)));
    assert_eq!(answer(&world, 0, load), refused);
    assert_eq!(answer(&world, 0, store), refused);
}

#[test]
fn who_keeps_silent_for_longer_than_the_fence_while_something_waits_must_go() {
    let mut leader = World::without_workers().leader;
    let load = Request::Load {
        slot: SlotId(9),
        first_page: 0,
        destination: PageList::run(0, 1),
    };
    let ask = Event::Request {
        engine: engine_id(0),
        id: RequestId(1),
        deadline: Time(5),
        request: load,
    };
    let mut effects = Vec::new();
    leader.step(Time(0), ask, &mut effects);
    let fence = Time(5) + Duration::from_secs(10);
    assert_eq!(leader.next_timeout(), Some(fence));
    leader.step(fence, Event::Tick, &mut effects);
    let all = (0..2).flat_map(|engine| (0..RANKS).map(move |rank| worker(engine, rank)));
    let expelled: Vec<Effect> = all.map(Effect::Expel).collect();
    assert_eq!(effects, expelled);
}

fn reset(world: &mut World, scope: ResetScope) -> Option<Reply> {
    world.ask(0, Request::Reset { scope });
    answer(world, 0, RequestId(world.next_id))
}

fn found(world: &mut World, namespace: u8) -> u32 {
    let lookup = Request::Lookup {
        slot: SlotId(2),
        namespace: vec![namespace],
        hashes: sequence(0, 8),
        device_pages: 0,
    };
    world.ask(1, lookup);
    let id = RequestId(world.next_id);
    world.take(Step::Finish { engine: 1, slot: 2 });
    let answer = answer(world, 1, id)
        .expect("an answer")
        .expect("no refusal");
    let Answer::Lookup { hit_pages, .. } = answer else {
        unreachable!("a lookup's answer is one");
    };
    hit_pages
}

#[test]
fn a_reset_forgets_what_it_names_and_nothing_else() {
    let mut world = World::new();
    for (slot, namespace) in [(0, 7), (1, 8)] {
        store(&mut world, 0, slot, namespace, 8);
        let op = *world.open.keys().next().expect("a copy");
        (0..RANKS).for_each(|rank| world.report(op, rank, true, EPOCH));
    }
    let forgotten = |pages| Some(Ok(Answer::Reset { pages }));
    assert_eq!(
        reset(&mut world, ResetScope::Namespace(vec![7])),
        forgotten(8)
    );
    assert_eq!((found(&mut world, 7), found(&mut world, 8)), (0, 8));
    let page = PageHashes::packed(16, sequence(0, 3).get(2).to_vec()).expect("one page");
    assert_eq!(
        reset(&mut world, ResetScope::Pages(vec![7], page.clone())),
        forgotten(0)
    );
    assert_eq!(
        reset(&mut world, ResetScope::Pages(vec![8], page)),
        forgotten(8)
    );
    assert_eq!(found(&mut world, 8), 0);
    assert_eq!(reset(&mut world, ResetScope::Everything), forgotten(0));
}

#[test]
fn a_reset_is_refused_while_pages_are_held_with_the_number_of_holders() {
    let mut world = World::new();
    store(&mut world, 0, 0, 7, 8);
    let op = *world.open.keys().next().expect("a copy");
    (0..RANKS).for_each(|rank| world.report(op, rank, true, EPOCH));
    for slot in [4, 5] {
        world.ask(
            1,
            Request::Lookup {
                slot: SlotId(slot),
                namespace: vec![7],
                hashes: sequence(0, 8),
                device_pages: 0,
            },
        );
    }
    let refused = Some(Err(Refusal::Leased { holders: 2 }));
    assert_eq!(reset(&mut world, ResetScope::Everything), refused);
    assert_eq!(found(&mut world, 7), 8, "nothing was forgotten");
}

#[test]
fn a_reset_is_answered_when_stores_in_flight_have_ended() {
    let mut world = World::new();
    let stored = store(&mut world, 0, 0, 7, 8);
    let op = *world.open.keys().next().expect("a copy");
    assert_eq!(reset(&mut world, ResetScope::Everything), None);
    let id = RequestId(world.next_id);
    assert!(world.cancelled.contains(&op));
    (0..RANKS).for_each(|rank| world.report(op, rank, true, EPOCH));
    assert_eq!(answer(&world, 0, id), Some(Ok(Answer::Reset { pages: 8 })));
    let failed = Answer::Store {
        stored_pages: 0,
        present_pages: 0,
        refused_pages: 0,
        failed_pages: 8,
    };
    assert_eq!(answer(&world, 0, stored), Some(Ok(failed)));
    assert_eq!(found(&mut world, 7), 0);
}

#[test]
fn one_request_too_many_is_refused_for_good_and_a_finish_never_is() {
    let mut world = World::with_limit(1);
    let first = store(&mut world, 0, 0, 7, 8);
    let op = *world.open.keys().next().expect("a copy");
    let second = store(&mut world, 0, 1, 8, 8);
    let limit = "requests of an engine under way";
    let refused = Some(Err(Refusal::Limit { limit, max: 1 }));
    assert_eq!(answer(&world, 0, second), refused);
    assert_eq!(world.leader.open_requests(), 1);
    world.take(Step::Finish { engine: 0, slot: 1 });
    let finish = RequestId(world.next_id);
    assert_eq!(answer(&world, 0, finish), Some(Ok(Answer::Finish)));
    (0..RANKS).for_each(|rank| world.report(op, rank, true, EPOCH));
    assert!(answer(&world, 0, first).is_some());
    let again = world.asked[&(0, second)].0.clone();
    world.send(0, second, again);
    assert!(
        world.open.is_empty(),
        "what was refused is not carried out when it comes again"
    );
    let third = store(&mut world, 0, 2, 8, 8);
    assert_eq!(answer(&world, 0, third), None, "there is room again");
}

#[test]
fn a_draining_leader_begins_nothing_new_and_ends_what_it_began() {
    let mut world = World::new();
    let first = store(&mut world, 0, 0, 7, 8);
    let op = *world.open.keys().next().expect("a copy");
    world.leader.drain();
    let second = store(&mut world, 0, 1, 7, 8);
    assert_eq!(answer(&world, 0, second), Some(Err(Refusal::Draining)));
    world.take(Step::Retry(first.0 as usize - 1));
    assert_eq!(
        answer(&world, 0, first),
        None,
        "asked again, its copy still runs"
    );
    (0..RANKS).for_each(|rank| world.report(op, rank, true, EPOCH));
    assert!(matches!(
        answer(&world, 0, first),
        Some(Ok(Answer::Store { .. }))
    ));
}

#[test]
fn a_lookup_behind_the_finish_of_its_slot_opens_nothing() {
    let mut world = World::new();
    world.next_id = 5;
    world.take(Step::Finish { engine: 0, slot: 1 });
    let late = Request::Lookup {
        slot: SlotId(1),
        namespace: vec![7],
        hashes: sequence(0, 8),
        device_pages: 0,
    };
    world.asked.insert((0, RequestId(3)), (late.clone(), None));
    world.send(0, RequestId(3), late);
    let unknown = Some(Err(Refusal::UnknownSlot(SlotId(1))));
    assert_eq!(answer(&world, 0, RequestId(3)), unknown);
    assert_eq!(world.leader.slots(), 0);
}

#[test]
fn what_is_copied_for_an_engine_that_stays_away_is_not_forgotten() {
    let mut world = World::new();
    let id = store(&mut world, 0, 0, 7, 8);
    let op = *world.open.keys().next().expect("a copy");
    world.event(Event::EngineClosed(engine_id(0)));
    world.now = world.now + Duration::from_secs(11);
    world.event(Event::Tick);
    world.event(Event::EngineOpened(engine_id(0)));
    let (request, _) = world.asked[&(0, id)].clone();
    world.send(0, id, request);
    assert_eq!(
        answer(&world, 0, id),
        None,
        "a worker may still read these pages"
    );
    (0..RANKS).for_each(|rank| world.report(op, rank, true, EPOCH));
    assert!(answer(&world, 0, id).is_some());
}
