//! Page storage: a depot's memory with its inventory. The storage outlives the processes that write it.
//!
//! Memory is a row of cells. A page of `n` cells with the number `k` lies in the cells `k * n ..`, as a page of a real
//! depot lies at an offset that follows from its number and its size: pages of different sizes overlap, and a write to
//! a page of one size destroys pages of another. The entries of the inventory lie before the pages, one for each page:
//! smaller pages have more entries, and clearing the entries of smaller pages destroys larger pages.

use std::ops::Range;

use super::setup::{CELL_BYTES, Shape};
use kvferry_types::{
    DepotId, Epoch, INVENTORY_ENTRY_BYTES, PageRecord, PageRun, Record, Scope, Stored,
};

/// Content of a cell: a number made from the page that the cell belongs to and from its shard, or one of the constants
/// below.
pub type Content = u64;

/// Never written.
pub const EMPTY: Content = 0;
/// Partly written, or overwritten by an engine that expects a load.
pub const TORN: Content = 1;
/// Result of a read where no page lies.
pub const NOWHERE: Content = 2;
/// Smallest number that stands for the content of a page.
pub const CONTENT_MIN: Content = 3;

/// State of a depot at the start of a reading of its inventory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hold {
    /// The depot holds pages of this shape.
    Held,
    /// The depot held pages of another shape, or none: every entry must be cleared first.
    Divide,
    /// A later reading has already started: nothing is changed.
    Late,
}

/// Storage for the pages of one shard, with an inventory by which they are found again. Also meant for the tiers below
/// the host.
pub trait Storage {
    /// Id of the memory.
    fn id(&self) -> DepotId;
    /// Number of pages of a shape that fit.
    fn pages(&self, shape: Shape) -> u32;
    /// Cells of each page in the inventory; `None` before the first reading and while the depot is being divided.
    fn holds(&self) -> Option<u32>;
    /// Prepares the inventory for pages of this shape. If it had pages of another shape, none are added until
    /// [`Self::clear`] has been called for every page of this shape, and then [`Self::divided`].
    fn hold(&mut self, shape: Shape, reading: (Epoch, u64)) -> Hold;
    /// Clears the entry of a page, also where the entry lies inside a page of the present shape.
    fn clear(&mut self, page: u32);
    /// Ends a division: the inventory takes pages of this shape from now on, unless another shape was set meanwhile.
    fn divided(&mut self, shape: Shape);
    /// Epoch of the leader that read the inventory last.
    fn last_reader(&self) -> Epoch;
    /// Reads a page: [`TORN`] when its cells belong to different pages, [`NOWHERE`] when there is no page of that
    /// number.
    fn read(&self, shape: Shape, page: u32) -> Content;
    /// Writes a page. Returns false when there is no page of that number.
    fn write(&mut self, shape: Shape, page: u32, content: Content) -> bool;
    /// Removes pages from the inventory before they are overwritten.
    fn unlist_run(&mut self, run: PageRun);
    /// Removes the pages of a scope in these entries that were stored by `through` or before. Returns the next entry,
    /// `None` after the last one.
    fn invalidate_scope(
        &mut self,
        scope: &Scope,
        through: Stored,
        entries: Range<u32>,
    ) -> Option<u32>;
    /// Adds complete pages to the inventory.
    fn list(&mut self, record: &Record);
    /// All pages in the inventory, in the order of the pages.
    fn listed(&self) -> Vec<PageRecord>;
}

/// Host memory of one shard.
#[derive(Debug)]
pub struct SimDepot {
    id: DepotId,
    cells: Vec<Content>,
    /// Inventory entries: one for each page of the smallest size.
    inventory: Vec<Option<PageRecord>>,
    holds: Option<u32>,
    reading: (Epoch, u64),
}

impl SimDepot {
    /// An empty depot of this many cells.
    pub fn new(id: DepotId, cells: u32) -> Self {
        Self {
            id,
            cells: vec![EMPTY; cells as usize],
            inventory: vec![None; cells as usize],
            holds: None,
            reading: (Epoch(0), 0),
        }
    }

    fn cells_of(&self, shape: Shape, page: u32) -> Option<Range<usize>> {
        let start = page as usize * shape.cells as usize;
        let end = start + shape.cells as usize;
        (end <= self.cells.len()).then_some(start..end)
    }
}

impl Storage for SimDepot {
    fn id(&self) -> DepotId {
        self.id
    }

    fn pages(&self, shape: Shape) -> u32 {
        u32::try_from(self.cells.len()).unwrap_or(u32::MAX) / shape.cells
    }

    fn holds(&self) -> Option<u32> {
        self.holds
    }

    fn hold(&mut self, shape: Shape, reading: (Epoch, u64)) -> Hold {
        if reading < self.reading {
            return Hold::Late;
        }
        self.reading = reading;
        if self.holds == Some(shape.cells) {
            return Hold::Held;
        }
        self.holds = None;
        Hold::Divide
    }

