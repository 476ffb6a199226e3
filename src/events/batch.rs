//! Batches of KV events: `[time, [events], data-parallel rank]` in MessagePack.
//!
//! vLLM, SGLang and TensorRT-LLM write each event as a map with a `type`; earlier versions of vLLM, and engines and
//! routers that follow these, an array whose first element is the type. Both are read, and either is written. Fields
//! that are not known here are kept, so that an event that passes through loses nothing.

use std::io;

use rmpv::{Value, decode, encode};

use crate::page::PageKey;

/// Bytes of a batch that is read. Its events take at most 40 times as much memory while it is read: 320 MiB.
pub const BATCH_BYTES_MAX: usize = 8 << 20;
/// Pages in an event, at most.
pub(crate) const PAGES_OF_EVENT_MAX: usize = 128;
const DEPTH_MAX: usize = 16;

const STORED: &str = "BlockStored";
const REMOVED: &str = "BlockRemoved";
const CLEARED: &str = "AllBlocksCleared";
/// Fields of an event that is an array, in their order. An array may end after any of them.
const STORED_FIELDS: [&str; 7] = [
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
];
const REMOVED_FIELDS: [&str; 2] = ["block_hashes", "medium"];

/// Why a batch cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum EventError {
    /// Too long.
    #[error("the batch has {0} bytes, more than {BATCH_BYTES_MAX}")]
    Long(usize),
    /// Not MessagePack, or nested too deep.
    #[error("the batch is not MessagePack: {0}")]
    Encoding(#[from] decode::Error),
    /// Bytes follow it.
    #[error("{0} bytes follow the batch")]
    Trailing(usize),
    /// Another structure.
    #[error("{field} is {found}: {expected} is expected")]
    Shape {
        /// The field, such as `block_hashes`.
        field: &'static str,
        /// The type and the length of what is there. The value itself may be tokens or hashes, which no log has.
        found: String,
        /// What the format has there.
        expected: &'static str,
    },
}

impl EventError {
    fn shape(field: &'static str, found: &Value, expected: &'static str) -> Self {
        Self::Shape {
            field,
            found: type_of(found),
            expected,
        }
    }
}

/// The type of a value and its length, without the value.
fn type_of(value: &Value) -> String {
    match value {
        Value::Nil => "nil".to_owned(),
        Value::Boolean(_) => "a boolean".to_owned(),
        Value::Integer(_) if is_negative(value) => "a negative integer".to_owned(),
        Value::Integer(_) => "an integer".to_owned(),
        Value::F32(_) | Value::F64(_) => "a float".to_owned(),
        Value::String(text) => format!("a text of {} bytes", text.as_bytes().len()),
        Value::Binary(bytes) => format!("{} bytes", bytes.len()),
        Value::Array(items) => format!("a list of {} items", items.len()),
        Value::Map(pairs) => format!("a map of {} fields", pairs.len()),
        Value::Ext(..) => "an extension".to_owned(),
    }
}

/// How events are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// A map with a `type`.
    Map,
    /// An array that begins with the type.
    Array,
}

/// Fields of an event, without its type, in their order.
pub(crate) type Fields = Vec<(String, Value)>;

/// Pages that are held from now on, consecutive in one sequence.
#[derive(Debug, Clone, PartialEq)]
pub struct Stored {
    /// The pages, in their order.
    pub pages: Vec<PageKey>,
    /// The page before the first one; `None` at the start of a sequence.
    pub parent: Option<PageKey>,
    /// Tokens of all pages. Their form is the engine's.
    pub tokens: Vec<Value>,
    /// Tokens of a page.
    pub page_tokens: u64,
    /// Where the pages are; `None` if the event does not name it.
    pub medium: Option<String>,
    /// The other fields.
    pub(crate) others: Fields,
}

/// Pages that are held no longer.
#[derive(Debug, Clone, PartialEq)]
pub struct Removed {
    /// The pages.
    pub pages: Vec<PageKey>,
    /// Where they were.
    pub medium: Option<String>,
    /// The other fields.
    pub(crate) others: Fields,
}

/// An event.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// Pages are held.
    Stored(Stored),
    /// Pages are held no longer.
    Removed(Removed),
    /// The engine holds no page.
    Cleared,
    /// Another event, which passes through: its value as it was read.
    Other(Value),
}

/// A batch.
#[derive(Debug, Clone, PartialEq)]
pub struct Batch {
    /// When it was made, in seconds since 1970.
    pub time: f64,
    /// Its events, in their order.
    pub events: Vec<Event>,
    /// The data-parallel rank; `None` if the engine does not name it.
    pub rank: Option<u64>,
    /// The engine writes numbers of pages with a sign.
    pub signed: bool,
}

