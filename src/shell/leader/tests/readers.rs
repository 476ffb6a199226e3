//! Reads of the change log, and their waits.

use super::*;
use kvferry_protocol::{EventKind, Events, ReadEvents};

/// A peer of the role `admin`, and its process.
const TOOL: (u64, i32) = (20, 200);

fn events(reply: Option<(u64, Message)>) -> (u64, Events) {
    match reply {
        Some((peer, Message::Events(events))) => (peer, events),
        other => panic!("no events: {other:?}"),
    }
}

impl World {
    /// A leader that serves, with a tool that has read the log.
    fn with_reader() -> (Self, ReadEvents) {
        let mut world = Self::serving();
        world.connect(TOOL, &named(Role::Admin, [0; 16], 0));
        let begin = ReadEvents {
            most: 100,
            cursor: Some(0),
            ..ReadEvents::default()
        };
        world.send(TOOL.0, Message::ReadEvents(begin));
        let (peer, begun) = events(world.process.replies.pop());
        assert_eq!((peer, begun.epoch, begun.lost), (TOOL.0, EPOCH.0, true));
        assert_eq!((begun.records.len(), begun.cursor), (0, None));
        let read = ReadEvents {
            epoch: begun.epoch,
            from: begun.next,
            wait_ms: 800,
            most: 100,
            namespace: None,
            cursor: None,
        };
        (world, read)
    }

    fn wait(&mut self, (peer, id): (u64, u64), read: &ReadEvents) {
        let replies = self.process.replies.len();
        self.request(peer, id, Message::ReadEvents(read.clone()));
        assert_eq!(self.process.replies.len(), replies, "it waits");
    }

    /// Stores two pages, and reports the end of their copy.
    fn stored(&mut self) {
        self.store();
        let transfer = match self.process.orders.last() {
            Some((_, Message::Transfer(order))) => order.transfers[0].id,
            other => panic!("no order: {other:?}"),
        };
        let ended = EndedCopy {
            complete_pages: 2,
            bytes: 8192,
            copy_us: 1,
            ..EndedCopy::complete(TransferId(transfer))
        };
        let copies = vec![ended];
        self.send(WORKER.0, Message::Ended(Ended { rank: 0, copies }));
    }

    /// The answers to reads, by peer.
    fn answers(&mut self) -> Vec<(u64, Events)> {
        let replies = self.process.replies.drain(..);
        let answers = replies.filter_map(|(peer, reply)| match reply {
            Message::Events(events) => Some((peer, events)),
            _ => None,
        });
        answers.collect()
    }

    fn at(&mut self, ms: u64) {
        self.process.now = Time(0) + Duration::from_millis(ms);
        self.shell.tick(&mut self.process);
    }
}

#[test]
fn a_read_waits_for_the_next_change_and_is_answered_once() {
    let (mut world, mut read) = World::with_reader();
    world.wait((TOOL.0, 7), &read);
    world.stored();
    let answers = world.answers();
    let [(peer, answer)] = answers.as_slice() else {
        panic!("{answers:?}");
    };
    assert_eq!((*peer, answer.lost, answer.hash_bytes), (TOOL.0, false, 16));
    let [record] = answer.records.as_slice() else {
        panic!("{answer:?}");
    };
    assert_eq!((record.event, record.tier), (EventKind::Stored, 2));
    assert_eq!(record.hashes, (0..32).collect::<Vec<u8>>());
    assert_eq!((record.namespace.len(), record.layout.len()), (8, 7));
    assert_eq!((record.group, record.why), (0, None));
    // The next read waits again.
    read.from = answer.next;
    world.wait((TOOL.0, 8), &read);
    world.at(1);
    assert_eq!(world.answers(), []);
}

