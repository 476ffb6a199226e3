//! Bodies of the requests of engines to a leader. Its answers are those of the core, in `types`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{ErrorBody, PageItemSchema};
use crate::bounded::at_most;
use crate::error::ErrorCode;
use crate::limits::STORES_MAX;
use crate::pairs::Pages;
use kvferry_types::{GroupId, PRIORITY_DEFAULT, Part, StoreAnswer};

/// Finds and holds the pages of a sequence.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Lookup {
    /// The engine's number of the running request.
    pub slot: u64,
    /// Namespace of the pages.
    #[serde(with = "serde_bytes", default)]
    #[schemars(with = "kvferry_types::BinarySchema")]
    pub namespace: Vec<u8>,
    /// Bytes of one page hash, 16 to 64.
    pub hash_bytes: u8,
    /// Hashes of the prompt, packed: one for each unit of the registered `hash_tokens`, which is the page of a model with
    /// one group.
    #[serde(with = "serde_bytes")]
    #[schemars(with = "kvferry_types::BinarySchema")]
    pub hashes: Vec<u8>,
    /// Number of hashes, from the first one on, whose pages the engine has itself, in every group.
    #[serde(default)]
    pub have_pages: u32,
    /// Largest end of a hit, in hashes; absent for all of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_pages: Option<u32>,
}

/// Consecutive pages of one group of a sequence.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PartBody {
    /// The group of layers.
    #[serde(default, skip_serializing_if = "first_group")]
    pub group: u8,
    /// Position of the first page in the sequence, in pages of the group.
    pub first_page: u32,
    /// Device pages, one for each page from there on.
    #[schemars(with = "Vec<PageItemSchema>")]
    pub pages: Pages,
    /// Number of pages that `pages` names, runs counted out. Redundant, so that pages in the shape of a run, or the
    /// reverse, are refused instead of copied: `[5, 2]` names two pages and `[[5, 2]]` names two others.
    pub count: u64,
    /// For a store, where host memory evicts by priority: how long the pages are kept, from 0, evicted first, to 7. Without
    /// it 4. A block has the priority of the last store that named pages of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority: Option<u8>,
}

impl From<Part> for PartBody {
    fn from(part: Part) -> Self {
        Self {
            group: part.group.0,
            first_page: part.first_page,
            count: part.pages.pages(),
            pages: part.pages.into(),
            priority: Some(part.priority).filter(|priority| *priority != PRIORITY_DEFAULT),
        }
    }
}

impl TryFrom<PartBody> for Part {
    type Error = ErrorBody;

    /// Fails if `count` is not the number of pages.
    fn try_from(part: PartBody) -> Result<Self, ErrorBody> {
        let pages = part.pages.list.pages();
        if part.count != pages {
            let text = format!(
                "count is {}, and pages names {pages}: a page is a number, and a run of them a list [start, count]",
                part.count
            );
            return Err(ErrorBody::new(ErrorCode::Invalid, text));
        }
        let priority = part.priority.unwrap_or(PRIORITY_DEFAULT);
        Ok(Self {
            priority,
            ..Self::new(GroupId(part.group), part.first_page, part.pages.list)
        })
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde gives a reference")]
const fn first_group(group: &u8) -> bool {
    *group == 0
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
    /// The pages. A load of one part may end early; one of several parts is carried out as a whole.
    pub parts: Vec<PartBody>,
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
    /// The pages. A group may have several parts.
    pub parts: Vec<PartBody>,
    /// Bytes of one page hash; 0 without further hashes.
    #[serde(default)]
    pub hash_bytes: u8,
    /// Hashes of pages that the slot may not have yet, packed.
    #[serde(with = "serde_bytes", default)]
    #[schemars(with = "kvferry_types::BinarySchema")]
    pub more_hashes: Vec<u8>,
    /// Position of the first of them. Hashes that the slot has must be equal, and none may be left out.
    #[serde(default)]
    pub more_from: u32,
    /// Number of the work that writes the pages, below the request's id: they are read once each rank has reported it as
    /// written. 0: once each rank has reported the request's own id.
    #[serde(default, skip_serializing_if = "nothing_before")]
    pub after: u64,
}

/// A store among several in one message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NumberedStore {
    /// Id of the request, as a `store` of its own would have it in its header. Other messages name the store by it:
    /// `written`, `abandon` and a repeated request.
    pub id: u64,
    /// Milliseconds until the deadline of this store, at most those of the message.
    pub deadline_ms: u32,
    /// The request.
    pub store: Store,
}

/// Several `store` requests in one message, each with an id of its own: those of one step of the engine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Stores {
    /// The requests, in the order in which they are carried out.
    pub stores: Vec<NumberedStore>,
}

/// How one of several stores ended: with its answer or with an error.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct StoreResult {
    /// The answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answer: Option<StoreAnswer>,
    /// Why the store was not carried out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<ErrorBody>,
}

/// Answer to `stores`, once each of them has ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct StoresAnswer {
    /// How each store ended, in their order.
    #[serde(deserialize_with = "at_most::<_, _, STORES_MAX>")]
    pub results: Vec<StoreResult>,
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

/// Moves to the disk what is stored at the time of the request, and makes it durable there.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Flush {}

/// The pages that a [`Reset`] removes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(transform = kvferry_types::open_words)]
#[serde(rename_all = "snake_case")]
pub enum ResetPages {
    /// Every page.
    All,
    /// The pages of the namespace.
    Namespace,
    /// The pages of the namespace that have one of the hashes.
    Hashes,
    /// A selection that this version does not know.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// Removes pages. The selection is named, so that a field that is missing, or that this version does not know, never
/// removes more than was meant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Reset {
    /// The pages.
    pub which: ResetPages,
    /// Namespace of the pages; absent for `all`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<kvferry_types::BinarySchema>")]
    pub namespace: Option<serde_bytes::ByteBuf>,
    /// Bytes of one hash; 0 without hashes.
    #[serde(default)]
    pub hash_bytes: u8,
    /// Hashes of the pages, packed.
    #[serde(with = "serde_bytes", default)]
    #[schemars(with = "kvferry_types::BinarySchema")]
    pub hashes: Vec<u8>,
    /// Number of the tier that forgets the pages: 2 for host memory, 3 for the disk; 0 for all tiers.
    #[serde(default)]
    pub tier: u8,
}
