//! A disk that fails in part: places of pages that are not used again, and a disk that takes no writes.

use kvferry_types::{Edge, LoadAnswer, TierId, Transfer};

use super::moves::{DOWN, RATIO, Tiered, UP};
use super::*;

impl Tiered {
    /// Ends a transfer as failed on the last rank, which names the page whose place failed.
    fn end_faulty(&mut self, transfer: &Transfer, complete: u32, bad: bool, faulty: u32) {
        for rank in 0..RANKS {
            let last = rank + 1 == RANKS;
            self.report_faulty(rank, transfer, (complete, bad), last.then_some(faulty));
        }
    }

    fn report_faulty(
        &mut self,
        rank: u16,
        transfer: &Transfer,
        (complete_pages, bad_source): (u32, bool),
        faulty_page: Option<u32>,
    ) {
        let failed = faulty_page.is_some();
        let ended = EndedCopy {
            complete_pages: if failed { complete_pages } else { RATIO },
            bytes: 64,
            copy_us: 1,
            bad_source: bad_source && failed,
            faulty_page,
            ..EndedCopy::new(transfer.id, !failed)
        };
        self.step(LeaderEvent::Ended {
            worker: worker(0, rank),
            epoch: EPOCH,
            copies: vec![ended],
        });
    }

    fn out_of_use(&self) -> u32 {
        let disk = self.leader.pool_of(TierId::Disk).expect("it serves");
        disk.page_states().out_of_use
    }

    fn writable(&mut self, rank: u16, writable: bool) {
        self.step(LeaderEvent::Writable {
            worker: worker(0, rank),
            tier: TierId::Disk,
            writable,
        });
    }

    /// Stores many sequences, all of which are written to the disk. Returns whether one was written to that page.
    fn overwrites(&mut self, page: u32) -> bool {
        let mut found = false;
        for name in (30..70).step_by(2) {
            self.stored(name);
            for down in self.take(DOWN) {
                let mut to = down.pairs.iter().flat_map(|pair| pair.dst.iter_pages());
                found |= to.any(|to| to == page);
                self.end(&down, RATIO, false);
            }
        }
        found
    }
}

fn page_of(transfer: &Transfer, index: usize, source: bool) -> u32 {
    let pair = &transfer.pairs[0];
    let list = if source { &pair.src } else { &pair.dst };
    list.iter_pages().nth(index).expect("a page")
}

#[test]
fn the_place_of_a_page_that_was_not_read_is_used_on_no_rank_again() {
    for (complete, bad) in [(3, true), (1, false)] {
        let mut tiered = Tiered::new(16, &[DOWN]);
        tiered.on_disk_only(0);
        assert_eq!(tiered.lookup(0), RATIO);
        tiered.load(0);
        let moves = tiered.take(UP);
        let place = page_of(&moves[0], 3, true);
        tiered.end_faulty(&moves[0], complete, bad, 3);
        assert!(tiered.lookup(0) <= 3, "the page is not found any longer");
        assert_eq!(tiered.out_of_use(), 1);
        assert_eq!(tiered.leader.counts().quarantined_places, 1);
        assert!(!tiered.overwrites(place), "page {place} was written again");
        assert_eq!(tiered.out_of_use(), 1);
    }
}

#[test]
fn a_place_that_fails_while_other_ranks_still_read_is_taken_out_once_they_have_ended() {
    let mut tiered = Tiered::new(16, &[DOWN]);
    tiered.on_disk_only(0);
    assert_eq!(tiered.lookup(0), RATIO);
    tiered.load(0);
    let moves = tiered.take(UP);
    let place = page_of(&moves[0], 5, true);
    tiered.report_faulty(0, &moves[0], (5, true), Some(5));
    assert_eq!(tiered.lookup(0), 0, "the block is forgotten at once");
    assert_eq!(tiered.out_of_use(), 0, "a rank still reads it");
    for rank in 1..RANKS {
        tiered.report_faulty(rank, &moves[0], (5, true), None);
    }
    assert_eq!(tiered.out_of_use(), 1);
    assert!(!tiered.overwrites(place), "page {place} was written again");
}

#[test]
fn the_place_of_a_page_that_was_not_written_is_used_on_no_rank_again() {
    let mut tiered = Tiered::new(16, &[DOWN]);
    tiered.stored(0);
    let moves = tiered.take(DOWN);
    let place = page_of(&moves[0], 2, false);
    tiered.end_faulty(&moves[0], 2, false, 2);
    assert_eq!(tiered.out_of_use(), 1);
    assert!(!tiered.overwrites(place), "page {place} was written again");
    // Places beyond the transfer are nonsense, and those of host memory are not of a disk.
    tiered.stored(4);
    let moves = tiered.take(DOWN);
    tiered.end_faulty(&moves[0], 0, false, RATIO);
    assert_eq!(tiered.out_of_use(), 1);
}

#[test]
fn a_disk_that_is_only_read_gets_no_moves_and_its_pages_are_still_loaded() {
    let mut tiered = Tiered::new(16, &[DOWN]);
    tiered.on_disk_only(0);
    tiered.writable(1, false);
    assert!(!tiered.leader.is_writable(TierId::Disk));
    tiered.stored(4);
    assert_eq!(tiered.take(DOWN), []);
    assert_eq!(tiered.lookup(0), RATIO);
    let load = tiered.load(0);
    assert_eq!(tiered.end_all(UP), 1);
    tiered.end_all(Edge::LOAD);
    let loaded = Some(Ok(Answer::Load(LoadAnswer { pages: RATIO })));
    assert_eq!(tiered.answered(load), loaded);
    tiered.writable(1, true);
    assert_eq!(tiered.take(DOWN).len(), 1, "what waited is written");
}

#[test]
fn a_worker_that_died_does_not_keep_its_successors_disk_from_being_written() {
    let mut tiered = Tiered::new(16, &[DOWN]);
    tiered.writable(1, false);
    tiered.step(LeaderEvent::WorkerDead(worker(0, 1)));
    assert!(tiered.leader.is_writable(TierId::Disk));
}

/// In a build with checks of arithmetic the leader ended.
#[test]
fn a_place_beyond_the_pages_of_a_write_is_of_no_page() {
    for (index, out_of_use) in [(RATIO - 1, 1), (RATIO, 0), (u32::MAX, 0)] {
        let mut tiered = Tiered::new(16, &[DOWN]);
        tiered.stored(0);
        let moves = tiered.take(DOWN);
        tiered.end_faulty(&moves[0], 1, false, index);
        assert_eq!(tiered.out_of_use(), out_of_use, "{index}");
        assert_eq!(tiered.leader.check(), Ok(()));
    }
}

#[test]
fn a_bad_source_beyond_the_pages_of_a_move_is_of_no_page() {
    for index in [RATIO, u32::MAX] {
        let mut tiered = Tiered::new(16, &[DOWN]);
        tiered.on_disk_only(0);
        assert_eq!(tiered.lookup(0), RATIO);
        tiered.load(0);
        let moves = tiered.take(UP);
        tiered.report_faulty(0, &moves[0], (index, true), Some(index));
        assert_eq!(tiered.lookup(0), RATIO, "while other ranks read it");
        for rank in 1..RANKS {
            tiered.report_faulty(rank, &moves[0], (RATIO, false), None);
        }
        assert_eq!(tiered.lookup(0), RATIO, "after the end");
        assert_eq!(tiered.out_of_use(), 0);
        assert_eq!(tiered.leader.check(), Ok(()));
    }
}
