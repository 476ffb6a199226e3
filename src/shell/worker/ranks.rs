//! Ranks of engines: connections, registered memory and requests.

use std::collections::BTreeMap;
use std::fmt;

use super::host::Registering;
use super::{Fatal, WorkerHost, WorkerShell};
use crate::log_filter::set_log;
use crate::{Holder, HolderPeers};
use kvferry_core::{MemoryBounds, WorkerEvent, engine_of};
use kvferry_protocol::{
    Empty, Envelope, ErrorBody, ErrorCode, Hello, Message, Register, Registered, Role, Written,
};
use kvferry_types::{
    Allocation, AllocationHandle, Attention, ByteSize, Caller, EngineId, GroupId, PeerId, Rank,
    Registration, RequestId, TierId, User,
};

/// A page that fills less than one part in this many of its place in host memory is named in the log.
const SPARSE_PARTS: u64 = 4;

/// A connected rank.
#[derive(Debug)]
struct RankPeer<P> {
    /// The engine of its hello and its user.
    engine: EngineId,
    /// The bytes that its hello named as the engine.
    hello_engine: [u8; 16],
    /// The rank that its hello named.
    rank: Rank,
    user: User,
    holder: Holder<P>,
}

/// Memory that is mapped, and that is used once the leader has admitted it.
#[derive(Debug)]
struct Mapped<M> {
    /// Number of the registration.
    number: u64,
    engine: EngineId,
    peer: PeerId,
    /// The registration request, until it is answered.
    request: Option<RequestId>,
    memory: M,
}

/// Memory that is being opened.
#[derive(Debug)]
struct Opening {
    engine: EngineId,
    peer: PeerId,
    user: User,
    /// The id of the rank's process, if the system shows it.
    pid: Option<i32>,
    /// The rank has unregistered it or is gone: the memory is closed when its opening ends.
    unwanted: bool,
}

impl Opening {
    /// False if the memory is known to be that of another process. The id of a process of another PID namespace reads
    /// as 0.
    fn may_be_of(&self, pid: Option<i32>) -> bool {
        let visible = |pid: Option<i32>| pid.filter(|pid| *pid > 0);
        match (visible(self.pid), visible(pid)) {
            (Some(own), Some(other)) => own == other,
            _ => true,
        }
    }
}

/// Connected ranks, and the memory that is registered.
#[derive(Debug)]
pub(super) struct Ranks<P, M> {
    rank: Rank,
    connected: BTreeMap<PeerId, RankPeer<P>>,
    mapped: Option<Mapped<M>>,
    /// The rank whose connection closed while its memory was registered. While its process lives, no other user gets its
    /// seat.
    left: Option<RankPeer<P>>,
    /// Memory that is being opened, by the number of its registration; also of ranks that are gone.
    opening: BTreeMap<u64, Opening>,
    last_registration: u64,
    /// Ranks that wait until no copies run for requests that they abandoned, by the number that the core received, and
    /// their answers.
    abandoning: BTreeMap<u64, (PeerId, RequestId, Message)>,
    last_abandoning: u64,
}

impl<P, M> Ranks<P, M> {
    /// Without connections. `rank` is the rank that this worker serves.
    pub(super) fn new(rank: Rank) -> Self {
        Self {
            rank,
            connected: BTreeMap::new(),
            mapped: None,
            left: None,
            opening: BTreeMap::new(),
            last_registration: 0,
            abandoning: BTreeMap::new(),
            last_abandoning: 0,
        }
    }
}

impl<P: fmt::Debug, M> Ranks<P, M> {
    /// The registered memory.
    pub(super) fn memory(&self) -> Option<&M> {
        self.mapped.as_ref().map(|mapped| &mapped.memory)
    }

    /// The registered memory, with its engine.
    pub(super) fn registered(&self) -> Option<(EngineId, &M)> {
        let mapped = self.mapped.as_ref()?;
        Some((mapped.engine, &mapped.memory))
    }

