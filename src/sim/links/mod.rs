//! Fluid model of shared links: how long transfers take that share bandwidth.
//!
//! Flows move bytes over links. Each flow is treated as a fluid: at every moment the capacity of the links is shared
//! max-min fairly by weight, so that no flow can get more without taking from a flow that has no more for its weight. A
//! flow over several links moves at one rate on all of them at once.
//!
//! # Cost
//!
//! A link keeps a clock of virtual work: the work that it has done for each unit of weight. A flow over this link
//! alone, without a cap, ends when the clock has advanced by the flow's bytes divided by its weight. That value never
//! changes when other flows start or end. These flows are therefore kept in an ordered set, an arrival, an end and a
//! cancel cost O(log n), and no flow is touched by the events of another one (the virtual time of Parekh and Gallager,
//! "A Generalized Processor Sharing Approach to Flow Control in Integrated Services Networks", 1993). Flows over
//! several links, or with a cap, keep their remaining work and their rate. Both are recomputed by progressive filling
//! (Bertsekas and Gallager, "Data Networks", 6.5.2) when a flow of their connected component starts or ends, at most
//! once for each point in time. Links that are not connected to the component take no part in that.
//!
//! # Accuracy
//!
//! All values are integers; see `fixed`. An end is reported at the first whole nanosecond at or after it, or at the
//! whole nanosecond that it exceeds by less than 2^-10 nanoseconds. On links that carry only flows without caps over
//! one link, each event adds less than 2^-31 nanoseconds and, with flows of weight W at capacity C, less than W/C x
//! 2^-31 nanoseconds of error. Rates of the other flows are rounded down to multiples of 2^-32 bytes per second: one
//! that runs for T nanoseconds at R bytes per second or more ends at most T/R x 2^-31 nanoseconds late. The state
//! changes at events only: the number of calls between events changes nothing.

mod connect;
mod filling;
mod fixed;
mod group;
#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use smallvec::SmallVec;

use kvferry_types::Time;

use group::{BandwidthLink, Group};

/// Most links of one flow.
pub const LINKS_PER_FLOW_MAX: usize = 8;

/// Id of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BandwidthLinkId(u32);

/// Id of a flow. Flows that start later have larger ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FlowId(pub u64);

/// The description of a flow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FlowSpec<'a> {
    /// 1 to [`LINKS_PER_FLOW_MAX`] different links.
    pub links: &'a [BandwidthLinkId],
    /// Bytes to move.
    pub bytes: u64,
    /// Weight of the flow when links are shared, at least 1.
    pub weight: u32,
    /// Limit of the rate in bytes per second, at least 1; `None` for no limit.
    pub cap: Option<u64>,
    /// Time from the start of the flow until it joins its links.
    pub latency: Duration,
}

/// Why a link or a flow is rejected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum LinksError {
    /// A link with a capacity of 0, on which flows would never end.
    #[error("a link moves 0 bytes per second: give it at least 1")]
    NoCapacity,
    /// A flow with a cap of 0, which would never end.
    #[error("a flow is capped at 0 bytes per second: give it at least 1, or no cap")]
    NoRate,
    /// A flow with a weight of 0.
    #[error("a flow has weight 0: give it at least 1")]
    NoWeight,
    /// A flow over no links, or over more than [`LINKS_PER_FLOW_MAX`].
    #[error("a flow uses {0} links: 1 to {LINKS_PER_FLOW_MAX} are possible")]
    LinkCount(usize),
    /// A link that is named twice, or belongs to another model.
    #[error("link {0} is unknown, or named twice")]
    LinkName(u32),
}

/// Usage of a link so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Utilisation {
    /// Bytes of flows that have ended, plus those that cancelled flows had moved.
    pub bytes: u64,
    /// Nanoseconds during which the link had at least one flow.
    pub busy_ns: u64,
}

/// Stage of a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Waits until its latency is over, at this time.
    Joining(Time),
    /// Runs over one link, without a cap: ends when the link's virtual work reaches `tag`.
    Single { tag: u128 },
    /// Runs over several links or with a cap: has its own remaining work and rate.
    Coupled { left: u128, rate: u128 },
}

#[derive(Debug, Clone)]
struct Flow {
    links: SmallVec<[u32; 2]>,
    bytes: u64,
    weight: u32,
    cap: Option<u64>,
    stage: Stage,
}

/// Links and the flows on them.
#[derive(Debug, Default)]
pub struct Links {
    links: Vec<BandwidthLink>,
    /// Indexed by the link that names the group. A group whose link belongs to another group is unused.
    groups: Vec<Group>,
    flows: HashMap<FlowId, Flow>,
    joining: BTreeSet<(Time, FlowId)>,
    /// Time at which each group's next flow ends.
    schedule: BTreeSet<(Time, u32)>,
    /// Groups whose rates or next end have to be recomputed.
    stale: Vec<u32>,
    /// Ends that were reached while a flow was started or cancelled.
    ended: Vec<(Time, FlowId)>,
    next_flow: u64,
    now: Time,
}

