//! Temporary directories for sockets.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use tempfile::TempDir;

use crate::config::SOCKET_DIR_BYTES_MAX;
use crate::error::CommandError;

/// Letters that are added to the start of a directory's name.
const RANDOM_LETTERS: usize = 6;
/// Where the directory is made if the temporary directory has a path that is too long for sockets.
const SHORT: &str = "/tmp";

/// Makes a directory whose name begins with `prefix` below the temporary directory, or below [`SHORT`].
pub(super) fn socket_dir(prefix: &str) -> Result<TempDir, CommandError> {
    let named = std::env::temp_dir();
    let bytes = named.as_os_str().len();
    let fits = bytes + 1 + prefix.len() + RANDOM_LETTERS <= SOCKET_DIR_BYTES_MAX;
    let parent = if fits {
        named.as_path()
    } else {
        Path::new(SHORT)
    };
    let made = tempfile::Builder::new()
        .prefix(prefix)
        .rand_bytes(RANDOM_LETTERS)
        .permissions(Permissions::from_mode(0o700))
        .tempdir_in(parent);
    made.map_err(|error| {
        let parent = parent.display();
        let why = match (std::env::var_os("TMPDIR").is_some(), fits) {
            (true, true) => format!("TMPDIR is {parent}, which"),
            (true, false) => {
                format!("TMPDIR has {bytes} bytes, too many for sockets, and {parent} in its place")
            }
            (false, _) => format!("the temporary directory {parent}"),
        };
        CommandError::Failed(format!(
            "{why} cannot be used ({error}): set TMPDIR to a directory in which this user can make one, such as \
             TMPDIR=/dev/shm"
        ))
    })
}