    /// The memory of this engine, if that memory is registered.
    pub(super) fn memory_of(&self, engine: EngineId) -> Option<&M> {
        let mapped = self.mapped.as_ref()?;
        (mapped.engine == engine).then_some(&mapped.memory)
    }

    /// Takes the rank, its request and the answer that wait for the end of `number`.
    pub(super) fn take_abandoning(&mut self, number: u64) -> Option<(PeerId, RequestId, Message)> {
        self.abandoning.remove(&number)
    }

    /// Adds a rank that waits until no copies run for requests that it abandons. Returns the number for the core.
    pub(super) fn waits_for_copies(
        &mut self,
        peer: PeerId,
        request: RequestId,
        answer: Message,
    ) -> u64 {
        self.last_abandoning += 1;
        let waiting = (peer, request, answer);
        self.abandoning.insert(self.last_abandoning, waiting);
        self.last_abandoning
    }

    /// Notes that openings are unwanted, and returns whether there are any.
    fn give_up_openings(&mut self, which: impl Fn(&Opening) -> bool) -> bool {
        let mut any = false;
        for opening in self.opening.values_mut().filter(|opening| which(opening)) {
            opening.unwanted = true;
            any = true;
        }
        any
    }

    /// True if the same rank has registered later than with this registration, and its later memory is mapped already.
    fn is_replaced(&self, number: u64, peer: PeerId, pid: Option<i32>) -> bool {
        let mapped = self.mapped.as_ref();
        mapped.is_some_and(|mapped| {
            let holder = self.connected.get(&mapped.peer).map(|rank| &rank.holder);
            let same = mapped.peer == peer || holder.is_some_and(|holder| holder.is_process(pid));
            same && mapped.number > number
        })
    }

    /// The id of a rank's process, if the system shows it.
    fn pid_of(&self, peer: PeerId) -> Option<i32> {
        self.connected.get(&peer).and_then(|rank| rank.holder.pid)
    }

    /// The engine and the user of a connected rank.
    pub(super) fn identity_of(&self, peer: PeerId) -> Option<(EngineId, User)> {
        let rank = self.connected.get(&peer)?;
        Some((rank.engine, rank.user))
    }

    /// The user of a rank's process.
    fn user_of(&self, peer: PeerId) -> User {
        self.connected
            .get(&peer)
            .map_or_else(User::default, |rank| rank.user)
    }

    /// Returns why a rank does not get the seat of the registered memory: another process has it, which is connected
    /// and lives.
    fn seat_taken(&self, host: &dyn HolderPeers<Process = P>, peer: PeerId) -> Option<ErrorBody> {
        let newcomer = self.connected.get(&peer);
        let pid = newcomer.and_then(|rank| rank.holder.pid);
        let holder = match &self.mapped {
            Some(mapped) if mapped.peer == peer => return None,
            Some(mapped) => Some(self.connected.get(&mapped.peer)?),
            None => None,
        };
        let in_use = holder.and_then(|rank| rank.holder.in_use(host, pid));
        // A silent rank, or one that connects again, keeps its seat from other users.
        let is_other = |rank: &&RankPeer<P>| newcomer.is_none_or(|new| new.user != rank.user);
        let of_another = holder.or(self.left.as_ref()).filter(is_other);
        let in_use = in_use.or_else(|| of_another?.holder.lives(host, pid))?;
        Some(in_use.refusal(&format!("the seat of {}", self.rank)))
    }

    /// Returns why a rank may not act for an engine: another process, which is connected and lives, registered its
    /// memory.
    pub(super) fn registered_by_another(
        &self,
        host: &dyn HolderPeers<Process = P>,
        peer: PeerId,
        engine: EngineId,
    ) -> Option<ErrorBody> {
        self.memory_of(engine)
            .and_then(|_| self.seat_taken(host, peer))
    }
}

