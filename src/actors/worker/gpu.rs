//! The first engine's rank with memory on a GPU makes the worker find that GPU and pin its depot for it. Until that is done
//! ranks are told how far it is, and ask again.

use std::sync::Arc;
use std::time::Duration;

use ractor::ActorRef;

use super::{State, WorkerMessage};
use crate::actors::gpu::{EngineSide, Gpu};
use crate::actors::transfer::TransferMessage;
use crate::cuda::{Announced, CudaError, DeviceUuid, Outcome, device_of};
use crate::protocol::ErrorCode;
use crate::types::{ByteSize, Registration, Time};

/// What a worker has of its GPU.
#[derive(Default)]
pub(super) enum GpuState {
    /// Nobody has asked for one.
    #[default]
    None,
    /// The depot is being pinned, and so many bytes of it are.
    Starting(DeviceUuid, u64),
    /// It copies.
    Ready(Arc<Gpu>),
    /// It cannot be used, and why. Tried again when somebody asks, a while later.
    Failed(DeviceUuid, String, Time),
}

pub(super) const NO_TIMELINE: &str = "written.timeline is true, and registration.timeline is absent: register it, or wait for the device yourself";

/// How long a worker stays with its word that a GPU cannot be used.
const TRY_AGAIN_AFTER: Duration = Duration::from_secs(10);

impl State {
    /// The GPU that a registration names, or what to tell the rank.
    pub(super) fn gpu_for(
        &mut self,
        registration: &Registration,
        myself: &ActorRef<WorkerMessage>,
    ) -> Result<Arc<Gpu>, (ErrorCode, String)> {
        let invalid = |text: String| (ErrorCode::Invalid, text);
        let uuid = device_of(registration).map_err(|error| invalid(error.to_string()))?;
        let Some(depot) = self.depot.clone() else {
            return Err((ErrorCode::NotReady, self.progress.line()));
        };
        let bytes = depot.buffer().len();
        let (there, answer) = match &self.gpu {
            GpuState::Ready(gpu) => (gpu.uuid, Ok(Arc::clone(gpu))),
            GpuState::Starting(uuid, pinned) => {
                (*uuid, Err((ErrorCode::NotReady, pinning(*pinned, bytes))))
            }
            GpuState::Failed(failed, why, at)
                if *failed == uuid && at.until(self.clock.now()) < TRY_AGAIN_AFTER =>
            {
                (uuid, Err(invalid(why.clone())))
            }
            GpuState::None | GpuState::Failed(..) => {
                self.gpu = GpuState::Starting(uuid, 0);
                self.teller.pinned(Some(0));
                let text = pinning(0, bytes);
                let (transfer, myself) = (self.transfer.clone(), myself.clone());
                let way = self.gpu_copy;
                tokio::task::spawn_blocking(move || {
                    let worker = myself.clone();
                    let tell = move |outcome| match outcome {
                        Outcome::Ended(copies) => {
                            transfer.cast(TransferMessage::Ended(copies)).is_ok()
                        }
                        Outcome::Written(announced) => {
                            worker.cast(WorkerMessage::Written(announced)).is_ok()
                        }
                        Outcome::Lost(error) => worker.cast(WorkerMessage::GpuLost(error)).is_ok(),
                    };
                    let pinned = |bytes| {
                        if myself.cast(WorkerMessage::Pinned(bytes)).is_err() {
                            tracing::debug!("the worker has stopped");
                        }
                    };
                    let message = match Gpu::start(uuid, depot, way, pinned, tell) {
                        Ok(gpu) => WorkerMessage::Gpu(Ok(Arc::new(gpu))),
                        Err(error) => match error.fatal() {
                            Some(fatal) => WorkerMessage::GpuLost(fatal),
                            None => WorkerMessage::Gpu(Err(error.to_string())),
                        },
                    };
                    if myself.cast(message).is_err() {
                        tracing::debug!("the worker has stopped");
                    }
                });
                (uuid, Err((ErrorCode::NotReady, text)))
            }
        };
        if there != uuid {
            return Err(invalid(format!(
                "registration.device_uuid is {uuid}, this worker copies for {there}: a worker serves one GPU, start the \
                 engine there, or kvferry again"
            )));
        }
        answer
    }

    /// A rank says that its device writes, and how far it is by its timeline. False where it has registered none.
    pub(super) fn announced(memory: &EngineSide, announced: Announced) -> bool {
        let EngineSide::Device(memory, gpu) = memory else {
            return false;
        };
        if let Some(word) = memory.timeline {
            gpu.wait_for(memory, word, announced);
        }
        memory.timeline.is_some()
    }

    /// Nobody can say when the copies under way are over; the end of this process is their end.
    pub(super) fn gpu_lost(&self, error: CudaError) {
        let why = format!("{} does not work any more: {error}", self.gpu_name());
        tracing::error!(worker = %self.worker, why, "this worker ends");
        self.teller.give_up(why);
    }

    fn gpu_name(&self) -> String {
        match &self.gpu {
            GpuState::Ready(gpu) => gpu.uuid.to_string(),
            GpuState::Starting(uuid, _) | GpuState::Failed(uuid, ..) => uuid.to_string(),
            GpuState::None => "the GPU".to_owned(),
        }
    }

    /// More of the depot is pinned.
    pub(super) fn pinned(&mut self, bytes: u64) {
        if let GpuState::Starting(_, pinned) = &mut self.gpu {
            *pinned = bytes;
            self.teller.pinned(Some(bytes));
        }
    }

    /// The GPU is there, or cannot be used: then this worker says why to every rank that asks, for a while.
    pub(super) fn gpu_started(&mut self, gpu: Result<Arc<Gpu>, String>) {
        self.gpu = match gpu {
            Ok(gpu) => {
                tracing::info!(worker = %self.worker, gpu = %gpu.uuid, "host memory pinned");
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
                GpuState::Ready(gpu)
            }
            Err(why) => {
                tracing::error!(worker = %self.worker, why, "no GPU");
                self.teller.pinned(None);
                self.turned_away_rank(&why);
                match self.gpu {
                    GpuState::Starting(uuid, _) => GpuState::Failed(uuid, why, self.clock.now()),
                    _ => GpuState::None,
                }
            }
        };
    }
}

/// How far the pinning is, for people.
fn pinning(pinned: u64, bytes: u64) -> String {
    let (pinned, bytes) = (ByteSize(pinned), ByteSize(bytes));
    format!("{pinned} of {bytes} host memory are pinned for the GPU")
}
