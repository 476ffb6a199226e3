//! State that all processes of a world share: time, random numbers, network, memory, and the checker's model.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use fastrand::Rng;
use siphasher::sip128::SipHasher24;

use super::disk::SimDisk;
use super::faults::{Fault, FaultCounts};
use super::net::{ConnectionEnd, ConnectionId, Net};
use super::oracle::Oracle;
use super::pids::Pids;
use super::queue::Queue;
use super::saboteur::Lie;
use super::setup::{CELL_BYTES, Setup, Shape, pick};
use super::storage::{CONTENT_MIN, Content, EMPTY, NOWHERE, SimDepot, Storage, TORN};
use super::{Counts, SimEvent};
use kvferry_core::{Domain, Leader, Model, Refusal};
use kvferry_protocol::HEADER_BYTES;
use kvferry_types::{
    Answer, DepotId, DomainId, EngineId, Epoch, Fingerprint, GroupId, MemoryGeometry, PerTier,
    Rank, RequestId, Shard, TierId, Time, Transfer, WorkerId,
};

/// Incarnations of one engine whose memory is kept.
const MEMORIES_KEPT: usize = 8;

/// Registered KV memory of one incarnation of an engine.
#[derive(Debug, Clone, Copy)]
pub(super) struct Memory {
    pub(super) shape: Shape,
    pub(super) device_pages: u32,
}

/// The environment of a world's processes.
pub(super) struct SimContext {
    pub(super) setup: Setup,
    /// The lie of the hosts.
    pub(super) lie: Option<Lie>,
    pub(super) queue: Queue<SimEvent>,
    pub(super) rng: Rng,
    pub(super) net: Net,
    pub(super) faults: FaultCounts,
    pub(super) counts: Counts,
    /// The disks, by shard; empty without a disk tier.
    pub(super) disks: Vec<SimDisk>,
    /// The depots of the other tiers, by shard.
    pub(super) depots: PerTier<Vec<SimDepot>>,
    depots_made: u128,
    /// Pages that fail their checksum when they are read, by tier and shard.
    pub(super) bad_pages: BTreeSet<(TierId, usize, u32)>,
    /// Registered memory of each engine, dead incarnations included.
    engines: BTreeMap<EngineId, Memory>,
    /// Contents of the engines' memory, rank by rank. Kept for dead incarnations as well, because a copy may still
    /// touch it.
    memories: BTreeMap<EngineId, Vec<Vec<Content>>>,
    pub(super) oracle: Oracle,
    pub(super) violation: Option<String>,
    /// The leader made a decision, or a depot was written, since the last check.
    pub(super) decided: bool,
    /// A rank whose copies all fail, and until when.
    pub(super) failing: Option<(Rank, Time)>,
    pub(super) pids: Pids,
    /// Workers whose process is to be killed: the one with this id, or any if `None`.
    pub(super) to_fence: Vec<(WorkerId, Option<i32>)>,
    /// Workers that started to divide a depot in this step.
    pub(super) divides: Vec<WorkerId>,
    /// Wall clock minus virtual time, in nanoseconds.
    wall_offset: i64,
    /// No more prompts arrive.
    pub(super) closing: bool,
    /// Namespace, shape and group of the pages of each domain.
    namespaces: BTreeMap<DomainId, (u8, Shape, GroupId)>,
    pub(super) digest: SipHasher24,
}

impl SimContext {
    /// True if the hosts of this world have this lie.
    pub(super) fn lies(&self, lie: Lie) -> bool {
        self.lie == Some(lie)
    }

