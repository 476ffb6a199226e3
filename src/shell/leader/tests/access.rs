//! Requests of engines of several users: a peer that names another's namespace gets nothing of it and cannot disturb it.

use super::*;
use kvferry_core::{NamespaceRule, Namespaces, engine_of};
use kvferry_protocol::{EventKind, ReadEvents};
use kvferry_types::{Caller, Request, User};

const ALICE: User = User::Other(1001);
const BOB: User = User::Other(1002);

/// Engines of kvferry's own user and of two others, by their connections.
const OWN_ENGINE: u64 = 1;
const OF_ALICE: u64 = 31;
const OF_BOB: u64 = 32;
const OPERATOR: u64 = 40;

fn rule(prefix: &[u8], users: &[User]) -> NamespaceRule {
    NamespaceRule {
        prefix: prefix.to_vec(),
        users: users.iter().copied().collect(),
        held_pages: None,
        stored_pages: kvferry_types::PerTier::default(),
        secret: None,
    }
}

fn in_namespace(namespace: &[u8]) -> Message {
    match lookup() {
        Message::Lookup(lookup) => Message::Lookup(Lookup {
            namespace: namespace.to_vec(),
            ..lookup
        }),
        other => other,
    }
}

fn reset_of(scope: ResetScope) -> Message {
    Message::from(Request::Reset { scope, tier: None })
}

fn read_of(namespace: Option<&[u8]>) -> Message {
    Message::ReadEvents(ReadEvents {
        most: 100,
        cursor: Some(0),
        namespace: namespace.map(|name| name.to_vec().into()),
        ..ReadEvents::default()
    })
}

impl World {
    /// A leader with these rules that serves the memory of an engine of Alice, and is connected to an engine of each user
    /// and to an operator.
    fn with_users(namespaces: Namespaces) -> Self {
        let mut world = Self::new(1);
        world.shell.settings.namespaces = Arc::new(namespaces);
        world.connect(WORKER, &named(Role::Worker, [0; 16], 0));
        let memory = StatedMemory {
            engine: engine_of(ALICE, ENGINE).0,
            ..stated_memory()
        };
        world.attach(WORKER.0, Some(memory));
        let read = world
            .process
            .orders
            .drain(..)
            .find_map(|(_, order)| match order {
                Message::ReadInventory(read) => Some(read),
                _ => None,
            });
        let part = Inventory::new(&read.expect("an inventory request"), None, &[]);
        world.send(WORKER.0, Message::Inventory(part));
        // All of them draw the same name.
        world.connect((OWN_ENGINE, 10), &named(Role::Engine, ENGINE, 0));
        world.connect_of(ALICE, (OF_ALICE, 11));
        world.connect_of(BOB, (OF_BOB, 12));
        world.connect((OPERATOR, 13), &named(Role::Admin, [3; 16], 0));
        assert_eq!(world.process.disconnected, []);
        world
    }

    fn connect_of(&mut self, user: User, (peer, pid): (u64, i32)) {
        let caller = Caller {
            user,
            pid: Some(pid),
        };
        let hello = named(Role::Engine, ENGINE, 0);
        self.shell
            .opened(&mut self.process, PeerId(peer), &hello, caller);
    }

    /// The code of the error that answers a message; `None` for another answer, or none yet.
    fn refused(&mut self, peer: u64, id: u64, message: Message) -> Option<ErrorCode> {
        self.process.replies.clear();
        self.request(peer, id, message);
        match self.process.replies.pop() {
            Some((to, Message::Error(error))) if to == peer => Some(error.code()),
            _ => None,
        }
    }
}

#[test]
fn an_engine_names_the_namespaces_of_its_user_alone() {
    let rules = vec![rule(b"a/", &[ALICE]), rule(b"b/", &[BOB])];
    let mut world = World::with_users(Namespaces::new(rules));
    let forbidden = Some(ErrorCode::Forbidden);
    let mut id = 100;
    for (peer, namespace, permitted) in [
        (OF_ALICE, &b"a/1"[..], true),
        (OF_ALICE, b"b/1", false),
        (OF_ALICE, b"", false),
        (OF_BOB, b"b/1", true),
        (OF_BOB, b"a/1", false),
        (OWN_ENGINE, b"a/1", false),
        (OWN_ENGINE, b"c", true),
        (OPERATOR, b"a/1", true),
    ] {
        let scopes = [
            ResetScope::Namespace(namespace.to_vec()),
            ResetScope::Pages(namespace.to_vec(), hashes()),
        ];
        let resets = scopes.into_iter().map(reset_of);
        let mut messages: Vec<Message> = resets.chain([read_of(Some(namespace))]).collect();
        if peer != OPERATOR {
            messages.push(in_namespace(namespace));
        }
        for message in messages {
            id += 1;
            let kind = message.kind().name();
            let events = world.process.events.len();
            let refused = world.refused(peer, id, message);
            let shown = namespace.escape_ascii();
            assert_eq!(
                refused == forbidden,
                !permitted,
                "{peer} {kind} {shown}: {refused:?}"
            );
            if !permitted {
                assert_eq!(
                    world.process.events.len(),
                    events,
                    "the core receives no {kind}"
                );
            }
        }
    }
}

