//! `kvferry events`

mod streams;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::time::{Instant, sleep_until};

use crate::cli::arguments::ClientArguments;
use crate::cli::common::{block_on, print_line};
use crate::cli::signals::Signals;
use crate::cli::status;
use crate::error::CommandError;
use kvferry_client::AdminClient;
use kvferry_events::{
    Batch, Event, Feed, Followed, GONE_MAX, Join, JoinSettings, Mode, Numbers, PAGES_MAX,
    PLACES_MAX, Shape, Step,
};
use kvferry_protocol::Events;
use kvferry_transport::{Clock, Failure, PublicAddress, Publisher, PublisherLimits};
use streams::{EngineStream, Frame};

/// Longest time that a read of the leader's changes waits for one, and time beyond that after which it fails.
const WAIT: Duration = Duration::from_secs(10);
const READ_LIMIT: Duration = Duration::from_secs(5);
/// Pause after a failed read.
const RETRY: Duration = Duration::from_secs(1);
/// Time without an answer of the leader after which no page counts as held. A restart of the leader takes less.
const ABSENT: Duration = Duration::from_secs(30);
/// How often the file with the engine's namespace is read.
const LOOK: Duration = Duration::from_millis(500);
/// Time after which a file with the namespace that is missing is logged: the engine may start later.
const MISSING_AFTER: Duration = Duration::from_secs(10);
/// Events in a published batch, at most.
const BATCH_EVENTS_MAX: usize = 128;
/// Groups of an engine.
const GROUPS_MAX: usize = 256;

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum ModeName {
    Tiers,
    Blind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum ShapeName {
    Map,
    Array,
}

#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    client: ClientArguments,
    /// Where the engine publishes its KV events, such as tcp://127.0.0.1:5557.
    #[arg(long, value_name = "ENDPOINT", value_parser = endpoint)]
    engine: String,
    /// Where the engine answers requests for earlier batches. Without it, a gap in the engine's stream removes every page
    /// that the engine has announced.
    #[arg(long, value_name = "ENDPOINT", value_parser = endpoint)]
    engine_replay: Option<String>,
    /// Topic of the engine's batches; empty for all.
    #[arg(long, default_value = "", value_name = "TOPIC")]
    engine_topic: String,
    /// Where the merged events are published, such as tcp://0.0.0.0:5657.
    #[arg(long, value_name = "ENDPOINT", value_parser = endpoint)]
    publish: String,
    /// Where requests for earlier batches are answered.
    #[arg(long, value_name = "ENDPOINT", value_parser = endpoint)]
    replay: Option<String>,
    /// Topic of the merged batches, such as kv@POD@MODEL.
    #[arg(long, default_value = "", value_name = "TOPIC")]
    topic: String,
    /// tiers: the engine's events pass through, and pages in kvferry are announced with the media CPU and STORAGE; blind,
    /// for routers that know no tiers: a page is announced when the first tier has it, and removed when the last one has
    /// lost it.
    #[arg(long, value_enum, default_value = "tiers")]
    mode: ModeName,
    /// map: events are maps, as vLLM 0.32 and SGLang write them; array: as earlier versions of vLLM did, without groups of
    /// layers, of which the first one alone is published.
    #[arg(long, value_enum, default_value = "map")]
    shape: ShapeName,
    /// Number of the engine beside the leader: its connector leaves the namespace of its pages in the socket directory.
    #[arg(long, default_value = "0", conflicts_with = "namespace")]
    replica: u16,
    /// Namespace of the engine's pages in kvferry, in hexadecimal digits, for connectors that leave none.
    #[arg(long, value_name = "HEX", value_parser = hex)]
    namespace: Option<Namespace>,
    /// Numbers of the engine's groups of layers in its events, in the order in which it registers them, with commas between
    /// them, where they are not 0, 1, 2 and so on.
    #[arg(long, value_name = "N[,N...]", value_parser = groups, requires = "namespace")]
    groups: Option<Groups>,
}

/// The engine's numbers of its groups.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Groups(Vec<u32>);

/// The bytes of a namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Namespace(Vec<u8>);

fn endpoint(text: &str) -> Result<String, String> {
    let known = ["tcp://", "ipc://"]
        .iter()
        .any(|scheme| text.starts_with(scheme));
    if !known || text.contains('*') {
        return Err(
            "give tcp://HOST:PORT or ipc://PATH; tcp://0.0.0.0:PORT for every address".to_owned(),
        );
    }
    let port = text.strip_prefix("tcp://").map(|address| {
        let (host, port) = address.rsplit_once(':').unwrap_or((address, ""));
        !host.is_empty() && port.parse::<u16>().is_ok_and(|port| port > 0)
    });
    if port == Some(false) {
        return Err("give tcp://HOST:PORT, with a port from 1 to 65535".to_owned());
    }
    Ok(text.to_owned())
}

