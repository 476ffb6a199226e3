//! Attach requests, statements of the memory, and what they stop.

use super::*;

#[test]
fn an_attach_and_then_the_memory_are_stated_until_they_are_answered() {
    let mut worker = worker();
    let effects = step(&mut worker, 5, WorkerEvent::LeaderFound(Epoch(2)));
    assert_eq!(effects, [attaches(2)]);
    let next = worker.next_timeout().expect("asks again").0;
    assert_eq!(step(&mut worker, next, WorkerEvent::Tick), [attaches(2)]);
    assert_eq!(admit(&mut worker, next, 1, 0), [], "an older request");
    let (attach, after) = (AttachId(2), Some(TransferId(0)));
    let admitted = WorkerEvent::Admitted { attach, after };
    assert_eq!(step(&mut worker, next, admitted), [states(2)]);
    let next = worker.next_timeout().expect("asks again").0;
    assert_eq!(step(&mut worker, next, WorkerEvent::Tick), [states(2)]);
    assert_eq!(
        admit_memory(&mut worker, next, 1, 0),
        [],
        "an older statement"
    );
    let (engine, admitted) = (ENGINE, true);
    assert_eq!(
        admit_memory(&mut worker, next, 2, 0),
        [WorkerEffect::Registered { engine, admitted }]
    );
    assert_eq!(worker.next_timeout(), None);
    assert_eq!(admit_memory(&mut worker, next, 2, 9), [], "answered twice");
    assert_eq!(starts(&order(&mut worker, 2, 1, vec![load(9)])), [9]);
}

#[test]
fn memory_that_is_refused_is_given_up_and_the_worker_stays_attached() {
    let mut worker = worker();
    step(&mut worker, 5, WorkerEvent::LeaderFound(Epoch(2)));
    let (attach, after) = (AttachId(2), Some(TransferId(0)));
    step(&mut worker, 6, WorkerEvent::Admitted { attach, after });
    let (number, after) = (MemoryId(2), None);
    let refusal = WorkerEvent::MemoryAdmitted { number, after };
    let (engine, admitted) = (ENGINE, false);
    assert_eq!(
        step(&mut worker, 6, refusal),
        [WorkerEffect::Registered { engine, admitted }]
    );
    assert_eq!(
        worker.next_timeout(),
        None,
        "the leader knows that there is none"
    );
    assert_eq!(worker.take_read(Epoch(2), 1), Ok(()));
    let effects = order(&mut worker, 2, 1, vec![load(1)]);
    assert_eq!(effects, [report(1, vec![refused(TransferId(1))])]);
    assert_eq!(starts(&order(&mut worker, 2, 2, vec![between(2)])), [2]);
    // Other memory is stated again.
    let effects = register(&mut worker, 7, ENGINE, RequestId(0));
    assert_eq!(effects, [states(3)]);
}

/// A rank that registers learns whether the leader still refuses the worker, and why.
#[test]
fn a_worker_that_is_refused_gives_up_its_memory_and_attaches_for_the_next() {
    let mut worker = worker();
    step(&mut worker, 5, WorkerEvent::LeaderFound(Epoch(2)));
    let refusal = |attach| WorkerEvent::Admitted {
        attach: AttachId(attach),
        after: None,
    };
    let (engine, admitted) = (ENGINE, false);
    assert_eq!(
        step(&mut worker, 6, refusal(2)),
        [WorkerEffect::Registered { engine, admitted }]
    );
    assert_eq!(worker.next_timeout(), None);
    let effects = order(&mut worker, 2, 1, vec![between(1)]);
    assert_eq!(effects, [report(1, vec![refused(TransferId(1))])]);
    assert_eq!(
        register(&mut worker, 7, ENGINE, RequestId(0)),
        [attaches(3)]
    );
    assert_eq!(
        step(&mut worker, 8, refusal(3)),
        [WorkerEffect::Registered { engine, admitted }]
    );
    register(&mut worker, 9, ENGINE, RequestId(0));
    let admitted = true;
    assert_eq!(
        admit(&mut worker, 9, 4, 0),
        [WorkerEffect::Registered { engine, admitted }]
    );
}

