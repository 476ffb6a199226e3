//! Fixtures of the measurements: page hashes, and processes with clients.

use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;

use tempfile::TempDir;
use tokio::process::Child;
use tokio::sync::mpsc;

use crate::cli::{program, temporary};
use crate::error::CommandError;
use kvferry_protocol::{Hello, Role};
use kvferry_transport::{Address, Client, ClientSettings, Incoming, Limits, ZmqTransport};
use kvferry_types::EngineId;

/// Bytes of a page hash.
pub const HASH_BYTES: usize = 16;
/// The engine that owns the pages.
pub const ENGINE: EngineId = EngineId([7; 16]);
/// The packed page hashes of a prompt. Equal arguments give equal hashes.
pub fn hashes(prompt: u64, pages: u32) -> Vec<u8> {
    let mut bytes = vec![0; pages as usize * HASH_BYTES];
    fastrand::Rng::with_seed(prompt).fill(&mut bytes);
    bytes
}

/// Creates a folder for sockets, removed when the returned value is dropped.
pub fn folder() -> Result<TempDir, CommandError> {
    temporary::socket_dir("kvferry-bench-")
}

/// Starts this program as a process that ends with this one.
pub fn process(arguments: &[&str], folder: &Path) -> Result<Child, CommandError> {
    process_with_errors(arguments, folder, Stdio::inherit())
}

/// The same, with another standard error.
pub fn process_with_errors(
    arguments: &[&str],
    folder: &Path,
    errors: Stdio,
) -> Result<Child, CommandError> {
    let child = program::command()
        .args(arguments)
        .arg(folder)
        .stdin(Stdio::piped())
        // What a leader tells its supervisor does not belong between the results.
        .stdout(Stdio::null())
        .stderr(errors)
        .kill_on_drop(true)
        .spawn();
    child.map_err(CommandError::failed)
}

/// The introduction of a client of the measurements.
pub fn hello(role: Role) -> Hello {
    Hello {
        engine: ENGINE.0,
        ..Hello::new(role, "bench")
    }
}

/// Connects to the server that listens in a directory.
pub fn client(address: Address, role: Role) -> (Client, mpsc::Receiver<Incoming>) {
    let settings = ClientSettings {
        address,
        hello: hello(role),
        limits: Limits::default(),
    };
    Client::start(Arc::new(ZmqTransport), settings)
}
