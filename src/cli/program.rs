//! The running program, for processes that this one starts.

use tokio::process::Command;

/// The file that this process runs, also after another one has taken its name. A path would then name another version, or
/// nothing: `std::env::current_exe` ends in ` (deleted)`. In a new process the link still leads to the file of the one
/// that started it, until it runs that file.
pub(super) const PROGRAM: &str = "/proc/self/exe";
/// The name of each process in `ps` and `top`, which would be `exe` otherwise.
const NAME: &std::ffi::CStr = c"kvferry";

/// A command that runs this program again.
pub(super) fn command() -> Command {
    let mut command = Command::new(PROGRAM);
    if let Some(name) = std::env::args_os().next() {
        command.arg0(name);
    }
    command
}

/// Gives this process its name.
pub(super) fn name_process() {
    if let Err(error) = rustix::thread::set_name(NAME) {
        tracing::debug!(%error, "this process keeps its name");
    }
}
