//! The pod of docs/deploy.md in real containers: `cargo xtask containers`.
//!
//! Two containers share their PID and IPC namespaces and a volume as a kubelet makes it. The image has nothing but the
//! program, a shell and the libraries that they load. Needs root, podman and buildah: an image is built without a
//! registry, and run by runc, because crun refuses hosts with both versions of cgroups.

mod first_hour;

use std::collections::BTreeMap;
use std::fmt::Display;
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use serde_json::Value;

const TOOLS: [&str; 4] = ["podman", "buildah", "runc", "ldd"];
/// Time in which a container must do what is awaited.
const LIMIT: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(100);
/// Path of the program in the image.
const PROGRAM: &str = "/usr/bin/kvferry";
/// Variables that a kubelet sets for a Service named `kvferry`.
const SERVICE_LINKS: [&str; 4] = [
    "KVFERRY_SERVICE_HOST=10.0.0.1",
    "KVFERRY_SERVICE_PORT=9464",
    "KVFERRY_PORT=tcp://10.0.0.1:9464",
    "KVFERRY_PORT_9464_TCP=tcp://10.0.0.1:9464",
];

/// Builds the image, and runs the pod and the first hour. `--program FILE` runs a program that was built before.
pub(crate) fn run(root: &Path, arguments: &[String]) -> Result<(), String> {
    if !rustix::process::geteuid().is_root() {
        return Err("containers need root here: run it with sudo".to_owned());
    }
    for tool in TOOLS {
        if Command::new(tool).arg("--version").output().is_err() {
            return Err(format!(
                "{tool} is missing: apt-get install podman buildah runc"
            ));
        }
    }
    let pod = PodOfTheDocs::read(root)?;
    let program = match arguments {
        [] => {
            super::cargo(&["build", "--locked", "--bin", "kvferry"])?;
            root.join("target/debug/kvferry")
        }
        [flag, program] if flag == "--program" => PathBuf::from(program),
        _ => return Err("containers has one argument: --program FILE".to_owned()),
    };
    let image = Image::build(&program)?;
    for (name, gid, mode) in [("plain", 0, 0o777), ("fsGroup", pod.fs_group, 0o2770)] {
        pod.play(&image, gid, mode)
            .map_err(|why| format!("volume of {name} (mode {mode:o}): {why}"))?;
        println!("a volume of mode {mode:o}: started, served and ended");
    }
    first_hour::play(&image, &program)
}

/// What the pod of the docs says of kvferry's container.
struct PodOfTheDocs {
    command: Vec<String>,
    mount: String,
    user: u32,
    fs_group: u32,
}

impl PodOfTheDocs {
    fn read(root: &Path) -> Result<Self, String> {
        let page = root.join("docs/deploy.md");
        let text = fs::read_to_string(&page).map_err(|error| failed(page.display(), error))?;
        let (_, pod) = text
            .split_once("kind: Pod")
            .ok_or("docs/deploy.md has no pod")?;
        let after = |begin: &str, end: char| {
            let found = pod.split_once(begin);
            let found = found.and_then(|(_, rest)| rest.split_once(end));
            let value = found.map(|(value, _)| value.trim());
            value.ok_or(format!("the pod of docs/deploy.md has no {begin}"))
        };
        let number = |begin: &str| {
            let text = after(begin, '\n')?;
            text.parse()
                .map_err(|error| failed(format!("{begin} {text}"), error))
        };
        let command = after("command: [\"kvferry\", ", '\n')?;
        let command = serde_json::from_str(&format!("[{command}"));
        Ok(Self {
            command: command.map_err(|error| failed("the command of the pod", error))?,
            mount: after("mountPath: ", '}')?.to_owned(),
            user: number("runAsUser:")?,
            fs_group: number("fsGroup:")?,
        })
    }

