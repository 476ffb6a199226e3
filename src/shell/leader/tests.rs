//! The leader's shell on a host that records what is sent: seats, fencing and status. The core's own tests cover the
//! decisions.

mod access;
mod batches;
mod operators;
mod readers;
mod supervisors;

use std::sync::Arc;

use super::*;
use crate::HolderPeers;
use kvferry_core::AnchorKey;
use kvferry_protocol::{
    Attach, AttachDepot, Ended, Hello, Inventory, Lookup, Memory, PartBody, RankStatus, Reset,
    ResetPages, Role, StatedMemory, Status, Store, TierPages, VERSION,
};
use kvferry_types::{
    EndedCopy, GroupGeometry, GroupId, PageHashes, PageList, Rank, Ratio, Replica, ResetScope,
    Sharding, SlotId, TransferId,
};

const EPOCH: Epoch = Epoch(3);
const DEPOT: [u8; 16] = [7; 16];
const ENGINE: [u8; 16] = [1; 16];

/// The worker's first connection and process, and those of the process that claims its seat.
const WORKER: (u64, i32) = (5, 50);
const NEWCOMER: (u64, i32) = (6, 60);

#[derive(Debug, Default)]
struct Process {
    now: Time,
    /// Peers from which nothing is received any longer.
    silent: Vec<PeerId>,
    ended: Vec<i32>,
    /// Process ids that the system does not show.
    unseen: Vec<i32>,
    own: Option<i32>,
    /// Requests without an answer.
    open: Vec<(PeerId, RequestId)>,
    supervised: bool,
    replies: Vec<(u64, Message)>,
    orders: Vec<(u64, Message)>,
    disconnected: Vec<PeerId>,
    end_requests: Vec<(WorkerId, Option<i32>)>,
    killed: Vec<(WorkerId, i32)>,
    events: Vec<LeaderEvent>,
}

impl HolderPeers for Process {
    type Process = i32;

    fn is_live(&self, peer: PeerId) -> bool {
        !self.silent.contains(&peer)
    }

    fn open_process(&mut self, pid: i32) -> Option<i32> {
        (!self.unseen.contains(&pid)).then_some(pid)
    }

    fn has_ended(&self, process: &i32) -> bool {
        self.ended.contains(process)
    }

    fn disconnect(&mut self, peer: PeerId) {
        self.disconnected.push(peer);
    }
}

impl LeaderHost for Process {
    fn now(&self) -> Time {
        self.now
    }

    fn is_open(&self, peer: PeerId, request: RequestId) -> bool {
        self.open.contains(&(peer, request))
    }

    fn reply(&mut self, peer: PeerId, _: RequestId, message: Message) {
        self.replies.push((peer.0, message));
    }

    fn order(
        &mut self,
        peers: &[PeerId],
        _: RequestId,
        message: Message,
        _: Duration,
    ) -> Vec<PeerId> {
        let orders = peers.iter().map(|peer| (peer.0, message.clone()));
        self.orders.extend(orders);
        Vec::new()
    }

    fn watch(&mut self, pid: i32) -> Option<i32> {
        self.open_process(pid)
    }

    fn is_own(&self, pid: i32) -> bool {
        self.own == Some(pid)
    }

    fn request_end(&mut self, worker: WorkerId, pid: Option<i32>) -> bool {
        self.end_requests.push((worker, pid));
        self.supervised
    }

    fn kill(&mut self, worker: WorkerId, process: &i32) {
        self.killed.push((worker, *process));
    }

    fn raise_epoch(&mut self, _: Epoch) -> Result<(), HostError> {
        Ok(())
    }

    fn lookup_time(&self) -> Duration {
        Duration::from_nanos(70)
    }

    fn before_step(&mut self, _: &Leader, event: &LeaderEvent) {
        self.events.push(event.clone());
    }

    fn after_step(&mut self, _: &Leader, _: &[LeaderEffect]) {}
}

const fn worker(rank: u16) -> WorkerId {
    WorkerId {
        replica: Replica(0),
        rank: Rank(rank),
    }
}

fn named(role: Role, engine: [u8; 16], rank: u16) -> Hello {
    Hello {
        engine,
        rank,
        ..Hello::new(role, String::new())
    }
}

/// A lookup of two pages.
fn lookup() -> Message {
    Message::Lookup(Lookup {
        limit_pages: None,
        slot: 4,
        namespace: Vec::new(),
        hash_bytes: 16,
        hashes: (0..32).collect(),
        have_pages: 0,
    })
}

