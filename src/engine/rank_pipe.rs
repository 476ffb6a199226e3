//! The scheduler's end of the pipes to its rank processes.

use std::time::Duration;

use tokio::process::{Child, ChildStdin, ChildStdout};
use tokio::sync::mpsc;

use crate::error::EngineError;
use crate::pipe::{self, RankOrder, RankReport};

/// Orders that may wait in a rank's queue.
pub(super) const RANK_QUEUE: usize = 1024;

/// A rank process and the pipes to it.
#[derive(Debug)]
pub struct RankPipe {
    /// The process, which is killed when this is dropped.
    pub child: Child,
    /// The pipe for orders.
    pub orders: ChildStdin,
    /// The pipe for reports.
    pub reports: ChildStdout,
}

impl RankPipe {
    /// Waits until the rank reports that it has registered.
    ///
    /// # Errors
    /// The rank's own error, or that it ended or took longer than `limit`.
    pub async fn wait_until_ready(&mut self, limit: Duration) -> Result<(), EngineError> {
        match tokio::time::timeout(limit, pipe::read::<RankReport>(&mut self.reports)).await {
            Err(_) => Err(EngineError::TooLate {
                what: "register",
                limit,
            }),
            Ok(Ok(Some(report))) if report.fatal => Err(EngineError::RankFailed(report.complaint)),
            Ok(Ok(Some(_))) => Ok(()),
            Ok(Ok(None)) => Err(EngineError::Protocol("closed before the rank was ready")),
            Ok(Err(error)) => Err(EngineError::Pipe(error)),
        }
    }
}

/// Writes orders until the queue ends or the pipe breaks.
pub(super) async fn send_orders(mut orders: mpsc::Receiver<RankOrder>, mut pipe: ChildStdin) {
    while let Some(order) = orders.recv().await {
        if let Err(error) = pipe::write(&mut pipe, &order).await {
            tracing::debug!(%error, "a rank takes no orders");
            return;
        }
    }
}

/// Reads reports. Sends `None` once, when the rank has ended.
pub(super) async fn take_reports<T>(
    mut reports: ChildStdout,
    events: mpsc::Sender<T>,
    event: impl Fn(Option<RankReport>) -> T,
) {
    loop {
        let report = pipe::read::<RankReport>(&mut reports).await.ok().flatten();
        let last = report.is_none();
        if events.send(event(report)).await.is_err() || last {
            return;
        }
    }
}
