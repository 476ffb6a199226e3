//! What a check finds, what a repair leaves, and that nothing damaged is served before or after it.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::super::buffer::{AlignedBuffer, UNIT_BYTES};
use super::super::files::{DiskFile, Files};
use super::super::format::{Extent, REGION_PAGES, SetKey, segment_name};
use super::super::fsck::{FindingKind, FsckReport, check};
use super::sim_files::SimDisk;
use super::world::{Served, World, key};

/// Five blocks of ten pages in shard 0, after a clean end.
pub(super) fn filled(disks: usize) -> (World, Served) {
    let mut world = World::new(disks, 4 << 20);
    world.start(key(1)).expect("fresh disks");
    fill(&mut world, 1);
    let served = world.served();
    assert_eq!(served.len(), 50);
    end(&mut world);
    (world, served)
}

pub(super) fn fill(world: &mut World, namespace: u64) {
    for start in [0, 20, 40, 60, 80] {
        let record = world.record(start, (0, 10), namespace);
        world.store(&record).expect("stored");
    }
    world.tier().flush().expect("flushed");
}

pub(super) fn end(world: &mut World) {
    let tier = world.tier.take().expect("started");
    tier.close().expect("closed");
}

/// Ends without a flush or an index.
fn kill(world: &mut World) {
    world.start(key(1)).expect("opened");
    world.tier = None;
}

pub(super) fn run(world: &World, repair: bool) -> FsckReport {
    let roots: Vec<Arc<dyn Files>> = world.disks.iter().map(SimDisk::root).collect();
    let last = std::cell::Cell::new((0, 0));
    let progress = |done: u64, all: u64| {
        assert!(done >= last.get().0 && done <= all, "{done} of {all}");
        last.set((done, all));
    };
    let report = check(&world.paths(), &roots, repair, &progress).expect("checked");
    assert_eq!(
        report.findings.len() as u64,
        report.findings_total.min(1000)
    );
    report
}

pub(super) fn kinds(report: &FsckReport) -> Vec<FindingKind> {
    report.findings.iter().map(|one| one.kind).collect()
}

/// Checks that these kinds are found, that a start serves nothing that was not stored, and that after a repair the next
/// check finds nothing. Returns the pages that are served after the repair.
pub(super) fn found_and_repaired(
    world: &mut World,
    before: &Served,
    expected: &[FindingKind],
) -> Served {
    let report = run(world, false);
    let kinds: BTreeSet<FindingKind> = kinds(&report).into_iter().collect();
    let expected: BTreeSet<FindingKind> = expected.iter().copied().collect();
    assert_eq!(kinds, expected, "{:#?}", report.findings);
    assert_eq!(report.repaired, 0);
    let again = run(world, false);
    assert_eq!(again.findings, report.findings, "a check changes nothing");
    let repaired = run(world, true);
    assert_eq!(repaired.findings_total, report.findings_total);
    assert!(repaired.repaired > 0);
    let clean = run(world, false);
    assert_eq!(clean.findings, [], "after the repair");
    world.start(key(1)).expect("opened");
    let served = world.served();
    assert_eq!(
        served.len() as u64,
        world.set().listed().1,
        "all that is listed is there"
    );
    for (page, record) in &served {
        assert_eq!(before.get(page), Some(record));
    }
    served
}

/// The file of a page, in the set of shard 0.
pub(super) fn file_of(
    world: &World,
    shard: u16,
    key: SetKey,
    disk: usize,
    name: &str,
) -> Arc<dyn DiskFile> {
    let root = world.disks[disk].root();
    let shard = root.directory(&format!("shard-{shard}")).expect("read");
    let set = shard.expect("there").directory(&key.name()).expect("read");
    let file = set.expect("there").open(name).expect("read");
    file.expect("there")
}

pub(super) fn bytes_at(file: &dyn DiskFile, at: u64, bytes: u64) -> AlignedBuffer {
    let mut buffer = AlignedBuffer::new(bytes as usize);
    file.read(buffer.bytes_mut(), at).expect("read");
    buffer
}

