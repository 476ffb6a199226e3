//! Bodies of the requests of engines to a leader and of its answers, and their conversion to the types of the core.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Empty, ErrorBody, PageItemSchema};
use crate::codec::Message;
use crate::error::ErrorCode;
use crate::pairs::Pages;
use kvferry_types::{
    Answer, HASH_BYTES_MAX, HASH_BYTES_MIN, PageHashes, Request, RequestId, ResetScope, SlotId,
};

/// Finds and holds the pages of a sequence.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Lookup {
    /// The engine's number of the running request.
    pub slot: u64,
    /// Namespace of the pages.
    #[serde(with = "serde_bytes", default)]
    #[schemars(with = "Vec<u8>", extend("contentEncoding" = "binary"))]
    pub namespace: Vec<u8>,
    /// Bytes of one page hash, 16 to 64.
    pub hash_bytes: u8,
    /// The hashes of all full pages of the prompt, packed.
    #[serde(with = "serde_bytes")]
    #[schemars(with = "Vec<u8>", extend("contentEncoding" = "binary"))]
    pub hashes: Vec<u8>,
    /// Number of pages, from the first one on, that the engine has itself.
    #[serde(default)]
    pub device_pages: u32,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde gives a reference")]
const fn nothing_before(after: &u64) -> bool {
    *after == 0
}

/// Copies held pages to the engine's memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Load {
    /// Slot of the lookup that holds the pages.
    pub slot: u64,
    /// Position of the first page in the sequence.
    pub first_page: u32,
    /// Device pages, one for each page from there on.
    #[schemars(with = "Vec<PageItemSchema>")]
    pub destination: Pages,
    /// The last request number that the ranks received for work of their own (`written`): each rank's copy starts after
    /// everything up to it is written. Lower than the id of this request. 0: nothing writes to the destination.
    #[serde(default, skip_serializing_if = "nothing_before")]
    pub after: u64,
}

/// Stores pages of a sequence.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Store {
    /// Slot of the lookup that opened the sequence.
    pub slot: u64,
    /// Position of the first page in the sequence.
    pub first_page: u32,
    /// Device pages, one for each page from there on.
    #[schemars(with = "Vec<PageItemSchema>")]
    pub source: Pages,
    /// Bytes of one page hash; 0 without further hashes.
    #[serde(default)]
    pub hash_bytes: u8,
    /// Hashes of pages that the slot may not have yet, packed.
    #[serde(with = "serde_bytes", default)]
    #[schemars(with = "Vec<u8>", extend("contentEncoding" = "binary"))]
    pub more_hashes: Vec<u8>,
    /// Position of the first of them. Hashes that the slot has must be equal, and none may be left out.
    #[serde(default)]
    pub more_from: u32,
}

/// Ends a running request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Finish {
    /// Slot of the request.
    pub slot: u64,
}

/// Stops the stores in flight that were requested before this one, because their engine needs the pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CancelStores {
    /// Stops the stores of this slot; those of all slots when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slot: Option<u64>,
}

/// Removes pages. Without a namespace: every page; without hashes: every page of the namespace.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Reset {
    /// Namespace of the pages; absent for all namespaces.
    #[serde(default)]
    #[schemars(with = "Option<Vec<u8>>")]
    pub namespace: Option<serde_bytes::ByteBuf>,
    /// Bytes of one hash; 0 without hashes.
    #[serde(default)]
    pub hash_bytes: u8,
    /// Hashes of the pages, packed.
    #[serde(with = "serde_bytes", default)]
    #[schemars(with = "Vec<u8>", extend("contentEncoding" = "binary"))]
    pub hashes: Vec<u8>,
}

impl From<Request> for Message {
    fn from(request: Request) -> Self {
        match request {
            Request::Lookup {
                slot,
                namespace,
                hashes,
                device_pages,
            } => Self::Lookup(Lookup {
                slot: slot.0,
                namespace,
                hash_bytes: width(&hashes),
                hashes: hashes.into_bytes(),
                device_pages,
            }),
            Request::Load {
                slot,
                first_page,
                destination,
                after,
            } => Self::Load(Load {
                after: after.0,
                slot: slot.0,
                first_page,
                destination: destination.into(),
            }),
            Request::Store {
                slot,
                first_page,
                more,
                source,
            } => {
                let (more_from, more) = more.unzip();
                Self::Store(Store {
                    slot: slot.0,
                    first_page,
                    source: source.into(),
                    hash_bytes: more.as_ref().map_or(0, width),
                    more_hashes: more.map_or_else(Vec::new, PageHashes::into_bytes),
                    more_from: more_from.unwrap_or(0),
                })
            }
            Request::Reset { scope } => Self::Reset(reset(scope)),
            Request::CancelStores { slot } => Self::CancelStores(CancelStores {
                slot: slot.map(|slot| slot.0),
            }),
            Request::Finish { slot } => Self::Finish(Finish { slot: slot.0 }),
        }
    }
}

