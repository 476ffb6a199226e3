//! Limits of the system, compared with what the processes need before any of them starts. Without that, a process ends
//! later, by a signal or with an error that names neither the limit nor its value.

use std::collections::BTreeSet;
use std::io;

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit, getuid, setrlimit};

use crate::config::Config;
use crate::error::CommandError;
use kvferry_memory::{Cgroup, PidsLimit};
use kvferry_tiers::disk::{segment_bytes, segment_files};
use kvferry_types::{ByteSize, Shard, WorkerId};

/// What the processes of one `up` need at least.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Needs {
    /// Bytes of a shard's host memory, which is a file.
    memory_file: u64,
    /// Bytes of a file of the disk tier; 0 without one.
    segment: u64,
    /// Open files of the process that has most of them.
    files: u64,
    /// Processes and threads together.
    threads: u64,
}

/// What the system allows; `None` without a limit.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Allowed {
    file_bytes: Option<u64>,
    files: Option<u64>,
    threads: Option<u64>,
    pids: Option<PidsLimit>,
}

/// Refuses limits below what the processes of `up` need, and raises those that a process may raise itself.
pub(super) fn check_limits(
    config: &Config,
    workers: &[WorkerId],
    shards: &BTreeSet<Shard>,
    no_tiers: bool,
) -> Result<(), CommandError> {
    for resource in [Resource::Fsize, Resource::Nofile] {
        raise(resource);
    }
    let needs = Needs::of(config, workers.len(), shards.len(), no_tiers);
    match refusal(config, needs, &Allowed::now()) {
        Some(why) => Err(CommandError::Config(why)),
        None => Ok(()),
    }
}

/// Raises the limit of a resource as far as this process may.
fn raise(resource: Resource) {
    let mut limit = getrlimit(resource);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(resource, limit) {
        tracing::warn!(%error, ?resource, "a limit of this process cannot be raised");
    }
}

impl Needs {
    fn of(config: &Config, workers: usize, shards: usize, no_tiers: bool) -> Self {
        let (workers, shards) = (workers as u64, shards as u64);
        let all = u64::from(config.kv_shards.shards());
        let disks = config.g3_dir.0.len() as u64;
        let disk = config.g3.0 > 0 && !no_tiers;
        let share = if disk {
            config.g3.0 / all / disks.max(1)
        } else {
            0
        };
        // Counted while a replay runs, and rounded up a little.
        let files_of_up = 16 + shards + 4 * (workers + 2);
        let files_of_leader = 24 + 4 * workers;
        let files_of_worker = 40
            + if disk {
                disks * segment_files(share)
            } else {
                0
            };
        // Rounded down: the limit of a user counts what else the user runs, and only what is certain may be refused.
        let threads_of_worker = 6 + u64::from(config.copy_threads) + if disk { 2 } else { 0 };
        Self {
            memory_file: match no_tiers {
                true => 0,
                false => config.host_memory().0 / all,
            },
            segment: segment_bytes(share),
            files: files_of_up.max(files_of_leader).max(files_of_worker),
            threads: 2 + 3 + workers * (1 + threads_of_worker),
        }
    }
}

impl Allowed {
    fn now() -> Self {
        // The limit of a user's processes does not hold for root.
        let threads = match getuid().is_root() {
            true => None,
            false => getrlimit(Resource::Nproc).current,
        };
        Self {
            file_bytes: getrlimit(Resource::Fsize).current,
            files: getrlimit(Resource::Nofile).current,
            threads,
            pids: Cgroup::of_this_process("pids").and_then(|group| group.pids()),
        }
    }
}

/// The first limit that is too low, with its remedy.
fn refusal(config: &Config, needs: Needs, allowed: &Allowed) -> Option<String> {
    if let Some(most) = allowed.file_bytes {
        let largest = |setting: &str, size: ByteSize, file: u64| {
            format!(
                "{setting} is {size}, in files of {}, and a file of this process may have {}: raise that (ulimit -f unlimited, LimitFSIZE=infinity of systemd), or give less",
                ByteSize(file),
                ByteSize(most)
            )
        };
        if needs.memory_file > most {
            return Some(largest("g2", config.g2, needs.memory_file));
        }
        if needs.segment > most {
            return Some(largest("g3", config.g3, needs.segment));
        }
    }
    if let Some(most) = allowed.files.filter(|most| needs.files > *most) {
        return Some(format!(
            "a process may have {most} open files, and one of {} ranks, {} replicas and g3 {} needs {}: raise that (ulimit -Hn {}, LimitNOFILE= of systemd, --ulimit nofile= of a container)",
            config.ranks,
            config.replicas,
            config.g3,
            needs.files,
            needs.files.next_power_of_two()
        ));
    }
    let threads = |limit: &str, remedy: &str| {
        format!(
            "{limit}, and {} ranks and {} replicas with copy_threads {} need {} processes and threads: raise that ({remedy}), or give fewer copy_threads",
            config.ranks, config.replicas, config.copy_threads, needs.threads
        )
    };
    if let Some(most) = allowed.threads.filter(|most| needs.threads > *most) {
        let limit = format!("a user may have {most} processes and threads");
        return Some(threads(
            &limit,
            "ulimit -u unlimited, LimitNPROC= of systemd",
        ));
    }
    let pids = allowed.pids.as_ref();
    let pids = pids.filter(|limit| needs.threads > limit.max.saturating_sub(limit.current));
    pids.map(|limit| {
        let limit = format!(
            "the pids cgroup {} has {} of at most {} processes and threads",
            limit.group.display(),
            limit.current,
            limit.max
        );
        threads(&limit, "TasksMax= of systemd, --pids-limit of a container")
    })
}

