//! Each counter of requests, and the states that are counted beside it.

use std::time::Duration;

use super::{COUNTERS, LeaderCounts, Refusable};
use crate::index::anchor::AnchorKey;
use crate::leader::event::{LeaderEffect, LeaderEvent};
use crate::leader::refusal::Refusal;
use crate::leader::tests::{ENGINE, arrival, lookup, serving, store, with_arena};
use crate::leader::{Leader, LeaderSettings};
use crate::pool::counts::PoolCounts;
use kvferry_types::{
    Edge, EndedCopy, Epoch, GroupId, PageList, Part, Rank, Ratio, Replica, Request, RequestId,
    SlotId, TierId, Time, TransferId, WorkerId,
};

const WORKER: WorkerId = WorkerId {
    replica: Replica(0),
    rank: Rank(0),
};

fn ms(ms: u64) -> Time {
    Time(0) + Duration::from_millis(ms)
}

/// Handles an event, and returns the transfers that it orders.
fn step(leader: &mut Leader, at: Time, event: LeaderEvent) -> Vec<TransferId> {
    let mut effects = Vec::new();
    leader.step(at, event, &mut effects);
    assert_eq!(leader.check(), Ok(()));
    let transfers = effects.into_iter().filter_map(|effect| match effect {
        LeaderEffect::Transfer { transfer, .. } => Some(transfer.id),
        _ => None,
    });
    transfers.collect()
}

fn send(leader: &mut Leader, at: Time, id: u64, request: Request) -> Vec<TransferId> {
    let event = LeaderEvent::Request {
        engine: ENGINE,
        id: RequestId(id),
        deadline: at + Duration::from_secs(5),
        request,
    };
    step(leader, at, event)
}

/// The worker reports that the first `complete_pages` of `pages` pages of a copy are complete.
fn end(leader: &mut Leader, at: Time, transfer: TransferId, (complete_pages, pages): (u32, u32)) {
    let copy = EndedCopy {
        complete_pages,
        bytes: 64,
        copy_us: 1,
        ..EndedCopy::new(transfer, complete_pages == pages)
    };
    let epoch = leader.epoch();
    let event = LeaderEvent::Ended {
        worker: WORKER,
        epoch,
        copies: vec![copy],
    };
    step(leader, at, event);
}

fn parts(pages: u32) -> Vec<Part> {
    vec![Part::new(GroupId(0), 0, PageList::run(0, pages))]
}

fn load(pages: u32) -> Request {
    Request::Load {
        slot: SlotId(1),
        parts: parts(pages),
        after: RequestId(0),
    }
}

fn store_pages(pages: u32) -> Request {
    Request::Store {
        slot: SlotId(1),
        parts: parts(pages),
        more: None,
        after: RequestId(0),
    }
}

/// The counters whose names begin with one of `names` and that are not 0.
fn counted(leader: &Leader, names: &[&str]) -> Vec<(&'static str, u64)> {
    let counters = leader.counters();
    let named = |name: &str| names.iter().any(|begin| name.starts_with(begin));
    counters
        .filter(|(name, value)| *value > 0 && named(name))
        .collect()
}

/// A leader that has the first two pages of a sequence.
fn with_two_pages() -> Leader {
    let mut leader = serving();
    send(&mut leader, ms(0), 1, lookup(1, 2));
    let copies = send(&mut leader, ms(0), 2, store_pages(2));
    end(&mut leader, ms(0), copies[0], (2, 2));
    leader
}

const REQUESTS: [&str; 5] = ["loads_", "load_us", "stores_", "store_us", "failed_pages"];

#[test]
fn names_of_counters_are_unique() {
    let mut names: Vec<&str> = COUNTERS.iter().map(|counter| counter.name).collect();
    names.sort_unstable();
    assert!(names.windows(2).all(|pair| pair[0] != pair[1]), "{names:?}");
}

#[test]
fn each_counter_of_refusals_counts_its_request_and_reason() {
    let requests = [
        ("lookups", Refusable::Lookup),
        ("loads", Refusable::Load),
        ("stores", Refusable::Store),
    ];
    let invalid = Refusal::Invalid {
        field: "parts",
        value: String::new(),
        remedy: "",
    };
    let not_pinned = Refusal::NotPinned {
        slot: SlotId(1),
        first_page: 0,
        end: 1,
    };
    let quota = Refusal::Quota {
        limit: "",
        max: 1,
        held: 1,
        pages: 1,
    };
    let refusals = [
        ("not_ready", Refusal::Reading),
        ("unknown_slot", Refusal::UnknownSlot(SlotId(1))),
        ("invalid", invalid),
        ("not_pinned", not_pinned),
        ("limit", Refusal::Limit { limit: "", max: 1 }),
        (
            "stale_request",
            Refusal::StaleRequest {
                id: RequestId(1),
                is_over: true,
            },
        ),
        ("draining", Refusal::Draining),
        ("busy", Refusal::Crowded { max: 1 }),
        ("quota", quota),
    ];
    let mut found = 0;
    for (requests, kind) in requests {
        for (code, refusal) in &refusals {
            let mut counts = LeaderCounts::default();
            counts.refusals.note(kind, refusal);
            let values = COUNTERS.iter().map(|counter| {
                let value = (counter.value)(&counts, &PoolCounts::default());
                (counter.name, value)
            });
            let noted: Vec<_> = values.filter(|(_, value)| *value > 0).collect();
            let name = format!("refused_{requests}_{code}");
            match COUNTERS.iter().any(|counter| counter.name == name) {
                true => assert_eq!(noted, [(name.as_str(), 1)]),
                false => assert_eq!(noted, []),
            }
            found += noted.len();
        }
    }
    let named = COUNTERS.iter();
    let named = named.filter(|counter| counter.name.starts_with("refused_"));
    // `refused_pages` is a counter of the pools.
    assert_eq!(found, named.count() - 1);
}

