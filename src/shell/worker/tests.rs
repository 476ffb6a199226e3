//! The worker's shell on a host that records what is sent. The core's own tests cover the decisions.

mod operators;
mod orders;
mod ranks;
mod tiers;
mod users;

use std::time::Duration;

use super::*;
use crate::{HolderPeers, Registering};
use kvferry_protocol::{
    Abandon, Attached, Cancel, Envelope, FlushTier, Hello, MemoryAnswer, MessageKind,
    ReadInventory, Register, Role, TierFlushed, Unregister, VERSION, Written,
};
use kvferry_types::{
    Attention, DepotId, Edge, GroupGeometry, GroupId, GroupMemory, MemoryGeometry, Nonce, PageRun,
    PeerId, PerTier, Rank, Record, Registration, Replica, Scope, Stored, TierId, TierLayout,
    Transfer,
};

const WORKER: WorkerId = WorkerId {
    replica: Replica(0),
    rank: Rank(1),
};
const DEPOT: DepotId = DepotId(7);
const LINK: LinkId = LinkId(1);
const EPOCH: Epoch = Epoch(3);
const PAGE_BYTES: u64 = 4096;

/// Mapped memory of an engine, as a number that is never reused.
type Mapping = u64;

#[derive(Debug, Default)]
struct Process {
    now: Time,
    requests: u64,
    /// Attach requests, and the connections over which they were sent.
    attaches: Vec<(LinkId, RequestId, Attach)>,
    /// Statements of the memory, with their requests.
    memories: Vec<(RequestId, Memory)>,
    /// Statements of the tiers, with their requests.
    tiers: Vec<(RequestId, Tiers)>,
    to_leader: Vec<(LinkId, RequestId, Message)>,
    to_ranks: Vec<(PeerId, RequestId, Message)>,
    opening: Vec<Registering>,
    /// Why the next memory cannot be opened.
    open_error: Option<ErrorBody>,
    closed: Vec<Mapping>,
    disconnected: Vec<PeerId>,
    problem: String,
    /// Nothing is received from the peers any longer.
    silent: bool,
    /// Processes that have ended.
    ended: Vec<i32>,
    /// Calls of [`WorkerShell::continue_invalidations`] that were requested and have not come.
    slices_to_come: u32,
    /// First page of each slice of a reset. A reset takes two slices.
    unlisted_from: Vec<u32>,
    unlisted_tiers: Vec<TierId>,
    /// The worker has a disk, whose next answers to a reset are these, last one first.
    disk: Option<Vec<Unlisted>>,
    /// Pages that the disk has, and for which it is open.
    disk_pages: u32,
    layout: Option<TierLayout>,
    /// Copies that were started.
    started: Vec<TransferId>,
    /// Copies whose order names what the worker has never had; `None` if there must be none.
    invalid: Option<Vec<TransferId>>,
    /// Copies of probes that were started.
    probes: u32,
    /// Why the next probe cannot start.
    probe_error: Option<String>,
}

impl HolderPeers for Process {
    type Process = i32;

    fn is_live(&self, _: PeerId) -> bool {
        !self.silent
    }

    fn open_process(&mut self, pid: i32) -> Option<i32> {
        Some(pid)
    }

    fn has_ended(&self, process: &i32) -> bool {
        self.ended.contains(process)
    }

    fn disconnect(&mut self, peer: PeerId) {
        self.disconnected.push(peer);
    }
}

impl WorkerHost for Process {
    type Memory = Mapping;

    fn now(&self) -> Time {
        self.now
    }

    fn request_leader(&mut self, link: LinkId, message: Message, _: Duration) -> RequestId {
        self.requests += 1;
        let id = RequestId(self.requests);
        match message {
            Message::Attach(attach) => self.attaches.push((link, id, attach)),
            Message::Memory(memory) => self.memories.push((id, memory)),
            Message::Tiers(tiers) => self.tiers.push((id, tiers)),
            other => panic!("{} is no request to a leader", other.kind().name()),
        }
        id
    }

    fn reply_to_leader(&mut self, link: LinkId, order: RequestId, message: Message) {
        self.to_leader.push((link, order, message));
    }

    fn reply(&mut self, peer: PeerId, request: RequestId, message: Message) {
        self.to_ranks.push((peer, request, message));
    }

    fn open(
        &mut self,
        registering: Registering,
        _: Registration,
        _: bool,
    ) -> Result<(), ErrorBody> {
        if let Some(error) = self.open_error.take() {
            return Err(error);
        }
        self.opening.push(registering);
        Ok(())
    }

