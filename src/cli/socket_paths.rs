//! Directories of a deployment's processes, one for each, below the socket directory.

use std::path::{Path, PathBuf};

use kvferry_transport::Address;
use kvferry_types::WorkerId;

/// The socket directory.
#[derive(Debug, Clone)]
pub(super) struct SocketPaths(PathBuf);

impl SocketPaths {
    pub(super) fn new(socket_dir: &Path) -> Self {
        Self(socket_dir.to_owned())
    }

    pub(super) fn root(&self) -> &Path {
        &self.0
    }

    pub(super) fn leader(&self) -> PathBuf {
        self.0.join("leader")
    }

    pub(super) fn leader_address(&self) -> Address {
        Address::Directory(self.leader())
    }

    /// The file with the restarts of processes.
    pub(super) fn restarts(&self) -> PathBuf {
        self.0.join("restarts")
    }

    pub(super) fn worker(&self, worker: WorkerId) -> PathBuf {
        let WorkerId { replica, rank } = worker;
        self.0.join(format!("worker-{}-{}", replica.0, rank.0))
    }
}
