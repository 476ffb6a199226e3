//! Which messages of a peer a server reads, judged by header and length before a byte of the body is looked at.
//!
//! Decoding costs time and several times the memory of the bytes, so a peer that has not said who it is, says what its role
//! does not say, has used up its credits, or repeats itself gets none of it.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;

use crate::protocol::{
    Class, ErrorBody, ErrorCode, HELLO_VERSION, Header, Kind, Role, judge, limits,
};
use crate::transport::process::ProcessWatch;
use crate::types::RequestId;

/// Messages that cannot be read, or come before hello, or answer nothing, after which a peer is closed.
const BAD_MAX: u32 = 16;
/// So often one of them is forgiven: a long conversation may hold some.
const BAD_FORGIVEN: Duration = Duration::from_secs(10);
/// A connection on which nobody has said hello by then is closed.
pub(super) const HELLO_DEADLINE: Duration = Duration::from_secs(5);

/// What a server knows of one connection.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) pid: Option<i32>,
    /// Watches its process, where it has memory that is used here.
    pub(super) process: Option<ProcessWatch>,
    /// What it is, once it was welcomed.
    pub(super) role: Option<Role>,
    /// Version in which it is spoken to.
    pub(super) version: u16,
    pub(super) opened: Instant,
    pub(super) heard: Instant,
    bad: u32,
    forgiven: Instant,
    open: HashMap<RequestId, u64>,
    open_bytes: u64,
}

/// What is to be done with a message.
#[derive(Debug, PartialEq)]
pub(super) enum Verdict {
    /// Its body is to be read.
    Read,
    /// It is to be answered with this, unread.
    Refuse(ErrorBody),
    /// Nothing.
    Drop,
}

impl Peer {
    pub(super) fn new(pid: Option<i32>, now: Instant) -> Self {
        Self {
            pid,
            process: None,
            role: None,
            version: HELLO_VERSION,
            opened: now,
            heard: now,
            bad: 0,
            forgiven: now,
            open: HashMap::new(),
            open_bytes: 0,
        }
    }

    /// Whether it has said nothing that a server may take for a reason to keep it.
    pub(super) fn is_silent(&self, now: Instant, silence_max: Duration) -> bool {
        let stranger = self.role.is_none() && now.duration_since(self.opened) > HELLO_DEADLINE;
        stranger || now.duration_since(self.heard) > silence_max
    }

    /// Notes a message that should not have come. True when there were too many: the peer is to be closed.
    pub(super) fn misbehaves(&mut self, now: Instant) -> bool {
        while self.bad > 0 && now.duration_since(self.forgiven) >= BAD_FORGIVEN {
            self.bad -= 1;
            self.forgiven += BAD_FORGIVEN;
        }
        if self.bad == 0 {
            self.forgiven = now;
        }
        self.bad += 1;
        self.bad > BAD_MAX
    }

    /// Whether the body of a message is to be read. `true` beside it: it should not have come.
    pub(super) fn judge(&mut self, header: &Header, bytes: usize, now: Instant) -> (Verdict, bool) {
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

    /// A request that was read waits for its answer.
    pub(super) fn owe(&mut self, id: RequestId, bytes: u64) {
        self.open_bytes += bytes - self.open.insert(id, bytes).unwrap_or(0);
    }

    /// It was answered.
    pub(super) fn settle(&mut self, id: RequestId) {
        self.open_bytes -= self.open.remove(&id).unwrap_or(0);
    }
}