    fn discard(&mut self, _: Registration) {}

    fn geometry(&self, _: &Mapping) -> MemoryGeometry {
        GroupGeometry {
            group: GroupId(0),
            engine_page_tokens: 16,
            layers: 1,
            page_bytes: PAGE_BYTES,
            device_pages: 8,
            content_digest: [0; 16],
            layout_fingerprint: [0; 16],
            ..GroupGeometry::default()
        }
        .into()
    }

    fn close(&mut self, _: EngineId, memory: Mapping) {
        self.closed.push(memory);
    }

    fn reply_when_closed(
        &mut self,
        peer: PeerId,
        request: RequestId,
        _: EngineId,
        answer: Message,
    ) {
        self.reply(peer, request, answer);
    }

    fn watch_timeline(&mut self, _: &Mapping, _: EngineId, _: RequestId) -> bool {
        false
    }

    fn written(&mut self, _: &Mapping, _: RequestId) {}

    fn depots(&self) -> PerTier<DepotId> {
        let mut depots = PerTier::host(DEPOT);
        if self.disk.is_some() {
            depots.insert(TierId::Disk, DepotId(DEPOT.0 + 1));
        }
        depots
    }

    fn last_reader(&self, _: TierId) -> Result<Epoch, Fatal> {
        Ok(Epoch(0))
    }

    fn arena_pages(&self, tier: TierId, _: u64) -> u32 {
        match tier {
            TierId::Disk => self.disk_pages,
            _ => 64,
        }
    }

    fn prepare_tiers(&mut self, layout: Option<TierLayout>) {
        self.layout = layout;
    }

    fn tier_layout(&self) -> Option<TierLayout> {
        self.layout
    }

    fn read_inventory(
        &mut self,
        link: LinkId,
        order: RequestId,
        _: Epoch,
        read: ReadInventory,
    ) -> Result<(), Fatal> {
        let part = kvferry_protocol::Inventory::new(&read, None, &[]);
        self.reply_to_leader(link, order, Message::Inventory(part));
        Ok(())
    }

    fn flush_tier(&mut self, link: LinkId, order: RequestId, flush: FlushTier) {
        let flush = flush.flush;
        self.reply_to_leader(link, order, Message::TierFlushed(TierFlushed { flush }));
    }

    fn unlist(&mut self, _: TierId, _: PageRun) -> Result<(), Fatal> {
        Ok(())
    }

    fn unlist_scope(
        &mut self,
        tier: TierId,
        _: &Scope,
        _: Stored,
        from: u32,
    ) -> Result<Unlisted, Fatal> {
        self.unlisted_tiers.push(tier);
        if let Some(answers) = self.disk.as_mut().filter(|_| tier == TierId::Disk) {
            return Ok(answers.pop().unwrap_or(Unlisted::Done));
        }
        if tier == TierId::Host {
            self.unlisted_from.push(from);
        }
        let first = from == 0 && tier == TierId::Host;
        Ok(if first {
            Unlisted::Next(32)
        } else {
            Unlisted::Done
        })
    }

    fn invalidate_later(&mut self) -> Result<(), Fatal> {
        self.slices_to_come += 1;
        Ok(())
    }

    fn list(&mut self, _: TierId, _: &Record) {}

    fn start(
        &mut self,
        _: Edge,
        copies: Vec<(Transfer, Time)>,
        _: Option<&Mapping>,
    ) -> Result<(), Fatal> {
        self.started.extend(copies.iter().map(|(copy, _)| copy.id));
        Ok(())
    }

    fn stop(&mut self, _: TransferId) -> Result<(), Fatal> {
        Ok(())
    }

    fn invalid_copy(&mut self, transfer: TransferId, problem: &str) {
        match &mut self.invalid {
            Some(invalid) => invalid.push(transfer),
            None => panic!("{transfer}: {problem}"),
        }
    }

    fn probe(&mut self) -> Result<(), String> {
        self.probes += 1;
        match self.probe_error.take() {
            Some(why) => Err(why),
            None => Ok(()),
        }
    }

    fn report_problem(&mut self, why: &str) {
        why.clone_into(&mut self.problem);
    }
}

struct World {
    shell: WorkerShell<i32, Mapping>,
    process: Process,
    mappings: u64,
}

