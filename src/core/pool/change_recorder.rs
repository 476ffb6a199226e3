//! Notes the changes of a pool, where they are read.

use crate::index::blocks::{BlockIndex, BlockRef};
use crate::pool::Pool;
use crate::pool::changes::{Change, GoneReason, PlacedPages};

impl Pool {
    /// Records blocks that gain pages from now on.
    pub(crate) fn record_gains(&mut self) {
        self.changes.gained.get_or_insert_default();
    }

    /// The blocks that gained pages since they were taken last.
    pub(crate) fn take_gains(&mut self) -> Vec<BlockRef> {
        let gained = self.changes.gained.as_mut();
        gained.map(std::mem::take).unwrap_or_default()
    }

    /// Records changes from now on.
    pub fn record_changes(&mut self) {
        self.changes.all.get_or_insert_default();
    }

    /// Records no changes any longer.
    pub(crate) fn stop_recording(&mut self) {
        self.changes.all = None;
    }

    /// The changes since they were taken last.
    pub fn take_changes(&mut self) -> Vec<Change> {
        let changes = self.changes.all.as_mut();
        changes.map(std::mem::take).unwrap_or_default()
    }

    /// Notes that pages of a block became readable, from page `first` of the block on.
    pub(crate) fn note_stored(&mut self, block: BlockIndex, first: u32, pages: u32) {
        if let Some(gained) = &mut self.changes.gained {
            gained.push(self.blocks.reference(block));
        }
        if self.changes.all.is_some() {
            let stored = Change::Stored(self.placed(block, first, pages));
            self.changes.add(stored);
        }
    }

    /// Notes the loss of readable pages of a block, from page `first` of the block on.
    pub(crate) fn note_gone(
        &mut self,
        block: BlockIndex,
        first: u32,
        pages: u32,
        reason: GoneReason,
    ) {
        if self.changes.all.is_some() && pages > 0 && !self.blocks.get(block).retired {
            let gone = Change::Gone(self.placed(block, first, pages), reason);
            self.changes.add(gone);
        }
    }

    fn placed(&self, block: BlockIndex, first: u32, pages: u32) -> PlacedPages {
        let block = self.blocks.get(block);
        let start = block.start + first;
        PlacedPages {
            domain: block.domain,
            start,
            pages: self.blocks.fingerprints(start, pages).into(),
        }
    }

    /// Positions of the slab, each with a block or without one.
    pub(crate) fn block_positions(&self) -> BlockIndex {
        self.blocks.places()
    }