#[test]
fn other_memory_stops_the_copies_of_the_old_one_before_it_is_used() {
    let mut worker = worker();
    order(&mut worker, 1, 1, vec![load(1)]);
    let (engine, after) = (EngineId([2; 16]), RequestId(0));
    let effects = register(&mut worker, 1, engine, after);
    assert_eq!(effects, [WorkerEffect::Stop(TransferId(1))]);
    let effects = ended(&mut worker, 2, vec![refused(TransferId(1))]);
    let said = report(1, vec![refused(TransferId(1))]);
    assert_eq!(effects, [said, states(2)]);
}

/// A move touches no engine's memory: it goes on while an engine leaves, while another one registers, and before the
/// leader knows of that.
#[test]
fn moves_go_on_while_engines_come_and_go() {
    let mut worker = worker();
    order(&mut worker, 1, 1, vec![between(1), load(2)]);
    let effects = step(&mut worker, 1, WorkerEvent::MemoryGone(ENGINE));
    assert_eq!(
        effects,
        [WorkerEffect::Stop(TransferId(2))],
        "the load alone"
    );
    let effects = ended(&mut worker, 1, vec![refused(TransferId(2))]);
    assert_eq!(effects, [states(2)]);
    assert_eq!(starts(&order(&mut worker, 1, 2, vec![between(3)])), [3]);
    admit_memory(&mut worker, 1, 2, 7);
    let effects = register(&mut worker, 2, EngineId([2; 16]), RequestId(0));
    assert_eq!(effects, [states(3)]);
    let copies = vec![complete(2 + 1)];
    assert_eq!(ended(&mut worker, 2, copies.clone()), [report(2, copies)]);
    // The answer concerns orders for the engine's memory, and no moves.
    admit_memory(&mut worker, 2, 3, 7);
    let late = order(&mut worker, 1, 4, vec![between(6)]);
    assert_eq!(starts(&late), [6], "ordered before the answer");
    // The first move belongs to the first order, whose load has ended.
    let first = ended(&mut worker, 3, vec![complete(1)]);
    assert_eq!(
        first,
        [report(1, vec![refused(TransferId(2)), complete(1)])]
    );
}

#[test]
fn a_leader_that_is_lost_ends_moves_too() {
    let mut worker = worker();
    order(&mut worker, 1, 1, vec![between(1)]);
    let effects = step(&mut worker, 1, WorkerEvent::LeaderFound(Epoch(2)));
    assert_eq!(effects, [WorkerEffect::Stop(TransferId(1))]);
    let effects = ended(&mut worker, 1, vec![complete(1)]);
    assert_eq!(effects, [attaches(2)], "once no copy is left");
}

/// A disk opens shortly after the engine has registered, and whenever it fails or is full and comes back.
#[test]
fn copies_of_the_engine_go_on_while_the_pages_of_a_tier_are_stated() {
    let mut worker = worker();
    let effects = order(&mut worker, 1, 1, vec![load(1), store(2, 7)]);
    assert_eq!(starts(&effects), [1]);
    let effects = step(&mut worker, 1, WorkerEvent::TiersChanged);
    assert_eq!(effects, [states_tiers(2)], "nothing stops");
    // Before the answer.
    assert_eq!(starts(&order(&mut worker, 1, 2, vec![load(3)])), [3]);
    assert_eq!(worker.take_read(Epoch(1), 4), Ok(()));
    assert_eq!(starts(&written(&mut worker, 7)), [2]);
    assert_eq!(admit_tiers(&mut worker, 1, 2, true), []);
    let copies = vec![complete(3)];
    assert_eq!(ended(&mut worker, 2, copies.clone()), [report(2, copies)]);
    let copies = vec![complete(1), complete(2)];
    assert_eq!(ended(&mut worker, 2, copies.clone()), [report(1, copies)]);
}

