//! The GPU of a worker's engine. An engine's rank names the GPU; the worker then finds it and pins its depot for it.

use std::sync::Arc;

use kvferry_cuda::{
    Announced, BATCH_COPIES_MAX, Context, Copier, CopierError, CopierReport, CopierSettings,
    CudaError, DeviceCopy, DeviceIo, DeviceOpenError, DeviceUuid, Driver, NoDriver,
    PIN_CHUNK_BYTES, PinError, PinnedDepot, RegisteredDevice, SmallCopyError, WaitOrder, bus_id,
};
use kvferry_memory::{BatchMark, CancelFlag, Depot, DropWaiter, NumaNode, RegisteredMemory};
use kvferry_transport::FdReceiver;
use kvferry_types::{
    Direction, FragmentPair, GpuCopy, GroupId, MemoryGeometry, Registration, RequestId, Timeline,
    TransferId,
};

/// The device attribute `CU_DEVICE_ATTRIBUTE_MPS_ENABLED`.
const MPS_ENABLED: u32 = 133;

/// A GPU that copies between engine memory and the depot.
#[derive(Debug)]
pub struct Gpu {
    /// The GPU's UUID.
    pub(super) uuid: DeviceUuid,
    // Declared before `depot`: the copier ends, and releases the memory of its copies, before the depot is unpinned.
    copier: Copier,
    context: Arc<Context>,
    depot: Arc<PinnedDepot>,
}

/// Why a GPU cannot be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum GpuError {
    #[error("registration.device_uuid is {uuid}: {source}")]
    NoDriver { uuid: DeviceUuid, source: NoDriver },
    #[error(
        "registration.device_uuid is {uuid}, this worker may use {}: start kvferry where it sees the engine's GPU \
         (CUDA_VISIBLE_DEVICES, --gpus of a container){}",
        listed(.others),
        by_instance(*.uuid, .others)
    )]
    NotThere {
        uuid: DeviceUuid,
        others: Vec<DeviceUuid>,
    },
    /// There is no context yet that could be lost.
    #[error("{uuid} cannot be used: {source}{}", source.hint())]
    NoContext { uuid: DeviceUuid, source: CudaError },
    #[error(transparent)]
    Pin(#[from] PinError),
    #[error(transparent)]
    Copier(#[from] CopierError),
}

impl GpuError {
    /// Returns the error after which nothing in this process works on the GPU any longer, if this is one.
    pub(super) fn fatal(&self) -> Option<CudaError> {
        let error = match self {
            Self::Copier(
                CopierError::Cuda(error) | CopierError::Memory(SmallCopyError::Cuda(error)),
            ) => Some(*error),
            Self::Pin(pin) => Some(pin.source),
            _ => None,
        };
        error.filter(|error| error.is_fatal())
    }

    /// True for a refusal that this process gets until it ends.
    pub(super) fn is_final(&self) -> bool {
        matches!(self, Self::NoDriver { source, .. } if source.is_final())
    }
}

/// The hint for a request that names a MIG instance, or for a worker that sees one.
fn by_instance(uuid: DeviceUuid, others: &[DeviceUuid]) -> &'static str {
    match uuid.is_instance() || others.iter().any(DeviceUuid::is_instance) {
        true => {
            "; with MIG, give the worker the engine's own instance: its MIG- name in CUDA_VISIBLE_DEVICES"
        }
        false => "",
    }
}

fn listed(uuids: &[DeviceUuid]) -> String {
    let names: Vec<String> = uuids.iter().map(DeviceUuid::to_string).collect();
    names.join(", ")
}

/// Returns the NUMA node of the GPU with this number among those that this process may use, most likely the GPU of the
/// rank with that number. Needed when host memory is placed, before an engine has registered, and found without a call
/// of the driver.
pub(super) fn likely_node(number: usize) -> Option<NumaNode> {
    let bus_id = bus_id(number)?;
    let node = NumaNode::near(&bus_id)?;
    tracing::info!(
        gpu = bus_id,
        node = node.number(),
        "host memory is placed near a GPU"
    );
    Some(node)
}

/// Returns how copies are submitted: one by one after the worker of this number died while batched copies ran.
fn allowed(way: GpuCopy, depot: &Depot, worker: usize) -> GpuCopy {
    if way == GpuCopy::Async {
        return way;
    }
    let avoid = match depot.batch_mark(worker) {
        Ok(BatchMark::None) => return way,
        Ok(BatchMark::UnderWay | BatchMark::Avoid) => {
            tracing::warn!(
                "a worker ended during batched copies: copies are given to the driver one by one \
                 from now on; start kvferry anew to try them together again"
            );
            depot.set_batch_mark(worker, BatchMark::Avoid)
        }
        Err(error) => Err(error),
    };
    if let Err(error) = avoid {
        tracing::error!(%error, "the depot does not record how copies were submitted");
    }
    GpuCopy::Async
}

