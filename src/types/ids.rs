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
    /// The engine's own number of a running request (a sequence), unique among its live ones.
    SlotId(u64), "slot "
);

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
