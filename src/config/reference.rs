//! The settings as data, for `docs/reference/settings.md`.

use clap::{Args, Command};

use super::keys::{Fallback, KEYS};
use super::sources::ENVIRONMENT_PREFIX;
use super::{Flags, SOCKET_DIR_DEFAULT};

/// A setting as its users see it.
#[derive(Debug, Clone)]
pub struct SettingReference {
    /// Its key in a file.
    pub key: &'static str,
    /// Its flag.
    pub flag: String,
    /// Its environment variable.
    pub variable: String,
    /// Its default, as a file would give it.
    pub default: String,
    /// Its meaning, in one line.
    pub meaning: String,
    /// Its bounds and remarks, in one line.
    pub bounds: String,
}

/// Every setting, in the order of [`super::Config`].
pub fn settings() -> Vec<SettingReference> {
    let command = Flags::augment_args(Command::new(""));
    let about = |name: &str| {
        let flag = command.get_arguments().find(|flag| flag.get_id() == name);
        let texts = flag.map(|flag| {
            let short = flag.get_help().map(ToString::to_string);
            let long = flag.get_long_help().map(ToString::to_string);
            (short.unwrap_or_default(), long.unwrap_or_default())
        });
        texts.unwrap_or_default()
    };
    let settings = KEYS.iter().map(|key| {
        let (meaning, long) = about(key.name);
        let bounds = long.strip_prefix(&meaning).unwrap_or(&long);
        SettingReference {
            key: key.name,
            flag: format!("--{}", key.name.replace('_', "-")),
            variable: format!("{ENVIRONMENT_PREFIX}{}", key.name.to_uppercase()),
            default: match key.default {
                Fallback::Switch(on) => on.to_string(),
                Fallback::SocketDir => SOCKET_DIR_DEFAULT.to_owned(),
                Fallback::Number(number) => number.to_string(),
                Fallback::Text(text) => text.to_owned(),
            },
            bounds: bounds
                .trim_start_matches(['.', ' ', '\n'])
                .replace('\n', " "),
            meaning,
        }
    });
    settings.collect()
}