/// Returns why memory is not opened by its path: this process may open files that the rank's user may not.
fn foreign_path(user: User, registration: &Registration) -> Option<String> {
    let is_path = |allocation: &Allocation| matches!(allocation.handle, AllocationHandle::Path(_));
    let index = registration.allocations.iter().position(is_path)?;
    (user != User::Own).then(|| {
        format!(
            "registration.allocations[{index}].handle is a path, and {user} is not the user of kvferry: send the descriptor \
             of the memory, and name its ticket"
        )
    })
}

/// Returns why memory is not copied although it is reachable: its engine asked for a check only, or a group is of a kind
/// that this version does not know.
fn not_served(registration: &Registration, check_only: bool) -> Option<String> {
    let mut groups = (0..).map(GroupId).zip(&registration.groups);
    let unknown = groups.find(|(_, group)| group.attention == Attention::Other);
    if let Some((group, described)) = unknown {
        let kind = described.attention.name();
        return Some(format!(
            "{group} has layers with {kind}, which are not served yet"
        ));
    }
    check_only.then(|| "the engine asked for a check of its memory only".to_owned())
}

/// All bytes of an engine's id. Its `Display` has the first four.
fn hex(id: &[u8; 16]) -> String {
    format!("{:032x}", u128::from_be_bytes(*id))
}

pub(super) fn refuse<P: fmt::Debug, M>(
    host: &mut dyn WorkerHost<Process = P, Memory = M>,
    peer: PeerId,
    request: RequestId,
    code: ErrorCode,
    text: impl Into<String>,
) {
    let error = ErrorBody::new(code, text);
    host.reply(peer, request, Message::Error(error));
}

impl<P: fmt::Debug, M> WorkerShell<P, M> {
    /// True while an engine's memory is registered or being opened.
    pub fn is_used(&self) -> bool {
        self.ranks.mapped.is_some() || !self.ranks.opening.is_empty()
    }

    /// Reports to the leader why a rank is refused, unless another rank is served: the refusal is no problem for that
    /// one.
    pub fn rank_refused(&self, host: &mut dyn WorkerHost<Process = P, Memory = M>, why: &str) {
        if self.ranks.mapped.is_none() {
            host.report_problem(why);
        }
    }

    /// Handles the hello of a rank.
    pub fn opened(
        &mut self,
        host: &mut dyn WorkerHost<Process = P, Memory = M>,
        peer: PeerId,
        hello: &Hello,
        caller: impl Into<Caller>,
    ) {
        if hello.role != Role::Rank {
            // An operator, who has no memory and no seat.
            return;
        }
        let Caller { user, pid } = caller.into();
        let rank = RankPeer {
            engine: engine_of(user, hello.engine),
            hello_engine: hello.engine,
            rank: Rank(hello.rank),
            user,
            holder: Holder::new(host, peer, pid),
        };
        self.ranks.connected.insert(peer, rank);
    }

    /// Handles the close of a rank's connection.
    pub fn closed(
        &mut self,
        host: &mut dyn WorkerHost<Process = P, Memory = M>,
        peer: PeerId,
    ) -> Result<(), Fatal> {
        self.probes.waiting.retain(|(waiting, _)| *waiting != peer);
        let ranks = &mut self.ranks;
        let rank = ranks.connected.remove(&peer);
        ranks.give_up_openings(|opening| opening.peer == peer);
        ranks.abandoning.retain(|_, (waiting, ..)| *waiting != peer);
        let Some(gone) = ranks.mapped.take_if(|mapped| mapped.peer == peer) else {
            return Ok(());
        };
        ranks.left = rank;
        let stepped = self.step(host, WorkerEvent::MemoryGone(gone.engine));
        host.close(gone.engine, gone.memory);
        stepped
    }

