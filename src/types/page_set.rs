//! Sets of page fingerprints with lookups in constant time.

use std::fmt;
use std::hash::BuildHasher;
use std::sync::Arc;

use hashbrown::HashTable;
use hashbrown::hash_table::Entry;

use super::Fingerprint;

/// Limit on the memory of a set, in bytes per page: 16 for the fingerprint, 2 for the filter, and up to 16/7 table
/// places of 5 bytes each. Sets of a few pages take several dozen bytes more.
pub const PAGE_SET_BYTES_PER_PAGE_MAX: usize = 30;
/// Pages per word of the filter.
const PAGES_PER_WORD: usize = 4;

/// Distinct fingerprints of pages, in the order in which they were first named. Clones share the memory.
///
/// A reset looks up every page of an arena, and every page that a lookup finds meanwhile, and nearly always the page is
/// not in the set. A filter answers all but about 1% of those lookups from one word of memory. The others are looked up
/// in a table.
#[derive(Clone, Default)]
pub struct PageSet(Arc<Named>);

#[derive(Default)]
struct Named {
    pages: Vec<Fingerprint>,
    filter: Filter,
    /// Positions in `pages`.
    places: HashTable<u32>,
    key: Key,
}

impl Named {
    fn find(&self, hash: u64, fingerprint: Fingerprint) -> bool {
        let same = |place: &u32| self.pages[*place as usize] == fingerprint;
        self.places.find(hash, same).is_some()
    }
}

impl PageSet {
    /// True when a page with this fingerprint is in the set.
    pub fn contains(&self, fingerprint: Fingerprint) -> bool {
        let named = &*self.0;
        let hash = named.key.hash(fingerprint);
        named.filter.may_contain(hash) && named.find(hash, fingerprint)
    }

    /// The fingerprints, in the order in which they were named.
    pub fn as_slice(&self) -> &[Fingerprint] {
        &self.0.pages
    }
}

impl FromIterator<Fingerprint> for PageSet {
    fn from_iter<I: IntoIterator<Item = Fingerprint>>(named: I) -> Self {
        let named = named.into_iter();
        let (at_least, _) = named.size_hint();
        let key = Key::random();
        let mut pages = Vec::with_capacity(at_least);
        let mut places = HashTable::with_capacity(at_least);
        for page in named {
            let entry = places.entry(
                key.hash(page),
                |place: &u32| pages[*place as usize] == page,
                |place| key.hash(pages[*place as usize]),
            );
            if let Entry::Vacant(entry) = entry {
                // Fits: a message names far fewer than 2^32 pages.
                entry.insert(pages.len() as u32);
                pages.push(page);
            }
        }
        // Pages that are named twice leave unused capacity.
        pages.shrink_to_fit();
        places.shrink_to_fit(|place| key.hash(pages[*place as usize]));
        let filter = Filter::new(pages.iter().map(|page| key.hash(*page)));
        Self(Arc::new(Named {
            pages,
            filter,
            places,
            key,
        }))
    }
}

impl PartialEq for PageSet {
    fn eq(&self, other: &Self) -> bool {
        self.as_slice() == other.as_slice()
    }
}

impl Eq for PageSet {}

impl fmt::Debug for PageSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("PageSet").field(&self.as_slice()).finish()
    }
}

/// A Bloom filter that keeps the bits of a page in one word, so that a lookup reads one cache line. 3 of 64 bits for
/// each page, with 4 pages per word on average.
#[derive(Default)]
struct Filter(Box<[u64]>);

impl Filter {
    fn new(hashes: impl ExactSizeIterator<Item = u64>) -> Self {
        let mut words = vec![0; hashes.len().div_ceil(PAGES_PER_WORD)];
        for hash in hashes {
            let index = Self::index(words.len(), hash);
            words[index] |= Self::bits(hash);
        }
        Self(words.into_boxed_slice())
    }

    /// False when no page with this hash is in the set.
    fn may_contain(&self, hash: u64) -> bool {
        let bits = Self::bits(hash);
        let word = self.0.get(Self::index(self.0.len(), hash));
        word.is_some_and(|word| word & bits == bits)
    }

    /// Index of a hash's word among `words`; hashes are spread evenly.
    fn index(words: usize, hash: u64) -> usize {
        (((hash >> 32) * words as u64) >> 32) as usize
    }

    fn bits(hash: u64) -> u64 {
        1 << (hash & 63) | 1 << (hash >> 6 & 63) | 1 << (hash >> 12 & 63)
    }
}

/// Multilinear hashing: the upper half of `k0 + k1 * low + k2 * high` modulo 2^128. The hash is strongly universal:
/// fingerprints chosen by an adversary without the key collide no more often than random ones. A digest such as
/// `SipHash` hides more than needed here, and takes several times as long.
#[derive(Debug, Clone, Copy, Default)]
struct Key([u128; 3]);

