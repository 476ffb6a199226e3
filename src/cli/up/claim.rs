//! What `up` claims before it starts anything, and what it warns of.

use std::os::unix::fs::PermissionsExt as _;

use super::system::System;
use crate::cli::socket_paths::{SocketPaths, prepare_sockets};
use crate::config::Config;
use crate::error::CommandError;
use kvferry_transport::{DirectoryLock, TransportError, UsedBy};

/// Lock file, held while an `up` uses a directory.
const LOCK_NAME: &str = "up.lock";

/// Creates the socket directory and locks it. Refuses a directory in which another `up` runs, because its children
/// would never become ready.
pub(super) fn claim_sockets(
    system: &impl System,
    config: &Config,
) -> Result<DirectoryLock, CommandError> {
    let socket_paths = SocketPaths::new(&config.socket_dir);
    let root = socket_paths.root();
    prepare_sockets(root, &config.users.others())?;
    let in_use = |by: UsedBy| {
        CommandError::Failed(format!(
            "{} is in use by {by}: end it, or name another --socket-dir",
            root.display()
        ))
    };
    let locked = system.lock(root, LOCK_NAME);
    locked.map_err(|error| refused(error, in_use))
}

/// Locks the disk tier, whose directories exist. A second `up` is refused here, and not by its leader and its workers after
/// they have started.
pub(super) fn claim_disks(
    system: &impl System,
    config: &Config,
) -> Result<Option<DirectoryLock>, CommandError> {
    let Some(named) = config.g3_dir.0.first() else {
        return Ok(None);
    };
    // A link in the place of the directory is followed, as everywhere below g3_dir.
    let first = &std::fs::canonicalize(named)
        .map_err(|error| CommandError::Failed(format!("g3_dir {}: {error}", named.display())))?;
    let in_use = |by: UsedBy| {
        CommandError::Failed(format!(
            "g3_dir {} is in use by {by}: end it, or name another g3_dir",
            named.display()
        ))
    };
    match system.lock(first, LOCK_NAME) {
        Err(TransportError::Io { source, .. })
            if source.kind() == std::io::ErrorKind::ReadOnlyFilesystem =>
        {
            Err(CommandError::Config(format!(
                "g3_dir {} is mounted read-only: mount it with writes, or start with --g3 0",
                named.display()
            )))
        }
        locked => locked.map(Some).map_err(|error| refused(error, in_use)),
    }
}

fn refused(error: TransportError, in_use: impl FnOnce(UsedBy) -> CommandError) -> CommandError {
    match error {
        TransportError::InUse { by, .. } => in_use(by),
        error => CommandError::failed(error),
    }
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
