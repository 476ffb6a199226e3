//! The page-addressed space of a tier: allocates runs of pages in constant time.
//!
//! Holes are kept in one list per exact length (1 to [`RATIO_MAX`], longer ones together), with boundary tags at both
//! ends, so that an allocation, a growth in place and a release read a handful of words whatever the size of the arena.
//! The pages from `frontier` on form one more hole that needs no tags, so that an arena costs memory only for the pages
//! below its highest frontier so far: 12 bytes each.

use kvferry_types::RATIO_MAX;

use crate::Contradiction;

const NONE: u32 = u32::MAX;
/// Longest hole with a list of its own.
const EXACT_MAX: u32 = RATIO_MAX;
/// Lists 1..=EXACT_MAX hold holes of exactly that length; the last list holds all longer ones.
const LISTS: usize = EXACT_MAX as usize + 2;
const LONG: usize = LISTS - 1;
const WORDS: usize = LISTS.div_ceil(64);

/// Most pages an arena can have: page indices stay below the marker for "none".
pub const ARENA_PAGES_MAX: u32 = u32::MAX - 1;

/// The allocator's record of one page. In one struct, so that reading a hole's end costs one cache line.
#[derive(Debug, Clone, Copy)]
struct Page {
    /// Length of the hole that starts or ends here; 0 anywhere else.
    tag: u32,
    /// Next hole in the list of the hole that starts here.
    next: u32,
    /// Previous hole in that list.
    prev: u32,
}

impl Page {
    const USED: Self = Self {
        tag: 0,
        next: NONE,
        prev: NONE,
    };
}

/// Allocator of page runs. Does not depend on what the pages hold.
#[derive(Debug, Clone)]
pub struct Arena {
    capacity: u32,
    frontier: u32,
    free: u32,
    /// One entry for each page below the frontier.
    pages: Vec<Page>,
    heads: [u32; LISTS],
    occupied: [u64; WORDS],
}

impl Arena {
    /// An empty arena of `capacity` pages, cut to [`ARENA_PAGES_MAX`].
    pub fn new(capacity: u32) -> Self {
        let capacity = capacity.min(ARENA_PAGES_MAX);
        Self {
            capacity,
            frontier: 0,
            free: capacity,
            pages: Vec::new(),
            heads: [NONE; LISTS],
            occupied: [0; WORDS],
        }
    }

    /// Total pages.
    pub fn capacity_pages(&self) -> u32 {
        self.capacity
    }

    /// Pages in holes, including those from the frontier on.
    pub fn free_pages(&self) -> u32 {
        self.free
    }

    /// First page of the untracked hole at the end: every allocated page lies below it.
    pub fn frontier(&self) -> u32 {
        self.frontier
    }

    /// Allocates `len` consecutive pages from the smallest hole that fits, else at the frontier. Returns `None` if no
    /// hole is long enough or `len` is 0.
    pub fn alloc(&mut self, len: u32) -> Option<u32> {
        if len == 0 {
            return None;
        }
        if let Some(hole) = self.smallest_hole(len) {
            self.take(hole, len);
            return Some(hole);
        }
        if self.capacity - self.frontier < len {
            return None;
        }
        let start = self.frontier;
        self.advance(len);
        Some(start)
    }

    /// Allocates the `len` pages from `start` on, if a hole of at least `len` pages begins exactly there: growth in
    /// place.
    pub fn alloc_at(&mut self, start: u32, len: u32) -> bool {
        if len == 0 || self.hole_at(start) < len {
            return false;
        }
        if start == self.frontier {
            self.advance(len);
        } else {
            self.take(start, len);
        }
        true
    }

    /// Frees pages and merges them with the adjacent holes.
    ///
    /// The caller must own the pages: a double release is a bug that [`Self::check`] detects.
    pub fn release(&mut self, start: u32, len: u32) {
        debug_assert!(len > 0 && u64::from(start) + u64::from(len) <= u64::from(self.frontier));
        self.free += len;
        let (mut first, mut length) = (start, len);
        if start > 0 && self.pages[start as usize - 1].tag != 0 {
            let before = self.pages[start as usize - 1].tag;
            first = start - before;
            length += before;
            self.unlink(first, before);
        }
        let end = start + len;
        if end < self.frontier && self.pages[end as usize].tag != 0 {
            let after = self.pages[end as usize].tag;
            self.unlink(end, after);
            length += after;
        }
        if first + length == self.frontier {
            self.frontier = first;
            self.pages.truncate(first as usize);
        } else {
            self.link(first, length);
        }
    }

