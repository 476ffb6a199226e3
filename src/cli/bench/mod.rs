//! `kvferry bench`: measurements of this machine. Each is shown beside a floor that is measured in the same run, both
//! sides in turn.

mod arena;
mod codec;
mod copy;
mod filled;
mod found;
mod gpu;
mod lookup;
mod moved;
mod order;
mod pages;
mod reset;
mod rpc;

use clap::Subcommand;

use crate::error::CommandError;

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Gather and scatter pages, beside one memcpy of as many bytes by as many threads; and what an order adds.
    Copy(copy::Arguments),
    /// Copies between a GPU and pinned host memory, beside one copy of as many bytes.
    Gpu(gpu::Arguments),
    /// Stores and loads of an engine through leader and worker, beside the same copies by the copy engine alone.
    Move(moved::Arguments),
    /// Lookups in a leader that holds many pages, beside plain probes and compares.
    Lookup(lookup::Arguments),
    /// A transfer order to bytes and back, beside its numbers alone.
    Codec(codec::Arguments),
    /// Allocations of an arena that is nearly full, beside a free list; and the memory that a pool takes.
    Arena(arena::Arguments),
    /// Resets of many hashes in a leader that holds many pages, and lookups between their slices.
    Reset(reset::Arguments),
    /// Round trips to a leader, beside round trips over a bare socket and to a server that is busy as long.
    Rpc(rpc::Arguments),
    /// Stands for a leader in `rpc`.
    #[command(hide = true)]
    Busy(found::BusyArguments),
}

impl Command {
    pub(super) fn run(self) -> Result<(), CommandError> {
        match self {
            Self::Copy(arguments) => arguments.run(),
            Self::Gpu(arguments) => arguments.run(),
            Self::Move(arguments) => arguments.run(),
            Self::Lookup(arguments) => arguments.run(),
            Self::Codec(arguments) => arguments.run(),
            Self::Arena(arguments) => arguments.run(),
            Self::Reset(arguments) => arguments.run(),
            Self::Rpc(arguments) => arguments.run(),
            Self::Busy(arguments) => arguments.run(),
        }
    }
}

/// Minimum, median and maximum of a list; 0 for an empty list.
fn spread(mut values: Vec<f64>) -> (f64, f64, f64) {
    values.sort_by(f64::total_cmp);
    let at = |index: usize| values.get(index).copied().unwrap_or(0.0);
    (
        at(0),
        at(values.len() / 2),
        at(values.len().saturating_sub(1)),
    )
}

/// Median and 99th percentile of a list; 0 for an empty list.
fn percentiles(mut values: Vec<f64>) -> (f64, f64) {
    values.sort_by(f64::total_cmp);
    let last = values.len().saturating_sub(1);
    let at = |thousandths: usize| {
        values
            .get(last * thousandths / 1000)
            .copied()
            .unwrap_or(0.0)
    };
    (at(500), at(990))
}
