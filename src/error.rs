//! How a command ends when it does not succeed.

use crate::config::ConfigError;

/// Exit code of [`CommandError::NoMemory`].
pub const NO_MEMORY: u8 = 69;

/// An error for people, with the exit code that scripts see.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    /// What was asked for was done, and found something wrong. Exit code 1.
    #[error("{0}")]
    Found(String),
    /// It could not be done. Exit code 1.
    #[error("{0}")]
    Failed(String),
    /// The host memory that is configured cannot be had. Exit code 69, as `EX_UNAVAILABLE`.
    #[error("{0}")]
    NoMemory(String),
    /// Values contradict each other or lie out of bounds. Exit code 78, as `EX_CONFIG`.
    #[error("{0}")]
    Config(String),
    /// A file that was named cannot be used. Exit code 65, as `EX_DATAERR`.
    #[error("{0}")]
    Data(String),
}

impl CommandError {
    /// A failure, from anything that says why.
    pub fn failed(why: impl ToString) -> Self {
        Self::Failed(why.to_string())
    }

    /// See the variants.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Found(_) | Self::Failed(_) => 1,
            Self::Data(_) => 65,
            Self::NoMemory(_) => NO_MEMORY,
            Self::Config(_) => 78,
        }
    }
}

impl From<ConfigError> for CommandError {
    fn from(error: ConfigError) -> Self {
        Self::Config(error.to_string())
    }
}
