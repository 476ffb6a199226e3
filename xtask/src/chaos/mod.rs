//! Real processes under random kills and stops, for a chosen time: `cargo xtask chaos --minutes N --seed S`.
//!
//! Two engine replicas of two ranks each replay and compare every byte that they load, while their workers, their
//! leader, the supervisor of these and the engines themselves are killed and stopped at random. The seed determines the
//! order of these events, and the machine determines the moment.

mod processes;
mod record;
mod workload;

use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;

use processes::{Cluster, Device, Engines, is_alive, number, signal};
use record::{Pages, Record};

/// Engine replicas, and ranks of each.
const REPLICAS: u64 = 2;
const RANKS: u64 = 2;
/// Time that an engine waits for an answer.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(1);
/// Time that a leader waits after the deadline of a copy before a worker that still owes a report is ended.
const FENCE: Duration = Duration::from_secs(10);
/// Additional time that anything may take, because the machine is busy.
const SLACK: Duration = Duration::from_secs(5);
/// Maximum time until everything serves again.
const RECOVERY_MAX: Duration = Duration::from_secs(60);
/// Maximum time until nothing is held after a replay. A worker that this run stopped may owe the end of a copy: its leader
/// ends it after the deadline and the fence time, and nothing else does while a disturbance waits.
const SETTLED_MAX: Duration =
    Duration::from_secs(REQUEST_TIMEOUT.as_secs() + FENCE.as_secs() + SLACK.as_secs());

/// A disturbance: the process that is hit, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    WorkerInGather,
    WorkerInScatter,
    Leader,
    Engine,
    Supervisor,
    WorkerStops,
    WorkerStaysStopped,
    LeaderStops,
}

impl Kind {
    const ALL: [Self; 8] = [
        Self::WorkerInGather,
        Self::WorkerInScatter,
        Self::Leader,
        Self::Engine,
        Self::Supervisor,
        Self::WorkerStops,
        Self::WorkerStaysStopped,
        Self::LeaderStops,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::WorkerInGather => "worker killed in a gather",
            Self::WorkerInScatter => "worker killed in a scatter",
            Self::Leader => "leader killed",
            Self::Engine => "engines killed",
            Self::Supervisor => "`up` killed",
            Self::WorkerStops => "worker stopped past a deadline, then continued",
            Self::WorkerStaysStopped => "worker stopped until it was killed for that",
            Self::LeaderStops => "leader stopped, then continued",
        }
    }
}

/// Runs until the time is over, or a check fails.
pub(crate) fn run(arguments: &[String]) -> Result<(), String> {
    let (mut minutes, mut seed, mut device) = (30, 1, Device::Cpu);
    let mut model = "llama-3-8b";
    for pair in arguments.chunks(2) {
        let value = pair.get(1).and_then(|value| value.parse().ok());
        let value = value.ok_or(format!("{} needs a number", pair[0]));
        match (pair[0].as_str(), pair.get(1).map(String::as_str)) {
            ("--minutes", _) => minutes = value?,
            ("--seed", _) => seed = value?,
            ("--device", Some("cpu")) => device = Device::Cpu,
            ("--device", Some("cuda")) => device = Device::Cuda,
            ("--model", Some(name)) => model = name,
            (other, _) => {
                let known = "--minutes N, --seed S, --device cpu|cuda, --model NAME";
                return Err(format!("unknown option '{other}': {known}"));
            }
        }
    }
    crate::cargo(&["build", "--release", "--locked", "--quiet"])?;
    if device == Device::Cuda {
        let driver = ["build", "--package", "kvferry-fake-cuda"];
        crate::cargo(&[&driver[..], &["--release", "--locked", "--quiet"]].concat())?;
    }
    let mut chaos = Chaos::start(seed, device, model)?;
    let result = chaos.until(Duration::from_secs(60 * minutes));
    let folder = chaos.cluster.folder().display().to_string();
    println!("{}", chaos.record.table(minutes, seed));
    match result.and_then(|()| chaos.end()) {
        Ok(()) => Ok(()),
        Err(why) => Err(format!("seed {seed}: {why}; logs are in {folder}")),
    }
}

struct Chaos {
    rng: fastrand::Rng,
    cluster: Cluster,
    engines: Engines,
    record: Record,
}

