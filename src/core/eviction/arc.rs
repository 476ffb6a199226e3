//! The adaptive part of ARC: remembers evicted pages, and decides which list the next victim comes from.
//!
//! Blocks that were used once and blocks that were used again are in two lists. A page that is stored soon after its
//! eviction shows that its list was too short, so the target for the pages of the first list moves towards it (Megiddo
//! and Modha, ARC, FAST 2003). Pages are counted, because blocks differ in length.

use std::collections::BTreeMap;

use kvferry_types::{DomainId, Fingerprint};

/// The list of blocks that were used once, and that of blocks that were used again.
pub(super) const ONCE: u8 = 0;
pub(super) const AGAIN: u8 = 1;

/// Evicted pages that are remembered for each list, at most, and no more than the tier has pages: about 64 bytes each,
/// 128 MiB for both lists.
pub const REMEMBERED_PAGES_MAX: usize = 1 << 20;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Adaptive {
    capacity: u64,
    /// Pages that the first list should have.
    target: u64,
    remembered: [Remembered; 2],
    /// The page that is stored now was evicted from the second list.
    recalled_from_again: bool,
}

/// Evicted pages, by key and by the order of their eviction.
#[derive(Debug, Default)]
struct Remembered {
    by_page: BTreeMap<u64, u64>,
    by_age: BTreeMap<u64, u64>,
    evictions: u64,
}

impl Remembered {
    fn len(&self) -> u64 {
        self.by_page.len() as u64
    }

    fn add(&mut self, page: u64) {
        self.remove(page);
        self.evictions += 1;
        self.by_page.insert(page, self.evictions);
        self.by_age.insert(self.evictions, page);
        while self.by_page.len() > REMEMBERED_PAGES_MAX {
            self.remove_oldest();
        }
    }

    fn remove(&mut self, page: u64) -> bool {
        let evicted = self.by_page.remove(&page);
        evicted.is_some_and(|evicted| self.by_age.remove(&evicted).is_some())
    }

    fn remove_oldest(&mut self) {
        if let Some((_, page)) = self.by_age.pop_first() {
            self.by_page.remove(&page);
        }
    }
}

/// The key of a page. Two pages with one key only move the target.
fn key(domain: DomainId, page: Fingerprint) -> u64 {
    let both = domain.0 ^ page.0;
    #[expect(clippy::cast_possible_truncation, reason = "both halves are used")]
    let (low, high) = (both as u64, (both >> 64) as u64);
    low ^ high.rotate_left(32)
}

impl Adaptive {
    pub(super) fn new(capacity_pages: u32) -> Self {
        Self {
            capacity: capacity_pages.into(),
            ..Self::default()
        }
    }

    /// Remembers a page that is evicted from a list.
    pub(super) fn evicted(&mut self, list: u8, domain: DomainId, page: Fingerprint) {
        self.remembered[usize::from(list)].add(key(domain, page));
    }

    /// Adapts the target to pages that are stored. Returns whether the first of them was evicted recently.
    pub(super) fn recall(
        &mut self,
        domain: DomainId,
        pages: impl Iterator<Item = Fingerprint>,
    ) -> bool {
        let mut first = None;
        self.recalled_from_again = false;
        for page in pages {
            let page = key(domain, page);
            let [once, again] = [0, 1].map(|list: usize| self.remembered[list].len());
            let hit = if self.remembered[usize::from(ONCE)].remove(page) {
                self.target = self.capacity.min(self.target + (again / once).max(1));
                Some(ONCE)
            } else if self.remembered[usize::from(AGAIN)].remove(page) {
                self.target = self.target.saturating_sub((once / again).max(1));
                Some(AGAIN)
            } else {
                None
            };
            first.get_or_insert(hit);
        }
        let first = first.flatten();
        self.recalled_from_again = first == Some(AGAIN);
        first.is_some()
    }

    /// The list from which the next victim is taken, if it has one.
    pub(super) fn victims(&self, once_pages: u64) -> u8 {
        let over = once_pages > self.target;
        let at = once_pages == self.target && once_pages > 0 && self.recalled_from_again;
        if over || at { ONCE } else { AGAIN }
    }

    /// Forgets the oldest of the remembered pages that are too many beside the pages in the lists.
    pub(super) fn trim(&mut self, once_pages: u64, again_pages: u64) {
        let [once, again] = &mut self.remembered;
        while once.len() > 0 && once_pages + once.len() > self.capacity {
            once.remove_oldest();
        }
        let all = 2 * self.capacity;
        while again.len() > 0 && once_pages + once.len() + again_pages + again.len() > all {
            again.remove_oldest();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DOMAIN: DomainId = DomainId(7);

    fn page(number: u128) -> Fingerprint {
        Fingerprint(number)
    }

    #[test]
    fn the_target_moves_towards_the_list_whose_pages_are_stored_again() {
        let mut arc = Adaptive::new(4);
        for number in 0..3 {
            arc.evicted(ONCE, DOMAIN, page(number));
        }
        arc.evicted(AGAIN, DOMAIN, page(9));
        assert!(!arc.recall(DOMAIN, std::iter::once(page(5))));
        assert!(!arc.recall(DomainId(8), std::iter::once(page(0))));
        assert_eq!(
            (arc.target, arc.victims(0), arc.victims(1)),
            (0, AGAIN, ONCE)
        );
        assert!(arc.recall(DOMAIN, [page(0), page(1)].into_iter()));
        assert_eq!(
            (arc.target, arc.victims(2), arc.victims(3)),
            (2, AGAIN, ONCE)
        );
        assert!(arc.recall(DOMAIN, std::iter::once(page(9))));
        assert_eq!((arc.target, arc.victims(1)), (1, ONCE), "a tie");
        assert!(
            !arc.recall(DOMAIN, std::iter::once(page(9))),
            "was forgotten"
        );
        assert_eq!(arc.victims(1), AGAIN);
    }

    #[test]
    fn pages_are_remembered_up_to_the_capacity() {
        let mut arc = Adaptive::new(4);
        for number in 0..4 {
            arc.evicted(ONCE, DOMAIN, page(number));
            arc.evicted(AGAIN, DOMAIN, page(10 + number));
        }
        arc.trim(2, 1);
        let lens = |arc: &Adaptive| [arc.remembered[0].len(), arc.remembered[1].len()];
        assert_eq!(lens(&arc), [2, 3]);
        assert!(!arc.recall(DOMAIN, std::iter::once(page(1))));
        assert!(arc.recall(DOMAIN, std::iter::once(page(2))));
        assert!(!arc.recall(DOMAIN, std::iter::once(page(10))));
        assert!(arc.recall(DOMAIN, std::iter::once(page(11))));
    }
}
