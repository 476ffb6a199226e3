//! Publishing by set: pages become readable when every rank has acknowledged a complete copy in time, in their
//! transfer and epoch. They are freed once, when no copy writes them any longer.
//!
//! Two pages, three sequences of one page each. A leader reserves, orders, receives acknowledgements, gives up at
//! deadlines and restarts; workers copy, fail and die. [`Pool`] runs in parallel.

use kvferry_core::{AnchorKey, Domain, MatchGoal, Pool};
use kvferry_types::{Epoch, GroupId, PageHashes, Rank, Ratio, TransferId};
use stateright::{Model, Property};

use super::harness::{Missing, Network, Past, RANKS, at, breaks, holds, ranks, shard};

const PAGES: usize = 2;
const NAMES: u8 = 3;

type Page = usize;
/// A store, unique over all epochs.
type StoreId = (Epoch, TransferId);

/// The rule for publishing: the real one, or a broken variant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rule {
    /// The real rule.
    Set,
    /// Publishes after as many acknowledgements as there are ranks, whichever ranks sent them.
    Count,
    /// An acknowledgement counts for the oldest store.
    AnyTransfer,
    /// An acknowledgement to an older leader counts for the store with its number.
    AnyEpoch,
    /// Pages are freed at their deadline.
    FreeLate,
    /// A late store that is complete publishes. Its pages are correct, so only the publication itself is visible: the
    /// engine may have been notified that they failed.
    PublishLate,
}

struct Publish {
    rule: Rule,
    /// Number of stores that each leader begins.
    stores: Vec<u64>,
    /// Maximum number of workers that die.
    deaths: u8,
    domain: Domain,
}

impl Publish {
    /// Three stores of one leader.
    fn one_leader(rule: Rule) -> Self {
        Self {
            rule,
            stores: vec![3],
            deaths: 0,
            domain: domain(),
        }
    }

    /// Two stores, and a worker that dies.
    fn dying(rule: Rule) -> Self {
        Self {
            stores: vec![2],
            deaths: 1,
            ..Self::one_leader(rule)
        }
    }

    /// A store of one leader, and two of the next.
    fn two_leaders(rule: Rule) -> Self {
        Self {
            stores: vec![1, 2],
            ..Self::one_leader(rule)
        }
    }
}

