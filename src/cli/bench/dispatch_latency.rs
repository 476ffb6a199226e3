//! Cost of ordering a copy: from the order to the report of its end, through the copy thread and the mailbox of a
//! worker, beside the same copy made directly.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ractor::{Actor, ActorProcessingErr, ActorRef};
use tokio::sync::mpsc;

use crate::error::CommandError;
use kvferry_actors::{CopyBatch, CopyThreads, EngineSide, TransferActor, TransferArguments};
use kvferry_memory::{CopyEngine, CopyJob, RegisteredMemory, WaitingLoads};
use kvferry_transport::Clock;
use kvferry_types::{DeviceEnd, Direction, Edge, EndedCopy, Time, Transfer, TransferId};

use super::percentiles;

/// Time limit of a copy of one page.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// Latencies of copies of one page each, in microseconds.
#[derive(Debug, serde::Serialize)]
pub(super) struct Ordered {
    direct_p50_us: f64,
    ordered_p50_us: f64,
    ordered_p99_us: f64,
    /// Difference of the medians: the cost of the order.
    latency_us: f64,
}

impl Ordered {
    pub(super) fn text(&self) -> String {
        format!(
            "One page: {:.1} us on the spot, {:.1} us (p99 {:.1}) when ordered as in a worker; latency per copy {:.1} us.",
            self.direct_p50_us, self.ordered_p50_us, self.ordered_p99_us, self.latency_us
        )
    }
}

/// Stands in for a worker's actor.
struct Orderer;

impl Actor for Orderer {
    type Msg = Vec<EndedCopy>;
    type State = mpsc::Sender<Vec<EndedCopy>>;
    type Arguments = mpsc::Sender<Vec<EndedCopy>>;

    async fn pre_start(
        &self,
        _myself: ActorRef<Self::Msg>,
        over: Self::Arguments,
    ) -> Result<Self::State, ActorProcessingErr> {
        Ok(over)
    }

    async fn handle(
        &self,
        _myself: ActorRef<Self::Msg>,
        ended: Vec<EndedCopy>,
        over: &mut Self::State,
    ) -> Result<(), ActorProcessingErr> {
        Ok(over.send(ended).await?)
    }
}

/// Measures both sides in turn. `job` is a load of one page.
pub(super) async fn measure(
    job: CopyJob,
    memory: RegisteredMemory,
    rounds: u32,
) -> Result<Ordered, CommandError> {
    let engine = CopyEngine::new(1).map_err(CommandError::failed)?;
    let (over, mut ended) = mpsc::channel(1);
    let (orderer, orderers_end) = Actor::spawn(None, Orderer, over)
        .await
        .map_err(CommandError::failed)?;
    let clock = Clock::start();
    let threads = CopyThreads::default();
    let arguments = TransferArguments {
        copy_threads: 1,
        waiting: WaitingLoads::default(),
        clock,
        threads: threads.clone(),
        report: Arc::new({
            let orderer = orderer.clone();
            move |copies| orderer.cast(copies).is_ok()
        }),
    };
    let (transfer, transfers_end) = Actor::spawn(None, TransferActor, arguments)
        .await
        .map_err(CommandError::failed)?;
    let (mut direct, mut ordered) = (Vec::new(), Vec::new());
    let warm_up = rounds / 10;
    for round in 0..rounds + warm_up {
        let begun = Instant::now();
        engine.run(&job).map_err(CommandError::failed)?;
        let on_the_spot = begun.elapsed();
        let copy = Transfer {
            id: TransferId(u64::from(round)),
            edge: Edge::LOAD,
            device: Some(DeviceEnd::default()),
            page_bytes: job.layout.slot_bytes,
            pairs: job.pairs.clone(),
            record: None,
            deadline: Time(u64::MAX),
        };
        let batch = CopyBatch {
            direction: Direction::Load,
            copies: vec![(copy, clock.now())],
            memory: EngineSide::Host(memory.clone()),
            depot: Arc::clone(&job.depot),
            waiting: None,
        };
        let begun = Instant::now();
        threads.start(batch).map_err(CommandError::failed)?;
        let copies = tokio::time::timeout(ANSWER_TIMEOUT, ended.recv()).await;
        let copies = copies.map_err(|_| {
            CommandError::Failed(format!(
                "a copy of one page did not end within {ANSWER_TIMEOUT:?}"
            ))
        })?;
        let copies =
            copies.ok_or_else(|| CommandError::Failed("the actor has ended".to_owned()))?;
        let complete = copies.iter().filter(|copy| copy.complete).count();
        if complete != 1 {
            let text = format!("a copy of one page ended as {copies:?}");
            return Err(CommandError::Failed(text));
        }
        if round >= warm_up {
            direct.push(on_the_spot.as_secs_f64() * 1e6);
            ordered.push(begun.elapsed().as_secs_f64() * 1e6);
        }
    }
    transfer.stop(None);
    transfers_end.await.map_err(CommandError::failed)?;
    orderer.stop(None);
    orderers_end.await.map_err(CommandError::failed)?;
    let (direct_p50_us, _) = percentiles(direct);
    let (ordered_p50_us, ordered_p99_us) = percentiles(ordered);
    Ok(Ordered {
        direct_p50_us,
        ordered_p50_us,
        ordered_p99_us,
        latency_us: ordered_p50_us - direct_p50_us,
    })
}
