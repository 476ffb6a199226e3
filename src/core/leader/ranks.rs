//! Workers come and go: who is there, and whether they agree.

use crate::core::arena::ARENA_PAGES_MAX;
use crate::core::event::{Attached, Effect};
use crate::core::pool::Pool;
use crate::core::refusal::Refusal;
use crate::core::shards::{RANKS_MAX, RankSet};
use crate::types::{GroupGeometry, Rank};

use super::Leader;

/// What is known of each rank.
#[derive(Debug)]
pub(super) struct Ranks {
    count: u16,
    attached: RankSet,
    known: Vec<Option<(GroupGeometry, u32)>>,
    turned_away: Option<Refusal>,
}

impl Ranks {
    pub(super) fn new(count: u16) -> Self {
        let count = count.min(RANKS_MAX);
        Self {
            count,
            attached: RankSet::default(),
            known: vec![None; usize::from(count)],
            turned_away: None,
        }
    }

    pub(super) fn all_attached(&self) -> bool {
        self.attached == RankSet::first(self.count)
    }

    pub(super) fn attached(&self) -> RankSet {
        self.attached
    }

    pub(super) fn lost(&mut self, rank: Rank) {
        self.attached.remove(rank);
    }

    /// What all attached ranks agree on.
    pub(super) fn geometry(&self) -> Option<&GroupGeometry> {
        let first = self.attached.iter().next()?;
        self.known[usize::from(first.0)]
            .as_ref()
            .map(|(geometry, _)| geometry)
    }

    /// Pages that every attached rank has room for: the smallest one sets the capacity, up to what an arena can have.
    fn arena_pages(&self) -> u32 {
        let attached = self
            .attached
            .iter()
            .filter_map(|rank| self.known[usize::from(rank.0)].as_ref());
        attached
            .map(|(_, pages)| *pages)
            .min()
            .unwrap_or(0)
            .min(ARENA_PAGES_MAX)
    }

    pub(super) fn not_ready(&self) -> Refusal {
        Refusal::NotReady {
            waiting_for: u32::from(self.count) - self.attached.len(),
            ranks: self.count,
            detail: self
                .turned_away
                .as_ref()
                .map_or_else(String::new, |why| format!(" ({why})")),
        }
    }

    fn judge(&self, attached: &Attached, least_pages: u32) -> Result<(), Refusal> {
        let rank = attached.rank;
        if rank.0 >= self.count {
            return Err(Refusal::NoSuchRank {
                rank,
                ranks: self.count,
            });
        }
        if attached.arena_pages < least_pages {
            let (arena_pages, ratio) = (attached.arena_pages, least_pages);
            return Err(Refusal::DepotTooSmall {
                rank,
                arena_pages,
                ratio,
            });
        }
        let others = self.attached.iter().filter(|other| *other != rank);
        for other in others {
            let Some((theirs, _)) = &self.known[usize::from(other.0)] else {
                continue;
            };
            if let Some((field, value, other_value)) = difference(&attached.geometry, theirs) {
                return Err(Refusal::RankDisagrees {
                    rank,
                    other,
                    field,
                    value,
                    other_value,
                });
            }
        }
        Ok(())
    }
}

/// The first field in which two ranks differ, with both values.
fn difference(a: &GroupGeometry, b: &GroupGeometry) -> Option<(&'static str, String, String)> {
    let hex = |bytes: &[u8; 16]| {
        bytes
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect::<String>()
    };
    let fields = [
        ("group", a.group.0.to_string(), b.group.0.to_string()),
        (
            "engine_page_tokens",
            a.engine_page_tokens.to_string(),
            b.engine_page_tokens.to_string(),
        ),
        ("layers", a.layers.to_string(), b.layers.to_string()),
        (
            "page_bytes",
            a.page_bytes.to_string(),
            b.page_bytes.to_string(),
        ),
        (
            "device_pages",
            a.device_pages.to_string(),
            b.device_pages.to_string(),
        ),
        (
            "layout_fingerprint",
            hex(&a.layout_fingerprint),
            hex(&b.layout_fingerprint),
        ),
    ];
    fields.into_iter().find(|(_, a, b)| a != b)
}

impl Leader {
    pub(super) fn attached(&mut self, attached: Attached, effects: &mut Vec<Effect>) {
        let rank = attached.rank;
        self.end_all_of(rank, effects);
        self.ranks.attached.remove(rank);
        let least_pages = if self.settings.tiers {
            self.settings.ratio.pages()
        } else {
            0
        };
        let verdict = self.ranks.judge(&attached, least_pages);
        match &verdict {
            Ok(()) => {
                if !attached.keeps_pages
                    && let Some(pool) = &mut self.pool
                {
                    pool.reset();
                }
                self.ranks.known[usize::from(rank.0)] =
                    Some((attached.geometry, attached.arena_pages));
                self.ranks.attached.insert(rank);
                self.ranks.turned_away = None;
            }
            Err(why) => self.ranks.turned_away = Some(why.clone()),
        }
        effects.push(Effect::Admit { rank, verdict });
        self.open_pool(effects);
    }

    pub(super) fn worker_dead(&mut self, rank: Rank, effects: &mut Vec<Effect>) {
        self.ranks.lost(rank);
        self.end_all_of(rank, effects);
        if let Some(pool) = &mut self.pool {
            pool.reset();
        }
        self.open_pool(effects);
    }

    /// Makes a pool once all ranks are there. One of another size replaces the old one only when nothing holds that.
    pub(super) fn open_pool(&mut self, effects: &mut Vec<Effect>) {
        if !self.ranks.all_attached() {
            return;
        }
        for (due, slot) in std::mem::take(&mut self.parked) {
            self.answer(due.engine, due.id, Err(Refusal::UnknownSlot(slot)), effects);
        }
        let pages = self.ranks.arena_pages();
        if self
            .pool
            .as_ref()
            .is_some_and(|pool| pool.capacity_pages() == pages)
        {
            return;
        }
        if self.pool.as_ref().is_none_or(|pool| pool.pins() == 0) && self.ops.is_empty() {
            self.pool = Some(Pool::new(pages, self.settings.ratio));
        }
    }
}
