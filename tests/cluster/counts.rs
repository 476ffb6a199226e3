//! The numbers that leader, workers, monitor and replays report, compared with counts that come from none of them: from the
//! trace and the KV events, from the bytes that the engine has compared, from the kernel, and from a check of the disk.
//!
//! The events up to the end of a replay say where each page lies. For a next replay of a single request, a model of a prefix
//! cache then says how much is found, and which tier serves it.

mod model;
mod reported;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use kvferry_workload::models::Model;
use kvferry_workload::trace::{Shape, TraceRequest, generate};
use rustix::process::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::disturbed::LIMIT;
use super::monitor::free_port;
use super::processes::{leader_beside, signal};
use super::recovery::files_below;
use super::replay_events::{Held, Told};
use super::restarts::disk;
use crate::support::{Running, kvferry, number, replay, socket_dir};
use model::Pages;
use reported::{compare_metrics, metrics, reported};

const RANKS: u16 = 2;
/// Pages of the largest block.
const RATIO: u64 = 8;
/// Time in which workers and monitor must have reported what is at rest.
const REPORT_LIMIT: Duration = Duration::from_mins(1);
/// Most bytes that a worker reads or writes in a replay in addition to pages and their headers.
const BESIDE_PAGES: u64 = 4 << 10;
/// Bytes of a write of headers.
const HEADER_BYTES: u64 = 4 << 10;

/// Bytes that each worker has read and written, by the kernel.
type Io = [[u64; 2]; 2];

