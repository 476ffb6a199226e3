//! The cost gate: pages on the disk are offered if they are loaded sooner than computed, and as long as that is unknown.

use std::num::NonZeroU64;

use kvferry_types::{Edge, PagesBelow, TierId, Transfer};

use super::moves::{DOWN, RATIO, Tiered, UP};
use super::*;

const SECOND: u64 = 1_000_000_000;

/// A leader whose engine computes a second's worth of tokens in the pages of one block, so that loading a block is
/// compared with one second.
fn gated() -> Tiered {
    let tokens = u64::from(RATIO) * u64::from(geometry().engine_page_tokens);
    let mut tiered = Tiered::with(geometry().into(), 16, &[DOWN], |settings| {
        settings.prefill_tokens_per_s = NonZeroU64::new(tokens);
    });
    tiered.now = Time(SECOND);
    tiered
}

fn lookup(tiered: &mut Tiered, name: u8) -> LookupAnswer {
    tiered.lookup(name);
    match tiered.answer() {
        Some(Ok(Answer::Lookup(found))) => found,
        other => unreachable!("{other:?}"),
    }
}

/// Ends a transfer on every rank, which took `ms` for each block of `RATIO` pages.
fn took(tiered: &mut Tiered, transfer: &Transfer, ms: u64) {
    tiered.now = tiered.now + Duration::from_millis(ms);
    let pages: u64 = transfer.pairs.iter().map(|pair| pair.src.pages()).sum();
    for rank in 0..RANKS {
        let ended = EndedCopy {
            bytes: pages * transfer.page_bytes,
            copy_us: ms * 1_000 * pages / u64::from(RATIO),
            ..EndedCopy::complete(transfer.id)
        };
        tiered.step(LeaderEvent::Ended {
            worker: worker(0, rank),
            epoch: EPOCH,
            copies: vec![ended],
        });
    }
}

/// Loads a sequence from the disk, which takes `ms`, and evicts it from host memory again.
fn measured(tiered: &mut Tiered, name: u8, ms: u64) {
    tiered.on_disk_only(name);
    let found = lookup(tiered, name);
    assert_eq!((found.hit_pages, found.ready_in_ms), (RATIO, None));
    tiered.load(name);
    let up = tiered.take(UP);
    took(tiered, &up[0], ms);
    tiered.end_all(Edge::LOAD);
    evicted(tiered, name);
}

/// Stores two other sequences, for which host memory evicts the ones before.
fn evicted(tiered: &mut Tiered, name: u8) {
    let finished = Request::Finish {
        slot: SlotId(name.into()),
    };
    tiered.request(finished);
    for other in [24, 26] {
        tiered.stored(other);
        tiered.end_all(DOWN);
    }
}

#[test]
fn pages_that_are_computed_sooner_than_loaded_are_left_out_and_counted() {
    let mut tiered = gated();
    measured(&mut tiered, 0, 1_100);
    let left_out = LookupAnswer {
        declined_pages: RATIO,
        ..LookupAnswer::default()
    };
    assert_eq!(lookup(&mut tiered, 0), left_out);
    let tokens = RATIO * geometry().engine_page_tokens;
    assert_eq!(tiered.leader.counts().declined_tokens, u64::from(tokens));
    let disk = tiered.leader.pool_of(TierId::Disk).expect("it serves");
    assert_eq!(disk.pins(), 0, "pages that are not offered are not held");
}

#[test]
fn pages_that_are_loaded_sooner_than_computed_are_offered_with_their_time() {
    let mut tiered = gated();
    measured(&mut tiered, 0, 600);
    let offered = LookupAnswer {
        hit_pages: RATIO,
        below_pages: PagesBelow::disk(RATIO),
        ready_in_ms: Some(600),
        ..LookupAnswer::default()
    };
    assert_eq!(lookup(&mut tiered, 0), offered);
    assert_eq!(tiered.leader.counts().declined_tokens, 0);
    // The blocks of another load are on their way up first: both of them take longer than computing one.
    tiered.load(0);
    assert_eq!(lookup(&mut tiered, 20).declined_pages, RATIO);
    tiered.end_all(UP);
    tiered.end_all(Edge::LOAD);
    let found = lookup(&mut tiered, 20);
    assert_eq!((found.hit_pages, found.declined_pages), (RATIO, 0));
}

#[test]
fn a_rate_that_was_not_measured_lately_keeps_nothing_out() {
    let mut tiered = gated();
    measured(&mut tiered, 0, 2_000);
    assert_eq!(lookup(&mut tiered, 0).declined_pages, RATIO);
    tiered.now = tiered.now + Duration::from_secs(61);
    let found = lookup(&mut tiered, 0);
    assert_eq!((found.hit_pages, found.declined_pages), (RATIO, 0));
    assert_eq!(found.ready_in_ms, None);
}

#[test]
fn pages_in_host_memory_are_offered_whatever_the_disk_takes() {
    let mut tiered = gated();
    measured(&mut tiered, 0, 2_000);
    let found = lookup(&mut tiered, 26);
    assert_eq!((found.hit_pages, found.declined_pages), (RATIO, 0));
}
