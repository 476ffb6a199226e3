//! Epochs: leaders restart, connections break, memory is registered again and workers die, while copies run and
//! messages of every age arrive. A worker starts each current order once. A leader waits for every copy that may run.
//!
//! The arena has one page. The workers are real [`Worker`]s, rebuilt from their past at every step; their debug output
//! is a part of the state. The leader is a small model: it orders stores one after another, and publishes by set.

mod checks;

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

use kvferry_core::{
    BatchId, GroupBounds, MemoryBounds, Worker, WorkerEffect, WorkerEvent, WorkerSettings,
};
use kvferry_types::{
    AttachId, DeviceEnd, Edge, EndedCopy, EngineId, Epoch, FragmentPair, GroupId, MemoryId,
    PageList, PerTier, Rank, RequestId, Time, Transfer, TransferId,
};
use stateright::{Model, Property};

use super::harness::{Missing, Network, Past, RANKS, at, canonical, ranks};

const NOW: Time = Time(0);
const ENGINE: EngineId = EngineId([1; 16]);
const RUNNING_MAX: usize = 2;

fn bounds() -> MemoryBounds {
    let group = GroupBounds {
        device_pages: 10_000,
        page_bytes: 4096,
    };
    MemoryBounds {
        groups: vec![group],
    }
}

/// A copy, unique over all epochs.
type CopyId = (Epoch, TransferId);

/// The rule that separates epochs: the real one, or a broken variant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rule {
    /// The real rule.
    Built,
    /// A leader accepts acknowledgements of any epoch.
    AnyAck,
    /// A worker accepts orders of any epoch.
    AnyOrder,
    /// A worker starts every order that arrives in its epoch, also repeated ones.
    RunAgain,
    /// A worker answers a cancel that arrives before its order, and does not remember the cancel.
    ForgetCancel,
    /// A worker attaches while it still copies.
    AttachEarly,
    /// An attach request of one connection is sent again over the next.
    AttachAgain,
    /// A worker states its memory while copies of other memory run.
    StateEarly,
    /// A leader takes copies for ended when a worker states its tiers.
    TiersEnd,
}

struct Epochs {
    rule: Rule,
    /// Number of stores that each leader orders.
    stores: Vec<u64>,
    /// Maximum numbers of broken connections, of repeated registrations, and of dead workers.
    breaks: u8,
    remaps: u8,
    deaths: u8,
    /// Maximum number of changes of the tiers below host memory.
    tiers: u8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Message {
    /// Bound to one connection.
    Attach(Rank, AttachId),
    /// Bound to one connection.
    Admit(Rank, AttachId, TransferId),
    /// Bound to one connection.
    Memory(Rank, MemoryId),
    /// Bound to one connection.
    AdmitMemory(Rank, MemoryId, TransferId),
    Tiers(Rank, MemoryId),
    AdmitTiers(Rank, MemoryId),
    Order(Rank, CopyId),
    Cancel(Rank, CopyId),
    Ack(Rank, CopyId, bool),
}

#[derive(Debug, Clone, PartialEq)]
enum Action {
    Store,
    Late,
    Arrive(Message),
    End(Rank, CopyId, bool),
    Restart,
    /// A leader loses a worker, which has not noticed it yet.
    Break(Rank),
    /// A worker connects to the leader.
    Connect(Rank),
    Remap(Rank),
    /// The tiers of a worker below host memory have changed.
    Tiers(Rank),
    Die(Rank),
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Fill {
    transfer: TransferId,
    missing: Missing,
    failed: bool,
    late: bool,
}

/// A worker's seat, as both sides see it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Seat {
    /// Epoch of the leader to which the worker is connected.
    link: Option<Epoch>,
    /// Whether the leader knows this connection.
    connected: bool,
    /// The last attach that the leader received over this connection.
    attached: Option<AttachId>,
    /// The last statement of the memory that the leader received after that.
    memory: Option<MemoryId>,
    /// Whether the worker's depot is not the one that the leader knows.
    other_depot: bool,
    /// Running copies, which write.
    running: Vec<CopyId>,
    /// The copy whose complete bytes the page holds.
    wrote: Option<CopyId>,
    /// Debug output of the worker.
    worker: Arc<str>,
    past: Past<WorkerEvent>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct State {
    epoch: Epoch,
    last: TransferId,
    fill: Option<Fill>,
    ready: Option<TransferId>,
    places: [Seat; RANKS as usize],
    network: Network<Message>,
    broken: u8,
    remapped: u8,
    dead: u8,
    changed: u8,
    /// Whether a worker started an order of an older leader.
    started_old: bool,
}

impl Seat {
    fn new() -> Self {
        let first = Past::new().then(WorkerEvent::DepotReady);
        let after = RequestId(0);
        let first = first.then(WorkerEvent::Registered {
            engine: ENGINE,
            abandoned_through: after,
            bounds: bounds(),
        });
        let through = RequestId(u64::MAX);
        let past = first.then(WorkerEvent::Written {
            engine: ENGINE,
            through,
        });
        Self {
            link: None,
            connected: false,
            attached: None,
            memory: None,
            other_depot: false,
            running: Vec::new(),
            wrote: None,
            worker: Arc::from(""),
            past,
        }
    }

