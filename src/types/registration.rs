//! The description of an engine rank's KV memory. The engine describes it, and kvferry checks the description: nothing
//! is guessed from shapes.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Rank;

/// Limit on the bytes of [`Registration::content`]; a longer description is replaced by its digest.
pub const CONTENT_BYTES_MAX: usize = 1024;

/// The content of a tensor, for each page.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[schemars(transform = super::open_words)]
#[serde(rename_all = "snake_case")]
pub enum TensorRole {
    /// Keys only.
    K,
    /// Values only.
    V,
    /// Keys and values together.
    Kv,
    /// A compressed latent from which keys and values are computed (MLA).
    Latent,
    /// The state of a recurrent layer (SSM).
    State,
    /// A role that this version does not know.
    #[serde(other)]
    #[schemars(skip)]
    Other,
}

impl TensorRole {
    /// The name on the wire.
    pub const fn name(self) -> &'static str {
        match self {
            Self::K => "k",
            Self::V => "v",
            Self::Kv => "kv",
            Self::Latent => "latent",
            Self::State => "state",
            Self::Other => "other",
        }
    }
}

/// The tokens that a token of a group's layers attends to, which decides how long its pages are needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize, JsonSchema)]
#[schemars(transform = super::open_words)]
#[serde(rename_all = "snake_case")]
pub enum Attention {
    /// Every token before it (also with a latent, MLA).
    #[default]
    Full,
    /// The last [`GroupMemory::window_tokens`] tokens.
    SlidingWindow,
    /// The tokens of its chunk of [`GroupMemory::window_tokens`].
    ChunkedLocal,
    /// A state that the tokens before it produce (SSM).
    State,
    /// A kind that this version does not support.
    #[serde(other)]
    #[schemars(skip)]
    Other,
}

impl Attention {
    /// The name for messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Full => "full attention",
            Self::SlidingWindow => "a sliding window",
            Self::ChunkedLocal => "chunked local attention",
            Self::State => "state",
            Self::Other => "a kind that this version does not know",
        }
    }
}

/// Kind of an allocation's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[schemars(transform = super::open_words)]
#[serde(rename_all = "snake_case")]
pub enum AllocationKind {
    /// Host memory that both processes map.
    SharedMemory,
    /// Memory of the GPU that [`Registration::device_uuid`] names.
    Device,
    /// A kind that this version does not know.
    #[serde(other)]
    #[schemars(skip)]
    Other,
}

/// How the worker opens an allocation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(transform = super::open_words)]
#[serde(rename_all = "snake_case")]
pub enum AllocationHandle {
    /// A file under a memory file system, by its absolute path.
    Path(String),
    /// A file descriptor that was passed to the worker's descriptor socket under this ticket: of a memory file, or of
    /// device memory exported by CUDA's virtual memory management.
    Ticket(
        #[serde(with = "serde_bytes")]
        #[schemars(with = "super::BinarySchema")]
        [u8; 16],
    ),
    /// `cudaIpcMemHandle_t` of device memory: the whole allocation that holds the tensors, from its first byte.
    CudaIpc(
        #[serde(with = "serde_bytes")]
        #[schemars(with = "super::BinarySchema")]
        [u8; 64],
    ),
    /// `CUmemFabricHandle` of device memory.
    CudaFabric(
        #[serde(with = "serde_bytes")]
        #[schemars(with = "super::BinarySchema")]
        [u8; 64],
    ),
    /// Device memory in chunks, each shared on its own. The chunks lie one after another: offsets count over all of
    /// them.
    Chunks(Vec<Chunk>),
    /// A handle that this version does not know.
    #[serde(other)]
    #[schemars(skip)]
    Other,
}

/// A part of an allocation of device memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Chunk {
    /// How the worker opens the chunk.
    pub handle: ChunkHandle,
    /// Size in bytes: everything that was created together.
    pub bytes: u64,
}

