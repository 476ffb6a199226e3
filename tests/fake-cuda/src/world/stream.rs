//! A stream: a thread that runs its work in order, and late.

pub(crate) mod batch;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::code::Code;
use crate::world::World;
use crate::world::stream::batch::Batch;

/// One piece of work in this many begins late, and delays all work after it.
const PAUSE_ONE_IN: u8 = 16;

/// One piece of work.
pub(crate) enum Work {
    Copy {
        to: u64,
        from: u64,
        bytes: usize,
        /// Base of registered host memory, which must still be registered when the copy runs.
        pinned: Option<u64>,
    },
    Batch(Batch),
    /// Never ends.
    Hang,
    Record(Arc<Event>, u64),
    /// Continues when the event has reached this number.
    WaitEvent(Arc<Event>, u64),
    WaitValue {
        at: u64,
        value: u64,
    },
    WriteValue {
        at: u64,
        value: u64,
    },
}

/// An event. Ready when everything before its last record is done.
#[derive(Default)]
pub(crate) struct Event {
    recorded: AtomicU64,
    reached: AtomicU64,
}

impl Event {
    /// Records the event again. Returns the record's number, which is reached when the stream gets there.
    pub(crate) fn record(&self) -> u64 {
        self.recorded.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// Number of the last record.
    pub(crate) fn recorded(&self) -> u64 {
        self.recorded.load(Ordering::SeqCst)
    }

    /// Whether the last record was reached. An event that was never recorded is ready.
    pub(crate) fn is_ready(&self) -> bool {
        self.reached.load(Ordering::SeqCst) >= self.recorded.load(Ordering::SeqCst)
    }
}

/// The caller's side of a stream.
pub(crate) struct Stream {
    work: Sender<Work>,
    waiting: Arc<Waiting>,
}

#[derive(Default)]
struct Waiting {
    pieces: Mutex<u64>,
    none: Condvar,
}

impl Stream {
    /// Starts the stream's thread, which ends when the stream is destroyed and all of its work is done.
    pub(crate) fn start(number: u64) -> Result<Self, Code> {
        let (work, given) = channel();
        let waiting = Arc::new(Waiting::default());
        let theirs = Arc::clone(&waiting);
        let thread = std::thread::Builder::new().name("fake-stream".to_owned());
        let started = thread.spawn(move || run(number, &given, &theirs));
        started.map_err(|_| crate::code::OUT_OF_MEMORY)?;
        Ok(Self { work, waiting })
    }

    pub(crate) fn give(&self, work: Work) {
        *lock(&self.waiting.pieces) += 1;
        if self.work.send(work).is_err() {
            crate::settings::complain("a stream's thread has ended");
            std::process::abort();
        }
    }

    /// A function that waits until all work of the stream is done.
    pub(crate) fn drained(&self) -> impl FnOnce() + use<> {
        let waiting = Arc::clone(&self.waiting);
        move || {
            let mut pieces = lock(&waiting.pieces);
            while *pieces > 0 {
                let woken = waiting.none.wait(pieces);
                pieces = woken.unwrap_or_else(PoisonError::into_inner);
            }
        }
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn run(number: u64, given: &Receiver<Work>, waiting: &Waiting) {
    let world = World::get();
    let settings = world.settings();
    let mut chance = fastrand::Rng::with_seed(settings.seed.wrapping_mul(1_000_003) ^ number);
    while let Ok(work) = given.recv() {
        if settings.delay_us > 0 && chance.u8(0..PAUSE_ONE_IN) == 0 {
            std::thread::sleep(Duration::from_micros(chance.u64(0..settings.delay_us)));
        }
        // After an error no more work runs, and no event becomes ready.
        let done = match (&work, world.poisoned()) {
            (_, Some(_)) => Ok(()),
            (
                Work::Copy {
                    to,
                    from,
                    bytes,
                    pinned,
                },
                None,
            ) => world.copy(*to, *from, *bytes, *pinned),
            (Work::Hang, None) => loop {
                std::thread::park();
            },
            (Work::Batch(batch), None) => batch.run(world, &mut chance),
            (Work::Record(event, number), None) => {
                event.reached.fetch_max(*number, Ordering::SeqCst);
                Ok(())
            }
            (Work::WaitEvent(event, number), None) => {
                wait_event(world, event, *number);
                Ok(())
            }
            (Work::WriteValue { at, value }, None) => world.write_value(*at, *value),
            (Work::WaitValue { at, value }, None) => wait_value(world, *at, *value),
        };
        if let Err(code) = done {
            world.poison(code);
        }
        let mut pieces = lock(&waiting.pieces);
        *pieces -= 1;
        if *pieces == 0 {
            waiting.none.notify_all();
        }
    }
}

/// Waits until an event has reached a number, or the context is poisoned.
fn wait_event(world: &World, event: &Event, number: u64) {
    while event.reached.load(Ordering::SeqCst) < number && world.poisoned().is_none() {
        std::thread::sleep(Duration::from_micros(20));
    }
}

/// Polls a word in device memory until it is at least `value`, because no notification exists for its changes.
fn wait_value(world: &World, at: u64, value: u64) -> Result<(), Code> {
    while world.value(at)? < value {
        if world.poisoned().is_some() {
            return Ok(());
        }
        std::thread::sleep(Duration::from_micros(20));
    }
    Ok(())
}