    /// Hands one more event to the worker. Returns its effects.
    fn step(&mut self, event: WorkerEvent) -> Vec<WorkerEffect> {
        let key = (Arc::clone(&self.worker), format!("{event:?}"));
        self.past = self.past.then(event);
        let stepped = STEPS.with_borrow_mut(|steps| {
            let rebuilt = || rebuild(self.past.events());
            steps.entry(key).or_insert_with(rebuilt).clone()
        });
        self.worker = stepped.0;
        stepped.1
    }

    fn start(&mut self, copy: CopyId) {
        self.running.push(copy);
        self.running.sort_unstable();
        self.wrote = None;
    }
}

/// Debug output of a worker after an event, and its effects.
type Stepped = (Arc<str>, Vec<WorkerEffect>);

thread_local! {
    /// Steps taken before, by debug output and event: workers with equal debug output behave alike.
    static STEPS: RefCell<HashMap<(Arc<str>, String), Stepped>> = RefCell::default();
}

fn rebuild(past: Vec<WorkerEvent>) -> Stepped {
    let mut worker = Worker::new(WorkerSettings::new(RUNNING_MAX));
    let mut effects = Vec::new();
    for event in past {
        effects.clear();
        worker.step(NOW, event, &mut effects);
    }
    (Arc::from(canonical(&format!("{worker:?}"))), effects)
}

/// The order of a copy. Its source page identifies it over all epochs.
fn copy((epoch, transfer): CopyId) -> Transfer {
    let source = u32::try_from(epoch.0 * 100 + transfer.0).expect("small numbers");
    let pair = FragmentPair {
        src: PageList::run(source, 1),
        dst: PageList::run(0, 1),
    };
    let device = DeviceEnd {
        group: GroupId(0),
        engine: ENGINE,
        request: RequestId(1),
        after: RequestId(1),
    };
    Transfer {
        id: transfer,
        edge: Edge::STORE,
        device: Some(device),
        page_bytes: 4096,
        pairs: vec![pair],
        record: None,
        deadline: Time(1),
    }
}

fn id(copy: &Transfer) -> CopyId {
    let source = u64::from(copy.pairs[0].src.0[0].start);
    (Epoch(source / 100), copy.id)
}

impl State {
    fn store(&mut self) {
        self.last.0 += 1;
        self.ready = None;
        self.fill = Some(Fill {
            transfer: self.last,
            missing: Missing::all(),
            failed: false,
            late: false,
        });
        for rank in ranks() {
            let order = Message::Order(rank, (self.epoch, self.last));
            self.network.send(order);
        }
    }

    fn late(&mut self) {
        let fill = self.fill.as_mut().expect("a store under way");
        fill.late = true;
        for rank in fill.missing.iter() {
            let cancel = Message::Cancel(rank, (self.epoch, fill.transfer));
            self.network.send(cancel);
        }
    }

    /// Handles the end of a copy on a rank in the leader. Returns whether this was the first report of it.
    fn ended(&mut self, transfer: TransferId, rank: Rank, complete: bool) -> bool {
        let Some(fill) = self.fill.as_mut().filter(|fill| fill.transfer == transfer) else {
            return false;
        };
        let first_report = fill.missing.remove(rank);
        fill.failed |= first_report && !complete;
        if fill.missing.is_empty() {
            self.ready = (!fill.failed && !fill.late).then_some(transfer);
            self.fill = None;
        }
        first_report
    }

    fn fail_copies_of(&mut self, rank: Rank) {
        if let Some(transfer) = self.fill.as_ref().map(|fill| fill.transfer) {
            self.ended(transfer, rank, false);
        }
    }

