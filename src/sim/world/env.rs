//! What all processes of a world share: time, chance, messages, memory, and the checker's knowledge.

use std::collections::BTreeMap;
use std::time::Duration;

use fastrand::Rng;
use siphasher::sip128::SipHasher24;

use super::faults::FaultCounts;
use super::ghost::Ghost;
use super::net::{ConnectionId, End, Net};
use super::queue::Queue;
use super::setup::Setup;
use super::storage::{Content, Depot, EMPTY, Storage};
use super::{Counts, Happening, Who};
use crate::core::{Domain, Refusal};
use crate::protocol::Message;
use crate::types::{
    Answer, Copy, DepotId, Direction, DomainId, EngineId, Epoch, Fingerprint, GroupGeometry,
    GroupId, Rank, RequestId, Shard, Time, WorkerId,
};

use super::ANCHOR_KEY;

/// Bytes of a page: nobody looks at them here.
const PAGE_BYTES: u64 = 4096;
/// Lives of one engine whose memory is kept.
const MEMORIES_KEPT: usize = 8;
/// Layout of all engines.
const LAYOUT: [u8; 16] = [7; 16];

/// See the module.
pub(super) struct Env {
    pub(super) setup: Setup,
    pub(super) queue: Queue<Happening>,
    pub(super) rng: Rng,
    pub(super) net: Net,
    pub(super) faults: FaultCounts,
    pub(super) counts: Counts,
    pub(super) depots: Vec<Depot>,
    /// Memory of engines, the dead ones included while a copy may touch it: rank by rank.
    memories: BTreeMap<EngineId, Vec<Vec<Content>>>,
    pub(super) ghost: Ghost,
    pub(super) violation: Option<String>,
    /// The leader took a decision, or a depot was written, since the last check.
    pub(super) decided: bool,
    /// A rank all of whose copies fail, and until when.
    pub(super) failing: Option<(Rank, Time)>,
    /// Lives of the processes.
    pub(super) lives: BTreeMap<Who, u32>,
    /// Workers that are to be ended.
    pub(super) expelled: Vec<WorkerId>,
    /// What the wall clock shows beyond the time that has passed.
    wall_offset: i64,
    /// No prompt arrives any more.
    pub(super) closing: bool,
    namespaces: BTreeMap<DomainId, u8>,
    pub(super) digest: SipHasher24,
}

impl Env {
    pub(super) fn new(seed: u64) -> Self {
        let mut rng = Rng::with_seed(seed);
        let setup = Setup::draw(&mut rng);
        let depots = (0..setup.sharding.shards()).map(|shard| {
            let id = DepotId(u128::from(shard) + 1);
            Depot::new(id, setup.arena_pages)
        });
        let depots = depots.collect();
        let domain = |name: u8| Domain::new(&ANCHOR_KEY, &[name], &LAYOUT, GroupId(0)).id();
        let ghost = Ghost::new(setup.fence);
        Self {
            net: Net::new(setup.chances),
            queue: Queue::new(),
            rng,
            faults: FaultCounts::default(),
            counts: Counts::default(),
            depots,
            memories: BTreeMap::new(),
            ghost,
            violation: None,
            decided: false,
            failing: None,
            lives: BTreeMap::new(),
            expelled: Vec::new(),
            wall_offset: 1 << 50,
            closing: false,
            namespaces: (0..setup.namespaces)
                .map(|name| (domain(name), name))
                .collect(),
            digest: SipHasher24::new(),
            setup,
        }
    }

    pub(super) fn now(&self) -> Time {
        self.queue.now()
    }

    /// What the wall clock shows.
    pub(super) fn wall(&self) -> Time {
        Time(self.now().0.saturating_add_signed(self.wall_offset))
    }

    /// When the wall clock will show this, as it goes now.
    pub(super) fn when_wall_shows(&self, wall: Time) -> Time {
        match wall {
            Time::NEVER => wall,
            Time(wall) => Time(wall.saturating_add_signed(-self.wall_offset)),
        }
    }

    pub(super) fn jump_wall(&mut self, by: i64) {
        self.wall_offset += by;
    }

    pub(super) fn geometry(&self) -> GroupGeometry {
        GroupGeometry {
            group: GroupId(0),
            engine_page_tokens: 16,
            layers: 1,
            page_bytes: PAGE_BYTES,
            device_pages: self.setup.device_pages,
            content_digest: [0; 16],
            layout_fingerprint: LAYOUT,
        }
    }

    pub(super) fn arrivals_end(&self) -> bool {
        self.closing
    }

    /// The first thing that is wrong ends the run.
    pub(super) fn violated(&mut self, what: String) {
        self.violation.get_or_insert(what);
    }

