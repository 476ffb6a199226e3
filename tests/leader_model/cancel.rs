//! An engine cancels its stores.

use kvferry_core::CANCELS_MAX;
use kvferry_types::Part;

use super::cases::{answer, store};
use super::*;

fn cancel(world: &mut World, engine: u8, slot: Option<u64>) -> RequestId {
    world.take(Step::CancelStores { engine, slot });
    RequestId(world.next_id)
}

fn failed_pages(reply: Option<Reply>) -> u32 {
    match reply {
        Some(Ok(Answer::Store(StoreAnswer { failed_pages, .. }))) => failed_pages,
        other => unreachable!("{other:?}"),
    }
}

fn transfers(world: &World) -> Vec<TransferId> {
    world.open.keys().copied().collect()
}

#[test]
fn cancelled_stores_are_stopped_and_answered_once_nothing_of_them_is_read() {
    let mut world = World::new();
    let stores = [store(&mut world, 0, 0, 7, 8), store(&mut world, 0, 1, 8, 8)];
    let other = store(&mut world, 1, 0, 9, 8);
    let open = transfers(&world);
    let requested = cancel(&mut world, 0, None);
    assert_eq!(world.cancelled, BTreeSet::from([open[0], open[1]]));
    for transfer in &open[..2] {
        for rank in 0..RANKS {
            assert_eq!(
                answer(&world, 0, requested),
                None,
                "rank {rank} still reads"
            );
            world.report(*transfer, rank, false, EPOCH);
        }
    }
    for id in stores {
        assert_eq!(failed_pages(answer(&world, 0, id)), 8);
    }
    assert_eq!(
        answer(&world, 0, requested),
        Some(Ok(Answer::CancelStores(CancelStoresAnswer { stores: 2 })))
    );
    assert_eq!(answer(&world, 1, other), None, "the other engine's goes on");
    (0..RANKS).for_each(|rank| world.report(open[2], rank, true, EPOCH));
    assert_eq!(failed_pages(answer(&world, 1, other)), 0);
    let states = world.leader.pool().expect("a pool").page_states();
    assert_eq!(
        (states.ready, states.filling),
        (8, 0),
        "their pages are free"
    );
}

#[test]
fn only_the_stores_of_a_slot_are_cancelled_where_one_is_named() {
    let mut world = World::new();
    store(&mut world, 0, 0, 7, 8);
    store(&mut world, 0, 1, 8, 8);
    let open = transfers(&world);
    cancel(&mut world, 0, Some(1));
    assert_eq!(world.cancelled, BTreeSet::from([open[1]]));
    // The cancel also works after the request has finished.
    world.take(Step::Finish { engine: 0, slot: 0 });
    cancel(&mut world, 0, Some(0));
    assert_eq!(world.cancelled, BTreeSet::from([open[0], open[1]]));
}

#[test]
fn a_store_that_waits_for_anothers_copy_is_answered_at_once_and_that_copy_continues() {
    let mut world = World::new();
    let first = store(&mut world, 0, 0, 7, 8);
    let second = store(&mut world, 1, 0, 7, 8);
    let requested = cancel(&mut world, 1, None);
    assert_eq!(failed_pages(answer(&world, 1, second)), 8);
    assert_eq!(
        answer(&world, 1, requested),
        Some(Ok(Answer::CancelStores(CancelStoresAnswer { stores: 1 })))
    );
    assert!(world.cancelled.is_empty());
    let transfer = transfers(&world)[0];
    (0..RANKS).for_each(|rank| world.report(transfer, rank, true, EPOCH));
    assert_eq!(failed_pages(answer(&world, 0, first)), 0);
}

#[test]
fn pages_of_a_cancelled_store_can_be_stored_again() {
    let mut world = World::new();
    store(&mut world, 0, 0, 7, 8);
    let transfer = transfers(&world)[0];
    cancel(&mut world, 0, None);
    (0..RANKS).for_each(|rank| world.report(transfer, rank, false, EPOCH));
    let again = store(&mut world, 0, 0, 7, 8);
    let transfer = transfers(&world)[0];
    (0..RANKS).for_each(|rank| world.report(transfer, rank, true, EPOCH));
    assert_eq!(failed_pages(answer(&world, 0, again)), 0);
}

