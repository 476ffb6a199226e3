//! The commands, one file each. `shutdown` and `signals` hold the shared shutdown logic of leader and worker processes,
//! `socket_paths` the layout of the socket directory.

pub mod bench;
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
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};

use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand};
use tokio::signal::unix::{SignalKind, signal};

use crate::config::{Config, Flags};
use crate::error::{CommandError, EXIT_CODES};
use kvferry_transport::CertificateHolder;

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

/// Sources of the settings.
#[derive(Debug, Clone, clap::Args)]
struct ConfigArguments {
    /// A TOML file with settings; the environment (KVFERRY_RATIO=32) and flags override it.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    flags: Flags,
}

impl ConfigArguments {
    /// Loads and checks the settings, and starts logging with them.
    fn load(mut self) -> Result<Config, CommandError> {
        let paths = [&mut self.flags.socket_dir, &mut self.flags.namespaces];
        // `absolute` refuses an empty path, which means none.
        for path in paths.into_iter().flatten() {
            if let Ok(absolute) = std::path::absolute(&*path) {
                *path = absolute;
            }
        }
        let config = Config::load(self.config.as_deref(), &self.flags)?;
        crate::telemetry::start(&config.log)?;
        Ok(config)
    }
}

/// Settings of a command that only connects to a running leader of this machine.
#[derive(Debug, Clone, clap::Args)]
struct LocalArguments {
    /// A TOML file with settings, that of `kvferry up`; the environment (KVFERRY_SOCKET_DIR=/run/kvf) and flags
    /// override it.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Directory of the sockets, that of `kvferry up`.
    #[arg(long, value_name = "DIR")]
    socket_dir: Option<PathBuf>,
}

impl LocalArguments {
    /// Loads and checks the settings, starts logging of warnings, and returns the paths of the sockets.
    fn load(self) -> Result<socket_paths::SocketPaths, CommandError> {
        let flags = Flags {
            socket_dir: self.socket_dir,
            log: Some("warn".to_owned()),
            ..Flags::default()
        };
        let config = self.config;
        let config = ConfigArguments { config, flags }.load()?;
        Ok(socket_paths::SocketPaths::new(&config.socket_dir))
    }
}

/// Settings of a command that only connects to a running leader.
#[derive(Debug, Clone, clap::Args)]
struct ClientArguments {
    /// A TOML file with settings, that of `kvferry up`; the environment (KVFERRY_SOCKET_DIR=/run/kvf) and flags
    /// override it.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Directory of the sockets, that of `kvferry up`.
    #[arg(long, value_name = "DIR")]
    socket_dir: Option<PathBuf>,
    #[command(flatten)]
    leader: remote::LeaderArguments,
    /// Filter of the log, such as info,kvferry=debug.
    #[arg(long, value_name = "FILTER", default_value = "warn")]
    log: String,
}

impl ClientArguments {
    /// Loads and checks the settings, starts logging, and returns the paths of the sockets and the place of the leader.
    fn load(self) -> Result<(socket_paths::SocketPaths, remote::LeaderPlace), CommandError> {
        let flags = Flags {
            socket_dir: self.socket_dir,
            log: Some(self.log),
            ..Flags::default()
        };
        let config = self.config;
        let config = ConfigArguments { config, flags }.load()?;
        let socket_paths = socket_paths::SocketPaths::new(&config.socket_dir);
        let wanted = |holder| {
            matches!(
                holder,
                CertificateHolder::Admin | CertificateHolder::Monitor
            )
        };
        let place = self
            .leader
            .load(&socket_paths, "an admin or a monitor", wanted)?;
        Ok((socket_paths, place))
    }
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

/// Reports the error of a command, if there is one, and returns the exit code of the process.
pub fn finish(result: Result<(), CommandError>) -> ExitCode {
    let code = match result {
        Ok(()) => u8::from(UNWRITTEN.load(Ordering::Relaxed)),
        Err(error) => {
            print_error(&error);
            error.exit_code()
        }
    };
    if kvferry_cuda::threads_in_driver() {
        kvferry_cuda::end_process(code);
    }
    ExitCode::from(code)
}

/// Reports a failed command on standard error, in one write, because other processes may write lines there too. If that
/// fails, the exit code alone reports the failure.
fn print_error(error: &CommandError) {
    let line = format!("error: {error}\n");
    std::io::stderr().write_all(line.as_bytes()).ok();
}

/// Set when a result could not be written to standard output. The failure was reported on standard error.
static UNWRITTEN: AtomicBool = AtomicBool::new(false);

/// Prints a result. A reader that closes the pipe early, such as `head`, is no failure; any other error makes the exit
/// code 1.
pub fn print_line(text: &str) {
    let mut out = std::io::stdout().lock();
    if let Err(error) = writeln!(out, "{text}").and_then(|()| out.flush())
        && error.kind() != std::io::ErrorKind::BrokenPipe
        && !UNWRITTEN.swap(true, Ordering::Relaxed)
    {
        print_error(&CommandError::Failed(format!("standard output: {error}")));
    }
}

/// Prints progress, which is no result, on standard error. A failure changes nothing.
fn say_progress(text: &str) {
    let line = format!("{text}\n");
    std::io::stderr().write_all(line.as_bytes()).ok();
}

/// Makes the write to a file of the largest size (`ulimit -f`) fail, which each part handles as it handles a full disk.
/// Without a handler, the kernel ends the process.
fn fail_at_the_largest_file() {
    let kind = SignalKind::from_raw(rustix::process::Signal::XFSZ.as_raw());
    if let Err(error) = signal(kind) {
        tracing::warn!(%error, "a file that reaches `ulimit -f` ends this process");
    }
}

/// Fails where the system starts no further thread. The runtime panics there.
fn can_start(threads: usize) -> Result<(), CommandError> {
    let (end, ended) = crossbeam::channel::bounded::<()>(0);
    let started: Result<Vec<_>, _> = (0..threads)
        .map(|_| {
            let ended = ended.clone();
            std::thread::Builder::new().spawn(move || ended.recv().is_err())
        })
        .collect();
    drop(end);
    let started = started.map_err(|error| {
        CommandError::Failed(format!(
            "no thread can be started: {error}; end other processes of this user, or raise ulimit -u"
        ))
    })?;
    for thread in started {
        drop(thread.join());
    }
    Ok(())
}

/// Runs an async command on a runtime of its own.
pub fn block_on<T>(
    threads: usize,
    command: impl Future<Output = Result<T, CommandError>>,
) -> Result<T, CommandError> {
    can_start(threads)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(threads)
        .enable_all()
        .build()
        .map_err(CommandError::failed)?;
    let result = runtime.block_on(async {
        fail_at_the_largest_file();
        command.await
    });
    // A thread may still wait for standard input. The process ends without waiting for it.
    runtime.shutdown_background();
    result
}
