//! Checks of everything but headers and pages: files, directories, marks, identities, permissions.

use std::collections::BTreeSet;
use std::hash::Hasher as _;
use std::os::unix::fs::PermissionsExt as _;
use std::sync::Arc;

use twox_hash::XxHash3_64;

use super::super::buffer::UNIT_BYTES;
use super::super::files::{DiskFile, Files};
use super::super::format::segment_name;
use super::super::fsck::{FindingKind, FsckError, check, fsck};
use super::super::{DiskDirectories, DiskError, DiskTier};
use super::fsck::{bytes_at, end, file_of, fill, filled, found_and_repaired, kinds, run};
use super::sim_files::SimDisk;
use super::world::{Served, World, key};

#[test]
fn a_damaged_set_file_costs_its_set_alone() {
    let (mut world, _) = filled(1);
    world.start(key(2)).expect("opened");
    fill(&mut world, 3);
    let other = world.served();
    end(&mut world);
    let set = file_of(&world, 0, key(1), 0, "set");
    let mut bytes = bytes_at(set.as_ref(), 0, UNIT_BYTES);
    bytes.bytes_mut()[50] ^= 1;
    set.write(bytes.bytes(), 0).expect("written");
    assert_eq!(kinds(&run(&world, false)), [FindingKind::SetFile]);
    run(&world, true);
    assert_eq!(run(&world, false).findings, []);
    world.start(key(2)).expect("opened");
    assert_eq!(world.served(), other);
    world.tier().open(key(1), &|_, _| {}).expect("opened");
    assert!(world.served().is_empty());
}

#[test]
fn a_set_file_of_another_shard_costs_its_set() {
    let (mut world, _) = filled(1);
    world.start_shard(1, key(1)).expect("opened");
    end(&mut world);
    let mine = file_of(&world, 0, key(1), 0, "set");
    let others = file_of(&world, 1, key(1), 0, "set");
    let bytes = bytes_at(others.as_ref(), 0, UNIT_BYTES);
    mine.write(bytes.bytes(), 0).expect("written");
    let served = found_and_repaired(&mut world, &Served::new(), &[FindingKind::SetFile]);
    assert!(served.is_empty());
}

#[test]
fn damaged_marks_cost_all_pages_because_resets_are_not_known() {
    let (mut world, _) = filled(1);
    world.start(key(1)).expect("opened");
    world.reset(Some(1)).expect("reset");
    world.tier = None;
    let report = run(&world, false);
    assert_eq!(report.findings, []);
    assert_eq!((report.pages, report.reset_pages), (0, 50));
    world.disks[0].flip_bit("marks", 40, 1);
    assert!(world.start(key(1)).is_err());
    world.tier = None;
    let report = run(&world, false);
    assert!(kinds(&report).contains(&FindingKind::Marks));
    run(&world, true);
    assert_eq!(run(&world, false).findings, []);
    world.start(key(1)).expect("opened");
    assert!(world.served().is_empty());
}

#[test]
fn a_repair_carries_out_resets() {
    let (mut world, _) = filled(1);
    world.start(key(1)).expect("opened");
    let record = world.record(100, (0, 10), 2);
    world.store(&record).expect("stored");
    world.tier().flush().expect("flushed");
    world.reset(Some(1)).expect("reset");
    world.tier = None;
    let report = run(&world, true);
    assert_eq!((report.pages, report.reset_pages), (10, 50));
    let report = run(&world, false);
    assert_eq!((report.pages, report.reset_pages), (10, 0));
    world.start(key(1)).expect("opened");
    assert_eq!(world.served().len(), 10);
}

#[test]
fn a_damaged_identity_is_written_again() {
    for disk in [0, 1] {
        let (mut world, before) = filled(2);
        world.disks[disk].flip_bit("disk", 35, 1);
        assert!(world.start(key(1)).is_err());
        let served = found_and_repaired(&mut world, &before, &[FindingKind::Identity]);
        assert_eq!(served, before);
    }
    let (mut world, before) = filled(1);
    world.disks[0].flip_bit("disk", 35, 1);
    let served = found_and_repaired(&mut world, &before, &[FindingKind::Identity]);
    assert_eq!(served, before);
}

#[test]
fn a_damaged_version_is_damage_and_no_other_version() {
    let (mut world, before) = filled(1);
    let file = file_of(&world, 0, key(1), 0, "set");
    let mut bytes = bytes_at(file.as_ref(), 0, UNIT_BYTES);
    bytes.bytes_mut()[9] ^= 4;
    file.write(bytes.bytes(), 0).expect("written");
    drop(file);
    let served = found_and_repaired(&mut world, &before, &[FindingKind::SetFile]);
    assert!(served.is_empty(), "what the pages are is not known");
}