#[test]
fn a_wait_ends_after_its_time_and_at_the_deadline_of_its_request() {
    // The deadline of each request is 1 s.
    for (wait_ms, end) in [(800, 800), (u32::MAX, 1000)] {
        let (mut world, mut read) = World::with_reader();
        read.wait_ms = wait_ms;
        world.wait((TOOL.0, 7), &read);
        let due = world.shell.next_timeout();
        assert_eq!(due, Some(Time(0) + Duration::from_millis(end)));
        world.at(end - 1);
        assert_eq!(world.answers(), []);
        world.at(end);
        let answers = world.answers();
        assert_eq!(answers.len(), 1);
        assert_eq!(
            (answers[0].1.next, answers[0].1.records.len()),
            (read.from, 0)
        );
        world.at(end + 1);
        assert_eq!(world.answers(), [], "it has one answer");
    }
}

#[test]
fn a_wait_has_a_limit_of_its_own() {
    let (mut world, mut read) = World::with_reader();
    read.wait_ms = u32::MAX;
    let envelope = Envelope {
        version: VERSION,
        correlation: RequestId(7),
        deadline_ms: u32::MAX,
        epoch: EPOCH,
        message: Message::ReadEvents(read),
    };
    world
        .shell
        .message(&mut world.process, PeerId(TOOL.0), envelope);
    let due = world.shell.next_timeout();
    assert_eq!(due, Some(Time(0) + Duration::from_secs(30)));
}

#[test]
fn a_later_read_of_a_peer_ends_its_earlier_one() {
    let (mut world, mut read) = World::with_reader();
    world.wait((TOOL.0, 7), &read);
    read.wait_ms = 0;
    world.request(TOOL.0, 8, Message::ReadEvents(read));
    assert_eq!(world.answers().len(), 2);
    assert_eq!(world.shell.readers.next_timeout(), None);
}

#[test]
fn a_reader_that_disconnects_is_forgotten() {
    let (mut world, read) = World::with_reader();
    world.wait((TOOL.0, 7), &read);
    world.close(TOOL.0);
    assert_eq!(world.shell.readers.next_timeout(), None);
    world.stored();
    assert_eq!(world.answers(), []);
}

#[test]
fn readers_beyond_the_limit_are_refused_and_may_read_without_a_wait() {
    let (mut world, mut read) = World::with_reader();
    for peer in 100..164 {
        world.connect((peer, 1000), &named(Role::Admin, [0; 16], 0));
        world.wait((peer, 1), &read);
    }
    world.request(TOOL.0, 7, Message::ReadEvents(read.clone()));
    let refused = world.process.replies.pop();
    assert!(
        matches!(&refused, Some((_, Message::Error(error))) if error.code() == ErrorCode::Busy),
        "{refused:?}"
    );
    read.wait_ms = 0;
    world.request(TOOL.0, 8, Message::ReadEvents(read));
    assert_eq!(world.answers().len(), 1);
    world.stored();
    assert_eq!(world.answers().len(), 64);
}

#[test]
fn changes_of_other_namespaces_end_no_wait() {
    let (mut world, read) = World::with_reader();
    for (peer, name) in [(100, &b""[..]), (101, b"other")] {
        world.connect((peer, 1000), &named(Role::Admin, [0; 16], 0));
        let namespace = Some(name.to_vec().into());
        let read = ReadEvents {
            namespace,
            ..read.clone()
        };
        world.wait((peer, 1), &read);
    }
    world.stored();
    let answered: Vec<u64> = world.answers().iter().map(|(peer, _)| *peer).collect();
    assert_eq!(answered, [100]);
    world.at(800);
    let answers = world.answers();
    assert_eq!(answers.len(), 1);
    let (peer, answer) = &answers[0];
    assert_eq!((*peer, answer.records.len()), (101, 0));
    assert!(
        answer.next > read.from,
        "it has skipped the records of others"
    );
}

#[test]
fn a_worker_may_not_read_the_log() {
    let mut world = World::serving();
    world.send(WORKER.0, Message::ReadEvents(ReadEvents::default()));
    let refused = world.process.replies.pop();
    assert!(
        matches!(&refused, Some((_, Message::Error(error))) if error.code() == ErrorCode::Forbidden),
        "{refused:?}"
    );
}
