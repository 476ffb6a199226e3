//! `replay --events`: the KV events of the tiers below the engine, a batch in each line of a file.
//!
//! A replay reads the leader's change log as `kvferry events` does: an offline one after each moment of virtual time, a live
//! one over a connection of its own. Both go through the same feed into the same events.

use std::fmt::Display;
use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

use crate::error::CommandError;
use kvferry_client::AdminClient;
use kvferry_core::Leader;
use kvferry_events::{Batch, Event, Feed, Followed, PageKey, Shape, TierEvents};
use kvferry_protocol::{Events, ReadEvents};
use kvferry_sim::read_events;
use kvferry_transport::Failure;
use kvferry_types::Time;
use kvferry_workload::scheduler::Prompt;

use super::Arguments;
use super::workload::Workload;

/// Events in a line, at most, of at most 128 pages each: 400 KiB.
const LINE_EVENTS_MAX: usize = 128;
/// Longest time that a read of a live leader waits for a change, and time beyond that after which it fails.
const WAIT: Duration = Duration::from_secs(10);
const READ_LIMIT: Duration = Duration::from_secs(5);
/// Pause after a failed read: the leader may be starting again.
const RETRY: Duration = Duration::from_millis(200);
/// Time in which a live leader must answer the reads at the begin and at the end.
const READ_ALL_LIMIT: Duration = Duration::from_secs(30);

/// The file, and what was read so far: at most 60 bytes for each page of a tier, 57 for each page that a tier has, and 39 for
/// each different page of the prompts so far.
pub(super) struct EventsFile {
    path: PathBuf,
    file: BufWriter<File>,
    feed: Feed,
    events: TierEvents,
    /// Hashes of a prompt that one page of each group covers.
    page_hashes: Vec<u32>,
    /// Time of the last batch, in seconds.
    last: f64,
    /// When a live replay began.
    begun: Option<Instant>,
    /// How often changes were lost by one leader, so that its pages were read again: their events are in another order.
    begun_again: u64,
    epoch: u64,
    /// Why the file could not be written.
    failed: Option<String>,
}

impl EventsFile {
    /// Creates the file that `--events` names.
    pub(super) fn create(
        arguments: &Arguments,
        workload: &Workload,
    ) -> Result<Option<Self>, CommandError> {
        let Some(path) = &arguments.events else {
            return Ok(None);
        };
        let file = File::create(path);
        let file = file
            .map_err(|error| CommandError::Data(format!("--events {}: {error}", path.display())))?;
        let groups = workload.groups.iter();
        let page_tokens = groups.map(|group| group.layers.page_tokens);
        let mut feed = Feed::with_places(usize::MAX);
        // The reference engine has one namespace, without a name.
        feed.follow(Some(Followed::new(Vec::new())));
        Ok(Some(Self {
            path: path.clone(),
            file: BufWriter::new(file),
            feed,
            events: TierEvents::new(page_tokens.clone().map(u64::from)),
            page_hashes: page_tokens
                .map(|tokens| (tokens / workload.unit_tokens).max(1))
                .collect(),
            last: 0.0,
            begun: None,
            begun_again: 0,
            epoch: 0,
            failed: None,
        }))
    }

    /// Takes the sequence of a prompt, before its first page is stored.
    ///
    /// # Errors
    /// The file could not be written since the last prompt.
    pub(super) fn arrives(&mut self, prompt: &Prompt) -> Result<(), CommandError> {
        for (group, hashes) in (0..).zip(&self.page_hashes) {
            let pages = prompt.hashes.view_of(*hashes);
            let numbers = pages.fingerprints(0);
            let numbers = numbers.filter_map(|page| PageKey::of_hash(&page.0.to_be_bytes()));
            self.events.describe(group, numbers);
        }
        self.checked()
    }

    /// Reads all changes of a simulated leader, which it made until `seconds`.
    pub(super) fn read(
        &mut self,
        seconds: f64,
        now: Time,
        leader: &mut Leader,
    ) -> Result<(), CommandError> {
        while let Some(read) = self.feed.read(Duration::ZERO) {
            let events = read_events(leader, now, read);
            if self.answered(seconds, &events)? {
                break;
            }
        }
        Ok(())
    }

