//! Moves of whole blocks between host memory and a disk, for the measurements of a disk.

use kvferry_types::{
    Anchor, DomainId, Edge, Epoch, Fingerprint, FragmentPair, PageList, Record, Stored, TierId,
    Time, Transfer, TransferId,
};

/// Where a block lies.
#[derive(Debug, Clone, Copy)]
pub(super) struct BlockPlace {
    /// Its first page in host memory.
    pub(super) host: u32,
    /// Its first page on the disk.
    pub(super) disk: u32,
    /// Its pages.
    pub(super) pages: u32,
}

/// Writes a block to the disk, with its record, or reads it.
pub(super) fn block_move(id: u64, write: bool, place: BlockPlace, page_bytes: u64) -> Transfer {
    let BlockPlace { host, disk, pages } = place;
    let id = TransferId(id);
    let (host, on_disk) = (PageList::run(host, pages), PageList::run(disk, pages));
    let (from, to, src, dst) = match write {
        true => (TierId::Host, TierId::Disk, host, on_disk),
        false => (TierId::Disk, TierId::Host, on_disk, host),
    };
    let record = write.then(|| Record {
        anchor: Anchor(disk.into()),
        domain: DomainId(1),
        block_start: disk,
        first: 0,
        phase: 0,
        stored: Stored {
            epoch: Epoch(1),
            transfer: id,
        },
        fingerprints: (disk..disk + pages)
            .map(|page| Fingerprint(page.into()))
            .collect(),
    });
    Transfer {
        id,
        edge: Edge { from, to },
        device: None,
        page_bytes,
        pairs: vec![FragmentPair { src, dst }],
        record,
        deadline: Time::NEVER,
    }
}
