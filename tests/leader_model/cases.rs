//! Single cases, each named by its test.

use super::*;
use kvferry_core::AttachedDepot;
use kvferry_types::Part;
use kvferry_types::PerTier;

/// Looks up and stores a sequence. The copies stay open.
pub fn store(world: &mut World, engine: u8, slot: u64, namespace: u8, pages: usize) -> RequestId {
    let hashes = sequence(0, pages);
    let lookup = Request::Lookup {
        slot: SlotId(slot),
        namespace: vec![namespace],
        hashes,
        have_pages: 0,
        limit_pages: None,
    };
    world.request(engine, lookup);
    world.take(Step::Store { engine, slot });
    RequestId(world.next_id)
}

pub fn answer(world: &World, engine: u8, id: RequestId) -> Option<Reply> {
    world
        .requests
        .get(&(engine, id))
        .and_then(|(_, answer)| answer.clone())
}

#[test]
fn two_stores_of_the_same_pages_copy_once_and_both_are_answered() {
    let mut world = World::new();
    let first = store(&mut world, 0, 0, 7, 8);
    let second = store(&mut world, 1, 0, 7, 8);
    assert_eq!(world.open.len(), 1, "one copy for both");
    let transfer = *world.open.keys().next().expect("a copy");
    for rank in 0..RANKS {
        assert_eq!(
            answer(&world, 0, first),
            None,
            "answered before rank {rank} ended"
        );
        world.report(transfer, rank, true, EPOCH);
    }
    let stored = |stored_pages, present_pages| {
        Some(Ok(Answer::Store(StoreAnswer {
            stored_pages,
            present_pages,
            refused_pages: 0,
            failed_pages: 0,
        })))
    };
    assert_eq!(answer(&world, 0, first), stored(8, 0));
    assert_eq!(answer(&world, 1, second), stored(0, 8));
}

#[test]
fn a_late_copy_is_cancelled_and_its_pages_stay_until_every_rank_has_ended() {
    let mut world = World::new();
    let id = store(&mut world, 0, 0, 7, 8);
    let transfer = *world.open.keys().next().expect("a copy");
    world.report(transfer, 0, true, EPOCH);
    world.take(Step::Wait(6));
    assert!(world.cancelled.contains(&transfer));
    let quarantined = |world: &World| {
        world
            .leader
            .pool()
            .expect("a pool")
            .page_states()
            .quarantined
    };
    assert_eq!(quarantined(&world), 8);
    world.report(transfer, 1, false, EPOCH);
    assert_eq!(
        (quarantined(&world), answer(&world, 0, id)),
        (8, None),
        "rank 2 may still write"
    );
    world.report(transfer, 2, false, EPOCH);
    assert_eq!(quarantined(&world), 0);
    let failed = Answer::Store(StoreAnswer {
        stored_pages: 0,
        present_pages: 0,
        refused_pages: 0,
        failed_pages: 8,
    });
    assert_eq!(answer(&world, 0, id), Some(Ok(failed)));
}

/// Starts a load of 8 stored pages. Returns its request and its copy.
fn loading(world: &mut World) -> (RequestId, TransferId) {
    store(world, 0, 0, 7, 8);
    let transfer = *world.open.keys().next().expect("a copy");
    (0..RANKS).for_each(|rank| world.report(transfer, rank, true, EPOCH));
    let hashes = sequence(0, 8);
    world.request(
        0,
        Request::Lookup {
            slot: SlotId(1),
            namespace: vec![7],
            hashes,
            have_pages: 0,
            limit_pages: None,
        },
    );
    world.take(Step::Load { engine: 0, slot: 1 });
    let transfer = *world.open.keys().next().expect("a copy");
    (RequestId(world.next_id), transfer)
}

#[test]
fn a_load_is_reported_failed_only_when_no_rank_writes_any_more() {
    let mut world = World::new();
    let (id, transfer) = loading(&mut world);
    world.report(transfer, 0, false, EPOCH);
    world.report(transfer, 1, true, EPOCH);
    assert_eq!(answer(&world, 0, id), None, "rank 2 may still write");
    world.report(transfer, 2, true, EPOCH);
    assert_eq!(answer(&world, 0, id), Some(Err(Refusal::CopyFailed(1))));
}