fn envelope(id: u64, message: Message) -> Envelope {
    Envelope {
        version: VERSION,
        correlation: RequestId(id),
        deadline_ms: 1000,
        epoch: EPOCH,
        message,
    }
}

fn registration() -> Registration {
    Registration {
        groups: vec![GroupMemory {
            attention: Attention::Full,
            window_tokens: 0,
            eagle: false,
            engine_page_tokens: 16,
            device_pages: 8,
            layers: 1,
            tensors: Vec::new(),
        }],
        hash_tokens: 0,
        hit_tokens: 0,
        content: b"test".to_vec(),
        rank: WORKER.rank,
        tp_size: 2,
        shard: 1,
        allocations: Vec::new(),
        nonce: Nonce {
            allocation: 0,
            offset_bytes: 0,
            bytes: Vec::new(),
        },
        proofs: Vec::new(),
        device_uuid: None,
        timeline: None,
    }
}

impl World {
    /// A worker with a depot that has attached to its leader.
    fn new() -> Self {
        let settings = WorkerSettings::new(4);
        let mut world = Self {
            shell: WorkerShell::new(WORKER, Sharding::each(2), settings),
            process: Process::default(),
            mappings: 0,
        };
        world.run(|shell, process| shell.depot_ready(process));
        world.run(|shell, process| shell.leader_found(process, EPOCH, LINK));
        world.attach();
        world
    }

    fn run(
        &mut self,
        call: impl FnOnce(&mut WorkerShell<i32, Mapping>, &mut Process) -> Result<(), Fatal>,
    ) {
        call(&mut self.shell, &mut self.process).expect("the worker goes on");
    }

    fn connect(&mut self, peer: u64, engine: u8, pid: i32) {
        self.connect_as(peer, engine, WORKER.rank.0, pid);
    }

    fn connect_as(&mut self, peer: u64, engine: u8, rank: u16, pid: i32) {
        let hello = Hello {
            engine: [engine; 16],
            rank,
            ..Hello::new(Role::Rank, String::new())
        };
        self.run(|shell, process| {
            shell.opened(process, PeerId(peer), &hello, Some(pid));
            Ok(())
        });
    }

    fn send(&mut self, peer: u64, id: u64, message: Message) {
        let envelope = envelope(id, message);
        self.run(|shell, process| shell.message(process, PeerId(peer), envelope));
    }

    fn send_registration(&mut self, peer: u64, id: u64, engine: u8, registration: Registration) {
        let register = Register {
            abandoned_through: 0,
            engine: [engine; 16],
            registration,
            check_only: false,
        };
        self.send(peer, id, Message::Register(register));
    }

    /// Maps everything that was registered, in order.
    fn open(&mut self) {
        for registering in std::mem::take(&mut self.process.opening) {
            self.mappings += 1;
            let memory = Ok(self.mappings);
            self.run(|shell, process| shell.mapped(process, registering, memory));
        }
    }

    fn register(&mut self, peer: u64, id: u64, engine: u8) {
        self.send_registration(peer, id, engine, registration());
        self.open();
    }

    /// Answers the last attach request, and the statement that there is no memory, if that follows.
    fn attach(&mut self) {
        let (_, id, attach) = self.process.attaches.last().cloned().expect("an attach");
        let attached = Message::Attached(Attached {
            attach: attach.attach,
            after: 0,
        });
        self.run(|shell, process| shell.leader_answered(process, id, Ok(attached)));
        let stated = self.process.memories.last();
        if stated.is_some_and(|(_, memory)| memory.memory.is_none()) {
            self.answer_memory(Ok(()));
        }
    }

    /// Answers the last statement of the memory.
    fn answer_memory(&mut self, answer: Result<(), ErrorBody>) {
        let (id, memory) = self.process.memories.last().cloned().expect("a statement");
        let admitted = Message::MemoryAnswer(MemoryAnswer {
            number: memory.number,
            after: 0,
        });
        let answer = answer.map(|()| admitted);
        self.run(|shell, process| shell.leader_answered(process, id, answer));
    }

    /// Returns the messages sent to the ranks since the last call.
    fn received(&mut self) -> Vec<(u64, u64, MessageKind, Option<ErrorCode>)> {
        let sent = std::mem::take(&mut self.process.to_ranks);
        let sent = sent.into_iter().map(|(peer, request, message)| {
            let code = match &message {
                Message::Error(error) => Some(error.code()),
                _ => None,
            };
            (peer.0, request.0, message.kind(), code)
        });
        sent.collect()
    }
}

