//! The file that says what the pages of a set are. Written once, before the set's first segment.
//!
//! ```text
//! body: 16 id of the set, random; 16 id of the tier; 2 shard; 2 number of shards; 16 fingerprint of the layout;
//!       8 page_bytes; 4 ratio; 8 stride; 8 slot_bytes; 4 stripe_pages; 2 disks; 4 segment_pages
//! ```

use std::io;

use super::super::buffer::UNIT_BYTES;
use super::super::files::Files;
use super::codec::{Reader, Writer, read, replace};
use super::{FormatError, Geometry, RegionId, SetKey, SetKeys};

/// Name of the file.
pub(in super::super) const SET_NAME: &str = "set";
const MAGIC: &[u8; 8] = b"KVFSET\0\0";

/// What the pages of a set are, and where they lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) struct SetFile {
    pub(in super::super) set: u128,
    pub(in super::super) tier: u128,
    pub(in super::super) shard: u16,
    pub(in super::super) key: SetKey,
    pub(in super::super) geometry: Geometry,
}

impl SetFile {
    /// Identity of a region of the set.
    pub(in super::super) fn region_id(&self, number: u32) -> RegionId {
        RegionId {
            set: self.set,
            shard: self.shard,
            number,
            seed: SetKeys::new(self.set, self.shard).region_seed(),
        }
    }

    /// Reads the file; `None` in a directory without one.
    pub(in super::super) fn read(
        files: &dyn Files,
    ) -> io::Result<Option<Result<Self, FormatError>>> {
        let body = read(files, SET_NAME, (MAGIC, "set"), UNIT_BYTES)?;
        Ok(body.map(|body| Self::decode(&body?)))
    }

    fn decode(body: &[u8]) -> Result<Self, FormatError> {
        let mut from = Reader(body);
        let (set, tier) = (from.u128()?, from.u128()?);
        let (shard, shards, layout) = (from.u16()?, from.u16()?, from.take()?);
        let (page_bytes, ratio) = (from.u64()?, from.u32()?);
        let geometry = Geometry {
            page_bytes,
            stride: from.u64()?,
            slot_bytes: from.u64()?,
            stripe_pages: from.u32()?,
            disks: from.u16()?,
            segment_pages: from.u32()?,
        };
        geometry.check(ratio)?;
        let key = SetKey {
            layout,
            page_bytes,
            ratio,
            shards,
        };
        Ok(Self {
            set,
            tier,
            shard,
            key,
            geometry,
        })
    }

    /// Writes the file. Durable when the call returns.
    pub(in super::super) fn write(&self, files: &dyn Files) -> io::Result<()> {
        let mut body = Writer::default();
        body.u128(self.set);
        body.u128(self.tier);
        body.u16(self.shard);
        body.u16(self.key.shards);
        body.bytes(&self.key.layout);
        body.u64(self.key.page_bytes);
        body.u32(self.key.ratio);
        body.u64(self.geometry.stride);
        body.u64(self.geometry.slot_bytes);
        body.u32(self.geometry.stripe_pages);
        body.u16(self.geometry.disks);
        body.u32(self.geometry.segment_pages);
        replace(files, SET_NAME, MAGIC, &body.0)
    }
}
