//! The client of operators and probes.

use std::sync::Arc;
use std::time::Duration;

use kvferry_protocol::{
    Drain, DrainAnswer, Events, Flush, Hello, Measure, MeasureAnswer, Message, Probe, ProbeAnswer,
    ReadEvents, Reset, Role, SetLog, Status, StatusAnswer,
};
use kvferry_transport::{Address, Client, ClientSettings, Failure, Limits, Transport, answer_of};
use kvferry_types::{Request, ResetAnswer, ResetScope, TierId};

/// A connection to a leader or a worker as an operator. A worker answers [`Self::measure`], [`Self::probe`] and [`Self::set_log`] only. Cheap
/// to clone; closes when the last clone is dropped.
#[derive(Debug, Clone)]
pub struct AdminClient(Client);

impl AdminClient {
    /// Connects in the background to the leader or worker at `address`. `name` is for its log.
    pub fn start(transport: Arc<dyn Transport>, address: Address, name: &str) -> Self {
        let settings = ClientSettings {
            address,
            hello: Hello {
                // The leader recognises a request that is repeated over another connection by this identity.
                engine: fastrand::u128(..).to_be_bytes(),
                ..Hello::new(Role::Admin, name)
            },
            limits: Limits::default(),
        };
        Self(Client::without_incoming(transport, settings))
    }

    /// Requests the state of the leader. With `check` the leader recounts pages, pins and blocks, in time proportional
    /// to the size of its arena; it does so for one request a second, and answers others with `busy`.
    ///
    /// # Errors
    /// [`Failure`] with `deadline` when no leader answers within `timeout`.
    pub async fn status(&self, check: bool, timeout: Duration) -> Result<StatusAnswer, Failure> {
        self.0.call(Status { check }, timeout).await
    }

    /// Requests the numbers of the process that the status does not have.
    ///
    /// # Errors
    /// [`Failure`] with `deadline` when the process does not answer within `timeout`.
    pub async fn measure(&self, timeout: Duration) -> Result<MeasureAnswer, Failure> {
        self.0.call(Measure {}, timeout).await
    }

    /// Checks that the process handles requests, and that a worker copies pages.
    ///
    /// # Errors
    /// [`Failure`] with `deadline` when the process does not answer within `timeout`, with `copy_failed` when the worker's
    /// copy failed.
    pub async fn probe(&self, timeout: Duration) -> Result<ProbeAnswer, Failure> {
        self.0.call(Probe {}, timeout).await
    }

    /// Makes the leader refuse lookups, loads and stores, or take them again. Returns what still runs.
    ///
    /// # Errors
    /// [`Failure`] with `deadline` when no leader answers within `timeout`, or the connection breaks before an answer: the
    /// order is not repeated, and may have been carried out.
    pub async fn drain(&self, resume: bool, timeout: Duration) -> Result<DrainAnswer, Failure> {
        self.0.call(Drain { resume }, timeout).await
    }

    /// Changes the filter of the log of a leader or a worker, until its end. Returns the one before.
    ///
    /// # Errors
    /// [`Failure`] with `invalid` when the filter cannot be read, with `deadline` when the process does not answer within
    /// `timeout`, or the connection breaks before an answer: the order is not repeated, and may have been carried out.
    pub async fn set_log(&self, filter: &str, timeout: Duration) -> Result<String, Failure> {
        let filter = filter.to_owned();
        let answer = self.0.call(SetLog { filter }, timeout).await?;
        Ok(answer.before)
    }

    /// Moves what is stored to the disk, makes it durable there, and returns the number of pages that the disk holds for
    /// the engines that are attached.
    ///
    /// # Errors
    /// `invalid` without a disk tier, `not_ready` while it is closed or read, `deadline` when moves or shards take longer
    /// than `timeout`.
    pub async fn flush(&self, timeout: Duration) -> Result<u32, Failure> {
        let answer = self.0.call(Flush {}, timeout).await?;
        Ok(answer.pages)
    }

    /// Reads which pages the leader's tiers gained and lost. Give the call more time than [`ReadEvents::wait_ms`].
    ///
    /// # Errors
    /// [`Failure`] with `busy` when too many readers wait, and with `deadline` when no leader answers within `timeout`.
    pub async fn read_events(
        &self,
        read: ReadEvents,
        timeout: Duration,
    ) -> Result<Events, Failure> {
        self.0.call(read, timeout).await
    }

    /// Removes the pages of `scope` from every tier, and returns their number, which counts a page once for each tier that
    /// had it. A reset that is repeated over another
    /// connection to the same leader is carried out once; a leader that has started meanwhile carries it out again.
    ///
    /// # Errors
    /// `leased` when a lookup or a load holds one of the pages; nothing is removed then.
    pub async fn reset(&self, scope: ResetScope, timeout: Duration) -> Result<u32, Failure> {
        Ok(self.reset_tier(scope, None, timeout).await?.pages)
    }

    /// Like [`Self::reset`], of one tier: the others keep the pages. `None` stands for all tiers. Returns the numbers of pages
    /// by tier.
    ///
    /// # Errors
    /// See [`Self::reset`]. Pages that are held in another tier do not refuse the reset.
    pub async fn reset_tier(
        &self,
        scope: ResetScope,
        tier: Option<TierId>,
        timeout: Duration,
    ) -> Result<ResetAnswer, Failure> {
        let message = Message::from(Request::Reset { scope, tier });
        let answer = self.0.request(message, timeout).await?;
        answer_of::<Reset>(answer)
    }
}
