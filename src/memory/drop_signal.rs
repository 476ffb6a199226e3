//! A signal for the drop of the last holder of a shared value.

use std::convert::Infallible;
use std::time::Duration;

use crossbeam::channel::{Receiver, RecvTimeoutError, Sender, bounded};

/// A signal on drop. Declare it as the last field: fields drop in order, so it fires after all others.
#[derive(Debug)]
pub struct DropSignal {
    _held: Sender<Infallible>,
    end: Receiver<Infallible>,
}

/// Receives the end of a [`DropSignal`], without holding it.
#[derive(Debug, Clone)]
pub struct DropWaiter(Receiver<Infallible>);

impl Default for DropSignal {
    fn default() -> Self {
        let (_held, end) = bounded(0);
        Self { _held, end }
    }
}

impl DropSignal {
    /// The receiver of its end.
    pub fn end(&self) -> DropWaiter {
        DropWaiter(self.end.clone())
    }
}

impl DropWaiter {
    /// Waits at most `limit` for the end. Returns false while the `DropSignal` exists.
    pub fn wait(&self, limit: Duration) -> bool {
        self.0.recv_timeout(limit) == Err(RecvTimeoutError::Disconnected)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn a_drop_signal_ends_with_its_last_holder() {
        let held = Arc::new(DropSignal::default());
        let end = held.end();
        let other = Arc::clone(&held);
        drop(held);
        assert!(!end.wait(Duration::ZERO));
        let dropping = std::thread::spawn(move || drop(other));
        assert!(end.wait(Duration::from_secs(60)));
        dropping.join().expect("no panic");
    }
}
