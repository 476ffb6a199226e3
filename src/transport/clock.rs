//! The monotonic clock of the live system, and waits by it. Stops with the runtime's paused clock in tests.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::task::Poll;
use std::time::Duration;

use tokio::time::{Instant, Sleep, sleep_until, timeout};

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

/// Waits for `work`, at most for `limit`; `None` when it took longer. Reads no clock for work that is done at once, as nearly
/// all sends are.
pub(super) async fn within<F: Future>(limit: Duration, work: F) -> Option<F::Output> {
    within_late(|| limit, work).await
}

/// As [`within`], for a limit that is only known by reading the clock.
pub(super) async fn within_late<F: Future>(
    limit: impl FnOnce() -> Duration,
    work: F,
) -> Option<F::Output> {
    let mut work = pin!(work);
    let done = poll_fn(|context| match work.as_mut().poll(context) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending => Poll::Ready(None),
    });
    match done.await {
        Some(output) => Some(output),
        None => timeout(limit(), work).await.ok(),
    }
}

/// A timer that fires by the time that is asked for, or earlier. It is set again only for an earlier time: most requests put
/// off what is due next, and a timer that fires early costs less than one that is set again for each request.
pub(super) struct Timer {
    sleep: Pin<Box<Sleep>>,
    /// False once `sleep` has fired, until it is set again.
    set: bool,
}

impl Timer {
    pub(super) fn new() -> Self {
        Self {
            sleep: Box::pin(sleep_until(Instant::now())),
            set: false,
        }
    }

    /// Waits until `due`, or until the earlier time of a call before that was dropped: the caller checks what is due. Waits for
    /// ever without either. Cancel safe.
    pub(super) async fn fired(&mut self, due: Option<Instant>) {
        if let Some(due) = due
            && !(self.set && self.sleep.deadline() <= due)
        {
            self.sleep.as_mut().reset(due);
            self.set = true;
        }
        if !self.set {
            std::future::pending::<()>().await;
        }
        self.sleep.as_mut().await;
        self.set = false;
    }
}