#[test]
fn a_partial_load_reports_the_pages_that_every_rank_has() {
    for (ends, pages) in [
        ([(false, 5), (true, 0), (false, 6)], 5),
        ([(true, 0), (false, 3), (false, 99)], 3),
        ([(true, 0), (true, 0), (true, 0)], 8),
        // All ranks report more pages than the load has.
        ([(false, 99), (false, 99), (false, 99)], 8),
    ] {
        let mut world = World::new();
        let (id, transfer) = loading(&mut world);
        for (rank, (complete, complete_pages)) in ends.into_iter().enumerate() {
            world.report_part(transfer, rank as u16, complete, complete_pages, EPOCH);
        }
        let load = Answer::Load(LoadAnswer { pages });
        assert_eq!(answer(&world, 0, id), Some(Ok(load)), "{ends:?}");
    }
}

#[test]
fn an_engine_that_stays_away_is_forgotten_with_all_it_held() {
    let mut world = World::new();
    store(&mut world, 0, 0, 7, 8);
    let transfer = *world.open.keys().next().expect("a copy");
    (0..RANKS).for_each(|rank| world.report(transfer, rank, true, EPOCH));
    let hashes = sequence(0, 8);
    world.request(
        0,
        Request::Lookup {
            slot: SlotId(1),
            namespace: vec![7],
            hashes,
            have_pages: 0,
            limit_pages: None,
        },
    );
    assert_eq!(world.leader.pool().expect("a pool").pins(), 1);
    world.event(LeaderEvent::EngineClosed(engine_id(0)));
    world.take(Step::Wait(11));
    assert_eq!(world.leader.pool().expect("a pool").pins(), 0);
    assert_eq!(world.leader.slots(), 0);
}

