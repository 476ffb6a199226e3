//! The scheduler of a model with several groups of layers.
//!
//! Steps of a prompt: wait for pages -> look up -> load the found pages -> compute the rest in steps, each of which stores
//! the pages that it completes -> finish. A load is used as a whole: if it fails, the prompt begins again without one.

use std::collections::{HashMap, VecDeque};

use super::{
    Action, ComputeSteps, Prompt, RUNNING_PROMPTS_MAX, Served, WaitingPrompt, WorkKind, count,
};
use crate::hybrid::{HybridCache, LayerGroup, PageCopy, RunningSequence};
use kvferry_types::{
    Answer, Fingerprint, GroupId, LoadAnswer, LookupAnswer, PageList, PageRun, Part, Request,
    RequestId, SlotId, StoreAnswer,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    LookingUp,
    Poisoning,
    Loading,
    Computing,
    /// The pages of a step are being stored, and the next step waits for that.
    Storing,
    /// Everything is computed, and stores or the comparison of loaded pages have not ended.
    Ending,
    Finishing,
}

/// A request without an answer.
#[derive(Debug)]
enum OpenRequest {
    Lookup,
    Load,
    /// The pages that are copied, which are held until then.
    Store(Vec<PageCopy>),
    Finish,
}

/// A prompt beside its place in memory.
#[derive(Debug)]
struct PromptState {
    prompt: Prompt,
    served: Served,
    open_stores: u32,
    /// A load has failed: the prompt is computed.
    load_failed: bool,
}

#[derive(Debug)]
struct RunningPrompt {
    state: PromptState,
    sequence: RunningSequence,
    step: Step,
    /// Pages that the prompt may still take. Memory has room for those of all running prompts.
    outstanding: usize,
    /// The pages of the load.
    copies: Vec<PageCopy>,
    /// The last work on the pages before they are loaded, whose writes may still be in flight.
    overwritten: RequestId,
    verifying: bool,
}

/// See [`super::Scheduler::of_groups`].
#[derive(Debug)]
pub(super) struct GroupScheduler {
    cache: HybridCache,
    steps: ComputeSteps,
    /// Prompts whose load failed, and which begin again before those that wait.
    again: VecDeque<PromptState>,
    waiting: VecDeque<WaitingPrompt>,
    running: HashMap<SlotId, RunningPrompt>,
    requested: HashMap<RequestId, (SlotId, OpenRequest)>,
    next_id: u64,
}

impl GroupScheduler {
    pub(super) fn new(
        groups: Vec<LayerGroup>,
        device_pages: u32,
        cached_pages: u32,
        steps: ComputeSteps,
    ) -> Self {
        Self {
            cache: HybridCache::new(groups, device_pages, cached_pages),
            steps,
            again: VecDeque::new(),
            waiting: VecDeque::new(),
            running: HashMap::new(),
            requested: HashMap::new(),
            next_id: 0,
        }
    }

    pub(super) fn arrive(&mut self, prompt: Prompt, actions: &mut Vec<Action>) {
        let waiting = WaitingPrompt {
            prompt,
            for_pages: false,
        };
        self.waiting.push_back(waiting);
        self.admit(actions);
        if self.running.len() < RUNNING_PROMPTS_MAX
            && let Some(waiting) = self.waiting.back_mut()
        {
            waiting.for_pages = true;
        }
    }

    pub(super) fn open_prompts(&self) -> usize {
        self.running.len() + self.again.len() + self.waiting.len()
    }

    pub(super) fn held_pages(&self) -> u32 {
        count(self.cache.held_pages())
    }

    pub(super) fn content(&self, slot: SlotId, group: GroupId, page: u32) -> Option<Fingerprint> {
        let run = self.running.get(&slot)?;
        let hashes = &run.state.prompt.hashes;
        let page_tokens = u64::from(self.cache.page_tokens(group)?);
        let end = (u64::from(page) + 1) * page_tokens / u64::from(self.cache.hash_tokens());
        let last = usize::try_from(end).ok()?.checked_sub(1)?;
        (last < hashes.len()).then(|| hashes.fingerprint(last))
    }

