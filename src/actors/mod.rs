//! The live system: thin actors around the core. Each decodes what it hears, steps a state machine, and carries out the
//! effects. They decide nothing.
//!
//! * `leader`: engines and workers on one side, [`crate::core::Leader`] on the other;
//! * `worker`: a leader and engine ranks on one side, [`crate::core::Worker`] on the other;
//! * `transfer`: runs copies on threads of its own and reports their ends;
//! * `gpu`: the GPU of a worker's engine, and memory of either kind;
//! * `holder`: who has a place, and whether another process may have it;
//! * `pool`: makes a worker's depot ready, with progress;
//! * `teller`: tells the leader how far a worker is that cannot serve yet;
//! * `supervision`: starts the others, ends the process when one of them fails;
//! * `mailbox`: mailboxes are unbounded, so what is sent to them is counted by credits.

mod clock;
pub(crate) mod gpu;
mod holder;
mod leader;
mod mailbox;
mod pool;
mod supervision;
mod teller;
pub(crate) mod transfer;
mod worker;

pub use clock::Clock;
pub use leader::{EndWorker, LeaderArguments, LeaderHandle, RaiseEpoch};
pub use pool::PoolSettings;
pub use supervision::{ProcessHandle, run_leader, run_worker};
pub use worker::WorkerArguments;
