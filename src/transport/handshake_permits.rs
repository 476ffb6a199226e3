//! A bounded set of places for connections that have not been verified yet.

use std::collections::VecDeque;
use std::net::IpAddr;
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
    places: VecDeque<Place>,
}

struct Place {
    id: u64,
    /// Address of another machine; `None` for this one.
    source: Option<IpAddr>,
    /// Dropped to evict the holder.
    _kept: oneshot::Sender<()>,
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
        self.take_as(None, self.max)
    }

    /// Takes a place for a connection from an address, which has at most `of_source_max` places: the oldest holder of
    /// that address is evicted first.
    pub(super) fn take_from(
        self: &Arc<Self>,
        source: IpAddr,
        of_source_max: usize,
    ) -> HandshakePermit {
        self.take_as(Some(source), of_source_max)
    }

    fn take_as(self: &Arc<Self>, source: Option<IpAddr>, of_source_max: usize) -> HandshakePermit {
        let mut taken = self.taken();
        let id = taken.next;
        taken.next += 1;
        let (kept, lost) = oneshot::channel();
        let places = &mut taken.places;
        let of_source = places.iter().filter(|place| place.source == source);
        let evicted = match of_source.count() >= of_source_max {
            true => places.iter().position(|place| place.source == source),
            false => (places.len() >= self.max).then_some(0),
        };
        if let Some(evicted) = evicted {
            places.remove(evicted);
        }
        places.push_back(Place {
            id,
            source,
            _kept: kept,
        });
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
        self.places
            .taken()
            .places
            .retain(|place| place.id != self.id);
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

    #[tokio::test]
    async fn an_address_loses_its_own_places_first() {
        let places = HandshakePermits::new(3);
        let (one, two) = ([10, 0, 0, 1].into(), [10, 0, 0, 2].into());
        let mut oldest = places.take_from(two, 2);
        let mut first = places.take_from(one, 2);
        let mut second = places.take_from(one, 2);
        let _third = places.take_from(one, 2);
        first.lost().await;
        tokio::select! {
            biased;
            () = oldest.lost() => panic!("another address had too many"),
            () = second.lost() => panic!("it is not the oldest of its address"),
            () = std::future::ready(()) => {}
        }
        let _fourth = places.take_from(two, 2);
        oldest.lost().await;
    }
}
