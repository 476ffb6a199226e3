//! An engine whose scheduler is the test itself, which decides what is requested and when. Its rank is a process, as in
//! a replay.

use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvferry_engine::pipe::{self, Order};
use kvferry_engine::rank_pipe::RankPipe;
use kvferry_protocol::{Hello, Message, Role, Status, StatusAnswer, VERSION, VERSION_MIN};
use kvferry_transport::{Address, Client, ClientSettings, Failure, Incoming, Limits, ZmqTransport};
use kvferry_types::{
    Answer, LookupAnswer, PageHashes, PageList, Request, RequestId, SlotId, StoreAnswer,
};
use kvferry_workload::scheduler::WorkKind;
use tokio::sync::mpsc::Receiver;

use super::disturbed::LIMIT;
use crate::support::{Running, program, signals, socket_dir};

const ENGINE: [u8; 16] = [5; 16];
/// Pages of a prompt.
pub const PROMPT_PAGES: u32 = 1024;
/// The namespace of all prompts.
pub const NAMESPACE: &[u8] = b"a";

/// The page hashes of a prompt. No two prompts share one.
pub fn hashes(prompt: u64, pages: u32) -> PageHashes {
    let mut bytes = vec![0; pages as usize * 16];
    fastrand::Rng::with_seed(prompt).fill(&mut bytes);
    PageHashes::packed(16, bytes).expect("whole hashes")
}

/// A leader, its worker, an engine, and a connection of an admin tool.
pub struct World {
    pub engine: Client,
    pub tool: Client,
    up: Running,
    folder: tempfile::TempDir,
    rank: RankPipe,
    ids: AtomicU64,
    _says: [Receiver<Incoming>; 2],
}

fn client(sockets: &Path, role: Role) -> (Client, Receiver<Incoming>) {
    let settings = ClientSettings {
        address: Address::Directory(sockets.join("leader")),
        hello: Hello {
            version_min: VERSION_MIN,
            version_max: VERSION,
            role,
            engine: ENGINE,
            rank: 0,
            replica: 0,
            features: 0,
            name: "test".to_owned(),
        },
        limits: Limits::default(),
    };
    Client::start(Arc::new(ZmqTransport), settings)
}

fn start_rank(sockets: &Path) -> RankPipe {
    signals::set_to_defaults();
    let engine: String = ENGINE.iter().map(|byte| format!("{byte:02x}")).collect();
    let pages = PROMPT_PAGES.to_string();
    let mut child = tokio::process::Command::new(program())
        .arg("engine-rank")
        .arg("--worker-dir")
        .arg(sockets.join("worker-0-0"))
        .args(["--engine", &engine, "--device-pages", &pages])
        .args(["--replica", "0", "--rank", "0", "--ranks", "1"])
        .args(["--engine-page-tokens", "16", "--model", "tiny"])
        .args(["--layout", "contiguous", "--start-limit-s", "120"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .expect("a rank");
    let orders = child.stdin.take().expect("its standard input");
    let reports = child.stdout.take().expect("its standard output");
    RankPipe {
        child,
        orders,
        reports,
    }
}

impl World {
    /// Starts all processes, and waits until lookups are served.
    pub async fn start() -> Self {
        let folder = socket_dir();
        let name = folder.path().to_str().expect("UTF-8");
        let up = Running::start(&["up", "--ranks", "1", "--g2", "64MiB", "--socket-dir", name]);
        let mut rank = start_rank(folder.path());
        rank.wait_until_ready(LIMIT).await.expect("a rank");
        let (engine, engine_hears) = client(folder.path(), Role::Engine);
        let (tool, tool_hears) = client(folder.path(), Role::Admin);
        let world = Self {
            engine,
            tool,
            up,
            folder,
            rank,
            ids: AtomicU64::new(0),
            _says: [engine_hears, tool_hears],
        };
        let begun = std::time::Instant::now();
        while !world.status(false).await.expect("a status").ready {
            assert!(begun.elapsed() < LIMIT, "it does not serve");
        }
        world
    }

    pub fn sockets(&self) -> &Path {
        self.folder.path()
    }

    /// The process id of `up`, which started leader and worker.
    pub fn up(&self) -> u64 {
        u64::from(self.up.0.id())
    }

    pub async fn status(&self, check: bool) -> Result<StatusAnswer, Failure> {
        let asked = Message::Status(Status { check });
        match self.tool.ask(asked, LIMIT).await? {
            Message::StatusAnswer(answer) => Ok(answer),
            other => panic!("{other:?} instead of a status"),
        }
    }

    /// Sends a request as the engine. The answer must arrive by the deadline that engines give their requests.
    async fn ask(&self, id: RequestId, request: Request) -> Answer {
        let limit = kvferry_workload::scheduler::REQUEST_TIMEOUT;
        let answer = self.engine.ask_as(id, request.into(), limit).await;
        let answer = answer.expect("an answer in time");
        answer.answer().expect("what was asked for")
    }

    fn next_id(&self) -> RequestId {
        RequestId(self.ids.fetch_add(1, Ordering::Relaxed) + 1)
    }

    /// Looks up a whole prompt. The pages found are held until [`Self::finish`].
    async fn look_up(&self, prompt: u64) -> u32 {
        let lookup = Request::Lookup {
            slot: SlotId(prompt),
            namespace: NAMESPACE.to_vec(),
            hashes: hashes(prompt, PROMPT_PAGES),
            device_pages: 0,
        };
        match self.ask(self.next_id(), lookup).await {
            Answer::Lookup(LookupAnswer { hit_pages, .. }) => hit_pages,
            other => panic!("{other:?} instead of what was found"),
        }
    }

    async fn finish(&self, prompt: u64) {
        let slot = SlotId(prompt);
        let answer = self.ask(self.next_id(), Request::Finish { slot }).await;
        assert_eq!(answer, Answer::Finish);
    }

    /// Number of pages of a prompt that a lookup finds. None is held afterwards.
    pub async fn found(&self, prompt: u64) -> u32 {
        let found = self.look_up(prompt).await;
        self.finish(prompt).await;
        found
    }

    /// Stores a whole prompt, which must not be stored yet.
    pub async fn store(&mut self, prompt: u64) {
        assert_eq!(self.look_up(prompt).await, 0);
        let id = self.next_id();
        // The content of the memory does not matter, because these tests load nothing.
        let written = Order::new(id.0, WorkKind::Compute, id.0);
        let told = pipe::write(&mut self.rank.orders, &written).await;
        told.expect("the rank takes orders");
        let store = Request::Store {
            slot: SlotId(prompt),
            first_page: 0,
            more: None,
            source: PageList::run(0, PROMPT_PAGES),
        };
        let stored = Answer::Store(StoreAnswer {
            stored_pages: PROMPT_PAGES,
            present_pages: 0,
            refused_pages: 0,
            failed_pages: 0,
        });
        assert_eq!(self.ask(id, store).await, stored);
        self.finish(prompt).await;
    }
}
