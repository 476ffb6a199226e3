//! The leader's record of each engine: its running requests, and answers kept for retries.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Range;

use crate::Contradiction;
use crate::group::model::Sequence;
use crate::index::sequence_cursor::Trail;
use crate::leader::decision::{Decision, RequestDigest};
use crate::leader::refusal::Refusal;
use crate::pool::Pin;
use crate::pool::held::{HeldCount, HeldPages, HoldOwners};
use kvferry_types::Answer;
use kvferry_types::{
    EngineId, GroupId, HashesDiffer, PageHashes, PageRun, RequestId, SlotId, TierId, Time,
};
use smallvec::SmallVec;

/// Most running requests of one engine. About 20 MB at 0.3 KB each, not counting their hashes, which
/// [`HASH_BYTES_PER_ENGINE_MAX`] bounds.
pub const SLOTS_MAX: usize = 65_536;
/// Most bytes of page hashes that the slots of one engine keep.
pub const HASH_BYTES_PER_ENGINE_MAX: usize = 256 << 20;
/// Most bytes of page hashes in the slots of all engines together whose connections are broken: beyond that, those with the
/// most are forgotten at once. One engine that connects again finds its slots, many names in turn take no more, and an engine
/// with few hashes keeps them beside others with many.
pub const HASH_BYTES_LEFT_MAX: usize = HASH_BYTES_PER_ENGINE_MAX;
/// Answers kept for retries, per engine; about 100 bytes each.
pub const ANSWERS_KEPT: usize = 4096;

/// Pages of a sequence that a lookup found in one block and holds.
#[derive(Debug)]
pub struct PinnedRun {
    /// The group of the pages.
    pub group: GroupId,
    /// The tier of the block.
    pub tier: TierId,
    /// Position of the run's first page in the sequence.
    pub position: u32,
    /// Pages of the block before the run.
    pub offset: u32,
    /// Number of readable pages.
    pub pages: u32,
    /// Arena page of the run's first page.
    pub arena_start: u32,
    /// Index of the block in its pool.
    pub block: u32,
    /// The pin that keeps the pages from eviction.
    pub pin: Pin,
    /// Counts the pages for those that hold them.
    pub counted: HeldPages,
}

/// One running request.
#[derive(Debug)]
pub struct Slot {
    /// The lookup that opened it, or replaced its hashes.
    lookup: RequestId,
    sequence: Sequence,
    /// For whom the pages that it holds and loads count.
    owners: HoldOwners,
    /// Runs found by the last lookup, held until a load, the expiry of the hold or the end of the slot.
    held: Vec<PinnedRun>,
    /// When the holds expire. Meaningless while `held` is empty.
    held_until: Time,
    /// The first blocks of the pages of each prefix group in host memory, as the last store found them.
    trails: SmallVec<[(GroupId, Trail); 1]>,
    digest: RequestDigest,
}

impl Slot {
    /// The slot of a lookup. `digest` holds the earlier decisions about the request.
    pub fn new(lookup: RequestId, sequence: Sequence, digest: RequestDigest) -> Self {
        Self {
            lookup,
            sequence,
            owners: HoldOwners::default(),
            held: Vec::new(),
            held_until: Time::NEVER,
            trails: SmallVec::new(),
            digest,
        }
    }

    /// The sequence that was looked up.
    pub fn sequence(&self) -> &Sequence {
        &self.sequence
    }

    /// The same slot, whose pages count for these owners.
    pub fn with_owners(self, owners: HoldOwners) -> Self {
        Self { owners, ..self }
    }

    /// For whom the pages that it holds and loads count.
    pub fn owners(&self) -> &HoldOwners {
        &self.owners
    }

    /// The lookup that opened it, or replaced its hashes.
    pub fn lookup(&self) -> RequestId {
        self.lookup
    }

