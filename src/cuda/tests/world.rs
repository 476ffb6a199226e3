//! Device memory, a pinned depot and the stream actor, together with the expected contents of memory: the reference
//! finds each element by shape and strides alone.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use crate::{
    Announced, Context, Copier, CopierReport, CopierSettings, CudaError, DeviceCopy, DeviceIo,
    DeviceMemories, DeviceMemory, Driver, PinnedDepot, RegisteredDevice, Sharing, WaitOrder,
};
use kvferry_memory::{CancelFlag, Depot, PageLayout, TIMELINE_BYTES, validate};
use kvferry_types::{
    Direction, EndedCopy, EngineId, FragmentPair, GroupId, PageList, Registration, RequestId,
    TensorView, Timeline, TransferId,
};

use super::engine::addresses;
use super::fake::on_gpu;

/// Time limit of a wait, exceeded only if something hangs.
pub const TEST_TIMEOUT: Duration = Duration::from_secs(60);

pub struct World {
    pub registration: Registration,
    pub layout: Arc<PageLayout>,
    pub device: RegisteredDevice,
    pub depot: Arc<PinnedDepot>,
    pub copier: Copier,
    outcomes: Receiver<CopierReport>,
    staged_io: RefCell<DeviceIo>,
    /// Expected contents of each allocation.
    pub on_device: Vec<Vec<u8>>,
    /// Expected contents of each page of the depot.
    pub in_depot: Vec<Vec<u8>>,
    last: u64,
}

/// How memory is shared and copies are submitted.
#[derive(Debug, Clone, Copy)]
pub struct Ways {
    /// How the memory is shared in chunks; `None` for an allocation without chunks.
    pub sharing: Option<Sharing>,
    /// [`CopierSettings::copies_a_call`].
    pub copies_a_call: usize,
}

impl Default for Ways {
    fn default() -> Self {
        Self {
            sharing: None,
            copies_a_call: 1,
        }
    }
}

/// A copy of a test: pages as (device, depot), in parts.
pub struct Wanted {
    pub direction: Direction,
    pub pages: Vec<(u32, u32)>,
    pub pages_a_part: usize,
}

impl World {
    /// Creates both memories and fills them with pseudo-random bytes.
    pub fn new(registration: Registration, depot_pages: u32, chunk_bytes: u64, seed: u64) -> Self {
        let world = Self::try_new(registration, depot_pages, chunk_bytes, seed);
        world.expect("a driver without errors")
    }

    /// Like [`Self::new`], with a driver that may refuse calls. Its refusals are errors; any other mistake panics.
    pub fn try_new(
        registration: Registration,
        depot_pages: u32,
        chunk_bytes: u64,
        seed: u64,
    ) -> Result<Self, String> {
        Self::with_ways(
            registration,
            depot_pages,
            chunk_bytes,
            seed,
            Ways::default(),
        )
    }

    /// Like [`Self::try_new`], with a way of sharing memory and of submitting copies.
    pub fn with_ways(
        registration: Registration,
        depot_pages: u32,
        chunk_bytes: u64,
        seed: u64,
        ways: Ways,
    ) -> Result<Self, String> {
        let mut chance = fastrand::Rng::with_seed(seed);
        let mut noise = |bytes: u64| {
            let mut noise = vec![0; bytes as usize];
            chance.fill(&mut noise);
            noise
        };
        let whole = Arc::new(validate(&registration).expect("consistent"));
        let layout = Arc::clone(&whole.groups[0]);
        let driver = Driver::get().map_err(words)?;
        let device = driver.devices().map_err(words)?[0];
        let context = Context::new(driver, device).map_err(words)?;
        let mut staged_io = DeviceIo::new(&context).map_err(words)?;
        let allocate = |bytes| match ways.sharing {
            None => DeviceMemory::allocate(&context, bytes).map_err(words),
            Some(sharing) => shared(&context, bytes, sharing).map_err(words),
        };
        let allocations = &registration.allocations;
        let memories: Result<Vec<_>, _> = allocations.iter().map(|it| allocate(it.bytes)).collect();
        let mut memories = memories?;
        memories.push(DeviceMemory::allocate(&context, TIMELINE_BYTES).map_err(words)?);
        let memory = DeviceMemories::own(memories);
        let timeline = Timeline {
            allocation: allocations.len() as u32,
            offset_bytes: 0,
        };
        let word = [(0, TIMELINE_BYTES)];
        let zeroed = staged_io.write(&memory, timeline.allocation, &word, &[0; 8]);
        zeroed.map_err(words)?;
        let on_device: Vec<Vec<u8>> = allocations.iter().map(|it| noise(it.bytes)).collect();
        for (index, bytes) in (0..).zip(&on_device) {
            let all = [(0, bytes.len() as u64)];
            staged_io
                .write(&memory, index, &all, bytes)
                .map_err(words)?;
        }
        let depot = Depot::create(Depot::bytes_for(depot_pages, layout.page_bytes));
        let depot = Arc::new(depot.expect("memory"));
        depot.hold_pages_of(layout.page_bytes).expect("writable");
        let mut pinned = 0;
        let pinned_depot = PinnedDepot::new(&context, depot, chunk_bytes, |bytes| {
            assert!(bytes > pinned, "progress");
            pinned = bytes;
        });
        let depot = Arc::new(pinned_depot.map_err(words)?);
        assert_eq!(pinned, depot.depot().buffer().len());
        let in_depot: Vec<Vec<u8>> = (0..depot_pages).map(|_| noise(layout.page_bytes)).collect();
        let (sender, outcomes) = channel();
        let copier = Copier::start(CopierSettings {
            context: Arc::clone(&context),
            copies_a_call: ways.copies_a_call,
            mark: Box::new(|_| ()),
            report: Box::new(move |outcome| sender.send(outcome).is_ok()),
        });
        let world = Self {
            device: RegisteredDevice {
                memory,
                layout: whole,
                timeline: Some(timeline),
            },
            registration,
            layout,
            depot,
            copier: copier.map_err(words)?,
            outcomes,
            staged_io: RefCell::new(staged_io),
            on_device,
            in_depot,
            last: 0,
        };
        for (page, bytes) in (0..).zip(&world.in_depot) {
            let at = world.depot_offset(page);
            world
                .depot
                .depot()
                .buffer()
                .write_from(at, bytes)
                .expect("in bounds");
        }
        Ok(world)
    }