#[test]
fn loads_are_counted_by_their_ends_with_the_time_until_their_answers() {
    for (complete_pages, ended) in [(2, "loads_done"), (1, "loads_short"), (0, "loads_failed")] {
        let mut leader = with_two_pages();
        send(&mut leader, ms(10), 3, lookup(1, 2));
        assert_eq!(counted(&leader, &["hit_tokens"]), [("hit_tokens", 32)]);
        let copies = send(&mut leader, ms(10), 4, load(2));
        assert_eq!((leader.open_loads(), leader.open_stores()), (1, 0));
        assert_eq!(leader.pages_over(Edge::LOAD), 2);
        // A retry under way counts neither as a load nor as a refusal.
        assert_eq!(send(&mut leader, ms(11), 4, load(2)), []);
        end(&mut leader, ms(13), copies[0], (complete_pages, 2));
        assert_eq!((leader.open_loads(), leader.open_requests()), (0, 0));
        assert_eq!(leader.pages_over(Edge::LOAD), 0);
        let names = ["loads_", "load_us", "loaded_pages", "refused_loads"];
        let mut expected = vec![(ended, 1), ("load_us", 3000)];
        let loaded = ("loaded_pages", u64::from(complete_pages));
        expected.splice(0..0, (complete_pages > 0).then_some(loaded));
        assert_eq!(counted(&leader, &names), expected);
    }
}

#[test]
fn stores_are_counted_by_their_ends_with_the_time_until_their_answers() {
    for (complete_pages, ended) in [(2, "stores_done"), (0, "stores_failed")] {
        let mut leader = serving();
        send(&mut leader, ms(0), 1, lookup(1, 2));
        let copies = send(&mut leader, ms(5), 2, store_pages(2));
        assert_eq!((leader.open_loads(), leader.open_stores()), (0, 1));
        assert_eq!(leader.pages_over(Edge::STORE), 2);
        end(&mut leader, ms(9), copies[0], (complete_pages, 2));
        assert_eq!((leader.open_stores(), leader.open_requests()), (0, 0));
        let mut expected = vec![(ended, 1), ("store_us", 4000)];
        expected.extend((complete_pages == 0).then_some(("failed_pages", 2)));
        assert_eq!(counted(&leader, &REQUESTS), expected);
    }
}

#[test]
fn pages_of_a_store_that_are_there_are_counted_as_present() {
    let mut leader = with_two_pages();
    assert_eq!(send(&mut leader, ms(1), 3, store_pages(2)), []);
    assert_eq!(counted(&leader, &["present"]), [("present_pages", 2)]);
    assert_eq!(counted(&leader, &["stores_"]), [("stores_done", 2)]);
}

#[test]
fn a_cancelled_store_is_no_failed_one() {
    let mut leader = serving();
    send(&mut leader, ms(0), 1, lookup(1, 2));
    let copies = send(&mut leader, ms(0), 2, store_pages(2));
    let cancel = Request::CancelStores { slot: None };
    send(&mut leader, ms(1), 4, cancel);
    end(&mut leader, ms(2), copies[0], (0, 2));
    let once = [
        ("stores_cancelled", 1),
        ("store_us", 2000),
        ("failed_pages", 2),
    ];
    assert_eq!(counted(&leader, &REQUESTS), once);
    // This store was sent before the cancel and arrives after it.
    assert_eq!(send(&mut leader, ms(3), 3, store(1, None)), []);
    let twice = [
        ("stores_cancelled", 2),
        ("store_us", 2000),
        ("failed_pages", 3),
    ];
    assert_eq!(counted(&leader, &REQUESTS), twice);
}

