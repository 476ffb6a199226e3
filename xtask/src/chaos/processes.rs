//! The processes that are killed and stopped, their status and their reports.

use std::fs::{DirBuilder, File};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::{RANKS, REPLICAS, REQUEST_TIMEOUT};

/// Maximum time in which `up` must end.
const END_LIMIT: Duration = Duration::from_secs(30);

/// Location of the engines' KV.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Device {
    Cpu,
    /// On GPUs of the driver for tests.
    Cuda,
}

/// A leader and its workers under `up`, with their folder.
pub(super) struct Cluster {
    folder: PathBuf,
    up: Child,
    device: Device,
    /// The model of the engines, as `kvferry replay --model` names it.
    model: String,
    seed: u64,
}

impl Cluster {
    pub(super) fn start(device: Device, model: &str, seed: u64) -> Result<Self, String> {
        let name = format!("kvferry-chaos-{}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        let made = DirBuilder::new().mode(0o700).create(&folder);
        made.map_err(|error| format!("{}: {error}", folder.display()))?;
        if device == Device::Cuda {
            link_driver(&folder)?;
        }
        let up = start_up(&folder, device, host_memory(model), seed)?;
        Ok(Self {
            folder,
            up,
            device,
            model: model.to_owned(),
            seed,
        })
    }

    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    pub(super) fn start_again(&mut self) -> Result<(), String> {
        let g2 = host_memory(&self.model);
        self.up = start_up(&self.folder, self.device, g2, self.seed)?;
        Ok(())
    }

    /// The leader's status, or `None` when no leader answers. With `check` the leader counts everything again, which it
    /// does once a second. Fails if `up` has ended, because no leader will answer then.
    pub(super) fn status(&mut self, check: bool) -> Result<Option<Value>, String> {
        self.is_up()?;
        let mut command = kvferry();
        command.args(["status", "--json"]);
        command.args(check.then_some("--check"));
        command.arg("--socket-dir");
        let output = command.arg(self.sockets()).output();
        let output = output.map_err(|error| format!("`status` does not start: {error}"))?;
        Ok(serde_json::from_slice(&output.stdout).ok())
    }

    /// Fails if `up` has ended: this run alone ends it, and starts it again at once.
    fn is_up(&mut self) -> Result<(), String> {
        match self.up.try_wait() {
            Ok(None) => Ok(()),
            Ok(Some(status)) => Err(format!("`up` ended by itself with {status}")),
            Err(error) => Err(format!("`up`: {error}")),
        }
    }

    /// The process of the leader, which is a child of `up`.
    pub(super) fn leader(&mut self) -> Result<u64, String> {
        let up = u64::from(self.up.id());
        let begun = Instant::now();
        loop {
            self.is_up()?;
            let entries = std::fs::read_dir("/proc").map_err(|error| format!("/proc: {error}"))?;
            let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
            let mut leaders = pids.filter(|pid| parent(*pid) == Some(up) && is_leader(*pid));
            match leaders.next() {
                Some(leader) => return Ok(leader),
                None if begun.elapsed() > END_LIMIT => {
                    return Err(format!("`up` has had no leader for {END_LIMIT:?}"));
                }
                None => std::thread::sleep(Duration::from_millis(5)),
            }
        }
    }

    pub(super) fn kill(&mut self) -> Result<(), String> {
        kill(&mut self.up)
    }

    /// Ends `up` with SIGTERM, as an operator does.
    pub(super) fn end(&mut self) -> Result<(), String> {
        signal(self.up.id().into(), Signal::TERM)?;
        let status = wait(&mut self.up, END_LIMIT)?;
        let status = status.ok_or(format!("`up` does not end within {END_LIMIT:?}"))?;
        if !status.success() {
            return Err(format!("`up` ended with {status}"));
        }
        std::fs::remove_dir_all(&self.folder)
            .map_err(|error| format!("{}: {error}", self.folder.display()))
    }

    fn sockets(&self) -> PathBuf {
        self.folder.join("sockets")
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if let Err(why) = kill(&mut self.up) {
            eprintln!("{why}");
        }
    }
}

/// Links the driver for tests into a folder of its own, under the driver's names.
fn link_driver(folder: &Path) -> Result<(), String> {
    let library = built().join("libkvferry_fake_cuda.so");
    let driver = folder.join("driver");
    let text = |error: std::io::Error| format!("{}: {error}", driver.display());
    std::fs::create_dir(&driver).map_err(text)?;
    for name in ["libcuda.so", "libcuda.so.1"] {
        std::os::unix::fs::symlink(&library, driver.join(name)).map_err(text)?;
    }
    Ok(())
}

/// Sets the environment with which a process loads the driver for tests.
fn with_driver(command: &mut Command, folder: &Path, device: Device, seed: u64) {
    if device == Device::Cuda {
        command.env("LD_LIBRARY_PATH", folder.join("driver"));
        command.env("FAKE_CUDA", format!("devices=2;delay_us=20;seed={seed}"));
    }
}

/// Host memory that is less than the KV of a replay. Models with large pages need more for the same number of prompts.
fn host_memory(model: &str) -> &'static str {
    match model.starts_with("llama") {
        true => "2GiB",
        false => "512MiB",
    }
}

