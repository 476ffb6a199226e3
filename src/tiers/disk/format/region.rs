//! Regions: the headers of the blocks that begin in the same 16 pages, in two slots.
//!
//! ```text
//! offset  bytes  field of a slot
//!      0      4  magic "KVFR"
//!      4      4  version of the format
//!      8      4  number of the region: its first page / 16
//!     12      2  shard
//!     14      2  number of blocks
//!     16     16  id of the set
//!     32      8  sequence number of this write, ascending over the whole set; the higher one of two slots counts
//!     40      8  sequence number up to which headers and their pages were durable when this slot was written
//!     48      8  checksum of the slot without this field
//!     56      4  bytes used
//!     60      4  number of the last sweep that the segment has followed; 0 from earlier programs
//!     64         blocks
//!
//!                field of a block
//!      0     16  anchor
//!     16     16  domain; its last 8 bytes are those of the namespace
//!     32      4  first page
//!     36      2  phase: position of the block's first page in its sequence, modulo the ratio
//!     38      2  number of pages
//!     40         pages
//!
//!                field of a page
//!      0     16  fingerprint
//!     16      8  epoch of the store   } the generation of the page
//!     24      8  id of the transfer   }
//!     32      8  checksum
//! ```

use kvferry_types::{Anchor, DomainId, Epoch, Fingerprint, Stored, TransferId};

use super::super::buffer::UNIT_BYTES;
use super::checksum::{PagePlace, PageSum};
use super::codec::{Reader, Writer, checksum};
use super::{FORMAT_VERSION, FormatError};

/// Pages of a region: their blocks' headers lie in one place of the table.
pub const REGION_PAGES: u32 = 16;
const MAGIC: [u8; 4] = *b"KVFR";
const SLOT_HEADER_BYTES: u64 = 64;
const SUM_AT: usize = 48;
const USED_AT: usize = 56;
const BLOCK_BYTES: u64 = 40;
const PAGE_BYTES: u64 = 40;
/// Bytes of the index for each page, at most: those of a block of one page, and a part of those of a region.
pub(super) const INDEX_BYTES_PER_PAGE: u64 = BLOCK_BYTES + PAGE_BYTES + 1;

/// Bytes of a slot for blocks of up to `ratio` pages: with 15 blocks of one page, and one of `ratio` pages at the end.
pub(super) fn slot_bytes(ratio: u32) -> u64 {
    let regions = u64::from(REGION_PAGES);
    let pages = regions - 1 + u64::from(ratio.max(1));
    (SLOT_HEADER_BYTES + regions * BLOCK_BYTES + pages * PAGE_BYTES).next_multiple_of(UNIT_BYTES)
}

/// A page in the header of its block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeaderPage {
    /// Fingerprint of the page.
    pub fingerprint: Fingerprint,
    /// The store that wrote it.
    pub stored: Stored,
    /// Checksum of its bytes and of its place.
    pub sum: PageSum,
}

/// The header of a block: everything that is needed to serve its pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockHeader {
    /// Key by which the block is found.
    pub anchor: Anchor,
    /// Domain of the block, with its namespace.
    pub domain: DomainId,
    /// Position of the block's first page in its sequence, modulo the ratio.
    pub phase: u16,
    /// The pages, from the first one on; at least one.
    pub pages: Vec<HeaderPage>,
}

impl BlockHeader {
    /// What the checksum of a page covers besides its bytes.
    pub(in super::super) fn place(&self, index: u16, page: &HeaderPage) -> PagePlace {
        PagePlace {
            anchor: self.anchor,
            domain: self.domain,
            index,
            fingerprint: page.fingerprint,
            stored: page.stored,
        }
    }

