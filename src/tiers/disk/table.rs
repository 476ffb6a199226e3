//! The headers of an open set, in memory: which pages are listed, and which regions of the disk say otherwise.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;

use kvferry_types::{PageRecord, PageRun, Record, Scope, Stored};

use super::format::{BlockHeader, HeaderPage, PageSum, REGION_PAGES};

/// Why a record is not listed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NotListed {
    /// The record is for another number of pages than were written.
    #[error("{pages} pages are recorded, and {written} were written")]
    Written {
        /// Pages of the record.
        pages: usize,
        /// Pages that were written.
        written: usize,
    },
    /// The record continues a block that is not listed, or not up to that page.
    #[error("the block at page {0} does not end where the record begins")]
    NoBlock(u32),
}

/// A region's two slots.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Slots {
    /// The slot that was written last: 0 or 1.
    pub(super) newest: u8,
    /// Sequence number of that write; 0 before the first.
    pub(super) sequence: u64,
    /// That write was made durable by itself, before the flush that covers it.
    pub(super) synced: bool,
}

/// One write of a region's slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SlotWrite {
    pub(super) slot: u8,
    pub(super) sequence: u64,
    pub(super) durable: u64,
}

/// How far a block is durable whose last pages are not.
#[derive(Debug, Clone, Copy, Default)]
struct Fresh {
    /// Pages, from the first on, that are durable.
    durable: usize,
    /// Pages that the last write of its region lists, and the sequence number of that write; 0 before the first.
    written: usize,
    sequence: u64,
}

/// The headers of a set. See the module.
#[derive(Debug, Default)]
pub(super) struct Table {
    blocks: BTreeMap<u32, BlockHeader>,
    /// The blocks with pages that are not durable yet, by their first page.
    fresh: BTreeMap<u32, Fresh>,
    regions: HashMap<u32, Slots>,
    /// Regions whose newest slot lacks a change.
    dirty: BTreeSet<u32>,
    /// Regions with a slot that lists pages that a reset removed, and how many writes have to end until none does: 2, and one
    /// more for a write that had begun before the reset.
    stale: BTreeMap<u32, u8>,
    /// Regions whose slot on the disk lists pages that were removed since, by these pages' number: a process writes them
    /// before it overwrites the pages.
    removals: BTreeMap<u32, BTreeSet<u32>>,
    /// Regions whose write has begun and not ended.
    writing: BTreeSet<u32>,
    sequence: u64,
    durable: u64,
    /// The next write says that all pages that are listed now are durable.
    checkpoint: bool,
    pages: u64,
}

/// The pages with which the blocks of a region begin.
fn pages_of(region: u32) -> Range<u32> {
    let start = region * REGION_PAGES;
    start..start.saturating_add(REGION_PAGES)
}

impl Table {
    /// A table of these blocks, which do not overlap. `sequence` is the last one on the disk, and `durable` the last one
    /// that is known to be durable.
    pub(super) fn new(
        blocks: impl IntoIterator<Item = (u32, BlockHeader)>,
        regions: HashMap<u32, Slots>,
        (sequence, durable): (u64, u64),
    ) -> Self {
        let blocks: BTreeMap<u32, BlockHeader> = blocks.into_iter().collect();
        let pages = blocks.values().map(|block| block.pages.len() as u64).sum();
        // What an ended process wrote after its last flush is durable after the first one of this process.
        let fresh = blocks.iter().filter_map(|(start, block)| {
            let slots = regions.get(&(start / REGION_PAGES));
            let sequence = slots.map_or(0, |slots| slots.sequence);
            let fresh = Fresh {
                durable: 0,
                written: block.pages.len(),
                sequence,
            };
            (sequence > durable).then_some((*start, fresh))
        });
        Self {
            fresh: fresh.collect(),
            blocks,
            regions,
            sequence,
            durable,
            pages,
            ..Self::default()
        }
    }

    /// The region of a page is to be written: the disk lists more than this table.
    pub(super) fn mark_dirty(&mut self, page: u32) {
        self.dirty.insert(page / REGION_PAGES);
    }

    /// Both slots of a region are to be written, because the disk has other bytes in one of them.
    pub(super) fn rewrite(&mut self, region: u32) {
        self.dirty.insert(region);
        self.set_stale(region);
    }

    /// Both slots of a region are stale. A write that is under way has the headers from before, and makes neither good.
    fn set_stale(&mut self, region: u32) {
        let writes = 2 + u8::from(self.writing.contains(&region));
        self.stale.insert(region, writes);
    }

