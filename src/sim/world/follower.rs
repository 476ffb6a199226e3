//! Readers of the leader's change log: each rebuilds from it what every arena page holds that a lookup can find, over closed
//! tiers, recoveries and restarts of the leader, and is compared with the pools.

use std::collections::BTreeMap;

use super::SimWorld;
use super::leader::LeaderProcess;
use super::setup::Setup;
use kvferry_core::{Change, Domain, Leader, LogRead, PlacedPages};
use kvferry_types::{DomainId, Epoch, Fingerprint, TierId, Time};

/// What the arena pages of all tiers hold.
type Held = BTreeMap<(TierId, u32), (DomainId, Fingerprint)>;

/// A reader of the change log.
#[derive(Debug)]
pub(super) struct Follower {
    read: LogRead,
    held: Held,
}

fn placed(
    tier: TierId,
    pages: &PlacedPages,
) -> impl Iterator<Item = ((TierId, u32), (DomainId, Fingerprint))> {
    let places = (pages.start..).zip(&pages.pages);
    places.map(move |(place, page)| ((tier, place), (pages.domain, *page)))
}

impl Follower {
    /// A reader that has nothing: of all pages, or of one namespace.
    pub(super) fn new(namespace: Option<Vec<u8>>) -> Self {
        Self {
            read: LogRead {
                epoch: Epoch(0),
                from: 0,
                most: 1,
                namespace,
                cursor: Some(0),
            },
            held: Held::new(),
        }
    }

    /// Reads a part of at most `most` pages, or of one record. Returns whether the reader has everything now.
    fn follow(&mut self, leader: &mut LeaderProcess, now: Time, most: u32) -> bool {
        self.read.most = most;
        let part = leader.read_log(now, &self.read);
        if part.lost {
            self.held.clear();
            if self.read.cursor.is_none() {
                // The answer has no present pages: they were not requested.
                self.read.epoch = leader.core().epoch();
                self.read.from = part.next;
                self.read.cursor = Some(0);
                return false;
            }
        }
        for (tier, change) in &part.changes {
            match change {
                Change::Stored(pages) => self.held.extend(placed(*tier, pages)),
                Change::Gone(pages, _) => {
                    for (place, _) in placed(*tier, pages) {
                        self.held.remove(&place);
                    }
                }
                Change::Cleared => self.held.retain(|(other, _), _| other != tier),
            }
        }
        self.read.epoch = leader.core().epoch();
        self.read.from = part.next;
        self.read.cursor = part.cursor;
        part.cursor.is_none() && part.next == leader.core().log_end()
    }

    /// What a reader must have: the readable pages of all blocks, of the reader's namespace in the layout of the tier.
    fn expected(&self, leader: &Leader, setup: &Setup) -> Held {
        let mut held = Held::new();
        let anchors = setup.anchor_key();
        for tier in &setup.tiers {
            let (Some(pool), Some(key)) = (leader.pool_of(*tier), leader.tier_key(*tier)) else {
                continue;
            };
            let layout = &key.layout_fingerprint;
            for block in pool.view().filter(|block| !block.retired) {
                let wanted = self.read.namespace.as_ref().is_none_or(|name| {
                    let group = block.domain.group();
                    Domain::new(&anchors, name, layout, group).id() == block.domain
                });
                let pages = (block.start..).zip(&block.fingerprints[..block.ready as usize]);
                let pages = pages.filter(|_| wanted);
                held.extend(pages.map(|(place, page)| ((*tier, place), (block.domain, *page))));
            }
        }
        held
    }

    /// Compares what the reader has with the pools. Returns what is wrong.
    fn compare(&self, leader: &Leader, setup: &Setup) -> Option<String> {
        let expected = self.expected(leader, setup);
        let differs = |held: &Held, other: &Held| {
            let mut held = held.iter();
            held.find(|(place, page)| other.get(place) != Some(page))
                .map(|((tier, place), _)| format!("page {place} of {tier}"))
        };
        if let Some(wrong) = differs(&self.held, &expected) {
            return Some(format!(
                "a reader of the log has {wrong}, which is not found"
            ));
        }
        let missing = differs(&expected, &self.held)?;
        Some(format!("a reader of the log lacks {missing}"))
    }
}

impl SimWorld {
    /// Lets the readers of the change log read, each a part of a size that varies, and sometimes nothing. Compares those
    /// that have everything with the pools at one of 4 checks.
    pub(super) fn follow_log(&mut self) {
        let (checks, now) = (self.checks, self.env.now());
        let Some(leader) = self.leader.state.as_mut() else {
            return;
        };
        let setup = &self.env.setup;
        let mut wrong = None;
        for (number, follower) in (0..).zip(&mut self.followers) {
            // From a part at each check to a part at one of 9.
            if !(checks + number).is_multiple_of(1 + checks / 256 % 9) {
                continue;
            }
            let most = 1 + u32::try_from(checks % 61).unwrap_or(0);
            let has_all = follower.follow(leader, now, most);
            if has_all && checks.is_multiple_of(4) {
                wrong = wrong.or(follower.compare(leader.core(), setup));
            }
        }
        if let Some(wrong) = wrong {
            self.env.violated(wrong);
        }
    }

    /// Lets the readers read everything, and compares them with the pools.
    pub(super) fn end_log(&mut self) {
        let now = self.env.now();
        let Some(leader) = self.leader.state.as_mut() else {
            return;
        };
        let setup = &self.env.setup;
        let mut wrong = None;
        for follower in &mut self.followers {
            let mut parts = 0;
            while !follower.follow(leader, now, 64) {
                parts += 1;
                if parts > 10_000 {
                    wrong = wrong.or(Some("a reader of the log never has everything".to_owned()));
                    break;
                }
            }
            wrong = wrong.or(follower.compare(leader.core(), setup));
        }
        if let Some(wrong) = wrong {
            self.env.violated(wrong);
        }
    }
}
