//! Waits until an engine's device has written what a store is to read: the device says so by a word in its own memory.
//!
//! The word is read, again and again, and not waited for by a stream: what a stream waits for cannot be given up, and would
//! keep everything behind it when an engine dies before it has written.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::driver::{Context, DeviceSide, HostMemory, Stream, Submitted};
use super::engine_memory::DeviceMemories;
use super::error::CudaError;
use super::sabotage::{Bug, planted};
use super::window::{SmallCopyError, Staging};
use crate::memory::{CopyRange, TIMELINE_BYTES};
use crate::types::{Direction, EngineId, RequestId, Timeline};

/// Pauses between two looks at a word: the first, and the longest, to which it doubles while nothing has happened.
pub(super) const LOOK_PAUSE: Duration = Duration::from_micros(50);
const LOOK_PAUSE_MAX: Duration = Duration::from_micros(400);

/// What an engine has announced: it is written once the word is at least `through`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Announced {
    /// Whose.
    pub engine: EngineId,
    /// The number up to which everything is written once the word has it.
    pub through: RequestId,
}

/// Something to wait for. It is forgotten with the memory that the word lies in.
#[derive(Debug)]
pub struct WaitOrder {
    /// Where the word lies.
    pub memory: Weak<DeviceMemories>,
    /// Where in it.
    pub word: Timeline,
    /// What is announced.
    pub announced: Announced,
}

/// What is to be waited for, one entry a word: what is announced last says more than what was before. So it is bounded by the
/// memories that are open. An entry goes when the word has its number, or when the engine says by itself that it is written.
#[derive(Debug, Default)]
pub(super) struct WaitList(Mutex<Vec<WaitOrder>>);

impl WaitList {
    /// One more; true when there was none.
    pub(super) fn push(&self, order: WaitOrder) -> bool {
        let mut waiting = self.lock();
        let first = waiting.is_empty();
        let same = |it: &&mut WaitOrder| it.is_of(&order.memory, order.word);
        match waiting.iter_mut().find(same) {
            Some(before) => {
                let through = &mut before.announced.through;
                *through = (*through).max(order.announced.through);
            }
            None => waiting.push(order),
        }
        first
    }

    /// The engine says by itself that everything up to this number is written. Its device may never let this word say so, and
    /// the word would be read until the next number is there.
    pub(super) fn said(&self, memory: &Weak<DeviceMemories>, word: Timeline, through: RequestId) {
        self.lock()
            .retain(|order| !order.is_of(memory, word) || order.announced.through > through);
    }

    fn lock(&self) -> MutexGuard<'_, Vec<WaitOrder>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl WaitOrder {
    fn is_of(&self, memory: &Weak<DeviceMemories>, word: Timeline) -> bool {
        self.memory.ptr_eq(memory) && self.word == word
    }
}

/// Looks at the words of a [`WaitList`].
pub(super) struct Waits {
    stream: Arc<Stream>,
    seen: Arc<Staging>,
    list: Arc<WaitList>,
    look: Option<Look>,
    not_before: Instant,
    pause: Duration,
    /// The words that were seen last, so that each is told once.
    told: u64,
    complained: bool,
}

/// A word that is being read.
struct Look {
    submitted: Submitted,
    memory: Weak<DeviceMemories>,
    word: Timeline,
}

impl Waits {
    pub(super) fn new(context: &Arc<Context>, list: Arc<WaitList>) -> Result<Self, SmallCopyError> {
        Ok(Self {
            stream: Stream::new(context)?,
            seen: Staging::new(context, TIMELINE_BYTES)?,
            list,
            look: None,
            not_before: Instant::now(),
            pause: LOOK_PAUSE,
            told: 0,
            complained: false,
        })
    }

    pub(super) fn is_idle(&self) -> bool {
        self.look.is_none() && self.list.lock().is_empty()
    }

    /// Waits for nothing more.
    pub(super) fn give_up(&mut self) {
        self.list.lock().clear();
    }

    /// Leaves what is under way as it is.
    pub(super) fn forget(&mut self) {
        if let Some(look) = self.look.take() {
            look.submitted.forget();
        }
    }

