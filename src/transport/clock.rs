//! The clock of the live system: monotonic, and paused with the runtime's in tests.

use std::time::Duration;

use tokio::time::Instant;

use crate::types::Time;

/// Reads time for those who may not.
#[derive(Debug, Clone, Copy)]
pub struct Clock(Instant);

impl Clock {
    /// A clock that starts now.
    pub fn start() -> Self {
        Self(Instant::now())
    }

    /// The time since the start.
    pub fn now(&self) -> Time {
        Time(u64::try_from(self.0.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }

    /// The same point in time for the runtime; `None` for [`Time::NEVER`].
    pub fn instant(&self, at: Time) -> Option<Instant> {
        self.0
            .checked_add(Duration::from_nanos(at.0))
            .filter(|_| at != Time::NEVER)
    }

    /// The point in time that is `ms` milliseconds away.
    pub fn after_ms(&self, ms: u32) -> Time {
        self.now() + Duration::from_millis(u64::from(ms))
    }
}
