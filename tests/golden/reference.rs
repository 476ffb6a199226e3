//! The pages of `docs/reference`, which are made of the program's own tables.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;

use kvferry::cli::monitor::{LABELS, LEADER_SERIES_MAX, METRICS, WORKER_SERIES_MAX};
use kvferry::config::settings;
use kvferry::error::{CommandError, EXIT_CODES};
use kvferry_core::COUNTERS;
use kvferry_protocol::{ErrorCode, Message, MessageKind};
use kvferry_shell::LOOKUP_NS;
use kvferry_types::LATENCY_BOUNDS_US;
use serde_json::Value;

const NOTE: &str =
    "Made from the program by `KVFERRY_BLESS=1 cargo test --test golden`. Do not edit.";
const WIDTH: usize = 120;

/// Compares a page with its file. Its text begins with a title and ends with a line break.
fn page(name: &str, text: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("docs/reference")
        .join(name);
    crate::compare(&path, text);
}

fn page_begin(title: &str, about: &str) -> String {
    format!("# {title}\n\n{}\n\n{NOTE}\n", wrapped(about))
}

/// Breaks a paragraph into lines.
fn wrapped(text: &str) -> String {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.len() + 1 + word.len() <= WIDTH => {
                if !line.is_empty() {
                    line.push(' ');
                }
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines.join("\n")
}

fn table(heads: [&str; 3], rows: impl IntoIterator<Item = [String; 3]>) -> String {
    let [a, b, c] = heads;
    let mut text = format!("\n| {a} | {b} | {c} |\n| --- | --- | --- |\n");
    for [a, b, c] in rows {
        let cells = [a, b, c].map(|cell| cell.replace('|', "\\|"));
        writeln!(text, "| {} |", cells.join(" | ")).expect("a string takes text");
    }
    text
}

#[test]
fn the_page_of_settings_is_made_of_flags_and_defaults() {
    let mut text = page_begin(
        "Settings",
        "Settings of `kvferry up`, `leader` and `worker`; `status` and `reset` use `socket_dir` and `log` alone. They come from a \
         file (`--config FILE`, at most 1 MiB of TOML), from variables, which override the file, and from flags, which \
         override both. An unknown key is refused in every source; variables that Kubernetes sets for a Service named \
         `kvferry` are no keys. Sizes are written `8GiB`, `1.5 GB` or `4096`: KiB, MiB, GiB and TiB are powers of 1,024, KB, \
         MB, GB and TB powers of 1,000, all with or without the B. A list is a text with commas; a file may also have a list \
         of TOML.",
    );
    let rows = settings();
    assert!(
        rows.iter()
            .all(|row| !row.meaning.is_empty() && !row.bounds.is_empty()),
        "{rows:?}"
    );
    text += &table(
        ["key", "default", "meaning"],
        rows.iter().map(|row| {
            let default = match row.default.as_str() {
                "" => "none".to_owned(),
                default => format!("`{default}`"),
            };
            let key = format!("[`{}`](#{})", row.key, row.key);
            [key, default, row.meaning.clone()]
        }),
    );
    for row in &rows {
        let about = wrapped(&format!(
            "{}. {} Flag `{}`, variable `{}`.",
            row.meaning.trim_end_matches('.'),
            row.bounds,
            row.flag,
            row.variable
        ));
        write!(text, "\n## `{}`\n\n{about}\n", row.key).expect("a string takes text");
    }
    page("settings.md", &text);
}

#[test]
fn the_page_of_exit_codes_is_made_of_the_programs() {
    let text = || "text".to_owned();
    let errors = [
        CommandError::Found(text()),
        CommandError::Failed(text()),
        CommandError::failed("text"),
        CommandError::NoMemory(text()),
        CommandError::Unstable(text()),
        CommandError::Config(text()),
        CommandError::Data(text()),
    ];
    let codes: BTreeSet<u8> = errors.iter().map(CommandError::exit_code).collect();
    // 0 is no error's, and 2 is the command line's.
    let known: BTreeSet<u8> = EXIT_CODES.iter().map(|(code, _)| *code).collect();
    assert_eq!(&codes | &[0, 2].into(), known);

    let mut text = page_begin(
        "Exit codes",
        "Exit codes of every `kvferry` command. The text on standard error says more.",
    );
    text += "\n| code | meaning |\n| ---: | --- |\n";
    for (code, meaning) in EXIT_CODES {
        writeln!(text, "| {code} | {meaning} |").expect("a string takes text");
    }
    page("exit-codes.md", &text);
}

#[test]
fn the_page_of_error_codes_is_made_of_the_wires() {
    let mut text = page_begin(
        "Error codes",
        "Codes of `error` on the wire, with what the receiver does. *retry*: the same request may succeed later; each \
         `error` says so itself, in its field `retry`. The text of an `error` has the details.",
    );
    text += "\n| code | name | retry | meaning |\n| ---: | --- | --- | --- |\n";
    for code in ErrorCode::ALL {
        let (number, name, meaning) = (code.number(), code.name(), code.meaning());
        let retry = if code.retry() { "yes" } else { "" };
        writeln!(text, "| {number} | `{name}` | {retry} | {meaning} |")
            .expect("a string takes text");
    }
    page("error-codes.md", &text);
}

#[test]
fn the_page_of_messages_is_made_of_the_wires() {
    let mut text = page_begin(
        "Messages",
        "Every kind of message, with who sends it to whom and the fields of its body. *server*: leader and worker; \
         *peer*: either side. Kinds between leader, workers and kvferry's own commands are *internal*, and may change: engines \
         and tools of others neither send nor get them. Types and descriptions of the fields: `schema/messages.json`.",
    );
    text += "\n| number | kind | from | to | | answer | fields |\n| ---: | --- | --- | --- | --- | --- | --- |\n";
    let catalogue = kvferry_protocol::catalogue();
    for kind in catalogue["kinds"].as_array().expect("a list") {
        let word = |field: &str| kind[field].as_str().unwrap_or_default().to_owned();
        let senders = kind["said_by"].as_array().expect("a list").iter();
        let senders: Vec<&str> = senders.filter_map(Value::as_str).collect();
        let fields = kind["body"]["properties"].as_object();
        let fields: Vec<String> = fields
            .into_iter()
            .flat_map(|fields| fields.keys().map(|name| format!("`{name}`")))
            .collect();
        let internal = if word("stability") == "internal" {
            "internal"
        } else {
            ""
        };
        let answer = match word("answer") {
            none if none.is_empty() => none,
            answer => format!("`{answer}`"),
        };
        writeln!(
            text,
            "| {} | `{}` | {} | {} | {internal} | {answer} | {} |",
            kind["number"],
            word("name"),
            senders.join(", "),
            word("said_to"),
            fields.join(", ")
        )
        .expect("a string takes text");
    }
    page("messages.md", &text);
}

/// A row for each property of an object's schema.
fn properties(schema: &Value) -> Vec<[String; 3]> {
    let properties = schema["properties"].as_object().expect("an object");
    let rows = properties.iter().map(|(name, property)| {
        let about = property["description"].as_str().unwrap_or_default();
        assert!(!about.is_empty(), "{name} has no description");
        [
            format!("`{name}`"),
            type_of(property),
            about.replace('\n', " "),
        ]
    });
    rows.collect()
}

fn type_of(property: &Value) -> String {
    match &property["type"] {
        Value::String(name) if name == "array" => "list".to_owned(),
        Value::String(name) => name.clone(),
        Value::Array(names) => {
            let names: Vec<&str> = names.iter().filter_map(Value::as_str).collect();
            names.join(" or ")
        }
        _ => "object".to_owned(),
    }
}

#[test]
fn the_page_of_the_status_is_made_of_its_schema_and_the_counters() {
    let mut text = page_begin(
        "Status",
        "Fields of `kvferry status --json`, which are those of `status_answer` on the wire. Readers skip fields and \
         counters that they do not know.",
    );
    let schema = serde_json::to_value(Message::schema(MessageKind::StatusAnswer)).expect("JSON");
    text += &table(["field", "type", "meaning"], properties(&schema));
    text += "\n## A rank\n\nEach item of `ranks`.\n";
    text += &table(
        ["field", "type", "meaning"],
        properties(&schema["$defs"]["RankStatus"]),
    );
    text += "\n## A tier\n\nEach item of `tiers`.\n";
    text += &table(
        ["field", "type", "meaning"],
        properties(&schema["$defs"]["TierStatus"]),
    );
    text += "\n## Moves\n\nThe fields of `moves`.\n";
    text += &table(
        ["field", "type", "meaning"],
        properties(&schema["$defs"]["MovesStatus"]),
    );
    text += "\n## Requests\n\nThe fields of `requests`.\n";
    text += &table(
        ["field", "type", "meaning"],
        properties(&schema["$defs"]["RequestsStatus"]),
    );
    text += "\n## Counters\n\nItems of `counters`. They run since the leader's start.\n\n| counter | meaning |\n| --- | --- |\n";
    for counter in COUNTERS {
        writeln!(text, "| `{}` | {} |", counter.name, counter.meaning)
            .expect("a string takes text");
    }
    writeln!(
        text,
        "| `{LOOKUP_NS}` | Nanoseconds that the leader spent in lookups |"
    )
    .expect("a string takes text");
    page("status.md", &text);
}

#[test]
fn the_page_of_metrics_is_made_of_their_list() {
    let mut text = page_begin(
        "Metrics",
        "Metrics of `kvferry monitor`, at `/metrics` of the address that the setting `monitor` names. Counters begin at 0 \
         when their process starts. Those of the leader have no series while it does not answer, and those of a worker \
         while that worker does not.",
    );
    let about = format!(
        "A leader has at most {LEADER_SERIES_MAX} series, and one for each tier of each group of layers; a worker has at most \
         {WORKER_SERIES_MAX}. No label has a token, a hash, a namespace or a payload. Scrapes are answered with numbers \
         that are at most 1 s old."
    );
    write!(text, "\n{}\n", wrapped(&about)).expect("a string takes text");
    text += "\n| metric | type | unit | labels | meaning |\n| --- | --- | --- | --- | --- |\n";
    for metric in METRICS {
        let labels: Vec<String> = metric
            .labels
            .iter()
            .map(|label| format!("`{label}`"))
            .collect();
        writeln!(
            text,
            "| `{}` | {} | {} | {} | {} |",
            metric.name,
            metric.kind.name(),
            metric.unit,
            labels.join(", "),
            metric.meaning
        )
        .expect("a string takes text");
    }
    let bounds = LATENCY_BOUNDS_US.map(|us| (us as f64 / 1e6).to_string());
    let about = format!(
        "Upper bounds of the buckets of histograms, in seconds: {}.",
        bounds.join(", ")
    );
    write!(text, "\n{}\n\n## Labels\n", wrapped(&about)).expect("a string takes text");
    text += "\n| label | values |\n| --- | --- |\n";
    for label in LABELS {
        writeln!(text, "| `{}` | {} |", label.name, label.values).expect("a string takes text");
    }
    page("metrics.md", &text);
}
