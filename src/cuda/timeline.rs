//! Waits until an engine's device has written what a store is to read: the device says so by a word in its own memory.
//!
//! The word is read, again and again, and not waited for by a stream: what a stream waits for cannot be given up, and would
//! keep everything behind it when an engine dies before it has written.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::driver::{Context, DeviceSide, HostMemory, Stream, Submitted};
use super::engine_memory::DeviceMemories;
use super::error::CudaError;
use super::sabotage::{Bug, planted};
use super::window::{SmallCopyError, Staging};
use crate::memory::{CopyRange, TIMELINE_BYTES};
use crate::types::{Direction, EngineId, RequestId, Timeline};

/// Things that are waited for at one time.
pub const WAITS_MAX: usize = 1024;
/// Pause between two looks at a word.
pub(super) const LOOK_PAUSE: Duration = Duration::from_micros(50);

/// What an engine has announced: it is written once the word is at least `through`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Announced {
    /// Whose.
    pub engine: EngineId,
    /// Stores up to this request.
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

/// All that is waited for.
pub(super) struct Waits {
    stream: Arc<Stream>,
    seen: Arc<Staging>,
    waiting: VecDeque<WaitOrder>,
    look: Option<Look>,
    not_before: Instant,
}

/// A word that is being read.
struct Look {
    submitted: Submitted,
    memory: Weak<DeviceMemories>,
    word: Timeline,
}

impl Waits {
    pub(super) fn new(context: &Arc<Context>) -> Result<Self, SmallCopyError> {
        Ok(Self {
            stream: Stream::new(context)?,
            seen: Staging::new(context, TIMELINE_BYTES)?,
            waiting: VecDeque::new(),
            look: None,
            not_before: Instant::now(),
        })
    }

    /// One more thing to wait for; beyond [`WAITS_MAX`] the oldest gives way to it. Later ones say more than earlier ones.
    pub(super) fn push(&mut self, order: WaitOrder) {
        if self.waiting.len() >= WAITS_MAX {
            self.waiting.pop_front();
        }
        self.waiting.push_back(order);
    }

    pub(super) fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.look.is_none()
    }

    /// Waits for nothing more.
    pub(super) fn give_up(&mut self) {
        self.waiting.clear();
    }

    /// Leaves what is under way as it is.
    pub(super) fn forget(&mut self) {
        if let Some(look) = self.look.take() {
            look.submitted.forget();
        }
    }

    /// Looks at the word of what has waited longest, and adds what is written by now.
    pub(super) fn go_on(&mut self, written: &mut Vec<Announced>) -> Result<(), CudaError> {
        if let Some(look) = &mut self.look {
            if !look.submitted.poll()? {
                return Ok(());
            }
            self.look_ended(written);
        }
        self.waiting.retain(|order| order.memory.strong_count() > 0);
        let Some(order) = self.waiting.front() else {
            return Ok(());
        };
        let now = Instant::now();
        if now < self.not_before {
            return Ok(());
        }
        self.not_before = now + LOOK_PAUSE;
        let (Some(memory), word) = (order.memory.upgrade(), order.word) else {
            return Ok(());
        };
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
            Err(error) => tracing::warn!(%error, "the device's word cannot be read now"),
        }
        Ok(())
    }

    fn look_ended(&mut self, written: &mut Vec<Announced>) {
        let Some(Look { memory, word, .. }) = self.look.take() else {
            return;
        };
        let mut bytes = [0; TIMELINE_BYTES as usize];
        if let Err(error) = self.seen.buffer.read_into(0, &mut bytes) {
            tracing::error!(%error, "a word of our own cannot be read");
            return;
        }
        let seen = u64::from_le_bytes(bytes);
        self.waiting.retain(|order| {
            let same = order.memory.ptr_eq(&memory) && order.word == word;
            let reached =
                same && (order.announced.through.0 <= seen || planted(Bug::SemaphoreTooSoon));
            if reached {
                written.push(order.announced);
            }
            !reached
        });
    }
}