impl Batch {
    /// Reads a batch.
    ///
    /// # Errors
    /// See [`EventError`]. A batch with one event that cannot be read is refused as a whole.
    pub fn read(mut bytes: &[u8]) -> Result<Self, EventError> {
        if bytes.len() > BATCH_BYTES_MAX {
            return Err(EventError::Long(bytes.len()));
        }
        let value = decode::read_value_with_max_depth(&mut bytes, DEPTH_MAX)?;
        if !bytes.is_empty() {
            return Err(EventError::Trailing(bytes.len()));
        }
        let Value::Array(parts) = &value else {
            return Err(EventError::shape("the batch", &value, "an array"));
        };
        let [time, events, rest @ ..] = parts.as_slice() else {
            return Err(EventError::shape("the batch", &value, "[time, events]"));
        };
        let time = time
            .as_f64()
            .ok_or_else(|| EventError::shape("the time of the batch", time, "a number"))?;
        let Value::Array(events) = events else {
            return Err(EventError::shape(
                "the events of the batch",
                events,
                "an array",
            ));
        };
        let mut signed = false;
        let events = events
            .iter()
            .map(|event| Event::read(event, &mut signed))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            time,
            events,
            rank: rest.first().and_then(Value::as_u64),
            signed,
        })
    }

    /// Writes the batch.
    pub fn write(&self, shape: Shape) -> Vec<u8> {
        let mut bytes = Vec::new();
        if let Err(error) = encode::write_value(&mut bytes, &self.value(shape)) {
            // A vector takes every byte.
            tracing::error!(%error, "a batch of events was not encoded");
        }
        bytes
    }

    /// Writes the batch as JSON, with the same structure and the same order of fields, and without line feeds.
    ///
    /// # Errors
    /// The writer's. Values that JSON does not have, such as bytes, are written as lists of numbers.
    pub fn write_json(&self, shape: Shape, to: impl io::Write) -> io::Result<()> {
        Ok(serde_json::to_writer(to, &self.value(shape))?)
    }

    fn value(&self, shape: Shape) -> Value {
        let events = self
            .events
            .iter()
            .map(|event| event.value(shape, self.signed));
        let rank = self.rank.map_or(Value::Nil, Value::from);
        Value::Array(vec![
            Value::F64(self.time),
            Value::Array(events.collect()),
            rank,
        ])
    }
}

impl Event {
    fn read(value: &Value, signed: &mut bool) -> Result<Self, EventError> {
        let (kind, fields) = named(value)?;
        match kind {
            STORED => Stored::read(fields, signed).map(Self::Stored),
            REMOVED => Removed::read(fields, signed).map(Self::Removed),
            CLEARED => Ok(Self::Cleared),
            _ => Ok(Self::Other(value.clone())),
        }
    }

    fn value(&self, shape: Shape, signed: bool) -> Value {
        match self {
            Self::Stored(stored) => shaped(shape, STORED, &STORED_FIELDS, stored.fields(signed)),
            Self::Removed(removed) => {
                shaped(shape, REMOVED, &REMOVED_FIELDS, removed.fields(signed))
            }
            Self::Cleared => shaped(shape, CLEARED, &[], Fields::new()),
            Self::Other(value) => value.clone(),
        }
    }
}

/// Returns the type of an event and its fields by name.
fn named(value: &Value) -> Result<(&str, Fields), EventError> {
    let wrong = || EventError::shape("an event", value, "a map with a type, or an array");
    match value {
        Value::Map(pairs) => {
            let mut kind = None;
            let mut fields = Fields::with_capacity(pairs.len());
            for (name, field) in pairs {
                match name.as_str().ok_or_else(wrong)? {
                    "type" => kind = field.as_str(),
                    name => fields.push((name.to_owned(), field.clone())),
                }
            }
            Ok((kind.ok_or_else(wrong)?, fields))
        }
        Value::Array(parts) => {
            let (kind, parts) = parts.split_first().ok_or_else(wrong)?;
            let kind = kind.as_str().ok_or_else(wrong)?;
            let names: &[&str] = match kind {
                STORED => &STORED_FIELDS,
                REMOVED => &REMOVED_FIELDS,
                _ => &[],
            };
            let fields = names.iter().zip(parts);
            let fields = fields.map(|(name, field)| ((*name).to_owned(), field.clone()));
            Ok((kind, fields.collect()))
        }
        _ => Err(wrong()),
    }
}

fn shaped(shape: Shape, kind: &str, order: &[&str], fields: Fields) -> Value {
    let kind = Value::from(kind);
    match shape {
        Shape::Map => {
            let fields = fields
                .into_iter()
                .map(|(name, field)| (Value::from(name), field));
            Value::Map(
                std::iter::once((Value::from("type"), kind))
                    .chain(fields)
                    .collect(),
            )
        }
        Shape::Array => {
            let mut parts = vec![kind];
            let mut fields = fields;
            // Readers of arrays know no fields beyond the medium.
            for name in order.iter().filter(|name| **name != "lora_name") {
                let at = fields.iter().position(|(field, _)| field == name);
                parts.push(at.map_or(Value::Nil, |at| fields.swap_remove(at).1));
            }
            while parts.len() > 2 && parts.last() == Some(&Value::Nil) {
                parts.pop();
            }
            Value::Array(parts)
        }
    }
}

fn take(fields: &mut Fields, name: &str) -> Option<Value> {
    let at = fields.iter().position(|(field, _)| field == name)?;
    let (_, value) = fields.remove(at);
    (!value.is_nil()).then_some(value)
}

