//! Checks that the configured host memory is available before anything is started.

use std::collections::BTreeSet;
use std::time::Duration;

use tokio::time::Instant;

use crate::config::Config;
use crate::error::CommandError;
use kvferry_memory::{LockLimit, MemoryAvailable, NumaNode};
use kvferry_types::{ByteSize, Shard};

/// Longest wait for memory that other processes use.
const MEMORY_WAIT_MAX: Duration = Duration::from_secs(10);
/// Interval at which available memory is checked.
const PAUSE: Duration = Duration::from_millis(500);

/// Refuses NUMA nodes that do not exist, more memory than may be locked, and more memory than is available, for the depots
/// of these shards on this machine.
pub(super) async fn preflight_memory(
    config: &Config,
    here: &BTreeSet<Shard>,
) -> Result<(), CommandError> {
    let wrong = |error: &dyn std::fmt::Display| CommandError::Config(error.to_string());
    let shards = config.kv_shards.shards();
    for node in here.iter().filter_map(|shard| config.g2_numa.of(*shard)) {
        NumaNode::find(node).map_err(|error| wrong(&error))?;
    }
    if config.g2_lock {
        // Each worker locks the depot of its shard.
        let each = config.host_memory().0 / u64::from(shards);
        LockLimit::now()
            .check(each)
            .map_err(|error| wrong(&error))?;
    }
    let (all, here) = (u64::from(shards), here.len() as u64);
    memory_for(
        ByteSize(config.host_memory().0 / all * here + config.host_memory().0 % all),
        &MemoryAvailable::ever(),
        MemoryAvailable::now,
    )
    .await
}

/// Waits up to [`MEMORY_WAIT_MAX`] for memory that other processes may soon free, for example after the end of another
/// `up`. `ever` is the memory that could become available at all; more is refused at once.
async fn memory_for(
    g2: ByteSize,
    ever: &MemoryAvailable,
    mut now: impl FnMut() -> MemoryAvailable,
) -> Result<(), CommandError> {
    let refused = |found: &MemoryAvailable| {
        let (limit, available) = (&found.limit, ByteSize(found.bytes));
        CommandError::Config(format!(
            "g2 is {g2}, {limit} has {available}: give less than that, or more memory"
        ))
    };
    if g2.0 > ever.bytes {
        return Err(refused(ever));
    }
    let until = Instant::now() + MEMORY_WAIT_MAX;
    loop {
        let found = now();
        if g2.0 <= found.bytes {
            return Ok(());
        }
        if Instant::now() >= until {
            return Err(refused(&found));
        }
        tracing::warn!(%g2, available = %ByteSize(found.bytes), "waiting for memory");
        tokio::time::sleep(PAUSE).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvferry_memory::MemoryLimit;

    fn host(bytes: u64) -> MemoryAvailable {
        let limit = MemoryLimit::Host;
        MemoryAvailable { bytes, limit }
    }

    /// Runs `memory_for` and returns the time that passed, the number of checks, and the refusal.
    async fn sampled(ever: u64, now: impl Fn(u32) -> u64) -> (Duration, u32, Option<String>) {
        let begun = Instant::now();
        let mut looks = 0;
        let found = memory_for(ByteSize(100), &host(ever), || {
            looks += 1;
            host(now(looks))
        })
        .await;
        let refused = found.err().map(|error| error.to_string());
        (begun.elapsed(), looks, refused)
    }

    #[tokio::test(start_paused = true)]
    async fn memory_that_is_freed_in_time_is_awaited() {
        assert_eq!(sampled(100, |_| 100).await, (Duration::ZERO, 1, None));
        let soon = |look: u32| if look < 4 { 99 } else { 100 };
        assert_eq!(sampled(100, soon).await, (3 * PAUSE, 4, None));
    }

    #[tokio::test(start_paused = true)]
    async fn memory_that_is_not_available_is_refused_with_both_numbers() {
        let (took, looks, refused) = sampled(100, |_| 99).await;
        assert_eq!((took, looks), (MEMORY_WAIT_MAX, 21));
        let text = "g2 is 100 B, the host's memory has 99 B: give less than that, or more memory";
        assert_eq!(refused.as_deref(), Some(text));
        let (took, looks, refused) = sampled(98, |_| 99).await;
        assert_eq!(
            (took, looks),
            (Duration::ZERO, 0),
            "there never was as much"
        );
        assert!(refused.is_some_and(|text| text.contains("has 98 B")));
    }
}