    /// Looks at a word, and adds what is written by now.
    pub(super) fn go_on(&mut self, written: &mut Vec<Announced>) -> Result<(), CudaError> {
        if let Some(look) = &mut self.look {
            if !look.submitted.poll()? {
                return Ok(());
            }
            self.look_ended(written);
        }
        let now = Instant::now();
        if now < self.not_before {
            return Ok(());
        }
        let next = {
            let mut waiting = self.list.lock();
            waiting.retain(|order| order.memory.strong_count() > 0);
            // Each in turn.
            let order = match waiting.is_empty() {
                true => return Ok(()),
                false => waiting.remove(0),
            };
            let next = (order.memory.upgrade(), order.word);
            waiting.push(order);
            next
        };
        let (Some(memory), word) = next else {
            return Ok(());
        };
        self.not_before = now + self.pause;
        self.pause = (self.pause * 2).min(LOOK_PAUSE_MAX);
        let weak = Arc::downgrade(&memory);
        let range = CopyRange {
            allocation: word.allocation,
            device_bytes: word.offset_bytes,
            depot_bytes: 0,
            len_bytes: TIMELINE_BYTES,
        };
        let device = memory as Arc<dyn DeviceSide>;
        let host = Arc::clone(&self.seen) as Arc<dyn HostMemory>;
        let mut ranges = std::iter::once(range);
        let look = self
            .stream
            .submit(Direction::Store, device, host, &mut ranges);
        match look.map_err(|refused| refused.error()) {
            Ok(submitted) => {
                self.look = Some(Look {
                    submitted,
                    memory: weak,
                    word,
                });
            }
            Err(error) if error.is_fatal() => return Err(error),
            // It was only a look: there will be another one.
            Err(error) if !self.complained => {
                tracing::warn!(%error, "the device's word cannot be read");
                self.complained = true;
            }
            Err(_) => {}
        }
        Ok(())
    }

    /// The word says how far the device is, which may be a part of what is announced.
    fn look_ended(&mut self, written: &mut Vec<Announced>) {
        let Some(Look { memory, word, .. }) = self.look.take() else {
            return;
        };
        let mut bytes = [0; TIMELINE_BYTES as usize];
        if let Err(error) = self.seen.buffer.read_into(0, &mut bytes) {
            tracing::error!(%error, "a word of our own cannot be read");
            return;
        }
        let seen = match planted(Bug::SemaphoreTooSoon) {
            true => u64::MAX,
            false => u64::from_le_bytes(bytes),
        };
        let told = std::mem::replace(&mut self.told, seen);
        self.list.lock().retain(|order| {
            if !order.is_of(&memory, word) {
                return true;
            }
            let Announced { engine, through } = order.announced;
            let through = RequestId(through.0.min(seen));
            let all = through == order.announced.through;
            if all || seen != told {
                self.pause = LOOK_PAUSE;
                written.push(Announced { engine, through });
            }
            !all
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn word(offset_bytes: u64) -> Timeline {
        Timeline {
            allocation: 0,
            offset_bytes,
        }
    }

    fn order(offset_bytes: u64, through: u64) -> WaitOrder {
        WaitOrder {
            memory: Weak::new(),
            word: word(offset_bytes),
            announced: Announced {
                engine: EngineId([1; 16]),
                through: RequestId(through),
            },
        }
    }

    #[test]
    fn what_an_engine_says_by_itself_is_not_waited_for() {
        let list = WaitList::default();
        let left = |list: &WaitList| -> Vec<(u64, u64)> {
            let waiting = list.lock();
            let each = waiting.iter();
            each.map(|it| (it.word.offset_bytes, it.announced.through.0))
                .collect()
        };
        assert!(list.push(order(0, 7)));
        assert!(!list.push(order(8, 7)));
        list.said(&Weak::new(), word(0), RequestId(6));
        assert_eq!(left(&list), [(0, 7), (8, 7)], "7 is not said");
        list.said(&Weak::new(), word(0), RequestId(7));
        assert_eq!(left(&list), [(8, 7)], "the other word is not meant");
        list.said(&Weak::new(), word(8), RequestId(9));
        assert_eq!(left(&list), []);
        assert!(list.push(order(0, 8)), "it is waited for anew");
    }
}
