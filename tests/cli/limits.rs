//! Limits of the system: refused at the start where they are too low, and explained when a process dies of one.

use std::fs;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::support::skipped::skipped;
use crate::support::{Running, command, kvferry, program, signals, socket_dir};
use crate::{LIMIT, status_once};

/// `up` under limits, as flags of `prlimit`.
fn up_under(limits: &str, arguments: &[&str]) -> Command {
    signals::set_to_defaults();
    let mut command = Command::new("prlimit");
    command.arg(limits).arg(program()).arg("up").args(arguments);
    command
}

/// Runs `up`, which must refuse to start with these words.
fn refused(mut command: Command, words: &[&str]) {
    let output = command.output().expect("a shell");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(78), "{errors}");
    for word in words.iter().chain(&["raise that"]) {
        assert!(errors.contains(word), "{word}: {errors}");
    }
    assert!(!errors.contains("started"), "{errors}");
}

#[test]
fn limits_that_are_too_low_are_refused_at_the_start() {
    let folder = socket_dir();
    let (sockets, disk) = (folder.path().join("s"), folder.path().join("d"));
    let paths = [&sockets, &disk].map(|path| path.to_str().expect("UTF-8"));
    let memory = ["--g2", "32MiB", "--ranks", "2", "--socket-dir", paths[0]];
    let disk = ["--g3", "64GiB", "--g3-dir", paths[1]];
    let disk = [&memory[..], &disk].concat();
    for (limits, arguments, words) in [
        (
            "--fsize=1000000",
            &memory[..],
            ["g2 is 32 MiB", "16 MiB", "ulimit -f"],
        ),
        (
            "--fsize=100000000",
            &disk,
            ["g3 is 64 GiB", "512 MiB", "ulimit -f"],
        ),
        (
            "--nofile=20",
            &memory,
            ["20 open files", "ranks", "ulimit -Hn"],
        ),
        (
            "--nofile=80",
            &disk,
            ["80 open files", "g3 64 GiB", "ulimit -Hn"],
        ),
    ] {
        refused(up_under(limits, arguments), &words);
    }
}

/// Without care, the write to a file of the largest size would end the process by a signal.
#[test]
fn a_log_of_the_largest_size_ends_no_process() {
    let folder = socket_dir();
    let sockets = folder.path().to_str().expect("UTF-8");
    let log = folder.path().join("log");
    let file = fs::File::options().create(true).append(true).open(&log);
    let file = file.expect("a log");
    let largest = 32 << 20;
    file.set_len(largest - 50).expect("a sparse file");
    let limit = format!("--fsize={largest}");
    let mut command = up_under(&limit, &["--g2", "16MiB", "--socket-dir", sockets]);
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(file);
    let up = Running(command.spawn().expect("a shell"));
    status_once(sockets, |status| {
        status["ranks"][0]["pid"].as_u64() > Some(0)
    });
    up.terminate();
    let mut up = up;
    assert_eq!(up.0.wait().expect("a status").code(), Some(0));
    let found = fs::metadata(&log).expect("a log").len();
    assert!(found > largest - 50, "a line was written: {found}");
}

/// A memory cgroup of a test, of version 1 or 2. Removed when dropped.
struct MemoryCgroup {
    path: PathBuf,
    limit: &'static str,
}

impl MemoryCgroup {
    /// Makes a group. Reports the test as skipped where that is not possible.
    fn make(name: &str) -> Option<Self> {
        let name = format!("kvferry-{name}-{}", std::process::id());
        let mut why = String::new();
        for (root, limit) in [
            ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
            ("/sys/fs/cgroup", "memory.max"),
        ] {
            let path = Path::new(root).join(&name);
            if let Err(error) = fs::create_dir(&path) {
                why = format!("{}: {error}", path.display());
                continue;
            }
            let group = Self { path, limit };
            match fs::metadata(group.path.join(limit)) {
                Ok(_) => return Some(group),
                Err(error) => why = format!("{}: {error}", group.path.display()),
            }
        }
        skipped(&format!("no memory cgroup can be made: {why}"));
        None
    }

    fn limit(&self, bytes: u64) {
        fs::write(self.path.join(self.limit), bytes.to_string()).expect("a limit");
    }

    /// A command whose process is in the group.
    fn run(&self, script: &str) -> Command {
        signals::set_to_defaults();
        let mut command = Command::new("sh");
        let join = format!("echo $$ > '{}/cgroup.procs'; {script}", self.path.display());
        command.args(["-c", &join]).arg(program()).process_group(0);
        command
    }
}

