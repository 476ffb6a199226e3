//! What a container gives to kvferry: the directories and modes of a kubelet, the variables of its Services, and a user
//! without an entry in /etc/passwd. The command is that of the pod in docs/deploy.md.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::{PermissionsExt as _, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use crate::LIMIT;
use crate::support::skipped::skipped;
use crate::support::{Running, kvferry, program, signals, socket_dir};

const PAUSE: Duration = Duration::from_millis(20);
/// A user as OpenShift chooses it, and the group of the pod's volumes.
const UID: u32 = 1_000_640_000;
const FS_GROUP: u32 = 1_000_640_001;
/// Variables that a kubelet sets for a Service named `kvferry`, and for one named `kvferry-metrics`.
const SERVICE_LINKS: [(&str, &str); 10] = [
    ("KVFERRY_SERVICE_HOST", "10.0.0.1"),
    ("KVFERRY_SERVICE_PORT", "9464"),
    ("KVFERRY_SERVICE_PORT_METRICS", "9464"),
    ("KVFERRY_PORT", "tcp://10.0.0.1:9464"),
    ("KVFERRY_PORT_9464_TCP", "tcp://10.0.0.1:9464"),
    ("KVFERRY_PORT_9464_TCP_PROTO", "tcp"),
    ("KVFERRY_PORT_9464_TCP_PORT", "9464"),
    ("KVFERRY_PORT_9464_TCP_ADDR", "10.0.0.1"),
    ("KVFERRY_METRICS_SERVICE_HOST", "10.0.0.2"),
    ("KVFERRY_METRICS_PORT", "tcp://10.0.0.2:80"),
];

/// The command of kvferry's container in the pod of docs/deploy.md, and the mount of its sockets.
fn of_the_docs() -> (Vec<String>, String) {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/deploy.md");
    let page = fs::read_to_string(page).expect("the page");
    let (_, pod) = page.split_once("kind: Pod").expect("a pod");
    let after = |begin: &str, end: char| {
        let (_, rest) = pod.split_once(begin).expect(begin);
        rest.split_once(end).expect("its end").0.to_owned()
    };
    let command = after("command: [\"kvferry\", ", '\n');
    let command = serde_json::from_str(&format!("[{command}")).expect("a list");
    (command, after("mountPath: ", '}'))
}

/// A pod on this machine: a folder with its volumes, and the program where its user can reach it.
struct Pod {
    folder: tempfile::TempDir,
}

impl Pod {
    /// `None`, after a report, where this process cannot become another user.
    fn new() -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            skipped("it needs root, which starts processes of another user");
            return None;
        }
        let folder = socket_dir();
        set_mode(folder.path(), 0o711);
        let pod = Self { folder };
        fs::copy(program(), pod.program()).expect("copied");
        Some(pod)
    }

    fn program(&self) -> PathBuf {
        self.folder.path().join("kvferry")
    }

    /// Makes a volume as a kubelet does: of root, or of the pod's group.
    fn volume(&self, name: &str, gid: u32, mode: u32) -> PathBuf {
        let path = self.folder.path().join(name);
        fs::create_dir(&path).expect("made");
        chown(&path, Some(0), Some(gid)).expect("given");
        set_mode(&path, mode);
        path
    }

    /// A command in a container: the pod's user and group of volumes, group 0, and no variable of this process.
    fn command(&self, arguments: &[&str]) -> Command {
        signals::set_to_defaults();
        let mut command = Command::new("setpriv");
        command
            .args(["--reuid", &UID.to_string(), "--regid", "0"])
            .args(["--groups", &FS_GROUP.to_string()])
            .args(["--inh-caps=-all", "--bounding-set=-all", "--no-new-privs"])
            .arg(self.program())
            .args(arguments)
            .env_clear()
            .env("PATH", "/usr/bin:/bin")
            .envs(SERVICE_LINKS)
            .current_dir("/");
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().expect("setpriv runs")
    }

    /// Writes a file as a kubelet does in the volume of a Secret or a ConfigMap, behind two links.
    fn file(&self, volume: &Path, name: &str, bytes: &[u8], mode: u32) -> PathBuf {
        let dated = volume.join("..2026_11_29_08_00_00.1");
        if !dated.exists() {
            fs::create_dir(&dated).expect("made");
            set_mode(&dated, 0o755);
            symlink("..2026_11_29_08_00_00.1", volume.join("..data")).expect("linked");
        }
        fs::write(dated.join(name), bytes).expect("written");
        chown(dated.join(name), Some(0), Some(FS_GROUP)).expect("given");
        set_mode(&dated.join(name), mode);
        symlink(Path::new("..data").join(name), volume.join(name)).expect("linked");
        volume.join(name)
    }
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("set");
}

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("an address").port()
}

