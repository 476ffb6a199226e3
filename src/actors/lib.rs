//! The live system: thin actors around the core. Actors own threads, timers, sockets and processes, and decide nothing.
//!
//! * `leader`: runs a [`kvferry_shell::LeaderShell`];
//! * `worker`: runs a [`kvferry_shell::WorkerShell`], with the leader and the engine ranks as its peers;
//! * `transfer`: runs copies on threads of its own and reports their ends;
//! * `gpu`: the GPU of a worker's engine, and engine memory on the host or on that GPU;
//! * `probe`: memory of the worker's own, for copies that check that pages are copied;
//! * `processes`: handles to the processes of peers;
//! * `depot`: prefaults a worker's depot, with progress;
//! * `readiness`: reports a worker's progress and problems to the leader;
//! * `supervision`: starts the other actors, and ends the process when one of them fails;
//! * `mailbox`: credits for mailboxes, which have no bound of their own.

#![forbid(unsafe_code)]

mod depot;
mod disk;
mod gpu;
mod leader;
mod mailbox;
mod probe;
mod processes;
mod readiness;
mod supervision;
mod transfer;
mod worker;

pub use depot::DepotSettings;
pub use disk::DiskSettings;
pub use gpu::EngineSide;
pub use leader::{EndWorker, LeaderArguments, LeaderHandle, RaiseEpoch, ReadRestarts};
pub use supervision::{ProcessHandle, run_leader, run_worker};
pub use transfer::{CopyBatch, CopyThreads, TransferActor, TransferArguments};
pub use worker::WorkerArguments;

/// Changes the filter of the process's log, and returns the one before. An error is one line for users.
pub type SetLog = fn(&str) -> Result<String, String>;
