//! Leases: a lookup holds the pages that it found for a while, and a load holds them until its copy has ended on every
//! rank, also with late copies, disconnects, expiry and deaths. Held pages are never evicted, and every hold has a
//! holder.
//!
//! Two pages, three sequences of one page each, one engine. A leader runs in parallel.

mod beside;

use kvferry_core::LeaderEvent;
use kvferry_types::{
    EndedCopy, EngineId, Epoch, GroupId, PageList, Part, Rank, Request, RequestId, SlotId,
    TransferId,
};
use stateright::{Model, Property};

use super::harness::{Missing, Past, breaks, holds, ranks};
use beside::{arrival, sequence, time, worker};

const PAGES: usize = 2;
const NAMES: usize = 3;
const ENGINE: EngineId = EngineId([1; 16]);
const EPOCH: Epoch = Epoch(1);
/// In seconds: how long a lookup holds pages, how long a disconnected engine is remembered, and when an answer is due.
const HOLD: u8 = 2;
const GRACE: u8 = 1;
const DEADLINE: u8 = 1;

/// The rule for holds: the real one, or a broken variant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rule {
    /// The real rule.
    Built,
    /// A lease ends with the deadline of its load.
    UntilDeadline,
    /// A lease ends when the first rank has ended its copy.
    UntilFirst,
    /// The holds of an engine remain when the engine is forgotten.
    Keep,
    /// The oldest block is evicted, also when it is held.
    EvictHeld,
    /// A repeated report of an end releases the lease again.
    ReleaseAgain,
}

struct Leases {
    rule: Rule,
    /// Maximum numbers of copies, seconds, broken connections and deaths.
    transfers: u64,
    seconds: u8,
    disconnects: u8,
    deaths: u8,
}

#[derive(Debug, Clone, PartialEq)]
enum Action {
    Lookup(usize),
    Load(usize),
    Store(usize),
    Finish(usize),
    Ended(TransferId, Rank, bool),
    Second,
    Disconnect,
    Reconnect,
    /// A worker dies, and another one with another depot attaches.
    Die(Rank),
}

