//! A limit on log lines that peers can cause.

use std::time::Duration;

use super::Time;

/// Limit on lines of one kind within a [`PERIOD`], where the line has no other. At 4 KiB each, the longest that a message can carry: 46 MiB a day.
const LINES_MAX: u32 = 8;
const PERIOD: Duration = Duration::from_secs(60);

/// Limits how often one log line is written, so that no peer can fill a disk. One value per line.
#[derive(Debug)]
pub struct LogLimit {
    lines_max: u32,
    since: Option<Time>,
    lines: u32,
    left_out: u64,
}

impl Default for LogLimit {
    fn default() -> Self {
        Self::new()
    }
}

impl LogLimit {
    /// A limit without lines so far.
    pub const fn new() -> Self {
        Self::of(LINES_MAX)
    }

    /// A limit of so many lines a minute.
    pub const fn of(lines_max: u32) -> Self {
        Self {
            lines_max,
            since: None,
            lines: 0,
            left_out: 0,
        }
    }

    /// Call before each line: `None` when the line must be left out, otherwise the number of lines left out since the
    /// last one.
    pub fn line(&mut self, now: Time) -> Option<u64> {
        if self.since.is_none_or(|since| now >= since + PERIOD) {
            self.since = Some(now);
            self.lines = 0;
        }
        if self.lines == self.lines_max {
            self.left_out += 1;
            return None;
        }
        self.lines += 1;
        Some(std::mem::take(&mut self.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_few_lines_a_minute_are_written_and_the_others_counted() {
        let mut limit = LogLimit::new();
        let begun = Time(5);
        for _ in 0..LINES_MAX {
            assert_eq!(limit.line(begun), Some(0));
        }
        for _ in 0..1000 {
            assert_eq!(limit.line(begun + PERIOD / 2), None);
        }
        assert_eq!(limit.line(begun + PERIOD), Some(1000));
        assert_eq!(limit.line(begun + PERIOD), Some(0));
    }
}
