//! The commands. One file each; `process` holds what leader and worker processes have in common, `signals` the signals
//! that end them, `dirs` where they meet.
//!
//! Exit codes: 0 done; 1 failed, or found something wrong; 2 the command line is wrong; 65 a named file cannot be used;
//! 78 a setting is wrong.

mod bench;
mod dirs;
mod engine_rank;
mod leader;
mod process;
mod replay;
mod reset;
mod room;
mod signals;
mod sim;
mod status;
mod up;
mod worker;

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};

use clap::{Parser, Subcommand};

use crate::config::{Config, Flags};
use crate::error::CommandError;

/// Moves LLM KV-cache blocks between engine memory and host memory, so that a prompt prefix that was computed once is
/// loaded instead of computed again.
#[derive(Debug, Parser)]
#[command(name = "kvferry", version, max_term_width = 100)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Start a leader and its workers, hold their host memory, restart what dies.
    ///
    /// SIGTERM, SIGINT (Ctrl-C) and SIGHUP end all of it in order. SIGINT and SIGHUP are without effect where they are
    /// ignored at the start: under nohup, and in the background of a shell without job control.
    Up(up::Arguments),
    /// Run a leader alone.
    Leader(leader::Arguments),
    /// Run the worker of one rank alone.
    Worker(worker::Arguments),
    /// Show how a running leader is doing.
    Status(status::Arguments),
    /// Forget pages: all, those of a namespace, or those with given hashes.
    Reset(reset::Arguments),
    /// Replay a request trace through leader, workers and an engine, and verify every byte.
    Replay(Box<replay::Arguments>),
    /// Measure this machine.
    #[command(subcommand)]
    Bench(bench::Command),
    /// Run simulated worlds with faults. For developers: see `cargo xtask sim`.
    #[command(hide = true)]
    Sim(sim::Arguments),
    /// One rank of the reference engine; speaks over its standard input and output.
    #[command(hide = true)]
    EngineRank(engine_rank::Arguments),
}

/// Where settings come from.
#[derive(Debug, Clone, clap::Args)]
struct ConfigArguments {
    /// A TOML file with settings; the environment (KVFERRY_RATIO=32) and flags override it.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    flags: Flags,
}

impl ConfigArguments {
    /// The settings, checked; logging starts with them.
    fn load(mut self) -> Result<Config, CommandError> {
        if let Some(dir) = &mut self.flags.socket_dir
            && let Ok(absolute) = std::path::absolute(&*dir)
        {
            *dir = absolute;
        }
        let config = Config::load(self.config.as_deref(), &self.flags)?;
        crate::telemetry::start(&config.log).map_err(CommandError::Config)?;
        Ok(config)
    }
}

/// JSON Schema of what `kvferry replay --json` writes.
pub fn replay_schema() -> schemars::Schema {
    schemars::schema_for!(replay::Report)
}

/// Runs the command line of this process.
pub fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let result = match arguments.command {
        Command::Up(arguments) => arguments.run(),
        Command::Leader(arguments) => arguments.run(),
        Command::Worker(arguments) => arguments.run(),
        Command::Status(arguments) => arguments.run(),
        Command::Reset(arguments) => arguments.run(),
        Command::Replay(arguments) => arguments.run(),
        Command::Bench(command) => command.run(),
        Command::Sim(arguments) => arguments.run(),
        Command::EngineRank(arguments) => arguments.run(),
    };
    let code = match result {
        Ok(()) => u8::from(UNWRITTEN.load(Ordering::Relaxed)),
        Err(error) => {
            say_error(&error);
            error.exit_code()
        }
    };
    if crate::cuda::threads_in_driver() {
        crate::cuda::end_process(code);
    }
    ExitCode::from(code)
}

/// Says why a command failed, in one write: lines of other processes may go to the same place. Where nothing can be
/// written there, the exit code alone tells.
fn say_error(error: &CommandError) {
    let line = format!("error: {error}\n");
    std::io::stderr().write_all(line.as_bytes()).ok();
}

/// A result could not be written to standard output, and was told instead.
static UNWRITTEN: AtomicBool = AtomicBool::new(false);

/// Prints a result. A reader that has seen enough, as `head`, is no failure; anything else makes the exit code 1.
fn say(text: &str) {
    let mut out = std::io::stdout().lock();
    if let Err(error) = writeln!(out, "{text}").and_then(|()| out.flush())
        && error.kind() != std::io::ErrorKind::BrokenPipe
        && !UNWRITTEN.swap(true, Ordering::Relaxed)
    {
        say_error(&CommandError::Failed(format!("standard output: {error}")));
    }
}

/// Runs an async command on a runtime of its own.
fn block_on<T>(
    threads: usize,
    command: impl Future<Output = Result<T, CommandError>>,
) -> Result<T, CommandError> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(threads)
        .enable_all()
        .build()
        .map_err(CommandError::failed)?;
    let result = runtime.block_on(command);
    // A thread may still wait for standard input; the process ends without it.
    runtime.shutdown_background();
    result
}
