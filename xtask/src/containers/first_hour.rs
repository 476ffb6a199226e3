//! What an operator does to kvferry in its first hour, in a container with 2 GiB of memory: `cargo xtask containers`.
//!
//! The program is replaced while it runs, each process is killed, the disk and the file system of the log are filled, and
//! kvferry is stopped in order. Each replay compares every byte, and `up` never ends before it is asked to. Its log is
//! printed, for a reader.

use std::cell::Cell;
use std::fs;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use serde_json::Value;

use super::{Container, Image, LIMIT, PAUSE, await_probe, failed, free_port, podman, succeeded};

const USER: u32 = 1000;
/// Size of the file system of the disk tier, which is larger than that.
const DISK_MIB: u64 = 192;
/// Size of the file system of the log.
const LOG_KIB: u64 = 256;

/// Plays the hour.
pub(super) fn play(image: &Image, program: &Path) -> Result<(), String> {
    let hour = FirstHour::start(image, program)?;
    hour.replay("the first replay")?;

    hour.replace_program(program)?;
    for process in ["worker", "leader", "monitor"] {
        hour.kill_each(process)?;
        hour.replay(&format!("a replay after each {process} was killed"))?;
    }
    hour.fill(&hour.disk.0)?;
    hour.replay("a replay with a full disk")?;
    let status = hour.status()?;
    if !status.contains("full (") {
        return Err(format!(
            "status does not say that the disk is full:\n{status}"
        ));
    }
    hour.fill(&hour.log.0)?;
    succeeded("kvferry log", hour.kvferry(&["log", "debug"]).output())?;
    hour.replay("a replay without room for the log")?;
    succeeded("kvferry log", hour.kvferry(&["log", "info"]).output())?;
    println!("{}", hour.status()?);
    hour.end()
}

/// A file system in memory, which is unmounted when this is dropped.
struct Tmpfs(PathBuf);

impl Tmpfs {
    fn mount(path: PathBuf, size: &str) -> Result<Self, String> {
        fs::create_dir(&path).map_err(|error| failed(path.display(), error))?;
        let options = format!("size={size},mode=0700,uid={USER},gid={USER}");
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &options, "kvferry-test"])
            .arg(&path)
            .output();
        succeeded("mount", mounted)?;
        Ok(Self(path))
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let unmounted = Command::new("umount").arg(&self.0).output();
        if let Err(why) = succeeded("umount", unmounted) {
            println!("{why}");
        }
    }
}

// The container is declared first: it is removed before its file systems are unmounted.
struct FirstHour<'a> {
    container: Container,
    image: &'a Image,
    /// The folder of the program, which is mounted into the container.
    programs: PathBuf,
    sockets: PathBuf,
    disk: Tmpfs,
    log: Tmpfs,
    /// Replays so far: each has prompts of its own, which have to be stored.
    replays: Cell<u64>,
}

impl<'a> FirstHour<'a> {
    fn start(image: &'a Image, program: &Path) -> Result<Self, String> {
        let folder = image.folder.join("hour");
        let (programs, sockets) = (folder.join("programs"), folder.join("sockets"));
        for made in [&programs, &sockets] {
            fs::create_dir_all(made).map_err(|error| failed(made.display(), error))?;
        }
        chown(&sockets, Some(USER), Some(USER)).map_err(|error| failed("chown", error))?;
        let copied = fs::copy(program, programs.join("kvferry"));
        copied.map_err(|error| failed(program.display(), error))?;
        let hour = Self {
            container: Container(format!("kvferry-hour-{}", std::process::id())),
            image,
            programs,
            sockets,
            disk: Tmpfs::mount(folder.join("disk"), &format!("{DISK_MIB}m"))?,
            log: Tmpfs::mount(folder.join("log"), &format!("{LOG_KIB}k"))?,
            replays: Cell::new(0),
        };
        let port = free_port()?;
        let up = format!(
            "exec /programs/kvferry up --ranks 2 --g2 256Mi --g3 1Gi --g3-dir /disk/kvferry --socket-dir /sockets/kvferry \
             --monitor 127.0.0.1:{port} 2>/log/kvferry"
        );
        let started = hour
            .run(&["--detach", "--name", &hour.container.0])
            .args([&hour.image.name, "/bin/sh", "-c", &up])
            .output();
        succeeded("podman run", started)?;
        await_probe(port, "/startupz", || hour.log())?;
        Ok(hour)
    }

    /// A command that runs in the container's namespaces and volumes, up to the image.
    fn run(&self, flags: &[&str]) -> Command {
        let mut command = podman(&self.image.folder);
        command
            .args(["run", "--user", &format!("{USER}:{USER}"), "--read-only"])
            .args(["--network", "host", "--memory", "2g", "--ipc", "shareable"])
            .args([
                "--ulimit",
                "nofile=1024:1024",
                "--ulimit",
                "nproc=4096:4096",
            ])
            .args(flags);
        for (from, to) in [
            (&self.programs, "/programs"),
            (&self.sockets, "/sockets"),
            (&self.disk.0, "/disk"),
            (&self.log.0, "/log"),
        ] {
            command.args(["--volume", &format!("{}:{to}", from.display())]);
        }
        command
    }

