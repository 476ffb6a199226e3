//! Small replays with round numbers: pages of 1 MB, links of 1 GB/s, messages of 50 us, 10 us before each copy.

use std::sync::Arc;
use std::time::Duration;

use kvferry_core::{AnchorKey, LeaderSettings};
use kvferry_types::{Epoch, GroupGeometry, GroupId, PageHashes, PerTier, Ratio};
use kvferry_workload::scheduler::Prompt;

use super::*;

const US: u64 = 1_000;
const MS: u64 = 1_000_000;
const MESSAGE: u64 = 50 * US;
/// Prefill of a page: 16 tokens at 16,000 tokens a second.
const PAGE_COMPUTED: u64 = MS;
/// Time of a page on a link.
const PAGE_MOVED: u64 = MS;
const COPY_LATENCY: u64 = 10 * US;

fn settings() -> TimedSettings {
    TimedSettings {
        d2h_bytes_per_s: 1_000_000_000,
        h2d_bytes_per_s: 1_000_000_000,
        store_bytes_per_s: None,
        link_latency: Duration::from_nanos(COPY_LATENCY),
        message_latency: Duration::from_nanos(MESSAGE),
        prefill: Prefill::Rate(16_000),
        decode_per_token: Duration::ZERO,
        serial_prefill: true,
        ..TimedSettings::default()
    }
}

/// A replay with `device_pages` pages on the device, none of which stay cached, and 64 pages of G2.
fn world(settings: TimedSettings, ranks: u16, device_pages: u32) -> Timed {
    let ratio = Ratio::new(4).expect("a ratio");
    let mut leader = LeaderSettings::new(Epoch(1), ranks, ratio, AnchorKey::new([0; 32]));
    leader.record_decisions = true;
    let geometry = GroupGeometry {
        group: GroupId(0),
        engine_page_tokens: 16,
        layers: 1,
        page_bytes: 1_000_000,
        device_pages,
        content_digest: [0; 16],
        layout_fingerprint: [0; 16],
        ..GroupGeometry::default()
    };
    let scheduler = Scheduler::new(device_pages, 0);
    Timed::new(
        Leader::new(leader),
        scheduler,
        ranks,
        &geometry.into(),
        &PerTier::host(64),
        settings,
    )
    .expect("a world")
}

/// A prompt of full pages with these contents.
fn arrival(at: u64, slot: u64, contents: &[u8]) -> Arrival {
    let hashes = contents.iter().flat_map(|content| [*content; 16]).collect();
    let prompt = Prompt {
        namespace: std::sync::Arc::from([]),
        slot: SlotId(slot),
        tokens: 16 * contents.len() as u64,
        hashes: Arc::new(PageHashes::packed(16, hashes).expect("hashes")),
    };
    Arrival {
        at: Time(at),
        prompt,
        output_tokens: 0,
    }
}

fn run(world: &mut Timed, arrivals: &[Arrival], pace: Pace) -> (Measurements, Vec<Served>) {
    let mut served = Vec::new();
    let seen = world
        .run(arrivals.iter().cloned(), pace, |done| served.push(*done))
        .expect("served");
    assert_eq!(world.held_pages(), 0);
    assert_eq!(world.leader().copies_under_way(), 0);
    assert_eq!(world.leader().check(), Ok(()));
    (seen, served)
}

#[test]
fn a_stored_prompt_takes_the_computed_time() {
    let mut world = world(settings(), 2, 8);
    let (seen, _) = run(
        &mut world,
        &[arrival(0, 1, &[1, 2, 3, 4])],
        Pace::Timestamps,
    );
    let first_token = 2 * MESSAGE + 4 * PAGE_COMPUTED;
    assert_eq!(seen.lookup_ns, [2 * MESSAGE]);
    assert_eq!(seen.first_token_ns, [first_token]);
    assert_eq!(seen.prefill, Duration::from_millis(4));
    // The workers are notified that the pages are written, copy and report; the engine receives the answer and
    // finishes.
    let copied = MESSAGE + COPY_LATENCY + 4 * PAGE_MOVED;
    let end = first_token + copied + 2 * MESSAGE + 2 * MESSAGE;
    assert_eq!(seen.span, Duration::from_nanos(end));
    assert_eq!(seen.d2h.bytes, 8_000_000);
    assert_eq!(seen.d2h.busy, Duration::from_millis(8));
    assert_eq!(seen.d2h.queue_ns, [0, 0], "alone on the link of each rank");
    assert_eq!(seen.h2d, LinkUse::default());
    assert_eq!((seen.late_stores, seen.page_wait_ns.len()), (0, 0));
}

