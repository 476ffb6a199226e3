//! Reads files that decide about access, and files with secrets: nobody but their owner may change them.

use std::fs::OpenOptions;
use std::io::{self, Read as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;

use rustix::fs::OFlags;

use super::own_uid;

/// Who may read a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Readers {
    /// Every user: the file has no secret.
    All,
    /// Its owner, and of a file of root a group that this process is in: so Kubernetes gives the files of a Secret to the
    /// group of a pod.
    OwnGroups,
}

/// Why a file is not used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileRefused {
    /// The defect found.
    pub problem: String,
    /// How to fix the defect; `None` if another file has to be named.
    pub remedy: Option<String>,
}

impl FileRefused {
    fn new(problem: impl Into<String>, remedy: impl Into<Option<String>>) -> Self {
        Self {
            problem: problem.into(),
            remedy: remedy.into(),
        }
    }
}

/// Reads a file that belongs to this user or to root, that nobody else can write, and that nobody but `readers` can read.
///
/// Follows links, because Kubernetes exchanges all files of a volume at once by a link. The file that was opened is checked.
///
/// # Errors
/// [`FileRefused`], also for more than `bytes_max` bytes.
pub fn read_trusted(path: &Path, readers: Readers, bytes_max: u64) -> Result<Vec<u8>, FileRefused> {
    let unreadable = |error: io::Error| {
        let remedy = (error.kind() == io::ErrorKind::PermissionDenied).then(|| {
            format!(
                "let uid {} read it, in a pod by the fsGroup of its securityContext",
                own_uid()
            )
        });
        FileRefused::new(format!("cannot be read ({error})"), remedy)
    };
    let mut file = OpenOptions::new()
        .read(true)
        // A pipe would otherwise wait for a writer.
        .custom_flags(OFlags::NONBLOCK.bits().cast_signed())
        .open(path)
        .map_err(unreadable)?;
    let found = file.metadata().map_err(unreadable)?;
    if !found.is_file() {
        return Err(FileRefused::new("is no regular file", None));
    }
    if found.uid() != own_uid() && found.uid() != 0 {
        return Err(FileRefused::new(
            format!("belongs to uid {}", found.uid()),
            format!(
                "give it to root, or to uid {}, as which kvferry runs",
                own_uid()
            ),
        ));
    }
    let forbidden = match readers {
        Readers::All => 0o022,
        // The files of a volume belong to root. A user's own file in a group may be open to other members of that group.
        Readers::OwnGroups if found.uid() == 0 && is_own_group(found.gid()) => 0o037,
        Readers::OwnGroups => 0o077,
    };
    let mode = found.mode() & 0o777;
    if mode & forbidden != 0 {
        let mut remedy = format!("run chmod {:03o} {}", mode & !forbidden, path.display());
        if readers == Readers::OwnGroups {
            remedy += ", or give the volume of a pod defaultMode: 0400 and the pod an fsGroup";
        }
        let gid = found.gid();
        let problem = format!("has mode {mode:04o} and gid {gid}, so that others can use it");
        return Err(FileRefused::new(problem, remedy));
    }
    let mut bytes = Vec::new();
    let mut limited = (&mut file).take(bytes_max + 1);
    limited.read_to_end(&mut bytes).map_err(unreadable)?;
    match bytes.len() as u64 > bytes_max {
        true => Err(FileRefused::new(
            format!("has more than {bytes_max} bytes"),
            "give fewer".to_owned(),
        )),
        false => Ok(bytes),
    }
}

/// Whether this process is in a group.
fn is_own_group(gid: u32) -> bool {
    rustix::process::getegid().as_raw() == gid
        || rustix::process::getgroups()
            .is_ok_and(|groups| groups.iter().any(|group| group.as_raw() == gid))
}
