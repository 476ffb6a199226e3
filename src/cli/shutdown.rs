//! Shutdown logic that leader and worker processes share.

use std::io::Write as _;
use std::time::Duration;

use rustix::process::{Signal, set_parent_process_death_signal};
use tokio::io::AsyncReadExt;

use crate::cli::signals::Signals;
use crate::error::CommandError;
use kvferry_types::{Rank, Replica, WorkerId};

/// Longest wait for running copies when a process ends in order.
pub(super) const DRAIN_LIMIT: Duration = Duration::from_secs(5);

/// A report of a child to its supervisor, on one line of standard output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ChildReport {
    /// The child serves: a leader listens, a worker's host memory is ready.
    Ready,
    /// A leader requests the end of a worker.
    Fence(FenceWorker),
}

impl std::fmt::Display for ChildReport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Ready => f.write_str("ready"),
            Self::Fence(fence) => fence.fmt(f),
        }
    }
}

impl std::str::FromStr for ChildReport {
    type Err = ();

    fn from_str(line: &str) -> Result<Self, ()> {
        match line {
            "ready" => Ok(Self::Ready),
            line => line.parse().map(Self::Fence),
        }
    }
}

impl ChildReport {
    /// Writes the report to the supervisor.
    pub(super) fn send(self) {
        let mut output = std::io::stdout();
        if let Err(error) = writeln!(output, "{self}").and_then(|()| output.flush()) {
            tracing::error!(%error, report = %self, "the supervisor does not read");
        }
    }
}

/// A leader's request to end the process of a worker. `pid` is set if the worker has connected to the leader.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FenceWorker {
    pub(super) worker: WorkerId,
    pub(super) pid: Option<i32>,
}

impl std::fmt::Display for FenceWorker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "fence {} {}", self.worker.replica.0, self.worker.rank.0)?;
        self.pid.map_or(Ok(()), |pid| write!(f, " {pid}"))
    }
}

impl std::str::FromStr for FenceWorker {
    type Err = ();

    fn from_str(line: &str) -> Result<Self, ()> {
        let mut words = line.strip_prefix("fence ").ok_or(())?.split(' ');
        let mut number = || words.next().and_then(|word| word.parse().ok()).ok_or(());
        let worker = WorkerId {
            replica: Replica(number()?),
            rank: Rank(number()?),
        };
        let pid = match words.next() {
            None => None,
            Some(word) => Some(word.parse().map_err(|_| ())?),
        };
        match words.next() {
            None => Ok(Self { worker, pid }),
            Some(_) => Err(()),
        }
    }
}

/// Makes the kernel kill this process when its supervisor ends, even while the process is stopped and reads nothing.
pub(super) fn end_with_supervisor(supervised: bool) -> Result<(), CommandError> {
    match supervised {
        true => set_parent_process_death_signal(Some(Signal::KILL)).map_err(CommandError::failed),
        false => Ok(()),
    }
}

/// The byte that a supervisor writes before it closes the standard input of a process, if it ends that process in
/// order. Without the byte, the supervisor itself has ended.
pub(super) const END_IN_ORDER: u8 = b'e';

/// Who ends the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EndedBy {
    /// Signals alone.
    Signals,
    /// SIGTERM, or the end of standard input.
    SignalOrInput,
    /// The end of standard input alone.
    Input,
}

impl EndedBy {
    /// What ends a process that `up` may have started.
    pub(super) fn child(supervised: bool) -> Self {
        match supervised {
            true => Self::Input,
            false => Self::Signals,
        }
    }
}

/// Receives requests to end the process, from its creation on. Create it before starting anything that must be ended.
pub(super) struct Ending {
    signals: Signals,
    by: EndedBy,
}

impl Ending {
    pub(super) fn listen(by: EndedBy) -> Result<Self, CommandError> {
        Ok(Self {
            signals: Signals::listen()?,
            by,
        })
    }

    /// Waits for a request to end. Signals are SIGTERM, SIGINT and SIGHUP. A leader or worker that `up` has started
    /// ends with its standard input, which is closed when `up` ends it, and when `up` ends in any way. Signals are left
    /// to `up`, because a terminal or a service manager sends them to it as well, and it ends its processes in its own
    /// order, after the stored pages are on the disk.
    pub(super) async fn requested(&mut self) {
        match self.by {
            EndedBy::Signals => self.signals.any().await,
            EndedBy::SignalOrInput => tokio::select! {
                () = self.signals.terminated() => {}
                () = end_of_input() => {}
            },
            EndedBy::Input => end_of_input().await,
        }
    }
}

async fn end_of_input() {
    let mut input = tokio::io::stdin();
    let (mut byte, mut in_order) = ([0], false);
    while matches!(input.read(&mut byte).await, Ok(1)) {
        in_order |= byte[0] == END_IN_ORDER;
    }
    match in_order {
        true => tracing::debug!("the supervisor ends this process"),
        false => tracing::warn!("the supervisor is gone"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_supervisor_reads_what_a_child_writes_and_nothing_else() {
        let worker = WorkerId {
            replica: Replica(3),
            rank: Rank(17),
        };
        for pid in [None, Some(4711)] {
            let fence = FenceWorker { worker, pid };
            let report = ChildReport::Fence(fence);
            assert_eq!(report.to_string().parse(), Ok(report));
        }
        let ready = ChildReport::Ready;
        assert_eq!(ready.to_string().parse(), Ok(ready));
        for wrong in [
            "",
            "fence",
            "fence 1",
            "fence 1 2 3 4",
            "fence 1 2 x",
            "fence 1 x",
            "fence 70000 1",
            " fence 1 2",
            "ready ",
        ] {
            assert_eq!(wrong.parse::<ChildReport>(), Err(()), "{wrong}");
        }
    }
}
