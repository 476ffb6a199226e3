//! The keys of the configuration, their types and defaults.

use figment::value::Value;

use kvferry_protocol::VERSION;

/// Largest size of a configuration file, in bytes.
pub const CONFIG_BYTES_MAX: u64 = 1 << 20;

/// One key of the configuration.
pub(super) struct Key {
    pub(super) name: &'static str,
    pub(super) is: Is,
    pub(super) default: Fallback,
}

/// The type as which a variable's text is read.
#[derive(Clone, Copy)]
pub(super) enum Is {
    Number,
    Switch,
    Text,
}

impl Is {
    /// Parses a variable's text. Text that cannot be parsed stays text, and is refused by the check of the setting.
    pub(super) fn read(self, text: &str) -> Value {
        let value = match self {
            Self::Number => text.trim().parse::<i64>().ok().map(Value::from),
            Self::Switch => text.trim().parse::<bool>().ok().map(Value::from),
            Self::Text => None,
        };
        value.unwrap_or_else(|| text.into())
    }
}

/// The default of a setting.
pub(super) enum Fallback {
    Switch(bool),
    SocketDir,
    Number(u64),
    Text(&'static str),
}

const fn number(name: &'static str, default: u64) -> Key {
    Key {
        name,
        is: Is::Number,
        default: Fallback::Number(default),
    }
}

const fn text(name: &'static str, default: Fallback) -> Key {
    Key {
        name,
        is: Is::Text,
        default,
    }
}

const fn switch(name: &'static str, default: bool) -> Key {
    Key {
        name,
        is: Is::Switch,
        default: Fallback::Switch(default),
    }
}

/// All keys, in the order of [`super::Config`].
pub(super) const KEYS: [Key; 29] = [
    text("socket_dir", Fallback::SocketDir),
    number("ranks", 1),
    number("kv_shards", 0),
    number("replicas", 1),
    number("ratio", 32),
    text("g2", Fallback::Text("8GiB")),
    switch("g2_lock", false),
    text("g2_numa", Fallback::Text("")),
    text("g2_policy", Fallback::Text("pieces=2")),
    text("g3", Fallback::Text("0")),
    text("g3_dir", Fallback::Text("")),
    text("g3_policy", Fallback::Text("pieces=0")),
    number("g3_depth", 16),
    text("g3_io", Fallback::Text("auto")),
    text("g3_scrub_bytes_per_s", Fallback::Text("8MiB")),
    switch("g3_discard", false),
    number("prefill_tokens_per_s", 0),
    number("copy_threads", 4),
    text("store_bytes_per_s", Fallback::Text("0")),
    text("gpu_copy", Fallback::Text("batch")),
    number("heartbeat_ms", 1_000),
    number("wire_max", VERSION as u64),
    text("users", Fallback::Text("")),
    text("namespaces", Fallback::Text("")),
    text("monitor", Fallback::Text("off")),
    switch("page_index", false),
    switch("record_decisions", false),
    number("flush_limit_s", 10),
    text("log", Fallback::Text("info")),
];
