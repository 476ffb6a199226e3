//! The numbers of an engine's batches: gaps, repetitions, and streams that begin again.
//!
//! A publisher numbers its batches from 0 at each start, keeps the newest ones, and sends them again from a number on. A
//! gap is therefore healed by a replay that begins with the last batch that is known: if that one is the same as before,
//! the stream is the same, and otherwise the engine has started again.

use twox_hash::XxHash3_64;

/// What to do with a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// The next one: apply it.
    Apply,
    /// Applied before.
    Skip,
    /// Batches before it are missing: request a replay from this number on, then present this batch again.
    Replay(u64),
    /// Another stream, or a gap that no replay fills: take back the engine's pages. Then, for a live batch, call
    /// [`Numbers::live`] again; in a replay that began above 0, request one from 0; in a replay from 0, call
    /// [`Numbers::replayed`] again with this batch.
    Restarted,
}

/// A batch that was applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Applied {
    number: u64,
    digest: u64,
}

/// The position in an engine's stream.
#[derive(Debug, Default)]
pub struct Numbers {
    last: Option<Applied>,
    /// The number of the last batch that came live.
    live: Option<u64>,
    /// The next batch of a replay is the last known one, if the stream is the same.
    compares: bool,
}

impl Numbers {
    /// A batch came live.
    pub fn live(&mut self, number: u64, payload: &[u8]) -> Step {
        if self.live.replace(number).is_some_and(|live| number <= live) {
            // The numbers of one stream grow.
            self.live = None;
            return self.restart();
        }
        match self.last {
            Some(last) if number <= last.number => {
                // A replay has brought it, unless it is another batch with that number.
                if number == last.number && digest(payload) != last.digest {
                    self.live = None;
                    return self.restart();
                }
                Step::Skip
            }
            Some(last) if number == last.number + 1 => self.apply(number, payload),
            Some(last) => {
                self.compares = true;
                Step::Replay(last.number)
            }
            None if number == 0 => self.apply(number, payload),
            None => Step::Replay(0),
        }
    }

    /// A batch of a replay came.
    pub fn replayed(&mut self, number: u64, payload: &[u8]) -> Step {
        let compares = std::mem::take(&mut self.compares);
        match self.last {
            Some(last) if compares => {
                if number == last.number && digest(payload) == last.digest {
                    Step::Skip
                } else {
                    self.restart()
                }
            }
            Some(last) if number <= last.number => Step::Skip,
            // A batch between is missing in the replay, too.
            Some(last) if number > last.number + 1 => self.restart(),
            _ => self.apply(number, payload),
        }
    }

    /// The replay has ended, or there was none in time. The batch that asked for it is applied next; returns whether batches
    /// before it are lost, so that what the engine held before means nothing.
    pub fn after_replay(&mut self, number: u64, payload: &[u8]) -> (Step, bool) {
        let unknown = std::mem::take(&mut self.compares);
        let last = self.last.map(|last| last.number);
        if !unknown && last.is_some_and(|last| number <= last) {
            return (Step::Skip, false);
        }
        let complete = !unknown && number == last.map_or(0, |last| last + 1);
        (self.apply(number, payload), !complete)
    }

    fn restart(&mut self) -> Step {
        self.last = None;
        self.compares = false;
        Step::Restarted
    }

    fn apply(&mut self, number: u64, payload: &[u8]) -> Step {
        let digest = digest(payload);
        self.last = Some(Applied { number, digest });
        Step::Apply
    }
}