    /// Handles a request of a rank that has sent its hello.
    pub fn message(
        &mut self,
        host: &mut dyn WorkerHost<Process = P, Memory = M>,
        peer: PeerId,
        envelope: Envelope,
    ) -> Result<(), Fatal> {
        let request = envelope.correlation;
        match envelope.message {
            Message::Register(register) => {
                self.register(host, peer, request, register);
                Ok(())
            }
            Message::Abandon(abandon) => self.abandon(host, peer, request, &abandon),
            Message::Written(written) => self.written(host, peer, request, &written),
            Message::Unregister(_) => self.unregister(host, peer, request),
            Message::Measure(_) => {
                let answer = Message::MeasureAnswer(self.measure(host));
                host.reply(peer, request, answer);
                Ok(())
            }
            Message::SetLog(log) => {
                let answer = set_log(host, &log);
                host.reply(peer, request, answer);
                Ok(())
            }
            Message::Probe(_) => {
                self.probe(host, peer, request);
                Ok(())
            }
            other => {
                let kind = other.kind().name();
                let text = format!("{kind} is not for a worker to answer: connect to the leader");
                refuse(host, peer, request, ErrorCode::Forbidden, text);
                Ok(())
            }
        }
    }

    fn written(
        &mut self,
        host: &mut dyn WorkerHost<Process = P, Memory = M>,
        peer: PeerId,
        request: RequestId,
        written: &Written,
    ) -> Result<(), Fatal> {
        let mapped = self.ranks.mapped.as_ref();
        let Some(mapped) = mapped.filter(|mapped| mapped.peer == peer) else {
            let text = "register your memory first";
            refuse(host, peer, request, ErrorCode::Invalid, text);
            return Ok(());
        };
        let (engine, through) = (mapped.engine, RequestId(written.through));
        if !written.timeline {
            host.written(&mapped.memory, through);
            host.reply(peer, request, Message::WrittenAnswer(Empty {}));
            return self.step(host, WorkerEvent::Written { engine, through });
        }
        match host.watch_timeline(&mapped.memory, engine, through) {
            true => host.reply(peer, request, Message::WrittenAnswer(Empty {})),
            false => {
                let text = "written.timeline is true, and registration.timeline is absent: register it, or wait for the \
                            device yourself";
                refuse(host, peer, request, ErrorCode::Invalid, text);
            }
        }
        Ok(())
    }

    /// Returns why the KV of this rank does not belong into this worker's depot.
    fn wrong_rank(&self, registration: &Registration) -> Option<String> {
        if registration.rank != self.worker.rank {
            return Some(format!(
                "registration.rank is {}, this worker serves {}: connect to the worker of your rank",
                registration.rank.0, self.worker.rank
            ));
        }
        let (ranks, shards) = (self.sharding.ranks(), self.sharding.shards());
        let expected = self.sharding.of(self.worker.rank).0;
        let (tp_size, shard) = (registration.tp_size, registration.shard);
        if tp_size != ranks {
            return Some(format!(
                "registration.tp_size is {tp_size}, this worker serves an engine of {ranks} ranks: start kvferry with \
                 ranks = {tp_size}"
            ));
        }
        (shard != expected).then(|| {
            format!(
                "registration.shard is {shard}, but {} of {ranks} holds shard {expected} of {shards}: start kvferry \
                 with as many kv_shards as the engine has",
                self.worker.rank
            )
        })
    }

    /// Returns why a registration is not that of the rank whose hello came over the connection: `abandon` and `unregister`
    /// act for the engine of the hello.
    fn not_of_hello(&self, peer: PeerId, register: &Register) -> Option<String> {
        let named = self.ranks.connected.get(&peer)?;
        if named.hello_engine != register.engine {
            return Some(format!(
                "register.engine is {}, and the engine in the hello of this connection {}: name the same engine in both",
                hex(&register.engine),
                hex(&named.hello_engine)
            ));
        }
        let rank = register.registration.rank;
        (named.rank != rank).then(|| {
            format!(
                "registration.rank is {}, and the rank in the hello of this connection {}: name the same rank in both",
                rank.0, named.rank.0
            )
        })
    }