impl Key {
    /// A new key for each set, from the seeds of the standard library's maps. No answer reveals the key.
    #[expect(
        clippy::disallowed_types,
        reason = "the key changes how long a lookup takes, and never its answer"
    )]
    fn random() -> Self {
        let seeds = std::hash::RandomState::new();
        let half = |index: usize| u128::from(seeds.hash_one(index));
        Self([0, 1, 2].map(|index| half(2 * index) << 64 | half(2 * index + 1)))
    }

    fn hash(self, Fingerprint(page): Fingerprint) -> u64 {
        let Self([constant, by_low, by_high]) = self;
        let (low, high) = (page & u128::from(u64::MAX), page >> 64);
        let sum = constant
            .wrapping_add(by_low.wrapping_mul(low))
            .wrapping_add(by_high.wrapping_mul(high));
        (sum >> 64) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Limit on the pages that one message names.
    const MANY: u32 = 131_072;

    fn set(pages: impl IntoIterator<Item = u128>) -> PageSet {
        pages.into_iter().map(Fingerprint).collect()
    }

    /// Bytes that a set has allocated.
    fn allocated(set: &PageSet) -> usize {
        let pages = set.0.pages.capacity() * size_of::<Fingerprint>();
        pages + size_of_val(&*set.0.filter.0) + set.0.places.allocation_size()
    }

    #[test]
    fn named_pages_are_contained_once_and_in_their_order() {
        let named = set([5, 1 << 64, 5, 0, u128::MAX, 1 << 64]);
        let once = [5, 1 << 64, 0, u128::MAX].map(Fingerprint);
        assert_eq!(named.as_slice(), once);
        assert!(once.iter().all(|page| named.contains(*page)));
        for other in [1, 4, (1 << 64) + 5, u128::MAX - 1] {
            assert!(!named.contains(Fingerprint(other)), "{other:x}");
        }
        assert!(!PageSet::default().contains(Fingerprint(0)));
        assert_eq!(named, set(once.map(|page| page.0)));
        assert_ne!(named, set([5]));
    }

    #[test]
    fn a_set_takes_bounded_memory_also_when_its_pages_are_named_twice() {
        for pages in [1000, 7 << 13, (7 << 13) + 1, MANY] {
            let bound = pages as usize * PAGE_SET_BYTES_PER_PAGE_MAX;
            let different = set((0..pages).map(u128::from));
            assert!(allocated(&different) <= bound, "{pages} pages");
        }
        let same = set((0..MANY).map(|_| 7));
        assert_eq!(same.as_slice().len(), 1);
        assert!(allocated(&same) < 256, "{} bytes", allocated(&same));
    }

    #[test]
    fn a_filter_passes_few_absent_pages() {
        let mut rng = fastrand::Rng::with_seed(2);
        let filter = Filter::new(
            (0..MANY)
                .map(|_| rng.u64(..))
                .collect::<Vec<_>>()
                .into_iter(),
        );
        let through = (0..MANY).filter(|_| filter.may_contain(rng.u64(..)));
        let through = through.count() as u32;
        assert!(through < MANY / 50, "{through} of {MANY}");
    }

    /// Fingerprints with a pattern, as an adversary would choose them to fill one place of the table.
    #[test]
    fn fingerprints_with_a_pattern_spread_over_the_table() {
        let mut rng = fastrand::Rng::with_seed(1);
        for shift in [0, 16, 32, 57, 64, 96, 111] {
            let key = Key(std::array::from_fn(|_| rng.u128(..)));
            let mut lowest = [0_u32; 1 << 14];
            let mut highest = [0_u32; 1 << 7];
            let mut words = [0_u32; 1 << 14];
            for page in 0..MANY {
                let hash = key.hash(Fingerprint(u128::from(page) << shift));
                lowest[hash as usize % (1 << 14)] += 1;
                highest[(hash >> 57) as usize] += 1;
                words[Filter::index(1 << 14, hash)] += 1;
            }
            // Expected averages are 8 and 1,024. Table and filter index by the first two counts; the third is the tag
            // that the table compares first.
            assert!(lowest.iter().all(|count| *count <= 64), "by {shift}");
            assert!(words.iter().all(|count| *count <= 64), "by {shift}");
            assert!(highest.iter().all(|count| *count <= 8192), "by {shift}");
        }
    }

    #[test]
    fn each_set_has_a_key_of_its_own() {
        let (one, other) = (set([1]), set([1]));
        assert_ne!(one.0.key.0, other.0.key.0);
    }
}