    /// The first blocks of a group's pages in host memory, as the last store of the group found them.
    pub fn trail(&self, group: GroupId) -> Option<&Trail> {
        let mut trails = self.trails.iter();
        trails
            .find(|(its, _)| *its == group)
            .map(|(_, trail)| trail)
    }

    /// The same, to be changed by a walk.
    pub fn trail_mut(&mut self, group: GroupId) -> &mut Trail {
        let known = self.trails.iter().position(|(its, _)| *its == group);
        let index = known.unwrap_or_else(|| {
            self.trails.push((group, Trail::default()));
            self.trails.len() - 1
        });
        &mut self.trails[index].1
    }

    /// Forgets all blocks of the trails, because their pool is closed.
    pub fn clear_trails(&mut self) {
        self.trails.clear();
    }

    /// Notes a decision about pages of a group.
    pub fn decide(&mut self, group: GroupId, decision: Decision) {
        let tokens = self.sequence.model().hash_tokens();
        self.digest.add(tokens, group, decision);
    }

    /// The digest of the decisions about the request.
    pub fn into_digest(self) -> RequestDigest {
        self.digest
    }

    /// The digest of the decisions about the request.
    pub fn digest(&self) -> &RequestDigest {
        &self.digest
    }

    /// Adds a run that a lookup found and pinned, which ends behind those of its group before it.
    pub fn hold(&mut self, run: PinnedRun) {
        debug_assert!(
            self.held.last().is_none_or(|last| {
                last.group != run.group || last.position + last.pages < run.position + run.pages
            }),
            "the ends of a group's runs ascend"
        );
        self.held.push(run);
    }

    /// Sets when the holds expire, if there are any. Returns whether there are.
    pub fn hold_until(&mut self, at: Time) -> bool {
        if !self.held.is_empty() {
            self.held_until = at;
        }
        !self.held.is_empty()
    }

    /// When the holds expire. Meaningless without holds.
    pub fn held_until(&self) -> Time {
        self.held_until
    }

    /// The runs that are held.
    pub fn held(&self) -> &[PinnedRun] {
        &self.held
    }

    /// Removes all holds; the caller releases their pins.
    pub fn take_held(&mut self) -> Vec<PinnedRun> {
        std::mem::take(&mut self.held)
    }

    /// Removes the holds on pages of groups before the position given for each; the caller releases their pins.
    pub fn take_held_before(&mut self, ends: &BTreeMap<GroupId, u32>) -> Vec<PinnedRun> {
        let (passed, kept) = self.held.drain(..).partition(|held| {
            let end = ends.get(&held.group);
            end.is_some_and(|end| held.position + held.pages <= *end)
        });
        self.held = kept;
        passed
    }

    /// The places of each group's runs among those that are held. The runs of a group lie together, and their ends ascend.
    pub fn held_by_group(&self) -> BTreeMap<GroupId, Range<usize>> {
        let mut places: BTreeMap<GroupId, Range<usize>> = BTreeMap::new();
        for (index, run) in self.held.iter().enumerate() {
            let of_group = places.entry(run.group).or_insert(index..index);
            of_group.end = index + 1;
        }
        places
    }

    /// The arena pages of positions `first..end` of a group, whose held runs lie at `places`. Each run comes with the index
    /// of the held run that it lies in; `None` when some page is not held.
    pub fn covering(
        &self,
        places: Range<usize>,
        first: u32,
        end: u32,
    ) -> Option<Vec<(usize, PageRun)>> {
        let runs = self.held.get(places.clone())?;
        let passed = runs.partition_point(|run| run.position + run.pages <= first);
        let mut sources = Vec::new();
        let mut position = first;
        for (run, index) in runs[passed..].iter().zip(places.start + passed..) {
            if position >= end {
                break;
            }
            if (run.position..run.position + run.pages).contains(&position) {
                let count = (run.position + run.pages).min(end) - position;
                let start = run.arena_start + (position - run.position);
                sources.push((index, PageRun { start, count }));
                position += count;
            }
        }
        (position == end && first < end).then_some(sources)
    }
}

