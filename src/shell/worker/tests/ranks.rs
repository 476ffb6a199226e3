//! Ranks: what they register, abandon and unregister, over which connection and for which engine.

use super::*;
use kvferry_protocol::{TransferBody, TransferOrder};
use kvferry_types::{EndedCopy, FragmentPair, PageList};

/// The number of the copy that [`World::load`] orders.
const COPY: u64 = 3;

impl World {
    /// Registers memory of `engine`.
    fn registered_as(engine: u8) -> Self {
        let mut world = Self::new();
        world.connect(5, engine, 50);
        world.register(5, 1, engine);
        world.answer_memory(Ok(()));
        world.received();
        world
    }

    /// Orders a load for request 4 of an engine, which runs until [`World::end_load`].
    pub(super) fn load(&mut self, engine: u8) {
        let pair = FragmentPair {
            src: PageList::run(0, 1),
            dst: PageList::run(1, 1),
        };
        let order = TransferOrder {
            group: 0,
            page_bytes: PAGE_BYTES,
            from: 2,
            to: 1,
            engine: Some([engine; 16]),
            request: 4,
            after: 0,
            transfers: vec![TransferBody {
                id: COPY,
                pairs: vec![pair].into(),
                record: None,
            }],
        };
        self.order(20, Message::Transfer(order));
        assert_eq!(self.shell.core().open_copies(), 1);
    }

    pub(super) fn end_load(&mut self) {
        let ended = EndedCopy::failed(TransferId(COPY));
        self.run(|shell, process| shell.copies_ended(process, vec![ended]));
    }

    fn abandon(&mut self, peer: u64, id: u64) {
        self.send(peer, id, Message::Abandon(Abandon { requests: vec![4] }));
    }
}

const fn abandoned(peer: u64, id: u64) -> (u64, u64, MessageKind, Option<ErrorCode>) {
    (peer, id, MessageKind::AbandonAnswer, None)
}

#[test]
fn each_connection_is_answered_when_no_copy_of_its_abandoned_requests_runs() {
    let mut world = World::registered_as(1);
    for peer in [6, 7] {
        world.connect(peer, 1, 50);
    }
    world.load(1);
    for (peer, id) in [(5, 2), (6, 2), (7, 2)] {
        world.abandon(peer, id);
    }
    assert_eq!(world.received(), []);
    world.run(|shell, process| shell.closed(process, PeerId(6)));
    world.end_load();
    assert_eq!(world.received(), [abandoned(5, 2), abandoned(7, 2)]);
}

#[test]
fn a_rank_abandons_requests_of_its_own_engine() {
    let mut world = World::registered_as(2);
    world.connect(6, 1, 50);
    world.load(2);
    world.abandon(6, 1);
    assert_eq!(
        world.received(),
        [abandoned(6, 1)],
        "engine 1, which copies nothing"
    );
    world.abandon(5, 2);
    assert_eq!(world.received(), [], "engine 2, whose copy runs");
    world.end_load();
    assert_eq!(world.received(), [abandoned(5, 2)]);
}

#[test]
fn memory_is_unregistered_by_its_connection_or_by_another_one_of_its_process_and_engine() {
    let unregister = |world: &mut World, peer, id| {
        world.send(peer, id, Message::Unregister(Unregister {}));
        world.received()
    };
    let done = |peer, id| [(peer, id, MessageKind::Unregistered, None)];
    let mut world = World::registered_as(2);
    assert_eq!(unregister(&mut world, 5, 2), done(5, 2));
    assert_eq!(world.process.closed, [1], "its own");

    let mut world = World::registered_as(1);
    world.connect(6, 1, 50);
    assert_eq!(unregister(&mut world, 6, 1), done(6, 1));
    assert_eq!(world.process.closed, [1], "of its engine");

    let mut world = World::registered_as(1);
    world.connect(6, 2, 50);
    assert_eq!(unregister(&mut world, 6, 1), done(6, 1));
    assert!(world.process.closed.is_empty(), "engine 1 is served");
}

