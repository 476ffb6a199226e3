//! Counters of the leader, and its reports about its state.

use kvferry_types::{PRIORITIES, TierId};

use super::*;
use kvferry_core::AttachedDepot;
use kvferry_types::Part;
use kvferry_types::PerTier;

/// Looks up the first `pages` pages of a sequence in a slot of engine 0.
fn look_up(world: &mut World, slot: u64, pages: usize) {
    let lookup = Request::Lookup {
        slot: SlotId(slot),
        namespace: vec![7],
        hashes: sequence(0, pages),
        have_pages: 0,
        limit_pages: None,
    };
    world.request(0, lookup);
}

fn store_from(world: &mut World, slot: u64, first_page: u32, pages: u32) -> Option<Reply> {
    let store = Request::Store {
        slot: SlotId(slot),
        parts: vec![Part::new(GroupId(0), first_page, PageList::run(1, pages))],
        more: None,
        after: RequestId(0),
    };
    world.request(0, store);
    let id = RequestId(world.next_id);
    while let Some(transfer) = world.open.keys().next().copied() {
        (0..RANKS).for_each(|rank| world.report(transfer, rank, true, EPOCH));
    }
    world.requests[&(0, id)].1.clone()
}

fn stored(stored_pages: u32, present_pages: u32) -> Option<Reply> {
    Some(Ok(Answer::Store(StoreAnswer {
        stored_pages,
        present_pages,
        refused_pages: 0,
        failed_pages: 0,
    })))
}

/// The counters that are not zero.
fn counted(world: &World) -> BTreeMap<&'static str, u64> {
    let counters = world.leader.counters();
    counters.filter(|(_, count)| *count > 0).collect()
}

/// The counter of a request with its answer: refusals by their reason, others by their end. `None` for requests that are
/// not counted.
fn counter_of(request: &Request, answer: &Reply) -> Option<String> {
    let requests = match request {
        Request::Lookup { .. } => "lookups",
        Request::Load { .. } => "loads",
        Request::Store { .. } => "stores",
        _ => return None,
    };
    let refused = match answer {
        Ok(Answer::Load(LoadAnswer { pages })) => {
            let Request::Load { parts, .. } = request else {
                unreachable!("{request:?} was answered as a load");
            };
            let wanted: u64 = parts.iter().map(|part| part.pages.pages()).sum();
            let whole = wanted == u64::from(*pages);
            return Some(if whole { "loads_done" } else { "loads_short" }.to_owned());
        }
        Ok(Answer::Store(stored)) if stored.failed_pages == 0 => {
            return Some("stores_done".to_owned());
        }
        // Stores that were cancelled are among them.
        Ok(Answer::Store(_)) => return Some("stores_failed".to_owned()),
        Ok(_) => return Some(requests.to_owned()),
        Err(Refusal::CopyFailed(_) | Refusal::BadPages(_) | Refusal::NotLoaded) => {
            return Some("loads_failed".to_owned());
        }
        Err(Refusal::UnknownSlot(_)) => "unknown_slot",
        Err(Refusal::NotPinned { .. }) => "not_pinned",
        Err(Refusal::Limit { .. }) => "limit",
        Err(Refusal::Crowded { .. }) => "busy",
        Err(Refusal::Invalid { .. }) => "invalid",
        Err(Refusal::NotReady { .. } | Refusal::AnotherEngine { .. } | Refusal::Reading) => {
            "not_ready"
        }
        Err(other) => unreachable!("{other:?} in this world"),
    };
    Some(format!("refused_{requests}_{refused}"))
}

