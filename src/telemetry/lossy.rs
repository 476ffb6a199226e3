//! Writes lines of the log without ever failing, and without waiting long: a line that standard error does not take is
//! dropped and counted. A full disk, a closed pipe or a reader that stands still thus costs lines of the log, and no
//! service.

use std::io::{self, Write};
use std::os::fd::AsFd;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, fstat};
use rustix::io::{Errno, ReadWriteFlags, pwritev2};

/// Longest wait for standard error to take a part of a line. After a dropped line, further ones do not wait until one
/// was written.
const WAIT_MAX: Duration = Duration::from_millis(100);
/// A pipe or terminal that is ready takes this many bytes without waiting (`PIPE_BUF`).
const PART_BYTES: usize = 4096;

/// The lines that this process has dropped since the last one that was written.
static LOST: Mutex<Lost> = Mutex::new(Lost::NONE);

/// A writer for one line of the log, which the caller writes at once.
pub(super) struct Line;

impl Write for Line {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let mut lost = LOST.lock().unwrap_or_else(PoisonError::into_inner);
        lost.write(line, &mut StandardError);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Takes bytes of the log.
trait Sink {
    /// Takes some of the bytes, at most after `wait`.
    fn take(&mut self, bytes: &[u8], wait: Duration) -> io::Result<usize>;
}

struct StandardError;

impl Sink for StandardError {
    fn take(&mut self, bytes: &[u8], wait: Duration) -> io::Result<usize> {
        let mut error = io::stderr().lock();
        let wait = Timespec::try_from(wait).ok();
        let ready = poll(&mut [PollFd::new(&error, PollFlags::OUT)], wait.as_ref())?;
        match ready {
            0 => Err(io::Error::new(
                io::ErrorKind::WouldBlock,
                "standard error takes nothing",
            )),
            _ => write_at_once(&mut error, bytes),
        }
    }
}

/// Writes without a wait for a reader: other processes share the pipe, and may have filled it since it was ready. A kernel
/// that cannot do so waits.
fn write_at_once<T: Write + AsFd>(to: &mut T, bytes: &[u8]) -> io::Result<usize> {
    let kind = FileType::from_raw_mode(fstat(&*to)?.st_mode);
    if matches!(kind, FileType::Fifo | FileType::Socket) {
        let (parts, here) = ([io::IoSlice::new(bytes)], u64::MAX);
        match pwritev2(&*to, &parts, here, ReadWriteFlags::NOWAIT) {
            Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL | Errno::SPIPE) => {}
            written => return Ok(written?),
        }
    }
    to.write(bytes)
}

#[derive(Debug)]
struct Lost {
    lines: u64,
    /// Why the first one was dropped.
    why: Option<io::Error>,
    /// A part of a dropped line was written.
    torn: bool,
}

impl Lost {
    const NONE: Self = Self {
        lines: 0,
        why: None,
        torn: false,
    };

    /// Writes a line, after one about the lines before it that were dropped. Drops it if that fails.
    fn write(&mut self, line: &[u8], sink: &mut impl Sink) {
        if let Err(error) = self.say(sink).and_then(|()| self.put(line, sink)) {
            self.lines += 1;
            self.why.get_or_insert(error);
        }
    }

    fn say(&mut self, sink: &mut impl Sink) -> io::Result<()> {
        let Some(why) = &self.why else {
            return Ok(());
        };
        let end = if self.torn { "\n" } else { "" };
        let lines = match self.lines {
            1 => "1 line".to_owned(),
            lines => format!("{lines} lines"),
        };
        let pid = std::process::id();
        let text = format!("{end} WARN {lines} of the log of process {pid} were lost: {why}\n");
        self.put(text.as_bytes(), sink)?;
        *self = Self::NONE;
        Ok(())
    }