fn start_up(folder: &Path, device: Device, g2: &str, seed: u64) -> Result<Child, String> {
    let (ranks, replicas) = (RANKS.to_string(), REPLICAS.to_string());
    let mut command = kvferry();
    command.args(["up", "--g2", g2, "--ratio", "8"]);
    command.args(["--ranks", &ranks, "--replicas", &replicas]);
    command.arg("--socket-dir").arg(folder.join("sockets"));
    with_driver(&mut command, folder, device, seed);
    command.stdout(Stdio::null()).stderr(log(folder, "up.log")?);
    let child = command.stdin(Stdio::null()).spawn();
    child.map_err(|error| format!("`up` does not start: {error}"))
}

/// A replay: the engines of all replicas.
pub(super) struct Engines {
    child: Child,
    report: PathBuf,
}

impl Engines {
    pub(super) fn start(cluster: &Cluster, number: u64) -> Result<Self, String> {
        let folder = cluster.folder();
        let report = folder.join(format!("replay-{number}.json"));
        let timeout = REQUEST_TIMEOUT.as_millis().to_string();
        let (ranks, replicas) = (RANKS.to_string(), REPLICAS.to_string());
        let trace = folder.join(format!("replay-{number}.jsonl"));
        // Small pages are given more tokens, so that copies still take a while.
        let block_tokens = match cluster.model.starts_with("llama") {
            true => 16,
            false => 128,
        };
        super::workload::write(&trace, number, block_tokens)?;
        let block_tokens = block_tokens.to_string();
        let layout = match number % 2 {
            0 => "layer-separate",
            _ => "contiguous",
        };
        let mut command = kvferry();
        command
            .arg("replay")
            .arg(trace)
            .args(["--quiet", "--model", &cluster.model]);
        command.args(["--trace-block-tokens", &block_tokens, "--g1-pages", "128"]);
        command.args(["--concurrency", "6"]);
        command.args(["--request-timeout-ms", &timeout, "--layout", layout]);
        command.args(["--ranks", &ranks, "--replicas", &replicas]);
        command.arg("--socket-dir").arg(cluster.sockets());
        command.arg("--json").arg(&report);
        if cluster.device == Device::Cuda {
            command.args(["--device", "cuda"]);
        }
        with_driver(&mut command, folder, cluster.device, cluster.seed);
        command.stdout(Stdio::null()).stdin(Stdio::null());
        command.stderr(log(folder, &format!("replay-{number}.log"))?);
        let child = command.spawn();
        let child = child.map_err(|error| format!("the replay does not start: {error}"))?;
        Ok(Self { child, report })
    }

    /// The report, or `None` while the replay runs.
    pub(super) fn ended(&mut self) -> Result<Option<Value>, String> {
        let ended = self.child.try_wait();
        let Some(status) = ended.map_err(|error| format!("the replay: {error}"))? else {
            return Ok(None);
        };
        if !status.success() {
            return Err(format!(
                "the replay of {} ended with {status}",
                self.report.display()
            ));
        }
        let text = std::fs::read(&self.report);
        let text = text.map_err(|error| format!("{}: {error}", self.report.display()))?;
        let report = serde_json::from_slice(&text);
        report
            .map(Some)
            .map_err(|error| format!("{}: {error}", self.report.display()))
    }

    pub(super) fn kill(&mut self) -> Result<(), String> {
        kill(&mut self.child)
    }
}

impl Drop for Engines {
    fn drop(&mut self) {
        if let Err(why) = self.kill() {
            eprintln!("{why}");
        }
    }
}

/// The program that `cargo build --release` built.
fn kvferry() -> Command {
    Command::new(built().join("kvferry"))
}

/// Cargo's folder for release builds.
fn built() -> PathBuf {
    crate::target().join("release")
}

fn log(folder: &Path, name: &str) -> Result<File, String> {
    let path = folder.join(name);
    let opened = File::options().append(true).create(true).open(&path);
    opened.map_err(|error| format!("{}: {error}", path.display()))
}

fn wait(child: &mut Child, limit: Duration) -> Result<Option<std::process::ExitStatus>, String> {
    let begun = Instant::now();
    loop {
        let status = child.try_wait();
        let status = status.map_err(|error| format!("process {}: {error}", child.id()))?;
        if status.is_some() || begun.elapsed() > limit {
            return Ok(status);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn kill(child: &mut Child) -> Result<(), String> {
    let killed = child.kill().and_then(|()| child.wait());
    killed
        .map(|_| ())
        .map_err(|error| format!("process {}: {error}", child.id()))
}

/// Sends a signal. A process that has ended meanwhile is not an error.
pub(super) fn signal(pid: u64, signal: Signal) -> Result<(), String> {
    let raw = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let raw = raw.ok_or(format!("{pid} is no process"))?;
    match kill_process(raw, signal) {
        Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
        Err(error) => Err(format!("process {pid}: {error}")),
    }
}

/// Whether the process runs. A zombie does not.
pub(super) fn is_alive(pid: u64) -> bool {
    stat(pid).is_some_and(|fields| !matches!(fields.first().map(String::as_str), Some("Z" | "X")))
}

fn parent(pid: u64) -> Option<u64> {
    stat(pid)?.get(1)?.parse().ok()
}

/// The fields after the name in `/proc/PID/stat`: state, parent, and so on.
fn stat(pid: u64) -> Option<Vec<String>> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let behind_name = text.rsplit_once(')')?.1;
    Some(behind_name.split_whitespace().map(str::to_owned).collect())
}

fn is_leader(pid: u64) -> bool {
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    line.split(|byte| *byte == 0).nth(1) == Some(b"leader")
}

/// The unsigned number at this JSON pointer of a report or status, or 0.
pub(super) fn number(value: &Value, path: &str) -> u64 {
    value.pointer(path).and_then(Value::as_u64).unwrap_or(0)
}
