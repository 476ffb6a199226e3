//! Which bytes of which file a page is, and how many pages a cap has room for.

use std::fmt;

use super::super::buffer::UNIT_BYTES;
use super::codec::file_bytes;
use super::region::{REGION_PAGES, slot_bytes};
use super::{FormatError, marks, region};

/// Segments are about this part of a disk's share of the cap, so that less than that is lost at its end.
const SEGMENTS_OF_A_CAP: u64 = 64;
/// Largest segment, in bytes, unless a stripe is larger: a cap of 4 TiB has 512 files.
const SEGMENT_BYTES_MAX: u64 = 8 << 30;
/// Room in each disk's share of the cap for small files: identity, lock, set files and their replacements.
const SMALL_FILES_BYTES: u64 = 16 * UNIT_BYTES;
/// Part of the cap that the marks of resets may use.
const MARKS_OF_A_CAP: u64 = 256;
/// Most pages of one set: page numbers are below that in the leader.
const PAGES_MAX: u64 = 1 << 31;

/// Bytes of a segment, for a share of the cap of `share` bytes on each disk. A segment holds at least one stripe, which
/// depends on the model.
pub fn segment_bytes(share: u64) -> u64 {
    (share / SEGMENTS_OF_A_CAP).min(SEGMENT_BYTES_MAX)
}

/// Most segments of one disk, for a share of the cap of `share` bytes.
pub fn segment_files(share: u64) -> u64 {
    share.checked_div(segment_bytes(share)).unwrap_or(0)
}

/// What the pages of a set are. Sets whose keys differ in any field have files of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SetKey {
    /// Fingerprint of the layout of a page, which covers the model's content.
    pub layout: [u8; 16],
    /// Bytes of a page.
    pub page_bytes: u64,
    /// Pages in the largest block.
    pub ratio: u32,
    /// Number of shards of the model.
    pub shards: u16,
}

impl SetKey {
    /// Name of the set's directory.
    pub fn name(&self) -> String {
        self.to_string()
    }

    /// True for the name of a set's directory.
    pub fn is_name(name: &str) -> bool {
        let mut parts = name.split('-');
        let layout = parts.next().unwrap_or_default();
        let hex = layout.len() == 32 && layout.bytes().all(|byte| byte.is_ascii_hexdigit());
        hex && parts.count() == 3
    }
}

impl fmt::Display for SetKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.layout
            .iter()
            .try_for_each(|byte| write!(f, "{byte:02x}"))?;
        let Self {
            page_bytes,
            ratio,
            shards,
            ..
        } = self;
        write!(f, "-{page_bytes}-r{ratio}-s{shards}")
    }
}

/// Where a range of consecutive pages lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// The disk.
    pub disk: usize,
    /// The segment on that disk.
    pub segment: u32,
    /// Offset in the segment's file, in bytes.
    pub at: u64,
    /// Number of pages.
    pub pages: u32,
}

/// Sizes and places of a set's files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Bytes of a page.
    pub page_bytes: u64,
    /// Bytes from one page to the next, a multiple of [`UNIT_BYTES`].
    pub stride: u64,
    /// Bytes of one of the two slots of a region.
    pub slot_bytes: u64,
    /// Pages that lie on one disk before the next ones lie on the next disk: a multiple of [`REGION_PAGES`].
    pub stripe_pages: u32,
    /// Number of disks.
    pub disks: u16,
    /// Pages of a segment, a multiple of `stripe_pages`.
    pub segment_pages: u32,
}

impl Geometry {
    /// The geometry of a new set, for a share of the cap of `share` bytes on each disk. The geometry of a set is kept in
    /// its set file, and does not change with the cap.
    ///
    /// # Errors
    ///
    /// A field of the key that is 0 or too large.
    pub fn new(key: &SetKey, disks: u16, share: u64) -> Result<Self, FormatError> {
        let stripe_pages = key.ratio.max(1).next_multiple_of(REGION_PAGES);
        let mut geometry = Self {
            page_bytes: key.page_bytes,
            stride: key.page_bytes.next_multiple_of(UNIT_BYTES),
            slot_bytes: slot_bytes(key.ratio),
            stripe_pages,
            disks,
            segment_pages: stripe_pages,
        };
        geometry.check(key.ratio)?;
        let stripes = (segment_bytes(share) / geometry.segment_bytes()).max(1);
        let most = u64::from(u32::MAX / 2 / stripe_pages);
        geometry.segment_pages = stripe_pages * u32::try_from(stripes.min(most)).unwrap_or(1);
        Ok(geometry)
    }

