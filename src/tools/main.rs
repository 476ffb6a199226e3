//! `kvferry-tools`: programs for the developers of kvferry. See `kvferry-tools --help`.

#![forbid(unsafe_code)]

mod bench;
mod reach;
mod sim;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Programs for the developers of kvferry.
#[derive(Debug, Parser)]
#[command(name = "kvferry-tools", version, max_term_width = 100)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run simulated worlds with faults, one for each seed.
    Sim(sim::Arguments),
    /// Apply the rules of groups to sets of pages, one JSON object per line of the standard input.
    Reach(reach::Arguments),
    /// Measure parts of kvferry, each with a baseline that is measured in the same run.
    #[command(subcommand)]
    Bench(bench::Command),
    /// Run a command line of `kvferry`: the measurements start a leader with it.
    #[command(hide = true, disable_help_flag = true)]
    Kvferry {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        line: Vec<OsString>,
    },
}

fn main() -> ExitCode {
    match Arguments::parse().command {
        Command::Sim(arguments) => kvferry::cli::finish(arguments.run()),
        Command::Reach(arguments) => kvferry::cli::finish(arguments.run()),
        Command::Bench(command) => kvferry::cli::finish(command.run()),
        Command::Kvferry { line } => {
            let name = OsString::from("kvferry");
            kvferry::cli::run(std::iter::once(name).chain(line))
        }
    }
}
