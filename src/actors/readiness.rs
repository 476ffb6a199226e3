//! Reports a worker's progress and problems to the leader, whose status shows them for every rank, also for one that
//! never becomes ready.

use std::time::Duration;

use tokio::sync::watch;

use kvferry_protocol::{DiskHealth, DiskStatus, Message, Readiness};
use kvferry_transport::Client;

/// Time limit of one report, and so the longest time for which a worker that gives up remains.
const REPORT_LIMIT: Duration = Duration::from_secs(2);

/// The state that is reported.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct State {
    ready_bytes: u64,
    bytes: u64,
    pinned_bytes: Option<u64>,
    problem: String,
    disk: Option<Box<DiskStatus>>,
    gives_up: bool,
}

/// Sends one report at a time, always with the newest state.
pub(super) struct ReadinessReporter(watch::Sender<State>);

impl ReadinessReporter {
    /// Reports to `leader` until the worker ends. Calls `ended` once the reason of [`Self::report_end`] was reported.
    pub(super) fn start(leader: Client, ended: impl FnOnce(String) + Send + 'static) -> Self {
        let (state, reported) = watch::channel(State::default());
        let notify = async move |body| {
            let requested = leader.request(Message::Readiness(body), REPORT_LIMIT).await;
            if let Err(failure) = requested {
                tracing::debug!(%failure, "the leader has not received the progress of this worker");
            }
        };
        tokio::spawn(async move {
            let Some(why) = run(notify, reported).await else {
                return;
            };
            ended(why);
        });
        Self(state)
    }

    /// Reports how many bytes of the host memory are ready, and of how many. Reported also when nothing has changed,
    /// because the leader may be a new one.
    pub(super) fn report_bytes(&self, (ready_bytes, bytes): (u64, u64)) {
        self.0.send_modify(|state| {
            (state.ready_bytes, state.bytes) = (ready_bytes, bytes);
        });
    }

    /// Reports how many bytes of the host memory are pinned for a GPU; `None` where no GPU copies.
    pub(super) fn pinned(&self, pinned_bytes: Option<u64>) {
        self.0.send_if_modified(|state| {
            let changes = state.pinned_bytes != pinned_bytes;
            state.pinned_bytes = pinned_bytes;
            changes
        });
    }

    /// Reports why the engine's rank was refused; an empty text clears the problem.
    pub(super) fn problem(&self, problem: String) {
        self.0.send_if_modified(|state| {
            let changes = !state.gives_up && state.problem != problem;
            if changes {
                state.problem = problem;
            }
            changes
        });
    }

    /// Reports the state of the disk. That of a disk with a problem is reported also when nothing has changed: the leader
    /// decides by it, and an earlier report may be lost.
    pub(super) fn disk(&self, disk: DiskStatus) {
        self.0.send_if_modified(|state| {
            let changes = state.disk.as_deref() != Some(&disk);
            let repeat = disk.health != DiskHealth::Ok;
            state.disk = Some(Box::new(disk));
            changes || repeat
        });
    }

    /// Reports why this worker ends. The worker must end when this reporter has called `ended`.
    pub(super) fn report_end(&self, why: String) {
        self.0.send_modify(|state| {
            (state.problem, state.gives_up) = (why, true);
        });
    }
}

/// Reports each new state until the worker ends, or until it has reported why it gives up: returns that reason.
async fn run(
    notify: impl AsyncFn(Readiness),
    mut reported: watch::Receiver<State>,
) -> Option<String> {
    while reported.changed().await.is_ok() {
        let state = reported.borrow_and_update().clone();
        let problem = state.problem.clone();
        let body = Readiness {
            disk: state.disk.clone(),
            ..Readiness::new(state.ready_bytes, state.bytes, state.pinned_bytes, problem)
        };
        // A separate receiver: states that arrive during the wait stay unread in `reported`, and are reported
        // afterwards.
        let mut last_words = reported.clone();
        let newer = tokio::select! {
            () = notify(body) => false,
            gives_up = last_words.wait_for(|newer| newer.gives_up), if !state.gives_up => gives_up.is_ok(),
        };
        if !newer && state.gives_up {
            return Some(state.problem);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::sync::{Semaphore, mpsc};

    use super::*;

    /// A reporter whose leader takes each report when a permit is added; the reported problems come out of the
    /// receiver.
    fn slow() -> (
        ReadinessReporter,
        Arc<Semaphore>,
        mpsc::Receiver<String>,
        tokio::task::JoinHandle<Option<String>>,
    ) {
        let (state, reported) = watch::channel(State::default());
        let (received, receiver) = mpsc::channel(8);
        let lets = Arc::new(Semaphore::new(0));
        let gate = Arc::clone(&lets);
        let notify = async move |body: Readiness| {
            received.try_send(body.problem).expect("somebody listens");
            gate.acquire().await.expect("open").forget();
        };
        let running = tokio::spawn(async move { run(notify, reported).await });
        (ReadinessReporter(state), lets, receiver, running)
    }

    #[tokio::test]
    async fn a_problem_during_a_report_is_reported_next() {
        let (readiness, lets, mut receiver, running) = slow();
        readiness.report_bytes((1, 2));
        assert_eq!(receiver.recv().await.as_deref(), Some(""));
        readiness.problem("no GPU".to_owned());
        // Lets the wait for `gives_up` see the problem before the first report has ended.
        tokio::task::yield_now().await;
        lets.add_permits(1);
        assert_eq!(receiver.recv().await.as_deref(), Some("no GPU"));
        drop(readiness);
        lets.add_permits(1);
        assert_eq!(running.await.expect("no panic"), None);
    }

    #[tokio::test]
    async fn the_last_report_does_not_wait_for_earlier_ones() {
        let (readiness, lets, mut receiver, running) = slow();
        readiness.report_bytes((1, 2));
        assert_eq!(receiver.recv().await.as_deref(), Some(""));
        readiness.report_end("no memory".to_owned());
        assert_eq!(receiver.recv().await.as_deref(), Some("no memory"));
        lets.add_permits(1);
        let why = running.await.expect("no panic");
        assert_eq!(why.as_deref(), Some("no memory"));
    }
}
