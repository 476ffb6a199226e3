//! The flags of each kind of replay. A flag that would have no effect is refused.

use crate::error::CommandError;

use super::report::RestartKind;
use super::workload::Workload;
use super::{Arguments, Mode};

/// How a replay treats time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReplayKind {
    /// Real processes; prompts arrive by timestamp or concurrency.
    Live,
    /// Real processes, one prompt after another.
    LiveSequential,
    /// Virtual time.
    Timed,
    /// No time.
    OfflineSequential,
}

impl Arguments {
    pub(super) fn kind(&self) -> ReplayKind {
        match (self.mode, self.sequential) {
            (Mode::Live, false) => ReplayKind::Live,
            (Mode::Live, true) => ReplayKind::LiveSequential,
            (Mode::Offline, false) => ReplayKind::Timed,
            (Mode::Offline, true) => ReplayKind::OfflineSequential,
        }
    }

    /// Factor by which timestamps are sped up; `None` if they are not used.
    pub(super) fn timestamps_speedup(&self) -> Option<f64> {
        let looked_at = !self.sequential && self.concurrency.is_none();
        looked_at.then(|| self.speedup.unwrap_or(1.0))
    }

    /// After how many requests all processes stop and start again, and how they stop.
    pub(super) fn restart(&self) -> Option<(usize, RestartKind)> {
        let restart = self.restart_at.map(|at| (at, RestartKind::Restart));
        let stop = restart.or_else(|| self.kill_at.map(|at| (at, RestartKind::Kill)));
        stop.map(|(at, kind)| (at as usize, kind))
    }

    /// Whether the processes of a live replay have a disk.
    pub(super) fn uses_disk(&self) -> bool {
        self.g3.is_some_and(|size| size.0 > 0)
    }

    /// Refuses a restart after which nothing would be found, or that never comes.
    pub(super) fn check_restart(&self, workload: &Workload) -> Result<(), CommandError> {
        let Some((at, kind)) = self.restart() else {
            return Ok(());
        };
        let flag = kind.flag();
        let (has_disk, remedy) = match self.mode {
            Mode::Live => (self.uses_disk(), "give --g3 and --g3-dir"),
            Mode::Offline => (workload.disk_pages > 0, "give --g3-pages"),
        };
        if !has_disk {
            return Err(CommandError::Config(format!(
                "{flag} is {at}, and only a disk keeps pages over it: {remedy}, or leave {flag} out"
            )));
        }
        let requests = workload.trace.requests.len();
        if at >= requests {
            return Err(CommandError::Config(format!(
                "{flag} is {at}, and there are {requests} requests: give less"
            )));
        }
        Ok(())
    }

    /// Refuses the settings of an `up` together with one that runs already, where they would have no effect.
    pub(super) fn check_sizes(&self) -> Result<(), CommandError> {
        let sizes = [
            ("--ratio", self.ratio.is_some()),
            ("--g2", self.g2.is_some()),
            ("--g2-pages", self.g2_pages.is_some()),
            ("--g2-policy", self.g2_policy.is_some()),
            ("--g3", self.g3.is_some()),
        ];
        let given = sizes.into_iter().find(|(_, given)| *given);
        match (given, &self.socket_dir) {
            (Some((flag, _)), Some(directory)) => Err(CommandError::Config(format!(
                "{flag} has no effect with --socket-dir {}: the kvferry up there has its own settings; leave one of them \
                 out",
                directory.display()
            ))),
            _ => Ok(()),
        }
    }

    /// Refuses flags that have no effect in this kind of replay.
    pub(super) fn check_flags(&self) -> Result<(), CommandError> {
        let kind = self.kind();
        let timed = &self.timed;
        let virtual_time = [
            ("--d2h-gb-per-s", timed.d2h_gb_per_s.is_some()),
            ("--h2d-gb-per-s", timed.h2d_gb_per_s.is_some()),
            ("--store-gb-per-s", timed.store_gb_per_s.is_some()),
            ("--link-latency-us", timed.link_latency_us.is_some()),
            ("--message-latency-us", timed.message_latency_us.is_some()),
            ("--g3-write-gb-per-s", timed.g3_write_gb_per_s.is_some()),
            ("--g3-read-gb-per-s", timed.g3_read_gb_per_s.is_some()),
            (
                "--prefill-tokens-per-s",
                timed.prefill_tokens_per_s.is_some(),
            ),
            ("--cost-gate", timed.cost_gate),
            ("--formula", timed.formula.is_some()),
            ("--parallel-prefill", timed.parallel_prefill),
        ];
        let pace = [
            ("--speedup", self.speedup.is_some()),
            ("--concurrency", self.concurrency.is_some()),
        ];
        let memory = [
            ("--layout", self.layout.is_some()),
            ("--device", self.device.is_some()),
        ];
        match kind {
            ReplayKind::Live => refuse(&virtual_time, "plays virtual time, use --mode offline"),
            ReplayKind::LiveSequential => {
                let remedy = "plays virtual time, use --mode offline without --sequential";
                refuse(&virtual_time, remedy)
            }
            ReplayKind::Timed => Ok(()),
            ReplayKind::OfflineSequential => {
                refuse(&virtual_time, "plays virtual time, leave --sequential out")
            }
        }?;
        if self.sequential {
            let remedy = "says when prompts come, and with --sequential each waits for the one \
                          before it: leave one of the two out";
            refuse(&pace, remedy)?;
        }
        if let Some(directories) = self.g3_dir.as_ref().filter(|all| all.0.len() > 1)
            && let Some(relative) = directories.0.iter().find(|path| path.is_relative())
        {
            return Err(CommandError::Config(format!(
                "--g3-dir is {directories}, and {} is not absolute: give absolute paths, separated by commas, without \
                 commas in them",
                relative.display()
            )));
        }
        if self.mode == Mode::Live {
            let disk = [("--g3-pages", self.g3_pages.is_some())];
            refuse(&disk, "simulates a disk, use --mode offline")?;
        }
        self.check_sizes()?;
        if self.socket_dir.is_some() {
            let restarts = [
                ("--restart-at", self.restart_at.is_some()),
                ("--kill-at", self.kill_at.is_some()),
            ];
            refuse(&restarts, "starts `up` again, leave --socket-dir out")?;
        }
        if kind == ReplayKind::Timed {
            let restarts = [("--restart-at", self.restart_at.is_some())];
            refuse(&restarts, "takes no time offline, add --sequential")?;
        }
        if self.mode == Mode::Offline {
            refuse(&memory, "lays out real memory, use --mode live")?;
            let live = [
                ("--replicas", self.replicas > 1),
                ("--socket-dir", self.socket_dir.is_some()),
                ("--request-timeout-ms", self.request_timeout_ms.is_some()),
                ("--kill-at", self.kill_at.is_some()),
                ("--g3", self.g3.is_some()),
            ];
            refuse(&live, "is for live replays, use --mode live")?;
        }
        Ok(())
    }
}

fn refuse(flags: &[(&str, bool)], remedy: &str) -> Result<(), CommandError> {
    match flags.iter().find(|(_, given)| *given) {
        Some((flag, _)) => Err(CommandError::Config(format!("{flag} {remedy}"))),
        None => Ok(()),
    }
}
