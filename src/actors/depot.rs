//! Prepares a worker's depot: opens its memory and touches every page of it, in parallel, with progress.

use std::cell::Cell;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use ractor::{Actor, ActorProcessingErr, ActorRef};
use tokio::sync::watch;
use tokio::task::{JoinError, JoinHandle};

use crate::gpu::likely_node;
use kvferry_memory::{Depot, DepotError, LockError, NumaNode, Prefault, PrefaultError};
use kvferry_types::ByteSize;

/// Bytes that one thread touches before it reports progress.
const PREFAULT_CHUNK_BYTES: u64 = 64 << 20;
/// Time limit for the preparation of a depot, plus 1 s per [`READY_BYTES_PER_S`]. A longer preparation means that the
/// machine swaps.
const READY_LIMIT_MIN: Duration = Duration::from_secs(60);
/// Lower bound of the prefault rate. Two workers on two virtual cores reached 300 MiB/s each; more workers share the
/// rate of the machine.
const READY_BYTES_PER_S: u64 = 32 << 20;
/// Pause between two reports of progress.
const REPORT_EVERY: Duration = Duration::from_millis(500);

/// Source and placement of a depot's memory.
pub struct DepotSettings {
    /// Memory held by a supervisor, so that it outlives the worker; `None` where the worker creates it.
    pub held: Option<OwnedFd>,
    /// Size in bytes; for held memory, the size of the file is used instead.
    pub bytes: u64,
    /// Threads that touch the memory.
    pub threads: usize,
    /// NUMA node of the memory; `None` for a node near GPU number `gpu`, if there is one.
    pub node: Option<NumaNode>,
    /// Number of the GPU, of those that this process sees, that the engine's rank most likely uses.
    pub gpu: usize,
    /// Lock the memory, so that it is never swapped out.
    pub lock: bool,
    /// Becomes true once all of the memory is ready.
    pub ready: watch::Sender<bool>,
}

