//! Reads and writes of pages, and what a power loss takes of them.

use std::collections::BTreeSet;
use std::ops::Range;

use super::headers::copy_region;
use super::{DiskFailure, SimDisk};
use crate::world::storage::{Content, NOWHERE, TORN};
use kvferry_types::Time;

impl SimDisk {
    fn cells_of(&self, page: u32) -> Option<Range<usize>> {
        let key = self.current?;
        let start = page as usize * key.cells as usize;
        (page < self.pages(key)).then_some(start..start + key.cells as usize)
    }

    /// Content of a page of the current set.
    pub(in super::super) fn read(&self, page: u32) -> Content {
        let cells = self.cells_of(page).zip(self.set());
        let cells = cells.map(|(cells, set)| &set.cells[cells]);
        match cells.and_then(<[Content]>::split_first) {
            None => NOWHERE,
            Some((first, others)) if others.iter().all(|cell| cell == first) => *first,
            Some(_) => TORN,
        }
    }

    /// Makes durable what must be before these pages are overwritten, and the segments that they lie in.
    pub(in super::super) fn prepare(
        &mut self,
        page: u32,
        now: Time,
        lies: bool,
    ) -> Result<(), DiskFailure> {
        if !self.works(now) {
            return Err(DiskFailure::Io);
        }
        let segment = self.current.map(|key| page / self.segment_pages(key));
        self.make_segment(segment.unwrap_or(0), now)?;
        if lies {
            return Ok(());
        }
        let regions: BTreeSet<u32> = self.set().map_or_else(BTreeSet::new, |set| {
            let headers = set.headers.iter().chain(&set.durable_headers);
            let of_page = headers.filter(|(_, listed)| listed.contains_key(&page));
            of_page.map(|(region, _)| *region).collect()
        });
        for region in regions {
            self.write_header(region);
            if let Some(set) = self.set_mut() {
                copy_region(region, &set.headers, &mut set.durable_headers);
            }
        }
        Ok(())
    }

    /// Writes a page of the current set. Returns an error text when a header of the disk still lists it.
    pub(in super::super) fn write(&mut self, page: u32, content: Content) -> Result<(), String> {
        let (Some(cells), id) = (self.cells_of(page), self.id) else {
            return Err(format!("page {page} is written, which no disk has"));
        };
        self.excused.remove(&page);
        let Some(set) = self.set_mut() else {
            return Err(format!("page {page} is written, and no set is open"));
        };
        for cell in cells {
            let old = std::mem::replace(&mut set.cells[cell], content);
            set.durable_cells.entry(cell).or_insert(old);
        }
        let mut headers = set.headers.values().chain(set.durable_headers.values());
        match headers.any(|listed| listed.contains_key(&page)) {
            true => Err(format!(
                "page {page} of disk {id:?} is overwritten, and a header of the disk lists it"
            )),
            false => Ok(()),
        }
    }

    /// Damages a page that is read next.
    pub(in super::super) fn spoil(&mut self, page: u32) {
        self.excused.insert(page);
        let cells = self.cells_of(page);
        if let (Some(cells), Some(set)) = (cells, self.set_mut()) {
            for cell in cells {
                set.cells[cell] = TORN;
                set.durable_cells.remove(&cell);
            }
        }
    }

    /// Checksum of a listed page.
    pub(in super::super) fn sum(&self, page: u32) -> Option<Content> {
        let listed = self.open.as_ref()?.table.get(&page)?;
        Some(listed.sum)
    }

    /// Content of a page that is listed and whose checksum matches.
    pub(in super::super) fn served(&self, page: u32) -> Option<Content> {
        self.sum(page).filter(|sum| *sum == self.read(page))
    }

    /// True if the leader may take this page for readable although the disk does not serve it.
    pub(in super::super) fn is_excused(&self, page: u32) -> bool {
        self.excused.contains(&page)
    }
}
