//! The agenda: pending events by time.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use kvferry_types::Time;

#[derive(Debug)]
struct Entry<T> {
    at: Time,
    number: u64,
    what: T,
}

impl<T> PartialEq for Entry<T> {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}

impl<T> Eq for Entry<T> {}

impl<T> PartialOrd for Entry<T> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl<T> Ord for Entry<T> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}

/// Events in the order of time, and of insertion where times are equal.
#[derive(Debug)]
pub(super) struct Agenda<T> {
    heap: BinaryHeap<Reverse<Entry<T>>>,
    added: u64,
}

impl<T> Agenda<T> {
    pub(super) fn new() -> Self {
        Self {
            heap: BinaryHeap::new(),
            added: 0,
        }
    }

    pub(super) fn add(&mut self, at: Time, what: T) {
        self.added += 1;
        let number = self.added;
        self.heap.push(Reverse(Entry { at, number, what }));
    }

    /// Time of the next event.
    pub(super) fn next_at(&self) -> Option<Time> {
        self.heap.peek().map(|Reverse(entry)| entry.at)
    }

    /// Takes the next event if it is due.
    pub(super) fn take_due(&mut self, now: Time) -> Option<T> {
        if self.next_at()? > now {
            return None;
        }
        self.heap.pop().map(|Reverse(entry)| entry.what)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_earliest_comes_first_and_equals_in_their_order() {
        let mut agenda = Agenda::new();
        for (at, what) in [(5, 'c'), (3, 'a'), (5, 'd'), (3, 'b')] {
            agenda.add(Time(at), what);
        }
        assert_eq!(agenda.take_due(Time(2)), None);
        assert_eq!(agenda.next_at(), Some(Time(3)));
        let order: String = std::iter::from_fn(|| agenda.take_due(Time(5))).collect();
        assert_eq!(order, "abcd");
        assert_eq!(agenda.next_at(), None);
    }
}
