//! Transfers: movements of pages between two tiers, which a leader orders and workers carry out.

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{EngineId, FragmentPair, GroupId, Record, RequestId, Time, TransferId};

/// A level of memory, fastest first. Displayed as `g1` to `g4`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TierId {
    /// The engine's memory, whose pages the engine allocates.
    Device,
    /// Host memory: the depots.
    Host,
    /// A disk.
    Disk,
    /// Storage of other hosts.
    Remote,
}

impl TierId {
    /// All tiers, fastest first.
    pub const ALL: [Self; 4] = [Self::Device, Self::Host, Self::Disk, Self::Remote];

    /// The tier's number, from 1 on: that of its name.
    pub const fn number(self) -> u8 {
        self as u8 + 1
    }

    /// The tier of this number.
    pub fn of_number(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|tier| tier.number() == number)
    }
}

impl fmt::Display for TierId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "g{}", self.number())
    }
}

/// Direction of a copy between an engine's memory and a depot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From the engine's memory to a depot: a gather.
    Store,
    /// From a depot to the engine's memory: a scatter.
    Load,
}

/// The tiers that a transfer reads and writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Edge {
    /// The tier whose pages are read.
    pub from: TierId,
    /// The tier whose pages are written.
    pub to: TierId,
}

impl Edge {
    /// From an engine's memory to host memory.
    pub const STORE: Self = Self {
        from: TierId::Device,
        to: TierId::Host,
    };
    /// From host memory to an engine's memory.
    pub const LOAD: Self = Self {
        from: TierId::Host,
        to: TierId::Device,
    };

    /// True if the tier is read or written.
    pub fn touches(self, tier: TierId) -> bool {
        self.from == tier || self.to == tier
    }

    /// The direction seen from the engine's memory; `None` if neither tier is the device.
    pub fn direction(self) -> Option<Direction> {
        match (self.from, self.to) {
            (TierId::Device, TierId::Device) => None,
            (TierId::Device, _) => Some(Direction::Store),
            (_, TierId::Device) => Some(Direction::Load),
            _ => None,
        }
    }
}

impl fmt::Display for Edge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} to {}", self.from, self.to)
    }
}

/// An engine's memory as one end of a transfer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DeviceEnd {
    /// The engine whose memory is read or written.
    pub engine: EngineId,
    /// The group of layers whose pages are copied.
    pub group: GroupId,
    /// The request that the transfer belongs to. A transfer for a request that the engine has abandoned never starts.
    pub request: RequestId,
    /// The transfer starts once the rank has reported everything up to this number as written: for a store its own
    /// request, for a load the last work that may write into the destination pages.
    pub after: RequestId,
}

/// One movement of pages, equal on every worker that carries it out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transfer {
    /// Id of the transfer; also of the reservation that it fills, if it writes to a tier below the device.
    pub id: TransferId,
    /// The tiers that are read and written.
    pub edge: Edge,
    /// The engine's memory; `None` if neither tier is the device.
    pub device: Option<DeviceEnd>,
    /// Bytes of one page of the tiers below the device: of a page of the engine's largest group.
    pub page_bytes: u64,
    /// The pages: device pages on the engine's side, arena pages on that of any other tier.
    pub pairs: Vec<FragmentPair>,
    /// The record that is added to the inventory of the written tier after the last byte; `None` for a load.
    pub record: Option<Record>,
    /// Time at which the transfer is cancelled.
    pub deadline: Time,
}

/// The end of one transfer on one worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct EndedCopy {
    /// The transfer.
    pub transfer: TransferId,
    /// True when every byte was copied.
    pub complete: bool,
    /// If not: number of pages, from the first one on and in the order of the pairs, of which every byte was copied.
    #[serde(default)]
    pub complete_pages: u32,
    /// Bytes that were copied.
    #[serde(default)]
    pub bytes: u64,
    /// Duration of the copy, in microseconds.
    #[serde(default)]
    pub copy_us: u64,
    /// The page after the complete ones failed its checksum in the tier that was read: the source is bad, not the copy.
    #[serde(default)]
    pub bad_source: bool,
    /// Index, in the order of the pairs, of a page whose place in a tier below host memory failed: it returned other bytes
    /// than were written, or an error. The place must not be used again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub faulty_page: Option<u32>,
}

impl EndedCopy {
    /// An end without counts, and without a bad source or place.
    pub const fn new(transfer: TransferId, complete: bool) -> Self {
        Self {
            transfer,
            complete,
            complete_pages: 0,
            bytes: 0,
            copy_us: 0,
            bad_source: false,
            faulty_page: None,
        }
    }

    /// Every byte was copied.
    pub const fn complete(transfer: TransferId) -> Self {
        Self::new(transfer, true)
    }

    /// Some bytes were not copied; no page counts as copied.
    pub const fn failed(transfer: TransferId) -> Self {
        Self::new(transfer, false)
    }
}

/// Places of failed pages that a tier keeps out of use, at most. A disk that fails at so many places is about to fail
/// altogether, and the list must not grow with it.
pub const QUARANTINED_PAGES_MAX: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_tier_has_the_number_of_its_name() {
        for (tier, name) in TierId::ALL.into_iter().zip(["g1", "g2", "g3", "g4"]) {
            assert_eq!(tier.to_string(), name);
            assert_eq!(TierId::of_number(tier.number()), Some(tier));
        }
        assert_eq!(TierId::of_number(0), None);
        assert_eq!(TierId::of_number(5), None);
    }

    #[test]
    fn an_edge_has_a_direction_if_one_of_its_ends_is_the_device() {
        for from in TierId::ALL {
            for to in TierId::ALL {
                let expected = match (from == TierId::Device, to == TierId::Device) {
                    (true, false) => Some(Direction::Store),
                    (false, true) => Some(Direction::Load),
                    _ => None,
                };
                assert_eq!(Edge { from, to }.direction(), expected);
            }
        }
        assert_eq!(Edge::STORE.direction(), Some(Direction::Store));
        assert_eq!(Edge::LOAD.to_string(), "g2 to g1");
    }
}