    fn depot_offset(&self, page: u32) -> u64 {
        let stride = self.layout.page_bytes.div_ceil(64) * 64;
        self.depot.depot().pages_at(self.layout.page_bytes) + u64::from(page) * stride
    }

    /// Queues a copy.
    pub fn start(&mut self, wanted: &Wanted) -> TransferId {
        self.start_with(wanted, Arc::default())
    }

    /// Like [`Self::start`], with a flag that stops the copy.
    pub fn start_with(&mut self, wanted: &Wanted, cancel: Arc<CancelFlag>) -> TransferId {
        assert!(self.try_start(wanted, cancel), "a place");
        TransferId(self.last)
    }

    /// Like [`Self::start_with`]; returns false if the queue is full.
    pub fn try_start(&mut self, wanted: &Wanted, cancel: Arc<CancelFlag>) -> bool {
        self.last += 1;
        let pair = |pages: &[(u32, u32)]| {
            let device: PageList = pages.iter().map(|pages| pages.0).collect();
            let depot: PageList = pages.iter().map(|pages| pages.1).collect();
            match wanted.direction {
                Direction::Store => FragmentPair {
                    src: device,
                    dst: depot,
                },
                Direction::Load => FragmentPair {
                    src: depot,
                    dst: device,
                },
            }
        };
        let order = DeviceCopy {
            transfer: TransferId(self.last),
            direction: wanted.direction,
            parts: wanted
                .pages
                .chunks(wanted.pages_a_part)
                .map(|part| vec![pair(part)])
                .collect(),
            device: self.device.clone(),
            group: GroupId(0),
            depot: Arc::clone(&self.depot),
            cancel,
        };
        self.copier.start_copy(order)
    }

    /// The next outcome of the actor.
    pub fn outcome(&self) -> CopierReport {
        self.outcomes
            .recv_timeout(TEST_TIMEOUT)
            .expect("it goes on")
    }

    /// The copies that end next, at least one.
    pub fn ended(&self) -> Vec<EndedCopy> {
        match self.outcome() {
            CopierReport::Ended(copies) => copies,
            other => panic!("{other:?}"),
        }
    }

    /// Makes the engine's device write new contents to all its memory and then its word, and announces this work to the
    /// actor. Returns when the actor has reported it as written.
    pub fn engine_writes(&mut self, chance: &mut fastrand::Rng) {
        self.last += 1;
        let word = self.device.timeline.expect("it has one");
        let announced = Announced {
            engine: EngineId([1; 16]),
            through: RequestId(self.last),
        };
        {
            let mut staged_io = self.staged_io.borrow_mut();
            for (index, bytes) in (0..).zip(&mut self.on_device) {
                chance.fill(bytes);
                let all = [(0, bytes.len() as u64)];
                let later = staged_io.write_later(&self.device.memory, index, &all, bytes);
                later.expect("a driver without errors");
            }
            let marked = staged_io.mark(&self.device.memory, word, self.last);
            marked.expect("a driver without errors");
        }
        let memory = Arc::downgrade(&self.device.memory);
        let order = WaitOrder {
            memory,
            word,
            announced,
        };
        self.copier.wait_for(order);
        match self.outcome() {
            CopierReport::Written(all) => assert_eq!(all, [announced]),
            other => panic!("{other:?}"),
        }
    }

