//! One child of `up`: when it is started again, and when `up` gives up.

use std::fmt;
use std::io;
use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::cli::restarts::Cause;
use crate::error::{CommandError, MISCONFIGURED, NO_MEMORY};
use kvferry_types::WorkerId;

const RESTART_FIRST: Duration = Duration::from_millis(100);
const RESTART_MAX: Duration = Duration::from_secs(5);
/// A child that has been ready for this long has settled: it is started again after the shortest pause, and if a
/// signal ends it, that is no failure.
pub(super) const SETTLED_AFTER: Duration = Duration::from_secs(10);
/// `up` ends when a child fails this many times in a row without settling.
pub(super) const FAILURES_MAX: u32 = 8;

/// The role of a child.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ChildKind {
    Leader,
    Worker(WorkerId),
    /// Metrics and health.
    Monitor,
}

impl ChildKind {
    /// The name in the status and in metrics.
    pub(super) fn name(self) -> String {
        match self {
            Self::Leader => "leader".to_owned(),
            Self::Worker(WorkerId { replica, rank }) => format!("worker-{}-{}", replica.0, rank.0),
            Self::Monitor => "monitor".to_owned(),
        }
    }
}

impl fmt::Display for ChildKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Leader => f.write_str("leader"),
            Self::Worker(worker) => write!(f, "worker of {worker}"),
            Self::Monitor => f.write_str("monitor"),
        }
    }
}

/// Why a child could not be started.
#[derive(Debug, thiserror::Error)]
#[error("{step}: {error}{hint}")]
pub(super) struct NotStarted {
    pub(super) step: &'static str,
    pub(super) error: io::Error,
    /// The limit that the error may come from, after a colon; or empty.
    pub(super) hint: String,
}

impl NotStarted {
    /// True if the same start may succeed later without any change by an operator.
    fn passes(&self) -> bool {
        use rustix::io::Errno;
        let errno = Errno::from_io_error(&self.error);
        let passing = [
            Errno::AGAIN,
            Errno::MFILE,
            Errno::NFILE,
            Errno::NOMEM,
            Errno::NOBUFS,
            Errno::INTR,
        ];
        errno.is_some_and(|errno| passing.contains(&errno))
    }
}

/// How a child ended.
#[derive(Debug)]
pub(super) struct End {
    /// `None` if the system did not report it.
    pub(super) status: Option<ExitStatus>,
    pub(super) cause: Cause,
    /// The same for operators.
    pub(super) text: String,
}

/// A child, and what its earlier processes did.
pub(super) struct Part<C> {
    pub(super) kind: ChildKind,
    pub(super) child: Option<C>,
    /// Time of the next start; `None` while the child runs.
    pub(super) due: Option<Instant>,
    /// The statement to a leader on another machine that the child has ended.
    pub(super) stating: Option<JoinHandle<()>>,
    /// When the child reported that it is ready. A monitor reports nothing.
    ready: Option<Instant>,
    /// The child was killed here, on request of the leader.
    pub(super) fenced: bool,
    pause: Duration,
    failures: u32,
    has_started: bool,
    /// A child of this part ran with its configuration.
    has_run: bool,
}

impl<C> Part<C> {
    /// A child that is to be started now.
    pub(super) fn new(kind: ChildKind) -> Self {
        Self {
            kind,
            child: None,
            due: Some(Instant::now()),
            stating: None,
            ready: None,
            fenced: false,
            pause: RESTART_FIRST,
            failures: 0,
            has_started: false,
            has_run: false,
        }
    }

    pub(super) fn has_started(&mut self, child: C) {
        self.child = Some(child);
        self.due = None;
        self.ready = (self.kind == ChildKind::Monitor).then(Instant::now);
        self.fenced = false;
        self.has_started = true;
    }

    pub(super) fn is_ready(&mut self) {
        self.ready.get_or_insert_with(Instant::now);
    }

    /// Sets the time of the next start, and returns the pause before it.
    fn again(&mut self) -> Duration {
        let pause = self.pause;
        self.due = Some(Instant::now() + pause);
        self.pause = (pause * 2).min(RESTART_MAX);
        pause
    }

