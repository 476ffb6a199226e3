//! A result that is made at most once a second, however many ask for it.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::Instant;

/// How long a result is given to others.
const FRESH: Duration = Duration::from_secs(1);

/// The last result. While one is made, others wait for it.
#[derive(Debug)]
pub(super) struct OnceASecond<T>(Mutex<Option<(Instant, Arc<T>)>>);

impl<T> OnceASecond<T> {
    pub(super) fn new() -> Self {
        Self(Mutex::new(None))
    }

    /// The last result with its age, or a new one if that is older than 1 s.
    pub(super) async fn get(&self, make: impl Future<Output = T>) -> (Duration, Arc<T>) {
        let mut last = self.0.lock().await;
        if let Some((at, result)) = last.as_ref()
            && at.elapsed() < FRESH
        {
            return (at.elapsed(), Arc::clone(result));
        }
        let result = Arc::new(make.await);
        *last = Some((Instant::now(), Arc::clone(&result)));
        (Duration::ZERO, result)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_result_is_made_once_a_second_and_others_get_it_with_its_age() {
        let (once, made) = (OnceASecond::new(), AtomicU32::new(0));
        let make = || async {
            tokio::time::sleep(Duration::from_millis(500)).await;
            made.fetch_add(1, Ordering::Relaxed) + 1
        };
        let both = tokio::join!(once.get(make()), once.get(make()));
        assert_eq!((*both.0.1, *both.1.1), (1, 1), "the second one waits");
        tokio::time::sleep(Duration::from_millis(999)).await;
        let (age, result) = once.get(make()).await;
        assert_eq!((age, *result), (Duration::from_millis(999), 1));
        tokio::time::sleep(Duration::from_millis(1)).await;
        let (age, result) = once.get(make()).await;
        assert_eq!((age, *result), (Duration::ZERO, 2));
    }
}
