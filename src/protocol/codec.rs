//! Encoding and decoding of messages. All conversions between bytes and messages go through here.

use serde::de::{DeserializeOwned, IgnoredAny};
use serde::{Deserialize, Serialize};

use crate::body::{
    Abandon, Attach, Attached, Cancel, CancelStores, Drain, DrainAnswer, Empty, Ended, ErrorBody,
    Events, Finish, Flush, FlushTier, Hello, Invalidate, Invalidated, Inventory, Load, Lookup,
    Measure, MeasureAnswer, Memory, MemoryAnswer, NumberedStore, OpenTiers, PartBody, Probe,
    ProbeAnswer, ReadEvents, ReadInventory, Readiness, Register, Registered, Reset, SetLog,
    SetLogAnswer, Status, StatusAnswer, Store, Stores, StoresAnswer, TierFlushed, Tiers,
    TiersAnswer, TransferOrder, Unregister, Welcome, WorkerGone, WorkerGoneAnswer, Written, cut,
};
use crate::error::{DecodeError, EncodeError};
use crate::header::{HEADER_BYTES, Header};
use crate::kind::MessageKind;
use crate::limits::{
    ABANDONED_MAX, BEYOND, BODY_BYTES_MAX, COPIES_MAX, DEPTH_MAX, EVENT_PAGES_MAX, HASHES_MAX,
    NAMESPACE_BYTES_MAX, PAGE_ITEMS_MAX, PAGE_RECORD_BYTES, PAGE_RECORDS_MAX, PAGES_MAX, PAIRS_MAX,
    PARTS_MAX, SMALL_BODY_BYTES_MAX, STORES_MAX, TEXT_BYTES_MAX,
};
use crate::named::Named;
use crate::table::for_each_kind;
use crate::trail::Trail;
use crate::{HELLO_VERSION, VERSION, VERSION_MIN, transfer};
use kvferry_types::{
    CancelStoresAnswer, Epoch, FlushAnswer, LoadAnswer, LookupAnswer, PageList, PageRun, RequestId,
    ResetAnswer, StoreAnswer,
};

/// Room for a body at first: most answers and small requests take less.
const USUAL_BODY_BYTES: usize = 256;