/// State of a request id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RequestState {
    /// Not seen before: handle the request.
    New,
    /// In progress: the answer follows.
    UnderWay,
    /// Already answered: send this answer again.
    Answered(Result<Answer, Refusal>),
    /// Too old: its answer is no longer kept.
    Stale,
    /// Of an earlier process of the engine, and still in progress.
    StaleUnderWay,
}

/// Answers by request id, so that a retry has no second effect.
#[derive(Debug, Default)]
pub struct ReplyCache {
    kept: BTreeMap<RequestId, Option<Result<Answer, Refusal>>>,
    answered: usize,
    dropped: Option<RequestId>,
    /// The last request of an earlier process of the engine. All ids up to it are stale.
    of_earlier: Option<RequestId>,
}

impl ReplyCache {
    /// Number of requests that have not been answered.
    pub fn open(&self) -> usize {
        self.kept.len() - self.answered
    }

    /// The state of a request.
    fn state(&self, id: RequestId) -> RequestState {
        let kept = self.kept.get(&id);
        if self.of_earlier.is_some_and(|last| id <= last) {
            return match kept {
                Some(None) => RequestState::StaleUnderWay,
                _ => RequestState::Stale,
            };
        }
        match kept {
            Some(Some(answer)) => RequestState::Answered(answer.clone()),
            Some(None) => RequestState::UnderWay,
            None if self.dropped.is_some_and(|dropped| id <= dropped) => RequestState::Stale,
            None => RequestState::New,
        }
    }

    /// Notes a request and returns the state that it had before.
    pub fn begin(&mut self, id: RequestId) -> RequestState {
        let state = self.state(id);
        if state == RequestState::New {
            self.kept.insert(id, None);
        }
        state
    }

    /// Drops every answer, because another process sends requests from now on: ids up to the last one are stale. Requests
    /// in progress stay until they end.
    fn replaced(&mut self) {
        let last = self.kept.last_key_value().map(|(id, _)| *id);
        self.of_earlier = self.of_earlier.max(self.dropped).max(last);
        self.kept.retain(|_, answer| answer.is_none());
        self.answered = 0;
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
    slots: BTreeMap<SlotId, Slot>,
    /// Requests in progress and recent answers.
    answers: ReplyCache,
    /// Recent requests that finished slots. An entry is kept while a request with a lower id may still arrive.
    finished: BTreeMap<RequestId, SlotId>,
    /// Recent requests that cancelled the stores of a slot, or of all slots. Kept as long.
    cancelled: BTreeMap<RequestId, Option<SlotId>>,
    /// Bytes of page hashes in all slots.
    hash_bytes: usize,
    /// Pages of host memory that its lookups and loads hold.
    held: HeldCount,
    /// When the engine is forgotten. Set while its connection is broken.
    gone_at: Option<Time>,
    /// The engine is forgotten, except for its requests in progress.
    gone: bool,
}

impl Session {
    /// The engine has a connection. Returns when it would have been forgotten.
    pub fn opened(&mut self) -> Option<Time> {
        self.gone = false;
        self.gone_at.take()
    }

    /// The engine's connection broke, and the engine is to be forgotten at this time. Returns the earlier such time.
    pub fn closed(&mut self, forget_at: Time) -> Option<Time> {
        self.gone_at.replace(forget_at)
    }

    /// True if the engine is gone and its requests are answered.
    fn is_over(&self) -> bool {
        self.gone && self.answers.open() == 0
    }

    /// Another process sends requests from now on.
    pub fn replaced(&mut self) {
        self.answers.replaced();
        self.finished.clear();
        self.cancelled.clear();
    }

    /// True if a request with this id is in progress, or its answer is kept.
    pub fn knows_request(&self, id: RequestId) -> bool {
        !matches!(
            self.answers.state(id),
            RequestState::New | RequestState::Stale
        )
    }

    /// Notes a request and returns the state that it had before.
    pub fn begin(&mut self, id: RequestId) -> RequestState {
        self.answers.begin(id)
    }