    /// Checks what is known without the memory; the host then opens and maps the memory.
    fn register(
        &mut self,
        host: &mut dyn WorkerHost<Process = P, Memory = M>,
        peer: PeerId,
        request: RequestId,
        register: Register,
    ) {
        let not_of_hello = self.not_of_hello(peer, &register);
        let registration = register.registration;
        if let Some(error) = self.ranks.seat_taken(host, peer) {
            host.discard(registration);
            return host.reply(peer, request, Message::Error(error));
        }
        let user = self.ranks.user_of(peer);
        if let Some(text) = foreign_path(user, &registration) {
            host.discard(registration);
            return refuse(host, peer, request, ErrorCode::Forbidden, text);
        }
        if let Some(text) = self.wrong_rank(&registration).or(not_of_hello) {
            host.discard(registration);
            self.rank_refused(host, &text);
            return refuse(host, peer, request, ErrorCode::Invalid, text);
        }
        self.ranks.last_registration += 1;
        let engine = engine_of(user, register.engine);
        let number = self.ranks.last_registration;
        let registering = Registering {
            number,
            peer,
            request,
            engine,
            abandoned_through: RequestId(register.abandoned_through),
            not_served: not_served(&registration, register.check_only),
            check_only: register.check_only,
        };
        let serves = self.ranks.mapped.is_some();
        match host.open(registering, registration, serves) {
            Ok(()) => {
                let pid = self.ranks.pid_of(peer);
                let opening = Opening {
                    engine,
                    peer,
                    user,
                    pid,
                    unwanted: false,
                };
                self.ranks.opening.insert(number, opening);
            }
            Err(error) => {
                // A worker that is only not ready reports no problem, because the status already shows its progress.
                if error.code() != ErrorCode::NotReady {
                    self.rank_refused(host, &error.message);
                }
                host.reply(peer, request, Message::Error(error));
            }
        }
    }

    /// Handles the end of an opening. New memory replaces the old one; the leader is requested to admit the new memory
    /// once no copies run.
    pub fn mapped(
        &mut self,
        host: &mut dyn WorkerHost<Process = P, Memory = M>,
        registering: Registering,
        memory: Result<M, ErrorBody>,
    ) -> Result<(), Fatal> {
        let Registering {
            number,
            peer,
            request,
            engine,
            abandoned_through,
            ..
        } = registering;
        let opening = self.ranks.opening.remove(&number);
        let memory = match memory {
            Ok(memory) => memory,
            Err(error) => {
                self.rank_refused(host, &error.message);
                host.reply(peer, request, Message::Error(error));
                return Ok(());
            }
        };
        let ranks = &mut self.ranks;
        let Some(opening) = opening.filter(|opening| !opening.unwanted) else {
            tracing::debug!(worker = %self.worker, "a rank is gone before its memory was mapped");
            host.close(engine, memory);
            refuse(
                host,
                peer,
                request,
                ErrorCode::Invalid,
                "unregistered meanwhile",
            );
            return Ok(());
        };
        // Openings may end in another order than they began.
        if ranks.is_replaced(number, peer, opening.pid) {
            host.close(engine, memory);
            let text = "this rank registered again meanwhile";
            refuse(host, peer, request, ErrorCode::Invalid, text);
            return Ok(());
        }
        // Another rank may have registered while this memory was opened.
        if let Some(error) = ranks.seat_taken(host, peer) {
            host.close(engine, memory);
            host.reply(peer, request, Message::Error(error));
            return Ok(());
        }
        let geometry = host.geometry(&memory);
        let bounds = MemoryBounds::new(&geometry);
        let before = ranks.mapped.replace(Mapped {
            number,
            engine,
            peer,
            request: Some(request),
            memory,
        });
        if let Some(before) = before {
            if let Some(request) = before.request {
                let text = "another engine registered meanwhile";
                refuse(host, before.peer, request, ErrorCode::Invalid, text);
            }
            host.close(before.engine, before.memory);
        }
        host.report_problem("");
        let event = WorkerEvent::Registered {
            engine,
            abandoned_through,
            bounds,
        };
        self.step(host, event)
    }