impl TryFrom<Message> for Request {
    type Error = ErrorBody;

    /// Fails for messages that no engine sends, and for hashes whose length does not match their width.
    fn try_from(message: Message) -> Result<Self, ErrorBody> {
        match message {
            Message::Lookup(lookup) => Ok(Self::Lookup {
                slot: SlotId(lookup.slot),
                namespace: lookup.namespace,
                hashes: page_hashes("hashes", lookup.hash_bytes, lookup.hashes)?,
                device_pages: lookup.device_pages,
            }),
            Message::Load(load) => Ok(Self::Load {
                slot: SlotId(load.slot),
                first_page: load.first_page,
                destination: load.destination.list,
                after: RequestId(load.after),
            }),
            Message::Store(store) => Ok(Self::Store {
                slot: SlotId(store.slot),
                first_page: store.first_page,
                more: match store.more_hashes.is_empty() {
                    true => None,
                    false => Some((
                        store.more_from,
                        page_hashes("more_hashes", store.hash_bytes, store.more_hashes)?,
                    )),
                },
                source: store.source.list,
            }),
            Message::Reset(reset) => Ok(Self::Reset {
                scope: reset_scope(reset)?,
            }),
            Message::CancelStores(cancel) => Ok(Self::CancelStores {
                slot: cancel.slot.map(SlotId),
            }),
            Message::Finish(finish) => Ok(Self::Finish {
                slot: SlotId(finish.slot),
            }),
            other => Err(ErrorBody::new(
                ErrorCode::UnknownKind,
                format!("{} is not for a leader to answer", other.kind().name()),
            )),
        }
    }
}

impl From<Answer> for Message {
    fn from(answer: Answer) -> Self {
        match answer {
            Answer::Lookup(answer) => Self::LookupAnswer(answer),
            Answer::Load(answer) => Self::LoadAnswer(answer),
            Answer::Store(answer) => Self::StoreAnswer(answer),
            Answer::Reset(answer) => Self::ResetAnswer(answer),
            Answer::CancelStores(answer) => Self::CancelStoresAnswer(answer),
            Answer::Finish => Self::FinishAnswer(Empty {}),
        }
    }
}

impl Message {
    /// Returns the answer to an engine's request, or `None` for any other message.
    pub fn answer(&self) -> Option<Answer> {
        match *self {
            Self::LookupAnswer(answer) => Some(Answer::Lookup(answer)),
            Self::LoadAnswer(answer) => Some(Answer::Load(answer)),
            Self::StoreAnswer(answer) => Some(Answer::Store(answer)),
            Self::ResetAnswer(answer) => Some(Answer::Reset(answer)),
            Self::CancelStoresAnswer(answer) => Some(Answer::CancelStores(answer)),
            Self::FinishAnswer(Empty {}) => Some(Answer::Finish),
            _ => None,
        }
    }
}

fn reset(scope: ResetScope) -> Reset {
    let (namespace, hashes) = match scope {
        ResetScope::Everything => (None, None),
        ResetScope::Namespace(namespace) => (Some(namespace), None),
        ResetScope::Pages(namespace, hashes) => (Some(namespace), Some(hashes)),
    };
    Reset {
        namespace: namespace.map(serde_bytes::ByteBuf::from),
        hash_bytes: hashes.as_ref().map_or(0, width),
        hashes: hashes.map_or_else(Vec::new, PageHashes::into_bytes),
    }
}

fn reset_scope(reset: Reset) -> Result<ResetScope, ErrorBody> {
    match (reset.namespace, reset.hashes.is_empty()) {
        (None, true) => Ok(ResetScope::Everything),
        (None, false) => {
            let text = "hashes without a namespace: say whose pages";
            Err(ErrorBody::new(ErrorCode::Invalid, text))
        }
        (Some(namespace), true) => Ok(ResetScope::Namespace(namespace.into_vec())),
        (Some(namespace), false) => {
            let hashes = page_hashes("hashes", reset.hash_bytes, reset.hashes)?;
            Ok(ResetScope::Pages(namespace.into_vec(), hashes))
        }
    }
}

fn width(hashes: &PageHashes) -> u8 {
    u8::try_from(hashes.width()).unwrap_or(0)
}

fn page_hashes(field: &str, width: u8, bytes: Vec<u8>) -> Result<PageHashes, ErrorBody> {
    let length = bytes.len();
    PageHashes::packed(usize::from(width), bytes).ok_or_else(|| {
        let text = format!(
            "{field} has {length} bytes and hash_bytes is {width}: hashes of {HASH_BYTES_MIN} to \
             {HASH_BYTES_MAX} bytes, packed without gaps"
        );
        ErrorBody::new(ErrorCode::Invalid, text)
    })
}
