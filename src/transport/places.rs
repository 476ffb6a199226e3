//! Places for connections about which nothing is known yet.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

/// A fixed number of places. When all are taken, the one that was taken first is lost to whoever comes next, so that peers
/// that keep silent cannot keep others out.
pub(super) struct Places {
    taken: Mutex<Taken>,
    max: usize,
}

#[derive(Default)]
struct Taken {
    next: u64,
    /// The first one was taken first.
    places: VecDeque<(u64, oneshot::Sender<()>)>,
}

impl Places {
    pub(super) fn new(max: usize) -> Arc<Self> {
        Arc::new(Self {
            taken: Mutex::default(),
            max,
        })
    }

    fn taken(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a place.
    pub(super) fn take(self: &Arc<Self>) -> Place {
        let mut taken = self.taken();
        let id = taken.next;
        taken.next += 1;
        let (kept, lost) = oneshot::channel();
        taken.places.push_back((id, kept));
        if taken.places.len() > self.max {
            taken.places.pop_front();
        }
        Place {
            id,
            lost,
            places: Arc::clone(self),
        }
    }
}

/// One of the [`Places`], free again when this is dropped.
pub(super) struct Place {
    id: u64,
    lost: oneshot::Receiver<()>,
    places: Arc<Places>,
}

impl Place {
    /// Ends when another one has got the place.
    pub(super) async fn lost(&mut self) {
        if (&mut self.lost).await.is_ok() {
            // Nothing is ever sent: the channel ends with the place.
            std::future::pending().await
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.places.taken().places.retain(|(id, _)| *id != self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_oldest_place_is_lost_and_a_free_one_is_not() {
        let places = Places::new(2);
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
