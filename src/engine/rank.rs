//! One rank of the reference engine: a process that registers its KV memory with its worker, and computes and checks
//! pages on orders of the scheduler.

use std::sync::Arc;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::error::EngineError;
use crate::layout::{Fragment, NONCE_ROOM_BYTES, pages_bytes};
use crate::memory::RankMemory;
use crate::pipe::{self, OrderTask, RankOrder, RankReport};
use crate::registered::RegisteredRank;
use crate::settings::RankSettings;
use kvferry_client::{RankSession, RankSessionSettings};
use kvferry_transport::{Address, Transport};
use kvferry_types::{Fingerprint, GroupId, RequestId};
use kvferry_workload::content::{ContentKey, POISON};
use kvferry_workload::scheduler::WorkKind;

/// Capacity of the queue of reports, and of the queue of messages to the worker.
const QUEUE: usize = 1024;
/// Orders that are read ahead. A scheduler sends none before the first registration.
const ORDERS_READ: usize = 16;

/// The rank's memory, and the state of its work.
struct RankProcess<'a> {
    settings: RankSettings,
    memory: Arc<RankMemory>,
    session: &'a RankSession,
    scratch: Vec<u8>,
}

/// Runs a rank until `orders` ends, also before its first registration. Reports that on `reports` as ticket 0, then the
/// end of each order. Registers again by itself when its connection breaks.
pub async fn run(
    transport: Arc<dyn Transport>,
    settings: RankSettings,
    orders: impl AsyncRead + Unpin + Send + 'static,
    reports: impl AsyncWrite + Unpin + Send + 'static,
) -> Result<(), EngineError> {
    let (report, queue) = mpsc::channel(QUEUE);
    let writing = tokio::spawn(write_reports(queue, reports));
    let ended = serve(transport, settings, orders, &report).await;
    if let Err(error) = &ended {
        let last = RankReport {
            complaint: error.to_string(),
            fatal: true,
            ..RankReport::default()
        };
        if report.send(last).await.is_err() {
            tracing::debug!("no receiver for reports");
        }
    }
    drop(report);
    let written = writing
        .await
        .map_err(|error| EngineError::Pipe(error.into()))?;
    ended.and(written)
}

async fn serve(
    transport: Arc<dyn Transport>,
    settings: RankSettings,
    orders: impl AsyncRead + Unpin + Send + 'static,
    report: &mpsc::Sender<RankReport>,
) -> Result<(), EngineError> {
    let orders = ReadOrders::start(orders);
    let bytes = pages_bytes(&settings) + NONCE_ROOM_BYTES;
    let memory = RankMemory::create(settings.device, settings.rank, bytes);
    let memory = Arc::new(memory?);
    let session_settings = RankSessionSettings {
        worker: Address::Directory(settings.worker_dir.clone()),
        engine: settings.engine,
        replica: settings.replica,
        rank: settings.rank,
        name: format!("reference engine, {}", settings.rank),
        start_limit: settings.start_limit,
    };
    let registered = RegisteredRank {
        settings: settings.clone(),
        memory: Arc::clone(&memory),
    };
    let session = RankSession::start(transport, session_settings, Arc::new(registered));
    let process = RankProcess {
        settings,
        memory,
        session: &session,
        scratch: Vec::new(),
    };
    tokio::select! {
        ended = process.work(orders, report) => ended,
        failure = session.failed() => Err(failure.into()),
    }
}

/// The orders, read from the start of the process on. A scheduler that was killed closes its end of the pipe, which must
/// end the rank also while no worker accepts its memory.
struct ReadOrders {
    queue: mpsc::Receiver<std::io::Result<RankOrder>>,
    reading: JoinHandle<()>,
}

impl ReadOrders {
    fn start(mut orders: impl AsyncRead + Unpin + Send + 'static) -> Self {
        let (sender, queue) = mpsc::channel(ORDERS_READ);
        let reading = tokio::spawn(async move {
            while let Some(order) = pipe::read(&mut orders).await.transpose() {
                let failed = order.is_err();
                if sender.send(order).await.is_err() || failed {
                    return;
                }
            }
        });
        Self { queue, reading }
    }

    /// The next order; `None` after the last one.
    async fn next(&mut self) -> Result<Option<RankOrder>, EngineError> {
        let order = self.queue.recv().await.transpose();
        order.map_err(EngineError::Pipe)
    }
}

async fn send_report(
    reports: &mpsc::Sender<RankReport>,
    report: RankReport,
) -> Result<(), EngineError> {
    let sent = reports.send(report).await;
    sent.map_err(|_| EngineError::Protocol("no receiver for reports"))
}

