//! Why a configuration is refused. Each error names the key, the value, the source and what is expected.

use std::path::PathBuf;

use super::sources::{CONFIG_BYTES_MAX, KEYS};

const SHOWN_CHARS_MAX: usize = 120;

/// Why there is no configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file is missing or cannot be read.
    #[error("{}: cannot read this configuration: {cause}", path.display())]
    File {
        /// Which file.
        path: PathBuf,
        /// What the system said.
        cause: std::io::Error,
    },
    /// The file is larger than [`CONFIG_BYTES_MAX`].
    #[error("{}: a configuration has at most {CONFIG_BYTES_MAX} bytes", path.display())]
    TooLarge {
        /// Which file.
        path: PathBuf,
    },
    /// The file is no TOML.
    #[error("{}: not TOML: {reason}", path.display())]
    Syntax {
        /// Which file.
        path: PathBuf,
        /// What the parser said, and where.
        reason: String,
    },
    /// A key, or an environment variable, that means nothing.
    #[error("{origin}: unknown key '{key}'{}", advice(suggestion.as_deref()))]
    UnknownKey {
        /// The file, or `environment`.
        origin: String,
        /// The key as it was written.
        key: String,
        /// What was probably meant, in the same writing.
        suggestion: Option<String>,
    },
    /// A value of the wrong type or out of bounds.
    #[error("{origin}: '{key}' is {value}: expected {expected}")]
    Value {
        /// Which key.
        key: &'static str,
        /// The value, as JSON, cut when it is long.
        value: String,
        /// The file, variable or flag that gave it.
        origin: String,
        /// What is expected instead.
        expected: String,
    },
    /// A variable or a flag that is not UTF-8.
    #[error("{origin}: the value is not UTF-8")]
    NotUtf8 {
        /// Which variable or flag.
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

/// A value for a message: JSON, cut when it is long.
pub(super) fn show(value: &figment::value::Value) -> String {
    let mut text = serde_json::to_string(value).unwrap_or_else(|_| "unreadable".to_owned());
    if let Some((cut, _)) = text.char_indices().nth(SHOWN_CHARS_MAX) {
        text.truncate(cut);
        text.push_str("...");
    }
    text
}
