//! Logs: one line per event on standard error, so that standard output remains free for results.

use std::io::IsTerminal;
use std::sync::OnceLock;

use tracing_subscriber::EnvFilter;

use crate::error::CommandError;

/// Replaces the filter of the running log, and returns the text of the one before.
type Change = Box<dyn Fn(EnvFilter) -> Result<String, String> + Send + Sync>;

static CHANGE: OnceLock<Change> = OnceLock::new();

fn parse(filter: &str) -> Result<EnvFilter, String> {
    EnvFilter::try_new(filter).map_err(|error| {
        format!("log is '{filter}': {error}; write a filter such as info,kvferry=debug")
    })
}

/// Starts logging with a filter such as `info,kvferry=debug`.
pub fn start(filter: &str) -> Result<(), CommandError> {
    let filter = parse(filter).map_err(CommandError::Config)?;
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false)
        .compact()
        .with_filter_reloading();
    let handle = log.reload_handle();
    log.try_init().map_err(CommandError::failed)?;
    CHANGE.get_or_init(|| {
        Box::new(move |filter| {
            let before = handle.with_current(ToString::to_string);
            let changed = before.and_then(|before| handle.reload(filter).map(|()| before));
            changed.map_err(|error| error.to_string())
        })
    });
    Ok(())
}

/// Changes the filter of the running log. Returns the one before.
pub fn change(filter: &str) -> Result<String, String> {
    let new = parse(filter)?;
    let change = CHANGE.get().ok_or("the log has not started")?;
    let before = change(new)?;
    tracing::info!(
        before,
        now = filter,
        "an operator has changed the filter of the log"
    );
    Ok(before)
}
