//! Why a child ended, for operators. A process that the kernel kills for lack of memory says nothing itself, so the
//! kernel's count of such kills is compared with the last one that was seen.

use std::io;
use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;

use rustix::process::Signal;

use super::part::End;
use crate::cli::restarts::Cause;
use kvferry_memory::{Cgroup, MemoryAvailable, MemoryLimit};
use kvferry_types::ByteSize;

/// The memory cgroup of `up` and its children, and the kills that it had when they were last looked at.
pub(super) struct Deaths {
    group: Option<Cgroup>,
    seen: Option<u64>,
}

impl Deaths {
    pub(super) fn watch() -> Self {
        Self::watch_in(Cgroup::of_this_process("memory"))
    }

    fn watch_in(group: Option<Cgroup>) -> Self {
        let seen = group.as_ref().and_then(Cgroup::oom_kills);
        Self { group, seen }
    }

    /// Explains the end of a child; `fenced` if it was killed by this process.
    pub(super) fn explain(&mut self, waited: io::Result<ExitStatus>, fenced: bool) -> End {
        let status = match waited {
            Ok(status) => status,
            Err(error) => {
                return End {
                    status: None,
                    cause: Cause::Unknown,
                    text: format!("its status cannot be read: {error}"),
                };
            }
        };
        let text = status.to_string();
        let (cause, text) = match status.signal() {
            None => (Cause::Exit, text),
            Some(_) if fenced => (Cause::Fenced, text),
            Some(signal) if signal == Signal::KILL.as_raw() => match self.one_more_kill() {
                Some(why) => (Cause::OutOfMemory, format!("{text}: {why}")),
                None => (Cause::Signal, text),
            },
            Some(_) => (Cause::Signal, text),
        };
        End {
            status: Some(status),
            cause,
            text,
        }
    }

    /// Takes one of the kills that the kernel has counted since the last look, and explains it. Other processes of the
    /// group are counted, too: each child that was killed takes one.
    fn one_more_kill(&mut self) -> Option<String> {
        let group = self.group.as_ref()?;
        let (now, seen) = (group.oom_kills()?, self.seen?);
        if now <= seen {
            return None;
        }
        self.seen = Some(seen + 1);
        let name = group.directory().display();
        let ever = MemoryAvailable::ever();
        let limit = match &ever.limit {
            MemoryLimit::Host => "the host has run out of memory".to_owned(),
            limit => format!("{limit} is limited to {}", ByteSize(ever.bytes)),
        };
        Some(format!(
            "the kernel has ended it for lack of memory ({limit}; cgroup {name}: oom_kill {now}); give g2 less, or the processes more memory"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KILLED: i32 = 9;

    /// A memory cgroup of version 2 in a temporary directory.
    fn group(folder: &std::path::Path) -> Cgroup {
        let mounts = format!("41 31 0:38 / {} rw - cgroup2 cgroup2 rw", folder.display());
        Cgroup::find("memory", "0::/\n", &mounts).expect("a group")
    }

    #[test]
    fn each_kill_that_the_kernel_counts_explains_one_death() {
        let folder = tempfile::tempdir().expect("a directory");
        let kills = |count: u64| {
            let text = format!("oom {count}\noom_kill {count}\n");
            std::fs::write(folder.path().join("memory.events"), text).expect("written");
        };
        kills(5);
        let mut deaths = Deaths::watch_in(Some(group(folder.path())));
        let mut explain = |raw: i32, fenced: bool| {
            let end = deaths.explain(Ok(ExitStatus::from_raw(raw)), fenced);
            (end.cause, end.text)
        };
        let by_hand = "signal: 9 (SIGKILL)".to_owned();
        assert_eq!(explain(KILLED, false), (Cause::Signal, by_hand));
        kills(7);
        // Ends that have another cause take none of the two.
        assert_eq!(explain(KILLED, true).0, Cause::Fenced);
        assert_eq!(explain(1 << 8, false).0, Cause::Exit);
        assert_eq!(explain(11, false).0, Cause::Signal);
        for _ in 0..2 {
            let (cause, text) = explain(KILLED, false);
            assert_eq!(cause, Cause::OutOfMemory, "{text}");
            let name = folder.path().display().to_string();
            for word in ["SIGKILL", "lack of memory", &name, "oom_kill 7", "g2"] {
                assert!(text.contains(word), "{word}: {text}");
            }
        }
        assert_eq!(explain(KILLED, false).0, Cause::Signal);
    }

    #[test]
    fn without_a_count_a_kill_is_a_signal() {
        let folder = tempfile::tempdir().expect("a directory");
        for group in [None, Some(group(folder.path()))] {
            let mut deaths = Deaths::watch_in(group);
            let end = deaths.explain(Ok(ExitStatus::from_raw(KILLED)), false);
            assert_eq!(end.cause, Cause::Signal);
        }
        let end = Deaths::watch_in(None).explain(Err(io::ErrorKind::Other.into()), false);
        assert_eq!((end.cause, end.status), (Cause::Unknown, None));
    }
}