    /// Starts kvferry's container, serves an engine of another one, and ends it.
    fn play(&self, image: &Image, gid: u32, mode: u32) -> Result<(), String> {
        let volume = image.folder.join(format!("volume-{mode:o}"));
        let made = fs::create_dir(&volume)
            .and_then(|()| chown(&volume, Some(0), Some(gid)))
            .and_then(|()| fs::set_permissions(&volume, fs::Permissions::from_mode(mode)));
        made.map_err(|error| failed(volume.display(), error))?;
        let port = free_port()?;
        let mut command = self.command.clone();
        let monitor = format!("127.0.0.1:{port}");
        for (flag, value) in [("--g2", "64Mi"), ("--monitor", monitor.as_str())] {
            let at = command.iter().position(|argument| argument == flag);
            let value_at = at.map(|at| at + 1);
            *value_at
                .and_then(|at| command.get_mut(at))
                .ok_or(format!("the command of the pod has no {flag}"))? = value.to_owned();
        }
        let mut socket_dir = command.iter().skip_while(|word| *word != "--socket-dir");
        let socket_dir = socket_dir.nth(1).ok_or("no --socket-dir")?.clone();

        let name = format!("kvferry-{}-{mode:o}", std::process::id());
        let kvferry = Container(name.clone());
        let volume = format!("{}:{}", volume.display(), self.mount);
        let started = self
            .podman(image, &volume)
            .args(["--detach", "--name", &name])
            .args(["--memory", "512m", "--ipc", "shareable"])
            .args([&image.name, PROGRAM])
            .args(&command)
            .output();
        succeeded("podman run", started)?;
        await_probe(port, "/startupz", || kvferry.log())?;
        await_probe(port, "/livez", || kvferry.log())?;
        let shared = format!("container:{name}");
        let engine = self
            .podman(image, &volume)
            .args(["--rm", "--pid", &shared, "--ipc", &shared])
            .args([&image.name, PROGRAM])
            .args(["replay", "--socket-dir", &socket_dir, "--ranks", "1"])
            .args(["--g1-pages", "0", "--requests", "40", "--concurrency", "4"])
            .args(["--quiet", "--json", "-"])
            .output();
        let report = succeeded("the engine", engine)?;
        let report: Value =
            serde_json::from_slice(&report).map_err(|error| failed("the report", error))?;
        let number = |path: &str| report.pointer(path).and_then(Value::as_u64);
        if number("/bytes/mismatched") != Some(0) || number("/tokens/hit_g2") == Some(0) {
            return Err(format!("the engine did not get its bytes back: {report}"));
        }
        kvferry.stop(&image.folder)
    }

    /// A command that runs a container of the pod, up to its own flags.
    fn podman(&self, image: &Image, volume: &str) -> Command {
        let mut podman = podman(&image.folder);
        podman
            .args(["run", "--user", &format!("{0}:{0}", self.user)])
            .args(["--group-add", &self.fs_group.to_string()])
            .args(["--read-only", "--cap-drop", "ALL"])
            .args(["--security-opt", "no-new-privileges"])
            .args(["--network", "host", "--volume", volume])
            // Those of a container may not be above those of this process.
            .args([
                "--ulimit",
                "nofile=1024:1024",
                "--ulimit",
                "nproc=4096:4096",
            ])
            .args(SERVICE_LINKS.iter().flat_map(|link| ["--env", link]));
        podman
    }
}

/// An image, and a folder for volumes. Both are removed when it is dropped.
struct Image {
    name: String,
    folder: PathBuf,
}

impl Image {
    /// Makes an image of the program, a shell and their libraries alone.
    fn build(program: &Path) -> Result<Self, String> {
        let name = format!("localhost/kvferry-test-{}", std::process::id());
        let folder =
            std::env::temp_dir().join(format!("kvferry-containers-{}", std::process::id()));
        fs::create_dir(&folder).map_err(|error| failed(folder.display(), error))?;
        let image = Self { name, folder };
        let container = succeeded("buildah", buildah(&["from", "scratch"]).output())?;
        let container = String::from_utf8_lossy(&container).trim().to_owned();
        let shell = PathBuf::from("/bin/sh");
        let mut files = BTreeMap::from([
            (PathBuf::from(PROGRAM), program.to_owned()),
            (shell.clone(), shell.clone()),
        ]);
        for of in [program, &shell] {
            let libraries = libraries(of)?.into_iter();
            files.extend(libraries.map(|library| (library.clone(), library)));
        }
        for (to, from) in files {
            let copied = buildah(&["copy", "--quiet", &container])
                .arg(&from)
                .arg(&to)
                .output();
            succeeded("buildah copy", copied)?;
        }
        let committed = buildah(&["commit", "--quiet", "--rm", &container, &image.name]).output();
        succeeded("buildah commit", committed)?;
        Ok(image)
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        let removed = Command::new("podman")
            .args(["rmi", "--force", &self.name])
            .output();
        if let Err(why) = succeeded("podman rmi", removed) {
            println!("{why}");
        }
        if let Err(error) = fs::remove_dir_all(&self.folder) {
            println!("{}", failed(self.folder.display(), error));
        }
    }
}

