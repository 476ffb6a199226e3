//! `kvferry bench`: figures of this machine, each beside a floor that is measured in the same run, both sides in turn.

mod copy;
mod order;
mod rpc;

use clap::Subcommand;

use crate::error::CommandError;

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Gather and scatter pages, beside one memcpy of as many bytes by as many threads; and what an order adds.
    Copy(copy::Arguments),
    /// Round trips to a leader, beside round trips over a bare socket.
    Rpc(rpc::Arguments),
}

impl Command {
    pub(super) fn run(self) -> Result<(), CommandError> {
        match self {
            Self::Copy(arguments) => arguments.run(),
            Self::Rpc(arguments) => arguments.run(),
        }
    }
}

/// Minimum, median and maximum of a list; zero of none.
fn spread(mut values: Vec<f64>) -> (f64, f64, f64) {
    values.sort_by(f64::total_cmp);
    let at = |index: usize| values.get(index).copied().unwrap_or(0.0);
    (
        at(0),
        at(values.len() / 2),
        at(values.len().saturating_sub(1)),
    )
}

/// Median and 99th percentile of a list; zero of none.
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