/// Counts the answers that the engines received: each request was answered and counted once, or is open, and the pages
/// and tokens are those of the answers.
pub fn check_balance(world: &World) {
    let (mut expected, mut open) = (BTreeMap::<String, u64>::new(), [0_usize; 3]);
    let mut add = |name: &str, value: u64| *expected.entry(name.to_owned()).or_default() += value;
    for (request, answer) in world.requests.values() {
        let Some(answer) = answer else {
            open[0] += 1;
            open[1] += usize::from(matches!(request, Request::Load { .. }));
            open[2] += usize::from(matches!(request, Request::Store { .. }));
            continue;
        };
        if let Some(name) = counter_of(request, answer) {
            add(&name, 1);
        }
        match answer {
            Ok(Answer::Lookup(found)) => add("hit_tokens", u64::from(found.hit_pages) * 16),
            Ok(Answer::Store(stored)) => {
                add("present_pages", stored.present_pages.into());
                add("failed_pages", stored.failed_pages.into());
            }
            _ => {}
        }
    }
    expected.retain(|_, value| *value > 0);
    let leader = &world.leader;
    let mut counted = BTreeMap::<String, u64>::new();
    for (name, value) in leader.counters().filter(|(_, value)| *value > 0) {
        let of_requests = ["lookups", "hit_tokens", "present_pages", "failed_pages"]
            .contains(&name)
            || name.starts_with("loads_")
            || name.starts_with("stores_")
            || (name.starts_with("refused_") && name != "refused_pages");
        let name = if name == "stores_cancelled" {
            "stores_failed"
        } else {
            name
        };
        if of_requests {
            *counted.entry(name.to_owned()).or_default() += value;
        }
    }
    assert_eq!(counted, expected);
    let by_tier_and_group: u64 = leader.hit_tokens().values().sum();
    assert_eq!(by_tier_and_group, leader.counts().hit_tokens);
    let parked = leader.parked_requests();
    assert_eq!(leader.open_requests() + parked, open[0]);
    assert_eq!(
        leader.open_loads() + leader.open_stores() + parked,
        open[1] + open[2]
    );
}

#[test]
fn the_counters_match_the_decisions() {
    let mut world = World::new();
    look_up(&mut world, 0, 12);
    assert_eq!(store_from(&mut world, 0, 0, 12), stored(12, 0));
    let mut expected = BTreeMap::from([
        ("lookups", 1),
        ("lookup_pages", 12),
        ("published_pages", 12),
        ("stores_done", 1),
        // A block of 8 and one of 4, on three ranks, 64 bytes each.
        ("blocks_stored", 2),
        ("gathered_bytes", 384),
        ("gather_us", 6),
    ]);
    assert_eq!(counted(&world), expected);

    look_up(&mut world, 1, 14);
    world.take(Step::Load { engine: 0, slot: 1 });
    let transfer = *world.open.keys().next().expect("a copy");
    (0..RANKS).for_each(|rank| world.report(transfer, rank, true, EPOCH));
    expected.extend([
        ("lookups", 2),
        ("lookup_pages", 26),
        ("hit_pages", 12),
        ("hit_tokens", 12 * 16),
        ("loads_done", 1),
        ("blocks_loaded", 2),
        ("loaded_pages", 12),
        ("scattered_bytes", 192),
        ("scatter_us", 3),
    ]);
    assert_eq!(counted(&world), expected);

    // The last block grows by two pages, and one rank fails.
    world.request(
        0,
        Request::Store {
            slot: SlotId(1),
            parts: vec![Part::new(GroupId(0), 12, PageList::run(1, 2))],
            more: None,
            after: RequestId(0),
        },
    );
    let transfer = *world.open.keys().next().expect("a copy");
    (0..RANKS).for_each(|rank| world.report(transfer, rank, rank != 1, EPOCH));
    expected.extend([
        ("blocks_grown", 1),
        ("failed_copies", 1),
        ("stores_failed", 1),
        ("failed_pages", 2),
        ("gathered_bytes", 576),
        ("gather_us", 9),
    ]);
    assert_eq!(counted(&world), expected);

    // The store is repeated, and misses its deadline.
    world.request(
        0,
        Request::Store {
            slot: SlotId(1),
            parts: vec![Part::new(GroupId(0), 12, PageList::run(1, 2))],
            more: None,
            after: RequestId(0),
        },
    );
    let pool = world.leader.pool().expect("a pool");
    let states = |pool: &kvferry_core::Pool| {
        let named = pool.page_states().by_name();
        named
            .into_iter()
            .filter(|(_, pages)| *pages > 0)
            .collect::<BTreeMap<_, _>>()
    };
    let free = pool.capacity_pages() - 14;
    let now = BTreeMap::from([("ready", 12), ("filling", 2), ("free", free)]);
    assert_eq!(states(pool), now);
    let awaited: Vec<_> = world.leader.awaited().collect();
    let transfer = *world.open.keys().next().expect("a copy");
    let everyone = (0..RANKS).map(|rank| worker(0, rank)).collect();
    assert_eq!(awaited, [(transfer, &everyone)]);
    world.take(Step::Wait(6));
    let pool = world.leader.pool().expect("a pool");
    let now = BTreeMap::from([("ready", 12), ("quarantined", 2), ("free", free)]);
    assert_eq!(states(pool), now);
    (0..RANKS).for_each(|rank| world.report(transfer, rank, true, EPOCH));
    expected.extend([
        ("blocks_grown", 2),
        ("failed_copies", 2),
        ("late_copies", 1),
        ("stores_failed", 2),
        ("failed_pages", 4),
        ("store_us", 6_000_000),
    ]);
    expected.extend([("gathered_bytes", 768), ("gather_us", 12)]);
    assert_eq!(counted(&world), expected);
}