    fn clear(&mut self, page: u32) {
        if let Some(entry) = self.inventory.get_mut(page as usize) {
            *entry = None;
        }
        let Some(holds) = self.holds else {
            return;
        };
        let entries = self.cells.len() / holds as usize;
        if let Some(behind) = (page as usize).checked_sub(entries) {
            let at = behind as u64 * INVENTORY_ENTRY_BYTES / CELL_BYTES;
            let at = usize::try_from(at).unwrap_or(usize::MAX);
            if let Some(cell) = self.cells.get_mut(at) {
                *cell = TORN;
            }
        }
    }

    fn divided(&mut self, shape: Shape) {
        self.holds.get_or_insert(shape.cells);
    }

    fn last_reader(&self) -> Epoch {
        self.reading.0
    }

    fn read(&self, shape: Shape, page: u32) -> Content {
        let Some((first, others)) = self
            .cells_of(shape, page)
            .and_then(|cells| self.cells[cells].split_first())
        else {
            return NOWHERE;
        };
        match others.iter().all(|cell| cell == first) {
            true => *first,
            false => TORN,
        }
    }

    fn write(&mut self, shape: Shape, page: u32, content: Content) -> bool {
        let cells = self.cells_of(shape, page);
        if let Some(cells) = cells.clone() {
            self.cells[cells].fill(content);
        }
        cells.is_some()
    }

    fn unlist_run(&mut self, run: PageRun) {
        let pages = self.inventory.iter_mut().skip(run.start as usize);
        pages
            .take(run.count as usize)
            .for_each(|entry| *entry = None);
    }

    fn invalidate_scope(
        &mut self,
        scope: &Scope,
        through: Stored,
        entries: Range<u32>,
    ) -> Option<u32> {
        let all = self.inventory.len();
        let count = entries.len();
        let slice = self.inventory.iter_mut().skip(entries.start as usize);
        for entry in slice.take(count) {
            if entry.is_some_and(|page| {
                page.stored <= through && scope.contains(page.domain, page.fingerprint)
            }) {
                *entry = None;
            }
        }
        ((entries.end as usize) < all).then_some(entries.end)
    }

    fn list(&mut self, record: &Record) {
        if self.holds.is_none() {
            return;
        }
        for page in record.pages() {
            if let Some(entry) = self.inventory.get_mut(page.page as usize) {
                *entry = Some(page);
            }
        }
    }

    fn listed(&self) -> Vec<PageRecord> {
        self.inventory.iter().flatten().copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(cells: u32) -> Shape {
        Shape {
            cells,
            layout: [0; 16],
            model: 0,
        }
    }

    #[test]
    fn a_page_lies_inside_those_of_other_sizes() {
        let mut depot = SimDepot::new(DepotId(1), 12);
        assert!(depot.write(shape(4), 1, 77));
        assert_eq!((depot.read(shape(2), 2), depot.read(shape(2), 3)), (77, 77));
        assert!(depot.write(shape(2), 3, 88));
        assert_eq!(depot.read(shape(4), 1), TORN);
        assert_eq!(depot.read(shape(4), 0), EMPTY);
        assert_eq!((depot.pages(shape(4)), depot.pages(shape(2))), (3, 6));
        assert!(!depot.write(shape(4), 3, 99));
        assert_eq!(depot.read(shape(4), 3), NOWHERE);
    }

    fn hold(depot: &mut SimDepot, shape: Shape, reading: (Epoch, u64)) -> Hold {
        let hold = depot.hold(shape, reading);
        if hold == Hold::Divide {
            (0..depot.pages(shape)).for_each(|page| depot.clear(page));
            depot.divided(shape);
        }
        hold
    }

    #[test]
    fn a_reading_that_comes_late_changes_nothing() {
        let mut depot = SimDepot::new(DepotId(1), 12);
        assert_eq!(hold(&mut depot, shape(4), (Epoch(1), 1)), Hold::Divide);
        assert_eq!(hold(&mut depot, shape(2), (Epoch(1), 2)), Hold::Divide);
        assert_eq!(hold(&mut depot, shape(4), (Epoch(1), 1)), Hold::Late);
        assert_eq!(depot.holds(), Some(2));
        assert_eq!(hold(&mut depot, shape(2), (Epoch(1), 2)), Hold::Held);
        assert_eq!(hold(&mut depot, shape(4), (Epoch(2), 1)), Hold::Divide);
    }

    #[test]
    fn slots_of_smaller_pages_lie_in_larger_ones() {
        let mut depot = SimDepot::new(DepotId(1), 12);
        hold(&mut depot, shape(1), (Epoch(1), 1));
        hold(&mut depot, shape(4), (Epoch(1), 2));
        assert!(depot.write(shape(4), 0, 77));
        (0..3).for_each(|page| depot.clear(page));
        assert_eq!(depot.read(shape(4), 0), 77, "entries of its own");
        depot.clear(3);
        assert_eq!(depot.read(shape(4), 0), TORN);
    }
}
