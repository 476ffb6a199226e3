//! Tests of the ZMTP parser: every split of a stream gives the same items, no input panics, and violations are refused
//! early.

use proptest::prelude::*;

use super::super::zmtp::{self, GREETING_BYTES, Item, Parser, Part};
use super::super::{Limits, Violation};

/// A found item with its payload joined, so that it does not depend on how the stream was split.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Found {
    Greeting,
    Ready,
    Ping,
    Ignored,
    Subscription(bool),
    Part(Part, u64, Vec<u8>),
    End,
}

fn limits() -> Limits {
    Limits {
        header_bytes: 300,
        body_bytes: 1000,
        ..Limits::default()
    }
}

/// Feeds the pieces in order. Also returns how many bytes were consumed before a refusal.
fn parse<'a>(
    mut parser: Parser,
    pieces: impl IntoIterator<Item = &'a [u8]>,
) -> (Vec<Found>, Result<(), Violation>) {
    let mut found = Vec::new();
    for mut piece in pieces {
        loop {
            match parser.next(&mut piece) {
                Ok(Some(item)) => note(&mut found, item),
                Ok(None) => break,
                Err(violation) => return (found, Err(violation)),
            }
        }
        assert!(piece.is_empty(), "bytes were left");
    }
    (found, Ok(()))
}

fn note(found: &mut Vec<Found>, item: Item<'_>) {
    match item {
        Item::Greeting => found.push(Found::Greeting),
        Item::Ready => found.push(Found::Ready),
        Item::Ping(_) => found.push(Found::Ping),
        Item::Ignored => found.push(Found::Ignored),
        Item::Subscription { on } => found.push(Found::Subscription(on)),
        Item::End => found.push(Found::End),
        Item::Part { part, bytes } => found.push(Found::Part(part, bytes, Vec::new())),
        Item::Payload(bytes) => match found.last_mut() {
            Some(Found::Part(_, _, payload)) => payload.extend_from_slice(bytes),
            other => panic!("payload after {other:?}"),
        },
    }
}

fn whole(bytes: &[u8]) -> (Vec<Found>, Result<(), Violation>) {
    parse(Parser::client(&limits()), [bytes])
}

fn by_bytes(bytes: &[u8]) -> (Vec<Found>, Result<(), Violation>) {
    parse(Parser::client(&limits()), bytes.chunks(1))
}

fn hello() -> Vec<u8> {
    let mut bytes = zmtp::greeting().to_vec();
    bytes.extend(zmtp::ready("DEALER", b"anything"));
    bytes
}

fn put_message(out: &mut Vec<u8>, header: &[u8], body: &[u8]) {
    for (part, bytes) in [(Part::Header, header), (Part::Body, body)] {
        zmtp::put_head(out, part, bytes.len() as u64);
        out.extend_from_slice(bytes);
    }
}

const PING: &[u8] = b"\x04\x0b\x04PING\x00\x05ctx!";

#[derive(Debug, Clone)]
enum Written {
    Message(Vec<u8>, Vec<u8>),
    Ping,
}