fn hex(text: &str) -> Result<Namespace, String> {
    let wrong = || "give an even number of hexadecimal digits, at most 2,048".to_owned();
    if !text.len().is_multiple_of(2) || text.len() > 2048 || !text.is_ascii() {
        return Err(wrong());
    }
    let pairs = text.as_bytes().chunks_exact(2);
    let bytes = pairs.map(|pair| {
        let digits = std::str::from_utf8(pair).map_err(|_| wrong())?;
        u8::from_str_radix(digits, 16).map_err(|_| wrong())
    });
    bytes.collect::<Result<_, _>>().map(Namespace)
}

fn groups(text: &str) -> Result<Groups, String> {
    let wrong = || format!("give at most {GROUPS_MAX} different numbers with commas between them");
    let numbers = text.split(',').map(|number| number.trim().parse());
    let numbers: Vec<u32> = numbers.collect::<Result<_, _>>().map_err(|_| wrong())?;
    let different: BTreeSet<_> = numbers.iter().collect();
    if numbers.len() > GROUPS_MAX || different.len() < numbers.len() {
        return Err(wrong());
    }
    Ok(Groups(numbers))
}

/// The file in which the connector of an engine leaves the namespace of its pages, in hexadecimal digits, and in a second
/// line the numbers of its groups, where they are not 0, 1, 2 and so on.
fn namespace_file(root: &Path, replica: u16) -> PathBuf {
    root.join(format!("namespace-{replica}"))
}

impl Arguments {
    pub(super) fn run(self) -> Result<(), CommandError> {
        let (socket_paths, place) = self.client.clone().load()?;
        block_on(2, async move {
            let mut signals = Signals::listen()?;
            let file = namespace_file(socket_paths.root(), self.replica);
            let follows = match self.namespace.clone() {
                Some(Namespace(namespace)) => Follows::Always(Followed {
                    namespace,
                    groups: self
                        .groups
                        .clone()
                        .map_or(Vec::new(), |Groups(groups)| groups),
                }),
                None => Follows::File(file),
            };
            let leader = status::admin_at(&place, "events");
            // The engine may not publish yet: a signal also ends the wait for it.
            tokio::select! {
                result = self.publish_merged(leader, follows) => result,
                () = signals.any() => Ok(()),
            }
        })
    }

    async fn publish_merged(
        &self,
        leader: AdminClient,
        follows: Follows,
    ) -> Result<(), CommandError> {
        let mut events = Merged::start(self, leader, follows).await?;
        print_line(&format!("publishing at {}", self.publish));
        events.run().await
    }
}

/// Logs a problem that is looked at again and again, each time that it changes.
#[derive(Default)]
struct Problem(String);

impl Problem {
    fn is(&mut self, text: String) {
        if text != self.0 {
            tracing::warn!("{text}");
        }
        self.0 = text;
    }

    fn is_over(&mut self) {
        self.0.clear();
    }
}

/// Where the namespace of the engine's pages comes from.
enum Follows {
    Always(Followed),
    File(PathBuf),
}

impl Follows {
    /// The present namespace; `None` while the engine has none, so that no page is found.
    ///
    /// # Errors
    /// A file that cannot be read, or that has no namespace: its path, and why. A missing file is no error.
    fn look(&self) -> Result<Option<Followed>, String> {
        let path = match self {
            Self::Always(followed) => return Ok(Some(followed.clone())),
            Self::File(path) => path,
        };
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(format!("{}: {error}", path.display())),
        };
        let wrong = |why: String| format!("{}: {why}", path.display());
        let mut lines = text.lines();
        let Namespace(namespace) = hex(lines.next().unwrap_or("").trim()).map_err(wrong)?;
        let groups = lines.next().map(str::trim).filter(|line| !line.is_empty());
        let Groups(groups) = groups
            .map_or(Ok(Groups(Vec::new())), self::groups)
            .map_err(wrong)?;
        Ok((!namespace.is_empty()).then_some(Followed { namespace, groups }))
    }
}

/// Opens the sockets of the merged stream.
async fn publisher(arguments: &Arguments) -> Result<Publisher, CommandError> {
    let failed = |at: &str, error| CommandError::Failed(format!("{at}: {error}"));
    let limits = PublisherLimits::default();
    let publisher = Publisher::new(&arguments.topic, micros_since_1970(), limits);
    let mut publisher = publisher.map_err(|error| failed("--topic", error))?;
    let at = &arguments.publish;
    let opened = publisher.serve_subscribers(&address(at)).await;
    opened.map_err(|error| failed(at, error))?;
    if let Some(at) = &arguments.replay {
        let opened = publisher.serve_replays(&address(at)).await;
        opened.map_err(|error| failed(at, error))?;
    }
    Ok(publisher)
}