    pub(super) fn new(seed: u64, lie: Option<Lie>) -> Self {
        let mut rng = Rng::with_seed(seed);
        let setup = Setup::draw(&mut rng);
        let key = setup.anchor_key();
        let mut namespaces = BTreeMap::new();
        for shape in &setup.shapes {
            let geometry = setup.geometry(*shape, 0);
            let groups: Vec<GroupId> = geometry.groups.iter().map(|group| group.group).collect();
            let model = Model::new(geometry);
            let model = model.unwrap_or_else(|error| unreachable!("drawn groups: {error}"));
            for name in 0..setup.namespaces {
                for group in groups.iter().copied() {
                    let layout = model.layout_fingerprint();
                    let domain = Domain::new(&key, &[name], layout, group);
                    namespaces.insert(domain.id(), (name, *shape, group));
                }
            }
        }
        let oracle = Oracle::new(setup.fence + setup.by_hand());
        let mut env = Self {
            lie,
            net: Net::new(setup.chances),
            queue: Queue::new(),
            rng,
            faults: FaultCounts::default(),
            counts: Counts::default(),
            disks: Vec::new(),
            depots: PerTier::default(),
            depots_made: 0,
            bad_pages: BTreeSet::new(),
            engines: BTreeMap::new(),
            memories: BTreeMap::new(),
            oracle,
            violation: None,
            decided: false,
            failing: None,
            pids: Pids::default(),
            to_fence: Vec::new(),
            divides: Vec::new(),
            wall_offset: 1 << 50,
            closing: false,
            namespaces,
            digest: SipHasher24::new(),
            setup,
        };
        for tier in env.setup.tiers.clone() {
            let shards = 0..env.setup.sharding.shards();
            if tier == TierId::Disk {
                env.disks = shards.map(|_| env.make_disk()).collect();
                continue;
            }
            let depots = shards.map(|_| env.make_depot(tier)).collect();
            env.depots.insert(tier, depots);
        }
        env
    }

    /// Makes an empty depot.
    fn make_depot(&mut self, tier: TierId) -> SimDepot {
        let cells = self.draw_cells(tier);
        SimDepot::new(DepotId(self.depots_made), cells)
    }

    /// Makes an empty disk.
    fn make_disk(&mut self) -> SimDisk {
        let cells = self.draw_cells(TierId::Disk);
        SimDisk::new(DepotId(self.depots_made), cells)
    }

    /// Draws the size of a new depot, with room for at least one block of the largest pages.
    fn draw_cells(&mut self, tier: TierId) -> u32 {
        self.depots_made += 1;
        let setup = &self.setup;
        let largest = setup.shapes.iter().map(|shape| shape.cells).max();
        let least = setup.ratio.max(4) * largest.unwrap_or(1);
        let mut cells = setup.arena_pages * setup.shapes[0].cells;
        if tier != TierId::Host {
            cells = (u64::from(cells) * setup.lower_tier_percent / 100) as u32;
        }
        if setup.depots_differ {
            cells = self.rng.u32(cells / 2..=cells);
        }
        cells.max(least)
    }

    /// Replaces the depot of a shard in a tier by a new, empty one.
    pub(super) fn lose_depot(&mut self, tier: TierId, shard: usize) {
        self.bad_pages
            .retain(|(of, bad, _)| (*of, *bad) != (tier, shard));
        self.decided = true;
        if tier == TierId::Disk {
            self.disks[shard] = self.make_disk();
            return;
        }
        let depot = self.make_depot(tier);
        if let Some(depots) = self.depots.get_mut(tier) {
            depots[shard] = depot;
        }
    }

    /// The disk of a rank's shard.
    pub(super) fn disk_of(&mut self, rank: Rank) -> Option<&mut SimDisk> {
        let shard = self.depot_of(rank);
        self.disks.get_mut(shard)
    }

    /// The depot of a shard in a tier.
    pub(super) fn depot(&mut self, tier: TierId, shard: usize) -> Option<&mut SimDepot> {
        self.depots.get_mut(tier)?.get_mut(shard)
    }

    pub(super) fn now(&self) -> Time {
        self.queue.now()
    }

    /// Present time of the wall clock.
    pub(super) fn wall(&self) -> Time {
        Time(self.now().0.saturating_add_signed(self.wall_offset))
    }

    /// Virtual time at which the wall clock shows `wall`, if it does not jump before.
    pub(super) fn when_wall_shows(&self, wall: Time) -> Time {
        match wall {
            Time::NEVER => wall,
            Time(wall) => Time(wall.saturating_add_signed(-self.wall_offset)),
        }
    }