#[test]
fn the_pages_of_a_tier_are_stated_with_the_memory_that_is_yet_to_be_stated() {
    let mut worker = worker();
    step(&mut worker, 5, WorkerEvent::LeaderFound(Epoch(2)));
    assert_eq!(step(&mut worker, 5, WorkerEvent::TiersChanged), []);
    assert_eq!(worker_attached(&mut worker, 6), [states(2)]);
    // What was sent has an earlier number of pages, and the leader may have received it: each change is sent.
    assert_eq!(step(&mut worker, 6, WorkerEvent::TiersChanged), [states(3)]);
    assert_eq!(step(&mut worker, 6, WorkerEvent::TiersChanged), [states(4)]);
    assert_eq!(admit_memory(&mut worker, 6, 2, 0), [], "an older one");
    assert_eq!(admit_memory(&mut worker, 6, 4, 0).len(), 1, "registered");
    assert_eq!(worker.next_timeout(), None);
    // Other memory is stated instead.
    let effects = step(&mut worker, 7, WorkerEvent::TiersChanged);
    assert_eq!(effects, [states_tiers(5)]);
    let effects = register(&mut worker, 7, EngineId([2; 16]), RequestId(0));
    assert_eq!(effects, [states(6)]);
    assert_eq!(admit_tiers(&mut worker, 7, 5, true), []);
    assert_eq!(admit_memory(&mut worker, 7, 6, 0).len(), 1, "registered");
    assert_eq!(worker.next_timeout(), None);
}

/// A disk that was closed and opened again has the same number of pages as before, and lists other ones.
#[test]
fn each_change_of_the_tiers_is_stated_while_the_memory_waits_for_copies() {
    let mut worker = worker();
    order(&mut worker, 1, 1, vec![load(1)]);
    let effects = register(&mut worker, 2, EngineId([2; 16]), RequestId(0));
    assert_eq!(effects, [WorkerEffect::Stop(TransferId(1))]);
    for number in [2, 3] {
        let effects = step(&mut worker, 2, WorkerEvent::TiersChanged);
        assert_eq!(effects, [states_tiers(number)]);
    }
    let effects = ended(&mut worker, 3, vec![refused(TransferId(1))]);
    let said = report(1, vec![refused(TransferId(1))]);
    assert_eq!(effects, [said, states(4)]);
    assert_eq!(admit_tiers(&mut worker, 3, 3, true), []);
    assert_eq!(admit_memory(&mut worker, 3, 4, 1).len(), 1, "registered");
    assert_eq!(worker.next_timeout(), None);
}

#[test]
fn a_worker_without_an_engine_states_the_tiers_that_it_has_open() {
    let mut worker = worker();
    step(&mut worker, 1, WorkerEvent::TiersChanged);
    admit_tiers(&mut worker, 1, 2, true);
    assert_eq!(
        step(&mut worker, 2, WorkerEvent::MemoryGone(ENGINE)),
        [states(3)]
    );
    assert_eq!(admit_memory(&mut worker, 2, 3, 0), [states_tiers(4)]);
    let next = worker.next_timeout().expect("stated again").0;
    assert_eq!(
        step(&mut worker, next, WorkerEvent::Tick),
        [states_tiers(4)]
    );
    assert_eq!(admit_tiers(&mut worker, next, 3, true), [], "an older one");
    assert!(worker.next_timeout().is_some());
    assert_eq!(admit_tiers(&mut worker, next, 4, true), []);
    assert_eq!(worker.next_timeout(), None);
    assert_eq!(
        step(&mut worker, 3, WorkerEvent::TiersChanged),
        [states_tiers(5)]
    );
    step(&mut worker, 5, WorkerEvent::LeaderFound(Epoch(2)));
    assert_eq!(worker_attached(&mut worker, 6), [states(6)]);
    assert_eq!(admit_memory(&mut worker, 6, 6, 0), [states_tiers(7)]);
}