/// The address of an endpoint that [`endpoint`] has accepted.
fn address(endpoint: &str) -> PublicAddress {
    match endpoint.strip_prefix("ipc://") {
        Some(path) => PublicAddress::Ipc(path.into()),
        None => PublicAddress::Tcp(endpoint.trim_start_matches("tcp://").to_owned()),
    }
}

/// A read of the leader's changes.
type Reading = Pin<Box<dyn Future<Output = Result<Events, Failure>> + Send>>;

/// The state of the command.
struct Merged {
    engine: EngineStream,
    publisher: Publisher,
    leader: AdminClient,
    follows: Follows,
    shape: Shape,
    clock: Clock,
    numbers: Numbers,
    feed: Feed,
    join: Join,
    /// Of the engine's last batch.
    rank: Option<u64>,
    signed: bool,
    /// Why the namespace cannot be read, and why the leader's changes cannot.
    no_namespace: Problem,
    no_changes: Problem,
    /// Whether it was logged that pages are left out.
    told_left_out: bool,
    started: Instant,
    /// Whether the file with the namespace was looked for.
    told_missing: bool,
}

impl Merged {
    async fn start(
        arguments: &Arguments,
        leader: AdminClient,
        follows: Follows,
    ) -> Result<Self, CommandError> {
        let publisher = publisher(arguments).await?;
        let engine = EngineStream::connect(
            &arguments.engine,
            arguments.engine_replay.as_deref(),
            &arguments.engine_topic,
        )
        .await?;
        Ok(Self {
            engine,
            publisher,
            leader,
            follows,
            shape: match arguments.shape {
                ShapeName::Map => Shape::Map,
                ShapeName::Array => Shape::Array,
            },
            clock: Clock::start(),
            numbers: Numbers::default(),
            feed: Feed::default(),
            join: Join::new(JoinSettings {
                mode: match arguments.mode {
                    ModeName::Tiers => Mode::Tiers,
                    ModeName::Blind => Mode::Blind,
                },
                pages_max: PAGES_MAX,
                gone_max: GONE_MAX,
                groups: arguments.shape == ShapeName::Map,
            }),
            rank: None,
            signed: false,
            no_namespace: Problem::default(),
            no_changes: Problem::default(),
            told_left_out: false,
            started: Instant::now(),
            told_missing: false,
        })
    }

    async fn run(&mut self) -> Result<(), CommandError> {
        let mut read = self.read(Duration::ZERO);
        let mut answered_at = Instant::now();
        let mut look_at = Instant::now();
        loop {
            let turn_at = self.feed.next_turn().and_then(|at| self.clock.instant(at));
            let next = [look_at]
                .into_iter()
                .chain(turn_at)
                .min()
                .unwrap_or(look_at);
            tokio::select! {
                frame = self.engine.receive() => self.engine_frame(&frame?).await,
                answer = &mut read => match answer {
                    Ok(events) => {
                        answered_at = Instant::now();
                        self.no_changes.is_over();
                        let changes = self.feed.answered(self.clock.now(), &events);
                        self.kvferry(&changes);
                        read = self.read(Duration::ZERO);
                    }
                    // A read fails in time, so that the absence is noticed here. Otherwise an answer could wait behind
                    // a replay of the engine, and count as absent.
                    Err(failure) => {
                        self.no_changes.is(format!("the leader's changes cannot be read: {failure}"));
                        if answered_at.elapsed() > ABSENT {
                            answered_at = Instant::now();
                            self.leader_absent();
                        }
                        // The answer of an earlier read would continue what was forgotten.
                        read = self.read(RETRY);
                    }
                },
                () = sleep_until(next) => {}
            }
            if Instant::now() >= look_at {
                look_at = Instant::now() + LOOK;
                if self.follow() {
                    read = self.read(Duration::ZERO);
                }
            }
            let changes = self.feed.turn(self.clock.now());
            self.kvferry(&changes);
            self.tell_left_out();
            self.tell_missing();
        }
    }

    fn leader_absent(&mut self) {
        let changes = self.feed.forget();
        if !changes.is_empty() {
            tracing::warn!("no leader answers for {ABSENT:?}: every page in kvferry is removed");
        }
        self.kvferry(&changes);
    }

    /// Logs once that no connector has left the namespace of its pages.
    fn tell_missing(&mut self) {
        if let Follows::File(path) = &self.follows
            && !self.told_missing
            && self.started.elapsed() > MISSING_AFTER
        {
            self.told_missing = true;
            if !path.exists() {
                tracing::warn!(
                    "{} does not exist: no page in kvferry is announced: check --socket-dir and --replica, or give \
                     --namespace for a connector that writes no such file",
                    path.display()
                );
            }
        }
    }

