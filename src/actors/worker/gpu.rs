//! The GPU of a worker. The first registration with memory on a GPU makes the worker find that GPU and pin its depot
//! for it. Until that has ended, ranks receive the progress, and retry.

use std::sync::Arc;
use std::time::Duration;

use super::gpu_state::{
    GpuRefusal, GpuRetry, GpuState, RELEASE_LIMIT, ReleaseProgress, ReleasingGpu,
};
use super::{Host, WorkerMessage};
use crate::gpu::{EngineSide, Gpu};
use kvferry_cuda::{Announced, CopierReport, CudaError, device_of};
use kvferry_protocol::{ErrorBody, ErrorCode};
use kvferry_types::{ByteSize, Registration, RequestId};

/// How long a worker keeps its context on a GPU, about 0.5 GiB of the GPU's memory, and its depot pinned after the last
/// engine has left.
pub(super) const IDLE_LIMIT: Duration = Duration::from_secs(300);

/// The kernel's setting for huge pages of shared host memory, which a GPU reaches faster.
const SHARED_HUGE_PAGES: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";

impl Host {
    /// Returns the GPU that a registration names, or the error for the rank.
    pub(super) fn gpu_for(
        &mut self,
        registration: &Registration,
        serves: bool,
    ) -> Result<Arc<Gpu>, ErrorBody> {
        let invalid = |text: String| ErrorBody::new(ErrorCode::Invalid, text);
        let not_ready = |text: String| ErrorBody::new(ErrorCode::NotReady, text);
        let uuid = device_of(registration).map_err(|error| invalid(error.to_string()))?;
        let Some(depot) = self.depot.clone() else {
            return Err(not_ready(self.progress.line()));
        };
        let bytes = depot.buffer().len();
        if let Some(text) = self.still_releasing() {
            return Err(not_ready(text));
        }
        if let GpuState::Failed(failed, refusal, at) = &self.gpu
            && (*failed == uuid || refusal.is_final)
        {
            match refusal.again(at.until(self.clock.now()), serves) {
                GpuRetry::Refuse => return Err(invalid(refusal.why.clone())),
                GpuRetry::End => {
                    let why = refusal.why.clone();
                    tracing::error!(worker = %self.worker, why, "this worker ends: its successor starts the driver again");
                    self.readiness.report_end(why.clone());
                    return Err(invalid(why));
                }
                GpuRetry::Try => {}
            }
        }
        let (there, answer) = match &self.gpu {
            GpuState::Ready(gpu) => (gpu.uuid, Ok(Arc::clone(gpu))),
            GpuState::Starting(uuid, pinned) => (*uuid, Err(not_ready(pinning(*pinned, bytes)))),
            GpuState::None | GpuState::Failed(..) | GpuState::Releasing(_) => {
                self.gpu = GpuState::Starting(uuid, 0);
                self.readiness.pinned(Some(0));
                let text = pinning(0, bytes);
                let (threads, myself) = (self.copies.clone(), self.myself.clone());
                let (number, way) = (self.number, self.gpu_copy);
                tokio::task::spawn_blocking(move || {
                    let worker = myself.clone();
                    let notify = move |outcome| match outcome {
                        CopierReport::Ended(copies) => {
                            threads.ended(&copies);
                            worker.cast(WorkerMessage::Ended(copies)).is_ok()
                        }
                        CopierReport::Written(announced) => {
                            worker.cast(WorkerMessage::Written(announced)).is_ok()
                        }
                        CopierReport::Lost(error) => {
                            worker.cast(WorkerMessage::GpuLost(error)).is_ok()
                        }
                    };
                    let pinned = |bytes| {
                        if myself.cast(WorkerMessage::Pinned(bytes)).is_err() {
                            tracing::debug!("the worker has stopped");
                        }
                    };
                    let message = match Gpu::start(uuid, depot, number, way, pinned, notify) {
                        Ok(gpu) => WorkerMessage::Gpu(Ok(Arc::new(gpu))),
                        Err(error) => match error.fatal() {
                            Some(fatal) => WorkerMessage::GpuLost(fatal),
                            None => WorkerMessage::Gpu(Err(GpuRefusal {
                                why: error.to_string(),
                                is_final: error.is_final(),
                            })),
                        },
                    };
                    if myself.cast(message).is_err() {
                        tracing::debug!("the worker has stopped");
                    }
                });
                (uuid, Err(not_ready(text)))
            }
        };
        if there != uuid {
            return Err(invalid(format!(
                "registration.device_uuid is {uuid}, this worker copies for {there}: a worker serves one GPU, start the \
                 engine there, or kvferry again"
            )));
        }
        self.gpu_uses += 1;
        answer
    }

    /// Returns the answer for a rank that registers while a GPU is being released. Ends the worker when the release is
    /// stuck, because its successor pins the depot for itself.
    fn still_releasing(&self) -> Option<String> {
        let GpuState::Releasing(letting_go) = &self.gpu else {
            return None;
        };
        let uuid = letting_go.uuid;
        match letting_go.is(self.clock.now()) {
            ReleaseProgress::Done => None,
            ReleaseProgress::UnderWay => Some(format!(
                "{uuid} is being released, because no engine used it: a GPU is used again after its host memory is unpinned"
            )),
            ReleaseProgress::Stuck => {
                let why = format!(
                    "the driver does not release {uuid}: its host memory is still pinned after {RELEASE_LIMIT:?}"
                );
                tracing::error!(worker = %self.worker, why, "this worker ends");
                self.readiness.report_end(why.clone());
                Some(why)
            }
        }
    }

