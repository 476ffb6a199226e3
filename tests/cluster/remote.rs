//! A leader and workers that are connected over TLS, as on different machines.

use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;

use super::processes::signal;
use super::recovery::status_of;
use crate::support::{Running, kvferry, number, replay, socket_dir};

/// Keys, a socket directory, and the address of a leader for two ranks.
struct Deployment {
    folder: tempfile::TempDir,
    at: String,
}

impl Deployment {
    fn make() -> Self {
        let folder = socket_dir();
        let keys = folder.path().join("keys");
        let made = kvferry(&[
            "keygen",
            text(&keys),
            "--deployment",
            "test",
            "--ranks",
            "2",
        ]);
        assert!(made.status.success(), "{made:?}");
        let free = std::net::TcpListener::bind("127.0.0.1:0").expect("binds");
        let at = free.local_addr().expect("an address").to_string();
        Self { folder, at }
    }

    fn sockets(&self) -> PathBuf {
        self.folder.path().join("sockets")
    }

    fn credentials(&self, name: &str) -> PathBuf {
        self.folder.path().join("keys").join(format!("{name}.pem"))
    }

    fn start(&self, process: &[&str], credentials: &str) -> Running {
        let (sockets, credentials) = (self.sockets(), self.credentials(credentials));
        let common = [
            "--socket-dir",
            text(&sockets),
            "--ranks",
            "2",
            "--g2",
            "64MiB",
        ];
        let credentials = ["--credentials", text(&credentials)];
        Running::start(&[process, &common, &credentials].concat())
    }

    fn leader(&self) -> Running {
        self.start(&["leader", "--listen", &self.at], "leader")
    }

    fn worker(&self, rank: &str) -> Running {
        let worker = ["worker", "--rank", rank, "--leader", &self.at];
        self.start(&worker, &format!("worker-0-{rank}"))
    }

    /// Runs a command over TLS. Returns its standard output, or its standard error if it fails.
    fn command(&self, command: &[&str], credentials: &str) -> Result<String, String> {
        let credentials = self.credentials(credentials);
        let place = ["--leader", &self.at, "--credentials", text(&credentials)];
        let output = kvferry(&[command, &place].concat());
        let read = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
        match output.status.success() {
            true => Ok(read(output.stdout)),
            false => Err(read(output.stderr)),
        }
    }

    fn status(&self) -> Value {
        let status = self.command(&["status", "--json", "--check"], "monitor");
        serde_json::from_str(&status.expect("a status")).expect("JSON")
    }

    /// Runs a replay. Returns the tokens that its engine found in host memory.
    fn serve(&self) -> u64 {
        let sockets = self.sockets();
        status_of(text(&sockets), |_| true);
        let attached = ["--socket-dir", text(&sockets), "--ranks", "2"];
        let replayed = ["--sequential", "--requests", "40", "--g1-pages", "0"];
        let report = replay(&[&attached[..], &replayed].concat());
        assert_eq!(number(&report, "/bytes/mismatched"), 0);
        for held in ["device_pages", "pins", "copies_under_way"] {
            assert_eq!(number(&report, &format!("/left/{held}")), 0, "{held}");
        }
        number(&report, "/tokens/hit_g2")
    }
}

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

#[test]
fn workers_over_tls_store_and_load_every_byte_also_after_one_was_killed() {
    let deployment = Deployment::make();
    let _leader = deployment.leader();
    let _first = deployment.worker("0");
    let mut second = deployment.worker("1");
    let hits = deployment.serve();
    assert!(hits > 0);
    let status = deployment.status();
    for rank in 0..2 {
        assert_eq!(
            number(&status, &format!("/ranks/{rank}/pid")),
            0,
            "it is seen"
        );
        assert!(number(&status, &format!("/ranks/{rank}/host_bytes")) > 0);
    }
    let reset = deployment.command(&["reset", "--all"], "monitor");
    let refused = reset.expect_err("a monitor changes nothing");
    let remedy = "reset is not for a peer with the certificate of a monitor: use that of an admin";
    assert!(refused.contains(remedy), "{refused}");
    let ready = |status: &Value| number(status, "/tiers/0/page_states/ready");
    assert!(ready(&status) > 0);
    assert_eq!(ready(&deployment.status()), ready(&status));
    deployment
        .command(&["reset", "--all"], "admin")
        .expect("removed");
    assert_eq!(ready(&deployment.status()), 0);

    assert_eq!(deployment.serve(), hits, "after a reset");
    signal(second.0.id().into(), Signal::KILL);
    second.0.wait().expect("killed");
    let _third = deployment.worker("1");
    assert!(deployment.serve() > 0);
}