/// Waits until a probe of a kubelet succeeds.
fn await_probe(port: u16, path: &str, process: &mut Running) {
    let begun = Instant::now();
    loop {
        if let Ok(mut stream) = TcpStream::connect(("127.0.0.1", port)) {
            let request = format!("GET {path} HTTP/1.1\r\nhost: kvferry\r\n\r\n");
            stream.set_read_timeout(Some(LIMIT)).expect("above 0");
            let mut answer = String::new();
            let sent = stream.write_all(request.as_bytes());
            let read = sent.and_then(|()| stream.read_to_string(&mut answer));
            if read.is_ok() && answer.starts_with("HTTP/1.1 200 ") {
                return;
            }
        }
        let ended = process.0.try_wait().expect("a child");
        assert!(ended.is_none(), "{path}: it has ended: {ended:?}");
        assert!(begun.elapsed() < LIMIT, "{path} does not succeed");
        std::thread::sleep(PAUSE);
    }
}

#[test]
fn the_pod_of_the_docs_starts_serves_and_ends_with_every_mode_of_its_volume() {
    let Some(pod) = Pod::new() else { return };
    let (command, mount) = of_the_docs();
    for (name, gid, mode) in [
        ("plain", 0, 0o777),
        ("group", FS_GROUP, 0o2777),
        ("no-others", FS_GROUP, 0o2775),
        ("only-group", FS_GROUP, 0o2770),
    ] {
        let volume = pod.volume(name, gid, mode);
        let here = |argument: &String| argument.replace(&mount, volume.to_str().expect("UTF-8"));
        // A port that is free, and less memory than a machine of the tests may have.
        let port = free_port();
        let command: Vec<String> = command.iter().map(here).collect();
        let replaced = |flag: &str, value: &str| {
            let at = command.iter().position(|argument| argument == flag);
            (at.expect(flag) + 1, value.to_owned())
        };
        let mut command = command.clone();
        for (at, value) in [
            replaced("--g2", "64Mi"),
            replaced("--monitor", &format!("127.0.0.1:{port}")),
        ] {
            command[at] = value;
        }
        let sockets = volume.join(
            Path::new(&command[replaced("--socket-dir", "").0])
                .file_name()
                .expect("a name"),
        );
        let sockets = sockets.to_str().expect("UTF-8");
        let arguments: Vec<&str> = command.iter().map(String::as_str).collect();
        let mut up = Running::spawn(&mut pod.command(&arguments));
        await_probe(port, "/startupz", &mut up);
        await_probe(port, "/livez", &mut up);
        let replay = ["replay", "--socket-dir", sockets, "--ranks", "1"];
        let load = [
            "--g1-pages",
            "0",
            "--requests",
            "20",
            "--concurrency",
            "4",
            "--quiet",
            "--json",
            "-",
        ];
        let served = pod.run(&[&replay[..], &load].concat());
        let errors = String::from_utf8_lossy(&served.stderr);
        assert!(served.status.success(), "{name}: {errors}");
        let report: serde_json::Value = serde_json::from_slice(&served.stdout).expect("a report");
        assert!(crate::number(&report, "/tokens/hit_g2") > 0, "{report}");
        assert_eq!(crate::number(&report, "/bytes/mismatched"), 0);
        up.terminate();
        let (code, errors) = up.end(LIMIT);
        assert_eq!(code, Some(0), "{name}: {errors}");
    }
}

#[test]
fn the_mount_of_a_volume_as_the_socket_directory_is_refused_with_a_directory_in_it() {
    let Some(pod) = Pod::new() else { return };
    let volume = pod.volume("volume", 0, 0o777);
    let name = volume.to_str().expect("UTF-8");
    let refused = pod.run(&["up", "--g2", "16MiB", "--socket-dir", name]);
    let errors = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(78), "{errors}");
    let inside = format!("{name}/kvferry");
    assert!(errors.contains(&inside), "{errors}");
}