/// The limit that an error of a system call may come from, after a colon; empty if there is none.
pub(super) fn hint(error: &io::Error) -> String {
    let text = match Errno::from_io_error(error) {
        Some(Errno::AGAIN) => of_threads(&Allowed::now()),
        Some(Errno::MFILE) => getrlimit(Resource::Nofile)
            .current
            .map(|most| format!("a process may have {most} open files (ulimit -n)")),
        Some(Errno::NFILE) => {
            Some("the host has no more open files (sysctl fs.file-max)".to_owned())
        }
        Some(Errno::NOMEM) => Some("the host or the memory cgroup has no more memory".to_owned()),
        Some(Errno::NOENT) => Some(format!(
            "is /proc mounted? {} is run",
            crate::cli::program::PROGRAM
        )),
        _ => None,
    };
    text.map_or_else(String::new, |text| format!(": {text}"))
}

fn of_threads(allowed: &Allowed) -> Option<String> {
    let user = allowed
        .threads
        .map(|most| format!("a user may have {most} processes and threads (ulimit -u)"));
    let group = allowed.pids.as_ref().map(|limit| {
        let (group, current, max) = (limit.group.display(), limit.current, limit.max);
        format!("the pids cgroup {group} has {current} of at most {max}")
    });
    let both: Vec<String> = user.into_iter().chain(group).collect();
    (!both.is_empty()).then(|| both.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Flags;
    use std::path::PathBuf;

    fn config(g2: &str, g3: &str) -> Config {
        let flags = Flags {
            ranks: Some(2),
            g2: Some(g2.parse().expect("a size")),
            g3: Some(g3.parse().expect("a size")),
            g3_dir: (g3 != "0").then(|| "/nowhere/disk".parse().expect("a path")),
            socket_dir: Some(PathBuf::from("/nowhere/sockets")),
            ..Flags::default()
        };
        Config::load_with(None, [], &flags).expect("a configuration")
    }

    /// Why these settings are refused under these limits.
    fn refused(g2: &str, g3: &str, allowed: Allowed) -> Option<String> {
        let config = config(g2, g3);
        let needs = Needs::of(&config, 2, 2, false);
        refusal(&config, needs, &allowed)
    }

    #[test]
    fn each_limit_that_is_too_low_is_named_with_its_value_and_what_is_needed() {
        let bytes = |bytes| Allowed {
            file_bytes: Some(bytes),
            ..Allowed::default()
        };
        let files = |files| Allowed {
            files: Some(files),
            ..Allowed::default()
        };
        let threads = |threads| Allowed {
            threads: Some(threads),
            ..Allowed::default()
        };
        let pids = |max| Allowed {
            pids: Some(PidsLimit {
                group: PathBuf::from("/sys/fs/cgroup/x"),
                max,
                current: 10,
            }),
            ..Allowed::default()
        };
        for (g3, allowed, words) in [
            (
                "0",
                bytes((64 << 20) - 1),
                &["g2 is 128 MiB", "files of 64 MiB", "ulimit -f"][..],
            ),
            (
                "64GiB",
                bytes(65 << 20),
                &["g3 is 64 GiB", "files of 512 MiB", "have 65 MiB"],
            ),
            (
                "0",
                files(20),
                &["20 open files", "needs 40", "ulimit -Hn 64", "LimitNOFILE"],
            ),
            (
                "64GiB",
                files(100),
                &["100 open files", "g3 64 GiB needs 104"],
            ),
            (
                "0",
                threads(10),
                &["user may have 10", "need 27", "ulimit -u"],
            ),
            (
                "0",
                pids(36),
                &[
                    "/sys/fs/cgroup/x has 10 of at most 36",
                    "need 27",
                    "pids-limit",
                ],
            ),
        ] {
            let text = refused("128MiB", g3, allowed).expect("too low");
            for word in words {
                assert!(text.contains(word), "{word}: {text}");
            }
        }
        for allowed in [
            bytes(64 << 20),
            files(40),
            threads(27),
            pids(37),
            Allowed::default(),
        ] {
            assert_eq!(refused("128MiB", "0", allowed), None);
        }
    }

    #[test]
    fn an_error_of_a_call_names_the_limit_that_it_may_come_from() {
        let hint = |errno: Errno| hint(&errno.into());
        assert!(hint(Errno::MFILE).contains("ulimit -n"));
        assert!(hint(Errno::NFILE).contains("file-max"));
        assert_eq!(hint(Errno::ACCESS), "");
        let allowed = Allowed {
            threads: Some(24),
            pids: Some(PidsLimit {
                group: PathBuf::from("/x"),
                max: 30,
                current: 29,
            }),
            ..Allowed::default()
        };
        let text = of_threads(&allowed).expect("two limits");
        assert!(
            text.contains("may have 24") && text.contains("/x has 29 of at most 30"),
            "{text}"
        );
    }
}
