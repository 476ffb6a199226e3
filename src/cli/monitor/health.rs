//! `/startupz`, `/livez` and `/readyz`: whether engines can start, whether requests are handled, and whether an engine is
//! served.

use std::fmt;

use super::reading::{Deployment, process_name};
use crate::cli::status::stage;
use kvferry_protocol::{ProbeAnswer, RankStatus, StatusAnswer};
use kvferry_types::{ByteSize, Rank, Replica, WorkerId};

/// The checks of a request for health.
#[derive(Debug, Default)]
pub(super) struct Health {
    /// Each process with its result, or why it fails.
    checks: Vec<(String, Result<String, String>)>,
}

impl Health {
    pub(super) fn is_good(&self) -> bool {
        self.checks.iter().all(|(_, result)| result.is_ok())
    }

    fn add(&mut self, process: impl Into<String>, result: Result<String, String>) {
        self.checks.push((process.into(), result));
    }
}

impl fmt::Display for Health {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", if self.is_good() { "ok" } else { "failed" })?;
        for (process, result) in &self.checks {
            match result {
                Ok(text) => writeln!(f, "{process}: ok, {text}")?,
                Err(why) => writeln!(f, "{process}: failed: {why}")?,
            }
        }
        Ok(())
    }
}

/// Whether engines can start: the leader handles requests, and every worker does and has its host memory. An engine that
/// waits for this waits for nothing that waits for the engine.
pub(super) async fn started(deployment: &Deployment) -> Health {
    let reading = deployment.read().await;
    let mut health = Health::default();
    let leader = reading.leader.as_ref();
    health.add(
        "leader",
        match leader {
            Ok(_) => deployment.reachable(None).map(|()| "it listens".to_owned()),
            Err(why) => Err(why.clone()),
        },
    );
    for (worker, measured) in &reading.workers {
        let status = leader.ok().map(|leader| &leader.status);
        let result = match (measured, status) {
            (Err(why), _) => Err(why.clone()),
            (Ok(_), None) => Err("its leader does not answer".to_owned()),
            (Ok(_), Some(status)) => deployment
                .reachable(Some(*worker))
                .and_then(|()| host_memory(status, *worker)),
        };
        health.add(process_name(*worker), result);
    }
    health
}

/// The host memory of a worker, if all of it is ready; else the state of the worker. An attached worker has its memory.
fn host_memory(status: &StatusAnswer, worker: WorkerId) -> Result<String, String> {
    let rank = rank_of(status, worker).ok_or_else(no_such_rank)?;
    let ready = rank.host_bytes > 0 && rank.host_ready_bytes >= rank.host_bytes;
    match rank.attached || ready {
        true => Ok(format!(
            "{} host memory are ready",
            ByteSize(rank.host_bytes)
        )),
        false => Err(stage(rank)),
    }
}

/// Whether the leader handles requests: a lookup of a page that no engine has goes through its socket, its mailbox and its
/// actor.
pub(super) async fn live(deployment: &Deployment) -> Health {
    let mut health = Health::default();
    let probed = deployment.probe_leader().await.and_then(|probed| {
        deployment.reachable(None)?;
        Ok(looked_up(probed))
    });
    health.add("leader", probed);
    health
}

/// Whether every engine is served: the leader handles requests, every rank is attached, and every worker copies a page.
pub(super) async fn ready(deployment: &Deployment) -> Health {
    let leader = async {
        let probed = deployment.probe_leader().await?;
        Ok((probed, deployment.status().await?))
    };
    let (leader, workers) = tokio::join!(leader, deployment.probe_workers());
    let mut health = Health::default();
    let status = match leader {
        Ok((probed, status)) => {
            let served = match status.ready {
                _ if probed.draining => {
                    Err("draining: kvferry drain --resume ends that".to_owned())
                }
                true => Ok(looked_up(probed)),
                false => {
                    Err("no engine is served: see the workers below, or kvferry status".to_owned())
                }
            };
            health.add("leader", served);
            Some(status)
        }
        Err(why) => {
            health.add("leader", Err(why));
            None
        }
    };
    for (worker, probed) in workers {
        let probed = probed.map(|probed| format!("{} bytes copied", probed.copied_bytes));
        let unattached = status
            .as_ref()
            .and_then(|status| unattached(status, worker));
        let result = match (probed, unattached) {
            (Ok(_), Some(why)) => Err(format!("not attached: {why}")),
            (probed, _) => probed,
        };
        health.add(process_name(worker), result);
    }
    health
}