fn domain() -> Domain {
    Domain::new(&AnchorKey::new([1; 32]), b"", &[0; 16], GroupId(0))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Message {
    Order {
        rank: Rank,
        transfer: TransferId,
        page: Page,
    },
    Ack {
        rank: Rank,
        epoch: Epoch,
        transfer: TransferId,
        complete: bool,
    },
}

#[derive(Debug, Clone, PartialEq)]
enum Action {
    Reserve(u8),
    Arrive(Message),
    /// The copy of a rank ends.
    End(Rank, StoreId, bool),
    Late(TransferId),
    /// A worker dies, and another one with another depot attaches.
    Die(Rank),
    /// The next leader starts, once every copy of the old one has ended.
    Restart,
}

/// A page of a sequence. A state lists its blocks from the oldest on.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Block {
    name: u8,
    page: Page,
    transfer: TransferId,
    fill: Option<Fill>,
    retired: bool,
    published_late: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Fill {
    missing: Missing,
    answers: u16,
    failed: bool,
    late: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct State {
    epoch: Epoch,
    last: TransferId,
    deaths: u8,
    blocks: Vec<Block>,
    free: Vec<Page>,
    /// Running copies, which write, by rank.
    writing: [Vec<(Page, StoreId)>; RANKS as usize],
    /// The store whose complete bytes each page holds, by rank.
    wrote: [[Option<StoreId>; PAGES]; RANKS as usize],
    /// By rank: the orders that have reached the worker or are not for it.
    seen: [Vec<TransferId>; RANKS as usize],
    network: Network<Message>,
    evicted: bool,
    freed: bool,
    differs: Option<String>,
    past: Past<Event>,
}

/// A call to the pool.
#[derive(Debug, Clone)]
enum Event {
    New,
    Reserve(u8),
    Late(TransferId),
    Ended(TransferId, Rank, bool, Option<bool>),
    Reset,
}

impl State {
    fn step(&mut self, event: Event) {
        self.past = self.past.then(event);
    }

    fn reserve(&mut self, name: u8) {
        if self.free.is_empty() {
            let oldest = self.blocks.iter().position(|block| block.fill.is_none());
            let oldest = self.blocks.remove(oldest.expect("a block to evict"));
            self.free.push(oldest.page);
            self.evicted = true;
        }
        let page = self.free.remove(0);
        self.last.0 += 1;
        let transfer = self.last;
        let fill = Fill {
            missing: Missing::all(),
            answers: 0,
            failed: false,
            late: false,
        };
        self.blocks.push(Block {
            name,
            page,
            transfer,
            fill: Some(fill),
            retired: false,
            published_late: false,
        });
        for rank in ranks() {
            self.network.send(Message::Order {
                rank,
                transfer,
                page,
            });
        }
        self.step(Event::Reserve(name));
    }

    fn start(&mut self, rank: Rank, transfer: TransferId, page: Page) -> bool {
        if self.seen[at(rank)].contains(&transfer) {
            return false;
        }
        self.seen[at(rank)].push(transfer);
        self.seen[at(rank)].sort_unstable();
        self.writing[at(rank)].push((page, (self.epoch, transfer)));
        self.writing[at(rank)].sort_unstable();
        self.wrote[at(rank)][page] = None;
        true
    }

    fn end(&mut self, rank: Rank, store: StoreId, complete: bool) {
        let writing = &mut self.writing[at(rank)];
        let which = writing.iter().position(|(_, running)| *running == store);
        let (page, _) = writing.remove(which.expect("a copy"));
        if complete {
            self.wrote[at(rank)][page] = Some(store);
        }
        let (epoch, transfer) = store;
        self.network.send(Message::Ack {
            rank,
            epoch,
            transfer,
            complete,
        });
    }

    /// Handles an acknowledgement. `None` when it has no effect.
    fn ended(
        &mut self,
        rule: Rule,
        transfer: TransferId,
        rank: Rank,
        complete: bool,
    ) -> Option<()> {
        let filling = |block: &&mut Block| block.fill.is_some();
        let mut blocks = self.blocks.iter_mut().filter(filling);
        let block = match rule {
            Rule::AnyTransfer => blocks.min_by_key(|block| block.transfer),
            _ => blocks.find(|block| block.transfer == transfer),
        };
        let block = block?;
        let fill = block.fill.as_mut()?;
        let first_report = fill.missing.remove(rank);
        if !first_report && rule != Rule::Count {
            return None;
        }
        fill.answers += 1;
        fill.failed |= !complete;
        let all = match rule {
            Rule::Count => fill.answers >= RANKS,
            _ => fill.missing.is_empty(),
        };
        let mut result = None;
        if all {
            let late = fill.late;
            let failed = fill.failed || block.retired || (late && rule != Rule::PublishLate);
            block.fill = None;
            block.published_late = late;
            result = Some(!failed);
            if failed {
                let transfer = block.transfer;
                let gone = self
                    .blocks
                    .iter()
                    .position(|block| block.transfer == transfer);
                let gone = self.blocks.remove(gone.expect("that block"));
                self.release(gone.page);
                self.freed = true;
            }
        }
        self.step(Event::Ended(transfer, rank, complete, result));
        Some(())
    }

    fn release(&mut self, page: Page) {
        self.free.push(page);
        self.free.sort_unstable();
    }

    fn late(&mut self, rule: Rule, transfer: TransferId) {
        let block = self
            .blocks
            .iter_mut()
            .find(|block| block.transfer == transfer);
        let block = block.expect("a store");
        block.fill.as_mut().expect("under way").late = true;
        let page = block.page;
        if rule == Rule::FreeLate {
            self.release(page);
        }
        self.step(Event::Late(transfer));
    }

    fn die(&mut self, rule: Rule, rank: Rank) {
        self.deaths += 1;
        self.writing[at(rank)].clear();
        self.wrote[at(rank)] = [None; PAGES];
        self.seen[at(rank)] = (1..=self.last.0).map(TransferId).collect();
        self.network
            .cut(|message| matches!(message, Message::Order { rank: to, .. } if *to == rank));
        let awaited = self.blocks.iter().filter(|block| {
            let fill = block.fill.as_ref();
            fill.is_some_and(|fill| fill.missing.contains(rank))
        });
        let mut awaited: Vec<_> = awaited.map(|block| block.transfer).collect();
        awaited.sort_unstable();
        for transfer in awaited {
            self.ended(rule, transfer, rank, false);
        }
        let (kept, gone) = std::mem::take(&mut self.blocks)
            .into_iter()
            .partition(|block| block.fill.is_some());
        self.blocks = kept;
        let gone: Vec<Block> = gone;
        gone.iter().for_each(|block| self.release(block.page));
        self.blocks
            .iter_mut()
            .for_each(|block| block.retired = true);
        self.step(Event::Reset);
    }

    fn restart(&mut self) {
        self.epoch.0 += 1;
        self.last = TransferId(0);
        self.blocks.clear();
        self.free = (0..PAGES).collect();
        self.writing = Default::default();
        self.wrote = Default::default();
        self.seen = Default::default();
        self.network
            .cut(|message| matches!(message, Message::Order { .. }));
        self.step(Event::New);
    }
}

impl Model for Publish {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        vec![State {
            epoch: Epoch(1),
            last: TransferId(0),
            deaths: 0,
            blocks: Vec::new(),
            free: (0..PAGES).collect(),
            writing: Default::default(),
            wrote: Default::default(),
            seen: Default::default(),
            network: Network::new(),
            evicted: false,
            freed: false,
            differs: None,
            past: Past::new().then(Event::New),
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        if state.last.0 < self.stores[state.epoch.0 as usize - 1] {
            let room =
                !state.free.is_empty() || state.blocks.iter().any(|block| block.fill.is_none());
            let absent = |name: &u8| {
                let mut there = state.blocks.iter().filter(|block| !block.retired);
                there.all(|block| block.name != *name)
            };
            // Sequences are alike: the first absent one stands for all absent ones.
            let name = (0..NAMES).filter(|_| room).find(absent);
            actions.extend(name.map(Action::Reserve));
        }
        actions.extend(state.network.messages().map(Action::Arrive));
        for rank in ranks() {
            for (_, store) in &state.writing[at(rank)] {
                actions.push(Action::End(rank, *store, true));
                actions.push(Action::End(rank, *store, false));
            }
            if state.deaths < self.deaths {
                actions.push(Action::Die(rank));
            }
        }
        for block in &state.blocks {
            if block.fill.as_ref().is_some_and(|fill| !fill.late) {
                actions.push(Action::Late(block.transfer));
            }
        }
        if state.epoch.0 < self.stores.len() as u64 {
            actions.push(Action::Restart);
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = last.clone();
        match action {
            Action::Reserve(name) => state.reserve(name),
            Action::Arrive(Message::Order {
                rank,
                transfer,
                page,
            }) => {
                if !state.start(rank, transfer, page) {
                    return None;
                }
            }
            Action::Arrive(Message::Ack {
                rank,
                epoch,
                transfer,
                complete,
            }) => {
                if epoch != state.epoch && self.rule != Rule::AnyEpoch {
                    return None;
                }
                if state.ended(self.rule, transfer, rank, complete).is_none() {
                    // The pool must ignore the acknowledgement as well.
                    state.step(Event::Ended(transfer, rank, complete, None));
                    state.differs = self.compare(&state);
                    return state.differs.is_some().then_some(state);
                }
            }
            Action::End(rank, store, complete) => state.end(rank, store, complete),
            Action::Late(transfer) => state.late(self.rule, transfer),
            Action::Die(rank) => state.die(self.rule, rank),
            Action::Restart => state.restart(),
        }
        state.differs = self.compare(&state);
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(READABLE, |_, state: &State| {
                let mut readable = state.blocks.iter().filter(|block| block.fill.is_none());
                readable.all(|block| {
                    let store = Some((state.epoch, block.transfer));
                    ranks().all(|rank| state.wrote[at(rank)][block.page] == store)
                })
            }),
            Property::always(ONE_WRITER, |_, state: &State| {
                ranks().all(|rank| {
                    let writing = &state.writing[at(rank)];
                    (0..PAGES).all(|page| writing.iter().filter(|(at, _)| *at == page).count() < 2)
                })
            }),
            Property::always(FREED_ONCE, |_, state: &State| {
                let held = state.blocks.iter().map(|block| block.page);
                let mut pages: Vec<Page> = held.chain(state.free.iter().copied()).collect();
                pages.sort_unstable();
                pages.into_iter().eq(0..PAGES)
            }),
            Property::always(IN_TIME, |_, state: &State| {
                let mut readable = state.blocks.iter().filter(|block| block.fill.is_none());
                readable.all(|block| !block.published_late)
            }),
            Property::always(ALIKE, |_, state: &State| state.differs.is_none()),
            Property::sometimes("both pages readable", |_, state: &State| {
                state.blocks.len() == PAGES && state.blocks.iter().all(|block| block.fill.is_none())
            }),
            Property::sometimes("evicted", |model: &Self, state: &State| {
                state.evicted || model.stores[0] <= PAGES as u64
            }),
            Property::sometimes("freed after a failure", |_, state: &State| state.freed),
            Property::sometimes(
                "readable in the last epoch",
                |model: &Self, state: &State| {
                    let readable = state.blocks.iter().any(|block| block.fill.is_none());
                    state.epoch.0 == model.stores.len() as u64 && readable
                },
            ),
        ]
    }
}

const READABLE: &str = "what is readable was written whole by every rank in its transfer and epoch";
const ONE_WRITER: &str = "no two copies write one page at a time";
const FREED_ONCE: &str = "every page is free or held, once";
const IN_TIME: &str = "nothing late is published";
const ALIKE: &str = "the pool does what the model does";

impl Publish {
    /// Replays the past of a state in the pool. Returns a difference, if there is one. Broken variants are not
    /// compared.
    fn compare(&self, state: &State) -> Option<String> {
        if self.rule != Rule::Set {
            return None;
        }
        let ratio = Ratio::new(1).expect("in bounds");
        let domain = &self.domain;
        let sequence = |name: u8| PageHashes::packed(16, vec![name + 1; 16]).expect("one page");
        let mut pool = Pool::new(PAGES as u32, ratio);
        let mut last = 0;
        for event in state.past.events() {
            match event {
                Event::New => {
                    pool = Pool::new(PAGES as u32, ratio);
                    last = 0;
                }
                Event::Reserve(name) => {
                    let (mut reserved, mut evicted) = (Vec::new(), Vec::new());
                    let hashes = sequence(name);
                    pool.reserve(
                        domain,
                        hashes.view(),
                        0,
                        1,
                        None,
                        &mut last,
                        &mut reserved,
                        &mut evicted,
                    );
                    let Some(reserved) = reserved.first() else {
                        return Some(format!("no room for sequence {name}"));
                    };
                    pool.start_filling(reserved.transfer, Missing::all().shards());
                }
                Event::Late(transfer) => pool.quarantine(transfer),
                Event::Ended(transfer, rank, complete, expected) => {
                    let result = pool.ended(transfer, shard(rank), complete);
                    if result != expected {
                        return Some(format!("{transfer}, {rank}: {result:?}, not {expected:?}"));
                    }
                }
                Event::Reset => pool.reset(),
            }
        }
        if let Err(why) = pool.check() {
            return Some(why.to_string());
        }
        let count = |which: fn(&Block) -> bool| state.blocks.iter().filter(|b| which(b)).count();
        let late = |block: &Block| block.fill.as_ref().is_some_and(|fill| fill.late);
        let expected = [
            state.free.len(),
            count(|block| block.fill.as_ref().is_some_and(|fill| !fill.late)),
            count(|block| block.fill.is_none()),
            count(late),
        ];
        let states = pool.page_states();
        let found = [
            states.free,
            states.filling,
            states.ready,
            states.quarantined,
        ];
        if found.map(|pages| pages as usize) != expected {
            return Some(format!("{states:?}, not {expected:?}"));
        }
        for name in 0..NAMES {
            let found = pool.longest(domain, sequence(name).view(), 0, MatchGoal::Readable);
            let readable = found.is_some_and(|found| found.ready > 0);
            let expected = |block: &&Block| block.name == name && block.fill.is_none();
            if readable != state.blocks.iter().any(|block| expected(&block)) {
                return Some(format!("sequence {name} is readable: {readable}"));
            }
        }
        None
    }
}

#[test]
fn pages_become_readable_by_set_and_are_freed_once() {
    holds("publish", Publish::one_leader(Rule::Set));
    holds("publish, workers die", Publish::dying(Rule::Set));
    holds("publish, restarted", Publish::two_leaders(Rule::Set));
}

#[test]
fn counting_acknowledgements_serves_incomplete_pages() {
    breaks(
        "publish by count",
        || Publish::one_leader(Rule::Count),
        READABLE,
    );
}

#[test]
fn an_acknowledgement_of_another_store_serves_incomplete_pages() {
    let model = || Publish::one_leader(Rule::AnyTransfer);
    breaks("publish by any transfer", model, READABLE);
}

#[test]
fn an_acknowledgement_to_an_older_leader_serves_incomplete_pages() {
    breaks(
        "publish by any epoch",
        || Publish::two_leaders(Rule::AnyEpoch),
        READABLE,
    );
}

#[test]
fn pages_that_are_freed_at_their_deadline_are_written_twice_at_a_time() {
    breaks(
        "free late pages",
        || Publish::one_leader(Rule::FreeLate),
        ONE_WRITER,
    );
    breaks(
        "free late pages",
        || Publish::one_leader(Rule::FreeLate),
        FREED_ONCE,
    );
}

#[test]
fn a_late_acknowledgement_that_counts_publishes_abandoned_pages() {
    breaks(
        "publish late pages",
        || Publish::one_leader(Rule::PublishLate),
        IN_TIME,
    );
}
