//! The stream actor: one thread for a GPU, which gives copies to streams and watches for their ends.
//!
//! Each direction has a stream and a lane of copies, done in order. A copy is given in parts, and a part of many small ranges
//! in slices: so many at a time that the link stays busy, so few that a cancel is heard soon and that the other direction gets
//! its turn. What a slice touches is held until its end was seen.

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
use super::sabotage::{Bug, planted};
use super::timeline::{Announced, LOOK_PAUSE, WaitList, WaitOrder, Waits};
use super::window::SmallCopyError;
use crate::memory::{CancelFlag, CopyPlan, CopyRequest};
use crate::types::{Direction, EndedCopy, FragmentPair, OpId, RequestId, Timeline};

/// Slices of one direction that a stream has at a time.
pub const PARTS_IN_FLIGHT: usize = 4;
/// Calls of the driver that one direction may take in a turn, before the other one has its turn. At about 2 us a call: 0.5 ms.
/// A range that crosses the end of a pinned chunk takes one call more.
pub const CALLS_A_TURN: usize = 256;
/// Copies that wait to be looked at.
pub const QUEUE_PLACES: usize = 1024;
/// Pause between two looks at what is under way.
const POLL_PAUSE: Duration = Duration::from_micros(20);
/// How long the thread goes on for what is under way when nobody wants it any more.
const STOP_LIMIT: Duration = Duration::from_secs(2);
/// How long its end is waited for: a call of the driver may not return.
const END_LIMIT: Duration = Duration::from_secs(3);

/// Copying threads of this process that have not ended.
static THREADS: AtomicUsize = AtomicUsize::new(0);

/// Whether copying threads may be in a function of the driver. Then the process must end by [`super::end_process`].
pub fn threads_in_driver() -> bool {
    THREADS.load(Ordering::SeqCst) > 0
}

/// A copy between an engine's memory and a depot.
#[derive(Debug)]
pub struct CopyOrder {
    /// Its name.
    pub op: OpId,
    /// Which way.
    pub direction: Direction,
    /// What is copied, cut where it may be stopped.
    pub parts: Vec<Vec<FragmentPair>>,
    /// The engine's side.
    pub device: RegisteredDevice,
    /// The host's side.
    pub depot: Arc<PinnedDepot>,
    /// Stops it before its next part.
    pub cancel: Arc<CancelFlag>,
}

/// What the thread says.
#[derive(Debug)]
pub enum Outcome {
    /// What engines announced is written.
    Written(Vec<Announced>),
    /// Copies that are over: nothing of them reads or writes any more.
    Ended(Vec<EndedCopy>),
    /// The GPU does not work for this process any more. What was under way has no end that could be seen, short of the
    /// end of the process.
    Lost(CudaError),
}

/// With what it starts.
pub struct CopierSettings {
    /// The GPU.
    pub context: Arc<Context>,
    /// Copies that the driver is given by one call, at most [`super::BATCH_COPIES_MAX`]; 1 for each by itself.
    pub copies_a_call: usize,
    /// Hears true before a call for many copies is given while none is under way, and false once none is under way any more.
    pub mark: Box<dyn Fn(bool) + Send>,
    /// Hears of ends; says whether anybody does.
    pub tell: Box<dyn Fn(Outcome) -> bool + Send>,
}

/// The caller's side. When it is dropped, what waits is given up, and what is under way ends.
#[derive(Debug)]
pub struct Copier {
    queue: Option<Sender<Order>>,
    waits: Arc<WaitList>,
    /// Nanoseconds that were spent in giving copies to the driver.
    giving_ns: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
    /// Closed when the thread has ended.
    over: Receiver<()>,
}

