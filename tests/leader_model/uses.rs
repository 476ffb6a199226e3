//! Uses of pages in slower tiers: a lookup uses the copies of its pages in every tier, and the end of a request makes its
//! sequence the newest one there.

use kvferry_types::{PagesBelow, TierId};

use super::moves::{DOWN, RATIO, Tiered};
use super::*;

/// Blocks of the disk, by the name of their sequence, in no order.
fn on_disk(tiered: &Tiered) -> Vec<u8> {
    let disk = tiered.leader.pool_of(TierId::Disk).expect("it serves");
    let firsts: Vec<_> = disk.view().map(|block| block.fingerprints[0]).collect();
    let of = |name: &u8| firsts.contains(&sequence(*name, 1).fingerprint(0));
    (0..60).step_by(2).filter(of).collect()
}

fn finish(tiered: &mut Tiered, name: u8) {
    let slot = SlotId(name.into());
    let finished = tiered.request(Request::Finish { slot });
    assert_eq!(finished, Some(Ok(Answer::Finish)));
}

/// A disk full of the sequences 0 to 14, all of which host memory has, too.
fn full() -> Tiered {
    let mut tiered = Tiered::new(256, &[DOWN]);
    for name in (0..16).step_by(2) {
        tiered.stored(name);
        assert_eq!(tiered.end_all(DOWN), 1);
        finish(&mut tiered, name);
    }
    assert_eq!(on_disk(&tiered), [0, 2, 4, 6, 8, 10, 12, 14]);
    tiered
}

#[test]
fn pages_that_host_memory_serves_count_as_used_on_the_disk() {
    let mut tiered = full();
    assert_eq!(tiered.lookup(0), RATIO);
    tiered.stored(20);
    assert_eq!(tiered.end_all(DOWN), 1);
    assert_eq!(on_disk(&tiered), [0, 4, 6, 8, 10, 12, 14, 20]);
}

#[test]
fn the_end_of_a_request_makes_its_sequence_the_newest_one_on_the_disk() {
    let mut tiered = full();
    // Beside the lookups of the others, the request of sequence 0 still runs.
    assert_eq!(tiered.lookup(0), RATIO);
    for other in (2..16).step_by(2) {
        assert_eq!(tiered.lookup(other), RATIO);
    }
    finish(&mut tiered, 0);
    tiered.stored(20);
    assert_eq!(tiered.end_all(DOWN), 1);
    assert_eq!(on_disk(&tiered), [0, 4, 6, 8, 10, 12, 14, 20]);
}

#[test]
fn used_pages_that_the_disk_lacks_are_written_to_it_again() {
    let mut tiered = full();
    for name in [20, 22] {
        tiered.stored(name);
        assert_eq!(tiered.end_all(DOWN), 1);
    }
    assert_eq!(on_disk(&tiered), [4, 6, 8, 10, 12, 14, 20, 22]);
    assert_eq!(tiered.lookup(0), RATIO, "host memory has the pages");
    assert_eq!(tiered.end_all(DOWN), 1, "the disk lacked them");
    assert_eq!(on_disk(&tiered), [0, 6, 8, 10, 12, 14, 20, 22]);
    assert_eq!(tiered.lookup(0), RATIO);
    assert_eq!(tiered.end_all(DOWN), 0, "the disk has them");
}

#[test]
fn the_answer_of_a_lookup_counts_the_pages_below_host_memory() {
    let mut tiered = Tiered::new(16, &[DOWN]);
    tiered.on_disk_only(0);
    for (name, below_pages) in [(0, RATIO), (22, 0)] {
        assert_eq!(tiered.lookup(name), RATIO);
        let answer = LookupAnswer {
            hit_pages: RATIO,
            below_pages: PagesBelow::disk(below_pages),
            ..LookupAnswer::default()
        };
        assert_eq!(tiered.answer(), Some(Ok(Answer::Lookup(answer))));
    }
    let counts = tiered.leader.counts();
    assert_eq!(counts.below_pages, u64::from(RATIO));
    let tokens = u64::from(RATIO) * 16;
    assert_eq!(counts.below_tokens, tokens);
    let hits: Vec<_> = tiered.leader.hit_tokens().iter().collect();
    let (host, disk) = ((TierId::Host, GroupId(0)), (TierId::Disk, GroupId(0)));
    assert_eq!(hits, [(&host, &tokens), (&disk, &tokens)]);
}
