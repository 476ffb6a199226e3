//! What keeps pages: a depot's memory with its inventory. It outlives the processes that write it.

use crate::types::{DepotId, PageRecord, PageRun, Record, Scope, Stored};

/// What a page holds: a number made from whose page it is and from which shard, or one of the two below.
pub type Content = u64;

/// Never written.
pub const EMPTY: Content = 0;
/// Partly written, or overwritten by an engine that expects a load.
pub const TORN: Content = 1;

/// Keeps the pages of one shard, and says which of them can be found again. Tiers below the host implement it as well.
pub trait Storage {
    /// Which memory this is.
    fn id(&self) -> DepotId;
    /// Reads a page.
    fn read(&self, page: u32) -> Content;
    /// Writes a page.
    fn write(&mut self, page: u32, content: Content);
    /// These pages will be overwritten: they are not listed any more.
    fn strike_out(&mut self, run: PageRun);
    /// Pages of this scope that were stored by `through` or before are not listed any more.
    fn strike_scope(&mut self, scope: &Scope, through: Stored);
    /// These pages are whole: they are listed.
    fn list(&mut self, record: &Record);
    /// Everything that is listed, in the order of the pages.
    fn listed(&self) -> Vec<PageRecord>;
}

/// Host memory of one shard.
#[derive(Debug)]
pub struct Depot {
    id: DepotId,
    pages: Vec<Content>,
    inventory: Vec<Option<PageRecord>>,
}

impl Depot {
    /// An empty one.
    pub fn new(id: DepotId, pages: u32) -> Self {
        Self {
            id,
            pages: vec![EMPTY; pages as usize],
            inventory: vec![None; pages as usize],
        }
    }
}

impl Storage for Depot {
    fn id(&self) -> DepotId {
        self.id
    }

    fn read(&self, page: u32) -> Content {
        self.pages[page as usize]
    }

    fn write(&mut self, page: u32, content: Content) {
        self.pages[page as usize] = content;
    }

    fn strike_out(&mut self, run: PageRun) {
        self.inventory[run.start as usize..][..run.count as usize].fill(None);
    }

    fn strike_scope(&mut self, scope: &Scope, through: Stored) {
        for slot in &mut self.inventory {
            if slot.is_some_and(|page| {
                page.stored <= through && scope.contains(page.domain, page.fingerprint)
            }) {
                *slot = None;
            }
        }
    }

    fn list(&mut self, record: &Record) {
        for page in record.pages() {
            self.inventory[page.page as usize] = Some(page);
        }
    }

    fn listed(&self) -> Vec<PageRecord> {
        self.inventory.iter().flatten().copied().collect()
    }
}