#[test]
fn memory_that_is_being_opened_is_unregistered_over_any_connection_of_its_process() {
    for (first_is_gone, pids) in [
        (false, (50, 50)),
        (true, (50, 50)),
        (true, (0, 0)),
        (false, (50, 60)),
    ] {
        let mut world = World::new();
        world.connect(5, 1, pids.0);
        world.send_registration(5, 1, 1, registration());
        if first_is_gone {
            world.run(|shell, process| shell.closed(process, PeerId(5)));
        }
        world.connect(6, 1, pids.1);
        world.send(6, 1, Message::Unregister(Unregister {}));
        let [(6, 1, _, code)] = world.received()[..] else {
            panic!("one answer");
        };
        let its = pids.0 == pids.1;
        assert_eq!(code, its.then_some(ErrorCode::NotReady), "{pids:?}");
        let attaches = world.process.attaches.len();
        world.open();
        world.received();
        if its {
            assert_eq!(world.process.closed, [1], "{pids:?}");
            assert_eq!(world.process.attaches.len(), attaches);
            world.send(6, 2, Message::Unregister(Unregister {}));
            assert_eq!(world.received(), [(6, 2, MessageKind::Unregistered, None)]);
        } else {
            assert!(world.process.closed.is_empty(), "of another process");
        }
    }
}

#[test]
fn the_last_registration_counts_in_whatever_order_the_memory_is_opened() {
    for second in [5, 6] {
        let mut world = World::new();
        world.connect(5, 1, 50);
        world.connect(6, 1, 50);
        world.send_registration(5, 1, 1, registration());
        world.send_registration(second, 2, 1, registration());
        world.process.opening.reverse();
        world.open();
        assert_eq!(world.process.closed, [2], "that of the first registration");
        let replaced = (5, 1, MessageKind::Error, Some(ErrorCode::Invalid));
        assert_eq!(world.received(), [replaced]);
        world.answer_memory(Ok(()));
        let registered = (second, 2, MessageKind::Registered, None);
        assert_eq!(world.received(), [registered]);
    }
}

#[test]
fn a_worker_is_used_while_memory_is_registered_or_being_opened() {
    let mut world = World::new();
    assert!(!world.shell.is_used());
    world.connect(5, 1, 50);
    assert!(!world.shell.is_used());
    world.send_registration(5, 1, 1, registration());
    assert!(world.shell.is_used());
    world.open();
    assert!(world.shell.is_used());
    world.run(|shell, process| shell.closed(process, PeerId(5)));
    assert!(!world.shell.is_used());
}

#[test]
fn a_host_that_is_not_ready_reports_no_problem() {
    for (code, problem) in [(ErrorCode::NotReady, ""), (ErrorCode::Limit, "no memory")] {
        let mut world = World::new();
        world.connect(5, 1, 50);
        world.process.open_error = Some(ErrorBody::new(code, "no memory"));
        world.send_registration(5, 1, 1, registration());
        assert_eq!(world.received(), [(5, 1, MessageKind::Error, Some(code))]);
        assert_eq!(world.process.problem, problem);
        assert!(!world.shell.is_used());
    }
}

#[test]
fn memory_that_is_not_served_is_checked_and_the_rank_receives_the_reason() {
    for (check_only, attention, why) in [
        (true, Attention::Full, "a check of its memory only"),
        (false, Attention::Other, "not served yet"),
    ] {
        let mut world = World::new();
        world.connect(5, 1, 50);
        let mut registration = registration();
        registration.groups[0].attention = attention;
        world.send(
            5,
            1,
            Message::Register(Register {
                abandoned_through: 0,
                engine: [1; 16],
                registration,
                check_only,
            }),
        );
        let registering = world.process.opening.pop().expect("it is checked");
        let reason = registering.not_served.clone().expect("a reason");
        assert!(reason.contains(why), "{reason}");
        let found = Ok(PAGE_BYTES);
        world.run(|shell, process| shell.checked(process, registering, found));
        let Some((_, _, Message::Registered(body))) = world.process.to_ranks.pop() else {
            panic!("an answer");
        };
        assert_eq!((body.arena_pages, body.page_bytes), (0, PAGE_BYTES));
        assert_eq!(body.not_served, reason);
        assert_eq!(world.process.problem, reason);
        assert!(!world.shell.is_used());
    }
    let mut world = World::new();
    world.connect(5, 1, 50);
    world.send_registration(5, 1, 1, registration());
    let registering = world.process.opening.pop().expect("it is mapped");
    assert_eq!(registering.not_served, None);
}

