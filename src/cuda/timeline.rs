//! Waits until an engine's device has written the pages that a store is to read: the device reports its progress by a
//! word in its own memory.
//!
//! The word is polled, and not waited for by a stream: such a wait cannot be cancelled, and would block everything
//! after it in the stream when an engine dies before it has written.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::device_memories::DeviceMemories;
use super::driver::{Context, DeviceSide, HostMemory, Stream, Submitted};
use super::error::CudaError;
use super::staged_io::{SmallCopyError, Staging};
use kvferry_memory::{CopyRange, TIMELINE_BYTES};
use kvferry_types::{Direction, EngineId, RequestId, Timeline};

/// Pause between two reads of a word: the initial value, and the maximum, up to which it doubles while nothing has
/// changed.
pub(super) const LOOK_PAUSE: Duration = Duration::from_micros(50);
const LOOK_PAUSE_MAX: Duration = Duration::from_micros(400);

/// Work that an engine has announced: all of it is written once the word is at least `through`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Announced {
    /// The engine that announced the work.
    pub engine: EngineId,
    /// Everything up to this number is written once the word has it.
    pub through: RequestId,
}

/// A request to wait for announced work. Dropped with the memory that contains the word.
#[derive(Debug)]
pub struct WaitOrder {
    /// The memory that contains the word.
    pub memory: Weak<DeviceMemories>,
    /// Position of the word in that memory.
    pub word: Timeline,
    /// The announced work.
    pub announced: Announced,
}

/// Work that is waited for, one entry per word, because a later announcement includes the earlier ones. The list is
/// therefore bounded by the memories that are open. An entry is removed when the word has reached its number, or when
/// the engine itself reports that the work is written.
#[derive(Debug, Default)]
pub(super) struct WaitList(Mutex<Vec<WaitOrder>>);

impl WaitList {
    /// Adds an entry, or raises the number of the word's entry. Returns true if the list was empty.
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

    /// Removes the entry of a word up to `through`, because the engine itself has reported that this is written. The
    /// device may never set the word to that number, and the word would be polled until a later number is reached.
    pub(super) fn announce(
        &self,
        memory: &Weak<DeviceMemories>,
        word: Timeline,
        through: RequestId,
    ) {
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

/// Polls the words of a [`WaitList`].
pub(super) struct Waits {
    stream: Arc<Stream>,
    seen: Arc<Staging>,
    list: Arc<WaitList>,
    look: Option<WordRead>,
    not_before: Instant,
    pause: Duration,
    /// The value that was read last, so that the same progress is not reported again.
    reported: u64,
    complained: bool,
}

/// A word that is being read.
struct WordRead {
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
            reported: 0,
            complained: false,
        })
    }

    pub(super) fn is_idle(&self) -> bool {
        self.look.is_none() && self.list.lock().is_empty()
    }

    /// Removes all entries.
    pub(super) fn clear(&mut self) {
        self.list.lock().clear();
    }

    /// Leaves a read in flight as it is, until the process ends.
    pub(super) fn leak(&mut self) {
        if let Some(look) = self.look.take() {
            look.submitted.leak();
        }
    }

    /// Polls the read in flight or starts the next one, and appends work that is written by now.
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
            // Round robin over the words.
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
                self.look = Some(WordRead {
                    submitted,
                    memory: weak,
                    word,
                });
            }
            Err(error) if error.is_fatal() => return Err(error),
            // Only one read has failed: another one follows.
            Err(error) if !self.complained => {
                tracing::warn!(%error, "the device's word cannot be read");
                self.complained = true;
            }
            Err(_) => {}
        }
        Ok(())
    }

    /// Evaluates a word that was read. Its value is the progress of the device, which may cover only a part of the
    /// announced work.
    fn look_ended(&mut self, written: &mut Vec<Announced>) {
        let Some(WordRead { memory, word, .. }) = self.look.take() else {
            return;
        };
        let mut bytes = [0; TIMELINE_BYTES as usize];
        if let Err(error) = self.seen.buffer.read_into(0, &mut bytes) {
            tracing::error!(%error, "a message of our own cannot be read");
            return;
        }
        let seen = u64::from_le_bytes(bytes);
        let reported = std::mem::replace(&mut self.reported, seen);
        self.list.lock().retain(|order| {
            if !order.is_of(&memory, word) {
                return true;
            }
            let Announced { engine, through } = order.announced;
            let through = RequestId(through.0.min(seen));
            let all = through == order.announced.through;
            if all || seen != reported {
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
    fn work_that_the_engine_reported_is_not_awaited() {
        let list = WaitList::default();
        let left = |list: &WaitList| -> Vec<(u64, u64)> {
            let waiting = list.lock();
            let each = waiting.iter();
            each.map(|it| (it.word.offset_bytes, it.announced.through.0))
                .collect()
        };
        assert!(list.push(order(0, 7)));
        assert!(!list.push(order(8, 7)));
        list.announce(&Weak::new(), word(0), RequestId(6));
        assert_eq!(left(&list), [(0, 7), (8, 7)], "7 is not said");
        list.announce(&Weak::new(), word(0), RequestId(7));
        assert_eq!(left(&list), [(8, 7)], "the other word is not meant");
        list.announce(&Weak::new(), word(8), RequestId(9));
        assert_eq!(left(&list), []);
        assert!(list.push(order(0, 8)), "it is waited for anew");
    }
}
