//! Ids. Each is a newtype, so that one kind cannot be used for another.

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

macro_rules! number_id {
    ($(#[$doc:meta])* $name:ident($inner:ty), $prefix:literal) => {
        $(#[$doc])*
        #[derive(
            Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
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
    /// A tensor-parallel rank of one engine: has one worker and one slice of the KV.
    Rank(u16), "rank "
);
number_id!(
    /// The number of one engine instance beside a leader: a data-parallel rank, or an engine that shares depots with
    /// others.
    Replica(u16), "replica "
);
number_id!(
    /// Id of one reset that the leader orders from the workers. Never reused within an epoch.
    ResetId(u64), "reset "
);
number_id!(
    /// Id of one flush that the leader orders from the workers. Never reused within an epoch.
    FlushId(u64), "flush "
);
number_id!(
    /// Sequence number of a worker's attach requests on one connection. A repeated number is a retry.
    AttachId(u64), "attach "
);
number_id!(
    /// Sequence number of a worker's statements of its engine's memory on one connection. A repeated number is a retry.
    MemoryId(u64), "memory "
);
number_id!(
    /// A slice of a group's KV. Ranks with equal KV hold the same shard.
    Shard(u16), "shard "
);
number_id!(
    /// A group of layers that share page geometry and attention kind. Most models have group 0 only.
    GroupId(u8), "group "
);
number_id!(
    /// Number of a leader's start, which grows with each. A message with an older epoch has no effect.
    Epoch(u64), "epoch "
);
number_id!(
    /// Id of one transfer that the leader orders from the workers; also of the reservation that it fills, if its target
    /// is a tier. Ascends, and is never reused within an epoch.
    TransferId(u64), "transfer "
);
number_id!(
    /// Id of a request, chosen by the client and growing. A repeated id is a retry, and has one effect.
    RequestId(u64), "request "
);
number_id!(
    /// Id of one connection on the listener's side. Unique in the process, never reused, and never chosen by the
    /// client.
    PeerId(u64), "peer "
);
number_id!(
    /// Number of a connection on the client's side, which grows with each connection of a session.
    LinkId(u64), "connection "
);
number_id!(
    /// The engine's own number of a running request (a sequence), unique among its running requests.
    SlotId(u64), "slot "
);

/// The seat of a worker: one rank of one replica. At most one process has it at a time. Displayed without the replica
/// if that is replica 0, because most leaders have no other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkerId {
    /// The engine instance.
    pub replica: Replica,
    /// The rank of that instance.
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

/// The memory of one shard on one host. Random bytes drawn at its creation, so that an empty successor is not taken for
/// the depot that held pages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DepotId(pub u128);

/// A rule about namespaces, as a keyed hash of its prefix.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RuleId(pub u32);

/// A namespace, as a keyed hash. All domains of a namespace have the same one, in every layout. The second half is the id of
/// the rule of the namespace, if it has one, so that the rule is known of pages that were found on a disk.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NamespaceId(pub u64);

impl NamespaceId {
    /// The rule of this namespace; where it has none, any number.
    pub const fn rule(self) -> RuleId {
        RuleId(self.0 as u32)
    }
}

impl fmt::Debug for NamespaceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x}", self.0 >> 32)
    }
}

/// A space of pages: one namespace of one model, layout and group, as a keyed hash. Two domains never share a page. The
/// first half is the hash of the namespace alone, so that a reset finds the pages of a namespace in every layout. The last
/// byte is the group, so that it is known of pages whose engine is gone.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DomainId(pub u128);

impl DomainId {
    /// The namespace of this domain.
    pub const fn namespace(self) -> NamespaceId {
        NamespaceId((self.0 >> 64) as u64)
    }

    /// The group of this domain.
    pub const fn group(self) -> GroupId {
        GroupId(self.0.to_be_bytes()[15])
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
