//! Moves: transfers between two tiers, which no request owns. Pages that are new in a tier are written to the slower
//! ones, pages that a lookup found in a slower tier are fetched before their load asks for them, and a load has the
//! pages promoted that it needs.
//!
//! A move holds its source until it has ended on every worker, and publishes its destination when every shard is
//! written. A page that fails its checksum is cut from the source, so that it is never served from there again.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use crate::Contradiction;
use crate::index::blocks::BlockRef;
use crate::leader::event::LeaderEffect;
use crate::pool::admission::Offer;
use crate::pool::store_window::LooksAround;
use crate::pool::{Pin, Reserved};
use kvferry_types::{
    Edge, Fingerprint, FragmentPair, PageHashes, PageList, TierId, Time, Transfer, TransferId,
};

use super::Leader;
use super::plan::{PlanWalk, plan};
use super::tier::Tiers;
use super::transfers::{Begun, TransferOutcome};

/// Blocks that wait to be moved over one edge, at most. A further one is not moved: it stays in its tier, and moves when
/// it grows or is stored again. About 50 bytes each.
pub const MOVES_WAITING_MAX: usize = 16_384;
/// Times that a block is written to a slower tier before it stays where it is, until it is used or grows.
pub const MOVE_ATTEMPTS_MAX: u8 = 3;

/// An edge over which the leader moves pages by itself: to a slower tier every page that is new in the faster one, to a
/// faster tier the pages that a lookup found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MoveEdge {
    /// The tiers.
    pub edge: Edge,
    /// Moves over this edge that run at one time, at most.
    pub running_max: usize,
    /// Time from the order of a move to its deadline.
    pub deadline: Duration,
}

impl MoveEdge {
    /// Moves over one edge that run at one time by default, at most: enough to keep a disk busy.
    pub const RUNNING_MAX: usize = 32;
    /// Time from the order of a move to its deadline by default.
    pub const DEADLINE: Duration = Duration::from_secs(30);

    /// The default edges of these tiers, which are given fastest first: from each one to the next slower one, and from each
    /// slower one to host memory.
    pub fn between(tiers: &[TierId]) -> Vec<Self> {
        let mut edges = Vec::new();
        for pair in tiers.windows(2) {
            let (from, to) = (pair[0], pair[1]);
            edges.push(Edge { from, to });
            edges.push(Edge {
                from: to,
                to: TierId::Host,
            });
        }
        let edge = |edge| Self {
            edge,
            running_max: Self::RUNNING_MAX,
            deadline: Self::DEADLINE,
        };
        edges.into_iter().map(edge).collect()
    }
}

/// The place of a block in the queue of an edge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Queued {
    /// Ascends in the order in which blocks were queued first.
    number: u64,
    /// Moves of the block under this number that have failed.
    failed: u8,
}

/// A move that is in flight.
#[derive(Debug)]
struct Move {
    edge: Edge,
    /// The hold on the source.
    pin: Pin,
    /// First source page.
    source: u32,
    /// Number of pages.
    pages: u32,
    /// Place in the queue, of a move that a setting ordered, and not a load.
    queued: Option<Queued>,
}

/// The blocks that wait at one edge.
#[derive(Debug, Default)]
struct WaitingBlocks {
    /// The blocks, with ascending numbers.
    queue: VecDeque<(Queued, BlockRef)>,
    queued: BTreeSet<(u32, u64)>,
}

impl WaitingBlocks {
    /// Adds a block at the end, if it does not wait already. Returns false if too many wait.
    fn push(&mut self, number: u64, block: BlockRef) -> bool {
        let key = (block.index, block.stamp);
        if self.queued.contains(&key) {
            return true;
        }
        let room = self.queue.len() < MOVES_WAITING_MAX;
        if room {
            self.queued.insert(key);
            self.queue.push_back((Queued { number, failed: 0 }, block));
        }
        room
    }