    /// Handles the end of a check of memory that is not served: its page size is now known. After a mere check, memory
    /// that is served stays. Otherwise this registration replaces it: the rank is answered once it is closed, after which
    /// nothing is copied for the engine.
    pub fn checked(
        &mut self,
        host: &mut dyn WorkerHost<Process = P, Memory = M>,
        registering: Registering,
        found: Result<u64, ErrorBody>,
    ) -> Result<(), Fatal> {
        let Registering {
            number,
            peer,
            request,
            engine,
            ..
        } = registering;
        let opening = self.ranks.opening.remove(&number);
        let through = registering.abandoned_through;
        let page_bytes = match found {
            Ok(found) => found,
            Err(error) => {
                self.rank_refused(host, &error.message);
                host.reply(peer, request, Message::Error(error));
                return Ok(());
            }
        };
        let Some(why) = registering.not_served else {
            let text = "the memory was checked and not mapped";
            refuse(host, peer, request, ErrorCode::Internal, text);
            return Ok(());
        };
        let pid = opening.as_ref().and_then(|opening| opening.pid);
        if !registering.check_only && self.ranks.is_replaced(number, peer, pid) {
            let text = "this rank registered again meanwhile";
            refuse(host, peer, request, ErrorCode::Invalid, text);
            return Ok(());
        }
        if let Some(left_out) = self.rank_lines.line(host.now()) {
            tracing::warn!(worker = %self.worker, page_bytes, why, left_out, "engine memory is not used");
        }
        self.rank_refused(host, &why);
        let answer = Message::Registered(Registered {
            arena_pages: 0,
            page_bytes,
            not_served: why,
        });
        if registering.check_only && through == RequestId(0) {
            host.reply(peer, request, answer);
            return Ok(());
        }
        if let Some(error) = self.ranks.registered_by_another(host, peer, engine) {
            host.reply(peer, request, Message::Error(error));
            return Ok(());
        }
        let user = self.ranks.user_of(peer);
        let user = opening.as_ref().map_or(user, |opening| opening.user);
        if through > RequestId(0) && self.forgets_abandoned_of(host, peer, request, (engine, user))
        {
            return Ok(());
        }
        if registering.check_only {
            let number = self.ranks.waits_for_copies(peer, request, answer);
            return self.abandon_through(host, (engine, user), number, through);
        }
        // Memory of the same rank that is still being opened is replaced, too.
        if let Some(checked) = opening {
            let earlier = self.ranks.opening.range_mut(..number);
            for (_, opening) in earlier.filter(|(_, opening)| {
                let same = (opening.engine, opening.user) == (engine, checked.user);
                same && opening.may_be_of(pid)
            }) {
                opening.unwanted = true;
            }
        }
        if through > RequestId(0) {
            // Nothing waits for this number: the answer comes once the memory is closed.
            self.ranks.last_abandoning += 1;
            let number = self.ranks.last_abandoning;
            self.abandon_through(host, (engine, user), number, through)?;
        }
        let stepped = self.memory_gone(host, engine, "registered again meanwhile");
        host.reply_when_closed(peer, request, engine, answer);
        stepped
    }

