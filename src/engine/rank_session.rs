//! A rank's connection to its worker, for the lifetime of the engine.
//!
//! When the connection breaks, or another worker takes over, the memory is registered again. The leader refuses the
//! scheduler's requests in the meantime; nothing else is lost.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::layout::pages_bytes;
use crate::memory::RankMemory;
use crate::outbox::{Outbox, RankRequest};
use crate::pipe::Report;
use crate::rank::{RankSettings, random};
use kvferry_protocol::{
    Abandon, ErrorCode, FEATURE_TIMELINE, Hello, Message, Register, Role, VERSION, VERSION_MIN,
    Written,
};
use kvferry_transport::{
    Address, Client, ClientSettings, Failure, Incoming, Limits, LinkId, Transport,
};
use kvferry_types::{Nonce, Registration, RequestId, Timeline};

/// Time limit of one request to the worker, after which it is repeated. A registration waits for the leader.
const QUESTION_LIMIT: Duration = Duration::from_secs(30);
/// Pause after a request that failed; doubles with each failure, up to `PAUSE_MAX`.
const PAUSE_FIRST: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// A report for the worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RankCommand {
    /// Stores up to this request may read their pages.
    Written(RequestId),
    /// Nothing may be copied for this request any longer. Reported under `ticket` once the worker has confirmed.
    Abandon { request: RequestId, ticket: u64 },
}

/// The outcome of a request to the worker.
struct Asked {
    link: LinkId,
    question: RankRequest,
    answer: Result<(), Failure>,
}

/// Sends the requests that a rank owes its worker, and reports their ends.
pub(super) struct RankSession {
    asker: Asker,
    incoming: mpsc::Receiver<Incoming>,
    reports: mpsc::Sender<Report>,
    outbox: Outbox,
    asking: JoinSet<Asked>,
    pause: Duration,
    /// Deadline of the first registration; `None` once it has succeeded.
    start_by: Option<Instant>,
}

/// State that is needed to send one request.
#[derive(Clone)]
struct Asker {
    settings: Arc<RankSettings>,
    memory: Arc<RankMemory>,
    worker: Client,
    /// Features of both sides, from the last welcome.
    features: u64,
}

impl RankSession {
    pub(super) fn start(
        transport: Arc<dyn Transport>,
        settings: &RankSettings,
        memory: Arc<RankMemory>,
        reports: mpsc::Sender<Report>,
    ) -> Self {
        let hello = Hello {
            version_min: VERSION_MIN,
            version_max: VERSION,
            role: Role::Rank,
            engine: settings.engine.0,
            rank: settings.rank.0,
            replica: settings.replica.0,
            features: memory.timeline().map_or(0, |_| FEATURE_TIMELINE),
            name: format!("reference engine, {}", settings.rank),
        };
        let client = ClientSettings {
            address: Address::Directory(settings.worker_dir.clone()),
            hello,
            limits: Limits::default(),
        };
        let (worker, incoming) = Client::start(transport, client);
        let start_by = Some(Instant::now() + settings.start_limit);
        let asker = Asker {
            settings: Arc::new(settings.clone()),
            memory,
            worker,
            features: 0,
        };
        Self {
            asker,
            incoming,
            reports,
            outbox: Outbox::new(),
            asking: JoinSet::new(),
            pause: PAUSE_FIRST,
            start_by,
        }
    }

    /// Runs until a fatal error or the end of the engine; returns the reason.
    pub(super) async fn run(mut self, mut told: mpsc::Receiver<RankCommand>) -> String {
        loop {
            while let Some((link, question)) = self.outbox.next() {
                let (asker, pause) = (self.asker.clone(), self.pause);
                self.asking.spawn(asker.ask(link, question, pause));
            }
            let step = tokio::select! {
                incoming = self.incoming.recv() => self.heard(incoming),
                tell = told.recv() => self.told(tell),
                Some(asked) = self.asking.join_next() => match asked {
                    Ok(asked) => self.answered(asked).await,
                    Err(error) if error.is_cancelled() => Ok(()),
                    Err(error) => Err(error.to_string()),
                },
                () = expired(self.start_by) => {
                    let limit = self.asker.settings.start_limit;
                    Err(format!("{}: no worker took its memory in {limit:?}", self.asker.settings.rank))
                }
            };
            if let Err(why) = step {
                return why;
            }
        }
    }

    fn told(&mut self, tell: Option<RankCommand>) -> Result<(), String> {
        match tell.ok_or("the engine has ended")? {
            RankCommand::Written(through) => self.outbox.wrote(through.0),
            RankCommand::Abandon { request, ticket } => self.outbox.abandon(request.0, ticket),
        }
        Ok(())
    }

