//! Growth: a block grows after its watermark, page by page. A growth that fails or is late returns its page, and the
//! next growth takes the same page in another transfer. The pages before it stay readable throughout.
//!
//! One sequence of three pages in an arena of three. [`Pool`] runs in parallel.

use kvferry_core::{AnchorKey, BlockRun, Domain, MatchGoal, Pool, PrefixMatch, ReservationKind};
use kvferry_types::{GroupId, PageHashes, Rank, Ratio, TransferId};
use stateright::{Model, Property};

use super::harness::{Missing, Network, Past, RANKS, at, breaks, holds, ranks, shard};

const PAGES: usize = 3;

type Page = usize;

/// The rule for growth: the real one, or a broken variant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rule {
    /// The real rule.
    Watermark,
    /// An acknowledgement of an older growth counts for the one that fills.
    AnyTransfer,
    /// A page is readable as soon as it is reserved.
    ReadReserved,
    /// A growth that failed on some rank publishes.
    PublishFailed,
    /// A growth is given up at its deadline, and its page is used again while it may still be written.
    FreeLate,
}

struct Growth {
    rule: Rule,
    /// Total number of stores: the first one and growths.
    stores: u64,
    domain: Domain,
    sequence: PageHashes,
}

impl Growth {
    fn new(rule: Rule) -> Self {
        let pages = (0..PAGES).flat_map(|page| [page as u8; 16]).collect();
        Self {
            rule,
            stores: 4,
            domain: Domain::new(&AnchorKey::new([1; 32]), b"", &[0; 16], GroupId(0)),
            sequence: PageHashes::packed(16, pages).expect("three pages"),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Message {
    Order(Rank, TransferId, Page),
    Ack(Rank, TransferId, bool),
}

#[derive(Debug, Clone, PartialEq)]
enum Action {
    Grow,
    Arrive(Message),
    End(Rank, TransferId, bool),
    Late,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Fill {
    transfer: TransferId,
    missing: Missing,
    failed: bool,
    late: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct State {
    last: TransferId,
    /// Pages below the watermark, each with the transfer that published it.
    ready: Vec<TransferId>,
    fill: Option<Fill>,
    writing: [Vec<(Page, TransferId)>; RANKS as usize],
    wrote: [[Option<TransferId>; PAGES]; RANKS as usize],
    seen: [Vec<TransferId>; RANKS as usize],
    network: Network<Message>,
    failures: u8,
    differs: Option<String>,
    past: Past<Event>,
}

/// A call to the pool.
#[derive(Debug, Clone)]
enum Event {
    Grow,
    Late(TransferId),
    Ended(TransferId, Rank, bool, Option<bool>),
}

impl State {
    fn step(&mut self, event: Event) {
        self.past = self.past.then(event);
    }

    fn grow(&mut self) {
        self.last.0 += 1;
        let (transfer, page) = (self.last, self.ready.len());
        self.fill = Some(Fill {
            transfer,
            missing: Missing::all(),
            failed: false,
            late: false,
        });
        for rank in ranks() {
            self.network.send(Message::Order(rank, transfer, page));
        }
        self.step(Event::Grow);
    }

    fn start(&mut self, rank: Rank, transfer: TransferId, page: Page) -> bool {
        let seen = &mut self.seen[at(rank)];
        if seen.contains(&transfer) {
            return false;
        }
        seen.push(transfer);
        seen.sort_unstable();
        self.writing[at(rank)].push((page, transfer));
        self.writing[at(rank)].sort_unstable();
        self.wrote[at(rank)][page] = None;
        true
    }

    fn end(&mut self, rank: Rank, transfer: TransferId, complete: bool) {
        let writing = &mut self.writing[at(rank)];
        let which = writing.iter().position(|(_, copy)| *copy == transfer);
        let (page, _) = writing.remove(which.expect("a copy"));
        if complete {
            self.wrote[at(rank)][page] = Some(transfer);
        }
        self.network.send(Message::Ack(rank, transfer, complete));
    }

    /// Handles an acknowledgement. Returns whether it had an effect.
    fn ended(&mut self, rule: Rule, transfer: TransferId, rank: Rank, complete: bool) -> bool {
        let meant = |fill: &Fill| fill.transfer == transfer || rule == Rule::AnyTransfer;
        let mut result = None;
        let mut effect = false;
        if let Some(fill) = self.fill.as_mut().filter(|fill| meant(fill)) {
            effect = fill.missing.remove(rank);
            fill.failed |= effect && !complete;
            if effect && fill.missing.is_empty() {
                let failed = (fill.failed && rule != Rule::PublishFailed) || fill.late;
                result = Some(!failed);
                let transfer = fill.transfer;
                self.fill = None;
                match failed {
                    true => self.failures += 1,
                    false => self.ready.push(transfer),
                }
            }
        }
        self.step(Event::Ended(transfer, rank, complete, result));
        effect
    }

    fn late(&mut self, rule: Rule) {
        let fill = self.fill.as_mut().expect("a store under way");
        let transfer = fill.transfer;
        fill.late = true;
        if rule == Rule::FreeLate {
            self.fill = None;
        }
        self.step(Event::Late(transfer));
    }

    /// Pages that a lookup finds.
    fn readable(&self, rule: Rule) -> Vec<TransferId> {
        let reserved = self.fill.iter().map(|fill| fill.transfer);
        let reserved = reserved.filter(|_| rule == Rule::ReadReserved);
        self.ready.iter().copied().chain(reserved).collect()
    }
}

impl Model for Growth {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        vec![State {
            last: TransferId(0),
            ready: Vec::new(),
            fill: None,
            writing: Default::default(),
            wrote: Default::default(),
            seen: Default::default(),
            network: Network::new(),
            failures: 0,
            differs: None,
            past: Past::new(),
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        let room = state.fill.is_none() && state.ready.len() < PAGES;
        if room && state.last.0 < self.stores {
            actions.push(Action::Grow);
        }
        actions.extend(state.network.messages().map(Action::Arrive));
        for rank in ranks() {
            for (_, transfer) in &state.writing[at(rank)] {
                actions.push(Action::End(rank, *transfer, true));
                actions.push(Action::End(rank, *transfer, false));
            }
        }
        if state.fill.as_ref().is_some_and(|fill| !fill.late) {
            actions.push(Action::Late);
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = last.clone();
        match action {
            Action::Grow => state.grow(),
            Action::Arrive(Message::Order(rank, transfer, page)) => {
                if !state.start(rank, transfer, page) {
                    return None;
                }
            }
            Action::Arrive(Message::Ack(rank, transfer, complete)) => {
                if !state.ended(self.rule, transfer, rank, complete) {
                    state.differs = self.compare(&state);
                    return state.differs.is_some().then_some(state);
                }
            }
            Action::End(rank, transfer, complete) => state.end(rank, transfer, complete),
            Action::Late => state.late(self.rule),
        }
        state.differs = self.compare(&state);
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(READABLE, |model: &Self, state: &State| {
                let readable = state.readable(model.rule);
                readable.iter().enumerate().all(|(page, transfer)| {
                    ranks().all(|rank| state.wrote[at(rank)][page] == Some(*transfer))
                })
            }),
            Property::always(ONE_WRITER, |_, state: &State| {
                ranks().all(|rank| state.writing[at(rank)].len() < 2)
            }),
            Property::always(ALIKE, |_, state: &State| state.differs.is_none()),
            Property::sometimes("whole after growths that failed", |_, state: &State| {
                state.ready.len() == PAGES && state.failures > 0
            }),
            Property::sometimes(
                "given up while pages before are readable",
                |_, state: &State| {
                    let late = state.fill.as_ref().is_some_and(|fill| fill.late);
                    late && !state.ready.is_empty()
                },
            ),
        ]
    }
}

const READABLE: &str = "what is readable was written whole by every rank in its transfer";
const ONE_WRITER: &str = "no two copies write one page at a time";
const ALIKE: &str = "the pool does what the model does";

impl Growth {
    /// Replays the past of a state in the pool. Returns a difference, if there is one. Broken variants are not
    /// compared.
    fn compare(&self, state: &State) -> Option<String> {
        if self.rule != Rule::Watermark {
            return None;
        }
        let ratio = Ratio::new(PAGES as u32).expect("in bounds");
        let mut pool = Pool::new(PAGES as u32, ratio);
        let (domain, sequence) = (&self.domain, &self.sequence);
        let mut last = 0;
        for event in state.past.events() {
            match event {
                Event::Grow => {
                    let tail = pool.longest(domain, sequence.view(), 0, MatchGoal::Present);
                    let position = tail.map_or(0, |tail| tail.pages);
                    let kind = tail.map_or(ReservationKind::New, |_| ReservationKind::Growth);
                    let (mut reserved, mut evicted) = (Vec::new(), Vec::new());
                    pool.reserve(
                        domain,
                        sequence.view(),
                        position,
                        position + 1,
                        tail,
                        &mut last,
                        &mut reserved,
                        &mut evicted,
                    );
                    let Some(reserved) = reserved.first().filter(|new| new.kind == kind) else {
                        return Some(format!("{reserved:?} for page {position}"));
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
            }
        }
        let mut runs: Vec<BlockRun> = Vec::new();
        let found = pool.walk(domain, sequence.view(), 0, &mut runs);
        let expected = PrefixMatch {
            end: state.ready.len() as u32,
            pending: state.fill.is_some(),
        };
        let wrong = (found != expected).then(|| format!("{found:?}, not {expected:?}"));
        pool.check().err().map(|why| why.to_string()).or(wrong)
    }
}

#[test]
fn an_acknowledgement_of_one_growth_never_publishes_another() {
    holds("growth", Growth::new(Rule::Watermark));
}

#[test]
fn an_acknowledgement_without_a_transfer_publishes_the_wrong_growth() {
    breaks(
        "growth by any transfer",
        || Growth::new(Rule::AnyTransfer),
        READABLE,
    );
}

#[test]
fn pages_above_the_watermark_are_incomplete() {
    breaks(
        "growth without watermark",
        || Growth::new(Rule::ReadReserved),
        READABLE,
    );
}

#[test]
fn a_growth_that_failed_on_one_rank_is_incomplete() {
    breaks(
        "growth in spite of failures",
        || Growth::new(Rule::PublishFailed),
        READABLE,
    );
}

#[test]
fn a_growth_that_is_given_up_too_early_is_written_twice_at_a_time() {
    breaks(
        "growth freed late",
        || Growth::new(Rule::FreeLate),
        ONE_WRITER,
    );
}
