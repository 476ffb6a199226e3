//! Messages: headers and bodies.

use kvferry_protocol::{
    DecodeError, EncodeError, Envelope, ErrorBody, ErrorCode, HEADER_BYTES, Header, Message,
    MessageKind, Pages, Pairs, Store, VERSION, VERSION_MIN, decode, encode, limits,
};
use kvferry_types::{Epoch, FragmentPair, PageList, RequestId};

use super::Input;
use super::allocated::most_held;

/// Memory that the decoder may hold for a message beside a multiple of its bytes.
const DECODED_BYTES: usize = 64 << 10;
/// The multiple. A page number of one byte takes 8.
const DECODED_FACTOR: usize = 16;
/// The same of a transfer: a pair of three bytes takes 48, and a growing list a quarter more.
const TRANSFER_FACTOR: usize = 24;
/// Pages of a message, counted out, beyond which it is not written page by page: that takes time.
const FLAT_PAGES_MAX: u64 = 1 << 14;

/// A header, and the body behind it.
pub fn frame(bytes: &[u8]) {
    let (head, body) = bytes.split_at(HEADER_BYTES.min(bytes.len()));
    let header = match Header::from_bytes(head) {
        Ok(header) => header,
        Err(error) => {
            let expected = matches!(
                error,
                DecodeError::HeaderLength(_) | DecodeError::Magic | DecodeError::MagicReversed
            );
            assert!(expected, "{error}");
            return;
        }
    };
    let mut written = header.to_bytes();
    // A reader ignores these.
    written[22..24].copy_from_slice(&head[22..24]);
    assert_eq!(written, head, "the header is another one");
    check(header, body);
}

/// A version, a kind, and a body.
pub fn body(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let version = VERSION_MIN + u16::from(input.byte()) % (VERSION - VERSION_MIN + 1);
    let kind = usize::from(input.byte());
    // One number beyond the known ones.
    let kind = MessageKind::ALL.get(kind % (MessageKind::ALL.len() + 1));
    let header = Header {
        version,
        kind: kind.map_or(1000, |kind| kind.number()),
        correlation: RequestId(7),
        deadline_ms: 8,
        required: 0,
        epoch: Epoch(9),
    };
    check(header, input.rest());
}

fn check(header: Header, body: &[u8]) {
    let (decoded, held) = most_held(|| decode(header, body));
    let factor = match MessageKind::from_number(header.kind) {
        Some(MessageKind::Transfer) => TRANSFER_FACTOR,
        _ => DECODED_FACTOR,
    };
    let bound = factor * body.len() + DECODED_BYTES;
    assert!(
        held <= bound,
        "kind {}: {held} bytes for a body of {}, more than {bound}",
        header.kind,
        body.len()
    );
    match decoded {
        Ok(envelope) => comes_back(&header, &envelope),
        Err(error) => is_documented(&header, &error),
    }
}

/// A refused message is answered with the code that docs/wire.md gives, in a text that fits into an answer.
fn is_documented(header: &Header, error: &DecodeError) {
    let kind = MessageKind::from_number(header.kind);
    let expected: &[ErrorCode] = match (kind, header.version, header.required) {
        (None, _, _) => &[ErrorCode::UnknownKind],
        (Some(_), _, 1..) => &[ErrorCode::Unsupported, ErrorCode::UnsupportedVersion],
        (Some(_), VERSION_MIN..=VERSION, 0) => &[ErrorCode::Malformed, ErrorCode::Limit],
        _ => &[ErrorCode::UnsupportedVersion],
    };
    assert!(expected.contains(&error.code()), "{header:?}: {error}");
    let text = error.to_string();
    assert!(
        !text.chars().any(char::is_control),
        "not one line: {text:?}"
    );
    let answer = Envelope {
        version: VERSION_MIN,
        correlation: header.correlation,
        deadline_ms: 0,
        epoch: header.epoch,
        message: Message::Error(ErrorBody::for_good(error.code(), text)),
    };
    encode(&answer).expect("the text fits into an answer");
}

