//! Finds the field of a body that cannot be read.
//!
//! While an error passes through the maps and lists that [`Named`](crate::named::Named) wraps, each notes how many of
//! its entries were not read. These counts lead to the field through the bytes alone: a second set of readers, which track
//! their fields, would take longer to compile than the rest of this package.

use std::cell::RefCell;
use std::fmt::Write as _;

use rmp::Marker;
use serde::Deserialize as _;
use serde::de::IgnoredAny;

/// The unread entries of each map or list around an error, the innermost first.
#[derive(Debug, Default)]
pub(super) struct Trail(RefCell<Vec<usize>>);

impl Trail {
    /// Notes that reading the latest entry failed in a map or list of which `unread` entries follow.
    #[cold]
    pub(super) fn note(&self, unread: Option<usize>) {
        self.0.borrow_mut().extend(unread);
    }

    /// The path of what could not be read in the body in `bytes`, such as `parts[0].count`. `None` if it is the body itself.
    pub(super) fn path(self, bytes: &[u8]) -> Option<String> {
        let (mut path, mut rest) = (String::new(), bytes);
        for unread in self.0.into_inner().into_iter().rev() {
            // Without a name for an entry, the path ends at the map or list that has it.
            let Some(behind) = enter(&mut path, rest, unread) else {
                break;
            };
            rest = behind;
        }
        (!path.is_empty()).then_some(path)
    }
}

/// Adds the entry that `unread` others follow to the path, and returns the bytes from its value on.
fn enter<'a>(path: &mut String, mut bytes: &'a [u8], unread: usize) -> Option<&'a [u8]> {
    let marker = rmp::decode::read_marker(&mut &bytes[..]).ok()?;
    let is_map = matches!(marker, Marker::FixMap(_) | Marker::Map16 | Marker::Map32);
    let entries = match is_map {
        true => rmp::decode::read_map_len(&mut bytes).ok()?,
        false => rmp::decode::read_array_len(&mut bytes).ok()?,
    };
    let place = (entries as usize).checked_sub(unread + 1)?;
    for _ in 0..place * (1 + usize::from(is_map)) {
        bytes = skip(bytes)?;
    }
    if !is_map {
        write!(path, "[{place}]").ok()?;
        return Some(bytes);
    }
    let (name, behind) = rmp::decode::read_str_from_slice(bytes).ok()?;
    let dot = if path.is_empty() { "" } else { "." };
    write!(path, "{dot}{name}").ok()?;
    Some(behind)
}

/// The bytes after the first value.
fn skip(bytes: &[u8]) -> Option<&[u8]> {
    let mut reader = rmp_serde::Deserializer::new(bytes);
    IgnoredAny::deserialize(&mut reader).ok()?;
    Some(reader.into_inner())
}
