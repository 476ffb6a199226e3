//! The monotonic clock of the live system. Stops with the runtime's paused clock in tests.

use std::time::Duration;

use tokio::time::Instant;

use kvferry_types::Time;

/// Supplies [`Time`] to code that must not read a clock itself.
#[derive(Debug, Clone, Copy)]
pub struct Clock(Instant);

impl Clock {
    /// Starts a clock at time 0.
    pub fn start() -> Self {
        Self(Instant::now())
    }

    /// Time since the start.
    pub fn now(&self) -> Time {
        Time(u64::try_from(self.0.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }

    /// Converts to an instant of the runtime; `None` for [`Time::NEVER`] and for times too far ahead.
    pub fn instant(&self, at: Time) -> Option<Instant> {
        self.0
            .checked_add(Duration::from_nanos(at.0))
            .filter(|_| at != Time::NEVER)
    }

    /// Returns the time `ms` milliseconds from now.
    pub fn after_ms(&self, ms: u32) -> Time {
        self.now() + Duration::from_millis(u64::from(ms))
    }
}
