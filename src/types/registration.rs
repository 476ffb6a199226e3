//! How an engine rank describes its KV memory. It describes, kvferry checks; nothing is guessed from shapes.

use serde::{Deserialize, Serialize};

use super::{GroupId, Rank};

/// Most bytes of [`Registration::content`]; a longer description is said by its digest.
pub const CONTENT_BYTES_MAX: usize = 1024;

/// What a tensor holds of each page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TensorRole {
    /// Keys only.
    K,
    /// Values only.
    V,
    /// Keys and values together.
    Kv,
    /// A compressed latent from which keys and values are made (MLA).
    Latent,
    /// The state of a recurrent layer (SSM).
    State,
}

/// What a token of a group's layers attends to, which decides how long its pages are needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Attention {
    /// Every token before it (also with a latent, MLA).
    #[default]
    Full,
    /// The last [`Registration::window_tokens`].
    SlidingWindow,
    /// Those of its chunk of [`Registration::window_tokens`].
    ChunkedLocal,
    /// A state that the tokens before it have left (SSM).
    State,
    /// Something that this version has no word for.
    #[serde(other)]
    Other,
}

impl Attention {
    /// The word for it.
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

/// What kind of memory an allocation is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AllocationKind {
    /// Host memory that both processes map.
    SharedMemory,
    /// Memory of the GPU that [`Registration::device_uuid`] names.
    Device,
}

/// How the worker reaches an allocation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AllocationHandle {
    /// A file under a memory file system, by its absolute path.
    Path(String),
    /// A file descriptor that was handed to the worker's descriptor socket under this ticket: of a memory file, or of device
    /// memory that CUDA's virtual memory management exported.
    Ticket(#[serde(with = "serde_bytes")] [u8; 16]),
    /// `cudaIpcMemHandle_t` of device memory: the whole allocation that holds the tensors, from its first byte.
    CudaIpc(#[serde(with = "serde_bytes")] [u8; 64]),
    /// `CUmemFabricHandle` of device memory.
    CudaFabric(#[serde(with = "serde_bytes")] [u8; 64]),
    /// Device memory in chunks, each shared by itself, that lie one behind the other: offsets count over all of them.
    Chunks(Vec<Chunk>),
}

/// A part of an allocation of device memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Chunk {
    /// How to reach it.
    pub handle: ChunkHandle,
    /// Its size in bytes: all that was created together.
    pub bytes: u64,
}

/// How the worker reaches a chunk.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChunkHandle {
    /// As [`AllocationHandle::Ticket`].
    Ticket(#[serde(with = "serde_bytes")] [u8; 16]),
    /// As [`AllocationHandle::CudaFabric`].
    CudaFabric(#[serde(with = "serde_bytes")] [u8; 64]),
}

/// One piece of memory that the engine allocated.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Allocation {
    /// What kind of memory it is.
    pub kind: AllocationKind,
    /// How to reach it.
    pub handle: AllocationHandle,
    /// Its size in bytes.
    pub bytes: u64,
}

/// One tensor of one layer: where its pages lie.
///
/// `shape` and `strides` describe the tensor as the engine sees it, in elements, strides as in PyTorch. `page_axis` is
/// the axis along which pages are counted. `page_bytes` and `page_stride_bytes` say the same in bytes, so that a
/// contradiction shows instead of a wrong copy.
///
/// The axes may lie in any order and with gaps between them, as long as they nest: a page is then copied in several
/// pieces. Elements that share bytes are refused.
///
/// Scales of quantised keys and values are tensors too, one more layer of the group for each layer that has them:
/// `layers` counts what is described, and a (layer, role) names one tensor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorView {
    /// Layer within the group, from 0.
    pub layer: u32,
    /// What it holds.
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
    /// Which axis counts pages.
    pub page_axis: u32,
    /// Bytes of one page in this tensor, gaps not counted.
    pub page_bytes: u64,
    /// Distance from one page to the next, in bytes.
    pub page_stride_bytes: u64,
}

/// Bytes of the engine's memory that the worker must find through its own mapping. Those of [`Registration::nonce`] are
/// random, and the engine wrote them for this registration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Nonce {
    /// Index into [`Registration::allocations`].
    pub allocation: u32,
    /// Where the bytes lie.
    pub offset_bytes: u64,
    /// The bytes, 16 to 64 of them.
    #[serde(with = "serde_bytes")]
    pub bytes: Vec<u8>,
}

/// Everything about one group of one rank's KV memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Registration {
    /// Which group of layers.
    pub group: GroupId,
    /// Groups of the rank's memory. Each is registered by itself; they may lie in the same allocations.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub groups: u8,
    /// What its layers attend to.
    #[serde(default, skip_serializing_if = "is_full")]
    pub attention: Attention,
    /// Tokens of a sliding window or a chunk; 0 without one.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub window_tokens: u32,
    /// What the bytes of a page depend on beside tokens and shape: model, revision, dtype, quantisation. Opaque,
    /// 1 to [`CONTENT_BYTES_MAX`] bytes. Memory with other content shares no page with this one. An absent field reads as
    /// an empty one, so that the check of the registration can name it with its remedy.
    #[serde(default, with = "serde_bytes")]
    pub content: Vec<u8>,
    /// Which rank this memory belongs to.
    pub rank: Rank,
    /// Ranks of the engine.
    pub tp_size: u16,
    /// Which slice of the KV the rank holds; ranks whose KV is equal name the same one.
    pub shard: u16,
    /// Tokens of one page.
    pub engine_page_tokens: u32,
    /// Pages of the engine's memory: every tensor has so many along its page axis.
    pub device_pages: u32,
    /// Layers of the group.
    pub layers: u32,
    /// The pieces of memory.
    pub allocations: Vec<Allocation>,
    /// The tensors, in any order; each (layer, role) at most once.
    pub tensors: Vec<TensorView>,
    /// Proof of the mapping.
    pub nonce: Nonce,
    /// Proofs of the other pieces of the memory (allocations, or chunks where an allocation has them): bytes as the engine
    /// found them shortly before. Those of one piece are alternatives.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub proofs: Vec<Nonce>,
    /// Identifies the GPU, where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_uuid: Option<String>,
    /// Where the device writes how far it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeline: Option<Timeline>,
}

/// A word of 8 bytes in device memory, little-endian, that only grows: the highest request for whose stores the device has
/// written everything. The engine sets it to 0 before it registers for the first time, and lets the device write it behind
/// the work in question.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timeline {
    /// Index into [`Registration::allocations`].
    pub allocation: u32,
    /// Where the word lies, a multiple of 8.
    pub offset_bytes: u64,
}

const fn one() -> u8 {
    1
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde gives a reference")]
const fn is_one(groups: &u8) -> bool {
    *groups == 1
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde gives a reference")]
fn is_full(attention: &Attention) -> bool {
    *attention == Attention::Full
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde gives a reference")]
const fn is_zero(tokens: &u32) -> bool {
    *tokens == 0
}