    fn heard(&mut self, incoming: Option<Incoming>) -> Result<(), String> {
        match incoming.ok_or("the conversation with the worker has ended")? {
            Incoming::Welcomed { link, features, .. } => {
                self.asker.features = features;
                self.asking.abort_all();
                self.pause = PAUSE_FIRST;
                self.outbox.connected(link);
            }
            Incoming::Lost => {
                self.asking.abort_all();
                self.outbox.lost();
            }
            Incoming::Request { envelope, .. } => {
                let kind = envelope.message.kind().name();
                tracing::debug!(kind, "a worker asks a rank for nothing");
            }
            Incoming::Answered { id, .. } => {
                tracing::debug!(%id, "a rank asks nothing in order");
            }
        }
        Ok(())
    }

    async fn answered(&mut self, asked: Asked) -> Result<(), String> {
        let Asked {
            link,
            question,
            answer,
        } = asked;
        let registers = matches!(question, RankRequest::Register { .. });
        if let Err(failure) = &answer {
            let rank = self.asker.settings.rank;
            tracing::debug!(%rank, ?question, %failure, "asking the worker again");
            if registers && self.start_by.is_some() && !failure.code.retry() {
                return Err(format!("{rank}: {failure}"));
            }
            if failure.code == ErrorCode::Invalid {
                self.outbox.forgotten(link);
            }
            self.pause = (self.pause * 2).min(PAUSE_MAX);
        } else {
            self.pause = PAUSE_FIRST;
        }
        let ended = self.outbox.answered(link, &question, answer.is_ok());
        if answer.is_ok() && registers && self.start_by.take().is_some() {
            self.report(0).await?;
        }
        for ticket in ended {
            self.report(ticket).await?;
        }
        Ok(())
    }

    async fn report(&self, ticket: u64) -> Result<(), String> {
        let report = Report {
            ticket,
            ..Report::default()
        };
        let sent = self.reports.send(report).await;
        sent.map_err(|_| "nobody reads the reports".to_owned())
    }
}

impl Asker {
    /// Sends one request over this connection; pauses after a failure.
    async fn ask(self, link: LinkId, question: RankRequest, pause: Duration) -> Asked {
        let answer = match &question {
            RankRequest::Register { after } => self.register(link, *after).await,
            RankRequest::Written { through } => self.written(link, *through).await,
            RankRequest::Abandon { requests } => {
                let requests = requests.clone();
                self.say(link, Message::Abandon(Abandon { requests })).await
            }
        };
        if answer.is_err() {
            tokio::time::sleep(pause).await;
        }
        Asked {
            link,
            question,
            answer,
        }
    }

    async fn say(&self, link: LinkId, message: Message) -> Result<(), Failure> {
        let asked = self.worker.ask_over(link, message, QUESTION_LIMIT);
        asked.await.map(|_| ())
    }

    /// The word to which the device writes its progress; `None` if it has none, or the worker does not read it.
    fn timeline(&self) -> Option<Timeline> {
        let both = self.features & FEATURE_TIMELINE != 0;
        self.memory.timeline().filter(|_| both)
    }

    /// Reports what is written. With a timeline the device's word shows when its writes are complete; without one, the
    /// report is sent after they are.
    async fn written(&self, link: LinkId, through: u64) -> Result<(), Failure> {
        let timeline = self.timeline().is_some();
        if !timeline {
            let memory = Arc::clone(&self.memory);
            let finished = tokio::task::spawn_blocking(move || memory.finish()).await;
            finished
                .map_err(|error| not_now(error.to_string()))?
                .map_err(not_now)?;
        }
        let written = Written { through, timeline };
        self.say(link, Message::Written(written)).await
    }

    /// Hands the memory over to the worker and registers it.
    async fn register(&self, link: LinkId, after: u64) -> Result<(), Failure> {
        let settings = &self.settings;
        let mut proof = [0; 32];
        random(&mut proof).map_err(not_now)?;
        let nonce = Nonce {
            allocation: 0,
            offset_bytes: pages_bytes(settings),
            bytes: proof.to_vec(),
        };
        let place = (nonce.offset_bytes, proof.len() as u64);
        let written = self.memory.write(&[place], &mut proof);
        written
            .and_then(|()| self.memory.finish())
            .map_err(not_now)?;
        let described = self.memory.hand_over(&settings.worker_dir).await;
        let described = described.map_err(not_now)?;
        let register = Register {
            after,
            engine: settings.engine.0,
            registration: Registration {
                timeline: self.timeline(),
                ..described.complete(settings, nonce)
            },
        };
        let asked = Message::Register(register);
        let answer = self.worker.ask_over(link, asked, QUESTION_LIMIT).await?;
        match answer {
            Message::Registered(registered) if !registered.not_served.is_empty() => {
                Err(Failure::new(ErrorCode::Invalid, registered.not_served))
            }
            _ => Ok(()),
        }
    }
}

fn not_now(message: String) -> Failure {
    Failure::new(ErrorCode::NotReady, message)
}

/// Waits until a point in time; forever if there is none.
async fn expired(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}
