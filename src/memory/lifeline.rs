//! Tells when something that many hold is gone.

use std::convert::Infallible;
use std::time::Duration;

use crossbeam::channel::{Receiver, RecvTimeoutError, Sender, bounded};

/// The last field of something: gone when everything before it is.
#[derive(Debug)]
pub struct Lifeline {
    _held: Sender<Infallible>,
    end: Receiver<Infallible>,
}

/// The end of a [`Lifeline`], for who does not hold it.
#[derive(Debug, Clone)]
pub struct LifelineEnd(Receiver<Infallible>);

impl Default for Lifeline {
    fn default() -> Self {
        let (_held, end) = bounded(0);
        Self { _held, end }
    }
}

impl Lifeline {
    /// What tells when it is gone.
    pub fn end(&self) -> LifelineEnd {
        LifelineEnd(self.end.clone())
    }
}

impl LifelineEnd {
    /// Waits until it is gone, at most so long; false when it is still there.
    pub fn wait(&self, limit: Duration) -> bool {
        self.0.recv_timeout(limit) == Err(RecvTimeoutError::Disconnected)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn it_ends_with_the_last_holder() {
        let held = Arc::new(Lifeline::default());
        let end = held.end();
        let other = Arc::clone(&held);
        drop(held);
        assert!(!end.wait(Duration::ZERO));
        let dropping = std::thread::spawn(move || drop(other));
        assert!(end.wait(Duration::from_secs(60)));
        dropping.join().expect("no panic");
    }
}