    /// Handles an attach in the leader. Returns whether it was new to the leader.
    fn attach(&mut self, rank: Rank, attach: AttachId) -> bool {
        if !self.places[at(rank)].connected || Some(attach) <= self.places[at(rank)].attached {
            return false;
        }
        self.fail_copies_of(rank);
        let place = &mut self.places[at(rank)];
        place.attached = Some(attach);
        place.memory = None;
        if std::mem::take(&mut place.other_depot) {
            self.ready = None;
            // A running fill is discarded when it ends.
            self.fill.iter_mut().for_each(|fill| fill.failed = true);
        }
        self.network.send(Message::Admit(rank, attach, self.last));
        true
    }

    /// Handles a statement of a worker's memory in the leader. Returns whether it was new to the leader.
    fn memory(&mut self, rank: Rank, number: MemoryId) -> bool {
        let place = &self.places[at(rank)];
        if place.attached.is_none() || Some(number) <= place.memory {
            return false;
        }
        self.fail_copies_of(rank);
        self.places[at(rank)].memory = Some(number);
        self.network
            .send(Message::AdmitMemory(rank, number, self.last));
        true
    }

    /// Handles a statement of a worker's tiers in the leader. Returns whether it was new to the leader.
    fn tiers(&mut self, rule: Rule, rank: Rank, number: MemoryId) -> bool {
        let known = self.places[at(rank)].memory;
        if known.is_none_or(|known| number <= known) {
            return false;
        }
        if rule == Rule::TiersEnd {
            self.fail_copies_of(rank);
        }
        self.places[at(rank)].memory = Some(number);
        self.network.send(Message::AdmitTiers(rank, number));
        true
    }

    /// Removes the leader's side of a connection, with the messages that the connection carried.
    fn cut(&mut self, rule: Rule, rank: Rank) {
        let place = &mut self.places[at(rank)];
        place.connected = false;
        place.attached = None;
        place.memory = None;
        self.network.cut(|message| match message {
            Message::Attach(who, _) => *who == rank && rule != Rule::AttachAgain,
            Message::Admit(who, ..) | Message::Memory(who, _) | Message::AdmitMemory(who, ..) => {
                *who == rank
            }
            Message::Tiers(who, _) | Message::AdmitTiers(who, _) => *who == rank,
            _ => false,
        });
    }

    /// Hands an event to a worker, and carries out its effects.
    fn step(&mut self, rule: Rule, rank: Rank, event: WorkerEvent) {
        let place = &mut self.places[at(rank)];
        for effect in place.step(event) {
            match effect {
                WorkerEffect::Attach { attach } => {
                    self.network.send(Message::Attach(rank, attach));
                }
                WorkerEffect::StateMemory { number } => {
                    self.network.send(Message::Memory(rank, number));
                }
                WorkerEffect::StateTiers { number } => {
                    self.network.send(Message::Tiers(rank, number));
                }
                WorkerEffect::Start { copies, .. } => {
                    for copy in copies.iter().map(id) {
                        self.started_old |= Some(copy.0) != place.link;
                        place.start(copy);
                    }
                }
                WorkerEffect::Report { copies, .. } => {
                    for ended in copies {
                        let epoch = place.link.expect("nobody is told without a leader");
                        let ack = Message::Ack(rank, (epoch, ended.transfer), ended.complete);
                        self.network.send(ack);
                    }
                }
                WorkerEffect::ExitProcess => unreachable!("time stands still"),
                _ => {}
            }
        }
        if rule == Rule::AttachEarly && place.link.is_some() && place.attached.is_none() {
            self.network.send(Message::Attach(rank, AttachId(1)));
        }
        if rule == Rule::StateEarly && place.attached.is_some() && !place.running.is_empty() {
            self.network.send(Message::Memory(rank, MemoryId(9)));
        }
    }

