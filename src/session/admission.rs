//! Admission of messages by their header and length, before a byte of the body is read.
//!
//! Decoding costs time, and several times the memory of the encoded bytes. The body is therefore not decoded for a peer
//! that has not sent its hello, sends a kind that its role may not send, has used up its credits, or repeats an open
//! request.

use std::collections::BTreeMap;
use std::time::Duration;

use super::origin::Origin;
use kvferry_protocol::{
    Class, ErrorBody, ErrorCode, HELLO_VERSION, Header, MessageKind, Role, check_header, limits,
};
use kvferry_types::{RequestId, Time};

/// Limit on messages that cannot be decoded, come before hello, or answer no request. One more closes the peer.
pub const BAD_MAX: u32 = 16;
/// Interval after which one such message is forgiven, because a long connection may have some.
const BAD_FORGIVEN: Duration = Duration::from_secs(10);
/// Limit on connections without a hello. One more closes the oldest of them.
pub const STRANGERS_MAX: usize = 16;
/// A connection that sends no hello within this time is closed.
pub const HELLO_DEADLINE: Duration = Duration::from_secs(5);

/// One connection of a server.
#[derive(Debug)]
pub(super) struct Peer {
    /// Where the connection comes from.
    pub(super) origin: Origin,
    /// The peer's role; `None` before its welcome.
    pub(super) role: Option<Role>,
    /// Version of the messages that are sent to the peer.
    pub(super) version: u16,
    opened: Time,
    /// When a message was last received from the peer.
    last_received: Time,
    bad: u32,
    forgiven: Time,
    /// Requests without an answer, with their bytes.
    open: BTreeMap<RequestId, u64>,
    open_bytes: u64,
}

/// The treatment of a message.
#[derive(Debug, PartialEq)]
pub(super) enum Verdict {
    /// The body is decoded.
    Read,
    /// The message is answered with this error, and not decoded.
    Refuse(ErrorBody),
    /// The message is an answer, and dropped for a reason that has this code.
    Drop(ErrorCode),
    /// The message is a request that is open, and dropped: the first one is answered once.
    Repeated,
}

impl Peer {
    /// When a message was last received from the peer.
    pub(super) fn last_received(&self) -> Time {
        self.last_received
    }

    pub(super) fn new(origin: Origin, now: Time) -> Self {
        Self {
            origin,
            role: None,
            version: HELLO_VERSION,
            opened: now,
            last_received: now,
            bad: 0,
            forgiven: now,
            open: BTreeMap::new(),
            open_bytes: 0,
        }
    }

    /// True when the peer was silent for more than `silence_max`, or sent no hello in time.
    pub(super) fn is_silent(&self, now: Time, silence_max: Duration) -> bool {
        let stranger = self.role.is_none() && now - self.opened > HELLO_DEADLINE;
        stranger || now - self.last_received > silence_max
    }

    /// Counts a bad message. Returns true when there were too many: the peer must be closed.
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

    /// Decides how a message is treated. The flag is true when the message counts as bad.
    pub(super) fn admit(&mut self, header: &Header, bytes: usize, now: Time) -> (Verdict, bool) {
        self.last_received = now;
        let is_request = Class::of(header.kind) == Class::Request;
        let refuse = |error: ErrorBody| match is_request {
            true => Verdict::Refuse(error),
            // A peer would take an answer with this id for the answer to a request of its own.
            false => Verdict::Drop(error.code()),
        };
        let known = MessageKind::from_number(header.kind);
        let allowed_before_welcome = matches!(
            known,
            Some(MessageKind::Hello | MessageKind::Ping | MessageKind::Pong)
        );
        let Some(role) = self
            .role
            .or_else(|| allowed_before_welcome.then_some(Role::Unknown))
        else {
            let text = match header.byte_order() {
                Some(order) => order.to_string(),
                None => {
                    let name = known.map_or_else(
                        || format!("kind {}", header.kind),
                        |kind| kind.name().to_owned(),
                    );
                    format!("{name} before hello: send hello first")
                }
            };
            return (refuse(ErrorBody::new(ErrorCode::HelloFirst, text)), true);
        };
        let kind = match check_header(header, bytes) {
            Ok(kind) => kind,
            Err(error) => {
                let error = ErrorBody::for_good(error.code(), error.to_string());
                return (refuse(error), false);
            }
        };
        if kind == MessageKind::Hello && self.role.is_some() {
            let text = "the hello was sent before: send it once";
            return (refuse(ErrorBody::new(ErrorCode::Invalid, text)), false);
        }
        if !kind.sent_by(role) || !self.origin.may_send(kind) {
            let text = forbidden(kind, role);
            let verdict = refuse(ErrorBody::new(ErrorCode::Forbidden, text));
            return (verdict, !is_request);
        }
        // Hello and pings use no credits.
        if allowed_before_welcome || !is_request {
            return (Verdict::Read, false);
        }
        (self.afford(header.correlation, bytes as u64), false)
    }

    fn afford(&self, id: RequestId, bytes: u64) -> Verdict {
        if self.is_open(id) {
            return Verdict::Repeated;
        }
        if self.open.len() >= limits::REQUEST_CREDITS as usize
            || self.open_bytes + bytes > limits::BYTE_CREDITS
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

    /// Charges the credits of a request that was decoded and has no answer yet.
    pub(super) fn note_request(&mut self, id: RequestId, bytes: u64) {
        self.open_bytes += bytes - self.open.insert(id, bytes).unwrap_or(0);
    }

    /// True while this request has no answer.
    pub(super) fn is_open(&self, id: RequestId) -> bool {
        self.open.contains_key(&id)
    }

    /// The requests without an answer, and their bytes.
    pub(super) fn open_requests(&self) -> (u64, u64) {
        (self.open.len() as u64, self.open_bytes)
    }

    /// Gives the peer the credits of an answered request back.
    pub(super) fn settle(&mut self, id: RequestId) {
        self.open_bytes -= self.open.remove(&id).unwrap_or(0);
    }
}
/// Why a peer of this role may not send a message: its role, or else its certificate, does not permit it.
fn forbidden(kind: MessageKind, role: Role) -> String {
    let name = kind.name();
    if kind.sent_by(role) {
        return match kind {
            MessageKind::Drain | MessageKind::SetLog => {
                format!("{name} is not for peers with a certificate: send it on this machine")
            }
            _ => format!(
                "{name} is not for a peer with the certificate of a monitor: use that of an admin"
            ),
        };
    }
    let senders = Role::ALL.iter().filter(|role| kind.sent_by(**role));
    let senders: Vec<&str> = senders.map(|role| role.name()).collect();
    match senders.is_empty() {
        true => format!("{name} is sent by servers alone: leave it out"),
        false => format!(
            "{name} is sent by the role {} to a {}, and yours is {}: connect with that role, to that process",
            senders.join(" or "),
            kind.receiver(),
            role.name()
        ),
    }
}
