//! The catalogue of messages as JSON: `schema/messages.json`.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::error::ErrorCode;
use crate::kind::MessageKind;
use crate::role::Role;
use crate::{Message, VERSION, VERSION_MIN, limits};
use kvferry_types::LATENCY_BOUNDS_US;

/// Returns every kind with its number and the JSON Schema of its body, every error code, and the limits.
pub fn catalogue() -> Value {
    let kinds: Vec<Value> = MessageKind::ALL
        .iter()
        .map(|kind| {
            json!({
                "number": kind.number(),
                "name": kind.name(),
                "answer": kind.answer().map(MessageKind::name),
                "stability": kind.stability(),
                "said_by": senders(*kind),
                "said_to": kind.receiver(),
                "body": with_defaults(Message::schema(*kind)),
            })
        })
        .collect();
    let errors: Vec<Value> = ErrorCode::ALL
        .iter()
        .map(|code| {
            json!({
                "number": code.number(),
                "name": code.name(),
                "retry": code.retry(),
                "meaning": code.meaning(),
            })
        })
        .collect();
    let named: BTreeMap<&str, u64> = limits::NAMED.into_iter().collect();
    json!({
        "status": "frozen",
        "versions": { "oldest": VERSION_MIN, "newest": VERSION },
        "header": "32 bytes, big-endian: docs/wire.md, part one",
        "kinds": kinds,
        "errors": errors,
        "limits": named,
        "latency_bounds_us": LATENCY_BOUNDS_US,
    })
}

/// Adds the defaults that serde gives without naming them, and writes those of binary fields as the JSON of golden
/// vectors does.
fn with_defaults(schema: schemars::Schema) -> Value {
    let mut schema = schema.to_value();
    add_defaults(&mut schema);
    schema
}

fn add_defaults(schema: &mut Value) {
    let required = schema["required"].clone();
    let required = required.as_array().map_or(&[][..], Vec::as_slice);
    if let Some(fields) = schema.get_mut("properties").and_then(Value::as_object_mut) {
        for (name, field) in fields {
            let Some(field) = field.as_object_mut() else {
                continue;
            };
            let binary = field.contains_key("contentEncoding");
            let kind = field.get("type").and_then(Value::as_str);
            let absent = match kind {
                _ if required.iter().any(|each| each == name) => None,
                Some("string") if binary => Some(json!([])),
                Some("string") => Some(json!("")),
                Some("integer") => Some(json!(0)),
                Some("boolean") => Some(json!(false)),
                Some("array") => Some(json!([])),
                _ => None,
            };
            if let Some(absent) = absent {
                field.entry("default").or_insert(absent);
            }
            if binary && let Some(Value::Array(bytes)) = field.get("default") {
                let hex: Vec<String> = bytes
                    .iter()
                    .filter_map(Value::as_u64)
                    .map(|byte| format!("{byte:02x}"))
                    .collect();
                field.insert("default".to_owned(), json!({"bin": hex.concat()}));
            }
        }
    }
    match schema {
        Value::Object(parts) => parts.values_mut().for_each(add_defaults),
        Value::Array(items) => items.iter_mut().for_each(add_defaults),
        _ => {}
    }
}

/// The roles of the clients that send `kind`, and `server` where servers do.
fn senders(kind: MessageKind) -> Vec<Value> {
    let roles = [
        Role::Engine,
        Role::Rank,
        Role::Worker,
        Role::Admin,
        Role::Supervisor,
    ];
    let roles = roles.into_iter().filter(|role| kind.sent_by(*role));
    let server = kind.sent_by_server().then(|| json!("server"));
    roles.map(|role| json!(role)).chain(server).collect()
}
