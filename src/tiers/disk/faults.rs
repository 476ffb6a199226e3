//! Places of a set that failed, and what an error of a disk says about it.

use std::collections::BTreeSet;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use kvferry_types::QUARANTINED_PAGES_MAX;

/// True if a disk has no room for what was to be written: it goes on to serve what it has.
pub fn is_full(error: &io::Error) -> bool {
    use io::ErrorKind::{QuotaExceeded, StorageFull};
    matches!(error.kind(), StorageFull | QuotaExceeded)
}

/// True if a disk may be read and not written: it is mounted read-only, or this process lost the permission.
pub fn is_read_only(error: &io::Error) -> bool {
    use io::ErrorKind::{PermissionDenied, ReadOnlyFilesystem};
    // A file that could be opened for reading alone.
    let opened_to_read = error.raw_os_error() == Some(EBADF);
    opened_to_read || matches!(error.kind(), PermissionDenied | ReadOnlyFilesystem)
}

const EBADF: i32 = 9;

/// True if an error of a read or write says that its place on the disk is bad.
pub(super) fn is_of_a_place(error: &io::Error) -> bool {
    !is_full(error) && !is_read_only(error)
}

/// The pages of an open set whose place failed, at most [`QUARANTINED_PAGES_MAX`]. The list lasts as long as the set is
/// open, longer than a leader: a write to such a place is refused, so that a new leader learns of it, too.
#[derive(Debug, Default)]
pub(super) struct FaultyPages(Mutex<BTreeSet<u32>>);

impl FaultyPages {
    fn pages(&self) -> MutexGuard<'_, BTreeSet<u32>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a page.
    pub(super) fn note(&self, page: u32) {
        let mut pages = self.pages();
        if pages.len() < QUARANTINED_PAGES_MAX {
            pages.insert(page);
        }
    }

    pub(super) fn contains(&self, page: u32) -> bool {
        self.pages().contains(&page)
    }

    /// Index of the first page whose place failed.
    pub(super) fn first_of(&self, pages: impl Iterator<Item = u32>) -> Option<usize> {
        let known = self.pages();
        let mut pages = pages.take_while(|_| !known.is_empty()).enumerate();
        let found = pages.find(|(_, page)| known.contains(page));
        found.map(|(index, _)| index)
    }

    pub(super) fn len(&self) -> usize {
        self.pages().len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_of_the_disk_or_of_a_place() {
        const ENOSPC: i32 = 28;
        for (code, full, read_only) in [
            (ENOSPC, true, false),
            (122, true, false),
            (30, false, true),
            (13, false, true),
            (EBADF, false, true),
            (5, false, false),
        ] {
            let error = io::Error::from_raw_os_error(code);
            let found = (is_full(&error), is_read_only(&error));
            assert_eq!(found, (full, read_only), "{error}");
            assert_eq!(is_of_a_place(&error), code == 5);
        }
    }

    #[test]
    fn the_list_of_places_is_bounded() {
        let faulty = FaultyPages::default();
        (0..2 * QUARANTINED_PAGES_MAX as u32).for_each(|page| faulty.note(page));
        assert_eq!(faulty.len(), QUARANTINED_PAGES_MAX);
        assert_eq!(faulty.first_of(5000..6000), None);
        assert_eq!(faulty.first_of([9999, 7].into_iter()), Some(1));
    }
}
