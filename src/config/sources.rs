//! Sources of settings. Each setting is a provider of its own, so that errors can name its origin.

use std::ffi::OsString;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use figment::value::{Dict, Map, Value};
use figment::{Metadata, Profile, Provider};

use super::keys::{CONFIG_BYTES_MAX, Fallback, Is, KEYS};
use super::service_links::is_service_link;
use super::{ConfigError, Flags, SHOWN_CHARS_MAX};

/// Prefix of kvferry's environment variables: `ratio` is `KVFERRY_RATIO`.
pub const ENVIRONMENT_PREFIX: &str = "KVFERRY_";
/// Variables with the prefix that are not settings: `KVFERRY_SHARED` names the folder of shared test files, and
/// `KVFERRY_SERVER_UID` tells clients of other users as which user kvferry runs.
pub const OTHER_VARIABLES: &[&str] = &["KVFERRY_SERVER_UID", "KVFERRY_SHARED"];
/// Prefix of the settings of the connector for TensorRT-LLM, which refuses unknown names itself: an engine and the program
/// may have one environment.
const CONNECTOR_PREFIX: &str = "KVFERRY_TRTLLM_";

/// Least similarity of two names for a suggestion: Jaro-Winkler, where 1 is equal.
const ALIKE_MIN: f64 = 0.8;

/// Keys whose text is a list with commas. A file may give a list of TOML.
const LISTS: [&str; 3] = ["g2_numa", "g3_dir", "users"];

/// One value of one key, and its origin.
pub(super) struct Setting {
    origin: String,
    key: String,
    value: Value,
}

impl Provider for Setting {
    fn metadata(&self) -> Metadata {
        Metadata::named(self.origin.clone())
    }

    fn data(&self) -> Result<Map<Profile, Dict>, figment::Error> {
        let dict = Dict::from([(self.key.clone(), self.value.clone())]);
        Ok(Map::from([(Profile::Default, dict)]))
    }
}

/// The defaults. `from` says where the default of the socket directory comes from.
pub(super) fn defaults(socket_dir: &Path, from: &str) -> Vec<Setting> {
    KEYS.iter()
        .map(|key| Setting {
            origin: match key.default {
                Fallback::SocketDir => from.to_owned(),
                _ => "default".to_owned(),
            },
            key: key.name.to_owned(),
            value: match key.default {
                Fallback::SocketDir => Value::from(socket_dir.to_string_lossy().as_ref()),
                Fallback::Switch(on) => Value::from(on),
                Fallback::Number(number) => Value::from(number),
                Fallback::Text(text) => Value::from(text),
            },
        })
        .collect()
}

/// Reads the settings of a TOML file. Every key must be known.
pub(super) fn file(path: &Path) -> Result<Vec<Setting>, ConfigError> {
    let text = read(path)?;
    let origin = path.display().to_string();
    let refuse = |reason| ConfigError::Syntax {
        path: path.to_owned(),
        reason,
    };
    let table = toml::from_str::<toml::Table>(&text);
    let table = table.map_err(|error| refuse(syntax_error(&text, &error)))?;
    let settings = table.into_iter().map(|(key, value)| {
        if KEYS.iter().any(|known| known.name == key) {
            let origin = origin.clone();
            let value = Value::serialize(value).map_err(|error| refuse(error.to_string()))?;
            let value = match LISTS.contains(&key.as_str()) {
                true => joined(&value).unwrap_or(value),
                false => value,
            };
            return Ok(Setting { origin, key, value });
        }
        Err(ConfigError::UnknownKey {
            origin: origin.clone(),
            suggestion: suggest(&key).map(str::to_owned),
            key,
        })
    });
    settings.collect()
}

fn read(path: &Path) -> Result<String, ConfigError> {
    let failed = |cause| ConfigError::File {
        path: path.to_owned(),
        cause,
    };
    let mut text = String::new();
    let mut file = File::open(path).map_err(failed)?.take(CONFIG_BYTES_MAX + 1);
    file.read_to_string(&mut text).map_err(failed)?;
    if text.len() as u64 > CONFIG_BYTES_MAX {
        return Err(ConfigError::TooLarge {
            path: path.to_owned(),
        });
    }
    Ok(text)
}

