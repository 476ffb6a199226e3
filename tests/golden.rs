//! Golden files: the bytes of every message, the published schemas, and the reference pages. `KVFERRY_BLESS=1` rewrites
//! the files.

#![expect(
    clippy::expect_used,
    clippy::panic,
    reason = "a test says what it expects"
)]

mod golden {
    mod reference;
}

use std::fs;
use std::path::{Path, PathBuf};

use kvferry_protocol::{
    Class, Envelope, HELLO_VERSION, Header, Load, Message, MessageKind, Store, VERSION,
    VERSION_MIN, decode, encode, examples,
};
use kvferry_types::{Epoch, RequestId};
use serde_json::Value;

fn schema(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("schema")
        .join(name)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    let digits = |at: usize| u8::from_str_radix(&text[at..at + 2], 16).expect("hexadecimal");
    (0..text.len()).step_by(2).map(digits).collect()
}

/// Compares a text with a file. `KVFERRY_BLESS` rewrites the file first.
fn compare(path: &Path, text: &str) {
    if std::env::var_os("KVFERRY_BLESS").is_some() {
        fs::create_dir_all(path.parent().expect("a folder")).expect("made");
        fs::write(path, text).expect("written");
    }
    let published = fs::read_to_string(path).unwrap_or_default();
    assert_eq!(
        published,
        text,
        "{} differs: see tests/golden.rs",
        path.display()
    );
}

/// Wraps a message in an envelope. `Hello` and `Welcome` have a version of their own, and answers have no deadline.
fn envelope(version: u16, message: Message) -> Envelope {
    let kind = message.kind();
    let version = match kind {
        MessageKind::Hello | MessageKind::Welcome => HELLO_VERSION,
        _ => version,
    };
    let deadline_ms = match kind.class() {
        Class::Request => 2000,
        Class::Answer => 0,
    };
    Envelope {
        version,
        correlation: RequestId(0x0102_0304),
        deadline_ms,
        epoch: Epoch(7),
        message,
    }
}

#[test]
fn every_message_has_the_bytes_of_its_golden_vector() {
    for version in VERSION_MIN..=VERSION {
        for (name, message) in examples() {
            let said = envelope(version, message);
            let (header, body) = encode(&said).expect("an example can be said");
            let path = schema(&format!("golden/v{version}/{name}.hex"));
            compare(&path, &format!("{}\n{}\n", hex(&header), hex(&body)));
        }
    }
}

#[test]
fn every_golden_vector_is_read_back() {
    for version in VERSION_MIN..=VERSION {
        for (name, message) in examples() {
            let path = schema(&format!("golden/v{version}/{name}.hex"));
            let text = fs::read_to_string(&path).expect("a golden vector");
            let (header, body) = text.trim_end().split_once('\n').expect("two lines");
            let header = Header::from_bytes(&unhex(header)).expect("a header");
            let received = decode(header, &unhex(body)).expect("a message");
            let said = envelope(version, message);
            assert_eq!(
                pages(&received.message),
                pages(&said.message),
                "{name}, version {version}"
            );
            if version == VERSION {
                assert_eq!(received, said, "{name}");
            }
        }
    }
}

/// The pages that a message names, page by page, because version 1 has no runs, and no pairs of several pages.
fn pages(message: &Message) -> Vec<(u64, u32, u32)> {
    match message {
        Message::Load(Load { parts, .. }) | Message::Store(Store { parts, .. }) => parts
            .iter()
            .flat_map(|part| part.pages.list.iter_pages())
            .map(|page| (0, page, 0))
            .collect(),
        Message::Transfer(transfer) => {
            let pairs = transfer.transfers.iter().flat_map(|transfer| {
                transfer.pairs.list.iter().flat_map(|pair| {
                    let both = pair.src.iter_pages().zip(pair.dst.iter_pages());
                    both.map(|(from, to)| (transfer.id, from, to))
                })
            });
            pairs.collect()
        }
        _ => Vec::new(),
    }
}

/// The JSON twin of a vector: the fields of the header, and the body with binary fields as `{"bin": HEX}`.
fn twin(header: &[u8], body: &[u8]) -> String {
    let head = Header::from_bytes(header).expect("a header");
    let body = rmpv::decode::read_value(&mut &body[..]).expect("MessagePack");
    let twin = serde_json::json!({
        "header": {
            "version": head.version,
            "kind": head.kind,
            "id": head.correlation.0,
            "deadline_ms": head.deadline_ms,
            "epoch": head.epoch.0,
        },
        "body": json(&body),
    });
    format!("{}\n", serde_json::to_string_pretty(&twin).expect("JSON"))
}

fn json(value: &rmpv::Value) -> Value {
    use rmpv::Value as Packed;
    match value {
        Packed::Nil => Value::Null,
        Packed::Boolean(flag) => (*flag).into(),
        Packed::Integer(number) => match (number.as_u64(), number.as_i64()) {
            (Some(number), _) => number.into(),
            (None, number) => number.into(),
        },
        Packed::String(text) => text.as_str().expect("UTF-8").into(),
        Packed::Binary(bytes) => serde_json::json!({ "bin": hex(bytes) }),
        Packed::Array(items) => items.iter().map(json).collect(),
        Packed::Map(fields) => {
            let named = |(name, value): &(Packed, Packed)| {
                (name.as_str().expect("a name").to_owned(), json(value))
            };
            Value::Object(fields.iter().map(named).collect())
        }
        other => panic!("no message has {other}"),
    }
}

