//! Copies in flight: the two links of each rank, and their measurements.

use std::collections::HashMap;
use std::time::Duration;

use crate::links::{BandwidthLinkId, FlowId, FlowSpec, Links, LinksError};
use kvferry_types::{Edge, EndedCopy, Rank, RequestId, TierId, Time, Transfer, TransferId};

use super::{Measurements, TimedSettings, pages};

/// The kinds of links: each rank has one from its device and one to it, and all ranks share the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Store,
    Load,
    DiskWrite,
    DiskRead,
}

impl Way {
    const ALL: [Self; 4] = [Self::Store, Self::Load, Self::DiskWrite, Self::DiskRead];

    fn of(edge: Edge) -> Self {
        match (edge.from, edge.to) {
            (TierId::Device, _) => Self::Store,
            (_, TierId::Device) => Self::Load,
            (from, to) if from < to => Self::DiskWrite,
            _ => Self::DiskRead,
        }
    }
}

/// A copy that a worker has received and not reported.
#[derive(Debug, Clone, Copy)]
struct CopyTask {
    way: Way,
    bytes: u64,
    /// When the copy was ordered and its source pages were written, whichever is later.
    ready_at: Time,
    started_at: Time,
    flow: Option<FlowId>,
}

#[derive(Debug)]
pub(super) struct TimedCopies {
    links: Links,
    /// The links of each rank, by their kind.
    by_rank: Vec<[BandwidthLinkId; 4]>,
    bytes_per_s: [u64; 4],
    latency: [Duration; 4],
    page_bytes: u64,
    tasks: HashMap<(Rank, TransferId), CopyTask>,
    flows: HashMap<FlowId, (Rank, TransferId)>,
    /// Requests up to which everything is written, and when the workers were notified. Both grow.
    written: Vec<(RequestId, Time)>,
    queue_ns: [Vec<u64>; 4],
    over: Vec<(Time, FlowId)>,
}

impl TimedCopies {
    pub(super) fn new(
        settings: &TimedSettings,
        ranks: u16,
        page_bytes: u64,
    ) -> Result<Self, LinksError> {
        let mut links = Links::new();
        let bytes_per_s = [
            settings.d2h_bytes_per_s,
            settings.h2d_bytes_per_s,
            settings.disk_write_bytes_per_s,
            settings.disk_read_bytes_per_s,
        ];
        let (link, disk) = (settings.link_latency, settings.disk_latency);
        let mut device = Vec::new();
        for _ in 0..ranks {
            device.push([
                links.add_link(bytes_per_s[0])?,
                links.add_link(bytes_per_s[1])?,
            ]);
        }
        let written = links.add_link(bytes_per_s[2])?;
        let read = links.add_link(bytes_per_s[3])?;
        let of_rank = |[store, load]: [BandwidthLinkId; 2]| [store, load, written, read];
        let by_rank = device.into_iter().map(of_rank).collect();
        Ok(Self {
            links,
            by_rank,
            bytes_per_s,
            latency: [link, link, disk, disk],
            page_bytes,
            tasks: HashMap::new(),
            flows: HashMap::new(),
            written: Vec::new(),
            queue_ns: Default::default(),
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
                way: Way::of(copy.edge),
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
            if task.way == Way::Store {
                let request = copy.device.unwrap_or_default().request;
                let first = self.written.partition_point(|(id, _)| *id < request);
                let written_at = self.written.get(first).map_or(Time(0), |(_, at)| *at);
                task.ready_at = task.ready_at.max(written_at);
            }
            let flow = FlowSpec {
                links: &[self.by_rank[usize::from(rank.0)][task.way as usize]],
                bytes: task.bytes,
                weight: 1,
                cap: None,
                latency: self.latency[task.way as usize],
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
            copy_us: microseconds(task.started_at, now),
            ..EndedCopy::failed(transfer)
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
            let way = task.way as usize;
            let alone = u128::from(task.bytes) * 1_000_000_000;
            let alone = alone.div_ceil(u128::from(self.bytes_per_s[way]));
            let alone =
                self.latency[way] + Duration::from_nanos(u64::try_from(alone).unwrap_or(u64::MAX));
            let queued = (task.ready_at + alone).until(at).as_nanos();
            self.queue_ns[way].push(u64::try_from(queued).unwrap_or(u64::MAX));
            let copy = EndedCopy {
                bytes: task.bytes,
                copy_us: microseconds(task.started_at, at),
                ..EndedCopy::complete(transfer)
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
        for way in Way::ALL {
            let use_of = match way {
                Way::Store => &mut seen.d2h,
                Way::Load => &mut seen.h2d,
                Way::DiskWrite => &mut seen.disk_write,
                Way::DiskRead => &mut seen.disk_read,
            };
            let shared = matches!(way, Way::DiskWrite | Way::DiskRead);
            let ranks = if shared { 1 } else { self.by_rank.len() };
            for links in &self.by_rank[..ranks] {
                use_of.add(self.links.utilisation(links[way as usize]));
            }
            use_of.queue_ns = std::mem::take(&mut self.queue_ns[way as usize]);
        }
    }
}

fn microseconds(from: Time, to: Time) -> u64 {
    u64::try_from(from.until(to).as_micros()).unwrap_or(u64::MAX)
}
