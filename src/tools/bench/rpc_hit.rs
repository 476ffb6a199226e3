//! Round trips of lookups that a real leader answers from a filled pool, beside round trips of the same sizes through
//! the same transport to a server that is busy for as long as such a lookup takes in the core.
//!
//! The leader is a process of its own. This process acts as its engine and as its worker, which reports each copy as
//! ended at once.

use std::path::Path;
use std::time::{Duration, Instant};

use tokio::io::AsyncReadExt as _;

use kvferry::cli::bench::percentiles;
use kvferry::cli::bench::rig::{ENGINE, HASH_BYTES, client, hashes, process};
use kvferry::cli::block_on;
use kvferry::error::CommandError;
use kvferry_protocol::{
    Attach, AttachDepot, Call, Ended, Inventory, Lookup, LookupAnswer, Memory, Message, PartBody,
    Role, StatedMemory, Status, Store, TierPages,
};
use kvferry_transport::{
    Address, Client, Incoming, Limits, OtherUsers, Server, ServerEvent, ServerSettings, Transport,
    ZmqTransport, prepare_for,
};
use kvferry_types::{EndedCopy, Epoch, PageList, TransferId};

use super::preloaded_leader::{PreloadedLeader, geometry};

/// Pages of the prompts, one row each.
const PROMPT_PAGES: [u32; 4] = [10, 256, 2048, 4096];
/// Windows into which the measurement in the leader is divided.
const WINDOWS: u32 = 20;
/// Prompts of each length, used in turn.
const PROMPTS: u64 = 16;
/// Time limit of a request.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// One row of the result, in microseconds.
#[derive(Debug, serde::Serialize)]
pub(super) struct HitRow {
    pages: u32,
    /// The core's step, measured in this process.
    core_p50_us: f64,
    /// The core's step in the leader, and the time for which the busy server is busy.
    step_p50_us: f64,
    busy_p50_us: f64,
    busy_p99_us: f64,
    leader_p50_us: f64,
    leader_p99_us: f64,
    leader_to_busy: f64,
}

impl HitRow {
    pub(super) fn heading() -> &'static str {
        "pages    core p50   in leader    busy server p50  p99      leader p50  p99      leader/busy"
    }

    pub(super) fn text(&self) -> String {
        format!(
            "{:>5}  {:>7.1} us  {:>7.1} us  {:>13.1} us {:>6.1}  {:>8.1} us {:>6.1}  {:>11.2}",
            self.pages,
            self.core_p50_us,
            self.step_p50_us,
            self.busy_p50_us,
            self.busy_p99_us,
            self.leader_p50_us,
            self.leader_p99_us,
            self.leader_to_busy
        )
    }
}

/// Measures against the leader that listens below `leader`. The busy server listens in `busy`.
pub(super) async fn measure(
    engine: &Client,
    leader: &Path,
    busy: &Path,
    rounds: u32,
) -> Result<Vec<HitRow>, CommandError> {
    let worker = attach(leader).await?;
    let mut server = process(&["bench", "busy"], busy)?;
    let (to_busy, mut incoming) = client(Address::Directory(busy.to_owned()), Role::Engine);
    let ignore = tokio::spawn(async move { while incoming.recv().await.is_some() {} });
    let mut rows = Vec::new();
    let mut first_prompt = 1_u64;
    for pages in PROMPT_PAGES {
        let prompts: Vec<u64> = (first_prompt..first_prompt + PROMPTS).collect();
        first_prompt += PROMPTS;
        for prompt in &prompts {
            store(engine, *prompt, pages).await?;
        }
        rows.push(row(engine, &to_busy, &prompts, pages, rounds).await?);
    }
    server.kill().await.map_err(CommandError::failed)?;
    ignore.abort();
    worker.abort();
    Ok(rows)
}