    /// Announces work, and reports it as done on behalf of the engine before its device does. Returns the number of the
    /// work.
    pub fn engine_says_so_by_itself(&mut self) -> RequestId {
        self.last += 1;
        let word = self.device.timeline.expect("it has one");
        let through = RequestId(self.last);
        self.copier.wait_for(WaitOrder {
            memory: Arc::downgrade(&self.device.memory),
            word,
            announced: Announced {
                engine: EngineId([1; 16]),
                through,
            },
        });
        self.copier.announce(&self.device, word, through);
        let mut staged_io = self.staged_io.borrow_mut();
        let marked = staged_io.mark(&self.device.memory, word, self.last);
        marked.expect("a driver without errors");
        through
    }

    /// Updates the expected contents by a complete copy.
    pub fn expect(&mut self, wanted: &Wanted) {
        let mut tensors: Vec<&TensorView> = self.registration.groups[0].tensors.iter().collect();
        tensors.sort_by_key(|tensor| (tensor.layer, tensor.role));
        for (device_page, depot_page) in &wanted.pages {
            let page = &mut self.in_depot[*depot_page as usize];
            let mut place = 0;
            for tensor in &tensors {
                let allocation = &mut self.on_device[tensor.allocation as usize];
                for at in addresses(tensor, *device_page) {
                    match wanted.direction {
                        Direction::Store => page[place] = allocation[at],
                        Direction::Load => allocation[at] = page[place],
                    }
                    place += 1;
                }
            }
        }
    }

    /// The contents of a page of the depot.
    pub fn depot_page(&self, page: u32) -> Vec<u8> {
        let mut bytes = vec![0; self.layout.page_bytes as usize];
        let buffer = self.depot.depot().buffer();
        buffer
            .read_into(self.depot_offset(page), &mut bytes)
            .expect("in bounds");
        bytes
    }

    /// The contents of an allocation.
    fn allocation(&self, index: u32) -> Result<Vec<u8>, String> {
        let mut bytes = vec![0; self.on_device[index as usize].len()];
        let memory = &self.device.memory;
        let all = [(0, bytes.len() as u64)];
        let read = self
            .staged_io
            .borrow_mut()
            .read(memory, index, &all, &mut bytes);
        read.map_err(words).map(|()| bytes)
    }

    /// Overwrites an allocation, as an engine does that has its pages back.
    pub fn overwrite(&mut self, index: u32, byte: u8) {
        let bytes = &mut self.on_device[index as usize];
        bytes.fill(byte);
        let all = [(0, bytes.len() as u64)];
        let written = self
            .staged_io
            .borrow_mut()
            .write(&self.device.memory, index, &all, bytes);
        written.expect("written");
    }

    /// Overwrites a page of the depot, as another store in its place does.
    pub fn overwrite_in_depot(&mut self, page: u32, byte: u8) {
        let bytes = &mut self.in_depot[page as usize];
        bytes.fill(byte);
        let at = self.depot_offset(page);
        let buffer = self.depot.depot().buffer();
        buffer
            .write_from(at, &self.in_depot[page as usize])
            .expect("in bounds");
    }

    /// Compares every byte of both memories.
    pub fn check(&self, what: &str) {
        self.try_check(what).expect("a driver without errors");
    }

    /// Like [`Self::check`], with a driver that may refuse to read its memory.
    pub fn try_check(&self, what: &str) -> Result<(), String> {
        for (page, expected) in (0..).zip(&self.in_depot) {
            let found = self.depot_page(page);
            assert!(found == *expected, "{what}: depot page {page}");
        }
        for (index, expected) in (0..).zip(&self.on_device) {
            let found = self.allocation(index)?;
            assert!(found == *expected, "{what}: allocation {index}");
        }
        Ok(())
    }

    /// Waits for the end of copies, and returns how each ended, ordered by id.
    pub fn wait(&self, transfers: &[TransferId]) -> Vec<EndedCopy> {
        let until = Instant::now() + TEST_TIMEOUT;
        let mut ended: Vec<EndedCopy> = Vec::new();
        while ended.len() < transfers.len() {
            assert!(Instant::now() < until, "copies do not end");
            ended.extend(self.ended());
        }
        ended.sort_by_key(|copy| copy.transfer);
        ended
    }
}

/// Memory as another process opens it; its creator releases it then.
fn shared(context: &Arc<Context>, bytes: u64, sharing: Sharing) -> Result<DeviceMemory, CudaError> {
    let made = |sharing| DeviceMemory::allocate_chunks(context, bytes, 1, sharing);
    let (made, chunks) = match made(sharing) {
        // Few machines support fabric handles.
        Err(_) if on_gpu() && sharing == Sharing::Fabric => made(Sharing::Fd),
        made => made,
    }?;
    let shared = chunks.iter().map(|it| Ok((it.share()?, it.bytes())));
    let shared = shared.collect::<Result<Vec<_>, CudaError>>()?;
    let opened = DeviceMemory::open_chunks(context, &shared);
    drop((made, chunks));
    opened
}

fn words(error: impl std::fmt::Display) -> String {
    error.to_string()
}
