//! `kvferry-tools bench steps`: one kind of work, repeated. The preparation is the same for every number of rounds, so
//! that two runs differ by the instructions of the further rounds alone, which `cargo xtask compare` counts.

use kvferry::cli::bench::copy_fixture::CopySteps;
use kvferry::cli::bench::rig::{HASH_BYTES, hashes};
use kvferry::error::CommandError;
use kvferry_protocol::{Header, decode, encode};

use super::codec;
use super::preloaded_leader::{Below, Preload, PreloadedLeader};

/// Most rounds.
const ROUNDS_MAX: u32 = 256;
/// Prompts that the leader holds, and pages of each.
const PROMPTS: u64 = 16;
const PROMPT_PAGES: u32 = 2048;
/// Pages of a sequence that grows by one page with each store: one sequence a round.
const SEQUENCE_PAGES: u32 = 64;
/// Seed of the first sequence that grows; smaller ones are those of prompts.
const SEQUENCES_FROM: u64 = 1 << 40;
/// Pairs of an order.
const ORDER_PAIRS: u32 = 200;

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Work {
    /// A lookup of 2,048 pages in a leader with one tier.
    Lookup,
    /// The same with a second tier, which is empty.
    LookupEmptyTier,
    /// The same with half of each prompt in the second tier.
    LookupHalfTier,
    /// A sequence of 64 pages: its slot, a store of each page, and its end.
    Store,
    /// A transfer order of 200 pairs, encoded and decoded.
    Order,
    /// A gather and a scatter of 512 fragments of 1 KiB by one thread.
    Copy,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// The work.
    work: Work,
    /// Number of times.
    #[arg(long, value_parser = clap::value_parser!(u32).range(0..=i64::from(ROUNDS_MAX)))]
    rounds: u32,
}

impl Arguments {
    pub(crate) fn run(self) -> Result<(), CommandError> {
        match self.work {
            Work::Lookup => self.look_up(Below::None),
            Work::LookupEmptyTier => self.look_up(Below::Empty),
            Work::LookupHalfTier => self.look_up(Below::Half),
            Work::Store => self.store(),
            Work::Order => self.order(),
            Work::Copy => self.copy(),
        }
    }

    fn look_up(&self, below: Below) -> Result<(), CommandError> {
        let mut leader = leader(below, 0)?;
        let prompts = (0..u64::from(ROUNDS_MAX)).map(|round| round % PROMPTS);
        let lookups = prompts.map(|prompt| leader.encoded(prompt));
        let lookups = lookups.collect::<Result<Vec<_>, CommandError>>()?;
        // No finish in between: ids of requests grow, and those of all lookups are drawn above. A lookup replaces the
        // one before in its slot.
        for lookup in &lookups[..self.rounds as usize] {
            leader.lookup(lookup)?;
        }
        Ok(())
    }

    fn store(&self) -> Result<(), CommandError> {
        let mut leader = leader(Below::None, ROUNDS_MAX * SEQUENCE_PAGES)?;
        let seeds = SEQUENCES_FROM..SEQUENCES_FROM + u64::from(ROUNDS_MAX);
        let sequences: Vec<_> = seeds
            .map(|seed| (seed, hashes(seed, SEQUENCE_PAGES)))
            .collect();
        for (slot, hashes) in &sequences[..self.rounds as usize] {
            leader.begin_sequence(*slot)?;
            let (hashes, _) = hashes.as_chunks::<HASH_BYTES>();
            for (hash, position) in hashes.iter().zip(0..) {
                leader.store_page(*slot, position, hash, 0)?;
            }
            leader.end_sequence(*slot)?;
        }
        Ok(())
    }

    fn order(&self) -> Result<(), CommandError> {
        let envelope = codec::order(codec::pairs(ORDER_PAIRS));
        for _ in 0..self.rounds {
            let (header, body) = encode(&envelope).map_err(CommandError::failed)?;
            let header = Header::from_bytes(&header).map_err(CommandError::failed)?;
            let back = decode(header, &body).map_err(CommandError::failed)?;
            if back.correlation != envelope.correlation {
                return Err(CommandError::Failed("came back changed".to_owned()));
            }
        }
        Ok(())
    }

    fn copy(&self) -> Result<(), CommandError> {
        let copies = CopySteps::new()?;
        (0..self.rounds).try_for_each(|_| copies.round())
    }
}

fn leader(below: Below, free_pages: u32) -> Result<PreloadedLeader, CommandError> {
    PreloadedLeader::with(Preload {
        prompts: PROMPTS,
        prompt_pages: PROMPT_PAGES,
        free_pages,
        below,
        page_index: false,
    })
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum as _;

    use super::*;

    #[test]
    fn each_work_can_be_repeated() {
        for work in Work::value_variants() {
            let work = *work;
            // More rounds than prompts: each slot is used again.
            let rounds = 2 * PROMPTS as u32;
            let ran = Arguments { work, rounds }.run();
            ran.unwrap_or_else(|error| panic!("{work:?}: {error}"));
        }
    }
}
