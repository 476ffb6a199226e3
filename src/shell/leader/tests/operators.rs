//! Requests of operators: second counts, numbers and probes, a drain, and the filter of the log.

use super::*;
use kvferry_protocol::{Drain, DrainAnswer, Measure, MeasureAnswer, Probe, ProbeAnswer, SetLog};

#[test]
fn audits_of_peers_have_a_pause_between_them() {
    let mut world = World::serving();
    world.connect((99, 5), &named(Role::Admin, [4; 16], 0));
    let mut audit = |now: u64| {
        world.process.now = Time(0) + Duration::from_millis(now);
        world.send(99, Message::Status(Status { check: true }));
        match world.process.replies.pop() {
            Some((_, Message::StatusAnswer(answer))) => Ok(answer.contradiction.expect("counted")),
            Some((_, Message::Error(error))) => Err((error.code(), error.message)),
            other => panic!("no answer: {other:?}"),
        }
    };
    assert_eq!(audit(5000), Ok(String::new()));
    let (code, text) = audit(5400).expect_err("too soon");
    assert_eq!(code, ErrorCode::Busy);
    assert!(text.contains("retry in 601 ms"), "{text}");
    assert_eq!(audit(6000), Ok(String::new()));
}

#[test]
fn an_operator_measures_and_probes_and_an_engine_may_not() {
    let mut world = World::serving();
    world.connect((20, 5), &named(Role::Admin, [4; 16], 0));
    world.process.replies.clear();
    world.send(20, Message::Probe(Probe {}));
    world.send(20, Message::Measure(Measure {}));
    world.send(1, Message::Probe(Probe {}));
    let [(20, probe), (20, measured), (1, Message::Error(refused))] = &world.process.replies[..]
    else {
        panic!("{:?}", world.process.replies)
    };
    let answer = ProbeAnswer {
        tiers: 1,
        ..ProbeAnswer::default()
    };
    assert_eq!(*probe, Message::ProbeAnswer(answer));
    assert_eq!(*measured, Message::MeasureAnswer(MeasureAnswer::default()));
    assert_eq!(refused.code(), ErrorCode::Forbidden);
}

#[test]
fn a_drained_leader_refuses_lookups_and_stores_until_it_resumes_and_says_what_runs() {
    let mut world = World::serving();
    world.connect((20, 5), &named(Role::Admin, [4; 16], 0));
    let drain = |world: &mut World, resume| {
        world.process.replies.clear();
        world.send(20, Message::Drain(Drain { resume }));
        match &world.process.replies[..] {
            [(20, Message::DrainAnswer(answer))] => *answer,
            other => panic!("{other:?}"),
        }
    };
    let nothing = |drained| DrainAnswer {
        drained,
        ..DrainAnswer::default()
    };
    assert_eq!(drain(&mut world, false), nothing(true));
    world.process.replies.clear();
    world.request(1, 5, lookup());
    world.send(20, Message::Probe(Probe {}));
    world.request(
        20,
        6,
        Message::from(Request::Reset {
            scope: ResetScope::Everything,
            tier: None,
        }),
    );
    let [
        (1, Message::Error(refused)),
        (20, Message::ProbeAnswer(probed)),
        ..,
    ] = &world.process.replies[..]
    else {
        panic!("{:?}", world.process.replies)
    };
    assert_eq!(
        (refused.code(), probed.draining),
        (ErrorCode::Draining, true)
    );
    let reset = world
        .process
        .replies
        .iter()
        .find_map(|(_, reply)| match reply {
            Message::Error(error) if error.code() == ErrorCode::Draining => Some(error),
            _ => None,
        });
    assert_eq!(reset, Some(refused), "resets are not refused");
    drain(&mut world, true);
    world.process.replies.clear();
    world.request(1, 7, lookup());
    let [(1, Message::LookupAnswer(_))] = &world.process.replies[..] else {
        panic!("{:?}", world.process.replies)
    };
}

#[test]
fn a_filter_that_is_too_long_or_not_taken_is_refused_with_its_reason() {
    let mut world = World::serving();
    world.connect((20, 5), &named(Role::Admin, [4; 16], 0));
    for (filter, why) in [
        ("a".repeat(1025), "has 1025 bytes: write at most 1024"),
        ("info".to_owned(), "this process has no log"),
    ] {
        world.process.replies.clear();
        world.send(20, Message::SetLog(SetLog { filter }));
        let [(20, Message::Error(error))] = &world.process.replies[..] else {
            panic!("{:?}", world.process.replies)
        };
        assert_eq!(error.code(), ErrorCode::Invalid);
        assert!(error.message.contains(why), "{}", error.message);
    }
}
