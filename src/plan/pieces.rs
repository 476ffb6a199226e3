//! The bytes of a page that one copy takes.

use crate::error::{At, PIECES_MAX, PlanError};
use crate::holders::Run;
use crate::side::{Counts, SideTensor};

/// Limit on the pieces of a plan before neighbours are merged, which bounds the time to make it: some 10 ms.
const STEPS_MAX: usize = 1 << 20;

/// Equal runs of bytes at equal distances, in one page of the source and one of the target. Offsets count from the start
/// of the page in the lower tiers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Page of the source, counted from the start of the period.
    pub source_page: u32,
    /// First byte in it.
    pub source_offset: u64,
    /// Page of the target, counted from the start of the period.
    pub target_page: u32,
    /// First byte in it.
    pub target_offset: u64,
    /// Bytes of each run.
    pub bytes: u64,
    /// Number of runs, at least 1.
    pub count: u64,
    /// Bytes from one run to the next at the source; 0 with one run.
    pub source_step: u64,
    /// Bytes from one run to the next at the target; 0 with one run.
    pub target_step: u64,
}

impl Piece {
    /// Takes the following piece into this one, if they are one.
    fn merge(&mut self, next: &Self) -> bool {
        let alike = (
            self.source_page,
            self.target_page,
            self.count,
            self.source_step,
            self.target_step,
        ) == (
            next.source_page,
            next.target_page,
            next.count,
            next.source_step,
            next.target_step,
        );
        let follows = self.source_offset + self.bytes == next.source_offset
            && self.target_offset + self.bytes == next.target_offset;
        if !alike || !follows {
            return false;
        }
        self.bytes += next.bytes;
        if self.count > 1 && self.bytes == self.source_step && self.bytes == self.target_step {
            self.bytes *= self.count;
            (self.count, self.source_step, self.target_step) = (1, 0, 0);
        }
        true
    }
}

/// Pieces, of which neighbours are merged.
#[derive(Debug, Default)]
pub(crate) struct Pieces {
    found: Vec<Piece>,
    steps: usize,
}

impl Pieces {
    pub(crate) fn push(&mut self, at: At, piece: Piece) -> Result<(), PlanError> {
        self.steps += 1;
        self.found.push(piece);
        while let [.., before, last] = &mut self.found[..]
            && before.merge(last)
        {
            self.found.pop();
        }
        if self.found.len() > PIECES_MAX || self.steps > STEPS_MAX {
            return Err(PlanError::Pieces { at });
        }
        Ok(())
    }

    pub(crate) fn into_found(self) -> Vec<Piece> {
        self.found
    }
}

/// Tokens of a page at both sides.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PageTokens {
    pub(crate) source: u32,
    pub(crate) target: u32,
}

impl PageTokens {
    /// Tokens after which pages of both sides begin together.
    pub(crate) fn period(self) -> u32 {
        self.source.max(self.target)
    }

    /// The parts of a period that lie in one page of each side.
    fn parts(self) -> impl Iterator<Item = Tokens> {
        let count = self.source.min(self.target);
        (0..self.period() / count).map(move |part| {
            let first = part * count;
            Tokens {
                source_page: first / self.source,
                source_first: u64::from(first % self.source),
                target_page: first / self.target,
                target_first: u64::from(first % self.target),
                count: u64::from(count),
            }
        })
    }
}

/// Tokens that lie in one page of each side.
struct Tokens {
    source_page: u32,
    source_first: u64,
    target_page: u32,
    target_first: u64,
    count: u64,
}

/// Adds the pieces of heads and tokens of one tensor. `heads`: all of them for a tensor that every rank holds whole.
pub(crate) fn tokens(
    pieces: &mut Pieces,
    at: At,
    (source, target): (&SideTensor, &SideTensor),
    pages: PageTokens,
    heads: Run,
) -> Result<(), PlanError> {
    for part in pages.parts() {
        // The number of indices of each axis, and the bytes from one to the next at both sides.
        let mut loops: Vec<(u64, u64, u64)> = Vec::new();
        let (mut source_offset, mut target_offset) = (source.offset_bytes, target.offset_bytes);
        let mut named = |counts, source_first: u64, target_first: u64, count: u64| {
            let (source_step, target_step) = (source.step(counts), target.step(counts));
            source_offset += source_first * source_step;
            target_offset += target_first * target_step;
            loops.push((count, source_step, target_step));
        };
        named(
            Counts::Heads,
            heads.first_there,
            heads.first_here,
            heads.count,
        );
        named(
            Counts::Tokens,
            part.source_first,
            part.target_first,
            part.count,
        );
        for (ours, theirs) in source.others().zip(target.others()) {
            loops.push((ours.length, ours.step_bytes, theirs.step_bytes));
        }
        loops.retain(|(count, _, _)| *count > 1);
        let mut bytes = 1;
        while let Some(inner) = loops
            .iter()
            .position(|(_, source, target)| (*source, *target) == (bytes, bytes))
        {
            bytes *= loops.swap_remove(inner).0;
        }
        // Outermost first, so that neighbours follow each other.
        loops.sort_by_key(|(_, source_step, _)| std::cmp::Reverse(*source_step));
        let longest = (0..loops.len()).max_by_key(|index| loops[*index].0);
        let (count, source_step, target_step) =
            longest.map_or((1, 0, 0), |index| loops.remove(index));
        let piece = Piece {
            source_page: part.source_page,
            source_offset,
            target_page: part.target_page,
            target_offset,
            bytes,
            count,
            source_step,
            target_step,
        };
        each(pieces, at, &loops, piece)?;
    }
    Ok(())
}

/// Adds a piece for each combination of the indices of these loops.
fn each(
    pieces: &mut Pieces,
    at: At,
    loops: &[(u64, u64, u64)],
    piece: Piece,
) -> Result<(), PlanError> {
    let [(count, source_step, target_step), inner @ ..] = loops else {
        return pieces.push(at, piece);
    };
    for index in 0..*count {
        let source_offset = piece.source_offset + index * source_step;
        let target_offset = piece.target_offset + index * target_step;
        each(
            pieces,
            at,
            inner,
            Piece {
                source_offset,
                target_offset,
                ..piece
            },
        )?;
    }
    Ok(())
}
