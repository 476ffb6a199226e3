//! The leader that runs in parallel to the model.

use std::time::Duration;

use kvferry_core::{
    AnchorKey, AttachRequest, AttachedDepot, Leader, LeaderEffect, LeaderEvent, LeaderSettings,
    WorkerMemory,
};
use kvferry_types::{
    Answer, AttachId, DepotId, Direction, Epoch, GroupGeometry, GroupId, LookupAnswer, PageHashes,
    PerTier, Rank, Ratio, Replica, Request, RequestId, TierId, Time, Transfer, TransferId,
    WorkerId,
};

use super::super::harness::{RANKS, ranks};
use super::{ENGINE, EPOCH, GRACE, HOLD, Leases, NAMES, PAGES, Rule, State};

pub(super) fn time(seconds: u8) -> Time {
    Time(0) + Duration::from_secs(u64::from(seconds))
}

pub(super) fn sequence(name: usize) -> PageHashes {
    PageHashes::packed(16, vec![name as u8 + 1; 16]).expect("one page")
}

pub(super) fn worker(rank: Rank) -> WorkerId {
    let replica = Replica(0);
    WorkerId { replica, rank }
}

/// The arrival of a worker with this depot: the first one of its shard, or a later one.
pub(super) fn arrival(worker: WorkerId, depot: u128) -> [LeaderEvent; 2] {
    let geometry = GroupGeometry {
        group: GroupId(0),
        engine_page_tokens: 16,
        layers: 1,
        page_bytes: 64,
        device_pages: NAMES as u32,
        content_digest: [0; 16],
        layout_fingerprint: [1; 16],
        ..GroupGeometry::default()
    };
    let memory = WorkerMemory {
        engine: ENGINE,
        geometry: geometry.into(),
        arena_pages: PerTier::host(PAGES as u32),
    };
    let attached = AttachRequest {
        worker,
        ranks: RANKS,
        shards: RANKS,
        attach: AttachId(1),
        depots: PerTier::host(AttachedDepot {
            depot: DepotId(depot << 16 | u128::from(worker.rank.0)),
            epoch: Epoch(0),
        }),
    };
    LeaderEvent::arrival(attached, memory)
}

/// A leader with both workers attached and an empty pool.
fn leader() -> Leader {
    let ratio = Ratio::new(1).expect("in bounds");
    let mut settings = LeaderSettings::new(EPOCH, RANKS, ratio, AnchorKey::new([1; 32]));
    settings.hold_for = Duration::from_secs(u64::from(HOLD));
    settings.engine_grace = Duration::from_secs(u64::from(GRACE));
    let mut leader = Leader::new(settings);
    let mut effects = Vec::new();
    leader.step(Time(0), LeaderEvent::EngineOpened(ENGINE), &mut effects);
    for rank in ranks() {
        for event in arrival(worker(rank), 1) {
            leader.step(Time(0), event, &mut effects);
        }
    }
    let requested = std::mem::take(&mut effects);
    for event in requested.iter().filter_map(empty_inventory) {
        leader.step(Time(0), event, &mut effects);
    }
    leader
}

/// The answer of an empty depot to a request for its inventory.
fn empty_inventory(effect: &LeaderEffect) -> Option<LeaderEvent> {
    let LeaderEffect::ReadInventory {
        worker,
        depot,
        read_id: reading,
        from,
        ..
    } = *effect
    else {
        return None;
    };
    Some(LeaderEvent::Inventory {
        worker,
        depot,
        read_id: reading,
        from,
        next: None,
        records: Vec::new(),
    })
}

/// The sequence that a lookup requests.
fn looked_up(event: &LeaderEvent) -> Option<usize> {
    match event {
        LeaderEvent::Request {
            request: Request::Lookup { slot, .. },
            ..
        } => usize::try_from(slot.0).ok(),
        _ => None,
    }
}

/// Copies in the order in which they began, running loads with the arena pages that they read, and the result of the
/// last lookup.
#[derive(Default)]
struct RequestState {
    began: Vec<TransferId>,
    reading: Vec<(TransferId, u32)>,
    found: Option<u32>,
}

