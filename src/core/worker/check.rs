//! Validation of orders: a copy is checked when its order arrives, before memory or the inventory is written.

use kvferry_types::{GroupId, MemoryGeometry, PageList, PerTier, Record, TierId, Transfer};

/// The pages of a group in the engine's registered memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupBounds {
    /// Number of pages.
    pub device_pages: u32,
    /// Bytes of one page.
    pub page_bytes: u64,
}

/// The registered memory of an engine: bounds for the device pages that copies may name, and the bytes of a page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryBounds {
    /// The groups of the memory.
    pub groups: Vec<GroupBounds>,
}

impl MemoryBounds {
    /// The bounds of an engine's memory.
    pub fn new(geometry: &MemoryGeometry) -> Self {
        let groups = geometry.groups.iter().map(|group| GroupBounds {
            device_pages: group.device_pages,
            page_bytes: group.page_bytes,
        });
        Self {
            groups: groups.collect(),
        }
    }

    /// Bytes of a page of the tiers below the device: each has room for a page of the largest group.
    pub(super) fn page_bytes(&self) -> u64 {
        let groups = self.groups.iter();
        groups.map(|group| group.page_bytes).max().unwrap_or(0)
    }

    fn group(&self, group: GroupId) -> Option<&GroupBounds> {
        self.groups.get(usize::from(group.0))
    }
}

/// Bounds for the pages of one order.
#[derive(Debug, Clone, Copy)]
pub(super) struct OrderBounds<'a> {
    /// The engine's memory; `None` if neither tier is the device.
    pub(super) memory: Option<&'a MemoryBounds>,
    /// Pages of the size that the order names in the depot of each tier that the worker reaches.
    pub(super) arena_pages: &'a PerTier<u32>,
}

impl OrderBounds<'_> {
    /// Bytes that a transfer moves. Between two tiers, pages of every group are moved with the room of the largest.
    pub(super) fn bytes_of(&self, transfer: &Transfer) -> u64 {
        let pages: u64 = transfer.pairs.iter().map(|pair| pair.src.pages()).sum();
        let group = transfer.device.map(|device| device.group);
        let group = group.and_then(|group| self.memory?.group(group));
        let page_bytes = group.map_or(transfer.page_bytes, |group| group.page_bytes);
        pages.saturating_mul(page_bytes)
    }

    /// The name of a tier's memory and its pages, of a group on the device; `None` if the worker does not reach the tier.
    fn of(&self, tier: TierId, group: Option<GroupId>) -> Option<(String, u32)> {
        match tier {
            TierId::Device => {
                let group = self.memory?.group(group?);
                let pages = group.map_or(0, |group| group.device_pages);
                Some(("device".to_owned(), pages))
            }
            tier => Some((format!("arena of {tier}"), *self.arena_pages.get(tier)?)),
        }
    }
}

/// A copy that failed validation.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{field} is {value}: {remedy}; the copy is refused: a tier has changed since the order, or leader and worker are of \
     different versions"
)]
pub(super) struct Invalid {
    field: &'static str,
    value: String,
    remedy: String,
}

fn invalid<T>(
    field: &'static str,
    value: impl Into<String>,
    remedy: impl Into<String>,
) -> Result<T, Invalid> {
    Err(Invalid {
        field,
        value: value.into(),
        remedy: remedy.into(),
    })
}

