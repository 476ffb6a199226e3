//! Changed bits, and clean ends.

use super::super::format::{REGION_PAGES, segment_name};
use super::world::{World, key};
use kvferry_types::Epoch;

fn filled() -> World {
    let mut world = World::new(1, 4 << 20);
    world.start(key(1)).expect("a fresh disk");
    for start in [0, 20, 40, 60, 80] {
        let record = world.record(start, (0, 10), 1);
        world.store(&record).expect("stored");
    }
    world.tier().flush().expect("flushed");
    world
}

#[test]
fn a_clean_end_leaves_an_index_that_the_next_start_uses() {
    let mut world = filled();
    let served = world.served();
    assert_eq!(served.len(), 50);
    world.tier().close().expect("closed");
    world.tier = None;
    let found = world.start(key(1)).expect("opened");
    assert!(found.by_index);
    assert_eq!((found.pages, found.blocks), (50, 5));
    assert_eq!(world.served(), served);
    // The index is gone while headers may change: the next start, after an unclean end, reads these.
    world.tier = None;
    let found = world.start(key(1)).expect("opened");
    assert!(!found.by_index);
    assert_eq!(world.served(), served);
}

#[test]
fn an_older_index_that_is_put_back_is_not_used() {
    for (reset, clean) in [(false, false), (true, false), (true, true)] {
        let mut world = filled();
        world.tier().close().expect("closed");
        world.tier = None;
        let kept = world.disks[0].keep("index");
        let found = world.start(key(1)).expect("opened");
        assert!(found.by_index);
        if reset {
            let record = world.record(200, (0, 4), 2);
            world.store(&record).expect("stored");
            world.reset(Some(1)).expect("reset");
            let record = world.record(220, (0, 4), 2);
            world.store(&record).expect("stored");
            world.tier().flush().expect("flushed");
        }
        let served = world.served();
        assert_eq!(served.len(), if reset { 8 } else { 50 });
        let sequence = world.set().table().sequence();
        if clean {
            world.tier().close().expect("closed");
        }
        world.tier = None;
        world.disks[0].put_back("index", kept);
        let found = world.start(key(1)).expect("opened");
        assert!(!found.by_index, "reset: {reset}, clean: {clean}");
        assert_eq!(world.served(), served);
        assert!(world.set().table().sequence() >= sequence);
    }
}

#[test]
fn a_damaged_header_does_not_bring_back_pages_of_a_reset_that_a_restart_interrupted() {
    for slot in 0..2 {
        let mut world = filled();
        let slot_bytes = world.set().geometry().slot_bytes;
        world.reset(Some(1)).expect("reset");
        // The first slots of all regions; the second ones follow with a later flush.
        world.set().write_dirty(0, 100).expect("written");
        world.tier = None;
        world.start(key(1)).expect("opened");
        assert!(world.served().is_empty());
        // From here on, no mark says that the pages were removed.
        world.tier().flush().expect("flushed");
        world.tier = None;
        // The block of page 20 is one of region 1.
        let at = (2 + slot) * slot_bytes + 40;
        world.disks[0].flip_bit(&segment_name(0), at, 2);
        let found = world.start(key(1)).expect("opened");
        assert_eq!(found.bad_slots, 1);
        assert!(world.served().is_empty(), "slot {slot}");
    }
}

#[test]
fn an_older_index_is_not_used_after_a_start_that_was_interrupted() {
    for changes in 0..12 {
        let mut world = World::new(1, 4 << 20);
        world.start(key(1)).expect("a fresh disk");
        // The reset leaves the header of region 0 as it was.
        for (start, namespace) in [(0, 2), (40, 1)] {
            let record = world.record(start, (0, 10), namespace);
            world.store(&record).expect("stored");
        }
        world.tier().close().expect("closed");
        world.tier = None;
        let kept = world.disks[0].keep("index");
        world.disks[0].die_after(Some(changes));
        let interrupted = world.start(key(1));
        assert!(changes > 2 || interrupted.is_err());
        world.disks[0].die_after(None);
        world.tier = None;
        world.start(key(1)).expect("opened");
        assert_eq!(world.served().len(), 20);
        world.reset(Some(1)).expect("reset");
        world.tier().flush().expect("flushed");
        world.tier = None;
        world.disks[0].put_back("index", kept);
        let found = world.start(key(1)).expect("opened");
        assert!(!found.by_index && world.served().len() == 10);
    }
}

#[test]
fn two_layouts_in_turn_find_their_own_pages() {
    let mut world = filled();
    let first = world.served();
    world.tier().open(key(2), &|_, _| {}).expect("opened");
    assert!(world.served().is_empty());
    let record = world.record(4, (0, 7), 2);
    world.store(&record).expect("stored");
    let second = world.served();
    world.tier().open(key(1), &|_, _| {}).expect("opened");
    assert_eq!(world.served(), first);
    // A reset reaches the set that is not open.
    world.reset(None).expect("reset");
    world.tier().flush().expect("flushed");
    assert!(world.served().is_empty());
    world.tier().open(key(2), &|_, _| {}).expect("opened");
    assert!(world.served().is_empty(), "{} pages", second.len());
}

#[test]
fn a_changed_bit_anywhere_is_a_miss_and_nothing_else() {
    let pages = filled().served();
    let bytes = filled().set().geometry().segment_bytes();
    let mut rng = fastrand::Rng::with_seed(7);
    let (mut missing, table) = (0, filled().set().geometry().table_bytes());
    for round in 0..300 {
        let mut world = filled();
        world.tier = None;
        let at = match round % 2 {
            0 => rng.u64(0..bytes.min(table + 100 * 8192)),
            // A byte of a header, of either slot.
            _ => rng.u64(0..5) / 2 * 8192 + rng.u64(0..8192),
        };
        world.disks[0].flip_bit(&segment_name(0), at, rng.u8(0..8));
        world.start(key(1)).expect("opened");
        let served = world.served();
        for (page, record) in &served {
            assert_eq!(pages.get(page), Some(record), "byte {at}");
        }
        missing += pages.len() - served.len();
    }
    assert!(
        missing > 100,
        "{missing} pages were missing: bits of pages and headers were changed"
    );
}

