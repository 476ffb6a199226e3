//! The start of a child: its command line and its descriptors.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};

use super::limits;
use super::part::{ChildKind, NotStarted};
use super::supervisor::Supervisor;
use super::system::{DEPOT_FD, Launch, System};
use kvferry_types::WorkerId;

impl<S: System> Supervisor<S> {
    /// Starts a child.
    pub(super) fn launch(
        &mut self,
        index: usize,
    ) -> Result<(S::Child, Option<S::Reports>), NotStarted> {
        let kind = self.parts[index].kind;
        let failed = |step| {
            move |error: io::Error| NotStarted {
                step,
                hint: limits::hint(&error),
                error,
            }
        };
        let clone = |fd| -> io::Result<OwnedFd> { self.system.clone_fd(fd) };
        let output = match (kind, &self.monitored) {
            (ChildKind::Monitor, Some(listener)) => {
                Some(clone(listener.as_fd()).map_err(failed("its socket cannot be duplicated"))?)
            }
            _ => None,
        };
        let depot = match kind {
            ChildKind::Worker(WorkerId { rank, .. }) => {
                let depot = &self.depots[&self.config.kv_shards.of(rank)];
                let duplicate = clone(depot.as_fd());
                Some(duplicate.map_err(failed("its host memory cannot be duplicated"))?)
            }
            ChildKind::Leader | ChildKind::Monitor => None,
        };
        let launch = Launch {
            arguments: self.arguments(kind),
            output,
            depot,
        };
        let started = self.system.spawn(launch);
        started.map_err(failed("it cannot be started"))
    }

    /// The command line of a child.
    fn arguments(&self, kind: ChildKind) -> Vec<OsString> {
        let mut line: Vec<OsString> = Vec::new();
        let mut add = |words: &[&str]| line.extend(words.iter().map(OsString::from));
        match kind {
            ChildKind::Leader => add(&["leader"]),
            ChildKind::Worker(_) => add(&["worker"]),
            ChildKind::Monitor => add(&["monitor", "--inherits-socket"]),
        }
        let config = &self.config;
        add(&["--supervised"]);
        add(&["--ranks", &config.ranks.to_string()]);
        add(&["--kv-shards", &config.kv_shards.shards().to_string()]);
        add(&["--replicas", &config.replicas.to_string()]);
        add(&["--ratio", &config.ratio.to_string()]);
        add(&["--g2", &config.g2.0.to_string()]);
        add(&["--g2-lock", &config.g2_lock.to_string()]);
        add(&["--g2-numa", &config.g2_numa.to_string()]);
        add(&["--g2-policy", &config.g2_policy.to_string()]);
        add(&["--g3", &config.g3.0.to_string()]);
        add(&["--g3-dir", &config.g3_dir.to_string()]);
        add(&["--g3-policy", &config.g3_policy.to_string()]);
        add(&["--g3-depth", &config.g3_depth.to_string()]);
        add(&["--g3-io", &config.g3_io.to_string()]);
        let scrub = config.g3_scrub_bytes_per_s.0.to_string();
        add(&["--g3-scrub-bytes-per-s", &scrub]);
        add(&["--g3-discard", &config.g3_discard.to_string()]);
        let prefill = config.prefill_tokens_per_s.to_string();
        add(&["--prefill-tokens-per-s", &prefill]);
        add(&["--copy-threads", &config.copy_threads.to_string()]);
        let store = config.store_bytes_per_s.0.to_string();
        add(&["--store-bytes-per-s", &store]);
        add(&["--gpu-copy", &config.gpu_copy.to_string()]);
        add(&["--heartbeat-ms", &config.heartbeat_ms.to_string()]);
        add(&["--wire-max", &config.wire_max.to_string()]);
        add(&["--users", &config.users.to_string()]);
        add(&["--monitor", &config.monitor.to_string()]);
        add(&["--page-index", &config.page_index.to_string()]);
        add(&["--record-decisions", &config.record_decisions.to_string()]);
        add(&["--log", &config.log]);
        match kind {
            ChildKind::Leader if self.no_tiers => add(&["--no-tiers"]),
            ChildKind::Leader | ChildKind::Monitor => {}
            ChildKind::Worker(WorkerId { replica, rank }) => {
                add(&["--rank", &rank.0.to_string()]);
                add(&["--replica", &replica.0.to_string()]);
                add(&["--depot-fd", &DEPOT_FD.to_string()]);
            }
        }
        if let (Some(tier), ChildKind::Leader | ChildKind::Worker(_)) = (&self.tier, kind) {
            line.extend(["--g3-tier".into(), tier.to_string().into()]);
        }
        line.extend(["--socket-dir".into(), config.socket_dir.clone().into()]);
        // The command line takes no empty path.
        if !config.namespaces.as_os_str().is_empty() {
            line.extend(["--namespaces".into(), config.namespaces.clone().into()]);
        }
        if let (Some(remote), ChildKind::Worker(worker)) = (&self.remote, kind) {
            line.extend(remote.flags(worker).into_iter().map(OsString::from));
        }
        line
    }
}