    /// Takes the answer of a read; returns whether everything is read.
    fn answered(&mut self, seconds: f64, events: &Events) -> Result<bool, CommandError> {
        if events.lost && self.epoch == events.epoch {
            self.begun_again += 1;
            tracing::warn!(
                "--events: the leader has no record of some changes: its pages are read again"
            );
        }
        self.epoch = events.epoch;
        let mut changes = self.feed.answered(Time(0), events);
        // The leader serves, so that its inventories are read: pages that it does not list are gone.
        changes.extend(self.feed.turn(Time::NEVER));
        let made = self.events.events(&changes);
        self.last = self.last.max(seconds);
        if self.failed.is_none()
            && let Err(error) = self.write(&made)
        {
            self.failed = Some(error.to_string());
        }
        self.checked()?;
        let begins = self.feed.read(Duration::ZERO);
        let begins = begins.is_some_and(|read| read.cursor.is_some());
        Ok(!begins && events.records.is_empty())
    }

    fn write(&mut self, events: &[Event]) -> std::io::Result<()> {
        for events in events.chunks(LINE_EVENTS_MAX) {
            let batch = Batch {
                time: self.last,
                events: events.to_vec(),
                rank: None,
                signed: false,
            };
            batch.write_json(Shape::Map, &mut self.file)?;
            self.file.write_all(b"\n")?;
        }
        Ok(())
    }

    fn checked(&self) -> Result<(), CommandError> {
        match &self.failed {
            None => Ok(()),
            Some(why) => Err(cannot_write(&self.path, why)),
        }
    }

    /// Writes what is left.
    pub(super) fn finish(&mut self) -> Result<(), CommandError> {
        self.checked()?;
        let flushed = self.file.flush();
        flushed.map_err(|error| cannot_write(&self.path, &error))
    }

    /// The next read of a live leader.
    fn request(&self, wait: Duration) -> Option<ReadEvents> {
        self.feed.read(wait)
    }
}

fn cannot_write(path: &Path, why: &dyn Display) -> CommandError {
    CommandError::Failed(format!(
        "--events {}: {why}; the file ends before the replay",
        path.display()
    ))
}

/// The file of a live replay: prompts arrive while the changes of the leader are read.
#[derive(Clone)]
pub(super) struct SharedFile(Arc<Mutex<EventsFile>>);