    pub(super) fn draw_id(&mut self) -> RequestId {
        self.next_id += 1;
        RequestId(self.next_id)
    }

    pub(super) fn answered(
        &mut self,
        id: RequestId,
        answer: Option<Answer>,
        actions: &mut Vec<Action>,
    ) {
        let Some((slot, requested)) = self.requested.remove(&id) else {
            return;
        };
        if let OpenRequest::Store(copies) = &requested {
            self.cache.release(copies);
        }
        let running = self.running.get_mut(&slot).map(|run| &mut run.state);
        let mut again = self.again.iter_mut();
        let state = running.or_else(|| again.find(|state| state.prompt.slot == slot));
        let Some(state) = state else {
            return;
        };
        state.served.refusals += u32::from(answer.is_none());
        match requested {
            OpenRequest::Lookup => {
                let found = match answer {
                    Some(Answer::Lookup(found)) => found,
                    _ => LookupAnswer::default(),
                };
                self.found(slot, found, actions);
            }
            OpenRequest::Load => {
                let loaded = match answer {
                    Some(Answer::Load(LoadAnswer { pages })) => pages,
                    _ => 0,
                };
                self.loaded(slot, loaded, actions);
            }
            OpenRequest::Store(_) => {
                state.open_stores -= 1;
                let stored = matches!(
                    answer,
                    Some(Answer::Store(StoreAnswer {
                        refused_pages: 0,
                        ..
                    }))
                );
                state.served.store_refused |= !stored;
                let stored = state.open_stores == 0;
                let run = self.running.get(&slot);
                if stored && run.is_some_and(|run| run.step == Step::Storing) {
                    self.compute(slot, actions);
                }
                self.finish_if_done(slot, actions);
                self.admit(actions);
            }
            OpenRequest::Finish => self.end(slot, actions),
        }
    }

    pub(super) fn abandoned(&mut self, id: RequestId, actions: &mut Vec<Action>) {
        match self.requested.get(&id) {
            Some((_, OpenRequest::Lookup)) => self.answered(id, None, actions),
            Some((_, OpenRequest::Load | OpenRequest::Store(_))) => {
                actions.push(Action::Abandon { id });
            }
            Some((_, OpenRequest::Finish)) | None => {}
        }
    }

    pub(super) fn worked(&mut self, slot: SlotId, kind: WorkKind, actions: &mut Vec<Action>) {
        let Some(run) = self.running.get_mut(&slot) else {
            return;
        };
        match (kind, run.step) {
            (WorkKind::Poison, Step::Poisoning) => {
                run.step = Step::Loading;
                let parts = parts(&run.copies);
                let after = run.overwritten;
                let load = Request::Load { slot, parts, after };
                self.send(slot, load, OpenRequest::Load, actions);
            }
            (WorkKind::Compute, Step::Computing) => {
                self.cache.computed(&run.sequence);
                match self.steps.await_stores && run.state.open_stores > 0 {
                    true => run.step = Step::Storing,
                    false => self.compute(slot, actions),
                }
            }
            (WorkKind::Verify, _) => {
                run.verifying = false;
                self.cache.release(&run.copies);
                self.finish_if_done(slot, actions);
            }
            _ => {}
        }
    }

    /// Loads the pages of a hit, or computes all.
    fn found(&mut self, slot: SlotId, found: LookupAnswer, actions: &mut Vec<Action>) {
        let hit_pages = found.hit_pages;
        let hit_tokens = hit_pages.saturating_mul(self.cache.hash_tokens());
        let Some(run) = self.running.get_mut(&slot) else {
            return;
        };
        let copies = match hit_tokens > 0 && !run.state.load_failed {
            true => self.cache.load(&mut run.sequence, hit_tokens),
            false => None,
        };
        let Some(copies) = copies else {
            return self.compute(slot, actions);
        };
        run.state.served.hit_pages = hit_pages;
        run.state.served.below_pages = found.below_pages.total();
        run.outstanding = run.outstanding.saturating_sub(copies.len());
        run.step = Step::Poisoning;
        // A number among those of the requests, so that the load is ordered after this work.
        self.next_id += 1;
        run.overwritten = RequestId(self.next_id);
        actions.push(Action::Work {
            slot,
            kind: WorkKind::Poison,
            parts: parts(&copies),
            reads: Vec::new(),
            written_through: Some(run.overwritten),
        });
        run.copies = copies;
    }

