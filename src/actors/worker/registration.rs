//! An engine rank registers its memory: it is checked, mapped, and used once the leader has agreed.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ractor::ActorRef;

use super::{ATTACH_TIMEOUT, ATTACHING_MAX, Handled, State, WorkerMessage};
use crate::actors::gpu::{EngineSide, Gpu};
use crate::core::{MemoryBounds, WorkerEvent};
use crate::memory::{LifelineEnd, RegisteredMemory, pieces_without_proof, validate};
use crate::protocol::{
    Attach, AttachedMemory, Empty, ErrorBody, ErrorCode, Message, Register, Registered,
};
use crate::transport::{Failure, FdReceiver, PeerId, SharedLogLimit, Ticket};
use crate::types::{
    AllocationHandle, AllocationKind, AttachId, Attention, ChunkHandle, DepotId, EngineId, Epoch,
    GroupId, OpId, Registration, RequestId,
};

/// How long copies may hold memory that its engine takes back, or has left behind.
const LET_GO_LIMIT: Duration = Duration::from_secs(2);

static UNPROVEN: SharedLogLimit = SharedLogLimit::new();

/// A rank that registers: who asked, under which id, for which engine, and which of its requests are over.
#[derive(Debug, Clone)]
pub(in crate::actors) struct Registering {
    peer: PeerId,
    asked: RequestId,
    engine: EngineId,
    after: RequestId,
    /// Why nothing will be copied for this memory.
    not_served: Option<String>,
}

/// Memory that was mapped and, once the leader has agreed, is used.
pub(super) struct Mapped {
    pub(super) engine: EngineId,
    pub(super) peer: PeerId,
    /// The registration, until it is answered.
    asked: Option<RequestId>,
    pub(super) memory: EngineSide,
}

/// Why the pages of a group are not copied, though its memory could be reached: leaders know pages that every token behind
/// them needs, of one group.
fn not_served(registration: &Registration) -> Option<String> {
    let Registration {
        group,
        groups,
        attention,
        ..
    } = registration;
    if *attention != Attention::Full {
        let kind = attention.name();
        return Some(format!(
            "{group} has layers with {kind}, which are not served yet"
        ));
    }
    (*groups != 1).then(|| {
        format!("the engine's KV memory has {groups} groups, and more than one is not served yet")
    })
}

/// Bytes of a page of memory that is not copied: its description is checked, and where it is the host's, it is mapped and
/// proven, too.
fn understood(
    registration: &Registration,
    on_device: bool,
    fds: &FdReceiver,
) -> Result<u64, String> {
    if on_device {
        let layout = validate(registration).map_err(|error| error.to_string())?;
        return Ok(layout.page_bytes);
    }
    let memory = RegisteredMemory::open(registration, |ticket| fds.take(ticket));
    let memory = memory.map_err(|error| error.to_string())?;
    Ok(memory.geometry.page_bytes)
}

/// How a rank is told that its memory was not opened. Bytes that were not found may have been written over meanwhile.
fn refused(may_pass: bool, error: &dyn std::fmt::Display) -> (ErrorCode, String) {
    let code = match may_pass {
        true => ErrorCode::NotReady,
        false => ErrorCode::Invalid,
    };
    (code, error.to_string())
}

/// The descriptors that a registration names. Those that nobody has taken are closed with this.
struct Tickets {
    fds: Arc<FdReceiver>,
    tickets: Vec<Ticket>,
}

impl Tickets {
    fn of(registration: &Registration, fds: &Arc<FdReceiver>) -> Self {
        let mut tickets = Vec::new();
        for allocation in &registration.allocations {
            match &allocation.handle {
                AllocationHandle::Ticket(ticket) => tickets.push(*ticket),
                AllocationHandle::Chunks(chunks) => {
                    tickets.extend(chunks.iter().filter_map(|chunk| match chunk.handle {
                        ChunkHandle::Ticket(ticket) => Some(ticket),
                        ChunkHandle::CudaFabric(_) => None,
                    }));
                }
                _ => {}
            }
        }
        let fds = Arc::clone(fds);
        Self { fds, tickets }
    }
}

impl Drop for Tickets {
    fn drop(&mut self) {
        for ticket in &self.tickets {
            drop(self.fds.take(ticket));
        }
    }
}

