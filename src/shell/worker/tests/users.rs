//! Ranks of several users: none takes the seat, the memory or the requests of another user's engine.

use super::*;
use kvferry_core::{WORKER_ABANDONERS_OF_USER_MAX, engine_of};
use kvferry_types::{Allocation, AllocationHandle, AllocationKind, Caller, User};

const ALICE: User = User::Other(1001);
const BOB: User = User::Other(1002);

impl World {
    fn connect_of(&mut self, user: User, peer: u64, pid: i32) {
        self.connect_named(user, [1; 16], peer, pid);
    }

    fn connect_named(&mut self, user: User, engine: [u8; 16], peer: u64, pid: i32) {
        let hello = Hello {
            engine,
            rank: WORKER.rank.0,
            ..Hello::new(Role::Rank, String::new())
        };
        let caller = Caller {
            user,
            pid: Some(pid),
        };
        self.run(|shell, process| {
            shell.opened(process, PeerId(peer), &hello, caller);
            Ok(())
        });
    }

    /// The engine whose memory the worker states last.
    fn stated_engine(&self) -> Option<EngineId> {
        let (_, stated) = self.process.memories.last()?;
        stated.memory.as_ref().map(|memory| EngineId(memory.engine))
    }
}

/// Memory that is shared by descriptors, as another user's is.
fn by_ticket() -> Registration {
    let mut registration = registration();
    registration.allocations.push(Allocation {
        kind: AllocationKind::SharedMemory,
        handle: AllocationHandle::Ticket([7; 16]),
        bytes: 8 * PAGE_BYTES,
    });
    registration
}

#[test]
fn memory_is_that_of_an_engine_of_its_ranks_user() {
    let mut world = World::new();
    world.connect_of(ALICE, 1, 50);
    world.send_registration(1, 1, 1, by_ticket());
    world.open();
    assert_eq!(world.stated_engine(), Some(engine_of(ALICE, [1; 16])));
    assert_ne!(world.stated_engine(), Some(EngineId([1; 16])));
}

#[test]
fn a_path_of_another_user_is_not_opened() {
    for (user, refused) in [(ALICE, true), (User::Own, false)] {
        let mut world = World::new();
        world.connect_of(user, 1, 50);
        let mut registration = by_ticket();
        registration.allocations[0].handle = AllocationHandle::Path("/dev/shm/x".to_owned());
        world.send_registration(1, 1, 1, registration);
        let opening = world.process.opening.len();
        let answers = world.received();
        let error = answers.iter().find_map(|(_, _, _, code)| *code);
        assert_eq!(error, refused.then_some(ErrorCode::Forbidden), "{user}");
        assert_eq!(opening, usize::from(!refused), "{user}");
    }
}

#[test]
fn another_user_gets_no_seat_whose_process_lives() {
    let mut world = World::new();
    world.connect_of(ALICE, 1, 50);
    world.send_registration(1, 1, 1, by_ticket());
    world.open();
    world.received();
    world.connect_of(BOB, 2, 60);
    let attempt = |world: &mut World, peer, id| {
        world.send_registration(peer, id, 1, by_ticket());
        let answers = world.received();
        answers.iter().find_map(|(_, _, _, code)| *code)
    };
    let in_use = Some(ErrorCode::NotReady);
    assert_eq!(attempt(&mut world, 2, 1), in_use);
    // Her rank is silent, and its connection is closed.
    world.process.silent = true;
    assert_eq!(attempt(&mut world, 2, 2), in_use);
    world.run(|shell, process| shell.closed(process, PeerId(1)));
    assert_eq!(attempt(&mut world, 2, 3), in_use);
    // He unregisters what is not his.
    world.send(2, 30, Message::Unregister(Unregister {}));
    world.received();
    assert_eq!(attempt(&mut world, 2, 31), in_use);
    // She gets her seat back.
    world.process.silent = false;
    world.connect_of(ALICE, 3, 50);
    assert_eq!(attempt(&mut world, 3, 4), None);
    world.open();
    assert_eq!(attempt(&mut world, 2, 5), in_use);
    world.run(|shell, process| shell.closed(process, PeerId(3)));
    world.process.ended.push(50);
    assert_eq!(attempt(&mut world, 2, 6), None);
}

#[test]
fn another_user_neither_unregisters_nor_abandons() {
    let mut world = World::new();
    world.connect_of(ALICE, 1, 50);
    world.send_registration(1, 1, 1, by_ticket());
    // Her memory is being opened. The system shows the process of neither.
    world.connect_of(BOB, 2, 0);
    world.send(2, 9, Message::Unregister(Unregister {}));
    world.open();
    assert!(world.shell.is_used());
    let abandon = Message::Abandon(Abandon { requests: vec![7] });
    world.send(2, 10, abandon);
    world.send(2, 11, Message::Unregister(Unregister {}));
    assert_eq!(world.stated_engine(), Some(engine_of(ALICE, [1; 16])));
    assert!(world.process.closed.is_empty(), "her memory stays");
}

#[test]
fn many_names_of_one_user_keep_no_other_user_from_abandoning() {
    let mut world = World::new();
    let abandon = |world: &mut World, user, peer: u64| {
        let name = u128::from(peer).to_be_bytes();
        world.connect_named(user, name, peer, 50);
        world.received();
        world.send(peer, 9, Message::Abandon(Abandon { requests: vec![7] }));
        let answers = world.received();
        assert_eq!(answers.len(), 1, "{answers:?}");
        answers.iter().find_map(|(_, _, _, code)| *code)
    };
    let most = WORKER_ABANDONERS_OF_USER_MAX as u64;
    for peer in 1..=most {
        assert_eq!(abandon(&mut world, BOB, peer), None, "{peer}");
    }
    assert_eq!(abandon(&mut world, BOB, most + 1), Some(ErrorCode::Busy));
    for (user, peer) in [(ALICE, most + 2), (User::Own, most + 3)] {
        assert_eq!(abandon(&mut world, user, peer), None, "{user}");
    }
}
