//! Headers: which pages are listed, in the memory of the process, on the disk, and durably.

use std::collections::BTreeMap;
use std::ops::Range;

use fastrand::Rng;

use super::{Headers, Listed, Lost, OpenSet, REGION_PAGES, SimDisk};
use crate::world::storage::{Content, TORN};
use kvferry_types::{Epoch, PageRecord, PageRun, Record, Scope, Stored, TransferId};

impl SimDisk {
    /// Notes the contents that a copy has written.
    pub(in super::super) fn written(&mut self, transfer: TransferId, contents: Vec<Content>) {
        if let Some(open) = &mut self.open {
            open.written.insert(transfer, contents);
        }
    }

    /// Lists pages that were written. Nothing is listed if their block does not end where they begin.
    pub(in super::super) fn list(&mut self, record: &Record) {
        let Some(open) = &mut self.open else {
            return;
        };
        let sums = open.written.remove(&record.stored.transfer);
        let pages: Vec<PageRecord> = record.pages().collect();
        let start = record.block_start + u32::from(record.first);
        let count = u32::try_from(pages.len()).unwrap_or(u32::MAX);
        let mut removed = open.unlist(PageRun { start, count });
        let before = start.checked_sub(1).and_then(|page| open.table.get(&page));
        let continues = record.first == 0
            || before.is_some_and(|listed| {
                let of = listed.record;
                (of.block_start, of.anchor, of.domain)
                    == (record.block_start, record.anchor, record.domain)
            });
        match sums.filter(|sums| continues && sums.len() == pages.len()) {
            Some(sums) => {
                let listed = pages.into_iter().zip(sums);
                let listed = listed.map(|(record, sum)| (record.page, Listed { record, sum }));
                open.table.extend(listed);
                open.dirty.insert(record.block_start / REGION_PAGES);
                // The disk may have been away since the pages were written.
                for page in start..start + count {
                    match self.served(page) {
                        Some(_) => self.excused.remove(&page),
                        None => self.excused.insert(page),
                    };
                }
            }
            None => removed.extend(pages.into_iter().map(|page| page.page)),
        }
        self.excused.extend(removed);
    }

    /// Notes pages that were written and are not listed, because their set is being closed.
    pub(in super::super) fn leave_out(&mut self, record: &Record) {
        self.excused.extend(record.pages().map(|page| page.page));
    }

    /// Removes pages, and those behind them in their blocks.
    pub(in super::super) fn unlist(&mut self, run: PageRun) {
        if let Some(open) = &mut self.open {
            let removed = open.unlist(run);
            self.excused.extend(removed);
        }
    }

    /// Listed pages of a part of the inventory.
    pub(in super::super) fn records(&self, pages: Range<u32>) -> Vec<PageRecord> {
        let open = self.open.iter();
        let listed = open.flat_map(|open| open.table.range(pages.clone()));
        listed.map(|(_, listed)| listed.record).collect()
    }

    /// Epoch of the newest listed store.
    pub(in super::super) fn newest(&self) -> Epoch {
        let open = self.open.iter();
        let listed = open.flat_map(|open| open.table.values());
        let epochs = listed.map(|listed| listed.record.stored.epoch);
        epochs.max().unwrap_or_default()
    }

    /// Carries out a reset. Its mark is durable when the call returns, unless the disk lies.
    pub(in super::super) fn reset(&mut self, scope: &Scope, through: Stored, lies: bool) {
        if !lies {
            self.marks.push((scope.clone(), through));
            self.mark_changes += 1;
        }
        if let Some(open) = &mut self.open {
            let removed = open.invalidate(scope, through);
            self.excused.extend(removed);
        }
    }

    /// True while the headers lack a change.
    pub(in super::super) fn is_dirty(&self) -> bool {
        self.open
            .as_ref()
            .is_some_and(|open| !open.dirty.is_empty())
    }

