//! `kvferry log`

use std::time::Duration;

use crate::cli::arguments::LocalArguments;
use crate::cli::common::{block_on, print_line};
use crate::cli::{socket_paths::SocketPaths, status};
use crate::error::CommandError;
use kvferry_client::AdminClient;
use kvferry_transport::{Address, ZmqTransport};
use kvferry_types::{Rank, Replica, WorkerId};

/// Time limit of the answer of a process.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);

#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    /// The filter, such as info,kvferry=debug.
    filter: String,
    #[command(flatten)]
    client: LocalArguments,
}

impl Arguments {
    pub(super) fn run(self) -> Result<(), CommandError> {
        let filter = self.filter;
        let socket_paths = self.client.load()?;
        block_on(1, async move {
            let found = status::request(&socket_paths, false).await?;
            let leader = status::admin(&socket_paths, "log");
            // A filter that cannot be read is refused by the leader, before any worker has another one.
            change("leader".to_owned(), &leader, &filter).await?;
            let workers = found.ranks.iter().map(|rank| WorkerId {
                replica: Replica(rank.replica),
                rank: Rank(rank.rank),
            });
            let mut failed = Vec::new();
            for worker in workers {
                let changed = change_worker(&socket_paths, worker, &filter).await;
                failed.extend(changed.err().map(|error| error.to_string()));
            }
            match failed.is_empty() {
                true => Ok(()),
                false => Err(CommandError::Failed(failed.join("; "))),
            }
        })
    }
}

async fn change_worker(
    socket_paths: &SocketPaths,
    worker: WorkerId,
    filter: &str,
) -> Result<(), CommandError> {
    let address = Address::Directory(socket_paths.worker(worker));
    let client = AdminClient::start(std::sync::Arc::new(ZmqTransport), address, "log");
    change(format!("worker of {worker}"), &client, filter).await
}

async fn change(process: String, client: &AdminClient, filter: &str) -> Result<(), CommandError> {
    let changed = client.set_log(filter, ANSWER_LIMIT).await;
    let before =
        changed.map_err(|failure| CommandError::Failed(format!("{process}: {failure}")))?;
    print_line(&format!("{process}: {before} before, {filter} now"));
    Ok(())
}
