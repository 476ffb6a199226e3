//! Requests of operators: numbers of the copies, and probes.

use std::fmt;

use super::{WorkerHost, WorkerShell};
use kvferry_core::{EdgeCounts, EdgeLoad};
use kvferry_protocol::{
    Durations, EdgeMeasure, ErrorBody, ErrorCode, MeasureAnswer, Message, ProbeAnswer,
};
use kvferry_types::{Edge, LatencyHistogram, PeerId, RequestId};

/// Probes that wait for their copy, at most; a further one is refused. About 50 bytes each.
const PROBES_MAX: usize = 64;

/// The probes of a worker.
#[derive(Debug, Default)]
pub(super) struct Probes {
    /// A copy of a probe runs, also when every operator that waits for it is gone.
    runs: bool,
    /// Requests that wait for its end, at most [`PROBES_MAX`].
    pub(super) waiting: Vec<(PeerId, RequestId)>,
}

impl<P: fmt::Debug, M> WorkerShell<P, M> {
    /// The numbers of the copies.
    pub(super) fn measure(&self, host: &dyn WorkerHost<Process = P, Memory = M>) -> MeasureAnswer {
        let counts = self.core.edge_counts();
        let loads = self.core.edge_loads();
        let mut edges: Vec<Edge> = counts.keys().chain(loads.keys()).copied().collect();
        edges.sort_unstable();
        edges.dedup();
        let edges = edges.into_iter().map(|edge| {
            let counts = counts.get(&edge).copied().unwrap_or_default();
            measured(edge, &counts, loads.get(&edge).copied().unwrap_or_default())
        });
        MeasureAnswer {
            connections: host.connections(),
            hits: Vec::new(),
            edges: edges.collect(),
            refused_orders: host.refused_orders(),
            namespaces: Vec::new(),
            draining: false,
        }
    }

    /// Begins a probe, or waits for the end of the one that runs, which proves as much: the end comes later than this
    /// request.
    pub(super) fn probe(
        &mut self,
        host: &mut dyn WorkerHost<Process = P, Memory = M>,
        peer: PeerId,
        request: RequestId,
    ) {
        if self.probes.waiting.len() >= PROBES_MAX {
            let text =
                format!("{PROBES_MAX} probes wait, as many as may: retry when one has ended");
            let error = ErrorBody::new(ErrorCode::Busy, text);
            return host.reply(peer, request, Message::Error(error));
        }
        if !self.probes.runs
            && let Err(why) = host.probe()
        {
            let error = ErrorBody::new(ErrorCode::CopyFailed, why);
            return host.reply(peer, request, Message::Error(error));
        }
        self.probes.runs = true;
        self.probes.waiting.push((peer, request));
    }

    /// Answers the probes that wait: the copy has ended, with these bytes or for this reason.
    pub fn probed(
        &mut self,
        host: &mut dyn WorkerHost<Process = P, Memory = M>,
        copied: Result<u64, String>,
    ) {
        let answer = match copied {
            Ok(copied_bytes) => Message::ProbeAnswer(ProbeAnswer {
                copied_bytes,
                ..ProbeAnswer::default()
            }),
            Err(why) => Message::Error(ErrorBody::new(ErrorCode::CopyFailed, why)),
        };
        self.probes.runs = false;
        for (peer, request) in self.probes.waiting.drain(..) {
            host.reply(peer, request, answer.clone());
        }
    }
}

fn measured(edge: Edge, counts: &EdgeCounts, load: EdgeLoad) -> EdgeMeasure {
    EdgeMeasure {
        from: edge.from.number(),
        to: edge.to.number(),
        complete: counts.complete,
        incomplete: counts.incomplete,
        bytes: counts.bytes,
        waiting: load.waiting,
        queued: load.queued,
        running: load.running,
        queue: durations(&counts.queue),
        copy: durations(&counts.copy),
    }
}

fn durations(histogram: &LatencyHistogram) -> Durations {
    Durations {
        counts: histogram.counts().to_vec(),
        sum_us: histogram.sum_us(),
    }
}
