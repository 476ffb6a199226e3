//! The leader's time for a single request is bounded: other peers are served meanwhile, and no process is ended because
//! of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use kvferry_client::AdminClient;
use kvferry_protocol::ErrorCode;
use kvferry_types::{PageHashes, ResetScope};
use serde_json::Value;

use super::disturbed::LIMIT;
use super::engine::{NAMESPACE, PROMPT_PAGES, World, hashes};
use super::processes::{children, lives};
use crate::support::{kvferry, number, signals};

/// Number of stored prompts. The first one is reset.
const PROMPTS: u64 = 8;
/// Maximum number of pages that a message can name.
const NAMED_PAGES: u32 = 131_072;
/// Lookups that must be answered while the tested request runs.
const LOOKUPS: u32 = 20;

/// Runs a test on a runtime of two threads.
pub fn on_two_threads(test: impl Future<Output = ()>) {
    // Must run before the runtime below starts, because it uses a runtime of its own.
    signals::set_to_defaults();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build();
    runtime.expect("a runtime").block_on(test);
}

async fn with_prompts() -> World {
    let mut world = World::start().await;
    for prompt in 0..PROMPTS {
        world.store(prompt).await;
    }
    world
}

/// The pages of the first prompt, and pages that are not stored.
fn named() -> ResetScope {
    let mut bytes = hashes(0, PROMPT_PAGES).into_bytes();
    bytes.extend(hashes(PROMPTS, NAMED_PAGES - PROMPT_PAGES).into_bytes());
    let pages = PageHashes::packed(16, bytes).expect("whole hashes");
    ResetScope::Pages(NAMESPACE.to_vec(), pages)
}

#[test]
fn a_reset_of_many_pages_is_confirmed_and_others_are_served_and_no_process_ends() {
    on_two_threads(async {
        let world = with_prompts().await;
        let processes = children(world.up());
        assert_eq!(processes.len(), 2, "a leader and a worker");
        let status = world.status(false).await.expect("a status");
        let (epoch, worker) = (status.epoch, status.ranks[0].pid);

        // Repeats resets until `LOOKUPS` lookups were requested and answered while a reset was running.
        let (begun, mut answered, mut expected) = (Instant::now(), 0, PROMPT_PAGES);
        while answered < LOOKUPS {
            assert!(begun.elapsed() < LIMIT, "{answered} lookups were answered");
            let tool = world.tool.clone();
            let reset = tokio::spawn(async move { tool.reset(named(), LIMIT).await });
            while !reset.is_finished() {
                let prompt = 1 + u64::from(answered) % (PROMPTS - 1);
                assert_eq!(world.found(prompt).await, PROMPT_PAGES);
                answered += u32::from(!reset.is_finished());
            }
            let confirmed = reset.await.expect("no panic").expect("a confirmation");
            assert_eq!(confirmed, expected);
            // The next reset finds no pages of the prompt.
            expected = 0;
        }
        assert_eq!(world.found(0).await, 0);

        let status = world.status(false).await.expect("a status");
        assert_eq!((status.epoch, status.ranks[0].pid), (epoch, worker));
        assert!(status.ranks[0].attached && status.ranks[0].problem.is_empty());
        assert_eq!(children(world.up()), processes);
        assert!(processes.iter().all(|process| lives(*process)));
    });
}

/// Second counts that run concurrently until `over`.
#[derive(Default)]
struct Counting {
    over: AtomicBool,
    counted: AtomicU64,
    refused: AtomicU64,
}

impl Counting {
    /// Runs the `status --check` command in a loop. Each run prints a count or the time after which to retry.
    fn by_command(&self, sockets: &str) {
        while !self.over.load(Ordering::Relaxed) {
            let output = kvferry(&["status", "--check", "--json", "--socket-dir", sockets]);
            let errors = String::from_utf8_lossy(&output.stderr);
            if !output.status.success() {
                assert!(errors.contains("retry in"), "{errors}");
                continue;
            }
            let status: Value = serde_json::from_slice(&output.stdout).expect("a status");
            let stored = PROMPTS * u64::from(PROMPT_PAGES);
            assert_eq!(number(&status, "/tiers/0/page_states/ready"), stored);
            assert_eq!(status["contradiction"], "");
            self.counted.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// A tool that ignores the time after which it should retry.
    async fn hastily(&self, tool: AdminClient) {
        while !self.over.load(Ordering::Relaxed) {
            match tool.status(true, LIMIT).await {
                Ok(status) => {
                    assert_eq!(status.contradiction.as_deref(), Some(""));
                    self.counted.fetch_add(1, Ordering::Relaxed);
                }
                Err(failure) => {
                    assert_eq!(failure.code, ErrorCode::Busy, "{failure}");
                    assert!(failure.message.contains("retry in"), "{failure}");
                    self.refused.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
    }
}

/// Ends the loops on drop, also when the test fails, because the test waits for their commands.
struct Until(Arc<Counting>);

impl Drop for Until {
    fn drop(&mut self) {
        self.0.over.store(true, Ordering::Relaxed);
    }
}

#[test]
fn status_with_a_second_count_in_a_loop_leaves_others_served() {
    on_two_threads(async {
        let world = with_prompts().await;
        let counting = Arc::new(Counting::default());
        let until = Until(Arc::clone(&counting));
        let begun = Instant::now();
        let commands: Vec<_> = (0..3)
            .map(|_| {
                let counting = Arc::clone(&counting);
                let sockets = world.sockets().to_str().expect("UTF-8").to_owned();
                tokio::task::spawn_blocking(move || counting.by_command(&sockets))
            })
            .collect();
        let (tool, hasty) = (world.tool.clone(), Arc::clone(&counting));
        let hasty = tokio::spawn(async move { hasty.hastily(tool).await });

        // Each lookup is answered by its deadline, while at least 3 counts are made.
        let mut lookups = 0;
        while lookups < LOOKUPS || counting.counted.load(Ordering::Relaxed) < 3 {
            assert!(begun.elapsed() < LIMIT, "{lookups} lookups");
            let prompt = u64::from(lookups) % PROMPTS;
            assert_eq!(world.found(prompt).await, PROMPT_PAGES);
            lookups += 1;
        }
        drop(until);
        hasty.await.expect("no panic");
        for command in commands {
            command.await.expect("no panic");
        }
        // The limit of one count per second holds for all tools together.
        let (counted, most) = (counting.counted.load(Ordering::Relaxed), begun.elapsed());
        assert!(
            counted <= most.as_secs() + 1,
            "{counted} counts in {most:?}"
        );
        assert!(counting.refused.load(Ordering::Relaxed) > 0);
    });
}
