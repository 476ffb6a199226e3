//! What is counted, and what is told about the state.

use super::*;

/// Asks for a sequence; returns the slot's request.
fn look_up(world: &mut World, slot: u64, pages: usize) {
    let lookup = Request::Lookup {
        slot: SlotId(slot),
        namespace: vec![7],
        hashes: sequence(0, pages),
        device_pages: 0,
    };
    world.ask(0, lookup);
}

fn store_from(world: &mut World, slot: u64, first_page: u32, pages: u32) -> Option<Reply> {
    let store = Request::Store {
        slot: SlotId(slot),
        first_page,
        more: None,
        source: PageList::run(1, pages),
    };
    world.ask(0, store);
    let id = RequestId(world.next_id);
    while let Some(op) = world.open.keys().next().copied() {
        (0..RANKS).for_each(|rank| world.report(op, rank, true, EPOCH));
    }
    world.asked[&(0, id)].1.clone()
}

fn stored(stored_pages: u32, present_pages: u32) -> Option<Reply> {
    Some(Ok(Answer::Store {
        stored_pages,
        present_pages,
        refused_pages: 0,
        failed_pages: 0,
    }))
}

/// The counters that are not zero.
fn counted(world: &World) -> BTreeMap<&'static str, u64> {
    let counters = world.leader.counters();
    counters.filter(|(_, count)| *count > 0).collect()
}

#[test]
fn what_is_counted_is_what_happened() {
    let mut world = World::new();
    look_up(&mut world, 0, 12);
    assert_eq!(store_from(&mut world, 0, 0, 12), stored(12, 0));
    let mut expected = BTreeMap::from([
        ("lookups", 1),
        ("lookup_pages", 12),
        ("published_pages", 12),
        // A block of 8 and one of 4, on three ranks, 64 bytes each.
        ("blocks_stored", 2),
        ("gathered_bytes", 384),
        ("gather_us", 6),
    ]);
    assert_eq!(counted(&world), expected);

    look_up(&mut world, 1, 14);
    world.take(Step::Load { engine: 0, slot: 1 });
    let op = *world.open.keys().next().expect("a copy");
    (0..RANKS).for_each(|rank| world.report(op, rank, true, EPOCH));
    expected.extend([
        ("lookups", 2),
        ("lookup_pages", 26),
        ("hit_pages", 12),
        ("blocks_loaded", 2),
        ("loaded_pages", 12),
        ("scattered_bytes", 192),
        ("scatter_us", 3),
    ]);
    assert_eq!(counted(&world), expected);

    // The last block grows by two pages, and one rank fails.
    world.ask(
        0,
        Request::Store {
            slot: SlotId(1),
            first_page: 12,
            more: None,
            source: PageList::run(1, 2),
        },
    );
    let op = *world.open.keys().next().expect("a copy");
    (0..RANKS).for_each(|rank| world.report(op, rank, rank != 1, EPOCH));
    expected.extend([
        ("blocks_grown", 1),
        ("failed_copies", 1),
        ("gathered_bytes", 576),
        ("gather_us", 9),
    ]);
    assert_eq!(counted(&world), expected);

    // Again, and too late.
    world.ask(
        0,
        Request::Store {
            slot: SlotId(1),
            first_page: 12,
            more: None,
            source: PageList::run(1, 2),
        },
    );
    let pool = world.leader.pool().expect("a pool");
    let states = |pool: &kvferry::core::Pool| {
        let named = pool.page_states().by_name();
        named
            .into_iter()
            .filter(|(_, pages)| *pages > 0)
            .collect::<BTreeMap<_, _>>()
    };
    let free = pool.capacity_pages() - 14;
    let now = BTreeMap::from([("ready", 12), ("filling", 2), ("free", free)]);
    assert_eq!(states(pool), now);
    let owed: Vec<_> = world.leader.owed().collect();
    let op = *world.open.keys().next().expect("a copy");
    let everyone = (0..RANKS).map(Rank).collect();
    assert_eq!(owed, [(op, Replica(0), everyone)]);
    world.take(Step::Wait(6));
    let pool = world.leader.pool().expect("a pool");
    let now = BTreeMap::from([("ready", 12), ("quarantined", 2), ("free", free)]);
    assert_eq!(states(pool), now);
    (0..RANKS).for_each(|rank| world.report(op, rank, true, EPOCH));
    expected.extend([
        ("blocks_grown", 2),
        ("failed_copies", 2),
        ("late_copies", 1),
    ]);
    expected.extend([("gathered_bytes", 768), ("gather_us", 12)]);
    assert_eq!(counted(&world), expected);
}