/// How the worker opens a chunk.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[schemars(transform = super::open_words)]
#[serde(rename_all = "snake_case")]
pub enum ChunkHandle {
    /// Like [`AllocationHandle::Ticket`].
    Ticket(
        #[serde(with = "serde_bytes")]
        #[schemars(with = "super::BinarySchema")]
        [u8; 16],
    ),
    /// Like [`AllocationHandle::CudaFabric`].
    CudaFabric(
        #[serde(with = "serde_bytes")]
        #[schemars(with = "super::BinarySchema")]
        [u8; 64],
    ),
    /// A handle that this version does not know.
    #[serde(other)]
    #[schemars(skip)]
    Other,
}

/// One piece of memory that the engine allocated.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Allocation {
    /// Kind of the memory.
    pub kind: AllocationKind,
    /// How the worker opens the allocation.
    pub handle: AllocationHandle,
    /// Size in bytes.
    pub bytes: u64,
}

/// The pages of one tensor of one layer.
///
/// `shape` and `strides` describe the tensor as the engine sees it, in elements, with strides as in PyTorch.
/// `page_axis` is the axis along which pages are counted. `page_bytes` and `page_stride_bytes` state the same in bytes,
/// so that a contradiction is detected instead of a wrong copy made.
///
/// The axes may be in any order and have gaps between them, as long as they nest: a page is then copied in several
/// pieces. Elements that share bytes are refused.
///
/// Scales of quantised keys and values are tensors too, with one more layer of the group for each layer that has them:
/// `layers` counts the described layers, and a (layer, role) names one tensor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TensorView {
    /// Layer within the group, from 0.
    pub layer: u32,
    /// The content.
    pub role: TensorRole,
    /// Index into [`Registration::allocations`].
    pub allocation: u32,
    /// Byte offset of element 0 in the allocation.
    pub offset_bytes: u64,
    /// Length of each axis, in elements.
    pub shape: Vec<u64>,
    /// Distance between neighbours along each axis, in elements.
    pub strides: Vec<u64>,
    /// Bytes of one element.
    pub element_bytes: u32,
    /// The axis that counts pages.
    pub page_axis: u32,
    /// Bytes of one page in this tensor, without gaps.
    pub page_bytes: u64,
    /// Distance from one page to the next, in bytes.
    pub page_stride_bytes: u64,
    /// Which part of the model's KV the rank's pages hold. `None`: pages are usable by ranks of equal engines only. With a
    /// word that this version does not know, no plan is made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slices: Option<Slices>,
}

/// How the ranks of an engine share the bytes of a tensor, from which a plan is made for an engine with another number of
/// ranks or tokens of a page. Rank r of T holds:
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(transform = super::open_words)]
#[serde(rename_all = "snake_case")]
pub enum Slices {
    /// The heads from r x `kv_heads` / T to (r + 1) x `kv_heads` / T, or, with more ranks than heads, head
    /// r x `kv_heads` / T.
    Heads {
        /// KV heads of the whole model in this tensor. Divides the number of ranks, or is divided by it.
        kv_heads: u32,
        /// The axis of the shape that counts the rank's heads.
        head_axis: u32,
        /// The axis of the shape that counts the tokens of a page.
        token_axis: u32,
    },
    /// Everything, as every other rank.
    Whole {
        /// The axis of the shape that counts the tokens of a page.
        token_axis: u32,
    },
    /// Of each part of a state the rows from r x `dim` / T to (r + 1) x `dim` / T.
    Parts {
        /// The parts in their order in memory, which fill the page.
        parts: Vec<StatePart>,
    },
    /// A division that this version does not know.
    #[serde(other)]
    #[schemars(skip)]
    Other,
}

impl Slices {
    /// The name on the wire.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Heads { .. } => "heads",
            Self::Whole { .. } => "whole",
            Self::Parts { .. } => "parts",
            Self::Other => "other",
        }
    }
}

/// A part of a state that is split along one dimension.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct StatePart {
    /// Length of the dimension in the whole model: a multiple of the number of ranks.
    pub dim: u32,
    /// Bytes of one index of the dimension with everything that lies inside it.
    pub row_bytes: u64,
}

