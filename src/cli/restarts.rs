//! How often `up` has started each process again, and why. `up` keeps the counts in a file of the socket directory; the
//! leader reads them for `status`, and the monitor for metrics. A file, because a leader and a monitor that have just
//! started need the counts of those before them, and the monitor also while no leader runs.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use kvferry_protocol::RestartedProcess;

/// Largest file that is read, in bytes: each of 4,098 processes has a line of at most 200 bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Why a process was started again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Cause {
    /// It ended with an exit code.
    Exit,
    /// A signal ended it.
    Signal,
    /// The kernel ended it for lack of memory.
    OutOfMemory,
    /// `up` killed it, on request of the leader.
    Fenced,
    /// It could not be started before.
    NotStarted,
    /// The system did not report how it ended.
    Unknown,
}

impl Cause {
    /// The name in the status and in metrics.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Exit => "exit",
            Self::Signal => "signal",
            Self::OutOfMemory => "out_of_memory",
            Self::Fenced => "fenced",
            Self::NotStarted => "not_started",
            Self::Unknown => "unknown",
        }
    }
}

/// The counts of one `up`.
#[derive(Debug, Default)]
pub(super) struct Restarts(BTreeMap<String, BTreeMap<Cause, u64>>);

impl Restarts {
    /// Counts that a process is to be started again.
    pub(super) fn count(&mut self, process: String, cause: Cause) {
        let causes = self.0.entry(process).or_default();
        *causes.entry(cause).or_default() += 1;
    }

    /// The content of the file.
    pub(super) fn text(&self) -> String {
        let processes = self.0.iter().map(|(process, causes)| RestartedProcess {
            process: process.clone(),
            causes: causes
                .iter()
                .map(|(cause, count)| (cause.name().to_owned(), *count))
                .collect(),
        });
        serde_json::to_string(&processes.collect::<Vec<_>>()).unwrap_or_default()
    }
}

/// Writes the file in one step, so that a reader finds the whole of one state.
pub(super) fn replace(path: &Path, text: &str) -> std::io::Result<()> {
    let fresh = path.with_extension("new");
    let mut file = File::options()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&fresh)?;
    file.write_all(text.as_bytes())?;
    std::fs::rename(&fresh, path)
}

/// Reads the counts of the `up` that has started this process. Empty if they cannot be read.
pub(super) fn read(path: &Path) -> Vec<RestartedProcess> {
    let text = || {
        let mut text = String::new();
        File::open(path)?
            .take(FILE_BYTES_MAX)
            .read_to_string(&mut text)?;
        Ok(text)
    };
    let text = text().map_err(|error: std::io::Error| error.to_string());
    let read = text.and_then(|text| serde_json::from_str(&text).map_err(|error| error.to_string()));
    read.unwrap_or_else(|error| {
        tracing::debug!(error, path = %path.display(), "the restarts of processes are unknown");
        Vec::new()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_read_as_they_were_written() {
        let folder = tempfile::tempdir().expect("a directory");
        let path = folder.path().join("restarts");
        assert_eq!(read(&path), []);
        let mut restarts = Restarts::default();
        replace(&path, &restarts.text()).expect("written");
        assert_eq!(read(&path), []);
        restarts.count("leader".to_owned(), Cause::Exit);
        for _ in 0..2 {
            restarts.count("worker-0-1".to_owned(), Cause::OutOfMemory);
        }
        restarts.count("worker-0-1".to_owned(), Cause::Signal);
        replace(&path, &restarts.text()).expect("written");
        let process = |process: &str, causes: &[(&str, u64)]| RestartedProcess {
            process: process.to_owned(),
            causes: causes
                .iter()
                .map(|(cause, count)| ((*cause).to_owned(), *count))
                .collect(),
        };
        let expected = [
            process("leader", &[("exit", 1)]),
            process("worker-0-1", &[("out_of_memory", 2), ("signal", 1)]),
        ];
        assert_eq!(read(&path), expected);
        std::fs::write(&path, "[").expect("written");
        assert_eq!(read(&path), []);
    }
}