/// A page of a sequence, identified by the store that fills it. A state lists its blocks from the oldest on.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Block {
    id: TransferId,
    name: usize,
    filling: bool,
    pins: i8,
    retired: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Hold {
    block: TransferId,
    until: u8,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Op {
    id: TransferId,
    /// The block that a load reads or a store fills.
    block: TransferId,
    load: bool,
    missing: Missing,
    failed: bool,
    late: bool,
    deadline: u8,
    leased: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct State {
    now: u8,
    last: TransferId,
    blocks: Vec<Block>,
    /// Running requests, each with its hold.
    slots: [Option<Option<Hold>>; NAMES],
    transfers: Vec<Op>,
    connected: bool,
    gone_at: Option<u8>,
    disconnected: u8,
    dead: u8,
    /// The pool belongs to a depot that is gone, and copies of it are still running.
    closing: bool,
    evicted: bool,
    differs: Option<String>,
    past: Past<(u8, LeaderEvent)>,
}

impl State {
    fn step(&mut self, event: LeaderEvent) {
        self.past = self.past.then((self.now, event));
    }

    fn request(&mut self, request: Request) {
        let (engine, id) = (ENGINE, RequestId(0));
        let deadline = time(self.now + DEADLINE);
        self.step(LeaderEvent::Request {
            engine,
            id,
            deadline,
            request,
        });
    }

    fn block(&mut self, id: TransferId) -> Option<&mut Block> {
        self.blocks.iter_mut().find(|block| block.id == id)
    }

    fn found(&self, name: usize) -> Option<&Block> {
        let mut blocks = self.blocks.iter();
        blocks.find(|block| block.name == name && !block.retired)
    }

    fn touch(&mut self, id: TransferId) {
        if let Some(at) = self.blocks.iter().position(|block| block.id == id) {
            let block = self.blocks.remove(at);
            self.blocks.push(block);
        }
    }

    fn pin(&mut self, id: TransferId) {
        if let Some(block) = self.block(id) {
            block.pins += 1;
        }
    }

    fn unpin(&mut self, id: TransferId) {
        if let Some(block) = self.block(id) {
            block.pins -= 1;
        }
        self.free_if_unheld();
    }

    /// Removes retired blocks that are neither filling nor held.
    fn free_if_unheld(&mut self) {
        self.blocks
            .retain(|block| block.filling || !block.retired || block.pins > 0);
    }

    fn release_block(&mut self, name: usize) {
        let hold = self.slots[name].as_mut().and_then(Option::take);
        if let Some(hold) = hold {
            self.unpin(hold.block);
        }
    }

    fn lookup(&mut self, name: usize) {
        self.release_block(name);
        self.slots[name] = Some(None);
        let found = self.found(name).filter(|block| !block.filling);
        if let Some(block) = found.map(|block| block.id) {
            self.touch(block);
            self.pin(block);
            let until = self.now + HOLD;
            self.slots[name] = Some(Some(Hold { block, until }));
        }
        self.request(Request::Lookup {
            slot: SlotId(name as u64),
            namespace: Vec::new(),
            hashes: sequence(name),
            have_pages: 0,
            limit_pages: None,
        });
    }

    fn load(&mut self, name: usize) {
        let hold = self.slots[name].as_mut().and_then(Option::take);
        let block = hold.expect("a hold").block;
        self.begin(block, true);
        self.request(Request::Load {
            slot: SlotId(name as u64),
            parts: vec![Part::new(GroupId(0), 0, PageList::run(name as u32, 1))],
            after: RequestId(0),
        });
    }

    fn begin(&mut self, block: TransferId, load: bool) {
        self.last.0 += u64::from(load);
        self.transfers.push(Op {
            id: self.last,
            block,
            load,
            missing: Missing::all(),
            failed: false,
            late: false,
            deadline: self.now + DEADLINE,
            leased: load,
        });
    }

    fn store(&mut self, rule: Rule, name: usize) {
        match self.found(name) {
            Some(block) if !block.filling => {
                let block = block.id;
                self.touch(block);
            }
            Some(_) => {}
            None => self.reserve(rule, name),
        }
        self.request(Request::Store {
            slot: SlotId(name as u64),
            parts: vec![Part::new(GroupId(0), 0, PageList::run(name as u32, 1))],
            more: None,
            after: RequestId(0),
        });
    }

    fn reserve(&mut self, rule: Rule, name: usize) {
        if self.blocks.len() == PAGES {
            let free = |block: &Block| block.pins == 0 || rule == Rule::EvictHeld;
            let oldest = self
                .blocks
                .iter()
                .position(|block| !block.filling && free(block));
            let Some(oldest) = oldest else { return };
            self.blocks.remove(oldest);
            self.evicted = true;
        }
        self.last.0 += 1;
        self.blocks.push(Block {
            id: self.last,
            name,
            filling: true,
            pins: 0,
            retired: false,
        });
        self.begin(self.last, false);
    }

    /// Handles the end of a copy on a rank. Returns whether this was the first report of it.
    fn ended(&mut self, rule: Rule, id: TransferId, rank: Rank, complete: bool) -> bool {
        let Some(transfer) = self.transfers.iter_mut().find(|transfer| transfer.id == id) else {
            return false;
        };
        let first_report = transfer.missing.remove(rank);
        transfer.failed |= first_report && !complete;
        let (transfer, last) = (transfer.clone(), transfer.missing.is_empty());
        let again = rule == Rule::ReleaseAgain && !first_report && transfer.load;
        let first = rule == Rule::UntilFirst && transfer.leased;
        if again || first {
            self.release(id);
        }
        if first_report && last {
            self.release(id);
            self.transfers.retain(|transfer| transfer.id != id);
            if !transfer.load {
                self.filled(&transfer);
            }
            self.closing &= !self.transfers.is_empty();
        }
        first_report || again
    }

    fn release(&mut self, id: TransferId) {
        let transfer = self.transfers.iter_mut().find(|transfer| transfer.id == id);
        let transfer = transfer.expect("a copy under way");
        if std::mem::take(&mut transfer.leased) {
            let block = transfer.block;
            self.unpin(block);
        }
    }

    fn filled(&mut self, transfer: &Op) {
        let failed = transfer.failed || transfer.late;
        if let Some(block) = self.block(transfer.block) {
            block.filling = false;
            block.retired |= failed;
        }
        self.free_if_unheld();
        self.touch(transfer.block);
    }

    fn second(&mut self, rule: Rule) {
        self.now += 1;
        let now = self.now;
        for name in 0..NAMES {
            let hold = self.slots[name].as_ref().and_then(Option::as_ref);
            if hold.is_some_and(|hold| hold.until <= now) {
                self.release_block(name);
            }
        }
        let due = self
            .transfers
            .iter_mut()
            .filter(|transfer| transfer.deadline <= now);
        let late: Vec<TransferId> = due
            .map(|transfer| {
                transfer.late = true;
                transfer.id
            })
            .collect();
        if rule == Rule::UntilDeadline {
            late.into_iter().for_each(|transfer| self.release(transfer));
        }
        if self.gone_at.is_some_and(|at| at <= now) {
            self.gone_at = None;
            for name in 0..NAMES {
                if rule != Rule::Keep {
                    self.release_block(name);
                }
                self.slots[name] = None;
            }
        }
        self.step(LeaderEvent::Tick);
    }

    fn die(&mut self, rule: Rule, rank: Rank) {
        self.dead += 1;
        let awaited: Vec<TransferId> = self.transfers.iter().map(|transfer| transfer.id).collect();
        for transfer in awaited {
            self.ended(rule, transfer, rank, false);
        }
        self.blocks
            .iter_mut()
            .for_each(|block| block.retired = true);
        // A load must not read pages of the new depot, so no hold outlives the old one.
        (0..NAMES).for_each(|name| self.release_block(name));
        self.free_if_unheld();
        self.closing = !self.transfers.is_empty();
        let worker = worker(rank);
        self.step(LeaderEvent::WorkerDead(worker));
        for event in arrival(worker, 2) {
            self.step(event);
        }
    }

    /// Every block that a slot holds or a load reads, once for each holder.
    fn holders(&self) -> impl Iterator<Item = TransferId> {
        let slots = self.slots.iter().flatten().flatten();
        let loads = self.transfers.iter().filter(|transfer| transfer.load);
        slots
            .map(|hold| hold.block)
            .chain(loads.map(|transfer| transfer.block))
    }
}

impl Model for Leases {
    type State = State;
    type Action = Action;

    /// The initial state: two sequences are stored and not held.
    fn init_states(&self) -> Vec<State> {
        let empty = State {
            now: 0,
            last: TransferId(0),
            blocks: Vec::new(),
            slots: [None, None, None],
            transfers: Vec::new(),
            connected: true,
            gone_at: None,
            disconnected: 0,
            dead: 0,
            closing: false,
            evicted: false,
            differs: None,
            past: Past::new(),
        };
        let store = |name: usize| {
            let transfer = TransferId(name as u64 + 1);
            let ended = ranks().map(move |rank| Action::Ended(transfer, rank, true));
            let begun = [Action::Lookup(name), Action::Store(name)].into_iter();
            begun.chain(ended).chain([Action::Finish(name)])
        };
        let stored = (0..PAGES).flat_map(store).fold(empty, |state, action| {
            self.next_state(&state, action).expect("an effect")
        });
        vec![stored]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        let room = state.last.0 < self.transfers;
        for name in (0..NAMES).filter(|_| state.connected) {
            // Requests while a pool closes are refused, which `leader_model` tests.
            if !state.closing {
                actions.push(Action::Lookup(name));
            }
            let Some(slot) = &state.slots[name] else {
                continue;
            };
            actions.push(Action::Finish(name));
            if room && !state.closing {
                actions.push(Action::Store(name));
            }
            if room && !state.closing && slot.is_some() {
                actions.push(Action::Load(name));
            }
        }
        // Earlier reports of ends are repeated, too.
        for transfer in &state.transfers {
            for rank in ranks() {
                actions.push(Action::Ended(transfer.id, rank, true));
                actions.push(Action::Ended(transfer.id, rank, false));
            }
        }
        if state.now < self.seconds {
            actions.push(Action::Second);
        }
        if state.connected && state.disconnected < self.disconnects {
            actions.push(Action::Disconnect);
        }
        if !state.connected {
            actions.push(Action::Reconnect);
        }
        if state.dead < self.deaths {
            actions.extend(ranks().map(Action::Die));
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = last.clone();
        match action {
            Action::Lookup(name) => state.lookup(name),
            Action::Load(name) => state.load(name),
            Action::Store(name) => state.store(self.rule, name),
            Action::Finish(name) => {
                state.release_block(name);
                state.slots[name] = None;
                let slot = SlotId(name as u64);
                state.request(Request::Finish { slot });
            }
            Action::Ended(transfer, rank, complete) => {
                let first_report = state.ended(self.rule, transfer, rank, complete);
                let ended = EndedCopy::new(transfer, complete);
                state.step(LeaderEvent::Ended {
                    worker: worker(rank),
                    epoch: EPOCH,
                    copies: vec![ended],
                });
                if !first_report {
                    state.differs = self.compare(&state);
                    return state.differs.is_some().then_some(state);
                }
            }
            Action::Second => state.second(self.rule),
            Action::Disconnect => {
                state.disconnected += 1;
                state.connected = false;
                state.gone_at = Some(state.now + GRACE);
                state.step(LeaderEvent::EngineClosed(ENGINE));
            }
            Action::Reconnect => {
                state.connected = true;
                state.gone_at = None;
                state.step(LeaderEvent::EngineOpened(ENGINE));
            }
            Action::Die(rank) => state.die(self.rule, rank),
        }
        state.differs = self.compare(&state);
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(KEPT, |_, state: &State| {
                let there = |id: TransferId| state.blocks.iter().any(|block| block.id == id);
                state.holders().all(there)
            }),
            Property::always(COUNTED, |_, state: &State| {
                state.blocks.iter().all(|block| {
                    let holders = state.holders().filter(|id| *id == block.id);
                    i8::try_from(holders.count()) == Ok(block.pins)
                })
            }),
            Property::always(ALIKE, |_, state: &State| state.differs.is_none()),
            Property::sometimes(
                "evicted while another page is read",
                |model: &Self, state: &State| {
                    let read = state.transfers.iter().any(|transfer| transfer.load);
                    (state.evicted && read) || model.transfers < 4
                },
            ),
            Property::sometimes("read after its deadline", |_, state: &State| {
                state
                    .transfers
                    .iter()
                    .any(|transfer| transfer.load && transfer.late)
            }),
            Property::sometimes(
                "read for an engine that is forgotten",
                |model: &Self, state: &State| {
                    let forgotten = !state.connected && state.gone_at.is_none();
                    (forgotten && state.transfers.iter().any(|transfer| transfer.load))
                        || model.disconnects == 0
                },
            ),
            Property::sometimes(
                "forgotten while it is held",
                |model: &Self, state: &State| {
                    let forgotten = |block: &Block| block.retired && block.pins > 0;
                    state.blocks.iter().any(forgotten) || model.deaths == 0
                },
            ),
        ]
    }
}

const KEPT: &str = "what is held is there";
const COUNTED: &str = "every holder counts, once, and nobody else";
const ALIKE: &str = "the leader does what the model does";

impl Leases {
    /// Two more copies, and a second in which they can miss their deadline.
    fn late(rule: Rule) -> Self {
        Self {
            rule,
            transfers: 4,
            seconds: 1,
            disconnects: 0,
            deaths: 0,
        }
    }

    /// One more copy, time for everything to expire, and an engine that disconnects.
    fn never_unpinned(rule: Rule) -> Self {
        Self {
            rule,
            transfers: 3,
            seconds: 3,
            disconnects: 1,
            deaths: 0,
        }
    }

    /// One more copy, and a worker that dies.
    fn dying(rule: Rule) -> Self {
        Self {
            rule,
            transfers: 3,
            seconds: 1,
            disconnects: 0,
            deaths: 1,
        }
    }
}

#[test]
fn held_pages_are_never_evicted_and_are_released_by_their_last_holder() {
    holds("leases, late copies", Leases::late(Rule::Built));
}

#[test]
fn holds_of_an_engine_are_released_when_it_is_forgotten() {
    holds(
        "leases, engines go away",
        Leases::never_unpinned(Rule::Built),
    );
}

#[test]
fn pages_of_a_dead_worker_are_freed_with_their_last_holder() {
    holds("leases, workers die", Leases::dying(Rule::Built));
}

#[test]
fn a_lease_until_the_deadline_releases_pages_that_are_still_read() {
    breaks(
        "lease until the deadline",
        || Leases::late(Rule::UntilDeadline),
        KEPT,
    );
}

#[test]
fn a_lease_until_the_first_end_releases_pages_that_are_still_read() {
    breaks(
        "lease until the first end",
        || Leases::late(Rule::UntilFirst),
        KEPT,
    );
}

#[test]
fn holds_that_a_forgotten_engine_keeps_have_no_holder() {
    breaks(
        "holds are kept",
        || Leases::never_unpinned(Rule::Keep),
        COUNTED,
    );
}

#[test]
fn evicting_the_oldest_block_regardless_takes_held_pages() {
    breaks("evict what is held", || Leases::late(Rule::EvictHeld), KEPT);
}

#[test]
fn an_end_that_is_reported_again_must_not_release_again() {
    breaks(
        "release again",
        || Leases::late(Rule::ReleaseAgain),
        COUNTED,
    );
}