    /// Answers a rank's registration: its memory is used, or why it is not.
    pub(super) fn registered(
        &mut self,
        host: &mut dyn WorkerHost<Process = P, Memory = M>,
        engine: EngineId,
        admitted: bool,
    ) {
        let mapped = self.ranks.mapped.as_mut();
        let Some(mapped) = mapped.filter(|mapped| mapped.engine == engine) else {
            return;
        };
        let (peer, request) = (mapped.peer, mapped.request.take());
        let geometry = host.geometry(&mapped.memory);
        if !admitted {
            if let Some(mapped) = self.ranks.mapped.take() {
                host.close(mapped.engine, mapped.memory);
            }
            let why = self.leader.turned_away.take();
            // Only the code and the text are the leader's: this error is about a registration, and frees no page.
            let why = why.map_or((ErrorCode::Internal, String::new()), |why| {
                (why.code(), why.message)
            });
            let why = ErrorBody::new(why.0, why.1);
            match request {
                Some(request) => host.reply(peer, request, Message::Error(why)),
                // An earlier leader admitted the memory, and the rank takes it for registered. After the disconnect the
                // rank registers again over a new connection, and receives the error.
                None => host.disconnect(peer),
            }
            return;
        }
        let page_bytes = geometry.page_bytes();
        let device_pages = geometry.groups.iter().map(|group| group.device_pages).max();
        let device_pages = device_pages.unwrap_or(0);
        let arena_pages = host.arena_pages(TierId::Host, page_bytes);
        if let Some(left_out) = self.rank_lines.line(host.now()) {
            tracing::info!(worker = %self.worker, arena_pages, page_bytes, left_out, "engine memory registered");
            if let Some(sparse) = geometry.sparse_group(SPARSE_PARTS) {
                let (kv, place) = (ByteSize(sparse.page_bytes), ByteSize(page_bytes));
                tracing::warn!(
                    worker = %self.worker,
                    "a page of group {} has {kv} and takes {place} of g2 and g3, the size of the largest group's pages: \
                     larger pages of this group waste less",
                    sparse.group.0
                );
            }
        }
        if arena_pages > 0 && arena_pages < device_pages {
            tracing::warn!(
                worker = %self.worker,
                arena_pages,
                device_pages,
                "G2 holds fewer pages than the engine itself: it will find little there; raise g2"
            );
        }
        if let Some(request) = request {
            let body = Registered {
                arena_pages,
                page_bytes,
                not_served: String::new(),
            };
            host.reply(peer, request, Message::Registered(body));
        }
    }

    /// Unregisters a rank's memory. The rank is answered once none of the memory is open in this worker, whichever
    /// connection of its process registered it.
    fn unregister(
        &mut self,
        host: &mut dyn WorkerHost<Process = P, Memory = M>,
        peer: PeerId,
        request: RequestId,
    ) -> Result<(), Fatal> {
        let ranks = &mut self.ranks;
        let Some(engine) = ranks.connected.get(&peer).map(|rank| rank.engine) else {
            return Ok(());
        };
        if let Some(error) = ranks.registered_by_another(host, peer, engine) {
            host.reply(peer, request, Message::Error(error));
            return Ok(());
        }
        // Memory that is being opened is closed when its opening ends.
        let (pid, user) = (ranks.pid_of(peer), ranks.user_of(peer));
        let being_opened = ranks.give_up_openings(|opening| {
            opening.peer == peer
                || opening.engine == engine && opening.user == user && opening.may_be_of(pid)
        });
        // A seat that is kept for a rank that has lost its connection is that rank's alone to give up.
        ranks.left.take_if(|left| left.engine == engine);
        let stepped = self.memory_gone(host, engine, "unregistered meanwhile");
        if being_opened {
            let text = "the memory is being opened: retry";
            refuse(host, peer, request, ErrorCode::NotReady, text);
            return stepped;
        }
        let answer = Message::Unregistered(Empty {});
        host.reply_when_closed(peer, request, engine, answer);
        stepped
    }

    /// Takes the memory of an engine back, if it is mapped. A registration of it that waits is refused with `why`.
    fn memory_gone(
        &mut self,
        host: &mut dyn WorkerHost<Process = P, Memory = M>,
        engine: EngineId,
        why: &str,
    ) -> Result<(), Fatal> {
        let mapped = &mut self.ranks.mapped;
        let Some(mapped) = mapped.take_if(|mapped| mapped.engine == engine) else {
            return Ok(());
        };
        if let Some(request) = mapped.request {
            refuse(host, mapped.peer, request, ErrorCode::Invalid, why);
        }
        let stepped = self.step(host, WorkerEvent::MemoryGone(engine));
        host.close(engine, mapped.memory);
        stepped
    }
}
