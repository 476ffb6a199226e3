//! The file of `replay --events`: what a reader rebuilds from it, and that live and offline replays write the same.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use kvferry_client::AdminClient;
use kvferry_protocol::{EventKind, ReadEvents};
use kvferry_transport::{Address, ZmqTransport};
use serde_json::Value;

use super::beside::on_two_threads;
use super::disturbed::LIMIT;
use super::recovery::status_of;
use super::restarts;
use crate::support::{Running, number, replay, socket_dir};

/// Group and number of a page.
pub type Page = (u64, u64);
/// The pages of each medium.
pub type Held = BTreeMap<String, BTreeSet<Page>>;

/// What a reader has of a file of events.
#[derive(Debug, Default, PartialEq)]
pub struct Told {
    /// Each page that was stored or removed: whether it was stored, medium, group and number, and the page before it.
    pub pages: Vec<(bool, String, Page, Option<u64>)>,
    pub held: Held,
}

impl Told {
    /// Reads a file. Each page of a medium is stored when the medium lacks it, and removed when the medium has it.
    pub fn read(path: &Path) -> Self {
        let text = std::fs::read_to_string(path).expect("a file of events");
        assert!(text.is_empty() || text.ends_with('\n'));
        let mut told = Self::default();
        let mut last = 0.0;
        for line in text.lines() {
            let batch: Value = serde_json::from_str(line).expect("a batch");
            let time = batch[0].as_f64().expect("a time");
            assert!(time >= last, "{time} after {last}");
            last = time;
            assert!(batch[2].is_null());
            for event in batch[1].as_array().expect("events") {
                told.apply(event);
            }
        }
        told
    }

    fn apply(&mut self, event: &Value) {
        let stored = match event["type"].as_str() {
            Some("BlockStored") => true,
            Some("BlockRemoved") => false,
            _ => panic!("{event}"),
        };
        let medium = event["medium"].as_str().expect("a medium").to_owned();
        let group = event["group_idx"].as_u64().unwrap_or(0);
        let held = self.held.entry(medium.clone()).or_default();
        let mut before = event["parent_block_hash"].as_u64();
        for number in event["block_hashes"].as_array().expect("pages") {
            let page = (group, number.as_u64().expect("a number"));
            let changed = match stored {
                true => held.insert(page),
                false => held.remove(&page),
            };
            assert!(changed, "{event} of a medium in another state");
            let parent = before.filter(|_| stored);
            self.pages.push((stored, medium.clone(), page, parent));
            before = Some(page.1);
        }
    }

    /// Pages of a medium.
    pub fn count(&self, medium: &str) -> u64 {
        self.held.get(medium).map_or(0, BTreeSet::len) as u64
    }
}

/// Checks that live and offline replays have written the same events, which end with the pages that the report has.
pub fn compare(live: &Path, offline: &Path, report: &Value) {
    let (live, offline) = (Told::read(live), Told::read(offline));
    let differs = live
        .pages
        .iter()
        .zip(&offline.pages)
        .position(|(a, b)| a != b);
    if let Some(at) = differs {
        panic!("{at}: {:?} and {:?}", live.pages[at], offline.pages[at]);
    }
    assert_eq!(live.pages.len(), offline.pages.len());
    let on_disk = report.pointer("/moves/g3_used_pages");
    let on_disk = on_disk.and_then(Value::as_u64).unwrap_or(0);
    let in_memory = number(report, "/arena/used_pages");
    if on_disk == 0 {
        assert_eq!((live.count("CPU"), live.count("STORAGE")), (in_memory, 0));
    } else {
        // Beside a disk a page may have several places in a tier.
        assert!((1..=in_memory).contains(&live.count("CPU")));
        assert!((1..=on_disk).contains(&live.count("STORAGE")));
    }
    assert!(live.pages.iter().any(|(stored, ..)| *stored));
}

/// The pages that a leader has, by the slices of its change log.
async fn present(leader: &AdminClient) -> Held {
    let mut read = ReadEvents {
        most: 1000,
        namespace: Some(Vec::new().into()),
        cursor: Some(0),
        ..ReadEvents::default()
    };
    let mut held = Held::new();
    while read.cursor.is_some() {
        let answer = leader.read_events(read.clone(), LIMIT).await;
        let answer = answer.expect("an answer in time");
        for record in &answer.records {
            assert_eq!(record.event, EventKind::Stored, "nothing changes");
            let medium = if record.tier == 2 { "CPU" } else { "STORAGE" };
            let numbers = record.hashes.chunks(16).map(|hash| {
                let number = hash.last_chunk().expect("8 bytes");
                (u64::from(record.group), u64::from_be_bytes(*number))
            });
            held.entry(medium.to_owned()).or_default().extend(numbers);
        }
        (read.epoch, read.from) = (answer.epoch, answer.next);
        read.cursor = answer.cursor;
    }
    held
}

#[test]
fn the_events_of_a_live_replay_rebuild_what_the_leader_has() {
    let (folder, disk) = (socket_dir(), restarts::disk());
    let sockets = folder.path().join("s");
    let sockets = sockets.to_str().expect("UTF-8");
    let disk = disk.path().to_str().expect("UTF-8");
    let up = ["up", "--ranks", "2", "--g2", "1500x4KiB", "--g3", "64MiB"];
    let up = [&up[..], &["--g3-dir", disk, "--socket-dir", sockets]].concat();
    let _up = Running::start(&up);
    status_of(sockets, |_| true);
    let path = folder.path().join("events");
    let name = path.to_str().expect("UTF-8");
    let requests = [
        "--requests",
        "150",
        "--g1-pages",
        "64",
        "--concurrency",
        "4",
    ];
    let report = replay(&[&requests[..], &["--socket-dir", sockets, "--events", name]].concat());
    let told = Told::read(&path);
    assert!(told.pages.iter().any(|(stored, ..)| !stored), "{report}");
    let leader = Address::Directory(Path::new(sockets).join("leader"));
    on_two_threads(async {
        let leader = AdminClient::start(Arc::new(ZmqTransport), leader, "test");
        assert_eq!(present(&leader).await, told.held);
    });
}
