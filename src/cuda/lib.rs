//! GPUs: the driver, and the thread that copies between device memory and depots.
//!
//! * [`driver`](Driver): the only calls into CUDA, with memory and streams that safe code cannot misuse;
//! * [`DeviceMemories`]: an engine's memory, opened in this process;
//! * [`PinnedDepot`]: a depot that is pinned for a GPU;
//! * [`Copier`]: the stream actor, one thread for each GPU.
//!
//! The driver is loaded at run time. Without one, every operation returns an error that explains it.

mod copier;
mod device_memories;
mod driver;
mod engine_memory;
mod error;
mod pinned;
mod plugged;
mod staged_io;
#[cfg(test)]
mod tests;
mod timeline;

pub use copier::{
    CALLS_A_TURN, Copier, CopierError, CopierReport, CopierSettings, DeviceCopy, QUEUE_PLACES,
    SLICES_IN_FLIGHT_MAX, threads_in_driver,
};
pub use device_memories::DeviceMemories;
pub use driver::{
    BATCH_COPIES_MAX, Context, Device, DeviceMemory, DeviceUuid, Driver, IPC_HANDLE_BYTES,
    Physical, SharedChunk, Sharing, end_process,
};
pub use engine_memory::{DeviceOpenError, RegisteredDevice, device_of};
pub use error::{CudaError, NoDriver};
pub use pinned::{PIN_CHUNK_BYTES, PinError, PinnedDepot};
pub use plugged::bus_id;
pub use staged_io::{DeviceIo, SmallCopyError};
pub use timeline::{Announced, WaitOrder};
