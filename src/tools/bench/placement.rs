//! The cores on which the processes of a measurement run.
//!
//! The scheduler moves two processes that wake each other between sharing a core and using two, and a wake-up on another core
//! costs more than a message. So both sides of a ratio are measured on the same cores, which are chosen here.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use kvferry::error::CommandError;

/// See the module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Placement {
    /// Client and servers on one core.
    OneCore,
    /// The client on one core, all servers on another.
    TwoCores,
    /// Where the scheduler puts them, which differs from run to run.
    Free,
}

impl Placement {
    /// As on the command line.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::OneCore => "one-core",
            Self::TwoCores => "two-cores",
            Self::Free => "free",
        }
    }
}

/// The cores of one placement.
pub(super) struct Cores {
    client: CpuSet,
    servers: CpuSet,
}

/// The placements to be measured, with their cores: those that are given, or one core and, if this process may use a second
/// one, two.
pub(super) fn chosen(given: &[Placement]) -> Result<Vec<(Placement, Cores)>, CommandError> {
    let allowed = sched_getaffinity(None).map_err(CommandError::failed)?;
    let mut cores = (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu));
    let first = cores
        .next()
        .ok_or_else(|| CommandError::Failed("this process may use no core".to_owned()))?;
    let siblings = thread_siblings(first);
    let second = cores.find(|cpu| siblings.is_none() || thread_siblings(*cpu) != siblings);
    let one = |cpu: usize| {
        let mut set = CpuSet::new();
        set.set(cpu);
        set
    };
    let default = match second {
        Some(_) => &[Placement::OneCore, Placement::TwoCores][..],
        None => &[Placement::OneCore],
    };
    let placements = if given.is_empty() { default } else { given };
    let placed = placements.iter().map(|placement| {
        let (client, servers) = match placement {
            Placement::OneCore => (one(first), one(first)),
            Placement::TwoCores => {
                let second = second.ok_or_else(|| {
                    CommandError::Failed(
                        "--placement two-cores: this process may use one core alone; allow another one, or leave it out"
                            .to_owned(),
                    )
                })?;
                (one(first), one(second))
            }
            Placement::Free => (allowed, allowed),
        };
        Ok((*placement, Cores { client, servers }))
    });
    placed.collect()
}

impl Cores {
    /// Moves this thread to the cores of the servers, which the processes that it starts inherit.
    pub(super) fn move_to_servers(&self) -> Result<(), CommandError> {
        sched_setaffinity(None, &self.servers).map_err(CommandError::failed)
    }

    /// Moves this thread to the core of the client.
    pub(super) fn move_to_client(&self) -> Result<(), CommandError> {
        sched_setaffinity(None, &self.client).map_err(CommandError::failed)
    }
}

/// The threads that share a core with this one, as the system lists them: the same text for each of them. `None` where the
/// system does not tell.
fn thread_siblings(cpu: usize) -> Option<String> {
    let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
    std::fs::read_to_string(path).ok()
}
