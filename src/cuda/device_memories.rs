//! Device memory in allocations, as a registration numbers them.

use std::sync::Arc;

use super::driver::{DeviceMemory, DeviceSide};
use kvferry_memory::{DropSignal, DropWaiter};

/// One piece of device memory for each allocation of a registration, in order.
#[derive(Debug)]
pub struct DeviceMemories {
    memories: Vec<DeviceMemory>,
    drop_signal: DropSignal,
}

impl DeviceMemories {
    /// Takes memory that was allocated or opened in this process, one piece for each allocation.
    pub fn own(memories: Vec<DeviceMemory>) -> Arc<Self> {
        Arc::new(Self {
            memories,
            drop_signal: DropSignal::default(),
        })
    }

    /// Signals that none of the memory is open in this process any longer.
    pub fn end(&self) -> DropWaiter {
        self.drop_signal.end()
    }

    /// The memory of an allocation, by its index.
    pub fn get(&self, allocation: u32) -> Option<&DeviceMemory> {
        self.memories.get(allocation as usize)
    }
}

impl DeviceSide for DeviceMemories {
    fn memory(&self, allocation: u32) -> Option<&DeviceMemory> {
        self.get(allocation)
    }
}
