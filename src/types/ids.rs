//! Identities. Each is a newtype, so that one is never taken for another.

use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! number_id {
    ($(#[$doc:meta])* $name:ident($inner:ty), $prefix:literal) => {
        $(#[$doc])*
        #[derive(
            Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
        )]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "{}"), self.0)
            }
        }
    };
}

number_id!(
    /// A tensor-parallel rank of one engine: which worker, which slice of the KV.
    Rank(u16), "rank "
);
number_id!(
    /// One engine instance's place beside a leader: data-parallel ranks, or engines that share depots.
    Replica(u16), "replica "
);
number_id!(
    /// Names one reset that the leader asked the workers to carry out. Never reused within an epoch.
    ResetId(u64), "reset "
);
number_id!(
    /// Numbers the times that one worker said who it is; grows over one connection.
    AttachId(u64), "attach "
);
number_id!(
    /// A slice of a group's KV. Ranks whose KV is equal hold the same one.
    Shard(u16), "shard "
);
number_id!(
    /// Layers that share page geometry and attention kind. Most models have group 0 only.
    GroupId(u8), "group "
);
number_id!(
    /// Grows with each leader start; whatever carries an older one has no effect.
    Epoch(u64), "epoch "
);
number_id!(
    /// Names one reservation of pages, a growth included. Never reused within an epoch.
    Generation(u64), "generation "
);
number_id!(
    /// Names one copy that the leader asked the workers for. Never reused within an epoch.
    OpId(u64), "op "
);
number_id!(
    /// Chosen by the client, growing; the same id again is a retry and has one effect.
    RequestId(u64), "request "
);
number_id!(
    /// One connection as its listener sees it. Unique in the process, never reused, and never chosen by the client.
    PeerId(u64), "peer "
);
number_id!(
    /// One connection of a client, by its session: grows with each.
    LinkId(u64), "connection "
);
number_id!(
    /// The engine's own number of a running request (a sequence), unique among its live ones.
    SlotId(u64), "slot "
);

/// A worker's place: one rank of one replica. At most one process has it at a time. Shown without the replica when that is
/// the first, which most leaders have alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkerId {
    /// Of which engine instance.
    pub replica: Replica,
    /// Which rank of it.
    pub rank: Rank,
}

impl fmt::Display for WorkerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.replica {
            Replica(0) => self.rank.fmt(f),
            replica => write!(f, "{} of {replica}", self.rank),
        }
    }
}

/// The memory of one shard on one host: random bytes drawn when it is made, so that an empty successor is not taken for
/// the one that held pages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DepotId(pub u128);

/// A namespace, as a keyed hash: that of every domain in it, whatever its layout.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NamespaceId(pub u64);

impl fmt::Debug for NamespaceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x}", self.0 >> 32)
    }
}

/// A space of pages: one namespace of one model, layout and group, as a keyed hash. Two domains never share a page. The
/// first half is that of the namespace alone, so that a reset finds the pages of a namespace in every layout.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DomainId(pub u128);

impl DomainId {
    /// The namespace that it belongs to.
    pub const fn namespace(self) -> NamespaceId {
        NamespaceId((self.0 >> 64) as u64)
    }
}

impl fmt::Debug for DomainId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x}", self.0 >> 96)
    }
}

/// One engine instance: 16 random bytes that it keeps over reconnects.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct EngineId(#[serde(with = "serde_bytes")] pub [u8; 16]);

impl fmt::Display for EngineId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for byte in &self.0[..4] {
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for EngineId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EngineId({self})")
    }
}