    /// Cuts a block to its first `keep` pages, so that no slot lists the others any longer.
    pub(super) fn cut_both(&mut self, start: u32, keep: u32) {
        self.cut(start, keep, true);
    }

    /// The first block with a page at `page` or behind it.
    pub(super) fn block_from(&self, page: u32) -> Option<(u32, &BlockHeader)> {
        let before = self.blocks.range(..=page).next_back();
        let holds =
            |(start, block): &(&u32, &BlockHeader)| **start + block.pages.len() as u32 > page;
        let found = before.filter(holds);
        let found = found.or_else(|| self.blocks.range(page..).next());
        found.map(|(start, block)| (*start, block))
    }

    /// Lets the next write say that all pages that are listed now are durable. There must be nothing else to write.
    pub(super) fn checkpoint(&mut self) {
        self.dirty.insert(0);
        self.checkpoint = true;
    }

    /// The slots of each region that was ever written.
    pub(super) fn slots(&self) -> impl ExactSizeIterator<Item = (u32, Slots)> {
        self.regions.iter().map(|(region, slots)| (*region, *slots))
    }

    /// Number of listed pages.
    pub(super) fn pages(&self) -> u64 {
        self.pages
    }

    /// Number of listed pages that a start finds after a loss of power.
    pub(super) fn durable_pages(&self) -> u64 {
        let fresh = self.fresh.iter().map(|(start, fresh)| {
            let listed = self.block(*start).map_or(0, |block| block.pages.len());
            listed.saturating_sub(fresh.durable) as u64
        });
        self.pages.saturating_sub(fresh.sum())
    }

    /// Number of listed blocks.
    pub(super) fn len(&self) -> usize {
        self.blocks.len()
    }

    /// First page and header of each block.
    pub(super) fn blocks(&self) -> impl ExactSizeIterator<Item = (u32, &BlockHeader)> {
        self.blocks.iter().map(|(start, block)| (*start, block))
    }

    /// The pages below `capacity` that are not listed, in runs.
    pub(super) fn free(&self, capacity: u32) -> Vec<PageRun> {
        let mut free = Vec::new();
        let mut from = 0;
        let ends = self.blocks().map(|(start, block)| {
            let pages = u32::try_from(block.pages.len()).unwrap_or(u32::MAX);
            (start, start.saturating_add(pages))
        });
        for (start, end) in ends.chain([(capacity, capacity)]) {
            let start = start.min(capacity);
            if start > from {
                free.push(PageRun {
                    start: from,
                    count: start - from,
                });
            }
            from = from.max(end);
        }
        free
    }

    /// The newest store of a listed page.
    pub(super) fn newest(&self) -> Stored {
        let pages = self.blocks.values().flat_map(|block| &block.pages);
        pages.map(|page| page.stored).max().unwrap_or_default()
    }

    /// The sequence number of the last write.
    pub(super) fn sequence(&self) -> u64 {
        self.sequence
    }

    /// The sequence number of the last write of a region; 0 before the first.
    pub(super) fn newest_of(&self, region: u32) -> u64 {
        self.regions.get(&region).map_or(0, |slots| slots.sequence)
    }

    /// Notes that all writes up to this sequence number are durable.
    pub(super) fn note_durable(&mut self, sequence: u64) {
        self.durable = self.durable.max(sequence);
        let blocks = &self.blocks;
        self.fresh.retain(|start, fresh| {
            if fresh.sequence <= sequence {
                fresh.durable = fresh.durable.max(fresh.written);
            }
            let listed = blocks.get(start).map_or(0, |block| block.pages.len());
            fresh.durable < listed
        });
        let mut removals = std::mem::take(&mut self.removals);
        removals.retain(|_, regions| {
            regions.retain(|region| self.lacks_removals(*region));
            !regions.is_empty()
        });
        self.removals = removals;
    }

    /// True if a slot that lists removed pages may be what a start finds of this region.
    fn lacks_removals(&self, region: u32) -> bool {
        let unwritten = self.dirty.contains(&region) || self.writing.contains(&region);
        unwritten || !self.is_durable(region)
    }

    /// The block that begins with a page.
    pub(super) fn block(&self, start: u32) -> Option<&BlockHeader> {
        self.blocks.get(&start)
    }

    /// The block that has a page, with the page's index in it.
    pub(super) fn find(&self, page: u32) -> Option<(&BlockHeader, u16)> {
        let (start, block) = self.blocks.range(..=page).next_back()?;
        let index = page - start;
        let listed = (index as usize) < block.pages.len();
        listed.then(|| Some((block, u16::try_from(index).ok()?)))?
    }

