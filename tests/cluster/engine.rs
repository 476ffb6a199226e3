//! An engine whose scheduler is the test itself, which decides what is requested and when. Its rank is a process, as in
//! a replay.

use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;

use kvferry_client::{
    AdminClient, EngineClient, EngineSettings, Failure, PromptPages, RequestGuard, StoreGuard,
    StoredPages,
};
use kvferry_engine::pipe::{self, RankOrder};
use kvferry_engine::rank_pipe::RankPipe;
use kvferry_protocol::{ErrorCode, StatusAnswer, StoreAnswer};
use kvferry_transport::{Address, ZmqTransport};
use kvferry_types::{EngineId, GroupId, PageHashes, PageList, Part, RequestId, SlotId};
use kvferry_workload::scheduler::{REQUEST_TIMEOUT, WorkKind};

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
    pub engine: EngineClient,
    pub tool: AdminClient,
    up: Running,
    folder: tempfile::TempDir,
    rank: RankPipe,
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
        Self::start_with(&[]).await
    }

    /// Like [`Self::start`], with more arguments of `up`.
    pub async fn start_with(arguments: &[&str]) -> Self {
        let folder = socket_dir();
        let name = folder.path().to_str().expect("UTF-8");
        let up = ["up", "--ranks", "1", "--g2", "64MiB", "--socket-dir", name];
        let up = Running::start(&[&up, arguments].concat());
        let mut rank = start_rank(folder.path());
        rank.wait_until_ready(LIMIT).await.expect("a rank");
        let leader = Address::Directory(folder.path().join("leader"));
        let settings = EngineSettings::new(leader.clone(), EngineId(ENGINE), "test");
        let engine = EngineClient::start(Arc::new(ZmqTransport), settings);
        let tool = AdminClient::start(Arc::new(ZmqTransport), leader, "test");
        let world = Self {
            engine,
            tool,
            up,
            folder,
            rank,
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
        self.tool.status(check, LIMIT).await
    }

    /// The process id of the engine's rank.
    pub fn rank_pid(&self) -> u64 {
        u64::from(self.rank.child.id().expect("it runs"))
    }

    /// Ends the engine's rank, as an engine that is killed.
    pub async fn end_rank(&mut self) {
        self.rank.child.kill().await.expect("it ends");
    }

    /// Looks up a whole prompt. The pages found are held until the guard is dropped. The answer must arrive by the
    /// deadline that engines give their requests.
    async fn look_up(&self, prompt: u64) -> RequestGuard {
        let found = self.engine.lookup(whole(prompt), REQUEST_TIMEOUT).await;
        found.expect("an answer in time")
    }

    /// Number of pages of a prompt that a lookup finds. None is held afterwards.
    pub async fn found(&self, prompt: u64) -> u32 {
        let found = self.look_up(prompt).await;
        let hit_pages = found.hit_pages();
        found.finish().await.expect("it is finished");
        hit_pages
    }

    /// Stores a whole prompt, which must not be stored yet.
    pub async fn store(&mut self, prompt: u64) {
        let store = self.begin_store(prompt).await;
        self.end_store(store).await;
    }

    /// Requests the store of a whole prompt, whose pages the engine has not written yet.
    pub async fn begin_store(&self, prompt: u64) -> OpenStore {
        let found = self.look_up(prompt).await;
        assert_eq!(found.hit_pages(), 0);
        let id = self.engine.next_id();
        let pages = StoredPages {
            id: Some(id),
            parts: vec![Part::new(GroupId(0), 0, PageList::run(0, PROMPT_PAGES))],
            more: None,
        };
        let stored = found.store(pages, (), REQUEST_TIMEOUT);
        OpenStore { found, stored, id }
    }

    /// Reports the pages of a store as written, and waits until they are stored.
    pub async fn end_store(&mut self, OpenStore { found, stored, id }: OpenStore) {
        // The content of the memory does not matter, because these tests load nothing.
        let written = RankOrder::new(id.0, WorkKind::Compute, id.0);
        let reported = pipe::write(&mut self.rank.orders, &written).await;
        reported.expect("the rank takes orders");
        let (answer, ()) = stored.await.expect("an answer in time");
        let expected = StoreAnswer {
            stored_pages: PROMPT_PAGES,
            present_pages: 0,
            refused_pages: 0,
            failed_pages: 0,
        };
        assert_eq!(answer, expected);
        found.finish().await.expect("it is finished");
    }

    /// The error with which the lookup of a prompt is refused.
    pub async fn refused(&self, prompt: u64) -> ErrorCode {
        let refused = self.engine.lookup(whole(prompt), REQUEST_TIMEOUT).await;
        refused.expect_err("refused").code
    }
}

/// A store that is not answered.
pub struct OpenStore {
    found: RequestGuard,
    stored: StoreGuard<()>,
    id: RequestId,
}

/// The pages of a whole prompt, in a slot of its own.
fn whole(prompt: u64) -> PromptPages {
    PromptPages {
        slot: SlotId(prompt),
        namespace: NAMESPACE.to_vec(),
        hashes: hashes(prompt, PROMPT_PAGES),
        have_pages: 0,
        limit_pages: None,
    }
}
