//! Answers of a leader to the requests of engines. The same values are decided by the core and encoded on the wire.

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::{Request, TierId};

/// The answer to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// To a lookup.
    Lookup(LookupAnswer),
    /// To a load: its pages are no longer written.
    Load(LoadAnswer),
    /// To a store: later lookups find the stored and present pages.
    Store(StoreAnswer),
    /// To a reset.
    Reset(ResetAnswer),
    /// To a flush.
    Flush(FlushAnswer),
    /// To a cancel of stores: their pages are no longer read.
    CancelStores(CancelStoresAnswer),
    /// To a finish.
    Finish,
}

impl Answer {
    /// True for the answer to a request of this kind.
    pub fn is_to(&self, request: &Request) -> bool {
        matches!(
            (self, request),
            (Self::Lookup(_), Request::Lookup { .. })
                | (Self::Load(_), Request::Load { .. })
                | (Self::Store(_), Request::Store { .. })
                | (Self::Reset(_), Request::Reset { .. })
                | (Self::Flush(_), Request::Flush)
                | (Self::CancelStores(_), Request::CancelStores { .. })
                | (Self::Finish, Request::Finish { .. })
        )
    }
}

/// Numbers of pages by the tier below host memory in which they lie. On the wire pairs `[tier, pages]`, fastest tier first,
/// without the tiers that have none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PagesBelow {
    /// Pages on a disk.
    pub disk: u32,
    /// Pages in storage of other hosts, and in tiers of a newer version, which are slower than any that this one knows.
    pub remote: u32,
}

impl PagesBelow {
    /// Pages on a disk alone.
    pub const fn disk(pages: u32) -> Self {
        Self {
            disk: pages,
            remote: 0,
        }
    }

    /// Adds pages of a tier; those of host memory are none of these.
    pub const fn add(&mut self, tier: TierId, pages: u32) {
        let of_tier = match tier {
            TierId::Device | TierId::Host => return,
            TierId::Disk => &mut self.disk,
            TierId::Remote => &mut self.remote,
        };
        *of_tier = of_tier.saturating_add(pages);
    }

    /// The pages of all tiers.
    pub const fn total(self) -> u32 {
        self.disk.saturating_add(self.remote)
    }

    /// Whether no page lies below host memory.
    pub const fn is_empty(&self) -> bool {
        self.total() == 0
    }

    fn pairs(self) -> impl Iterator<Item = (u8, u32)> {
        let by_tier = [(TierId::Disk, self.disk), (TierId::Remote, self.remote)];
        let with_pages = by_tier.into_iter().filter(|(_, pages)| *pages > 0);
        with_pages.map(|(tier, pages)| (tier.number(), pages))
    }
}

impl Serialize for PagesBelow {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let pairs: Vec<(u8, u32)> = self.pairs().collect();
        pairs.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for PagesBelow {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut below = Self::default();
        for (tier, pages) in Vec::<(u8, u32)>::deserialize(deserializer)? {
            below.add(TierId::of_number(tier).unwrap_or(TierId::Remote), pages);
        }
        Ok(below)
    }
}

/// Answer to `lookup`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct LookupAnswer {
    /// Pages after the engine's own that can be loaded. They are held for a limited time.
    pub hit_pages: u32,
    /// The page after those is being stored: a later lookup may find more.
    #[serde(default)]
    pub pending: bool,
    /// Those of the pages that lie in a tier below host memory, as pairs of the tier's number and a number of pages: the
    /// load brings them up first, unless they are on their way already.
    #[serde(default, skip_serializing_if = "PagesBelow::is_empty")]
    #[schemars(with = "Vec<(u8, u32)>")]
    pub below_pages: PagesBelow,
    /// Estimate of the time until those are in host memory, in milliseconds; absent if there are none, or nothing was read
    /// from their tier lately.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready_in_ms: Option<u32>,
    /// Further pages that lie below host memory and are not offered, because computing them takes less time than loading.
    #[serde(default)]
    pub declined_pages: u32,
}

/// Answer to `load`: the pages are no longer written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct LoadAnswer {
    /// Number of pages, from the first one on, that are in place on every rank. The engine computes the others.
    pub pages: u32,
}

/// Answer to `store`: lookups find stored and present pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct StoreAnswer {
    /// Pages that this request stored.
    pub stored_pages: u32,
    /// Pages that were stored before.
    pub present_pages: u32,
    /// Pages that found no room, or that the tier did not admit.
    #[serde(default)]
    pub refused_pages: u32,
    /// Pages whose copy failed.
    #[serde(default)]
    pub failed_pages: u32,
}

/// Answer to `reset`: lookups find none of the pages, neither now nor after a restart.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ResetAnswer {
    /// Number of pages that were removed, once for each tier that had them.
    pub pages: u32,
    /// Those of them that were removed from tiers below host memory, as pairs of the tier's number and a number of pages.
    #[serde(default, skip_serializing_if = "PagesBelow::is_empty")]
    #[schemars(with = "Vec<(u8, u32)>")]
    pub below_pages: PagesBelow,
}

/// Answer to `flush`: what was stored before the request lies on the disk, and is found again after any end of the
/// processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FlushAnswer {
    /// Pages that the disk holds for the engines that are attached, each counted once for all ranks.
    pub pages: u32,
}

/// Answer to `cancel_stores`: each of the stores has been answered, and none of their pages is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CancelStoresAnswer {
    /// Number of stores that were in flight.
    pub stores: u32,
}
