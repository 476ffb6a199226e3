//! The control group of this process, in version 1 or 2 of the kernel's interface.
//!
//! A host has one of the versions for each controller. A hybrid host mounts version 2 without controllers, and each
//! controller in version 1. In a container, the mounted hierarchy often begins at the container's own group, while
//! `/proc/self/cgroup` names the group from the host's root: the mount's root is removed from that path.

use std::fs;
use std::path::{Path, PathBuf};

/// The group of this process in the hierarchy of one controller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cgroup {
    /// Where the hierarchy is mounted.
    mount: PathBuf,
    /// The group's directory, at the mount or below it.
    leaf: PathBuf,
    pub(super) version: CgroupVersion,
}

/// The version of the interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CgroupVersion {
    One,
    Two,
}

/// A limit of processes and threads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PidsLimit {
    /// The group that sets it.
    pub group: PathBuf,
    /// Processes and threads that the group may have.
    pub max: u64,
    /// Those that it has.
    pub current: u64,
}

impl Cgroup {
    /// The group of this process for a controller, such as `memory`; `None` where none is mounted.
    pub fn of_this_process(controller: &str) -> Option<Self> {
        let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
        let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
        Self::find(controller, &groups, &mounts)
    }

    /// Finds the group in the texts of `/proc/self/cgroup` and `/proc/self/mountinfo`.
    pub fn find(controller: &str, groups: &str, mounts: &str) -> Option<Self> {
        let mounts: Vec<Mount> = mounts.lines().filter_map(Mount::parse).collect();
        let groups = groups.lines().filter_map(|line| {
            let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
            Some((controllers, Path::new(path)))
        });
        let groups: Vec<(&str, &Path)> = groups.collect();
        let names = |list: &str| list.split(',').any(|name| name == controller);
        let one = groups.iter().find(|(controllers, _)| names(controllers));
        let two = groups
            .iter()
            .find(|(controllers, _)| controllers.is_empty());
        let one = one.and_then(|(_, path)| {
            let mounts = mounts
                .iter()
                .filter(|mount| mount.kind == "cgroup" && names(mount.options));
            Some((leaf(mounts, path)?, CgroupVersion::One))
        });
        let two = || {
            let (_, path) = two?;
            let mounts = mounts.iter().filter(|mount| mount.kind == "cgroup2");
            Some((leaf(mounts, path)?, CgroupVersion::Two))
        };
        let ((mount, leaf), version) = one.or_else(two)?;
        Some(Self {
            mount,
            leaf,
            version,
        })
    }

    /// The group and those around it, up to the mount.
    pub(super) fn levels(&self) -> impl Iterator<Item = &Path> {
        let levels = self.leaf.ancestors();
        levels.take_while(|level| level.starts_with(&self.mount))
    }

    /// The group's directory.
    pub fn directory(&self) -> &Path {
        &self.leaf
    }

    /// Processes of the group that the kernel has ended for lack of memory, since the group was made: of the group's own
    /// memory, or of the host's. `None` if the kernel does not count them.
    pub fn oom_kills(&self) -> Option<u64> {
        let name = match self.version {
            CgroupVersion::One => "memory.oom_control",
            CgroupVersion::Two => "memory.events",
        };
        let text = fs::read_to_string(self.leaf.join(name)).ok()?;
        let kills = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
        kills?.trim().parse().ok()
    }

    /// The tightest limit of processes and threads; `None` without one. The files have the same names in both versions.
    pub fn pids(&self) -> Option<PidsLimit> {
        let limits = self.levels().filter_map(|level| {
            let read = |name: &str| fs::read_to_string(level.join(name)).ok();
            Some(PidsLimit {
                max: read("pids.max")?.trim().parse().ok()?,
                current: read("pids.current")?.trim().parse().ok()?,
                group: level.to_owned(),
            })
        });
        limits.min_by_key(|limit| limit.max.saturating_sub(limit.current))
    }
}

/// A mounted hierarchy.
struct Mount<'a> {
    kind: &'a str,
    options: &'a str,
    /// The group at the mount point.
    root: PathBuf,
    point: PathBuf,
}

impl<'a> Mount<'a> {
    /// Parses a line of `/proc/self/mountinfo`:
    /// `35 31 0:32 ROOT POINT rw,relatime [fields] - cgroup SOURCE rw,memory`.
    fn parse(line: &'a str) -> Option<Self> {
        let (place, system) = line.split_once(" - ")?;
        let mut place = place.split(' ').skip(3);
        let mut system = system.split(' ');
        let kind = system.next()?;
        Some(Self {
            root: unescaped(place.next()?),
            point: unescaped(place.next()?),
            kind,
            options: system.nth(1)?,
        })
    }
}

/// A path of `/proc/self/mountinfo`, in which a space is `\040`, for example.
fn unescaped(text: &str) -> PathBuf {
    let mut path = String::new();
    let mut parts = text.split('\\');
    path.extend(parts.next());
    for part in parts {
        let code = part.get(..3);
        match code.and_then(|code| u8::from_str_radix(code, 8).ok()) {
            Some(byte) if byte.is_ascii() => {
                path.push(char::from(byte));
                path.extend(part.get(3..));
            }
            _ => {
                path.push('\\');
                path.push_str(part);
            }
        }
    }
    path.into()
}

