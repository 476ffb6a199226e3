//! Which faults there are, and how often each was injected and had an effect.

use std::fmt;

macro_rules! faults {
    ($($(#[$doc:meta])* $name:ident, $text:literal;)*) => {
        /// A kind of fault.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
        #[repr(usize)]
        pub enum Fault {
            $($(#[$doc])* $name,)*
        }

        impl Fault {
            /// Every kind.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// What reports call it.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)*
                }
            }
        }
    };
}

faults! {
    /// A message does not arrive. Effect: its receiver was there.
    Loss, "message lost";
    /// A message arrives twice. Effect: both were read.
    Duplicate, "message duplicated";
    /// A message takes much longer. Effect: a later one over the same connection overtook it.
    Delay, "message delayed, reordered";
    /// Nothing comes through from one process to another, while the other way is open. Effect: a message was stopped.
    Partition, "partition, one way";
    /// The leader's process dies. Effect: requests or copies were under way.
    LeaderCrash, "leader crash";
    /// The leader's process dies soon after a copy has begun. Effect: copies were running.
    LeaderCrashInCopy, "leader crash, copies running";
    /// A worker's process dies. Effect: copies were open.
    WorkerCrash, "worker crash";
    /// An engine's process dies. Effect: prompts were running.
    EngineCrash, "engine crash";
    /// The leader's process stands still. Effect: something waited for it.
    LeaderPause, "leader pause";
    /// A worker's process stands still, its copies with it. Effect: something waited for it.
    WorkerPause, "worker pause";
    /// A paused worker has a copy that goes on behind its deadline. Effect: it wrote.
    LateWriter, "copy resumed behind its deadline";
    /// An engine's process stands still. Effect: something waited for it.
    EnginePause, "engine pause";
    /// A copy fails half way. Effect: it was reported.
    CopyError, "copy error";
    /// A copy takes longer than its deadline. Effect: it ended behind it, or was stopped.
    CopyLate, "copy ended late";
    /// A copy never ends and cannot be stopped. Effect: its process died for it.
    CopyStuck, "copy that never ended";
    /// The wall clock jumps. Effect: the leader had deadlines to keep.
    WallJump, "wall clock jump";
    /// A process reads its messages slowly. Effect: messages queued.
    SlowConsumer, "slow consumer";
    /// The memory of a shard is lost with its workers. Effect: a pool was closed for it.
    DepotLoss, "depot lost";
    /// An engine leaves while inventories are read. Effect: they were still being read when the leader heard of it.
    ReadingLeft, "engine left a reading";
    /// An engine begins whose pages have another shape than those of its last life. Effect: a pool was closed for it.
    OtherShape, "engine of another shape";
    /// All copies of one rank fail for a while. Effect: a store failed on that rank alone.
    RankFailure, "one rank failing";
}

/// How often.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FaultCounts([(u64, u64); Fault::ALL.len()]);

impl FaultCounts {
    /// One more of this kind.
    pub fn injected(&mut self, fault: Fault) {
        self.0[fault as usize].0 += 1;
    }

    /// One of this kind has had an effect.
    pub fn took_effect(&mut self, fault: Fault) {
        self.0[fault as usize].1 += 1;
    }

    /// Kind, injected, taken effect.
    pub fn iter(&self) -> impl Iterator<Item = (Fault, u64, u64)> {
        Fault::ALL
            .iter()
            .zip(self.0)
            .map(|(fault, (injected, effect))| (*fault, injected, effect))
    }

    /// Adds those of another run.
    pub fn add(&mut self, other: &Self) {
        for (sum, more) in self.0.iter_mut().zip(other.0) {
            *sum = (sum.0 + more.0, sum.1 + more.1);
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
