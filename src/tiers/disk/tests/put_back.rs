//! Segments that were away, or older copies of them, that are put back: nothing of a reset comes back with them.

use kvferry_types::Stored;

use super::super::files::Files;
use super::super::format::segment_name;
use super::super::fsck::{FsckReport, check};
use super::sim_files::SimDisk;
use super::world::{World, key};

const CAP: u64 = 4 << 20;

/// The directory of the set.
fn directory(disk: &SimDisk) -> std::sync::Arc<dyn Files> {
    let shard = disk.root().directory("shard-0").expect("read");
    let set = shard.expect("a shard").directory(&key(1).name());
    set.expect("read").expect("a set")
}

fn remove(disk: &SimDisk, segment: u32) {
    let directory = directory(disk);
    directory.remove(&segment_name(segment)).expect("removed");
    directory.sync().expect("durable");
}

/// Stores a block in the middle of each of the first two segments.
fn store_in_both(world: &mut World) {
    let pages = world.set().geometry().pages(1);
    for segment in 0..2 {
        let record = world.record(segment * pages + 20, (0, 10), 7);
        world.store(&record).expect("stored");
    }
}

/// Two segments with pages that are durable.
fn written() -> World {
    let mut world = World::new(1, CAP);
    world.start(key(1)).expect("a fresh disk");
    store_in_both(&mut world);
    world.tier().flush().expect("flushed");
    assert_eq!(world.served().len(), 20);
    world
}

fn end(world: &mut World, cleanly: bool) {
    let ended = match cleanly {
        true => world.tier().close(),
        false => world.tier().flush(),
    };
    ended.expect("durable");
    world.tier = None;
}

/// Opens the set, and checks that nothing is served that a reset through this store has removed.
fn check_served(world: &mut World, through: Stored, what: &str) -> usize {
    world.start(key(1)).expect("opened");
    let served = world.served();
    let old = served.values().find(|record| record.stored <= through);
    assert_eq!(old, None, "{what}");
    served.len()
}

fn fsck(world: &World, repair: bool) -> FsckReport {
    let roots: Vec<_> = world.disks.iter().map(SimDisk::root).collect();
    check(&world.paths(), &roots, repair, &|_, _| {}).expect("checked")
}

#[test]
fn a_segment_that_was_away_during_a_reset_loses_its_pages_when_it_is_put_back() {
    for case in 0..16_u32 {
        let (segment, cleanly, new, repaired) =
            (case & 1, case & 2 > 0, case & 4 > 0, case & 8 > 0);
        let what = format!("segment {segment}, {cleanly}, {new}, {repaired}");
        let mut world = written();
        end(&mut world, cleanly);
        let name = segment_name(segment);
        let kept = world.disks[0].keep(&name);
        remove(&world.disks[0], segment);
        world.start(key(1)).expect("opened");
        assert_eq!(world.served().len(), 10, "{what}");
        let through = world.reset(None).expect("noted");
        if new {
            store_in_both(&mut world);
        }
        world.tier().flush().expect("flushed");
        end(&mut world, cleanly);
        if directory(&world.disks[0])
            .entry(&name)
            .expect("read")
            .is_some()
        {
            remove(&world.disks[0], segment);
        }
        world.disks[0].put_back(&name, kept);
        if repaired {
            let found = fsck(&world, true);
            let finding = found
                .findings
                .iter()
                .find(|finding| finding.what.contains("was not there"));
            assert!(finding.is_some(), "{what}: {:?}", found.findings);
            assert_eq!(fsck(&world, false).findings_total, 0, "{what}");
        }
        let served = check_served(&mut world, through, &what);
        assert_eq!(
            served,
            10 * usize::from(new),
            "{what}: the other segment is served"
        );
        // What is stored there now is found.
        store_in_both(&mut world);
        end(&mut world, cleanly);
        assert_eq!(check_served(&mut world, through, &what), 20, "{what}");
    }
}

#[test]
fn an_older_copy_of_a_segment_brings_no_page_of_a_reset_back() {
    for (segment, cleanly) in [(0, false), (0, true), (1, false), (1, true)] {
        let mut world = written();
        let name = segment_name(segment);
        let copy = world.disks[0].copy(&name);
        let through = world.reset(None).expect("noted");
        world.tier().flush().expect("flushed");
        end(&mut world, cleanly);
        remove(&world.disks[0], segment);
        world.disks[0].put_back(&name, copy);
        let what = format!("segment {segment}, {cleanly}");
        assert_eq!(check_served(&mut world, through, &what), 0, "{what}");
    }
}

