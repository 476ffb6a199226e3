//! The creation of segments: on slow disks, and on disks without room for them.

use std::sync::mpsc;
use std::time::Duration;

use super::super::set::segment_name;
use super::world::{World, key};

#[test]
fn neither_the_capacity_nor_a_read_waits_for_the_creation_of_a_segment() {
    let mut world = World::new(1, 4 << 20);
    world.start(key(1)).expect("a fresh disk");
    let set = world.set();
    set.segment(0, 0).expect("created");
    let capacity = set.capacity_pages();
    let silence = world.disks[0].silence();
    std::thread::scope(|scope| {
        let creation = scope.spawn(|| set.segment(0, 1).map(drop));
        world.disks[0].await_write();
        let (answer, answers) = mpsc::channel();
        let set = &set;
        scope.spawn(move || {
            let exists = |segment| set.existing_segment(0, segment).is_some();
            let found = (set.capacity_pages(), exists(0), exists(1));
            let shrunk = set.shrink();
            answer.send((found, shrunk, set.capacity_pages())).ok();
        });
        let found = answers.recv_timeout(Duration::from_secs(10));
        drop(silence);
        creation.join().expect("no panic").expect("created");
        let one = set.geometry().pages(1);
        assert_eq!(found, Ok(((capacity, true, false), true, one)));
    });
    assert!(set.existing_segment(0, 1).is_some());
}

#[test]
fn a_segment_whose_creation_did_not_end_does_not_stop_a_start_on_a_full_disk() {
    let mut world = World::new(1, 4 << 20);
    world.start(key(1)).expect("a fresh disk");
    let record = world.record(0, (0, 10), 1);
    world.store(&record).expect("stored");
    world.tier().flush().expect("flushed");
    let (served, full) = (world.served(), world.set().capacity_pages());
    world.tier = None;
    world.disks[0].create_beside(&segment_name(0), &segment_name(1));
    world.disks[0].set_room(Some(0));
    world.start(key(1)).expect("opened");
    let set = world.set();
    assert_eq!(world.served(), served);
    assert!(set.is_short() && set.existing_segment(0, 1).is_none());
    assert_eq!(set.capacity_pages(), set.geometry().pages(1));
    world.disks[0].set_room(None);
    assert!(set.grow());
    assert_eq!(set.capacity_pages(), full);
}
