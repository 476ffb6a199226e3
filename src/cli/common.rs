//! What all commands do: run on a runtime, print results and progress, and end with an exit code.

use std::io::Write as _;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::{Resource, getrlimit, setrlimit};
use tokio::signal::unix::{SignalKind, signal};

use crate::error::CommandError;

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
pub(super) fn say_progress(text: &str) {
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

/// Raises the limit of open files to its maximum. Each chunk of an engine's memory is a file, so that the usual limit of
/// 1024 may be too low.
pub(super) fn open_as_many_files_as_allowed() {
    let mut files = getrlimit(Resource::Nofile);
    files.current = files.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, files) {
        tracing::warn!(%error, "cannot raise the number of open files");
    }
}

/// Fills `bytes` with random bytes of the system.
pub(super) fn random(bytes: &mut [u8]) -> Result<(), CommandError> {
    let flags = rustix::rand::GetRandomFlags::empty();
    match rustix::rand::getrandom(&mut *bytes, flags) {
        Ok(count) if count == bytes.len() => Ok(()),
        Ok(count) => Err(CommandError::Failed(format!(
            "the system gave {count} of {} random bytes",
            bytes.len()
        ))),
        Err(error) => Err(CommandError::failed(error)),
    }
}
