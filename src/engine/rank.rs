//! One rank of the reference engine: a process with KV memory of its own that registers it with its worker, and computes
//! and checks pages when the scheduler says so.

use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::mpsc;

use crate::engine::content::{ContentKey, POISON};
use crate::engine::layout::{EngineLayout, describe};
use crate::engine::models::ModelGeometry;
use crate::engine::pipe::{self, Order, Report};
use crate::engine::scheduler::WorkKind;
use crate::memory::SharedBuffer;
use crate::protocol::{ErrorCode, Hello, Message, Register, Role, VERSION, VERSION_MIN, Written};
use crate::transport::{
    Address, Client, ClientSettings, Failure, Incoming, Limits, Transport, send_fd,
};
use crate::types::{EngineId, Fingerprint, Nonce, Rank, Registration};

/// What a rank is.
#[derive(Debug, Clone)]
pub struct RankSettings {
    /// Directory of the worker's sockets.
    pub worker_dir: PathBuf,
    /// Which engine it belongs to.
    pub engine: EngineId,
    /// Which rank it is.
    pub rank: Rank,
    /// Ranks of the engine.
    pub ranks: u16,
    /// Tokens of a page.
    pub engine_page_tokens: u32,
    /// Pages of its memory.
    pub device_pages: u32,
    /// What a page is made of.
    pub geometry: ModelGeometry,
    /// Pages are equal on all ranks.
    pub replicated: bool,
    /// How the pages lie in memory.
    pub layout: EngineLayout,
    /// How long registration may take, the worker's start included.
    pub start_limit: Duration,
}

/// A rank that has registered.
struct RankProcess {
    settings: RankSettings,
    memory: SharedBuffer,
    worker: Client,
    scratch: Vec<u8>,
}

/// Runs a rank until `orders` ends. Says on `reports` when it is ready (ticket 0), then reports each order.
pub async fn run(
    transport: Arc<dyn Transport>,
    settings: RankSettings,
    mut orders: impl AsyncRead + Unpin,
    mut reports: impl AsyncWrite + Unpin,
) -> Result<(), String> {
    let started = RankProcess::start(transport, settings).await;
    let (mut process, mut incoming) = match started {
        Ok(started) => started,
        Err(complaint) => {
            let report = Report {
                complaint: complaint.clone(),
                fatal: true,
                ..Report::default()
            };
            pipe::write(&mut reports, &report)
                .await
                .map_err(|error| error.to_string())?;
            return Err(complaint);
        }
    };
    tokio::spawn(async move { while incoming.recv().await.is_some() {} });
    pipe::write(&mut reports, &Report::default())
        .await
        .map_err(|error| error.to_string())?;
    loop {
        let order: Option<Order> = pipe::read(&mut orders)
            .await
            .map_err(|error| error.to_string())?;
        let Some(order) = order else { return Ok(()) };
        let report = process.carry_out(&order).await;
        let report = report.unwrap_or_else(|complaint| Report {
            ticket: order.ticket,
            complaint,
            fatal: true,
            ..Report::default()
        });
        pipe::write(&mut reports, &report)
            .await
            .map_err(|error| error.to_string())?;
    }
}

impl RankProcess {
    async fn start(
        transport: Arc<dyn Transport>,
        settings: RankSettings,
    ) -> Result<(Self, mpsc::Receiver<Incoming>), String> {
        let page_bytes = settings.geometry.page_bytes();
        let bytes = page_bytes * u64::from(settings.device_pages);
        let memory =
            SharedBuffer::create("kvferry-engine", bytes).map_err(|error| error.to_string())?;
        let address = Address::Directory(settings.worker_dir.clone());
        let hello = Hello {
            version_min: VERSION_MIN,
            version_max: VERSION,
            role: Role::Rank,
            engine: settings.engine.0,
            rank: settings.rank.0,
            replica: 0,
            name: format!("reference engine, {}", settings.rank),
        };
        let client = ClientSettings {
            address,
            hello,
            limits: Limits::default(),
        };
        let (worker, incoming) = Client::start(transport, client);
        let process = Self {
            settings,
            memory,
            worker,
            scratch: Vec::new(),
        };
        process.register().await?;
        Ok((process, incoming))
    }

