//! The parser of one direction of a connection.

use super::{
    COMMAND_BYTES_MAX, DELIMITER_BYTES_MAX, FLAG_COMMAND, FLAG_LONG, FLAG_MORE, GREETING_BYTES,
    HEAD_BYTES_MAX, NUMBER_BYTES, PING_CONTEXT_BYTES_MAX, Part, PingContext, TOPIC_BYTES_MAX,
    Violation, check_part,
};
use crate::Limits;

/// An item found by the parser.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Item<'a> {
    /// The greeting is complete and acceptable.
    Greeting,
    /// A valid READY of a socket of the expected type.
    Ready,
    /// A PING, to be answered by a PONG.
    Ping(PingContext),
    /// A PONG or an ERROR, both without effect.
    Ignored,
    /// A SUBSCRIBE, or a CANCEL, of the topic that [`Parser::topic`] has until the next item.
    Subscription {
        /// Whether it subscribes.
        on: bool,
    },
    /// Start of a part; its length is within the limits.
    Part {
        /// The part that starts.
        part: Part,
        /// Its length.
        bytes: u64,
    },
    /// The next bytes of the part.
    Payload(&'a [u8]),
    /// The message is complete.
    End,
}

#[derive(Debug)]
enum State {
    Greeting,
    Head,
    Command { bytes: usize },
    Payload { left: u64 },
}

/// What the other side may send.
#[derive(Debug, Clone, Copy)]
struct Rules {
    socket_types: &'static [&'static [u8]],
    /// The first part of each message.
    first: Part,
    /// Whether the other side may subscribe by commands.
    subscribes: bool,
}

/// Parses one direction of a connection. After an `Err` the parser must not be used again.
#[derive(Debug)]
pub struct Parser {
    state: State,
    /// Buffered bytes of a greeting, a head or a command.
    held: Vec<u8>,
    ready: bool,
    part: Part,
    /// Of the last SUBSCRIBE or CANCEL.
    topic: Vec<u8>,
    rules: Rules,
    limits: Limits,
}

impl Parser {
    /// A parser for a client's stream from its start.
    pub fn client(limits: &Limits) -> Self {
        Self::of_messages(&[b"DEALER"], limits.clone())
    }

    /// A parser for a server's stream from its start.
    pub fn server(limits: &Limits) -> Self {
        Self::of_messages(&[b"ROUTER"], limits.clone())
    }

    /// A parser for the stream of a subscriber: messages of one part, the first byte of which says whether the topic behind
    /// it is subscribed (1) or cancelled (0), and the commands SUBSCRIBE and CANCEL.
    pub fn subscriber() -> Self {
        let limits = Limits {
            header_bytes: 0,
            body_bytes: 1 + TOPIC_BYTES_MAX,
            ..Limits::default()
        };
        let rules = Rules {
            socket_types: &[b"SUB", b"XSUB"],
            first: Part::Body,
            subscribes: true,
        };
        Self::new(rules, limits)
    }

    /// A parser for the stream of a client that requests earlier batches: messages of two parts, the second of which is a
    /// number.
    pub fn requester() -> Self {
        let limits = Limits {
            header_bytes: DELIMITER_BYTES_MAX,
            body_bytes: NUMBER_BYTES,
            ..Limits::default()
        };
        Self::of_messages(&[b"DEALER", b"REQ"], limits)
    }

