//! The catalogue of messages as JSON: `schema/messages.json`.

use serde_json::{Value, json};

use crate::error::ErrorCode;
use crate::kind::MessageKind;
use crate::role::Role;
use crate::{Message, VERSION, VERSION_MIN, limits};
use kvferry_types::CONTENT_BYTES_MAX;

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
    json!({
        "status": "provisional",
        "versions": { "oldest": VERSION_MIN, "newest": VERSION },
        "header": "src/protocol/header.rs: 32 bytes, big-endian",
        "kinds": kinds,
        "errors": errors,
        "limits": {
            "body_bytes": limits::BODY_BYTES_MAX,
            "small_body_bytes": limits::SMALL_BODY_BYTES_MAX,
            "deadline_max_ms": limits::DEADLINE_MAX_MS,
            "page_hashes": limits::HASHES_MAX,
            "stores": limits::STORES_MAX,
            "pairs": limits::PAIRS_MAX,
            "page_items": limits::PAGE_ITEMS_MAX,
            "pages": limits::PAGES_MAX,
            "event_pages": limits::EVENT_PAGES_MAX,
            "copies": limits::COPIES_MAX,
            "abandoned_requests": limits::ABANDONED_MAX,
            "text_bytes": limits::TEXT_BYTES_MAX,
            "namespace_bytes": limits::NAMESPACE_BYTES_MAX,
            "content_bytes": CONTENT_BYTES_MAX,
            "depth": limits::DEPTH_MAX,
            "request_credits": limits::REQUEST_CREDITS,
            "byte_credits": limits::BYTE_CREDITS,
        },
    })
}

/// The roles of the clients that send `kind`, and `server` where servers do.
fn senders(kind: MessageKind) -> Vec<Value> {
    let roles = [Role::Engine, Role::Rank, Role::Worker, Role::Admin];
    let roles = roles.into_iter().filter(|role| kind.sent_by(*role));
    let server = kind.sent_by_server().then(|| json!("server"));
    roles.map(|role| json!(role)).chain(server).collect()
}
