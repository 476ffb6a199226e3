//! Messages between processes: real bytes over connections that lose, repeat, delay and reorder them.
//!
//! A connection belongs to one incarnation of each of two processes. When one of them dies, the other receives a close
//! or finds out by silence. A message sent over one connection is never received over another, as the identities of the
//! live system's gate ensure.

use std::collections::BTreeMap;
use std::time::Duration;

use fastrand::Rng;

use super::faults::{Fault, FaultCounts};
use super::queue::Queue;
use super::setup::Chances;
use super::{NodeId, SimEvent};
use kvferry_protocol::{HEADER_BYTES, Header, decode};
use kvferry_types::Time;

/// Id of a connection, never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct ConnectionId(pub(super) u64);

/// An end of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ConnectionEnd {
    /// The process that connected.
    Client,
    /// The process that accepted the connection.
    Server,
}

impl ConnectionEnd {
    fn other(self) -> Self {
        match self {
            Self::Client => Self::Server,
            Self::Server => Self::Client,
        }
    }
}

/// A packet in flight.
#[derive(Debug, Clone)]
pub(super) enum Packet {
    /// A message, as bytes.
    Bytes {
        header: [u8; HEADER_BYTES],
        body: Vec<u8>,
        number: u64,
    },
    /// The sender has closed the connection.
    Close,
}

#[derive(Debug)]
struct Connection {
    ends: [(NodeId, Option<u32>); 2],
    open: [bool; 2],
    sent: [u64; 2],
    received: [u64; 2],
}

/// A message or a close that a process receives.
#[derive(Debug)]
pub(super) enum Received {
    Bytes {
        header: [u8; HEADER_BYTES],
        body: Vec<u8>,
    },
    Closed,
}

/// All connections.
#[derive(Debug)]
pub(super) struct Net {
    connections: BTreeMap<ConnectionId, Connection>,
    next: u64,
    /// One-way partitions: sender, receiver, and until when.
    pub(super) partitions: Vec<(NodeId, NodeId, Time)>,
    pub(super) chances: Chances,
    pub(super) sent: u64,
}

/// Usual latency of a message, in microseconds.
const LATENCY_US: std::ops::RangeInclusive<u64> = 5..=60;

impl Net {
    pub(super) fn new(chances: Chances) -> Self {
        Self {
            connections: BTreeMap::new(),
            next: 0,
            partitions: Vec::new(),
            chances,
            sent: 0,
        }
    }

    /// Opens a connection from a live process to a seat. The other end is the incarnation that runs there when the
    /// first message arrives.
    pub(super) fn connect(
        &mut self,
        client: NodeId,
        incarnation: u32,
        server: NodeId,
    ) -> ConnectionId {
        self.next += 1;
        let id = ConnectionId(self.next);
        let connection = Connection {
            ends: [(client, Some(incarnation)), (server, None)],
            open: [true, true],
            sent: [0; 2],
            received: [0; 2],
        };
        self.connections.insert(id, connection);
        id
    }

    /// Incarnation of the server, once a message has reached it. Serves as its process id.
    pub(super) fn incarnation_of_server(&self, id: ConnectionId) -> Option<u32> {
        self.connections.get(&id)?.ends[1].1
    }

    /// The client of a connection, and its incarnation.
    pub(super) fn client(&self, id: ConnectionId) -> Option<(NodeId, u32)> {
        let (who, incarnation) = self.connections.get(&id)?.ends[0];
        Some((who, incarnation?))
    }

    /// Sends an encoded message. Returns false when this end of the connection is closed.
    pub(super) fn send(
        &mut self,
        queue: &mut Queue<SimEvent>,
        rng: &mut Rng,
        faults: &mut FaultCounts,
        id: ConnectionId,
        from: ConnectionEnd,
        (header, body): ([u8; HEADER_BYTES], Vec<u8>),
    ) -> bool {
        let connection = self.connections.get_mut(&id);
        let Some(connection) = connection.filter(|known| known.open[from as usize]) else {
            return false;
        };
        connection.sent[from as usize] += 1;
        self.sent += 1;
        let number = connection.sent[from as usize];
        let packet = Packet::Bytes {
            header,
            body,
            number,
        };
        self.post(queue, rng, faults, id, from, packet);
        true
    }

    /// Closes one end. The other end receives a close, unless it is lost.
    pub(super) fn close(
        &mut self,
        queue: &mut Queue<SimEvent>,
        rng: &mut Rng,
        faults: &mut FaultCounts,
        id: ConnectionId,
        from: ConnectionEnd,
    ) {
        let open = self
            .connections
            .get_mut(&id)
            .map(|c| &mut c.open[from as usize]);
        if open.is_some_and(std::mem::take) {
            self.post(queue, rng, faults, id, from, Packet::Close);
        }
    }