/// The mount point and the directory of the group `path`. A group outside of the mounted part, as `/proc` names it from
/// within a namespace, is that of the mount point.
fn leaf<'a>(
    mounts: impl Iterator<Item = &'a Mount<'a>>,
    path: &Path,
) -> Option<(PathBuf, PathBuf)> {
    let mut first = None;
    for mount in mounts {
        let found = path.strip_prefix(&mount.root);
        let below = found.map(|below| mount.point.join(below));
        if let Some(leaf) = below.ok().filter(|leaf| leaf.is_dir()) {
            return Some((mount.point.clone(), leaf));
        }
        first.get_or_insert(&mount.point);
    }
    first.map(|point| (point.clone(), point.clone()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tree of directories with files, and the texts of `/proc`.
    struct Tree(tempfile::TempDir);

    impl Tree {
        fn new(files: &[(&str, &str)]) -> Self {
            let tree = Self(tempfile::tempdir().expect("a directory"));
            for (path, text) in files {
                let path = tree.path(path);
                fs::create_dir_all(path.parent().expect("a parent")).expect("made");
                fs::write(path, text).expect("written");
            }
            tree
        }

        fn path(&self, name: &str) -> PathBuf {
            self.0.path().join(name)
        }

        fn find(&self, controller: &str, groups: &str, mounts: &[&str]) -> Option<Cgroup> {
            let root = self.0.path().to_str().expect("UTF-8");
            let mounts: Vec<String> = mounts.iter().map(|line| line.replace('@', root)).collect();
            Cgroup::find(controller, groups, &mounts.join("\n"))
        }
    }

    #[test]
    fn the_group_is_found_in_version_1_2_and_on_hybrid_hosts() {
        let files = [
            ("memory/pod/engine/memory.limit_in_bytes", "5\n"),
            ("pod/engine/memory.max", "7\n"),
        ];
        let tree = Tree::new(&files);
        let one = "35 31 0:32 / @/memory rw,relatime shared:9 - cgroup cgroup rw,memory";
        let two = "41 31 0:38 / @ rw,relatime - cgroup2 cgroup2 rw";
        let hybrid = "4:cpu,cpuacct:/\n3:memory:/pod/engine\n0::/other\n";
        let found = |groups, mounts: &[&str]| {
            let found = tree.find("memory", groups, mounts)?;
            Some((found.version, found.leaf))
        };
        let (first, second) = (tree.path("memory/pod/engine"), tree.path("pod/engine"));
        assert_eq!(
            found(hybrid, &[two, one]),
            Some((CgroupVersion::One, first.clone()))
        );
        let only_one = "3:memory:/pod/engine\n";
        assert_eq!(found(only_one, &[one]), Some((CgroupVersion::One, first)));
        let only_two = "0::/pod/engine\n";
        assert_eq!(found(only_two, &[two]), Some((CgroupVersion::Two, second)));
        assert_eq!(found(only_two, &[one]), None);
        assert_eq!(tree.find("pids", "3:memory:/pod\n", &[one]), None);
    }

    #[test]
    fn a_container_sees_its_own_group_at_the_mount_point() {
        let tree = Tree::new(&[
            ("m/memory.limit_in_bytes", "5\n"),
            ("n n/x/pids.max", "5\n"),
        ]);
        let groups = "4:memory:/docker/4711\n3:pids:/docker/4711/x\n";
        let mount = "35 31 0:32 /docker/4711 @/m ro - cgroup cgroup ro,memory";
        let found = tree.find("memory", groups, &[mount]).expect("a group");
        assert_eq!(found.leaf, tree.path("m"));
        let mount = r"35 31 0:32 /docker/4711 @/n\040n ro - cgroup cgroup ro,pids";
        let found = tree.find("pids", groups, &[mount]).expect("a group");
        assert_eq!(found.leaf, tree.path("n n/x"));
        // The mount shows a part of the hierarchy that does not contain the named path.
        let mount = "35 31 0:32 /../.. @/m ro - cgroup cgroup ro,memory";
        let found = tree.find("memory", groups, &[mount]).expect("a group");
        assert_eq!(found.leaf, tree.path("m"));
    }

    #[test]
    fn kills_for_lack_of_memory_are_read_in_both_versions() {
        let files = [
            (
                "one/memory.oom_control",
                "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
            ),
            (
                "two/memory.events",
                "low 0\nmax 9\noom 2\noom_kill 4\noom_group_kill 1\n",
            ),
            (
                "old/memory.oom_control",
                "oom_kill_disable 0\nunder_oom 0\n",
            ),
        ];
        let tree = Tree::new(&files);
        let kills = |version, name| {
            let leaf = tree.path(name);
            let mount = leaf.clone();
            Cgroup {
                mount,
                leaf,
                version,
            }
            .oom_kills()
        };
        assert_eq!(kills(CgroupVersion::One, "one"), Some(3));
        assert_eq!(kills(CgroupVersion::Two, "two"), Some(4));
        assert_eq!(kills(CgroupVersion::One, "old"), None);
        assert_eq!(kills(CgroupVersion::Two, "one"), None);
    }

    #[test]
    fn the_limit_of_processes_with_the_least_room_counts() {
        let files = [
            ("pids.current", "50\n"),
            ("pod/pids.max", "100\n"),
            ("pod/pids.current", "40\n"),
            ("pod/engine/pids.max", "max\n"),
            ("pod/engine/pids.current", "40\n"),
        ];
        let tree = Tree::new(&files);
        let mount = "41 31 0:38 / @ rw - cgroup2 cgroup2 rw";
        let group = tree.find("pids", "0::/pod/engine\n", &[mount]);
        let expected = PidsLimit {
            group: tree.path("pod"),
            max: 100,
            current: 40,
        };
        assert_eq!(group.expect("a group").pids(), Some(expected));
    }
}