async fn row(
    engine: &Client,
    to_busy: &Client,
    prompts: &[u64],
    pages: u32,
    rounds: u32,
) -> Result<HitRow, CommandError> {
    let core_us = in_core(pages, rounds)?;
    let step_us = in_leader(engine, to_busy, prompts, pages, rounds).await?;
    let (mut busy, mut leader) = (Vec::new(), Vec::new());
    let nanoseconds = (step_us * 1e3) as u64;
    for (_, prompt) in (0..rounds).zip(prompts.iter().cycle()) {
        let idle = lookup(nanoseconds, *prompt, pages);
        let begun = Instant::now();
        request(to_busy, idle).await?;
        let copy_us = begun.elapsed().as_secs_f64() * 1e6;
        let real = lookup(*prompt, *prompt, pages);
        let begun = Instant::now();
        let answer = request(engine, real).await?;
        let leader_us = begun.elapsed().as_secs_f64() * 1e6;
        all_found(answer, pages)?;
        busy.push(copy_us);
        leader.push(leader_us);
    }
    let (busy_p50_us, busy_p99_us) = percentiles(busy);
    let (leader_p50_us, leader_p99_us) = percentiles(leader);
    Ok(HitRow {
        pages,
        core_p50_us: core_us,
        step_p50_us: step_us,
        busy_p50_us,
        busy_p99_us,
        leader_p50_us,
        leader_p99_us,
        leader_to_busy: leader_p50_us / busy_p50_us,
    })
}

fn all_found(answer: LookupAnswer, pages: u32) -> Result<(), CommandError> {
    match answer.hit_pages == pages {
        true => Ok(()),
        false => Err(CommandError::Failed(format!("found {answer:?}"))),
    }
}

/// Measures the core's step of a lookup in the leader's process, in microseconds: the median over windows of the mean
/// that the leader counts. Lookups alternate with messages to the busy server, as in the later measurement.
async fn in_leader(
    engine: &Client,
    to_busy: &Client,
    prompts: &[u64],
    pages: u32,
    rounds: u32,
) -> Result<f64, CommandError> {
    let each = rounds.div_ceil(WINDOWS * 4).max(1);
    let mut means = Vec::new();
    let mut prompts = prompts.iter().cycle();
    let mut before = lookup_ns(engine).await?;
    for _ in 0..WINDOWS {
        for (_, prompt) in (0..each).zip(&mut prompts) {
            request(to_busy, lookup(0, *prompt, pages)).await?;
            all_found(
                request(engine, lookup(*prompt, *prompt, pages)).await?,
                pages,
            )?;
        }
        let now = lookup_ns(engine).await?;
        means.push((now - before) as f64 / f64::from(each) / 1e3);
        before = now;
    }
    Ok(percentiles(means).0)
}

async fn lookup_ns(engine: &Client) -> Result<u64, CommandError> {
    let status = request(engine, Status { check: false }).await?;
    Ok(status.counters.get("lookup_ns").copied().unwrap_or(0))
}

/// Measures the core's step of a lookup without sockets and actors, in microseconds. Decoding is excluded, because the
/// busy server decodes as well.
fn in_core(pages: u32, rounds: u32) -> Result<f64, CommandError> {
    let mut leader = PreloadedLeader::new(PROMPTS, pages)?;
    let mut took = Vec::new();
    for (_, prompt) in (0..rounds).zip((0..PROMPTS).cycle()) {
        let encoded = leader.encoded(prompt)?;
        took.push(leader.lookup(&encoded)?.step.as_secs_f64() * 1e6);
    }
    Ok(percentiles(took).0)
}

fn lookup(slot: u64, prompt: u64, pages: u32) -> Lookup {
    Lookup {
        slot,
        namespace: Vec::new(),
        hash_bytes: HASH_BYTES as u8,
        hashes: hashes(prompt, pages),
        have_pages: 0,
        limit_pages: None,
    }
}

async fn request<C: Call>(client: &Client, call: C) -> Result<C::Answer, CommandError> {
    let answer = client.call(call, ANSWER_TIMEOUT).await;
    answer.map_err(CommandError::failed)
}

async fn store(engine: &Client, prompt: u64, pages: u32) -> Result<(), CommandError> {
    request(engine, lookup(prompt, prompt, pages)).await?;
    let store = Store {
        slot: prompt,
        parts: vec![PartBody {
            group: 0,
            first_page: 0,
            pages: PageList::run(0, pages).into(),
            count: u64::from(pages),
            priority: None,
        }],
        hash_bytes: 0,
        more_hashes: Vec::new(),
        more_from: 0,
        after: 0,
    };
    match request(engine, store).await? {
        answer if answer.stored_pages == pages => Ok(()),
        answer => Err(CommandError::Failed(format!("stored {answer:?}"))),
    }
}

