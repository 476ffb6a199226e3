//! Stores that arrive several in one message.

use super::*;
use kvferry_protocol::{NumberedStore, StoreResult, Stores};
use kvferry_types::StoreAnswer;

/// The message of the stores.
const MESSAGE: u64 = 30;

impl World {
    /// A leader with a slot that names four pages.
    fn with_slot() -> Self {
        let mut world = Self::serving();
        let lookup = Lookup {
            limit_pages: None,
            slot: 4,
            namespace: Vec::new(),
            hash_bytes: 16,
            hashes: (0..64).collect(),
            have_pages: 0,
        };
        world.request(1, 1, Message::Lookup(lookup));
        world.process.replies.clear();
        world
    }

    fn stores(&mut self, message: u64, stores: Vec<NumberedStore>) {
        self.request(1, message, Message::Stores(Stores { stores }));
    }

    /// Reports the end of every copy that was ordered since the last call.
    fn copied(&mut self) {
        let orders = std::mem::take(&mut self.process.orders);
        let transfers = orders.into_iter().filter_map(|(_, order)| match order {
            Message::Transfer(order) => Some(order.transfers),
            _ => None,
        });
        let copies = transfers.flatten().map(|transfer| EndedCopy {
            complete_pages: 1,
            bytes: 4096,
            copy_us: 1,
            ..EndedCopy::complete(TransferId(transfer.id))
        });
        let copies = copies.collect();
        self.send(WORKER.0, Message::Ended(Ended { rank: 0, copies }));
    }

    fn results(&mut self) -> Vec<StoreResult> {
        match self.process.replies.pop() {
            Some((1, Message::StoresAnswer(answer))) => answer.results,
            other => panic!("no results: {other:?}"),
        }
    }
}

/// A store of one page.
fn store(id: u64, slot: u64, page: u32) -> NumberedStore {
    let part = PartBody {
        group: 0,
        first_page: page,
        pages: PageList::run(2 + page, 1).into(),
        count: 1,
        priority: None,
    };
    NumberedStore {
        id,
        deadline_ms: 1000,
        store: Store {
            slot,
            parts: vec![part],
            hash_bytes: 0,
            more_hashes: Vec::new(),
            more_from: 0,
            after: 0,
        },
    }
}

fn stored() -> StoreResult {
    StoreResult {
        answer: Some(StoreAnswer {
            stored_pages: 1,
            present_pages: 0,
            refused_pages: 0,
            failed_pages: 0,
        }),
        error: None,
    }
}

#[test]
fn stores_of_one_message_are_answered_together_and_in_order() {
    let mut world = World::with_slot();
    // The slot of the second store is unknown: it is refused at once, and the first one is copied meanwhile.
    world.stores(
        MESSAGE,
        vec![store(11, 4, 0), store(12, 5, 0), store(13, 4, 1)],
    );
    assert!(world.process.replies.is_empty(), "two stores are copied");
    world.copied();
    let results = world.results();
    assert_eq!((&results[0], &results[2]), (&stored(), &stored()));
    let refused = results[1].error.as_ref().expect("no such slot");
    assert_eq!(
        (refused.code(), refused.over),
        (ErrorCode::UnknownSlot, true)
    );
}

#[test]
fn a_message_whose_stores_all_end_at_once_is_answered_at_once() {
    let mut world = World::with_slot();
    world.stores(MESSAGE, vec![store(11, 5, 0), store(12, 5, 1)]);
    assert_eq!(world.results().len(), 2);
}

#[test]
fn a_store_without_an_answer_is_answered_in_the_message_that_repeats_it() {
    let mut world = World::with_slot();
    world.stores(MESSAGE, vec![store(11, 4, 0), store(12, 4, 1)]);
    world.close(1);
    world.connect((1, 10), &named(Role::Engine, ENGINE, 0));
    world.process.replies.clear();
    world.stores(MESSAGE + 1, vec![store(11, 4, 0)]);
    world.copied();
    // The first message is over with its connection: the other store has none to be answered in.
    let alone = world.process.replies.pop();
    assert!(
        matches!(alone, Some((1, Message::StoreAnswer(_)))),
        "{alone:?}"
    );
    assert_eq!(world.results(), [stored()]);
    world.stores(MESSAGE + 2, vec![store(12, 4, 1)]);
    assert_eq!(world.results(), [stored()]);
}

#[test]
fn an_id_that_waits_for_its_answer_is_refused_in_a_second_message() {
    let mut world = World::with_slot();
    world.stores(MESSAGE, vec![store(11, 4, 0)]);
    for (message, again) in [
        (MESSAGE + 1, vec![store(12, 4, 1), store(11, 4, 0)]),
        (MESSAGE + 2, vec![store(13, 4, 1), store(13, 4, 1)]),
        (MESSAGE + 3, vec![]),
    ] {
        world.stores(message, again);
        match world.process.replies.pop() {
            Some((1, Message::Error(error))) => {
                assert_eq!((error.code(), error.over), (ErrorCode::Invalid, false));
            }
            other => panic!("not refused: {other:?}"),
        }
    }
    world.stores(MESSAGE + 4, vec![store(12, 4, 1)]);
    world.copied();
    assert_eq!(world.results(), [stored()]);
    assert_eq!(world.results(), [stored()]);
}