#[test]
fn a_temporary_refusal_of_the_leader_refuses_no_rank() {
    for code in [
        ErrorCode::NotReady,
        ErrorCode::Busy,
        ErrorCode::Deadline,
        ErrorCode::StaleEpoch,
    ] {
        let mut world = World::new();
        world.connect(5, 1, 50);
        world.register(5, 1, 1);
        world.answer_memory(Err(ErrorBody::new(code, "not now")));
        assert!(
            world.received().is_empty(),
            "{code:?} does not concern the memory"
        );
        assert!(world.process.closed.is_empty());
        let sent = world.process.memories.len();
        world.process.now = Time(0) + Duration::from_secs(1);
        world.run(|shell, process| shell.tick(process));
        assert_eq!(world.process.memories.len(), sent + 1, "states it again");
        world.answer_memory(Ok(()));
        assert_eq!(world.received(), [(5, 1, MessageKind::Registered, None)]);
    }
}

#[test]
fn a_refusal_by_the_leader_is_reported_to_the_rank() {
    for code in [ErrorCode::Invalid, ErrorCode::RankDisagrees] {
        let mut world = World::new();
        world.connect(5, 1, 50);
        world.register(5, 1, 1);
        let refused = ErrorBody {
            over: true,
            ..ErrorBody::new(code, "another model")
        };
        world.answer_memory(Err(refused));
        let quoted = Message::Error(ErrorBody::new(code, "another model"));
        assert_eq!(world.process.to_ranks, [(PeerId(5), RequestId(1), quoted)]);
        assert_eq!(world.process.closed, [1], "the memory is given back");
        assert_eq!(world.process.problem, "another model");
    }
}

#[test]
fn a_rank_whose_registered_memory_is_refused_later_is_disconnected() {
    let mut world = World::new();
    world.connect(5, 1, 50);
    world.register(5, 1, 1);
    world.answer_memory(Ok(()));
    world.received();
    world.run(|shell, process| shell.leader_lost(process));
    world.run(|shell, process| shell.leader_found(process, Epoch(4), LinkId(2)));
    world.attach();
    let refused = ErrorBody::new(ErrorCode::RankDisagrees, "another model");
    world.answer_memory(Err(refused));
    assert_eq!(world.received(), []);
    assert_eq!(world.process.disconnected, [PeerId(5)]);
}

#[test]
fn a_second_registration_over_one_connection_maps_the_memory_again() {
    let mut world = World::new();
    world.connect(5, 1, 50);
    world.register(5, 1, 1);
    let first = world.process.memories.len();
    world.register(5, 2, 1);
    let refused = (5, 1, MessageKind::Error, Some(ErrorCode::Invalid));
    assert_eq!(world.received(), [refused], "the first one is over");
    assert_eq!(world.process.closed, [1]);
    assert!(
        world.process.memories.len() > first,
        "the leader agrees anew"
    );
    world.answer_memory(Ok(()));
    assert_eq!(world.received(), [(5, 2, MessageKind::Registered, None)]);
}

#[test]
fn the_seat_of_a_live_process_is_kept() {
    let mut world = World::new();
    world.connect(5, 1, 50);
    world.register(5, 1, 1);
    world.answer_memory(Ok(()));
    world.received();
    world.connect(6, 2, 60);
    world.send_registration(6, 1, 2, registration());
    let not_ready = (6, 1, MessageKind::Error, Some(ErrorCode::NotReady));
    assert_eq!(world.received(), [not_ready]);
    assert!(world.process.opening.is_empty());
    // Process 70 may not abandon requests of that engine either.
    world.connect(7, 1, 70);
    let abandon = Message::Abandon(Abandon { requests: vec![4] });
    world.send(7, 2, abandon);
    let not_ready = (7, 2, MessageKind::Error, Some(ErrorCode::NotReady));
    assert_eq!(world.received(), [not_ready]);
    world.process.ended.push(50);
    world.register(6, 3, 2);
    world.answer_memory(Ok(()));
    assert_eq!(world.received(), [(6, 3, MessageKind::Registered, None)]);
}

