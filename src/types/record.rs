//! What a depot knows of its own pages, so that they are found again when every process that knew them has ended.

use super::{Anchor, DomainId, Epoch, Fingerprint, Generation, NamespaceId, PageSet};

/// Bytes that an inventory keeps of each page of an arena, used or not.
pub const INVENTORY_SLOT_BYTES: u64 = 80;

/// What a store writes beside the pages that it fills.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// How the block is found.
    pub anchor: Anchor,
    /// Whose it is.
    pub domain: DomainId,
    /// First arena page of the block.
    pub block_start: u32,
    /// Place in the block of the first page that is filled: 0 for a new block, more for a growth.
    pub first: u16,
    /// Position of the block's first page in its sequence, modulo the ratio.
    pub phase: u16,
    /// When it was stored.
    pub stored: Stored,
    /// One for each page that is filled.
    pub fingerprints: Vec<Fingerprint>,
}

/// Orders stores, also over the restarts of a leader.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Stored {
    /// In which epoch.
    pub epoch: Epoch,
    /// By which reservation.
    pub generation: Generation,
}

/// What an inventory says of one arena page that holds something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageRecord {
    /// Which arena page.
    pub page: u32,
    /// How its block is found.
    pub anchor: Anchor,
    /// Whose it is.
    pub domain: DomainId,
    /// First arena page of its block.
    pub block_start: u32,
    /// Its place in the block.
    pub index: u16,
    /// Position of the block's first page in its sequence, modulo the ratio.
    pub phase: u16,
    /// When it was stored.
    pub stored: Stored,
    /// What it holds.
    pub fingerprint: Fingerprint,
}

impl Record {
    /// One by one. Ends before a page, or a place in the block, whose number is too large to be one.
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

/// Which pages a reset means.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Scope {
    /// Every page.
    Everything,
    /// Every page of a namespace, in every layout.
    Namespace(NamespaceId),
    /// Pages of a namespace that hold one of these, in every layout.
    Pages(NamespaceId, PageSet),
}

impl Scope {
    /// True when it means a page.
    pub fn contains(&self, domain: DomainId, fingerprint: Fingerprint) -> bool {
        match self {
            Self::Everything => true,
            Self::Namespace(which) => *which == domain.namespace(),
            Self::Pages(which, pages) => {
                *which == domain.namespace() && pages.contains(fingerprint)
            }
        }
    }

    /// True when it means one of these pages of a domain.
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

    /// Pages that it names one by one.
    pub fn named_pages(&self) -> usize {
        match self {
            Self::Everything | Self::Namespace(_) => 0,
            Self::Pages(_, pages) => pages.as_slice().len(),
        }
    }
}
