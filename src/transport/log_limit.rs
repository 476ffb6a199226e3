//! Rate limit on log lines that peers can cause, shared by all threads.

use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::Instant;

use kvferry_types::{LogLimit, Time};

static STARTED: LazyLock<Instant> = LazyLock::new(Instant::now);

/// A [`LogLimit`] on the system's monotonic clock, for use in a `static`.
#[derive(Debug)]
pub struct SharedLogLimit(Mutex<LogLimit>);

impl SharedLogLimit {
    /// Creates a limit that has counted no line.
    #[expect(clippy::new_without_default, reason = "for a static")]
    pub const fn new() -> Self {
        Self(Mutex::new(LogLimit::new()))
    }

    /// See [`LogLimit::line`].
    pub fn line(&self) -> Option<u64> {
        let now = u64::try_from(STARTED.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let mut limit = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        limit.line(Time(now))
    }
}