impl Drop for MemoryCgroup {
    fn drop(&mut self) {
        // Its processes may not be gone yet.
        for _ in 0..1000 {
            if fs::remove_dir(&self.path).is_ok() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }
}

#[test]
fn host_memory_beyond_the_memory_cgroup_is_refused() {
    let Some(group) = MemoryCgroup::make("refused") else {
        return;
    };
    group.limit(256 << 20);
    let folder = socket_dir();
    let mut command = group.run("exec \"$0\" up --g2 512MiB --socket-dir \"$1\"");
    let output = command.arg(folder.path()).output().expect("a shell");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(78), "{errors}");
    let path = group.path.display().to_string();
    for word in ["g2 is 512 MiB", &path, "has 256 MiB", "give less"] {
        assert!(errors.contains(word), "{word}: {errors}");
    }
    assert!(!errors.contains("started"), "{errors}");
}

#[test]
fn a_worker_that_the_kernel_kills_for_lack_of_memory_is_explained_and_counted() {
    let Some(group) = MemoryCgroup::make("killed") else {
        return;
    };
    group.limit(256 << 20);
    let folder = socket_dir();
    let sockets = folder.path().to_str().expect("UTF-8");
    let mut command = group.run("exec \"$0\" up --g2 64MiB --monitor 0 --socket-dir \"$1\"");
    let up = Running::spawn(command.arg(folder.path()));
    let pid = |status: &Value| status["ranks"][0]["pid"].as_u64().expect("a number");
    let ready = |status: &Value| status["ranks"][0]["host_ready_bytes"] == 64 << 20;
    let before = pid(&status_once(sockets, ready));
    // The kernel prefers the worker to the process that takes the rest of the memory.
    fs::write(format!("/proc/{before}/oom_score_adj"), "1000").expect("written");
    let hog = "head -c 400000000 /dev/zero | tail -c 400000000 > /dev/null; exit 0";
    let hogged = group.run(hog).stderr(Stdio::null()).status();
    assert!(hogged.expect("a shell").success());
    let killed = |status: &Value| {
        let restarts = status["restarts"].as_array().cloned().unwrap_or_default();
        let of_worker = restarts.iter().find(|each| each["process"] == "worker-0-0");
        let count = of_worker.and_then(|each| each["causes"]["out_of_memory"].as_u64());
        count >= Some(1) && pid(status) != before && ready(status)
    };
    status_once(sockets, killed);
    let table = kvferry(&["status", "--socket-dir", sockets]);
    let table = String::from_utf8_lossy(&table.stdout).into_owned();
    assert!(
        table.contains("restarts     worker-0-0: ") && table.contains(" after lack of memory"),
        "{table}"
    );
    up.terminate();
    let (code, errors) = up.end(LIMIT);
    assert_eq!(code, Some(0), "{errors}");
    let path = group.path.display().to_string();
    for word in ["SIGKILL", "lack of memory", &path, "oom_kill ", "256 MiB"] {
        assert!(errors.contains(word), "{word}: {errors}");
    }
}

#[test]
fn a_second_up_on_one_disk_is_refused_before_it_starts_anything() {
    let folder = socket_dir();
    let name = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_owned();
    let (one, other, disk, link) = (name("one"), name("other"), name("disk"), name("link"));
    std::os::unix::fs::symlink(&disk, &link).expect("linked");
    let arguments = |sockets, disk| {
        let all = [
            "up",
            "--g2",
            "16MiB",
            "--g3",
            "64MiB",
            "--g3-dir",
            disk,
            "--socket-dir",
            sockets,
        ];
        all.map(str::to_owned)
    };
    let first = Running::spawn(command().args(arguments(&one, &disk)));
    status_once(&one, |_| true);
    let pid = format!("process {}", first.0.id());
    for disk in [&disk, &link] {
        let second = command().args(arguments(&other, disk)).output();
        let second = second.expect("it runs");
        let errors = String::from_utf8_lossy(&second.stderr);
        assert_eq!(second.status.code(), Some(1), "{errors}");
        for word in ["g3_dir", disk, "in use by", &pid, "another g3_dir"] {
            assert!(errors.contains(word), "{word}: {errors}");
        }
        assert!(!errors.contains("started"), "{errors}");
    }
    let checked = kvferry(&["fsck", &disk]);
    let errors = String::from_utf8_lossy(&checked.stderr);
    assert!(errors.contains("stop kvferry first (process "), "{errors}");
    first.terminate();
    assert_eq!(first.end(LIMIT).0, Some(0));
    // The lock is kvferry's own file.
    let checked = kvferry(&["fsck", &disk]);
    assert_eq!(checked.status.code(), Some(0), "{checked:?}");
    let text = String::from_utf8_lossy(&checked.stdout);
    assert!(!text.contains("up.lock"), "{text}");
    let linked = Running::spawn(command().args(arguments(&other, &link)));
    status_once(&other, |_| true);
    linked.terminate();
    assert_eq!(linked.end(LIMIT).0, Some(0));
}
