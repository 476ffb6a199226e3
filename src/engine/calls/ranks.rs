//! The ranks of a replayed engine: tasks of this process, with memory of the recorded shape and small pages.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncWriteExt, DuplexStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::frames::{Header, HeaderGroup};
use crate::error::EngineError;
use crate::layout::NONCE_ROOM_BYTES;
use crate::pipe::{self, RankOrder, RankReport};
use crate::rank;
use crate::settings::{EngineDevice, EngineLayout, RankSettings};
use kvferry_transport::ZmqTransport;
use kvferry_types::{Attention, EngineId, Rank, Replica, Sharding, TensorRole};
use kvferry_workload::hybrid::{LayerGroup, LayerKind};
use kvferry_workload::models::{ModelGeometry, ModelGroup};

/// Bytes of a page in a replay, on one rank, whatever the recorded engine's pages have: a leader decides about pages.
pub const PAGE_BYTES: u64 = 1 << 10;
/// Bytes of orders that may wait for a rank.
const PIPE_BYTES: usize = 1 << 20;
/// Longest wait for a rank that reads no orders.
const ORDER_LIMIT: Duration = Duration::from_secs(60);

/// Why an engine of a recording cannot be started.
#[derive(Debug, thiserror::Error)]
#[error(
    "group {group} of the recorded engine has layers of a kind that this program does not know"
)]
pub struct UnknownLayers {
    /// The group.
    pub group: usize,
}

/// What the ranks have reported, all together.
#[derive(Debug, Default)]
struct Reported {
    verified_bytes: u64,
    mismatched_bytes: u64,
    complaint: String,
    fatal: bool,
}

/// The ranks of one engine.
pub(super) struct Ranks {
    orders: Vec<DuplexStream>,
    tasks: Vec<JoinHandle<Result<(), EngineError>>>,
    reading: Vec<JoinHandle<()>>,
    reported: Arc<Mutex<Reported>>,
    ready: watch::Receiver<usize>,
}

/// Bytes of the memory of one rank.
pub fn rank_bytes(device_pages: u32) -> u64 {
    u64::from(device_pages) * PAGE_BYTES + NONCE_ROOM_BYTES
}

impl Ranks {
    /// Starts the ranks, whose workers listen in these directories.
    pub(super) fn start(
        header: &Header,
        device_pages: u32,
        engine: EngineId,
        workers: Vec<PathBuf>,
        start_limit: Duration,
    ) -> Result<Self, UnknownLayers> {
        let groups = header.groups.iter().enumerate();
        let groups: Result<Vec<_>, _> = groups.map(|(at, group)| model_group(at, group)).collect();
        let groups = groups?;
        let reported = Arc::<Mutex<Reported>>::default();
        let (registered, ready) = watch::channel(0);
        let registered = Arc::new(registered);
        let (mut orders, mut tasks, mut reading) = (Vec::new(), Vec::new(), Vec::new());
        for (rank, worker_dir) in (0..header.ranks).map(Rank).zip(workers) {
            let settings = RankSettings {
                worker_dir,
                engine,
                replica: Replica(0),
                rank,
                ranks: header.ranks,
                hash_tokens: header.hash_tokens,
                hit_tokens: header.hit_tokens,
                device_pages: device_pages.max(1),
                content: b"recorded calls".to_vec(),
                groups: groups.clone(),
                shard: Sharding::each(header.ranks).of(rank),
                device: EngineDevice::Cpu,
                layout: EngineLayout::Contiguous,
                start_limit,
            };
            let (ours, theirs) = tokio::io::duplex(PIPE_BYTES);
            let (report, reports) = tokio::io::duplex(PIPE_BYTES);
            tasks.push(tokio::spawn(rank::run(
                Arc::new(ZmqTransport),
                settings,
                theirs,
                report,
            )));
            let (reported, registered) = (Arc::clone(&reported), Arc::clone(&registered));
            reading.push(tokio::spawn(read_reports(reports, reported, registered)));
            orders.push(ours);
        }
        Ok(Self {
            orders,
            tasks,
            reading,
            reported,
            ready,
        })
    }