/// Bytes of the engine's memory that the worker must find through its own mapping. The bytes of [`Registration::nonce`]
/// are random, and the engine wrote them for this registration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Nonce {
    /// Index into [`Registration::allocations`].
    pub allocation: u32,
    /// Byte offset of the bytes in the allocation.
    pub offset_bytes: u64,
    /// The bytes, 16 to 64 of them.
    #[serde(with = "serde_bytes")]
    #[schemars(with = "super::BinarySchema")]
    pub bytes: Vec<u8>,
}

/// The pages of one group of layers of one rank: layers of one kind, which share a table of pages.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GroupMemory {
    /// The tokens that its layers attend to.
    #[serde(default, skip_serializing_if = "is_full")]
    #[schemars(extend("default" = "full"))]
    pub attention: Attention,
    /// Tokens of a sliding window, the token that attends included and those that the engine keeps beyond it, or of a
    /// chunk; 0 without one.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub window_tokens: u32,
    /// Whether draft layers (EAGLE) use the group, which compute the last page of a hit again.
    #[serde(default, skip_serializing_if = "is_false")]
    pub eagle: bool,
    /// Tokens of one page.
    pub engine_page_tokens: u32,
    /// Pages of the engine's memory: the length of every tensor's page axis.
    pub device_pages: u32,
    /// Layers of the group.
    pub layers: u32,
    /// The tensors, in any order; each (layer, role) at most once.
    pub tensors: Vec<TensorView>,
}

/// One rank's KV memory: its groups, which may lie in the same bytes, because a page of the memory belongs to one group at
/// a time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Registration {
    /// The groups of layers, by id from 0.
    pub groups: Vec<GroupMemory>,
    /// Tokens by which one page hash extends the previous one: a divisor of every group's page. 0: the page of the only
    /// group.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub hash_tokens: u32,
    /// Hits end at multiples of this many tokens: a multiple of every group's page. 0: the page of the only group.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub hit_tokens: u32,
    /// Everything besides tokens and shape that determines the bytes of a page: model, revision, dtype, quantisation.
    /// Opaque, 1 to [`CONTENT_BYTES_MAX`] bytes. Memory with other content shares no page with this one. An absent
    /// field reads as an empty one, so that the check of the registration can name it with its remedy.
    #[serde(default, with = "serde_bytes")]
    #[schemars(with = "super::BinarySchema")]
    pub content: Vec<u8>,
    /// The rank that this memory belongs to.
    #[schemars(with = "u16")]
    pub rank: Rank,
    /// Number of ranks of the engine.
    pub tp_size: u16,
    /// The slice of the KV that the rank holds. Ranks with equal KV name the same one.
    pub shard: u16,
    /// The allocations that hold the tensors.
    pub allocations: Vec<Allocation>,
    /// Proof of the mapping.
    pub nonce: Nonce,
    /// Proofs for the other pieces of the memory (allocations, or chunks where an allocation has them): bytes that the
    /// engine read there shortly before. Several proofs of one piece are alternatives.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub proofs: Vec<Nonce>,
    /// UUID of the GPU; `None` for host memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_uuid: Option<String>,
    /// The timeline of the device; `None` where ranks report what is written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeline: Option<Timeline>,
}

/// A word of 8 bytes in device memory, little-endian, that only grows: the highest request for whose stores the device
/// has written everything. The engine sets it to 0 before its first registration, and lets the device write it after
/// the work in question.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Timeline {
    /// Index into [`Registration::allocations`].
    pub allocation: u32,
    /// Byte offset of the word, a multiple of 8.
    pub offset_bytes: u64,
}

impl Registration {
    /// Tokens of the unit of the hashes and of the alignment of hits. Where the only group sets them, they are the tokens
    /// of its page.
    pub fn units(&self) -> (u32, u32) {
        let page = match &self.groups[..] {
            [only] => only.engine_page_tokens,
            _ => 0,
        };
        let or_page = |tokens: u32| match tokens {
            0 => page,
            tokens => tokens,
        };
        (or_page(self.hash_tokens), or_page(self.hit_tokens))
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde gives a reference")]
const fn is_false(flag: &bool) -> bool {
    !*flag
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde gives a reference")]
fn is_full(attention: &Attention) -> bool {
    *attention == Attention::Full
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde gives a reference")]
const fn is_zero(tokens: &u32) -> bool {
    *tokens == 0
}