    fn put(&mut self, line: &[u8], sink: &mut impl Sink) -> io::Result<()> {
        let mut rest = line;
        while !rest.is_empty() {
            let part = rest.get(..PART_BYTES).unwrap_or(rest);
            let wait = match self.lines {
                0 => WAIT_MAX,
                _ => Duration::ZERO,
            };
            match sink.take(part, wait) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => rest = rest.get(written..).unwrap_or_default(),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    self.torn |= rest.len() < line.len();
                    return Err(error);
                }
            }
        }
        self.torn = false;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Another process may fill a pipe between the look at it and the write.
    #[test]
    fn a_pipe_that_has_become_full_is_not_waited_for() {
        let (_reader, mut writer) = io::pipe().expect("a pipe");
        let full = loop {
            match write_at_once(&mut writer, &[b'x'; PART_BYTES]) {
                Ok(written) => assert!(written > 0),
                Err(error) => break error,
            }
        };
        assert_eq!(full.kind(), io::ErrorKind::WouldBlock);
    }

    /// Takes as many bytes as it has room for, in parts of at most `part` bytes, then none.
    struct Room {
        room: usize,
        part: usize,
        text: String,
        waits: Vec<Duration>,
    }

    impl Sink for Room {
        fn take(&mut self, bytes: &[u8], wait: Duration) -> io::Result<usize> {
            self.waits.push(wait);
            let taken = bytes.len().min(self.room).min(self.part);
            if taken == 0 {
                return Err(io::ErrorKind::StorageFull.into());
            }
            self.room -= taken;
            self.text += std::str::from_utf8(&bytes[..taken]).expect("UTF-8");
            Ok(taken)
        }
    }

    /// What a sink with `before` bytes of room gets of four lines, and of a fifth one once it has room again.
    fn written(before: usize, part: usize) -> (String, Vec<Duration>) {
        let mut lost = Lost::NONE;
        let (text, waits) = (String::new(), Vec::new());
        let mut sink = Room {
            room: before,
            part,
            text,
            waits,
        };
        for line in ["one\n", "two\n", "three\n", "four\n"] {
            lost.write(line.as_bytes(), &mut sink);
        }
        sink.room = 1000;
        lost.write(b"five\n", &mut sink);
        let pid = std::process::id().to_string();
        (sink.text.replace(&pid, "PID"), sink.waits)
    }

    #[test]
    fn dropped_lines_are_counted_once_and_a_part_of_a_line_is_ended() {
        let note = |lines: &str| format!(" WARN {lines} of the log of process PID were lost: ");
        for part in [1, 2, 1000] {
            let of = |room| written(room, part).0;
            let why = io::Error::from(io::ErrorKind::StorageFull);
            assert_eq!(of(8), format!("one\ntwo\n{}{why}\nfive\n", note("2 lines")));
            assert_eq!(
                of(10),
                format!("one\ntwo\nth\n{}{why}\nfive\n", note("2 lines"))
            );
            assert_eq!(
                of(14),
                format!("one\ntwo\nthree\n{}{why}\nfive\n", note("1 line"))
            );
            assert_eq!(of(19), "one\ntwo\nthree\nfour\nfive\n");
        }
    }

    #[test]
    fn only_the_first_line_that_is_dropped_waits() {
        let (_, waits) = written(8, 1000);
        let long = waits.iter().filter(|wait| !wait.is_zero()).count();
        // The two lines that fit, the first that does not, and the one after the note.
        assert_eq!((long, waits.len()), (4, 6), "{waits:?}");
    }

    #[test]
    fn a_line_is_offered_in_parts_that_a_pipe_takes_at_once() {
        let mut sizes = Vec::new();
        struct Sizes<'a>(&'a mut Vec<usize>);
        impl Sink for Sizes<'_> {
            fn take(&mut self, bytes: &[u8], _: Duration) -> io::Result<usize> {
                self.0.push(bytes.len());
                Ok(bytes.len())
            }
        }
        let mut lost = Lost::NONE;
        lost.write(&[b'x'; 10_000], &mut Sizes(&mut sizes));
        assert_eq!(sizes, [4096, 4096, 1808]);
    }
}