    /// Pages of host memory that its lookups and loads hold.
    pub fn held(&self) -> &HeldCount {
        &self.held
    }

    /// Number of requests that have not been answered.
    pub fn open_requests(&self) -> usize {
        self.answers.open()
    }

    /// The ids of its slots, in ascending order.
    pub fn slot_ids(&self) -> Vec<SlotId> {
        self.slots.keys().copied().collect()
    }

    /// A slot, whatever the layout of its pages.
    pub fn any_slot(&mut self, id: SlotId) -> Option<&mut Slot> {
        self.slots.get_mut(&id)
    }

    /// A slot that was opened for pages of this layout. Results of a lookup for another layout do not apply, so such a
    /// slot counts as unknown.
    pub fn slot(&mut self, id: SlotId, layout: [u8; 16]) -> Result<&mut Slot, Refusal> {
        slot_of(&mut self.slots, id, layout)
    }

    /// Adds a slot, within the limits on slots and hash bytes.
    pub fn open_slot(&mut self, id: SlotId, slot: Slot) -> Result<&mut Slot, Refusal> {
        if self.slots.len() >= SLOTS_MAX {
            return Err(Refusal::Limit {
                limit: "running requests",
                max: SLOTS_MAX as u64,
            });
        }
        let bytes = self.hash_bytes + slot.sequence.hash_bytes();
        if bytes > HASH_BYTES_PER_ENGINE_MAX {
            return Err(TOO_MANY_HASHES);
        }
        self.hash_bytes = bytes;
        Ok(self.slots.entry(id).or_insert(slot))
    }

    /// Removes a slot. The caller releases its holds.
    pub fn take_slot(&mut self, id: SlotId) -> Option<Slot> {
        let slot = self.slots.remove(&id)?;
        self.hash_bytes -= slot.sequence.hash_bytes();
        Some(slot)
    }

    /// Appends hashes that a slot does not have yet; overlapping hashes must be equal.
    pub fn extend_hashes(
        &mut self,
        id: SlotId,
        layout: [u8; 16],
        more: Option<(u32, PageHashes)>,
    ) -> Result<&mut Slot, Refusal> {
        let slot = slot_of(&mut self.slots, id, layout)?;
        let Some((from, more)) = more else {
            return Ok(slot);
        };
        let before = slot.sequence.hash_bytes();
        let after = match from as usize <= slot.sequence.hashes().len() {
            true => before.max(from as usize * more.width() + more.as_bytes().len()),
            false => before,
        };
        if self.hash_bytes + (after - before) > HASH_BYTES_PER_ENGINE_MAX {
            return Err(TOO_MANY_HASHES);
        }
        let invalid = |field, value, remedy| {
            Err(Refusal::Invalid {
                field,
                value,
                remedy,
            })
        };
        match slot.sequence.hashes_mut().extend_from(from as usize, &more) {
            Ok(()) => {
                self.hash_bytes += slot.sequence.hash_bytes() - before;
                Ok(slot)
            }
            Err(HashesDiffer::Width) => invalid(
                "hash_bytes",
                more.width().to_string(),
                "use one width for all hashes of a slot",
            ),
            Err(HashesDiffer::Gap { known }) => invalid(
                "more_from",
                format!("{from}, and the slot knows {known} hashes"),
                "leave none out",
            ),
            Err(HashesDiffer::Content) => invalid(
                "more_hashes",
                format!("other hashes than the slot knows, from page {from} on"),
                "hashes of a slot do not change: look up again",
            ),
        }
    }

    /// The count of the bytes of page hashes.
    #[cfg(test)]
    pub fn hash_bytes_mut(&mut self) -> &mut usize {
        &mut self.hash_bytes
    }

    /// Notes that a request finishes a slot. Requests for this slot that have a lower id and arrive later have no
    /// effect.
    pub fn note_finish(&mut self, id: RequestId, slot: SlotId) {
        self.finished.insert(id, slot);
        self.drop_notes();
    }