impl Chaos {
    fn start(seed: u64, device: Device, model: &str) -> Result<Self, String> {
        let mut cluster = Cluster::start(device, model, seed)?;
        let begun = Instant::now();
        // A replay fails at once without a leader.
        while cluster.status(false)?.is_none() {
            if begun.elapsed() > RECOVERY_MAX {
                return Err(format!("no leader answers after {RECOVERY_MAX:?}"));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let engines = Engines::start(&cluster, 0)?;
        Ok(Self {
            rng: fastrand::Rng::with_seed(seed),
            cluster,
            engines,
            record: Record::default(),
        })
    }

    fn until(&mut self, time: Duration) -> Result<(), String> {
        let begun = Instant::now();
        let mut kinds: Vec<Kind> = Vec::new();
        while begun.elapsed() < time {
            // All kinds in a shuffled order, repeatedly.
            if kinds.is_empty() {
                kinds.extend(Kind::ALL);
                self.rng.shuffle(&mut kinds);
            }
            let Some(kind) = kinds.pop() else { continue };
            self.goes_on()?;
            std::thread::sleep(Duration::from_millis(self.rng.u64(0..300)));
            let at = begun.elapsed().as_secs();
            println!("{:>3}:{:02}  {}", at / 60, at % 60, kind.name());
            self.disturb(kind)
                .map_err(|why| format!("{}: {why}", kind.name()))?;
        }
        Ok(())
    }

    /// Waits for the running replay to end, as long as it stores or loads, then ends all other processes.
    fn end(&mut self) -> Result<(), String> {
        let mut progress = (Instant::now(), [0; 2]);
        let report = loop {
            if let Some(report) = self.engines.ended()? {
                break report;
            }
            let now = self.cluster.status(false)?.map(|status| counts(&status));
            if let Some(now) = now.filter(|now| *now != progress.1) {
                progress = (Instant::now(), now);
            }
            if progress.0.elapsed() > RECOVERY_MAX {
                return Err(format!(
                    "the last replay neither ended nor stored or loaded a block for {RECOVERY_MAX:?}"
                ));
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        self.record.replay(&report)?;
        self.settled(SETTLED_MAX)?;
        self.cluster.end()
    }

    /// Starts the next replay when the last one has ended.
    fn tend(&mut self) -> Result<(), String> {
        if let Some(report) = self.engines.ended()? {
            self.record.replay(&report)?;
            self.settled(SETTLED_MAX)?;
            self.engines = Engines::start(&self.cluster, self.record.replays())?;
        }
        Ok(())
    }

    /// Waits until `is_true` holds for the status, and returns the status.
    fn once(
        &mut self,
        limit: Duration,
        what: &str,
        is_true: impl Fn(&Value) -> bool,
    ) -> Result<Value, String> {
        let begun = Instant::now();
        loop {
            self.tend()?;
            let status = self.cluster.status(false)?;
            if let Some(status) = status.as_ref().filter(|status| is_true(status)) {
                return Ok(status.clone());
            }
            if begun.elapsed() > limit {
                let status = status.map_or_else(|| "none".to_owned(), |status| status.to_string());
                return Err(format!(
                    "not within {limit:?}: {what}; the status is {status}"
                ));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until blocks are stored and loaded again.
    fn goes_on(&mut self) -> Result<(), String> {
        let before = counts(&self.serves()?);
        let more = |status: &Value| {
            let now = counts(status);
            now.iter()
                .zip(before)
                .all(|(now, before)| *now > before + 3)
        };
        self.once(RECOVERY_MAX, "blocks are stored and loaded", more)?;
        Ok(())
    }

    fn serves(&mut self) -> Result<Value, String> {
        self.once(RECOVERY_MAX, "all ranks serve", serves)
    }

    /// Waits until nothing is held and the second count agrees. Called between two replays.
    fn settled(&mut self, limit: Duration) -> Result<(), String> {
        let begun = Instant::now();
        let mut held = "no leader answers".to_owned();
        loop {
            // A leader that counts once a second answers nothing in between: the last answer stands.
            if let Some(status) = self.cluster.status(true)? {
                held = what_is_held(&status).join(", ");
            }
            if held.is_empty() {
                return Ok(());
            }
            if begun.elapsed() > limit {
                return Err(format!(
                    "not settled {limit:?} after the engines ended: {held}"
                ));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn disturb(&mut self, kind: Kind) -> Result<(), String> {
        match kind {
            Kind::WorkerInGather | Kind::WorkerInScatter => self.kill_worker(kind),
            Kind::WorkerStops | Kind::WorkerStaysStopped => self.stop_worker(kind),
            Kind::Leader => self.kill_leader(),
            Kind::LeaderStops => self.stop_leader(),
            Kind::Engine => self.kill_engines(),
            Kind::Supervisor => self.kill_supervisor(),
        }
    }

    /// Stops workers, one after another, until one owes the end of such a copy. This worker stays stopped.
    fn catch_worker(&mut self, key: Option<&str>) -> Result<(usize, u64, Value), String> {
        let begun = Instant::now();
        while begun.elapsed() < RECOVERY_MAX {
            let status = self.serves()?;
            let place = self.rng.usize(0..(REPLICAS * RANKS) as usize);
            let pid = number(&status, &format!("/ranks/{place}/pid"));
            signal(pid, Signal::STOP)?;
            // Without an answer of the leader it is unknown whether the worker copies.
            if let Some(status) = self.cluster.status(false)? {
                let has_open = |key: &str| number(&status, &format!("/ranks/{place}/{key}")) > 0;
                let caught = match key {
                    Some(key) => has_open(key),
                    None => has_open("stores") || has_open("loads"),
                };
                if caught && number(&status, &format!("/ranks/{place}/pid")) == pid {
                    return Ok((place, pid, status));
                }
            }
            signal(pid, Signal::CONT)?;
        }
        Err(format!("no worker was seen to copy in {RECOVERY_MAX:?}"))
    }

    fn kill_worker(&mut self, kind: Kind) -> Result<(), String> {
        let key = match kind {
            Kind::WorkerInGather => "stores",
            _ => "loads",
        };
        let (place, pid, before) = self.catch_worker(Some(key))?;
        let begun = Instant::now();
        signal(pid, Signal::KILL)?;
        let after = self.successor(place, pid)?;
        self.record.recovered(kind, begun.elapsed());
        self.record.pages(kind, Pages::of_worker(&before, &after)?);
        Ok(())
    }

    fn successor(&mut self, place: usize, pid: u64) -> Result<Value, String> {
        let is_there = |status: &Value| {
            serves(status) && number(status, &format!("/ranks/{place}/pid")) != pid
        };
        self.once(RECOVERY_MAX, "a successor serves", is_there)
    }

    fn stop_worker(&mut self, kind: Kind) -> Result<(), String> {
        let (place, pid, _) = self.catch_worker(None)?;
        let stopped = Instant::now();
        if kind == Kind::WorkerStops {
            let beyond = REQUEST_TIMEOUT + Duration::from_millis(self.rng.u64(300..4000));
            // Nothing else is waited for: what this worker holds is free only after it continues.
            std::thread::sleep(beyond.saturating_sub(stopped.elapsed()));
            let begun = Instant::now();
            signal(pid, Signal::CONT)?;
            self.serves()?;
            self.record.recovered(kind, begun.elapsed());
            return Ok(());
        }
        self.successor(place, pid)?;
        self.record.recovered(kind, stopped.elapsed());
        match is_alive(pid) {
            true => Err(format!(
                "the stopped worker {pid} lives beside its successor"
            )),
            false => Ok(()),
        }
    }

    fn kill_leader(&mut self) -> Result<(), String> {
        let leader = self.cluster.leader()?;
        let before = self.serves()?;
        let begun = Instant::now();
        signal(leader, Signal::KILL)?;
        let epoch = number(&before, "/epoch");
        let next = |status: &Value| serves(status) && number(status, "/epoch") > epoch;
        let after = self.once(RECOVERY_MAX, "the next leader serves", next)?;
        self.record.recovered(Kind::Leader, begun.elapsed());
        self.record
            .pages(Kind::Leader, Pages::of_leader(&before, &after));
        Ok(())
    }

    fn stop_leader(&mut self) -> Result<(), String> {
        let leader = self.cluster.leader()?;
        signal(leader, Signal::STOP)?;
        let time = REQUEST_TIMEOUT + Duration::from_millis(self.rng.u64(0..4000));
        std::thread::sleep(time);
        let begun = Instant::now();
        signal(leader, Signal::CONT)?;
        self.serves()?;
        self.record.recovered(Kind::LeaderStops, begun.elapsed());
        Ok(())
    }

    /// Kills the engines. Their leases must be released within `2 * FENCE + REQUEST_TIMEOUT + SLACK`, whatever was
    /// copied for them.
    fn kill_engines(&mut self) -> Result<(), String> {
        self.once(RECOVERY_MAX, "leases are held", |status| {
            number(status, "/pins") > 0
        })?;
        let begun = Instant::now();
        self.engines.kill()?;
        self.record.killed_replay();
        self.settled(2 * FENCE + REQUEST_TIMEOUT + SLACK)?;
        self.record.recovered(Kind::Engine, begun.elapsed());
        self.engines = Engines::start(&self.cluster, self.record.replays())?;
        Ok(())
    }

    /// Kills the supervisor. Leader and workers end with it, and its successor starts with empty depots.
    fn kill_supervisor(&mut self) -> Result<(), String> {
        let status = self.serves()?;
        let epoch = number(&status, "/epoch");
        let mut children: Vec<u64> = (0..REPLICAS * RANKS)
            .map(|place| number(&status, &format!("/ranks/{place}/pid")))
            .collect();
        children.push(self.cluster.leader()?);
        let begun = Instant::now();
        self.cluster.kill()?;
        while let Some(left) = children.iter().find(|pid| is_alive(**pid)) {
            if begun.elapsed() > SLACK {
                return Err(format!(
                    "process {left} lives {SLACK:?} after `up` was killed"
                ));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        self.cluster.start_again()?;
        let next = |status: &Value| serves(status) && number(status, "/epoch") > epoch;
        self.once(RECOVERY_MAX, "everything serves again", next)?;
        self.record.recovered(Kind::Supervisor, begun.elapsed());
        Ok(())
    }
}

fn serves(status: &Value) -> bool {
    let ranks = status["ranks"].as_array();
    let attached = ranks.is_some_and(|ranks| ranks.iter().all(|rank| rank["attached"] == true));
    attached && status["ready"] == true
}

fn counts(status: &Value) -> [u64; 2] {
    ["blocks_stored", "blocks_loaded"].map(|name| number(status, &format!("/counters/{name}")))
}

/// What is held, or not known, by the names in the status. Nothing is held in a tier that is closed: a leader opens its
/// tiers when an engine registers, so a leader that began after the last engine ended has only closed ones.
fn what_is_held(status: &Value) -> Vec<String> {
    let mut held = Vec::new();
    let mut is_zero = |path: &str| {
        if status.pointer(path) != Some(&Value::from(0)) {
            let value = status.pointer(path).unwrap_or(&Value::Null);
            held.push(format!("{} is {value}", &path[1..]));
        }
    };
    for path in ["/slots", "/pins", "/copies_under_way"] {
        is_zero(path);
    }
    let tiers = status["tiers"].as_array().map_or(0, Vec::len);
    for tier in (0..tiers).filter(|tier| status["tiers"][tier]["pages"] != 0) {
        for state in ["reserved", "filling", "quarantined"] {
            is_zero(&format!("/tiers/{tier}/page_states/{state}"));
        }
    }
    if status["contradiction"] != "" {
        held.push(format!("the second count: {}", status["contradiction"]));
    }
    held
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn status(pages: u64, page_states: Value) -> Value {
        let tiers = [json!({"tier": 2, "pages": pages, "page_states": page_states})];
        json!({"slots": 0, "pins": 0, "copies_under_way": 0, "tiers": tiers, "contradiction": ""})
    }

    #[test]
    fn a_leader_without_engines_holds_nothing() {
        assert_eq!(what_is_held(&status(0, json!({}))), [""; 0]);
    }

    #[test]
    fn what_is_held_in_an_open_tier_is_named() {
        let mut status = status(64, json!({"reserved": 0, "filling": 3, "quarantined": 0}));
        status["pins"] = json!(2);
        status["contradiction"] = json!("pins: 2, counted 1");
        let expected = [
            "pins is 2",
            "tiers/0/page_states/filling is 3",
            "the second count: \"pins: 2, counted 1\"",
        ];
        assert_eq!(what_is_held(&status), expected);
    }

    #[test]
    fn a_number_that_is_missing_counts_as_held() {
        let held = what_is_held(&status(64, json!({"reserved": 0, "filling": 0})));
        assert_eq!(held, ["tiers/0/page_states/quarantined is null"]);
    }
}