    /// The readable pages of the block at a position of the slab; `None` without a block, or when no lookup finds it. The
    /// pages of a reset that has not removed them yet are among them: they will be removed, or the reset is refused.
    pub(crate) fn readable_at(&self, position: BlockIndex) -> Option<PlacedPages> {
        let block = self.blocks.at(position)?;
        let ready = u32::from(block.ready);
        (!block.retired && ready > 0).then(|| self.placed(position, 0, ready))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::pool::tests::{domain, sequence, stored};
    use kvferry_types::{DomainId, Fingerprint, Scope, Shard, TransferId};

    use crate::index::shard_set::ShardSet;

    type Held = BTreeMap<u32, (DomainId, Fingerprint)>;

    fn placed(pages: &PlacedPages) -> impl Iterator<Item = (u32, (DomainId, Fingerprint))> {
        let places = (pages.start..).zip(&pages.pages);
        places.map(|(place, page)| (place, (pages.domain, *page)))
    }

    /// What the arena pages of a pool hold that are readable.
    fn readable(pool: &Pool) -> Held {
        let blocks = pool.view().filter(|block| !block.retired);
        let pages = blocks.flat_map(|block| {
            let ready = &block.fingerprints[..block.ready as usize];
            let places = (block.start..).zip(ready);
            places.map(move |(place, page)| (place, (block.domain, *page)))
        });
        pages.collect()
    }

    /// Applies the changes of a pool to what its arena pages hold.
    fn follow(pool: &mut Pool, held: &mut Held) {
        for change in pool.take_changes() {
            match change {
                Change::Stored(stored) => held.extend(placed(&stored)),
                Change::Gone(gone, _) => placed(&gone).for_each(|(place, page)| {
                    assert_eq!(held.remove(&place), Some(page), "it was readable");
                }),
                Change::Cleared => held.clear(),
            }
        }
    }

    fn store(pool: &mut Pool, salt: u8, id: u64) {
        let (mut reserved, mut evicted, mut next) = (Vec::new(), Vec::new(), id);
        let hashes = sequence(4, salt);
        let into = (&mut next, &mut reserved, &mut evicted);
        pool.reserve(&domain(), hashes.view(), 0, 4, None, into.0, into.1, into.2);
        for piece in &reserved {
            pool.start_filling(piece.transfer, ShardSet::first(1));
            assert_eq!(pool.ended(piece.transfer, Shard(0), true), Some(true));
        }
    }

    #[test]
    fn changes_followed_from_the_start_give_what_every_arena_page_holds() {
        let mut pool = stored(&sequence(8, 0), 12);
        let mut held = readable(&pool);
        pool.record_changes();
        type Step = fn(&mut Pool);
        let steps: [(&str, Step); 6] = [
            ("a store into free pages", |pool| store(pool, 1, 100)),
            ("a store that evicts", |pool| store(pool, 2, 200)),
            ("a cut", |pool| {
                let block = pool.view().next().expect("a block");
                let (index, start) = (block.index, block.start);
                let block = pool.blocks.reference(index);
                pool.cut(block, start + 1);
            }),
            ("a cut of a held block", |pool| {
                let block = pool.view().last().expect("a block");
                let (index, start) = (block.index, block.start);
                let pin = pool.pin(index, 4);
                pool.cut(pin.block(), start + 1);
                pool.unpin(pin);
            }),
            ("a reset", |pool| {
                let mut sweep = pool.begin_sweep(Scope::Everything);
                pool.remove_next(&mut sweep, &mut 100, &mut Vec::<TransferId>::new());
                pool.end_sweep(&sweep);
            }),
            ("a close", |pool| {
                store(pool, 3, 300);
                pool.reset();
            }),
        ];
        for (what, step) in steps {
            step(&mut pool);
            follow(&mut pool, &mut held);
            assert_eq!(held, readable(&pool), "{what}");
            assert_eq!(pool.check(), Ok(()), "{what}");
        }
    }

    #[test]
    fn a_pool_whose_changes_nobody_reads_records_none() {
        let mut pool = stored(&sequence(8, 0), 12);
        store(&mut pool, 1, 100);
        pool.reset();
        assert_eq!(pool.take_changes(), []);
        assert_eq!(pool.take_gains(), []);
        pool.record_changes();
        pool.stop_recording();
        pool.reset();
        assert_eq!(pool.take_changes(), []);
    }

    #[test]
    fn a_change_names_the_pages_that_it_adds_or_removes_and_why() {
        let mut pool = stored(&sequence(8, 0), 12);
        pool.record_changes();
        pool.record_gains();
        let reasons = |pool: &mut Pool| {
            let changes = pool.take_changes().into_iter();
            let reasons = changes.map(|change| match change {
                Change::Stored(pages) => (None, pages.pages.len()),
                Change::Gone(pages, reason) => (Some(reason), pages.pages.len()),
                Change::Cleared => unreachable!("nothing closes"),
            });
            reasons.collect::<Vec<_>>()
        };
        store(&mut pool, 1, 100);
        assert_eq!(reasons(&mut pool), [(None, 4)]);
        assert_eq!(pool.take_gains().len(), 1);
        store(&mut pool, 2, 200);
        assert_eq!(
            reasons(&mut pool),
            [(Some(GoneReason::Evicted), 4), (None, 4)]
        );
        let block = pool.view().next().expect("a block");
        let (index, start) = (block.index, block.start);
        pool.cut(pool.block_ref(index), start);
        assert_eq!(reasons(&mut pool), [(Some(GoneReason::Damaged), 4)]);
        let mut sweep = pool.begin_sweep(Scope::Everything);
        pool.remove_next(&mut sweep, &mut 100, &mut Vec::<TransferId>::new());
        pool.end_sweep(&sweep);
        let removed = reasons(&mut pool);
        assert!(!removed.is_empty());
        assert!(
            removed
                .iter()
                .all(|(why, _)| *why == Some(GoneReason::Reset))
        );
    }
}