    /// Notes that a request cancels the stores of a slot, or of all slots. Stores with a lower id that arrive later are
    /// not carried out.
    pub fn note_cancel(&mut self, id: RequestId, slot: Option<SlotId>) {
        self.cancelled.insert(id, slot);
        self.drop_notes();
    }

    /// Removes notes that concern only requests that are refused as stale.
    fn drop_notes(&mut self) {
        if let Some(dropped) = self.answers.dropped {
            self.finished = self.finished.split_off(&dropped);
            self.cancelled = self.cancelled.split_off(&dropped);
        }
    }

    /// True if this store was issued before a request that cancelled the stores of its slot.
    pub fn is_cancelled(&self, id: RequestId, slot: SlotId) -> bool {
        let mut later = self.cancelled.range(id..);
        later.any(|(_, cancelled)| cancelled.is_none_or(|cancelled| cancelled == slot))
    }

    /// True if the slot was opened by a lookup with a higher id.
    pub fn is_newer(&self, slot: SlotId, id: RequestId) -> bool {
        self.slots.get(&slot).is_some_and(|slot| id < slot.lookup)
    }

    /// True if this request was issued before its slot was finished, or before the lookup that the slot now has: it is
    /// about other pages than the slot's. A leader that has started since then knows of no finish, but has the later
    /// lookup.
    pub fn is_outdated(&self, id: RequestId, slot: SlotId) -> bool {
        let mut later = self.finished.range(id..);
        let finished = later.any(|(_, finished)| *finished == slot);
        finished || self.is_newer(slot, id)
    }

    /// Recounts the bytes of page hashes.
    fn check(&self) -> Result<(), Contradiction> {
        let slots = self.slots.values();
        let bytes: usize = slots.map(|slot| slot.sequence.hash_bytes()).sum();
        match bytes == self.hash_bytes {
            true => Ok(()),
            false => Err(format!(
                "{bytes} bytes of page hashes, the session counts {}",
                self.hash_bytes
            )
            .into()),
        }
    }
}

fn slot_of(
    slots: &mut BTreeMap<SlotId, Slot>,
    id: SlotId,
    layout: [u8; 16],
) -> Result<&mut Slot, Refusal> {
    let slot = slots.get_mut(&id);
    slot.filter(|slot| *slot.sequence.model().layout_fingerprint() == layout)
        .ok_or(Refusal::UnknownSlot(id))
}

const TOO_MANY_HASHES: Refusal = Refusal::Limit {
    limit: "bytes of page hashes",
    max: HASH_BYTES_PER_ENGINE_MAX as u64,
};

/// The sessions of all engines.
#[derive(Debug, Default)]
pub struct Sessions(BTreeMap<EngineId, Session>);

impl Sessions {
    /// The session of an engine; a new one if the engine has none.
    pub fn open(&mut self, engine: EngineId) -> &mut Session {
        self.0.entry(engine).or_default()
    }

    /// The session of an engine, if it has one.
    pub fn get(&self, engine: EngineId) -> Option<&Session> {
        self.0.get(&engine)
    }

    /// The session of an engine, if it has one.
    pub fn get_mut(&mut self, engine: EngineId) -> Option<&mut Session> {
        self.0.get_mut(&engine)
    }

    /// Keeps the answer to a request for retries. Returns true if the engine is gone and this was its last answer, so that
    /// its session is to be removed.
    pub fn answered(
        &mut self,
        engine: EngineId,
        id: RequestId,
        answer: &Result<Answer, Refusal>,
    ) -> bool {
        self.0.get_mut(&engine).is_some_and(|session| {
            session.answers.end(id, answer);
            session.is_over()
        })
    }