    /// Length of the hole that begins at `start`, or 0.
    pub fn hole_at(&self, start: u32) -> u32 {
        if start == self.frontier {
            return self.capacity - self.frontier;
        }
        if start > self.frontier {
            return 0;
        }
        // A tag marks both ends of a hole. Only at the first page does the hole extend upwards.
        let tag = self.pages[start as usize].tag;
        let starts_here = tag != 0 && (tag == 1 || self.tag_is_start(start, tag));
        if starts_here { tag } else { 0 }
    }

    /// Length of the longest hole, capped at [`RATIO_MAX`] + 1: no run is longer than [`RATIO_MAX`].
    pub fn largest_hole(&self) -> u32 {
        let ahead = (self.capacity - self.frontier).min(EXACT_MAX + 1);
        let listed = self
            .occupied
            .iter()
            .enumerate()
            .rev()
            .find(|(_, word)| **word != 0)
            .map_or(0, |(index, word)| {
                u32::try_from(index).unwrap_or(0) * 64 + (63 - word.leading_zeros())
            });
        ahead.max(listed)
    }

    /// Every hole as `(start, length)`, in address order, including the one at the frontier. Walks all pages.
    pub fn holes(&self) -> Vec<(u32, u32)> {
        let mut holes = Vec::new();
        let mut page = 0;
        while page < self.frontier {
            let length = self.hole_at(page);
            if length > 0 {
                holes.push((page, length));
            }
            page += length.max(1);
        }
        if self.frontier < self.capacity {
            holes.push((self.frontier, self.capacity - self.frontier));
        }
        holes
    }

    /// Recounts the counters and lists independently. `Err` names the first contradiction.
    pub fn check(&self) -> Result<(), Contradiction> {
        let holes = self.holes();
        let counted: u64 = holes.iter().map(|(_, length)| u64::from(*length)).sum();
        if counted != u64::from(self.free) {
            return Err(
                format!("holes hold {counted} pages, the counter has {}", self.free).into(),
            );
        }
        for (list, head) in self.heads.iter().enumerate() {
            let occupied = self.occupied[list / 64] >> (list % 64) & 1 == 1;
            if occupied != (*head != NONE) {
                return Err(
                    format!("list {list}: the bitmap has {occupied}, the head {head}").into(),
                );
            }
            let mut hole = *head;
            while hole != NONE {
                let length = self.hole_at(hole);
                if list_of(length) != list {
                    return Err(format!("hole {hole} of {length} pages lies in list {list}").into());
                }
                hole = self.pages[hole as usize].next;
            }
        }
        Ok(())
    }

    fn tag_is_start(&self, page: u32, tag: u32) -> bool {
        let last = u64::from(page) + u64::from(tag) - 1;
        last < u64::from(self.frontier)
            && self.pages[last as usize].tag == tag
            && self.is_linked(page, tag)
    }

    /// True if a hole's first page is linked: it is the head of its list, or its predecessor points to it.
    fn is_linked(&self, page: u32, tag: u32) -> bool {
        let before = self.pages[page as usize].prev;
        match before {
            NONE => self.heads[list_of(tag)] == page,
            _ => self
                .pages
                .get(before as usize)
                .is_some_and(|before| before.next == page),
        }
    }

    fn smallest_hole(&self, len: u32) -> Option<u32> {
        let from = list_of(len);
        let mut word = from / 64;
        let mut bits = self.occupied[word] & (!0 << (from % 64));
        while bits == 0 {
            word += 1;
            bits = *self.occupied.get(word)?;
        }
        let list = word * 64 + bits.trailing_zeros() as usize;
        Some(self.heads[list]).filter(|hole| self.pages[*hole as usize].tag >= len)
    }