    /// Logs once that pages are left out.
    fn tell_left_out(&mut self) {
        let (places, pages) = (self.feed.left_out(), self.join.left_out());
        if !self.told_left_out && (places > 0 || pages > 0) {
            self.told_left_out = true;
            tracing::warn!(
                "{PAGES_MAX} pages or {PLACES_MAX} places of kvferry are known: further ones are not announced as pages \
                 in kvferry"
            );
        }
    }

    /// Follows the present namespace of the engine; returns whether it has changed.
    fn follow(&mut self) -> bool {
        let followed = match self.follows.look() {
            Ok(followed) => {
                self.no_namespace.is_over();
                followed
            }
            Err(why) => {
                self.no_namespace
                    .is(format!("{why}: no page in kvferry is announced"));
                None
            }
        };
        if self.feed.follows(followed.as_ref()) {
            return false;
        }
        let changes = self.feed.follow(followed);
        self.kvferry(&changes);
        true
    }

    /// The next read of the leader's changes, after a pause; never ready while no namespace is followed.
    fn read(&self, pause: Duration) -> Reading {
        let leader = self.leader.clone();
        let request = self.feed.read(WAIT);
        Box::pin(async move {
            tokio::time::sleep(pause).await;
            let Some(request) = request else {
                return std::future::pending().await;
            };
            let limit = Duration::from_millis(request.wait_ms.into()) + READ_LIMIT;
            leader.read_events(request, limit).await
        })
    }

    async fn engine_frame(&mut self, frame: &Frame) {
        let mut step = self.numbers.live(frame.number, &frame.payload);
        if step == Step::Restarted {
            self.engine_lost("the engine has started again");
            step = self.numbers.live(frame.number, &frame.payload);
        }
        match step {
            Step::Apply => self.engine_batch(&frame.payload),
            Step::Skip => {}
            Step::Replay(from) => self.heal(from, frame).await,
            // A second one in a row is impossible: the numbers begin with the first.
            Step::Restarted => {}
        }
    }

    /// Requests the batches before `frame`, and applies them and `frame`.
    async fn heal(&mut self, mut from: u64, frame: &Frame) {
        loop {
            let frames = self.engine.replay(from).await;
            let mut again = false;
            for each in frames {
                let mut step = self.numbers.replayed(each.number, &each.payload);
                if step == Step::Restarted {
                    self.engine_lost("the engine has started again, or its replay has a gap");
                    if from != 0 {
                        again = true;
                        break;
                    }
                    // Nothing older can be requested: its batches apply from here on.
                    step = self.numbers.replayed(each.number, &each.payload);
                }
                if step == Step::Apply {
                    self.engine_batch(&each.payload);
                }
            }
            if !again {
                break;
            }
            from = 0;
        }
        let (step, lost) = self.numbers.after_replay(frame.number, &frame.payload);
        if lost {
            self.engine_lost("batches of the engine are missing");
        }
        if step == Step::Apply {
            self.engine_batch(&frame.payload);
        }
    }

    fn engine_lost(&mut self, why: &str) {
        let events = self.join.engine_lost();
        if !events.is_empty() {
            tracing::warn!("{why}: the pages that it had announced are removed");
        }
        self.publish(now(), events);
    }

    fn engine_batch(&mut self, payload: &[u8]) {
        match Batch::read(payload) {
            Ok(batch) => {
                self.rank = batch.rank;
                self.signed |= batch.signed;
                let events = self.join.engine(batch.events);
                self.publish(batch.time, events);
            }
            Err(error) => {
                // Which pages it names is unknown.
                tracing::warn!(%error, "a batch of the engine cannot be read");
                self.engine_lost("a batch of the engine cannot be read");
            }
        }
    }

    fn kvferry(&mut self, changes: &[kvferry_events::Change]) {
        if !changes.is_empty() {
            let events = self.join.kvferry(changes);
            self.publish(now(), events);
        }
    }

    fn publish(&mut self, time: f64, events: Vec<Event>) {
        let mut events = events.into_iter().peekable();
        while events.peek().is_some() {
            let batch = Batch {
                time,
                events: events.by_ref().take(BATCH_EVENTS_MAX).collect(),
                rank: self.rank,
                signed: self.signed,
            };
            self.publisher.publish(batch.write(self.shape));
        }
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "subscribers compare numbers and times over restarts, which no monotonic clock does"
)]
fn since_1970() -> Duration {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
}

fn micros_since_1970() -> u64 {
    u64::try_from(since_1970().as_micros()).unwrap_or(1)
}

fn now() -> f64 {
    since_1970().as_secs_f64()
}