#[test]
fn stored_pages_are_counted_as_present() {
    let mut world = World::new();
    look_up(&mut world, 0, 12);
    assert_eq!(store_from(&mut world, 0, 0, 10), stored(10, 0));
    assert_eq!(store_from(&mut world, 0, 0, 10), stored(0, 10));
    assert_eq!(store_from(&mut world, 0, 4, 8), stored(2, 6));
}

#[test]
fn a_store_may_begin_after_missing_pages() {
    let mut world = World::new();
    look_up(&mut world, 0, 12);
    assert_eq!(store_from(&mut world, 0, 5, 7), stored(7, 0));
    let pool = world.leader.pool().expect("a pool");
    assert_eq!((pool.live_blocks(), pool.page_states().ready), (2, 7));
    assert_eq!(store_from(&mut world, 0, 0, 12), stored(5, 7));
}

#[test]
fn attached_workers_are_known_by_rank() {
    let mut world = World::without_workers();
    assert!(!world.leader.is_attached(worker(0, 0)));
    world.begin();
    for rank in 0..RANKS {
        assert!(world.leader.is_attached(worker(1, rank)));
    }
    world.event(LeaderEvent::WorkerLost(worker(1, 1)));
    let attached = |rank| world.leader.is_attached(worker(1, rank));
    assert_eq!([0, 1, 2].map(attached), [true, false, true]);
}

#[test]
fn a_repeated_attach_gets_the_same_answer_and_an_older_one_gets_none() {
    let mut leader = Leader::new(settings());
    let mut attach_with = |attach: u64| {
        let attached = AttachRequest {
            worker: worker(0, 0),
            ranks: RANKS,
            shards: RANKS,
            attach: AttachId(attach),
            depots: PerTier::host(AttachedDepot {
                depot: DepotId(0),
                epoch: Epoch(0),
            }),
        };
        let mut effects = Vec::new();
        leader.step(Time(0), LeaderEvent::Attach(attached), &mut effects);
        effects
    };
    let first = attach_with(4);
    assert!(matches!(
        first[..],
        [LeaderEffect::Admit {
            attach: AttachId(4),
            verdict: Ok(_),
            ..
        }]
    ));
    assert_eq!(attach_with(4), first);
    assert_eq!(attach_with(3), []);
    assert_ne!(attach_with(5), first);
}