    /// Waits until every rank has registered its memory.
    pub(super) async fn wait_until_ready(&mut self, limit: Duration) -> Result<(), EngineError> {
        let ranks = self.orders.len();
        let ready = async {
            let all = self.ready.wait_for(|ready| *ready >= ranks).await;
            // Every rank has ended.
            all.map(|_| ()).map_err(|_| EngineError::RankEnded(0))
        };
        let waited = tokio::time::timeout(limit, ready).await;
        self.check()?;
        waited.map_err(|_| EngineError::TooLate {
            what: "register",
            limit,
        })?
    }

    /// Fails if a rank cannot continue.
    pub(super) fn check(&self) -> Result<(), EngineError> {
        let reported = self.reported();
        match reported.fatal {
            true => Err(EngineError::RankFailed(reported.complaint.clone())),
            false => Ok(()),
        }
    }

    fn reported(&self) -> MutexGuard<'_, Reported> {
        self.reported.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends an order to every rank; waits while too many wait there, at most [`ORDER_LIMIT`] for one.
    pub(super) async fn order(&mut self, order: &RankOrder) -> Result<(), EngineError> {
        for (rank, orders) in self.orders.iter_mut().enumerate() {
            let sent = tokio::time::timeout(ORDER_LIMIT, pipe::write(orders, order)).await;
            let sent = sent.map_err(|_| EngineError::TooLate {
                what: "take an order",
                limit: ORDER_LIMIT,
            })?;
            sent.map_err(|_| EngineError::RankEnded(rank))?;
        }
        self.check()
    }

    /// Ends the ranks, and returns the bytes that were compared, those that were wrong, and the first wrong one.
    pub(super) async fn end(mut self, limit: Duration) -> Result<(u64, u64, String), EngineError> {
        for orders in &mut self.orders {
            orders.shutdown().await.map_err(EngineError::Pipe)?;
        }
        let late = EngineError::TooLate { what: "end", limit };
        let ended = async {
            for task in self.tasks.drain(..) {
                task.await
                    .map_err(|error| EngineError::Pipe(error.into()))??;
            }
            for task in self.reading.drain(..) {
                task.await
                    .map_err(|error| EngineError::Pipe(error.into()))?;
            }
            Ok::<_, EngineError>(())
        };
        tokio::time::timeout(limit, ended)
            .await
            .map_err(|_| late)??;
        let reported = self.reported();
        Ok((
            reported.verified_bytes,
            reported.mismatched_bytes,
            reported.complaint.clone(),
        ))
    }
}

async fn read_reports(
    mut reports: DuplexStream,
    reported: Arc<Mutex<Reported>>,
    registered: Arc<watch::Sender<usize>>,
) {
    while let Ok(Some(report)) = pipe::read::<RankReport>(&mut reports).await {
        {
            let mut all = reported.lock().unwrap_or_else(PoisonError::into_inner);
            all.verified_bytes += report.verified_bytes;
            all.mismatched_bytes += report.mismatched_bytes;
            all.fatal |= report.fatal;
            if all.complaint.is_empty() {
                all.complaint.clone_from(&report.complaint);
            }
        }
        if report.ticket == 0 {
            registered.send_modify(|ready| *ready += 1);
        }
    }
}

fn model_group(at: usize, group: &HeaderGroup) -> Result<ModelGroup, UnknownLayers> {
    let kind = match group.attention {
        Attention::Full => LayerKind::Full,
        Attention::SlidingWindow => LayerKind::Window(group.window_tokens),
        Attention::ChunkedLocal => LayerKind::Chunk(group.window_tokens),
        Attention::State => LayerKind::Recurrent,
        Attention::Other => return Err(UnknownLayers { group: at }),
    };
    let roles: &'static [TensorRole] = match kind {
        LayerKind::Recurrent => &[TensorRole::State],
        _ => &[TensorRole::K, TensorRole::V],
    };
    Ok(ModelGroup {
        layers: LayerGroup {
            kind,
            page_tokens: group.page_tokens,
            layers: 1,
            drafted: group.eagle,
        },
        geometry: ModelGeometry {
            layers: 1,
            roles,
            element_bytes: 2,
            fragment_bytes: PAGE_BYTES / roles.len() as u64,
        },
    })
}
