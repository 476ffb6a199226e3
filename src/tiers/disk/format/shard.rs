//! The files that say which directory holds the pages of a shard: a number in the directory, `id`, and the same number
//! next to it, `shard-S.id`.
//!
//! A directory that was removed, or moved away, is made again while a worker runs. Resets after that are not noted in the
//! old one, so that it must not be used if it is put back: its number is another one then. Directories of an earlier
//! version have no number.
//!
//! ```text
//! body: 16 random number
//! ```

use std::io;

use super::super::buffer::UNIT_BYTES;
use super::super::files::Files;
use super::FormatError;
use super::codec::{Reader, Writer, read, replace};

/// Name of the file in the directory.
pub(in super::super) const SHARD_ID_NAME: &str = "id";
const MAGIC: &[u8; 8] = b"KVFSHARD";

/// Name of a shard's directory.
pub(in super::super) fn shard_name(shard: u16) -> String {
    format!("shard-{shard}")
}

/// Name of the file next to it.
fn beside(shard: u16) -> String {
    format!("shard-{shard}.id")
}

/// The shard of a file next to its directory; `None` for other names.
pub(in super::super) fn shard_beside(name: &str) -> Option<u16> {
    let name = name.strip_suffix(".new").unwrap_or(name);
    let number = name.strip_prefix("shard-")?.strip_suffix(".id")?;
    let number = number.parse().ok()?;
    (name == beside(number)).then_some(number)
}

type Id = Option<Result<u128, FormatError>>;

fn read_id(files: &dyn Files, name: &str) -> io::Result<Id> {
    let body = read(files, name, (MAGIC, "shard identity"), UNIT_BYTES)?;
    Ok(body.map(|body| Reader(&body?).u128()))
}

/// Whether the directory of a shard is the one that was used last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) enum ShardDirectory {
    /// It has the number that lies next to it.
    Current,
    /// Neither has a number.
    Unnumbered,
    /// It is new, or was put back.
    Other,
}

impl ShardDirectory {
    /// Compares the numbers of the directory of a shard, and next to it in `root`. A damaged number is no number of the
    /// shard's directory.
    pub(in super::super) fn of(
        (root, shard): (&dyn Files, u16),
        directory: &dyn Files,
    ) -> io::Result<Self> {
        let expected = read_id(root, &beside(shard))?;
        let found = read_id(directory, SHARD_ID_NAME)?;
        Ok(match (expected, found) {
            (None, None) => Self::Unnumbered,
            (Some(Ok(expected)), Some(Ok(found))) if expected == found => Self::Current,
            _ => Self::Other,
        })
    }

    /// Gives a directory without pages a new number. One that is interrupted is none of the shard's, and is given another
    /// number by the next start.
    pub(in super::super) fn renew(
        (root, shard): (&dyn Files, u16),
        directory: &dyn Files,
    ) -> io::Result<()> {
        let mut id = [0; 16];
        rustix::rand::getrandom(&mut id, rustix::rand::GetRandomFlags::empty())?;
        let mut body = Writer::default();
        body.u128(u128::from_le_bytes(id));
        replace(directory, SHARD_ID_NAME, MAGIC, &body.0)?;
        replace(root, &beside(shard), MAGIC, &body.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_beside_directories_are_told_from_others() {
        for (name, shard) in [
            ("shard-0.id", Some(0)),
            ("shard-17.id.new", Some(17)),
            ("shard-0", None),
            ("shard-00.id", None),
            ("shard-70000.id", None),
            ("shard-.id", None),
        ] {
            assert_eq!(shard_beside(name), shard, "{name}");
        }
    }
}