#[test]
fn directories_of_another_version_are_left_alone() {
    let (world, _) = filled(1);
    let root = world.disks[0].root();
    let write = |file: &dyn DiskFile| {
        let mut sealed = bytes_at(file, 0, UNIT_BYTES);
        let bytes = sealed.bytes_mut();
        bytes[8] += 1;
        let body = u64::from_le_bytes(bytes[16..24].try_into().expect("8 bytes"));
        let mut sum = XxHash3_64::with_seed(0);
        sum.write(&bytes[..24]);
        sum.write(&bytes[32..32 + body as usize]);
        bytes[24..32].copy_from_slice(&sum.finish().to_le_bytes());
        file.write(sealed.bytes(), 0).expect("written");
    };
    write(file_of(&world, 0, key(1), 0, "set").as_ref());
    let changes = world.disks[0].changes();
    let report = run(&world, true);
    assert_eq!(kinds(&report), [FindingKind::Version]);
    assert_eq!((report.repaired, world.disks[0].changes()), (0, changes));
    write(root.open("disk").expect("read").expect("there").as_ref());
    let changes = world.disks[0].changes();
    let refused = check(&world.paths(), &[root], true, &|_, _| {}).expect_err("another version");
    assert!(
        matches!(refused, FsckError::Disk(DiskError::Format { .. })),
        "{refused}"
    );
    assert_eq!(world.disks[0].changes(), changes);
}

#[test]
fn directories_in_another_order_or_without_a_tier_are_refused() {
    let (world, _) = filled(2);
    let mut roots: Vec<Arc<dyn Files>> = world.disks.iter().map(SimDisk::root).collect();
    roots.reverse();
    let refused = check(&world.paths(), &roots, true, &|_, _| {}).expect_err("another order");
    assert!(refused.to_string().contains("is disk 1 of 2"), "{refused}");
    let empty = SimDisk::new();
    let refused = check(&world.paths()[..1], &[empty.root()], true, &|_, _| {});
    let refused = refused.expect_err("no tier").to_string();
    assert!(refused.contains("no disk tier is there"), "{refused}");
    assert_eq!(empty.changes(), 0);
}

#[test]
fn unknown_files_are_reported_and_left() {
    let (world, _) = filled(1);
    let root = world.disks[0].root();
    root.create("notes").expect("created");
    root.create_directory("leader").expect("created");
    let shard = root.directory("shard-0").expect("read").expect("there");
    shard.create("more").expect("created");
    let report = run(&world, true);
    assert_eq!((report.findings_total, report.unknown_total), (0, 2));
    assert_eq!(report.unknown[1].to_string(), "disk 0, shard 0, more");
    assert!(root.open("notes").expect("read").is_some());
}

#[test]
fn real_files_are_checked_with_their_permissions_kinds_and_lengths() {
    let directory = tempfile::tempdir().expect("a directory");
    let paths = [directory.path().join("one"), directory.path().join("two")];
    let directories = DiskDirectories::open(&paths).expect("opened");
    let tier = DiskTier::take(&directories, 0, 16 << 20).expect("usable");
    let mut world = World::new(2, 16 << 20);
    world.tier = tier;
    world.tier().open(key(1), &|_, _| {}).expect("opened");
    fill(&mut world, 1);
    let used = fsck(&paths, true, &|_, _| {}).expect_err("the shard is locked");
    assert!(
        used.to_string()
            .contains("shard 0 is in use: stop kvferry first"),
        "{used}"
    );
    let before = world.served();
    end(&mut world);
    let clean = fsck(&paths, false, &|_, _| {}).expect("checked");
    assert_eq!(
        (clean.findings_total, clean.pages),
        (0, 50),
        "{:?}",
        clean.findings
    );

    let set = paths[0].join("shard-0").join(key(1).name());
    let segment = set.join(segment_name(0));
    let mode = |path: &std::path::Path, mode| {
        let permissions = std::fs::Permissions::from_mode(mode);
        std::fs::set_permissions(path, permissions).expect("changed");
    };
    mode(&paths[1], 0o755);
    mode(&segment, 0o644);
    std::os::unix::fs::symlink("/etc/passwd", set.join(segment_name(50))).expect("linked");
    let file = std::fs::OpenOptions::new()
        .write(true)
        .open(&segment)
        .expect("opened");
    let bytes = file.metadata().expect("read").len();
    file.set_len(bytes - 8192).expect("cut");
    let report = fsck(&paths, false, &|_, _| {}).expect("checked");
    let found: BTreeSet<FindingKind> = kinds(&report).into_iter().collect();
    let expected = [
        FindingKind::Permissions,
        FindingKind::Kind,
        FindingKind::Segment,
    ];
    assert!(
        expected.iter().all(|kind| found.contains(kind)),
        "{:#?}",
        report.findings
    );
    fsck(&paths, true, &|_, _| {}).expect("repaired");
    let again = fsck(&paths, false, &|_, _| {}).expect("checked");
    assert_eq!(again.findings, []);
    assert_eq!(file.metadata().expect("read").len(), bytes);
    let directories = DiskDirectories::open(&paths).expect("opened");
    world.tier = DiskTier::take(&directories, 0, 16 << 20).expect("usable");
    world.tier().open(key(1), &|_, _| {}).expect("opened");
    for (page, record) in world.served() {
        assert_eq!(before.get(&page), Some(&record));
    }
}
