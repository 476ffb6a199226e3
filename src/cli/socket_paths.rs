//! Directories of a deployment's processes, one for each, below the socket directory.

use std::io;
use std::path::{Path, PathBuf};

use crate::error::CommandError;
use kvferry_transport::{Address, OtherUsers, TransportError, prepare_for};
use kvferry_types::WorkerId;

/// Creates the socket directory, or checks an existing one. See [`prepare_for`].
pub(super) fn prepare_sockets(root: &Path, users: &OtherUsers) -> Result<(), CommandError> {
    match prepare_for(root, users) {
        Ok(_) => Ok(()),
        Err(error) if names_no_usable_place(&error) => Err(CommandError::Config(error.to_string())),
        Err(error) => Err(CommandError::failed(error)),
    }
}

/// Whether another setting is needed, and not another attempt.
fn names_no_usable_place(error: &TransportError) -> bool {
    match error {
        TransportError::Directory { .. } => true,
        TransportError::Io { source, .. } => source.kind() == io::ErrorKind::NotFound,
        _ => false,
    }
}

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
