//! The error of a replay in virtual time.

use kvferry_core::Refusal;
use thiserror::Error;

use crate::links::LinksError;

/// A replay in virtual time that cannot start or cannot complete.
#[derive(Debug, Error)]
pub enum ReplayError {
    /// The leader does not admit the simulated engine: its sizes contradict each other.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The links between device and host cannot be simulated, for example at a rate of zero.
    #[error(transparent)]
    Links(#[from] LinksError),
    /// The prompt needs more pages than the engine has.
    #[error("the prompt does not fit into the engine's memory")]
    PromptTooLarge,
    /// This many prompts were never computed, because the first of them needs more pages than the engine has.
    #[error("{0} prompts never run: the next one does not fit into the engine's memory")]
    PromptsLeft(usize),
    /// The caller ended the replay.
    #[error("the replay was ended")]
    Ended,
}