/// The text of a list of TOML, as a variable gives it; `None` for another value, and for items with commas.
fn joined(value: &Value) -> Option<Value> {
    let items = value.as_array()?.iter();
    let items = items.map(|item| match item {
        Value::String(_, text) if !text.contains(',') => Some(text.clone()),
        Value::Num(_, number) => Some(number.to_i128()?.to_string()),
        _ => None,
    });
    let items: Option<Vec<String>> = items.collect();
    Some(items?.join(",").into())
}

/// Says where a text is not TOML, and how a value without quotes is written.
fn syntax_error(text: &str, error: &toml::de::Error) -> String {
    let cause = one_line(error.message());
    let before = error.span().and_then(|span| text.get(..span.start));
    let number = before.map_or(0, |before| before.matches('\n').count());
    let Some(line) = text.lines().nth(number).map(str::trim) else {
        return cause;
    };
    let problem = format!("line {}, `{}`: {cause}", number + 1, shortened(line));
    let unquoted = line.split_once('=').and_then(|(key, value)| {
        let (key, value) = (key.trim(), value.split('#').next()?.trim());
        let known = KEYS.iter().find(|known| known.name == key)?;
        let quotable = matches!(known.is, Is::Text)
            && !value.is_empty()
            && !value.contains(['"', '\'', '[', '{']);
        quotable.then(|| format!(": write {key} = \"{}\"", shortened(value)))
    });
    problem + &unquoted.unwrap_or_default()
}

/// A text without what follows its first [`SHOWN_CHARS_MAX`] characters.
fn shortened(text: &str) -> String {
    match text.char_indices().nth(SHOWN_CHARS_MAX) {
        Some((cut, _)) => format!("{}...", &text[..cut]),
        None => text.to_owned(),
    }
}

/// Joins the first line of the parser's message, which has the position, and the last, which has the cause.
fn one_line(message: &str) -> String {
    let mut lines = message.lines().filter(|line| !line.trim().is_empty());
    let first = lines.next().unwrap_or_default().to_owned();
    match lines.next_back() {
        Some(last) => format!("{first}: {last}"),
        None => first,
    }
}

/// Reads the settings among environment variables. Every variable with the prefix must be known, or be one of a Kubernetes
/// Service.
pub(super) fn environment(variables: &[(OsString, OsString)]) -> Result<Vec<Setting>, ConfigError> {
    let mut settings = Vec::new();
    for (name, value) in variables {
        let Some(name) = name.to_str() else { continue };
        let Some(rest) = name.strip_prefix(ENVIRONMENT_PREFIX) else {
            continue;
        };
        if OTHER_VARIABLES.contains(&name) || name.starts_with(CONNECTOR_PREFIX) {
            continue;
        }
        let known = KEYS.iter().find(|key| key.name.to_uppercase() == rest);
        if known.is_none()
            && value
                .to_str()
                .is_some_and(|value| is_service_link(rest, value))
        {
            continue;
        }
        let key = known.ok_or_else(|| ConfigError::UnknownKey {
            origin: "environment".to_owned(),
            key: name.to_owned(),
            suggestion: suggest(&rest.to_lowercase())
                .map(|key| format!("{ENVIRONMENT_PREFIX}{}", key.to_uppercase())),
        })?;
        let origin = format!("environment variable {name}");
        let Some(value) = value.to_str() else {
            return Err(ConfigError::NotUtf8 { origin });
        };
        settings.push(Setting {
            origin,
            key: key.name.to_owned(),
            value: key.is.read(value),
        });
    }
    Ok(settings)
}

/// Returns the settings that flags give.
pub(super) fn flags(flags: &Flags) -> Result<Vec<Setting>, ConfigError> {
    // Only a path can fail to serialize, because it may not be UTF-8.
    let value = Value::serialize(flags).map_err(|_| ConfigError::NotUtf8 {
        origin: "--socket-dir".to_owned(),
    })?;
    let given = value.into_dict().unwrap_or_default();
    let settings = given.into_iter().map(|(key, value)| Setting {
        origin: format!("--{}", key.replace('_', "-")),
        key,
        value,
    });
    Ok(settings.collect())
}

/// Returns the known key that is most similar to `key`, if any is similar enough.
fn suggest(key: &str) -> Option<&'static str> {
    let key = key.to_lowercase().replace('-', "_");
    KEYS.iter()
        .map(|known| (strsim::jaro_winkler(known.name, &key), known.name))
        .filter(|(alike, _)| *alike >= ALIKE_MIN)
        .max_by(|(a, _), (b, _)| a.total_cmp(b))
        .map(|(_, name)| name)
}
