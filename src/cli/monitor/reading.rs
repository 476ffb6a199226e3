//! The numbers of a deployment at one time, read over its sockets.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::cli::{restarts, socket_paths::SocketPaths};
use crate::config::Config;
use kvferry_client::AdminClient;
use kvferry_protocol::{MeasureAnswer, ProbeAnswer, RestartedProcess, StatusAnswer};
use kvferry_transport::{Address, ZmqTransport, has_socket};
use kvferry_types::{Rank, Replica, WorkerId};

/// Time limit of every request to a process. Processes are asked at the same time.
pub(super) const ANSWER_LIMIT: Duration = Duration::from_secs(2);

/// The name of a worker in labels and texts: that of its directory.
pub(super) fn process_name(worker: WorkerId) -> String {
    format!("worker-{}-{}", worker.replica.0, worker.rank.0)
}

/// Connections to every process of a deployment: one to the leader and one to each worker, at most 4,097.
#[derive(Debug)]
pub(super) struct Deployment {
    sockets: SocketPaths,
    leader: AdminClient,
    workers: Vec<(WorkerId, AdminClient)>,
    /// The file with the restarts of processes, where a supervisor writes it.
    restarts: Option<PathBuf>,
}

/// The numbers of a leader.
#[derive(Debug)]
pub(super) struct Leader {
    pub(super) status: StatusAnswer,
    pub(super) measured: MeasureAnswer,
}

/// The numbers of a deployment, or why a process has none.
#[derive(Debug)]
pub(super) struct Reading {
    pub(super) leader: Result<Leader, String>,
    pub(super) workers: Vec<(WorkerId, Result<MeasureAnswer, String>)>,
    /// Processes that the supervisor has started again, also while no leader answers.
    pub(super) restarts: Vec<RestartedProcess>,
}

impl Deployment {
    /// Connects in the background, and again whenever a process has started again. `supervised` by `up`, which counts
    /// restarts.
    pub(super) fn connect(config: &Config, supervised: bool) -> Self {
        let socket_paths = SocketPaths::new(&config.socket_dir);
        let transport = Arc::new(ZmqTransport);
        let connect = |address| AdminClient::start(transport.clone(), address, "monitor");
        let replicas = (0..config.replicas).map(Replica);
        let workers = replicas.flat_map(|replica| {
            let ranks = (0..config.ranks).map(Rank);
            ranks.map(move |rank| WorkerId { replica, rank })
        });
        let workers = workers.map(|worker| {
            let address = Address::Directory(socket_paths.worker(worker));
            (worker, connect(address))
        });
        Self {
            leader: connect(socket_paths.leader_address()),
            workers: workers.collect(),
            restarts: supervised.then(|| socket_paths.restarts()),
            sockets: socket_paths,
        }
    }

    /// Why no engine can connect to the leader, or no rank to a worker: the connections of this process outlive the socket.
    pub(super) fn reachable(&self, worker: Option<WorkerId>) -> Result<(), String> {
        let directory = match worker {
            Some(worker) => self.sockets.worker(worker),
            None => self.sockets.leader(),
        };
        match has_socket(&directory) {
            true => Ok(()),
            false => Err(format!(
                "the socket in {} was removed: start kvferry again",
                directory.display()
            )),
        }
    }

    /// Requests one thing of every worker at the same time.
    async fn of_workers<T: Send + 'static, F>(
        &self,
        request: impl Fn(AdminClient) -> F,
    ) -> Vec<(WorkerId, Result<T, String>)>
    where
        F: Future<Output = Result<T, String>> + Send + 'static,
    {
        let asked = self.workers.iter();
        let asked = asked.map(|(worker, client)| (*worker, tokio::spawn(request(client.clone()))));
        let mut answers = Vec::new();
        for (worker, answer) in asked.collect::<Vec<_>>() {
            let answer = answer.await.unwrap_or_else(|error| Err(error.to_string()));
            answers.push((worker, answer));
        }
        answers
    }

    /// Reads all numbers. Takes at most [`ANSWER_LIMIT`], or twice that where the leader answers late.
    pub(super) async fn read(&self) -> Reading {
        let leader = async {
            let measured = self.leader.measure(ANSWER_LIMIT).await;
            let measured = measured.map_err(|failure| failure.to_string())?;
            let status = self.status().await?;
            Ok(Leader { status, measured })
        };
        let workers = self.of_workers(|client| async move {
            let measured = client.measure(ANSWER_LIMIT).await;
            measured.map_err(|failure| failure.to_string())
        });
        let (leader, workers) = tokio::join!(leader, workers);
        let restarts = self.restarts.as_deref();
        Reading {
            leader,
            workers,
            restarts: restarts.map_or_else(Vec::new, restarts::read),
        }
    }

    pub(super) async fn status(&self) -> Result<StatusAnswer, String> {
        let status = self.leader.status(false, ANSWER_LIMIT).await;
        status.map_err(|failure| failure.to_string())
    }

    /// Sends a probe through the leader.
    pub(super) async fn probe_leader(&self) -> Result<ProbeAnswer, String> {
        let probed = self.leader.probe(ANSWER_LIMIT).await;
        probed.map_err(|failure| failure.to_string())
    }

    /// Sends a probe through every worker.
    pub(super) async fn probe_workers(&self) -> Vec<(WorkerId, Result<ProbeAnswer, String>)> {
        self.of_workers(|client| async move {
            let probed = client.probe(ANSWER_LIMIT).await;
            probed.map_err(|failure| failure.to_string())
        })
        .await
    }
}
