//! The gate's parser of ZMTP.

use kvferry_transport::zmtp::{COMMAND_BYTES_MAX, Item, Parser, Part};
use kvferry_transport::{Limits, Violation};

use super::Input;

/// A found item with its payload joined, so that it does not depend on how the stream was split.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Found {
    Greeting,
    Ready,
    Ping(Vec<u8>),
    Ignored,
    Subscription(bool),
    Part(Part, u64, Vec<u8>),
    End,
}

fn limits() -> Limits {
    Limits {
        header_bytes: 40,
        body_bytes: 600,
        ..Limits::default()
    }
}

/// A list of cuts, and the stream that is cut there: any split gives the same items and the same refusal, the parser
/// holds little, and payload is passed on whole.
pub fn zmtp(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let server = input.flag();
    let count = input.below(16);
    let cuts: Vec<usize> = (0..count)
        .map(|_| usize::from(input.byte()) << 8 | usize::from(input.byte()))
        .collect();
    let stream = input.rest();
    let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut % (stream.len() + 1)).collect();
    cuts.extend([0, stream.len()]);
    cuts.sort_unstable();
    let pieces = cuts.windows(2).map(|cut| &stream[cut[0]..cut[1]]);
    let parser = || match server {
        true => Parser::server(&limits()),
        false => Parser::client(&limits()),
    };
    let whole = parse(parser(), [stream]);
    assert_eq!(parse(parser(), pieces), whole, "by cuts");
    assert_eq!(parse(parser(), stream.chunks(1)), whole, "byte by byte");
    check_items(&whole.0);
}

/// Feeds the pieces in order.
fn parse<'a>(
    mut parser: Parser,
    pieces: impl IntoIterator<Item = &'a [u8]>,
) -> (Vec<Found>, Result<(), Violation>) {
    let mut found = Vec::new();
    for mut piece in pieces {
        loop {
            let before = piece.len();
            let next = parser.next(&mut piece);
            assert!(parser.held_bytes() <= COMMAND_BYTES_MAX, "it holds much");
            match next {
                Ok(Some(item)) => note(&mut found, item, before - piece.len()),
                Ok(None) => break,
                Err(violation) => return (found, Err(violation)),
            }
        }
        assert!(piece.is_empty(), "bytes were left");
    }
    (found, Ok(()))
}

fn note(found: &mut Vec<Found>, item: Item<'_>, consumed: usize) {
    match item {
        Item::Greeting => found.push(Found::Greeting),
        Item::Ready => found.push(Found::Ready),
        Item::Ping(context) => found.push(Found::Ping(context.bytes[..context.len].to_vec())),
        Item::Ignored => found.push(Found::Ignored),
        Item::Subscription { on } => found.push(Found::Subscription(on)),
        Item::End => found.push(Found::End),
        Item::Part { part, bytes } => found.push(Found::Part(part, bytes, Vec::new())),
        Item::Payload(bytes) => {
            assert!(!bytes.is_empty() && bytes.len() == consumed);
            match found.last_mut() {
                Some(Found::Part(_, _, payload)) => payload.extend_from_slice(bytes),
                other => panic!("payload after {other:?}"),
            }
        }
    }
}

/// The order of the items: a greeting, READY, and then messages of two parts within the limits.
fn check_items(found: &[Found]) {
    let mut ready = false;
    let mut greeted = false;
    let mut open: Option<Part> = None;
    for (place, item) in found.iter().enumerate() {
        let is_last = place + 1 == found.len();
        match item {
            Found::Greeting => {
                assert!(!greeted && place == 0);
                greeted = true;
            }
            Found::Ready => {
                assert!(greeted && !ready);
                ready = true;
            }
            Found::Ping(_) => assert!(ready),
            Found::Ignored => assert!(greeted),
            Found::Subscription(_) => panic!("only a PUB takes subscriptions"),
            Found::Part(part, bytes, payload) => {
                assert!(ready);
                let (before, most) = match part {
                    Part::Header => (None, limits().header_bytes),
                    Part::Body => (Some(Part::Header), limits().body_bytes),
                };
                assert_eq!(open, before, "parts out of order");
                assert!(*bytes <= most as u64, "a part beyond its limit");
                let complete = payload.len() as u64 == *bytes;
                assert!(complete || (is_last && (payload.len() as u64) < *bytes));
                open = Some(*part);
            }
            Found::End => assert_eq!(open.take(), Some(Part::Body), "an end without a body"),
        }
    }
}
