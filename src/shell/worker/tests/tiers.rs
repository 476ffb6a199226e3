//! Disks that open, close and become smaller while a leader orders moves.

use super::*;
use kvferry_protocol::{TiersAnswer, TransferBody, TransferOrder};
use kvferry_types::{FragmentPair, PageList};

/// Orders the move of a page to a page of the disk.
fn order(world: &mut World, id: u64, page: u32) {
    let pair = FragmentPair {
        src: PageList::run(0, 1),
        dst: PageList::run(page, 1),
    };
    let order = TransferOrder {
        from: 2,
        to: 3,
        engine: None,
        request: 0,
        after: 0,
        group: 0,
        page_bytes: PAGE_BYTES,
        transfers: vec![TransferBody {
            id,
            pairs: vec![pair].into(),
            record: None,
        }],
    };
    world.order(id, Message::Transfer(order));
}

/// The disk has this many pages from now on.
fn change(world: &mut World, pages: u32) {
    world.process.disk_pages = pages;
    world.run(|shell, process| shell.tiers_changed(process));
}

fn answer(world: &mut World) {
    let (id, tiers) = world.process.tiers.last().cloned().expect("a statement");
    let answer = Message::TiersAnswer(TiersAnswer {
        number: tiers.number,
    });
    world.run(|shell, process| shell.leader_answered(process, id, Ok(answer)));
}

/// A worker with an engine, whose disk has opened since it was admitted.
fn open() -> World {
    let mut world = World::attached();
    world.process.disk = Some(Vec::new());
    world.process.invalid = Some(Vec::new());
    change(&mut world, 64);
    let (_, stated) = world.process.tiers.last().expect("stated").clone();
    let pages: Vec<(u8, u32)> = stated.pages.iter().map(|of| (of.tier, of.pages)).collect();
    assert_eq!((stated.page_bytes, pages), (PAGE_BYTES, vec![(3, 64)]));
    answer(&mut world);
    world
}

/// The host ends such a move at once: the leader cannot know yet that the disk has fewer pages.
#[test]
fn a_move_that_was_ordered_before_a_disk_became_smaller_contradicts_nothing() {
    for left in [0, 32] {
        let mut world = open();
        order(&mut world, 1, 40);
        change(&mut world, left);
        order(&mut world, 2, 41);
        // The answer overtakes an order.
        answer(&mut world);
        order(&mut world, 3, 42);
        assert_eq!(world.process.started, [1, 2, 3].map(TransferId));
        assert_eq!(world.process.invalid, Some(Vec::new()));
    }
}

#[test]
fn a_move_to_pages_that_no_disk_has_had_is_refused_as_invalid() {
    let mut world = open();
    order(&mut world, 1, 64);
    change(&mut world, 96);
    order(&mut world, 2, 95);
    answer(&mut world);
    order(&mut world, 3, 96);
    assert_eq!(world.process.started, [TransferId(2)]);
    let invalid = vec![TransferId(1), TransferId(3)];
    assert_eq!(world.process.invalid, Some(invalid));
}

#[test]
fn a_leader_without_statements_of_tiers_receives_the_memory_again() {
    let mut world = World::attached();
    world.process.disk = Some(Vec::new());
    change(&mut world, 64);
    let stated = world.process.memories.len();
    let (id, _) = world.process.tiers.last().cloned().expect("a statement");
    let unknown = ErrorBody::new(ErrorCode::UnknownKind, "tiers is unknown");
    world.run(|shell, process| shell.leader_answered(process, id, Err(unknown)));
    assert_eq!(world.process.memories.len(), stated + 1);
    let (_, again) = world.process.memories.last().expect("stated");
    let memory = again.memory.as_ref().expect("an engine's");
    let disk = memory.arena_pages.iter().find(|of| of.tier == 3);
    assert_eq!(disk.map(|of| of.pages), Some(64));
}
