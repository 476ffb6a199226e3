//! Errors of the configuration. Each names the key, the value, the source and the expected value.

use std::path::PathBuf;

use super::SHOWN_CHARS_MAX;
use super::keys::{CONFIG_BYTES_MAX, KEYS};

/// Why a configuration was rejected.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file is missing or cannot be read.
    #[error("{}: cannot read this configuration: {cause}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The system's error.
        cause: std::io::Error,
    },
    /// The file is larger than [`CONFIG_BYTES_MAX`].
    #[error("{}: a configuration has at most {CONFIG_BYTES_MAX} bytes", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
    },
    /// The file is not TOML.
    #[error("{}: not TOML: {reason}", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// The parser's message, with the position.
        reason: String,
    },
    /// A key, or an environment variable, that is not known.
    #[error("{origin}: unknown key '{key}'{}", advice(suggestion.as_deref()))]
    UnknownKey {
        /// The file, or `environment`.
        origin: String,
        /// The key as it was written.
        key: String,
        /// The most similar known key, in the same spelling; `None` if none is similar.
        suggestion: Option<String>,
    },
    /// A value of the wrong type or out of bounds.
    #[error("{origin}: '{key}' is {value}: expected {expected}")]
    Value {
        /// The key.
        key: &'static str,
        /// The value as JSON, truncated after 120 characters.
        value: String,
        /// The file, variable or flag that gave it.
        origin: String,
        /// The expected value.
        expected: String,
    },
    /// A variable or a flag that is not UTF-8.
    #[error("{origin}: the value is not UTF-8")]
    NotUtf8 {
        /// The variable or flag.
        origin: String,
    },
}

fn advice(suggestion: Option<&str>) -> String {
    match suggestion {
        Some(suggestion) => format!(": did you mean '{suggestion}'?"),
        None => {
            let keys: Vec<&str> = KEYS.iter().map(|key| key.name).collect();
            format!(": the keys are {}", keys.join(", "))
        }
    }
}

/// Formats a value for an error: as JSON, truncated after [`SHOWN_CHARS_MAX`] characters.
pub(super) fn show(value: &figment::value::Value) -> String {
    let mut text = serde_json::to_string(value).unwrap_or_else(|_| "unreadable".to_owned());
    if let Some((cut, _)) = text.char_indices().nth(SHOWN_CHARS_MAX) {
        text.truncate(cut);
        text.push_str("...");
        if value.as_str().is_some() {
            text.push('"');
        }
    }
    text
}