impl Links {
    /// A model without links.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a link that moves `bytes_per_s`. At most 2^32 links.
    ///
    /// # Errors
    ///
    /// A capacity of zero.
    pub fn add_link(&mut self, bytes_per_s: u64) -> Result<BandwidthLinkId, LinksError> {
        if bytes_per_s == 0 {
            return Err(LinksError::NoCapacity);
        }
        let index = u32::try_from(self.links.len()).unwrap_or(u32::MAX);
        self.links.push(BandwidthLink::new(bytes_per_s, index));
        self.groups.push(Group::of_one(index));
        Ok(BandwidthLinkId(index))
    }

    /// Starts a flow at `now`, which is no earlier than the time of any earlier call; an earlier one counts as the
    /// latest.
    ///
    /// # Errors
    ///
    /// An invalid description of the flow. Nothing has changed then.
    pub fn start(&mut self, now: Time, flow: &FlowSpec<'_>) -> Result<FlowId, LinksError> {
        let links = self.check(flow)?;
        // Flows that start at the same time get their rates in one computation.
        if now > self.now {
            self.run_to(now);
        }
        let id = FlowId(self.next_flow);
        self.next_flow += 1;
        let joins = self.now + flow.latency;
        self.flows.insert(
            id,
            Flow {
                links,
                bytes: flow.bytes,
                weight: flow.weight,
                cap: flow.cap,
                stage: Stage::Joining(joins),
            },
        );
        match joins > self.now {
            true => _ = self.joining.insert((joins, id)),
            false => self.put_on(id),
        }
        Ok(id)
    }

    /// Returns when to call [`Links::advance`] next: a flow ends or joins its links then, and none ends before. `None`
    /// without flows.
    pub fn next_event(&mut self) -> Option<Time> {
        self.settle();
        let ended = self.ended.first().map(|(at, _)| *at);
        let joins = self.joining.first().map(|(at, _)| *at);
        let ends = self.schedule.first().map(|(at, _)| *at);
        [ended, joins, ends].into_iter().flatten().min()
    }

    /// Advances to `now` and appends the flows that have ended, with their times, in the order of time, and of ids
    /// where times are equal. Times are never before those of earlier calls.
    pub fn advance(&mut self, now: Time, ended: &mut Vec<(Time, FlowId)>) {
        self.run_to(now);
        self.ended.sort_unstable();
        ended.append(&mut self.ended);
    }

    /// Removes a flow at `now` and returns the bytes that it has not moved, rounded up; `None` when the flow has ended.
    pub fn cancel(&mut self, now: Time, id: FlowId) -> Option<u64> {
        self.run_to(now);
        let flow = self.flows.get(&id)?.clone();
        let left = match flow.stage {
            Stage::Joining(at) => {
                self.joining.remove(&(at, id));
                self.flows.remove(&id);
                return Some(flow.bytes);
            }
            Stage::Single { .. } | Stage::Coupled { .. } => self.take_off(id)?,
        };
        let left = fixed::to_bytes(left).min(flow.bytes);
        for link in &flow.links {
            self.links[*link as usize].used.bytes += flow.bytes - left;
        }
        Some(left)
    }

    /// Rate of a flow in bytes per second, rounded down; 0 during its latency, `None` when the flow has ended.
    pub fn rate(&mut self, id: FlowId) -> Option<u64> {
        self.settle();
        let rate = self.exact_rate(id)?;
        Some(u64::try_from(rate / fixed::ONE).unwrap_or(u64::MAX))
    }

    /// Number of flows that have not ended.
    pub fn open_flows(&self) -> usize {
        self.flows.len()
    }

    /// Usage of a link up to the time of the last call.
    pub fn utilisation(&self, id: BandwidthLinkId) -> Utilisation {
        self.links
            .get(id.0 as usize)
            .map_or_else(Utilisation::default, |link| link.used_until(self.now))
    }

    fn check(&self, flow: &FlowSpec<'_>) -> Result<SmallVec<[u32; 2]>, LinksError> {
        if flow.weight == 0 {
            return Err(LinksError::NoWeight);
        }
        if flow.cap == Some(0) {
            return Err(LinksError::NoRate);
        }
        if flow.links.is_empty() || flow.links.len() > LINKS_PER_FLOW_MAX {
            return Err(LinksError::LinkCount(flow.links.len()));
        }
        let mut links = SmallVec::new();
        for BandwidthLinkId(link) in flow.links {
            if *link as usize >= self.links.len() || links.contains(link) {
                return Err(LinksError::LinkName(*link));
            }
            links.push(*link);
        }
        Ok(links)
    }
}