/// What was counted since the leader started.
#[derive(Debug, Default)]
struct Counted {
    replays: u64,
    /// By the name of what must be [`reported`].
    sums: BTreeMap<&'static str, u64>,
    /// Found tokens by tier and group.
    tokens: BTreeMap<(&'static str, usize), u64>,
    /// Pages that engines have asked to store.
    stored: u64,
}

impl Counted {
    fn add(&mut self, sums: &[(&'static str, u64)]) {
        for (name, more) in sums {
            *self.sums.entry(name).or_default() += more;
        }
    }
}

/// A running `up` with its monitor, and what was counted of it.
struct Live {
    up: Running,
    folder: TempDir,
    monitor: u16,
    disk: Option<TempDir>,
    pages: Pages,
    held: Held,
    counted: Counted,
}

impl Live {
    /// Starts `up` with room for so many pages of the model on each rank, and with so much of a disk.
    fn start(model: Model, host_pages: u32, g3: Option<&str>) -> Self {
        let (folder, monitor, pages) = (socket_dir(), free_port(), Pages::of(model));
        let (ranks, ratio, port) = (RANKS.to_string(), RATIO.to_string(), monitor.to_string());
        let host = format!("{host_pages}x{}", pages.place_bytes());
        let up = ["up", "--ranks", &ranks, "--ratio", &ratio, "--g2", &host];
        let sockets = folder.path().join("s");
        let sockets = ["--socket-dir", sockets.to_str().expect("UTF-8")];
        let mut up = [&up[..], &sockets, &["--monitor", &port]].concat();
        let disk = g3.map(|_| disk());
        if let (Some(g3), Some(disk)) = (g3, &disk) {
            let directory = disk.path().to_str().expect("UTF-8");
            // The kernel counts what threads read for a process, and not what io_uring does.
            up.extend(["--g3", g3, "--g3-dir", directory, "--g3-io", "threads"]);
        }
        // The scrub reads the disk, too.
        let no_scrub = [("KVFERRY_G3_SCRUB_BYTES_PER_S", "0".into())];
        Self {
            up: Running::start_with(&no_scrub, &up, folder.path()),
            folder,
            monitor,
            disk,
            pages,
            held: Held::new(),
            counted: Counted::default(),
        }
    }

    fn path(&self, name: &str) -> String {
        let path = self.folder.path().join(name);
        path.to_str().expect("UTF-8").to_owned()
    }

    /// The first status with `is_true`.
    fn status(&self, is_true: impl Fn(&Value) -> bool) -> Value {
        let begun = Instant::now();
        loop {
            let output = kvferry(&["status", "--json", "--socket-dir", &self.path("s")]);
            let status = serde_json::from_slice(&output.stdout).unwrap_or(Value::Null);
            if status.is_object() && is_true(&status) {
                return status;
            }
            assert!(begun.elapsed() < REPORT_LIMIT, "{status:#}");
        }
    }

    /// The status at rest, and what the workers have read and written.
    fn at_rest(&self) -> (Value, Io) {
        let status = self.status(|status| {
            let none = |path: &&str| status.pointer(path).and_then(Value::as_u64).unwrap_or(0) == 0;
            let open = ["/slots", "/pins", "/copies_under_way", "/requests/engines"];
            let moves = ["/moves/under_way", "/moves/waiting"];
            let workers = ["/ranks/0/pid", "/ranks/1/pid"];
            open.iter().chain(&moves).all(none) && !workers.iter().any(none)
        });
        let io = [0, 1].map(|rank| {
            let pid = number(&status, &format!("/ranks/{rank}/pid"));
            let io = fs::read_to_string(format!("/proc/{pid}/io")).expect("a worker");
            ["rchar: ", "wchar: "].map(|name| {
                let bytes = io.lines().find_map(|line| line.strip_prefix(name));
                bytes.and_then(|bytes| bytes.parse().ok()).expect("bytes")
            })
        });
        (status, io)
    }

    /// The arguments of a replay that writes its events.
    fn arguments(&self, more: &[&str]) -> Vec<String> {
        let (sockets, events) = (self.path("s"), self.path("events"));
        let model = self.pages.model.to_string();
        let fixed = ["--socket-dir", &sockets, "--events", &events];
        let fixed = [&fixed[..], &["--model", &model]].concat();
        let all = fixed.iter().chain(more);
        all.map(|text| (*text).to_owned()).collect()
    }

    /// Counts the pages that a replay has brought into host memory, evicted from there and read from the disk. Returns those
    /// that each rank has read.
    fn count_pages(&mut self, before: &Io) -> u64 {
        let told = Told::read(Path::new(&self.path("events")));
        let of_host = |stored| {
            let of = told.pages.iter().filter(|page| page.0 == stored);
            of.filter(|page| page.1 == "CPU").count() as u64
        };
        let held = |medium| self.held.get(medium).map_or(0, BTreeSet::len) as u64;
        // The file begins with the pages that were there before.
        let (evicted, came) = (of_host(false), of_host(true) - held("CPU"));
        let read = self.at_rest().1.map(|[read, _]| read);
        let read = [0, 1].map(|rank| read[rank] - before[rank][0]);
        let read = read.map(|bytes| match held("STORAGE") {
            // The headers of an empty disk, which is opened during the first requests.
            0 => 0,
            _ => {
                let page = self.pages.place_bytes();
                assert!(bytes % page <= BESIDE_PAGES, "{bytes} bytes were read");
                bytes / page
            }
        });
        assert_eq!(read[0], read[1], "each rank has its part of a page");
        self.held = told.held;
        let used = number(&self.at_rest().0, "/tiers/0/used_pages");
        let held = self.held["CPU"].len() as u64;
        // Beside a disk a page may have several places in a tier.
        let most = if self.disk.is_some() { used } else { held };
        assert!(held <= used && used <= most, "{held} are told, {used} used");
        self.counted.replays += 1;
        self.counted.add(&[
            ("evicted_pages", evicted),
            ("pages read from the disk", read[0]),
        ]);
        if self.disk.is_none() {
            self.counted.add(&[("published_pages", came)]);
        }
        read[0]
    }

    /// Replays one request, and compares its report with the model.
    fn replay_one(&mut self, asked: &TraceRequest) {
        let (hit, hashes) = self.pages.hit(asked, &self.held);
        let line = json!({
            "timestamp": 0,
            "input_length": asked.input_tokens,
            "output_length": asked.output_tokens,
            "hash_ids": asked.blocks,
        });
        let (trace, unit) = (self.path("one.jsonl"), self.pages.unit.to_string());
        fs::write(&trace, line.to_string()).expect("a trace is written");
        let one = [&trace, "--trace-block-tokens", &unit, "--g1-pages", "0"];
        let arguments = self.arguments(&[&one[..], &["--sequential"]].concat());
        let (_, before) = self.at_rest();
        let report = replay(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
        let bytes = u64::from(RANKS) * hit.bytes;
        for (path, expected) in [
            ("/tokens/prompt", asked.input_tokens),
            ("/tokens/hit_g1", 0),
            ("/tokens/hit_g2", hit.tokens - hit.below_tokens),
            ("/tokens/hit_g3", hit.below_tokens),
            ("/tokens/computed", asked.input_tokens - hit.tokens),
            ("/bytes/verified", bytes),
            ("/bytes/mismatched", 0),
            ("/disturbed_requests", 0),
        ] {
            assert_eq!(
                number(&report, path),
                expected,
                "{path} of {hit:?}: {report:#}"
            );
        }
        let read = self.count_pages(&before);
        // Blocks are read as a whole, also for a window at their end.
        let most = hit.pages_below * RATIO;
        assert!(
            (hit.pages_below..=most).contains(&read),
            "{read} pages were read for {hit:?}"
        );
        let unit = u64::from(self.pages.unit);
        self.counted.add(&[
            ("lookups", 1),
            ("lookup_pages", hashes),
            ("device_pages", 0),
            ("hit_pages", hit.tokens / unit),
            ("hit_tokens", hit.tokens),
            ("below_pages", hit.below_tokens / unit),
            ("below_tokens", hit.below_tokens),
            ("loaded_pages", hit.pages),
            ("scattered_bytes", bytes),
        ]);
        self.counted.stored += hashes;
        for (of, tokens) in hit.by_group {
            *self.counted.tokens.entry(of).or_default() += tokens;
        }
    }

    /// Replays a part of the built-in workload concurrently, and calls `meanwhile` while it runs. Counts what the engine has
    /// got, without pages. Returns the report, and what the workers had read and written before.
    fn replay_many(&mut self, requests: u32, meanwhile: impl FnOnce(&Self)) -> (Value, Io) {
        let (path, most) = (self.path("report.json"), requests.to_string());
        let many = ["--quiet", "--json", &path, "--requests", &most];
        let many = [&many[..], &["--concurrency", "6", "--g1-pages", "64"]].concat();
        let arguments = self.arguments(&many);
        let arguments = arguments.iter().map(String::as_str);
        let arguments: Vec<&str> = ["replay"].into_iter().chain(arguments).collect();
        let (_, before) = self.at_rest();
        let running = Running::start(&arguments);
        meanwhile(self);
        let (code, errors) = running.end(LIMIT);
        assert_eq!(code, Some(0), "{errors}");
        let report = fs::read(path).expect("a report");
        let report = serde_json::from_slice(&report).expect("JSON");
        assert_eq!(number(&report, "/requests"), u64::from(requests));
        let unit = u64::from(self.pages.unit);
        let [own, host, below] = ["hit_g1", "hit_g2", "hit_g3"]
            .map(|source| number(&report, &format!("/tokens/{source}")) / unit);
        let prompts = generate(&Shape::default(), 1).requests.into_iter();
        let prompts = prompts.take(requests as usize);
        let asked = prompts.map(|prompt| prompt.blocks.len() as u64).sum();
        let verified = number(&report, "/bytes/verified");
        self.counted.add(&[
            ("lookups", requests.into()),
            ("lookup_pages", asked),
            ("device_pages", own),
            ("hit_pages", host + below),
            ("hit_tokens", (host + below) * unit),
            ("below_pages", below),
            ("below_tokens", below * unit),
            (
                "loaded_pages",
                verified / self.pages.place_bytes() / u64::from(RANKS),
            ),
            ("scattered_bytes", verified),
        ]);
        self.counted.stored += asked;
        for (tier, pages) in [("g2", host), ("g3", below)] {
            *self.counted.tokens.entry((tier, 0)).or_default() += pages * unit;
        }
        (report, before)
    }

    /// Bytes of the files of a rank's shard.
    fn shard_bytes(&self, rank: usize) -> u64 {
        let disk = self.disk.as_ref().expect("a disk").path();
        let files = files_below(&disk.join(format!("shard-{rank}"))).into_iter();
        // A file may be replaced meanwhile.
        let bytes = files.map(|path| fs::metadata(path).map_or(0, |file| file.len()));
        bytes.sum()
    }

    /// Compares what is reported at rest with what was counted. Returns the status.
    fn compare(&self) -> Value {
        // Workers report their disks every two seconds.
        let status = self.status(|status| {
            let written = reported(status, "written_through_pages") * self.pages.place_bytes();
            let mut ranks = status["ranks"]
                .as_array()
                .expect("ranks")
                .iter()
                .enumerate();
            ranks.all(|(rank, shown)| {
                let disk = &shown["disk"];
                disk.is_null()
                    || disk["listed_pages"] == disk["durable_pages"]
                        && disk["written_bytes"] == written
                        && disk["used_bytes"] == self.shard_bytes(rank)
            })
        });
        let counted = |name| self.counted.sums[name];
        let of_status = |name| reported(&status, name);
        let short = of_status("loads_short") + of_status("loads_failed");
        for (name, expected) in &self.counted.sums {
            let more = match *name {
                // An engine does not use what a load copied after a copy that failed.
                "scattered_bytes" => short > 0,
                // Beside a disk a page may have several places in a tier, and events tell of its last one.
                "evicted_pages" => self.disk.is_some(),
                _ => false,
            };
            match more {
                true => assert!(of_status(name) >= *expected),
                false => assert_eq!(of_status(name), *expected, "{name} of {status:#}"),
            }
        }
        if self.pages.groups.len() == 1 {
            let ends = ["present_pages", "published_pages", "failed_pages"];
            let ends: u64 = ends.iter().map(|name| of_status(name)).sum();
            // Loads count the pages for which they find no room, too.
            let most = ends + of_status("refused_pages");
            assert!((ends..=most).contains(&self.counted.stored), "{status:#}");
        }
        let missing = counted("lookup_pages") - counted("device_pages");
        let below = counted("below_pages");
        let from_host = counted("hit_pages") - below;
        let tiers = [
            ("CPU", missing, from_host),
            ("STORAGE", missing - from_host, below),
        ];
        let shown = status["tiers"].as_array().expect("tiers");
        for (shown, (medium, asked, found)) in shown.iter().zip(tiers) {
            assert_eq!(number(shown, "/lookup_pages"), asked, "{medium}");
            assert_eq!(number(shown, "/hit_pages"), found, "{medium}");
        }
        let status_now = || self.status(|_| true);
        compare_metrics(self.monitor, status_now, &self.counted.tokens);
        status
    }

    /// Ends `up`, and compares what workers, the kernel and a check of the files say of the disk.
    fn end(self, status: &Value) {
        let all = u64::from(RANKS) * self.pages.place_bytes();
        let found = metrics(self.monitor);
        for (edge, bytes) in [
            (["g1", "g2"], reported(status, "gathered_bytes")),
            (["g2", "g1"], reported(status, "scattered_bytes")),
            (
                ["g2", "g3"],
                reported(status, "written_through_pages") * all,
            ),
            (
                ["g3", "g2"],
                self.counted.sums["pages read from the disk"] * all,
            ),
        ] {
            let [from, to] = edge;
            let copied = [0, 1].map(|rank| {
                let labels = format!("process=\"worker-0-{rank}\",from=\"{from}\",to=\"{to}\"");
                found[&format!("kvferry_copied_bytes_total{{{labels}}}")]
            });
            assert_eq!(copied[0] + copied[1], bytes as f64, "{edge:?}");
        }
        for (rank, [_, written]) in self.at_rest().1.iter().enumerate() {
            let pages = number(status, &format!("/ranks/{rank}/disk/written_bytes"));
            let headers = reported(status, "moves") * HEADER_BYTES;
            let most = pages + headers + self.counted.replays * BESIDE_PAGES;
            assert!((pages..=most).contains(written), "{written} and {pages}");
        }
        self.up.terminate();
        assert_eq!(self.up.end(LIMIT).0, Some(0));
        let disk = self.disk.expect("a disk");
        let checked = kvferry(&["fsck", "--json", disk.path().to_str().expect("UTF-8")]);
        let checked = serde_json::from_slice(&checked.stdout).expect("a report");
        let ranks = status["ranks"].as_array().expect("ranks").iter();
        let durable: u64 = ranks.map(|rank| number(rank, "/disk/durable_pages")).sum();
        assert_eq!(number(&checked, "/good_pages"), durable);
        assert_eq!(number(&checked, "/findings_total"), 0);
    }
}

#[test]
fn with_a_disk_every_count_is_that_of_others() {
    let mut live = Live::start(Model::Tiny, 300, Some("32MiB"));
    for asked in live.pages.requests(13) {
        live.replay_one(&asked);
    }
    let below = live.counted.sums["below_pages"];
    assert!(below > 0, "nothing came from the disk");
    live.compare();
    let (_, before) = live.replay_many(60, |_| ());
    live.count_pages(&before);
    assert!(live.counted.sums["below_pages"] > below);
    let status = live.compare();
    live.end(&status);
}

#[test]
fn with_several_groups_every_count_is_that_of_others() {
    for (model, host_pages, requests) in [(Model::TwoSizes, 128, 8), (Model::MambaLike, 40, 8)] {
        let mut live = Live::start(model, host_pages, Some("256MiB"));
        for asked in live.pages.requests(requests) {
            live.replay_one(&asked);
        }
        let tokens = &live.counted.tokens;
        for of in [("g2", 0), ("g2", 1)] {
            assert!(tokens.contains_key(&of), "{tokens:?}");
        }
        assert!(tokens.keys().any(|(tier, _)| *tier == "g3"), "{tokens:?}");
        let status = live.compare();
        live.end(&status);
    }
}

#[test]
fn after_kills_every_count_is_that_of_others() {
    let mut live = Live::start(Model::Tiny, 2_000, None);
    let (_, before) = live.replay_many(60, |_| ());
    live.count_pages(&before);
    let status = live.compare();

    // The counters of the next leader begin at 0, and it finds what is held.
    let epoch = number(&status, "/epoch");
    signal(leader_beside(number(&status, "/ranks/0/pid")), Signal::KILL);
    live.status(|status| number(status, "/epoch") > epoch);
    live.counted = Counted::default();
    live.replay_many(1, |_| ());
    let status = live.at_rest().0;
    let recovered = reported(&status, "recovered_pages");
    // It finds evicted pages, too, if nothing has overwritten them.
    assert!(recovered >= live.held["CPU"].len() as u64);
    live.held = Told::read(Path::new(&live.path("events"))).held;
    let [came, evicted] =
        ["published_pages", "evicted_pages"].map(|name| (name, reported(&status, name)));
    let held = recovered + came.1 - evicted.1;
    assert_eq!(live.held["CPU"].len() as u64, held);
    live.counted.add(&[came, evicted]);
    for asked in live.pages.requests(4) {
        live.replay_one(&asked);
    }
    live.compare();

    let loaded = live.counted.sums["loaded_pages"];
    let (report, _) = live.replay_many(400, |live| {
        let status = live.status(|status| reported(status, "loaded_pages") > loaded + 1_000);
        signal(number(&status, "/ranks/1/pid"), Signal::KILL);
    });
    assert!(
        number(&report, "/disturbed_requests") > 0,
        "the kills disturbed no request"
    );
    let status = live.at_rest().0;
    let counted = |name| live.counted.sums[name];
    for name in ["hit_pages", "hit_tokens", "loaded_pages"] {
        assert_eq!(reported(&status, name), counted(name), "{name}");
    }
    // While a rank was missing, lookups were refused.
    let refused = reported(&status, "refused_lookups_not_ready");
    assert_eq!(reported(&status, "lookups") + refused, counted("lookups"));
    for name in ["lookup_pages", "device_pages"] {
        assert!(reported(&status, name) <= counted(name), "{name}");
    }
    // More by copies of the other rank, for loads that failed.
    assert!(reported(&status, "scattered_bytes") >= counted("scattered_bytes"));
}