    fn of_messages(socket_types: &'static [&'static [u8]], limits: Limits) -> Self {
        let rules = Rules {
            socket_types,
            first: Part::Header,
            subscribes: false,
        };
        Self::new(rules, limits)
    }

    fn new(rules: Rules, limits: Limits) -> Self {
        Self {
            rules,
            state: State::Greeting,
            held: Vec::with_capacity(GREETING_BYTES),
            ready: false,
            part: rules.first,
            topic: Vec::new(),
            limits,
        }
    }

    /// The topic of the last SUBSCRIBE or CANCEL.
    pub fn topic(&self) -> &[u8] {
        &self.topic
    }

    /// Bytes of a greeting, a head or a command that are buffered.
    pub fn held_bytes(&self) -> usize {
        self.held.len()
    }

    /// Consumes bytes from the front of `input` until an item is found; `None` when all bytes are consumed.
    pub fn next<'a>(&mut self, input: &mut &'a [u8]) -> Result<Option<Item<'a>>, Violation> {
        loop {
            let found = match self.state {
                State::Greeting => self.greeting(input)?,
                State::Head => self.head(input)?,
                State::Command { bytes } => match self.hold(input, bytes) {
                    true => Some(self.command()?),
                    false => None,
                },
                State::Payload { left } => self.payload(input, left),
            };
            match found {
                Some(item) => return Ok(Some(item)),
                None if input.is_empty() && !self.can_go_on() => return Ok(None),
                None => {}
            }
        }
    }

    /// Whether the parser can find an item without further bytes.
    fn can_go_on(&self) -> bool {
        match self.state {
            State::Payload { left } => left == 0,
            State::Command { bytes } => self.held.len() == bytes,
            State::Greeting | State::Head => false,
        }
    }

    /// Buffers bytes of `input` until there are `want`. Returns whether there are.
    fn hold(&mut self, input: &mut &[u8], want: usize) -> bool {
        let take = want.saturating_sub(self.held.len()).min(input.len());
        let (taken, rest) = input.split_at(take);
        self.held.extend_from_slice(taken);
        *input = rest;
        self.held.len() == want
    }

    fn greeting<'a>(&mut self, input: &mut &[u8]) -> Result<Option<Item<'a>>, Violation> {
        let complete = self.hold(input, GREETING_BYTES);
        check_greeting(&self.held)?;
        if !complete {
            return Ok(None);
        }
        self.held.clear();
        self.state = State::Head;
        Ok(Some(Item::Greeting))
    }

    fn head<'a>(&mut self, input: &mut &[u8]) -> Result<Option<Item<'a>>, Violation> {
        if !self.hold(input, 1) && self.held.is_empty() {
            return Ok(None);
        }
        let flags = self.held[0];
        self.check_flags(flags)?;
        let want = match flags & FLAG_LONG {
            0 => 2,
            _ => HEAD_BYTES_MAX,
        };
        if !self.hold(input, want) {
            return Ok(None);
        }
        let bytes = self.held[1..]
            .iter()
            .fold(0_u64, |sum, byte| sum << 8 | u64::from(*byte));
        self.held.clear();
        match flags & FLAG_COMMAND {
            0 => self.start_part(bytes).map(Some),
            _ => self.start_command(bytes),
        }
    }

    fn check_flags(&self, flags: u8) -> Result<(), Violation> {
        if flags & !(FLAG_MORE | FLAG_LONG | FLAG_COMMAND) != 0 {
            return Err(Violation::Flags);
        }
        let more = flags & FLAG_MORE != 0;
        match (flags & FLAG_COMMAND != 0, self.part) {
            (true, _) if more => Err(Violation::Flags),
            (true, _) => Ok(()),
            (false, _) if !self.ready => Err(Violation::NotReady),
            (false, Part::Header) if !more => Err(Violation::Parts),
            (false, Part::Body) if more => Err(Violation::Parts),
            (false, _) => Ok(()),
        }
    }

    fn start_part<'a>(&mut self, bytes: u64) -> Result<Item<'a>, Violation> {
        check_part(&self.limits, self.part, bytes)?;
        self.state = State::Payload { left: bytes };
        Ok(Item::Part {
            part: self.part,
            bytes,
        })
    }

    fn start_command<'a>(&mut self, bytes: u64) -> Result<Option<Item<'a>>, Violation> {
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        if bytes > COMMAND_BYTES_MAX {
            return Err(Violation::CommandTooLong);
        }
        self.state = State::Command { bytes };
        Ok(None)
    }

    fn payload<'a>(&mut self, input: &mut &'a [u8], left: u64) -> Option<Item<'a>> {
        if left == 0 {
            self.state = State::Head;
            let ended = self.part;
            self.part = match ended {
                Part::Header => Part::Body,
                Part::Body => self.rules.first,
            };
            return (ended == Part::Body).then_some(Item::End);
        }
        let take = usize::try_from(left).unwrap_or(usize::MAX).min(input.len());
        if take == 0 {
            return None;
        }
        let (taken, rest) = input.split_at(take);
        *input = rest;
        self.state = State::Payload {
            left: left - take as u64,
        };
        Some(Item::Payload(taken))
    }

    fn command<'a>(&mut self) -> Result<Item<'a>, Violation> {
        self.state = State::Head;
        let held = std::mem::take(&mut self.held);
        let (name, rest) = take_string(&held).ok_or(Violation::Command)?;
        match (name, self.ready) {
            (b"READY", false) => {
                check_ready(rest, self.rules.socket_types)?;
                self.ready = true;
                Ok(Item::Ready)
            }
            (b"PING", true) => ping_context(rest).map(Item::Ping),
            (b"PONG", true) | (b"ERROR", _) => Ok(Item::Ignored),
            (b"SUBSCRIBE", true) if self.rules.subscribes => self.subscription(true, rest),
            (b"CANCEL", true) if self.rules.subscribes => self.subscription(false, rest),
            _ => Err(Violation::UnexpectedCommand),
        }
    }

    fn subscription<'a>(&mut self, on: bool, topic: &[u8]) -> Result<Item<'a>, Violation> {
        check_part(&self.limits, Part::Body, 1 + topic.len() as u64)?;
        self.topic.clear();
        self.topic.extend_from_slice(topic);
        Ok(Item::Subscription { on })
    }
}

