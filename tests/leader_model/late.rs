//! Requests that arrive after their slot was finished, or opened for another prompt.

use super::cases::{answer, store};
use super::*;
use kvferry_types::Part;

#[test]
fn a_request_under_the_id_of_an_answered_one_of_another_kind_is_refused_and_changes_nothing() {
    let mut world = World::new();
    let lookup = Request::Lookup {
        slot: SlotId(2),
        namespace: vec![7],
        hashes: sequence(0, 8),
        have_pages: 0,
        limit_pages: None,
    };
    let id = RequestId(world.next_id);
    world.next_id += 1;
    world.request_as(0, id, lookup.clone());
    let found = answer(&world, 0, id);
    assert!(matches!(found, Some(Ok(Answer::Lookup(_)))), "{found:?}");
    world.request_as(0, id, Request::Finish { slot: SlotId(2) });
    let refused = answer(&world, 0, id);
    let Some(Err(error @ Refusal::Invalid { .. })) = &refused else {
        panic!("{refused:?}");
    };
    assert!(error.to_string().contains(&id.0.to_string()), "{error}");
    assert_eq!(world.leader.slots(), 1, "the slot is open");
    // The same request again gets the answer that it had.
    world.request_as(0, id, lookup);
    assert_eq!(answer(&world, 0, id), found);
}

/// An engine may repeat a request after its slot was finished and opened again for another prompt.
#[test]
fn a_load_and_a_store_after_the_finish_of_their_slot_leave_its_next_request_alone() {
    let mut world = World::new();
    store(&mut world, 0, 0, 7, 8);
    while let Some(transfer) = world.open.keys().next().copied() {
        (0..RANKS).for_each(|rank| world.report(transfer, rank, true, EPOCH));
    }
    let late = world.next_id;
    world.next_id += 2;
    world.take(Step::Finish { engine: 0, slot: 0 });
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
    let pins = world.leader.pool().map(|pool| pool.pins());
    assert!(pins > Some(0), "{pins:?}");
    let pages = PageList::run(0, 4);
    let load = Request::Load {
        slot: SlotId(0),
        parts: vec![Part::new(GroupId(0), 0, pages.clone())],
        after: RequestId(0),
    };
    let store = Request::Store {
        slot: SlotId(0),
        parts: vec![Part::new(GroupId(0), 0, pages)],
        more: None,
        after: RequestId(0),
    };
    for (id, request) in [(late + 1, load), (late + 2, store)] {
        let id = RequestId(id);
        world.request_as(0, id, request);
        let older = Some(Err(Refusal::OlderThanSlot(SlotId(0))));
        assert_eq!(answer(&world, 0, id), older);
        assert_eq!(world.leader.pool().map(|pool| pool.pins()), pins);
        assert!(world.open.is_empty(), "nothing is copied");
    }
}

/// A leader that has started since the slot was finished knows of no finish.
#[test]
fn a_request_from_before_the_lookup_of_its_slot_is_refused() {
    let mut world = World::new();
    store(&mut world, 0, 0, 7, 8);
    while let Some(transfer) = world.open.keys().next().copied() {
        (0..RANKS).for_each(|rank| world.report(transfer, rank, true, EPOCH));
    }
    let (slot, late) = (SlotId(3), world.next_id);
    world.next_id += 3;
    let lookup = |namespace| Request::Lookup {
        slot,
        namespace: vec![namespace],
        hashes: sequence(0, 8),
        have_pages: 0,
        limit_pages: None,
    };
    world.request(0, lookup(7));
    let pins = world.leader.pool().map(|pool| pool.pins());
    assert!(pins > Some(0), "{pins:?}");
    let load = Request::Load {
        slot,
        parts: vec![Part::new(GroupId(0), 0, PageList::run(0, 4))],
        after: RequestId(0),
    };
    let store = Request::Store {
        slot,
        parts: vec![Part::new(GroupId(0), 0, PageList::run(0, 4))],
        more: None,
        after: RequestId(0),
    };
    for (id, request) in [(late + 1, lookup(9)), (late + 2, load), (late + 3, store)] {
        let id = RequestId(id);
        world.request_as(0, id, request);
        let older = Some(Err(Refusal::OlderThanSlot(slot)));
        assert_eq!(answer(&world, 0, id), older);
        assert_eq!(world.leader.pool().map(|pool| pool.pins()), pins);
        assert!(world.open.is_empty(), "nothing is copied");
    }
}

#[test]
fn a_finish_leaves_a_slot_that_a_later_lookup_has_opened() {
    let mut world = World::new();
    let late = RequestId(world.next_id + 1);
    world.next_id += 1;
    store(&mut world, 0, 0, 7, 8);
    let finish = Request::Finish { slot: SlotId(0) };
    world.request_as(0, late, finish);
    assert_eq!(answer(&world, 0, late), Some(Ok(Answer::Finish)));
    assert_eq!(world.leader.slots(), 1);
}
