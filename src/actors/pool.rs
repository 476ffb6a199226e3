//! Makes a worker's depot ready: opens its memory and touches every page of it, in parallel, with progress.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use ractor::{Actor, ActorProcessingErr, ActorRef};

use crate::actors::worker::WorkerMessage;
use crate::memory::Depot;
use crate::types::ByteSize;

/// Bytes that one thread touches before it reports.
const PREFAULT_CHUNK_BYTES: u64 = 64 << 20;

/// Where a depot's memory comes from.
pub struct PoolSettings {
    /// Held by a supervisor, so that it outlives the worker; made by the worker itself otherwise.
    pub held: Option<OwnedFd>,
    /// Its size; of memory that is held, the size is that of the file.
    pub bytes: u64,
    /// Threads that touch it.
    pub threads: usize,
}

/// How far the depot is, in bytes.
#[derive(Debug, Default)]
pub(super) struct Progress {
    done: AtomicU64,
    total: AtomicU64,
}

impl Progress {
    /// One line for people.
    pub(super) fn line(&self) -> String {
        let done = ByteSize(self.done.load(Ordering::Relaxed));
        let total = ByteSize(self.total.load(Ordering::Relaxed));
        format!("{done} of {total} host memory are ready")
    }
}

pub(super) struct PoolArguments {
    pub(super) settings: PoolSettings,
    pub(super) progress: Arc<Progress>,
    pub(super) worker: ActorRef<WorkerMessage>,
}

pub(super) struct PoolActor;

/// Stops the touching when the actor stops.
pub(super) struct State(Arc<AtomicBool>);

impl Actor for PoolActor {
    type Msg = ();
    type State = State;
    type Arguments = PoolArguments;

    async fn pre_start(
        &self,
        _myself: ActorRef<()>,
        arguments: PoolArguments,
    ) -> Result<State, ActorProcessingErr> {
        let cancel = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&cancel);
        tokio::task::spawn_blocking(move || {
            let PoolArguments {
                settings,
                progress,
                worker,
            } = arguments;
            let threads = settings.threads;
            let say = |message| {
                if worker.cast(message).is_err() {
                    tracing::debug!("the worker has stopped");
                }
            };
            match open(settings) {
                Ok(depot) => {
                    say(WorkerMessage::Depot(Ok(Arc::clone(&depot))));
                    say(WorkerMessage::Prefaulted(prefault(
                        &depot, threads, &progress, &flag,
                    )));
                }
                Err(why) => say(WorkerMessage::Depot(Err(why))),
            }
        });
        Ok(State(cancel))
    }

    async fn post_stop(
        &self,
        _myself: ActorRef<()>,
        state: &mut State,
    ) -> Result<(), ActorProcessingErr> {
        state.0.store(true, Ordering::Relaxed);
        Ok(())
    }
}

fn open(settings: PoolSettings) -> Result<Arc<Depot>, String> {
    let depot = match settings.held {
        Some(held) => Depot::from_fd(held),
        None => Depot::create(settings.bytes),
    };
    depot.map(Arc::new).map_err(|error| error.to_string())
}

fn prefault(
    depot: &Depot,
    threads: usize,
    progress: &Progress,
    cancel: &AtomicBool,
) -> Result<(), String> {
    let report = |done, total| {
        progress.done.store(done, Ordering::Relaxed);
        progress.total.store(total, Ordering::Relaxed);
    };
    depot
        .prefault(threads, PREFAULT_CHUNK_BYTES, &report, cancel)
        .map(|_| ())
        .map_err(|error| error.to_string())
}
