//! Shared links as fluids: how long transfers take that share what moves them.
//!
//! Flows move bytes over links. Each flow is in the place of a fluid: at every moment the links are shared out max-min
//! fairly by weight, so that no flow can get more without taking from one that has no more for its weight. A flow over
//! several links moves at one rate on all of them at once.
//!
//! # Cost
//!
//! A link keeps a clock of virtual work: what it has done for each unit of weight. A flow over this link alone, without
//! a cap, ends when the clock shows what it showed at the start and the flow's bytes by its weight; that never changes,
//! whoever comes and goes. So these flows lie in an ordered set, an arrival, an end and a cancel cost O(log n), and no
//! flow is touched by the events of another one (the virtual time of Parekh and Gallager, "A Generalized Processor
//! Sharing Approach to Flow Control in Integrated Services Networks", 1993). Flows over several links, or with a cap, keep their rest and their rate; both are computed anew, by
//! progressive filling (Bertsekas and Gallager, "Data Networks", 6.5.2), when a flow of their connected component comes
//! or goes, at most once for each point in time. Links that are not connected to it have no part in that.
//!
//! # Accuracy
//!
//! Everything is an integer; see `fixed`. An end is reported at the first whole nanosecond behind it, or at the one that
//! it is less than 2^-10 nanoseconds behind. On links that carry only flows without caps over one link, each event adds
//! less than 2^-31 nanoseconds and, with flows of weight W at capacity C, less than W/C x 2^-31 nanoseconds of error.
//! Rates of the other flows are rounded down to multiples of 2^-32 bytes per second: one that runs for T nanoseconds at R
//! bytes per second or more ends at most T/R x 2^-31 nanoseconds late. A state changes at events only, so that how often
//! anybody looks changes nothing.

mod connect;
mod filling;
mod fixed;
mod group;
#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use smallvec::SmallVec;

use crate::types::Time;

use group::{Group, Link};

/// Most links of one flow.
pub const LINKS_PER_FLOW_MAX: usize = 8;

/// Names a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkId(u32);

/// Names a flow. Flows that start later have larger ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FlowId(pub u64);

/// What a flow is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FlowSpec<'a> {
    /// 1 to [`LINKS_PER_FLOW_MAX`] different links.
    pub links: &'a [LinkId],
    /// Bytes to move.
    pub bytes: u64,
    /// Its share among others, at least 1.
    pub weight: u32,
    /// Bytes per second that it never exceeds, at least 1.
    pub cap: Option<u64>,
    /// Joins its links so long after it starts.
    pub latency: Duration,
}

/// Why a link or a flow cannot be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum LinksError {
    /// A link without capacity would hold its flows for ever.
    #[error("a link moves 0 bytes per second: give it at least 1")]
    NoCapacity,
    /// The same of a cap.
    #[error("a flow is capped at 0 bytes per second: give it at least 1, or no cap")]
    NoRate,
    /// A flow without a share.
    #[error("a flow has weight 0: give it at least 1")]
    NoWeight,
    /// No links, or too many.
    #[error("a flow uses {0} links: 1 to {LINKS_PER_FLOW_MAX} are possible")]
    LinkCount(usize),
    /// A link twice, or one of another model.
    #[error("link {0} is unknown, or named twice")]
    LinkName(u32),
}

/// How a link was used up to now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Utilisation {
    /// Bytes of flows that ended, and what cancelled ones had moved.
    pub bytes: u64,
    /// Nanoseconds during which it had a flow.
    pub busy_ns: u64,
}

/// Where a flow is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Its latency is not over.
    Joining(Time),
    /// Over one link, without a cap: ends when the link's virtual work is this.
    Single { tag: u128 },
    /// Any other, by its own account.
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

/// Links and the flows on them. See the module.
#[derive(Debug, Default)]
pub struct Links {
    links: Vec<Link>,
    /// By the link that names the group; only groups that are somebody's count.
    groups: Vec<Group>,
    flows: HashMap<FlowId, Flow>,
    joining: BTreeSet<(Time, FlowId)>,
    /// When each group's next flow ends.
    schedule: BTreeSet<(Time, u32)>,
    /// Groups whose rates or next end are to be computed.
    stale: Vec<u32>,
    /// Ends that were met while a flow was started or cancelled.
    ended: Vec<(Time, FlowId)>,
    next_flow: u64,
    now: Time,
}

impl Links {
    /// No links.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a link. At most 2^32 of them.
    ///
    /// # Errors
    ///
    /// A capacity of zero.
    pub fn add_link(&mut self, bytes_per_s: u64) -> Result<LinkId, LinksError> {
        if bytes_per_s == 0 {
            return Err(LinksError::NoCapacity);
        }
        let index = u32::try_from(self.links.len()).unwrap_or(u32::MAX);
        self.links.push(Link::new(bytes_per_s, index));
        self.groups.push(Group::of_one(index));
        Ok(LinkId(index))
    }

    /// Starts a flow at `now`, which is no earlier than any time named before; an earlier one counts as that.
    ///
    /// # Errors
    ///
    /// What the flow lacks; nothing has changed then.
    pub fn start(&mut self, now: Time, flow: &FlowSpec<'_>) -> Result<FlowId, LinksError> {
        let links = self.check(flow)?;
        // What starts at one time is rated together.
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

    /// When to call [`Links::advance`] next: no flow ends before. A flow ends then, or one joins. `None` without flows.
    pub fn next_event(&mut self) -> Option<Time> {
        self.settle();
        let ended = self.ended.first().map(|(at, _)| *at);
        let joins = self.joining.first().map(|(at, _)| *at);
        let ends = self.schedule.first().map(|(at, _)| *at);
        [ended, joins, ends].into_iter().flatten().min()
    }

    /// Lets time pass until `now` and appends the flows that ended, with their times: in the order of time, of ids where
    /// times are equal. Times are never before those of earlier calls.
    pub fn advance(&mut self, now: Time, ended: &mut Vec<(Time, FlowId)>) {
        self.run_to(now);
        self.ended.sort_unstable();
        ended.append(&mut self.ended);
    }

    /// Takes a flow off at `now` and returns the bytes that it has left, rounded up; `None` when it has ended.
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

    /// Bytes per second of a flow, rounded down; 0 while its latency lasts, `None` when it has ended.
    pub fn rate(&mut self, id: FlowId) -> Option<u64> {
        self.settle();
        let rate = self.exact_rate(id)?;
        Some(u64::try_from(rate / fixed::ONE).unwrap_or(u64::MAX))
    }

    /// Flows that have not ended.
    pub fn open_flows(&self) -> usize {
        self.flows.len()
    }

    /// How a link was used up to the last time named.
    pub fn utilisation(&self, id: LinkId) -> Utilisation {
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
        for LinkId(link) in flow.links {
            if *link as usize >= self.links.len() || links.contains(link) {
                return Err(LinksError::LinkName(*link));
            }
            links.push(*link);
        }
        Ok(links)
    }
}
