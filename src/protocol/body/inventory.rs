//! Bodies about the inventory of a depot, and the encoding of its records.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::ErrorBody;
use super::tier::tier_of;
use crate::error::ErrorCode;
use crate::limits::PAGE_RECORD_BYTES;
use kvferry_types::{
    Anchor, DomainId, Epoch, Fingerprint, NamespaceId, PageRecord, Record, ResetId, Scope, Stored,
    TierId, TransferId,
};

/// The inventory's record of the pages that a store fills.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RecordBody {
    /// Keyed hash by which the block is found, big-endian.
    #[serde(with = "serde_bytes")]
    #[schemars(with = "kvferry_types::BinarySchema")]
    pub anchor: [u8; 16],
    /// Keyed hashes, big-endian: 8 bytes of the namespace, 7 of namespace, layout and group; then the group.
    #[serde(with = "serde_bytes")]
    #[schemars(with = "kvferry_types::BinarySchema")]
    pub domain: [u8; 16],
    /// First arena page of the block.
    pub block_start: u32,
    /// Position in the block of the first page that is filled.
    pub first: u16,
    /// Position of the block's first page in its sequence, modulo the ratio.
    pub phase: u16,
    /// Orders the stores of one epoch.
    pub transfer: u64,
    /// Fingerprints, 16 bytes for each page that is filled, big-endian.
    #[serde(with = "serde_bytes")]
    #[schemars(with = "kvferry_types::BinarySchema")]
    pub fingerprints: Vec<u8>,
}

/// Removes pages from the inventory of the worker's shard. Without a namespace: all pages; without fingerprints: all
/// pages of the namespace. Pages that were stored after `through` stay listed, because this request may be repeated
/// after they were stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Invalidate {
    /// Number of the reset.
    pub reset: u64,
    /// Empty, or 8 bytes: selects the pages whose domain begins with these.
    #[serde(with = "serde_bytes", default)]
    #[schemars(with = "kvferry_types::BinarySchema")]
    pub namespace: Vec<u8>,
    /// Fingerprints of the pages, 16 bytes each, big-endian.
    #[serde(with = "serde_bytes", default)]
    #[schemars(with = "kvferry_types::BinarySchema")]
    pub fingerprints: Vec<u8>,
    /// Covers stores of the header's epoch up to this transfer, and all stores of older epochs.
    pub through: u64,
    /// Number of the tier whose inventory is changed; 0 for all tiers.
    #[serde(default)]
    pub tier: u8,
}

/// Answer to [`Invalidate`]: the pages are removed from the inventory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Invalidated {
    /// Number of the reset.
    pub reset: u64,
}

/// Makes durable what was written to a tier of the worker's shard before this request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FlushTier {
    /// Number of the flush.
    pub flush: u64,
    /// Number of the tier: 3 for the disk.
    pub tier: u8,
}

/// Answer to [`FlushTier`]: everything that was written before the request is durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TierFlushed {
    /// Number of the flush.
    pub flush: u64,
}

/// Reads the inventory of the worker's depot from an arena page on. A depot with pages of another size is emptied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ReadInventory {
    /// Identity of the depot.
    #[serde(with = "serde_bytes")]
    #[schemars(with = "kvferry_types::BinarySchema")]
    pub depot: [u8; 16],
    /// Bytes of one page of one rank.
    pub page_bytes: u64,
    /// Number of the request: an answer to one of an earlier reading may list pages that have been removed since.
    #[serde(default)]
    pub read_id: u64,
    /// First arena page to read.
    pub from: u32,
}

/// Answer to [`ReadInventory`]: the pages that the depot lists, from a page on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Inventory {
    /// Identity of the depot that was read.
    #[serde(with = "serde_bytes")]
    #[schemars(with = "kvferry_types::BinarySchema")]
    pub depot: [u8; 16],
    /// Number of the request.
    pub read_id: u64,
    /// First arena page that was read.
    pub from: u32,
    /// First arena page that was not read; absent after the last page.
    #[serde(default)]
    pub next: Option<u32>,
    /// 76 bytes for each page in use: arena page (4), first arena page of its block (4), position in the block (2),
    /// phase of the block (2), epoch (8) and transfer (8) that stored it, anchor (16), domain (16), fingerprint (16);
    /// numbers big-endian.
    #[serde(with = "serde_bytes")]
    #[schemars(with = "kvferry_types::BinarySchema")]
    pub records: Vec<u8>,
}

impl From<&Record> for RecordBody {
    fn from(record: &Record) -> Self {
        Self {
            anchor: record.anchor.0.to_be_bytes(),
            domain: record.domain.0.to_be_bytes(),
            block_start: record.block_start,
            first: record.first,
            phase: record.phase,
            transfer: record.stored.transfer.0,
            fingerprints: packed(&record.fingerprints),
        }
    }
}

