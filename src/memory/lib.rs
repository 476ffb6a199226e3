//! Memory and copies: registered engine memory (G1), depots (G2), page layouts and the CPU copy engine.
//!
//! [`validate`] turns an engine's description of its memory into a [`PageLayout`]; [`EngineMemory`] holds the mapped
//! allocations, [`Depot`] the host memory of one shard, and [`CopyEngine`] copies pages between the two. All functions
//! block: an async caller runs them on a thread of its own.
//!
//! Other processes write to both kinds of memory too. No reference into them is ever formed; bytes are read and written
//! through bounds-checked raw copies, and bytes that were read are checked only after they were copied out.

mod available;
mod buffer;
mod cgroup;
mod copy;
mod depot;
mod drop_signal;
mod engine_memory;
mod inventory;
mod layout;
mod lock;
mod node;
mod open;
mod prefault;
mod registration;

pub use available::{MemoryAvailable, MemoryLimit};
pub use buffer::{BufferError, SharedBuffer};
pub use cgroup::{Cgroup, PidsLimit};
pub use copy::{
    COPY_PART_BYTES, CUT_BYTES, CancelFlag, CopyEngine, CopyError, CopyJob, CopyMode, CopyPlan,
    CopyRange, CopyReport, CopyRequest, NON_TEMPORAL_MIN_BYTES, POOL_MIN_BYTES, STORE_YIELD_BYTES,
    Side, WaitingLoad, WaitingLoads,
};
pub use depot::{
    BatchMark, DEPOT_FORMAT_VERSION, DEPOT_HEADER_BYTES, Depot, DepotError, ENTRY_BYTES,
    page_stride_bytes,
};
pub use drop_signal::{DropSignal, DropWaiter};
pub use engine_memory::{EngineMemory, EngineMemoryError, NonceMismatch};
pub use layout::{FragmentLayout, MemoryLayout, PageLayout};
pub use lock::{LockError, LockLimit};
pub use node::{NoSuchNode, NumaNode};
pub use open::{OpenError, RegisteredMemory};
pub use prefault::{Prefault, PrefaultError, PrefaultReport};
pub use registration::{
    ALLOCATIONS_MAX, AXES_MAX, FRAGMENTS_MAX, NONCE_BYTES_MAX, NONCE_BYTES_MIN, PAGE_BYTES_MAX,
    ProofError, RegistrationError, TENSORS_MAX, TIMELINE_BYTES, pieces_without_proof, validate,
    verify_proofs,
};