#[test]
fn memory_that_opens_after_its_rank_has_left_is_closed() {
    let mut world = World::new();
    world.connect(5, 1, 50);
    world.send_registration(5, 1, 1, registration());
    world.run(|shell, process| shell.closed(process, PeerId(5)));
    world.open();
    assert_eq!(world.process.closed, [1]);
    // A rank that unregisters while its memory is being opened is refused until that has ended.
    world.connect(6, 1, 60);
    world.received();
    world.send_registration(6, 1, 1, registration());
    world.send(6, 2, Message::Unregister(Unregister {}));
    let not_ready = (6, 2, MessageKind::Error, Some(ErrorCode::NotReady));
    assert_eq!(world.received(), [not_ready]);
    world.open();
    assert_eq!(world.process.closed, [1, 2]);
    world.received();
    world.send(6, 3, Message::Unregister(Unregister {}));
    assert_eq!(world.received(), [(6, 3, MessageKind::Unregistered, None)]);
}

#[test]
fn a_registration_for_another_rank_or_shard_is_refused_unopened() {
    let wrong: [fn(&mut Registration); 3] = [
        |registration| registration.rank = Rank(0),
        |registration| registration.tp_size = 4,
        |registration| registration.shard = 0,
    ];
    for change in wrong {
        let mut world = World::new();
        world.connect(5, 1, 50);
        let mut registration = registration();
        change(&mut registration);
        world.send_registration(5, 1, 1, registration);
        let invalid = (5, 1, MessageKind::Error, Some(ErrorCode::Invalid));
        assert_eq!(world.received(), [invalid]);
        assert!(world.process.opening.is_empty());
        assert!(world.process.problem.starts_with("registration."));
    }
}

#[test]
fn pages_are_reported_written_by_the_rank_whose_memory_is_registered() {
    let mut world = World::new();
    world.connect(5, 1, 50);
    let written = |timeline| {
        Message::Written(Written {
            through: 9,
            timeline,
        })
    };
    world.send(5, 1, written(false));
    world.register(5, 2, 1);
    world.answer_memory(Ok(()));
    world.send(5, 3, written(false));
    world.send(5, 4, written(true));
    let invalid = Some(ErrorCode::Invalid);
    assert_eq!(
        world.received(),
        [
            (5, 1, MessageKind::Error, invalid),
            (5, 2, MessageKind::Registered, None),
            (5, 3, MessageKind::WrittenAnswer, None),
            (5, 4, MessageKind::Error, invalid),
        ]
    );
}

#[test]
fn a_refused_attach_refuses_a_rank_that_has_registered() {
    let mut world = World::new();
    world.run(|shell, process| shell.leader_lost(process));
    world.run(|shell, process| shell.leader_found(process, EPOCH, LinkId(2)));
    world.connect(5, 1, 50);
    world.register(5, 1, 1);
    let (_, id, _) = world.process.attaches.last().cloned().expect("an attach");
    let refused = || Err(ErrorBody::new(ErrorCode::Invalid, "other settings"));
    world.run(|shell, process| shell.leader_answered(process, id, refused()));
    let invalid = (5, 1, MessageKind::Error, Some(ErrorCode::Invalid));
    assert_eq!(world.received(), [invalid]);
    assert_eq!(world.process.closed, [1]);
    // The next registration asks the leader again.
    world.register(5, 2, 1);
    world.attach();
    world.answer_memory(Ok(()));
    assert_eq!(world.received(), [(5, 2, MessageKind::Registered, None)]);
}

#[test]
fn answers_over_an_older_connection_are_ignored() {
    let mut world = World::new();
    world.connect(5, 1, 50);
    world.register(5, 1, 1);
    let (_, old_attach, attach) = world.process.attaches.last().cloned().expect("an attach");
    let (old_memory, memory) = world.process.memories.last().cloned().expect("a statement");
    let stated = world.process.memories.len();
    world.run(|shell, process| shell.leader_lost(process));
    world.run(|shell, process| shell.leader_found(process, EPOCH, LinkId(2)));
    let late = [
        (
            old_attach,
            Message::Attached(Attached {
                attach: attach.attach,
                after: 0,
            }),
        ),
        (
            old_memory,
            Message::MemoryAnswer(MemoryAnswer {
                number: memory.number,
                after: 0,
            }),
        ),
    ];
    for (id, answer) in late {
        world.run(|shell, process| shell.leader_answered(process, id, Ok(answer)));
    }
    assert_eq!(world.process.memories.len(), stated, "not attached");
    assert_eq!(
        world.received(),
        [],
        "only answers over this connection count"
    );
    world.attach();
    world.answer_memory(Ok(()));
    assert_eq!(world.received(), [(5, 1, MessageKind::Registered, None)]);
}
