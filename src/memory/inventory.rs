//! Inventory of an arena: one entry for each page, which records what the page holds, so that a new leader finds the
//! pages when every process that knew them has ended.
//!
//! ```text
//! offset  bytes  field of an entry (numbers little-endian)
//!      0      8  seal: 0 when the page holds nothing, else a checksum of the other fields and of the page's number
//!      8     16  anchor
//!     24     16  domain; its last 8 bytes are those of the namespace
//!     40     16  fingerprint
//!     56      8  epoch of the store
//!     64      8  id of the transfer that stored it
//!     72      4  first arena page of the block
//!     76      2  index of the page in the block
//!     78      2  phase of the block
//! ```
//!
//! The seal is one aligned word. A writer clears it before it changes anything else of a page or its entry, and sets it
//! after the last byte of both: a process that dies in between leaves an invalid entry.

use std::hash::Hasher;

use siphasher::sip::SipHasher13;

use super::buffer::BufferError;
use super::depot::{Depot, ENTRY_BYTES};
use kvferry_types::{
    Anchor, DomainId, Epoch, Fingerprint, PageRecord, PageRun, Record, Scope, Stored, TransferId,
};

const SEAL_BYTES: usize = 8;
const BODY_BYTES: usize = ENTRY_BYTES as usize - SEAL_BYTES;

/// The seal of an entry: a keyed checksum, never 0.
fn seal(depot: &Depot, page: u32, body: &[u8; BODY_BYTES]) -> u64 {
    let [high, low] = depot.seal_key();
    let mut hasher = SipHasher13::new_with_keys(high, low);
    hasher.write_u32(page);
    hasher.write(body);
    hasher.finish() | 1
}

fn body(record: &PageRecord) -> [u8; BODY_BYTES] {
    let mut body = [0; BODY_BYTES];
    let mut at = 0;
    let mut put = |bytes: &[u8]| {
        body[at..at + bytes.len()].copy_from_slice(bytes);
        at += bytes.len();
    };
    put(&record.anchor.0.to_le_bytes());
    put(&record.domain.0.to_le_bytes());
    put(&record.fingerprint.0.to_le_bytes());
    put(&record.stored.epoch.0.to_le_bytes());
    put(&record.stored.transfer.0.to_le_bytes());
    put(&record.block_start.to_le_bytes());
    put(&record.index.to_le_bytes());
    put(&record.phase.to_le_bytes());
    body
}

fn record(page: u32, body: &[u8; BODY_BYTES]) -> PageRecord {
    /// Takes the next `N` bytes.
    fn take<const N: usize>(rest: &mut &[u8]) -> [u8; N] {
        match rest.split_first_chunk::<N>() {
            Some((field, behind)) => {
                *rest = behind;
                *field
            }
            None => [0; N],
        }
    }
    let rest = &mut &body[..];
    let anchor = Anchor(u128::from_le_bytes(take(rest)));
    let domain = DomainId(u128::from_le_bytes(take(rest)));
    let fingerprint = Fingerprint(u128::from_le_bytes(take(rest)));
    let stored = Stored {
        epoch: Epoch(u64::from_le_bytes(take(rest))),
        transfer: TransferId(u64::from_le_bytes(take(rest))),
    };
    PageRecord {
        page,
        anchor,
        domain,
        block_start: u32::from_le_bytes(take(rest)),
        index: u16::from_le_bytes(take(rest)),
        phase: u16::from_le_bytes(take(rest)),
        stored,
        fingerprint,
    }
}

/// The inventory of a depot for pages of `page_bytes` bytes. Only one process at a time writes a page's entry: the
/// leader gives each page to one store.
impl Depot {
    /// Sets the page size of the depot. If it held pages of another size before, all pages are removed from the
    /// inventory. Of two processes that do so at the same time, the first one wins.
    pub fn hold_pages_of(&self, page_bytes: u64) -> Result<(), BufferError> {
        let before = self.page_bytes()?.unwrap_or(0);
        if before == page_bytes || !self.exchange_page_bytes(before, 0)? {
            return Ok(());
        }
        for page in 0..self.arena_pages(page_bytes) {
            self.buffer().store_word(Self::entry_at(page), 0)?;
        }
        self.exchange_page_bytes(0, page_bytes)?;
        Ok(())
    }

    /// Does what [`Self::hold_pages_of`] does, for a reading of the inventory. Returns `false`, without a change, when
    /// a later reading came before: a worker that stalled may process a request of an earlier leader or reading. The
    /// page size of that request would remove the pages that are served now.
    pub fn hold_pages_for(
        &self,
        page_bytes: u64,
        reading: (Epoch, u64),
    ) -> Result<bool, BufferError> {
        if reading < self.last_reading()? {
            return Ok(false);
        }
        self.set_last_reading(reading)?;
        self.hold_pages_of(page_bytes)?;
        Ok(self.page_bytes()? == Some(page_bytes))
    }