    /// Delivers an order or a cancel to a worker.
    fn ordered(&mut self, rule: Rule, message: Message) {
        match message {
            Message::Order(rank, order) => {
                let epoch = match (rule, self.places[at(rank)].link) {
                    (Rule::AnyOrder, Some(epoch)) => epoch,
                    _ => order.0,
                };
                let batch = BatchId(order.1.0);
                let event = WorkerEvent::Ordered {
                    epoch,
                    batch,
                    transfers: vec![copy(order)],
                    arena_pages: PerTier::host(10_000),
                };
                self.step(rule, rank, event);
                let place = &mut self.places[at(rank)];
                let again = rule == Rule::RunAgain && place.link == Some(order.0);
                if again && !place.running.contains(&order) {
                    place.start(order);
                }
            }
            Message::Cancel(rank, (epoch, transfer)) => {
                let place = &self.places[at(rank)];
                let runs = place.running.contains(&(epoch, transfer));
                if rule == Rule::ForgetCancel && !runs && place.link == Some(epoch) {
                    self.network
                        .send(Message::Ack(rank, (epoch, transfer), false));
                    return;
                }
                let batch = BatchId(100 + transfer.0);
                let transfers = vec![transfer];
                let event = WorkerEvent::Cancel {
                    epoch,
                    batch,
                    transfers,
                };
                self.step(rule, rank, event);
            }
            _ => {}
        }
    }

    /// Delivers a message. Returns whether it changed anything.
    fn arrive(&mut self, rule: Rule, message: Message) -> bool {
        match message {
            Message::Attach(rank, attach) => self.attach(rank, attach),
            Message::Memory(rank, number) => self.memory(rank, number),
            Message::Tiers(rank, number) => self.tiers(rule, rank, number),
            Message::Ack(rank, (epoch, transfer), complete) => {
                (epoch == self.epoch || rule == Rule::AnyAck)
                    && self.ended(transfer, rank, complete)
            }
            Message::Admit(rank, attach, after) => {
                let after = Some(after);
                self.changed(rank, |state| {
                    state.step(rule, rank, WorkerEvent::Admitted { attach, after });
                })
            }
            Message::AdmitMemory(rank, number, after) => {
                let after = Some(after);
                self.changed(rank, |state| {
                    let admitted = WorkerEvent::MemoryAdmitted { number, after };
                    state.step(rule, rank, admitted);
                })
            }
            Message::AdmitTiers(rank, number) => self.changed(rank, |state| {
                let known = true;
                state.step(rule, rank, WorkerEvent::TiersAdmitted { number, known });
            }),
            Message::Order(rank, _) | Message::Cancel(rank, _) => {
                self.changed(rank, |state| state.ordered(rule, message))
            }
        }
    }

    fn changed(&mut self, rank: Rank, event: impl FnOnce(&mut Self)) -> bool {
        let before = (self.places[at(rank)].clone(), self.network.clone());
        event(self);
        before != (self.places[at(rank)].clone(), self.network.clone())
    }

    fn end(&mut self, rule: Rule, rank: Rank, copy: CopyId, complete: bool) {
        let place = &mut self.places[at(rank)];
        place.running.retain(|running| *running != copy);
        if complete {
            place.wrote = Some(copy);
        }
        let ended = EndedCopy::new(copy.1, complete);
        self.step(rule, rank, WorkerEvent::CopiesEnded(vec![ended]));
    }

    fn restart(&mut self, rule: Rule) {
        self.epoch.0 += 1;
        self.last = TransferId(0);
        self.fill = None;
        self.ready = None;
        ranks().for_each(|rank| self.cut(rule, rank));
    }

    fn connect(&mut self, rule: Rule, rank: Rank) {
        self.cut(rule, rank);
        let place = &mut self.places[at(rank)];
        place.connected = true;
        place.link = Some(self.epoch);
        self.step(rule, rank, WorkerEvent::LeaderFound(self.epoch));
    }

    fn die(&mut self, rank: Rank) {
        self.dead += 1;
        self.cut(Rule::Built, rank);
        self.fail_copies_of(rank);
        self.places[at(rank)] = Seat::new();
        self.places[at(rank)].other_depot = true;
    }