/// Attaches as the leader's only worker and answers its orders from then on.
async fn attach(leader: &Path) -> Result<tokio::task::JoinHandle<()>, CommandError> {
    let (worker, mut incoming) = client(leader_address(leader), Role::Worker);
    let pages = PROMPT_PAGES.iter().sum::<u32>() * PROMPTS as u32;
    let attach = Attach {
        replica: 0,
        rank: 0,
        ranks: 1,
        kv_shards: 1,
        attach: 1,
        depots: vec![AttachDepot {
            tier: 2,
            depot: [1; 16],
            epoch: 0,
        }],
    };
    let memory = Memory {
        number: 1,
        memory: Some(StatedMemory {
            engine: ENGINE.0,
            geometry: geometry().into(),
            arena_pages: vec![TierPages {
                tier: 2,
                pages: 2 * pages,
            }],
        }),
    };
    let orders = worker.clone();
    let obeys = tokio::spawn(async move {
        while let Some(received) = incoming.recv().await {
            let Incoming::Request { link, envelope } = received else {
                continue;
            };
            if let Some(answer) = obey(envelope.message) {
                orders.reply(link, envelope.correlation, answer);
            }
        }
    });
    request(&worker, attach).await?;
    request(&worker, memory).await?;
    let limit = Instant::now() + ANSWER_TIMEOUT;
    loop {
        if request(&worker, Status { check: false }).await?.ready {
            return Ok(obeys);
        }
        if Instant::now() >= limit {
            let text = format!("the leader is not ready after {ANSWER_TIMEOUT:?}");
            return Err(CommandError::Failed(text));
        }
    }
}

/// The address of the leader of a socket directory.
pub(super) fn leader_address(socket_dir: &Path) -> Address {
    Address::Directory(socket_dir.join("leader"))
}

/// Answers as a worker with an empty depot that copies nothing and reports each copy as complete.
fn obey(order: Message) -> Option<Message> {
    match order {
        Message::Transfer(transfer) => {
            let copies = transfer
                .transfers
                .iter()
                .map(|transfer| EndedCopy::complete(TransferId(transfer.id)));
            let copies = copies.collect();
            Some(Message::Ended(Ended { rank: 0, copies }))
        }
        Message::ReadInventory(read) => {
            let nothing = Inventory::new(&read, None, &[]);
            Some(Message::Inventory(nothing))
        }
        _ => None,
    }
}

/// `kvferry-tools bench busy`: answers lookups after as many nanoseconds as their slot's number, until its standard
/// input ends.
#[derive(Debug, clap::Args)]
pub(crate) struct BusyArguments {
    directory: std::path::PathBuf,
}

impl BusyArguments {
    pub(crate) fn run(self) -> Result<(), CommandError> {
        // As many threads as a leader has.
        block_on(1, async move {
            let directory = prepare_for(&self.directory, &OtherUsers::default());
            directory.map_err(CommandError::failed)?;
            let listener = ZmqTransport
                .listen(&Address::Directory(self.directory), Limits::default())
                .await
                .map_err(CommandError::failed)?;
            let settings = ServerSettings {
                epoch: Epoch(1),
                heartbeat: Duration::from_secs(1),
                roles: vec![Role::Engine],
                features: 0,
                worker_seats: None,
            };
            let server = Server::new(listener, settings);
            // A task of its own, as in a leader.
            let serve = tokio::spawn(serve(server));
            tokio::select! {
                () = end_of_input() => Ok(()),
                ended = serve => ended.map_err(CommandError::failed),
            }
        })
    }
}

async fn end_of_input() {
    let mut byte = [0];
    while matches!(tokio::io::stdin().read(&mut byte).await, Ok(1)) {}
}

async fn serve(mut server: Server) {
    let replier = server.replier();
    while let Some(events) = server.next().await {
        for event in events {
            let ServerEvent::Message { peer, envelope } = event else {
                continue;
            };
            let begun = Instant::now();
            let Message::Lookup(lookup) = envelope.message else {
                continue;
            };
            while begun.elapsed() < Duration::from_nanos(lookup.slot) {
                std::hint::spin_loop();
            }
            let hit_pages = (lookup.hashes.len() / HASH_BYTES) as u32;
            let answer = LookupAnswer {
                hit_pages,
                ..LookupAnswer::default()
            };
            replier.reply(peer, envelope.correlation, Message::LookupAnswer(answer));
        }
    }
}