    fn post(
        &mut self,
        queue: &mut Queue<SimEvent>,
        rng: &mut Rng,
        faults: &mut FaultCounts,
        id: ConnectionId,
        from: ConnectionEnd,
        packet: Packet,
    ) {
        let Some(connection) = self.connections.get(&id) else {
            return;
        };
        let (sender, receiver) = (
            connection.ends[from as usize].0,
            connection.ends[from.other() as usize].0,
        );
        let now = queue.now();
        let cut =
            |(a, b, until): &(NodeId, NodeId, Time)| (*a, *b) == (sender, receiver) && now < *until;
        if self.partitions.iter().any(cut) {
            faults.took_effect(Fault::Partition);
            return;
        }
        let mut happens = |chance: u32| rng.u32(0..1_000_000) < chance;
        if happens(self.chances.loss) {
            faults.injected(Fault::Loss);
            let there = connection.open[from.other() as usize];
            if there {
                faults.took_effect(Fault::Loss);
            }
            return;
        }
        let copies = if happens(self.chances.duplicate) {
            faults.injected(Fault::Duplicate);
            2
        } else {
            1
        };
        for _ in 0..copies {
            let mut late = Duration::from_micros(rng.u64(LATENCY_US));
            if rng.u32(0..1_000_000) < self.chances.delay {
                faults.injected(Fault::Delay);
                late += Duration::from_micros(1 << rng.u32(7..=19));
            }
            let packet = packet.clone();
            let to = from.other();
            queue.push(now + late, SimEvent::Packet { id, to, packet });
        }
    }

    /// The seat that a packet is addressed to.
    pub(super) fn receiver(&self, id: ConnectionId, to: ConnectionEnd) -> Option<NodeId> {
        Some(self.connections.get(&id)?.ends[to as usize].0)
    }

    /// Delivers a packet to an incarnation of a process. Returns `None` when the packet is not for this incarnation, or
    /// the connection is closed at this end.
    #[expect(
        clippy::too_many_arguments,
        reason = "a packet and the world it comes from"
    )]
    pub(super) fn receive(
        &mut self,
        queue: &mut Queue<SimEvent>,
        rng: &mut Rng,
        faults: &mut FaultCounts,
        id: ConnectionId,
        to: ConnectionEnd,
        incarnation: Option<u32>,
        packet: Packet,
    ) -> Option<Received> {
        let connection = self.connections.get_mut(&id)?;
        let end = to as usize;
        let (_, known) = &mut connection.ends[end];
        if known.is_none() && connection.open[end] {
            *known = incarnation;
        }
        if incarnation.is_none() || *known != incarnation || !connection.open[end] {
            // The connection is unknown here: send a close to the other end.
            connection.open[end] = false;
            if !matches!(packet, Packet::Close) {
                self.post(queue, rng, faults, id, to, Packet::Close);
            }
            return None;
        }
        match packet {
            Packet::Close => {
                connection.open[end] = false;
                Some(Received::Closed)
            }
            Packet::Bytes {
                header,
                body,
                number,
            } => {
                if number < connection.received[end] {
                    faults.took_effect(Fault::Delay);
                } else if number == connection.received[end] {
                    faults.took_effect(Fault::Duplicate);
                }
                connection.received[end] = connection.received[end].max(number);
                if tracing::enabled!(tracing::Level::TRACE)
                    && let Ok(header) = Header::from_bytes(&header)
                    && let Ok(envelope) = decode(header, &body)
                {
                    tracing::trace!(to = ?connection.ends[end], ?id, message = ?envelope.message, correlation = %envelope.correlation, "receives");
                }
                Some(Received::Bytes { header, body })
            }
        }
    }

    /// Closes the connections of a process that has died. The other ends receive a close, subject to the usual faults.
    pub(super) fn died(
        &mut self,
        queue: &mut Queue<SimEvent>,
        rng: &mut Rng,
        faults: &mut FaultCounts,
        who: NodeId,
    ) {
        let mut ends = Vec::new();
        for (id, connection) in &self.connections {
            for end in [ConnectionEnd::Client, ConnectionEnd::Server] {
                if connection.ends[end as usize].0 == who && connection.open[end as usize] {
                    ends.push((*id, end));
                }
            }
        }
        for (id, end) in ends {
            self.close(queue, rng, faults, id, end);
        }
        self.connections
            .retain(|_, connection| connection.open != [false, false]);
    }
}
