//! Why a leader does not answer, as far as its directory and its process show it.

use std::io;
use std::path::Path;
use std::time::Duration;

use tokio::time::Instant;

use crate::cli::remote::LeaderPlace;
use kvferry_transport::{Address, Listening, TransportError, listening_in, own_uid};

/// Time after which a command gives up a leader that cannot answer. A leader that starts again is back by then.
const GIVE_UP_AFTER: Duration = Duration::from_millis(200);
/// Time in which most answers come: only after it the leader's process is looked at.
const LOOK_AFTER: Duration = Duration::from_millis(100);
/// Pauses between looks before the leader could be given up, and after it: a look at a process connects to it.
const LOOK_PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

/// Waits until it is clear that the leader of a place will not answer, and returns the reason; for ever if it may answer.
pub(super) async fn hopeless(place: &LeaderPlace) -> String {
    let Address::Directory(directory) = &place.address else {
        return std::future::pending().await;
    };
    let begun = Instant::now();
    loop {
        match look(directory, begun.elapsed() >= LOOK_AFTER).await {
            Look::Useless(why) => return why,
            Look::Absent(why) if begun.elapsed() >= GIVE_UP_AFTER => return why,
            Look::Absent(_) | Look::MayAnswer => {}
        }
        let is_early = begun.elapsed() < GIVE_UP_AFTER;
        let (early, late) = LOOK_PAUSES;
        tokio::time::sleep(if is_early { early } else { late }).await;
    }
}

/// Says that no answer came in time, and which process did not answer.
pub(super) async fn silent(directory: &Path, failure: &impl std::fmt::Display) -> String {
    let root = directory.parent().unwrap_or(directory).display();
    let process = match listening_in(directory).await {
        Ok(Listening::Process(Some(pid))) => {
            let state = state_of(pid).map(|state| format!(", state {state}"));
            format!(" (process {pid}{})", state.unwrap_or_default())
        }
        Ok(Listening::Process(None)) => " (a process of another PID namespace)".to_owned(),
        Ok(Listening::Nobody) | Err(_) => String::new(),
    };
    format!("the leader in {root}{process} does not answer: {failure}; read its log, and retry")
}

/// What a look at a leader's directory shows.
enum Look {
    /// No leader will ever answer there.
    Useless(String),
    /// No leader answers there now.
    Absent(String),
    MayAnswer,
}

async fn look(directory: &Path, at_the_process: bool) -> Look {
    let root = directory.parent().unwrap_or(directory);
    let shown = root.display();
    if let Some(owner) = other_owner(root).or_else(|| other_owner(directory)) {
        return Look::Useless(format!(
            "no leader answers uid {} in {shown}, which belongs to uid {owner}: run the command as that user",
            own_uid(),
        ));
    }
    match std::fs::metadata(root) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Look::Absent(format!(
                "no leader answers in {shown}, which does not exist: start `kvferry up` with this --socket-dir, or name \
                 the one of a running `kvferry up`"
            ));
        }
        _ => {}
    }
    let nobody = || {
        Look::Absent(format!(
            "no leader answers in {shown}: no process listens there; is `kvferry up` running with this --socket-dir?"
        ))
    };
    if std::fs::symlink_metadata(directory.join("kvferry.sock")).is_err() && !at_the_process {
        return nobody();
    }
    if !at_the_process {
        return Look::MayAnswer;
    }
    match listening_in(directory).await {
        Ok(Listening::Nobody) => nobody(),
        Ok(Listening::Process(Some(pid))) if matches!(state_of(pid), Some('T' | 't')) => {
            Look::Absent(format!(
                "the leader in {shown}, process {pid}, is stopped (state T) and does not answer: run kill -CONT {pid}, or \
                 end it"
            ))
        }
        Ok(Listening::Process(_)) => Look::MayAnswer,
        Err(TransportError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            nobody()
        }
        Err(error) => Look::Useless(format!("no leader answers in {shown}: {error}")),
    }
}

/// The owner of a directory, if that is another user than this one.
fn other_owner(directory: &Path) -> Option<u32> {
    use std::os::unix::fs::MetadataExt as _;
    let owner = std::fs::metadata(directory).ok()?.uid();
    (owner != own_uid()).then_some(owner)
}

/// The letter of a process's state, as `ps` shows it.
fn state_of(pid: i32) -> Option<char> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, after_name) = text.rsplit_once(')')?;
    after_name.trim_start().chars().next()
}