#[test]
fn memory_that_is_not_served_replaces_what_its_engine_had_unless_it_is_only_checked() {
    let register = |world: &mut World, attention, check_only| {
        let mut registration = registration();
        registration.groups[0].attention = attention;
        let register = Register {
            abandoned_through: 9,
            engine: [1; 16],
            registration,
            check_only,
        };
        world.send(5, 2, Message::Register(register));
        let registering = world.process.opening.pop().expect("it is checked");
        world.run(|shell, process| shell.checked(process, registering, Ok(PAGE_BYTES)));
    };
    let answered = [(5, 2, MessageKind::Registered, None)];
    for (attention, check_only, closed) in [
        (Attention::Other, false, vec![1]),
        (Attention::Full, true, vec![]),
        (Attention::Other, true, vec![]),
    ] {
        let mut world = World::registered_as(1);
        register(&mut world, attention, check_only);
        assert_eq!(world.received(), answered);
        assert_eq!(world.process.closed, closed);
        assert_eq!(world.shell.is_used(), check_only);
    }
}

#[test]
fn memory_that_is_being_opened_is_replaced_by_later_memory_that_is_not_served() {
    let mut world = World::new();
    world.connect(5, 1, 50);
    world.send_registration(5, 1, 1, registration());
    let mut later = registration();
    later.groups[0].attention = Attention::Other;
    world.send_registration(5, 2, 1, later);
    let registering = world.process.opening.pop().expect("it is checked");
    world.run(|shell, process| shell.checked(process, registering, Ok(PAGE_BYTES)));
    assert_eq!(world.received(), [(5, 2, MessageKind::Registered, None)]);
    // The opening of the earlier memory ends later.
    world.open();
    let invalid = Some(ErrorCode::Invalid);
    assert_eq!(world.received(), [(5, 1, MessageKind::Error, invalid)]);
    assert_eq!(world.process.closed, [1]);
    assert!(!world.shell.is_used());
}

#[test]
fn a_check_gives_up_requests_and_is_answered_once_nothing_is_copied_for_them() {
    let mut world = World::attached();
    world.received();
    world.load(1);
    let register = Register {
        abandoned_through: 1000,
        engine: [1; 16],
        registration: registration(),
        check_only: true,
    };
    world.send(5, 2, Message::Register(register));
    let registering = world.process.opening.pop().expect("it is checked");
    world.run(|shell, process| shell.checked(process, registering, Ok(PAGE_BYTES)));
    assert_eq!(world.received(), [], "a copy runs");
    world.end_load();
    assert_eq!(world.received(), [(5, 2, MessageKind::Registered, None)]);
    assert!(world.shell.is_used(), "its memory stays");
}

#[test]
fn a_registration_that_differs_from_the_hello_is_refused_and_both_are_named() {
    let cases = [
        (
            2,
            1,
            "register.engine is 02020202020202020202020202020202, and the engine in the hello of this connection \
                01010101010101010101010101010101",
        ),
        (
            1,
            0,
            "registration.rank is 1, and the rank in the hello of this connection 0",
        ),
    ];
    for (engine, hello_rank, named) in cases {
        let mut world = World::new();
        world.connect_as(5, 1, hello_rank, 50);
        world.send_registration(5, 1, engine, registration());
        assert!(world.process.opening.is_empty(), "nothing is mapped");
        let Some((PeerId(5), RequestId(1), Message::Error(error))) = world.process.to_ranks.pop()
        else {
            panic!("an answer");
        };
        assert_eq!(error.code(), ErrorCode::Invalid);
        assert!(error.message.starts_with(named), "{}", error.message);
        assert_eq!(world.process.problem, error.message);
        // The right name is taken over the same connection.
        world.connect(5, 1, 50);
        world.register(5, 2, 1);
        world.answer_memory(Ok(()));
        assert_eq!(world.received(), [(5, 2, MessageKind::Registered, None)]);
    }
}
