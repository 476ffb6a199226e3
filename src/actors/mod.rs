//! The live system: thin actors around the core. They own threads, timers, sockets and processes, and decide nothing.
//!
//! * `leader`: runs a [`crate::shell::LeaderShell`];
//! * `worker`: a leader and engine ranks on one side, [`crate::core::Worker`] on the other;
//! * `transfer`: runs copies on threads of its own and reports their ends;
//! * `gpu`: the GPU of a worker's engine, and memory of either kind;
//! * `processes`: handles to the processes of peers;
//! * `pool`: makes a worker's depot ready, with progress;
//! * `teller`: tells the leader how far a worker is that cannot serve yet;
//! * `supervision`: starts the others, ends the process when one of them fails;
//! * `mailbox`: mailboxes are unbounded, so what is sent to them is counted by credits.

pub(crate) mod gpu;
mod leader;
mod mailbox;
mod pool;
mod processes;
mod supervision;
mod teller;
pub(crate) mod transfer;
mod worker;

pub use leader::{EndWorker, LeaderArguments, LeaderHandle, RaiseEpoch};
pub use pool::PoolSettings;
pub use supervision::{ProcessHandle, run_leader, run_worker};
pub use worker::WorkerArguments;