    pub(super) fn encode(&self, start: u32, into: &mut Writer) {
        into.u128(self.anchor.0);
        into.u128(self.domain.0);
        into.u32(start);
        into.u16(self.phase);
        into.u16(u16::try_from(self.pages.len()).unwrap_or(u16::MAX));
        for page in &self.pages {
            into.u128(page.fingerprint.0);
            into.u64(page.stored.epoch.0);
            into.u64(page.stored.transfer.0);
            into.u64(page.sum.0);
        }
    }

    pub(super) fn decode(from: &mut Reader<'_>) -> Result<(u32, Self), FormatError> {
        let (anchor, domain) = (Anchor(from.u128()?), DomainId(from.u128()?));
        let (start, phase, count) = (from.u32()?, from.u16()?, from.u16()?);
        if count == 0 {
            return Err(FormatError::Field {
                field: "number of pages",
                value: 0,
            });
        }
        let mut pages = Vec::with_capacity(usize::from(count).min(from.0.len()));
        for _ in 0..count {
            let fingerprint = Fingerprint(from.u128()?);
            let (epoch, transfer) = (Epoch(from.u64()?), TransferId(from.u64()?));
            pages.push(HeaderPage {
                fingerprint,
                stored: Stored { epoch, transfer },
                sum: PageSum(from.u64()?),
            });
        }
        let header = Self {
            anchor,
            domain,
            phase,
            pages,
        };
        Ok((start, header))
    }
}

/// Identity of a region: what a slot must say to be one of its two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) struct RegionId {
    pub(in super::super) set: u128,
    pub(in super::super) shard: u16,
    /// First page / [`REGION_PAGES`].
    pub(in super::super) number: u32,
    /// Seed of the set's checksums.
    pub(in super::super) seed: u64,
}

/// Numbers of a slot.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in super::super) struct Numbers {
    /// Sequence number of the write.
    pub(in super::super) sequence: u64,
    /// Writes up to this sequence number were durable.
    pub(in super::super) durable: u64,
    /// The last sweep that the segment has followed.
    pub(in super::super) sweep: u32,
}

/// Contents of a slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in super::super) struct Region {
    pub(in super::super) numbers: Numbers,
    /// First page and header of each block, in the order of the pages.
    pub(in super::super) blocks: Vec<(u32, BlockHeader)>,
}

impl Region {
    /// Encodes a slot into `into`, whose length is that of a slot. Blocks are those that begin in the region.
    ///
    /// # Errors
    ///
    /// [`FormatError::Short`] if they do not fit, which blocks of up to `ratio` pages that do not overlap always do.
    pub(in super::super) fn encode<'a>(
        id: RegionId,
        numbers: Numbers,
        blocks: impl Iterator<Item = (u32, &'a BlockHeader)>,
        into: &mut [u8],
    ) -> Result<(), FormatError> {
        let mut body = Writer::default();
        let mut count = 0_u16;
        for (start, block) in blocks {
            block.encode(start, &mut body);
            count += 1;
        }
        let mut head = Writer::default();
        head.bytes(&MAGIC);
        head.u32(FORMAT_VERSION);
        head.u32(id.number);
        head.u16(id.shard);
        head.u16(count);
        head.u128(id.set);
        head.u64(numbers.sequence);
        head.u64(numbers.durable);
        head.u64(0);
        head.u32(u32::try_from(body.0.len()).unwrap_or(u32::MAX));
        head.u32(numbers.sweep);
        let used = head.0.len() + body.0.len();
        let slot = into.get_mut(..used).ok_or(FormatError::Short)?;
        let (first, rest) = slot.split_at_mut(head.0.len());
        first.copy_from_slice(&head.0);
        rest.copy_from_slice(&body.0);
        into[used..].fill(0);
        let sum = checksum(id.seed, &[into]);
        into[SUM_AT..USED_AT].copy_from_slice(&sum.to_le_bytes());
        Ok(())
    }

