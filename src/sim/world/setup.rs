//! A world's configuration, drawn from its seed: a seed is all that is needed to repeat a run.

use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Duration;

use fastrand::Rng;

use super::disk_faults::DiskSetup;
use super::groups::{CELLS_MAX, SimGroup, draw_model, units};
use super::{ANCHOR_KEY, rules};
use kvferry_core::{Admission, AnchorKey, EvictionPolicy, MoveEdge, Namespaces, TierPolicy};
use kvferry_types::{Edge, Epoch, PerTier, Sharding, TierId};
use kvferry_workload::scheduler::ComputeSteps;

/// Number of draws for process faults; see `nemesis`.
pub(super) const TROUBLES: u8 = 14;

/// Separates the random numbers for large worlds, so that they do not change what is drawn for all other worlds.
const LARGE: u64 = 0x6c61_7267_6521;
/// Like [`LARGE`], for worlds whose ranks hold the same KV.
const SHARED: u64 = 0x7368_6172_6564;

/// Like [`LARGE`], for the shapes of pages, the sizes of memories, and the loss of depots.
const SHAPES: u64 = 0x7368_6170_6573;
/// Like [`LARGE`], for the division of depots.
const DIVIDE: u64 = 0x6469_7669_6465;
/// Like [`LARGE`], for the visibility of processes.
const UNSEEN: u64 = 0x756e_7365_656e;
/// Like [`LARGE`], for the request limits of the leaders after the first.
const LIMITS: u64 = 0x6c69_6d69_7473;
/// Like [`LARGE`], for how much of a copy cannot be stopped.
const GRANULE: u64 = 0x6772_616e_756c;
/// Like [`LARGE`], for times.
const TIMES: u64 = 0x7469_6d65_7321;
/// Like [`LARGE`], for the tiers below host memory.
const TIERS: u64 = 0x7469_6572_7321;
/// Like [`LARGE`], for the rules about namespaces.
const RULES: u64 = 0x7275_6c65_7321;
/// Like [`LARGE`], for the groups of layers of models.
const GROUPS: u64 = 0x6772_6f75_7073;
/// Like [`LARGE`], for the index of pages and for prompts that are tails.
const TAILS: u64 = 0x7461_696c_7321;
/// Like [`LARGE`], for the rates of edges.
const RATES: u64 = 0x7261_7465_7321;
/// Like [`LARGE`], for the faults of disks.
const DISKS: u64 = 0x6469_736b_7321;
/// Bytes of one cell of memory.
pub(super) const CELL_BYTES: u64 = 1024;

/// Size and layout of an engine's pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Cells of one page, 1 to `CELLS_MAX`.
    pub cells: u32,
    /// Layout fingerprint of a page.
    pub layout: [u8; 16],
    /// Index of its model in [`Setup::models`].
    pub model: usize,
}

