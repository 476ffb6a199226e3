//! Workers on another machine, whose ends their supervisors state.

use super::*;
use kvferry_protocol::{StoreAnswer, WorkerGone};

/// The worker's connection, a later one of its supervisor, and one of the worker's successor.
const REMOTE: u64 = 5;
const SUPERVISOR: u64 = 6;
const SUCCESSOR: u64 = 7;

impl World {
    /// A connection from another machine.
    fn connect_remote(&mut self, peer: u64, role: Role) {
        let hello = named(role, [0; 16], 0);
        self.shell
            .opened(&mut self.process, PeerId(peer), &hello, None);
    }

    /// A leader of one rank that serves an engine; the worker is on another machine, and owes a copy.
    fn with_remote_copy() -> Self {
        let mut world = Self::new(1);
        world.connect_remote(REMOTE, Role::Worker);
        world.attach(REMOTE, Some(stated_memory()));
        let orders = std::mem::take(&mut world.process.orders);
        let read = orders.into_iter().find_map(|(_, order)| match order {
            Message::ReadInventory(read) => Some(read),
            _ => None,
        });
        let part = Inventory::new(&read.expect("an inventory request"), None, &[]);
        world.send(REMOTE, Message::Inventory(part));
        world.connect((1, 10), &named(Role::Engine, ENGINE, 0));
        world.store();
        world.process.replies.clear();
        world
    }

    /// What the leader answers to the supervisor.
    fn state_gone(&mut self, supervisor: u64) -> bool {
        self.send(supervisor, Message::WorkerGone(WorkerGone {}));
        let replies = std::mem::take(&mut self.process.replies);
        let (answers, others): (Vec<_>, Vec<_>) = replies
            .into_iter()
            .partition(|(peer, _)| *peer == supervisor);
        self.process.replies = others;
        match &answers[..] {
            [(_, Message::WorkerGoneAnswer(answer))] => answer.gone,
            other => panic!("{other:?}"),
        }
    }

    fn store_answer(&self) -> Option<StoreAnswer> {
        match &self.process.replies[..] {
            [] => None,
            [(1, Message::StoreAnswer(answer))] => Some(*answer),
            other => panic!("{other:?}"),
        }
    }

    /// The time goes on for so long that nothing is left to wait for, but for what has no limit.
    fn wait_long(&mut self) {
        for _ in 0..400 {
            self.process.now = self.process.now + Duration::from_secs(1);
            self.shell.tick(&mut self.process);
        }
    }
}

#[test]
fn a_store_of_a_dead_worker_waits_until_its_supervisor_states_the_end() {
    let mut world = World::with_remote_copy();
    world.close(REMOTE);
    world.wait_long();
    assert_eq!(world.store_answer(), None, "nobody has stated the end");
    world.connect_remote(SUPERVISOR, Role::Supervisor);
    assert!(world.state_gone(SUPERVISOR));
    let answer = world.store_answer().expect("answered");
    assert_eq!((answer.stored_pages, answer.failed_pages), (0, 2));
    assert_eq!(world.shell.core().copies_under_way(), 0);
    assert!(world.state_gone(SUPERVISOR), "repeated");
}

#[test]
fn a_connection_that_is_still_open_is_of_the_dead_worker() {
    let mut world = World::with_remote_copy();
    // A second connection of the same process waits for the seat, because the leader sees no process.
    world.connect_remote(SUPERVISOR - 1, Role::Worker);
    world.connect_remote(SUCCESSOR, Role::Supervisor);
    assert!(world.state_gone(SUCCESSOR));
    assert!(world.process.disconnected.contains(&PeerId(REMOTE)));
    assert!(world.store_answer().is_some());
    // What the dead process had sent is dropped.
    world.process.events.clear();
    world.send(
        REMOTE,
        Message::Ended(Ended {
            rank: 0,
            copies: Vec::new(),
        }),
    );
    assert!(world.process.events.is_empty());
}

#[test]
fn a_waiting_connection_of_the_dead_worker_gets_no_seat() {
    let mut world = World::with_remote_copy();
    world.connect_remote(SUPERVISOR, Role::Worker);
    assert!(!world.is_holder(SUPERVISOR));
    world.connect_remote(SUCCESSOR, Role::Supervisor);
    assert!(world.state_gone(SUCCESSOR));
    world.process.events.clear();
    let memory = Memory {
        number: 1,
        memory: None,
    };
    world.send(SUPERVISOR, Message::Memory(memory));
    assert!(!world.is_holder(SUPERVISOR));
    assert!(world.process.events.is_empty());
}

#[test]
fn a_statement_about_an_earlier_process_does_not_end_its_successor() {
    let mut world = World::with_remote_copy();
    world.close(REMOTE);
    world.process.silent.push(PeerId(REMOTE));
    world.connect_remote(SUPERVISOR, Role::Supervisor);
    world.connect_remote(SUCCESSOR, Role::Worker);
    assert!(world.is_holder(SUCCESSOR));
    world.attach(SUCCESSOR, Some(stated_memory()));
    let before = world.process.events.len();
    assert!(!world.state_gone(SUPERVISOR), "the successor has the seat");
    assert!(world.is_holder(SUCCESSOR));
    assert_eq!(world.process.events.len(), before, "the core took a step");
}

#[test]
fn a_process_that_the_leader_sees_is_ended_by_no_statement() {
    let mut world = World::with_worker();
    world.connect_remote(SUPERVISOR, Role::Supervisor);
    assert!(!world.state_gone(SUPERVISOR));
    assert!(world.is_holder(WORKER.0));
}

#[test]
fn a_seat_beyond_the_settings_and_other_roles_state_nothing() {
    let mut world = World::new(1);
    let hello = named(Role::Supervisor, [0; 16], 1);
    let peer = PeerId(SUPERVISOR);
    world.shell.opened(&mut world.process, peer, &hello, None);
    assert!(!world.state_gone(SUPERVISOR));
    world.connect_remote(8, Role::Admin);
    world.send(8, Message::WorkerGone(WorkerGone {}));
    let Some((8, Message::Error(error))) = world.process.replies.pop() else {
        panic!("{:?}", world.process.replies)
    };
    assert_eq!(error.code(), ErrorCode::Forbidden);
}

#[test]
fn a_new_leader_refuses_parked_requests_once_the_last_seat_is_empty() {
    let mut world = World::new(1);
    world.connect((1, 10), &named(Role::Engine, ENGINE, 0));
    world.request(1, 1, lookup());
    world.process.replies.clear();
    let load = kvferry_protocol::Load {
        slot: 4,
        parts: vec![PartBody {
            group: 0,
            first_page: 0,
            pages: PageList::run(2, 2).into(),
            count: 2,
            priority: None,
        }],
        after: 0,
    };
    world.request(1, 2, Message::Load(load));
    world.wait_long();
    assert!(world.process.replies.is_empty(), "an older copy may run");
    world.connect_remote(SUPERVISOR, Role::Supervisor);
    assert!(world.state_gone(SUPERVISOR));
    let [(1, Message::Error(refused))] = &world.process.replies[..] else {
        panic!("{:?}", world.process.replies)
    };
    assert!(refused.over, "{refused:?}");
}
