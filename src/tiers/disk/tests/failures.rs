//! Disks that fail in part: places that are not read or written, disks that take no writes, and disks that are gone.

use std::io;

use super::super::format::{DiskIdentity, segment_name};
use super::super::scrub::Scrub;
use super::super::{DiskDirectories, DiskError, DiskIo, is_full, is_read_only};
use super::copies::{Copies, PAGE_BYTES, PAGES, in_files};
use super::world::{World, key};

/// The bytes of a page in its segment.
fn place(copies: &Copies, page: u32) -> std::ops::Range<u64> {
    let geometry = *copies.set().geometry();
    let at = geometry.table_bytes() + u64::from(page) * geometry.stride;
    at..at + geometry.stride
}

fn fail_place(copies: &Copies, page: u32, write: bool) {
    let bytes = place(copies, page);
    copies.world.disks[0].fail_place(&segment_name(0), bytes, write);
}

/// The pages that were read have the bytes that were written, and the others those from before the read.
fn assert_read(copies: &Copies, pages: u32) {
    for page in 0..pages {
        let byte = page as u8 + 1;
        assert_eq!(copies.first_and_last(PAGES + page), (byte, byte));
    }
}

#[test]
fn a_place_that_is_not_read_is_named_and_the_pages_before_it_are_good() {
    for failed in [0, 1, 5, PAGES - 1] {
        let copies = Copies::new(1);
        assert!(copies.write(1, 0).ended.complete);
        fail_place(&copies, failed, false);
        let end = copies.read(2, 0);
        assert!(!end.ended.complete && !end.ended.bad_source && !end.write);
        assert_eq!(end.ended.faulty_page, Some(failed), "{end:?}");
        assert!(end.error.is_some() && end.ended.complete_pages <= failed);
        assert_read(&copies, end.ended.complete_pages);
        assert_eq!(copies.set().faulty_pages(), 1);
    }
}

#[test]
fn a_place_that_is_not_written_is_named_and_never_written_again_while_the_set_is_open() {
    let mut copies = Copies::new(1);
    assert!(copies.write(1, 0).ended.complete);
    fail_place(&copies, 3, true);
    let end = copies.write(2, 0);
    assert!(end.write && !end.ended.complete && end.error.is_some());
    assert_eq!(end.ended.faulty_page, Some(3), "{end:?}");
    copies.world.disks[0].mend();
    let written = copies.world.disks[0].written();
    let end = copies.write(3, 0);
    assert!(!end.ended.complete && end.error.is_none(), "{end:?}");
    assert_eq!(end.ended.faulty_page, Some(3));
    assert_eq!(
        copies.world.disks[0].written(),
        written,
        "nothing is written"
    );
    assert!(copies.write(4, 4).ended.complete, "other places are");
    let key = copies.set().file.key;
    copies.world.tier = None;
    copies.world.start(key).expect("opened anew");
    assert!(copies.write(5, 0).ended.complete);
    assert!(copies.read(6, 0).ended.complete);
}

#[test]
fn a_place_with_other_bytes_is_named_by_a_read_and_by_the_scrub() {
    for scrubbed in [false, true] {
        let copies = Copies::new(1);
        assert!(copies.write(1, 0).ended.complete);
        let at = place(&copies, 5).start + PAGE_BYTES - 1;
        copies.world.disks[0].flip_bit(&segment_name(0), at, 2);
        if scrubbed {
            let now = std::time::Instant::now();
            let set = copies.set();
            let mut scrub = Scrub::new(&set, 1 << 40, now).expect("a rate");
            while scrub.step(&set, scrub.due()).ended.is_none() {}
            assert_eq!(set.faulty_pages(), 1);
        }
        let end = copies.read(2, 0);
        assert_eq!(end.ended.complete_pages, 5);
        assert!(end.ended.bad_source && end.error.is_none());
        assert_eq!(end.ended.faulty_page, Some(5), "{end:?}");
        assert_read(&copies, 5);
        assert_eq!(copies.write(3, 4).ended.faulty_page, Some(1));
    }
}

#[test]
fn a_page_that_is_not_listed_has_no_bad_place() {
    let copies = Copies::new(1);
    assert!(copies.write(1, 0).ended.complete);
    let end = copies.read(2, 8);
    // Page 8 is not listed: no place of it has failed.
    assert!(end.ended.bad_source);
    assert_eq!(end.ended.faulty_page, None);
}

#[test]
fn a_disk_that_is_full_or_only_read_has_no_bad_places() {
    for kind in [
        io::ErrorKind::StorageFull,
        io::ErrorKind::ReadOnlyFilesystem,
    ] {
        let copies = Copies::new(1);
        assert!(copies.write(1, 0).ended.complete);
        copies.world.disks[0].fail_writes(Some(kind));
        let end = copies.write(2, 16);
        let error = end.error.expect("the write failed");
        assert_eq!(is_full(&error), kind == io::ErrorKind::StorageFull);
        assert_eq!(is_read_only(&error), kind != io::ErrorKind::StorageFull);
        assert_eq!(end.ended.faulty_page, None);
        assert_eq!(copies.set().faulty_pages(), 0);
        assert!(copies.read(3, 0).ended.complete, "reads go on");
        assert_read(&copies, PAGES);
    }
}