/// The configuration of a world, drawn before its first event.
#[derive(Debug, Clone)]
pub struct Setup {
    /// Ranks of an engine, 1 to 4.
    pub ranks: u16,
    /// Ranks that hold the same KV.
    pub sharding: Sharding,
    /// Engines, 1 to 3.
    pub replicas: u16,
    /// Pages of the largest block, 1 to 32.
    pub ratio: u32,
    /// Pages of each shard's arena.
    pub arena_pages: u32,
    /// The tiers below the device.
    pub tiers: Vec<TierId>,
    /// How each tier places, evicts and admits pages.
    pub policies: PerTier<TierPolicy>,
    /// Edges over which the leader moves pages by itself.
    pub moves: Vec<MoveEdge>,
    /// Rate at which the leader takes engines to compute, for the cost gate; `None` for no gate.
    pub prefill_tokens_per_s: Option<NonZeroU64>,
    /// The times and faults of disks.
    pub disk: DiskSetup,
    /// Pages of lower tiers that turn out to be bad when they are read, per million.
    pub bad_page: u32,
    /// Size of the depots of tiers below host memory, in percent of those of host memory.
    pub lower_tier_percent: u64,
    /// Page shapes that the incarnations of engines use. The first is the most frequent.
    pub shapes: Vec<Shape>,
    /// Groups of layers of the models that engines have. The first has none: one prefix group.
    pub models: Vec<Vec<SimGroup>>,
    /// How engines with several groups compute their prompts.
    pub steps: ComputeSteps,
    /// Incarnations of an engine with another shape than the first, per million.
    pub other_shape: u32,
    /// Pages of the smallest memory of an engine.
    pub device_pages: u32,
    /// Most pages by which an engine's memory exceeds `device_pages`.
    pub more_device_pages: u32,
    /// Every incarnation of a worker brings its own depot.
    pub standalone: bool,
    /// Depots differ in size: each new one has between half and all of the cells of a full one.
    pub depots_differ: bool,
    /// The leader and the workers cannot see the processes of their peers, as in another PID namespace.
    pub processes_unseen: bool,
    /// Depot pages that a worker reads for one part of an inventory, or clears in one slice of a reset.
    pub inventory_pages: u32,
    /// Readings of inventories in which an engine leaves, per million.
    pub leave_while_reading: u32,
    /// Started copies during which the leader dies, per million.
    pub leader_dies_in_copy: u32,
    /// Longest time in which a worker divides a depot into pages of another size.
    pub divide_time: Duration,
    /// Divisions of a depot in which the worker is paused, per million.
    pub pause_while_dividing: u32,
    /// Pages of an engine's memory that stay cached when no prompt holds them.
    pub cached_pages: u32,
    /// Namespaces, 1 to 3.
    pub namespaces: u8,
    /// Rules about them: of the leaders of even epochs, and of the others.
    pub rules: [Arc<Namespaces>; 2],
    /// Each engine of several holds half of host memory at most.
    pub halves_held_pages: bool,
    /// Families of sequences, each with branches.
    pub families: u64,
    /// Longest sequence in pages.
    pub longest: u32,
    /// Some prompts begin in the middle of a sequence.
    pub tails: bool,
    /// The leader of every second epoch, and the others, find pages inside blocks: a restarted leader may have another
    /// setting than the one before.
    pub page_index: [bool; 2],
    /// Most prompts that an engine runs at one time.
    pub concurrency: usize,
    /// Most open requests of one engine at a leader: one limit for each leader in turn, because a restarted leader may
    /// have other settings than the one before.
    pub open_requests_limits: Vec<usize>,
    /// Most copies that a worker runs at one time.
    pub running_max: usize,
    /// Most bytes a second that the copies of an edge move; without an entry as many as they can.
    pub bytes_per_s: BTreeMap<Edge, NonZeroU64>,
    /// Highest protocol version that clients offer.
    pub version_max: u16,
    /// First delay before a client reconnects. The longest is 4 times that.
    pub reconnect: Duration,
    /// How long an engine waits for an answer before it gives up the request.
    pub request_timeout: Duration,
    /// Fence of the leader and the workers: how long a copy may run after its deadline before its worker is ended.
    pub fence: Duration,
    /// How long a lookup holds the pages that it found.
    pub hold_for: Duration,
    /// Interval at which a worker repeats its attach request.
    pub attach_every: Duration,
    /// How long a leader remembers a disconnected engine.
    pub engine_grace: Duration,
    /// Average time to copy one page.
    pub page_time: Duration,
    /// Pages of a copy that are started together: a stopped copy ends after them, because a device's stream cannot take
    /// back work that it was given.
    pub granule: usize,
    /// Chances in a million.
    pub chances: Chances,
    /// Time between two faults of the processes, on average.
    pub fault_every: Duration,
    /// A process fault, by its number, that occurs more often than all others together.
    pub favourite: Option<u8>,
}

/// Probabilities of faults of messages and copies, per million.
#[derive(Debug, Clone, Copy, Default)]
pub struct Chances {
    /// A message is lost.
    pub loss: u32,
    /// A message arrives twice.
    pub duplicate: u32,
    /// A message is delayed.
    pub delay: u32,
    /// A copy fails.
    pub copy_error: u32,
    /// A copy is slow enough to miss its deadline.
    pub copy_late: u32,
    /// A copy never ends.
    pub copy_stuck: u32,
}