    /// Compares the pages of a load and continues behind them, if all of them were loaded; else begins again.
    fn loaded(&mut self, slot: SlotId, pages: u32, actions: &mut Vec<Action>) {
        let Some(run) = self.running.get_mut(&slot) else {
            return;
        };
        if (pages as usize) < run.copies.len() {
            self.begin_again(slot, actions);
            return;
        }
        self.cache.loaded(&run.sequence);
        run.state.served.loaded_pages = run.state.served.hit_pages;
        run.verifying = true;
        // A window may leave a page behind before the comparison has read it.
        self.cache.hold(&run.copies);
        actions.push(Action::Work {
            slot,
            kind: WorkKind::Verify,
            parts: parts(&run.copies),
            reads: Vec::new(),
            written_through: None,
        });
        self.compute(slot, actions);
    }

    /// Starts a prompt from what the engine itself has, without a load.
    fn begin_again(&mut self, slot: SlotId, actions: &mut Vec<Action>) {
        if let Some(run) = self.running.remove(&slot) {
            self.cache.finish(run.sequence);
            let mut state = run.state;
            state.load_failed = true;
            // What the engine has itself is counted anew.
            state.served.hit_pages = 0;
            state.served.below_pages = 0;
            self.again.push_back(state);
            self.admit(actions);
        }
    }

    fn admit(&mut self, actions: &mut Vec<Action>) {
        while self.running.len() < RUNNING_PROMPTS_MAX {
            let prompt = match (self.again.front(), self.waiting.front()) {
                (Some(state), _) => &state.prompt,
                (None, Some(waiting)) => &waiting.prompt,
                (None, None) => return,
            };
            let tokens = tokens(prompt);
            let contents: Vec<Fingerprint> = prompt.contents().collect();
            let sequence = self.cache.begin(contents, tokens.saturating_sub(1));
            let need = self.cache.pages_for(tokens);
            let outstanding = need.saturating_sub(sequence.held_pages());
            let others = self.running.values().map(|run| run.outstanding);
            if others.sum::<usize>() + outstanding > self.cache.available_pages() {
                self.cache.finish(sequence);
                return;
            }
            let device_pages = sequence.computed_tokens() / self.cache.hash_tokens();
            let Some(mut state) = self.take_next() else {
                return;
            };
            if state.prompt.hashes.is_empty() {
                self.cache.finish(sequence);
                actions.push(Action::Done(state.served));
                continue;
            }
            state.served.device_pages = device_pages;
            let slot = state.prompt.slot;
            let lookup = Request::Lookup {
                slot,
                namespace: state.prompt.namespace.to_vec(),
                hashes: (*state.prompt.hashes).clone(),
                have_pages: device_pages,
                limit_pages: Some(tokens.saturating_sub(1) / self.cache.hash_tokens()),
            };
            let run = RunningPrompt {
                state,
                sequence,
                step: Step::LookingUp,
                outstanding,
                copies: Vec::new(),
                overwritten: RequestId(0),
                verifying: false,
            };
            self.running.insert(slot, run);
            self.send(slot, lookup, OpenRequest::Lookup, actions);
        }
    }

    /// The prompt that is admitted next.
    fn take_next(&mut self) -> Option<PromptState> {
        if let Some(state) = self.again.pop_front() {
            return Some(state);
        }
        let WaitingPrompt { prompt, for_pages } = self.waiting.pop_front()?;
        let served = Served {
            slot: prompt.slot,
            tokens: prompt.tokens,
            device_pages: 0,
            hit_pages: 0,
            below_pages: 0,
            loaded_pages: 0,
            refusals: 0,
            waited_for_pages: for_pages,
            store_refused: false,
        };
        Some(PromptState {
            prompt,
            served,
            open_stores: 0,
            load_failed: false,
        })
    }

