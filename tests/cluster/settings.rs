//! Leaders and workers that are started apart, with settings and files that do not fit together.

use crate::cluster::recovery::status_of;
use crate::support::{Running, socket_dir};

#[test]
fn a_leader_for_fewer_ranks_turns_the_workers_of_an_engine_away() {
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