impl Setup {
    /// Draws the configuration of a world.
    pub fn draw(rng: &mut Rng) -> Self {
        let ratio = *pick(rng, &[1, 2, 3, 4, 8, 16, 32]);
        let device_pages = rng.u32(12..=96);
        let arena_pages = match rng.u8(0..4) {
            0 => ratio.max(4) + rng.u32(0..8),
            1 | 2 => ratio.max(8) + rng.u32(0..96),
            _ => ratio.max(8) + rng.u32(0..512),
        };
        let often = |rng: &mut Rng, most: u32| match rng.u8(0..3) {
            0 => 0,
            1 => rng.u32(0..most / 10 + 1),
            _ => rng.u32(0..most + 1),
        };
        let favourite = (rng.u8(0..3) == 0).then(|| rng.u8(0..TROUBLES));
        let ms = |rng: &mut Rng, from: u64, to: u64| Duration::from_millis(rng.u64(from..=to));
        let mut beside = Rng::with_seed(rng.clone().u64(..) ^ LARGE);
        let mut others = Rng::with_seed(rng.clone().u64(..) ^ SHARED);
        let mut shapes = Rng::with_seed(rng.clone().u64(..) ^ SHAPES);
        let mut times = Rng::with_seed(rng.clone().u64(..) ^ TIMES);
        let mut divide = Rng::with_seed(rng.clone().u64(..) ^ DIVIDE);
        let mut unseen = Rng::with_seed(rng.clone().u64(..) ^ UNSEEN);
        let mut tiers = Rng::with_seed(rng.clone().u64(..) ^ TIERS);
        let mut groups = Rng::with_seed(rng.clone().u64(..) ^ GROUPS);
        let mut granule = Rng::with_seed(rng.clone().u64(..) ^ GRANULE);
        let mut tails = Rng::with_seed(rng.clone().u64(..) ^ TAILS);
        let mut limits = Rng::with_seed(rng.clone().u64(..) ^ LIMITS);
        let mut rates = Rng::with_seed(rng.clone().u64(..) ^ RATES);
        let mut disks = Rng::with_seed(rng.clone().u64(..) ^ DISKS);
        let mut of_rules = Rng::with_seed(rng.clone().u64(..) ^ RULES);
        let ranks = rng.u16(1..=4);
        let mut setup = Self {
            ranks,
            sharding: Sharding::each(ranks),
            replicas: rng.u16(1..=3),
            ratio,
            arena_pages,
            shapes: vec![Shape {
                cells: CELLS_MAX,
                layout: [7; 16],
                model: 0,
            }],
            models: vec![Vec::new()],
            steps: ComputeSteps {
                tokens: 1,
                await_stores: false,
            },
            other_shape: 0,
            device_pages,
            more_device_pages: 0,
            standalone: false,
            tiers: vec![TierId::Host],
            lower_tier_percent: 100,
            policies: PerTier::default(),
            moves: Vec::new(),
            prefill_tokens_per_s: None,
            disk: DiskSetup::default(),
            bad_page: 0,
            depots_differ: false,
            processes_unseen: false,
            inventory_pages: 100,
            leave_while_reading: 0,
            leader_dies_in_copy: 0,
            divide_time: Duration::ZERO,
            pause_while_dividing: 0,
            cached_pages: rng.u32(0..=device_pages) * u32::from(rng.bool()),
            namespaces: rng.u8(1..=3),
            rules: Default::default(),
            halves_held_pages: false,
            families: if rng.bool() {
                rng.u64(1..=2)
            } else {
                rng.u64(1..=6)
            },
            longest: rng.u32(2..=device_pages.min(48)),
            tails: false,
            page_index: [false; 2],
            concurrency: rng.usize(1..=6),
            open_requests_limits: vec![*pick(rng, &[2, 4, 16, 1024])],
            favourite,
            running_max: *pick(rng, &[1, 2, 8, 64]),
            bytes_per_s: BTreeMap::new(),
            version_max: rng.u16(1..=2),
            reconnect: Duration::ZERO,
            request_timeout: match rng.u8(0..3) {
                0 => ms(rng, 4, 30),
                1 => ms(rng, 30, 120),
                _ => ms(rng, 120, 400),
            },
            fence: ms(rng, 50, 300),
            hold_for: Duration::ZERO,
            attach_every: Duration::from_millis(15),
            engine_grace: if rng.bool() {
                ms(rng, 1, 20)
            } else {
                ms(rng, 20, 400)
            },
            page_time: Duration::from_micros(match rng.u8(0..3) {
                0 => rng.u64(5..50),
                1 => rng.u64(50..500),
                _ => rng.u64(500..4000),
            }),
            granule: 1,
            chances: Chances {
                loss: often(rng, 30_000),
                duplicate: often(rng, 50_000),
                delay: often(rng, 50_000),
                copy_error: often(rng, 40_000),
                copy_late: often(rng, 20_000),
                copy_stuck: often(rng, 4_000),
            },
            fault_every: match rng.u8(0..3) {
                0 => ms(rng, 3, 20),
                1 => ms(rng, 20, 120),
                _ => ms(rng, 120, 600),
            },
        };
        if beside.u8(0..16) == 0 {
            setup.enlarge(&mut beside);
        }
        if others.u8(0..3) == 0 {
            let shards = others.u16(1..=ranks);
            setup.sharding = Sharding::new(ranks, shards).unwrap_or(setup.sharding);
        }
        setup.vary(&mut shapes);
        setup.time(&mut times);
        setup.divide_time = setup.fence.mul_f64(*pick(&mut divide, &[0.001, 0.02, 0.2]));
        setup.pause_while_dividing = *pick(&mut divide, &[0, 100_000, 500_000]);
        setup.processes_unseen = unseen.u8(0..6) == 0;
        setup.add_groups(&mut groups);
        setup.add_tiers(&mut tiers);
        setup.choose_policies(&mut tiers);
        setup.granule = *pick(&mut granule, &[1, 1, 8, usize::MAX]);
        setup.leader_dies_in_copy = *pick(&mut granule, &[0, 0, 2_000, 20_000]);
        setup.tails = tails.bool();
        setup.page_index = *pick(
            &mut tails,
            &[[false; 2], [true; 2], [true; 2], [false, true]],
        );
        if limits.bool() {
            let next = *pick(&mut limits, &[1, 2, 4, 1024]);
            setup.open_requests_limits.push(next);
        }
        setup.limit_rates(&mut rates);
        if setup.tiers.contains(&TierId::Disk) && disks.bool() {
            setup.use_disks(&mut disks);
        }
        setup.rules = rules::draw(
            &mut of_rules,
            setup.namespaces,
            &setup.tiers,
            setup.arena_pages,
        );
        setup.halves_held_pages = of_rules.bool();
        setup.disk = DiskSetup::draw(&mut disks, setup.request_timeout);
        setup
    }

