//! Readers of the leader's change log, and their waits.
//!
//! A read that finds nothing may wait for the next change. Each peer has one wait at most: a later read of the same peer ends
//! the earlier one. Waits cost nothing while the log does not grow.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use super::{LeaderHost, LeaderShell, Origin};
use kvferry_core::{Change, GoneReason, LOG_IDLE, LOG_READ_PAGES_MAX, Leader, LogPart, LogRead};
use kvferry_protocol::limits::EVENT_PAGES_MAX;
use kvferry_protocol::{
    ErrorBody, ErrorCode, EventKind, EventReason, EventRecord, Events, Message, ReadEvents,
};
use kvferry_types::{Epoch, PeerId, RequestId, TierId, Time};

/// Reads that wait for a change, at most; more are answered `busy`.
const LOG_READERS_MAX: usize = 64;
/// Longest time that a read waits.
const LOG_WAIT_MAX: Duration = Duration::from_secs(30);

/// Bytes of a hash in a record.
const HASH_BYTES: u8 = 16;

// A part of the core's log fits into one message, and a reader that waits all the time keeps the log recording.
const _: () = assert!(LOG_READ_PAGES_MAX as usize == EVENT_PAGES_MAX);
const _: () = assert!(2 * LOG_WAIT_MAX.as_secs() <= LOG_IDLE.as_secs());

/// A read that waits for a change.
#[derive(Debug)]
struct WaitingRead {
    request: RequestId,
    read: LogRead,
    until: Time,
}

/// The reads that wait.
#[derive(Debug, Default)]
pub(super) struct LogReaders {
    waiting: BTreeMap<PeerId, WaitingRead>,
    /// The end of the log when they were last checked.
    seen: u64,
}

impl LogReaders {
    /// When the first wait ends.
    pub(super) fn next_timeout(&self) -> Option<Time> {
        self.waiting.values().map(|waiting| waiting.until).min()
    }

    /// Forgets the read of a peer whose connection is closed.
    pub(super) fn forget(&mut self, peer: PeerId) {
        self.waiting.remove(&peer);
    }
}

impl<P: fmt::Debug> LeaderShell<P> {
    /// Reads the change log for a reader that is part of this process.
    pub fn read_log(&mut self, now: Time, read: &LogRead) -> LogPart {
        self.core.read_log(now, read)
    }

    /// Answers a read, or lets it wait for the next change.
    pub(super) fn read_events(
        &mut self,
        host: &mut dyn LeaderHost<Process = P>,
        origin: Origin,
        body: ReadEvents,
    ) {
        let Origin {
            peer,
            request,
            deadline_ms,
            ..
        } = origin;
        let now = host.now();
        if let Some(before) = self.readers.waiting.remove(&peer) {
            self.answer_read(host, peer, &before);
        }
        let wait = Duration::from_millis(body.wait_ms.min(deadline_ms).into()).min(LOG_WAIT_MAX);
        let mut read = log_read(body);
        let part = self.core.read_log(now, &read);
        if !part.is_empty() || read.cursor.is_some() || wait.is_zero() {
            return host.reply(peer, request, self.events(part));
        }
        if self.readers.waiting.len() >= LOG_READERS_MAX {
            let text = format!("{LOG_READERS_MAX} readers wait: retry, or read with wait_ms 0");
            let error = ErrorBody::new(ErrorCode::Busy, text);
            return host.reply(peer, request, Message::Error(error));
        }
        read.from = part.next;
        let until = now + wait;
        let waiting = WaitingRead {
            request,
            read,
            until,
        };
        self.readers.waiting.insert(peer, waiting);
    }

    /// Answers the reads for which there are changes.
    pub(super) fn answer_readers(&mut self, host: &mut dyn LeaderHost<Process = P>) {
        let end = self.core.log_end();
        if self.readers.waiting.is_empty() || end == self.readers.seen {
            return;
        }
        self.readers.seen = end;
        let now = host.now();
        let mut waiting = std::mem::take(&mut self.readers.waiting);
        waiting.retain(|peer, waiting| {
            let part = self.core.read_log(now, &waiting.read);
            // The changes were of other namespaces.
            waiting.read.from = part.next;
            let waits = part.is_empty();
            if !waits {
                host.reply(*peer, waiting.request, self.events(part));
            }
            waits
        });
        self.readers.waiting = waiting;
    }

    /// Answers the reads whose wait has ended.
    pub(super) fn end_waits(&mut self, host: &mut dyn LeaderHost<Process = P>) {
        let now = host.now();
        let mut waiting = std::mem::take(&mut self.readers.waiting);
        waiting.retain(|peer, waiting| {
            let waits = now < waiting.until;
            if !waits {
                self.answer_read(host, *peer, waiting);
            }
            waits
        });
        self.readers.waiting = waiting;
    }

    fn answer_read(
        &mut self,
        host: &mut dyn LeaderHost<Process = P>,
        peer: PeerId,
        waiting: &WaitingRead,
    ) {
        let part = self.core.read_log(host.now(), &waiting.read);
        host.reply(peer, waiting.request, self.events(part));
    }

    fn events(&self, part: LogPart) -> Message {
        Message::Events(events(self.settings.epoch, part))
    }
}

/// Reads the change log of a leader without a shell, as a reader of a live leader does; never waits.
pub fn read_events(leader: &mut Leader, now: Time, body: ReadEvents) -> Events {
    let part = leader.read_log(now, &log_read(body));
    events(leader.epoch(), part)
}

fn log_read(body: ReadEvents) -> LogRead {
    LogRead {
        epoch: Epoch(body.epoch),
        from: body.from,
        most: body.most,
        namespace: body.namespace.map(|name| name.into_vec()),
        cursor: body.cursor,
    }
}

fn events(epoch: Epoch, part: LogPart) -> Events {
    let changes = part.changes.into_iter();
    Events {
        epoch: epoch.0,
        next: part.next,
        lost: part.lost,
        hash_bytes: HASH_BYTES,
        records: changes.map(record).collect(),
        cursor: part.cursor,
    }
}

fn record((tier, change): (TierId, Change)) -> EventRecord {
    let (event, why, changed) = match change {
        Change::Stored(pages) => (EventKind::Stored, None, pages),
        Change::Gone(pages, reason) => {
            let why = match reason {
                GoneReason::Evicted => EventReason::Evicted,
                GoneReason::Damaged => EventReason::Damaged,
                GoneReason::Reset => EventReason::Reset,
            };
            (EventKind::Gone, Some(why), pages)
        }
        Change::Cleared => {
            return EventRecord {
                event: EventKind::Cleared,
                tier: tier.number(),
                ..EventRecord::default()
            };
        }
    };
    let domain = changed.domain.0.to_be_bytes();
    let hashes: Vec<[u8; 16]> = changed
        .pages
        .iter()
        .map(|page| page.0.to_be_bytes())
        .collect();
    EventRecord {
        event,
        tier: tier.number(),
        namespace: domain[..8].to_vec(),
        layout: domain[8..15].to_vec(),
        group: changed.domain.group().0,
        place: changed.start,
        hashes: hashes.into_flattened(),
        why,
    }
}