macro_rules! messages {
    ($($(#[$doc:meta])* $number:literal $name:ident $text:literal: $body:ident, [$($sender:ident)*] to $receiver:ident,
        $stability:ident, $class:ident $($answer:ident $(($answer_body:ty))?)?;)*) => {
        /// A message: its kind and its body.
        #[derive(Debug, Clone, PartialEq)]
        pub enum Message {
            $($(#[$doc])* $name($body),)*
        }

        impl Message {
            /// Returns the kind of the message.
            pub fn kind(&self) -> MessageKind {
                match self {
                    $(Self::$name(_) => MessageKind::$name,)*
                }
            }

            fn write(&self, out: &mut Vec<u8>) -> Result<(), rmp_serde::encode::Error> {
                match self {
                    $(Self::$name(body) => body.serialize(&mut rmp_serde::Serializer::new(out).with_struct_map()),)*
                }
            }

            fn read(kind: MessageKind, bytes: &[u8]) -> Result<Self, DecodeError> {
                match kind {
                    $(MessageKind::$name => read_body(kind, bytes).map(Self::$name),)*
                }
            }

            /// Returns the JSON Schema of the body of a kind.
            pub fn schema(kind: MessageKind) -> schemars::Schema {
                match kind {
                    $(MessageKind::$name => schemars::schema_for!($body),)*
                }
            }
        }
    };
}

for_each_kind!(messages);

/// A message with the fields of its header.
#[derive(Debug, Clone, PartialEq)]
pub struct Envelope {
    /// Version of the body.
    pub version: u16,
    /// Copied from a request to its answer.
    pub correlation: RequestId,
    /// Milliseconds until the deadline; 0 in answers.
    pub deadline_ms: u32,
    /// Epoch of the leader that the sender is or is connected to; 0 before the sender has received one.
    pub epoch: Epoch,
    /// The decoded body.
    pub message: Message,
}

/// Encodes the two parts of a message. Fails when a limit or the version forbids it.
pub fn encode(envelope: &Envelope) -> Result<([u8; HEADER_BYTES], Vec<u8>), EncodeError> {
    let fields = EnvelopeFields {
        version: envelope.version,
        correlation: envelope.correlation,
        deadline_ms: envelope.deadline_ms,
        epoch: envelope.epoch,
    };
    encode_message(fields, &envelope.message)
}

/// The fields of an [`Envelope`] beside its message.
#[derive(Debug, Clone, Copy)]
pub struct EnvelopeFields {
    /// See [`Envelope::version`].
    pub version: u16,
    /// See [`Envelope::correlation`].
    pub correlation: RequestId,
    /// See [`Envelope::deadline_ms`].
    pub deadline_ms: u32,
    /// See [`Envelope::epoch`].
    pub epoch: Epoch,
}

/// As [`encode`], for a message that is not moved into an envelope.
pub fn encode_message(
    fields: EnvelopeFields,
    message: &Message,
) -> Result<([u8; HEADER_BYTES], Vec<u8>), EncodeError> {
    let EnvelopeFields {
        version,
        correlation,
        deadline_ms,
        epoch,
    } = fields;
    let kind = message.kind();
    if !is_spoken(kind, version, VERSION_MIN, VERSION) {
        return Err(EncodeError::Version {
            kind: kind.name(),
            version,
        });
    }
    check(message)?;
    check_pages(message)?;
    check_lists(message, version)?;
    let header = Header {
        version,
        kind: kind.number(),
        correlation,
        deadline_ms,
        required: 0,
        epoch,
    };
    let mut body = Vec::with_capacity(USUAL_BODY_BYTES);
    let written = match version {
        1 => flat(message).write(&mut body),
        _ => match message {
            Message::Transfer(transfer) => transfer::write(transfer, &mut body),
            message => message.write(&mut body),
        },
    };
    written.map_err(|error| EncodeError::Body {
        kind: kind.name(),
        reason: error.to_string(),
    })?;
    if body.len() > BODY_BYTES_MAX {
        let (value, max) = (body.len() as u64, BODY_BYTES_MAX as u64);
        return Err(EncodeError::limit(kind, "body bytes", value, max));
    }
    Ok((header.to_bytes(), body))
}

/// Validates a message by its header and the length of its body. Refuses unsupported versions, unknown kinds, unknown
/// `required` bits, bodies that are too long, and numbers in little-endian order.
pub fn check_header(header: &Header, body_bytes: usize) -> Result<MessageKind, DecodeError> {
    if let Some(error) = header.byte_order() {
        return Err(error);
    }
    let kind =
        MessageKind::from_number(header.kind).ok_or(DecodeError::UnknownKind(header.kind))?;
    if !is_spoken(kind, header.version, VERSION_MIN, VERSION) {
        return Err(DecodeError::Version(header.version));
    }
    if header.required != 0 {
        return Err(DecodeError::Required(header.required));
    }
    let max = match kind {
        MessageKind::Hello | MessageKind::Ping | MessageKind::Pong => SMALL_BODY_BYTES_MAX,
        _ => BODY_BYTES_MAX,
    };
    match body_bytes <= max {
        true => Ok(kind),
        false => Err(DecodeError::BodyLength {
            bytes: body_bytes,
            max,
        }),
    }
}

/// Whether a side that supports the versions `min` to `max` sends and accepts `kind` in `version`. Messages before the
/// version is agreed have a version of their own, so that a peer without a common version can read them.
fn is_spoken(kind: MessageKind, version: u16, min: u16, max: u16) -> bool {
    let is_of_handshake = matches!(
        kind,
        MessageKind::Hello | MessageKind::Welcome | MessageKind::Error
    );
    (min..=max).contains(&version) || (is_of_handshake && version == HELLO_VERSION)
}

/// Decodes the body of a message whose header was read. Refuses what [`check_header`] refuses, values beyond a limit,
/// and trailing bytes. Never panics, and never allocates by an unverified length.
pub fn decode(header: Header, body: &[u8]) -> Result<Envelope, DecodeError> {
    let kind = check_header(&header, body.len())?;
    let as_written = match kind {
        MessageKind::Transfer => transfer::read(body).map(Message::Transfer),
        _ => None,
    };
    let message = match as_written {
        Some(message) => message,
        None => Message::read(kind, body)?,
    };
    check(&message).map_err(|error| {
        let (kind, text) = (kind.name(), error.to_string());
        let reason = text.strip_prefix(&format!("{kind}: ")).map(str::to_owned);
        let reason = reason.unwrap_or(text);
        DecodeError::Limit { kind, reason }
    })?;
    Ok(Envelope {
        version: header.version,
        correlation: header.correlation,
        deadline_ms: header.deadline_ms,
        epoch: header.epoch,
        message,
    })
}

fn read_body<T: DeserializeOwned>(kind: MessageKind, bytes: &[u8]) -> Result<T, DecodeError> {
    let trail = Trail::default();
    let mut reader = rmp_serde::Deserializer::from_read_ref(bytes);
    reader.set_max_depth(DEPTH_MAX);
    let body = T::deserialize(Named(&mut reader, &trail));
    let body = body.map_err(|error| refused(kind, &error, trail.path(bytes)))?;
    // The reader does not report how many bytes it has read. At the end of the input, and only there, deserializing
    // `()` fails with `InvalidMarkerRead`; of any further value it reads no more than `()` needs.
    match <()>::deserialize(&mut reader) {
        Err(rmp_serde::decode::Error::InvalidMarkerRead(_)) => Ok(body),
        _ => Err(DecodeError::Trailing {
            kind: kind.name(),
            bytes: bytes.len() - body_bytes(bytes).map_err(|error| refused(kind, &error, None))?,
        }),
    }
}

/// Why a body cannot be read, with the path of the field.
fn refused(
    kind: MessageKind,
    error: &rmp_serde::decode::Error,
    path: Option<String>,
) -> DecodeError {
    use rmp_serde::decode::Error;
    let reason = match error {
        Error::TypeMismatch(marker) => {
            format!("the MessagePack value {marker:?} is of another type than the schema has")
        }
        Error::OutOfRange => "the number is out of the bounds of the schema".to_owned(),
        Error::InvalidMarkerRead(_) | Error::InvalidDataRead(_) => "the body ends early".to_owned(),
        error => error.to_string(),
    };
    let reason = cut(match path {
        Some(path) => format!("{path}: {reason}"),
        None => reason,
    });
    let kind = kind.name();
    match error {
        Error::DepthLimitExceeded => DecodeError::Limit { kind, reason },
        _ if reason.contains(BEYOND) => DecodeError::Limit { kind, reason },
        _ => DecodeError::Body { kind, reason },
    }
}

/// Length in bytes of the first MessagePack value.
fn body_bytes(bytes: &[u8]) -> Result<usize, rmp_serde::decode::Error> {
    let mut reader = rmp_serde::Deserializer::new(bytes);
    reader.set_max_depth(DEPTH_MAX);
    IgnoredAny::deserialize(&mut reader)?;
    Ok(bytes.len() - reader.get_ref().len())
}

/// Checks the limits on values. Used by both [`encode`] and [`decode`].
fn check(message: &Message) -> Result<(), EncodeError> {
    let kind = message.kind();
    let within = |what, value: u64, max: u64| match value <= max {
        true => Ok(()),
        false => Err(EncodeError::limit(kind, what, value, max)),
    };
    let hashes = |bytes: &[u8], width: u8| {
        within(
            "page hashes",
            bytes.len() as u64 / u64::from(width.max(1)),
            HASHES_MAX as u64,
        )
    };
    let parts = |parts: &mut dyn Iterator<Item = &PartBody>| {
        let (mut count, mut pages) = (0, 0);
        for part in parts {
            count += 1;
            pages += part.pages.list.pages();
        }
        within("parts", count, PARTS_MAX as u64)?;
        within("pages", pages, PAGES_MAX)
    };
    let text = |what, text: &str| within(what, text.len() as u64, TEXT_BYTES_MAX as u64);
    match message {
        Message::Hello(hello) => text("bytes of name", &hello.name),
        Message::Error(error) => text("bytes of message", &error.message),
        Message::Readiness(readiness) => text("bytes of problem", &readiness.problem),
        Message::Lookup(lookup) => {
            let namespace = lookup.namespace.len() as u64;
            within("namespace bytes", namespace, NAMESPACE_BYTES_MAX as u64)?;
            hashes(&lookup.hashes, lookup.hash_bytes)
        }
        Message::Reset(reset) => {
            let namespace = reset.namespace.as_ref().map_or(0, |name| name.len()) as u64;
            within("namespace bytes", namespace, NAMESPACE_BYTES_MAX as u64)?;
            hashes(&reset.hashes, reset.hash_bytes)
        }
        Message::ReadEvents(read) => {
            let namespace = read.namespace.as_ref().map_or(0, |name| name.len()) as u64;
            within("namespace bytes", namespace, NAMESPACE_BYTES_MAX as u64)
        }
        Message::Events(events) => {
            let records = events.records.len() as u64;
            within("records", records, EVENT_PAGES_MAX as u64)?;
            let bytes: usize = events
                .records
                .iter()
                .map(|record| record.hashes.len())
                .sum();
            let pages = bytes as u64 / u64::from(events.hash_bytes.max(1));
            within("page hashes", pages, EVENT_PAGES_MAX as u64)
        }
        Message::Invalidate(invalidate) => hashes(&invalidate.fingerprints, 16),
        Message::Inventory(inventory) => {
            let records = inventory.records.len() / PAGE_RECORD_BYTES;
            within("page records", records as u64, PAGE_RECORDS_MAX as u64)
        }
        Message::Abandon(abandon) => within(
            "requests",
            abandon.requests.len() as u64,
            ABANDONED_MAX as u64,
        ),
        Message::Load(load) => parts(&mut load.parts.iter()),
        Message::Store(store) => {
            parts(&mut store.parts.iter())?;
            hashes(&store.more_hashes, store.hash_bytes)
        }
        Message::Stores(Stores { stores }) => {
            within("stores", stores.len() as u64, STORES_MAX as u64)?;
            parts(&mut stores.iter().flat_map(|each| &each.store.parts))?;
            let count =
                |store: &Store| store.more_hashes.len() as u64 / u64::from(store.hash_bytes.max(1));
            let count = stores.iter().map(|each| count(&each.store)).sum();
            within("page hashes", count, HASHES_MAX as u64)
        }
        Message::StoresAnswer(answer) => {
            within("stores", answer.results.len() as u64, STORES_MAX as u64)?;
            let mut errors = answer
                .results
                .iter()
                .filter_map(|result| result.error.as_ref());
            errors.try_for_each(|error| text("bytes of message", &error.message))
        }
        Message::Transfer(transfer) => {
            within(
                "transfers",
                transfer.transfers.len() as u64,
                COPIES_MAX as u64,
            )?;
            let pairs = transfer.transfers.iter().flat_map(|copy| &copy.pairs.list);
            within("pages", pairs.map(|pair| pair.src.pages()).sum(), PAGES_MAX)?;
            let records = transfer
                .transfers
                .iter()
                .filter_map(|copy| copy.record.as_ref());
            let pages: u64 = records
                .map(|record| record.fingerprints.len() as u64 / 16)
                .sum();
            within("pages", pages, PAGES_MAX)
        }
        Message::Ended(ended) => within("copies", ended.copies.len() as u64, COPIES_MAX as u64),
        Message::Cancel(cancel) => {
            within("copies", cancel.transfers.len() as u64, COPIES_MAX as u64)
        }
        _ => Ok(()),
    }
}

/// Checks that the parts of a load or a store have the pages that their reader requires.
fn check_pages(message: &Message) -> Result<(), EncodeError> {
    let holds_none = |run: &&PageRun| run.count == 0 || run.end() > u64::from(u32::MAX);
    let kind = message.kind().name();
    for part in parts_of(message) {
        let list = &part.pages.list;
        let value = match list.0.iter().find(holds_none) {
            None if list.0.is_empty() => "no page".to_owned(),
            None => continue,
            Some(run) => format!("the run [{}, {}]", run.start, run.count),
        };
        let field = "parts.pages";
        return Err(EncodeError::Pages { kind, field, value });
    }
    Ok(())
}

/// Checks the limits on lists of pages as a reader of `version` counts them: page by page in version 1, by items later.
fn check_lists(message: &Message, version: u16) -> Result<(), EncodeError> {
    let kind = message.kind();
    let within = |what, value: u64, max: usize| match value <= max as u64 {
        true => Ok(()),
        false => Err(EncodeError::limit(kind, what, value, max as u64)),
    };
    let items = |list: &PageList| match version {
        1 => list.pages(),
        _ => list.0.len() as u64,
    };
    match message {
        Message::Transfer(transfer) => transfer.transfers.iter().try_for_each(|copy| {
            let pairs = &copy.pairs.list;
            let count = match version {
                1 => pairs.iter().map(|pair| pair.src.pages()).sum(),
                _ => pairs.len() as u64,
            };
            within("pairs", count, PAIRS_MAX)?;
            let items = pairs.iter().map(|pair| items(&pair.src) + items(&pair.dst));
            within("page items", items.sum(), 2 * PAGE_ITEMS_MAX)
        }),
        _ => {
            let items = parts_of(message).map(|part| items(&part.pages.list));
            within("page items", items.sum(), PAGE_ITEMS_MAX)
        }
    }
}

/// The parts of loads and stores; none in other messages.
fn parts_of(message: &Message) -> impl Iterator<Item = &PartBody> {
    let (one, several): (&[PartBody], &[NumberedStore]) = match message {
        Message::Load(load) => (&load.parts, &[]),
        Message::Store(store) => (&store.parts, &[]),
        Message::Stores(stores) => (&[], &stores.stores),
        _ => (&[], &[]),
    };
    let several = several.iter().flat_map(|each| &each.store.parts);
    one.iter().chain(several)
}

/// Returns the message in the form of version 1: page by page.
fn flat(message: &Message) -> Message {
    let mut message = message.clone();
    match &mut message {
        Message::Load(Load { parts, .. }) | Message::Store(Store { parts, .. }) => {
            parts.iter_mut().for_each(|part| part.pages.flat = true);
        }
        Message::Stores(Stores { stores }) => {
            let parts = stores.iter_mut().flat_map(|each| &mut each.store.parts);
            parts.for_each(|part| part.pages.flat = true);
        }
        Message::Transfer(transfer) => {
            transfer
                .transfers
                .iter_mut()
                .for_each(|copy| copy.pairs.flat = true);
        }
        _ => {}
    }
    message
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hello_is_read_by_a_side_without_its_version() {
        for kind in [MessageKind::Hello, MessageKind::Welcome, MessageKind::Error] {
            assert!(is_spoken(kind, HELLO_VERSION, 3, 5), "{}", kind.name());
            assert!(is_spoken(kind, 4, 3, 5), "{}", kind.name());
            assert!(!is_spoken(kind, 2, 3, 5), "{}", kind.name());
        }
        assert!(!is_spoken(MessageKind::Lookup, HELLO_VERSION, 3, 5));
    }

    /// The reason for which a lookup with this field is refused.
    fn refused(field: &str, value: serde_json::Value) -> String {
        let mut body = serde_json::json!({"slot": 1, "hash_bytes": 16});
        body[field] = value;
        let body = rmp_serde::to_vec_named(&body).expect("a body");
        let read = read_body::<crate::Lookup>(MessageKind::Lookup, &body);
        read.err()
            .map_or_else(String::new, |error| error.to_string())
    }

    #[test]
    fn a_body_that_cannot_be_read_names_the_field() {
        let fields = [
            (
                "slot",
                serde_json::json!("1"),
                "body of lookup: slot: the MessagePack value FixStr(1) is of another type",
            ),
            ("slot", serde_json::json!(-1), "body of lookup: slot: "),
            (
                "hash_bytes",
                serde_json::json!(1000),
                "body of lookup: hash_bytes: ",
            ),
            (
                "namespace",
                serde_json::json!(7),
                "body of lookup: namespace: ",
            ),
        ];
        for (field, value, expected) in fields {
            let reason = refused(field, value);
            assert!(reason.starts_with(expected), "{reason}");
        }
        let second = serde_json::json!([{"first_page": 0, "pages": [1], "count": 1}, {"first_page": 1, "pages": [2, "x", 3], "count": 3}]);
        let second = serde_json::json!({"slot": 1, "parts": second, "later": {"a": 1}});
        let second = rmp_serde::to_vec_named(&second).expect("a body");
        let read = read_body::<crate::Load>(MessageKind::Load, &second);
        let reason = read.expect_err("a page is a text").to_string();
        assert!(
            reason.starts_with("body of load: parts[1].pages[1]: "),
            "{reason}"
        );
        let parts =
            serde_json::json!({"slot": 1, "parts": [{"first_page": 0, "pages": [], "count": "x"}]});
        let parts = rmp_serde::to_vec_named(&parts).expect("a body");
        let read = read_body::<crate::Load>(MessageKind::Load, &parts);
        let reason = read.expect_err("count is a text").to_string();
        assert!(
            reason.starts_with("body of load: parts[0].count: "),
            "{reason}"
        );
        let read = read_body::<crate::Load>(MessageKind::Load, &parts[..9]);
        let reason = read.expect_err("half of a body").to_string();
        assert!(reason.ends_with("the body ends early"), "{reason}");
    }
}
