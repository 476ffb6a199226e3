//! What leader and worker processes have in common: how they end.

use std::time::Duration;

use tokio::io::AsyncReadExt;
use tokio::signal::unix::{SignalKind, signal};

use crate::error::CommandError;

/// How long a process waits for copies under way when it is told to end.
pub(super) const DRAIN_LIMIT: Duration = Duration::from_secs(5);

/// Waits until the process is told to end: SIGTERM, SIGINT, or, under a supervisor, the end of standard input, which
/// comes when the supervisor is gone, however it went.
pub(super) async fn told_to_end(supervised: bool) -> Result<(), CommandError> {
    let mut terminate = signal(SignalKind::terminate()).map_err(CommandError::failed)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(CommandError::failed)?;
    tokio::select! {
        _ = terminate.recv() => {}
        // A supervisor in the same terminal gets the signal too, and passes it on in its own order.
        _ = interrupt.recv(), if !supervised => {}
        () = end_of_input(), if supervised => tracing::warn!("the supervisor is gone"),
    }
    Ok(())
}

async fn end_of_input() {
    let mut input = tokio::io::stdin();
    let mut byte = [0];
    while matches!(input.read(&mut byte).await, Ok(1)) {}
}