#[test]
fn what_does_not_fit_together_is_refused_with_the_setting() {
    let deployment = Deployment::make();
    let (leader, worker) = (
        deployment.credentials("leader"),
        deployment.credentials("worker-0-1"),
    );
    let sockets = deployment.sockets();
    let refused = |arguments: &[&str], texts: &[&str]| {
        let common = ["--socket-dir", text(&sockets)];
        let output = kvferry(&[arguments, &common].concat());
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(78), "{arguments:?}: {error}");
        for text in texts {
            assert!(error.contains(text), "{arguments:?}: {error}");
        }
    };
    for at in ["0.0.0.0:7400", "127.0.0.1:7400", "[::]:7400"] {
        let expected = format!("listen is {at}, without credentials");
        refused(&["leader", "--listen", at], &[&expected, "kvferry keygen"]);
    }
    let at = ["--leader", "10.0.0.1:7400"];
    let workers = [&["worker", "--rank", "0"][..], &at].concat();
    refused(
        &workers,
        &[
            "leader is 10.0.0.1:7400, without credentials",
            "kvferry keygen",
        ],
    );
    refused(
        &["status", at[0], at[1]],
        &["leader is 10.0.0.1:7400, without credentials"],
    );
    let with = |credentials| ["--credentials", text(credentials)];
    refused(
        &[&["leader"][..], &with(&leader)].concat(),
        &["without listen"],
    );
    refused(
        &[&workers[..], &with(&worker)].concat(),
        &["are of kvferry://test/worker/0/1: give those of worker/0/0"],
    );
    refused(
        &[
            &["leader", "--listen", "127.0.0.1:7400"][..],
            &with(&worker),
        ]
        .concat(),
        &["give those of the leader"],
    );
    refused(
        &[
            &[
                "worker", "--rank", "1", "--ranks", "2", "--leader", "10.0.0.1",
            ][..],
            &with(&worker),
        ]
        .concat(),
        &["leader is \"10.0.0.1\": give HOST:PORT"],
    );
}

/// Certificates that do not fit never will: nothing is tried again, and one line says it.
#[test]
fn credentials_of_another_root_are_refused_at_once_in_one_line() {
    let (deployment, other) = (Deployment::make(), Deployment::make());
    let _leader = deployment.leader();
    let begun = std::time::Instant::now();
    while deployment.command(&["status"], "monitor").is_err() {
        assert!(
            begun.elapsed() < super::disturbed::LIMIT,
            "the leader starts"
        );
    }
    for command in [
        &["status"][..],
        &["status", "--wait-s", "600"],
        &["worker-gone", "--host-is-off"],
    ] {
        let name = match command[0] {
            "worker-gone" => "worker-0-0",
            _ => "monitor",
        };
        let credentials = other.credentials(name);
        let place = [
            "--leader",
            &deployment.at,
            "--credentials",
            text(&credentials),
        ];
        let begun = std::time::Instant::now();
        let output = kvferry(&[command, &place].concat());
        let took = begun.elapsed();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{errors}");
        assert_eq!(errors.lines().count(), 1, "{errors}");
        assert!(errors.contains("is not trusted"), "{errors}");
        assert!(errors.contains("use files of one directory"), "{errors}");
        assert!(took < Duration::from_secs(60), "it waits for its own limit");
    }
}

#[test]
fn keys_are_made_once_and_added_to() {
    let folder = socket_dir();
    let keys = folder.path().join("keys");
    let files = || {
        let mut files = std::fs::read_dir(&keys)
            .expect("a directory")
            .map(|entry| {
                entry
                    .expect("an entry")
                    .file_name()
                    .into_string()
                    .expect("UTF-8")
            })
            .collect::<Vec<_>>();
        files.sort();
        files
    };
    let keygen = |more: &[&str]| kvferry(&[&["keygen", text(&keys)], more].concat());
    assert!(keygen(&["--deployment", "a"]).status.success());
    let first = [
        "admin.pem",
        "leader.pem",
        "monitor.pem",
        "root.key",
        "root.pem",
        "worker-0-0.pem",
    ];
    assert_eq!(files(), first);
    let leader = std::fs::read(keys.join("leader.pem")).expect("read");
    assert!(
        keygen(&["--deployment", "a", "--ranks", "2"])
            .status
            .success()
    );
    assert_eq!(files(), [&first[..], &["worker-0-1.pem"]].concat());
    assert_eq!(
        std::fs::read(keys.join("leader.pem")).expect("read"),
        leader
    );
    let other = keygen(&["--deployment", "b"]);
    assert_eq!(other.status.code(), Some(1));
    let error = String::from_utf8_lossy(&other.stderr).into_owned();
    assert!(
        error.contains("holds the root of deployment a, not b"),
        "{error}"
    );
}