#[test]
fn a_changed_bit_in_the_index_costs_the_index_alone() {
    let mut world = filled();
    let served = world.served();
    world.tier().close().expect("closed");
    world.tier = None;
    world.disks[0].flip_bit("index", 300, 3);
    let found = world.start(key(1)).expect("opened");
    assert!(!found.by_index);
    assert_eq!(world.served(), served);
}

#[test]
fn an_index_that_is_longer_than_the_set_permits_is_not_read() {
    let mut world = filled();
    let served = world.served();
    world.tier().close().expect("closed");
    world.tier = None;
    world.disks[0].lengthen("index", 512 << 10);
    let found = world.start(key(1)).expect("opened");
    assert!(!found.by_index);
    assert_eq!(world.served(), served);
}

#[test]
fn a_changed_bit_in_the_set_file_costs_the_pages_of_the_set_alone() {
    for at in [0, 20, 40] {
        let mut world = filled();
        world.tier = None;
        // Byte 40 is one of the set's id.
        world.disks[0].flip_bit("set", at, 3);
        world.start(key(1)).expect("opened");
        assert!(world.served().is_empty(), "byte {at}");
        let record = world.record(0, (0, 10), 1);
        world.store(&record).expect("stored");
    }
}

#[test]
fn a_header_that_cannot_be_read_costs_the_pages_of_its_region_alone() {
    let mut world = filled();
    let mut served = world.served();
    let geometry = *world.set().geometry();
    world.tier = None;
    // The second slot of region 1, which was written first; the block of page 20 begins there.
    let at = 3 * geometry.slot_bytes;
    world.disks[0].fail_place(&segment_name(0), at..at + 4096, false);
    let found = world.start(key(1)).expect("opened");
    assert_eq!((found.bad_slots, found.pages), (1, 40));
    served.retain(|page, _| !(20..30).contains(page));
    assert_eq!(world.served(), served);
    world.tier = None;
    world.disks[0].fail_place(&segment_name(0), 0..geometry.table_bytes(), false);
    assert!(world.start(key(1)).is_err(), "the disk reads nothing");
}

#[test]
fn a_new_block_costs_its_bytes_and_one_header() {
    let mut world = filled();
    let set = world.set();
    let geometry = *set.geometry();
    for extent in geometry.extents(7 * REGION_PAGES, 20) {
        let segment = set.segment(extent.disk, extent.segment);
        segment.expect("created");
    }
    let before = world.disks[0].written();
    let record = world.record(7 * REGION_PAGES, (0, 20), 1);
    world.store(&record).expect("stored");
    world.tier().flush().expect("flushed");
    let written = world.disks[0].written() - before;
    assert_eq!(written, 20 * geometry.stride + geometry.slot_bytes);
    // Growth writes what is new, and one header.
    let record = world.record(8 * REGION_PAGES + 8, (0, 2), 1);
    world.store(&record).expect("stored");
    world.tier().flush().expect("flushed");
    let before = world.disks[0].written();
    let record = world.record(8 * REGION_PAGES + 8, (2, 1), 1);
    world.store(&record).expect("stored");
    world.tier().flush().expect("flushed");
    assert_eq!(
        world.disks[0].written() - before,
        geometry.stride + geometry.slot_bytes
    );
}

#[test]
fn a_disk_with_less_room_than_the_cap_uses_what_it_has() {
    let mut world = World::new(2, 8 << 20);
    world.start(key(1)).expect("a fresh disk");
    let set = world.set();
    let (full, segment) = (set.capacity_pages(), set.geometry().segment_bytes());
    let row = u32::from(set.geometry().disks) * set.geometry().segment_pages;
    world.disks[0].set_room(Some(3 * segment));
    world.disks[1].set_room(Some(2 * segment));
    let mut failed = None;
    for start in (0..full).step_by(20) {
        let record = world.record(start, (0, 20.min(full - start)), 1);
        if let Err(error) = world.store(&record) {
            failed.get_or_insert((start, error.kind()));
        }
    }
    let (start, kind) = failed.expect("the disk has no room");
    assert_eq!(kind, std::io::ErrorKind::StorageFull);
    assert!(start < 3 * row, "page {start}");
    let served = world.served();
    assert!(set.shrink() && set.is_short());
    assert_eq!(set.capacity_pages(), 2 * row);
    assert!(!set.shrink(), "once");
    assert!(!set.grow(), "there is still no room");
    assert_eq!(world.served(), served);
    world.disks.iter().for_each(|disk| disk.set_room(None));
    assert!(set.grow() && !set.is_short());
    assert_eq!(set.capacity_pages(), full);
}

/// The file with the last epoch of a leader was replaced by an older one: the disk has pages of later leaders.
#[test]
fn a_reset_covers_pages_of_leaders_with_later_epochs() {
    let mut world = World::new(1, 4 << 20);
    world.start(key(1)).expect("a fresh disk");
    for (start, epoch) in [(0, 1), (20, 9)] {
        let mut record = world.record(start, (0, 10), 1);
        record.stored.epoch = Epoch(epoch);
        world.store(&record).expect("stored");
    }
    world.tier().flush().expect("flushed");
    world.reset(None).expect("noted");
    assert!(world.served().is_empty());
    world.tier = None;
    world.start(key(1)).expect("opened");
    assert!(world.served().is_empty());
}
