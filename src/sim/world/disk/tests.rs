//! What the simulated disk keeps and loses.

use super::*;
use crate::world::storage::{CONTENT_MIN, TORN};
use kvferry_types::{Anchor, DomainId, Epoch, Fingerprint, PageRun, Rank, Record, Replica};

const KEY: SetKey = SetKey {
    layout: [1; 16],
    cells: 2,
};

fn process(incarnation: u32) -> (WorkerId, u32) {
    let worker = WorkerId {
        replica: Replica(0),
        rank: Rank(0),
    };
    (worker, incarnation)
}

fn stored(transfer: u64) -> Stored {
    Stored {
        epoch: Epoch(1),
        transfer: TransferId(transfer),
    }
}

/// A disk of 16 pages that a process has open.
fn opened() -> SimDisk {
    let mut disk = SimDisk::new(DepotId(1), 32);
    assert!(disk.take(process(1), Time(0)));
    disk.open(KEY);
    disk
}

/// Stores a block of one page, as a worker does.
fn store(disk: &mut SimDisk, page: u32, transfer: u64) {
    let content = CONTENT_MIN + transfer;
    disk.unlist(PageRun {
        start: page,
        count: 1,
    });
    assert_eq!(disk.prepare(page, Time(0), false), Ok(()));
    assert_eq!(disk.write(page, TORN), Ok(()));
    assert_eq!(disk.write(page, content), Ok(()));
    disk.written(TransferId(transfer), vec![content]);
    disk.list(&Record {
        anchor: Anchor(page.into()),
        domain: DomainId(1 << 64),
        block_start: page,
        first: 0,
        phase: 0,
        stored: stored(transfer),
        fingerprints: vec![Fingerprint(transfer.into())],
    });
}

fn flush(disk: &mut SimDisk) {
    disk.write_headers();
    disk.sync();
}

/// The next process opens the disk.
fn restart(disk: &mut SimDisk) -> FoundPages {
    disk.died(process(1), Time(0));
    assert!(disk.take(process(2), Time(0)));
    disk.open(KEY)
}

#[test]
fn a_process_that_ends_loses_what_was_not_written_and_a_power_loss_what_was_not_flushed() {
    let mut lost = [false; 3];
    for seed in 0..64 {
        let mut disk = opened();
        store(&mut disk, 0, 10);
        flush(&mut disk);
        store(&mut disk, 9, 11);
        disk.write_headers();
        store(&mut disk, 1, 12);
        if seed > 0 {
            disk.lose(&mut Rng::with_seed(seed));
        }
        let found = restart(&mut disk);
        assert_eq!(disk.served(0), Some(CONTENT_MIN + 10), "it is durable");
        assert_eq!(disk.served(1), None, "it was not written");
        match seed {
            0 => assert_eq!(disk.served(9), Some(CONTENT_MIN + 11), "the disk has it"),
            _ => {
                lost[0] |= disk.served(9).is_some();
                lost[1] |= disk.sum(9).is_none();
                lost[2] |= found.lost == 1;
            }
        }
    }
    assert_eq!(lost, [true; 3], "kept, header lost, content lost");
}

#[test]
fn a_page_is_not_overwritten_before_its_removal_is_durable() {
    let mut disk = opened();
    store(&mut disk, 3, 10);
    flush(&mut disk);
    let run = PageRun { start: 3, count: 1 };
    disk.unlist(run);
    assert_eq!(disk.prepare(3, Time(0), true), Ok(()));
    assert!(disk.write(3, TORN).is_err(), "a header lists the page");
    assert_eq!(disk.prepare(3, Time(0), false), Ok(()));
    assert_eq!(disk.write(3, TORN), Ok(()));
}

#[test]
fn pages_of_a_reset_do_not_come_back_although_headers_list_them() {
    for lies in [false, true] {
        let mut disk = opened();
        store(&mut disk, 0, 10);
        store(&mut disk, 1, 12);
        flush(&mut disk);
        disk.reset(&Scope::Everything, stored(11), lies);
        restart(&mut disk);
        assert_eq!(disk.served(0).is_some(), lies);
        assert!(disk.served(1).is_some(), "it was stored later");
    }
}

#[test]
fn a_full_disk_has_the_segments_that_exist_and_grows_again() {
    let mut disk = opened();
    store(&mut disk, 5, 10);
    store(&mut disk, 0, 11);
    disk.full_until = Some(Time(100));
    assert_eq!(disk.prepare(9, Time(50), false), Err(DiskFailure::Full));
    assert!(disk.shrink());
    assert_eq!((disk.capacity_pages(), disk.is_short()), (8, true));
    assert!(!disk.shrink());
    assert!(!disk.grow(Time(99)));
    assert!(disk.grow(Time(100)));
    assert_eq!((disk.capacity_pages(), disk.is_short()), (16, false));
}

#[test]
fn a_disk_that_was_away_serves_nothing_before_it_is_opened_again() {
    let mut disk = opened();
    store(&mut disk, 0, 10);
    flush(&mut disk);
    disk.go_away(Time(50), &mut Rng::with_seed(1));
    assert!(!disk.works(Time(50)), "what the process has open fails");
    assert!(disk.is_there(Time(50)));
    disk.close(process(1));
    assert!(disk.works(Time(50)));
    assert!(disk.take(process(2), Time(50)));
    disk.open(KEY);
    assert_eq!(disk.served(0), Some(CONTENT_MIN + 10));
}
