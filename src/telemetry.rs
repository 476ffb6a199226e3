//! Logs: one line per event on standard error, so that standard output remains free for results.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

use crate::error::CommandError;

/// Starts logging with a filter such as `info,kvferry=debug`.
pub fn start(filter: &str) -> Result<(), CommandError> {
    let filter = EnvFilter::try_new(filter).map_err(|error| {
        CommandError::Config(format!(
            "log is '{filter}': {error}; write a filter such as info,kvferry=debug"
        ))
    })?;
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false)
        .compact()
        .try_init()
        .map_err(CommandError::failed)
}