    /// The key of all leaders and engines.
    pub(super) fn anchor_key(&self) -> AnchorKey {
        // The rules of all epochs have the same prefixes and secrets, which are all that a key depends on.
        AnchorKey::new(ANCHOR_KEY).with_namespaces(self.rules_of(Epoch(0)))
    }

    /// The rules of the leader of an epoch.
    pub(super) fn rules_of(&self, epoch: Epoch) -> Arc<Namespaces> {
        Arc::clone(&self.rules[usize::from(epoch.0 % 2 == 1)])
    }

    /// In every third world, stores or moves to slower tiers have a rate, from a fifth of what one copy moves without it
    /// to five times as much.
    fn limit_rates(&mut self, rng: &mut Rng) {
        if rng.u8(0..3) > 0 {
            return;
        }
        let page_ns = u64::try_from(self.page_time.as_nanos())
            .unwrap_or(u64::MAX)
            .max(1);
        let bytes_per_s = u64::from(self.shapes[0].cells) * CELL_BYTES * 1_000_000_000 / page_ns;
        let down = Edge {
            from: TierId::Host,
            to: TierId::Disk,
        };
        for edge in [Edge::STORE, down] {
            let rate = NonZeroU64::new(bytes_per_s * rng.u64(1..=25) / 5);
            if let Some(rate) = rate.filter(|_| rng.bool()) {
                self.bytes_per_s.insert(edge, rate);
            }
        }
    }