#[test]
fn a_store_has_no_more_time_than_its_message() {
    let mut world = World::with_slot();
    let mut one = store(11, 4, 0);
    one.deadline_ms = 100_000;
    world.stores(MESSAGE, vec![one]);
    let deadlines: Vec<Time> = (world.process.events.iter())
        .filter_map(|event| match event {
            LeaderEvent::Request {
                id: RequestId(11),
                deadline,
                ..
            } => Some(*deadline),
            _ => None,
        })
        .collect();
    // The deadline of a message of the tests.
    assert_eq!(deadlines, [world.process.now + Duration::from_millis(1000)]);
}

#[test]
fn a_slow_store_does_not_keep_the_answers_of_the_others() {
    let mut world = World::with_slot();
    world.stores(MESSAGE, vec![store(11, 4, 0), store(12, 4, 1)]);
    let second = world.process.orders.split_off(1);
    world.process.now = world.process.now + Duration::from_millis(150);
    world.copied();
    let alone = world.process.replies.pop();
    assert!(
        matches!(alone, Some((1, Message::StoreAnswer(_)))),
        "{alone:?}"
    );
    world.process.orders = second;
    world.copied();
    assert_eq!(world.results(), [stored(), stored()]);
    assert!(world.process.replies.is_empty());
}

#[test]
fn stores_that_ended_early_do_not_wait_for_a_slow_one() {
    let mut world = World::with_slot();
    world.stores(
        MESSAGE,
        vec![store(11, 4, 0), store(12, 5, 0), store(13, 4, 1)],
    );
    let second = world.process.orders.split_off(1);
    world.copied();
    assert!(world.process.replies.is_empty());
    let due = world.shell.next_timeout().expect("the message grows old");
    assert!(due <= world.process.now + Duration::from_millis(100));
    world.process.now = due;
    world.shell.tick(&mut world.process);
    let alone = std::mem::take(&mut world.process.replies);
    assert!(
        matches!(
            &alone[..],
            [(1, Message::StoreAnswer(_)), (1, Message::Error(_))]
        ),
        "{alone:?}"
    );
    // Once only.
    world.process.now = due + Duration::from_millis(50);
    world.shell.tick(&mut world.process);
    assert!(world.process.replies.is_empty());
    world.process.orders = second;
    world.copied();
    let results = world.results();
    assert_eq!((&results[0], &results[2]), (&stored(), &stored()));
}

#[test]
fn stores_with_the_id_of_an_open_request_or_of_their_message_are_refused() {
    let mut world = World::with_slot();
    world.request(1, 11, Message::Store(store(11, 4, 0).store));
    world.process.open.push((PeerId(1), RequestId(11)));
    for taken in [11, MESSAGE] {
        world.stores(MESSAGE, vec![store(12, 4, 1), store(taken, 4, 2)]);
        let Some((1, Message::Error(error))) = world.process.replies.pop() else {
            panic!("refused");
        };
        assert_eq!(error.code(), ErrorCode::Invalid);
        assert!(error.message.contains(&format!("stores.id {taken} ")));
    }
    // The store alone gets its answer, after which its id is free.
    world.copied();
    let alone = world.process.replies.pop();
    assert!(
        matches!(alone, Some((1, Message::StoreAnswer(_)))),
        "{alone:?}"
    );
    world.process.open.clear();
    world.stores(MESSAGE, vec![store(12, 4, 1), store(11, 4, 0)]);
    world.copied();
    assert_eq!(world.results().len(), 2);
}

#[test]
fn a_request_under_the_id_of_a_store_in_an_open_message_is_refused() {
    let mut world = World::with_slot();
    world.stores(MESSAGE, vec![store(20, 4, 0), store(21, 4, 1)]);
    let NumberedStore { store: alone, .. } = store(20, 4, 0);
    for message in [
        Message::Store(alone),
        Message::Finish(kvferry_protocol::Finish { slot: 4 }),
        Message::Stores(Stores {
            stores: vec![store(22, 4, 2)],
        }),
        Message::Status(Status { check: false }),
        Message::ReadEvents(kvferry_protocol::ReadEvents::default()),
    ] {
        world.request(1, 20, message);
        match world.process.replies.pop() {
            Some((1, Message::Error(error))) => {
                assert_eq!(error.code(), ErrorCode::Invalid);
                assert!(error.message.contains("is open"), "{}", error.message);
            }
            other => panic!("{other:?}"),
        }
    }
    world.copied();
    assert_eq!(world.results().len(), 2);
    // Its id is free again, and its answer is repeated.
    let NumberedStore { store: alone, .. } = store(20, 4, 0);
    world.request(1, 20, Message::Store(alone));
    assert!(matches!(
        world.process.replies.pop(),
        Some((1, Message::StoreAnswer(_)))
    ));
}
