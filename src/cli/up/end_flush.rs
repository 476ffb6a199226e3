//! The flush at the end of `up`, which makes a planned restart warm.

use std::path::Path;
use std::time::Duration;

use tokio::time::Instant;

use crate::cli::{socket_paths::SocketPaths, status};
use kvferry_protocol::StatusAnswer;

/// Time in which stored pages must be on the disk before the children end. A second signal ends it at once.
const FLUSH_LIMIT: Duration = Duration::from_secs(10);

/// Moves what is stored to the disk before the processes end, so that the next start serves it.
pub(super) async fn flush(socket_dir: &Path) {
    let begun = Instant::now();
    let socket_paths = SocketPaths::new(socket_dir);
    if let Ok(status) = status::request(&socket_paths, false).await
        && holds_nothing(&status)
    {
        tracing::info!("no engine has registered: no pages are moved to the disk");
        return;
    }
    let leader = status::admin(&socket_paths, "up");
    let left = FLUSH_LIMIT.saturating_sub(begun.elapsed());
    match leader.flush(left).await {
        Ok(pages) => {
            tracing::info!(pages, took = ?begun.elapsed(), "the pages on the disk are durable")
        }
        Err(failure) => {
            tracing::warn!(%failure, "stored pages may not all be on the disk, and are computed again");
        }
    }
}

/// True if no engine has registered since the leader started, and nothing was stored.
fn holds_nothing(status: &StatusAnswer) -> bool {
    let stored = status.counters.get("blocks_stored");
    !status.ready
        && stored.is_none_or(|blocks| *blocks == 0)
        && status.ranks.iter().all(|rank| !rank.attached)
}