    /// Checks the fields, also those of a set file.
    pub(super) fn check(&self, ratio: u32) -> Result<(), FormatError> {
        let fields = [
            ("page_bytes", self.page_bytes, 1..=1 << 40),
            ("ratio", u64::from(ratio), 1..=256),
            ("disks", u64::from(self.disks), 1..=64),
            ("slot_bytes", self.slot_bytes, 1..=slot_bytes(256)),
            ("stripe_pages", u64::from(self.stripe_pages), 1..=1 << 16),
            (
                "segment_pages",
                u64::from(self.segment_pages),
                1..=PAGES_MAX,
            ),
        ];
        for (field, value, range) in fields {
            if !range.contains(&value) {
                return Err(FormatError::Field { field, value });
            }
        }
        let multiples = [
            ("stride", self.stride, UNIT_BYTES),
            ("slot_bytes", self.slot_bytes, UNIT_BYTES),
            (
                "stripe_pages",
                self.stripe_pages.into(),
                REGION_PAGES.into(),
            ),
            (
                "segment_pages",
                self.segment_pages.into(),
                self.stripe_pages.into(),
            ),
        ];
        for (field, value, of) in multiples {
            if value == 0 || value % of != 0 {
                return Err(FormatError::Field { field, value });
            }
        }
        let fits = self.stride >= self.page_bytes && self.slot_bytes >= slot_bytes(ratio);
        let too_long = self.stride.checked_mul(self.segment_pages.into()).is_none();
        match fits && !too_long {
            true => Ok(()),
            false => Err(FormatError::Field {
                field: "stride",
                value: self.stride,
            }),
        }
    }

    /// Bytes of a segment's table.
    pub fn table_bytes(&self) -> u64 {
        u64::from(self.segment_pages / REGION_PAGES) * 2 * self.slot_bytes
    }

    /// Bytes of a segment's file.
    pub fn segment_bytes(&self) -> u64 {
        self.table_bytes() + u64::from(self.segment_pages) * self.stride
    }

    /// Pages of one segment on every disk.
    fn row_pages(&self) -> u64 {
        u64::from(self.segment_pages) * u64::from(self.disks)
    }

    /// Number of segments on each disk for which a share of the cap has room, with all other files.
    pub fn segments(&self, share: u64) -> u32 {
        let index = region::INDEX_BYTES_PER_PAGE * self.row_pages();
        let each = self.segment_bytes().saturating_add(index);
        let other = SMALL_FILES_BYTES + Self::marks_bytes(share) + file_bytes(0);
        let room = share.saturating_sub(other);
        let most = PAGES_MAX / self.row_pages();
        u32::try_from((room / each).min(most)).unwrap_or(u32::MAX)
    }

    /// The smallest share of the cap on each disk that has room for pages of a key; `None` for a key that no set can have.
    pub fn smallest_share(key: &SetKey, disks: u16) -> Option<u64> {
        Self::share_for(key, disks, 1)
    }

    /// A share of the cap on each disk that has room for this many pages of a key, and is hardly larger than needed. `None`
    /// for a key that no set can have, and for more pages than a set can have.
    pub fn share_for(key: &SetKey, disks: u16, pages: u32) -> Option<u64> {
        let has_room = |share: u64| {
            let geometry = Self::new(key, disks, share).ok()?;
            Some(geometry.pages(geometry.segments(share)) >= pages)
        };
        let (mut less, mut enough) = (0, UNIT_BYTES);
        while !has_room(enough)? {
            less = enough;
            enough = enough.checked_mul(2)?;
        }
        while enough - less > UNIT_BYTES {
            let share = less + (enough - less) / 2;
            match has_room(share)? {
                true => enough = share,
                false => less = share,
            }
        }
        Some(enough)
    }

    /// Number of pages of a set with this many segments on each disk.
    pub fn pages(&self, segments: u32) -> u32 {
        u32::try_from(u64::from(segments) * self.row_pages()).unwrap_or(u32::MAX)
    }

    /// Bytes that the marks of resets may use, of a share of the cap.
    pub fn marks_bytes(share: u64) -> u64 {
        let part = share / MARKS_OF_A_CAP / UNIT_BYTES * UNIT_BYTES;
        // Twice: a file is replaced by a new one.
        2 * part.clamp(marks::FILE_BYTES_MIN, marks::FILE_BYTES_MAX)
    }

    /// Where a page lies: disk, segment on that disk, and index in the segment.
    fn place(&self, page: u32) -> (usize, u32, u32) {
        let stripe = page / self.stripe_pages;
        let disks = u32::from(self.disks);
        let disk = stripe % disks;
        let local = stripe / disks * self.stripe_pages + page % self.stripe_pages;
        let (segment, index) = (local / self.segment_pages, local % self.segment_pages);
        (disk as usize, segment, index)
    }

    /// The page at an index of a segment: the reverse of `place`.
    pub fn page_of(&self, disk: usize, segment: u32, index: u32) -> u64 {
        let local = u64::from(segment) * u64::from(self.segment_pages) + u64::from(index);
        let stripe_pages = u64::from(self.stripe_pages);
        let stripe = local / stripe_pages * u64::from(self.disks) + disk as u64;
        stripe * stripe_pages + local % stripe_pages
    }