#[test]
fn a_command_whose_user_may_start_no_thread_says_so() {
    let Some(pod) = Pod::new() else { return };
    let inner = pod.command(&["status", "--socket-dir", "/run/kvferry"]);
    let mut command = Command::new("prlimit");
    let command = command
        .arg("--nproc=1")
        .arg(inner.get_program())
        .args(inner.get_args());
    let output = command.output().expect("prlimit runs");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(errors.contains("ulimit -u"), "{errors}");
}

#[test]
fn files_of_secrets_are_read_by_the_group_of_the_pod_and_refused_where_all_can_read_them() {
    let Some(pod) = Pod::new() else { return };
    let keys = pod.folder.path().join("keys");
    let made = kvferry(&["keygen", keys.to_str().expect("UTF-8")]);
    assert!(made.status.success(), "{made:?}");
    let secrets = pod.volume("secrets", FS_GROUP, 0o2755);
    let secret = |name: &str, mode: u32| {
        let bytes = fs::read(keys.join(name)).expect("read");
        pod.file(&secrets, name, &bytes, mode)
    };
    let (leader, monitor) = (secret("leader.pem", 0o440), secret("monitor.pem", 0o440));
    let readable = secret("admin.pem", 0o444);
    let hidden = pod.file(&secrets, "hidden.pem", b"x", 0o400);
    let tenant = pod.file(&secrets, "tenant", &[7; 32], 0o440);
    let rules = format!(
        "[[namespace]]\nprefix = 'a/'\nusers = [1]\nsecret_file = '{}'\n",
        tenant.display()
    );
    let configuration = pod.volume("configuration", 0, 0o755);
    let rules = pod.file(&configuration, "namespaces.toml", rules.as_bytes(), 0o644);
    let text = |path: &Path| path.to_str().expect("UTF-8").to_owned();

    let volume = pod.volume("sockets", 0, 0o777);
    let sockets = text(&volume.join("kvferry"));
    let at = format!("127.0.0.1:{}", free_port());
    let _leader = Running::spawn(&mut pod.command(&[
        "leader",
        "--socket-dir",
        &sockets,
        "--listen",
        &at,
        "--credentials",
        &text(&leader),
        "--namespaces",
        &text(&rules),
    ]));
    let status = |credentials: &Path| {
        let credentials = text(credentials);
        pod.run(&["status", "--leader", &at, "--credentials", &credentials])
    };
    let begun = Instant::now();
    loop {
        let found = status(&monitor);
        let errors = String::from_utf8_lossy(&found.stderr);
        if found.status.success() {
            break;
        }
        assert!(errors.contains("no leader answers"), "{errors}");
        assert!(begun.elapsed() < LIMIT, "{errors}");
    }
    let refused = |credentials: &Path, words: &[&str]| {
        let found = status(credentials);
        let errors = String::from_utf8_lossy(&found.stderr);
        assert_eq!(found.status.code(), Some(78), "{errors}");
        for word in words {
            assert!(errors.contains(word), "{word}: {errors}");
        }
    };
    refused(&readable, &["admin.pem", "0444", "defaultMode: 0400"]);
    refused(&hidden, &["hidden.pem", "Permission denied", "fsGroup"]);
}

#[test]
fn a_temporary_directory_is_chosen_that_sockets_fit_into_or_named_with_the_remedy() {
    let folder = socket_dir();
    let long = folder.path().join("t".repeat(90));
    fs::create_dir(&long).expect("made");
    let replay = |temporary: &Path| {
        let mut command = crate::support::command();
        command
            .args([
                "replay",
                "--requests",
                "3",
                "--concurrency",
                "4",
                "--ranks",
                "1",
            ])
            .args(["--g2", "16MiB", "--quiet"])
            .env("TMPDIR", temporary);
        command.output().expect("the program runs")
    };
    let served = replay(&long);
    assert!(
        served.status.success(),
        "{}",
        String::from_utf8_lossy(&served.stderr)
    );
    let missing = folder.path().join("missing");
    let refused = replay(&missing);
    let errors = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(1), "{errors}");
    for word in [
        "TMPDIR is",
        missing.to_str().expect("UTF-8"),
        "No such file",
        "set TMPDIR",
    ] {
        assert!(errors.contains(word), "{word}: {errors}");
    }
}
