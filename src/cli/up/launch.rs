//! The start of a child: its command line and its descriptors.

use std::os::fd::OwnedFd;
use std::process::Stdio;

use command_fds::{CommandFdExt as _, FdMapping};
use tokio::time::Instant;

use super::requests::listen;
use super::supervisor::{ChildKind, Supervisor};
use crate::cli::program;
use crate::error::CommandError;
use kvferry_types::WorkerId;

/// Number of the file descriptor of a worker's depot.
const DEPOT_FD: i32 = 3;

impl Supervisor {
    pub(super) fn start(&mut self, index: usize) -> Result<(), CommandError> {
        let part = self.parts[index].part;
        let mut command = program::command();
        match part {
            ChildKind::Leader => command.arg("leader"),
            ChildKind::Worker(_) => command.arg("worker"),
            ChildKind::Monitor => command.args(["monitor", "--inherits-socket"]),
        };
        let config = &self.config;
        command
            .arg("--supervised")
            .args(["--ranks", &config.ranks.to_string()])
            .args(["--kv-shards", &config.kv_shards.shards().to_string()])
            .args(["--replicas", &config.replicas.to_string()])
            .args(["--ratio", &config.ratio.to_string()])
            .args(["--g2", &config.g2.0.to_string()])
            .args(["--g2-lock", &config.g2_lock.to_string()])
            .args(["--g2-numa", &config.g2_numa.to_string()])
            .args(["--g2-policy", &config.g2_policy.to_string()])
            .args(["--g3", &config.g3.0.to_string()])
            .args(["--g3-dir", &config.g3_dir.to_string()])
            .args(["--g3-policy", &config.g3_policy.to_string()])
            .args(["--g3-depth", &config.g3_depth.to_string()])
            .args(["--g3-io", &config.g3_io.to_string()])
            .args([
                "--g3-scrub-bytes-per-s",
                &config.g3_scrub_bytes_per_s.0.to_string(),
            ])
            .args(["--g3-discard", &config.g3_discard.to_string()])
            .args([
                "--prefill-tokens-per-s",
                &config.prefill_tokens_per_s.to_string(),
            ])
            .args(["--copy-threads", &config.copy_threads.to_string()])
            .args([
                "--store-bytes-per-s",
                &config.store_bytes_per_s.0.to_string(),
            ])
            .args(["--gpu-copy", &config.gpu_copy.to_string()])
            .args(["--heartbeat-ms", &config.heartbeat_ms.to_string()])
            .args(["--wire-max", &config.wire_max.to_string()])
            .args(["--users", &config.users.to_string()])
            .args(["--monitor", &config.monitor.to_string()])
            .args(["--page-index", &config.page_index.to_string()])
            .args(["--record-decisions", &config.record_decisions.to_string()])
            .args(["--log", &config.log])
            .arg("--socket-dir")
            .arg(&config.socket_dir)
            .stdin(Stdio::piped())
            .stdout(match (part, &self.monitored) {
                (ChildKind::Leader, _) => Stdio::piped(),
                (ChildKind::Monitor, Some(listener)) => {
                    let listener = listener.try_clone().map_err(CommandError::failed)?;
                    Stdio::from(OwnedFd::from(listener))
                }
                _ => Stdio::null(),
            })
            .kill_on_drop(true);
        // The command line takes no empty path.
        if !config.namespaces.as_os_str().is_empty() {
            command.arg("--namespaces").arg(&config.namespaces);
        }
        match part {
            ChildKind::Leader if self.no_tiers => {
                command.arg("--no-tiers");
            }
            ChildKind::Leader | ChildKind::Monitor => {}
            ChildKind::Worker(WorkerId { replica, rank }) => {
                let parent_fd: OwnedFd = self.depots[&config.kv_shards.of(rank)]
                    .try_clone_fd()
                    .map_err(CommandError::failed)?;
                let mapping = FdMapping {
                    parent_fd,
                    child_fd: DEPOT_FD,
                };
                command.args(["--rank", &rank.0.to_string()]);
                command.args(["--replica", &replica.0.to_string()]);
                command.args(["--depot-fd", &DEPOT_FD.to_string()]);
                if let Some(remote) = &self.remote {
                    command.args(remote.flags(WorkerId { replica, rank }));
                }
                command
                    .fd_mappings(vec![mapping])
                    .map_err(CommandError::failed)?;
            }
        }
        let child = command.spawn();
        let mut child = child.map_err(|error| CommandError::Failed(format!("{part}: {error}")))?;
        tracing::info!(pid = child.id(), "{part} started");
        let supervised = &mut self.parts[index];
        supervised.input = child.stdin.take();
        if let Some(lines) = child.stdout.take() {
            tokio::spawn(listen(lines, self.fence_requester.clone()));
        }
        supervised.child = Some(child);
        supervised.restart = None;
        supervised.started = Instant::now();
        Ok(())
    }
}
