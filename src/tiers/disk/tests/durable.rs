//! The number of durable pages, against what a flush has written and what a start finds.

use kvferry_types::PageRun;

use super::world::{World, key, sums};

const CAP: u64 = 16 << 20;

/// Flushes as the disk's thread does, until nothing waits for a flush.
fn flush_all(world: &World) {
    while world.set().is_dirty() {
        world.tier().flush().expect("flushed");
    }
}

#[test]
fn pages_that_are_listed_during_a_flush_and_written_by_it_count_as_durable() {
    let mut world = World::new(1, CAP);
    world.start(key(1)).expect("a fresh disk");
    for start in [0, 32] {
        let record = world.record(start, (0, 4), 7);
        world.store(&record).expect("stored");
    }
    let more = world.record(32, (4, 3), 7);
    let set = world.set();
    let silence = world.disks[0].silence();
    std::thread::scope(|scope| {
        let flush = scope.spawn(|| world.tier().flush());
        // The headers of the first block are being written, and then those of the second one.
        world.disks[0].await_write();
        let listed = set.table().list(&more, &sums(&set, &more));
        listed.expect("the block ends there");
        drop(silence);
        flush.join().expect("no panic").expect("flushed");
    });
    flush_all(&world);
    assert_eq!(set.listed(), (2, 11));
    assert_eq!(set.durable_pages(), 11);
}

#[test]
fn pages_whose_header_was_written_for_a_removal_are_flushed() {
    let mut world = World::new(1, CAP);
    world.start(key(1)).expect("a fresh disk");
    let record = world.record(0, (0, 8), 7);
    world.store(&record).expect("stored");
    flush_all(&world);
    // Pages of another block of the same region: nothing but the removal writes its headers.
    let record = world.record(8, (0, 4), 7);
    world.store(&record).expect("stored");
    let run = PageRun { start: 6, count: 2 };
    let set = world.set();
    set.unlist(run);
    set.write_removals(run).expect("written");
    assert!(set.is_dirty(), "the bytes of four pages are not durable");
    assert_eq!(set.durable_pages(), 6);
    flush_all(&world);
    assert_eq!(set.durable_pages(), 10);
    world.disks[0].crash(&mut fastrand::Rng::with_seed(1));
    world.tier = None;
    world.start(key(1)).expect("opened");
    assert_eq!(world.served().len(), 10);
    assert_eq!(world.set().durable_pages(), 10);
}
