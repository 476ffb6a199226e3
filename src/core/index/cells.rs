//! The cells of a sequence: the pages between two multiples of the ratio, which no block crosses.

/// Where the cells of a sequence lie. Those of a sequence that is named from its first page on begin at the multiples of
/// the ratio. The first page of one of which the tail alone is named lies anywhere in a cell, which shows once a block of
/// it is found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cells {
    ratio: u32,
    /// Pages between the first page of the sequence and the beginning of its cell.
    lead: u32,
}

impl Cells {
    /// The cells of a sequence that is named from its first page on.
    pub(crate) fn new(ratio: u32) -> Self {
        Self { ratio, lead: 0 }
    }

    /// Takes the cells from a block that was found: the page at `position` is page `phase` of its cell. Returns whether
    /// they lie elsewhere than before.
    pub(crate) fn align(&mut self, position: u32, phase: u32) -> bool {
        let lead = (phase + self.ratio - position % self.ratio) % self.ratio;
        std::mem::replace(&mut self.lead, lead) != lead
    }

    /// The place of a page in its cell.
    pub(crate) fn phase(self, position: u32) -> u32 {
        (position + self.lead) % self.ratio
    }

    /// The first page of the next cell.
    pub(crate) fn next(self, position: u32) -> u32 {
        position + self.ratio - self.phase(position)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_follow_from_the_place_of_any_page() {
        for ratio in [1, 2, 3, 8, 32] {
            let whole = Cells::new(ratio);
            for first in 0..2 * ratio {
                // A tail that begins at page `first` of its sequence.
                let mut tail = Cells::new(ratio);
                let at = first % 5;
                let moved = tail.align(at, whole.phase(first + at));
                assert_eq!(moved, !first.is_multiple_of(ratio));
                assert!(!tail.align(at + 7, whole.phase(first + at + 7)), "known");
                for position in 0..3 * ratio {
                    assert_eq!(tail.phase(position), whole.phase(first + position));
                    let next = tail.next(position);
                    assert_eq!(whole.next(first + position), first + next);
                    assert!(next > position && tail.phase(next) == 0);
                }
            }
        }
    }
}
