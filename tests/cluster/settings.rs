//! Leaders and workers that are started separately, with settings and files that do not fit together.

use std::path::Path;

use super::disturbed::LIMIT;
use super::recovery::status_of;
use crate::support::{Running, number, replay, socket_dir};

#[test]
fn a_leader_for_fewer_ranks_refuses_the_workers_of_an_engine() {
    let folder = socket_dir();
    let sockets = folder.path().to_str().expect("UTF-8");
    let common = ["--socket-dir", sockets, "--g2", "16MiB"];
    let _leader = Running::start(&[&["leader", "--ranks", "1"][..], &common].concat());
    let worker = ["worker", "--rank", "0", "--ranks", "2"];
    let _worker = Running::start(&[&worker[..], &common].concat());
    let problem = |status: &serde_json::Value| {
        let problem = status.pointer("/ranks/0/problem")?.as_str()?;
        (!problem.is_empty()).then(|| problem.to_owned())
    };
    let status = status_of(sockets, |status| problem(status).is_some());
    assert_eq!(
        problem(&status).as_deref(),
        Some(
            "attach.ranks of rank 0 is 2, and this leader was started for 1: start leader and workers with the same ranks"
        )
    );
    assert_eq!(status["ready"], false);
    assert_eq!(status["ranks"][0]["attached"], false);
}

/// A leader and a worker without a supervisor.
struct Alone {
    folder: tempfile::TempDir,
    leader: Option<Running>,
    _worker: Running,
}

impl Alone {
    fn start() -> Self {
        let folder = socket_dir();
        let leader = Some(leader(folder.path()));
        let sockets = folder.path().to_str().expect("UTF-8");
        let worker = ["worker", "--rank", "0", "--socket-dir", sockets];
        let _worker = Running::start(&[&worker[..], &["--g2", "512MiB"]].concat());
        Self {
            folder,
            leader,
            _worker,
        }
    }

    fn sockets(&self) -> &str {
        self.folder.path().to_str().expect("UTF-8")
    }

    fn epoch_file(&self) -> std::path::PathBuf {
        self.folder.path().join("leader/epoch")
    }

    /// Runs a replay. Returns the tokens that its engine found in host memory.
    fn serve(&self) -> u64 {
        status_of(self.sockets(), |_| true);
        let sockets = ["--socket-dir", self.sockets()];
        let engine = ["--ranks", "1", "--g1-pages", "0"];
        let replayed = ["--sequential", "--requests", "20"];
        let report = replay(&[&engine[..], &replayed, &sockets].concat());
        assert_eq!(number(&report, "/bytes/mismatched"), 0);
        number(&report, "/tokens/hit_g2")
    }

    fn epoch(&self) -> u64 {
        number(&status_of(self.sockets(), |_| true), "/epoch")
    }
}

fn leader(folder: &Path) -> Running {
    let sockets = folder.to_str().expect("UTF-8");
    Running::start(&["leader", "--socket-dir", sockets, "--g2", "512MiB"])
}

#[test]
fn a_leader_serves_though_the_file_with_the_last_epoch_is_lost() {
    let mut alone = Alone::start();
    let empty = alone.serve();
    let epoch = alone.epoch();
    drop(alone.leader.take());
    std::fs::remove_file(alone.epoch_file()).expect("it was there");
    alone.leader = Some(leader(alone.folder.path()));
    assert!(alone.epoch() > epoch, "the epochs go on");
    let kept = alone.serve();
    assert!(kept > empty, "what the depot holds is found");
}

/// As when the clock was set back before the file was lost, or when the file was restored.
#[test]
fn a_leader_whose_epoch_a_depot_has_seen_ends_and_the_next_one_serves() {
    let mut alone = Alone::start();
    let empty = alone.serve();
    let epoch = alone.epoch();
    for last in [1, epoch - 1] {
        drop(alone.leader.take());
        std::fs::write(alone.epoch_file(), format!("{last}\n")).expect("written");
        let (code, said) = leader(alone.folder.path()).end(LIMIT);
        assert_eq!(code, Some(1), "{said}");
        let expected = format!(
            "the depot of rank 0 was read by a leader of epoch {epoch}, and this leader has epoch {}: end it and start it \
             again, the next one has a later epoch",
            last + 1
        );
        assert!(said.contains(&expected), "{said}");
        let noted = std::fs::read_to_string(alone.epoch_file()).expect("a file");
        assert_eq!(noted, format!("{epoch}\n"));
    }
    alone.leader = Some(leader(alone.folder.path()));
    assert_eq!(alone.epoch(), epoch + 1);
    let kept = alone.serve();
    assert!(kept > empty, "what the depot holds is found");
}