struct World {
    shell: LeaderShell<i32>,
    process: Process,
}

impl World {
    fn new(ranks: u16) -> Self {
        let ratio = Ratio::new(4).expect("in bounds");
        let mut settings = LeaderSettings::new(EPOCH, ranks, ratio, AnchorKey::new([1; 32]));
        settings.sharding = Sharding::each(ranks);
        Self {
            shell: LeaderShell::new(settings, [9; 8]),
            process: Process::default(),
        }
    }

    /// A leader of one rank whose worker has connected.
    fn with_worker() -> Self {
        let mut world = Self::new(1);
        world.connect(WORKER, &named(Role::Worker, [0; 16], 0));
        world
    }

    /// The same after the worker has attached with an engine's memory: the leader has requested its inventory.
    fn reading() -> Self {
        let mut world = Self::with_worker();
        world.attach(WORKER.0, Some(stated_memory()));
        world
    }

    /// The same after the inventory was read, with a connected engine.
    fn serving() -> Self {
        let mut world = Self::reading();
        let read = world
            .process
            .orders
            .drain(..)
            .find_map(|(_, order)| match order {
                Message::ReadInventory(read) => Some(read),
                _ => None,
            });
        let part = Inventory::new(&read.expect("an inventory request"), None, &[]);
        world.send(WORKER.0, Message::Inventory(part));
        world.connect((1, 10), &named(Role::Engine, ENGINE, 0));
        assert!(world.shell.core().is_ready());
        world
    }

    fn connect(&mut self, (peer, pid): (u64, i32), hello: &Hello) {
        self.shell
            .opened(&mut self.process, PeerId(peer), hello, Some(pid));
    }

    fn close(&mut self, peer: u64) {
        self.shell.closed(&mut self.process, PeerId(peer));
    }

    fn send(&mut self, peer: u64, message: Message) {
        self.request(peer, 1, message);
    }

    fn request(&mut self, peer: u64, id: u64, message: Message) {
        let envelope = Envelope {
            version: VERSION,
            correlation: RequestId(id),
            deadline_ms: 1000,
            epoch: EPOCH,
            message,
        };
        self.shell
            .message(&mut self.process, PeerId(peer), envelope);
    }

    fn attach(&mut self, peer: u64, memory: Option<StatedMemory>) {
        let ranks = self.shell.settings.sharding.ranks();
        let attach = Attach {
            replica: 0,
            rank: 0,
            ranks,
            kv_shards: ranks,
            attach: 1,
            depots: vec![AttachDepot {
                tier: 2,
                depot: DEPOT,
                epoch: 0,
            }],
        };
        self.send(peer, Message::Attach(attach));
        let attached = self.process.replies.pop();
        assert!(
            matches!(attached, Some((to, Message::Attached(_))) if to == peer),
            "{attached:?}"
        );
        self.send(peer, Message::Memory(Memory { number: 1, memory }));
        let admitted = self.process.replies.pop();
        assert!(
            matches!(admitted, Some((to, Message::MemoryAnswer(_))) if to == peer),
            "{admitted:?}"
        );
    }

    /// Stores two pages, whose copy the worker owes from then on.
    fn store(&mut self) {
        self.request(1, 1, lookup());
        let store = Store {
            slot: 4,
            parts: vec![PartBody {
                group: 0,
                first_page: 0,
                pages: PageList::run(2, 2).into(),
                count: 2,
                priority: None,
            }],
            hash_bytes: 0,
            more_hashes: Vec::new(),
            more_from: 0,
            after: 0,
        };
        self.request(1, 2, Message::Store(store));
        let ordered = self.process.orders.last();
        assert!(
            matches!(ordered, Some((_, Message::Transfer(_)))),
            "{ordered:?}"
        );
    }

    fn is_holder(&self, peer: u64) -> bool {
        let role = self.shell.roles.get(&PeerId(peer));
        role == Some(&PeerRole::Worker(worker(0)))
    }

    fn status(&mut self) -> kvferry_protocol::StatusAnswer {
        self.shell
            .roles
            .insert(PeerId(99), PeerRole::Admin(EngineId([99; 16]), None));
        self.send(99, Message::Status(Status { check: false }));
        match self.process.replies.pop() {
            Some((99, Message::StatusAnswer(answer))) => answer,
            other => panic!("no status: {other:?}"),
        }
    }