    /// Decodes a slot; `None` if none was ever written there.
    pub(in super::super) fn decode(id: RegionId, slot: &[u8]) -> Result<Option<Self>, FormatError> {
        if slot.iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        let mut from = Reader(slot);
        if from.take::<4>()? != MAGIC {
            return Err(FormatError::Magic("region"));
        }
        let found = from.u32()?;
        let (number, shard, count, set) = (from.u32()?, from.u16()?, from.u16()?, from.u128()?);
        let (sequence, durable, sum) = (from.u64()?, from.u64()?, from.u64()?);
        let (used, sweep) = (from.u32()?, from.u32()?);
        let (before, behind) = (&slot[..SUM_AT], &slot[USED_AT..]);
        if checksum(id.seed, &[before, &[0; 8], behind]) != sum {
            return Err(FormatError::Checksum);
        }
        if found != FORMAT_VERSION {
            return Err(FormatError::Version { found });
        }
        if (number, shard, set) != (id.number, id.shard, id.set) {
            return Err(FormatError::Field {
                field: "region",
                value: number.into(),
            });
        }
        let used = used as usize;
        let mut body = Reader(from.0.get(..used).ok_or(FormatError::Short)?);
        let mut blocks = Vec::with_capacity(usize::from(count).min(REGION_PAGES as usize));
        for _ in 0..count {
            let (start, block) = BlockHeader::decode(&mut body)?;
            if start / REGION_PAGES != id.number {
                return Err(FormatError::Field {
                    field: "first page",
                    value: start.into(),
                });
            }
            blocks.push((start, block));
        }
        let numbers = Numbers {
            sequence,
            durable,
            sweep,
        };
        Ok(Some(Self { numbers, blocks }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: RegionId = RegionId {
        set: 77 << 64 | 5,
        shard: 1,
        number: 3,
        seed: 99,
    };

    const NUMBERS: Numbers = Numbers {
        sequence: 8,
        durable: 6,
        sweep: 5,
    };

    fn block(pages: usize) -> BlockHeader {
        let page = |index: usize| HeaderPage {
            fingerprint: Fingerprint(index as u128 + 1),
            stored: Stored {
                epoch: Epoch(4),
                transfer: TransferId(index as u64 + 9),
            },
            sum: PageSum(!(index as u64)),
        };
        BlockHeader {
            anchor: Anchor(1 << 100),
            domain: DomainId(6),
            phase: 2,
            pages: (0..pages).map(page).collect(),
        }
    }

    fn encoded(blocks: &[(u32, BlockHeader)], ratio: u32) -> Vec<u8> {
        let mut slot = vec![0xff; slot_bytes(ratio) as usize];
        let blocks = blocks.iter().map(|(start, block)| (*start, block));
        Region::encode(ID, NUMBERS, blocks, &mut slot).expect("they fit");
        slot
    }

    #[test]
    fn the_largest_region_fits_into_its_slot() {
        for ratio in [1, 2, 32, 256] {
            let mut blocks: Vec<(u32, BlockHeader)> = (48..63).map(|at| (at, block(1))).collect();
            blocks.push((63, block(ratio as usize)));
            let slot = encoded(&blocks, ratio);
            let expected = Region {
                numbers: NUMBERS,
                blocks,
            };
            assert_eq!(Region::decode(ID, &slot), Ok(Some(expected)));
        }
        assert_eq!(slot_bytes(32), 4096);
    }

    #[test]
    fn a_slot_with_a_changed_bit_or_of_another_place_is_refused() {
        let slot = encoded(&[(50, block(3))], 32);
        for at in 0..slot.len() {
            let mut changed = slot.clone();
            changed[at] ^= 1 << (at % 8);
            assert!(Region::decode(ID, &changed).is_err(), "byte {at}");
        }
        let others = [
            RegionId { number: 4, ..ID },
            RegionId { shard: 0, ..ID },
            RegionId { set: 5, ..ID },
        ];
        for id in others {
            assert!(Region::decode(id, &slot).is_err(), "{id:?}");
        }
        assert_eq!(Region::decode(ID, &vec![0; 4096]), Ok(None));
    }
}
