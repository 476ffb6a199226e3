//! What the leader knows of one engine: its running requests, and the answers it may ask for again.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use crate::core::anchor::Domain;
use crate::core::decision::RequestDigest;
use crate::core::pool::Pin;
use crate::core::refusal::Refusal;
use crate::types::Answer;
use crate::types::{PageHashes, RequestId, SlotId, Time};

/// Running requests of one engine, at most. About 20 MB at 0.3 KB each, beside their hashes, which
/// [`HASH_BYTES_PER_ENGINE_MAX`] bounds.
pub const SLOTS_MAX: usize = 65_536;
/// Bytes of page hashes that one engine's slots keep, at most.
pub const HASH_BYTES_PER_ENGINE_MAX: usize = 256 << 20;
/// Answers kept for retries, per engine; about 100 bytes each.
pub const ANSWERS_KEPT: usize = 4096;

/// Pages of a sequence that a lookup found in one block, held.
#[derive(Debug)]
pub struct HeldRun {
    /// Position of the block's first page in the sequence.
    pub position: u32,
    /// How many pages can be read.
    pub pages: u32,
    /// Arena page of the first one.
    pub arena_start: u32,
    /// Which block it is.
    pub block: u32,
    /// The hold.
    pub pin: Pin,
}

/// One running request.
#[derive(Debug)]
pub struct Slot {
    /// Where its pages are looked for.
    pub domain: Domain,
    /// Layout of the pages that it was looked up for.
    pub layout: [u8; 16],
    /// Hashes of its pages, from the first on.
    pub hashes: Arc<PageHashes>,
    /// What the last lookup found, until a load, the expiry or the end.
    pub held: Vec<HeldRun>,
    /// When the holds expire, while there are any.
    pub held_until: Time,
    /// What was decided about it.
    pub digest: RequestDigest,
}

/// What a request id stands for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Seen {
    /// Never seen: carry it out.
    New,
    /// Under way: the answer will come.
    UnderWay,
    /// Answered: say it again.
    Answered(Result<Answer, Refusal>),
    /// Too old to know.
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
    /// Requests that have not been answered.
    pub fn open(&self) -> usize {
        self.kept.len() - self.answered
    }

    /// True when this request was noted and is remembered.
    pub fn knows(&self, id: RequestId) -> bool {
        self.kept.contains_key(&id)
    }

    /// Notes a request and says what it is.
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

    /// Keeps an answer; the oldest ones beyond [`ANSWERS_KEPT`] are dropped.
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

/// One engine.
#[derive(Debug, Default)]
pub struct Session {
    /// Its running requests.
    pub slots: HashMap<SlotId, Slot>,
    /// Its answers.
    pub answers: Answers,
    /// The last requests that finished slots, as long as an older one could come behind them.
    finished: BTreeMap<RequestId, SlotId>,
    /// Bytes of page hashes in its slots.
    pub hash_bytes: usize,
    /// When it is forgotten, while its connection is broken.
    pub gone_at: Option<Time>,
    /// It is forgotten but for what is under way.
    pub gone: bool,
}

/// A slot that was opened for pages of this layout: what was looked up for another layout says nothing here.
pub fn slot_of(
    slots: &mut HashMap<SlotId, Slot>,
    id: SlotId,
    layout: [u8; 16],
) -> Result<&mut Slot, Refusal> {
    let slot = slots.get_mut(&id);
    slot.filter(|slot| slot.layout == layout)
        .ok_or(Refusal::UnknownSlot(id))
}

impl Session {
    /// This request finishes a slot. What was said before it, and comes behind it, has no effect.
    pub fn note_finish(&mut self, id: RequestId, slot: SlotId) {
        self.finished.insert(id, slot);
        if let Some(dropped) = self.answers.dropped {
            self.finished = self.finished.split_off(&dropped);
        }
    }

    /// This request was said before its slot was finished.
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
