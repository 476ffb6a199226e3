//! Requests that wait for the copies of an older leader, and ids that are not known any more.

use super::*;
use crate::leader::session::ANSWERS_KEPT;

fn load() -> Request {
    Request::Load {
        slot: SlotId(1),
        parts: vec![Part::new(GroupId(0), 0, PageList::run(0, 1))],
        after: RequestId(0),
    }
}

/// A leader to which no worker has attached: copies of an older leader may run.
fn unclear() -> Leader {
    let ratio = Ratio::new(4).expect("in bounds");
    let settings = LeaderSettings::new(Epoch(1), 1, ratio, AnchorKey::new([1; 32]));
    let mut leader = Leader::new(settings);
    leader.step(Time(0), LeaderEvent::EngineOpened(ENGINE), &mut Vec::new());
    leader
}

/// Finishes slots under ids from 2 on, until the answer to request 1 would have been dropped.
fn forget_the_first(leader: &mut Leader) {
    for id in 2..ANSWERS_KEPT as u64 + 4 {
        let finished = request(leader, id, Request::Finish { slot: SlotId(9) });
        assert_eq!(finished, Some(Ok(Answer::Finish)));
    }
}

/// The worker attaches. Returns the answers.
fn clear(leader: &mut Leader) -> Vec<(RequestId, Result<Answer, Refusal>)> {
    let mut effects = Vec::new();
    for event in arrival(1, (0, 1), 32) {
        leader.step(Time(0), event, &mut effects);
    }
    let answers = effects.into_iter().filter_map(|effect| match effect {
        LeaderEffect::Answer { id, answer, .. } => Some((id, answer)),
        _ => None,
    });
    answers.collect()
}

fn refused() -> Vec<(RequestId, Result<Answer, Refusal>)> {
    vec![(RequestId(1), Err(Refusal::UnknownSlot(SlotId(1))))]
}

#[test]
fn a_parked_request_is_answered_however_many_came_after_it() {
    let mut leader = unclear();
    assert_eq!(request(&mut leader, 1, load()), None);
    forget_the_first(&mut leader);
    assert_eq!(clear(&mut leader), refused());
}

#[test]
fn an_id_that_is_not_known_any_more_waits_for_the_copies_of_an_older_leader() {
    let mut leader = unclear();
    assert_eq!(request(&mut leader, 1, load()), None);
    forget_the_first(&mut leader);
    for event in [
        LeaderEvent::EngineClosed(ENGINE),
        LeaderEvent::EngineOpened(ENGINE),
    ] {
        leader.step(Time(0), event, &mut Vec::new());
    }
    assert_eq!(request(&mut leader, 1, load()), None, "it is parked again");
    assert_eq!(clear(&mut leader), refused());
}

#[test]
fn a_stale_request_is_over_once_its_copy_has_ended() {
    let mut leader = serving();
    assert!(request(&mut leader, 1, lookup(1, 2)).is_some());
    assert_eq!(request(&mut leader, 2, store(1, None)), None);
    let copy = TransferId(leader.next_id);
    let replaced = LeaderEvent::EngineReplaced(ENGINE);
    leader.step(Time(0), replaced, &mut Vec::new());
    let is_over = |leader: &mut Leader| {
        let answer = request(leader, 2, store(1, None)).expect("an answer");
        let refusal = answer.expect_err("an earlier process has used the id");
        assert!(matches!(refusal, Refusal::StaleRequest { .. }), "{refusal}");
        refusal.is_over()
    };
    assert!(!is_over(&mut leader), "the copy reads the engine's page");
    end(&mut leader, std::iter::once(copy));
    assert!(is_over(&mut leader));
}