#[test]
fn pages_that_are_there_are_counted_as_present() {
    let mut world = World::new();
    look_up(&mut world, 0, 12);
    assert_eq!(store_from(&mut world, 0, 0, 10), stored(10, 0));
    assert_eq!(store_from(&mut world, 0, 0, 10), stored(0, 10));
    assert_eq!(store_from(&mut world, 0, 4, 8), stored(2, 6));
}

#[test]
fn a_store_may_begin_behind_pages_that_are_not_there() {
    let mut world = World::new();
    look_up(&mut world, 0, 12);
    assert_eq!(store_from(&mut world, 0, 5, 7), stored(7, 0));
    let pool = world.leader.pool().expect("a pool");
    assert_eq!((pool.live_blocks(), pool.page_states().ready), (2, 7));
    assert_eq!(store_from(&mut world, 0, 0, 12), stored(5, 7));
}

#[test]
fn who_has_attached_is_told() {
    let mut world = World::without_workers();
    assert!(!world.leader.is_attached(worker(0, 0)));
    world.begin();
    for rank in 0..RANKS {
        assert!(world.leader.is_attached(worker(1, rank)));
    }
    world.event(Event::WorkerLost(worker(1, 1)));
    let attached = |rank| world.leader.is_attached(worker(1, rank));
    assert_eq!([0, 1, 2].map(attached), [true, false, true]);
}

#[test]
fn an_attach_that_is_said_again_is_answered_alike_and_an_older_one_not_at_all() {
    let mut leader = Leader::new(settings());
    let mut say = |attach: u64| {
        let attached = Attached {
            worker: worker(0, 0),
            attach: AttachId(attach),
            depot: DepotId(0),
            memory: None,
        };
        let mut effects = Vec::new();
        leader.step(Time(0), Event::Attached(attached), &mut effects);
        effects
    };
    let first = say(4);
    assert!(matches!(
        first[..],
        [Effect::Admit {
            attach: AttachId(4),
            verdict: Ok(_),
            ..
        }]
    ));
    assert_eq!(say(4), first);
    assert_eq!(say(3), []);
    assert_ne!(say(5), first);
}

#[test]
fn no_more_wait_for_the_workers_of_an_older_leader_than_the_limit() {
    let mut leader = World::without_workers().leader;
    let mut effects = Vec::new();
    for id in 1..=PARKED_MAX as u64 + 2 {
        let load = Request::Load {
            slot: SlotId(9),
            first_page: 0,
            destination: PageList::run(0, 1),
        };
        let ask = Event::Request {
            engine: engine_id(0),
            id: RequestId(id),
            deadline: Time(5),
            request: load,
        };
        leader.step(Time(0), ask, &mut effects);
    }
    assert_eq!(effects, []);
    for engine in 0..2 {
        for rank in 0..RANKS {
            let dead = Event::WorkerDead(worker(engine, rank));
            leader.step(Time(0), dead, &mut effects);
        }
    }
    let refused = effects.iter().filter(|effect| {
        matches!(
            effect,
            Effect::Answer {
                answer: Err(Refusal::UnknownSlot(SlotId(9))),
                ..
            }
        )
    });
    assert_eq!((refused.count(), effects.len()), (PARKED_MAX, PARKED_MAX));
}
