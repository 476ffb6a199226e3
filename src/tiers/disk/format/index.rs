//! The index: a copy of all headers of a set, written at a clean end.
//!
//! ```text
//! body: 16 id of the set; 8 last sequence number; 4 number of regions, and of each: 4 number, 1 newest slot,
//!       8 its sequence number; 4 number of blocks, and the blocks, as in a region
//! ```

use std::io;

use super::super::files::Files;
use super::super::table::Slots;
use super::FormatError;
use super::codec::{Reader, Writer, file_bytes, read, replace};
use super::region::{BlockHeader, INDEX_BYTES_PER_PAGE};

/// Name of the file.
pub const INDEX_NAME: &str = "index";
const MAGIC: &[u8; 8] = b"KVFINDEX";
/// Bytes of the body without regions and blocks.
const BODY_BYTES: u64 = 16 + 8 + 4 + 4;

/// All headers of a set.
#[derive(Debug, PartialEq, Eq)]
pub(in super::super) struct Index {
    /// The last sequence number of the set.
    pub(in super::super) sequence: u64,
    /// The slots of each region that was ever written.
    pub(in super::super) regions: Vec<(u32, Slots)>,
    /// First page and header of each block, in the order of the pages.
    pub(in super::super) blocks: Vec<(u32, BlockHeader)>,
}

/// Writes the index of a set. Durable when the call returns.
pub(in super::super) fn write_index<'a>(
    files: &dyn Files,
    (set, sequence): (u128, u64),
    regions: impl ExactSizeIterator<Item = (u32, Slots)>,
    blocks: impl ExactSizeIterator<Item = (u32, &'a BlockHeader)>,
) -> io::Result<()> {
    let mut body = Writer::default();
    body.u128(set);
    body.u64(sequence);
    body.u32(u32::try_from(regions.len()).unwrap_or(u32::MAX));
    for (number, slots) in regions {
        body.u32(number);
        body.bytes(&[slots.newest]);
        body.u64(slots.sequence);
    }
    body.u32(u32::try_from(blocks.len()).unwrap_or(u32::MAX));
    for (start, block) in blocks {
        block.encode(start, &mut body);
    }
    replace(files, INDEX_NAME, MAGIC, &body.0)
}

/// Reads the index of a set; `None` if there is none, or if it is that of another set, damaged, or
/// longer than that of a set of `pages` pages: the headers say the same.
pub(in super::super) fn read_index(
    files: &dyn Files,
    set: u128,
    pages: u32,
) -> io::Result<Option<Index>> {
    match check_index(files, set, pages)? {
        Some(Ok(index)) => Ok(Some(index)),
        Some(Err(error)) => {
            tracing::warn!(%error, "the index of a disk cannot be used: its headers are read");
            Ok(None)
        }
        None => Ok(None),
    }
}

/// Reads the index of a set of `pages` pages; `None` if there is none.
pub(in super::super) fn check_index(
    files: &dyn Files,
    set: u128,
    pages: u32,
) -> io::Result<Option<Result<Index, FormatError>>> {
    let most = file_bytes(BODY_BYTES + u64::from(pages) * INDEX_BYTES_PER_PAGE);
    if let Some(file) = files.open(INDEX_NAME)?
        && file.bytes()? > most
    {
        let (field, value) = ("length of the index", file.bytes()?);
        return Ok(Some(Err(FormatError::Field { field, value })));
    }
    let body = read(files, INDEX_NAME, (MAGIC, "index"), most)?;
    Ok(body.map(|body| decode(&body?, set)))
}

fn decode(body: &[u8], set: u128) -> Result<Index, FormatError> {
    let mut from = Reader(body);
    if from.u128()? != set {
        return Err(FormatError::Magic("index of this set"));
    }
    let sequence = from.u64()?;
    let mut regions = Vec::new();
    for _ in 0..from.u32()? {
        let number = from.u32()?;
        let [newest] = from.take()?;
        let sequence = from.u64()?;
        regions.push((
            number,
            Slots {
                newest,
                sequence,
                synced: true,
            },
        ));
    }
    let count = from.u32()?;
    let mut blocks = Vec::new();
    for _ in 0..count {
        blocks.push(BlockHeader::decode(&mut from)?);
    }
    Ok(Index {
        sequence,
        regions,
        blocks,
    })
}