impl SharedFile {
    pub(super) fn new(file: EventsFile) -> Self {
        Self(Arc::new(Mutex::new(file)))
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, EventsFile> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn answered(&self, events: &Events) -> Result<bool, CommandError> {
        let mut file = self.lock();
        let seconds = file.begun.get_or_insert_with(Instant::now).elapsed();
        file.answered(seconds.as_secs_f64(), events)
    }

    /// Reads everything that a leader has.
    async fn read_all(&self, leader: &AdminClient) -> Result<(), CommandError> {
        let until = Instant::now() + READ_ALL_LIMIT;
        loop {
            let answer = self.next(leader, Duration::ZERO).await;
            match answer {
                None => return Ok(()),
                Some(Ok(events)) => {
                    if self.answered(&events)? {
                        return Ok(());
                    }
                }
                Some(Err(failure)) if Instant::now() >= until => {
                    return Err(CommandError::Failed(format!(
                        "--events: the leader's changes cannot be read: {failure}"
                    )));
                }
                Some(Err(failure)) => {
                    tracing::info!(%failure, "the leader's changes cannot be read");
                    sleep(RETRY).await;
                }
            }
        }
    }

    async fn next(&self, leader: &AdminClient, wait: Duration) -> Option<Result<Events, Failure>> {
        let request = self.lock().request(wait)?;
        let limit = Duration::from_millis(request.wait_ms.into()) + READ_LIMIT;
        Some(leader.read_events(request, limit).await)
    }
}

/// Follows the changes of one live leader. Stops when dropped.
pub(super) struct Following {
    file: SharedFile,
    leader: AdminClient,
    end: oneshot::Sender<()>,
    task: Task,
}

/// A task that is ended when it is dropped.
struct Task(JoinHandle<Result<(), CommandError>>);

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Following {
    /// Reads the pages that the leader has, and follows it from then on.
    pub(super) async fn start(file: SharedFile, leader: AdminClient) -> Result<Self, CommandError> {
        file.read_all(&leader).await?;
        let (end, ended) = oneshot::channel();
        let follow = follow(file.clone(), leader.clone(), ended);
        Ok(Self {
            file,
            leader,
            end,
            task: Task(tokio::spawn(follow)),
        })
    }

    /// Reads the changes up to now, and ends.
    pub(super) async fn end(mut self) -> Result<(), CommandError> {
        // A task that has failed does not receive it.
        let _received = self.end.send(());
        (&mut self.task.0).await.map_err(CommandError::failed)??;
        self.file.read_all(&self.leader).await
    }
}

async fn follow(
    file: SharedFile,
    leader: AdminClient,
    mut ended: oneshot::Receiver<()>,
) -> Result<(), CommandError> {
    loop {
        let answer = tokio::select! {
            answer = file.next(&leader, WAIT) => answer,
            _ = &mut ended => return Ok(()),
        };
        match answer {
            None => return Ok(()),
            Some(Ok(events)) => _ = file.answered(&events)?,
            Some(Err(failure)) => {
                tracing::info!(%failure, "the leader's changes cannot be read");
                tokio::select! {
                    () = sleep(RETRY) => {}
                    _ = &mut ended => return Ok(()),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use clap::Parser;
    use serde_json::Value;

    use super::super::{offline, timed};
    use super::*;
    use kvferry_events::Tier;
    use kvferry_types::TierId;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        arguments: Arguments,
    }

    fn arguments(path: &Path, more: &str) -> Arguments {
        let path = path.to_str().expect("UTF-8");
        let all = ["replay", "--quiet", "--mode", "offline", "--events", path];
        let all = all.into_iter().chain(more.split_whitespace());
        Command::parse_from(all).arguments
    }

    /// Group and number of a page.
    type Page = (u64, u64);
    type Held = BTreeMap<&'static str, BTreeSet<Page>>;

    /// What a reader has at the end of a file.
    #[derive(Default)]
    struct Reader {
        held: Held,
        removed: u64,
        last: f64,
    }

    /// The page before each page of the prompts.
    fn parents(workload: &Workload, file: &EventsFile) -> BTreeMap<Page, Option<u64>> {
        let mut parents = BTreeMap::new();
        for (_, prompt) in workload.prompts() {
            for (group, hashes) in (0..).zip(&file.page_hashes) {
                let mut before = None;
                for page in prompt.hashes.view_of(*hashes).fingerprints(0) {
                    let number = (page.0 & u128::from(u64::MAX)) as u64;
                    parents.insert((group, number), before.replace(number));
                }
            }
        }
        parents
    }

    fn read(path: &Path, parents: &BTreeMap<Page, Option<u64>>) -> Reader {
        let text = std::fs::read_to_string(path).expect("a file of events");
        let mut reader = Reader::default();
        for line in text.lines() {
            let batch: Value = serde_json::from_str(line).expect("a batch");
            let time = batch[0].as_f64().expect("a time");
            assert!(time >= reader.last, "{time} after {}", reader.last);
            reader.last = time;
            for event in batch[1].as_array().expect("events") {
                let medium = match event["medium"].as_str() {
                    Some("CPU") => "CPU",
                    Some("STORAGE") => "STORAGE",
                    _ => panic!("{event}"),
                };
                let held = reader.held.entry(medium).or_default();
                let group = event["group_idx"].as_u64().unwrap_or(0);
                let stored = event["type"] == "BlockStored";
                let mut before = event["parent_block_hash"].as_u64();
                for number in event["block_hashes"].as_array().expect("pages") {
                    let number = number.as_u64().expect("a number");
                    if stored {
                        assert_eq!(parents[&(group, number)], before, "{event}");
                        before = Some(number);
                        assert!(held.insert((group, number)), "{event} twice");
                    } else {
                        assert!(held.remove(&(group, number)), "{event} of no page");
                        reader.removed += 1;
                    }
                }
            }
        }
        reader
    }

    /// The pages that a lookup finds in each tier.
    fn content(leader: &Leader) -> Held {
        let mut held = Held::new();
        for (tier, medium) in [(TierId::Host, Tier::Host), (TierId::Disk, Tier::Disk)] {
            let Some(pool) = leader.pool_of(tier) else {
                continue;
            };
            for block in pool.view().filter(|block| !block.retired) {
                let group = u64::from(block.domain.group().0);
                let pages = &block.fingerprints[..block.ready as usize];
                let numbers = pages.iter().map(|page| page.0 & u128::from(u64::MAX));
                let pages = numbers.map(|number| (group, number as u64));
                held.entry(medium.medium()).or_default().extend(pages);
            }
        }
        held
    }

    fn check(path: &Path, workload: &Workload, file: &EventsFile, leader: &Leader) -> Reader {
        let reader = read(path, &parents(workload, file));
        let content = content(leader);
        assert!(content.values().any(|pages| !pages.is_empty()));
        for (medium, pages) in &content {
            assert_eq!(reader.held.get(medium), Some(pages), "{medium}");
            let tier = Tier::ALL.into_iter().find(|tier| tier.medium() == *medium);
            let known = file.events.held(tier.expect("a tier"));
            let known: BTreeSet<Page> = known
                .map(|(group, page)| (u64::from(group), page.0))
                .collect();
            assert_eq!(known, *pages, "{medium}");
        }
        reader
    }

    #[test]
    fn a_reader_of_a_sequential_replay_has_what_the_tiers_have() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("events");
        for more in [
            "--requests 120 --g1-pages 0 --g2-pages 600",
            "--requests 120 --g1-pages 16 --g2-pages 600 --g3-pages 4000 --ratio 4",
            "--requests 120 --g1-pages 16 --g2-pages 600 --g3-pages 4000 --restart-at 60",
            "--requests 60 --g1-pages 500 --g2-pages 500 --model gemma-like",
            "--requests 60 --g1-pages 500 --g2-pages 500 --model mamba-like --g3-pages 2000",
        ] {
            let arguments = arguments(&path, &format!("--sequential {more}"));
            let workload = Workload::load(&arguments).expect("a workload");
            let file = EventsFile::create(&arguments, &workload).expect("a file");
            let mut file = file.expect("--events is given");
            let played = offline::play(&arguments, &workload, Some(&mut file));
            let (mut world, _) = played.expect("played");
            file.finish().expect("written");
            let reader = check(&path, &workload, &file, world.leader_mut());
            assert!(reader.removed > 0, "{more}");
            assert!(reader.last > 1.0, "{more}: {}", reader.last);
        }
    }

    #[test]
    fn a_reader_of_a_replay_in_virtual_time_has_what_the_tiers_have() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("events");
        // With the last one, nothing happens for longer than a leader records changes without a reader.
        for (more, least) in [
            ("--speedup 40 --d2h-gb-per-s 0.5", 0.1),
            ("--concurrency 8 --prefill-tokens-per-s 200000", 0.1),
            ("--requests 40 --speedup 0.0005", 1000.0),
        ] {
            let sizes = "--g1-pages 16 --g2-pages 600 --g3-pages 6000";
            let arguments = arguments(&path, &format!("{sizes} {more}"));
            let workload = Workload::load(&arguments).expect("a workload");
            let file = EventsFile::create(&arguments, &workload).expect("a file");
            let mut file = file.expect("--events is given");
            let settings = arguments.timed.settings().expect("settings");
            let pages = offline::tier_pages(&workload);
            let world = timed::world(&arguments, &workload, settings, &pages);
            let mut world = world.expect("a world");
            let served = |_: &_| {};
            timed::play(&arguments, &workload, &mut world, served, Some(&mut file))
                .expect("played");
            file.finish().expect("written");
            let reader = check(&path, &workload, &file, world.leader());
            assert!(reader.removed > 0, "{more}");
            assert!(reader.last > least, "{more}: {}", reader.last);
            assert_eq!(file.begun_again, 0, "{more}");
        }
    }

    #[test]
    fn two_offline_replays_write_the_same_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let text = |name: &str| {
            let path = folder.path().join(name);
            let arguments = arguments(&path, "--requests 60 --g2-pages 600 --speedup 40");
            let workload = Workload::load(&arguments).expect("a workload");
            timed::run(&arguments, &workload).expect("a report");
            std::fs::read(path).expect("a file")
        };
        let first = text("first");
        assert!(!first.is_empty());
        assert!(first == text("second"));
    }
}
