//! The kinds of faults, and how often each was injected and had an effect.

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

            /// Name of the kind in reports.
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
    /// No message gets from one process to another, while the other way is open. Effect: a message was stopped.
    Partition, "partition, one way";
    /// The leader's process dies. Effect: requests or copies were open.
    LeaderCrash, "leader crash";
    /// The leader's process dies soon after a copy has begun. Effect: copies were running.
    LeaderCrashInCopy, "leader crash, copies running";
    /// A worker's process dies. Effect: copies were open.
    WorkerCrash, "worker crash";
    /// An engine's process dies. Effect: prompts were running.
    EngineCrash, "engine crash";
    /// The leader's process is paused. Effect: an event waited for it.
    LeaderPause, "leader pause";
    /// A worker's process is paused, its copies with it. Effect: an event waited for it.
    WorkerPause, "worker pause";
    /// A paused worker has a copy that continues after its deadline. Effect: it wrote.
    LateWriter, "copy resumed after its deadline";
    /// An engine's process is paused. Effect: an event waited for it.
    EnginePause, "engine pause";
    /// A copy fails half way. Effect: it was reported.
    CopyError, "copy error";
    /// A copy takes longer than its deadline. Effect: it ended after its deadline, or was stopped.
    CopyLate, "copy ended late";
    /// A copy never ends and cannot be stopped. Effect: its process died.
    CopyStuck, "copy that never ended";
    /// The wall clock jumps. Effect: the leader had copies with deadlines.
    WallJump, "wall clock jump";
    /// A process reads its messages slowly. Effect: messages queued.
    SlowConsumer, "slow consumer";
    /// The memory of a shard is lost with its workers. Effect: a pool closed because of it.
    DepotLoss, "depot lost";
    /// An engine leaves while inventories are read. Effect: the leader was still reading them.
    ReadingLeft, "engine left a reading";
    /// An engine starts whose pages have another shape than the usual one. Effect: a pool closed because of it.
    OtherShape, "engine of another shape";
    /// A page of a tier fails its checksum when it is moved. Effect: the move ended there.
    BadSource, "bad page in a tier";
    /// All copies of one rank fail for a while. Effect: a store failed on that rank alone.
    RankFailure, "one rank failing";
    /// A disk does not read a page. Effect: the move ended there.
    DiskReadError, "disk read error";
    /// A disk does not write a page. Effect: the move failed.
    DiskWriteError, "disk write error";
    /// A disk has no room for another segment. Effect: a worker states fewer pages.
    DiskFull, "disk full";
    /// A disk goes away for a while, and part of what it had not made durable with it. Effect: an open set was closed.
    DiskAway, "disk away";
    /// A worker does not reach its disk for a while. Effect: it tried to open it.
    DiskMissing, "worker without its disk";
    /// All processes of the host die, its memory is lost, and part of what its disks had not made durable. Effect: something
    /// of a disk was lost.
    PowerLoss, "power loss";
}

/// How often each kind of fault was injected, and how often it had an effect.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FaultCounts([(u64, u64); Fault::ALL.len()]);

impl FaultCounts {
    /// Counts an injected fault.
    pub fn injected(&mut self, fault: Fault) {
        self.0[fault as usize].0 += 1;
    }

    /// Counts a fault that had an effect.
    pub fn took_effect(&mut self, fault: Fault) {
        self.0[fault as usize].1 += 1;
    }

    /// All kinds, each with the numbers injected and taken effect.
    pub fn iter(&self) -> impl Iterator<Item = (Fault, u64, u64)> {
        Fault::ALL
            .iter()
            .zip(self.0)
            .map(|(fault, (injected, effect))| (*fault, injected, effect))
    }

    /// Adds the counts of another run.
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
