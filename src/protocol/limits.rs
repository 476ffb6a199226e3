//! Limits of the wire, enforced on encode and on decode, before anything is allocated.

use kvferry_types::CONTENT_BYTES_MAX;

/// Bytes of a message's body. A lookup of a million tokens in pages of 16, with hashes of 64 bytes, takes 4 MiB.
pub const BODY_BYTES_MAX: usize = 8 << 20;
/// Bytes of the body of a hello, a ping or a pong: a server reads them before the peer has identified itself.
pub const SMALL_BODY_BYTES_MAX: usize = 16 << 10;
/// Page hashes in one message.
pub const HASHES_MAX: usize = 131_072;
/// Pairs in one message.
pub const PAIRS_MAX: usize = 65_536;
/// Items (pages or runs) in one list of pages.
pub const PAGE_ITEMS_MAX: usize = 131_072;
/// Parts of a load or a store: runs of pages, of which a window or a state may have one for each boundary.
pub const PARTS_MAX: usize = 4096;
/// Stores in one message: those of one step of an engine. Their pages, parts and hashes together are limited as those of
/// one store.
pub const STORES_MAX: usize = 256;
/// Pages named by one part of the change log, and records in it.
pub const EVENT_PAGES_MAX: usize = 8192;
/// Pages named by one message, each page of a run counted.
pub const PAGES_MAX: u64 = 1 << 20;
/// Copies ordered by one transfer, and results in its answer.
pub const COPIES_MAX: usize = 65_536;
/// Requests in one abandon. A worker remembers up to this many individually.
pub const ABANDONED_MAX: usize = 4096;
/// Bytes of a text field.
pub const TEXT_BYTES_MAX: usize = 4096;
/// Bytes of a namespace.
pub const NAMESPACE_BYTES_MAX: usize = 1024;
/// Processes of one supervisor: a worker for each of 64 ranks of 64 replicas, a leader and a monitor.
pub const PROCESSES_MAX: usize = 4098;
/// Bytes of one page record.
pub const PAGE_RECORD_BYTES: usize = 76;
/// Page records in one part of an inventory.
pub const PAGE_RECORDS_MAX: usize = 4096;
/// Nesting depth of a body: maps, lists and pairs.
pub const DEPTH_MAX: usize = 16;
/// Longest deadline of a request, in milliseconds; longer ones are cut to it. Also bounds how long a request holds
/// resources without copying: a place among the open requests, hashes that wait, reserved pages.
pub const DEADLINE_MAX_MS: u32 = 120_000;
/// Unanswered requests that one peer may have.
pub const REQUEST_CREDITS: u32 = 1024;
/// Bytes of unanswered requests that one peer may have: bounds the memory that a peer can occupy.
pub const BYTE_CREDITS: u64 = 64 << 20;
// Otherwise the longest request would be `busy` for ever.
const _: () = assert!(BODY_BYTES_MAX as u64 <= BYTE_CREDITS);

/// Every limit with its public name: of `schema/messages.json`, and of a welcome.
pub const NAMED: [(&str, u64); 18] = [
    ("abandoned_requests", ABANDONED_MAX as u64),
    ("body_bytes", BODY_BYTES_MAX as u64),
    ("byte_credits", BYTE_CREDITS),
    ("content_bytes", CONTENT_BYTES_MAX as u64),
    ("copies", COPIES_MAX as u64),
    ("deadline_max_ms", DEADLINE_MAX_MS as u64),
    ("depth", DEPTH_MAX as u64),
    ("event_pages", EVENT_PAGES_MAX as u64),
    ("namespace_bytes", NAMESPACE_BYTES_MAX as u64),
    ("page_hashes", HASHES_MAX as u64),
    ("page_items", PAGE_ITEMS_MAX as u64),
    ("pages", PAGES_MAX),
    ("pairs", PAIRS_MAX as u64),
    ("parts", PARTS_MAX as u64),
    ("request_credits", REQUEST_CREDITS as u64),
    ("small_body_bytes", SMALL_BODY_BYTES_MAX as u64),
    ("stores", STORES_MAX as u64),
    ("text_bytes", TEXT_BYTES_MAX as u64),
];
/// Entries of the file `namespaces`.
pub const NAMESPACE_ENTRIES_MAX: usize = 256;
/// Tiers of a status.
pub(super) const TIERS_MAX: usize = 256;
/// List items for which memory is reserved by the length that a message claims, at most; more is reserved as they arrive.
pub(super) const RESERVED_ITEMS_MAX: usize = 64;

/// Error text for a value beyond its limit. Serde carries errors as text, so the codec recognizes a limit by this text.
pub(super) fn beyond(what: &str, max: usize) -> String {
    format!("{what}: {BEYOND} {max}")
}

/// The part of [`beyond`]'s text by which the codec recognizes a limit.
pub(super) const BEYOND: &str = "more than the limit of";
