//! `kvferry bench`: measurements of this machine. Each is shown with a baseline that is measured in the same run, both
//! sides in turn.

mod bench_engine;
mod copy;
pub mod copy_fixture;
mod disk;
mod disk_blocks;
mod disk_load;
mod disk_recovery;
mod dispatch_latency;
mod end_to_end;
mod gpu;
mod lanes;
mod plain_disk;
pub mod rig;

use clap::Subcommand;

use crate::error::CommandError;

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Gather and scatter pages, beside one memcpy of as many bytes by as many threads; and what an order adds.
    Copy(copy::Arguments),
    /// Blocks between host memory and a disk, beside plain reads and writes of the same files.
    Disk(disk::Arguments),
    /// Loads of an engine from the disk, beside plain reads of the same files.
    DiskLoad(disk_load::Arguments),
    /// The start of a disk tier with many blocks, with its index and from the headers alone.
    DiskRecovery(disk_recovery::Arguments),
    /// Copies between a GPU and pinned host memory, beside one copy of as many bytes.
    Gpu(gpu::Arguments),
    /// The time that loads wait in a worker while stores are queued, beside the same loads without stores.
    Lanes(lanes::Arguments),
    /// Stores and loads of an engine through leader and worker, beside the same copies by the copy engine alone.
    Move(end_to_end::Arguments),
}

impl Command {
    pub(super) fn run(self) -> Result<(), CommandError> {
        match self {
            Self::Copy(arguments) => arguments.run(),
            Self::Disk(arguments) => arguments.run(),
            Self::DiskLoad(arguments) => arguments.run(),
            Self::DiskRecovery(arguments) => arguments.run(),
            Self::Gpu(arguments) => arguments.run(),
            Self::Lanes(arguments) => arguments.run(),
            Self::Move(arguments) => arguments.run(),
        }
    }
}

/// Minimum, median and maximum of a list; 0 for an empty list.
pub fn spread(mut values: Vec<f64>) -> (f64, f64, f64) {
    values.sort_by(f64::total_cmp);
    let at = |index: usize| values.get(index).copied().unwrap_or(0.0);
    (
        at(0),
        at(values.len() / 2),
        at(values.len().saturating_sub(1)),
    )
}

/// Median and 99th percentile of a list; 0 for an empty list.
pub fn percentiles(mut values: Vec<f64>) -> (f64, f64) {
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
