//! Bytes of memory that a depot can still take.

use std::fmt;
use std::fs;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};

use super::cgroup::{Cgroup, CgroupVersion};

/// The files of a memory cgroup: its limit, its use, and the name of the page cache that can be dropped in
/// `memory.stat`.
type Files = [&'static str; 3];

const fn files(version: CgroupVersion) -> Files {
    match version {
        CgroupVersion::One => [
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file ",
        ],
        CgroupVersion::Two => ["memory.max", "memory.current", "inactive_file "],
    }
}

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
        let group = Cgroup::of_this_process("memory");
        let group = group.and_then(|group| tightest(&group, in_use));
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

/// The tightest limit of a group and those around it.
fn tightest(group: &Cgroup, in_use: Use) -> Option<MemoryAvailable> {
    let files = files(group.version);
    let limits = group.levels().filter_map(|level| {
        Some(MemoryAvailable {
            bytes: level_bytes(level, files, in_use)?,
            limit: MemoryLimit::Cgroup(level.to_owned()),
        })
    });
    limits.min_by_key(|available| available.bytes)
}

/// Bytes that one cgroup may still take: its limit minus its use, where page cache that can be dropped does not count
/// as use. Version 1 has a number near 2^63 in place of no limit.
fn level_bytes(level: &Path, [limit, usage, cache]: Files, in_use: Use) -> Option<u64> {
    let read = |name: &str| fs::read_to_string(level.join(name)).ok();
    let max: u64 = read(limit)?.trim().parse().ok()?;
    if in_use == Use::Ignored {
        return Some(max);
    }
    let current: u64 = read(usage)?.trim().parse().ok()?;
    let stat = read("memory.stat").unwrap_or_default();
    let cache = stat.lines().find_map(|line| line.strip_prefix(cache));
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
    fn the_tightest_limit_of_all_parent_groups_applies_in_both_versions() {
        let stat = "inactive_file 30\ntotal_inactive_file 100\n";
        let one = ["memory.limit_in_bytes", "memory.usage_in_bytes", stat];
        let stat = "anon 5\ninactive_file 100\n";
        let two = ["memory.max", "memory.current", stat];
        for (kind, unlimited, [max, current, stat]) in [
            ("cgroup - memory", "9223372036854771712\n", one),
            ("cgroup2 - rw", "max\n", two),
        ] {
            let root = tempfile::tempdir().expect("a directory");
            let (root, options) = (root.path(), kind.replace(" - ", " cgroup "));
            let leaf = root.join("pod/engine");
            fs::create_dir_all(&leaf).expect("made");
            let write = |dir: &Path, name: &str, text: &str| {
                fs::write(dir.join(name), text).expect("written");
            };
            write(&leaf, max, unlimited);
            write(&leaf, current, "10\n");
            let pod = root.join("pod");
            write(&pod, max, "1000\n");
            write(&pod, current, "700\n");
            write(&pod, "memory.stat", stat);
            let groups = match kind.starts_with("cgroup2") {
                true => "0::/pod/engine\n",
                false => "4:memory:/pod/engine\n0::/\n",
            };
            let mounts = format!("35 31 0:32 / {} rw - {options}", root.display());
            let group = Cgroup::find("memory", groups, &mounts).expect("a group");
            for (in_use, bytes) in [(Use::Counts, 400), (Use::Ignored, 1000)] {
                let limit = MemoryLimit::Cgroup(pod.clone());
                let expected = Some(MemoryAvailable { bytes, limit });
                assert_eq!(tightest(&group, in_use), expected, "{kind}");
            }
        }
    }
}