    /// Removes pages that will be overwritten from the inventory. A run that ends outside the arena is refused, because
    /// the memory after the last entry holds pages.
    pub fn unlist_run(&self, page_bytes: u64, run: PageRun) -> Result<(), BufferError> {
        let pages = self.arena_pages(page_bytes);
        let end = u32::try_from(run.end()).ok().filter(|end| *end <= pages);
        let Some(end) = end else {
            return Err(BufferError::OutOfRange {
                offset_bytes: Self::entry_at(run.start),
                len_bytes: u64::from(run.count) * ENTRY_BYTES,
                bytes: Self::entry_at(pages),
            });
        };
        for page in run.start..end {
            self.buffer().store_word(Self::entry_at(page), 0)?;
        }
        Ok(())
    }

    /// Removes the pages of `scope` that were stored by `through` or before, in `count` entries starting at `from`.
    /// Returns the first entry that was not examined, or `None` after the last one.
    pub fn invalidate_scope(
        &self,
        page_bytes: u64,
        scope: &Scope,
        through: Stored,
        from: u32,
        count: u32,
    ) -> Result<Option<u32>, BufferError> {
        let pages = self.arena_pages(page_bytes);
        let end = from.saturating_add(count).min(pages);
        for page in from..end {
            let listed = self.listed(page)?;
            if let Some((seal, record)) = listed
                && record.stored <= through
                && scope.contains(record.domain, record.fingerprint)
            {
                self.invalidate_sealed(page, seal)?;
            }
        }
        Ok((end < pages).then_some(end))
    }

    /// Adds pages to the inventory, of which every byte has been written. A page outside the arena is refused, and no
    /// page after it is added.
    pub fn list(&self, page_bytes: u64, stored: &Record) -> Result<(), BufferError> {
        let pages = self.arena_pages(page_bytes);
        for page in stored.pages() {
            if page.page >= pages {
                return Err(BufferError::OutOfRange {
                    offset_bytes: Self::entry_at(page.page),
                    len_bytes: ENTRY_BYTES,
                    bytes: Self::entry_at(pages),
                });
            }
            let at = Self::entry_at(page.page);
            let body = body(&page);
            self.buffer().store_word(at, 0)?;
            self.buffer().write_from(at + SEAL_BYTES as u64, &body)?;
            let seal = seal(self, page.page, &body);
            self.buffer().store_word(at, seal)?;
        }
        Ok(())
    }

    /// Returns the listed pages among the `count` pages starting at `from`, in order. A entry whose seal does not match
    /// is not listed.
    pub fn read_inventory(
        &self,
        page_bytes: u64,
        from: u32,
        count: u32,
    ) -> Result<Vec<PageRecord>, BufferError> {
        let end = from.saturating_add(count).min(self.arena_pages(page_bytes));
        let mut records = Vec::new();
        for page in from..end {
            records.extend(self.listed(page)?.map(|(_, record)| record));
        }
        Ok(records)
    }

    /// Removes a page from the inventory if its entry still has this seal. While a worker stalls between the read of
    /// the entry and its change, the entry may have become that of another page, or bytes of a larger page.
    fn invalidate_sealed(&self, page: u32, seal: u64) -> Result<(), BufferError> {
        self.buffer()
            .exchange_word(Self::entry_at(page), seal, 0)
            .map(|_| ())
    }