    pub(super) fn write_header(&mut self, region: u32) {
        let Some(open) = &mut self.open else {
            return;
        };
        open.dirty.remove(&region);
        let own =
            |(_, listed): &(&u32, &Listed)| listed.record.block_start / REGION_PAGES == region;
        let listed = open.table.iter().filter(own);
        let listed: BTreeMap<u32, Listed> = listed.map(|(page, one)| (*page, *one)).collect();
        if let Some(set) = self.set_mut() {
            set.headers.insert(region, listed);
        }
    }

    /// Begins a flush: writes the headers that have changed.
    pub(in super::super) fn write_headers(&mut self) {
        let dirty = self.open.as_ref().map(|open| open.dirty.clone());
        for region in dirty.into_iter().flatten() {
            self.write_header(region);
        }
        self.flushing = Some(self.mark_changes);
    }

    /// Ends a flush: what was written is durable. Marks that were in all headers when it began are dropped.
    pub(in super::super) fn sync(&mut self) {
        if let Some(set) = self.set_mut() {
            set.durable_cells.clear();
            set.durable_headers.clone_from(&set.headers);
        }
        let swept = self.flushing.take() == Some(self.mark_changes) && self.sets.len() == 1;
        if swept {
            self.marks.clear();
        }
    }

    /// Loses any part of what is not durable.
    pub(in super::super) fn lose(&mut self, rng: &mut Rng) -> Lost {
        let mut lost = Lost::default();
        for set in self.sets.values_mut() {
            let mut regions: Vec<u32> = set.headers.keys().copied().collect();
            regions.retain(|region| set.headers.get(region) != set.durable_headers.get(region));
            for region in regions {
                if rng.bool() {
                    lost.regions += 1;
                    copy_region(region, &set.durable_headers, &mut set.headers);
                }
            }
            set.durable_headers.clone_from(&set.headers);
            for (cell, durable) in std::mem::take(&mut set.durable_cells) {
                let kept = match rng.u8(0..4) {
                    0 => TORN,
                    1 => durable,
                    _ => continue,
                };
                lost.cells += u64::from(set.cells[cell] != kept);
                set.cells[cell] = kept;
            }
        }
        self.excused.extend(0..self.capacity_cells);
        lost
    }
}

impl OpenSet {
    /// Removes pages, and those behind them in their blocks. Returns those that were listed.
    fn unlist(&mut self, run: PageRun) -> Vec<u32> {
        let first: Vec<(u32, u32)> = {
            let of_run = self
                .table
                .range(run.start..run.start.saturating_add(run.count));
            of_run
                .map(|(page, listed)| (*page, listed.record.block_start))
                .collect()
        };
        let mut removed = Vec::new();
        for (page, block) in first {
            let behind = self.table.range(page..);
            let behind = behind.take_while(|(_, listed)| listed.record.block_start == block);
            let behind: Vec<u32> = behind.map(|(page, _)| *page).collect();
            for page in behind {
                self.table.remove(&page);
                removed.push(page);
                self.dirty.insert(block / REGION_PAGES);
            }
        }
        removed
    }

    /// Removes the pages of a reset, and those behind them in their blocks. Returns those that were listed.
    pub(super) fn invalidate(&mut self, scope: &Scope, through: Stored) -> Vec<u32> {
        let covered = self.table.values().filter(|listed| {
            let page = listed.record;
            page.stored <= through && scope.contains(page.domain, page.fingerprint)
        });
        let covered: Vec<u32> = covered.map(|listed| listed.record.page).collect();
        let run = |page| PageRun {
            start: page,
            count: 1,
        };
        covered
            .into_iter()
            .flat_map(|page| self.unlist(run(page)))
            .collect()
    }
}

pub(super) fn copy_region(region: u32, from: &Headers, to: &mut Headers) {
    match from.get(&region) {
        Some(listed) => to.insert(region, listed.clone()),
        None => to.remove(&region),
    };
}