    /// Records of the listed pages of a range, in order.
    pub(super) fn records(&self, pages: Range<u32>) -> Vec<PageRecord> {
        let first = self.blocks.range(..=pages.start).next_back();
        let first = first.map_or(pages.start, |(start, _)| *start);
        let mut records = Vec::new();
        for (start, block) in self.blocks.range(first..pages.end) {
            let listed = block.pages.iter().zip(0_u16..);
            records.extend(listed.filter_map(|(page, index)| {
                let number = start + u32::from(index);
                pages.contains(&number).then_some(PageRecord {
                    page: number,
                    anchor: block.anchor,
                    domain: block.domain,
                    block_start: *start,
                    index,
                    phase: block.phase,
                    stored: page.stored,
                    fingerprint: page.fingerprint,
                })
            }));
        }
        records
    }

    /// Removes the pages of a run, and those behind them in the same blocks, which nobody could find any longer.
    pub(super) fn unlist(&mut self, run: PageRun) {
        let end = run.start.saturating_add(run.count);
        let before = self.blocks.range(..run.start).next_back();
        let before = before.filter(|(start, block)| **start + block.pages.len() as u32 > run.start);
        let mut cut: Vec<(u32, u32)> = Vec::new();
        cut.extend(before.map(|(start, _)| (*start, run.start - start)));
        cut.extend(
            self.blocks
                .range(run.start..end)
                .map(|(start, _)| (*start, 0)),
        );
        for (start, keep) in cut {
            self.cut(start, keep, false);
        }
    }

    /// Cuts a block to its first `keep` pages. `both`: no slot may list the others any longer.
    fn cut(&mut self, start: u32, keep: u32, both: bool) {
        let Some(block) = self.blocks.get_mut(&start) else {
            return;
        };
        let had = block.pages.len() as u32;
        if keep >= had {
            return;
        }
        self.pages -= u64::from(had - keep);
        block.pages.truncate(keep as usize);
        if let Some(fresh) = self.fresh.get_mut(&start) {
            fresh.durable = fresh.durable.min(keep as usize);
            fresh.written = fresh.written.min(keep as usize);
            if fresh.durable == keep as usize {
                self.fresh.remove(&start);
            }
        }
        if keep == 0 {
            self.blocks.remove(&start);
        }
        let region = start / REGION_PAGES;
        self.dirty.insert(region);
        if both {
            self.set_stale(region);
        }
        // The slot on the disk may list more of the block than this process did.
        for page in (start + keep) / REGION_PAGES..=(start + had - 1) / REGION_PAGES {
            self.removals.entry(page).or_default().insert(region);
        }
    }

    /// Lists pages that were written, with their checksums. Pages that were listed in their place are removed.
    pub(super) fn list(&mut self, record: &Record, sums: &[PageSum]) -> Result<(), NotListed> {
        let pages = record.fingerprints.len();
        if pages != sums.len() {
            return Err(NotListed::Written {
                pages,
                written: sums.len(),
            });
        }
        let (start, first) = (record.block_start, u32::from(record.first));
        let count = u32::try_from(pages).unwrap_or(u32::MAX);
        self.unlist(PageRun {
            start: start + first,
            count,
        });
        let fresh = record.fingerprints.iter().zip(sums);
        let fresh = fresh.map(|(fingerprint, sum)| HeaderPage {
            fingerprint: *fingerprint,
            stored: record.stored,
            sum: *sum,
        });
        if first == 0 {
            let block = BlockHeader {
                anchor: record.anchor,
                domain: record.domain,
                phase: record.phase,
                pages: fresh.collect(),
            };
            self.blocks.insert(start, block);
            self.fresh.insert(start, Fresh::default());
        } else {
            let block = self.blocks.get_mut(&start);
            let block = block.filter(|block| {
                let same = (block.anchor, block.domain) == (record.anchor, record.domain);
                same && block.pages.len() == first as usize
            });
            let block = block.ok_or(NotListed::NoBlock(start))?;
            let durable = block.pages.len();
            block.pages.extend(fresh);
            self.fresh.entry(start).or_insert(Fresh {
                durable,
                ..Fresh::default()
            });
        }
        self.pages += u64::from(count);
        self.dirty.insert(start / REGION_PAGES);
        Ok(())
    }

