//! Several engines that share one leader: replicas of one model.

use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::driver::{EngineDriver, EngineEvent, EngineParts};
use crate::error::EngineError;
use crate::metrics::EngineMetrics;
use crate::rank_pipe::RANK_QUEUE;
use kvferry_workload::scheduler::{Prompt, Served};

/// Replicas that share one leader. Prompts are assigned to the engines in turn.
pub struct Fleet {
    drivers: Vec<EngineDriver>,
    events: mpsc::Receiver<EngineEvent>,
    next: usize,
}

impl Fleet {
    /// Connects engines to their leader and ranks. A request that is not answered within `request_timeout` is
    /// abandoned.
    pub fn new(engines: Vec<EngineParts>, request_timeout: Duration) -> Self {
        let (report, events) = mpsc::channel(RANK_QUEUE);
        let engines = engines.into_iter().enumerate();
        let drivers = engines
            .map(|(index, parts)| EngineDriver::new(index, parts, request_timeout, report.clone()));
        Self {
            drivers: drivers.collect(),
            events,
            next: 0,
        }
    }

    /// Prompts that run or wait.
    pub fn open_prompts(&self) -> usize {
        self.drivers.iter().map(EngineDriver::open_prompts).sum()
    }

    /// Pages that prompts hold: 0 when none runs.
    pub fn held_pages(&self) -> u64 {
        let held = self.drivers.iter().map(EngineDriver::held_pages);
        held.map(u64::from).sum()
    }

    /// Loaded bytes that were wrong so far.
    pub fn mismatched_bytes(&self) -> u64 {
        let observed = self.drivers.iter().map(EngineDriver::observed);
        observed.map(|observed| observed.mismatched_bytes).sum()
    }

    /// Adds a prompt to the next engine in turn. Appends the prompts that completed.
    ///
    /// # Errors
    /// A rank that ended or failed.
    pub async fn arrive(
        &mut self,
        prompt: Prompt,
        served: &mut Vec<Served>,
    ) -> Result<(), EngineError> {
        let index = self.next;
        self.next = (index + 1) % self.drivers.len().max(1);
        let driver = self.drivers.get_mut(index).ok_or(EngineError::NoEngine)?;
        driver.arrive(prompt, served).await
    }

    /// Waits for the next event, at most until `limit`, and handles it and all further ones that are queued. Appends
    /// the prompts that completed.
    ///
    /// # Errors
    /// A rank that ended or failed.
    pub async fn progress(
        &mut self,
        limit: Instant,
        served: &mut Vec<Served>,
    ) -> Result<(), EngineError> {
        let Ok(event) = tokio::time::timeout_at(limit, self.events.recv()).await else {
            return Ok(());
        };
        let mut next = event;
        while let Some(event) = next {
            let driver = self
                .drivers
                .get_mut(event.engine)
                .ok_or(EngineError::NoEngine)?;
            driver.take(event.kind)?;
            next = self.events.try_recv().ok();
        }
        for driver in &mut self.drivers {
            driver.act(served).await?;
        }
        Ok(())
    }

    /// Waits, at most until `limit`, until the leader has accepted the `finish` of every prompt.
    ///
    /// # Errors
    /// A rank that ended or failed.
    pub async fn settle(&mut self, limit: Instant) -> Result<(), EngineError> {
        let mut served = Vec::new();
        while Instant::now() < limit && self.drivers.iter().any(EngineDriver::is_finishing) {
            self.progress(limit, &mut served).await?;
        }
        Ok(())
    }

    /// Kills the ranks, whatever they do.
    pub async fn kill(self) -> EngineMetrics {
        let mut observed = EngineMetrics::default();
        for driver in self.drivers {
            observed.add(driver.kill().await);
        }
        observed
    }

    /// Ends the ranks: closes their pipes and waits at most `limit` for each.
    ///
    /// # Errors
    /// A rank that does not end with success.
    pub async fn end(self, limit: Duration) -> Result<EngineMetrics, EngineError> {
        let mut observed = EngineMetrics::default();
        for driver in self.drivers {
            observed.add(driver.end(limit).await?);
        }
        Ok(observed)
    }
}
