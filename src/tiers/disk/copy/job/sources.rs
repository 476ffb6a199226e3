//! What a read expects to find.

use std::sync::Arc;

use super::super::super::format::BlockHeader;
use super::super::super::set::DiskSet;
use kvferry_types::Record;

/// A page of a read, as the set listed it when the copy began.
#[derive(Debug)]
pub(super) struct Source {
    pub(super) block: Arc<BlockHeader>,
    pub(super) index: u16,
}

/// What the set lists of each page that is read. `None` for a page that is not listed, or that is another page than the
/// record of the copy names: the leader's view of the disk may be older than the disk, as after a disk was exchanged.
pub(super) fn sources(
    set: &DiskSet,
    pages: &[(u32, u32)],
    record: Option<&Record>,
) -> Vec<Option<Source>> {
    let table = set.table();
    let mut last: Option<(u32, Arc<BlockHeader>)> = None;
    let sources = pages.iter().enumerate().map(|(number, (_, page))| {
        let (block, index) = table.find(*page)?;
        let listed = block.pages.get(usize::from(index))?.fingerprint;
        let ordered = record.is_none_or(|record| {
            record.domain == block.domain && record.fingerprints.get(number) == Some(&listed)
        });
        if !ordered {
            return None;
        }
        let start = page - u32::from(index);
        let shared = match &last {
            Some((of, shared)) if *of == start => Arc::clone(shared),
            _ => Arc::new(block.clone()),
        };
        last = Some((start, Arc::clone(&shared)));
        Some(Source {
            block: shared,
            index,
        })
    });
    sources.collect()
}