async fn write_reports(
    mut queue: mpsc::Receiver<RankReport>,
    mut reports: impl AsyncWrite + Unpin,
) -> Result<(), EngineError> {
    while let Some(report) = queue.recv().await {
        let written = pipe::write(&mut reports, &report).await;
        written.map_err(EngineError::Pipe)?;
    }
    Ok(())
}

impl RankProcess<'_> {
    async fn work(
        mut self,
        mut orders: ReadOrders,
        reports: &mpsc::Sender<RankReport>,
    ) -> Result<(), EngineError> {
        tokio::select! {
            registered = self.session.registered() => registered?,
            _ = &mut orders.reading => {
                // Orders without memory are dropped, and an error of the pipe is reported.
                while orders.next().await?.is_some() {}
                return Ok(());
            }
        }
        send_report(reports, RankReport::default()).await?;
        while let Some(order) = orders.next().await? {
            let task = order.task();
            let kind = match task.ok_or(EngineError::Protocol("an order of an unknown kind"))? {
                OrderTask::Work(kind) => kind,
                OrderTask::Abandon(request) => {
                    let abandoned = self.session.abandon(request);
                    let (reports, ticket) = (reports.clone(), order.ticket);
                    tokio::spawn(async move {
                        let report = RankReport {
                            ticket,
                            ..RankReport::default()
                        };
                        // A session that has ended ends the process, and a closed queue, too.
                        if abandoned.await.is_ok() && reports.send(report).await.is_err() {
                            tracing::debug!("no receiver for reports");
                        }
                    });
                    continue;
                }
            };
            let report = self.carry_out(kind, &order)?;
            if order.written_through > 0 {
                self.memory.mark(order.written_through)?;
                let through = RequestId(order.written_through);
                self.session.written(through).await?;
            }
            // The device may still write: readers and later writers of these pages wait for the announced number.
            send_report(reports, report).await?;
        }
        Ok(())
    }

    fn carry_out(&mut self, kind: WorkKind, order: &RankOrder) -> Result<RankReport, EngineError> {
        let mut report = RankReport {
            ticket: order.ticket,
            ..RankReport::default()
        };
        for (group, page, content) in order.pages() {
            if usize::from(group.0) >= self.settings.groups.len() {
                return Err(EngineError::Protocol("an order for an unknown group"));
            }
            self.page(kind, (group, page), content, &mut report)?;
        }
        Ok(report)
    }

    fn page(
        &mut self,
        kind: WorkKind,
        (group, page): (GroupId, u32),
        content: Fingerprint,
        report: &mut RankReport,
    ) -> Result<(), EngineError> {
        let Self {
            settings,
            memory,
            scratch,
            ..
        } = self;
        let group = usize::from(group.0);
        let geometry = &settings.groups[group].geometry;
        // Layers are numbered over all groups, so that pages of two groups with the same hash differ.
        let before = settings.groups[..group].iter();
        let layers_before: u32 = before.map(|group| group.geometry.layers).sum();
        let fragments = (0..geometry.layers).flat_map(|layer| {
            (0..geometry.roles.len()).map(move |role| Fragment { group, layer, role })
        });
        let places: Vec<(u64, u64)> = fragments
            .clone()
            .map(|fragment| settings.layout.offset(settings, fragment, page))
            .map(|offset| (offset, geometry.fragment_bytes))
            .collect();
        let bytes = usize::try_from(geometry.fragment_bytes).unwrap_or(0);
        scratch.resize(bytes * places.len(), POISON);
        if kind == WorkKind::Verify {
            memory.read(&places, scratch)?;
        }
        for (fragment, its) in fragments.zip(scratch.chunks_exact_mut(bytes)) {
            let role = geometry.roles[fragment.role];
            let layer = layers_before + fragment.layer;
            let key = ContentKey::new(content, layer, role, settings.shard);
            match kind {
                WorkKind::Poison => its.fill(POISON),
                WorkKind::Compute => key.fill(its),
                WorkKind::Verify => {
                    report.verified_bytes += bytes as u64;
                    if let Err(wrong) = key.verify(its) {
                        report.mismatched_bytes += wrong.mismatched_bytes;
                        if report.complaint.is_empty() {
                            let place =
                                format!("{}, page {page}, layer {layer}, {role:?}", settings.rank);
                            report.complaint = format!("{place}: {wrong}");
                        }
                    }
                }
            }
        }
        match kind {
            WorkKind::Verify => Ok(()),
            WorkKind::Poison | WorkKind::Compute => memory.write(&places, scratch),
        }
    }
}
