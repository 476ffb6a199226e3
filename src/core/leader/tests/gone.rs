//! Requests of an engine that the leader has forgotten, except for its requests in progress.

use super::*;

#[test]
fn the_last_answer_of_an_engine_that_is_gone_releases_what_it_looked_up_since() {
    let mut leader = serving();
    assert!(request(&mut leader, 1, lookup_of(1, distinct(2))).is_some());
    assert_eq!(request(&mut leader, 2, store(1, None)), None);
    let first = TransferId(leader.next_id);
    end(&mut leader, std::iter::once(first));
    let second_page = Request::Store {
        slot: SlotId(1),
        parts: vec![Part::new(GroupId(0), 1, PageList::run(1, 1))],
        more: None,
        after: RequestId(0),
    };
    assert_eq!(request(&mut leader, 3, second_page), None);
    let second = TransferId(leader.next_id);

    let late = Time(0) + leader.settings.engine_grace;
    for (now, event) in [
        (Time(0), LeaderEvent::EngineClosed(ENGINE)),
        (late, LeaderEvent::Tick),
    ] {
        leader.step(now, event, &mut Vec::new());
    }
    assert!(leader.knows(ENGINE), "a store is in progress");
    let found = request(&mut leader, 4, lookup_of(2, distinct(1)));
    let found = found.expect("an answer").expect("a hit");
    assert!(matches!(
        found,
        Answer::Lookup(LookupAnswer { hit_pages: 1, .. })
    ));
    assert_eq!(leader.pool().map(Pool::pins), Some(1));

    end(&mut leader, std::iter::once(second));
    assert_eq!(leader.check(), Ok(()));
    assert_eq!(leader.pool().map(Pool::pins), Some(0));
    assert!(!leader.knows(ENGINE));
}
