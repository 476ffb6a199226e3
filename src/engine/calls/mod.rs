//! Recordings of an engine's calls, and their replay: `docs/recording.md`.
//!
//! `file` reads the frames, `frames` their fields. `plan` reads a recording as a whole before anything starts, `play`
//! sends its requests again with the `ranks` of an engine of the same shape, and `compare` compares the answers.

mod compare;
mod file;
mod frames;
mod plan;
mod play;
mod ranks;
#[cfg(test)]
mod tests;

pub use compare::{CallsReport, Conditions, Reason, Verdict, compare};
pub use file::{CallsError, EndReason, Ending, FORMAT};
pub use frames::{Failed, Header, HeaderGroup, LeaderFrame, Outcome, RequestKind};
pub use plan::{Known, Plan, PlannedEnd};
pub use play::{PlayError, PlaySettings, Player};
pub use ranks::{PAGE_BYTES, UnknownLayers, rank_bytes};