impl RequestState {
    /// The leader's number of the model's n-th copy. The model counts only copies, while the leader numbers inventory
    /// requests in the same sequence.
    fn number(&self, TransferId(nth): TransferId) -> TransferId {
        let began = self.began.get(nth as usize - 1);
        *began.expect("a copy of the model has begun")
    }

    /// Records a copy. Returns a contradiction when a store gets a page that a load still reads.
    fn copy(&mut self, leader: &Leader, copy: &Transfer) -> Option<String> {
        self.began.push(copy.id);
        let runs = leader
            .awaited()
            .map(|(transfer, _)| transfer)
            .collect::<Vec<_>>();
        self.reading.retain(|(transfer, _)| runs.contains(transfer));
        let pair = &copy.pairs[0];
        match copy.edge.direction().expect("an end is the device") {
            Direction::Load => self.reading.push((copy.id, pair.src.0[0].start)),
            Direction::Store => {
                let page = pair.dst.0[0].start;
                let read = self.reading.iter().find(|(_, read)| *read == page);
                return read
                    .map(|(transfer, _)| format!("{} overwrites what {transfer} reads", copy.id));
            }
        }
        None
    }
}

impl Leases {
    /// Replays the past of a state in a leader. Returns a difference, if there is one. Broken variants are not
    /// compared.
    pub(super) fn compare(&self, state: &State) -> Option<String> {
        if self.rule != Rule::Built {
            return None;
        }
        let mut leader = leader();
        let mut seen = RequestState::default();
        let (mut effects, mut held) = (Vec::new(), None);
        for (index, (now, mut event)) in (1..).zip(state.past.events()) {
            match &mut event {
                LeaderEvent::Request { id, .. } => *id = RequestId(index),
                LeaderEvent::Ended { copies, .. } => {
                    for copy in copies {
                        copy.transfer = seen.number(copy.transfer);
                    }
                }
                _ => {}
            }
            seen.found = None;
            held = looked_up(&event).map(|name| state.slots[name] != Some(None));
            leader.step(time(now), event, &mut effects);
            let mut inventories = Vec::new();
            for effect in effects.drain(..) {
                inventories.extend(empty_inventory(&effect));
                match effect {
                    LeaderEffect::Transfer { transfer: copy, .. } => {
                        if let Some(why) = seen.copy(&leader, &copy) {
                            return Some(why);
                        }
                    }
                    LeaderEffect::Answer {
                        answer: Ok(Answer::Lookup(LookupAnswer { hit_pages, .. })),
                        ..
                    } => seen.found = Some(hit_pages),
                    _ => {}
                }
            }
            for event in inventories {
                leader.step(time(now), event, &mut effects);
            }
            effects.clear();
        }
        if let Err(why) = leader.check() {
            return Some(why.to_string());
        }
        let pool = leader
            .pool()
            .or(leader.closing_pool(TierId::Host))
            .expect("a pool");
        let states = pool.page_states();
        let ready = state.blocks.iter().filter(|block| !block.filling).count();
        let late = state
            .transfers
            .iter()
            .filter(|transfer| transfer.late && !transfer.load)
            .count();
        let expected = [ready, late, PAGES - state.blocks.len()];
        let found = [states.ready, states.quarantined, states.free];
        let pins: i8 = state.blocks.iter().map(|block| block.pins).sum();
        let compared = [
            ("pages", found.map(|pages| pages as usize) == expected),
            ("pins", Ok(pool.pins()) == u64::try_from(pins)),
            ("copies", leader.copies_under_way() == state.transfers.len()),
            (
                "slots",
                leader.slots() == state.slots.iter().flatten().count(),
            ),
            ("answer", seen.found.map(|pages| pages > 0) == held),
        ];
        let wrong = compared.into_iter().find(|(_, equal)| !equal);
        wrong.map(|(what, _)| format!("{what}: {states:?}, {} pins", pool.pins()))
    }
}