    /// Makes a world that uses its disks much: host memory has no room for all that few engines request again and again,
    /// and nothing else disturbs them often.
    fn use_disks(&mut self, rng: &mut Rng) {
        self.arena_pages = self.ratio.max(4) + rng.u32(8..24);
        self.lower_tier_percent = 800;
        self.longest = rng.u32(4..=self.longest.clamp(4, 16));
        self.families = rng.u64(2..=4);
        self.namespaces = 1;
        self.cached_pages = 0;
        self.replicas = self.replicas.min(2);
        self.page_time = Duration::from_micros(rng.u64(5..100));
        self.request_timeout = self.request_timeout.max(Duration::from_millis(60));
        self.hold_for = self.hold_for.max(self.request_timeout);
        self.fault_every = self
            .fault_every
            .max(Duration::from_millis(rng.u64(100..600)));
        self.other_shape = self.other_shape.min(50_000);
        self.leader_dies_in_copy = self.leader_dies_in_copy.min(2_000);
        self.policies = PerTier::default();
        for one in &mut self.moves {
            one.running_max = one.running_max.max(4);
            one.deadline = self.request_timeout * 2;
        }
        // Computing takes between a tenth and ten times as long as a load from a disk.
        let tokens = 4 * u64::from(self.shapes[0].cells);
        let page_us = u64::try_from(self.page_time.as_micros()).unwrap_or(u64::MAX);
        let rate = tokens * 1_000_000 / page_us.max(1);
        let percent = *pick(rng, &[0, 3, 10, 30, 100, 300]);
        self.prefill_tokens_per_s = NonZeroU64::new(rate * percent / 100);
    }

    /// Most open requests of one engine at the leader of this epoch.
    pub fn open_requests_max(&self, epoch: Epoch) -> usize {
        let limits = &self.open_requests_limits;
        // The first leader's epoch is 1.
        limits[(epoch.0 as usize - 1) % limits.len()]
    }

    /// True if the leader of this epoch finds pages inside blocks.
    pub fn page_index(&self, epoch: Epoch) -> bool {
        self.page_index[epoch.0 as usize % 2]
    }

    /// Time until an operator ends a process that the leader cannot end; zero where the leader sees processes.
    pub fn by_hand(&self) -> Duration {
        match self.processes_unseen {
            true => self.fence * 10,
            false => Duration::ZERO,
        }
    }

    /// Draws page shapes, memory sizes and depot sizes, and whether depots are lost with their workers.
    fn vary(&mut self, rng: &mut Rng) {
        let cells = |rng: &mut Rng| rng.u32(1..=CELLS_MAX);
        let first = Shape {
            cells: cells(rng),
            layout: [7; 16],
            model: 0,
        };
        self.shapes = vec![first];
        for number in 1..rng.u8(1..=3) {
            let cells = if rng.bool() { cells(rng) } else { first.cells };
            let layout = [7 + number; 16];
            self.shapes.push(Shape {
                cells,
                layout,
                model: 0,
            });
        }
        self.other_shape = *pick(rng, &[50_000, 300_000, 600_000]);
        if rng.bool() {
            self.more_device_pages = rng.u32(1..=self.device_pages);
        }
        let own = self.replicas == 1 && self.sharding.shards() == self.ranks;
        self.standalone = own && rng.u8(0..3) == 0;
        self.depots_differ = rng.bool();
        self.inventory_pages = rng.u32(1..=100).max(self.arena_pages / 64);
        self.leave_while_reading = *pick(rng, &[0, 100_000, 500_000]);
    }

    /// Draws the policy of each tier. Every second world has the defaults.
    fn choose_policies(&mut self, rng: &mut Rng) {
        if rng.bool() {
            return;
        }
        for tier in self.tiers.clone() {
            let admission = match rng.u8(0..6) {
                0 => Admission::SeenTimes(2),
                1 => Admission::BytesPerDay(1 << rng.u32(20..34)),
                _ => Admission::All,
            };
            let policy = TierPolicy {
                pieces_max: *pick(rng, &[0, 2, 3, 8]),
                eviction: *pick(rng, &EvictionPolicy::ALL),
                quota_pages: (rng.u8(0..3) == 0).then(|| rng.u32(1..=self.arena_pages)),
                admission,
            };
            self.policies.insert(tier, policy);
        }
    }