    /// True if the last step of the core was for this event.
    fn last_event(&self, expected: impl Fn(&LeaderEvent) -> bool) -> bool {
        self.process.events.last().is_some_and(expected)
    }
}

fn stated_memory() -> StatedMemory {
    StatedMemory {
        engine: ENGINE,
        geometry: GroupGeometry {
            group: GroupId(0),
            engine_page_tokens: 16,
            layers: 1,
            page_bytes: 4096,
            device_pages: 8,
            content_digest: [0; 16],
            layout_fingerprint: [0; 16],
            ..GroupGeometry::default()
        }
        .into(),
        arena_pages: vec![TierPages { tier: 2, pages: 64 }],
    }
}

#[test]
fn a_silent_worker_keeps_its_seat_while_it_may_write() {
    let mut stored = World::serving();
    stored.store();
    let mut without_memory = World::with_worker();
    without_memory.attach(WORKER.0, None);
    for (mut world, may_write) in [
        // Copies that an older leader ordered may be in flight.
        (World::with_worker(), true),
        (without_memory, false),
        (World::reading(), true),
        (World::serving(), false),
        (stored, true),
    ] {
        world.process.silent.push(PeerId(WORKER.0));
        world.connect(NEWCOMER, &named(Role::Worker, [0; 16], 0));
        assert_eq!(world.is_holder(NEWCOMER.0), !may_write);
        assert_eq!(world.is_holder(WORKER.0), may_write);
        // The end of the process proves that it writes no longer.
        world.process.ended.push(WORKER.1);
        world.send(NEWCOMER.0, Message::Readiness(Readiness::default()));
        assert!(world.is_holder(NEWCOMER.0));
    }
}

#[test]
fn a_worker_that_reconnects_gets_its_seat_and_its_old_connection_closes_without_effect() {
    let mut world = World::serving();
    world.connect((8, WORKER.1), &named(Role::Worker, [0; 16], 0));
    assert!(world.is_holder(8));
    assert_eq!(world.process.disconnected, [PeerId(WORKER.0)]);
    world.attach(8, Some(stated_memory()));
    let steps = world.process.events.len();
    world.close(WORKER.0);
    assert_eq!(world.process.events.len(), steps);
    assert!(world.shell.core().is_attached(worker(0)));
    world.connect((3, 10), &named(Role::Engine, ENGINE, 0));
    let steps = world.process.events.len();
    world.close(1);
    assert_eq!(world.process.events.len(), steps);
    assert!(world.shell.engines.contains_key(&EngineId(ENGINE)));
}

#[test]
fn a_few_peers_wait_for_a_seat_and_the_oldest_of_more_are_closed() {
    let mut world = World::serving();
    for peer in 20..30 {
        world.connect((peer, 100), &named(Role::Worker, [0; 16], 0));
    }
    let closed: Vec<u64> = world
        .process
        .disconnected
        .iter()
        .map(|peer| peer.0)
        .collect();
    assert_eq!(closed, [20, 21, 22, 23, 24, 25]);
    assert!(world.is_holder(WORKER.0));
    // One that still waits gets the seat.
    world.process.ended.push(WORKER.1);
    world.send(29, Message::Readiness(Readiness::default()));
    assert!(world.is_holder(29));
}

#[test]
fn an_older_connection_does_not_take_the_seat_from_a_newer_one_of_its_process() {
    let mut world = World::serving();
    let engine = named(Role::Engine, ENGINE, 0);
    let worker = named(Role::Worker, [0; 16], 0);
    for (hello, holder, request) in [
        (&engine, (1, 10), lookup()),
        (&worker, WORKER, Message::Readiness(Readiness::default())),
    ] {
        let (older, newer, other) = (holder.0 + 40, holder.0 + 50, holder.0 + 60);
        for (peer, pid) in [(older, 200), (newer, 200), (other, 201)] {
            world.connect((peer, pid), hello);
        }
        world.process.disconnected.clear();
        world.process.ended.push(holder.1);
        // What the process had sent over its older connection is read after a request of the newer one.
        for peer in [newer, older] {
            world.request(peer, 7, request.clone());
        }
        let role = |peer| world.shell.roles.get(&PeerId(peer));
        assert!(
            matches!(role(newer), Some(PeerRole::Engine(_) | PeerRole::Worker(_))),
            "{hello:?}"
        );
        assert_eq!(role(older), None);
        assert!(matches!(role(other), Some(PeerRole::Waiting(..))));
        let closed = [PeerId(older), PeerId(holder.0)];
        for peer in &world.process.disconnected {
            assert!(closed.contains(peer), "{peer:?}");
        }
        assert!(world.process.disconnected.contains(&PeerId(older)));
        let refused = world.process.replies.pop();
        assert!(
            matches!(&refused, Some((to, Message::Error(error)))
                if *to == older && error.code() == ErrorCode::NotReady),
            "{refused:?}"
        );
    }
}