    /// Adds a block at its place, also beyond the limit: as many as run. One that was queued again meanwhile moves to this
    /// place.
    fn push_again(&mut self, queued: Queued, block: BlockRef) {
        if !self.queued.insert((block.index, block.stamp)) {
            self.queue.retain(|(_, other)| *other != block);
        }
        let before = |(other, _): &(Queued, BlockRef)| other.number <= queued.number;
        let place = self.queue.partition_point(before);
        self.queue.insert(place, (queued, block));
    }

    fn pop(&mut self) -> Option<(Queued, BlockRef)> {
        let (queued, block) = self.queue.pop_front()?;
        self.queued.remove(&(block.index, block.stamp));
        Some((queued, block))
    }
}

/// The moves in flight, and the blocks that wait for one.
#[derive(Debug, Default)]
pub(super) struct Moves {
    running: BTreeMap<TransferId, Move>,
    /// Numbers of running moves that settings ordered, by edge.
    by_setting: BTreeMap<Edge, usize>,
    waiting: BTreeMap<Edge, WaitingBlocks>,
    /// The number of the block that was queued last.
    last_queued: u64,
}

impl Moves {
    /// Adds a block to those that wait at an edge. Returns false if too many wait.
    pub(super) fn queue(&mut self, edge: Edge, block: BlockRef) -> bool {
        self.last_queued += 1;
        let number = self.last_queued;
        self.waiting.entry(edge).or_default().push(number, block)
    }

    /// Adds the block of a write that failed to those that wait, at its place, so that a flush waits for it. Returns false
    /// if it is not moved again.
    fn queue_again(&mut self, edge: Edge, block: BlockRef, before: Queued) -> bool {
        let queued = Queued {
            failed: before.failed + 1,
            ..before
        };
        let waiting = self.waiting.entry(edge).or_default();
        if queued.failed >= MOVE_ATTEMPTS_MAX {
            return waiting.queued.contains(&(block.index, block.stamp));
        }
        waiting.push_again(queued, block);
        true
    }

    /// Adds the block of a write whose tier closed to those that wait, at its place, until the tier is open again.
    fn queue_until_open(&mut self, edge: Edge, block: BlockRef, queued: Queued) {
        let waiting = self.waiting.entry(edge).or_default();
        waiting.push_again(queued, block);
    }

    /// The number of the block that was queued last.
    pub(super) fn last_queued(&self) -> u64 {
        self.last_queued
    }

    /// True if no block that was queued up to this number waits to be moved to a slower tier, or is being moved.
    pub(super) fn are_over(&self, to: TierId, through: u64) -> bool {
        let written = |edge: &Edge| edge.to == to && edge.to > edge.from;
        let mut waiting = self.waiting.iter().filter(|(edge, _)| written(edge));
        let first = |blocks: &WaitingBlocks| blocks.queue.front().map(|(queued, _)| queued.number);
        let mut running = self.running.values().filter(|one| written(&one.edge));
        waiting.all(|(_, blocks)| first(blocks).is_none_or(|number| number > through))
            && running.all(|one| one.queued.is_none_or(|queued| queued.number > through))
    }

    /// Number of pins that moves hold.
    pub(super) fn pins(&self) -> usize {
        self.running.len()
    }

