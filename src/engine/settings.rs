//! Settings of a rank of the reference engine.

use std::path::PathBuf;
use std::time::Duration;

use clap::ValueEnum;

use kvferry_types::{EngineId, Rank, Replica, Shard};
use kvferry_workload::models::ModelGroup;

/// Where the reference engine keeps its KV.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum EngineDevice {
    /// In host memory, which its worker maps.
    #[default]
    Cpu,
    /// On a GPU for each rank, in turn; shared by CUDA IPC handles.
    Cuda,
    /// The same in chunks, as PyTorch's expandable segments are, shared by file descriptors.
    CudaFd,
    /// The same, shared by fabric handles.
    CudaFabric,
}

/// Where the fragments of a page lie.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum EngineLayout {
    /// One tensor for each layer and role: `[layer][role][page]`, as engines that allocate by layer do. Groups lie one
    /// after another.
    #[default]
    LayerSeparate,
    /// All of a page together: `[page][layer][role]`. The pages of all groups lie in the same bytes, at a distance of
    /// the largest one.
    Contiguous,
}

/// Settings of one rank.
#[derive(Debug, Clone)]
pub struct RankSettings {
    /// Directory of the worker's sockets.
    pub worker_dir: PathBuf,
    /// The engine that the rank belongs to.
    pub engine: EngineId,
    /// The instance of the engine beside the leader.
    pub replica: Replica,
    /// The rank's number within the engine.
    pub rank: Rank,
    /// Number of ranks of the engine.
    pub ranks: u16,
    /// Tokens of the unit of the hashes: of a page, for a model with one group.
    pub hash_tokens: u32,
    /// Tokens between two ends of hits.
    pub hit_tokens: u32,
    /// Pages of the rank's memory.
    pub device_pages: u32,
    /// Identifies the KV beyond its shape: `registration.content`.
    pub content: Vec<u8>,
    /// The groups of layers: what they read, and the layers, roles and sizes of a page.
    pub groups: Vec<ModelGroup>,
    /// The slice of the KV that the rank holds.
    pub shard: Shard,
    /// The kind of memory.
    pub device: EngineDevice,
    /// Placement of the pages in memory.
    pub layout: EngineLayout,
    /// Time limit of the first registration, the worker's start included.
    pub start_limit: Duration,
}