#[test]
fn a_cancel_without_running_stores_is_answered_at_once() {
    let mut world = World::new();
    let requested = cancel(&mut world, 0, None);
    assert_eq!(
        answer(&world, 0, requested),
        Some(Ok(Answer::CancelStores(CancelStoresAnswer { stores: 0 })))
    );
}

#[test]
fn a_cancel_that_a_worker_does_not_obey_is_answered_by_its_deadline() {
    let mut world = World::new();
    world.request(
        0,
        Request::Lookup {
            slot: SlotId(0),
            namespace: vec![7],
            hashes: sequence(0, 8),
            have_pages: 0,
            limit_pages: None,
        },
    );
    world.take(Step::Store { engine: 0, slot: 0 });
    let stored = RequestId(world.next_id);
    let requested = cancel(&mut world, 0, None);
    world.take(Step::Wait(5));
    assert_eq!(
        answer(&world, 0, requested),
        Some(Err(Refusal::StillRead { stores: 1 }))
    );
    assert_eq!(
        answer(&world, 0, stored),
        None,
        "a worker may still read it"
    );
    let transfer = transfers(&world)[0];
    (0..RANKS).for_each(|rank| world.report(transfer, rank, false, EPOCH));
    assert_eq!(failed_pages(answer(&world, 0, stored)), 8);
}

#[test]
fn an_engine_whose_requests_are_all_stores_can_cancel_them_a_bounded_number_of_times() {
    let mut world = World::with_limit(1);
    store(&mut world, 0, 0, 7, 8);
    for _ in 0..CANCELS_MAX {
        let requested = cancel(&mut world, 0, None);
        assert_eq!(answer(&world, 0, requested), None);
    }
    let requested = cancel(&mut world, 0, None);
    assert!(matches!(
        answer(&world, 0, requested),
        Some(Err(Refusal::Limit { .. }))
    ));
}

#[test]
fn nothing_is_cancelled_while_copies_of_an_older_leader_may_run() {
    let mut world = World::without_workers();
    let requested = cancel(&mut world, 0, None);
    assert!(matches!(
        answer(&world, 0, requested),
        Some(Err(Refusal::NotReady { .. }))
    ));
}

/// They may be the stores of the engine's next client.
#[test]
fn a_cancel_leaves_stores_with_higher_ids() {
    let mut world = World::new();
    let cancel = RequestId(world.next_id + 1);
    world.next_id += 2;
    store(&mut world, 0, 0, 7, 8);
    assert!(!world.open.is_empty(), "a copy is under way");
    send_cancel(&mut world, cancel);
    let none = Answer::CancelStores(CancelStoresAnswer { stores: 0 });
    assert_eq!(answer(&world, 0, cancel), Some(Ok(none)));
}

fn send_cancel(world: &mut World, id: RequestId) {
    let request = Request::CancelStores { slot: None };
    world.request_as(0, id, request);
}

/// From the answer to a cancel on, none of the stores' pages may be read.
#[test]
fn a_store_that_arrives_after_its_cancel_is_answered_without_a_copy() {
    let mut world = World::new();
    let lookup = Request::Lookup {
        slot: SlotId(0),
        namespace: vec![7],
        hashes: sequence(0, 8),
        have_pages: 0,
        limit_pages: None,
    };
    world.request(0, lookup);
    let (late, cancel) = (RequestId(world.next_id + 1), RequestId(world.next_id + 2));
    world.next_id += 2;
    send_cancel(&mut world, cancel);
    let request = Request::Store {
        slot: SlotId(0),
        parts: vec![Part::new(GroupId(0), 0, PageList::run(0, 8))],
        more: None,
        after: RequestId(0),
    };
    world.request_as(0, late, request.clone());
    assert_eq!(failed_pages(answer(&world, 0, late)), 8);
    assert!(world.open.is_empty(), "nothing is copied");
    world.request(0, request);
    assert_eq!(world.open.len(), 1, "a later store is carried out");
}
