//! Copies in flight: the two links of each rank, and their measurements.

use std::collections::HashMap;
use std::time::Duration;

use crate::links::{BandwidthLinkId, FlowId, FlowSpec, Links, LinksError};
use kvferry_types::{Direction, EndedCopy, Rank, RequestId, Time, Transfer, TransferId};

use super::{DIRECTIONS, Measurements, TimedSettings, pages};

/// The direction of a transfer. One neither of whose ends is the device would count as a store; no leader here orders
/// any.
fn direction(transfer: &Transfer) -> Direction {
    transfer.edge.direction().unwrap_or(Direction::Store)
}

/// A copy that a worker has received and not reported.
#[derive(Debug, Clone, Copy)]
struct CopyTask {
    direction: Direction,
    bytes: u64,
    /// When the copy was ordered and its source pages were written, whichever is later.
    ready_at: Time,
    started_at: Time,
    flow: Option<FlowId>,
}

#[derive(Debug)]
pub(super) struct TimedCopies {
    links: Links,
    /// The links of each rank, by direction.
    by_rank: Vec<[BandwidthLinkId; 2]>,
    bytes_per_s: [u64; 2],
    latency: Duration,
    page_bytes: u64,
    tasks: HashMap<(Rank, TransferId), CopyTask>,
    flows: HashMap<FlowId, (Rank, TransferId)>,
    /// Requests up to which everything is written, and when the workers were notified. Both grow.
    written: Vec<(RequestId, Time)>,
    queue_ns: [Vec<u64>; 2],
    over: Vec<(Time, FlowId)>,
}

fn index(direction: Direction) -> usize {
    usize::from(direction == Direction::Load)
}

impl TimedCopies {
    pub(super) fn new(
        settings: &TimedSettings,
        ranks: u16,
        page_bytes: u64,
    ) -> Result<Self, LinksError> {
        let mut links = Links::new();
        let bytes_per_s = [settings.d2h_bytes_per_s, settings.h2d_bytes_per_s];
        let mut by_rank = Vec::new();
        for _ in 0..ranks {
            by_rank.push([
                links.add_link(bytes_per_s[0])?,
                links.add_link(bytes_per_s[1])?,
            ]);
        }
        Ok(Self {
            links,
            by_rank,
            bytes_per_s,
            latency: settings.link_latency,
            page_bytes,
            tasks: HashMap::new(),
            flows: HashMap::new(),
            written: Vec::new(),
            queue_ns: [Vec::new(), Vec::new()],
            over: Vec::new(),
        })
    }

    /// When copies may end next.
    pub(super) fn next_event(&mut self) -> Option<Time> {
        self.links.next_event()
    }

    /// Notes copies that a worker receives.
    pub(super) fn ordered(&mut self, now: Time, rank: Rank, copies: &[Transfer]) {
        for copy in copies {
            let task = CopyTask {
                direction: direction(copy),
                bytes: pages(copy) * self.page_bytes,
                ready_at: now,
                started_at: now,
                flow: None,
            };
            self.tasks.insert((rank, copy.id), task);
        }
    }

    /// Notes that the workers are notified that everything up to a request is written.
    pub(super) fn written(&mut self, now: Time, through: RequestId) {
        self.written.push((through, now));
    }

    /// Starts copies of a worker.
    pub(super) fn start(&mut self, now: Time, rank: Rank, copies: &[Transfer]) {
        for copy in copies {
            let Some(task) = self.tasks.get_mut(&(rank, copy.id)) else {
                continue;
            };
            if direction(copy) == Direction::Store {
                let request = copy.device.unwrap_or_default().request;
                let first = self.written.partition_point(|(id, _)| *id < request);
                let written_at = self.written.get(first).map_or(Time(0), |(_, at)| *at);
                task.ready_at = task.ready_at.max(written_at);
            }
            let flow = FlowSpec {
                links: &[self.by_rank[usize::from(rank.0)][index(direction(copy))]],
                bytes: task.bytes,
                weight: 1,
                cap: None,
                latency: self.latency,
            };
            task.started_at = now;
            task.flow = self.links.start(now, &flow).ok();
            if let Some(flow) = task.flow {
                self.flows.insert(flow, (rank, copy.id));
            }
        }
    }

    /// Stops a copy of a worker: no more of its bytes move. Returns `None` when the copy has already ended.
    pub(super) fn stop(
        &mut self,
        now: Time,
        rank: Rank,
        transfer: TransferId,
    ) -> Option<EndedCopy> {
        let task = self.tasks.get_mut(&(rank, transfer))?;
        let flow = task.flow.take()?;
        // A copy that has ended by now is reported as ended, not as stopped.
        self.links.cancel(now, flow)?;
        self.flows.remove(&flow);
        Some(EndedCopy {
            transfer,
            complete: false,
            complete_pages: 0,
            bytes: 0,
            copy_us: microseconds(task.started_at, now),
            bad_source: false,
        })
    }

    /// Takes the copies that have ended by now, sorted by rank.
    pub(super) fn take_ended(&mut self, now: Time) -> Vec<(Rank, EndedCopy)> {
        let mut ended = Vec::new();
        self.links.advance(now, &mut self.over);
        for (at, flow) in self.over.drain(..) {
            let Some((rank, transfer)) = self.flows.remove(&flow) else {
                continue;
            };
            let Some(task) = self.tasks.get_mut(&(rank, transfer)) else {
                continue;
            };
            task.flow = None;
            let way = index(task.direction);
            let alone = u128::from(task.bytes) * 1_000_000_000;
            let alone = alone.div_ceil(u128::from(self.bytes_per_s[way]));
            let alone =
                self.latency + Duration::from_nanos(u64::try_from(alone).unwrap_or(u64::MAX));
            let queued = (task.ready_at + alone).until(at).as_nanos();
            self.queue_ns[way].push(u64::try_from(queued).unwrap_or(u64::MAX));
            let copy = EndedCopy {
                transfer,
                complete: true,
                complete_pages: 0,
                bytes: task.bytes,
                copy_us: microseconds(task.started_at, at),
                bad_source: false,
            };
            ended.push((rank, copy));
        }
        ended.sort_by_key(|(rank, _)| *rank);
        ended
    }

    /// Removes copies that a worker has reported.
    pub(super) fn reported(&mut self, rank: Rank, copies: &[EndedCopy]) {
        for copy in copies {
            self.tasks.remove(&(rank, copy.transfer));
        }
    }

    /// Adds the measurements of the links.
    pub(super) fn fill(&mut self, seen: &mut Measurements) {
        for direction in DIRECTIONS {
            let way = index(direction);
            let use_of = match direction {
                Direction::Store => &mut seen.d2h,
                Direction::Load => &mut seen.h2d,
            };
            for links in &self.by_rank {
                use_of.add(self.links.utilisation(links[way]));
            }
            use_of.queue_ns = std::mem::take(&mut self.queue_ns[way]);
        }
    }
}

fn microseconds(from: Time, to: Time) -> u64 {
    u64::try_from(from.until(to).as_micros()).unwrap_or(u64::MAX)
}