/// The reason that a depot's memory cannot be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum DepotFailure {
    /// The memory cannot be opened.
    #[error(transparent)]
    Open(#[from] DepotError),
    /// The memory cannot be touched, or not on the chosen NUMA node.
    #[error(transparent)]
    Prefault(#[from] PrefaultError),
    /// The memory cannot be locked.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// The preparation panicked or was aborted.
    #[error(transparent)]
    Stopped(#[from] JoinError),
    /// The preparation took too long.
    #[error("{progress} after {limit:?}: is the machine swapping? Give it a smaller g2")]
    Slow {
        /// How far the preparation was, as text.
        progress: String,
        /// The time that it had.
        limit: Duration,
    },
}

impl DepotSettings {
    fn ready_limit(&self) -> Duration {
        READY_LIMIT_MIN + Duration::from_secs(self.bytes / READY_BYTES_PER_S)
    }
}

/// Progress of the depot's preparation, in bytes.
#[derive(Debug, Default)]
pub(super) struct DepotProgress {
    done: AtomicU64,
    total: AtomicU64,
    /// The NUMA node of the memory, where one was chosen.
    pub(super) node: OnceLock<u16>,
}

impl DepotProgress {
    /// Bytes that are ready, and bytes in total.
    pub(super) fn bytes(&self) -> (u64, u64) {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        (read(&self.done), read(&self.total))
    }

    /// The progress, as one line for operators.
    pub(super) fn line(&self) -> String {
        let done = ByteSize(self.done.load(Ordering::Relaxed));
        let total = ByteSize(self.total.load(Ordering::Relaxed));
        format!("{done} of {total} host memory are ready")
    }
}

/// A step of the preparation of a depot.
pub(super) enum DepotReport {
    /// The depot is mapped.
    Opened(Arc<Depot>),
    /// More of its memory is prefaulted.
    Progress,
    /// All of its memory is prefaulted, or that failed.
    Prefaulted(Result<(), DepotFailure>),
}

pub(super) struct DepotArguments {
    pub(super) settings: DepotSettings,
    pub(super) progress: Arc<DepotProgress>,
    /// Receives every step. Must not block.
    pub(super) report: Arc<dyn Fn(DepotReport) + Send + Sync>,
}

pub(super) struct DepotActor;

/// Cancels the prefault when the actor stops.
pub(super) struct State(Arc<AtomicBool>);

impl Actor for DepotActor {
    type Msg = ();
    type State = State;
    type Arguments = DepotArguments;

    async fn pre_start(
        &self,
        _myself: ActorRef<()>,
        arguments: DepotArguments,
    ) -> Result<State, ActorProcessingErr> {
        let cancel = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&cancel);
        let DepotArguments {
            settings,
            progress,
            report,
        } = arguments;
        let limit = settings.ready_limit();
        let (shown, steps) = (Arc::clone(&progress), Arc::clone(&report));
        let taken = tokio::task::spawn_blocking(move || {
            prepare(settings, likely_node, &progress, &flag, &*steps)
        });
        let flag = Arc::clone(&cancel);
        tokio::spawn(async move {
            let ready = within(limit, taken, &shown, &flag).await;
            report(DepotReport::Prefaulted(ready));
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

/// Opens the depot and reports it, then determines where its memory belongs, and touches it there. The order matters: a
/// worker attaches once its depot is open, and the leader ends workers that do not attach within the fence time, which
/// a slow driver must not use up. The memory of the depot is not placed before it is touched.
fn prepare(
    settings: DepotSettings,
    place: impl FnOnce(usize) -> Option<NumaNode>,
    progress: &DepotProgress,
    cancel: &AtomicBool,
    report: &dyn Fn(DepotReport),
) -> Result<(), DepotFailure> {
    let DepotSettings {
        held,
        bytes,
        threads,
        node,
        gpu,
        lock,
        ready,
    } = settings;
    let depot = open(held, bytes)?;
    report(DepotReport::Opened(Arc::clone(&depot)));
    let node = node.or_else(|| place(gpu));
    if let Some(node) = &node {
        progress.node.get_or_init(|| node.number());
    }
    let by = Prefault {
        threads,
        chunk_bytes: PREFAULT_CHUNK_BYTES,
        node,
    };
    prefault(&depot, &by, lock, progress, cancel, report)?;
    if lock {
        depot.lock()?;
        progress.done.store(depot.bytes(), Ordering::Relaxed);
    }
    ready.send_replace(true);
    Ok(())
}

fn open(held: Option<OwnedFd>, bytes: u64) -> Result<Arc<Depot>, DepotError> {
    let depot = match held {
        Some(held) => Depot::from_fd(held),
        None => Depot::create(bytes),
    };
    depot.map(Arc::new)
}

fn prefault(
    depot: &Depot,
    by: &Prefault,
    lock: bool,
    progress: &DepotProgress,
    cancel: &AtomicBool,
    report: &dyn Fn(DepotReport),
) -> Result<(), DepotFailure> {
    let reported = Cell::new(Instant::now());
    let step = |done, total| {
        // Memory that must be locked is not ready before that.
        let done = if lock && done == total {
            total - 1
        } else {
            done
        };
        progress.done.store(done, Ordering::Relaxed);
        progress.total.store(total, Ordering::Relaxed);
        if reported.get().elapsed() >= REPORT_EVERY {
            reported.set(Instant::now());
            report(DepotReport::Progress);
        }
    };
    depot.prefault(by, &step, cancel)?;
    Ok(())
}

/// Waits for the preparation. After `limit`, cancels it and returns an error.
async fn within(
    limit: Duration,
    taken: JoinHandle<Result<(), DepotFailure>>,
    progress: &DepotProgress,
    cancel: &AtomicBool,
) -> Result<(), DepotFailure> {
    match tokio::time::timeout(limit, taken).await {
        Ok(Ok(ready)) => ready,
        Ok(Err(error)) => Err(error.into()),
        Err(_) => {
            cancel.store(true, Ordering::Relaxed);
            let progress = progress.line();
            Err(DepotFailure::Slow { progress, limit })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_depot_that_does_not_get_ready_in_time_is_given_up() {
        let progress = DepotProgress::default();
        progress.done.store(1 << 30, Ordering::Relaxed);
        progress.total.store(8 << 30, Ordering::Relaxed);
        let cancel = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&cancel);
        let taken = tokio::task::spawn_blocking(move || {
            while !flag.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
            Ok(())
        });
        let why = within(Duration::from_millis(1), taken, &progress, &cancel).await;
        let why = why.expect_err("it takes for ever").to_string();
        assert!(why.contains("1 GiB of 8 GiB"), "{why}");
        assert!(cancel.load(Ordering::Relaxed), "what runs is told to end");
    }

    /// A driver that does not start must not keep a worker from attaching.
    #[test]
    fn a_depot_is_opened_before_its_numa_node_is_known() {
        let settings = DepotSettings {
            held: None,
            bytes: 1 << 20,
            threads: 1,
            node: None,
            gpu: 3,
            lock: false,
            ready: watch::Sender::default(),
        };
        let ready = settings.ready.subscribe();
        let (open, opened) = std::sync::mpsc::channel();
        let (answer, answered) = std::sync::mpsc::channel::<()>();
        let prefaulting = std::thread::spawn(move || {
            let report = |step| {
                if let DepotReport::Opened(depot) = step {
                    open.send(depot.bytes()).expect("the test waits");
                }
            };
            let place = |gpu| {
                assert_eq!(gpu, 3);
                answered.recv().expect("the driver answers at last");
                None
            };
            let (progress, cancel) = (DepotProgress::default(), AtomicBool::new(false));
            prepare(settings, place, &progress, &cancel, &report)
        });
        let timeout = Duration::from_secs(600);
        let bytes = opened.recv_timeout(timeout);
        assert_eq!(bytes, Ok(1 << 20), "opened while the driver starts");
        assert!(!*ready.borrow(), "nothing is touched yet");
        answer.send(()).expect("it waits");
        let prepared = prefaulting.join().expect("no panic");
        prepared.expect("a depot");
        assert!(*ready.borrow());
    }

    #[test]
    fn larger_depots_have_more_time() {
        let settings = |bytes| DepotSettings {
            held: None,
            bytes,
            threads: 1,
            node: None,
            gpu: 0,
            lock: false,
            ready: watch::Sender::default(),
        };
        assert_eq!(settings(0).ready_limit(), READY_LIMIT_MIN);
        let day = Duration::from_secs(24 * 3600);
        let limit = settings(1 << 40).ready_limit();
        assert!(
            limit > Duration::from_secs(3600) && limit < day,
            "{limit:?}"
        );
    }
}
