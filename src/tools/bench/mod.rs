//! `kvferry-tools bench`: measurements of parts. Each is shown with a baseline that is measured in the same run, both
//! sides in turn.

mod arena;
mod bare_client;
mod codec;
mod lookup;
mod ping;
mod placement;
mod preloaded_leader;
mod recovery;
mod reset;
mod rpc;
mod rpc_hit;
mod steps;
mod store;
mod tails;

use clap::Subcommand;

use kvferry::error::CommandError;

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Lookups in a leader that holds many pages, beside plain probes and compares.
    Lookup(lookup::Arguments),
    /// Lookups that name only the tail of a prompt, and of whole prompts, with and without an index of pages.
    Tails(tails::Arguments),
    /// Stores of one page each in sequences that grow, in a leader that holds many pages.
    Store(store::Arguments),
    /// Recovery of a pool from the inventories of its shards, part by part.
    Recovery(recovery::Arguments),
    /// Encodes and decodes a transfer order, beside its numbers alone.
    Codec(codec::Arguments),
    /// Allocations of an arena that is nearly full, beside a free list; and the memory that a pool takes.
    Arena(arena::Arguments),
    /// Resets of many hashes in a leader that holds many pages, and lookups between their slices.
    Reset(reset::Arguments),
    /// Round trips to a leader, beside round trips over a bare socket and to a server that is busy as long.
    Rpc(rpc::Arguments),
    /// Round trips through the gate and to a leader, beside round trips between two sockets of the `zeromq` crate.
    Ping(ping::Arguments),
    /// One kind of work, repeated, so that its instructions can be counted.
    Steps(steps::Arguments),
    /// Answers in `ping`.
    #[command(hide = true)]
    Echo(ping::EchoArguments),
    /// Stands for a leader in `rpc`.
    #[command(hide = true)]
    Busy(rpc_hit::BusyArguments),
}

impl Command {
    pub(super) fn run(self) -> Result<(), CommandError> {
        match self {
            Self::Lookup(arguments) => arguments.run(),
            Self::Tails(arguments) => arguments.run(),
            Self::Store(arguments) => arguments.run(),
            Self::Recovery(arguments) => arguments.run(),
            Self::Codec(arguments) => arguments.run(),
            Self::Arena(arguments) => arguments.run(),
            Self::Reset(arguments) => arguments.run(),
            Self::Rpc(arguments) => arguments.run(),
            Self::Ping(arguments) => arguments.run(),
            Self::Steps(arguments) => arguments.run(),
            Self::Echo(arguments) => arguments.run(),
            Self::Busy(arguments) => arguments.run(),
        }
    }
}