/// Where a page lies, by the geometry of the set of shard 0.
fn extent(world: &mut World, page: u32) -> (Extent, u64) {
    if world.tier.is_none() {
        world.start(key(1)).expect("opened");
        let geometry = *world.set().geometry();
        end(world);
        return (geometry.extents(page, 1)[0], geometry.stride);
    }
    let geometry = *world.set().geometry();
    (geometry.extents(page, 1)[0], geometry.stride)
}

/// Where a region's slot lies: file, offset, bytes.
fn slot(world: &mut World, shard: u16, region: u32, slot: u8) -> (Arc<dyn DiskFile>, u64, u64) {
    world.start_shard(shard, key(1)).expect("opened");
    let geometry = *world.set().geometry();
    end(world);
    let (disk, segment, at) = geometry.slot_at(region, slot);
    let file = file_of(world, shard, key(1), disk, &segment_name(segment));
    (file, at, geometry.slot_bytes)
}

#[test]
fn a_clean_tier_has_no_findings() {
    for disks in [1, 2] {
        let (mut world, served) = filled(disks);
        for unclean in [false, true] {
            if unclean {
                kill(&mut world);
            }
            let report = run(&world, false);
            assert_eq!(report.findings, []);
            assert_eq!(
                (report.shards, report.sets, report.unknown_total),
                (1, 1, 0)
            );
            assert_eq!(
                (report.blocks, report.pages, report.good_pages),
                (5, 50, 50)
            );
        }
        let repaired = run(&world, true);
        assert_eq!((repaired.findings_total, repaired.repaired), (0, 0));
        world.start(key(1)).expect("opened");
        assert_eq!(world.served(), served);
    }
}

#[test]
fn a_changed_bit_of_a_page_is_found_and_costs_the_pages_behind_it_in_its_block() {
    for disks in [1, 2] {
        let (mut world, before) = filled(disks);
        let (place, _) = extent(&mut world, 43);
        world.disks[place.disk].flip_bit(&segment_name(place.segment), place.at + 99, 1);
        world.start(key(1)).expect("opened");
        assert!(!world.served().contains_key(&43));
        end(&mut world);
        let report = run(&world, false);
        let finding = &report.findings[0];
        assert_eq!(
            (finding.place.page, finding.place.disk),
            (Some(43), Some(place.disk as u16))
        );
        assert_eq!(finding.place.shard, Some(0));
        let served = found_and_repaired(&mut world, &before, &[FindingKind::Page]);
        let expected: Vec<u32> = before
            .keys()
            .copied()
            .filter(|at| !(43..50).contains(at))
            .collect();
        assert_eq!(served.keys().copied().collect::<Vec<_>>(), expected);
    }
}

#[test]
fn a_changed_bit_of_either_slot_is_found() {
    for with_index in [false, true] {
        for number in [0, 1] {
            let (mut world, before) = filled(1);
            let (file, at, _) = slot(&mut world, 0, 1, number);
            if !with_index {
                kill(&mut world);
            }
            let mut unit = bytes_at(file.as_ref(), at, UNIT_BYTES);
            let written = unit.bytes().iter().any(|byte| *byte != 0);
            unit.bytes_mut()[70] ^= 4;
            file.write(unit.bytes(), at).expect("written");
            let report = run(&world, false);
            assert!(
                kinds(&report).contains(&FindingKind::Slot),
                "{:?}",
                report.findings
            );
            let newest =
                written && report.pages < 50 || kinds(&report).contains(&FindingKind::Index);
            let mut expected = vec![FindingKind::Slot];
            expected.extend((with_index && newest).then_some(FindingKind::Index));
            let served = found_and_repaired(&mut world, &before, &expected);
            // With an index, the headers are known.
            let least = if with_index { 50 } else { 40 };
            assert!(served.len() >= least, "{} pages", served.len());
        }
    }
}