    /// Accounts for the end of the child. Returns the pause before its next start, or why it is not started again.
    pub(super) fn ended(&mut self, end: &End) -> Result<Duration, CommandError> {
        self.child = None;
        let kind = self.kind;
        // Not from the start on: much host memory takes longer than that, and a child may then die of it.
        let settled = (self.ready).is_some_and(|ready| ready.elapsed() >= SETTLED_AFTER);
        if settled {
            self.pause = RESTART_FIRST;
            self.failures = 0;
        }
        let code = end.status.and_then(|status| status.code());
        let is = |known: u8| code == Some(i32::from(known));
        let misconfigured = is(MISCONFIGURED);
        self.has_run |= !misconfigured;
        // A file of the configuration has changed since an earlier child ran: the pages that the others have are kept until
        // the file is mended.
        let to_mend = misconfigured && self.has_run;
        if to_mend {
            tracing::error!(
                "{kind} cannot start with its present configuration, see above: mend it, stored pages are kept"
            );
        }
        // A signal that ends a settled child comes from outside, and starting the child again helps: tests and operators
        // kill children that serve. One that dies again and again before it has settled dies of something that will
        // not pass, also by a signal: of a lack of memory, or of a defect. A child that was killed here has not failed.
        let by_signal = end.status.is_some_and(|status| status.signal().is_some());
        if code.is_some() && !to_mend || by_signal && !self.fenced && !settled {
            self.failures += 1;
        }
        // Nothing is served worse without the monitor: it is started again however often it fails.
        let needed = kind != ChildKind::Monitor;
        if needed && misconfigured && !to_mend {
            let text = format!("{kind} cannot start: see its messages above");
            return Err(CommandError::Config(text));
        }
        if needed && self.failures >= FAILURES_MAX {
            let text = format!(
                "{kind} does not stay up: it ended {FAILURES_MAX} times in a row, before it had been ready for {SETTLED_AFTER:?}; at last by {}; see its messages above",
                end.text
            );
            return Err(match end.cause == Cause::OutOfMemory || is(NO_MEMORY) {
                true => CommandError::NoMemory(text),
                false => CommandError::Unstable(text),
            });
        }
        Ok(self.again())
    }