#[test]
fn refusals_are_counted_once_for_all_retries() {
    let mut leader = with_arena(32, |settings| settings.open_requests_max = 1);
    for _ in 0..2 {
        send(&mut leader, ms(0), 1, load(2));
        send(&mut leader, ms(0), 2, store_pages(2));
    }
    send(&mut leader, ms(0), 3, lookup(1, 2));
    send(&mut leader, ms(0), 4, load(2));
    send(&mut leader, ms(0), 5, store_pages(2));
    // A store is under way: another one is refused, and a lookup is not.
    send(&mut leader, ms(0), 6, store_pages(2));
    send(&mut leader, ms(0), 7, lookup(2, 2));
    leader.drain();
    send(&mut leader, ms(0), 8, lookup(1, 2));
    let expected = [
        ("refused_lookups_draining", 1),
        ("refused_loads_unknown_slot", 1),
        ("refused_loads_not_pinned", 1),
        ("refused_stores_unknown_slot", 1),
        ("refused_stores_limit", 1),
    ];
    assert_eq!(counted(&leader, &["refused_"]), expected);
    assert_eq!(counted(&leader, &["loads_", "load_us"]), []);
    assert_eq!(leader.open_requests(), 1);
}

#[test]
fn a_request_whose_answer_is_no_longer_kept_is_counted_as_stale() {
    let mut leader = serving();
    for id in 2..=crate::leader::session::ANSWERS_KEPT as u64 + 3 {
        send(&mut leader, ms(0), id, Request::Finish { slot: SlotId(9) });
    }
    send(&mut leader, ms(0), 1, lookup(1, 2));
    let expected = [("refused_lookups_stale_request", 1)];
    assert_eq!(counted(&leader, &["refused_"]), expected);
}

#[test]
fn parked_requests_are_open_until_they_are_refused() {
    let ratio = Ratio::new(4).expect("in bounds");
    let mut settings = LeaderSettings::new(Epoch(1), 1, ratio, AnchorKey::new([1; 32]));
    settings.open_requests_max = 2;
    let mut leader = Leader::new(settings);
    step(&mut leader, ms(0), LeaderEvent::EngineOpened(ENGINE));
    send(&mut leader, ms(0), 1, load(2));
    send(&mut leader, ms(0), 2, store_pages(2));
    send(&mut leader, ms(0), 3, load(2));
    send(&mut leader, ms(0), 4, store_pages(2));
    assert_eq!((leader.parked_requests(), leader.open_requests()), (2, 0));
    let crowded = [("refused_loads_busy", 1), ("refused_stores_busy", 1)];
    assert_eq!(counted(&leader, &["refused_"]), crowded);
    for event in arrival(1, (0, 1), 32) {
        step(&mut leader, ms(0), event);
    }
    assert_eq!(leader.parked_requests(), 0);
    let all = [
        ("refused_loads_unknown_slot", 1),
        ("refused_loads_busy", 1),
        ("refused_stores_unknown_slot", 1),
        ("refused_stores_busy", 1),
    ];
    assert_eq!(counted(&leader, &["refused_"]), all);
}

#[test]
fn pages_that_are_neither_loaded_nor_finished_in_time_are_counted_as_expired() {
    let mut leader = with_two_pages();
    send(&mut leader, ms(10), 3, lookup(1, 2));
    step(&mut leader, ms(30_009), LeaderEvent::Tick);
    assert_eq!(counted(&leader, &["expired_"]), []);
    step(&mut leader, ms(30_010), LeaderEvent::Tick);
    assert_eq!(counted(&leader, &["expired_"]), [("expired_holds", 1)]);
    step(&mut leader, ms(30_010), LeaderEvent::EngineClosed(ENGINE));
    step(&mut leader, ms(40_010), LeaderEvent::Tick);
    let expired = [("expired_holds", 1), ("expired_engines", 1)];
    assert_eq!(counted(&leader, &["expired_"]), expired);
}

#[test]
fn pages_that_are_finished_in_time_do_not_expire() {
    let mut leader = with_two_pages();
    send(&mut leader, ms(10), 3, lookup(1, 2));
    send(&mut leader, ms(11), 4, Request::Finish { slot: SlotId(1) });
    step(&mut leader, ms(40_000), LeaderEvent::Tick);
    assert_eq!(counted(&leader, &["expired_"]), []);
}

#[test]
fn hits_are_counted_by_tier_and_group_in_tokens() {
    let mut leader = with_two_pages();
    assert!(
        leader.hit_tokens().is_empty(),
        "the first lookup found nothing"
    );
    for (id, found) in [(3, 32), (4, 64)] {
        send(&mut leader, ms(id), id, lookup(1, 2));
        let hits: Vec<_> = leader.hit_tokens().iter().collect();
        assert_eq!(hits, [(&(TierId::Host, GroupId(0)), &found)]);
    }
}

#[test]
fn a_probe_looks_into_every_tier_that_serves_and_changes_nothing() {
    let leader = with_two_pages();
    let before = format!("{leader:?}");
    assert_eq!(leader.probe(), 1);
    assert_eq!(format!("{leader:?}"), before);
    let ratio = Ratio::new(4).expect("in bounds");
    let settings = LeaderSettings::new(Epoch(1), 1, ratio, AnchorKey::new([1; 32]));
    assert_eq!(Leader::new(settings).probe(), 0, "no tier is open");
}