#[test]
fn a_file_that_became_shorter_is_read_up_to_its_end_and_never_as_zeros() {
    for io in [DiskIo::Threads, DiskIo::Auto] {
        let directory = tempfile::tempdir().expect("a directory");
        let copies = in_files(directory.path(), 1, io);
        assert!(copies.write(1, 0).ended.complete);
        let cut = place(&copies, 4).start + 4096;
        let name = copies.set().file.key.name();
        let segment = directory.path().join("disk-0/shard-0").join(name);
        let file = std::fs::File::options()
            .write(true)
            .open(segment.join(segment_name(0)))
            .expect("a segment");
        file.set_len(cut).expect("cut");
        let end = copies.read(2, 0);
        assert!(!end.ended.complete, "{end:?}");
        assert!(end.ended.faulty_page >= Some(4), "{end:?}");
        assert_read(&copies, end.ended.complete_pages);
    }
}

#[test]
fn a_disk_that_takes_no_writes_refuses_resets_and_the_probe_and_serves_on() {
    let mut world = World::new(2, 64 << 20);
    world.start(key(1)).expect("a fresh disk");
    let record = world.record(0, (0, 4), 7);
    world.store(&record).expect("stored");
    world.tier().flush().expect("flushed");
    world.tier().probe_writes().expect("it takes writes");
    world.disks[1].set_read_only(true);
    assert!(world.tier().probe_writes().is_err(), "one of two disks");
    world.disks[0].set_read_only(true);
    assert!(is_read_only(&world.reset(None).expect_err("not durable")));
    assert_eq!(world.served().len(), 4);
    assert!(world.tier().probe_reads().is_ok());
    for disk in &world.disks {
        disk.set_read_only(false);
    }
    world.tier().probe_writes().expect("it takes writes again");
    world.reset(None).expect("durable");
    world.tier = None;
    world.start(key(1)).expect("opened");
    assert!(world.served().is_empty());
}

#[test]
fn a_disk_that_is_gone_is_missing_until_it_is_back() {
    let mut world = World::new(2, 64 << 20);
    world.start(key(1)).expect("a fresh disk");
    let record = world.record(0, (0, 4), 7);
    world.store(&record).expect("stored");
    world.tier().flush().expect("flushed");
    let directories = world.directories().expect("open");
    directories.check_present().expect("present");
    world.disks[1].set_gone(true);
    assert!(directories.check_present().is_err() && directories.reopened().is_err());
    assert!(world.tier().probe_reads().is_err());
    assert!(world.served().is_empty() || world.served().len() <= 4);
    world.disks[1].set_gone(false);
    directories.check_present().expect("it is back");
    directories.reopened().expect("it is back");
    world.tier = None;
    world.start(key(1)).expect("opened");
    assert_eq!(world.served().len(), 4);
}

#[test]
fn an_identity_that_another_process_wrote_before_the_lock_is_kept() {
    let world = World::new(1, 64 << 20);
    let (disk, disks) = (0, 1);
    let tier = 77;
    world.disks[0].write_before_lock(DiskIdentity { tier, disk, disks });
    let directories = world.directories().expect("opened");
    assert_eq!(directories.tier(), tier);
    let again = world.directories().expect("opened");
    assert_eq!(again.tier(), tier);
}

#[test]
fn an_empty_directory_does_not_take_the_place_of_a_disk() {
    let root = tempfile::tempdir().expect("a directory");
    let path = root.path().join("disk");
    let paths = [path.clone()];
    let directories = DiskDirectories::open(&paths).expect("opened");
    directories.check_present().expect("present");
    // As another process knows them, that reads it from a command line.
    let known = directories.known().to_string().parse().expect("as written");
    assert_eq!(&known, directories.known());
    let two = ["first", "second"].map(|name| root.path().join(name));
    let two = DiskDirectories::open(&two).expect("opened");
    assert_eq!(two.known().to_string().parse().as_ref(), Ok(two.known()));
    let of_another = DiskDirectories::of_known(&paths, known).expect("one directory");
    std::fs::rename(&path, root.path().join("away")).expect("renamed");
    for empty in [false, true] {
        if empty {
            std::fs::create_dir(&path).expect("created");
        }
        assert!(directories.check_present().is_err(), "empty: {empty}");
        let missing = directories.reopened();
        assert!(missing.is_err(), "empty: {empty}");
        assert!(of_another.reopened().is_err(), "empty: {empty}");
        if empty {
            assert!(matches!(missing, Err(DiskError::Missing(_))));
            let names = std::fs::read_dir(&path).expect("read").count();
            assert_eq!(names, 0, "nothing is written there");
            std::fs::remove_dir(&path).expect("removed");
        }
    }
    std::fs::rename(root.path().join("away"), &path).expect("renamed");
    directories.check_present().expect("it is back");
    for directories in [&directories, &of_another] {
        let again = directories.reopened().expect("it is back");
        assert_eq!(again.depot(0), directories.depot(0));
    }
}