    /// Hands the memory over and describes it; asks again while the worker is not ready, until the limit.
    async fn register(&self) -> Result<(), String> {
        let settings = &self.settings;
        let limit = tokio::time::Instant::now() + settings.start_limit;
        let mut proof = [0; 32];
        let mut ticket = [0; 16];
        random(&mut proof)?;
        loop {
            random(&mut ticket)?;
            let nonce = Nonce {
                allocation: 0,
                offset_bytes: 0,
                bytes: proof.to_vec(),
            };
            self.memory
                .write_from(0, &proof)
                .map_err(|error| error.to_string())?;
            let failure = match self.hand_over(ticket).await {
                Err(why) => Failure {
                    code: ErrorCode::NotReady,
                    message: why,
                },
                Ok(()) => {
                    let registration = describe(settings, ticket, nonce);
                    match self.ask_to_register(registration).await {
                        Ok(()) => return Ok(()),
                        Err(failure) => failure,
                    }
                }
            };
            if !failure.code.retry() || tokio::time::Instant::now() >= limit {
                return Err(format!("{}: {failure}", settings.rank));
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    async fn hand_over(&self, ticket: [u8; 16]) -> Result<(), String> {
        let fd = self
            .memory
            .try_clone_fd()
            .map_err(|error| error.to_string())?;
        let (directory, limit) = (&self.settings.worker_dir, Duration::from_secs(2));
        send_fd(directory, &ticket, fd.as_fd(), limit)
            .await
            .map_err(|error| error.to_string())
    }

    async fn ask_to_register(&self, registration: Registration) -> Result<(), Failure> {
        let register = Register {
            after: 0,
            engine: self.settings.engine.0,
            registration,
        };
        let limit = Duration::from_secs(30);
        self.worker
            .ask(Message::Register(register), limit)
            .await
            .map(|_| ())
    }

    async fn carry_out(&mut self, order: &Order) -> Result<Report, String> {
        let mut report = Report {
            ticket: order.ticket,
            ..Report::default()
        };
        let kind = order.work().ok_or("unknown work")?;
        let pages = order
            .pages
            .chunks_exact(4)
            .map(|page| u32::from_le_bytes([page[0], page[1], page[2], page[3]]));
        for (page, content) in pages.zip(order.contents.chunks_exact(16)) {
            let mut first = [0; 16];
            first.copy_from_slice(content);
            self.page(
                kind,
                page,
                Fingerprint(u128::from_be_bytes(first)),
                &mut report,
            )?;
        }
        if order.written_through > 0 {
            let written = Written {
                through: order.written_through,
            };
            self.worker
                .ask(Message::Written(written), Duration::from_secs(30))
                .await
                .map_err(|failure| failure.to_string())?;
        }
        Ok(report)
    }

    fn page(
        &mut self,
        kind: WorkKind,
        page: u32,
        content: Fingerprint,
        report: &mut Report,
    ) -> Result<(), String> {
        let Self {
            settings,
            memory,
            scratch,
            ..
        } = self;
        let bytes = usize::try_from(settings.geometry.fragment_bytes).unwrap_or(0);
        let rank = if settings.replicated {
            Rank(0)
        } else {
            settings.rank
        };
        scratch.resize(bytes, POISON);
        for layer in 0..settings.geometry.layers {
            for (index, role) in settings.geometry.roles.iter().enumerate() {
                let offset = settings.layout.offset(settings, layer, index, page);
                let key = ContentKey::new(content, layer, *role, rank);
                let result = match kind {
                    WorkKind::Poison => {
                        scratch.fill(POISON);
                        memory.write_from(offset, scratch)
                    }
                    WorkKind::Compute => {
                        key.fill(scratch);
                        memory.write_from(offset, scratch)
                    }
                    WorkKind::Verify => memory.read_into(offset, scratch),
                };
                result.map_err(|error| error.to_string())?;
                if kind == WorkKind::Verify {
                    report.verified_bytes += bytes as u64;
                    if let Err(wrong) = key.verify(scratch) {
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
        Ok(())
    }
}

/// Fills with random bytes of the system.
pub fn random(bytes: &mut [u8]) -> Result<(), String> {
    let got = rustix::rand::getrandom(&mut *bytes, rustix::rand::GetRandomFlags::empty());
    match got {
        Ok(count) if count == bytes.len() => Ok(()),
        Ok(count) => Err(format!("{count} random bytes of {}", bytes.len())),
        Err(error) => Err(error.to_string()),
    }
}
