//! The leader's record of one engine: its running requests, and answers kept for retries.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::anchor::Domain;
use crate::decision::RequestDigest;
use crate::pool::Pin;
use crate::refusal::Refusal;
use kvferry_types::Answer;
use kvferry_types::{PageHashes, RequestId, SlotId, Time};

/// Most running requests of one engine. About 20 MB at 0.3 KB each, not counting their hashes, which
/// [`HASH_BYTES_PER_ENGINE_MAX`] bounds.
pub const SLOTS_MAX: usize = 65_536;
/// Most bytes of page hashes that the slots of one engine keep.
pub const HASH_BYTES_PER_ENGINE_MAX: usize = 256 << 20;
/// Answers kept for retries, per engine; about 100 bytes each.
pub const ANSWERS_KEPT: usize = 4096;

/// Pages of a sequence that a lookup found in one block and holds.
#[derive(Debug)]
pub struct HeldRun {
    /// Position of the block's first page in the sequence.
    pub position: u32,
    /// Number of readable pages.
    pub pages: u32,
    /// Arena page of the run's first page.
    pub arena_start: u32,
    /// Index of the block in its pool.
    pub block: u32,
    /// The pin that keeps the pages from eviction.
    pub pin: Pin,
}

/// One running request.
#[derive(Debug)]
pub struct Slot {
    /// The domain in which its pages are looked up.
    pub domain: Domain,
    /// Layout of the pages that the slot was opened for.
    pub layout: [u8; 16],
    /// Hashes of its pages, starting with the first page.
    pub hashes: Arc<PageHashes>,
    /// Runs found by the last lookup, held until a load, the expiry of the hold or the end of the slot.
    pub held: Vec<HeldRun>,
    /// When the holds expire. Meaningless while `held` is empty.
    pub held_until: Time,
    /// Digest of the decisions about this request.
    pub digest: RequestDigest,
}

/// State of a request id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Seen {
    /// Not seen before: handle the request.
    New,
    /// In progress: the answer follows.
    UnderWay,
    /// Already answered: send this answer again.
    Answered(Result<Answer, Refusal>),
    /// Too old: its answer is no longer kept.
    Stale,
}

/// Answers by request id, so that a retry has no second effect.
#[derive(Debug, Default)]
pub struct Answers {
    kept: BTreeMap<RequestId, Option<Result<Answer, Refusal>>>,
    answered: usize,
    dropped: Option<RequestId>,
}

impl Answers {
    /// Number of requests that have not been answered.
    pub fn open(&self) -> usize {
        self.kept.len() - self.answered
    }

    /// Notes a request and returns the state that it had before.
    pub fn begin(&mut self, id: RequestId) -> Seen {
        match self.kept.get(&id) {
            Some(Some(answer)) => Seen::Answered(answer.clone()),
            Some(None) => Seen::UnderWay,
            None if self.dropped.is_some_and(|dropped| id <= dropped) => Seen::Stale,
            None => {
                self.kept.insert(id, None);
                Seen::New
            }
        }
    }

    /// Keeps an answer for retries and drops the oldest ones beyond [`ANSWERS_KEPT`].
    pub fn end(&mut self, id: RequestId, answer: &Result<Answer, Refusal>) {
        if let Some(kept) = self.kept.get_mut(&id) {
            *kept = Some(answer.clone());
            self.answered += 1;
        }
        while self.answered > ANSWERS_KEPT {
            let oldest = self.kept.iter().find(|(_, answer)| answer.is_some());
            let Some(oldest) = oldest.map(|(id, _)| *id) else {
                break;
            };
            self.kept.remove(&oldest);
            self.answered -= 1;
            self.dropped = self.dropped.max(Some(oldest));
        }
    }
}

/// The state of one engine.
#[derive(Debug, Default)]
pub struct Session {
    /// Running requests.
    pub slots: BTreeMap<SlotId, Slot>,
    /// Requests in progress and recent answers.
    pub answers: Answers,
    /// Recent requests that finished slots. An entry is kept while a request with a lower id may still arrive.
    finished: BTreeMap<RequestId, SlotId>,
    /// Bytes of page hashes in all slots.
    pub hash_bytes: usize,
    /// When the engine is forgotten. Set while its connection is broken.
    pub gone_at: Option<Time>,
    /// The engine is forgotten, except for its requests in progress.
    pub gone: bool,
}

/// Returns a slot that was opened for pages of this layout. Results of a lookup for another layout do not apply, so
/// such a slot counts as unknown.
pub fn slot_of(
    slots: &mut BTreeMap<SlotId, Slot>,
    id: SlotId,
    layout: [u8; 16],
) -> Result<&mut Slot, Refusal> {
    let slot = slots.get_mut(&id);
    slot.filter(|slot| slot.layout == layout)
        .ok_or(Refusal::UnknownSlot(id))
}

impl Session {
    /// Notes that a request finishes a slot. Requests for this slot that have a lower id and arrive later have no
    /// effect.
    pub fn note_finish(&mut self, id: RequestId, slot: SlotId) {
        self.finished.insert(id, slot);
        if let Some(dropped) = self.answers.dropped {
            self.finished = self.finished.split_off(&dropped);
        }
    }

    /// True if this request was issued before its slot was finished.
    pub fn is_finished(&self, id: RequestId, slot: SlotId) -> bool {
        self.finished
            .range(id..)
            .any(|(_, finished)| *finished == slot)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_retry_is_recognised_while_under_way_and_after() {
        let mut answers = Answers::default();
        let id = RequestId(7);
        assert_eq!(answers.begin(id), Seen::New);
        assert_eq!(answers.begin(id), Seen::UnderWay);
        answers.end(id, &Ok(Answer::Finish));
        assert_eq!(answers.begin(id), Seen::Answered(Ok(Answer::Finish)));
    }

    #[test]
    fn answers_are_bounded_and_what_was_dropped_is_stale() {
        let mut answers = Answers::default();
        for id in 0..=ANSWERS_KEPT as u64 {
            assert_eq!(answers.begin(RequestId(id)), Seen::New);
            answers.end(RequestId(id), &Ok(Answer::Finish));
        }
        assert_eq!(answers.kept.len(), ANSWERS_KEPT);
        assert_eq!(answers.begin(RequestId(0)), Seen::Stale);
        assert_eq!(
            answers.begin(RequestId(1)),
            Seen::Answered(Ok(Answer::Finish))
        );
    }
}