    pub(super) fn say(
        &mut self,
        id: ConnectionId,
        from: End,
        correlation: RequestId,
        deadline: Duration,
        epoch: Epoch,
        message: Message,
    ) {
        let said = self.net.say(
            &mut self.queue,
            &mut self.rng,
            &mut self.faults,
            id,
            from,
            correlation,
            deadline,
            epoch,
            message,
        );
        if let Err(why) = said {
            self.violated(format!("a message has no bytes: {why}"));
        }
    }

    pub(super) fn close(&mut self, id: ConnectionId, from: End) {
        self.net
            .close(&mut self.queue, &mut self.rng, &mut self.faults, id, from);
    }

    /// The life of the process that made a connection: what the kernel says of its peer.
    pub(super) fn life_of_client(&self, who: Who, id: ConnectionId) -> Option<u32> {
        self.net
            .life_of_client(id)
            .filter(|_| self.lives.contains_key(&who))
    }

    pub(super) fn expel(&mut self, worker: WorkerId) {
        self.counts.expelled += 1;
        self.expelled.push(worker);
    }

    pub(super) fn answered(
        &mut self,
        epoch: Epoch,
        engine: EngineId,
        id: RequestId,
        answer: &Result<Answer, Refusal>,
    ) {
        if let Some(trouble) = self.ghost.answered(epoch, engine, id, answer) {
            self.violated(trouble);
        }
    }

    pub(super) fn check_touched(&mut self) {
        if let Some(trouble) = self.ghost.touched.trouble.take() {
            self.violated(trouble);
        }
    }

    // Memory.

    pub(super) fn add_memory(&mut self, engine: EngineId) {
        let pages = vec![EMPTY; self.setup.device_pages as usize];
        let ranks = vec![pages; usize::from(self.setup.ranks)];
        self.memories.insert(engine, ranks);
        // Workers may have the memory of an engine that has died mapped for a while, and read it. Ids are ordered by
        // place and life.
        let place = |id: &&EngineId| id.0[0] == engine.0[0];
        if self.memories.keys().filter(place).count() > MEMORIES_KEPT
            && let Some(oldest) = self.memories.keys().find(place).copied()
        {
            self.memories.remove(&oldest);
        }
    }

    /// What a page must hold: a number made from whose it is, what it is, and which shard.
    pub(super) fn expected(&self, namespace: u8, fingerprint: Fingerprint, rank: Rank) -> Content {
        expected(namespace, fingerprint, self.setup.sharding.of(rank))
    }

    /// Where the depot of a rank stands among all of them.
    pub(super) fn depot_of(&self, rank: Rank) -> usize {
        usize::from(self.setup.sharding.of(rank).0)
    }

    /// Whose pages lie in a domain.
    pub(super) fn namespace_of(&self, domain: DomainId) -> Option<u8> {
        self.namespaces.get(&domain).copied()
    }

    /// What a copy reads.
    pub(super) fn read(&self, copy: &Copy, rank: Rank, page: u32) -> Content {
        match copy.direction {
            Direction::Store => self
                .memories
                .get(&copy.engine)
                .map_or(EMPTY, |ranks| ranks[usize::from(rank.0)][page as usize]),
            Direction::Load => self.depots[self.depot_of(rank)].read(page),
        }
    }

    /// What a copy writes.
    pub(super) fn write(&mut self, copy: &Copy, rank: Rank, page: u32, content: Content) {
        self.counts.pages_copied += 1;
        match copy.direction {
            Direction::Store => {
                let depot = self.depot_of(rank);
                self.depots[depot].write(page, content);
                self.decided = true;
            }
            Direction::Load => {
                if let Some(ranks) = self.memories.get_mut(&copy.engine) {
                    ranks[usize::from(rank.0)][page as usize] = content;
                }
            }
        }
    }

    /// An engine writes its own memory: no copy may touch that page.
    pub(super) fn engine_writes(
        &mut self,
        engine: EngineId,
        rank: u16,
        page: u32,
        content: Content,
    ) {
        if let Some((op, worker)) = self.ghost.touched.device(engine, rank, page) {
            self.violated(format!(
                "engine {engine} writes page {page} of rank {rank} while {op} of {worker} copies it"
            ));
        }
        if let Some(ranks) = self.memories.get_mut(&engine) {
            ranks[usize::from(rank)][page as usize] = content;
        }
    }

    /// An engine reads its own memory: it must hold what it must.
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

/// See [`Env::expected`].
pub(super) fn expected(namespace: u8, fingerprint: Fingerprint, shard: Shard) -> Content {
    let mixed = (fingerprint.0 as u64) ^ (fingerprint.0 >> 64) as u64;
    let whose = (u64::from(namespace) << 8 | u64::from(shard.0)) + 2;
    (mixed.wrapping_add(whose.wrapping_mul(0x9e37_79b9_7f4a_7c15))).max(2)
}