    /// The engines without connections that are to be forgotten now, and when they would have been, so that the hashes of
    /// the others take at most `most` bytes.
    pub fn left_beyond(&self, most: usize) -> Vec<(Time, EngineId)> {
        let left = |(engine, session): (&EngineId, &Session)| {
            let forget_at = session.gone_at.filter(|_| session.hash_bytes > 0)?;
            Some((Reverse(session.hash_bytes), forget_at, *engine))
        };
        let mut left: Vec<_> = self.0.iter().filter_map(left).collect();
        let mut bytes: usize = left.iter().map(|(its, ..)| its.0).sum();
        if bytes <= most {
            return Vec::new();
        }
        left.sort_unstable();
        let mut forgotten = Vec::new();
        for (its, forget_at, engine) in left {
            if bytes <= most {
                break;
            }
            bytes -= its.0;
            forgotten.push((forget_at, engine));
        }
        forgotten
    }

    /// Forgets an engine whose slots are finished. Its session stays until its requests in progress are answered,
    /// because a retry must not be refused while a worker reads or writes that engine's pages.
    pub fn remove(&mut self, engine: EngineId) {
        if let Some(session) = self.0.get_mut(&engine) {
            session.gone = true;
            if session.is_over() {
                self.0.remove(&engine);
            }
        }
    }

    /// Number of slots of all engines.
    pub fn slots(&self) -> usize {
        self.0.values().map(|session| session.slots.len()).sum()
    }

    /// The ids of all slots, in ascending order.
    pub fn slot_ids(&self) -> Vec<(EngineId, SlotId)> {
        let sessions = self.0.iter();
        sessions
            .flat_map(|(engine, session)| session.slots.keys().map(|slot| (*engine, *slot)))
            .collect()
    }

    /// Number of requests of all engines that have not been answered.
    pub fn open_requests(&self) -> usize {
        self.0.values().map(Session::open_requests).sum()
    }

    /// Number of pins that slots hold.
    pub fn pins(&self) -> usize {
        let slots = self.0.values().flat_map(|session| session.slots.values());
        slots.map(|slot| slot.held.len()).sum()
    }

    /// Pages that slots hold, once for each owner; and what the engines count as theirs.
    pub fn held_pages(&self) -> (u64, u64) {
        let slots = self.0.values().flat_map(|session| session.slots.values());
        let held = slots
            .flat_map(|slot| &slot.held)
            .map(|run| run.counted.counted());
        let engines = self.0.values().map(|session| session.held.pages());
        (held.sum(), engines.sum())
    }

