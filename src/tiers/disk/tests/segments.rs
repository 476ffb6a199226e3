//! The creation of segments: on slow disks, and on disks without room for them.

use std::sync::mpsc;
use std::time::Duration;

use super::super::DiskTier;
use super::super::format::{Geometry, SetKey, segment_name};
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
    world.set().segment(0, 1).expect("created");
    world.tier = None;
    world.disks[0].cut_file(&segment_name(1));
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

#[test]
fn a_set_that_was_made_for_a_much_larger_cap_gets_segments_that_fit() {
    for segments in 0..2 {
        let mut world = World::new(2, 2 << 30);
        world.start(key(1)).expect("fresh disks");
        if segments > 0 {
            let record = world.record(0, (0, 10), 1);
            world.store(&record).expect("stored");
        }
        world.tier().close().expect("closed");
        world.tier = None;
        world.cap = 8 << 20;
        for _ in 0..2 {
            world.start(key(1)).expect("opened");
            let capacity = world.set().capacity_pages();
            assert!(capacity > 0 && capacity == world.tier().capacity_pages(&key(1)));
            world.tier = None;
        }
        world.start(key(1)).expect("opened");
        assert!(world.served().is_empty());
        let record = world.record(0, (0, 10), 1);
        world.store(&record).expect("stored");
        assert!(world.disks.iter().all(|disk| disk.used() <= 4 << 20));
    }
}

#[test]
fn sets_of_other_layouts_make_room_on_a_disk_that_is_smaller_than_the_cap() {
    let mut world = World::new(1, 64 << 20);
    for layout in 1..4 {
        world.start(key(layout)).expect("opened");
        let record = world.record(0, (0, 10), 1);
        world.store(&record).expect("stored");
        world.tier().close().expect("closed");
        world.tier = None;
    }
    world.start(key(4)).expect("a new set");
    let segment = world.set().geometry().segment_bytes();
    let used = world.disks[0].used();
    assert!(used + 4 * segment < 60 << 20, "the cap has room");
    world.disks[0].set_room(Some(0));
    let set = world.set();
    for number in 0..3 {
        set.segment(0, number).expect("a closed set makes room");
    }
    let error = set.segment(0, 3).expect_err("no closed set is left");
    assert_eq!(error.kind(), std::io::ErrorKind::StorageFull);
    let used = world.tier().used_bytes().expect("read");
    assert!(used < 4 * segment);
    for number in 0..3 {
        assert!(set.existing_segment(0, number).is_some());
    }
}

#[test]
fn a_set_of_another_layout_makes_room_for_a_segment_whose_creation_did_not_end() {
    let mut world = World::new(1, 64 << 20);
    for layout in 1..3 {
        world.start(key(layout)).expect("opened");
        let record = world.record(0, (0, 10), 1);
        world.store(&record).expect("stored");
        world.tier().flush().expect("flushed");
        world.tier = None;
    }
    world.start(key(2)).expect("opened");
    let served = world.served();
    assert_eq!(served.len(), 10);
    world.set().segment(0, 1).expect("created");
    world.tier = None;
    world.disks[0].cut_file(&segment_name(1));
    world.disks[0].set_room(Some(0));
    world.start(key(2)).expect("opened");
    assert_eq!(world.served(), served);
    let set = world.set();
    assert!(!set.is_short() && set.existing_segment(0, 1).is_some());
}

#[test]
fn files_of_shards_that_no_worker_has_count_and_make_room() {
    let mut world = World::new(1, 16 << 20);
    for shard in [1, 3, 2, 0] {
        world.start_shard(shard, key(1)).expect("opened");
        let record = world.record(0, (0, 10), 1);
        world.store(&record).expect("stored");
        world.tier().close().expect("closed");
        world.tier = None;
    }
    let found = |world: &World| -> Vec<u16> {
        let root = world.disks[0].root();
        let shards = (0..4).filter(|shard| {
            let directory = root.directory(&format!("shard-{shard}"));
            let directory = directory.expect("read").expect("exists");
            directory.names().expect("read").contains(&key(1).name())
        });
        shards.collect()
    };
    let take = |world: &World, cap: u64| {
        let directories = world.directories().expect("a tier").for_shards(2);
        let tier = DiskTier::take(&directories, 0, cap).expect("usable");
        tier.expect("not locked")
    };
    let tier = take(&world, 16 << 20);
    let used = tier.used_bytes().expect("read");
    tier.open(key(1), &|_, _| {}).expect("opened");
    assert_eq!(found(&world), [0, 1, 2, 3], "there is room");
    assert!(tier.used_bytes().expect("read") >= used / 2);
    drop(tier);
    let tier = take(&world, used / 4 * 3);
    tier.open(key(1), &|_, _| {}).expect("opened");
    assert_eq!(found(&world), [0, 1, 3], "shards 1 and 3 are another's");
    assert!(tier.used_bytes().expect("read") <= used / 4 * 3);
}

#[test]
fn the_smallest_share_has_room_and_a_smaller_one_has_none() {
    for (page_bytes, ratio) in [(4096, 1), (100_000, 32), (3 << 20, 256)] {
        let key = SetKey {
            layout: [0; 16],
            page_bytes,
            ratio,
            shards: 1,
        };
        let pages = |share: u64| {
            let geometry = Geometry::new(&key, 2, share).expect("a valid key");
            geometry.pages(geometry.segments(share))
        };
        let share = Geometry::smallest_share(&key, 2).expect("a share");
        assert!(pages(share) > 0 && pages(share - 4096) == 0, "{share}");
    }
}
