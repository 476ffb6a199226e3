//! Records of a depot about its own pages, by which the pages are found again after all processes that used them have
//! ended.

use super::{Anchor, DomainId, Epoch, Fingerprint, NamespaceId, PageSet, TransferId};

/// Bytes of an inventory for each page of an arena, used or not.
pub const INVENTORY_ENTRY_BYTES: u64 = 80;

/// The record that a store adds to the inventory, for the pages that it fills.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Key by which the block is found.
    pub anchor: Anchor,
    /// Domain of the block.
    pub domain: DomainId,
    /// First arena page of the block.
    pub block_start: u32,
    /// Index in the block of the first page that is filled: 0 for a new block, more for a growth.
    pub first: u16,
    /// Position of the block's first page in its sequence, modulo the ratio.
    pub phase: u16,
    /// When the pages were stored.
    pub stored: Stored,
    /// Fingerprint of each page that is filled.
    pub fingerprints: Vec<Fingerprint>,
}

/// When a page was stored: orders stores, also over restarts of a leader.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Stored {
    /// Epoch of the leader that ordered the store.
    pub epoch: Epoch,
    /// The transfer that stored it.
    pub transfer: TransferId,
}

/// The inventory's record of one arena page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageRecord {
    /// Index of the arena page.
    pub page: u32,
    /// Key by which the page's block is found.
    pub anchor: Anchor,
    /// Domain of the block.
    pub domain: DomainId,
    /// First arena page of the block.
    pub block_start: u32,
    /// Index of the page in the block.
    pub index: u16,
    /// Position of the block's first page in its sequence, modulo the ratio.
    pub phase: u16,
    /// When the page was stored.
    pub stored: Stored,
    /// Fingerprint of the page.
    pub fingerprint: Fingerprint,
}

impl Record {
    /// One record per page. Ends before a page, or an index in the block, that does not fit into its type.
    pub fn pages(&self) -> impl Iterator<Item = PageRecord> {
        let places = u64::from(self.first)..;
        self.fingerprints
            .iter()
            .zip(places)
            .map_while(|(fingerprint, place)| {
                let index = u16::try_from(place).ok()?;
                Some(PageRecord {
                    page: self.block_start.checked_add(u32::from(index))?,
                    anchor: self.anchor,
                    domain: self.domain,
                    block_start: self.block_start,
                    index,
                    phase: self.phase,
                    stored: self.stored,
                    fingerprint: *fingerprint,
                })
            })
    }
}

/// The pages that a reset covers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Scope {
    /// Every page.
    Everything,
    /// Every page of a namespace, in every layout.
    Namespace(NamespaceId),
    /// Pages of a namespace with one of these fingerprints, in every layout.
    Pages(NamespaceId, PageSet),
}

impl Scope {
    /// True when the scope covers this page.
    pub fn contains(&self, domain: DomainId, fingerprint: Fingerprint) -> bool {
        match self {
            Self::Everything => true,
            Self::Namespace(which) => *which == domain.namespace(),
            Self::Pages(which, pages) => {
                *which == domain.namespace() && pages.contains(fingerprint)
            }
        }
    }

    /// True when the scope covers one of these pages of a domain.
    pub fn meets(&self, domain: DomainId, fingerprints: &[Fingerprint]) -> bool {
        match self {
            Self::Everything => true,
            Self::Namespace(which) => *which == domain.namespace(),
            Self::Pages(which, pages) => {
                *which == domain.namespace()
                    && fingerprints.iter().any(|page| pages.contains(*page))
            }
        }
    }

    /// Number of pages that the scope names one by one.
    pub fn named_pages(&self) -> usize {
        match self {
            Self::Everything | Self::Namespace(_) => 0,
            Self::Pages(_, pages) => pages.as_slice().len(),
        }
    }
}
