//! Bytes of memory that a depot can still take.

use std::fmt;
use std::fs;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};

/// Mount point of cgroup v2.
const CGROUP_ROOT: &str = "/sys/fs/cgroup";

/// The limit of the memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MemoryLimit {
    /// The machine's memory.
    Host,
    /// The limit of a cgroup: the directory that sets it.
    Cgroup(PathBuf),
    /// The size of the file system that holds the memory's file.
    FileSystem,
}

impl fmt::Display for MemoryLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("the host's memory"),
            Self::Cgroup(path) => write!(f, "the memory cgroup {}", path.display()),
            Self::FileSystem => f.write_str("its file system (such as /dev/shm)"),
        }
    }
}

/// Available bytes, and the limit that determines them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryAvailable {
    /// Bytes that can still be allocated.
    pub bytes: u64,
    /// The limit that leaves the fewest bytes.
    pub limit: MemoryLimit,
}

impl MemoryAvailable {
    /// The tightest limit for this process; a limit that cannot be read counts as none.
    pub fn now() -> Self {
        Self::least(None, Use::Counts)
    }

    /// The tightest limit if nothing were in use: more than this is never available, however long the caller waits.
    pub fn ever() -> Self {
        Self::least(None, Use::Ignored)
    }

    /// The tightest limit for the file of `fd`, whose file system may have a limit of its own.
    pub(super) fn for_file(fd: BorrowedFd<'_>) -> Self {
        let system = file_system_bytes(fd).map(|bytes| Self {
            bytes,
            limit: MemoryLimit::FileSystem,
        });
        Self::least(system, Use::Counts)
    }

    fn least(system: Option<Self>, in_use: Use) -> Self {
        let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let host = Self {
            bytes: host_bytes(&meminfo, in_use).unwrap_or(u64::MAX),
            limit: MemoryLimit::Host,
        };
        let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let group = group_path(&groups);
        let group = group.and_then(|path| cgroup(Path::new(CGROUP_ROOT), path, in_use));
        let others = [system, group].into_iter().flatten();
        others.fold(host, |least, other| {
            if other.bytes < least.bytes {
                other
            } else {
                least
            }
        })
    }
}

/// Whether memory that is in use counts against the limit.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Use {
    Counts,
    Ignored,
}

/// `MemAvailable` or `MemTotal` of `/proc/meminfo`, which is in KiB.
fn host_bytes(meminfo: &str, in_use: Use) -> Option<u64> {
    let name = match in_use {
        Use::Counts => "MemAvailable:",
        Use::Ignored => "MemTotal:",
    };
    let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// Free bytes of the file's own file system; `None` where it has no size, as for a memfd.
fn file_system_bytes(fd: BorrowedFd<'_>) -> Option<u64> {
    let system = rustix::fs::fstatvfs(fd)
        .ok()
        .filter(|system| system.f_blocks > 0)?;
    system.f_bavail.checked_mul(system.f_frsize)
}

/// The path of this process's cgroup v2, the line `0::/path` of `/proc/self/cgroup`.
fn group_path(groups: &str) -> Option<&str> {
    groups.lines().find_map(|line| line.strip_prefix("0::/"))
}

/// The tightest limit between a cgroup and the root.
fn cgroup(root: &Path, group: &str, in_use: Use) -> Option<MemoryAvailable> {
    let leaf = root.join(group);
    let levels = leaf.ancestors().take_while(|level| level.starts_with(root));
    levels
        .filter_map(|level| {
            Some(MemoryAvailable {
                bytes: level_bytes(level, in_use)?,
                limit: MemoryLimit::Cgroup(level.to_owned()),
            })
        })
        .min_by_key(|available| available.bytes)
}

/// Bytes that one cgroup may still take: its limit minus its use, where page cache that can be dropped does not count
/// as use.
fn level_bytes(level: &Path, in_use: Use) -> Option<u64> {
    let read = |name: &str| fs::read_to_string(level.join(name)).ok();
    let max: u64 = read("memory.max")?.trim().parse().ok()?;
    if in_use == Use::Ignored {
        return Some(max);
    }
    let current: u64 = read("memory.current")?.trim().parse().ok()?;
    let stat = read("memory.stat").unwrap_or_default();
    let cache = stat
        .lines()
        .find_map(|line| line.strip_prefix("inactive_file "));
    let cache: u64 = cache
        .and_then(|bytes| bytes.trim().parse().ok())
        .unwrap_or(0);
    Some(max.saturating_sub(current.saturating_sub(cache)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_available_memory_is_read_in_kib() {
        let text = "MemTotal:       100 kB\nMemAvailable:    64 kB\n";
        assert_eq!(host_bytes(text, Use::Counts), Some(65536));
        assert_eq!(host_bytes(text, Use::Ignored), Some(102_400));
        assert_eq!(host_bytes("MemTotal: 100 kB\n", Use::Counts), None);
    }

    #[test]
    fn the_tightest_limit_of_all_parent_groups_applies() {
        let root = tempfile::tempdir().expect("a directory");
        let leaf = root.path().join("pod/engine");
        fs::create_dir_all(&leaf).expect("made");
        let write = |dir: &Path, name: &str, text: &str| {
            fs::write(dir.join(name), text).expect("written");
        };
        write(&leaf, "memory.max", "max\n");
        write(&leaf, "memory.current", "10\n");
        let pod = root.path().join("pod");
        write(&pod, "memory.max", "1000\n");
        write(&pod, "memory.current", "700\n");
        write(&pod, "memory.stat", "anon 5\ninactive_file 100\n");
        for (in_use, bytes) in [(Use::Counts, 400), (Use::Ignored, 1000)] {
            let found = cgroup(root.path(), "pod/engine", in_use);
            let limit = MemoryLimit::Cgroup(pod.clone());
            assert_eq!(found, Some(MemoryAvailable { bytes, limit }));
        }
        assert_eq!(
            group_path("1:name=x:/y\n0::/pod/engine\n"),
            Some("pod/engine")
        );
    }
}
