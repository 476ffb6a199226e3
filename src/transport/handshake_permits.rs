//! A bounded set of places for connections that have not been verified yet.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

/// A fixed number of places. When all are taken, a new connection evicts the oldest one, so that silent peers cannot
/// keep others out.
pub(super) struct HandshakePermits {
    taken: Mutex<Taken>,
    max: usize,
}

#[derive(Default)]
struct Taken {
    next: u64,
    /// Ordered by time, oldest first.
    places: VecDeque<(u64, oneshot::Sender<()>)>,
}

impl HandshakePermits {
    pub(super) fn new(max: usize) -> Arc<Self> {
        Arc::new(Self {
            taken: Mutex::default(),
            max,
        })
    }

    fn taken(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a place, evicting the oldest holder if there is none free.
    pub(super) fn take(self: &Arc<Self>) -> HandshakePermit {
        let mut taken = self.taken();
        let id = taken.next;
        taken.next += 1;
        let (kept, lost) = oneshot::channel();
        taken.places.push_back((id, kept));
        if taken.places.len() > self.max {
            taken.places.pop_front();
        }
        HandshakePermit {
            id,
            lost,
            places: Arc::clone(self),
        }
    }
}

/// One of the [`HandshakePermits`], freed on drop.
pub(super) struct HandshakePermit {
    id: u64,
    lost: oneshot::Receiver<()>,
    places: Arc<HandshakePermits>,
}

impl HandshakePermit {
    /// Completes when a newer connection has evicted this one.
    pub(super) async fn lost(&mut self) {
        if (&mut self.lost).await.is_ok() {
            // Unreachable: the channel is only ever dropped, never sent on.
            std::future::pending().await
        }
    }
}

impl Drop for HandshakePermit {
    fn drop(&mut self) {
        self.places.taken().places.retain(|(id, _)| *id != self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_oldest_place_is_lost_and_a_free_one_is_not() {
        let places = HandshakePermits::new(2);
        let mut first = places.take();
        drop(places.take());
        let mut second = places.take();
        tokio::select! {
            biased;
            () = first.lost() => panic!("there was room"),
            () = second.lost() => panic!("there was room"),
            () = std::future::ready(()) => {}
        }
        let _third = places.take();
        first.lost().await;
        tokio::select! {
            biased;
            () = second.lost() => panic!("it is not the oldest"),
            () = std::future::ready(()) => {}
        }
    }
}
