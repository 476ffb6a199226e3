//! The stream actor: one thread for each GPU, which submits copies to streams and polls for their ends.
//!
//! Each direction has a stream and a lane of copies, which are executed in order. A copy is submitted in parts, and a
//! part of many small ranges in slices: enough at a time to keep the link busy, few enough that a cancel takes effect
//! soon and that the other direction gets its turn. The memory of a slice is held until its end was observed.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, RecvTimeoutError, Sender, TryRecvError, bounded};

use super::driver::{Context, DeviceSide, HostMemory, NotSubmitted, Stream, Submitted};
use super::engine_memory::RegisteredDevice;
use super::error::CudaError;
use super::pinned::PinnedDepot;
use super::staged_io::SmallCopyError;
use super::timeline::{Announced, LOOK_PAUSE, WaitList, WaitOrder, Waits};
use kvferry_memory::{CancelFlag, CopyPlan, CopyRequest};
use kvferry_types::{Direction, EndedCopy, FragmentPair, GroupId, RequestId, Timeline, TransferId};

/// Most slices of one direction in flight in its stream.
pub const SLICES_IN_FLIGHT_MAX: usize = 4;
/// Calls of the driver that one direction may take in a turn before the other direction gets its turn. At about 2 us a
/// call: 0.5 ms. A range that crosses the end of a pinned chunk takes one call more.
pub const CALLS_A_TURN: usize = 256;
/// Capacity of the queue of orders that the thread has not taken yet.
pub const QUEUE_PLACES: usize = 1024;
/// Pause between two polls of copies in flight.
const POLL_PAUSE: Duration = Duration::from_micros(20);
/// How long the thread still waits for copies in flight after its [`Copier`] was dropped.
const STOP_LIMIT: Duration = Duration::from_secs(2);
/// How long the drop of a [`Copier`] waits for the thread's end: a call of the driver may not return.
const END_LIMIT: Duration = Duration::from_secs(3);

/// Number of copying threads of this process that have not ended.
static THREADS: AtomicUsize = AtomicUsize::new(0);

/// Whether copying threads may be inside a function of the driver. The process must then end by [`super::end_process`].
pub fn threads_in_driver() -> bool {
    THREADS.load(Ordering::SeqCst) > 0
}

/// A copy between an engine's memory and a depot.
#[derive(Debug)]
pub struct DeviceCopy {
    /// Id of the copy, repeated in its [`EndedCopy`].
    pub transfer: TransferId,
    /// Store or load.
    pub direction: Direction,
    /// Pages to copy, in parts. An end reports complete parts only.
    pub parts: Vec<Vec<FragmentPair>>,
    /// The engine's memory.
    pub device: RegisteredDevice,
    /// The group whose pages are copied.
    pub group: GroupId,
    /// The host's memory.
    pub depot: Arc<PinnedDepot>,
    /// Stops the copy before its next slice.
    pub cancel: Arc<CancelFlag>,
}

/// A report of the thread.
#[derive(Debug)]
pub enum CopierReport {
    /// Work that engines announced has been written.
    Written(Vec<Announced>),
    /// Copies that have ended: they no longer read or write any memory.
    Ended(Vec<EndedCopy>),
    /// The GPU no longer works for this process. The end of the copies in flight cannot be observed, except as the end
    /// of the process.
    Lost(CudaError),
}

/// Parameters of [`Copier::start`].
pub struct CopierSettings {
    /// Context on the GPU that copies.
    pub context: Arc<Context>,
    /// Copies that one call of the driver receives, at most [`super::BATCH_COPIES_MAX`]; 1 issues each copy by a call
    /// of its own.
    pub copies_a_call: usize,
    /// Called with true before a batched copy is issued while none is in flight, and with false when none is in flight
    /// any longer.
    pub mark: Box<dyn Fn(bool) + Send>,
    /// Receives the outcomes; returns false when there is no receiver for them.
    pub report: Box<dyn Fn(CopierReport) -> bool + Send>,
}