    /// Handles a rank's announcement of work on its device: waits until its timeline reaches that work. Returns false
    /// when the rank has registered no timeline.
    pub(super) fn announced(memory: &EngineSide, announced: Announced) -> bool {
        let EngineSide::Device(memory, gpu) = memory else {
            return false;
        };
        if let Some(word) = memory.timeline {
            gpu.wait_for(memory, word, announced);
        }
        memory.timeline.is_some()
    }

    /// Handles a rank's own report that everything up to `through` is written.
    pub(super) fn announce(memory: &EngineSide, through: RequestId) {
        if let EngineSide::Device(memory, gpu) = memory
            && let Some(word) = memory.timeline
        {
            gpu.announce(memory, word, through);
        }
    }

    /// Ends the worker after the loss of its GPU. The end of the running copies cannot be determined; the end of the
    /// process ends them.
    pub(super) fn gpu_lost(&self, error: CudaError) {
        let why = format!("{} no longer works: {error}", self.gpu_name());
        tracing::error!(worker = %self.worker, why, "this worker ends");
        self.readiness.report_end(why);
    }

    fn gpu_name(&self) -> String {
        match &self.gpu {
            GpuState::Ready(gpu) => gpu.uuid.to_string(),
            GpuState::Starting(uuid, _) | GpuState::Failed(uuid, ..) => uuid.to_string(),
            GpuState::Releasing(letting_go) => letting_go.uuid.to_string(),
            GpuState::None => "the GPU".to_owned(),
        }
    }

    /// Reports that more of the depot is pinned.
    pub(super) fn pinned(&mut self, bytes: u64) {
        if let GpuState::Starting(_, pinned) = &mut self.gpu {
            *pinned = bytes;
            self.readiness.pinned(Some(bytes));
        }
    }

    /// Handles the end of the GPU's start. A GPU that cannot be used is refused to every rank that requests it, for a
    /// while.
    ///
    /// Returns why the GPU cannot be used; `None` when it is ready.
    pub(super) fn gpu_started(&mut self, gpu: Result<Arc<Gpu>, GpuRefusal>) -> Option<String> {
        let mut failed = None;
        self.gpu = match gpu {
            Ok(gpu) => {
                let huge_pages = std::fs::read_to_string(SHARED_HUGE_PAGES).unwrap_or_default();
                tracing::info!(
                    worker = %self.worker,
                    gpu = %gpu.uuid,
                    shmem_enabled = huge_pages.trim(),
                    "host memory pinned"
                );
                let (near, chosen) = (gpu.node(), self.progress.node.get().copied());
                if near.is_some() && near != chosen {
                    tracing::warn!(
                        worker = %self.worker,
                        gpu = %gpu.uuid,
                        node = near,
                        ?chosen,
                        "host memory does not come from the GPU's NUMA node: name it in g2_numa"
                    );
                }
                if gpu.is_shared_by_mps() {
                    tracing::warn!(
                        worker = %self.worker,
                        gpu = %gpu.uuid,
                        "MPS serves this GPU: a worker that is killed while it copies may end the engine, too; end \
                         kvferry by SIGTERM"
                    );
                }
                GpuState::Ready(gpu)
            }
            Err(refusal) => {
                tracing::error!(worker = %self.worker, why = refusal.why, "no GPU");
                self.readiness.pinned(None);
                failed = Some(refusal.why.clone());
                match self.gpu {
                    GpuState::Starting(uuid, _) => {
                        GpuState::Failed(uuid, refusal, self.clock.now())
                    }
                    _ => GpuState::None,
                }
            }
        };
        // The rank that requested the GPU may be gone.
        self.watch_gpu();
        failed
    }

    /// Schedules a check whether an engine still uses the GPU.
    pub(super) fn watch_gpu(&self) {
        let uses = self.gpu_uses;
        if matches!(self.gpu, GpuState::Ready(_)) {
            drop(
                self.myself
                    .send_after(self.gpu_idle, move || WorkerMessage::GpuIdle(uses)),
            );
        }
    }

    /// Releases the GPU if no engine has requested it since `uses` was read: its memory belongs to the engines, and
    /// some tools refuse to work while a process has a context. The next registration after that takes the GPU again.
    pub(super) fn gpu_idle(&mut self, uses: u64, is_used: bool) {
        let GpuState::Ready(gpu) = &self.gpu else {
            return;
        };
        if is_used || self.gpu_uses != uses {
            return;
        }
        let gpu = Arc::clone(gpu);
        self.gpu = GpuState::Releasing(ReleasingGpu {
            uuid: gpu.uuid,
            // Engine memory that is still being closed holds the GPU as well.
            end: gpu.end(),
            since: self.clock.now(),
        });
        tracing::info!(worker = %self.worker, idle = ?self.gpu_idle, "no engine: the GPU is released");
        self.readiness.pinned(None);
        // On a thread of its own, because the drop waits for running copies, and unpinning takes as long as pinning.
        tokio::task::spawn_blocking(move || drop(gpu));
    }
}

/// The progress of pinning, as one line for operators.
fn pinning(pinned: u64, bytes: u64) -> String {
    let (pinned, bytes) = (ByteSize(pinned), ByteSize(bytes));
    format!("{pinned} of {bytes} host memory are pinned for the GPU")
}