#[test]
fn a_loaded_prompt_takes_the_computed_time() {
    let mut world = world(settings(), 2, 8);
    let arrivals = [
        arrival(0, 1, &[1, 2, 3, 4]),
        arrival(50 * MS, 2, &[1, 2, 3, 4, 5]),
    ];
    let (seen, served) = run(&mut world, &arrivals, Pace::Timestamps);
    let load = 4 * MESSAGE + COPY_LATENCY + 4 * PAGE_MOVED;
    assert_eq!(seen.load_ns, [load]);
    let first_token = 2 * MESSAGE + load + PAGE_COMPUTED;
    assert_eq!(seen.first_token_ns[1], first_token);
    assert_eq!((served[1].hit_pages, served[1].loaded_pages), (4, 4));
    assert_eq!(seen.h2d.bytes, 8_000_000);
}

#[test]
fn copies_at_one_time_share_their_link() {
    let mut settings = settings();
    settings.prefill = Prefill::Instant;
    let mut world = world(settings, 1, 8);
    let arrivals = [arrival(0, 1, &[1, 2]), arrival(0, 2, &[3, 4, 5, 6])];
    let (seen, _) = run(&mut world, &arrivals, Pace::Timestamps);
    // Two pages each at half the rate, then the other two alone.
    assert_eq!(seen.d2h.queue_ns, [2 * PAGE_MOVED, 2 * PAGE_MOVED]);
    assert_eq!(seen.d2h.busy, Duration::from_nanos(6 * PAGE_MOVED));
    // Both wait for the order, which arrives after the notification that all is written.
    let end = 4 * MESSAGE + COPY_LATENCY + 6 * PAGE_MOVED + 4 * MESSAGE;
    assert_eq!(seen.span, Duration::from_nanos(end));
}

#[test]
fn stores_wait_for_their_rate_and_loads_do_not() {
    let mut settings = settings();
    settings.prefill = Prefill::Instant;
    settings.store_bytes_per_s = std::num::NonZeroU64::new(1_000_000);
    let mut world = world(settings, 1, 16);
    let stored = [arrival(0, 1, &[1, 2]), arrival(0, 2, &[3, 4])];
    // Comes while the second store waits until the 2 MB of the first one are paid for, 2 s from the start.
    let loaded = arrival(100 * MS, 3, &[1, 2]);
    let arrivals = [stored[0].clone(), stored[1].clone(), loaded];
    let (seen, served) = run(&mut world, &arrivals, Pace::Timestamps);
    assert_eq!(seen.d2h.queue_ns, [0, 2_000 * MS - 4 * MESSAGE]);
    assert_eq!(served.iter().map(|done| done.loaded_pages).sum::<u32>(), 2);
    assert_eq!(seen.load_ns, [4 * MESSAGE + COPY_LATENCY + 2 * PAGE_MOVED]);
    assert_eq!(seen.h2d.queue_ns, [0]);
}

#[test]
fn a_prompt_waits_when_the_device_is_exactly_full() {
    let arrivals = [arrival(0, 1, &[1, 2, 3, 4]), arrival(MS, 2, &[5, 6, 7, 8])];
    let mut roomy = world(settings(), 1, 8);
    let (seen, _) = run(&mut roomy, &arrivals, Pace::Timestamps);
    assert!(seen.page_wait_ns.is_empty());
    let mut full = world(settings(), 1, 7);
    let (seen, served) = run(&mut full, &arrivals, Pace::Timestamps);
    // The store of the first prompt reads its pages until the end, so they are held until then.
    let first = 2 * MESSAGE + 4 * PAGE_COMPUTED + MESSAGE + COPY_LATENCY + 4 * PAGE_MOVED;
    let free = first + 2 * MESSAGE + 2 * MESSAGE;
    assert_eq!(seen.page_wait_ns, [free - MS]);
    let first_token = free - MS + 2 * MESSAGE + 4 * PAGE_COMPUTED;
    assert_eq!(seen.first_token_ns[1], first_token);
    let waited: Vec<bool> = served.iter().map(|done| done.waited_for_pages).collect();
    assert_eq!(waited, [false, true]);
}

#[test]
fn prefills_wait_for_the_device_unless_it_is_parallel() {
    let arrivals = [arrival(0, 1, &[1, 2]), arrival(0, 2, &[3, 4])];
    let mut serial = world(settings(), 1, 8);
    let (seen, _) = run(&mut serial, &arrivals, Pace::Timestamps);
    let first = 2 * MESSAGE + 2 * PAGE_COMPUTED;
    assert_eq!(seen.first_token_ns, [first, first + 2 * PAGE_COMPUTED]);
    let mut settings = settings();
    settings.serial_prefill = false;
    let mut parallel = world(settings, 1, 8);
    let (seen, _) = run(&mut parallel, &arrivals, Pace::Timestamps);
    assert_eq!(seen.first_token_ns, [first, first]);
}