    /// Removes the pages of a reset in blocks that begin in `count` pages from `from` on. Returns where the next slice
    /// begins; `None` after the last block.
    pub(super) fn invalidate(
        &mut self,
        scope: &Scope,
        through: Stored,
        from: u32,
        count: u32,
    ) -> Option<u32> {
        let end = from.saturating_add(count);
        let mut cuts = Vec::new();
        for (start, block) in self.blocks.range(from..end) {
            let covered = |page: &HeaderPage| {
                page.stored <= through && scope.contains(block.domain, page.fingerprint)
            };
            let keep = block.pages.iter().position(covered);
            cuts.extend(keep.map(|keep| (*start, keep as u32)));
        }
        for (start, keep) in cuts {
            self.cut(start, keep, true);
        }
        let (next, _) = self.blocks.range(end..).next()?;
        Some(*next)
    }

    /// Regions that have to be written durably before the pages of a run are overwritten.
    pub(super) fn removals_of(&self, run: PageRun) -> BTreeSet<u32> {
        let end = run.start.saturating_add(run.count.max(1)) - 1;
        let of_run = self
            .removals
            .range(run.start / REGION_PAGES..=end / REGION_PAGES);
        let regions = of_run.flat_map(|(_, regions)| regions.iter().copied());
        regions
            .filter(|region| self.lacks_removals(*region))
            .collect()
    }

    /// Up to `max` regions that have to be written and may be written now, in order, from `from` on.
    pub(super) fn to_write(&self, from: u32, max: usize) -> Vec<u32> {
        let dirty = self.dirty.range(from..).copied();
        let stale = self.stale.range(from..).map(|(region, _)| *region);
        let stale = stale.filter(|region| self.is_durable(*region));
        let mut regions: Vec<u32> = dirty.take(max).chain(stale.take(max)).collect();
        regions.sort_unstable();
        regions.dedup();
        regions.truncate(max);
        regions
    }

    /// True if the newest slot of a region is durable.
    fn is_durable(&self, region: u32) -> bool {
        let slots = self.regions.get(&region);
        slots.is_none_or(|slots| slots.synced || slots.sequence <= self.durable)
    }

    /// True if a slot on the disk lacks a change, or a listed page is not durable: the write of a slot for a removal lists
    /// the new pages of its region, too, and makes the bytes of none of them durable.
    pub(super) fn is_dirty(&self) -> bool {
        let unwritten = !self.dirty.is_empty() || !self.stale.is_empty();
        unwritten || !self.writing.is_empty() || !self.fresh.is_empty()
    }

    /// Begins the write of a region: gives it a slot and a sequence number, and counts the region as clean. `None` if it
    /// need not be written, or must not be written now.
    ///
    /// A slot that is the last durable one is not overwritten: a write that is torn would lose its headers. So regions
    /// that are written again before a flush are written to the same slot.
    /// With `synced`, a region whose newest slot is not durable is written again, too.
    pub(super) fn begin_write(&mut self, region: u32, synced: bool) -> Option<SlotWrite> {
        let durable = self.is_durable(region);
        let dirty = self.dirty.remove(&region) || (synced && !durable);
        let stale = durable && self.stale.contains_key(&region);
        if !dirty && !stale {
            return None;
        }
        self.sequence += 1;
        self.writing.insert(region);
        let (blocks, sequence) = (&self.blocks, self.sequence);
        for (start, fresh) in self.fresh.range_mut(pages_of(region)) {
            let listed = blocks.get(start).map_or(0, |block| block.pages.len());
            (fresh.written, fresh.sequence) = (listed, sequence);
        }
        let Slots { newest, .. } = *self.regions.entry(region).or_default();
        Some(SlotWrite {
            slot: if durable { 1 - newest.min(1) } else { newest },
            sequence: self.sequence,
            durable: match std::mem::take(&mut self.checkpoint) {
                true => self.sequence,
                false => self.durable,
            },
        })
    }

    /// The headers of a region.
    pub(super) fn region(&self, region: u32) -> impl Iterator<Item = (u32, &BlockHeader)> {
        let blocks = self.blocks.range(pages_of(region));
        blocks.map(|(start, block)| (*start, block))
    }