impl State {
    /// An opening of a rank's memory is over.
    fn opened(&mut self, peer: PeerId) {
        if let Some(count) = self.opening.get_mut(&peer) {
            *count -= 1;
            if *count == 0 {
                self.opening.remove(&peer);
            }
        }
    }

    /// Why this rank's KV is not what its depot is for.
    fn wrong_shard(&self, registration: &Registration) -> Option<String> {
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

    /// Why a rank does not get the place of the memory that is registered: that of another process, which is connected and
    /// lives.
    fn place_taken(&self, peer: PeerId) -> Option<ErrorBody> {
        let mapped = self.mapped.as_ref().filter(|mapped| mapped.peer != peer)?;
        let holder = &self.ranks.get(&mapped.peer)?.holder;
        let pid = self.ranks.get(&peer).and_then(|rank| rank.holder.pid);
        let in_use = holder.in_use(&self.replier, pid)?;
        Some(in_use.refusal(&format!("the place of {}", self.worker.rank)))
    }

    /// Why a rank may not act for an engine: another process, which is connected and lives, registered its memory.
    pub(super) fn registered_by_another(
        &self,
        peer: PeerId,
        engine: EngineId,
    ) -> Option<ErrorBody> {
        self.mapped
            .as_ref()
            .filter(|mapped| mapped.engine == engine)
            .and_then(|_| self.place_taken(peer))
    }

    /// Says once that an engine leaves memory unproven: a handle that shows other memory is not noticed there.
    fn warn_of_proofs(&mut self, registration: &Registration) {
        let pieces = pieces_without_proof(registration);
        if pieces > 0 && !std::mem::replace(&mut self.told_of_proofs, true) {
            tracing::warn!(
                worker = %self.worker,
                pieces,
                "the engine gives no proof (registration.proofs) for pieces of its memory: they are used as its handles say"
            );
        }
    }

    /// What can be checked at once, and the GPU for memory that lies on one and is copied.
    fn admissible(
        &mut self,
        registration: &Registration,
        copied_on_device: bool,
        myself: &ActorRef<WorkerMessage>,
    ) -> Result<Option<Arc<Gpu>>, (ErrorCode, String)> {
        if registration.rank != self.worker.rank {
            let text = format!(
                "registration.rank is {}, this worker serves {}: connect to the worker of your rank",
                registration.rank.0, self.worker.rank
            );
            return Err((ErrorCode::Invalid, text));
        }
        if let Some(text) = self.wrong_shard(registration) {
            return Err((ErrorCode::Invalid, text));
        }
        if !self.prefaulted {
            return Err((ErrorCode::NotReady, self.progress.line()));
        }
        match copied_on_device {
            true => self.gpu_for(registration, myself).map(Some),
            false => Ok(None),
        }
    }

    /// Checks what can be checked at once; opens and maps the memory on a thread of its own.
    pub(super) fn register(
        &mut self,
        peer: PeerId,
        correlation: RequestId,
        register: Register,
        myself: &ActorRef<WorkerMessage>,
    ) {
        if let Some(error) = self.place_taken(peer) {
            let tickets = Tickets::of(&register.registration, &self.fds);
            tokio::task::spawn_blocking(move || drop(tickets));
            return self.replier.refuse(peer, correlation, error);
        }
        let registration = register.registration;
        self.warn_of_proofs(&registration);
        self.unregistered.remove(&peer);
        // Whatever becomes of it: a descriptor that is left lying holds its memory.
        let tickets = Tickets::of(&registration, &self.fds);
        let who = Registering {
            peer,
            asked: correlation,
            engine: EngineId(register.engine),
            after: RequestId(register.after),
            not_served: not_served(&registration),
        };
        let on_device = registration
            .allocations
            .iter()
            .any(|allocation| allocation.kind == AllocationKind::Device);
        // No memory is pinned for what is not copied.
        let copied_on_device = on_device && who.not_served.is_none();
        let gpu = match self.admissible(&registration, copied_on_device, myself) {
            Ok(gpu) => gpu,
            Err((code, text)) => {
                // What is only not ready yet, the status says by how far it is.
                if code != ErrorCode::NotReady {
                    self.turned_away_rank(&text);
                }
                tokio::task::spawn_blocking(move || drop(tickets));
                return self.refuse(peer, correlation, code, text);
            }
        };
        let fds = Arc::clone(&self.fds);
        let myself = myself.clone();
        *self.opening.entry(peer).or_default() += 1;
        tokio::task::spawn_blocking(move || {
            let _tickets = tickets;
            if let Some(why) = who.not_served.clone() {
                let page_bytes = understood(&registration, on_device, &fds);
                let group = registration.group;
                let answer = page_bytes.map(|page_bytes| (group, page_bytes, why));
                if myself.cast(WorkerMessage::Understood(who, answer)).is_err() {
                    tracing::debug!("the worker has stopped");
                }
                return;
            }
            let memory = match gpu {
                Some(gpu) => match gpu.open(&registration, &fds) {
                    Ok(memory) => Ok(EngineSide::Device(memory, gpu)),
                    Err(error) => {
                        // What a rank hands over may be anything: the driver's word about it is not yet one about the GPU.
                        if let Some(fatal) = error.fatal()
                            && !gpu.works()
                            && myself.cast(WorkerMessage::GpuLost(fatal)).is_err()
                        {
                            tracing::debug!("the worker has stopped");
                        }
                        Err(refused(error.may_pass(), &error))
                    }
                },
                None => RegisteredMemory::open(&registration, |ticket| fds.take(ticket))
                    .map(EngineSide::Host)
                    .map_err(|error| refused(error.may_pass(), &error)),
            };
            let memory = Box::new(memory);
            if myself.cast(WorkerMessage::Mapped(who, memory)).is_err() {
                tracing::debug!("the worker has stopped");
            }
        });
    }

    /// The new memory takes the place of the old one; the leader is asked once nothing is under way any more.
    pub(super) fn mapped(
        &mut self,
        who: Registering,
        memory: Result<EngineSide, (ErrorCode, String)>,
        myself: &ActorRef<WorkerMessage>,
    ) -> Handled {
        self.opened(who.peer);
        let memory = match memory {
            Ok(memory) => memory,
            Err((code, why)) => {
                // The rank asks again without a word.
                if code == ErrorCode::NotReady
                    && let Some(left_out) = UNPROVEN.line()
                {
                    tracing::warn!(worker = %self.worker, why, left_out, "engine memory is not proven");
                }
                self.turned_away_rank(&why);
                self.refuse(who.peer, who.asked, code, why);
                self.watch_gpu(myself);
                return Ok(());
            }
        };
        if !self.ranks.contains_key(&who.peer) || self.unregistered.contains(&who.peer) {
            tracing::debug!(worker = %self.worker, "a rank is gone before its memory was mapped");
            self.close(who.engine, memory, myself);
            let text = "unregistered meanwhile".to_owned();
            self.refuse(who.peer, who.asked, ErrorCode::Invalid, text);
            return Ok(());
        }
        // Another one may have registered while this memory was opened.
        if let Some(error) = self.place_taken(who.peer) {
            self.close(who.engine, memory, myself);
            self.replier.refuse(who.peer, who.asked, error);
            return Ok(());
        }
        let (engine, after) = (who.engine, who.after);
        let geometry = memory.geometry();
        let depot = self.depot.as_ref();
        let bounds = MemoryBounds {
            device_pages: geometry.device_pages,
            arena_pages: depot.map_or(0, |depot| depot.arena_pages(geometry.page_bytes)),
        };
        let mut before = self.mapped.replace(Mapped {
            engine,
            peer: who.peer,
            asked: Some(who.asked),
            memory,
        });
        let waiting = before.as_mut();
        if let Some((peer, asked)) = waiting.and_then(|it| Some((it.peer, it.asked.take()?))) {
            let text = "another engine registered meanwhile".to_owned();
            self.refuse(peer, asked, ErrorCode::Invalid, text);
        }
        if let Some(before) = before {
            self.close(before.engine, before.memory, myself);
        }
        self.teller.problem(String::new());
        let registered = WorkerEvent::Registered {
            engine,
            after,
            bounds,
        };
        self.step(registered, myself)
    }

    /// The rank hears that its memory was understood, and why it is not used. Memory that is served stays.
    pub(super) fn understood(
        &mut self,
        who: &Registering,
        answer: Result<(GroupId, u64, String), String>,
    ) {
        self.opened(who.peer);
        let (group, page_bytes, why) = match answer {
            Ok(understood) => understood,
            Err(why) => {
                self.turned_away_rank(&why);
                return self.refuse(who.peer, who.asked, ErrorCode::Invalid, why);
            }
        };
        tracing::warn!(worker = %self.worker, %group, page_bytes, why, "engine memory is not used");
        self.turned_away_rank(&why);
        let body = Registered {
            arena_pages: 0,
            page_bytes,
            not_served: why,
        };
        self.replier
            .reply(who.peer, who.asked, Message::Registered(body));
    }

    /// Asks the leader; without an answer in time the core asks again. The answer comes in order with the leader's
    /// orders: those that follow it must find an admitted worker.
    pub(super) fn attach(&mut self, attach: AttachId) {
        let memory = self.mapped.as_ref().zip(self.depot.as_ref());
        let memory = memory.map(|(mapped, depot)| AttachedMemory {
            engine: mapped.engine.0,
            geometry: mapped.memory.geometry().clone(),
            arena_pages: depot.arena_pages(mapped.memory.geometry().page_bytes),
        });
        let last_reading = self.depot.as_ref().map(|depot| depot.last_reading());
        let depot_epoch = match last_reading.transpose() {
            Ok(last) => last.map_or(Epoch(0), |(epoch, _)| epoch),
            Err(error) => return tracing::error!(%error, "the depot cannot be read: not attached"),
        };
        let question = Attach {
            replica: self.worker.replica.0,
            rank: self.worker.rank.0,
            ranks: self.sharding.ranks(),
            kv_shards: self.sharding.shards(),
            attach: attach.0,
            depot: self
                .depot
                .as_ref()
                .map_or(DepotId::default(), |depot| depot.id())
                .0
                .to_be_bytes(),
            depot_epoch: depot_epoch.0,
            memory,
        };
        let question = Message::Attach(question);
        let id = self
            .leader
            .ask_in_order(self.link, question, ATTACH_TIMEOUT);
        self.attaching.insert(id, attach);
        if self.attaching.len() > ATTACHING_MAX {
            self.attaching.pop_first();
        }
    }

    pub(super) fn admitted(
        &mut self,
        attach: AttachId,
        verdict: Result<Message, Failure>,
        myself: &ActorRef<WorkerMessage>,
    ) -> Handled {
        let after = match verdict {
            Ok(Message::Attached(attached)) => Some(OpId(attached.after)),
            Ok(other) => {
                tracing::warn!(kind = other.kind().name(), "no answer to an attach");
                return Ok(());
            }
            Err(failure)
                if matches!(failure.code, ErrorCode::Invalid | ErrorCode::RankDisagrees) =>
            {
                tracing::error!(worker = %self.worker, message = failure.message, "turned away");
                self.teller.problem(failure.message.clone());
                self.turned_away = Some(failure);
                None
            }
            Err(failure) => {
                tracing::debug!(worker = %self.worker, message = failure.message, "not attached yet");
                return Ok(());
            }
        };
        self.step(WorkerEvent::Admitted { attach, after }, myself)
    }

    /// The rank hears whether its memory is used.
    pub(super) fn registered(
        &mut self,
        engine: EngineId,
        admitted: bool,
        myself: &ActorRef<WorkerMessage>,
    ) {
        let Some(mapped) = self
            .mapped
            .as_mut()
            .filter(|mapped| mapped.engine == engine)
        else {
            return;
        };
        let (peer, asked) = (mapped.peer, mapped.asked.take());
        let page_bytes = mapped.memory.geometry().page_bytes;
        if !admitted {
            if let Some(mapped) = self.mapped.take() {
                self.close(mapped.engine, mapped.memory, myself);
            }
            let why = self.turned_away.take();
            let (code, text) = why.map_or((ErrorCode::Internal, String::new()), |why| {
                (why.code, why.message)
            });
            match asked {
                Some(asked) => self.refuse(peer, asked, code, text),
                // An earlier leader had let it in, and the rank takes it for registered: over a new connection it asks again,
                // and hears why not.
                None => self.replier.disconnect(peer),
            }
            return;
        }
        let arena_pages = self
            .depot
            .as_ref()
            .map_or(0, |depot| depot.arena_pages(page_bytes));
        let device_pages = mapped.memory.geometry().device_pages;
        tracing::info!(worker = %self.worker, arena_pages, page_bytes, "engine memory registered");
        if arena_pages > 0 && arena_pages < device_pages {
            tracing::warn!(
                worker = %self.worker,
                arena_pages,
                device_pages,
                "G2 holds fewer pages than the engine itself: it will find little there; raise g2"
            );
        }
        if let Some(asked) = asked {
            let body = Registered {
                arena_pages,
                page_bytes,
                not_served: String::new(),
            };
            self.replier.reply(peer, asked, Message::Registered(body));
        }
    }

    /// A rank takes its memory back: it hears so once nothing of it is open here any more, whichever connection of its
    /// process it was registered over.
    pub(super) fn unregister(
        &mut self,
        peer: PeerId,
        correlation: RequestId,
        myself: &ActorRef<WorkerMessage>,
    ) -> Handled {
        let Some(engine) = self.ranks.get(&peer).map(|rank| rank.engine) else {
            return Ok(());
        };
        if let Some(error) = self.registered_by_another(peer, engine) {
            self.replier.refuse(peer, correlation, error);
            return Ok(());
        }
        // What is being opened is closed when it is open.
        self.unregistered.insert(peer);
        let mut stepped = Ok(());
        // It may have named another engine when it registered.
        let mut named = engine;
        let its = |mapped: &mut Mapped| mapped.peer == peer || mapped.engine == engine;
        if let Some(mut mapped) = self.mapped.take_if(its) {
            named = mapped.engine;
            if let Some(asked) = mapped.asked.take() {
                let text = "unregistered meanwhile".to_owned();
                self.refuse(mapped.peer, asked, ErrorCode::Invalid, text);
            }
            stepped = self.step(WorkerEvent::MemoryGone(named), myself);
            self.close(named, mapped.memory, myself);
        }
        if self.opening.contains_key(&peer) {
            let text = "it is being opened: ask again".to_owned();
            self.refuse(peer, correlation, ErrorCode::NotReady, text);
            return stepped;
        }
        let ends: Vec<LifelineEnd> = self
            .closing
            .iter()
            .filter(|(closing, _)| [engine, named].contains(closing))
            .map(|(_, end)| end.clone())
            .collect();
        let replier = self.replier.clone();
        tokio::task::spawn_blocking(move || {
            let until = Instant::now() + LET_GO_LIMIT;
            let left = || until.saturating_duration_since(Instant::now());
            let answer = match ends.iter().all(|end| end.wait(left())) {
                true => Message::Unregistered(Empty {}),
                false => {
                    let text = format!("copies of it go on for more than {LET_GO_LIMIT:?}");
                    Message::Error(ErrorBody::new(ErrorCode::NotReady, text))
                }
            };
            replier.reply(peer, correlation, answer);
        });
        stepped
    }

    /// Closes an engine's memory, on a thread of its own. A GPU's memory that a copy holds on to for longer than
    /// [`LET_GO_LIMIT`] goes with this process.
    pub(super) fn close(
        &mut self,
        engine: EngineId,
        memory: EngineSide,
        myself: &ActorRef<WorkerMessage>,
    ) {
        self.closing.retain(|(_, end)| !end.wait(Duration::ZERO));
        self.closing.push((engine, memory.end()));
        self.watch_gpu(myself);
        let myself = myself.clone();
        tokio::task::spawn_blocking(move || {
            let on_device = matches!(memory, EngineSide::Device(..));
            let end = memory.end();
            drop(memory);
            // This process may have stood still meanwhile: once more, before that is held against the copies.
            let gone = end.wait(LET_GO_LIMIT) || end.wait(LET_GO_LIMIT / 10);
            if !gone && on_device && myself.cast(WorkerMessage::StillHeld).is_err() {
                tracing::debug!("the worker has stopped");
            }
        });
    }

    /// A rank that serves has no problem with another one that does not get in.
    pub(super) fn turned_away_rank(&self, why: &str) {
        if self.mapped.is_none() {
            self.teller.problem(why.to_owned());
        }
    }
}