#[test]
fn another_process_with_the_name_of_an_engine_gets_none_of_the_answers_of_the_earlier_one() {
    let mut world = World::serving();
    world.store();
    let lookup = |slot| {
        Message::Lookup(Lookup {
            limit_pages: None,
            slot,
            namespace: Vec::new(),
            hash_bytes: 16,
            hashes: (0..32).collect(),
            have_pages: 0,
        })
    };
    let answer = |world: &mut World, peer, id, slot| {
        world.request(peer, id, lookup(slot));
        world.process.replies.pop().map(|(_, message)| message)
    };
    // The same process, over another connection: the same answer.
    world.close(1);
    world.connect((11, 10), &named(Role::Engine, ENGINE, 0));
    let again = answer(&mut world, 11, 1, 4);
    assert!(matches!(again, Some(Message::LookupAnswer(_))), "{again:?}");
    world.close(11);
    world.connect((12, 77), &named(Role::Engine, ENGINE, 0));
    // Request 1 was answered, request 2 is in progress.
    for id in [1, 2] {
        let stale = answer(&mut world, 12, id, 4);
        let is_stale = |error: &ErrorBody| error.code() == ErrorCode::StaleRequest;
        assert!(
            matches!(&stale, Some(Message::Error(error)) if is_stale(error)),
            "{stale:?}"
        );
    }
    assert_eq!(
        world.status().slots,
        0,
        "those of the earlier process are finished"
    );
    let found = answer(&mut world, 12, 3, 4);
    assert!(matches!(found, Some(Message::LookupAnswer(_))), "{found:?}");
    assert_eq!(
        world.shell.processes.len(),
        1,
        "the last process of each engine"
    );
}

#[test]
fn a_closed_connection_ends_what_the_peer_had() {
    let mut world = World::serving();
    world.close(WORKER.0);
    let lost =
        |event: &LeaderEvent| matches!(event, LeaderEvent::WorkerLost(id) if *id == worker(0));
    assert!(world.last_event(lost));
    assert!(!world.shell.core().is_attached(worker(0)));
    world.close(1);
    let closed = |event: &LeaderEvent| matches!(event, LeaderEvent::EngineClosed(EngineId(ENGINE)));
    assert!(world.last_event(closed));
    assert!(world.shell.engines.is_empty());
    // A peer that waits for a seat has none to lose.
    let mut world = World::with_worker();
    world.connect(NEWCOMER, &named(Role::Worker, [0; 16], 0));
    let steps = world.process.events.len();
    world.close(NEWCOMER.0);
    assert_eq!(world.process.events.len(), steps);
    assert!(world.is_holder(WORKER.0));
}

#[test]
fn the_process_of_a_seat_is_known_after_its_connection_broke_and_that_of_no_seat_is_forgotten() {
    let mut world = World::new(2);
    for (peer, rank) in [(5, 0), (6, 1), (7, 2)] {
        world.connect(
            (peer, 10 * rank),
            &named(Role::Worker, [0; 16], rank as u16),
        );
        world.close(peer);
    }
    let known: Vec<WorkerId> = world.shell.workers.keys().copied().collect();
    assert_eq!(known, [worker(0), worker(1)]);
    world.shell.fence(&mut world.process, worker(1));
    assert_eq!(world.process.killed, [(worker(1), 10)]);
}