    /// The record of a listed page, with its seal.
    fn listed(&self, page: u32) -> Result<Option<(u64, PageRecord)>, BufferError> {
        let at = Self::entry_at(page);
        let found = self.buffer().load_word(at)?;
        if found == 0 {
            return Ok(None);
        }
        let mut bytes = [0; BODY_BYTES];
        self.buffer()
            .read_into(at + SEAL_BYTES as u64, &mut bytes)?;
        let whole = found == seal(self, page, &bytes);
        Ok(whole.then(|| (found, record(page, &bytes))))
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use super::*;
    use kvferry_types::NamespaceId;

    const PAGE_BYTES: u64 = 1000;
    /// A mark after every store.
    const LAST: Stored = Stored {
        epoch: Epoch(u64::MAX),
        transfer: TransferId(u64::MAX),
    };

    fn depot() -> Depot {
        let depot = Depot::create(Depot::bytes_for(64, PAGE_BYTES)).expect("memory");
        depot.hold_pages_of(PAGE_BYTES).expect("held");
        depot
    }

    fn stored(block_start: u32, first: u16, pages: u128, domain: u128) -> Record {
        Record {
            anchor: Anchor(u128::from(block_start) << 100 | 7),
            domain: DomainId(domain << 64 | 5),
            block_start,
            first,
            phase: 3,
            stored: Stored {
                epoch: Epoch(5),
                transfer: TransferId(6 << 40),
            },
            fingerprints: (0..pages).map(|page| Fingerprint(page << 90 | 1)).collect(),
        }
    }

    fn listed(depot: &Depot) -> Vec<PageRecord> {
        depot
            .read_inventory(PAGE_BYTES, 0, u32::MAX)
            .expect("readable")
    }

    #[test]
    fn listed_pages_are_read_by_the_next_process_that_maps_the_depot() {
        let depot = depot();
        let (long, short) = (stored(0, 2, 5, 1), stored(60, 0, 4, 2));
        depot.list(PAGE_BYTES, &short).expect("listed");
        depot.list(PAGE_BYTES, &long).expect("listed");
        let expected: Vec<PageRecord> = long.pages().chain(short.pages()).collect();
        let again = Depot::from_fd(depot.as_fd().try_clone_to_owned().expect("descriptor"))
            .expect("a depot");
        assert_eq!(listed(&again), expected);
        let part = again.read_inventory(PAGE_BYTES, 4, 57).expect("readable");
        assert_eq!(part, expected[2..6]);
    }

    #[test]
    fn unlisted_pages_are_not_found() {
        let depot = depot();
        depot.list(PAGE_BYTES, &stored(0, 0, 8, 1)).expect("listed");
        depot
            .unlist_run(PAGE_BYTES, PageRun { start: 2, count: 3 })
            .expect("invalidated");
        let pages: Vec<u32> = listed(&depot).iter().map(|page| page.page).collect();
        assert_eq!(pages, [0, 1, 5, 6, 7]);
    }

    #[test]
    fn a_scope_is_invalidated_and_nothing_else() {
        let depot = depot();
        depot.list(PAGE_BYTES, &stored(0, 0, 4, 1)).expect("listed");
        depot.list(PAGE_BYTES, &stored(8, 0, 4, 2)).expect("listed");
        let pages =
            |depot: &Depot| -> Vec<u32> { listed(depot).iter().map(|page| page.page).collect() };
        let invalidate = |scope: &Scope, from, count| {
            let next = depot.invalidate_scope(PAGE_BYTES, scope, LAST, from, count);
            next.expect("invalidated")
        };
        let one = Scope::Pages(NamespaceId(2), [Fingerprint(1)].into_iter().collect());
        assert_eq!(invalidate(&one, 0, u32::MAX), None);
        assert_eq!(pages(&depot), [0, 1, 2, 3, 9, 10, 11]);
        let scope = Scope::Namespace(NamespaceId(1));
        assert_eq!(invalidate(&scope, 0, 2), Some(2), "a slice");
        assert_eq!(pages(&depot), [2, 3, 9, 10, 11]);
        assert_eq!(invalidate(&scope, 2, 8), Some(10));
        assert_eq!(invalidate(&scope, 10, 100), None);
        assert_eq!(pages(&depot), [9, 10, 11]);
        assert_eq!(invalidate(&Scope::Everything, 0, 64), None);
        assert!(pages(&depot).is_empty());
    }

    #[test]
    fn a_repeated_invalidation_keeps_pages_stored_after_the_reset() {
        let depot = depot();
        let stored_by = |block_start, epoch, transfer| {
            let by = Stored {
                epoch: Epoch(epoch),
                transfer: TransferId(transfer),
            };
            let record = Record {
                stored: by,
                ..stored(block_start, 0, 1, 1)
            };
            depot.list(PAGE_BYTES, &record).expect("listed");
        };
        stored_by(0, 4, 90);
        stored_by(1, 5, 8);
        stored_by(2, 5, 9);
        stored_by(3, 6, 1);
        let through = Stored {
            epoch: Epoch(5),
            transfer: TransferId(8),
        };
        for _ in 0..2 {
            depot
                .invalidate_scope(PAGE_BYTES, &Scope::Everything, through, 0, u32::MAX)
                .expect("invalidated");
            let pages: Vec<u32> = listed(&depot).iter().map(|page| page.page).collect();
            assert_eq!(pages, [2, 3]);
        }
    }

    #[test]
    fn a_slot_with_a_changed_bit_is_invalid() {
        let depot = depot();
        let one = stored(3, 0, 1, 1);
        depot.list(PAGE_BYTES, &one).expect("listed");
        let at = Depot::entry_at(3);
        for byte in at..at + ENTRY_BYTES {
            let mut was = [0];
            depot.buffer().read_into(byte, &mut was).expect("readable");
            let other = [was[0] ^ 0x10];
            depot.buffer().write_from(byte, &other).expect("written");
            assert_eq!(listed(&depot), [], "byte {}", byte - at);
            depot.buffer().write_from(byte, &was).expect("written");
        }
        assert_eq!(listed(&depot), one.pages().collect::<Vec<_>>());
        // A valid entry in another page's position is not listed either.
        let mut entry = [0; ENTRY_BYTES as usize];
        depot.buffer().read_into(at, &mut entry).expect("readable");
        let place = Depot::entry_at(4);
        depot.buffer().write_from(place, &entry).expect("written");
        assert_eq!(listed(&depot).len(), 1);
    }

    #[test]
    fn pages_of_another_size_empty_the_depot() {
        let depot = depot();
        depot.list(PAGE_BYTES, &stored(0, 0, 4, 1)).expect("listed");
        depot.hold_pages_of(PAGE_BYTES).expect("held");
        assert_eq!(listed(&depot).len(), 4);
        depot.hold_pages_of(2000).expect("held");
        let found = depot.read_inventory(2000, 0, u32::MAX).expect("readable");
        assert_eq!(found, []);
        depot.hold_pages_of(PAGE_BYTES).expect("held");
        assert_eq!(listed(&depot), []);
    }

    #[test]
    fn a_late_reading_keeps_the_pages_of_a_later_one() {
        let depot = depot();
        let hold = |page_bytes, epoch, reading| {
            let held = depot.hold_pages_for(page_bytes, (Epoch(epoch), reading));
            held.expect("a depot")
        };
        assert!(hold(PAGE_BYTES, 3, 7));
        assert!(hold(500, 3, 8));
        depot.list(500, &stored(0, 0, 4, 1)).expect("listed");
        assert!(!hold(PAGE_BYTES, 3, 7), "the reading before");
        assert!(!hold(PAGE_BYTES, 2, 9), "the leader before");
        assert_eq!(depot.page_bytes().expect("readable"), Some(500));
        let found = depot.read_inventory(500, 0, u32::MAX).expect("readable");
        assert_eq!(found.len(), 4);
        assert!(hold(500, 3, 8), "its next part");
        assert!(hold(PAGE_BYTES, 4, 1), "the next leader");
        assert_eq!(depot.page_bytes().expect("readable"), Some(PAGE_BYTES));
    }

    #[test]
    fn a_page_outside_the_arena_is_refused() {
        let depot = depot();
        assert!(depot.list(PAGE_BYTES, &stored(62, 0, 4, 1)).is_err());
        assert_eq!(listed(&depot).len(), 2);
    }

    #[test]
    fn nothing_outside_the_inventory_is_unlisted() {
        let depot = depot();
        depot.list(PAGE_BYTES, &stored(0, 0, 4, 1)).expect("listed");
        let pages_at = depot.pages_at(PAGE_BYTES);
        let content = vec![0xa5; usize::try_from(depot.bytes() - pages_at).expect("small")];
        depot
            .buffer()
            .write_from(pages_at, &content)
            .expect("written");
        for (start, count) in [
            (63, 2),
            (64, 1),
            (70, 1),
            (0, u32::MAX),
            (u32::MAX, u32::MAX),
        ] {
            let run = PageRun { start, count };
            assert!(depot.unlist_run(PAGE_BYTES, run).is_err(), "{run:?}");
        }
        let mut found = vec![0; content.len()];
        depot
            .buffer()
            .read_into(pages_at, &mut found)
            .expect("readable");
        assert!(found == content, "a page was written");
        assert_eq!(listed(&depot).len(), 4, "and nothing is removed");
    }

    #[test]
    fn a_record_of_impossible_pages_lists_none_of_them() {
        let depot = depot();
        for (block_start, first) in [(u32::MAX, 0), (u32::MAX, 9), (60, u16::MAX)] {
            let record = stored(block_start, first, 4, 1);
            assert!(record.pages().count() < 4, "page {block_start} + {first}");
            if let Ok(()) = depot.list(PAGE_BYTES, &record) {
                assert_eq!(record.pages().count(), 0);
            }
            assert_eq!(listed(&depot), []);
        }
    }

    /// Simulates a worker that stalls between the read of an entry and its change.
    #[test]
    fn a_entry_that_has_changed_since_it_was_examined_stays_listed() {
        let depot = depot();
        let by = |transfer| Record {
            stored: Stored {
                epoch: Epoch(1),
                transfer: TransferId(transfer),
            },
            ..stored(0, 0, 1, 1)
        };
        depot.list(PAGE_BYTES, &by(1)).expect("listed");
        let seal = || {
            let listed = depot.listed(0).expect("readable");
            listed.map_or(0, |(seal, _)| seal)
        };
        let before = seal();
        depot.list(PAGE_BYTES, &by(2)).expect("listed");
        depot.invalidate_sealed(0, before).expect("looked at");
        assert_eq!(listed(&depot).len(), 1, "stored after the reset");
        depot.invalidate_sealed(0, seal()).expect("invalidated");
        assert!(listed(&depot).is_empty());
    }
}