fn written() -> impl Strategy<Value = Written> {
    let bytes = |max| proptest::collection::vec(any::<u8>(), 0..=max);
    prop_oneof![
        4 => (bytes(300), bytes(1000)).prop_map(|(header, body)| Written::Message(header, body)),
        1 => Just(Written::Ping),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_split_of_a_stream_reads_the_same(
        said in proptest::collection::vec(written(), 0..6),
        cuts in proptest::collection::vec(any::<prop::sample::Index>(), 0..40),
    ) {
        let mut bytes = hello();
        let mut expected = vec![Found::Greeting, Found::Ready];
        for said in said {
            match said {
                Written::Message(header, body) => {
                    put_message(&mut bytes, &header, &body);
                    expected.push(Found::Part(Part::Header, header.len() as u64, header));
                    expected.push(Found::Part(Part::Body, body.len() as u64, body));
                    expected.push(Found::End);
                }
                Written::Ping => {
                    bytes.extend_from_slice(PING);
                    expected.push(Found::Ping);
                }
            }
        }
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len())).collect();
        cuts.extend([0, bytes.len()]);
        cuts.sort_unstable();
        let pieces = cuts.windows(2).map(|cut| &bytes[cut[0]..cut[1]]);
        prop_assert_eq!(parse(Parser::client(&limits()), pieces), (expected, Ok(())));
    }

    #[test]
    fn random_bytes_read_the_same_whole_and_byte_by_byte(
        shaken in any::<bool>(),
        noise in proptest::collection::vec(prop_oneof![0_u8..8, any::<u8>()], 0..400),
    ) {
        let mut bytes = if shaken { hello() } else { Vec::new() };
        bytes.extend(noise);
        prop_assert_eq!(whole(&bytes), by_bytes(&bytes));
        for (parser, socket_type) in [(Parser::subscriber as fn() -> Parser, "SUB"), (Parser::requester, "REQ")] {
            let ready = zmtp::ready(socket_type, b"");
            let start = [&zmtp::greeting()[..], &ready].concat();
            let bytes = [if shaken { &start[..] } else { &[] }, &bytes[bytes.len().min(start.len())..]].concat();
            prop_assert_eq!(parse(parser(), [&bytes[..]]), parse(parser(), bytes.chunks(1)));
        }
    }
}

fn refused(bytes: &[u8]) -> Option<Violation> {
    assert_eq!(whole(bytes), by_bytes(bytes));
    whole(bytes).1.err()
}

#[test]
fn refuses_a_bad_greeting_at_its_first_wrong_byte() {
    let with = |at: usize, byte: u8| {
        let mut bytes = zmtp::greeting();
        bytes[at] = byte;
        bytes[..=at].to_vec()
    };
    assert_eq!(refused(b"G"), Some(Violation::Greeting));
    assert_eq!(refused(&with(9, 0)), Some(Violation::Greeting));
    assert_eq!(refused(&with(10, 2)), Some(Violation::Greeting));
    assert_eq!(refused(&with(10, 3)), None);
    assert_eq!(refused(&with(11, 1)), None);
    assert_eq!(refused(&with(12, b'C')), Some(Violation::Mechanism));
    assert_eq!(refused(&with(16, b'X')), Some(Violation::Mechanism));
}

fn after(start: &[u8], rest: &[u8]) -> Option<Violation> {
    refused(&[start, rest].concat())
}

#[test]
fn refuses_lengths_before_any_payload() {
    let forged = |flags: u8| [&[flags][..], &(1_u64 << 40).to_be_bytes()].concat();
    let greeted = zmtp::greeting();
    assert_eq!(after(&greeted, &forged(2)), Some(Violation::NotReady));
    assert_eq!(after(&greeted, &forged(6)), Some(Violation::CommandTooLong));
    assert_eq!(after(&hello(), &forged(3)), Some(Violation::HeaderTooLong));
    let header = [&hello()[..], &[1, 0]].concat();
    assert_eq!(after(&header, &forged(2)), Some(Violation::BodyTooLong));
    assert_eq!(after(&hello(), &forged(6)), Some(Violation::CommandTooLong));
    let longest = |bytes: u64| [&[3][..], &bytes.to_be_bytes()].concat();
    assert_eq!(after(&hello(), &longest(300)), None);
    assert_eq!(
        after(&hello(), &longest(301)),
        Some(Violation::HeaderTooLong)
    );
    assert_eq!(
        after(&hello(), &longest(u64::MAX)),
        Some(Violation::HeaderTooLong)
    );
}

#[test]
fn refuses_messages_without_exactly_two_parts() {
    assert_eq!(after(&hello(), &[0]), Some(Violation::Parts));
    assert_eq!(after(&hello(), &[1, 1, b'h', 1]), Some(Violation::Parts));
    assert_eq!(after(&hello(), &[1, 1, b'h', 0, 1, b'b']), None);
}

