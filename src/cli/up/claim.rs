//! What `up` claims before it starts anything, and what it warns of.

use std::os::unix::fs::PermissionsExt as _;

use crate::cli::socket_paths::SocketPaths;
use crate::config::Config;
use crate::error::CommandError;
use kvferry_transport::{DirectoryLock, TransportError, prepare_for};

/// Lock file, held while an `up` uses the socket directory.
const LOCK_NAME: &str = "up.lock";

/// Creates the socket directory and locks it. Refuses a directory in which another `up` runs, because its children
/// would never become ready.
pub(super) fn claim(config: &Config) -> Result<DirectoryLock, CommandError> {
    let socket_paths = SocketPaths::new(&config.socket_dir);
    let root = socket_paths.root();
    prepare_for(root, &config.users.others()).map_err(CommandError::failed)?;
    DirectoryLock::take(root, LOCK_NAME).map_err(|error| match error {
        TransportError::InUse { pid, .. } => CommandError::Failed(format!(
            "{} is in use by {}: end it, or name another --socket-dir",
            root.display(),
            pid.map_or_else(
                || "another process".to_owned(),
                |pid| format!("process {pid}")
            )
        )),
        error => CommandError::failed(error),
    })
}

/// Says which folders keep the users of the setting from the sockets. An access list may let them pass all the same.
pub(super) fn warn_of_closed_folders(config: &Config) {
    if config.users.others().is_empty() {
        return;
    }
    for folder in config.socket_dir.ancestors().skip(1) {
        let mode = std::fs::metadata(folder).map(|found| found.permissions().mode());
        if mode.is_ok_and(|mode| mode & 0o001 == 0) {
            let folder = folder.display();
            tracing::warn!(%folder, users = %config.users, "others cannot pass this folder to the sockets: run chmod o+x");
        }
    }
}

/// A tier that is smaller than the one above it holds nothing that the other one does not hold.
pub(super) fn warn_of_sizes(config: &Config) {
    let (g2, g3) = (config.host_memory(), config.g3);
    if g3.0 > 0 && g3.0 < g2.0 {
        tracing::warn!(
            "g3 is {g3}, less than the {g2} of host memory: pages leave the disk first, give it more"
        );
    }
}