impl Gpu {
    /// Finds the GPU and pins the depot. `pinned` receives the bytes pinned so far. `worker` is the number of this
    /// worker among those that may share the depot. Blocks, for about 1 s per 10 GiB.
    pub(super) fn start(
        uuid: DeviceUuid,
        depot: Arc<Depot>,
        worker: usize,
        way: GpuCopy,
        pinned: impl Fn(u64),
        notify: impl Fn(CopierReport) -> bool + Send + 'static,
    ) -> Result<Self, GpuError> {
        let driver = Driver::get().map_err(|source| GpuError::NoDriver { uuid, source })?;
        let no_context = |source| GpuError::NoContext { uuid, source };
        let device = driver.find(uuid).map_err(no_context)?;
        let Some(device) = device else {
            let others = driver.devices().map_err(no_context)?;
            let others = others.iter().map(|device| device.uuid).collect();
            return Err(GpuError::NotThere { uuid, others });
        };
        let context = Context::new(driver, device).map_err(no_context)?;
        let way = allowed(way, &depot, worker);
        let marked = Arc::clone(&depot);
        let depot = PinnedDepot::new(&context, depot, PIN_CHUNK_BYTES, pinned)?;
        let copier = Copier::start(CopierSettings {
            context: Arc::clone(&context),
            copies_a_call: match way {
                GpuCopy::Async => 1,
                GpuCopy::Batch => BATCH_COPIES_MAX,
            },
            mark: Box::new(move |under_way| {
                let mark = match under_way {
                    true => BatchMark::UnderWay,
                    false => BatchMark::None,
                };
                if let Err(error) = marked.set_batch_mark(worker, mark) {
                    tracing::error!(%error, "a successor does not learn that copies were under way");
                }
            }),
            report: Box::new(notify),
        })?;
        Ok(Self {
            uuid,
            copier,
            context,
            depot: Arc::new(depot),
        })
    }

    /// True when MPS serves the GPU, which restricts how a worker may end.
    pub(super) fn is_shared_by_mps(&self) -> bool {
        // An older driver does not support the attribute.
        self.context.attribute(MPS_ENABLED) == Ok(1)
    }

    /// The NUMA node of the GPU; `None` where the machine does not report it.
    pub(super) fn node(&self) -> Option<u16> {
        let bus_id = self.context.pci_bus_id().ok()?;
        NumaNode::near(&bus_id).map(|node| node.number())
    }

    /// Opens an engine's memory. Blocks on the driver.
    pub(super) fn open(
        &self,
        registration: &Registration,
        fds: &FdReceiver,
    ) -> Result<RegisteredDevice, DeviceOpenError> {
        let mut window = DeviceIo::new(&self.context)?;
        let take = |ticket: &[u8; 16]| fds.take(ticket);
        RegisteredDevice::open(registration, &self.context, &mut window, take)
    }

    /// Submits a copy. Returns false when there is no room for it, or the GPU is lost.
    pub(super) fn copy(
        &self,
        (transfer, direction, group): (TransferId, Direction, GroupId),
        parts: Vec<Vec<FragmentPair>>,
        memory: &RegisteredDevice,
        cancel: Arc<CancelFlag>,
    ) -> bool {
        let order = DeviceCopy {
            transfer,
            direction,
            parts,
            device: memory.clone(),
            group,
            depot: Arc::clone(&self.depot),
            cancel,
        };
        self.copier.start_copy(order)
    }

    /// Requests a notification when the announced work is written.
    pub(super) fn wait_for(&self, memory: &RegisteredDevice, word: Timeline, announced: Announced) {
        self.copier.wait_for(WaitOrder {
            memory: Arc::downgrade(&memory.memory),
            word,
            announced,
        });
    }

    /// Handles an engine's own report that everything up to `through` is written: the timeline is no longer read for
    /// that.
    pub(super) fn announce(&self, memory: &RegisteredDevice, word: Timeline, through: RequestId) {
        self.copier.announce(memory, word, through);
    }

    /// A signal that the depot is unpinned, which happens some time after this value was dropped.
    pub(super) fn end(&self) -> DropWaiter {
        self.depot.end()
    }