    /// Recounts what the sessions count. `Err` names the first contradiction.
    pub fn check(&self) -> Result<(), Contradiction> {
        self.0.values().try_for_each(Session::check)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::group::model::Model;
    use crate::index::anchor::AnchorKey;
    use crate::pool::Pool;
    use kvferry_types::{GroupGeometry, Ratio};
    use std::sync::Arc;

    #[test]
    fn a_retry_is_recognised_while_under_way_and_after() {
        let mut answers = ReplyCache::default();
        let id = RequestId(7);
        assert_eq!(answers.begin(id), RequestState::New);
        assert_eq!(answers.begin(id), RequestState::UnderWay);
        answers.end(id, &Ok(Answer::Finish));
        assert_eq!(
            answers.begin(id),
            RequestState::Answered(Ok(Answer::Finish))
        );
    }

    #[test]
    fn ids_of_an_earlier_process_are_stale() {
        let mut answers = ReplyCache::default();
        for id in 0..3 {
            assert_eq!(answers.begin(RequestId(id)), RequestState::New);
        }
        answers.end(RequestId(2), &Ok(Answer::Finish));
        answers.replaced();
        assert_eq!(answers.open(), 2, "they end later");
        for id in [0, 1] {
            assert_eq!(answers.begin(RequestId(id)), RequestState::StaleUnderWay);
        }
        assert_eq!(answers.begin(RequestId(2)), RequestState::Stale);
        assert_eq!(answers.begin(RequestId(3)), RequestState::New);
        for id in [0, 1, 3] {
            answers.end(RequestId(id), &Ok(Answer::Finish));
        }
        assert_eq!(answers.begin(RequestId(1)), RequestState::Stale);
        assert_eq!(
            answers.begin(RequestId(3)),
            RequestState::Answered(Ok(Answer::Finish))
        );
        assert_eq!(answers.open(), 0);
    }

    #[test]
    fn answers_are_bounded_and_a_dropped_one_is_stale() {
        let mut answers = ReplyCache::default();
        for id in 0..=ANSWERS_KEPT as u64 {
            assert_eq!(answers.begin(RequestId(id)), RequestState::New);
            answers.end(RequestId(id), &Ok(Answer::Finish));
        }
        assert_eq!(answers.kept.len(), ANSWERS_KEPT);
        assert_eq!(answers.begin(RequestId(0)), RequestState::Stale);
        assert_eq!(
            answers.begin(RequestId(1)),
            RequestState::Answered(Ok(Answer::Finish))
        );
    }

    fn slot(pages: usize) -> Slot {
        let hashes = PageHashes::packed(16, vec![1; 16 * pages]).expect("16 bytes a page");
        let geometry = GroupGeometry {
            engine_page_tokens: 16,
            ..GroupGeometry::default()
        };
        let model = Arc::new(Model::new(geometry.into()).expect("one group"));
        let sequence = Sequence::new(model, &AnchorKey::new([1; 32]), b"a", hashes);
        Slot::new(RequestId(1), sequence, RequestDigest::new(true))
    }

    #[test]
    fn a_wrong_count_of_hash_bytes_is_detected() {
        let mut sessions = Sessions::default();
        let engine = EngineId([1; 16]);
        let session = sessions.open(engine);
        assert!(session.open_slot(SlotId(1), slot(3)).is_ok());
        assert_eq!(sessions.check(), Ok(()));
        *sessions.open(engine).hash_bytes_mut() += 1;
        let why = sessions.check().expect_err("48 bytes, not 49");
        let text = "48 bytes of page hashes, the session counts 49";
        assert_eq!(why.to_string(), text);
    }

    #[test]
    fn covered_pages_end_with_the_run_that_has_the_last_of_them() {
        let mut pool = Pool::new(64, Ratio::new(4).expect("in bounds"));
        let mut slot = slot(12);
        assert!(!slot.hold_until(Time(5)), "nothing is held");
        let sequence = slot.sequence().clone();
        let (domain, hashes) = sequence.of(GroupId(0));
        let (mut reserved, mut next) = (Vec::new(), 0);
        for at in [0, 4, 8] {
            let all = (&mut next, &mut reserved, &mut Vec::new());
            pool.reserve(domain, hashes, at, at + 4, None, all.0, all.1, all.2);
        }
        for position in [0, 4, 8] {
            let run = PinnedRun {
                group: GroupId(0),
                tier: TierId::Host,
                position,
                offset: 0,
                pages: 4,
                arena_start: 100 + position,
                block: 0,
                pin: pool.pin(0, 4),
                counted: HeldPages::default(),
            };
            slot.hold(run);
        }
        let run = |start, count| PageRun { start, count };
        let all = vec![(0, run(100, 4)), (1, run(104, 4))];
        assert_eq!(
            slot.covering(slot.held_by_group()[&GroupId(0)].clone(), 0, 8),
            Some(all),
            "no run without pages"
        );
        assert_eq!(
            slot.covering(slot.held_by_group()[&GroupId(0)].clone(), 5, 7),
            Some(vec![(1, run(105, 2))])
        );
        assert_eq!(
            slot.covering(slot.held_by_group()[&GroupId(0)].clone(), 9, 13),
            None
        );
        assert_eq!(
            slot.covering(slot.held_by_group()[&GroupId(0)].clone(), 3, 3),
            None
        );
        assert!(slot.hold_until(Time(7)));
        assert_eq!(slot.held_until(), Time(7));
        slot.take_held()
            .into_iter()
            .for_each(|held| pool.unpin(held.pin));
    }
}