/// Checks that every page lies within its memory and has the size of the memory's pages, that both sides of each pair
/// have the same number of pages, and that the record lists the pages that are written to a tier.
pub(super) fn check(transfer: &Transfer, bounds: OrderBounds<'_>) -> Result<(), Invalid> {
    let edge = transfer.edge;
    let names_engine = transfer.device.is_some() == edge.touches(TierId::Device);
    let group = transfer.device.map(|device| device.group);
    let ends = bounds.of(edge.from, group).zip(bounds.of(edge.to, group));
    let Some((from, to)) = ends.filter(|_| edge.from != edge.to && names_engine) else {
        let remedy = "name two tiers of this worker, and the engine if one is the device";
        return invalid("from, to", edge.to_string(), remedy);
    };
    let registered = bounds.memory.map(MemoryBounds::page_bytes);
    let registered = registered.unwrap_or(transfer.page_bytes);
    if transfer.page_bytes != registered {
        let remedy = format!("the engine's pages have {registered} bytes");
        return invalid("page_bytes", transfer.page_bytes.to_string(), remedy);
    }
    if transfer.pairs.is_empty() {
        return invalid("pairs", "empty", "name at least one");
    }
    for pair in &transfer.pairs {
        within("pairs.src", &pair.src, &from)?;
        within("pairs.dst", &pair.dst, &to)?;
        let (src, dst) = (pair.src.pages(), pair.dst.pages());
        if src == 0 || src != dst {
            let value = format!("{src} sources for {dst} destinations");
            return invalid("pairs", value, "name as many on both sides, at least one");
        }
    }
    match &transfer.record {
        None => Ok(()),
        Some(_) if edge.to == TierId::Device => {
            invalid("record", "there", "leave it out: a load lists nothing")
        }
        Some(record) => lists(transfer, record),
    }
}

fn within(
    field: &'static str,
    list: &PageList,
    (memory, pages): &(String, u32),
) -> Result<(), Invalid> {
    let inside = |run: &&kvferry_types::PageRun| run.count > 0 && run.end() <= u64::from(*pages);
    match list.0.iter().find(|run| !inside(run)) {
        None => Ok(()),
        Some(run) => {
            let value = format!("[{}, {}]", run.start, run.count);
            invalid(field, value, format!("the {memory} has {pages} pages"))
        }
    }
}

/// Checks that the record of a store names the pages that the store writes, in order. Sums cannot overflow: a block
/// begins at a page of the arena, and the position of a page in its block is counted in 64 bits.
fn lists(transfer: &Transfer, record: &Record) -> Result<(), Invalid> {
    let written: u64 = transfer.pairs.iter().map(|pair| pair.dst.pages()).sum();
    let listed = record.fingerprints.len() as u64;
    if listed != written {
        let value = format!("{listed} fingerprints");
        return invalid("record", value, format!("{written} pages are written"));
    }
    let last = u64::from(record.first) + listed;
    if last > u64::from(u16::MAX) + 1 {
        let value = format!("{} and {listed} fingerprints", record.first);
        return invalid("record.first", value, "a block has at most 65536 pages");
    }
    let mut next = u64::from(record.block_start) + u64::from(record.first);
    for run in transfer.pairs.iter().flat_map(|pair| &pair.dst.0) {
        if u64::from(run.start) != next {
            let value = format!("{} with first {}", record.block_start, record.first);
            let remedy = format!("page {} is written where page {next} is listed", run.start);
            return invalid("record.block_start", value, remedy);
        }
        next = run.end();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvferry_types::{
        Anchor, DomainId, Edge, Fingerprint, FragmentPair, PageRun, Stored, Time, TransferId,
    };

    /// An index in a block has 16 bits in the inventory.
    #[test]
    fn a_record_ends_at_the_last_index_that_a_block_can_have() {
        let listed = |first: u16| {
            let run = |start| PageList([PageRun { start, count: 4 }].into_iter().collect());
            let (src, dst) = (run(0), run(u32::from(first)));
            let transfer = Transfer {
                id: TransferId(1),
                edge: Edge::STORE,
                device: None,
                page_bytes: 1,
                pairs: vec![FragmentPair { src, dst }],
                record: None,
                deadline: Time(0),
            };
            let record = Record {
                anchor: Anchor(1),
                domain: DomainId(2),
                block_start: 0,
                first,
                phase: 0,
                stored: Stored::default(),
                fingerprints: vec![Fingerprint(3); 4],
            };
            lists(&transfer, &record).map_err(|why| why.field)
        };
        assert_eq!(listed(65_532), Ok(()));
        assert_eq!(listed(65_533), Err("record.first"));
    }
}
