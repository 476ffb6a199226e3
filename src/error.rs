//! The error of a command, and its exit code.

use crate::config::ConfigError;

/// Exit code of [`CommandError::NoMemory`].
pub const NO_MEMORY: u8 = 69;
/// Exit code of [`CommandError::Unstable`].
pub const UNSTABLE: u8 = 70;
/// Exit code of [`CommandError::Config`].
pub const MISCONFIGURED: u8 = 78;

/// Every exit code of the program with its meaning: those of [`CommandError::exit_code`], 0, and 2, with which the
/// parser of the command line ends.
pub const EXIT_CODES: &[(u8, &str)] = &[
    (0, "done"),
    (
        1,
        "the command failed, such as because another process uses a directory, or it completed and found something wrong",
    ),
    (2, "the command line cannot be parsed"),
    (65, "a named file cannot be used, such as a trace"),
    (
        NO_MEMORY,
        "the host memory of a worker is not available (g2), or the kernel ends a process for lack of memory",
    ),
    (
        UNSTABLE,
        "a process of `up` ended 8 times in a row, before it had been ready for 10 s",
    ),
    (
        MISCONFIGURED,
        "a setting is out of bounds or names a directory that cannot be used, or settings contradict each other",
    ),
];

/// An error for operators, with the exit code for scripts.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    /// The command completed, and found a problem. Exit code 1.
    #[error("{0}")]
    Found(String),
    /// The command failed. Exit code 1.
    #[error("{0}")]
    Failed(String),
    /// The command failed because of this error. Exit code 1.
    #[error(transparent)]
    Cause(Box<dyn std::error::Error + Send + Sync>),
    /// The configured host memory is not available. Exit code 69, as `EX_UNAVAILABLE`.
    #[error("{0}")]
    NoMemory(String),
    /// A process ends again and again. Exit code 70, as `EX_SOFTWARE`.
    #[error("{0}")]
    Unstable(String),
    /// Values contradict each other or lie out of bounds. Exit code 78, as `EX_CONFIG`.
    #[error("{0}")]
    Config(String),
    /// A named file cannot be used. Exit code 65, as `EX_DATAERR`.
    #[error("{0}")]
    Data(String),
}

impl CommandError {
    /// A failure with this cause.
    pub fn failed(cause: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self::Cause(cause.into())
    }

    /// The exit code of the process, as the variants state it.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Found(_) | Self::Failed(_) | Self::Cause(_) => 1,
            Self::Data(_) => 65,
            Self::NoMemory(_) => NO_MEMORY,
            Self::Unstable(_) => UNSTABLE,
            Self::Config(_) => MISCONFIGURED,
        }
    }
}

impl From<ConfigError> for CommandError {
    fn from(error: ConfigError) -> Self {
        Self::Config(error.to_string())
    }
}
