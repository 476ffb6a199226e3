//! Pages of device memory that all groups share, found by content. The least recently used page is evicted first.

use std::collections::BTreeMap;

use hashbrown::HashMap;
use hashbrown::hash_map::Entry;

use kvferry_types::{Fingerprint, GroupId};

/// The null page: no content, never allocated.
pub(super) const NULL: u32 = 0;

#[derive(Debug, Clone, Copy, Default)]
struct Page {
    holders: u32,
    content: Option<(GroupId, Fingerprint)>,
    /// Key in the order of eviction, while the page is idle.
    released: u64,
}

/// The pages: held by sequences, idle with content, or free.
#[derive(Debug)]
pub(super) struct DevicePages {
    pages: Vec<Page>,
    free: Vec<u32>,
    /// Idle pages by the time of their release.
    idle: BTreeMap<u64, u32>,
    /// Most idle pages.
    idle_max: usize,
    by_content: HashMap<(GroupId, Fingerprint), u32>,
    releases: u64,
}

impl DevicePages {
    /// `count` pages beside the null page, all free. At most `idle_max` stay idle.
    pub(super) fn new(count: u32, idle_max: u32) -> Self {
        Self {
            pages: vec![Page::default(); count as usize + 1],
            free: (1..=count).rev().collect(),
            idle: BTreeMap::new(),
            idle_max: idle_max as usize,
            by_content: HashMap::new(),
            releases: 0,
        }
    }

    /// Pages that a sequence can get now.
    pub(super) fn available(&self) -> usize {
        self.free.len() + self.idle.len()
    }

    /// Pages that sequences hold.
    pub(super) fn held(&self) -> usize {
        self.pages.len() - 1 - self.available()
    }

    /// The page with this content.
    pub(super) fn find(&self, group: GroupId, content: Fingerprint) -> Option<u32> {
        self.by_content.get(&(group, content)).copied()
    }

    /// Adds a holder.
    pub(super) fn hold(&mut self, page: u32) {
        let held = &mut self.pages[page as usize];
        held.holders += 1;
        if held.holders == 1 {
            self.idle.remove(&held.released);
        }
    }

    /// A page for new content, held once: a free one, or the least recently used idle one.
    pub(super) fn take(&mut self) -> Option<u32> {
        let page = self.free.pop().or_else(|| self.evict())?;
        self.pages[page as usize].holders = 1;
        Some(page)
    }

    /// Removes the content of the least recently used idle page.
    fn evict(&mut self) -> Option<u32> {
        let (_, page) = self.idle.pop_first()?;
        if let Some(content) = self.pages[page as usize].content.take() {
            self.by_content.remove(&content);
        }
        Some(page)
    }

    /// Records the content of a page. If another page already has it, lookups keep finding that one.
    pub(super) fn written(&mut self, page: u32, group: GroupId, content: Fingerprint) {
        let held = &mut self.pages[page as usize];
        if held.content.is_none()
            && let Entry::Vacant(place) = self.by_content.entry((group, content))
        {
            place.insert(page);
            held.content = Some((group, content));
        }
    }

    /// Whether the page is found by its content.
    pub(super) fn is_cached(&self, page: u32) -> bool {
        self.pages[page as usize].content.is_some()
    }

    /// Removes a holder. Without another one, a page with content becomes idle, any other one free.
    pub(super) fn release(&mut self, page: u32) {
        let held = &mut self.pages[page as usize];
        held.holders -= 1;
        if held.holders > 0 {
            return;
        }
        if held.content.is_none() {
            self.free.push(page);
            return;
        }
        self.releases += 1;
        held.released = self.releases;
        self.idle.insert(self.releases, page);
        if self.idle.len() > self.idle_max {
            let evicted = self.evict();
            self.free.extend(evicted);
        }
    }
}
