//! Fragment pairs: the pages that a copy reads, and those that it writes.

use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

/// `count` consecutive pages from `start` on, in the index space of one arena or one device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PageRun {
    /// Index of the first page.
    pub start: u32,
    /// Number of pages, at least 1.
    pub count: u32,
}

impl PageRun {
    /// A run of one page.
    pub const fn one(page: u32) -> Self {
        Self {
            start: page,
            count: 1,
        }
    }

    /// Index after the last page. A `u64`, so that it cannot overflow.
    pub const fn end(self) -> u64 {
        self.start as u64 + self.count as u64
    }
}

/// Pages in order, with neighbours merged into runs. Two runs fit without an allocation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PageList(pub SmallVec<[PageRun; 2]>);

impl PageList {
    /// A list of one run.
    pub fn run(start: u32, count: u32) -> Self {
        Self(SmallVec::from_slice(&[PageRun { start, count }]))
    }

    /// Appends a run, merged into the last one if it continues that one.
    pub fn push(&mut self, run: PageRun) {
        match self.0.last_mut() {
            Some(last) if last.end() == u64::from(run.start) => {
                if let Some(count) = last.count.checked_add(run.count) {
                    last.count = count;
                    return;
                }
                self.0.push(run);
            }
            _ => self.0.push(run),
        }
    }

    /// Number of pages in all runs.
    pub fn pages(&self) -> u64 {
        self.0.iter().map(|run| u64::from(run.count)).sum()
    }

    /// Every page index, in order.
    pub fn iter_pages(&self) -> impl Iterator<Item = u32> + '_ {
        self.0
            .iter()
            .flat_map(|run| (0..run.count).map(move |i| run.start + i))
    }
}

/// Reads a [`PageList`] from front to back, a few pages at a time.
#[derive(Debug)]
pub struct PageCursor<'a> {
    runs: &'a [PageRun],
    used: u32,
}

impl<'a> PageCursor<'a> {
    /// A cursor at the first page.
    pub fn new(list: &'a PageList) -> Self {
        Self {
            runs: &list.0,
            used: 0,
        }
    }

    /// Takes the next `count` pages; fewer when the list ends before.
    pub fn take(&mut self, count: u32) -> PageList {
        let mut taken = PageList::default();
        self.advance(count, |run| taken.push(run));
        taken
    }

    /// Skips `count` pages.
    pub fn skip(&mut self, count: u32) {
        self.advance(count, |_| ());
    }

    fn advance(&mut self, mut count: u32, mut visit: impl FnMut(PageRun)) {
        while let Some(run) = self.runs.first().filter(|_| count > 0) {
            let step = count.min(run.count - self.used);
            visit(PageRun {
                start: run.start + self.used,
                count: step,
            });
            count -= step;
            self.used += step;
            if self.used == run.count {
                self.runs = &self.runs[1..];
                self.used = 0;
            }
        }
    }
}

impl FromIterator<u32> for PageList {
    fn from_iter<I: IntoIterator<Item = u32>>(pages: I) -> Self {
        let mut list = Self::default();
        for page in pages {
            list.push(PageRun::one(page));
        }
        list
    }
}

/// `(sources, destinations)`: two lists with the same number of pages; the i-th source page is copied to the i-th
/// destination page. `[p0..p31] -> [[a, 32]]` is a gather, the reverse a scatter.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FragmentPair {
    /// Pages that are read.
    pub src: PageList,
    /// Pages that are written.
    pub dst: PageList,
}

impl FragmentPair {
    /// Cuts a list between pairs. A part ends once it has at least `part_bytes` bytes.
    pub fn parts(pairs: Vec<Self>, page_bytes: u64, part_bytes: u64) -> Vec<Vec<Self>> {
        let mut parts = vec![Vec::new()];
        let mut bytes = 0u64;
        for pair in pairs {
            if bytes >= part_bytes {
                parts.push(Vec::new());
                bytes = 0;
            }
            bytes = bytes.saturating_add(pair.dst.pages().saturating_mul(page_bytes));
            if let Some(part) = parts.last_mut() {
                part.push(pair);
            }
        }
        parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_merge_into_one_run() {
        let list: PageList = [7, 8, 9, 3, 4, 20].into_iter().collect();
        let runs: Vec<_> = list.0.iter().map(|run| (run.start, run.count)).collect();
        assert_eq!(runs, [(7, 3), (3, 2), (20, 1)]);
        assert_eq!(list.pages(), 6);
        assert_eq!(list.iter_pages().collect::<Vec<_>>(), [7, 8, 9, 3, 4, 20]);
    }

    #[test]
    fn a_cursor_cuts_a_list_without_losing_a_page() {
        let list: PageList = [7, 8, 9, 3, 4, 20].into_iter().collect();
        let mut cursor = PageCursor::new(&list);
        let mut pages: Vec<u32> = cursor.take(2).iter_pages().collect();
        cursor.skip(1);
        pages.extend(cursor.take(2).iter_pages());
        pages.extend(cursor.take(9).iter_pages());
        assert_eq!(pages, [7, 8, 3, 4, 20]);
    }

    #[test]
    fn a_list_is_cut_between_pairs() {
        let pair = |pages| FragmentPair {
            src: PageList::run(0, pages),
            dst: PageList::run(0, pages),
        };
        let lengths = |counts: &[u32], part_bytes| {
            let pairs = counts.iter().copied().map(pair).collect();
            let cut = FragmentPair::parts(pairs, 10, part_bytes);
            cut.iter().map(Vec::len).collect::<Vec<_>>()
        };
        assert_eq!(lengths(&[1, 1, 1, 1, 1], 20), [2, 2, 1]);
        assert_eq!(lengths(&[5, 1, 1], 20), [1, 2]);
        assert_eq!(lengths(&[1, 1, 1], u64::MAX), [3]);
        assert_eq!(lengths(&[], 20), [0]);
    }

    #[test]
    fn a_run_at_the_end_of_the_index_space_does_not_overflow() {
        let mut list = PageList::run(u32::MAX, 1);
        list.push(PageRun::one(0));
        assert_eq!(list.0.len(), 2);
    }
}