#[test]
fn a_worker_is_ended_by_its_supervisor_first_and_killed_if_it_still_lives() {
    let mut world = World::with_worker();
    world.process.supervised = true;
    world.shell.fence(&mut world.process, worker(0));
    assert!(world.process.killed.is_empty());
    world.shell.fence(&mut world.process, worker(0));
    assert_eq!(world.process.end_requests, [(worker(0), Some(50)); 2]);
    assert_eq!(world.process.killed, [(worker(0), 50)]);

    let mut world = World::with_worker();
    world.process.own = Some(WORKER.1);
    world.shell.fence(&mut world.process, worker(0));
    assert!(world.process.killed.is_empty(), "the leader's own process");
    assert_eq!(world.process.disconnected, [PeerId(WORKER.0)]);

    let mut world = World::new(1);
    world.process.unseen.push(WORKER.1);
    world.connect(WORKER, &named(Role::Worker, [0; 16], 0));
    world.shell.fence(&mut world.process, worker(0));
    assert!(world.process.killed.is_empty() && world.process.disconnected.is_empty());
}

#[test]
fn the_end_of_a_process_is_that_of_its_worker() {
    let mut world = World::serving();
    let steps = world.process.events.len();
    world.shell.worker_exited(&mut world.process, NEWCOMER.1);
    assert_eq!(world.process.events.len(), steps);
    world.shell.worker_exited(&mut world.process, WORKER.1);
    let dead =
        |event: &LeaderEvent| matches!(event, LeaderEvent::WorkerDead(id) if *id == worker(0));
    assert!(world.last_event(dead));
    assert_eq!(world.process.disconnected, [PeerId(WORKER.0)]);
    assert!(world.shell.workers.is_empty() && !world.is_holder(WORKER.0));
}

/// The first byte and the rest of the half of a name that is no secret.
fn admin(kind: u8, rest: [u8; 7]) -> EngineId {
    let mut name = [9; 16];
    name[8] = kind;
    name[9..].copy_from_slice(&rest);
    EngineId(name)
}

fn reset() -> Message {
    Message::Reset(Reset {
        which: ResetPages::All,
        tier: 0,
        namespace: None,
        hash_bytes: 0,
        hashes: Vec::new(),
    })
}

#[test]
fn an_admin_session_has_a_name_of_its_own() {
    let mut world = World::serving();
    for (peer, identity) in [(20, [0; 16]), (21, [0; 16]), (22, ENGINE), (23, [4; 16])] {
        world.connect((peer, 5), &named(Role::Admin, identity, 0));
        world.send(peer, reset());
    }
    let names: Vec<EngineId> = world.shell.engines.keys().copied().collect();
    let counted = |number| admin(0, [0, 0, 0, 0, 0, 0, number]);
    let identified = |identity: u8| admin(1, [identity ^ identity.rotate_left(3); 7]);
    let all = [
        EngineId(ENGINE),
        counted(1),
        counted(2),
        identified(1),
        identified(4),
    ];
    assert_eq!(names, all);
    assert_eq!(world.shell.engines[&EngineId(ENGINE)].peer, PeerId(1));
    world.close(22);
    assert!(world.shell.engines.contains_key(&EngineId(ENGINE)));
}

/// Two tools with one identity: the second has the name of the first, whose connection is closed at once, whether it has
/// sent a request or not. Neither the end of the first nor its reset takes the answer of the second.
#[test]
fn a_second_session_of_one_identity_closes_the_first_before_any_request() {
    let mut world = World::serving();
    world.connect((20, 5), &named(Role::Admin, [4; 16], 0));
    world.connect((21, 5), &named(Role::Admin, [4; 16], 0));
    assert_eq!(world.process.disconnected, [PeerId(20)]);
    world.send(21, reset());
    world.close(20);
    let confirmed = kvferry_protocol::Invalidated { reset: 1 };
    world.send(WORKER.0, Message::Invalidated(confirmed));
    let (peer, answer) = world.process.replies.pop().expect("an answer");
    assert_eq!(peer, 21);
    assert!(matches!(answer, Message::ResetAnswer(_)), "{answer:?}");
}

#[test]
fn a_reset_that_is_repeated_over_another_connection_is_carried_out_once() {
    let resets = |world: &World| {
        let orders = world.process.orders.iter();
        orders
            .filter(|(_, order)| matches!(order, Message::Invalidate(_)))
            .count()
    };
    for closed_first in [false, true] {
        let mut world = World::serving();
        world.connect((20, 5), &named(Role::Admin, [4; 16], 0));
        world.send(20, reset());
        assert_eq!(resets(&world), 1);
        if closed_first {
            world.close(20);
        }
        world.connect((21, 5), &named(Role::Admin, [4; 16], 0));
        world.send(21, reset());
        assert_eq!(resets(&world), 1, "closed first: {closed_first}");
        assert!(world.process.replies.is_empty());
        world.close(20);
        let confirmed = kvferry_protocol::Invalidated { reset: 1 };
        world.send(WORKER.0, Message::Invalidated(confirmed));
        let answer = world.process.replies.pop();
        assert!(
            matches!(answer, Some((21, Message::ResetAnswer(_)))),
            "{answer:?}"
        );
        // Another process that names the identity gets a session of its own.
        world.connect((22, 6), &named(Role::Admin, [4; 16], 0));
        world.send(22, reset());
        assert_eq!(resets(&world), 2);
        assert_eq!(world.shell.engines[&admin(1, [4 ^ 32; 7])].peer, PeerId(21));
    }
}