#[test]
fn loads_and_stores_are_refused_only_after_the_copies_of_an_older_leader_have_ended() {
    let mut world = World::without_workers();
    let (slot, destination) = (SlotId(9), PageList::run(0, 1));
    let (first_page, more, source) = (0, None, destination.clone());
    world.request(
        0,
        Request::Load {
            slot,
            parts: vec![Part::new(GroupId(0), first_page, destination)],
            after: RequestId(0),
        },
    );
    let load = RequestId(world.next_id);
    world.request(
        0,
        Request::Store {
            slot,
            parts: vec![Part::new(GroupId(0), first_page, source)],
            more,
            after: RequestId(0),
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
    world.event(LeaderEvent::WorkerDead(worker(1, 2)));
    let refused = Some(Err(Refusal::UnknownSlot(slot)));
    assert_eq!(answer(&world, 0, load), refused);
    assert_eq!(answer(&world, 0, store), refused);
}

#[test]
fn a_new_leader_that_was_paused_fences_no_worker_before_it_has_checked_again() {
    let mut leader = Leader::new(settings());
    let mut effects = Vec::new();
    leader.step(
        Time(0),
        LeaderEvent::EngineOpened(engine_id(0)),
        &mut effects,
    );
    let late = Time(0) + settings().fence * 3;
    leader.step(late, LeaderEvent::Tick, &mut effects);
    assert!(
        !effects
            .iter()
            .any(|effect| matches!(effect, LeaderEffect::FenceWorker(_))),
        "{effects:?}"
    );
}

#[test]
fn workers_that_are_silent_within_the_fence_of_a_new_leader_are_fenced() {
    let fence = settings().fence;
    let mut leader = Leader::new(settings());
    let mut effects = Vec::new();
    let at = |seconds: u64| Time(0) + fence.mul_f64(seconds as f64);
    leader.step(at(1), LeaderEvent::EngineOpened(engine_id(0)), &mut effects);
    let spoke = AttachRequest {
        worker: worker(0, 0),
        ranks: RANKS,
        shards: RANKS,
        attach: AttachId(1),
        depots: PerTier::host(AttachedDepot {
            depot: DepotId(0),
            epoch: Epoch(0),
        }),
    };
    leader.step(at(1), LeaderEvent::Attach(spoke), &mut effects);
    let fenced = |effects: &mut Vec<LeaderEffect>| -> Vec<WorkerId> {
        effects
            .drain(..)
            .filter_map(|effect| match effect {
                LeaderEffect::FenceWorker(worker) => Some(worker),
                _ => None,
            })
            .collect()
    };
    assert_eq!(fenced(&mut effects), []);
    while let Some(next) = leader.next_timeout().filter(|next| *next < at(2)) {
        leader.step(next, LeaderEvent::Tick, &mut effects);
    }
    assert_eq!(fenced(&mut effects), []);
    assert_eq!(leader.next_timeout(), Some(at(2)));
    leader.step(at(2), LeaderEvent::Tick, &mut effects);
    let silent: Vec<WorkerId> = (0..2)
        .flat_map(|engine| (0..RANKS).map(move |rank| worker(engine, rank)))
        .filter(|silent| *silent != worker(0, 0))
        .collect();
    assert_eq!(fenced(&mut effects), silent);
    for dead in silent {
        leader.step(at(2), LeaderEvent::WorkerDead(dead), &mut effects);
    }
    leader.step(at(9), LeaderEvent::Tick, &mut effects);
    assert_eq!(fenced(&mut effects), []);
    assert_eq!(leader.next_timeout(), None);
}

fn reset(world: &mut World, scope: ResetScope) -> Option<Reply> {
    world.request(0, Request::Reset { scope, tier: None });
    answer(world, 0, RequestId(world.next_id))
}

fn found(world: &mut World, namespace: u8) -> u32 {
    let lookup = Request::Lookup {
        slot: SlotId(2),
        namespace: vec![namespace],
        hashes: sequence(0, 8),
        have_pages: 0,
        limit_pages: None,
    };
    world.request(1, lookup);
    let id = RequestId(world.next_id);
    world.take(Step::Finish { engine: 1, slot: 2 });
    let answer = answer(world, 1, id)
        .expect("an answer")
        .expect("no refusal");
    let Answer::Lookup(LookupAnswer { hit_pages, .. }) = answer else {
        unreachable!("a lookup's answer is one");
    };
    hit_pages
}

#[test]
fn a_reset_removes_the_named_pages_and_no_others() {
    let mut world = World::new();
    for (slot, namespace) in [(0, 7), (1, 8)] {
        store(&mut world, 0, slot, namespace, 8);
        let transfer = *world.open.keys().next().expect("a copy");
        (0..RANKS).for_each(|rank| world.report(transfer, rank, true, EPOCH));
    }
    let removed = |pages| {
        Some(Ok(Answer::Reset(ResetAnswer {
            pages,
            ..ResetAnswer::default()
        })))
    };
    assert_eq!(
        reset(&mut world, ResetScope::Namespace(vec![7])),
        removed(8)
    );
    assert_eq!((found(&mut world, 7), found(&mut world, 8)), (0, 8));
    let page = PageHashes::packed(16, sequence(0, 3).get(2).to_vec()).expect("one page");
    assert_eq!(
        reset(&mut world, ResetScope::Pages(vec![7], page.clone())),
        removed(0)
    );
    assert_eq!(
        reset(&mut world, ResetScope::Pages(vec![8], page)),
        removed(8)
    );
    assert_eq!(found(&mut world, 8), 0);
    assert_eq!(reset(&mut world, ResetScope::Everything), removed(0));
}

#[test]
fn a_reset_is_refused_while_pages_are_held_with_the_number_of_holders() {
    let mut world = World::new();
    store(&mut world, 0, 0, 7, 8);
    let transfer = *world.open.keys().next().expect("a copy");
    (0..RANKS).for_each(|rank| world.report(transfer, rank, true, EPOCH));
    for slot in [4, 5] {
        world.request(
            1,
            Request::Lookup {
                slot: SlotId(slot),
                namespace: vec![7],
                hashes: sequence(0, 8),
                have_pages: 0,
                limit_pages: None,
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
    store(&mut world, 1, 0, 8, 8);
    let transfers: Vec<TransferId> = world.open.keys().copied().collect();
    assert_eq!(transfers.len(), 2);
    assert_eq!(reset(&mut world, ResetScope::Everything), None);
    let id = RequestId(world.next_id);
    for transfer in transfers {
        assert!(world.cancelled.contains(&transfer));
        assert_eq!(
            answer(&world, 0, id),
            None,
            "{transfer} may still be listed"
        );
        (0..RANKS).for_each(|rank| world.report(transfer, rank, true, EPOCH));
    }
    assert_eq!(
        answer(&world, 0, id),
        Some(Ok(Answer::Reset(ResetAnswer {
            pages: 16,
            ..ResetAnswer::default()
        })))
    );
    let failed = Answer::Store(StoreAnswer {
        stored_pages: 0,
        present_pages: 0,
        refused_pages: 0,
        failed_pages: 8,
    });
    assert_eq!(answer(&world, 0, stored), Some(Ok(failed)));
    assert_eq!(found(&mut world, 7), 0);
}

#[test]
fn a_second_reset_waits_for_stores_that_the_first_one_stopped() {
    let mut world = World::new();
    store(&mut world, 0, 0, 7, 8);
    let transfer = *world.open.keys().next().expect("a copy");
    assert_eq!(reset(&mut world, ResetScope::Everything), None);
    let first = RequestId(world.next_id);
    assert_eq!(reset(&mut world, ResetScope::Everything), None);
    let second = RequestId(world.next_id);
    (0..RANKS).for_each(|rank| world.report(transfer, rank, true, EPOCH));
    let removed = |pages| {
        Some(Ok(Answer::Reset(ResetAnswer {
            pages,
            ..ResetAnswer::default()
        })))
    };
    assert_eq!(answer(&world, 0, first), removed(8));
    assert_eq!(answer(&world, 0, second), removed(0));
    assert_eq!(found(&mut world, 7), 0);
}

#[test]
fn one_request_too_many_is_refused_permanently_and_a_finish_never_is() {
    let mut world = World::with_limit(1);
    let first = store(&mut world, 0, 0, 7, 8);
    let transfer = *world.open.keys().next().expect("a copy");
    let second = store(&mut world, 0, 1, 8, 8);
    let limit = "stores of an engine under way";
    let refused = Some(Err(Refusal::Limit { limit, max: 1 }));
    assert_eq!(answer(&world, 0, second), refused);
    assert_eq!(world.leader.open_requests(), 1);
    world.take(Step::Finish { engine: 0, slot: 1 });
    let finish = RequestId(world.next_id);
    assert_eq!(answer(&world, 0, finish), Some(Ok(Answer::Finish)));
    (0..RANKS).for_each(|rank| world.report(transfer, rank, true, EPOCH));
    assert!(answer(&world, 0, first).is_some());
    let again = world.requests[&(0, second)].0.clone();
    world.send(0, second, again);
    assert!(
        world.open.is_empty(),
        "what was refused is not carried out when it comes again"
    );
    let third = store(&mut world, 0, 2, 8, 8);
    assert_eq!(answer(&world, 0, third), None, "there is room again");
}

#[test]
fn a_draining_leader_starts_no_copies_and_ends_running_ones() {
    let mut world = World::new();
    let first = store(&mut world, 0, 0, 7, 8);
    let transfer = *world.open.keys().next().expect("a copy");
    world.leader.drain();
    let second = store(&mut world, 0, 1, 7, 8);
    assert_eq!(answer(&world, 0, second), Some(Err(Refusal::Draining)));
    world.request(0, Request::Flush);
    let flush = RequestId(world.next_id);
    assert_ne!(answer(&world, 0, flush), Some(Err(Refusal::Draining)));
    world.take(Step::Retry(first.0 as usize - 1));
    assert_eq!(
        answer(&world, 0, first),
        None,
        "asked again, its copy still runs"
    );
    (0..RANKS).for_each(|rank| world.report(transfer, rank, true, EPOCH));
    assert!(matches!(
        answer(&world, 0, first),
        Some(Ok(Answer::Store(StoreAnswer { .. })))
    ));
}

#[test]
fn a_lookup_after_the_finish_of_its_slot_opens_nothing() {
    let mut world = World::new();
    world.next_id = 5;
    world.take(Step::Finish { engine: 0, slot: 1 });
    let late = Request::Lookup {
        slot: SlotId(1),
        namespace: vec![7],
        hashes: sequence(0, 8),
        have_pages: 0,
        limit_pages: None,
    };
    world
        .requests
        .insert((0, RequestId(3)), (late.clone(), None));
    world.send(0, RequestId(3), late);
    let older = Some(Err(Refusal::OlderThanSlot(SlotId(1))));
    assert_eq!(answer(&world, 0, RequestId(3)), older);
    assert_eq!(world.leader.slots(), 0);
}

#[test]
fn copies_for_an_absent_engine_are_not_forgotten() {
    let mut world = World::new();
    let id = store(&mut world, 0, 0, 7, 8);
    let transfer = *world.open.keys().next().expect("a copy");
    world.event(LeaderEvent::EngineClosed(engine_id(0)));
    world.now = world.now + Duration::from_secs(11);
    world.event(LeaderEvent::Tick);
    world.event(LeaderEvent::EngineOpened(engine_id(0)));
    let (request, _) = world.requests[&(0, id)].clone();
    world.send(0, id, request);
    assert_eq!(
        answer(&world, 0, id),
        None,
        "a worker may still read these pages"
    );
    (0..RANKS).for_each(|rank| world.report(transfer, rank, true, EPOCH));
    assert!(answer(&world, 0, id).is_some());
}

/// The leader's answer to an attach of the first replica's rank 2 with this memory.
fn verdict(world: &mut World, arena_pages: u32, page_bytes: u64) -> Result<TransferId, Refusal> {
    world.event(LeaderEvent::WorkerDead(worker(0, 2)));
    world.attaches += 1;
    let geometry = GroupGeometry {
        page_bytes,
        ..geometry()
    };
    let attached = LeaderEvent::arrival(
        AttachRequest {
            worker: worker(0, 2),
            ranks: RANKS,
            shards: RANKS,
            attach: AttachId(world.attaches),
            depots: PerTier::host(AttachedDepot {
                depot: DepotId(2),
                epoch: Epoch(0),
            }),
        },
        WorkerMemory {
            engine: engine_id(0),
            geometry: geometry.into(),
            arena_pages: PerTier::host(arena_pages),
        },
    );
    let mut effects = Vec::new();
    for event in attached {
        world.leader.step(world.now, event, &mut effects);
    }
    admission(&effects)
}

#[test]
fn a_refused_worker_costs_no_page() {
    let mut world = World::new();
    store(&mut world, 0, 0, 7, 8);
    let transfer = *world.open.keys().next().expect("a copy");
    (0..RANKS).for_each(|rank| world.report(transfer, rank, true, EPOCH));
    let refused = verdict(&mut world, 50, 128);
    assert!(
        matches!(refused, Err(Refusal::RankDisagrees { .. })),
        "{refused:?}"
    );
    assert_eq!(found(&mut world, 7), 8);
}

#[test]
fn a_smaller_depot_is_accepted_only_when_nothing_is_held() {
    let mut world = World::new();
    store(&mut world, 1, 0, 7, 8);
    let refused = verdict(&mut world, 50, 64);
    let least_pages = 60;
    let arena_pages = 50;
    let worker = worker(0, 2);
    let too_small = Refusal::DepotTooSmall {
        worker,
        arena_pages,
        least_pages,
    };
    assert_eq!(refused, Err(too_small));
    let transfer = *world.open.keys().next().expect("a copy");
    (0..RANKS).for_each(|rank| world.report(transfer, rank, true, EPOCH));
    assert!(verdict(&mut world, 50, 64).is_ok());
    assert!(
        world
            .leader
            .pool()
            .is_none_or(|pool| pool.capacity_pages() == 50)
    );
}

#[test]
fn a_smaller_depot_is_refused_while_a_lookup_holds_pages() {
    let mut world = World::new();
    store(&mut world, 1, 0, 7, 8);
    let transfer = *world.open.keys().next().expect("a copy");
    (0..RANKS).for_each(|rank| world.report(transfer, rank, true, EPOCH));
    let lookup = Request::Lookup {
        slot: SlotId(5),
        namespace: vec![7],
        hashes: sequence(0, 8),
        have_pages: 0,
        limit_pages: None,
    };
    world.request(1, lookup);
    assert_eq!(world.leader.pool().expect("a pool").pins(), 1);
    assert_eq!(world.leader.copies_under_way(), 0);
    let refused = verdict(&mut world, 50, 64);
    assert!(
        matches!(refused, Err(Refusal::DepotTooSmall { .. })),
        "{refused:?}"
    );
    assert_eq!(verdict(&mut world, 60, 64).map(|_| ()), Ok(()));
}

#[test]
fn another_depot_holds_nothing_and_the_same_one_all_of_it() {
    let mut world = World::new();
    store(&mut world, 0, 0, 7, 8);
    let transfer = *world.open.keys().next().expect("a copy");
    (0..RANKS).for_each(|rank| world.report(transfer, rank, true, EPOCH));
    for engine in 0..2 {
        world.die(engine, 1);
    }
    assert_eq!(found(&mut world, 7), 8);
    for engine in 0..2 {
        world.event(LeaderEvent::WorkerDead(worker(engine, 1)));
    }
    for engine in 0..2 {
        world.attaches += 1;
        let arrival = LeaderEvent::arrival(
            AttachRequest {
                worker: worker(engine, 1),
                ranks: RANKS,
                shards: RANKS,
                attach: AttachId(world.attaches),
                depots: PerTier::host(AttachedDepot {
                    depot: DepotId(70),
                    epoch: Epoch(0),
                }),
            },
            WorkerMemory {
                engine: engine_id(engine),
                geometry: geometry().into(),
                arena_pages: PerTier::host(60),
            },
        );
        for event in arrival {
            world.event(event);
        }
    }
    assert_eq!(found(&mut world, 7), 0);
}

#[test]
fn replicas_may_have_memory_of_different_sizes_and_ranks_may_not() {
    let mut world = World::without_workers();
    let mut attach = |engine: u8, rank: u16, device_pages: u32| {
        world.attaches += 1;
        let attached = LeaderEvent::arrival(
            AttachRequest {
                worker: worker(engine, rank),
                ranks: RANKS,
                shards: RANKS,
                attach: AttachId(world.attaches),
                depots: PerTier::host(AttachedDepot {
                    depot: DepotId(rank.into()),
                    epoch: Epoch(0),
                }),
            },
            WorkerMemory {
                engine: engine_id(engine),
                geometry: GroupGeometry {
                    device_pages,
                    ..geometry()
                }
                .into(),
                arena_pages: PerTier::host(60),
            },
        );
        let mut effects = Vec::new();
        for event in attached {
            world.leader.step(world.now, event, &mut effects);
        }
        admission(&effects).err().map(|refusal| match refusal {
            Refusal::RankDisagrees { field, value, .. } => (field, value),
            other => unreachable!("{other:?}"),
        })
    };
    assert_eq!(attach(0, 0, 64), None);
    assert_eq!(attach(1, 0, 32), None);
    assert_eq!(attach(0, 1, 32), Some(("device_pages", "32".to_owned())));
    assert_eq!(attach(0, 1, 64), None);
    assert_eq!(attach(1, 1, 32), None);
}

/// Ends all workers, then attaches their successors with memory of this content.
fn another_engine(world: &mut World, content: u8) {
    let places = (0..2).flat_map(|engine| (0..RANKS).map(move |rank| (engine, rank)));
    for (engine, rank) in places.clone() {
        world.event(LeaderEvent::WorkerDead(worker(engine, rank)));
    }
    for (engine, rank) in places {
        world.attaches += 1;
        let arrival = LeaderEvent::arrival(
            AttachRequest {
                worker: worker(engine, rank),
                ranks: RANKS,
                shards: RANKS,
                attach: AttachId(world.attaches),
                depots: PerTier::host(AttachedDepot {
                    depot: DepotId(rank.into()),
                    epoch: Epoch(0),
                }),
            },
            WorkerMemory {
                engine: engine_id(engine),
                geometry: of_content(content).into(),
                arena_pages: PerTier::host(60),
            },
        );
        for event in arrival {
            world.event(event);
        }
    }
}

/// Memory of equal shape whose content, a part of its fingerprint, differs.
fn of_content(content: u8) -> GroupGeometry {
    GroupGeometry {
        content_digest: [content; 16],
        layout_fingerprint: [content; 16],
        ..geometry()
    }
}

#[test]
fn an_engine_of_other_content_and_equal_shape_gets_no_hit() {
    let mut world = World::without_workers();
    another_engine(&mut world, 1);
    store(&mut world, 0, 0, 7, 8);
    let transfer = *world.open.keys().next().expect("a copy");
    (0..RANKS).for_each(|rank| world.report(transfer, rank, true, EPOCH));
    assert_eq!(found(&mut world, 7), 8);
    another_engine(&mut world, 2);
    assert_eq!(found(&mut world, 7), 0);
}

#[test]
fn ranks_of_other_content_are_refused_by_that_field() {
    let mut world = World::without_workers();
    another_engine(&mut world, 1);
    world.event(LeaderEvent::WorkerDead(worker(1, 2)));
    world.attaches += 1;
    let attached = LeaderEvent::arrival(
        AttachRequest {
            worker: worker(1, 2),
            ranks: RANKS,
            shards: RANKS,
            attach: AttachId(world.attaches),
            depots: PerTier::host(AttachedDepot {
                depot: DepotId(2),
                epoch: Epoch(0),
            }),
        },
        WorkerMemory {
            engine: engine_id(1),
            geometry: of_content(2).into(),
            arena_pages: PerTier::host(60),
        },
    );
    let mut effects = Vec::new();
    for event in attached {
        world.leader.step(world.now, event, &mut effects);
    }
    let refused = admission(&effects);
    let Err(Refusal::RankDisagrees { field, .. }) = refused else {
        unreachable!("{refused:?}");
    };
    assert_eq!(field, "content");
}