    pub(super) fn jump_wall(&mut self, by: i64) {
        self.wall_offset += by;
    }

    /// Geometry of an engine's memory.
    pub(super) fn geometry(&self, engine: EngineId) -> MemoryGeometry {
        let Memory {
            shape,
            device_pages,
        } = self.memory(engine);
        self.setup.geometry(shape, device_pages)
    }

    /// Registered memory of an engine.
    pub(super) fn memory(&self, engine: EngineId) -> Memory {
        let usual = Memory {
            shape: self.setup.shapes[0],
            device_pages: self.setup.device_pages,
        };
        self.engines.get(&engine).copied().unwrap_or(usual)
    }

    /// The shape that a geometry describes.
    pub(super) fn shape(page_bytes: u64, layout: [u8; 16]) -> Shape {
        let cells = u32::try_from(page_bytes / CELL_BYTES).unwrap_or(1);
        let cells = cells.max(1);
        Shape {
            cells,
            layout,
            model: 0,
        }
    }

    /// Adds what a leader counted, when it dies or the run ends.
    pub(super) fn count_decisions(&mut self, leader: &Leader) {
        let counts = leader.counts();
        self.counts.recovered_pages += counts.recovered_pages;
        self.counts.declined_tokens += counts.declined_tokens;
    }

    pub(super) fn arrivals_end(&self) -> bool {
        self.closing
    }

    /// Records a violation and so ends the run. Only the first one is kept.
    pub(super) fn violated(&mut self, what: String) {
        self.violation.get_or_insert(what);
    }

    /// Sends an encoded message. Returns false when this end of the connection is closed.
    pub(super) fn send(
        &mut self,
        id: ConnectionId,
        from: ConnectionEnd,
        message: ([u8; HEADER_BYTES], Vec<u8>),
    ) -> bool {
        self.net.send(
            &mut self.queue,
            &mut self.rng,
            &mut self.faults,
            id,
            from,
            message,
        )
    }

    pub(super) fn close(&mut self, id: ConnectionId, from: ConnectionEnd) {
        self.net
            .close(&mut self.queue, &mut self.rng, &mut self.faults, id, from);
    }

    /// Process id of the client of a connection, as the kernel reports it.
    pub(super) fn pid_of_client(&self, id: ConnectionId) -> Option<i32> {
        let (who, incarnation) = self.net.client(id)?;
        self.pids.of(who, incarnation)
    }

    /// Like [`SimContext::pid_of_client`], but `None` where processes are unseen.
    pub(super) fn visible_pid(&self, id: ConnectionId) -> Option<i32> {
        match self.setup.processes_unseen {
            true => None,
            false => self.pid_of_client(id),
        }
    }

    /// Requests the end of a worker's process, if it has this id.
    pub(super) fn request_fence(&mut self, worker: WorkerId, pid: Option<i32>) {
        self.counts.fenced += 1;
        self.to_fence.push((worker, pid));
    }

    pub(super) fn answered(
        &mut self,
        epoch: Epoch,
        engine: EngineId,
        id: RequestId,
        answer: &Result<Answer, Refusal>,
    ) {
        if let Some(violation) = self.oracle.answered(epoch, engine, id, answer) {
            self.violated(violation);
        }
    }

    /// Checks that no copy touches the pages of a load or store that is over: the engine reuses these pages.
    pub(super) fn check_over(&mut self, engine: EngineId, request: RequestId) {
        if let Some((transfer, worker)) = self.oracle.touched.copy_of(engine, request) {
            self.violated(format!(
                "{request} of engine {engine} is over, and {transfer} of {worker} still touches its pages"
            ));
        }
    }

    /// A copy starts that takes `copy_time`: with chance `leader_dies_in_copy`, the leader dies before its end.
    pub(super) fn leader_may_die(&mut self, copy_time: Duration) {
        if self.rng.u32(0..1_000_000) < self.setup.leader_dies_in_copy {
            let at = self.now() + copy_time.mul_f64(self.rng.f64());
            self.queue.push(at, SimEvent::LeaderDies);
        }
    }

