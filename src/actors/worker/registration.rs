//! Opens the memory of an engine's rank, and closes it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ractor::ActorRef;

use super::{Host, WorkerMessage};
use crate::gpu::{EngineSide, Gpu};
use kvferry_memory::{DropWaiter, OpenError, RegisteredMemory, pieces_without_proof, validate};
use kvferry_protocol::{ErrorBody, ErrorCode, Message};
use kvferry_shell::Registering;
use kvferry_transport::{FdReceiver, PeerId, Ticket};
use kvferry_types::{
    AllocationHandle, AllocationKind, ChunkHandle, EngineId, Registration, RequestId,
};

/// How long copies may hold memory that its engine has unregistered or left.
const LET_GO_LIMIT: Duration = Duration::from_secs(2);

/// Returns the bytes of a page of memory that is not copied. Checks its description; host memory is also mapped and
/// proven.
fn understood(
    registration: &Registration,
    on_device: bool,
    fds: &FdReceiver,
) -> Result<u64, OpenError> {
    if on_device {
        let layout = validate(registration)?;
        return Ok(layout.geometry.page_bytes());
    }
    let memory = RegisteredMemory::open(registration, |ticket| fds.take(ticket))?;
    Ok(memory.layout.geometry.page_bytes())
}

/// The error for a rank whose memory was not opened. `may_pass` is true where the bytes to be found may have been
/// overwritten meanwhile.
fn refused(may_pass: bool, error: &dyn std::fmt::Display) -> ErrorBody {
    let code = match may_pass {
        true => ErrorCode::NotReady,
        false => ErrorCode::Invalid,
    };
    ErrorBody::new(code, error.to_string())
}

/// The descriptors that a registration names. Descriptors that were not taken are closed when this is dropped.
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
                        ChunkHandle::CudaFabric(_) | ChunkHandle::Other => None,
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

impl Host {
    /// Warns once that an engine gives no proofs for some of its memory: a handle to the wrong memory is not detected
    /// there.
    fn warn_of_proofs(&mut self, registration: &Registration) {
        let pieces = pieces_without_proof(registration);
        if pieces > 0 && !std::mem::replace(&mut self.proofs_logged, true) {
            tracing::warn!(
                worker = %self.worker,
                pieces,
                "the engine gives no proof (registration.proofs) for pieces of its memory: they are used as its handles state"
            );
        }
    }

    /// Closes the descriptors of a registration, on a thread of its own.
    pub(super) fn drop_tickets(&self, registration: &Registration) {
        let tickets = Tickets::of(registration, &self.fds);
        tokio::task::spawn_blocking(move || drop(tickets));
    }

    /// Returns the GPU for memory that lies on one and is copied. Fails until the depot is prefaulted.
    fn gpu_of(
        &mut self,
        registration: &Registration,
        copied_on_device: bool,
        serves: bool,
    ) -> Result<Option<Arc<Gpu>>, ErrorBody> {
        if !self.prefaulted {
            let text = self.progress.line();
            return Err(ErrorBody::new(ErrorCode::NotReady, text));
        }
        match copied_on_device {
            true => self.gpu_for(registration, serves).map(Some),
            false => Ok(None),
        }
    }