/// An id stands for one request, also while loads and stores are parked.
#[test]
fn a_load_under_the_id_of_another_request_is_not_parked() {
    for load_first in [false, true] {
        let mut leader = World::without_workers().leader;
        let mut effects = Vec::new();
        let mut send = |leader: &mut Leader, request: Request| {
            let event = LeaderEvent::Request {
                engine: engine_id(0),
                id: RequestId(7),
                deadline: Time(5),
                request,
            };
            leader.step(Time(0), event, &mut effects);
        };
        let load = Request::Load {
            slot: SlotId(9),
            parts: vec![Part::new(GroupId(0), 0, PageList::run(0, 1))],
            after: RequestId(0),
        };
        let finish = Request::Finish { slot: SlotId(9) };
        let (first, second) = match load_first {
            true => (load, finish),
            false => (finish, load),
        };
        send(&mut leader, first);
        send(&mut leader, second);
        assert_eq!(leader.parked_requests(), usize::from(load_first));
        for engine in 0..2 {
            for rank in 0..RANKS {
                let dead = LeaderEvent::WorkerDead(worker(engine, rank));
                leader.step(Time(0), dead, &mut effects);
            }
        }
        let answers: Vec<_> = effects
            .iter()
            .map(|effect| match effect {
                LeaderEffect::Answer { answer, .. } => answer.clone(),
                other => unreachable!("{other:?} instead of an answer"),
            })
            .collect();
        assert_eq!(answers[0], Ok(Answer::Finish));
        match load_first {
            true => assert_eq!(answers.len(), 1, "the answer to both"),
            // The load is not answered as the finish was.
            false => assert!(
                matches!(&answers[1..], [Err(Refusal::Invalid { value, .. })] if value.starts_with("7,")),
                "{answers:?}"
            ),
        }
        assert_eq!((leader.open_requests(), leader.parked_requests()), (0, 0));
        leader.check().expect("the second count agrees");
    }
}

#[test]
fn no_more_requests_are_parked_than_the_limit() {
    let mut leader = World::without_workers().leader;
    let mut effects = Vec::new();
    for id in 1..=OPEN_REQUESTS_MAX as u64 + 2 {
        let load = Request::Load {
            slot: SlotId(9),
            parts: vec![Part::new(GroupId(0), 0, PageList::run(0, 1))],
            after: RequestId(0),
        };
        let send_request = LeaderEvent::Request {
            engine: engine_id(0),
            id: RequestId(id),
            deadline: Time(5),
            request: load,
        };
        leader.step(Time(0), send_request, &mut effects);
    }
    let crowded = effects.drain(..).map(|effect| match effect {
        LeaderEffect::Answer { id, answer, .. } => (id.0, answer),
        other => unreachable!("{other:?} instead of an answer"),
    });
    let max = OPEN_REQUESTS_MAX as u64;
    let refusal = || Err(Refusal::Crowded { max });
    let crowded: Vec<_> = crowded.collect();
    assert_eq!(crowded, [(max + 1, refusal()), (max + 2, refusal())]);
    for engine in 0..2 {
        for rank in 0..RANKS {
            let dead = LeaderEvent::WorkerDead(worker(engine, rank));
            leader.step(Time(0), dead, &mut effects);
        }
    }
    let refused = effects.iter().filter(|effect| {
        matches!(
            effect,
            LeaderEffect::Answer {
                answer: Err(Refusal::UnknownSlot(SlotId(9))),
                ..
            }
        )
    });
    assert_eq!(
        (refused.count(), effects.len()),
        (OPEN_REQUESTS_MAX, OPEN_REQUESTS_MAX)
    );
}

#[test]
fn attached_workers_and_page_tokens_are_reported() {
    let mut world = World::without_workers();
    let reported = |world: &World| {
        (
            world.leader.attached_workers(),
            world.leader.engine_page_tokens(),
        )
    };
    assert_eq!(reported(&world), (0, 0));
    world.begin();
    assert_eq!(reported(&world), (2 * u32::from(RANKS), 16));
    let lookup = Request::Lookup {
        slot: SlotId(0),
        namespace: vec![7],
        hashes: sequence(0, 9),
        have_pages: 5,
        limit_pages: None,
    };
    world.request(0, lookup);
    let expected = [("lookups", 1), ("lookup_pages", 9), ("device_pages", 5)];
    assert_eq!(counted(&world), BTreeMap::from(expected));
}

