//! The engine's own paged prefix cache (G1): maps pages of sequences to pages of device memory.
//!
//! Eviction is least recently used, the tail of a sequence first: a request that ends returns its pages from the last
//! to the first, so that the root is the most recent.

use hashbrown::HashMap;
use hashbrown::hash_map::Entry;

use kvferry_types::Fingerprint;

const NONE: u32 = u32::MAX;

#[derive(Debug, Clone, Copy)]
struct Page {
    holders: u32,
    content: Option<Fingerprint>,
    older: u32,
    newer: u32,
}

/// Pages of device memory by content.
#[derive(Debug)]
pub struct PagedCache {
    pages: Vec<Page>,
    free: Vec<u32>,
    by_content: HashMap<Fingerprint, u32>,
    oldest: u32,
    newest: u32,
    idle: u32,
    keep: u32,
}

impl PagedCache {
    /// Creates a cache of `pages` of device memory, of which at most `keep` stay cached while no request holds them.
    pub fn new(pages: u32, keep: u32) -> Self {
        let page = Page {
            holders: 0,
            content: None,
            older: NONE,
            newer: NONE,
        };
        Self {
            pages: vec![page; pages as usize],
            free: (0..pages).rev().collect(),
            by_content: HashMap::new(),
            oldest: NONE,
            newest: NONE,
            idle: 0,
            keep,
        }
    }

    /// Pages that a request can get now: free ones and idle ones.
    pub fn available(&self) -> u32 {
        self.idle + u32::try_from(self.free.len()).unwrap_or(u32::MAX)
    }

    /// Holds the longest cached prefix of a sequence and returns its pages in order.
    pub fn hold_prefix(&mut self, contents: impl Iterator<Item = Fingerprint>) -> Vec<u32> {
        let mut held = Vec::new();
        for content in contents {
            let Some(page) = self.by_content.get(&content).copied() else {
                break;
            };
            self.hold(page);
            held.push(page);
        }
        held
    }

    /// Takes `count` pages for new content, the free ones first, then the oldest idle ones. Returns `None` and changes
    /// nothing when fewer are available.
    pub fn take(&mut self, count: u32) -> Option<Vec<u32>> {
        if self.available() < count {
            return None;
        }
        let mut taken = Vec::with_capacity(count as usize);
        for _ in 0..count {
            let page = self.free.pop().or_else(|| self.evict_oldest())?;
            self.pages[page as usize].holders = 1;
            taken.push(page);
        }
        Some(taken)
    }

    /// Records the content of a page. If another page already has this content, lookups keep finding that one.
    pub fn written(&mut self, page: u32, content: Fingerprint) {
        let held = &mut self.pages[page as usize];
        if held.content.is_none()
            && let Entry::Vacant(place) = self.by_content.entry(content)
        {
            place.insert(page);
            held.content = Some(content);
        }
    }

    /// Returns the pages of a sequence, given in the order of the sequence.
    pub fn give_back(&mut self, pages: &[u32]) {
        for page in pages.iter().rev() {
            let held = &mut self.pages[*page as usize];
            held.holders -= 1;
            if held.holders > 0 {
                continue;
            }
            match held.content {
                Some(_) => self.append(*page),
                None => self.free.push(*page),
            }
        }
        while self.idle > self.keep {
            if let Some(page) = self.evict_oldest() {
                self.free.push(page);
            }
        }
    }

    /// Pages that requests hold.
    pub fn held_pages(&self) -> u32 {
        u32::try_from(self.pages.len()).unwrap_or(u32::MAX) - self.available()
    }

    fn hold(&mut self, page: u32) {
        if self.pages[page as usize].holders == 0 {
            self.unlink(page);
        }
        self.pages[page as usize].holders += 1;
    }

    fn evict_oldest(&mut self) -> Option<u32> {
        let page = self.oldest;
        if page == NONE {
            return None;
        }
        self.unlink(page);
        if let Some(content) = self.pages[page as usize].content.take() {
            self.by_content.remove(&content);
        }
        Some(page)
    }

    fn append(&mut self, page: u32) {
        let newest = self.newest;
        let entry = &mut self.pages[page as usize];
        entry.older = newest;
        entry.newer = NONE;
        match newest {
            NONE => self.oldest = page,
            _ => self.pages[newest as usize].newer = page,
        }
        self.newest = page;
        self.idle += 1;
    }

    fn unlink(&mut self, page: u32) {
        let Page { older, newer, .. } = self.pages[page as usize];
        match older {
            NONE => self.oldest = newer,
            _ => self.pages[older as usize].newer = newer,
        }
        match newer {
            NONE => self.newest = older,
            _ => self.pages[newer as usize].older = older,
        }
        self.idle -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn contents(ids: &[u8]) -> impl Iterator<Item = Fingerprint> {
        ids.iter().map(|id| Fingerprint(u128::from(*id)))
    }

    fn serve(cache: &mut PagedCache, ids: &[u8]) -> usize {
        let mut pages = cache.hold_prefix(contents(ids));
        let hits = pages.len();
        pages.extend(cache.take((ids.len() - hits) as u32).expect("room"));
        for (page, content) in pages.iter().zip(contents(ids)) {
            cache.written(*page, content);
        }
        cache.give_back(&pages);
        hits
    }

    #[test]
    fn the_tail_of_a_sequence_is_evicted_before_its_root() {
        let mut cache = PagedCache::new(4, 4);
        assert_eq!(serve(&mut cache, &[1, 2, 3]), 0);
        assert_eq!(serve(&mut cache, &[7, 8]), 0, "evicts page 3, the tail");
        assert_eq!(serve(&mut cache, &[1, 2]), 2);
        assert_eq!(cache.held_pages(), 0);
    }

    #[test]
    fn a_cache_of_size_zero_finds_nothing() {
        let mut cache = PagedCache::new(3, 0);
        assert_eq!(serve(&mut cache, &[1, 2, 3]), 0);
        assert_eq!(serve(&mut cache, &[1, 2, 3]), 0);
        assert_eq!(cache.available(), 3);
    }

    #[test]
    fn held_pages_are_not_taken() {
        let mut cache = PagedCache::new(3, 3);
        serve(&mut cache, &[1, 2]);
        let held = cache.hold_prefix(contents(&[1, 2]));
        assert!(cache.take(2).is_none());
        assert!(cache.take(1).is_some());
        cache.give_back(&held);
        assert_eq!(cache.available(), 2);
    }
}
