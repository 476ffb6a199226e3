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
                "body": Message::schema(*kind),
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
