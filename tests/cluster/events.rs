//! The change log of a real leader: what a reader gets, when, and how it begins again.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use kvferry_core::LOG_RECORDS_MAX;
use kvferry_protocol::{EventKind, EventReason, EventRecord, Events, ReadEvents};
use kvferry_types::ResetScope;
use rustix::process::Signal;

use super::beside::on_two_threads;
use super::disturbed::LIMIT;
use super::engine::{NAMESPACE, PROMPT_PAGES, World, hashes};
use super::processes::{leader_beside, signal};

/// What a tool that reads the log has.
struct Reader {
    read: ReadEvents,
    pages: BTreeSet<(u8, u32, Vec<u8>)>,
}

impl Reader {
    fn new() -> Self {
        let read = ReadEvents {
            most: 300,
            namespace: Some(NAMESPACE.to_vec().into()),
            cursor: Some(0),
            ..ReadEvents::default()
        };
        let pages = BTreeSet::new();
        Self { read, pages }
    }

    async fn read(&mut self, world: &World, wait_ms: u32) -> Events {
        self.read.wait_ms = wait_ms;
        let answer = world.tool.read_events(self.read.clone(), LIMIT).await;
        let answer = answer.expect("an answer in time");
        if answer.lost {
            self.pages.clear();
        }
        for record in &answer.records {
            let hashes = record.hashes.chunks(usize::from(answer.hash_bytes));
            let places = (record.place..).zip(hashes);
            let pages = places.map(|(place, hash)| (record.tier, place, hash.to_vec()));
            match record.event {
                EventKind::Stored => self.pages.extend(pages),
                EventKind::Gone => pages.for_each(|page| {
                    self.pages.remove(&page);
                }),
                EventKind::Cleared => self.pages.retain(|(tier, ..)| *tier != record.tier),
                EventKind::Unknown => unreachable!("{record:?}"),
            }
        }
        let begins = answer.lost && self.read.cursor.is_none();
        (self.read.epoch, self.read.from) = (answer.epoch, answer.next);
        self.read.cursor = if begins { Some(0) } else { answer.cursor };
        answer
    }

    /// Reads until the tool has every page and every record. Returns the records.
    async fn read_all(&mut self, world: &World) -> Vec<EventRecord> {
        let mut records = Vec::new();
        loop {
            let answer = self.read(world, 0).await;
            if answer.cursor.is_none() && answer.records.is_empty() {
                return records;
            }
            records.extend(answer.records);
        }
    }

    /// Number of the pages of a prompt that the tool has.
    fn pages_of(&self, prompt: u64) -> u32 {
        let prompt = hashes(prompt, PROMPT_PAGES).into_bytes();
        let prompt: BTreeSet<&[u8]> = prompt.chunks(16).collect();
        let known = self.pages.iter();
        known
            .filter(|(.., hash)| prompt.contains(hash.as_slice()))
            .count() as u32
    }
}

/// Prompts that a test stores at most, until something has happened.
const PROMPTS_MAX: u64 = 200;

#[test]
fn a_tool_follows_stores_evictions_resets_and_a_restart_of_the_leader() {
    on_two_threads(async {
        let mut world = World::start().await;
        world.store(0).await;
        let mut reader = Reader::new();
        let begun = reader.read(&world, 0).await;
        assert!(
            begun.lost && begun.cursor.is_some(),
            "the pages come in slices"
        );
        reader.read_all(&world).await;
        assert_eq!(reader.pages_of(0), PROMPT_PAGES);

        // The answer waits for the store, and not for its own deadline.
        let (tool, mut read) = (world.tool.clone(), reader.read.clone());
        read.wait_ms = 30_000;
        let begun = Instant::now();
        let waiting = tokio::spawn(async move { tool.read_events(read, LIMIT).await });
        world.store(1).await;
        let answer = waiting.await.expect("no panic").expect("an answer");
        assert_eq!(
            answer.records.first().map(|record| record.event),
            Some(EventKind::Stored)
        );
        assert!(begun.elapsed() < Duration::from_secs(30));

        let mut evicted = false;
        for prompt in 2..PROMPTS_MAX {
            if evicted {
                break;
            }
            world.store(prompt).await;
            let records = reader.read_all(&world).await;
            let why = |record: &EventRecord| record.why == Some(EventReason::Evicted);
            evicted = records.iter().any(why);
            assert_eq!(reader.pages_of(prompt), PROMPT_PAGES);
        }
        assert!(evicted, "the host memory is never full");
        assert!(
            reader.pages_of(0) < PROMPT_PAGES,
            "the oldest prompt is evicted first"
        );
        assert_eq!(world.found(0).await, reader.pages_of(0));

        let status = world.status(false).await.expect("a status");
        signal(leader_beside(status.ranks[0].pid.into()), Signal::KILL);
        let answer = reader.read(&world, 0).await;
        assert!(answer.lost && answer.epoch > status.epoch, "{answer:?}");
        let begun = Instant::now();
        while !world.status(false).await.is_ok_and(|status| status.ready) {
            assert!(begun.elapsed() < LIMIT, "it does not serve");
        }
        reader.read_all(&world).await;
        assert_eq!(
            reader.pages_of(1),
            PROMPT_PAGES,
            "its pages are found again"
        );
        let reset = world.tool.reset(ResetScope::Everything, LIMIT).await;
        reset.expect("a confirmation");
        let records = reader.read_all(&world).await;
        assert!(reader.pages.is_empty());
        assert!(
            records
                .iter()
                .all(|record| record.why == Some(EventReason::Reset))
        );
    });
}

#[test]
fn a_tool_that_reads_too_late_begins_again() {
    on_two_threads(async {
        // A record for each page.
        let mut world = World::start_with(&["--ratio", "1"]).await;
        let mut reader = Reader::new();
        reader.read_all(&world).await;
        let from = reader.read.from;
        for prompt in 0..PROMPTS_MAX {
            world.store(prompt).await;
            // Without records, because none has this number.
            let last = ReadEvents {
                from: u64::MAX,
                ..reader.read.clone()
            };
            let last = world
                .tool
                .read_events(last, LIMIT)
                .await
                .expect("an answer");
            if last.next > from + LOG_RECORDS_MAX as u64 {
                break;
            }
        }
        let answer = reader.read(&world, 0).await;
        assert!(answer.lost && answer.records.is_empty(), "{answer:?}");
        reader.read_all(&world).await;
        let used = world
            .status(false)
            .await
            .expect("a status")
            .pages_in(2, "ready");
        assert_eq!(reader.pages.len() as u64, used);
    });
}