    fn all_attached(&self) -> bool {
        self.places.iter().all(|place| place.memory.is_some())
    }
}

impl Model for Epochs {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        vec![State {
            epoch: Epoch(1),
            last: TransferId(0),
            fill: None,
            ready: None,
            places: [Seat::new(), Seat::new()],
            network: Network::new(),
            broken: 0,
            remapped: 0,
            dead: 0,
            changed: 0,
            started_old: false,
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        let leader = usize::try_from(state.epoch.0 - 1).expect("a small number");
        if state.all_attached() && state.fill.is_none() && state.last.0 < self.stores[leader] {
            actions.push(Action::Store);
        }
        if state.fill.as_ref().is_some_and(|fill| !fill.late) {
            actions.push(Action::Late);
        }
        if leader + 1 < self.stores.len() {
            actions.push(Action::Restart);
        }
        actions.extend(state.network.messages().map(Action::Arrive));
        for rank in ranks() {
            let place = &state.places[at(rank)];
            for copy in &place.running {
                actions.push(Action::End(rank, *copy, true));
                actions.push(Action::End(rank, *copy, false));
            }
            match place.connected {
                false => actions.push(Action::Connect(rank)),
                true if state.broken < self.breaks => actions.push(Action::Break(rank)),
                true => {}
            }
            if state.remapped < self.remaps {
                actions.push(Action::Remap(rank));
            }
            if state.changed < self.tiers {
                actions.push(Action::Tiers(rank));
            }
            if state.dead < self.deaths {
                actions.push(Action::Die(rank));
            }
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = last.clone();
        match action {
            Action::Store => state.store(),
            Action::Late => state.late(),
            Action::Arrive(message) => return state.arrive(self.rule, message).then_some(state),
            Action::End(rank, copy, complete) => state.end(self.rule, rank, copy, complete),
            Action::Restart => state.restart(self.rule),
            Action::Break(rank) => {
                state.broken += 1;
                state.cut(self.rule, rank);
            }
            Action::Connect(rank) => state.connect(self.rule, rank),
            Action::Remap(rank) => {
                state.remapped += 1;
                let after = RequestId(0);
                let event = WorkerEvent::Registered {
                    engine: ENGINE,
                    abandoned_through: after,
                    bounds: bounds(),
                };
                state.step(self.rule, rank, event);
                let through = RequestId(u64::MAX);
                let event = WorkerEvent::Written {
                    engine: ENGINE,
                    through,
                };
                state.step(self.rule, rank, event);
            }
            Action::Tiers(rank) => {
                state.changed += 1;
                state.step(self.rule, rank, WorkerEvent::TiersChanged);
            }
            Action::Die(rank) => state.die(rank),
        }
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(READABLE, |_, state: &State| {
                let served = state.ready.filter(|_| state.all_attached());
                served.is_none_or(|transfer| {
                    let complete = Some((state.epoch, transfer));
                    state.places.iter().all(|place| place.wrote == complete)
                })
            }),
            Property::always(ONE_WRITER, |_, state: &State| {
                state.places.iter().all(|place| place.running.len() < 2)
            }),
            Property::always(AWAITED, |_, state: &State| {
                ranks().all(|rank| {
                    let place = &state.places[at(rank)];
                    let awaits_rank = |fill: &Fill| fill.missing.contains(rank);
                    let awaited = state.fill.as_ref().filter(|fill| awaits_rank(fill));
                    let awaited = awaited.map(|fill| (state.epoch, fill.transfer));
                    let mut running = place.running.iter();
                    place.attached.is_none() || running.all(|copy| Some(*copy) == awaited)
                })
            }),
            Property::always(ENDED, |_, state: &State| {
                state.network.messages().all(|message| match message {
                    Message::Ack(rank, copy, _) => !state.places[at(rank)].running.contains(&copy),
                    _ => true,
                })
            }),
            Property::always(NOTHING_OLD, |_, state: &State| !state.started_old),
            Property::sometimes(
                "a page is readable after all",
                |model: &Self, state: &State| {
                    state.ready.is_some()
                        && state.all_attached()
                        && state.epoch.0 == model.stores.len() as u64
                        && (state.broken, state.remapped, state.dead, state.changed)
                            == (model.breaks, model.remaps, model.deaths, model.tiers)
                },
            ),
            Property::sometimes(
                "a copy outlives its leader, or what it was for",
                |_, state: &State| {
                    let outlives = |place: &Seat| {
                        let mut running = place.running.iter();
                        running.any(|(epoch, _)| *epoch != state.epoch || place.attached.is_none())
                    };
                    state.places.iter().any(outlives) || state.fill.iter().any(|fill| fill.late)
                },
            ),
        ]
    }
}

const READABLE: &str = "what is readable was written whole by every rank, for this leader";
const ONE_WRITER: &str = "no two copies write one page at a time";
const AWAITED: &str = "what runs on an attached worker is waited for by its leader";
const ENDED: &str = "a copy that was said to have ended does not run";
const NOTHING_OLD: &str = "no worker starts what an older leader ordered";