fn digest(payload: &[u8]) -> u64 {
    XxHash3_64::oneshot(payload)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch(number: u64) -> Vec<u8> {
        format!("batch {number}").into_bytes()
    }

    fn live(numbers: &mut Numbers, number: u64) -> Step {
        numbers.live(number, &batch(number))
    }

    #[test]
    fn batches_in_order_are_applied() {
        let mut numbers = Numbers::default();
        for number in 0..5 {
            assert_eq!(live(&mut numbers, number), Step::Apply);
        }
    }

    #[test]
    fn a_late_subscriber_requests_everything_and_skips_what_came_twice() {
        let mut numbers = Numbers::default();
        assert_eq!(live(&mut numbers, 3), Step::Replay(0));
        for number in 0..6 {
            assert_eq!(numbers.replayed(number, &batch(number)), Step::Apply);
        }
        assert_eq!(numbers.after_replay(3, &batch(3)), (Step::Skip, false));
        assert_eq!(live(&mut numbers, 4), Step::Skip);
        assert_eq!(live(&mut numbers, 5), Step::Skip);
        assert_eq!(live(&mut numbers, 6), Step::Apply);
    }

    #[test]
    fn a_gap_is_healed_by_the_batches_between() {
        let mut numbers = Numbers::default();
        assert_eq!(live(&mut numbers, 0), Step::Apply);
        assert_eq!(live(&mut numbers, 3), Step::Replay(0));
        assert_eq!(numbers.replayed(0, &batch(0)), Step::Skip);
        assert_eq!(numbers.replayed(1, &batch(1)), Step::Apply);
        assert_eq!(numbers.replayed(2, &batch(2)), Step::Apply);
        assert_eq!(numbers.after_replay(3, &batch(3)), (Step::Apply, false));
        assert_eq!(live(&mut numbers, 4), Step::Apply);
    }

    #[test]
    fn a_gap_without_a_replay_loses_the_state() {
        let mut numbers = Numbers::default();
        assert_eq!(live(&mut numbers, 0), Step::Apply);
        assert_eq!(live(&mut numbers, 3), Step::Replay(0));
        assert_eq!(numbers.after_replay(3, &batch(3)), (Step::Apply, true));
        assert_eq!(live(&mut numbers, 4), Step::Apply);
    }

    #[test]
    fn a_gap_in_a_replay_loses_the_state() {
        let mut numbers = Numbers::default();
        assert_eq!(live(&mut numbers, 9), Step::Replay(0));
        assert_eq!(numbers.replayed(4, &batch(4)), Step::Apply);
        assert_eq!(numbers.replayed(6, &batch(6)), Step::Restarted);
        assert_eq!(numbers.replayed(6, &batch(6)), Step::Apply);
        assert_eq!(numbers.replayed(7, &batch(7)), Step::Apply);
        // Number 8 is missing at the end of the replay.
        assert_eq!(numbers.after_replay(9, &batch(9)), (Step::Apply, true));
    }

    #[test]
    fn a_replay_to_one_who_knows_nothing_may_begin_later() {
        let mut numbers = Numbers::default();
        assert_eq!(live(&mut numbers, 7), Step::Replay(0));
        assert_eq!(numbers.replayed(5, &batch(5)), Step::Apply);
        assert_eq!(numbers.replayed(6, &batch(6)), Step::Apply);
        assert_eq!(numbers.after_replay(7, &batch(7)), (Step::Apply, false));
    }

    #[test]
    fn a_smaller_number_is_another_stream() {
        let mut numbers = Numbers::default();
        for number in 0..4 {
            live(&mut numbers, number);
        }
        assert_eq!(live(&mut numbers, 0), Step::Restarted);
        assert_eq!(live(&mut numbers, 0), Step::Apply);
        assert_eq!(live(&mut numbers, 1), Step::Apply);
        let mut numbers = Numbers::default();
        for number in 0..4 {
            live(&mut numbers, number);
        }
        assert_eq!(live(&mut numbers, 2), Step::Restarted);
        assert_eq!(live(&mut numbers, 2), Step::Replay(0));
    }

    /// The engine started again while the connection was lost, and its numbers have passed those of before.
    #[test]
    fn a_replay_shows_that_the_engine_has_started_again() {
        let mut numbers = Numbers::default();
        for number in 0..4 {
            live(&mut numbers, number);
        }
        assert_eq!(numbers.live(9, b"another 9"), Step::Replay(3));
        assert_eq!(numbers.replayed(3, b"another 3"), Step::Restarted);
        assert_eq!(numbers.replayed(4, b"another 4"), Step::Apply);
    }
}
