//! The event queue: events in the order of time, and of insertion where times are equal.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use kvferry_types::Time;

/// Future events, and the present time.
#[derive(Debug)]
pub(super) struct Queue<E> {
    heap: BinaryHeap<Reverse<Entry<E>>>,
    now: Time,
    made: u64,
}

#[derive(Debug)]
struct Entry<E> {
    at: Time,
    number: u64,
    event: E,
}

impl<E> Queue<E> {
    pub(super) fn new() -> Self {
        Self {
            heap: BinaryHeap::new(),
            now: Time(0),
            made: 0,
        }
    }

    pub(super) fn now(&self) -> Time {
        self.now
    }

    /// Adds an event. A time in the past counts as now.
    pub(super) fn push(&mut self, at: Time, event: E) {
        self.made += 1;
        let entry = Entry {
            at: at.max(self.now),
            number: self.made,
            event,
        };
        self.heap.push(Reverse(entry));
    }

    /// Takes the next event and sets the present time to its time.
    pub(super) fn pop(&mut self) -> Option<(u64, E)> {
        let Reverse(entry) = self.heap.pop()?;
        self.now = entry.at;
        Some((entry.number, entry.event))
    }
}

impl<E> PartialEq for Entry<E> {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.number) == (other.at, other.number)
    }
}

impl<E> Eq for Entry<E> {}

impl<E> PartialOrd for Entry<E> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> Ord for Entry<E> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_times_keep_their_order_and_past_events_are_due_now() {
        let mut queue = Queue::new();
        queue.push(Time(5), 'b');
        queue.push(Time(5), 'c');
        queue.push(Time(1), 'a');
        assert_eq!(queue.pop().map(|(_, event)| event), Some('a'));
        assert_eq!(queue.pop().map(|(_, event)| event), Some('b'));
        queue.push(Time(2), 'd');
        assert_eq!(queue.pop().map(|(_, event)| event), Some('c'));
        assert_eq!(queue.pop().map(|(_, event)| event), Some('d'));
        assert_eq!(queue.now(), Time(5));
        assert_eq!(queue.pop(), None);
    }
}