#[test]
fn a_rank_out_of_range_is_refused() {
    for (engine, rank) in [(0, RANKS), (2, 0)] {
        let mut leader = Leader::new(settings());
        let attached = AttachRequest {
            worker: worker(engine, rank),
            ranks: RANKS,
            shards: RANKS,
            attach: AttachId(1),
            depots: PerTier::host(AttachedDepot {
                depot: DepotId(0),
                epoch: Epoch(0),
            }),
        };
        let mut effects = Vec::new();
        leader.step(Time(0), LeaderEvent::Attach(attached), &mut effects);
        let [LeaderEffect::Admit { verdict, .. }] = &effects[..] else {
            panic!("{effects:?}");
        };
        let refused = matches!(verdict, Err(Refusal::NoSuchWorker { .. }));
        assert!(refused, "{verdict:?}");
    }
}

#[test]
fn a_load_of_a_part_leaves_the_rest_held() {
    let mut world = World::new();
    look_up(&mut world, 0, 20);
    assert_eq!(store_from(&mut world, 0, 0, 20), stored(20, 0));
    let pins = |world: &World| world.leader.pool().expect("a pool").pins();
    look_up(&mut world, 1, 20);
    assert_eq!(pins(&world), 3);
    let load = |first_page| Request::Load {
        slot: SlotId(1),
        parts: vec![Part::new(GroupId(0), first_page, PageList::run(0, 8))],
        after: RequestId(0),
    };
    for (first_page, left) in [(0, 2), (8, 1)] {
        world.request(0, load(first_page));
        assert_eq!(pins(&world), left + 1, "the lease, and what is left");
        let transfer = *world.open.keys().next().expect("a copy");
        (0..RANKS).for_each(|rank| world.report(transfer, rank, true, EPOCH));
        assert_eq!(pins(&world), left);
    }
}

#[test]
fn room_for_a_tail_is_never_made_at_the_cost_of_its_root() {
    let mut world = World::new();
    look_up(&mut world, 0, 16);
    look_up(&mut world, 1, 16);
    assert_eq!(store_from(&mut world, 1, 0, 8), stored(8, 0));
    // The other pages of the arena are younger.
    for slot in 2..9 {
        let pages = if slot == 8 { 4 } else { 8 };
        let lookup = Request::Lookup {
            slot: SlotId(slot),
            namespace: vec![100 + slot as u8],
            hashes: sequence(0, pages),
            have_pages: 0,
            limit_pages: None,
        };
        world.request(0, lookup);
        assert_eq!(
            store_from(&mut world, slot, 0, pages as u32),
            stored(pages as u32, 0)
        );
    }
    let states = world.leader.pool().expect("a pool").page_states();
    assert_eq!((states.free, states.ready), (0, 60));
    assert_eq!(store_from(&mut world, 0, 0, 16), stored(8, 8));
    look_up(&mut world, 9, 16);
    let found = world.requests[&(0, RequestId(world.next_id))].1.clone();
    let all = Answer::Lookup(LookupAnswer {
        hit_pages: 16,
        ..LookupAnswer::default()
    });
    assert_eq!(found, Some(Ok(all)));
}

#[test]
fn pages_without_room_and_split_runs_are_counted() {
    let mut world = World::new();
    // Lookups hold 56 of 60 pages.
    for slot in 0..7 {
        let lookup = |slot: u64| Request::Lookup {
            slot: SlotId(slot),
            namespace: vec![slot as u8 % 10],
            hashes: sequence(0, 8),
            have_pages: 0,
            limit_pages: None,
        };
        world.request(0, lookup(slot));
        assert_eq!(store_from(&mut world, slot, 0, 8), stored(8, 0));
        world.request(0, lookup(slot + 10));
    }
    let lookup = Request::Lookup {
        slot: SlotId(9),
        namespace: vec![9],
        hashes: sequence(0, 7),
        have_pages: 0,
        limit_pages: None,
    };
    world.request(0, lookup);
    let refused = Answer::Store(StoreAnswer {
        stored_pages: 4,
        present_pages: 0,
        refused_pages: 3,
        failed_pages: 0,
    });
    assert_eq!(store_from(&mut world, 9, 0, 7), Some(Ok(refused)));
    let counts = counted(&world);
    let count = |name| counts.get(name).copied().unwrap_or(0);
    assert_eq!((count("blocks_refused"), count("refused_pages")), (1, 3));
    assert_eq!((count("blocks_stored"), count("blocks_split")), (8, 0));
    assert_eq!(count("blocks_evicted"), 0);
}