    /// Cuts `len` pages off the front of the hole at `start`.
    fn take(&mut self, start: u32, len: u32) {
        let length = self.pages[start as usize].tag;
        self.unlink(start, length);
        if length > len {
            self.link(start + len, length - len);
        }
        self.free -= len;
    }

    fn advance(&mut self, len: u32) {
        self.frontier += len;
        self.free -= len;
        let used = self.frontier as usize;
        self.pages.resize(used, Page::USED);
    }

    fn link(&mut self, start: u32, length: u32) {
        self.pages[start as usize].tag = length;
        self.pages[(start + length) as usize - 1].tag = length;
        let list = list_of(length);
        let head = self.heads[list];
        self.pages[start as usize].next = head;
        self.pages[start as usize].prev = NONE;
        if head != NONE {
            self.pages[head as usize].prev = start;
        }
        self.heads[list] = start;
        self.occupied[list / 64] |= 1 << (list % 64);
    }

    fn unlink(&mut self, start: u32, length: u32) {
        let (before, after) = (
            self.pages[start as usize].prev,
            self.pages[start as usize].next,
        );
        let list = list_of(length);
        if before == NONE {
            self.heads[list] = after;
            if after == NONE {
                self.occupied[list / 64] &= !(1 << (list % 64));
            }
        } else {
            self.pages[before as usize].next = after;
        }
        if after != NONE {
            self.pages[after as usize].prev = before;
        }
        self.pages[start as usize].prev = NONE;
        self.pages[start as usize].next = NONE;
        self.pages[start as usize].tag = 0;
        self.pages[(start + length) as usize - 1].tag = 0;
    }
}

fn list_of(length: u32) -> usize {
    (length as usize).min(LONG)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Holes of 1 and 2 pages, and one at the frontier.
    fn with_holes() -> Arena {
        let mut arena = Arena::new(16);
        for start in [0, 2, 4, 6, 8] {
            assert_eq!(arena.alloc(2), Some(start));
        }
        arena.release(2, 2);
        arena.release(7, 1);
        assert_eq!(arena.holes(), [(2, 2), (7, 1), (10, 6)]);
        assert_eq!(arena.check(), Ok(()));
        arena
    }

    #[test]
    fn the_second_count_sees_what_is_wrong() {
        let wrong = |spoil: fn(&mut Arena), expected: &str| {
            let mut arena = with_holes();
            spoil(&mut arena);
            let why = arena.check().expect_err(expected).to_string();
            assert!(why.contains(expected), "{why}");
        };
        wrong(|arena| arena.free += 1, "the counter has 10");
        wrong(
            |arena| arena.occupied[0] |= 1 << 9,
            "list 9: the bitmap has true",
        );
        wrong(
            |arena| arena.occupied[0] &= !(1 << 2),
            "list 2: the bitmap has false",
        );
        wrong(
            |arena| {
                let hole = arena.heads[1];
                arena.heads[5] = hole;
                arena.occupied[0] |= 1 << 5;
            },
            "hole 7 of 1 pages lies in list 5",
        );
    }

    #[test]
    fn an_arena_without_room_has_no_hole() {
        let mut arena = Arena::new(8);
        assert_eq!(arena.holes(), [(0, 8)]);
        assert_eq!(arena.alloc(8), Some(0));
        assert_eq!(arena.holes(), []);
        assert_eq!(arena.largest_hole(), 0);
    }

    #[test]
    fn the_longest_hole_is_reported_up_to_one_page_more_than_a_block() {
        assert_eq!(Arena::new(10_000).largest_hole(), RATIO_MAX + 1);
        assert_eq!(Arena::new(RATIO_MAX).largest_hole(), RATIO_MAX);
        let mut arena = Arena::new(1000);
        assert_eq!(arena.alloc(600), Some(0));
        assert_eq!(arena.alloc(400), Some(600));
        arena.release(10, 3);
        assert_eq!(arena.largest_hole(), 3);
        arena.release(100, 400);
        assert_eq!(arena.largest_hole(), RATIO_MAX + 1);
    }
}
