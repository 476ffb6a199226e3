//! Names of the files of a set.

use super::{INDEX_NAME, SET_NAME};

/// Name of a segment's file.
pub(in super::super) fn segment_name(segment: u32) -> String {
    format!("segment-{segment:05}")
}

/// The number of a segment's file; `None` for other files.
pub(in super::super) fn segment_number(name: &str) -> Option<u32> {
    name.strip_prefix("segment-")?.parse().ok()
}

/// True for a file of a set's directory that some version of the program wrote.
pub(in super::super) fn is_ours(name: &str) -> bool {
    let name = name.strip_suffix(".new").unwrap_or(name);
    matches!(name, SET_NAME | INDEX_NAME) || segment_number(name).is_some()
}