    /// Number of blocks that wait for a move.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.values().map(|blocks| blocks.queue.len()).sum()
    }

    /// Pins of moves on each block of a tier: they do not keep a reset from removing pages.
    pub(super) fn pins_of(&self, tier: TierId) -> BTreeMap<u32, u32> {
        let mut pins = BTreeMap::new();
        let of_tier = self.running.values().filter(|one| one.edge.from == tier);
        for one in of_tier {
            *pins.entry(one.pin.block().index).or_default() += 1;
        }
        pins
    }

    /// Number of running moves over an edge that a setting ordered.
    fn running(&self, edge: Edge) -> usize {
        self.by_setting.get(&edge).copied().unwrap_or(0)
    }

    fn insert(&mut self, id: TransferId, one: Move) {
        if one.queued.is_some() {
            *self.by_setting.entry(one.edge).or_default() += 1;
        }
        self.running.insert(id, one);
    }

    fn remove(&mut self, id: TransferId) -> Option<Move> {
        let one = self.running.remove(&id)?;
        if one.queued.is_some()
            && let Some(count) = self.by_setting.get_mut(&one.edge)
        {
            *count -= 1;
        }
        Some(one)
    }

    /// Forgets the blocks of a tier that wait, and those that wait to be fetched into it. Blocks that wait to be written to
    /// it are written when it is open again. Returns the number of those that waited to be written to a slower tier.
    pub(super) fn forget(&mut self, tier: TierId) -> u64 {
        let is_write = |edge: &Edge| edge.to > edge.from;
        let mut gone = 0;
        self.waiting.retain(|edge, blocks| {
            let kept = !edge.touches(tier) || (edge.to == tier && is_write(edge));
            if !kept && is_write(edge) {
                gone += blocks.queue.len() as u64;
            }
            kept
        });
        gone
    }

    /// Checks that the source of every move has a pool, and recounts the moves by edge. `Err` names the first
    /// contradiction.
    pub(super) fn check(&self, tiers: &Tiers) -> Result<(), Contradiction> {
        let mut by_setting: BTreeMap<Edge, usize> = BTreeMap::new();
        for one in self.running.values().filter(|one| one.queued.is_some()) {
            *by_setting.entry(one.edge).or_default() += 1;
        }
        let counted = self.by_setting.iter().filter(|(_, count)| **count > 0);
        if !counted.eq(by_setting.iter()) {
            let counted = &self.by_setting;
            return Err(format!("{by_setting:?} moves run, counted {counted:?}").into());
        }
        let mut running = self.running.iter();
        let lost = running.find(|(_, one)| tiers.pools().all(|(tier, _)| tier != one.edge.from));
        match lost {
            None => Ok(()),
            Some((id, one)) => {
                Err(format!("{id} reads {}, which has no pool", one.edge.from).into())
            }
        }
    }
}

/// Pages of a block that are moved.
#[derive(Debug, Clone, Copy)]
pub(super) struct MoveSource {
    pub(super) tier: TierId,
    pub(super) block: BlockRef,
    /// The source page of the page at position `first`.
    pub(super) start: u32,
    pub(super) first: u32,
}

/// The terms of a move.
#[derive(Debug, Clone, Copy)]
pub(super) struct MoveTerms {
    pub(super) deadline: Time,
    /// Place in the queue, if a setting orders the move, and not a load: its edge limits how many run.
    pub(super) queued: Option<Queued>,
}

impl Leader {
    /// Starts the moves that follow from the changes of this step, and those that had to wait.
    pub(super) fn run_moves(&mut self, now: Time, effects: &mut Vec<LeaderEffect>) {
        if self.settings.moves.is_empty() {
            return;
        }
        self.queue_changes();
        let mut waiting = self.moves.waiting.values();
        if waiting.all(|blocks| blocks.queue.is_empty()) {
            return;
        }
        for index in 0..self.settings.moves.len() {
            let MoveEdge {
                edge,
                running_max,
                deadline,
            } = self.settings.moves[index];
            if !self.can_move(edge) {
                continue;
            }
            while self.moves.running(edge) < running_max {
                let waiting = self.moves.waiting.get_mut(&edge);
                let Some((queued, block)) = waiting.and_then(WaitingBlocks::pop) else {
                    break;
                };
                let terms = MoveTerms {
                    deadline: now + deadline,
                    queued: Some(queued),
                };
                self.move_block(now, edge, block, terms, effects);
            }
        }
    }

    /// True if blocks wait at an edge that can be moved now. They wait while a tier is closed, or not open in a worker of each
    /// shard, and while a disk is only read.
    fn can_move(&self, edge: Edge) -> bool {
        let waiting = self.moves.waiting.get(&edge);
        waiting.is_some_and(|blocks| !blocks.queue.is_empty())
            && self.tiers.serving(edge.from).is_some()
            && self.tiers.serving(edge.to).is_some()
            && self.roster.is_writable(edge.to)
            && self.roster.moving(edge).is_some()
    }

