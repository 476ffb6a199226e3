//! Notes the changes of a pool, where they are consumed.

use crate::blocks::BlockIndex;
use crate::change::Change;
use crate::pool::Pool;

impl Pool {
    /// Records changes from now on.
    pub fn record_changes(&mut self) {
        self.changes.0.get_or_insert_default();
    }

    /// The changes since they were taken last.
    pub fn take_changes(&mut self) -> Vec<Change> {
        self.changes
            .0
            .as_mut()
            .map(std::mem::take)
            .unwrap_or_default()
    }

    pub(super) fn note_stored(&mut self, block: BlockIndex) {
        let block = self.blocks.reference(block);
        self.changes.add(|| Change::Stored(block));
    }

    /// Notes the loss of readable pages of a block, from page `first` of the block on.
    pub(super) fn note_removed(&mut self, block: BlockIndex, first: u32, pages: u32) {
        let block = self.blocks.get(block);
        if pages > 0 && !block.retired {
            let (domain, start) = (block.domain, block.start + first);
            let blocks = &self.blocks;
            self.changes.add(|| Change::Removed {
                domain,
                pages: blocks.fingerprints(start, pages).to_vec(),
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::tests::{domain, sequence, stored};
    use kvferry_types::{DomainId, Fingerprint, Scope, Shard, TransferId};

    use crate::shard_set::ShardSet;

    /// The readable pages of a pool.
    fn readable(pool: &Pool) -> BTreeSet<(DomainId, Fingerprint)> {
        let blocks = pool.view().filter(|block| !block.retired);
        let pages = blocks.flat_map(|block| {
            let ready = &block.fingerprints[..block.ready as usize];
            ready.iter().map(move |page| (block.domain, *page))
        });
        pages.collect()
    }

    /// Applies the changes of a pool to a set of pages.
    fn follow(pool: &mut Pool, pages: &mut BTreeSet<(DomainId, Fingerprint)>) {
        for change in pool.take_changes() {
            match change {
                Change::Stored(block) => {
                    let mut blocks = pool.view();
                    let found = blocks.find(|view| pool.blocks.reference(view.index) == block);
                    // A later change of the same step may have removed the block.
                    let Some(block) = found else { continue };
                    let ready = &block.fingerprints[..block.ready as usize];
                    pages.extend(ready.iter().map(|page| (block.domain, *page)));
                }
                Change::Removed {
                    domain,
                    pages: gone,
                } => gone.into_iter().for_each(|page| {
                    assert!(pages.remove(&(domain, page)), "it was readable");
                }),
                Change::Cleared => pages.clear(),
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
    fn changes_followed_from_the_start_give_the_pages_that_are_readable() {
        let mut pool = stored(&sequence(8, 0), 12);
        let mut pages = readable(&pool);
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
            follow(&mut pool, &mut pages);
            assert_eq!(pages, readable(&pool), "{what}");
            assert_eq!(pool.check(), Ok(()), "{what}");
        }
    }

    #[test]
    fn a_pool_whose_changes_nobody_consumes_records_none() {
        let mut pool = stored(&sequence(8, 0), 12);
        pool.reset();
        assert_eq!(pool.take_changes(), []);
    }
}
