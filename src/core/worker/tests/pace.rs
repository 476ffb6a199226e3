//! Rates of edges: no more bytes start than an edge's rate permits, and nothing else waits for it.

use std::num::NonZeroU64;
use std::time::Duration;

use super::*;

const SECOND: u64 = 1_000_000_000;
const NONE: [u64; 0] = [];
const LATE: Time = Time(1_000 * SECOND);

/// A worker that stores at most `pages` pages a second, and runs any number of copies.
fn paced(pages: u64) -> Worker {
    let mut settings = WorkerSettings::new(1_000);
    let rate = NonZeroU64::new(pages * PAGE_BYTES).expect("above 0");
    settings.bytes_per_s.insert(Edge::STORE, rate);
    let mut worker = serving(settings);
    written(&mut worker, 1);
    worker
}

/// A store of `pages` pages that are written.
fn large(id: u64, pages: u32) -> Transfer {
    let pair = FragmentPair {
        src: PageList::run(0, pages),
        dst: PageList::run(0, pages),
    };
    Transfer {
        pairs: vec![pair],
        deadline: LATE,
        ..store(id, 1)
    }
}

fn tick(worker: &mut Worker, now: u64) -> Vec<u64> {
    starts(&step(worker, now, WorkerEvent::Tick))
}

/// Orders at `now` what follows an earlier order.
fn order_at(worker: &mut Worker, now: u64, transfers: Vec<Transfer>) -> Vec<u64> {
    order_at_epoch(worker, 1, now, transfers)
}

fn order_at_epoch(worker: &mut Worker, epoch: u64, now: u64, transfers: Vec<Transfer>) -> Vec<u64> {
    let (epoch, batch) = (Epoch(epoch), BatchId(transfers[0].id.0));
    let ordered = WorkerEvent::Ordered {
        epoch,
        batch,
        transfers,
        arena_pages: arena_pages(),
    };
    starts(&step(worker, now, ordered))
}

#[test]
fn a_copy_starts_when_those_before_it_are_paid_for() {
    let mut worker = paced(10);
    let stores = [3, 1, 2, 1].into_iter().zip(1..);
    let stores = stores.map(|(pages, id)| large(id, pages)).collect();
    let full = PACE_BURST.as_nanos() as u64;
    assert_eq!(order_at(&mut worker, SECOND, stores), [1], "3 pages: 0.3 s");
    for (at, id) in [(1.3, 2), (1.4, 3), (1.6, 4)] {
        let at = (at * SECOND as f64) as u64 - full;
        assert_eq!(worker.next_timeout(), Some(Time(at)));
        assert_eq!(tick(&mut worker, at - 1), NONE);
        assert_eq!(tick(&mut worker, at), [id]);
    }
    assert_eq!(
        worker.next_timeout(),
        Some(LATE),
        "nothing waits for the rate"
    );
}

/// The bucket holds 10 ms, less than one page here; the store has all 32 pages of the depot.
#[test]
fn a_copy_larger_than_the_bucket_starts() {
    let mut worker = paced(10);
    assert_eq!(order_at(&mut worker, SECOND, vec![large(1, 32)]), [1]);
    assert_eq!(order_at(&mut worker, 2 * SECOND, vec![large(2, 32)]), NONE);
    let at = worker.next_timeout().expect("the rate").0;
    assert_eq!(at, SECOND * 42 / 10 - PACE_BURST.as_nanos() as u64);
    assert_eq!(tick(&mut worker, at), [2]);
}

#[test]
fn no_more_bytes_start_than_the_rate_permits_and_no_fewer() {
    const PAGES_PER_S: u64 = 50_000;
    let mut worker = paced(PAGES_PER_S);
    let sizes: Vec<u32> = (0..2_000).map(|index| index * 7_919 % 32 + 1).collect();
    let stores = sizes.iter().zip(1..).map(|(pages, id)| large(id, *pages));
    // When each copy started, and the pages that had started before it.
    let mut log = Vec::new();
    let mut total = 0;
    let mut now = SECOND;
    let mut started = order_at(&mut worker, now, stores.collect());
    loop {
        for id in started.drain(..) {
            log.push((now, total));
            total += u64::from(sizes[id as usize - 1]);
            ended(&mut worker, now, vec![complete(id)]);
        }
        let Some(Time(next)) = worker.next_timeout() else {
            break;
        };
        // Timers fire up to 2 ms late.
        now = now.max(next) + now * 7_919 % 2_000_000;
        started = tick(&mut worker, now);
    }
    assert_eq!(log.len(), sizes.len());
    let pages_in = |ns: u64| PAGES_PER_S as f64 * ns as f64 / SECOND as f64;
    let burst = pages_in(PACE_BURST.as_nanos() as u64);
    for (index, (from, before)) in log.iter().enumerate() {
        for (to, until) in &log[index..] {
            let most = pages_in(to - from) + burst + 32.0;
            let moved = (until - before) as f64;
            assert!(
                moved <= most,
                "{moved} pages in {:?}",
                Duration::from_nanos(to - from)
            );
        }
    }
    let (last, all) = log[log.len() - 1];
    let least = pages_in(last - SECOND) * 0.99 - 32.0;
    assert!(all as f64 >= least, "{all} pages, {least} were permitted");
}