/// The sweep ends at any change, and begins again without the segment into which it had written already.
#[test]
fn a_segment_that_has_seen_a_part_of_a_sweep_does_not_count_as_swept() {
    let mut ended = 0;
    for changes in 0.. {
        let mut world = written();
        let through = world.reset(None).expect("noted");
        world.disks[0].die_after(Some(changes));
        let swept = world.tier().flush().is_ok();
        world.disks[0].crash(&mut fastrand::Rng::with_seed(changes));
        world.tier = None;
        let name = segment_name(1);
        let kept = world.disks[0].keep(&name);
        remove(&world.disks[0], 1);
        let what = format!("after {changes} changes");
        check_served(&mut world, through, &what);
        world.tier().flush().expect("flushed");
        world.tier = None;
        world.disks[0].put_back(&name, kept);
        assert_eq!(check_served(&mut world, through, &what), 0, "{what}");
        ended += 1;
        if swept {
            break;
        }
    }
    assert!(ended > 8, "a sweep of {ended} changes");
}

/// A segment that does not exist when the set is opened, and is put back before its pages are written again.
#[test]
fn a_segment_is_not_created_from_a_file_that_was_put_there() {
    let mut world = written();
    let name = segment_name(1);
    let kept = world.disks[0].keep(&name);
    world.tier = None;
    remove(&world.disks[0], 1);
    world.start(key(1)).expect("opened");
    let through = world.reset(None).expect("noted");
    world.tier().flush().expect("flushed");
    world.disks[0].put_back(&name, kept);
    store_in_both(&mut world);
    world.tier().flush().expect("flushed");
    world.tier = None;
    assert_eq!(check_served(&mut world, through, "put back"), 20);
}

/// Disks that were written by programs that know no sweeps.
#[test]
fn segments_without_the_number_of_a_sweep_are_used_until_one_is_over() {
    let mut world = written();
    world.tier = None;
    let shard = world.disks[0]
        .root()
        .directory("shard-0")
        .expect("read")
        .expect("a shard");
    shard.remove("marks").expect("removed");
    let directory = directory(&world.disks[0]);
    for segment in 0..2 {
        let file = directory
            .open(&segment_name(segment))
            .expect("read")
            .expect("a segment");
        // The first region, into which nothing was stored.
        file.write(&[0; 2 * 4096], 0).expect("written");
    }
    world.start(key(1)).expect("opened");
    assert_eq!(world.served().len(), 20);
    let through = world.reset(None).expect("noted");
    store_in_both(&mut world);
    world.tier().flush().expect("flushed");
    world.tier = None;
    assert_eq!(check_served(&mut world, through, "swept"), 20);
}

#[test]
fn segments_of_a_disk_that_reads_nothing_for_a_time_are_kept_by_fsck() {
    let mut world = written();
    world.reset(None).expect("noted");
    world.tier().flush().expect("flushed");
    store_in_both(&mut world);
    let table = world.set().geometry().table_bytes();
    end(&mut world, false);
    for segment in 0..2 {
        world.disks[0].fail_place(&segment_name(segment), 0..table, false);
    }
    let roots: Vec<_> = world.disks.iter().map(SimDisk::root).collect();
    let error = check(&world.paths(), &roots, true, &|_, _| {}).expect_err("nothing is read");
    assert!(error.to_string().contains("open a segment"), "{error}");
    world.disks[0].mend();
    world.start(key(1)).expect("opened");
    assert_eq!(world.served().len(), 20);
}

#[test]
fn what_is_stored_becomes_durable_although_no_sweep_can_begin() {
    let mut world = written();
    let through = world.reset(None).expect("noted");
    store_in_both(&mut world);
    world.disks[0].set_new_files(false);
    let flushed = world.tier().flush();
    assert!(flushed.is_err(), "the marks cannot be replaced");
    world.disks[0].set_new_files(true);
    world.disks[0].crash(&mut fastrand::Rng::with_seed(1));
    world.tier = None;
    assert_eq!(check_served(&mut world, through, "after a crash"), 20);
}