    /// Queues the blocks that gained pages for the slower tiers.
    pub(super) fn queue_changes(&mut self) {
        let edges: Vec<Edge> = self.settings.moves.iter().map(|one| one.edge).collect();
        for (tier, pool) in self.tiers.all_serving() {
            for block in pool.take_gains() {
                let out = edges
                    .iter()
                    .filter(|edge| edge.from == tier && edge.to > tier);
                for edge in out {
                    let queued = self.moves.queue(*edge, block);
                    self.counts.moves_left_out += u64::from(!queued);
                }
            }
        }
    }

    /// Queues a block that a lookup found in a slower tier, if there is an edge to the faster one.
    pub(super) fn queue_prefetch(&mut self, from: TierId, block: BlockRef) {
        let edge = Edge {
            from,
            to: TierId::Host,
        };
        if self.settings.moves.iter().any(|one| one.edge == edge) {
            self.queue_move(edge, block);
        }
    }

    /// Moves the pages of a block that the other tier does not have. A block that was evicted or forgotten meanwhile, or
    /// that a reset is about to remove, is not moved.
    fn move_block(
        &mut self,
        now: Time,
        edge: Edge,
        block: BlockRef,
        terms: MoveTerms,
        effects: &mut Vec<LeaderEffect>,
    ) {
        let Some(source) = self.tiers.serving(edge.from) else {
            return;
        };
        let Some((domain, phase, start, pages)) = source.movable(block) else {
            self.counts.moves_gone += u64::from(edge.to > edge.from);
            return;
        };
        // The block's place in its sequence is not known, only its place in a cell: the pages before it are not read.
        let before = (0..phase).map(|_| Fingerprint::default());
        let hashes = PageHashes::of_fingerprints(before.chain(pages));
        let domain = self.settings.anchor_key.domain(domain);
        let end = u32::try_from(hashes.len()).unwrap_or(phase);
        let page_bytes = self.tiers.key(edge.to).map_or(0, |key| key.page_bytes);
        let offer = Offer { now, page_bytes };
        let Some(target) = self.tiers.serving_mut(edge.to) else {
            return;
        };
        let walk = PlanWalk {
            from: phase,
            wanted: phase..end,
            trail: None,
            // The pages of a write that failed were admitted before.
            offer: Some(offer).filter(|_| {
                let again = terms.queued.is_some_and(|queued| queued.failed > 0);
                edge.to > edge.from && !again
            }),
            around: LooksAround::default(),
        };
        let planned = plan(target, (&domain, hashes.view()), walk, &mut self.next_id);
        let source = MoveSource {
            tier: edge.from,
            block,
            start,
            first: phase,
        };
        self.order_moves(edge, &source, &planned.reserved, terms, effects);
    }

