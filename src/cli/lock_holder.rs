//! The process that holds the lock of a file or directory.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use rustix::fs::{major, minor};

/// The process that holds the `flock` of a file or directory. `None` if it has none, or is of another PID namespace.
pub(super) fn lock_holder(path: &Path) -> Option<i32> {
    let found = fs::metadata(path).ok()?;
    let device = (major(found.dev()), minor(found.dev()));
    holder_in(
        &fs::read_to_string("/proc/locks").ok()?,
        device,
        found.ino(),
    )
}

/// Finds the holder in the text of `/proc/locks`, such as `1: FLOCK  ADVISORY  WRITE 4711 fe:00:5529615 0 EOF`. A process
/// that waits for a lock has an arrow behind the number.
fn holder_in(locks: &str, device: (u32, u32), inode: u64) -> Option<i32> {
    let file = format!("{:02x}:{:02x}:{inode}", device.0, device.1);
    locks.lines().find_map(|line| {
        let mut words = line.split_whitespace().skip(1);
        if words.next()? != "FLOCK" {
            return None;
        }
        let pid = words.nth(2)?.parse().ok().filter(|pid| *pid > 0)?;
        (words.next()? == file).then_some(pid)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_holder_of_a_lock_is_found_by_the_file() {
        let locks = "1: POSIX  ADVISORY  WRITE 1 fe:00:77 0 EOF\n\
                     2: FLOCK  ADVISORY  WRITE 2 fe:01:77 0 EOF\n\
                     3: FLOCK  ADVISORY  WRITE 3 fe:00:77 0 EOF\n\
                     3: -> FLOCK  ADVISORY  WRITE 4 fe:00:77 0 EOF\n\
                     4: FLOCK  ADVISORY  WRITE 0 fe:00:78 0 EOF\n";
        assert_eq!(holder_in(locks, (254, 0), 77), Some(3));
        assert_eq!(holder_in(locks, (254, 1), 77), Some(2));
        for inode in [78, 79] {
            assert_eq!(holder_in(locks, (254, 0), inode), None);
        }
    }
}
