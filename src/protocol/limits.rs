//! Named limits of the wire, held on encode and on decode, before anything is allocated.

/// Bytes of a message's second part. A lookup of a million tokens in pages of 16, with hashes of 64 bytes, takes 4 MiB.
pub const BODY_BYTES_MAX: usize = 8 << 20;
/// Bytes of the body of a hello, a ping or a pong: they are read before anything else is known about a peer.
pub const SMALL_BODY_BYTES_MAX: usize = 16 << 10;
/// Page hashes in one message.
pub const HASHES_MAX: usize = 131_072;
/// Pairs in one message.
pub const PAIRS_MAX: usize = 65_536;
/// Items (pages or runs) in one list of pages.
pub const PAGE_ITEMS_MAX: usize = 131_072;
/// Pages named by one message, runs counted out.
pub const PAGES_MAX: u64 = 1 << 20;
/// Copies ordered by one transfer, and results in its answer.
pub const COPIES_MAX: usize = 65_536;
/// Requests in one abandon: a worker remembers so many one by one.
pub const ABANDONED_MAX: usize = 4096;
/// Bytes of a text field.
pub const TEXT_BYTES_MAX: usize = 4096;
/// Bytes of a namespace.
pub const NAMESPACE_BYTES_MAX: usize = 1024;
/// Bytes of one page record.
pub const PAGE_RECORD_BYTES: usize = 76;
/// Page records in one part of an inventory.
pub const PAGE_RECORDS_MAX: usize = 4096;
/// Nesting of a body: maps, lists and pairs.
pub const DEPTH_MAX: usize = 16;
/// Longest deadline of a request, in milliseconds; a longer one is cut to it. What a request holds without copying anything
/// (a place among the open requests, hashes that wait, pages that are reserved) is held no longer.
pub const DEADLINE_MAX_MS: u32 = 120_000;
/// Requests of one peer that may wait for their answers.
pub const REQUEST_CREDITS: u32 = 1024;
/// Bytes of requests of one peer that may wait for their answers: the memory that a peer can hold.
pub const BYTE_CREDITS: u64 = 64 << 20;

/// What a decoder says about a value beyond its limit. Serde carries errors as text: this text is how the codec tells a limit
/// from other mistakes.
pub(super) fn beyond(what: &str, max: usize) -> String {
    format!("{what}: {BEYOND} {max}")
}

/// See [`beyond`].
pub(super) const BEYOND: &str = "more than the limit of";