    /// True while the driver works for this process.
    pub(super) fn works(&self) -> bool {
        DeviceIo::new(&self.context).is_ok()
    }
}

/// An engine's memory, with the means to copy it.
#[derive(Debug, Clone)]
pub enum EngineSide {
    /// Host memory, copied by the CPU.
    Host(RegisteredMemory),
    /// A GPU's memory.
    Device(RegisteredDevice, Arc<Gpu>),
}

impl EngineSide {
    /// A signal that none of the memory is open in this process any longer.
    pub(super) fn end(&self) -> DropWaiter {
        match self {
            Self::Host(memory) => memory.memory.end(),
            Self::Device(memory, _) => memory.memory.end(),
        }
    }

    /// The sizes that all ranks must agree on.
    pub(super) fn geometry(&self) -> &MemoryGeometry {
        match self {
            Self::Host(memory) => &memory.layout.geometry,
            Self::Device(memory, _) => &memory.layout.geometry,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unrecoverable_gpu_errors_are_fatal_in_every_place() {
        let error = |code| CudaError::Answered {
            call: "cuMemcpyAsync",
            code,
            name: "an error",
        };
        let everywhere = |code| {
            let error = error(code);
            let pin = PinError {
                pinned_bytes: 0,
                bytes: 1,
                registers: true,
                source: error,
            };
            [
                GpuError::Pin(pin),
                GpuError::Copier(CopierError::Cuda(error)),
                GpuError::Copier(CopierError::Memory(SmallCopyError::Cuda(error))),
            ]
        };
        for fatal in everywhere(719) {
            assert_eq!(fatal.fatal(), Some(error(719)), "{fatal}");
        }
        for refusal in everywhere(2) {
            assert_eq!(refusal.fatal(), None, "{refusal}");
        }
        let length = SmallCopyError::Length {
            described: 1,
            bytes: 2,
        };
        assert_eq!(GpuError::Copier(CopierError::Memory(length)).fatal(), None);
    }

    /// A GPU that is in use elsewhere or not ready is not a lost GPU: nothing runs on it.
    #[test]
    fn a_context_that_cannot_be_created_is_refused_with_a_remedy() {
        let uuid = DeviceUuid::gpu([7; 16]);
        for (code, remedy) in [
            (2, "gpu_memory_utilization"),
            (46, "nvidia-smi -c DEFAULT"),
            (802, "fabric manager"),
            (805, "CUDA_MPS_PIPE_DIRECTORY"),
            (807, "CUDA_MPS_PIPE_DIRECTORY"),
            (999, "nvidia-uvm"),
        ] {
            let source = CudaError::Answered {
                call: "cuDevicePrimaryCtxRetain",
                code,
                name: "an error",
            };
            let refusal = GpuError::NoContext { uuid, source };
            assert_eq!(refusal.fatal(), None, "{refusal}");
            assert!(!refusal.is_final(), "{refusal}");
            let text = refusal.to_string();
            assert!(text.contains(remedy), "{text}");
            let source = NoDriver::InitFailed { error: source };
            let refusal = GpuError::NoDriver { uuid, source };
            assert!(refusal.is_final() && refusal.to_string().contains(remedy));
        }
    }

    #[test]
    fn the_successor_of_a_worker_that_died_during_a_batched_copy_copies_one_by_one() {
        let depot = Depot::create(1 << 20).expect("memory");
        let way = |worker| allowed(GpuCopy::Batch, &depot, worker);
        assert_eq!(way(3), GpuCopy::Batch);
        depot
            .set_batch_mark(3, BatchMark::UnderWay)
            .expect("writable");
        assert_eq!(allowed(GpuCopy::Async, &depot, 3), GpuCopy::Async);
        for _ in 0..2 {
            assert_eq!(way(3), GpuCopy::Async);
            assert_eq!(way(4), GpuCopy::Batch, "another worker");
        }
        let mark = depot.batch_mark(3).expect("readable");
        assert_eq!(mark, BatchMark::Avoid);
    }

    #[test]
    fn a_missing_mig_instance_is_refused_with_the_instances_to_name() {
        let named = |uuid| GpuError::NotThere {
            uuid,
            others: vec![DeviceUuid::gpu([1; 16])],
        };
        let text = named(DeviceUuid::instance([7; 16])).to_string();
        assert!(text.contains("is MIG-07070707-"), "{text}");
        assert!(text.contains("MIG- name in CUDA_VISIBLE_DEVICES"), "{text}");
        let text = named(DeviceUuid::gpu([7; 16])).to_string();
        assert!(!text.contains("MIG"), "{text}");
    }
}