#[test]
fn refuses_reserved_flags_and_commands_with_more() {
    for flags in [8, 16, 32, 64, 128, 5] {
        assert_eq!(after(&hello(), &[flags]), Some(Violation::Flags), "{flags}");
        assert_eq!(
            after(&zmtp::greeting(), &[flags]),
            Some(Violation::Flags),
            "{flags}"
        );
    }
}

#[test]
fn refuses_commands_where_they_are_out_of_order() {
    let greeted = zmtp::greeting();
    assert_eq!(after(&greeted, PING), Some(Violation::UnexpectedCommand));
    assert_eq!(
        after(&greeted, b"\x04\x05\x04PONG"),
        Some(Violation::UnexpectedCommand)
    );
    assert_eq!(after(&greeted, b"\x04\x0a\x05ERROR\x03why"), None);
    let again = zmtp::ready("DEALER", b"");
    assert_eq!(after(&hello(), &again), Some(Violation::UnexpectedCommand));
    assert_eq!(
        after(&hello(), b"\x04\x0a\x09SUBSCRIBE"),
        Some(Violation::UnexpectedCommand)
    );
    assert_eq!(after(&hello(), b"\x04\x05\x04PONG"), None);
}

#[test]
fn refuses_malformed_commands() {
    let greeted = zmtp::greeting();
    assert_eq!(after(&greeted, b"\x04\x00"), Some(Violation::Command));
    assert_eq!(after(&greeted, b"\x04\x02\x05R"), Some(Violation::Command));
    assert_eq!(
        after(&greeted, b"\x04\x07\x05READY\x0b"),
        Some(Violation::Command)
    );
    assert_eq!(
        after(&greeted, b"\x04\x09\x05READY\x01x\x00"),
        Some(Violation::Command)
    );
    assert_eq!(
        after(&greeted, b"\x04\x0c\x05READY\x01x\x00\x00\x00\x01"),
        Some(Violation::Command)
    );
    assert_eq!(
        after(&hello(), b"\x04\x06\x04PING\x00"),
        Some(Violation::Command)
    );
    let long = b"\x04\x18\x04PING\x00\x0012345678901234567";
    assert_eq!(after(&hello(), long), Some(Violation::Command));
}

#[test]
fn takes_dealers_only() {
    for other in ["REQ", "ROUTER", "PUB", "STREAM", "dealer", ""] {
        let ready = zmtp::ready(other, b"");
        assert_eq!(
            after(&zmtp::greeting(), &ready),
            Some(Violation::SocketType),
            "{other}"
        );
    }
    assert_eq!(
        after(&zmtp::greeting(), b"\x04\x06\x05READY"),
        Some(Violation::SocketType)
    );
}

#[test]
fn the_encoders_match_the_specification() {
    let greeting = zmtp::greeting();
    assert_eq!(greeting[..17], *b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0NULL\0");
    assert_eq!(greeting.len(), GREETING_BYTES);
    assert!(greeting[17..].iter().all(|byte| *byte == 0));
    let ready = zmtp::ready("DEALER", &[7; 8]);
    let expected = b"\x04\x31\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Identity\0\0\0\x08";
    assert_eq!(ready[..expected.len()], *expected);
    assert_eq!(ready[expected.len()..], [7; 8]);
    let mut parser = Parser::client(&limits());
    let stream = [hello(), PING.to_vec()].concat();
    let mut input = &stream[..];
    while !input.is_empty() {
        match parser.next(&mut input) {
            Ok(Some(Item::Greeting | Item::Ready)) => {}
            Ok(Some(Item::Ping(context))) => {
                assert_eq!(zmtp::pong(&context), b"\x04\x09\x04PONGctx!");
            }
            other => panic!("no ping: {other:?}"),
        }
    }
}
