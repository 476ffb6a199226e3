//! Page hashes as the engine computes them, and the keys that kvferry derives from them.

use std::fmt;

/// Shortest accepted page hash, in bytes: a fingerprint needs 128 bits.
pub const HASH_BYTES_MIN: usize = 16;
/// Longest accepted page hash, in bytes.
pub const HASH_BYTES_MAX: usize = 64;

/// Last 128 bits of a page hash, by which pages are found and compared. Engines publish the last 64 bits of a hash in
/// their KV events, so that a removal can be reported by the fingerprint alone.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fingerprint(pub u128);

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x}", self.0 >> 96)
    }
}

/// Keyed 128-bit hash of domain and fingerprint of a block's first page, by which a block is found.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Anchor(pub u128);

impl fmt::Debug for Anchor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x}", self.0 >> 96)
    }
}

/// Consecutive page hashes of one sequence, from its first page on, packed without gaps as the engine sent them.
///
/// `bytes.len()` is a multiple of the width, and the width lies in [`HASH_BYTES_MIN`]`..=`[`HASH_BYTES_MAX`]: the
/// constructor refuses anything else.
#[derive(Clone, PartialEq, Eq)]
pub struct PageHashes {
    width: usize,
    bytes: Vec<u8>,
}

impl PageHashes {
    /// No pages, with the width that later pages must have.
    pub fn empty(width: usize) -> Option<Self> {
        Self::packed(width, Vec::new())
    }

    /// Wraps packed hashes; `None` when the width is out of bounds or the length is not a multiple of it.
    pub fn packed(width: usize, bytes: Vec<u8>) -> Option<Self> {
        let fits =
            (HASH_BYTES_MIN..=HASH_BYTES_MAX).contains(&width) && bytes.len().is_multiple_of(width);
        fits.then_some(Self { width, bytes })
    }

    /// Hashes that consist of these fingerprints.
    pub fn of_fingerprints(pages: impl IntoIterator<Item = Fingerprint>) -> Self {
        let pages = pages.into_iter().map(|page| page.0.to_be_bytes());
        Self {
            width: HASH_BYTES_MIN,
            bytes: pages.flatten().collect(),
        }
    }

    /// Width of one hash, in bytes.
    pub fn width(&self) -> usize {
        self.width
    }

    /// The packed hashes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Unwraps the packed hashes.
    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }

    /// Number of pages.
    pub fn len(&self) -> usize {
        self.bytes.len() / self.width
    }

    /// True when there are no pages.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The hash of page `index`. Panics if `index` is out of bounds, as a slice does.
    pub fn get(&self, index: usize) -> &[u8] {
        &self.bytes[index * self.width..(index + 1) * self.width]
    }

    /// The fingerprint of page `index`. Panics if `index` is out of bounds, as a slice does.
    pub fn fingerprint(&self, index: usize) -> Fingerprint {
        self.view().fingerprint(index)
    }

    /// The fingerprints of the pages from `first` on. Panics if `first` is out of bounds, as a slice does.
    pub fn fingerprints(&self, first: usize) -> impl Iterator<Item = Fingerprint> + '_ {
        self.view().fingerprints(first)
    }

    /// A view in which each hash is one page.
    pub fn view(&self) -> HashView<'_> {
        self.view_of(1)
    }

    /// A view in which `per_page` hashes cover one page; 0 counts as 1.
    pub fn view_of(&self, per_page: u32) -> HashView<'_> {
        HashView {
            bytes: &self.bytes,
            page: self.width * per_page.max(1) as usize,
        }
    }

    /// Keeps the first `pages` pages.
    pub fn truncate(&mut self, pages: usize) {
        self.bytes.truncate(pages.saturating_mul(self.width));
    }

    /// Extends the sequence with `more`, whose first hash is that of page `from`. Hashes that are present must be
    /// equal, and further ones are appended. An error leaves the sequence unchanged.
    pub fn extend_from(&mut self, from: usize, more: &Self) -> Result<(), HashesDiffer> {
        if more.width != self.width {
            return Err(HashesDiffer::Width);
        }
        let known = self
            .len()
            .checked_sub(from)
            .ok_or(HashesDiffer::Gap { known: self.len() })?;
        let shared = known.min(more.len()) * self.width;
        let at = from * self.width;
        if self.bytes[at..at + shared] != more.bytes[..shared] {
            return Err(HashesDiffer::Content);
        }
        self.bytes.extend_from_slice(&more.bytes[shared..]);
        Ok(())
    }
}