/// A message is the same after it was encoded and decoded in each version.
fn comes_back(header: &Header, envelope: &Envelope) {
    let kind = envelope.message.kind();
    assert_eq!(kind.number(), header.kind);
    assert_eq!(envelope.version, header.version);
    assert_eq!(envelope.correlation, header.correlation);
    assert_eq!(envelope.deadline_ms, header.deadline_ms);
    assert_eq!(envelope.epoch, header.epoch);
    for version in VERSION_MIN..=VERSION {
        if version == 1 && pages(&envelope.message) > FLAT_PAGES_MAX {
            continue;
        }
        let said = Envelope {
            version,
            ..envelope.clone()
        };
        let (head, body) = match encode(&said) {
            Ok(encoded) => encoded,
            // Page by page, a message may be too long.
            Err(EncodeError::Limit { .. }) if version == 1 => continue,
            Err(error) => panic!("{error}"),
        };
        let head = Header::from_bytes(&head).expect("a header");
        let read = decode(head, &body).expect("a message that was written can be read");
        assert_eq!(
            counted_out(read.message.clone()),
            counted_out(envelope.message.clone())
        );
        if version == VERSION {
            assert_eq!(read.message, envelope.message);
        }
        assert_eq!(read.correlation, envelope.correlation);
        assert_eq!(read.deadline_ms, envelope.deadline_ms);
        assert_eq!(read.epoch, envelope.epoch);
    }
}

/// The number of pages that a message names.
fn pages(message: &Message) -> u64 {
    let of = |store: &Store| store.parts.iter().map(|part| part.pages.list.pages()).sum();
    match message {
        Message::Load(load) => load.parts.iter().map(|part| part.pages.list.pages()).sum(),
        Message::Store(store) => of(store),
        Message::Stores(stores) => stores.stores.iter().map(|each| of(&each.store)).sum(),
        Message::Transfer(order) => {
            let pairs = order.transfers.iter().flat_map(|each| &each.pairs.list);
            pairs.map(|pair| pair.src.pages()).sum()
        }
        _ => 0,
    }
}

/// The message with each list of pages in one form, because a version writes runs page by page.
fn counted_out(mut message: Message) -> Message {
    let one_form = |list: &PageList| list.iter_pages().collect::<PageList>();
    let store = |store: &mut Store| {
        for part in &mut store.parts {
            part.pages = Pages::from(one_form(&part.pages.list));
        }
    };
    match &mut message {
        Message::Load(load) => {
            for part in &mut load.parts {
                part.pages = Pages::from(one_form(&part.pages.list));
            }
        }
        Message::Store(only) => store(only),
        Message::Stores(stores) => stores
            .stores
            .iter_mut()
            .for_each(|each| store(&mut each.store)),
        Message::Transfer(order) => {
            for each in &mut order.transfers {
                let pairs = &each.pairs.list;
                let src = pairs.iter().flat_map(|pair| pair.src.iter_pages());
                let dst = pairs.iter().flat_map(|pair| pair.dst.iter_pages());
                let (src, dst) = (src.collect(), dst.collect());
                each.pairs = Pairs::from(vec![FragmentPair { src, dst }]);
            }
        }
        _ => {}
    }
    message
}

/// A body of a transfer: the fast reader finds what serde finds. An unknown field in front of the others keeps the fast
/// reader out and means nothing to serde.
pub fn transfer_twin(body: &[u8]) {
    /// A map of eight fields, as this program writes them.
    const WRITTEN: u8 = 0x88;
    let header = Header {
        version: VERSION,
        kind: MessageKind::Transfer.number(),
        correlation: RequestId(1),
        deadline_ms: 1,
        required: 0,
        epoch: Epoch(1),
    };
    let read = decode(header, body);
    if let Some((&WRITTEN, fields)) = body.split_first()
        && body.len() + 3 <= limits::BODY_BYTES_MAX
    {
        let twin = [&[WRITTEN + 1, 0xa1, b'?', 0xc0], fields].concat();
        match (&read, decode(header, &twin)) {
            (Ok(fast), Ok(slow)) => assert_eq!(*fast, slow),
            (Err(fast), Err(slow)) => assert_eq!(fast.code(), slow.code(), "{fast}; {slow}"),
            (fast, slow) => panic!("{fast:?} and {slow:?}"),
        }
    }
    if let Ok(Envelope {
        message: Message::Transfer(order),
        ..
    }) = read
    {
        let envelope = Envelope {
            version: VERSION,
            correlation: RequestId(1),
            deadline_ms: 1,
            epoch: Epoch(1),
            message: Message::Transfer(order.clone()),
        };
        let (_, written) = encode(&envelope).expect("what was read can be written");
        let by_serde = rmp_serde::to_vec_named(&order).expect("memory");
        assert_eq!(written, by_serde, "the fast writer differs from serde");
    }
}