#[test]
fn requests_about_the_pages_of_all_are_for_operators() {
    for namespaces in [Namespaces::default(), Namespaces::new(Vec::new())] {
        let mut world = World::with_users(namespaces);
        let check = Message::Status(Status { check: true });
        for (id, peer, reset, others) in [
            (200, OWN_ENGINE, true, false),
            (210, OF_ALICE, true, true),
            (220, OPERATOR, false, false),
        ] {
            let forbidden = [
                reset_of(ResetScope::Everything),
                read_of(None),
                check.clone(),
                Message::from(Request::Flush),
            ];
            let forbidden = (id..).zip(forbidden).map(|(id, message)| {
                world.refused(peer, id, message) == Some(ErrorCode::Forbidden)
            });
            let forbidden: Vec<bool> = forbidden.collect();
            assert_eq!(forbidden, [reset, others, others, others], "{peer}");
        }
    }
}

#[test]
fn a_peer_that_has_lost_its_seat_is_served_nothing() {
    let mut world = World::with_users(Namespaces::default());
    // Alice's process connects again, and messages of its first connection are still to be handled.
    world.connect_of(ALICE, (OF_ALICE + 10, 11));
    assert_eq!(world.process.disconnected, [PeerId(OF_ALICE)]);
    let check = Message::Status(Status { check: true });
    for (id, message) in (330..).zip([check, reset_of(ResetScope::Everything), lookup()]) {
        let refused = world.refused(OF_ALICE, id, message);
        assert_eq!(refused, Some(ErrorCode::NotReady));
    }
}

#[test]
fn an_unknown_selection_of_pages_is_invalid_and_removes_nothing() {
    let mut world = World::with_users(Namespaces::default());
    for (id, peer) in [(300, OWN_ENGINE), (310, OF_ALICE), (320, OPERATOR)] {
        for namespace in [None, Some(b"a/1".to_vec().into())] {
            let events = world.process.events.len();
            let reset = Reset {
                which: ResetPages::Unknown,
                namespace,
                hash_bytes: 0,
                hashes: Vec::new(),
                tier: 0,
            };
            let refused = world.refused(peer, id, Message::Reset(reset));
            assert_eq!(refused, Some(ErrorCode::Invalid), "{peer}");
            let mut received = world.process.events[events..].iter();
            let is_request = |event: &LeaderEvent| matches!(event, LeaderEvent::Request { .. });
            assert!(!received.any(is_request), "the core receives no reset");
        }
    }
}

#[test]
fn an_engine_of_another_user_under_the_same_name_is_another_engine() {
    let mut world = World::with_users(Namespaces::default());
    // Alice's memory is registered, and Bob has drawn the name of her engine.
    assert_eq!(world.refused(OF_ALICE, 1, lookup()), None);
    assert_eq!(
        world.refused(OF_BOB, 1, lookup()),
        Some(ErrorCode::NotReady)
    );
    assert_eq!(
        world.refused(OWN_ENGINE, 1, lookup()),
        Some(ErrorCode::NotReady)
    );
    // Bob neither ends her requests nor takes her name when she is silent.
    world.process.silent.push(PeerId(OF_ALICE));
    world.connect_of(BOB, (OF_BOB + 10, 14));
    let finish = Message::from(Request::Finish { slot: SlotId(4) });
    world.request(OF_BOB + 10, 9, finish);
    assert!(world.shell.core().knows(engine_of(ALICE, ENGINE)));
    assert_eq!(world.shell.core().slots(), 1);
    assert_eq!(world.process.disconnected, []);
    assert_eq!(world.shell.core().check(), Ok(()));
}

#[test]
fn a_reader_of_a_namespace_receives_nothing_of_others() {
    let rules = vec![rule(b"a/", &[ALICE]), rule(b"b/", &[BOB])];
    let mut world = World::with_users(Namespaces::new(rules));
    let read = |world: &mut World, peer, id, namespace: &[u8]| {
        world.process.replies.clear();
        world.request(peer, id, read_of(Some(namespace)));
        match world.process.replies.pop() {
            Some((_, Message::Events(events))) => events
                .records
                .iter()
                .filter(|record| record.event == EventKind::Stored)
                .map(|record| record.hashes.len() / 16)
                .sum::<usize>(),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(read(&mut world, OF_ALICE, 1, b"a/1"), 0);
    world.request(OF_ALICE, 2, in_namespace(b"a/1"));
    world.request(
        OF_ALICE,
        3,
        Message::Store(Store {
            slot: 4,
            parts: vec![PartBody {
                group: 0,
                first_page: 0,
                pages: PageList::run(2, 2).into(),
                priority: None,
                count: 2,
            }],
            hash_bytes: 0,
            more_hashes: Vec::new(),
            more_from: 0,
            after: 0,
        }),
    );
    let transfer = world
        .process
        .orders
        .iter()
        .find_map(|(_, order)| match order {
            Message::Transfer(order) => Some(order.transfers[0].id),
            _ => None,
        });
    let ended = EndedCopy {
        complete_pages: 2,
        bytes: 8192,
        copy_us: 1,
        ..EndedCopy::complete(TransferId(transfer.expect("a copy")))
    };
    let copies = vec![ended];
    world.send(WORKER.0, Message::Ended(Ended { rank: 0, copies }));
    assert_eq!(read(&mut world, OF_ALICE, 4, b"a/1"), 2);
    assert_eq!(read(&mut world, OF_BOB, 4, b"b/1"), 0);
}

fn hashes() -> PageHashes {
    PageHashes::packed(16, (0..32).collect()).expect("two hashes")
}