    /// Opens and maps the memory on a thread of its own.
    pub(super) fn open_memory(
        &mut self,
        registering: Registering,
        registration: Registration,
        serves: bool,
    ) -> Result<(), ErrorBody> {
        self.warn_of_proofs(&registration);
        // Takes the descriptors on every path: a descriptor that is not taken keeps its memory.
        let tickets = Tickets::of(&registration, &self.fds);
        let on_device = registration
            .allocations
            .iter()
            .any(|allocation| allocation.kind == AllocationKind::Device);
        // The depot is not pinned for memory that is not copied.
        let copied_on_device = on_device && registering.not_served.is_none();
        let gpu = match self.gpu_of(&registration, copied_on_device, serves) {
            Ok(gpu) => gpu,
            Err(error) => {
                tokio::task::spawn_blocking(move || drop(tickets));
                return Err(error);
            }
        };
        let fds = Arc::clone(&self.fds);
        let worker = self.myself.clone();
        tokio::task::spawn_blocking(move || {
            let _tickets = tickets;
            let message = match registering.not_served {
                Some(_) => {
                    let found = understood(&registration, on_device, &fds)
                        .map_err(|error| ErrorBody::new(ErrorCode::Invalid, error.to_string()));
                    WorkerMessage::Checked(registering, found)
                }
                None => {
                    let memory = open(&registration, gpu, &fds, &worker);
                    WorkerMessage::Mapped(registering, Box::new(memory))
                }
            };
            if worker.cast(message).is_err() {
                tracing::debug!("the worker has stopped");
            }
        });
        Ok(())
    }

    /// Closes an engine's memory, on a thread of its own. Ends the process if a copy holds GPU memory for longer than
    /// [`LET_GO_LIMIT`].
    pub(super) fn close_memory(&mut self, engine: EngineId, memory: EngineSide) {
        self.closing.retain(|(_, end)| !end.wait(Duration::ZERO));
        self.closing.push((engine, memory.end()));
        self.watch_gpu();
        let worker = self.myself.clone();
        tokio::task::spawn_blocking(move || {
            let on_device = matches!(memory, EngineSide::Device(..));
            let end = memory.end();
            drop(memory);
            // Waits a second time before the copies count as stuck, because this process may have been stopped
            // meanwhile.
            let gone = end.wait(LET_GO_LIMIT) || end.wait(LET_GO_LIMIT / 10);
            if !gone && on_device && worker.cast(WorkerMessage::StillHeld).is_err() {
                tracing::debug!("the worker has stopped");
            }
        });
    }

    /// Answers a rank once all memory of this engine is closed in this worker, or after [`LET_GO_LIMIT`].
    pub(super) fn answer_when_closed(
        &self,
        peer: PeerId,
        request: RequestId,
        engine: EngineId,
        answer: Message,
    ) {
        let closing = self.closing.iter();
        let its = closing.filter(|(of, _)| of == &engine);
        let ends: Vec<DropWaiter> = its.map(|(_, end)| end.clone()).collect();
        let replier = self.replier.clone();
        tokio::task::spawn_blocking(move || {
            let until = Instant::now() + LET_GO_LIMIT;
            let left = || until.saturating_duration_since(Instant::now());
            let answer = match ends.iter().all(|end| end.wait(left())) {
                true => answer,
                false => {
                    let text = format!("copies of it run for more than {LET_GO_LIMIT:?}");
                    Message::Error(ErrorBody::new(ErrorCode::NotReady, text))
                }
            };
            replier.reply(peer, request, answer);
        });
    }
}

/// Maps an engine's memory. `gpu` is `None` for host memory.
fn open(
    registration: &Registration,
    gpu: Option<Arc<Gpu>>,
    fds: &FdReceiver,
    worker: &ActorRef<WorkerMessage>,
) -> Result<EngineSide, ErrorBody> {
    let Some(gpu) = gpu else {
        let memory = RegisteredMemory::open(registration, |ticket| fds.take(ticket));
        let memory = memory.map_err(|error| refused(error.may_pass(), &error))?;
        return Ok(EngineSide::Host(memory));
    };
    match gpu.open(registration, fds) {
        Ok(memory) => Ok(EngineSide::Device(memory, gpu)),
        Err(error) => {
            // A fatal error about memory that a rank supplied does not prove that the GPU is lost: check the GPU itself
            // first.
            if let Some(fatal) = error.fatal()
                && !gpu.works()
                && worker.cast(WorkerMessage::GpuLost(fatal)).is_err()
            {
                tracing::debug!("the worker has stopped");
            }
            Err(refused(error.may_pass(), &error))
        }
    }
}