fn take_pages(fields: &mut Fields, signed: &mut bool) -> Result<Vec<PageKey>, EventError> {
    let value = take(fields, "block_hashes").unwrap_or(Value::Nil);
    let wrong = |value: &Value| EventError::shape("block_hashes", value, "a list of hashes");
    let Value::Array(hashes) = &value else {
        return Err(wrong(&value));
    };
    *signed |= hashes.iter().any(is_negative);
    let pages = hashes
        .iter()
        .map(|hash| PageKey::read(hash).ok_or_else(|| wrong(hash)));
    pages.collect()
}

fn is_negative(value: &Value) -> bool {
    matches!(value, Value::Integer(number) if number.is_i64() && !number.is_u64())
}

fn take_medium(fields: &mut Fields) -> Result<Option<String>, EventError> {
    let medium = take(fields, "medium");
    medium
        .map(|medium| {
            let text = medium.as_str().map(str::to_owned);
            text.ok_or_else(|| EventError::shape("medium", &medium, "a text"))
        })
        .transpose()
}

impl Stored {
    fn read(mut fields: Fields, signed: &mut bool) -> Result<Self, EventError> {
        let pages = take_pages(&mut fields, signed)?;
        let parent = match take(&mut fields, "parent_block_hash") {
            None => None,
            Some(parent) => {
                *signed |= is_negative(&parent);
                let page = PageKey::read(&parent);
                Some(page.ok_or_else(|| EventError::shape("parent_block_hash", &parent, "a hash"))?)
            }
        };
        let tokens = match take(&mut fields, "token_ids") {
            None => Vec::new(),
            Some(Value::Array(tokens)) => tokens,
            Some(other) => return Err(EventError::shape("token_ids", &other, "a list")),
        };
        let size = take(&mut fields, "block_size").unwrap_or(Value::from(0));
        let page_tokens = size
            .as_u64()
            .ok_or_else(|| EventError::shape("block_size", &size, "an integer from 0 on"))?;
        let medium = take_medium(&mut fields)?;
        Ok(Self {
            pages,
            parent,
            tokens,
            page_tokens,
            medium,
            others: fields,
        })
    }

    /// The fields in vLLM's order.
    fn fields(&self, signed: bool) -> Fields {
        let pages = self.pages.iter().map(|page| page.value(signed));
        let mut fields = vec![
            ("block_hashes".to_owned(), Value::Array(pages.collect())),
            (
                "parent_block_hash".to_owned(),
                self.parent.map_or(Value::Nil, |page| page.value(signed)),
            ),
            ("token_ids".to_owned(), Value::Array(self.tokens.clone())),
            ("block_size".to_owned(), Value::from(self.page_tokens)),
        ];
        let mut others = self.others.iter().cloned().peekable();
        let lora = others.next_if(|(name, _)| name == "lora_id");
        fields.push(lora.unwrap_or_else(|| ("lora_id".to_owned(), Value::Nil)));
        fields.push(medium_field(self.medium.as_deref()));
        fields.extend(others);
        fields
    }

    /// Whether every page has its tokens, as a subscriber needs that does not know them.
    pub(crate) fn is_described(&self) -> bool {
        let tokens = u64::try_from(self.pages.len())
            .ok()
            .and_then(|pages| pages.checked_mul(self.page_tokens));
        self.page_tokens > 0 && tokens == u64::try_from(self.tokens.len()).ok()
    }
}

impl Removed {
    fn read(mut fields: Fields, signed: &mut bool) -> Result<Self, EventError> {
        let pages = take_pages(&mut fields, signed)?;
        let medium = take_medium(&mut fields)?;
        Ok(Self {
            pages,
            medium,
            others: fields,
        })
    }

    fn fields(&self, signed: bool) -> Fields {
        let pages = self.pages.iter().map(|page| page.value(signed));
        let mut fields = vec![
            ("block_hashes".to_owned(), Value::Array(pages.collect())),
            medium_field(self.medium.as_deref()),
        ];
        fields.extend(self.others.iter().cloned());
        fields
    }
}

fn medium_field(medium: Option<&str>) -> (String, Value) {
    ("medium".to_owned(), medium.map_or(Value::Nil, Value::from))
}

/// The field that names the group of layers of an event's pages.
const GROUP: &str = "group_idx";

/// The group of layers of an event's pages, as the engine numbers groups: the first one if the event names none; `None` if
/// it names something else.
pub(crate) fn group_of(others: &Fields) -> Option<u32> {
    match named_group(others) {
        None | Some(Value::Nil) => Some(0),
        Some(value) => value.as_u64().and_then(|group| u32::try_from(group).ok()),
    }
}

/// Whether an event names the group of its pages.
pub(crate) fn names_group(others: &Fields) -> bool {
    named_group(others).is_some_and(|group| !group.is_nil())
}

fn named_group(others: &Fields) -> Option<&Value> {
    let group = others.iter().find(|(name, _)| name == GROUP);
    group.map(|(_, value)| value)
}

/// The field that names a group.
pub(crate) fn group_field(group: u32) -> (String, Value) {
    (GROUP.to_owned(), Value::from(group))
}