    pub(super) fn check_touched(&mut self) {
        if let Some(violation) = self.oracle.touched.violation.take() {
            self.violated(violation);
        }
    }

    // Memory.

    /// An engine starts: draws the shape and the size of its memory.
    pub(super) fn add_memory(&mut self, engine: EngineId) -> Memory {
        let other = self.rng.u32(0..1_000_000) < self.setup.other_shape;
        let shapes = &self.setup.shapes;
        let memory = Memory {
            shape: match other {
                true => *pick(&mut self.rng, shapes),
                false => shapes[0],
            },
            device_pages: self.setup.device_pages + self.rng.u32(0..=self.setup.more_device_pages),
        };
        if memory.shape != shapes[0] {
            self.faults.injected(Fault::OtherShape);
        }
        self.engines.insert(engine, memory);
        let pages = vec![EMPTY; memory.device_pages as usize];
        let ranks = vec![pages; usize::from(self.setup.ranks)];
        self.memories.insert(engine, ranks);
        // A worker may keep the memory of a dead engine mapped for a while and read it. Ids are ordered by replica and
        // incarnation.
        let place = |id: &&EngineId| id.0[0] == engine.0[0];
        if self.memories.keys().filter(place).count() > MEMORIES_KEPT
            && let Some(oldest) = self.memories.keys().find(place).copied()
        {
            self.memories.remove(&oldest);
        }
        memory
    }

    /// Content that a page must hold: a number made from its namespace, shape, fingerprint and shard.
    pub(super) fn expected(
        &self,
        namespace: u8,
        (shape, group): (Shape, GroupId),
        fingerprint: Fingerprint,
        rank: Rank,
    ) -> Content {
        let shard = self.setup.sharding.of(rank);
        expected(namespace, (shape, group), fingerprint, shard)
    }

    /// Index of a rank's depot in `depots`.
    pub(super) fn depot_of(&self, rank: Rank) -> usize {
        usize::from(self.setup.sharding.of(rank).0)
    }

    /// Namespace, shape and group of the pages of a domain.
    pub(super) fn namespace_of(&self, domain: DomainId) -> Option<(u8, Shape, GroupId)> {
        self.namespaces.get(&domain).copied()
    }

    /// Content that a copy reads from its source.
    pub(super) fn read(&self, copy: &Transfer, shape: Shape, rank: Rank, page: u32) -> Content {
        let engine = copy.device.unwrap_or_default().engine;
        match copy.edge.from {
            TierId::Device => self
                .memories
                .get(&engine)
                .map_or(EMPTY, |ranks| device(ranks, rank, page)),
            TierId::Disk => {
                let disk = self.disks.get(self.depot_of(rank));
                disk.map_or(NOWHERE, |disk| disk.read(page))
            }
            tier => {
                let depots = self.depots.get(tier);
                depots.map_or(NOWHERE, |depots| {
                    depots[self.depot_of(rank)].read(shape, page)
                })
            }
        }
    }

    /// Writes content to the destination of a copy.
    pub(super) fn write(
        &mut self,
        copy: &Transfer,
        shape: Shape,
        rank: Rank,
        page: u32,
        content: Content,
    ) {
        self.counts.pages_copied += 1;
        let engine = copy.device.unwrap_or_default().engine;
        match copy.edge.to {
            TierId::Device => {
                let Some(ranks) = self.memories.get_mut(&engine) else {
                    return;
                };
                match ranks[usize::from(rank.0)].get_mut(page as usize) {
                    Some(holds) => *holds = content,
                    None => {
                        let transfer = copy.id;
                        self.violated(format!(
                            "{transfer} writes page {page}, which engine {engine} does not have"
                        ));
                    }
                }
            }
            TierId::Disk => {
                self.decided = true;
                let disk = self.disk_of(rank);
                if let Some(Err(wrong)) = disk.map(|disk| disk.write(page, content)) {
                    self.violated(format!("{}: {wrong}", copy.id));
                }
            }
            tier => {
                let shard = self.depot_of(rank);
                self.decided = true;
                self.bad_pages.remove(&(tier, shard, page));
                let depot = self.depot(tier, shard);
                if !depot.is_some_and(|depot| depot.write(shape, page, content)) {
                    let transfer = copy.id;
                    self.violated(format!("{transfer} writes page {page}, which no depot has"));
                }
            }
        }
    }