#[test]
fn parallel_prefills_that_end_out_of_order_store_written_pages_only() {
    let mut settings = settings();
    settings.serial_prefill = false;
    let mut world = world(settings, 1, 12);
    let arrivals = [
        arrival(0, 1, &[1, 2, 3, 4, 5, 6, 7, 8]),
        arrival(0, 2, &[9]),
    ];
    let (seen, _) = run(&mut world, &arrivals, Pace::Timestamps);
    // The short prompt is computed at once, but its store comes after the long prompt's, and may not start before it is
    // written.
    let long = 2 * MESSAGE + 8 * PAGE_COMPUTED;
    assert_eq!(seen.first_token_ns, [2 * MESSAGE + PAGE_COMPUTED, long]);
    let last = long + MESSAGE + COPY_LATENCY + 9 * PAGE_MOVED + 4 * MESSAGE;
    assert_eq!(seen.span, Duration::from_nanos(last));
}

#[test]
fn decoding_holds_the_pages() {
    let mut settings = settings();
    settings.decode_per_token = Duration::from_millis(3);
    let mut world = world(settings, 1, 4);
    let mut arrivals = [arrival(0, 1, &[1, 2, 3, 4]), arrival(0, 2, &[5])];
    arrivals[0].output_tokens = 10;
    let (seen, _) = run(&mut world, &arrivals, Pace::Timestamps);
    let free = 2 * MESSAGE + 4 * PAGE_COMPUTED + 30 * MS + 2 * MESSAGE;
    assert_eq!(seen.page_wait_ns, [free]);
}

#[test]
fn a_closed_loop_keeps_so_many_open() {
    let mut world = world(settings(), 1, 64);
    let arrivals: Vec<Arrival> = (0..6).map(|slot| arrival(0, slot, &[slot as u8])).collect();
    let (seen, served) = run(&mut world, &arrivals, Pace::Closed(1));
    let each = 2 * MESSAGE + PAGE_COMPUTED + MESSAGE + COPY_LATENCY + PAGE_MOVED + 4 * MESSAGE;
    assert_eq!(seen.span, Duration::from_nanos(6 * each));
    assert_eq!(served.len(), 6);
    let first_token = 2 * MESSAGE + PAGE_COMPUTED;
    assert_eq!(seen.first_token_ns, [first_token; 6]);
}

#[test]
fn a_copy_that_takes_too_long_is_stopped_and_its_prompt_goes_on() {
    let mut settings = settings();
    settings.d2h_bytes_per_s = 100_000;
    let mut world = world(settings, 2, 4);
    let arrivals = [
        arrival(0, 1, &[1, 2, 3, 4]),
        arrival(90_000 * MS, 2, &[1, 2, 3, 4]),
    ];
    let (seen, served) = run(&mut world, &arrivals, Pace::Timestamps);
    assert_eq!(seen.late_stores, 2, "4 MB take 40 s, 20 s are granted");
    assert_eq!((served[0].refusals, served[1].hit_pages), (0, 0));
    let states = world.leader().pool().expect("a pool").page_states();
    let left = states.ready + states.reserved + states.filling + states.quarantined;
    assert_eq!(left, 0);
}

#[test]
fn a_prompt_without_a_full_page_is_computed_all_the_same() {
    let mut world = world(settings(), 1, 4);
    let mut arrivals = [arrival(0, 1, &[])];
    arrivals[0].prompt.tokens = 8;
    let (seen, served) = run(&mut world, &arrivals, Pace::Timestamps);
    assert_eq!(seen.first_token_ns, [PAGE_COMPUTED / 2]);
    assert_eq!(seen.span, Duration::from_nanos(PAGE_COMPUTED / 2));
    assert_eq!(served.len(), 1);
}

#[test]
fn a_prompt_that_never_fits_is_an_error() {
    let mut world = world(settings(), 1, 2);
    let arrivals = [arrival(0, 1, &[1, 2, 3]), arrival(0, 2, &[4])];
    let error = world.run(arrivals.into_iter(), Pace::Timestamps, |_| ());
    assert!(matches!(error, Err(ReplayError::PromptsLeft(2))));
}

#[test]
fn the_same_input_gives_the_same_output() {
    let once = || {
        let mut world = world(settings(), 2, 16);
        let arrivals: Vec<Arrival> = (0..200_u64)
            .map(|slot| {
                let length = 1 + slot * 7 % 11;
                let contents: Vec<u8> = (0..length).map(|at| (slot % 5 * 40 + at) as u8).collect();
                arrival(slot * 2_300 * US, slot, &contents)
            })
            .collect();
        let seen = run(&mut world, &arrivals, Pace::Timestamps);
        (seen, world.leader().decisions_digest().expect("recorded"))
    };
    let (first, second) = (once(), once());
    assert_eq!(first, second);
    let ((seen, served), _) = first;
    assert!(!seen.page_wait_ns.is_empty() && served.iter().any(|done| done.loaded_pages > 0));
}
