//! Requests that engines give up stay over, whoever gives up others.

use super::*;

fn abandon(worker: &mut Worker, engine: EngineId, request: u64) {
    abandon_of(User::Own, worker, engine, request);
}

fn abandon_of(user: User, worker: &mut Worker, engine: EngineId, request: u64) {
    let (number, requests) = (1, BTreeSet::from([RequestId(request)]));
    let abandon = WorkerEvent::Abandon {
        engine,
        user,
        number,
        requests,
    };
    assert_eq!(
        step(worker, 0, abandon),
        [WorkerEffect::Abandoned { number }]
    );
}

/// An engine by its number.
fn numbered(number: u32) -> EngineId {
    let mut id = [0; 16];
    id[..4].copy_from_slice(&number.to_be_bytes());
    EngineId(id)
}

#[test]
fn abandons_under_other_names_bring_no_given_up_request_back() {
    let mut worker = worker();
    let given_up = numbered(1);
    abandon(&mut worker, given_up, 8);
    for other in 0..2 * WORKER_ENGINES_MAX as u32 {
        abandon(&mut worker, numbered(10 + other), 1);
    }
    // The engine registers its memory, and does not name what it gave up.
    register(&mut worker, 0, given_up, RequestId(0));
    admit_memory(&mut worker, 0, 2, 0);
    let of = |transfer, request| {
        let mut copy = copy(transfer, Direction::Load, request);
        if let Some(device) = &mut copy.device {
            device.engine = given_up;
        }
        copy
    };
    let effects = order(&mut worker, 1, 1, vec![of(1, 8), of(2, 9)]);
    assert_eq!(starts(&effects), [2], "{effects:?}");
    // Its next list begins where the dropped one ended.
    abandon(&mut worker, given_up, 12);
    let effects = order(&mut worker, 1, 2, vec![of(3, 8), of(4, 12), of(5, 11)]);
    assert_eq!(starts(&effects), [5], "{effects:?}");
}

#[test]
fn engines_beyond_the_limit_are_to_be_refused_until_others_are_forgotten() {
    let mut worker = worker();
    for number in 0..(WORKER_ABANDONERS_MAX + WORKER_ENGINES_MAX) as u32 {
        assert!(worker.remembers_abandoned_of(Time(0), numbered(number), User::Own));
        abandon(&mut worker, numbered(number), 1);
    }
    let one_more = numbered(u32::MAX);
    assert!(!worker.remembers_abandoned_of(Time(0), one_more, User::Own));
    assert!(
        worker.remembers_abandoned_of(Time(0), numbered(7), User::Own),
        "known"
    );
    let later = Time(0) + std::time::Duration::from_secs(601);
    assert!(worker.remembers_abandoned_of(later, one_more, User::Own));
}

#[test]
fn the_engines_of_one_user_leave_room_for_those_of_others() {
    let (mallory, bob) = (User::Other(1), User::Other(2));
    let mut worker = worker();
    for number in 0..WORKER_ABANDONERS_OF_USER_MAX as u32 {
        assert!(worker.remembers_abandoned_of(Time(0), numbered(number), mallory));
        abandon_of(mallory, &mut worker, numbered(number), 1);
    }
    let one_more = numbered(u32::MAX);
    assert!(!worker.remembers_abandoned_of(Time(0), one_more, mallory));
    for (user, name) in [(bob, 8_000), (User::Own, 9_000)] {
        for number in 0..10 {
            assert!(worker.remembers_abandoned_of(Time(0), numbered(name + number), user));
            abandon_of(user, &mut worker, numbered(name + number), 1);
        }
    }
    let later = Time(0) + std::time::Duration::from_secs(601);
    assert!(worker.remembers_abandoned_of(later, one_more, mallory));
}

#[test]
fn all_requests_up_to_a_number_are_given_up_at_once() {
    let mut worker = worker();
    let of = |transfer, request| copy(transfer, Direction::Load, request);
    let started = starts(&order(&mut worker, 1, 1, vec![of(1, 4), of(2, 6)]));
    assert_eq!(started, [1, 2]);
    let (engine, number, through) = (ENGINE, 7, RequestId(5));
    let abandon = WorkerEvent::AbandonThrough {
        engine,
        user: User::Own,
        number,
        through,
    };
    // The copy for request 4 runs, and the answer waits for its end.
    assert_eq!(
        step(&mut worker, 0, abandon),
        [WorkerEffect::Stop(TransferId(1))]
    );
    let effects = ended(&mut worker, 1, vec![complete(2)]);
    assert!(!effects.contains(&WorkerEffect::Abandoned { number }));
    let effects = ended(&mut worker, 2, vec![complete(1)]);
    assert!(effects.contains(&WorkerEffect::Abandoned { number }));
    let effects = order(&mut worker, 1, 2, vec![of(3, 5), of(4, 7)]);
    assert_eq!(starts(&effects), [4], "{effects:?}");
}
