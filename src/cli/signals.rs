//! Signals that end a process in order, except those that were ignored when the process started.
//!
//! `nohup` starts a process with SIGHUP ignored, and a shell without job control starts background jobs with SIGINT
//! ignored. A handler would undo that: a closed terminal, or a Ctrl-C meant for another process, would end this one. A
//! signal that is ignored when the process starts therefore stays ignored. SIGTERM is sent to one process by name, and
//! always ends it.

use std::fs;

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::error::CommandError;

/// The kernel's status of this process. `SigIgn` is a mask of the ignored signals.
const STATUS: &str = "/proc/self/status";

/// Receives the signals that end a process.
pub(super) struct Signals {
    terminate: Signal,
    /// `None` if the process was started with the signal ignored.
    interrupt: Option<Signal>,
    hang_up: Option<Signal>,
}

impl Signals {
    /// Installs the handlers. Must be called once, before anything that must be ended is started.
    pub(super) fn listen() -> Result<Self, CommandError> {
        let ignored = fs::read_to_string(STATUS).map_or_else(
            |error| {
                tracing::debug!(%error, "{STATUS} cannot be read: no signal is taken as ignored");
                0
            },
            |status| ignored_in(&status),
        );
        let unless_ignored = |kind: SignalKind| match ignored & bit(kind) {
            0 => signal(kind).map(Some),
            _ => Ok(None),
        };
        let listen = || {
            Ok(Self {
                terminate: signal(SignalKind::terminate())?,
                interrupt: unless_ignored(SignalKind::interrupt())?,
                hang_up: unless_ignored(SignalKind::hangup())?,
            })
        };
        listen().map_err(|error: std::io::Error| CommandError::failed(error))
    }

    /// Waits for SIGTERM, which is sent to this process alone.
    pub(super) async fn terminated(&mut self) {
        self.terminate.recv().await;
    }

    /// Waits for any of the signals.
    pub(super) async fn any(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            () = received(&mut self.interrupt) => {}
            () = received(&mut self.hang_up) => {}
        }
    }
}

async fn received(signal: &mut Option<Signal>) {
    match signal {
        Some(signal) => {
            signal.recv().await;
        }
        None => std::future::pending().await,
    }
}

fn bit(kind: SignalKind) -> u64 {
    u32::try_from(kind.as_raw_value() - 1)
        .map_or(0, |number| 1_u64.checked_shl(number).unwrap_or(0))
}

/// Parses the mask of ignored signals in the text of `/proc/PID/status`. Returns 0 if the text has no such line.
fn ignored_in(status: &str) -> u64 {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ignored_signals_are_read_from_the_kernels_text() {
        let status =
            "Name:\tkvferry\nSigBlk:\t0000000000000002\nSigIgn:\t0000000000001003\nSigCgt:\t0\n";
        let ignored = ignored_in(status);
        for (kind, expected) in [
            (SignalKind::hangup(), true),
            (SignalKind::interrupt(), true),
            (SignalKind::pipe(), true),
            (SignalKind::terminate(), false),
        ] {
            assert_eq!(ignored & bit(kind) != 0, expected, "{kind:?}");
        }
        for without in [
            "",
            "SigIgn:\n",
            "SigIgn:\tnone\n",
            "SigCgt:\t0000000000000002\n",
        ] {
            assert_eq!(ignored_in(without), 0, "{without}");
        }
    }
}