/// Checks the received part of a greeting, so that garbage is refused at its first byte.
fn check_greeting(held: &[u8]) -> Result<(), Violation> {
    let signature = |at: usize, wrong: fn(u8) -> bool| held.get(at).copied().is_some_and(wrong);
    if signature(0, |b| b != 0xff) || signature(9, |b| b != 0x7f) || signature(10, |b| b < 3) {
        return Err(Violation::Greeting);
    }
    let mut mechanism = [0_u8; 20];
    mechanism[..4].copy_from_slice(b"NULL");
    let given = held.get(12..).unwrap_or_default();
    match given.iter().zip(&mechanism).all(|(a, b)| a == b) {
        true => Ok(()),
        false => Err(Violation::Mechanism),
    }
}

/// Splits off a string with a length of one byte; returns it and the rest.
fn take_string(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (len, rest) = bytes.split_first()?;
    rest.split_at_checked(usize::from(*len))
}

/// Splits off a value with a length of four bytes; returns it and the rest.
fn take_value(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (len, rest) = bytes.split_first_chunk::<4>()?;
    rest.split_at_checked(usize::try_from(u32::from_be_bytes(*len)).ok()?)
}

fn check_ready(mut rest: &[u8], expected: &[&[u8]]) -> Result<(), Violation> {
    let mut socket_type = None;
    while !rest.is_empty() {
        let (name, after) = take_string(rest).ok_or(Violation::Command)?;
        let (value, after) = take_value(after).ok_or(Violation::Command)?;
        rest = after;
        if name.eq_ignore_ascii_case(b"Socket-Type") && socket_type.replace(value).is_some() {
            return Err(Violation::Command);
        }
    }
    match socket_type {
        Some(found) if expected.contains(&found) => Ok(()),
        _ => Err(Violation::SocketType),
    }
}

fn ping_context(rest: &[u8]) -> Result<PingContext, Violation> {
    let (_ttl, context) = rest.split_first_chunk::<2>().ok_or(Violation::Command)?;
    let mut bytes = [0; PING_CONTEXT_BYTES_MAX];
    let slot = bytes.get_mut(..context.len()).ok_or(Violation::Command)?;
    slot.copy_from_slice(context);
    Ok(PingContext {
        bytes,
        len: context.len(),
    })
}
