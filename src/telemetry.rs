//! Logs: one line per event on standard error, so that standard output remains free for results.

mod lossy;

use std::io::IsTerminal;
use std::sync::OnceLock;

use tracing_subscriber::EnvFilter;

use crate::error::CommandError;

/// Replaces the filter of the running log, and returns the text of the one before.
type Change = Box<dyn Fn(EnvFilter) -> Result<String, String> + Send + Sync>;

static CHANGE: OnceLock<Change> = OnceLock::new();

const LEVELS: [&str; 6] = ["trace", "debug", "info", "warn", "error", "off"];

/// The filter of a text. A word that is no level would name a part of the program, and turn the log of all others off:
/// most of them are misspelt levels.
fn parse(filter: &str) -> Result<EnvFilter, String> {
    let refuse = |why: String| {
        format!(
            "log filter is '{filter}': {why}; write a filter such as info, or info,kvferry=debug"
        )
    };
    let is_level = |word: &str| LEVELS.iter().any(|level| level.eq_ignore_ascii_case(word));
    let mut words = filter.split(',').map(str::trim);
    if let Some(word) = words.find(|word| !word.contains(['=', '[']) && !is_level(word)) {
        let levels = LEVELS.join(", ");
        return Err(refuse(format!("'{word}' is none of {levels}")));
    }
    EnvFilter::try_new(filter).map_err(|error| refuse(error.to_string()))
}

/// Starts logging with a filter such as `info,kvferry=debug`.
pub fn start(filter: &str) -> Result<(), CommandError> {
    let filter = parse(filter).map_err(CommandError::Config)?;
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(|| lossy::Line)
        .log_internal_errors(false)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelt_level_is_refused_and_does_not_turn_the_log_off() {
        for good in [
            "info",
            "WARN",
            "off",
            "info,kvferry=debug",
            "kvferry=trace",
            "[span]=debug",
        ] {
            assert!(parse(good).is_ok(), "{good}");
        }
        for bad in ["inof", "", "info,kvferry", "info,,warn", "kvferry=loud"] {
            let error = parse(bad).expect_err(bad);
            assert!(
                error.starts_with(&format!("log filter is '{bad}': ")),
                "{error}"
            );
        }
        let error = parse("inof").expect_err("no level");
        assert!(error.contains("'inof' is none of trace, debug"), "{error}");
    }
}