#[test]
fn random_changed_bits_are_never_served_and_repaired() {
    let (world, _) = filled(1);
    drop(world);
    let mut rng = fastrand::Rng::with_seed(11);
    let mut found = 0;
    for round in 0..60 {
        let (mut world, before) = filled(1);
        if round % 2 == 0 {
            kill(&mut world);
        }
        let (place, stride) = extent(&mut world, 0);
        if round % 2 == 0 {
            kill(&mut world);
        }
        let at = match round % 3 {
            0 => rng.u64(0..6 * 2 * UNIT_BYTES),
            _ => place.at + rng.u64(0..90 * stride),
        };
        world.disks[0].flip_bit(&segment_name(0), at, rng.u8(0..8));
        let report = run(&world, false);
        let repaired = run(&world, true);
        assert_eq!(repaired.findings_total, report.findings_total, "byte {at}");
        found += usize::from(report.findings_total > 0);
        assert_eq!(run(&world, false).findings, [], "byte {at}");
        world.start(key(1)).expect("opened");
        for (page, record) in world.served() {
            assert_eq!(before.get(&page), Some(&record), "byte {at}");
        }
    }
    assert!(
        found > 12,
        "{found} of 60 changed bits were found: others are of unused bytes"
    );
}

#[test]
fn two_blocks_whose_bytes_are_swapped_are_found_and_not_served() {
    let (mut world, before) = filled(1);
    let (first, stride) = extent(&mut world, 0);
    let (second, _) = extent(&mut world, 40);
    let file = |world: &World, one: &Extent| {
        file_of(world, 0, key(1), one.disk, &segment_name(one.segment))
    };
    let (from, to) = (file(&world, &first), file(&world, &second));
    let mine = bytes_at(from.as_ref(), first.at, 10 * stride);
    let others = bytes_at(to.as_ref(), second.at, 10 * stride);
    from.write(others.bytes(), first.at).expect("written");
    to.write(mine.bytes(), second.at).expect("written");
    world.start(key(1)).expect("opened");
    assert_eq!(world.served().len(), 30);
    end(&mut world);
    assert_eq!(run(&world, false).findings_total, 20);
    let served = found_and_repaired(&mut world, &before, &[FindingKind::Page]);
    assert_eq!(served.len(), 30);
}

#[test]
fn a_page_of_another_namespaces_block_is_found_and_not_served() {
    let (mut world, mut before) = filled(1);
    world.start(key(1)).expect("opened");
    let record = world.record(100, (0, 10), 2);
    world.store(&record).expect("stored");
    before.extend(world.served());
    end(&mut world);
    let (mine, stride) = extent(&mut world, 2);
    let (others, _) = extent(&mut world, 102);
    let name = |one: &Extent| segment_name(one.segment);
    let from = file_of(&world, 0, key(1), others.disk, &name(&others));
    let to = file_of(&world, 0, key(1), mine.disk, &name(&mine));
    let bytes = bytes_at(from.as_ref(), others.at, stride);
    to.write(bytes.bytes(), mine.at).expect("written");
    world.start(key(1)).expect("opened");
    assert!(!world.served().contains_key(&2));
    end(&mut world);
    let served = found_and_repaired(&mut world, &before, &[FindingKind::Page]);
    assert_eq!(served.len(), 52);
}

#[test]
fn a_header_of_another_place_shard_or_set_is_found_and_lists_nothing() {
    // Of another region of the same set, of the same region of another shard, and of another set.
    for from in 0..3 {
        let (mut world, before) = filled(1);
        world.start_shard(1, key(1)).expect("opened");
        fill(&mut world, 2);
        end(&mut world);
        world.start(key(2)).expect("opened");
        fill(&mut world, 3);
        end(&mut world);
        let (target, at, bytes) = slot(&mut world, 0, 2, 0);
        let (source, source_at, _) = match from {
            0 => slot(&mut world, 0, 1, 1),
            1 => slot(&mut world, 1, 2, 1),
            _ => (
                file_of(&world, 0, key(2), 0, &segment_name(0)),
                at + bytes,
                bytes,
            ),
        };
        kill(&mut world);
        let header = bytes_at(source.as_ref(), source_at, bytes);
        assert!(
            header.bytes().iter().any(|byte| *byte != 0),
            "it was written"
        );
        target.write(header.bytes(), at).expect("written");
        let served = found_and_repaired(&mut world, &before, &[FindingKind::Slot]);
        assert!(served.len() >= 40, "{from}: {}", served.len());
    }
}