    /// Draws models of several groups. In every third world all engines have one prefix group.
    fn add_groups(&mut self, rng: &mut Rng) {
        if rng.u8(0..3) == 0 {
            return;
        }
        for shape in &mut self.shapes {
            if rng.u8(0..8) == 0 {
                continue;
            }
            let model = draw_model(rng);
            shape.cells = model.iter().map(|group| group.cells).max().unwrap_or(1);
            shape.model = self.models.len();
            self.models.push(model);
        }
        // Every prompt fits into the memory, beside the null page.
        let groups = self.models.iter().map(Vec::len).max().unwrap_or(1);
        let groups = u32::try_from(groups.max(1)).unwrap_or(1);
        self.device_pages = groups * (self.device_pages + 1) + 1;
        let models = self.models.iter().filter(|model| !model.is_empty());
        let block_tokens = models.map(|model| units(model).1).max().unwrap_or(1);
        self.steps.tokens = match rng.u8(0..4) {
            0 => rng.u32(1..=64),
            1 => 1 << 20,
            _ => block_tokens * rng.u32(1..=8),
        };
        self.steps.await_stores = rng.u8(0..4) == 0;
    }

    /// Draws the tiers below host memory.
    fn add_tiers(&mut self, rng: &mut Rng) {
        let below = *pick(rng, &[0, 0, 1, 1, 2]);
        self.tiers
            .extend([TierId::Disk, TierId::Remote].iter().take(below));
        self.lower_tier_percent = *pick(rng, &[50, 100, 200, 400]);
        self.bad_page = *pick(rng, &[0, 2_000, 30_000]);
        let lower = self.tiers[1..].to_vec();
        for (above, tier) in self.tiers.clone().into_iter().zip(lower) {
            let down = Edge {
                from: above,
                to: tier,
            };
            let up = Edge {
                from: tier,
                to: TierId::Host,
            };
            for edge in [down, up] {
                // Without an edge up, loads alone promote pages. A tier that nothing is written to stays empty.
                if edge == up && rng.bool() {
                    continue;
                }
                self.moves.push(MoveEdge {
                    edge,
                    running_max: *pick(rng, &[1, 4, 32]),
                    deadline: self.request_timeout.mul_f64(*pick(rng, &[0.5, 2.0, 8.0])),
                });
            }
        }
        // From rates at which every page is offered to rates at which none is that has to be loaded.
        self.prefill_tokens_per_s =
            NonZeroU64::new(*pick(rng, &[0, 0, 1_000, 100_000, 10_000_000]));
    }

    /// Draws times. A hold may end long before or long after the deadline of the load that needs it.
    fn time(&mut self, rng: &mut Rng) {
        let request = self.request_timeout;
        self.hold_for = match rng.u8(0..4) {
            0 => request.mul_f64(rng.f64()),
            1 => request,
            2 => request * 4,
            _ => request.mul_f64(1.0 + rng.f64() * 15.0),
        };
        self.hold_for = self.hold_for.max(Duration::from_millis(1));
        self.attach_every = Duration::from_millis(rng.u64(3..=60));
        self.reconnect = Duration::from_micros(*pick(rng, &[500, 2_000, 20_000]));
    }

    /// Makes the world large: thousands of pages, and prompts that fill them.
    fn enlarge(&mut self, rng: &mut Rng) {
        self.arena_pages = rng.u32(1024..=4096);
        self.device_pages = rng.u32(256..=1024);
        self.cached_pages = rng.u32(0..=self.device_pages) * u32::from(rng.bool());
        self.longest = rng.u32(64..=self.device_pages.min(256));
        self.families = rng.u64(2..=48);
        self.page_time = Duration::from_micros(rng.u64(2..20));
    }
}

/// Picks one element at random.
pub(super) fn pick<'a, T>(rng: &mut Rng, from: &'a [T]) -> &'a T {
    &from[rng.usize(0..from.len())]
}