    /// A command of an operator in the running container.
    fn kvferry(&self, arguments: &[&str]) -> Command {
        let mut command = podman(&self.image.folder);
        command
            .args(["exec", &self.container.0, "/programs/kvferry"])
            .args(arguments)
            .args(["--socket-dir", "/sockets/kvferry"]);
        command
    }

    fn status(&self) -> Result<String, String> {
        let status = self.kvferry(&["status", "--check"]).output();
        let status = succeeded("kvferry status", status)?;
        Ok(String::from_utf8_lossy(&status).into_owned())
    }

    /// Replays beside `up`, with the same user. `up` must run before and after it.
    fn replay(&self, what: &str) -> Result<(), String> {
        let shared = format!("container:{}", self.container.0);
        self.replays.set(self.replays.get() + 1);
        let seed = self.replays.get().to_string();
        let replayed = podman(&self.image.folder)
            .args([
                "run",
                "--rm",
                "--user",
                &format!("{USER}:{USER}"),
                "--read-only",
            ])
            .args(["--pid", &shared, "--ipc", &shared, "--network", "host"])
            .args([
                "--ulimit",
                "nofile=1024:1024",
                "--ulimit",
                "nproc=4096:4096",
            ])
            .args(["--volume", &format!("{}:/sockets", self.sockets.display())])
            .args([
                "--volume",
                &format!("{}:/programs", self.programs.display()),
            ])
            .args([&self.image.name, "/programs/kvferry", "replay"])
            .args(["--socket-dir", "/sockets/kvferry", "--ranks", "2"])
            .args([
                "--g1-pages",
                "0",
                "--concurrency",
                "8",
                "--quiet",
                "--json",
                "-",
            ])
            .args(["--seed", &seed])
            .output();
        let report = succeeded(what, replayed).map_err(|why| format!("{why}\n{}", self.log()))?;
        let report: Value =
            serde_json::from_slice(&report).map_err(|error| failed("the report", error))?;
        let number = |path: &str| report.pointer(path).and_then(Value::as_u64);
        if number("/bytes/mismatched") != Some(0) || number("/bytes/verified") == Some(0) {
            return Err(format!(
                "{what}: bytes differ, or none was compared: {report}"
            ));
        }
        self.process()?;
        println!("{what}: {} bytes compared", report["bytes"]["verified"]);
        Ok(())
    }

    /// The process of `up`, as this machine sees it.
    fn process(&self) -> Result<u64, String> {
        let state = ["inspect", "--format", "{{.State.Running}} {{.State.Pid}}"];
        let state = podman(&self.image.folder)
            .args(state)
            .arg(&self.container.0)
            .output();
        let state = succeeded("podman inspect", state)?;
        let state = String::from_utf8_lossy(&state).trim().to_owned();
        let pid = state.strip_prefix("true ").and_then(|pid| pid.parse().ok());
        pid.ok_or_else(|| format!("`up` has ended: {state}\n{}", self.log()))
    }

    /// Replaces the program by a copy of it, as packages do.
    fn replace_program(&self, program: &Path) -> Result<(), String> {
        let fresh = self.programs.join("fresh");
        let replaced = fs::copy(program, &fresh)
            .and_then(|_| fs::rename(&fresh, self.programs.join("kvferry")));
        replaced.map_err(|error| failed("the program", error))
    }

    /// Kills each child of `up` that runs this command, and waits for its successor.
    fn kill_each(&self, command: &str) -> Result<(), String> {
        let up = self.process()?;
        let killed = children(up, command);
        if killed.is_empty() {
            return Err(format!("`up` has no {command}"));
        }
        for pid in &killed {
            succeeded(
                "kill",
                Command::new("kill").args(["-9", &pid.to_string()]).output(),
            )?;
        }
        let begun = Instant::now();
        loop {
            self.process()?;
            let now = children(up, command);
            if now.len() == killed.len() && now.iter().all(|pid| !killed.contains(pid)) {
                return Ok(());
            }
            if begun.elapsed() > LIMIT {
                return Err(format!("{command} is not started again\n{}", self.log()));
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Uses up the room of a file system.
    fn fill(&self, path: &Path) -> Result<(), String> {
        let file = path.join("filler");
        match fs::write(&file, vec![0; (DISK_MIB << 20) as usize]) {
            Err(error) if error.kind() == std::io::ErrorKind::StorageFull => Ok(()),
            Err(error) => Err(failed(file.display(), error)),
            Ok(()) => Err(format!("{} is not full", path.display())),
        }
    }

    /// Stops the container in order.
    fn end(self) -> Result<(), String> {
        self.container.stop(&self.image.folder)?;
        let log = self.log();
        match log.contains("panicked") {
            true => Err(format!("it panicked:\n{log}")),
            false => {
                println!("ended in order; its log:\n{log}");
                Ok(())
            }
        }
    }

    fn log(&self) -> String {
        fs::read_to_string(self.log.0.join("kvferry")).unwrap_or_else(|error| error.to_string())
    }
}

/// Children of a process that run a command of kvferry.
fn children(parent: u64, command: &str) -> Vec<u64> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u64>().ok());
    let is_child = |pid: &u64| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let mut words = stat.rsplit_once(')')?.1.split_whitespace().skip(1);
        let line = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        let is_it = line.split(|byte| *byte == 0).nth(1) == Some(command.as_bytes());
        (is_it && words.next()?.parse() == Ok(parent)).then_some(())
    };
    pids.filter(|pid| is_child(pid).is_some()).collect()
}
