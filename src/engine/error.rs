//! Errors of the reference engine.

use std::io;
use std::time::Duration;

use kvferry_client::RankFailure;
use kvferry_cuda::{CudaError, NoDriver, SmallCopyError};
use kvferry_memory::BufferError;
use kvferry_transport::FdError;

/// Why the reference engine, or one of its ranks, cannot continue.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// A rank reported that it cannot continue.
    #[error("{0}")]
    RankFailed(String),
    /// A rank's process ended, or closed its pipes, while the engine needed it.
    #[error("engine rank {0} ended early")]
    RankEnded(usize),
    /// A rank's process did not end with success.
    #[error("engine rank {rank} ended with {status}")]
    RankStatus {
        /// The rank.
        rank: usize,
        /// The status of its process.
        status: std::process::ExitStatus,
    },
    /// A rank did not register, take an order, or end in time.
    #[error("an engine rank did not {what} within {limit:?}")]
    TooLate {
        /// The step that was awaited.
        what: &'static str,
        /// The limit.
        limit: Duration,
    },
    /// A pipe between the scheduler and a rank broke, or carried bytes that are no frame.
    #[error("the pipe of an engine rank: {0}")]
    Pipe(#[source] io::Error),
    /// The other side of the pipes follows another protocol.
    #[error("the pipe of an engine rank: {0}")]
    Protocol(&'static str),
    /// The session with the worker ended.
    #[error(transparent)]
    Session(#[from] RankFailure),
    /// The system gave no random bytes.
    #[error("random bytes of the system: {0}")]
    Random(#[source] io::Error),
    /// The rank's host memory.
    #[error(transparent)]
    Host(#[from] BufferError),
    /// The CUDA driver could not be loaded.
    #[error(transparent)]
    NoDriver(#[from] NoDriver),
    /// The CUDA driver refused a call.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// A copy between the rank and its GPU memory failed.
    #[error(transparent)]
    Copy(#[from] SmallCopyError),
    /// The worker did not accept the file descriptors of the memory.
    #[error(transparent)]
    Fds(#[from] FdError),
    /// Ranges are longer than the buffer that they are read into or written from.
    #[error("ranges of more bytes than the buffer has")]
    Ranges,
    /// The fleet has no engine.
    #[error("no engine")]
    NoEngine,
}
