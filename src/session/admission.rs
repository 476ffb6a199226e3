//! Admission of messages by their header and length, before a byte of the body is read.
//!
//! Decoding costs time and several times the memory of the bytes. So the body is not decoded for a peer that has not said
//! hello, sends what its role does not send, has used up its credits, or repeats itself.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::protocol::{
    Class, ErrorBody, ErrorCode, HELLO_VERSION, Header, Kind, Role, judge, limits,
};
use crate::types::{RequestId, Time};

/// Messages that cannot be decoded, come before hello, or answer nothing, after which a peer is closed.
const BAD_MAX: u32 = 16;
/// One of them is forgiven after so long: a long conversation may hold some.
const BAD_FORGIVEN: Duration = Duration::from_secs(10);
/// Connections without a hello; when there is one more, the oldest of them is closed.
pub const STRANGERS_MAX: usize = 16;
/// A connection without a hello by then is closed.
pub const HELLO_DEADLINE: Duration = Duration::from_secs(5);

/// One connection of a server.
#[derive(Debug)]
pub(super) struct Peer {
    /// Its process, if the system shows it.
    pub(super) pid: Option<i32>,
    /// Its role, once it was welcomed.
    pub(super) role: Option<Role>,
    /// Version of the messages that are sent to it.
    pub(super) version: u16,
    opened: Time,
    /// When something was received from it last.
    heard: Time,
    bad: u32,
    forgiven: Time,
    /// Requests without an answer, with their bytes.
    open: BTreeMap<RequestId, u64>,
    open_bytes: u64,
}

/// How a message is treated.
#[derive(Debug, PartialEq)]
pub(super) enum Verdict {
    /// Its body is decoded.
    Read,
    /// It is answered with this error, and not decoded.
    Refuse(ErrorBody),
    /// It is dropped.
    Drop,
}

impl Peer {
    /// When something was received from it last.
    pub(super) fn heard(&self) -> Time {
        self.heard
    }

    pub(super) fn new(pid: Option<i32>, now: Time) -> Self {
        Self {
            pid,
            role: None,
            version: HELLO_VERSION,
            opened: now,
            heard: now,
            bad: 0,
            forgiven: now,
            open: BTreeMap::new(),
            open_bytes: 0,
        }
    }

    /// True when nothing was received from it for so long, or no hello in time.
    pub(super) fn is_silent(&self, now: Time, silence_max: Duration) -> bool {
        let stranger = self.role.is_none() && now - self.opened > HELLO_DEADLINE;
        stranger || now - self.heard > silence_max
    }

    /// Counts a message that should not have come. True when there were too many: the peer is to be closed.
    pub(super) fn misbehaves(&mut self, now: Time) -> bool {
        while self.bad > 0 && now - self.forgiven >= BAD_FORGIVEN {
            self.bad -= 1;
            self.forgiven = self.forgiven + BAD_FORGIVEN;
        }
        if self.bad == 0 {
            self.forgiven = now;
        }
        self.bad += 1;
        self.bad > BAD_MAX
    }

    /// How a message is treated. True beside it when it should not have come.
    pub(super) fn judge(&mut self, header: &Header, bytes: usize, now: Time) -> (Verdict, bool) {
        self.heard = now;
        let is_request = Class::of(header.kind) == Class::Request;
        let refuse = |error: ErrorBody| match is_request {
            true => Verdict::Refuse(error),
            // Its sender would take an answer for one to a request of its own.
            false => Verdict::Drop,
        };
        let known = Kind::from_number(header.kind);
        let first_words = matches!(known, Some(Kind::Hello | Kind::Ping | Kind::Pong));
        let Some(role) = self.role.or_else(|| first_words.then_some(Role::Unknown)) else {
            let name = known.map_or("something", Kind::name);
            let text = format!("{name} before hello: say hello first");
            return (refuse(ErrorBody::new(ErrorCode::HelloFirst, text)), true);
        };
        let kind = match judge(header, bytes) {
            Ok(kind) => kind,
            Err(error) => {
                let error = ErrorBody::for_good(error.code(), error.to_string());
                return (refuse(error), false);
            }
        };
        if kind == Kind::Hello && self.role.is_some() {
            let text = "hello was said before: once is enough";
            return (refuse(ErrorBody::new(ErrorCode::Invalid, text)), false);
        }
        if !kind.said_by(role) {
            let text = format!(
                "{} is not for this peer to send here: check its role",
                kind.name()
            );
            let verdict = refuse(ErrorBody::new(ErrorCode::UnknownKind, text));
            return (verdict, !is_request);
        }
        if first_words || !is_request {
            return (Verdict::Read, false);
        }
        (self.afford(header.correlation, bytes as u64), false)
    }

    fn afford(&self, id: RequestId, bytes: u64) -> Verdict {
        if self.open.contains_key(&id) {
            // It will be answered, once.
            return Verdict::Drop;
        }
        if self.open.len() >= limits::REQUEST_CREDITS as usize
            || (self.open_bytes + bytes > limits::BYTE_CREDITS && !self.open.is_empty())
        {
            let text = format!(
                "{} requests with {} bytes wait for answers: at most {} and {} may",
                self.open.len(),
                self.open_bytes,
                limits::REQUEST_CREDITS,
                limits::BYTE_CREDITS
            );
            return Verdict::Refuse(ErrorBody::new(ErrorCode::Busy, text));
        }
        Verdict::Read
    }

    /// A request was decoded and has no answer yet.
    pub(super) fn owe(&mut self, id: RequestId, bytes: u64) {
        self.open_bytes += bytes - self.open.insert(id, bytes).unwrap_or(0);
    }

    /// A request is answered.
    pub(super) fn settle(&mut self, id: RequestId) {
        self.open_bytes -= self.open.remove(&id).unwrap_or(0);
    }
}