fn looked_up(probed: ProbeAnswer) -> String {
    format!("a page was looked up in {} tiers", probed.tiers)
}

/// Why a worker is not attached with its engine's memory; `None` if it is.
fn unattached(status: &StatusAnswer, worker: WorkerId) -> Option<String> {
    match rank_of(status, worker) {
        Some(rank) if rank.attached => None,
        Some(rank) => Some(stage(rank)),
        None => Some(no_such_rank()),
    }
}

fn rank_of(status: &StatusAnswer, worker: WorkerId) -> Option<&RankStatus> {
    status.ranks.iter().find(|rank| {
        let (replica, rank) = (Replica(rank.replica), Rank(rank.rank));
        WorkerId { replica, rank } == worker
    })
}

fn no_such_rank() -> String {
    "the leader has no such rank: start all processes with the same ranks and replicas".to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_check_fails_the_whole_and_is_named() {
        let mut health = Health::default();
        health.add("leader", Ok("a".to_owned()));
        assert_eq!(
            (health.is_good(), health.to_string().as_str()),
            (true, "ok\nleader: ok, a\n")
        );
        health.add("worker-0-1", Err("b".to_owned()));
        let text = "failed\nleader: ok, a\nworker-0-1: failed: b\n";
        assert_eq!(
            (health.is_good(), health.to_string().as_str()),
            (false, text)
        );
    }

    /// Neither the registration of an engine nor what follows it, such as pinned memory, may be awaited: the engine may wait
    /// for this.
    #[test]
    fn a_worker_has_started_once_its_host_memory_is_ready_without_an_engine() {
        let mut rank = RankStatus {
            pid: 7,
            host_bytes: 2 << 30,
            host_ready_bytes: 1 << 30,
            ..RankStatus::default()
        };
        let memory = |rank: &RankStatus| {
            let (replica, number) = (Replica(0), Rank(0));
            let status = StatusAnswer {
                ranks: vec![rank.clone()],
                ..StatusAnswer::default()
            };
            let worker = WorkerId {
                replica,
                rank: number,
            };
            host_memory(&status, worker)
        };
        let text = "1 GiB of 2 GiB host memory are ready".to_owned();
        assert_eq!(memory(&rank), Err(text));
        rank.host_ready_bytes = 2 << 30;
        rank.host_pinned_bytes = Some(0);
        rank.problem = "the engine's page size differs".to_owned();
        assert_eq!(memory(&rank), Ok("2 GiB host memory are ready".to_owned()));
        assert!(memory(&RankStatus::default()).is_err(), "no worker yet");
    }

    #[test]
    fn a_worker_is_attached_only_if_the_leader_says_so() {
        let rank = |rank, attached| RankStatus {
            rank,
            attached,
            pid: 1,
            host_bytes: 1,
            host_ready_bytes: 1,
            ..RankStatus::default()
        };
        let status = StatusAnswer {
            ranks: vec![rank(0, true), rank(1, false)],
            ..StatusAnswer::default()
        };
        let unattached = |rank| {
            let (replica, rank) = (Replica(0), Rank(rank));
            unattached(&status, WorkerId { replica, rank })
        };
        assert_eq!(unattached(0), None);
        assert!(unattached(1).is_some_and(|why| why.contains("engine")));
        assert!(unattached(2).is_some_and(|why| why.contains("no such rank")));
    }
}