/// The hashes of the pages of one group of layers: every n-th hash of a sequence.
///
/// Hashes extend a sequence by one unit of tokens, which every page size is a multiple of. A page is named by the hash
/// of all tokens up to its end, so that groups with pages of several sizes share one list of hashes.
#[derive(Clone, Copy)]
pub struct HashView<'a> {
    bytes: &'a [u8],
    /// Bytes of the hashes that a page covers, of which the last one names the page.
    page: usize,
}

impl<'a> HashView<'a> {
    /// Number of pages that have a hash.
    pub fn len(self) -> usize {
        self.bytes.len() / self.page
    }

    /// True when no page has a hash.
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// The fingerprint of page `page`. Panics if `page` is out of bounds, as a slice does.
    pub fn fingerprint(self, page: usize) -> Fingerprint {
        let end = (page + 1) * self.page;
        let mut last = [0; HASH_BYTES_MIN];
        last.copy_from_slice(&self.bytes[end - HASH_BYTES_MIN..end]);
        Fingerprint(u128::from_be_bytes(last))
    }

    /// The fingerprints of the pages from `first` on. Panics if `first` is out of bounds, as a slice does.
    pub fn fingerprints(self, first: usize) -> impl Iterator<Item = Fingerprint> + 'a {
        let pages = self.bytes[first * self.page..].chunks_exact(self.page);
        pages
            .filter_map(|page| page.last_chunk())
            .map(|last| Fingerprint(u128::from_be_bytes(*last)))
    }

    /// The low halves of the fingerprints of the pages from `first` on: as good as the whole for a filter, and read in half
    /// the time. Panics if `first` is out of bounds, as a slice does.
    pub fn low_halves(self, first: usize) -> impl Iterator<Item = u64> + 'a {
        let pages = self.bytes[first * self.page..].chunks_exact(self.page);
        pages
            .filter_map(|page| page.last_chunk())
            .map(|last| u64::from_be_bytes(*last))
    }
}

impl fmt::Debug for HashView<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HashView({} x {} B)", self.len(), self.page)
    }
}

/// Why hashes do not continue a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HashesDiffer {
    /// The width of the hashes differs.
    Width,
    /// The new hashes begin after the end of the sequence.
    Gap {
        /// Number of hashes in the sequence.
        known: usize,
    },
    /// A page of the sequence has another hash.
    Content,
}

impl fmt::Debug for PageHashes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PageHashes({} x {} B)", self.len(), self.width)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_widths_and_lengths_that_do_not_fit() {
        assert!(PageHashes::packed(15, vec![]).is_none());
        assert!(PageHashes::packed(65, vec![]).is_none());
        assert!(PageHashes::packed(16, vec![0; 17]).is_none());
        assert_eq!(
            PageHashes::packed(16, vec![0; 32]).map(|h| h.len()),
            Some(2)
        );
    }

    #[test]
    fn a_fingerprint_is_the_last_128_bits_big_endian() {
        let mut bytes = vec![0; 20];
        bytes[3] = 0xff;
        bytes[4] = 0x80;
        bytes[19] = 1;
        let hashes = PageHashes::packed(20, bytes).expect("fits");
        assert_eq!(hashes.fingerprint(0), Fingerprint((1 << 127) | 1));
    }

    #[test]
    fn fingerprints_are_those_of_each_page() {
        let hashes = PageHashes::packed(20, (0..60).collect()).expect("fits");
        let one_by_one: Vec<_> = (1..3).map(|page| hashes.fingerprint(page)).collect();
        assert_eq!(hashes.fingerprints(1).collect::<Vec<_>>(), one_by_one);
        assert_eq!(hashes.fingerprints(3).count(), 0);
    }

    #[test]
    fn a_page_of_several_hashes_has_the_last_of_them() {
        let hashes = PageHashes::packed(16, (0..=111).collect()).expect("seven hashes");
        let view = hashes.view_of(3);
        assert_eq!((view.len(), view.is_empty()), (2, false));
        let expected = [hashes.fingerprint(2), hashes.fingerprint(5)];
        assert_eq!(view.fingerprints(0).collect::<Vec<_>>(), expected);
        assert_eq!(view.fingerprints(1).collect::<Vec<_>>(), expected[1..]);
        assert_eq!(view.fingerprints(2).count(), 0);
        assert_eq!([view.fingerprint(0), view.fingerprint(1)], expected);
        assert!(hashes.view_of(8).is_empty());
        let whole = hashes.view();
        assert_eq!(whole.len(), hashes.len());
        assert_eq!(whole.fingerprint(6), hashes.fingerprint(6));
    }
}
