//! Lines of the log that peers can cause.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Most lines of one kind within a [`PERIOD`]. At 4 KiB each, the longest that a message can carry: 46 MiB a day.
const LINES_MAX: u32 = 8;
const PERIOD: Duration = Duration::from_secs(60);

/// Bounds how often one line is written, so that no peer can fill a disk. A `static` for each line.
#[derive(Debug)]
pub struct Quiet(Mutex<Written>);

#[derive(Debug)]
struct Written {
    since: Option<Instant>,
    lines: u32,
    left_out: u64,
}

impl Quiet {
    /// Nothing is written yet.
    #[expect(clippy::new_without_default, reason = "for a static")]
    pub const fn new() -> Self {
        Self(Mutex::new(Written {
            since: None,
            lines: 0,
            left_out: 0,
        }))
    }

    /// To be asked before each line: `None` when it is to be left out, otherwise how many were since the last one.
    pub fn line(&self) -> Option<u64> {
        self.line_at(Instant::now())
    }

    fn line_at(&self, now: Instant) -> Option<u64> {
        let mut written = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if written.since.is_none_or(|since| now >= since + PERIOD) {
            written.since = Some(now);
            written.lines = 0;
        }
        if written.lines == LINES_MAX {
            written.left_out += 1;
            return None;
        }
        written.lines += 1;
        Some(std::mem::take(&mut written.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_few_lines_a_minute_are_written_and_the_others_counted() {
        let quiet = Quiet::new();
        let begun = Instant::now();
        for _ in 0..LINES_MAX {
            assert_eq!(quiet.line_at(begun), Some(0));
        }
        for _ in 0..1000 {
            assert_eq!(quiet.line_at(begun + PERIOD / 2), None);
        }
        assert_eq!(quiet.line_at(begun + PERIOD), Some(1000));
        assert_eq!(quiet.line_at(begun + PERIOD), Some(0));
    }
}
