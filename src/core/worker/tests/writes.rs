//! Copies wait for the writes of their engine.

use super::*;

#[test]
fn a_load_overwrites_nothing_that_its_engine_still_writes() {
    let mut worker = worker();
    let late = after(7, load(1));
    let waits = WorkerEffect::Await {
        engine: ENGINE,
        through: RequestId(7),
    };
    assert_eq!(
        order(&mut worker, 1, 1, vec![late, load(2)]),
        [waits, start_of(load(2))]
    );
    assert_eq!(written(&mut worker, 6), []);
    let started = after(7, load(1));
    assert_eq!(written(&mut worker, 7), [start_of(started)]);
}

#[test]
fn a_store_of_what_earlier_work_writes_waits_for_that_work() {
    let mut worker = worker();
    let of_its_step = copy(1, Direction::Store, 7);
    assert_eq!(order(&mut worker, 1, 1, vec![of_its_step]), []);
    let of_earlier_work = after(5, copy(2, Direction::Store, 8));
    let waits = WorkerEffect::Await {
        engine: ENGINE,
        through: RequestId(5),
    };
    assert_eq!(order(&mut worker, 1, 2, vec![of_earlier_work]), [waits]);
    assert_eq!(written(&mut worker, 4), []);
    assert_eq!(starts(&written(&mut worker, 5)), [2]);
    assert_eq!(starts(&written(&mut worker, 7)), [1]);
}

#[test]
fn a_load_that_waits_for_its_engine_ends_by_its_deadline_and_by_a_cancel() {
    let mut worker = worker();
    let late = |id| after(9, load(id));
    order(&mut worker, 1, 1, vec![late(1)]);
    order(&mut worker, 1, 2, vec![late(2)]);
    let reported = |effects: Vec<WorkerEffect>| -> Vec<TransferId> {
        let ended = effects.into_iter().flat_map(|effect| match effect {
            WorkerEffect::Report { copies, .. } => copies,
            _ => Vec::new(),
        });
        ended.map(|copy| copy.transfer).collect()
    };
    assert!(reported(cancel(&mut worker, 3, 1)).contains(&TransferId(1)));
    assert_eq!(
        reported(step(&mut worker, 100, WorkerEvent::Tick)),
        [TransferId(2)]
    );
    assert_eq!(worker.open_copies(), 0);
    assert_eq!(written(&mut worker, 9), []);
}

#[test]
fn a_request_that_is_over_does_not_count_as_written() {
    let mut worker = worker();
    register(&mut worker, 0, ENGINE, RequestId(20));
    admit_memory(&mut worker, 0, 2, 0);
    let late = super::after(15, copy(3, Direction::Load, 21));
    let started = starts(&order(&mut worker, 1, 2, vec![late]));
    assert!(started.is_empty(), "{started:?}");
    assert_eq!(starts(&written(&mut worker, 15)), [3]);
}
