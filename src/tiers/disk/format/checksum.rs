//! Checksums of pages.

use std::hash::Hasher as _;

use kvferry_types::{Anchor, DomainId, Fingerprint, Stored};
use siphasher::sip::SipHasher13;
use twox_hash::XxHash3_64;

/// Checksum of a page, bound to its place: see [`SetKeys::page_sum`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PageSum(pub u64);

/// The keys of one set's checksums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) struct SetKeys {
    key: [u64; 2],
    shard: u16,
}

/// The bytes of a page so far.
pub(in super::super) struct PageHasher {
    bytes: XxHash3_64,
    len: u64,
}

impl PageHasher {
    /// Adds the next bytes of the page.
    pub(in super::super) fn add(&mut self, bytes: &[u8]) {
        self.bytes.write(bytes);
        self.len += bytes.len() as u64;
    }
}

/// What a page's checksum covers besides its bytes.
#[derive(Debug, Clone, Copy)]
pub(in super::super) struct PagePlace {
    pub(in super::super) anchor: Anchor,
    pub(in super::super) domain: DomainId,
    /// Index of the page in its block.
    pub(in super::super) index: u16,
    pub(in super::super) fingerprint: Fingerprint,
    pub(in super::super) stored: Stored,
}

impl SetKeys {
    /// The keys of a set with this random id.
    pub(in super::super) fn new(set: u128, shard: u16) -> Self {
        let key = [(set >> 64) as u64, set as u64];
        Self { key, shard }
    }

    /// Checksum of a page: of its bytes by XXH3, and of its place by SipHash-1-3 under the set's random id. A page that is
    /// read for another place, block, store, shard or set does not match.
    pub(in super::super) fn page_sum(&self, place: &PagePlace, bytes: &[u8]) -> PageSum {
        let mut sum = self.begin_sum();
        sum.add(bytes);
        self.end_sum(place, sum)
    }

    /// Begins the checksum of a page whose bytes are added piece by piece.
    pub(in super::super) fn begin_sum(&self) -> PageHasher {
        PageHasher {
            bytes: XxHash3_64::new(),
            len: 0,
        }
    }

    /// Ends a checksum: see [`Self::page_sum`].
    pub(in super::super) fn end_sum(&self, place: &PagePlace, sum: PageHasher) -> PageSum {
        let [high, low] = self.key;
        let mut hasher = SipHasher13::new_with_keys(high, low);
        hasher.write_u64(sum.bytes.finish());
        hasher.write_u64(sum.len);
        hasher.write_u128(place.anchor.0);
        hasher.write_u128(place.domain.0);
        hasher.write_u128(place.fingerprint.0);
        hasher.write_u64(place.stored.epoch.0);
        hasher.write_u64(place.stored.transfer.0);
        hasher.write_u16(place.index);
        hasher.write_u16(self.shard);
        PageSum(hasher.finish())
    }

    /// Seed of the checksums of regions.
    pub(in super::super) fn region_seed(&self) -> u64 {
        self.key[0] ^ self.key[1].rotate_left(32) ^ u64::from(self.shard)
    }
}