    /// Computes the next step of a prompt, and stores the pages that it completes.
    fn compute(&mut self, slot: SlotId, actions: &mut Vec<Action>) {
        let Some(run) = self.running.get_mut(&slot) else {
            return;
        };
        let (from, tokens) = (run.sequence.computed_tokens(), tokens(&run.state.prompt));
        if from >= tokens {
            run.step = Step::Ending;
            return self.finish_if_done(slot, actions);
        }
        let end = step_end(&self.cache, self.steps.tokens.max(1), from, tokens);
        let reads = self.cache.reads(&run.sequence);
        let Some(step) = self.cache.advance(&mut run.sequence, end - from) else {
            // Admission leaves room for all running prompts, so that this does not happen.
            return self.begin_again(slot, actions);
        };
        run.step = Step::Computing;
        run.outstanding = run.outstanding.saturating_sub(step.taken);
        let id = match step.stores.is_empty() {
            true => self.draw_id(),
            false => {
                run.state.open_stores += 1;
                self.cache.hold(&step.stores);
                let store = Request::Store {
                    slot,
                    parts: parts(&step.stores),
                    more: None,
                    after: RequestId(0),
                };
                self.send(slot, store, OpenRequest::Store(step.stores), actions)
            }
        };
        actions.push(Action::Work {
            slot,
            kind: WorkKind::Compute,
            parts: parts(&step.writes),
            reads: parts(&reads),
            written_through: Some(id),
        });
    }

    fn finish_if_done(&mut self, slot: SlotId, actions: &mut Vec<Action>) {
        let Some(run) = self.running.get_mut(&slot) else {
            return;
        };
        if run.step == Step::Ending && run.state.open_stores == 0 && !run.verifying {
            run.step = Step::Finishing;
            self.send(slot, Request::Finish { slot }, OpenRequest::Finish, actions);
        }
    }

    fn end(&mut self, slot: SlotId, actions: &mut Vec<Action>) {
        let Some(run) = self.running.remove(&slot) else {
            return;
        };
        self.cache.finish(run.sequence);
        actions.push(Action::Done(run.state.served));
        self.admit(actions);
    }

    fn send(
        &mut self,
        slot: SlotId,
        request: Request,
        open: OpenRequest,
        actions: &mut Vec<Action>,
    ) -> RequestId {
        let id = self.draw_id();
        self.requested.insert(id, (slot, open));
        actions.push(Action::Send { id, request });
        id
    }
}

fn tokens(prompt: &Prompt) -> u32 {
    u32::try_from(prompt.tokens).unwrap_or(u32::MAX)
}

/// End of the step that begins at token `from`. With recurrent layers, the last step begins at a multiple of
/// [`HybridCache::block_tokens`], so that the state there is kept: the longest one that a later prompt can share.
fn step_end(cache: &HybridCache, step_tokens: u32, from: u32, tokens: u32) -> u32 {
    let end = (from / step_tokens + 1).saturating_mul(step_tokens);
    let last_block = tokens - tokens % cache.block_tokens();
    match end >= tokens {
        true if cache.has_states() && from < last_block => last_block,
        true => tokens,
        false => end,
    }
}

/// The pages as parts: consecutive pages of a group together.
fn parts(copies: &[PageCopy]) -> Vec<Part> {
    let mut parts: Vec<Part> = Vec::new();
    let mut next = None;
    for copy in copies {
        let run = PageRun {
            start: copy.device_page,
            count: 1,
        };
        match parts
            .last_mut()
            .filter(|_| next == Some((copy.group, copy.page)))
        {
            Some(part) => part.pages.push(run),
            None => {
                let mut pages = PageList::default();
                pages.push(run);
                parts.push(Part::new(copy.group, copy.page, pages));
            }
        }
        next = Some((copy.group, copy.page + 1));
    }
    parts
}