    /// Spoils, by chance, a source page of a copy between tiers. The page fails its checksum until it is written again.
    pub(super) fn spoil_page(&mut self, copy: &Transfer, shape: Shape, rank: Rank, pages: usize) {
        let tier = copy.edge.from;
        if copy.device.is_some() || self.rng.u32(0..1_000_000) >= self.setup.bad_page {
            return;
        }
        let shard = self.depot_of(rank);
        let index = self.rng.usize(0..pages);
        let mut sources = copy.pairs.iter().flat_map(|pair| pair.src.iter_pages());
        self.faults.injected(Fault::BadSource);
        if let Some(page) = sources.nth(index) {
            if tier == TierId::Disk {
                self.disks[shard].spoil(page);
                return;
            }
            self.bad_pages.insert((tier, shard, page));
            // A load from host memory verifies nothing: only the checksum is wrong there.
            if let Some(depot) = self.depot(tier, shard).filter(|_| tier != TierId::Host) {
                depot.write(shape, page, TORN);
            }
        }
    }

    /// True if the page that a copy between tiers reads next fails its checksum.
    pub(super) fn is_bad(&self, copy: &Transfer, rank: Rank, index: usize) -> bool {
        let mut sources = copy.pairs.iter().flat_map(|pair| pair.src.iter_pages());
        let page = sources.nth(index).filter(|_| copy.device.is_none());
        let place = |page| (copy.edge.from, self.depot_of(rank), page);
        page.is_some_and(|page| self.bad_pages.contains(&place(page)))
    }

    /// An engine writes a page of its own memory. No copy may touch that page.
    pub(super) fn engine_writes(
        &mut self,
        engine: EngineId,
        rank: u16,
        page: u32,
        content: Content,
    ) {
        if let Some((transfer, worker)) = self.oracle.touched.device(engine, rank, page) {
            self.violated(format!(
                "engine {engine} writes page {page} of rank {rank} while {transfer} of {worker} copies it"
            ));
        }
        if let Some(ranks) = self.memories.get_mut(&engine) {
            ranks[usize::from(rank)][page as usize] = content;
        }
    }

    /// An engine reads a page of its own memory, which must hold `must`.
    pub(super) fn engine_reads(
        &mut self,
        engine: EngineId,
        rank: u16,
        page: u32,
        must: Content,
        how: &str,
    ) {
        self.counts.pages_verified += 1;
        let holds = self.memories[&engine][usize::from(rank)][page as usize];
        if holds != must {
            self.violated(format!(
                "wrong bytes: a {how} page {page} on rank {rank} of engine {engine} holds {holds:x}, not {must:x}"
            ));
        }
    }
}

/// See [`SimContext::expected`].
pub(super) fn expected(
    namespace: u8,
    (shape, group): (Shape, GroupId),
    fingerprint: Fingerprint,
    shard: Shard,
) -> Content {
    let mixed = (fingerprint.0 as u64) ^ (fingerprint.0 >> 64) as u64;
    let layout = u64::from(shape.layout[0]);
    let whose = layout << 40 | u64::from(group.0) << 32 | u64::from(namespace) << 8;
    let whose = (whose | u64::from(shard.0)) + 2;
    (mixed.wrapping_add(whose.wrapping_mul(0x9e37_79b9_7f4a_7c15))).max(CONTENT_MIN)
}

/// Content of a page of an engine's memory, [`NOWHERE`] if it has no such page.
fn device(ranks: &[Vec<Content>], rank: Rank, page: u32) -> Content {
    let pages = &ranks[usize::from(rank.0)];
    pages.get(page as usize).copied().unwrap_or(NOWHERE)
}