    /// Accounts for a start that failed. Returns the pause before the next one, or why there is none. A part that had
    /// started before is started again however often that fails: the others keep their pages meanwhile.
    pub(super) fn not_started(&mut self, error: &NotStarted) -> Result<Duration, CommandError> {
        let kind = self.kind;
        let needed = kind != ChildKind::Monitor && !self.has_started;
        self.failures += u32::from(needed);
        let gives_up = needed && (!error.passes() || self.failures >= FAILURES_MAX);
        match gives_up {
            true => Err(CommandError::Failed(format!("{kind}: {error}"))),
            false => Ok(self.again()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvferry_types::{Rank, Replica};

    const WORKER: ChildKind = ChildKind::Worker(WorkerId {
        replica: Replica(0),
        rank: Rank(0),
    });
    const KILLED: i32 = 9;

    fn exited(code: i32) -> End {
        End {
            status: Some(ExitStatus::from_raw(code << 8)),
            cause: Cause::Exit,
            text: format!("exit status: {code}"),
        }
    }

    fn killed(cause: Cause) -> End {
        End {
            status: Some(ExitStatus::from_raw(KILLED)),
            cause,
            text: "a signal".to_owned(),
        }
    }

    /// Starts a child, lets it run for some time, ready or not, and ends it.
    async fn run(
        part: &mut Part<()>,
        ready: bool,
        seconds: u64,
        end: &End,
    ) -> Result<Duration, CommandError> {
        part.has_started(());
        if ready {
            part.is_ready();
        }
        tokio::time::sleep(Duration::from_secs(seconds)).await;
        part.ended(end)
    }

    /// The number of ends after which `up` gives up, of at most 20, and its exit code.
    async fn gives_up(kind: ChildKind, ready: bool, seconds: u64, end: &End) -> Option<(u32, u8)> {
        let mut part = Part::new(kind);
        for number in 1..=20 {
            if let Err(error) = run(&mut part, ready, seconds, end).await {
                return Some((number, error.exit_code()));
            }
        }
        None
    }

    #[tokio::test(start_paused = true)]
    async fn a_child_that_dies_early_ends_up_and_one_that_had_settled_does_not() {
        let signal = killed(Cause::Signal);
        for (ready, seconds, expected) in [
            (false, 0, Some((8, 70))),
            // Touching much memory may take long, and so may the death of it.
            (false, 60, Some((8, 70))),
            (true, 9, Some((8, 70))),
            (true, 10, None),
        ] {
            let found = gives_up(WORKER, ready, seconds, &signal).await;
            assert_eq!(found, expected, "ready {ready}, {seconds} s");
        }
        let of_memory = killed(Cause::OutOfMemory);
        assert_eq!(gives_up(WORKER, false, 1, &of_memory).await, Some((8, 69)));
        assert_eq!(
            gives_up(WORKER, false, 60, &exited(69)).await,
            Some((8, 69))
        );
        assert_eq!(gives_up(WORKER, false, 1, &exited(1)).await, Some((8, 70)));
        assert_eq!(gives_up(WORKER, false, 1, &exited(78)).await, Some((1, 78)));
        let monitor = gives_up(ChildKind::Monitor, false, 1, &signal).await;
        assert_eq!(monitor, None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_child_that_takes_long_to_be_ready_and_dies_then_has_failed() {
        let mut part = Part::new(WORKER);
        for number in 1..=FAILURES_MAX {
            part.has_started(());
            tokio::time::sleep(2 * SETTLED_AFTER).await;
            part.is_ready();
            tokio::time::sleep(SETTLED_AFTER / 2).await;
            let ended = part.ended(&killed(Cause::OutOfMemory));
            assert_eq!(ended.is_err(), number == FAILURES_MAX, "{number}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_child_that_was_killed_here_has_not_failed() {
        let mut part = Part::new(WORKER);
        for _ in 0..20 {
            part.has_started(());
            part.fenced = true;
            assert!(part.ended(&killed(Cause::Fenced)).is_ok());
        }
        // A process that succeeds it is not excused.
        for number in 1..=FAILURES_MAX {
            let ended = run(&mut part, false, 1, &killed(Cause::Signal)).await;
            assert_eq!(ended.is_err(), number == FAILURES_MAX, "{number}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn failures_count_in_a_row_and_pauses_grow_until_a_child_has_settled() {
        let mut part = Part::new(WORKER);
        let mut pauses = Vec::new();
        for number in 0..30 {
            let settles = number % 7 == 6;
            let seconds = if settles { 10 } else { 0 };
            let ended = run(&mut part, true, seconds, &killed(Cause::Signal)).await;
            pauses.push(ended.expect("it never fails 8 times in a row").as_millis());
        }
        let expected = [100, 200, 400, 800, 1600, 3200, 100, 200];
        assert_eq!(pauses[..8], expected);
    }

    #[tokio::test(start_paused = true)]
    async fn a_start_that_fails_ends_up_only_at_first() {
        let failed = |errno: rustix::io::Errno| NotStarted {
            step: "it cannot be started",
            error: errno.into(),
            hint: String::new(),
        };
        let (passing, lasting) = (
            failed(rustix::io::Errno::AGAIN),
            failed(rustix::io::Errno::ACCESS),
        );
        let mut part = Part::<()>::new(WORKER);
        for number in 1..=FAILURES_MAX {
            let found = part.not_started(&passing);
            assert_eq!(found.is_err(), number == FAILURES_MAX, "{number}");
        }
        let found = Part::<()>::new(WORKER).not_started(&lasting);
        let text = found.expect_err("nothing changes by itself").to_string();
        assert!(text.contains("rank 0: it cannot be started: "), "{text}");
        let mut part = Part::new(WORKER);
        part.has_started(());
        part.ended(&killed(Cause::Signal)).expect("a first end");
        for _ in 0..100 {
            assert!(part.not_started(&passing).is_ok());
            assert!(part.not_started(&lasting).is_ok());
        }
    }
}