#[test]
fn the_status_names_each_rank_with_its_last_report_and_its_copies() {
    let mut world = World::serving();
    world.store();
    let readiness = Readiness::new(4096, 8192, Some(16), "too small".to_owned());
    world.send(WORKER.0, Message::Readiness(readiness));
    let reported = world.process.replies.pop();
    assert!(matches!(reported, Some((5, Message::ReadinessAnswer(_)))));
    let answer = world.status();
    let rank = RankStatus {
        rank: 0,
        attached: true,
        pid: 50,
        replica: 0,
        stores: 1,
        loads: 0,
        host_ready_bytes: 4096,
        host_bytes: 8192,
        host_pinned_bytes: Some(16),
        problem: "too small".to_owned(),
        connected: Some(true),
        disk: None,
    };
    assert_eq!(answer.ranks, [rank]);
    assert_eq!(answer.version, env!("CARGO_PKG_VERSION"));
    assert_eq!((answer.epoch, answer.ratio, answer.ready), (3, 4, true));
    assert_eq!((answer.slots, answer.copies_under_way), (1, 1));
    assert_eq!(
        (answer.requests.storing_pages, answer.requests.loading_pages),
        (2, 0)
    );
    let open = (
        answer.requests.open_requests,
        answer.requests.open_loads,
        answer.requests.open_stores,
    );
    assert_eq!(
        (
            open,
            answer.requests.engines,
            answer.requests.parked_requests
        ),
        ((1, 0, 1), 1, 0)
    );
    assert_eq!(answer.hash_tokens, 16);
    assert_eq!(answer.decisions_digest, None);
    assert_eq!(answer.counters.get(LOOKUP_NS), Some(&70));
    assert_eq!(answer.pages_in(2, "filling"), 2);
    let host = answer.tier(2).expect("host memory");
    assert_eq!((host.blocks, answer.pins), (1, 0));

    let Some((_, Message::Transfer(transfer))) = world.process.orders.pop() else {
        panic!("a copy was ordered");
    };
    let copies = transfer.transfers.iter().map(|transfer| EndedCopy {
        complete_pages: 2,
        bytes: 8192,
        copy_us: 1,
        ..EndedCopy::complete(TransferId(transfer.id))
    });
    let copies = copies.collect();
    world.send(WORKER.0, Message::Ended(Ended { rank: 0, copies }));
    let answer = world.status();
    assert_eq!(answer.ranks[0].stores, 0);
    assert_eq!(answer.pages_in(2, "ready"), 2);
    world.close(WORKER.0);
    let answer = world.status();
    assert!(!answer.ranks[0].attached && !answer.ready);
    assert_eq!(answer.ranks[0].connected, Some(false));
    assert_eq!(answer.ranks[0].host_bytes, 8192, "the last report is kept");
}

#[test]
fn each_new_problem_of_a_worker_is_one_line_of_the_log() {
    let mut world = World::with_worker();
    // A worker of no seat, whose reports are not kept.
    world.connect((7, 70), &named(Role::Worker, [0; 16], 4));
    for (peer, problem) in [
        (5, "one"),
        (5, "one"),
        (5, ""),
        (5, "two"),
        (5, "two"),
        (7, "three"),
    ] {
        let readiness = Readiness::new(0, 0, None, problem.to_owned());
        world.send(peer, Message::Readiness(readiness));
    }
    let left = std::iter::from_fn(|| world.shell.problems.line(Time(0)));
    assert_eq!(left.count(), LINES_A_MINUTE - 2);
    let reported: Vec<WorkerId> = world.shell.readiness.keys().copied().collect();
    assert_eq!(reported, [worker(0)]);
}

/// Lines that a [`LogLimit`] lets through within a minute.
const LINES_A_MINUTE: usize = 8;