#[test]
fn a_load_never_waits_for_the_rate_of_stores() {
    let mut worker = paced(1);
    let stores = (1..=4).map(|id| large(id, 8)).collect();
    assert_eq!(order_at(&mut worker, SECOND, stores), [1]);
    for id in 5..100 {
        let now = SECOND + id;
        let load = Transfer {
            deadline: LATE,
            ..load(id)
        };
        assert_eq!(order_at(&mut worker, now, vec![load]), [id]);
    }
    let paid = 9 * SECOND - PACE_BURST.as_nanos() as u64;
    assert_eq!(worker.next_timeout(), Some(Time(paid)));
    assert_eq!(tick(&mut worker, paid - 1), NONE);
    assert_eq!(tick(&mut worker, paid), [2], "the loads cost no store time");
}

#[test]
fn a_copy_that_is_stopped_gives_nothing_back_and_one_that_never_started_costs_nothing() {
    let mut worker = paced(1);
    let stores = (1..=3).map(|id| large(id, 2)).collect();
    assert_eq!(order_at(&mut worker, SECOND, stores), [1]);
    assert_eq!(
        cancel(&mut worker, 9, 1),
        [WorkerEffect::Stop(TransferId(1)), report(9, vec![])]
    );
    assert_eq!(
        starts(&ended(&mut worker, SECOND, vec![refused(TransferId(1))])),
        NONE
    );
    cancel(&mut worker, 10, 2);
    let paid = 3 * SECOND - PACE_BURST.as_nanos() as u64;
    assert_eq!(worker.next_timeout(), Some(Time(paid)));
    assert_eq!(tick(&mut worker, paid - 1), NONE);
    assert_eq!(tick(&mut worker, paid), [3], "the second one never started");
    assert_eq!(worker.next_timeout(), Some(LATE));
}

#[test]
fn a_copy_that_waits_for_its_rate_ends_at_its_deadline() {
    let mut worker = paced(1);
    let last = Transfer {
        deadline: Time(3 * SECOND),
        ..large(2, 1)
    };
    assert_eq!(order_at(&mut worker, SECOND, vec![large(1, 8), last]), [1]);
    assert_eq!(worker.next_timeout(), Some(Time(3 * SECOND)));
    let effects = step(&mut worker, 3 * SECOND, WorkerEvent::Tick);
    assert_eq!(effects, [], "the order is answered when both have ended");
    assert_eq!(worker.open_copies(), 1);
    let effects = ended(&mut worker, 4 * SECOND, vec![complete(1)]);
    assert_eq!(
        effects,
        [report(1, vec![refused(TransferId(2)), complete(1)])]
    );
}

/// A timeout in the past would make the timer fire without end.
#[test]
fn no_timeout_is_due_while_the_limit_of_running_copies_holds_an_edge() {
    let mut worker = paced(1_000);
    worker.settings.running_max = 1;
    let stores = (1..=2).map(|id| large(id, 1)).collect();
    assert_eq!(order_at(&mut worker, SECOND, stores), [1]);
    assert_eq!(tick(&mut worker, 2 * SECOND), NONE);
    assert_eq!(worker.next_timeout(), Some(LATE));
    assert_eq!(
        starts(&ended(&mut worker, 2 * SECOND, vec![complete(1)])),
        [2]
    );
}

/// A copy that waits for the rate of its edge leaves its number in the queue when its leader is lost.
#[test]
fn a_new_leader_may_use_the_numbers_of_queued_copies_for_other_edges() {
    let mut settings = WorkerSettings::new(1);
    let rate = NonZeroU64::new(PAGE_BYTES).expect("above 0");
    settings.bytes_per_s.insert(Edge::STORE, rate);
    let mut worker = serving(settings);
    written(&mut worker, 9);
    let late = |transfer: Transfer| Transfer {
        deadline: LATE,
        ..transfer
    };
    let first = [store(1, 1), store(2, 2), store(3, 3)].map(late);
    assert_eq!(starts(&order(&mut worker, 1, 1, first.to_vec())), [1]);
    step(&mut worker, 0, WorkerEvent::LeaderLost);
    ended(&mut worker, 0, vec![refused(TransferId(1))]);
    find(&mut worker, 2, 2);
    let loads = [load(1), load(2)].map(late);
    assert_eq!(starts(&order(&mut worker, 2, 7, loads.to_vec())), [1]);
    // The rate permits a store, and none is queued.
    let second = LATE.0 / 2;
    assert!(tick(&mut worker, second).is_empty(), "one load runs");
    assert_eq!(starts(&ended(&mut worker, second, vec![complete(1)])), [2]);
    ended(&mut worker, second, vec![complete(2)]);
    let next = [load(9), store(10, 4)].map(late);
    let started = order_at_epoch(&mut worker, 2, second, next.to_vec());
    assert_eq!(started, [9, 10]);
}