impl Copier {
    /// Starts the thread.
    pub fn start(settings: CopierSettings) -> Result<Self, CopierError> {
        let stream = || Stream::giving(&settings.context, settings.copies_a_call);
        let lanes = [Lane::new(stream()?), Lane::new(stream()?)];
        let list = Arc::new(WaitList::default());
        let waits = Waits::new(&settings.context, Arc::clone(&list))?;
        let (queue, orders) = bounded(QUEUE_PLACES);
        let (running, over) = bounded(0);
        let thread = std::thread::Builder::new().name("kvferry-cuda".to_owned());
        let giving_ns = Arc::new(AtomicU64::new(0));
        let run = Run {
            orders,
            lanes,
            waits,
            mark: settings.mark,
            marked: false,
            giving_ns: Arc::clone(&giving_ns),
            tell: settings.tell,
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

    /// Hands a copy over; false when there is no place, or nobody.
    pub fn start_copy(&self, order: CopyOrder) -> bool {
        self.hand_over(Order::Copy(Box::new(order)))
    }

    /// How long giving copies to the driver has taken, in all. The GPU may work meanwhile.
    pub fn giving(&self) -> Duration {
        Duration::from_nanos(self.giving_ns.load(Ordering::Relaxed))
    }

    /// Asks to be told when something is written.
    pub fn wait_for(&self, order: WaitOrder) {
        if self.waits.push(order) && !self.hand_over(Order::Look) {
            tracing::debug!("the copying thread is awake already");
        }
    }

    /// The engine whose word this is says by itself that everything up to this number is written.
    pub fn said(&self, memory: &RegisteredDevice, word: Timeline, through: RequestId) {
        let memory = Arc::downgrade(&memory.memory);
        self.waits.said(&memory, word, through);
    }

    fn hand_over(&self, order: Order) -> bool {
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

enum Order {
    Copy(Box<CopyOrder>),
    /// There is something to wait for.
    Look,
}

/// Why the thread did not start.
#[derive(Debug, thiserror::Error)]
pub enum CopierError {
    /// The driver's error.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// Memory for what is seen.
    #[error(transparent)]
    Memory(#[from] SmallCopyError),
    /// The system's error.
    #[error("no thread for copies: {0}")]
    Thread(#[from] std::io::Error),
}

struct Run {
    orders: Receiver<Order>,
    lanes: [Lane; 2],
    waits: Waits,
    mark: Box<dyn Fn(bool) + Send>,
    /// It was said that calls for many copies are under way.
    marked: bool,
    giving_ns: Arc<AtomicU64>,
    tell: Box<dyn Fn(Outcome) -> bool + Send>,
}

impl Run {
    fn run(mut self) {
        let mut stop_at = None;
        loop {
            let stopping = stop_at.is_some();
            if !stopping && self.take_orders() {
                stop_at = Some(Instant::now() + STOP_LIMIT);
                self.lanes.iter_mut().for_each(Lane::give_up);
                self.waits.give_up();
            }
            let (mut ended, mut written) = (Vec::new(), Vec::new());
            let went_on = self.go_on(&mut ended, &mut written);
            self.say(Outcome::Ended, ended);
            self.say(Outcome::Written, written);
            if let Err(error) = went_on {
                tracing::error!(%error, "the GPU is lost to this process");
                (self.tell)(Outcome::Lost(error));
                self.forget();
                return;
            }
            let idle = self.is_idle();
            match stop_at {
                Some(_) if planted(Bug::LetGoEarly) => return,
                Some(at) if idle || Instant::now() >= at => {
                    self.forget();
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
        if !self.marked && self.lanes.iter().any(Lane::will_give_batches) {
            self.marked = true;
            (self.mark)(true);
        }
        for lane in &mut self.lanes {
            lane.go_on(ended, &self.giving_ns)?;
        }
        if self.marked && self.lanes.iter().all(Lane::is_idle) {
            self.marked = false;
            (self.mark)(false);
        }
        self.waits.go_on(written)
    }

    fn say<T>(&self, outcome: impl Fn(Vec<T>) -> Outcome, what: Vec<T>) {
        if !what.is_empty() && !(self.tell)(outcome(what)) {
            tracing::debug!("nobody hears of what is over");
        }
    }

    fn is_idle(&self) -> bool {
        self.waits.is_idle() && self.lanes.iter().all(Lane::is_idle)
    }

    /// Leaves what is under way as it is, with its memory, for the end of the process.
    fn forget(&mut self) {
        self.waits.forget();
        for lane in &mut self.lanes {
            let flights = lane.flights.drain(..);
            flights.for_each(|flight| flight.submitted.forget());
        }
    }

    /// Takes what has come, or waits for it when nothing is under way. True when nobody will send any more.
    fn take_orders(&mut self) -> bool {
        let pause = match self.lanes.iter().all(Lane::is_idle) {
            true => LOOK_PAUSE,
            false => POLL_PAUSE,
        };
        let first = match () {
            () if self.is_idle() => self.orders.recv().map_err(|_| true),
            // There is more to give: a pause would leave the link idle.
            () if self.lanes.iter().any(Lane::can_give) => {
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
                Order::Copy(order) => self.lanes[lane_of(order.direction)].take(*order),
                Order::Look => {}
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

/// Copies of one direction.
struct Lane {
    stream: Arc<Stream>,
    jobs: VecDeque<Job>,
    /// Slices that the stream has, in order, each with the number of its job.
    flights: VecDeque<Flight>,
    /// Number of the first of `jobs`.
    first: u64,
}

struct Job {
    order: CopyOrder,
    parts: std::vec::IntoIter<Vec<FragmentPair>>,
    /// What is being given.
    part: Option<Part>,
    begun: Option<Instant>,
    flights: usize,
    failed: bool,
    whole_pages: u64,
    bytes: u64,
}

/// A part of a copy, of which some ranges were given.
struct Part {
    plan: CopyPlan,
    pages: u64,
    /// The first step that was not given yet.
    step: u64,
    /// Ranges that are still to be given; more than there are, without a planted bug.
    ranges: usize,
}

/// A slice of a part.
struct Flight {
    job: u64,
    submitted: Submitted,
    /// Of the whole part.
    pages: u64,
    bytes: u64,
    /// With it all of the part was given.
    whole: bool,
}

impl Job {
    fn new(mut order: CopyOrder) -> Self {
        let parts = std::mem::take(&mut order.parts).into_iter();
        Self {
            order,
            parts,
            part: None,
            begun: None,
            flights: 0,
            failed: false,
            whole_pages: 0,
            bytes: 0,
        }
    }

    /// Nothing of it will be given any more, and nothing is under way.
    fn is_over(&self) -> bool {
        if planted(Bug::PageBackEarly) && self.whole_pages > 0 {
            return true;
        }
        self.flights == 0 && !self.has_more()
    }

    /// Something of it is still to be given.
    fn has_more(&self) -> bool {
        !self.failed && (self.part.is_some() || self.parts.len() > 0)
    }

    fn ended(&self) -> EndedCopy {
        let busy = self.begun.map_or(Duration::ZERO, |begun| begun.elapsed());
        EndedCopy {
            op: self.order.op,
            whole: !self.failed,
            whole_pages: u32::try_from(self.whole_pages).unwrap_or(u32::MAX),
            bytes: self.bytes,
            busy_us: u64::try_from(busy.as_micros()).unwrap_or(u64::MAX),
        }
    }

    /// Gives the next slice to the stream. A slice that is refused ends the copy; what of it is under way is watched, too.
    fn submit(&mut self, number: u64, stream: &Arc<Stream>) -> Result<Option<Flight>, CudaError> {
        if self.order.cancel.is_cancelled() {
            tracing::info!(op = %self.order.op, "copy cancelled");
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
        let most = stream.copies_a_call().max(CALLS_A_TURN).min(part.ranges);
        let (mut step, mut count) = (part.step, 0);
        let ranges = part.plan.ranges_from(part.step).take(most);
        let mut ranges = ranges.map(|(range, behind)| {
            (step, count) = (behind, count + 1);
            range
        });
        let given = stream.submit(order.direction, device, host, &mut ranges);
        drop(ranges);
        let whole = part.plan.is_done(step) || part.ranges == count;
        let flight = |submitted, whole| Flight {
            job: number,
            submitted,
            pages: part.pages,
            bytes: part.plan.bytes(),
            whole,
        };
        let flight = match given {
            Ok(submitted) => Some(flight(submitted, whole)),
            Err(refused) => match *refused {
                NotSubmitted::Refused(error, under_way) if !error.is_fatal() => {
                    tracing::error!(op = %order.op, %error, "copy refused");
                    self.failed = !planted(Bug::CountRefused);
                    let whole = planted(Bug::CountRefused);
                    under_way.map(|submitted| flight(submitted, whole))
                }
                lost => return Err(lost.error()),
            },
        };
        self.flights += usize::from(flight.is_some());
        if !whole {
            self.part = Some(Part {
                step,
                ranges: part.ranges - count,
                ..part
            });
        }
        Ok(flight)
    }

    /// Checks what is to be given next. A part that contradicts the memories ends the copy.
    fn next_part(&mut self) -> Option<Part> {
        let pairs = self.parts.next()?;
        self.begun.get_or_insert_with(Instant::now);
        let order = &self.order;
        let request = CopyRequest {
            direction: order.direction,
            layout: &order.device.layout,
            depot: order.depot.depot(),
            pairs: &pairs,
        };
        let memory = &order.device.memory;
        match CopyPlan::new(&request, |index| memory.get(index).map(|it| it.bytes())) {
            Ok(plan) => Some(Part {
                pages: pairs.iter().map(|pair| pair.dst.pages()).sum(),
                step: 0,
                ranges: match planted(Bug::ForgetLast) {
                    true => plan.ranges().count().saturating_sub(1),
                    false => usize::MAX,
                },
                plan,
            }),
            Err(error) => {
                tracing::error!(op = %order.op, %error, "copy refused");
                self.failed = true;
                None
            }
        }
    }
}

impl Lane {
    fn new(stream: Arc<Stream>) -> Self {
        Self {
            stream,
            jobs: VecDeque::new(),
            flights: VecDeque::new(),
            first: 0,
        }
    }

    fn take(&mut self, order: CopyOrder) {
        self.jobs.push_back(Job::new(order));
    }

    fn is_idle(&self) -> bool {
        self.jobs.is_empty()
    }

    /// More can be given at once.
    fn can_give(&self) -> bool {
        self.flights.len() < PARTS_IN_FLIGHT && self.jobs.iter().any(Job::has_more)
    }

    /// What it gives next are calls for many copies.
    fn will_give_batches(&self) -> bool {
        self.stream.copies_a_call() > 1 && self.can_give()
    }

    /// Gives nothing more to the stream.
    fn give_up(&mut self) {
        self.jobs.iter_mut().for_each(|job| job.failed = true);
    }

    /// Looks at what is under way, and gives more.
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
            // Parts behind one that is not whole do not count: pages are told from the first on.
            if flight.whole {
                job.whole_pages += flight.pages;
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

    /// One more slice, of the first copy that has any left, if the stream may have it. Only one, so that the other direction
    /// waits for [`CALLS_A_TURN`] calls at most, or for one call for many copies.
    fn fill(&mut self) -> Result<(), CudaError> {
        for (number, job) in (self.first..).zip(&mut self.jobs) {
            if self.flights.len() >= PARTS_IN_FLIGHT {
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