fn buildah(arguments: &[&str]) -> Command {
    let mut buildah = Command::new("buildah");
    buildah.args(arguments).env("BUILDAH_ISOLATION", "chroot");
    buildah
}

/// The libraries that a program loads, with the loader.
fn libraries(program: &Path) -> Result<Vec<PathBuf>, String> {
    let listed = succeeded("ldd", Command::new("ldd").arg(program).output())?;
    let listed = String::from_utf8_lossy(&listed).into_owned();
    let paths = listed
        .split_whitespace()
        .filter(|word| word.starts_with('/'));
    Ok(paths.map(PathBuf::from).collect())
}

/// A running container, which is removed when this is dropped.
struct Container(String);

impl Container {
    fn log(&self) -> String {
        let log = Command::new("podman").args(["logs", &self.0]).output();
        log.map_or_else(
            |error| error.to_string(),
            |log| String::from_utf8_lossy(&[log.stdout, log.stderr].concat()).into_owned(),
        )
    }

    /// Ends the container in order. Its process must succeed.
    fn stop(&self, folder: &Path) -> Result<(), String> {
        let stopped = podman(folder)
            .args(["stop", "--time", "60", &self.0])
            .output();
        succeeded("podman stop", stopped)?;
        let code = podman(folder)
            .args(["inspect", "--format", "{{.State.ExitCode}}", &self.0])
            .output();
        let code = succeeded("podman inspect", code)?;
        match code.trim_ascii() {
            b"0" => Ok(()),
            code => Err(format!(
                "it ended with {}: {}",
                String::from_utf8_lossy(code),
                self.log()
            )),
        }
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        let removed = Command::new("podman")
            .args(["rm", "--force", "--time", "0", &self.0])
            .output();
        if let Err(why) = succeeded("podman rm", removed) {
            println!("{why}");
        }
    }
}

fn podman(folder: &Path) -> Command {
    let mut podman = Command::new("podman");
    podman
        .args(["--runtime", "runc", "--cgroup-manager", "cgroupfs"])
        .current_dir(folder);
    podman
}

fn free_port() -> Result<u16, String> {
    let port = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    Ok(port.map_err(|error| failed("a port", error))?.port())
}

/// Waits until a probe succeeds; `log` explains why it does not.
fn await_probe(port: u16, path: &str, log: impl Fn() -> String) -> Result<(), String> {
    let begun = Instant::now();
    loop {
        let answer = probe(port, path).unwrap_or_else(|error| error.to_string());
        if answer.starts_with("HTTP/1.1 200 ") {
            return Ok(());
        }
        if begun.elapsed() > LIMIT {
            return Err(format!("{path}: {answer}\n{}", log()));
        }
        std::thread::sleep(PAUSE);
    }
}

fn probe(port: u16, path: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(LIMIT))?;
    stream.write_all(format!("GET {path} HTTP/1.1\r\nhost: kvferry\r\n\r\n").as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

/// The output of a command, if it succeeded.
fn succeeded(what: &str, output: std::io::Result<Output>) -> Result<Vec<u8>, String> {
    let output = output.map_err(|error| failed(what, error))?;
    match output.status.success() {
        true => Ok(output.stdout),
        false => Err(format!(
            "{what} ended with {}: {}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        )),
    }
}

fn failed(what: impl Display, error: impl Display) -> String {
    format!("{what}: {error}")
}