/// Where host memory evicts by priority, the pages of a part with a low one are evicted before older ones.
#[test]
fn pages_are_evicted_by_the_priority_of_the_part_that_stored_them() {
    let mut world = World::without_workers();
    let mut settings = settings();
    let policy = "eviction=priority".parse().expect("a policy");
    settings.tier_policies.insert(TierId::Host, policy);
    world.leader = Leader::new(settings);
    for engine in 0..2 {
        world.event(LeaderEvent::EngineOpened(engine_id(engine)));
    }
    world.begin();
    let store = |world: &mut World, name: u8, priority: u8| {
        look_up_named(world, name);
        world.request(
            0,
            Request::Store {
                slot: SlotId(name.into()),
                parts: vec![Part {
                    priority,
                    ..Part::new(GroupId(0), 0, PageList::run(0, 8))
                }],
                more: None,
                after: RequestId(0),
            },
        );
        let open: Vec<TransferId> = world.open.keys().copied().collect();
        for transfer in open {
            (0..RANKS).for_each(|rank| world.report(transfer, rank, true, EPOCH));
        }
    };
    // 60 pages of host memory: seven sequences of 8 pages fit, and the eighth evicts one.
    store(&mut world, 10, 5);
    store(&mut world, 12, 1);
    for name in 7..12 {
        store(&mut world, 2 * name, 4);
    }
    let is_found = |world: &mut World, name| look_up_named(world, name) == 8;
    store(&mut world, 30, 7);
    assert!(!is_found(&mut world, 12), "the lowest priority");
    assert!(is_found(&mut world, 10), "the oldest, of a higher priority");
    // The last store that names a page sets its priority anew.
    store(&mut world, 10, 0);
    store(&mut world, 32, 7);
    assert!(!is_found(&mut world, 10));
    // Priorities that do not exist are refused by field.
    look_up_named(&mut world, 40);
    let part = Part {
        priority: PRIORITIES,
        ..Part::new(GroupId(0), 0, PageList::run(0, 8))
    };
    world.request(
        0,
        Request::Store {
            slot: SlotId(40),
            parts: vec![part],
            more: None,
            after: RequestId(0),
        },
    );
    let (_, refused) = &world.requests[&(0, RequestId(world.next_id))];
    let field = match refused {
        Some(Err(Refusal::Invalid { field, .. })) => *field,
        other => unreachable!("{other:?}"),
    };
    assert_eq!(field, "parts.priority");
}

/// Looks up a sequence of 8 pages in a slot of its own. Returns the number of pages found.
fn look_up_named(world: &mut World, name: u8) -> u32 {
    let lookup = Request::Lookup {
        slot: SlotId(name.into()),
        namespace: vec![7],
        hashes: sequence(name, 8),
        have_pages: 0,
        limit_pages: None,
    };
    world.request(0, lookup);
    let found = match &world.requests[&(0, RequestId(world.next_id))].1 {
        Some(Ok(Answer::Lookup(found))) => found.hit_pages,
        other => unreachable!("{other:?}"),
    };
    world.request(
        0,
        Request::Finish {
            slot: SlotId(name.into()),
        },
    );
    let lookup = Request::Lookup {
        slot: SlotId(name.into()),
        namespace: vec![7],
        hashes: sequence(name, 8),
        have_pages: 8,
        limit_pages: None,
    };
    world.request(0, lookup);
    found
}