    /// Orders the transfers of reserved pages from a source, which is held until each of them has ended.
    pub(super) fn order_moves(
        &mut self,
        edge: Edge,
        source: &MoveSource,
        reserved: &[Reserved],
        terms: MoveTerms,
        effects: &mut Vec<LeaderEffect>,
    ) {
        let Some(workers) = self.roster.moving(edge) else {
            return;
        };
        let shards = self.roster.shard_set();
        let page_bytes = self.tiers.key(edge.to).map_or(0, |key| key.page_bytes);
        for reserved in reserved {
            let Reserved {
                transfer: id,
                position,
                run,
                ..
            } = *reserved;
            let start = source.start + (position - source.first);
            let Some(from) = self.tiers.serving_mut(source.tier) else {
                return;
            };
            let pin = from.pin_through(source.block, start + run.count);
            debug_assert!(
                pin.is_some(),
                "the source was found in this step, or is held"
            );
            let Some(pin) = pin else {
                return;
            };
            let one = Move {
                edge,
                pin,
                source: start,
                pages: run.count,
                queued: terms.queued,
            };
            self.moves.insert(id, one);
            let Some(to) = self.tiers.serving_mut(edge.to) else {
                return;
            };
            let pair = FragmentPair {
                src: PageList::run(start, run.count),
                dst: PageList::run(run.start, run.count),
            };
            let transfer = Transfer {
                id,
                edge,
                device: None,
                page_bytes,
                pairs: vec![pair],
                record: to.record(id, self.settings.epoch),
                deadline: terms.deadline,
            };
            to.start_filling(id, shards);
            let begun = Begun {
                id,
                edge,
                workers: workers.clone(),
                pages: run.count,
                deadline: terms.deadline,
            };
            self.transfers.begin(begun, &mut self.timers);
            self.counts.moves += 1;
            self.counts.moved_pages += u64::from(run.count);
            if edge.to > edge.from {
                self.counts.written_through_pages += u64::from(run.count);
            }
            effects.push(LeaderEffect::Transfer {
                workers: workers.clone(),
                transfer,
            });
        }
    }

    /// Page `page` of a move failed its checksum on one worker, while others still read the source: its block is forgotten,
    /// because other moves and loads must not read that page meanwhile.
    pub(super) fn source_is_bad(&mut self, id: TransferId, page: u32) {
        if let Some(one) = self.moves.running.get(&id)
            && page < one.pages
            && let Some(pool) = self.tiers.serving_mut(one.edge.from)
        {
            pool.cut(one.pin.block(), one.source + page);
        }
    }

    /// The place of a page of a move failed on the disk of one worker: the page is not served from there again, and the
    /// place is not used again on any rank.
    pub(super) fn place_failed(&mut self, id: TransferId, edge: Edge, page: u32) {
        let noted = match edge.from > edge.to {
            true => {
                let Some(one) = self.moves.running.get(&id) else {
                    return;
                };
                let (block, place) = (one.pin.block(), one.source.saturating_add(page));
                let found = page < one.pages && edge.from > TierId::Host;
                let pool = self.tiers.pool_mut(edge.from).filter(|_| found);
                pool.is_some_and(|pool| {
                    let noted = pool.quarantine_place(place);
                    if self.transfers.awaits(id) {
                        pool.cut(block, place);
                    }
                    noted
                })
            }
            false => {
                let pool = self.tiers.pool_mut(edge.to);
                let pool = pool.filter(|_| edge.to > TierId::Host);
                pool.is_some_and(|pool| pool.quarantine_filled(id, page))
            }
        };
        self.counts.quarantined_places += u64::from(noted);
    }

    /// A transfer has ended on every worker, and its pages are served or not. If it was a move, releases its source, and cuts
    /// it at a page that failed its checksum. A write whose pages are not served for another reason is tried again: a place
    /// of the disk that failed is not used again, and a disk that fails is only read or closed.
    pub(super) fn move_ended(&mut self, id: TransferId, outcome: &TransferOutcome, served: bool) {
        let Some(Move {
            edge,
            pin,
            source,
            queued,
            ..
        }) = self.moves.remove(id)
        else {
            return;
        };
        let block = pin.block();
        self.tiers.unpin(edge.from, pin);
        let Some(pool) = self.tiers.serving_mut(edge.from) else {
            let gone = !served && queued.is_some() && edge.to > edge.from;
            self.counts.moves_gone += u64::from(gone);
            return;
        };
        if let Some(page) = outcome.bad_page {
            pool.cut(block, source + page);
            self.counts.bad_sources += 1;
            return;
        }
        let Some(queued) = queued.filter(|_| !served && edge.to > edge.from) else {
            return;
        };
        if self.tiers.serving(edge.to).is_none() {
            return self.moves.queue_until_open(edge, block, queued);
        }
        let again = self.moves.queue_again(edge, block, queued);
        self.counts.moves_left_out += u64::from(!again);
    }
}