#[test]
fn a_leader_that_knows_no_statement_of_tiers_learns_of_them_with_the_memory() {
    let mut worker = worker();
    order(&mut worker, 1, 1, vec![load(1)]);
    assert_eq!(
        step(&mut worker, 1, WorkerEvent::TiersChanged),
        [states_tiers(2)]
    );
    let effects = admit_tiers(&mut worker, 1, 2, false);
    assert_eq!(effects, [WorkerEffect::Stop(TransferId(1))]);
    let effects = ended(&mut worker, 2, vec![refused(TransferId(1))]);
    let said = report(1, vec![refused(TransferId(1))]);
    assert_eq!(effects, [said, states(3)]);
}

#[test]
fn a_leader_that_knows_no_statement_of_tiers_gets_no_others_without_an_engine() {
    let mut worker = worker();
    step(&mut worker, 1, WorkerEvent::TiersChanged);
    admit_tiers(&mut worker, 1, 2, true);
    step(&mut worker, 2, WorkerEvent::MemoryGone(ENGINE));
    assert_eq!(admit_memory(&mut worker, 2, 3, 0), [states_tiers(4)]);
    assert_eq!(admit_tiers(&mut worker, 2, 4, false), []);
    assert_eq!(worker.next_timeout(), None);
}

/// The leader handles one of two statements with the same number, which may be the first one.
#[test]
fn a_memory_statement_that_is_repeated_does_not_stand_for_what_changed_after_the_first() {
    let mut worker = worker();
    step(&mut worker, 5, WorkerEvent::LeaderFound(Epoch(2)));
    assert_eq!(worker_attached(&mut worker, 6), [states(2)]);
    assert_eq!(step(&mut worker, 6, WorkerEvent::TiersChanged), [states(3)]);
    let next = worker.next_timeout().expect("stated again").0;
    assert_eq!(step(&mut worker, next, WorkerEvent::Tick), [states(3)]);
    assert_eq!(admit_memory(&mut worker, next, 2, 0), [], "an older one");
    assert_eq!(admit_memory(&mut worker, next, 3, 0).len(), 1);
}

#[test]
fn the_tiers_are_stated_when_the_memory_that_they_were_stated_with_is_refused() {
    let mut worker = worker();
    step(&mut worker, 1, WorkerEvent::TiersChanged);
    admit_tiers(&mut worker, 1, 2, true);
    let engine = EngineId([2; 16]);
    let effects = register(&mut worker, 2, engine, RequestId(0));
    assert_eq!(effects, [states(3)]);
    let (number, after) = (MemoryId(3), None);
    let effects = step(
        &mut worker,
        2,
        WorkerEvent::MemoryAdmitted { number, after },
    );
    let registered = WorkerEffect::Registered {
        engine,
        admitted: false,
    };
    assert_eq!(effects, [registered, states_tiers(4)]);
}

/// The leader of the second epoch admits the worker. Returns what follows.
fn worker_attached(worker: &mut Worker, now: u64) -> Vec<WorkerEffect> {
    let (attach, after) = (AttachId(2), Some(TransferId(0)));
    step(worker, now, WorkerEvent::Admitted { attach, after })
}

/// The statement of the tiers of this number.
fn states_tiers(number: u64) -> WorkerEffect {
    let number = MemoryId(number);
    WorkerEffect::StateTiers { number }
}

/// The leader answers a statement of the tiers, which it knows or not.
fn admit_tiers(worker: &mut Worker, now: u64, number: u64, known: bool) -> Vec<WorkerEffect> {
    let number = MemoryId(number);
    step(worker, now, WorkerEvent::TiersAdmitted { number, known })
}
