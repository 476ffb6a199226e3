//! What a read expects to find.

use std::sync::Arc;

use super::super::super::format::BlockHeader;
use super::super::super::set::DiskSet;

/// A page of a read, as the set listed it when the copy began.
#[derive(Debug)]
pub(super) struct Source {
    pub(super) block: Arc<BlockHeader>,
    pub(super) index: u16,
}

/// What the set lists of each page that is read.
pub(super) fn sources(set: &DiskSet, pages: &[(u32, u32)]) -> Vec<Option<Source>> {
    let table = set.table();
    let mut last: Option<(u32, Arc<BlockHeader>)> = None;
    let sources = pages.iter().map(|(_, page)| {
        let (block, index) = table.find(*page)?;
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
