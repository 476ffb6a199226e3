//! Locks a depot into memory (`mlock`), within the limit of the process.

use std::fs;
use std::io;

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use super::depot::Depot;

/// Bit of `CAP_IPC_LOCK` in a set of capabilities, `linux/capability.h`: a process that has it has no limit.
const CAP_IPC_LOCK: u32 = 14;

/// The number of bytes that a process may lock; see [`LockLimit::now`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LockLimit(Option<u64>);

/// Why a depot is not locked.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// The depot is larger than the limit of the process.
    #[error(
        "g2_lock is true, and {bytes} bytes are to be locked, but a process may lock {limit_bytes}: raise that (`ulimit -l`, \
         LimitMEMLOCK= of systemd, --ulimit memlock=-1 of a container), or set g2_lock to false"
    )]
    Limit {
        /// Bytes of the depot.
        bytes: u64,
        /// `RLIMIT_MEMLOCK` of the process.
        limit_bytes: u64,
    },
    /// The system call failed for another reason.
    #[error("cannot lock {bytes} bytes of host memory: {source}; or set g2_lock = false")]
    Io {
        /// Bytes of the depot.
        bytes: u64,
        /// The error of the system call.
        source: io::Error,
    },
}

impl LockError {
    /// Attributes an error of the system call to the limit if that is exceeded: in a user namespace of a container the
    /// capability may have no effect.
    fn of(bytes: u64, source: io::Error) -> Self {
        let limit = getrlimit(Resource::Memlock).current;
        let exceeded = limit.filter(|limit| bytes > *limit);
        let reported = [Errno::NOMEM, Errno::PERM, Errno::AGAIN].map(|errno| errno.raw_os_error());
        match exceeded {
            Some(limit_bytes)
                if source
                    .raw_os_error()
                    .is_some_and(|code| reported.contains(&code)) =>
            {
                Self::Limit { bytes, limit_bytes }
            }
            _ => Self::Io { bytes, source },
        }
    }
}

impl LockLimit {
    /// The limit of this process and of its children: `RLIMIT_MEMLOCK`, or none with `CAP_IPC_LOCK`.
    pub fn now() -> Self {
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        Self::of(&status, getrlimit(Resource::Memlock).current)
    }

    fn of(status: &str, limit: Option<u64>) -> Self {
        let effective = status
            .lines()
            .find_map(|line| line.strip_prefix("CapEff:"))
            .and_then(|set| u64::from_str_radix(set.trim(), 16).ok())
            .unwrap_or(0);
        Self(limit.filter(|_| effective & (1 << CAP_IPC_LOCK) == 0))
    }

    /// Refuses more bytes than the limit.
    pub fn check(self, bytes: u64) -> Result<(), LockError> {
        match self.0 {
            Some(limit_bytes) if bytes > limit_bytes => {
                Err(LockError::Limit { bytes, limit_bytes })
            }
            _ => Ok(()),
        }
    }
}

impl Depot {
    /// Locks the whole depot into memory until it is unmapped here.
    pub fn lock(&self) -> Result<(), LockError> {
        let bytes = self.bytes();
        LockLimit::now().check(bytes)?;
        let locked = self.buffer().lock();
        locked.map_err(|source| LockError::of(bytes, source))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: &str = "Name:\tkvferry\nCapEff:\t0000000000000000\n";
    const MAY_LOCK: &str = "Name:\tkvferry\nCapEff:\t0000000000004000\n";

    #[test]
    fn more_than_the_limit_is_refused_with_both_numbers_and_the_remedy() {
        let limit = LockLimit::of(PLAIN, Some(65_536));
        assert!(limit.check(65_536).is_ok());
        let error = limit.check(65_537).expect_err("one byte more").to_string();
        for part in ["65537", "65536", "ulimit -l", "g2_lock"] {
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn without_a_limit_or_with_the_capability_anything_may_be_locked() {
        assert!(LockLimit::of(PLAIN, None).check(u64::MAX).is_ok());
        assert!(LockLimit::of(MAY_LOCK, Some(0)).check(u64::MAX).is_ok());
        assert!(LockLimit::of("", Some(0)).check(1).is_err());
    }

    #[test]
    fn a_small_depot_is_locked() {
        let depot = Depot::create(16 << 10).expect("memory");
        match LockLimit::now().check(depot.bytes()) {
            Ok(()) => depot.lock().expect("within the limit"),
            Err(_) => assert!(depot.lock().is_err()),
        }
    }
}