/// Handle of the thread. Its drop discards waiting copies and waits for copies in flight, at most 3 s.
#[derive(Debug)]
pub struct Copier {
    queue: Option<Sender<CopierCommand>>,
    waits: Arc<WaitList>,
    /// Nanoseconds spent in submitting copies to the driver.
    giving_ns: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
    /// Disconnected when the thread has ended.
    over: Receiver<()>,
}

impl Copier {
    /// Starts the thread.
    pub fn start(settings: CopierSettings) -> Result<Self, CopierError> {
        let stream = || Stream::giving(&settings.context, settings.copies_a_call);
        let lanes = [CopyLane::new(stream()?), CopyLane::new(stream()?)];
        let list = Arc::new(WaitList::default());
        let waits = Waits::new(&settings.context, Arc::clone(&list))?;
        let (queue, orders) = bounded(QUEUE_PLACES);
        let (running, over) = bounded(0);
        let thread = std::thread::Builder::new().name("kvferry-cuda".to_owned());
        let giving_ns = Arc::new(AtomicU64::new(0));
        let run = CopierThread {
            orders,
            lanes,
            waits,
            mark: settings.mark,
            marked: false,
            giving_ns: Arc::clone(&giving_ns),
            notify: settings.report,
        };
        THREADS.fetch_add(1, Ordering::SeqCst);
        let thread = thread.spawn(move || {
            run.run();
            THREADS.fetch_sub(1, Ordering::SeqCst);
            drop(running);
        });
        let thread = thread.inspect_err(|_| {
            THREADS.fetch_sub(1, Ordering::SeqCst);
        })?;
        Ok(Self {
            queue: Some(queue),
            waits: list,
            giving_ns,
            thread: Some(thread),
            over,
        })
    }

    /// Queues a copy. Returns false when the queue is full or the thread has ended.
    pub fn start_copy(&self, order: DeviceCopy) -> bool {
        self.hand_over(CopierCommand::Copy(Box::new(order)))
    }

    /// Total time spent in submitting copies to the driver. The GPU may have been copying meanwhile.
    pub fn giving(&self) -> Duration {
        Duration::from_nanos(self.giving_ns.load(Ordering::Relaxed))
    }

    /// Requests an [`CopierReport::Written`] when the announced work is written.
    pub fn wait_for(&self, order: WaitOrder) {
        if self.waits.push(order) && !self.hand_over(CopierCommand::Look) {
            tracing::debug!("the copying thread is awake already");
        }
    }

    /// Removes waits for everything up to `through`, because the engine that owns the word has reported by itself that
    /// it is written.
    pub fn announce(&self, memory: &RegisteredDevice, word: Timeline, through: RequestId) {
        let memory = Arc::downgrade(&memory.memory);
        self.waits.announce(&memory, word, through);
    }

    fn hand_over(&self, order: CopierCommand) -> bool {
        let queue = self.queue.as_ref();
        queue.is_some_and(|queue| queue.try_send(order).is_ok())
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        self.queue = None;
        if self.over.recv_timeout(END_LIMIT) == Err(RecvTimeoutError::Timeout) {
            tracing::error!("the driver does not answer: the copying thread stays");
            return;
        }
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the copying thread panicked");
        }
    }
}

enum CopierCommand {
    Copy(Box<DeviceCopy>),
    /// Wakes the thread, because there is something to wait for.
    Look,
}

