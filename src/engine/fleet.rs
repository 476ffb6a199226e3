//! Engines beside each other that share one leader: replicas of one model.

use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::engine::driver::{Driver, Event};
use crate::engine::observed::Observed;
use crate::engine::rank_pipe::{RANK_QUEUE, RankPipe};
use crate::engine::scheduler::{Prompt, Scheduler, Served};
use crate::transport::Client;

/// What one engine is driven with.
#[derive(Debug)]
pub struct EngineParts {
    /// Its scheduler.
    pub scheduler: Scheduler,
    /// Its conversation with the leader.
    pub client: Client,
    /// Its ranks, which have registered.
    pub ranks: Vec<RankPipe>,
}

/// See the module. Prompts are dealt to the engines in turn.
pub struct Fleet {
    drivers: Vec<Driver>,
    events: mpsc::Receiver<Event>,
    next: usize,
}

impl Fleet {
    /// Joins engines with their leader and ranks. A request that is not answered within `request_timeout` is given up.
    pub fn new(engines: Vec<EngineParts>, request_timeout: Duration) -> Self {
        let (report, events) = mpsc::channel(RANK_QUEUE);
        let engines = engines.into_iter().enumerate();
        let drivers = engines
            .map(|(index, parts)| Driver::new(index, parts, request_timeout, report.clone()));
        Self {
            drivers: drivers.collect(),
            events,
            next: 0,
        }
    }

    /// Prompts that run or wait.
    pub fn open_prompts(&self) -> usize {
        self.drivers.iter().map(Driver::open_prompts).sum()
    }

    /// Pages that prompts hold: zero when none runs.
    pub fn held_pages(&self) -> u64 {
        let held = self.drivers.iter().map(Driver::held_pages);
        held.map(u64::from).sum()
    }

    /// Bytes that came back wrong so far.
    pub fn mismatched_bytes(&self) -> u64 {
        let observed = self.drivers.iter().map(Driver::observed);
        observed.map(|observed| observed.mismatched_bytes).sum()
    }

    /// A prompt arrives at the next engine. Appends what was served meanwhile.
    ///
    /// # Errors
    /// A rank that is gone, or gives up.
    pub async fn arrive(&mut self, prompt: Prompt, served: &mut Vec<Served>) -> Result<(), String> {
        let index = self.next;
        self.next = (index + 1) % self.drivers.len().max(1);
        let driver = self.drivers.get_mut(index).ok_or("no engine")?;
        driver.arrive(prompt, served).await
    }

    /// Waits until something happens, at most until `limit`, and goes on from there. Appends what was served.
    ///
    /// # Errors
    /// A rank that is gone, or gives up.
    pub async fn progress(
        &mut self,
        limit: Instant,
        served: &mut Vec<Served>,
    ) -> Result<(), String> {
        let Ok(event) = tokio::time::timeout_at(limit, self.events.recv()).await else {
            return Ok(());
        };
        let mut next = event;
        while let Some(event) = next {
            let driver = self.drivers.get_mut(event.engine).ok_or("no engine")?;
            driver.take(event.happened)?;
            next = self.events.try_recv().ok();
        }
        for driver in &mut self.drivers {
            driver.act(served).await?;
        }
        Ok(())
    }

    /// Waits, at most until `limit`, until the leader has heard of the end of every prompt.
    ///
    /// # Errors
    /// A rank that is gone, or gives up.
    pub async fn settle(&mut self, limit: Instant) -> Result<(), String> {
        let mut served = Vec::new();
        while Instant::now() < limit && self.drivers.iter().any(Driver::is_finishing) {
            self.progress(limit, &mut served).await?;
        }
        Ok(())
    }

    /// Ends the ranks: closes their pipes and waits for them, at most `limit` each.
    ///
    /// # Errors
    /// A rank that does not end with success.
    pub async fn end(self, limit: Duration) -> Result<Observed, String> {
        let mut observed = Observed::default();
        for driver in self.drivers {
            observed.add(driver.end(limit).await?);
        }
        Ok(observed)
    }
}
