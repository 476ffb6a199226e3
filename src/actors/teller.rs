//! Tells the leader how far this worker is, so that its status says so of every rank, also of one that never gets ready.

use std::time::Duration;

use ractor::ActorRef;
use tokio::sync::watch;

use crate::actors::worker::WorkerMessage;
use crate::protocol::{Message, Preparing};
use crate::transport::Client;

/// How long telling may take, and so the longest that a worker that gives up stays.
const TELL_LIMIT: Duration = Duration::from_secs(2);

/// What there is to tell.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct News {
    ready_bytes: u64,
    bytes: u64,
    problem: String,
    gives_up: bool,
}

/// Tells one thing at a time, and always the newest.
pub(super) struct Teller(watch::Sender<News>);

impl Teller {
    /// Tells `leader`; ends with the worker.
    pub(super) fn start(leader: Client, worker: ActorRef<WorkerMessage>) -> Self {
        let (news, told) = watch::channel(News::default());
        tokio::spawn(run(leader, told, worker));
        Self(news)
    }

    /// So many bytes of host memory are ready, of so many. Told again even when nothing has changed: the leader may be
    /// another one.
    pub(super) fn tell(&self, (ready_bytes, bytes): (u64, u64)) {
        self.0.send_modify(|news| {
            (news.ready_bytes, news.bytes) = (ready_bytes, bytes);
        });
    }

    /// Why the engine's rank was turned away; empty once it was not.
    pub(super) fn problem(&self, problem: String) {
        self.0.send_if_modified(|news| {
            let changes = !news.gives_up && news.problem != problem;
            if changes {
                news.problem = problem;
            }
            changes
        });
    }

    /// Why this worker ends. It is to end when [`WorkerMessage::Failed`] comes back.
    pub(super) fn give_up(&self, why: String) {
        self.0.send_modify(|news| {
            (news.problem, news.gives_up) = (why, true);
        });
    }
}

async fn run(leader: Client, mut told: watch::Receiver<News>, worker: ActorRef<WorkerMessage>) {
    while told.changed().await.is_ok() {
        let news = told.borrow_and_update().clone();
        let body = Preparing::new(news.ready_bytes, news.bytes, news.problem.clone());
        let asked = leader.ask(Message::Preparing(body), TELL_LIMIT);
        let newer = tokio::select! {
            answer = asked => {
                if let Err(failure) = answer {
                    tracing::debug!(%failure, "the leader does not know how far this worker is");
                }
                false
            }
            gives_up = told.wait_for(|newer| newer.gives_up), if !news.gives_up => gives_up.is_ok(),
        };
        if newer {
            told.mark_changed();
            continue;
        }
        if news.gives_up {
            if worker.cast(WorkerMessage::Failed(news.problem)).is_err() {
                tracing::debug!("the worker has stopped");
            }
            return;
        }
    }
}