/// Why the thread did not start.
#[derive(Debug, thiserror::Error)]
pub enum CopierError {
    /// A call of the driver failed.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// Host memory for the values that are read could not be created or pinned.
    #[error(transparent)]
    Memory(#[from] SmallCopyError),
    /// The system could not start the thread.
    #[error("no thread for copies: {0}")]
    Thread(#[from] std::io::Error),
}

struct CopierThread {
    orders: Receiver<CopierCommand>,
    lanes: [CopyLane; 2],
    waits: Waits,
    mark: Box<dyn Fn(bool) + Send>,
    /// `mark` was called with true: batched copies may be in flight.
    marked: bool,
    giving_ns: Arc<AtomicU64>,
    notify: Box<dyn Fn(CopierReport) -> bool + Send>,
}

impl CopierThread {
    fn run(mut self) {
        let mut stop_at = None;
        loop {
            let stopping = stop_at.is_some();
            if !stopping && self.take_orders() {
                stop_at = Some(Instant::now() + STOP_LIMIT);
                self.lanes.iter_mut().for_each(CopyLane::stop_submitting);
                self.waits.clear();
            }
            let (mut ended, mut written) = (Vec::new(), Vec::new());
            let went_on = self.go_on(&mut ended, &mut written);
            self.report_all(CopierReport::Ended, ended);
            self.report_all(CopierReport::Written, written);
            if let Err(error) = went_on {
                tracing::error!(%error, "the GPU is lost to this process");
                (self.notify)(CopierReport::Lost(error));
                self.leak();
                return;
            }
            let idle = self.is_idle();
            match stop_at {
                Some(at) if idle || Instant::now() >= at => {
                    self.leak();
                    return;
                }
                Some(_) => std::thread::sleep(POLL_PAUSE),
                None => {}
            }
        }
    }

    fn go_on(
        &mut self,
        ended: &mut Vec<EndedCopy>,
        written: &mut Vec<Announced>,
    ) -> Result<(), CudaError> {
        if !self.marked && self.lanes.iter().any(CopyLane::will_give_batches) {
            self.marked = true;
            (self.mark)(true);
        }
        for lane in &mut self.lanes {
            lane.go_on(ended, &self.giving_ns)?;
        }
        if self.marked && self.lanes.iter().all(CopyLane::is_idle) {
            self.marked = false;
            (self.mark)(false);
        }
        self.waits.go_on(written)
    }

    fn report_all<T>(&self, outcome: impl Fn(Vec<T>) -> CopierReport, what: Vec<T>) {
        if !what.is_empty() && !(self.notify)(outcome(what)) {
            tracing::debug!("no receiver for requests that are over");
        }
    }

    fn is_idle(&self) -> bool {
        self.waits.is_idle() && self.lanes.iter().all(CopyLane::is_idle)
    }

    /// Leaves the work in flight as it is, and keeps its memory until the process ends.
    fn leak(&mut self) {
        self.waits.leak();
        for lane in &mut self.lanes {
            let flights = lane.flights.drain(..);
            flights.for_each(|flight| flight.submitted.leak());
        }
    }

    /// Takes the queued orders, or waits for one when nothing is in flight. Returns true when the [`Copier`] was
    /// dropped.
    fn take_orders(&mut self) -> bool {
        let pause = match self.lanes.iter().all(CopyLane::is_idle) {
            true => LOOK_PAUSE,
            false => POLL_PAUSE,
        };
        let first = match () {
            () if self.is_idle() => self.orders.recv().map_err(|_| true),
            // More slices can be submitted: a pause would leave the link idle.
            () if self.lanes.iter().any(CopyLane::can_give) => {
                let none = |none| none == TryRecvError::Disconnected;
                self.orders.try_recv().map_err(none)
            }
            () => {
                let none = |none| none == RecvTimeoutError::Disconnected;
                self.orders.recv_timeout(pause).map_err(none)
            }
        };
        let mut order = match first {
            Ok(order) => order,
            Err(over) => return over,
        };
        loop {
            match order {
                CopierCommand::Copy(order) => self.lanes[lane_of(order.direction)].take(*order),
                CopierCommand::Look => {}
            }
            order = match self.orders.try_recv() {
                Ok(order) => order,
                Err(TryRecvError::Empty) => return false,
                Err(TryRecvError::Disconnected) => return true,
            };
        }
    }
}

const fn lane_of(direction: Direction) -> usize {
    match direction {
        Direction::Store => 0,
        Direction::Load => 1,
    }
}

/// The copies of one direction.
struct CopyLane {
    stream: Arc<Stream>,
    jobs: VecDeque<Job>,
    /// Slices in the stream, in order, each with the number of its job.
    flights: VecDeque<InFlight>,
    /// Number of the first job in `jobs`.
    first: u64,
}

struct Job {
    order: DeviceCopy,
    parts: std::vec::IntoIter<Vec<FragmentPair>>,
    /// The part that is being submitted.
    part: Option<Part>,
    begun: Option<Instant>,
    flights: usize,
    failed: bool,
    complete_pages: u64,
    bytes: u64,
}

/// A part of a copy, of which some ranges have been submitted.
struct Part {
    plan: CopyPlan,
    pages: u64,
    /// The first step that has not been submitted yet.
    step: u64,
}

/// A slice of a part, in flight.
struct InFlight {
    job: u64,
    submitted: Submitted,
    /// Pages of the whole part, of which this is a slice.
    pages: u64,
    bytes: u64,
    /// Whether the part has been submitted completely with this slice.
    complete: bool,
}

impl Job {
    fn new(mut order: DeviceCopy) -> Self {
        let parts = std::mem::take(&mut order.parts).into_iter();
        Self {
            order,
            parts,
            part: None,
            begun: None,
            flights: 0,
            failed: false,
            complete_pages: 0,
            bytes: 0,
        }
    }

    /// Nothing more will be submitted, and nothing is in flight.
    fn is_over(&self) -> bool {
        self.flights == 0 && !self.has_more()
    }

    /// Some parts are still to be submitted.
    fn has_more(&self) -> bool {
        !self.failed && (self.part.is_some() || self.parts.len() > 0)
    }

    fn ended(&self) -> EndedCopy {
        let busy = self.begun.map_or(Duration::ZERO, |begun| begun.elapsed());
        EndedCopy {
            complete_pages: u32::try_from(self.complete_pages).unwrap_or(u32::MAX),
            bytes: self.bytes,
            copy_us: u64::try_from(busy.as_micros()).unwrap_or(u64::MAX),
            ..EndedCopy::new(self.order.transfer, !self.failed)
        }
    }

    /// Submits the next slice to the stream. A refused slice ends the copy; its ranges that are in flight are still
    /// watched.
    fn submit(&mut self, number: u64, stream: &Arc<Stream>) -> Result<Option<InFlight>, CudaError> {
        if self.order.cancel.is_cancelled() {
            tracing::info!(transfer = %self.order.transfer, "copy cancelled");
            self.failed = true;
            return Ok(None);
        }
        let part = match self.part.take() {
            Some(part) => part,
            None => match self.next_part() {
                Some(part) => part,
                None => return Ok(None),
            },
        };
        let order = &self.order;
        let device = Arc::clone(&order.device.memory) as Arc<dyn DeviceSide>;
        let host = Arc::clone(&order.depot) as Arc<dyn HostMemory>;
        let most = stream.copies_a_call().max(CALLS_A_TURN);
        let mut step = part.step;
        let ranges = part.plan.ranges_from(part.step).take(most);
        let mut ranges = ranges.map(|(range, behind)| {
            step = behind;
            range
        });
        let given = stream.submit(order.direction, device, host, &mut ranges);
        drop(ranges);
        let complete = part.plan.is_done(step);
        let flight = |submitted, complete| InFlight {
            job: number,
            submitted,
            pages: part.pages,
            bytes: part.plan.bytes(),
            complete,
        };
        let flight = match given {
            Ok(submitted) => Some(flight(submitted, complete)),
            Err(refused) => match *refused {
                NotSubmitted::Refused(error, under_way) if !error.is_fatal() => {
                    tracing::error!(transfer = %order.transfer, %error, "copy refused");
                    self.failed = true;
                    under_way.map(|submitted| flight(submitted, false))
                }
                lost => return Err(lost.error()),
            },
        };
        self.flights += usize::from(flight.is_some());
        if !complete {
            self.part = Some(Part { step, ..part });
        }
        Ok(flight)
    }

    /// Checks the next part. A part that contradicts the memories ends the copy.
    fn next_part(&mut self) -> Option<Part> {
        let pairs = self.parts.next()?;
        self.begun.get_or_insert_with(Instant::now);
        let order = &self.order;
        let Some(layout) = order.device.layout.of(order.group) else {
            tracing::error!(transfer = %order.transfer, group = %order.group, "copy of no registered group refused");
            self.failed = true;
            return None;
        };
        let request = CopyRequest {
            direction: order.direction,
            layout,
            depot: order.depot.depot(),
            pairs: &pairs,
        };
        let memory = &order.device.memory;
        match CopyPlan::new(&request, |index| memory.get(index).map(|it| it.bytes())) {
            Ok(plan) => Some(Part {
                pages: pairs.iter().map(|pair| pair.dst.pages()).sum(),
                step: 0,
                plan,
            }),
            Err(error) => {
                tracing::error!(transfer = %order.transfer, %error, "copy refused");
                self.failed = true;
                None
            }
        }
    }
}

impl CopyLane {
    fn new(stream: Arc<Stream>) -> Self {
        Self {
            stream,
            jobs: VecDeque::new(),
            flights: VecDeque::new(),
            first: 0,
        }
    }

    fn take(&mut self, order: DeviceCopy) {
        self.jobs.push_back(Job::new(order));
    }

    fn is_idle(&self) -> bool {
        self.jobs.is_empty()
    }

    /// Another slice can be submitted at once.
    fn can_give(&self) -> bool {
        self.flights.len() < SLICES_IN_FLIGHT_MAX && self.jobs.iter().any(Job::has_more)
    }

    /// The next slice will be submitted by batched calls.
    fn will_give_batches(&self) -> bool {
        self.stream.copies_a_call() > 1 && self.can_give()
    }

    /// Submits nothing more to the stream.
    fn stop_submitting(&mut self) {
        self.jobs.iter_mut().for_each(|job| job.failed = true);
    }

    /// Polls the slices in flight, and submits another.
    fn go_on(
        &mut self,
        ended: &mut Vec<EndedCopy>,
        giving_ns: &AtomicU64,
    ) -> Result<(), CudaError> {
        while let Some(flight) = self.flights.front_mut() {
            if !flight.submitted.poll()? {
                break;
            }
            let Some(flight) = self.flights.pop_front() else {
                break;
            };
            let place = flight.job.checked_sub(self.first);
            let job = place.and_then(|place| self.jobs.get_mut(place as usize));
            let Some(job) = job else { continue };
            job.flights -= 1;
            // Only complete parts count, because an end reports a number of pages from the first one on.
            if flight.complete {
                job.complete_pages += flight.pages;
                job.bytes += flight.bytes;
            }
        }
        if self.can_give() {
            let begun = Instant::now();
            let filled = self.fill();
            let giving = u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX);
            giving_ns.fetch_add(giving, Ordering::Relaxed);
            filled?;
        }
        while self.jobs.front().is_some_and(Job::is_over) {
            if let Some(job) = self.jobs.pop_front() {
                self.first += 1;
                ended.push(job.ended());
            }
        }
        Ok(())
    }

    /// Submits one more slice, of the first copy that has any left, if the stream has room. Only one, so that the other
    /// direction waits for at most [`CALLS_A_TURN`] calls, or for one batched call.
    fn fill(&mut self) -> Result<(), CudaError> {
        for (number, job) in (self.first..).zip(&mut self.jobs) {
            if self.flights.len() >= SLICES_IN_FLIGHT_MAX {
                return Ok(());
            }
            if !job.has_more() {
                continue;
            }
            if let Some(flight) = job.submit(number, &self.stream)? {
                self.flights.push_back(flight);
                return Ok(());
            }
        }
        Ok(())
    }
}
