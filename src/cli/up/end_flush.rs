//! The flush at the end of `up`, which makes a planned restart warm.

use std::future::Future;
use std::path::Path;
use std::time::Duration;

use tokio::time::Instant;

use crate::cli::{socket_paths::SocketPaths, status};
use kvferry_client::Failure;
use kvferry_protocol::{ErrorCode, StatusAnswer};
use kvferry_types::TierId;

/// Pause before a flush that was refused is requested again.
const AGAIN_EVERY: Duration = Duration::from_millis(200);

/// Moves what is stored to the disk before the processes end, so that the next start serves it. Takes at most `limit`.
pub(super) async fn flush(socket_dir: &Path, limit: Duration) {
    let begun = Instant::now();
    let socket_paths = SocketPaths::new(socket_dir);
    let found = async {
        match status::request(&socket_paths, false).await {
            Ok(status) if holds_nothing(&status) => None,
            _ => Some(status::admin(&socket_paths, "up")),
        }
    };
    let leader = match tokio::time::timeout(limit, found).await {
        Ok(Some(leader)) => leader,
        Ok(None) => {
            tracing::info!("no engine has registered: no pages are moved to the disk");
            return;
        }
        Err(_) => status::admin(&socket_paths, "up"),
    };
    match until_taken(|left| leader.flush(left), begun + limit).await {
        Ok(pages) => {
            tracing::info!(pages, took = ?begun.elapsed(), "the pages on the disk are durable");
        }
        Err(failure) => {
            let found = status::request(&socket_paths, false).await;
            let missing = found.map_or_else(|error| error.to_string(), |status| durable(&status));
            let took = begun.elapsed();
            tracing::warn!(
                %failure,
                "after {took:?} not all stored pages are on the disk: {missing}; those that are missing are computed again. Give flush_limit_s more, or run `kvferry flush --timeout SECONDS` before the end"
            );
        }
    }
}

/// Requests a flush, and again while it is refused because the disk is not ready: one that is being opened, or whose pages the
/// leader reads, is ready a moment later.
async fn until_taken<F: Future<Output = Result<u32, Failure>>>(
    request: impl Fn(Duration) -> F,
    until: Instant,
) -> Result<u32, Failure> {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        match request(left).await {
            Err(failure)
                if failure.code == ErrorCode::NotReady && Instant::now() + AGAIN_EVERY < until =>
            {
                tracing::debug!(%failure, "the flush is requested again");
                tokio::time::sleep(AGAIN_EVERY).await;
            }
            ended => return ended,
        }
    }
}

/// How many pages are durable, of how many.
fn durable(status: &StatusAnswer) -> String {
    let disks = status.ranks.iter().filter_map(|rank| rank.disk.as_deref());
    // A page is found again if every shard has its part.
    let durable = disks.map(|disk| disk.durable_pages).min().unwrap_or(0);
    let host = status.tier(TierId::Host.number());
    let host = host.map_or(0, |tier| tier.used_pages);
    let waiting = status.moves.as_ref().map_or(0, |moves| moves.waiting);
    format!(
        "{durable} pages are durable there, {host} are in host memory, and {waiting} blocks wait to be moved"
    )
}

/// True if no engine has registered since the leader started, and nothing was stored.
fn holds_nothing(status: &StatusAnswer) -> bool {
    let stored = status.counters.get("blocks_stored");
    !status.ready
        && stored.is_none_or(|blocks| *blocks == 0)
        && status.ranks.iter().all(|rank| !rank.attached)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvferry_protocol::{DiskStatus, MovesStatus, RankStatus, TierStatus};
    use std::cell::Cell;

    /// Requests a flush that is refused with this code so many times. Returns how it ended, and after which time.
    async fn refused(
        code: ErrorCode,
        times: u32,
        limit: Duration,
    ) -> (Result<u32, ErrorCode>, Duration) {
        let (begun, left_out) = (Instant::now(), Cell::new(times));
        let request = |left: Duration| {
            assert!(left <= limit);
            let refused = left_out.get() > 0;
            left_out.set(left_out.get().saturating_sub(1));
            async move {
                match refused {
                    true => Err(Failure::new(code, "refused")),
                    false => Ok(7),
                }
            }
        };
        let ended = until_taken(request, begun + limit).await;
        (ended.map_err(|failure| failure.code), begun.elapsed())
    }

    #[tokio::test(start_paused = true)]
    async fn a_flush_is_requested_until_the_disk_is_open_and_no_longer_than_the_limit() {
        let limit = Duration::from_secs(10);
        let (ended, took) = refused(ErrorCode::NotReady, 3, limit).await;
        assert_eq!((ended, took), (Ok(7), 3 * AGAIN_EVERY));
        let (ended, took) = refused(ErrorCode::NotReady, u32::MAX, limit).await;
        assert_eq!(ended, Err(ErrorCode::NotReady));
        assert!(took <= limit && took >= limit - 2 * AGAIN_EVERY, "{took:?}");
        let (ended, took) = refused(ErrorCode::Invalid, 1, limit).await;
        assert_eq!((ended, took), (Err(ErrorCode::Invalid), Duration::ZERO));
    }

    #[test]
    fn the_numbers_of_durable_pages_are_those_of_the_slowest_disk() {
        let rank = |durable_pages| {
            let disk = DiskStatus {
                durable_pages,
                ..DiskStatus::default()
            };
            RankStatus {
                disk: Some(Box::new(disk)),
                ..RankStatus::default()
            }
        };
        let status = StatusAnswer {
            ranks: vec![rank(1_900), rank(1_888)],
            tiers: vec![TierStatus {
                tier: 2,
                used_pages: 4_800,
                ..TierStatus::default()
            }],
            moves: Some(Box::new(MovesStatus {
                waiting: 91,
                ..MovesStatus::default()
            })),
            ..StatusAnswer::default()
        };
        assert_eq!(
            durable(&status),
            "1888 pages are durable there, 4800 are in host memory, and 91 blocks wait to be moved"
        );
    }
}