#[test]
fn every_golden_vector_has_its_twin_in_json() {
    for version in VERSION_MIN..=VERSION {
        for (name, _) in examples() {
            let path = schema(&format!("golden/v{version}/{name}.hex"));
            let text = fs::read_to_string(&path).expect("a golden vector");
            let (header, body) = text.trim_end().split_once('\n').expect("two lines");
            compare(
                &path.with_extension("json"),
                &twin(&unhex(header), &unhex(body)),
            );
        }
    }
}

#[test]
fn every_golden_file_is_that_of_an_example() {
    let names: Vec<_> = examples().into_iter().map(|(name, _)| name).collect();
    for version in VERSION_MIN..=VERSION {
        for entry in fs::read_dir(schema(&format!("golden/v{version}"))).expect("vectors") {
            let path = entry.expect("a file").path();
            let name = path.file_stem().and_then(|name| name.to_str());
            assert!(
                name.is_some_and(|name| names.contains(&name)),
                "{}",
                path.display()
            );
        }
    }
}

#[test]
fn every_kind_has_an_example() {
    let shown: Vec<_> = examples()
        .into_iter()
        .map(|(_, message)| message.kind())
        .collect();
    for kind in kvferry_protocol::MessageKind::ALL {
        assert!(shown.contains(kind), "{} has no example", kind.name());
    }
}

#[test]
fn the_published_schemas_are_those_of_the_program() {
    let pretty =
        |value: &Value| format!("{}\n", serde_json::to_string_pretty(value).expect("JSON"));
    compare(
        &schema("messages.json"),
        &pretty(&kvferry_protocol::catalogue()),
    );
    compare(
        &schema("metrics.json"),
        &pretty(&kvferry::cli::monitor::metrics_catalogue()),
    );
    let report = serde_json::to_value(kvferry::cli::replay_schema()).expect("JSON");
    compare(&schema("replay.json"), &pretty(&report));
    let report = serde_json::to_value(kvferry::cli::fsck_schema()).expect("JSON");
    compare(&schema("fsck.json"), &pretty(&report));
}

#[test]
fn a_replay_report_fits_its_schema() {
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_kvferry"))
        .args([
            "replay",
            "--mode",
            "offline",
            "--sequential",
            "--quiet",
            "--json",
            "-",
        ])
        .output()
        .expect("the program runs");
    let report: Value = serde_json::from_slice(&output.stdout).expect("a report");
    let text = fs::read_to_string(schema("replay.json")).expect("a schema");
    let schema: Value = serde_json::from_str(&text).expect("JSON");
    let validator = jsonschema::validator_for(&schema).expect("a valid schema");
    let errors: Vec<String> = validator
        .iter_errors(&report)
        .map(|error| error.to_string())
        .collect();
    assert!(errors.is_empty(), "{errors:?}");
}

/// The names in a query that begin with `kvferry_`.
fn metrics_in(query: &str) -> Vec<&str> {
    let words = query.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    words.filter(|word| word.starts_with("kvferry_")).collect()
}

/// Every text below a value of JSON, with the key that it has.
fn texts<'a>(value: &'a Value, key: &'a str, found: &mut Vec<(&'a str, &'a str)>) {
    match value {
        Value::String(text) => found.push((key, text)),
        Value::Array(values) => values.iter().for_each(|value| texts(value, key, found)),
        Value::Object(fields) => fields
            .iter()
            .for_each(|(key, value)| texts(value, key, found)),
        _ => {}
    }
}

#[test]
fn the_board_queries_metrics_of_the_list_with_their_labels_and_nothing_else() {
    let text = fs::read_to_string(schema("grafana.json")).expect("the board");
    let board: Value = serde_json::from_str(&text).expect("JSON");
    let mut found = Vec::new();
    texts(&board, "", &mut found);
    let queries = found
        .iter()
        .filter(|(key, _)| matches!(*key, "expr" | "query" | "definition"));
    let queries: Vec<&str> = queries.map(|(_, query)| *query).collect();
    assert!(queries.len() > 30, "{queries:?}");
    let all: Vec<&str> = found
        .iter()
        .flat_map(|(_, text)| metrics_in(text))
        .collect();
    let in_queries: Vec<&str> = queries.iter().flat_map(|query| metrics_in(query)).collect();
    assert_eq!(
        all.len(),
        in_queries.len(),
        "a metric is named outside of the queries"
    );
    for name in in_queries {
        let listed = kvferry::cli::monitor::METRICS.iter().any(|metric| {
            let ends: &[&str] = match metric.kind.name() {
                "histogram" => &["_bucket", "_sum", "_count"],
                _ => &[""],
            };
            let end = name.strip_prefix(metric.name);
            end.is_some_and(|end| ends.contains(&end))
        });
        assert!(listed, "{name} is not in the list");
    }
    let labels = kvferry::cli::monitor::LABELS.iter().map(|label| label.name);
    let known: Vec<&str> = labels.chain(["le", "instance"]).collect();
    for query in queries {
        for by in query.split("by (").skip(1) {
            let (labels, _) = by.split_once(')').expect("a list");
            for label in labels.split(", ") {
                assert!(known.contains(&label), "{label} in {query}");
            }
        }
    }
}