impl RecordBody {
    pub(crate) fn into_record(self, epoch: Epoch) -> Record {
        Record {
            anchor: Anchor(u128::from_be_bytes(self.anchor)),
            domain: DomainId(u128::from_be_bytes(self.domain)),
            block_start: self.block_start,
            first: self.first,
            phase: self.phase,
            stored: Stored {
                epoch,
                transfer: TransferId(self.transfer),
            },
            fingerprints: unpacked(&self.fingerprints),
        }
    }
}

impl Invalidate {
    /// Builds the order to remove the pages of a scope from the inventory of a tier, or of all tiers, as far as they were
    /// stored at or before `through`.
    pub fn new(id: ResetId, scope: &Scope, tier: Option<TierId>, through: TransferId) -> Self {
        let (namespace, fingerprints) = match scope {
            Scope::Everything => (Vec::new(), Vec::new()),
            Scope::Namespace(namespace) => (namespace.0.to_be_bytes().to_vec(), Vec::new()),
            Scope::Pages(namespace, pages) => {
                (namespace.0.to_be_bytes().to_vec(), packed(pages.as_slice()))
            }
        };
        Self {
            reset: id.0,
            namespace,
            fingerprints,
            through: through.0,
            tier: tier.map_or(0, TierId::number),
        }
    }

    /// Returns the pages to remove, and the tier if it is only one. Fails as [`Self::scope`] does, and if `tier` is none.
    pub fn covers(&self) -> Result<(Scope, Option<TierId>), ErrorBody> {
        Ok((self.scope()?, tier_of("tier", self.tier)?))
    }

    /// Returns the scope of pages to remove. Fails if `namespace` has neither 0 nor 8 bytes.
    pub fn scope(&self) -> Result<Scope, ErrorBody> {
        let namespace = match (
            <[u8; 8]>::try_from(self.namespace.as_slice()),
            self.namespace.len(),
        ) {
            (Ok(namespace), _) => NamespaceId(u64::from_be_bytes(namespace)),
            (Err(_), 0) => return Ok(Scope::Everything),
            (Err(_), length) => {
                let text = format!("namespace has {length} bytes: none, or 8");
                return Err(ErrorBody::new(ErrorCode::Invalid, text));
            }
        };
        Ok(match self.fingerprints.is_empty() {
            true => Scope::Namespace(namespace),
            false => Scope::Pages(
                namespace,
                unpacked(&self.fingerprints).into_iter().collect(),
            ),
        })
    }
}

impl Inventory {
    /// Builds the answer to `requested`.
    pub fn new(requested: &ReadInventory, next: Option<u32>, pages: &[PageRecord]) -> Self {
        let mut records = Vec::with_capacity(pages.len() * PAGE_RECORD_BYTES);
        for page in pages {
            records.extend(page.page.to_be_bytes());
            records.extend(page.block_start.to_be_bytes());
            records.extend(page.index.to_be_bytes());
            records.extend(page.phase.to_be_bytes());
            records.extend(page.stored.epoch.0.to_be_bytes());
            records.extend(page.stored.transfer.0.to_be_bytes());
            records.extend(page.anchor.0.to_be_bytes());
            records.extend(page.domain.0.to_be_bytes());
            records.extend(page.fingerprint.0.to_be_bytes());
        }
        Self {
            depot: requested.depot,
            read_id: requested.read_id,
            from: requested.from,
            next,
            records,
        }
    }

    /// Returns the listed pages. Bytes after the last complete record are ignored.
    pub fn pages(&self) -> Vec<PageRecord> {
        let (records, _) = self.records.as_chunks::<PAGE_RECORD_BYTES>();
        records.iter().map(page_record).collect()
    }
}

fn page_record(bytes: &[u8; PAGE_RECORD_BYTES]) -> PageRecord {
    /// Reads the big-endian number of `N` bytes at `at`.
    fn number<const N: usize>(bytes: &[u8; PAGE_RECORD_BYTES], at: usize) -> u128 {
        let of = |sum: u128, byte: &u8| sum << 8 | u128::from(*byte);
        bytes[at..at + N].iter().fold(0, of)
    }
    PageRecord {
        page: number::<4>(bytes, 0) as u32,
        block_start: number::<4>(bytes, 4) as u32,
        index: number::<2>(bytes, 8) as u16,
        phase: number::<2>(bytes, 10) as u16,
        stored: Stored {
            epoch: Epoch(number::<8>(bytes, 12) as u64),
            transfer: TransferId(number::<8>(bytes, 20) as u64),
        },
        anchor: Anchor(number::<16>(bytes, 28)),
        domain: DomainId(number::<16>(bytes, 44)),
        fingerprint: Fingerprint(number::<16>(bytes, 60)),
    }
}

fn packed(pages: &[Fingerprint]) -> Vec<u8> {
    let pages: Vec<[u8; 16]> = pages.iter().map(|page| page.0.to_be_bytes()).collect();
    pages.into_flattened()
}

fn unpacked(bytes: &[u8]) -> Vec<Fingerprint> {
    let (pages, _) = bytes.as_chunks::<16>();
    pages
        .iter()
        .map(|page| Fingerprint(u128::from_be_bytes(*page)))
        .collect()
}