    /// The extents of `count` pages from `start` on, in order. Neighbours that lie one after the other are one extent.
    pub fn extents(&self, start: u32, count: u32) -> Vec<Extent> {
        let mut extents: Vec<Extent> = Vec::new();
        let (mut page, end) = (start, start.saturating_add(count));
        while page < end {
            let (disk, segment, index) = self.place(page);
            let pages = (self.stripe_pages - page % self.stripe_pages).min(end - page);
            let at = self.table_bytes() + u64::from(index) * self.stride;
            match extents.last_mut() {
                Some(last)
                    if (last.disk, last.segment) == (disk, segment)
                        && last.at + u64::from(last.pages) * self.stride == at =>
                {
                    last.pages += pages;
                }
                _ => extents.push(Extent {
                    disk,
                    segment,
                    at,
                    pages,
                }),
            }
            page += pages;
        }
        extents
    }

    /// Where a slot of the region of a page lies: disk, segment and offset in bytes.
    pub fn slot_at(&self, region: u32, slot: u8) -> (usize, u32, u64) {
        let (disk, segment, index) = self.place(region * REGION_PAGES);
        let place = u64::from(index / REGION_PAGES) * 2 + u64::from(slot & 1);
        (disk, segment, place * self.slot_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(page_bytes: u64, ratio: u32) -> SetKey {
        SetKey {
            layout: [7; 16],
            page_bytes,
            ratio,
            shards: 2,
        }
    }

    #[test]
    fn every_page_has_a_place_of_its_own() {
        for (disks, ratio) in [(1, 1), (1, 32), (2, 20), (3, 256)] {
            let geometry = Geometry::new(&key(5000, ratio), disks, 64 << 20).expect("valid");
            let segments = 3;
            let mut places = std::collections::BTreeSet::new();
            for page in 0..geometry.pages(segments) {
                let extents = geometry.extents(page, 1);
                let [extent] = extents.as_slice() else {
                    panic!("{extents:?}");
                };
                assert!(extent.segment < segments && extent.disk < usize::from(disks));
                assert!(extent.at >= geometry.table_bytes());
                assert!(extent.at + geometry.stride <= geometry.segment_bytes());
                assert!(places.insert((extent.disk, extent.segment, extent.at)));
                let index = ((extent.at - geometry.table_bytes()) / geometry.stride) as u32;
                let back = geometry.page_of(extent.disk, extent.segment, index);
                assert_eq!(back, u64::from(page));
            }
        }
    }

    #[test]
    fn a_run_is_split_at_stripes_of_several_disks_and_at_segments() {
        let geometry = Geometry::new(&key(4096, 16), 2, 1 << 20).expect("valid");
        assert_eq!(geometry.segment_pages, 16, "a small cap");
        let pages = |extents: Vec<Extent>| -> Vec<(usize, u32, u32)> {
            let parts = extents.iter();
            parts
                .map(|one| (one.disk, one.segment, one.pages))
                .collect()
        };
        let found = pages(geometry.extents(10, 40));
        assert_eq!(found, [(0, 0, 6), (1, 0, 16), (0, 1, 16), (1, 1, 2)]);
        let one = Geometry::new(&key(4096, 16), 1, 1 << 30).expect("valid");
        assert_eq!(pages(one.extents(10, 40)), [(0, 0, 40)]);
    }

    #[test]
    fn all_files_of_a_full_set_fit_into_the_cap() {
        for share in [1 << 20, 3 << 20, 100 << 20, 5 << 30, 1 << 42_u64] {
            for (page_bytes, ratio) in [(4096, 32), (100, 256), (2 << 20, 32), (65_536, 1)] {
                let geometry = Geometry::new(&key(page_bytes, ratio), 1, share).expect("valid");
                let segments = geometry.segments(share);
                let pages = u64::from(geometry.pages(segments));
                let data = u64::from(segments) * geometry.segment_bytes();
                let index = file_bytes(pages * region::INDEX_BYTES_PER_PAGE);
                let bytes = data + index + SMALL_FILES_BYTES + Geometry::marks_bytes(share);
                assert!(
                    bytes <= share || segments == 0,
                    "{share} {page_bytes} {bytes}"
                );
                let used = pages * geometry.stride;
                let large =
                    share >= 100 << 20 && page_bytes >= 4096 && page_bytes * 64 < share / 64;
                assert!(
                    !large || used * 10 >= share * 8,
                    "{share} {page_bytes}: {used}"
                );
            }
        }
    }

    #[test]
    fn a_key_or_a_geometry_that_no_program_writes_is_refused() {
        assert!(Geometry::new(&key(0, 32), 1, 1 << 30).is_err());
        assert!(Geometry::new(&key(4096, 0), 1, 1 << 30).is_err());
        assert!(Geometry::new(&key(4096, 257), 1, 1 << 30).is_err());
        assert!(Geometry::new(&key(4096, 32), 0, 1 << 30).is_err());
        let good = Geometry::new(&key(4096, 32), 1, 1 << 30).expect("valid");
        let bad = Geometry {
            stride: 5000,
            ..good
        };
        assert!(bad.check(32).is_err());
        let bad = Geometry {
            slot_bytes: slot_bytes(256) + UNIT_BYTES,
            ..good
        };
        assert!(bad.check(32).is_err());
        let bad = Geometry {
            segment_pages: 33,
            ..good
        };
        assert!(bad.check(32).is_err());
    }
}
