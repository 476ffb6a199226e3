//! What keeps pages: a depot's memory with its inventory. It outlives the processes that write it.
//!
//! Memory is a row of cells. A page of `n` cells with the number `k` lies in the cells `k * n ..`, as a page of a real depot
//! lies at an offset that follows from its number and its size: pages of different sizes overlap, and whoever writes a
//! page of one size destroys pages of another.

use super::setup::Shape;
use crate::types::{DepotId, Epoch, PageRecord, PageRun, Record, Scope, Stored};

/// What a cell holds: a number made from whose page it belongs to and from which shard, or one of those below.
pub type Content = u64;

/// Never written.
pub const EMPTY: Content = 0;
/// Partly written, or overwritten by an engine that expects a load.
pub const TORN: Content = 1;
/// Read where no page is.
pub const NOWHERE: Content = 2;
/// The smallest number that stands for the content of a page.
pub const CONTENT_MIN: Content = 3;

/// Keeps the pages of one shard, and says which of them can be found again. Tiers below the host implement it as well.
pub trait Storage {
    /// Which memory this is.
    fn id(&self) -> DepotId;
    /// Pages of a shape that there is room for.
    fn pages(&self, shape: Shape) -> u32;
    /// Cells of the pages that are listed here; `None` before anything asked for them.
    fn holds(&self) -> Option<u32>;
    /// From now on pages of this shape are listed: none, if others were listed before. A reading that is older than the
    /// last one changes nothing, and hears `false`.
    fn hold(&mut self, shape: Shape, reading: (Epoch, u64)) -> bool;
    /// Reads a page: [`TORN`] when its cells belong to different pages, [`NOWHERE`] when there is none of that number.
    fn read(&self, shape: Shape, page: u32) -> Content;
    /// Writes a page. `false` when there is none of that number.
    fn write(&mut self, shape: Shape, page: u32, content: Content) -> bool;
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
    cells: Vec<Content>,
    /// One slot for each page of the smallest size.
    inventory: Vec<Option<PageRecord>>,
    holds: Option<u32>,
    reading: (Epoch, u64),
}

impl Depot {
    /// An empty one.
    pub fn new(id: DepotId, cells: u32) -> Self {
        Self {
            id,
            cells: vec![EMPTY; cells as usize],
            inventory: vec![None; cells as usize],
            holds: None,
            reading: (Epoch(0), 0),
        }
    }

    fn cells_of(&self, shape: Shape, page: u32) -> Option<std::ops::Range<usize>> {
        let start = page as usize * shape.cells as usize;
        let end = start + shape.cells as usize;
        (end <= self.cells.len()).then_some(start..end)
    }
}

impl Storage for Depot {
    fn id(&self) -> DepotId {
        self.id
    }

    fn pages(&self, shape: Shape) -> u32 {
        u32::try_from(self.cells.len()).unwrap_or(u32::MAX) / shape.cells
    }

    fn holds(&self) -> Option<u32> {
        self.holds
    }

    fn hold(&mut self, shape: Shape, reading: (Epoch, u64)) -> bool {
        if reading < self.reading {
            return false;
        }
        self.reading = reading;
        if self.holds != Some(shape.cells) {
            self.inventory.fill(None);
            self.holds = Some(shape.cells);
        }
        true
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

    fn strike_out(&mut self, run: PageRun) {
        let pages = self.inventory.iter_mut().skip(run.start as usize);
        pages.take(run.count as usize).for_each(|slot| *slot = None);
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
        if self.holds.is_none() {
            return;
        }
        for page in record.pages() {
            if let Some(slot) = self.inventory.get_mut(page.page as usize) {
                *slot = Some(page);
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
        }
    }

    #[test]
    fn a_page_lies_inside_those_of_other_sizes() {
        let mut depot = Depot::new(DepotId(1), 12);
        assert!(depot.write(shape(4), 1, 77));
        assert_eq!((depot.read(shape(2), 2), depot.read(shape(2), 3)), (77, 77));
        assert!(depot.write(shape(2), 3, 88));
        assert_eq!(depot.read(shape(4), 1), TORN);
        assert_eq!(depot.read(shape(4), 0), EMPTY);
        assert_eq!((depot.pages(shape(4)), depot.pages(shape(2))), (3, 6));
        assert!(!depot.write(shape(4), 3, 99));
        assert_eq!(depot.read(shape(4), 3), NOWHERE);
    }

    #[test]
    fn a_reading_that_comes_late_changes_nothing() {
        let mut depot = Depot::new(DepotId(1), 12);
        assert!(depot.hold(shape(4), (Epoch(1), 1)));
        assert!(depot.hold(shape(2), (Epoch(1), 2)));
        assert!(!depot.hold(shape(4), (Epoch(1), 1)));
        assert_eq!(depot.holds(), Some(2));
        assert!(depot.hold(shape(4), (Epoch(2), 1)));
    }
}