#[test]
fn a_stale_generation_is_found_and_not_served() {
    let mut world = World::new(1, 4 << 20);
    world.start(key(1)).expect("fresh disks");
    fill(&mut world, 1);
    end(&mut world);
    let (file, at, bytes) = slot(&mut world, 0, 20 / REGION_PAGES, 0);
    let old = bytes_at(file.as_ref(), at, 2 * bytes);
    world.start(key(1)).expect("opened");
    let record = world.record(20, (0, 10), 2);
    world.store(&record).expect("stored");
    world.tier().flush().expect("flushed");
    let before = world.served();
    assert_eq!(before.len(), 50);
    world.tier = None;
    // The header of the pages that were there before, beside the new pages.
    file.write(old.bytes(), at).expect("written");
    let served = found_and_repaired(&mut world, &before, &[FindingKind::Page]);
    assert_eq!(served.len(), 40);
}

#[test]
fn blocks_that_list_the_same_page_are_found() {
    let mut world = World::new(1, 4 << 20);
    world.start(key(1)).expect("fresh disks");
    fill(&mut world, 1);
    end(&mut world);
    let (file, at, bytes) = slot(&mut world, 0, 20 / REGION_PAGES, 0);
    let old = bytes_at(file.as_ref(), at, 2 * bytes);
    world.start(key(1)).expect("opened");
    // It begins in another region than the block whose pages it takes.
    let record = world.record(8, (0, 20), 2);
    world.store(&record).expect("stored");
    world.tier().flush().expect("flushed");
    let before = world.served();
    world.tier = None;
    file.write(old.bytes(), at).expect("written");
    let served = found_and_repaired(&mut world, &before, &[FindingKind::Overlap]);
    assert_eq!(served, before);
}

#[test]
fn a_damaged_index_is_found_and_written_again() {
    let (mut world, before) = filled(1);
    world.disks[0].flip_bit("index", 300, 3);
    let served = found_and_repaired(&mut world, &before, &[FindingKind::Index]);
    assert_eq!(served, before);
}

#[test]
fn an_index_of_an_earlier_end_is_found_and_does_not_win() {
    let (mut world, _) = filled(1);
    let index = file_of(&world, 0, key(1), 0, "index");
    let old = bytes_at(index.as_ref(), 0, index.bytes().expect("read"));
    world.start(key(1)).expect("opened");
    let record = world.record(100, (0, 10), 1);
    world.store(&record).expect("stored");
    let before = world.served();
    end(&mut world);
    let index = file_of(&world, 0, key(1), 0, "index");
    index.write(old.bytes(), 0).expect("written");
    let served = found_and_repaired(&mut world, &before, &[FindingKind::Index]);
    assert_eq!(served, before);
}

#[test]
fn pages_that_no_file_has_are_found() {
    let (mut world, before) = filled(2);
    let root = world.disks[1].root();
    let shard = root.directory("shard-0").expect("read").expect("there");
    let set = shard
        .directory(&key(1).name())
        .expect("read")
        .expect("there");
    set.remove(&segment_name(0)).expect("removed");
    let report = run(&world, false);
    assert!(report.pages < 50);
    found_and_repaired(&mut world, &before, &[FindingKind::NoSegment]);
}

#[test]
fn a_set_that_lost_its_room_on_one_disk_is_no_finding() {
    let (mut world, before) = filled(2);
    let root = world.disks[1].root();
    let shard = root.directory("shard-0").expect("read").expect("there");
    super::super::room::remove_set(shard.as_ref(), &key(1).name()).expect("removed");
    let report = run(&world, false);
    assert_eq!(report.findings, []);
    assert!(report.displaced_pages > 0);
    assert_eq!(report.pages + report.displaced_pages, 50);
    world.start(key(1)).expect("opened");
    assert!(world.served().len() < before.len());
}
