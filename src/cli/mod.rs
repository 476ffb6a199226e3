//! The commands, one file each. `common` and `arguments` hold what they share, `shutdown` and `signals` hold the shared shutdown logic of leader and worker processes,
//! `socket_paths` the layout of the socket directory.

mod arguments;
pub mod bench;
mod common;
mod disk_room;
mod drain;
mod engine_rank;
mod events;
mod flush;
mod fsck;
mod keygen;
mod leader;
mod lock_holder;
mod log;
pub mod monitor;
mod namespaces;
mod program;
mod remote;
mod remote_workers;
mod replay;
mod reset;
mod restarts;
mod shutdown;
mod signals;
mod socket_paths;
mod status;
mod temporary;
mod up;
mod worker;
mod worker_gone;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand};

use crate::error::EXIT_CODES;

pub use common::{block_on, finish, print_line};

/// Moves LLM KV-cache blocks between engine memory and host memory, so that a prompt prefix that was computed once is
/// loaded instead of computed again.
#[derive(Debug, Parser)]
#[command(name = "kvferry", version, max_term_width = 100, after_help = exit_codes())]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

fn exit_codes() -> String {
    let mut text = "Exit codes:".to_owned();
    for (code, meaning) in EXIT_CODES {
        text += &format!("\n  {code:2}  {meaning}");
    }
    text
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Start a leader and its workers, hold their host memory, restart processes that die.
    ///
    /// SIGTERM, SIGINT (Ctrl-C) and SIGHUP end them in order. SIGINT and SIGHUP are without effect where they are
    /// ignored at the start: under nohup, and in the background of a shell without job control.
    Up(up::Arguments),
    /// Run a leader alone.
    Leader(leader::Arguments),
    /// Run the worker of one rank alone.
    Worker(worker::Arguments),
    /// State to a leader on another machine that a worker of this machine has ended.
    ///
    /// For supervisors other than `kvferry up --leader`, after the end of a worker that is not started again at once.
    WorkerGone(worker_gone::Arguments),
    /// Serve the metrics and the health of a running leader and its workers over HTTP.
    ///
    /// `kvferry up` starts it by itself where the setting `monitor` names an address.
    Monitor(monitor::Arguments),
    /// Show the state of a running leader.
    Status(status::Arguments),
    /// Remove pages: all, those of a namespace, or those with given hashes.
    Reset(reset::Arguments),
    /// Refuse lookups, loads and stores, and wait until none runs.
    Drain(drain::Arguments),
    /// Change the filter of the log of the leader and its workers, until each of them ends.
    Log(log::Arguments),
    /// Move what is stored to the disk, and wait until it is durable there.
    Flush(flush::Arguments),
    /// Merge the KV events of an engine with the pages in kvferry, for routers.
    Events(Box<events::Arguments>),
    /// Check the files of a disk tier that no process uses, and repair them.
    ///
    /// A check changes nothing. Exit code 1 if something is wrong, and after a repair if something is left.
    Fsck(fsck::Arguments),
    /// Make the keys of leader, workers and operators that are on different machines.
    ///
    /// The first run makes a root, which signs and stays in DIR; later ones add or renew files with the same root.
    Keygen(keygen::Arguments),
    /// Replay a request trace through leader, workers and an engine, and verify every byte.
    Replay(Box<replay::Arguments>),
    /// Measure this machine.
    #[command(subcommand)]
    Bench(bench::Command),
    /// One rank of the reference engine; communicates over its standard input and output.
    #[command(hide = true)]
    EngineRank(engine_rank::Arguments),
}

/// JSON Schema of the output of `kvferry replay --json`.
pub fn replay_schema() -> schemars::Schema {
    schemars::schema_for!(replay::ReplayReport)
}

/// JSON Schema of the output of `kvferry fsck --json`.
pub fn fsck_schema() -> schemars::Schema {
    schemars::schema_for!(fsck::Report)
}

/// Runs the command line of this process.
pub fn main() -> ExitCode {
    run(std::env::args_os())
}

/// Runs a command line, which begins with the name of the program.
pub fn run(line: impl IntoIterator<Item = OsString>) -> ExitCode {
    program::name_process();
    let matches = taking_negative_values(Arguments::command()).get_matches_from(line);
    let arguments = Arguments::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    finish(match arguments.command {
        Command::Up(arguments) => arguments.run(),
        Command::Leader(arguments) => arguments.run(),
        Command::Worker(arguments) => arguments.run(),
        Command::WorkerGone(arguments) => arguments.run(),
        Command::Monitor(arguments) => arguments.run(),
        Command::Status(arguments) => arguments.run(),
        Command::Reset(arguments) => arguments.run(),
        Command::Drain(arguments) => arguments.run(),
        Command::Log(arguments) => arguments.run(),
        Command::Flush(arguments) => arguments.run(),
        Command::Events(arguments) => arguments.run(),
        Command::Fsck(arguments) => arguments.run(),
        Command::Keygen(arguments) => arguments.run(),
        Command::Replay(arguments) => arguments.run(),
        Command::Bench(command) => command.run(),
        Command::EngineRank(arguments) => arguments.run(),
    })
}

/// Lets values begin with `-`, so that the check of a value refuses `--g2 -1` by its name. Clap would refuse an unknown
/// flag `-1`.
fn taking_negative_values(command: clap::Command) -> clap::Command {
    let command = command.mut_args(|arg| {
        let is_size = arg.get_value_names().is_some_and(|names| names == ["SIZE"]);
        match arg.get_action().takes_values() {
            true if is_size => arg.allow_hyphen_values(true),
            true => arg.allow_negative_numbers(true),
            false => arg,
        }
    });
    command.mut_subcommands(taking_negative_values)
}