    /// Ends the write of a region, which is durable if `synced`. After a failed one the region still has to be written.
    pub(super) fn end_write(
        &mut self,
        region: u32,
        write: SlotWrite,
        (written, synced): (bool, bool),
    ) {
        self.writing.remove(&region);
        // The contents of a slot whose write failed are not known, so it is the one to write next.
        let slots = self.regions.entry(region).or_default();
        if !written {
            self.dirty.insert(region);
            for (_, fresh) in self.fresh.range_mut(pages_of(region)) {
                fresh.written = fresh.durable;
            }
            return;
        }
        let other = slots.newest != write.slot;
        *slots = Slots {
            newest: write.slot,
            sequence: write.sequence,
            synced,
        };
        // The first write after a reset makes one slot good, and the next one to the other slot both.
        match self.stale.get(&region) {
            Some(writes @ 2..) => {
                let writes = writes - 1;
                self.stale.insert(region, writes);
            }
            Some(_) if other => {
                self.stale.remove(&region);
            }
            _ => {}
        }
        // A write that is not durable yet may be lost, and the slot before it be found.
        if synced && !self.dirty.contains(&region) {
            self.forget_removals(region);
        }
    }

    fn forget_removals(&mut self, region: u32) {
        // Blocks have at most 256 pages, so that the pages of a region's blocks lie in the next few regions.
        let last = region + 256 / REGION_PAGES + 1;
        let near: Vec<u32> = self
            .removals
            .range(region..=last)
            .map(|(at, _)| *at)
            .collect();
        for at in near {
            if let Some(regions) = self.removals.get_mut(&at) {
                regions.remove(&region);
                if regions.is_empty() {
                    self.removals.remove(&at);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvferry_types::{Anchor, DomainId, Epoch, Fingerprint, NamespaceId, TransferId};

    fn record(start: u32, first: u16, pages: u32, id: u64) -> Record {
        Record {
            anchor: Anchor(start.into()),
            domain: DomainId(3 << 64),
            block_start: start,
            first,
            phase: 0,
            stored: Stored {
                epoch: Epoch(1),
                transfer: TransferId(id),
            },
            fingerprints: (0..pages)
                .map(|page| Fingerprint(u128::from(page + u32::from(first))))
                .collect(),
        }
    }

    fn list(
        table: &mut Table,
        start: u32,
        first: u16,
        pages: u32,
        id: u64,
    ) -> Result<(), NotListed> {
        let sums = vec![PageSum(id); pages as usize];
        table.list(&record(start, first, pages, id), &sums)
    }

    fn numbers(table: &Table) -> Vec<u32> {
        table
            .records(0..1000)
            .iter()
            .map(|record| record.page)
            .collect()
    }

    #[test]
    fn a_block_grows_where_it_ends_and_nowhere_else() {
        let mut table = Table::default();
        assert_eq!(list(&mut table, 10, 0, 2, 1), Ok(()));
        assert_eq!(list(&mut table, 10, 2, 1, 2), Ok(()));
        assert_eq!(list(&mut table, 10, 4, 1, 3), Err(NotListed::NoBlock(10)));
        assert_eq!(list(&mut table, 20, 1, 1, 4), Err(NotListed::NoBlock(20)));
        assert_eq!(numbers(&table), [10, 11, 12]);
        assert_eq!(table.pages(), 3);
        assert_eq!(table.newest().transfer, TransferId(2));
    }

    #[test]
    fn unlisted_pages_take_those_behind_them_along() {
        let mut table = Table::default();
        assert_eq!(list(&mut table, 10, 0, 6, 1), Ok(()));
        assert_eq!(list(&mut table, 16, 0, 4, 2), Ok(()));
        table.unlist(PageRun {
            start: 12,
            count: 5,
        });
        assert_eq!(numbers(&table), [10, 11]);
        assert_eq!(
            table.removals_of(PageRun {
                start: 12,
                count: 5
            }),
            [0, 1].into()
        );
        assert_eq!(table.pages(), 2);
    }

    #[test]
    fn pages_between_blocks_and_behind_the_last_one_are_free() {
        let mut table = Table::default();
        let run = |start, count| PageRun { start, count };
        assert_eq!(table.free(30), [run(0, 30)]);
        assert_eq!(list(&mut table, 0, 0, 4, 1), Ok(()));
        assert_eq!(list(&mut table, 10, 0, 6, 2), Ok(()));
        assert_eq!(list(&mut table, 16, 0, 4, 3), Ok(()));
        assert_eq!(table.free(30), [run(4, 6), run(20, 10)]);
        assert_eq!(table.free(18), [run(4, 6)]);
        assert_eq!(table.free(8), [run(4, 4)]);
    }

    /// Writes a region. Returns the slot.
    fn write(table: &mut Table, region: u32) -> Option<u8> {
        let write = table.begin_write(region, false)?;
        table.end_write(region, write, (true, false));
        Some(write.slot)
    }

    fn flushed(table: &mut Table) {
        table.note_durable(table.sequence());
    }

    #[test]
    fn the_last_durable_slot_is_not_overwritten() {
        let mut table = Table::default();
        for (page, slot) in [(10, 1), (11, 1), (12, 1)] {
            assert_eq!(list(&mut table, 10, page - 10, 1, 1), Ok(()));
            assert_eq!(write(&mut table, 0), Some(slot));
        }
        flushed(&mut table);
        for (page, slot) in [(13, 0), (14, 0)] {
            assert_eq!(list(&mut table, 10, page - 10, 1, 1), Ok(()));
            assert_eq!(write(&mut table, 0), Some(slot));
        }
        assert_eq!(write(&mut table, 0), None, "nothing to write");
    }

    #[test]
    fn a_reset_writes_both_slots_and_an_overwrite_one() {
        let mut table = Table::default();
        assert_eq!(list(&mut table, 10, 0, 6, 1), Ok(()));
        assert_eq!(write(&mut table, 0), Some(1));
        flushed(&mut table);
        assert!(!table.is_dirty());
        let through = Stored {
            epoch: Epoch(1),
            transfer: TransferId(1),
        };
        let scope = Scope::Namespace(NamespaceId(3));
        assert_eq!(table.invalidate(&scope, through, 0, 100), None);
        assert!(numbers(&table).is_empty());
        assert_eq!(write(&mut table, 0), Some(0));
        assert_eq!(write(&mut table, 0), None, "the first slot is not durable");
        assert!(table.is_dirty());
        flushed(&mut table);
        let second = table.begin_write(0, false).expect("the other slot");
        table.end_write(0, second, (false, false));
        assert!(table.is_dirty(), "the write failed");
        assert_eq!(write(&mut table, 0), Some(1));
        assert!(!table.is_dirty());
        table.unlist(PageRun { start: 0, count: 9 });
        assert!(!table.is_dirty(), "nothing is listed there");
    }

    #[test]
    fn pages_stored_after_a_reset_stay() {
        let mut table = Table::default();
        for (start, id) in [(0, 5), (40, 6), (80, 7)] {
            assert_eq!(list(&mut table, start, 0, 2, id), Ok(()));
        }
        let through = Stored {
            epoch: Epoch(1),
            transfer: TransferId(6),
        };
        assert_eq!(
            table.invalidate(&Scope::Everything, through, 0, 40),
            Some(40)
        );
        assert_eq!(
            table.invalidate(&Scope::Everything, through, 40, 40),
            Some(80)
        );
        assert_eq!(table.invalidate(&Scope::Everything, through, 80, 40), None);
        assert_eq!(numbers(&table), [80, 81]);
    }

    #[test]
    fn the_removals_of_a_run_are_gone_once_they_are_durable() {
        let mut table = Table::default();
        let run = PageRun {
            start: 20,
            count: 10,
        };
        for synced in [true, false] {
            assert_eq!(list(&mut table, 10, 0, 30, 1), Ok(()));
            assert!(write(&mut table, 0).is_some());
            flushed(&mut table);
            assert!(table.removals_of(run).is_empty());
            table.unlist(run);
            assert_eq!(table.removals_of(run), [0].into());
            // A write that is not durable may be lost.
            assert!(write(&mut table, 0).is_some());
            assert_eq!(table.removals_of(run), [0].into());
            match synced {
                true => {
                    let write = table.begin_write(0, true).expect("not durable");
                    table.end_write(0, write, (true, true));
                }
                false => flushed(&mut table),
            }
            assert!(table.removals_of(run).is_empty());
            assert!(table.removals.is_empty());
        }
    }

    #[test]
    fn a_write_that_began_before_a_reset_makes_no_slot_good() {
        let mut table = Table::default();
        let write = |table: &mut Table| table.begin_write(0, true).expect("to be written");
        assert_eq!(list(&mut table, 0, 0, 4, 1), Ok(()));
        let first = write(&mut table);
        table.end_write(0, first, (true, true));
        assert_eq!(list(&mut table, 8, 0, 4, 2), Ok(()));
        let before = write(&mut table);
        table.cut_both(0, 0);
        table.end_write(0, before, (true, true));
        // One write for each slot.
        for slot in [1 - before.slot, before.slot] {
            let next = write(&mut table);
            assert_eq!(next.slot, slot);
            table.end_write(0, next, (true, true));
        }
        assert!(table.begin_write(0, true).is_none(), "both slots are good");
    }
}
