//! The scheduler of a model with one group of full attention, whose pages are the units of the hashes.
//!
//! Steps of a prompt: wait for pages -> look up -> load the found pages -> compute the rest at once -> store -> finish.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;

use super::{Action, Prompt, RUNNING_PROMPTS_MAX, Served, WaitingPrompt, WorkKind, count};
use crate::cache::PagedCache;
use kvferry_types::{
    Answer, Fingerprint, GroupId, LoadAnswer, PageList, Part, Request, RequestId, SlotId,
    StoreAnswer,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    LookingUp,
    Poisoning,
    Loading,
    Computing {
        stored: bool,
        computed: bool,
        verified: bool,
    },
    Finishing,
}

#[derive(Debug)]
struct RunningPrompt {
    prompt: Prompt,
    pages: Vec<u32>,
    step: Step,
    /// The last work on the pages before they are loaded, whose writes may still be in flight.
    overwritten: RequestId,
    served: Served,
}

/// See [`super::Scheduler`].
#[derive(Debug)]
pub(super) struct PrefixScheduler {
    cache: PagedCache,
    waiting: VecDeque<WaitingPrompt>,
    running: HashMap<SlotId, RunningPrompt>,
    requested: HashMap<RequestId, SlotId>,
    next_id: u64,
}

impl PrefixScheduler {
    /// Creates a scheduler with `device_pages` of memory, which keeps at most `cached_pages` of them cached when idle.
    pub(super) fn new(device_pages: u32, cached_pages: u32) -> Self {
        Self {
            cache: PagedCache::new(device_pages, cached_pages),
            waiting: VecDeque::new(),
            running: HashMap::new(),
            requested: HashMap::new(),
            next_id: 0,
        }
    }

    /// Adds a prompt, which waits until its pages fit. Prompts are admitted in the order of their arrival.
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

    /// Prompts that run or wait.
    pub(super) fn open_prompts(&self) -> usize {
        self.running.len() + self.waiting.len()
    }

    /// Pages that running prompts hold: 0 when none runs.
    pub(super) fn held_pages(&self) -> u32 {
        self.cache.held_pages()
    }

    pub(super) fn content(&self, slot: SlotId, group: GroupId, page: u32) -> Option<Fingerprint> {
        let run = self.running.get(&slot).filter(|_| group == GroupId(0))?;
        let hashes = &run.prompt.hashes;
        ((page as usize) < hashes.len()).then(|| hashes.fingerprint(page as usize))
    }

    /// Draws the id of a request that the caller makes itself, above those of all earlier requests.
    pub(super) fn draw_id(&mut self) -> RequestId {
        self.next_id += 1;
        RequestId(self.next_id)
    }

    /// Handles an answer of the leader. With `None` the request was refused, and the prompt continues without it.
    /// Answers to unknown requests have no effect.
    pub(super) fn answered(
        &mut self,
        id: RequestId,
        answer: Option<Answer>,
        actions: &mut Vec<Action>,
    ) {
        let Some(slot) = self.requested.remove(&id) else {
            return;
        };
        let Some(run) = self.running.get_mut(&slot) else {
            return;
        };
        run.served.refusals += u32::from(answer.is_none());
        match (run.step, answer) {
            (Step::LookingUp, Some(Answer::Lookup(found))) if found.hit_pages > 0 => {
                run.served.hit_pages = found.hit_pages;
                run.served.below_pages = found.below_pages.total();
                run.step = Step::Poisoning;
                let parts = vec![run.part(run.loading())];
                let kind = WorkKind::Poison;
                // A number among those of the requests, so that the load is ordered after this work.
                self.next_id += 1;
                run.overwritten = RequestId(self.next_id);
                actions.push(Action::Work {
                    slot,
                    kind,
                    parts,
                    reads: Vec::new(),
                    written_through: Some(run.overwritten),
                });
            }
            (Step::LookingUp, _) => self.compute(slot, actions),
            (Step::Loading, Some(Answer::Load(LoadAnswer { pages }))) => {
                run.served.loaded_pages = pages.min(run.served.hit_pages);
                let parts = vec![run.part(run.loaded())];
                let kind = WorkKind::Verify;
                actions.push(Action::Work {
                    slot,
                    kind,
                    parts,
                    reads: Vec::new(),
                    written_through: None,
                });
                self.compute(slot, actions);
            }
            (Step::Loading, _) => self.compute(slot, actions),
            (
                Step::Computing {
                    computed, verified, ..
                },
                answer,
            ) => {
                let refused = |answer| matches!(answer, Answer::Store(StoreAnswer { refused_pages, .. }) if refused_pages > 0);
                run.served.store_refused = answer.is_none_or(refused);
                run.step = Step::Computing {
                    stored: true,
                    computed,
                    verified,
                };
                self.finish_if_done(slot, actions);
            }
            (Step::Finishing, _) => self.end(slot, actions),
            (Step::Poisoning, _) => {}
        }
    }

    /// The leader has not answered this request in time. After a lookup the prompt continues without an answer. After a
    /// load or a store, the copies that may still run must be known to have ended first.
    pub(super) fn abandoned(&mut self, id: RequestId, actions: &mut Vec<Action>) {
        let run = self
            .requested
            .get(&id)
            .and_then(|slot| self.running.get(slot));
        match run.map(|run| run.step) {
            Some(Step::LookingUp) => self.answered(id, None, actions),
            Some(Step::Loading | Step::Computing { .. }) => actions.push(Action::Abandon { id }),
            Some(Step::Poisoning | Step::Finishing) | None => {}
        }
    }

    /// Handles the end of a piece of work on all ranks.
    pub(super) fn worked(&mut self, slot: SlotId, kind: WorkKind, actions: &mut Vec<Action>) {
        let Some(run) = self.running.get_mut(&slot) else {
            return;
        };
        match (kind, run.step) {
            (WorkKind::Poison, Step::Poisoning) => {
                run.step = Step::Loading;
                let parts = vec![run.part(run.loading())];
                let after = run.overwritten;
                self.send(slot, Request::Load { slot, parts, after }, actions);
            }
            (
                WorkKind::Compute,
                Step::Computing {
                    stored, verified, ..
                },
            ) => {
                run.step = Step::Computing {
                    stored,
                    computed: true,
                    verified,
                };
                for (page, content) in run.pages.iter().zip(run.prompt.contents()) {
                    self.cache.written(*page, content);
                }
                self.finish_if_done(slot, actions);
            }
            (
                WorkKind::Verify,
                Step::Computing {
                    stored, computed, ..
                },
            ) => {
                run.step = Step::Computing {
                    stored,
                    computed,
                    verified: true,
                };
                self.finish_if_done(slot, actions);
            }
            _ => {}
        }
    }

    fn admit(&mut self, actions: &mut Vec<Action>) {
        while let Some(WaitingPrompt { prompt, .. }) = self.waiting.front()
            && self.running.len() < RUNNING_PROMPTS_MAX
        {
            let mut pages = self.cache.hold_prefix(prompt.contents());
            let device_pages = count(pages.len());
            let Some(fresh) = self.cache.take(count(prompt.hashes.len()) - device_pages) else {
                self.cache.give_back(&pages);
                return;
            };
            pages.extend(fresh);
            let Some(WaitingPrompt { prompt, for_pages }) = self.waiting.pop_front() else {
                return;
            };
            let slot = prompt.slot;
            let served = Served {
                slot,
                tokens: prompt.tokens,
                device_pages,
                hit_pages: 0,
                below_pages: 0,
                loaded_pages: 0,
                refusals: 0,
                waited_for_pages: for_pages,
                store_refused: false,
            };
            if prompt.hashes.is_empty() {
                actions.push(Action::Done(served));
                continue;
            }
            let request = Request::Lookup {
                slot,
                namespace: prompt.namespace.to_vec(),
                hashes: (*prompt.hashes).clone(),
                have_pages: device_pages,
                limit_pages: None,
            };
            self.running.insert(
                slot,
                RunningPrompt {
                    prompt,
                    pages,
                    step: Step::LookingUp,
                    overwritten: RequestId(0),
                    served,
                },
            );
            self.send(slot, request, actions);
        }
    }

    /// Computes the pages that are neither cached nor loaded, and requests a store of the whole prompt.
    fn compute(&mut self, slot: SlotId, actions: &mut Vec<Action>) {
        let Some(run) = self.running.get_mut(&slot) else {
            return;
        };
        let all = 0..count(run.pages.len());
        let found = run.served.device_pages + run.served.loaded_pages;
        let verified = run.served.loaded_pages == 0;
        run.step = Step::Computing {
            stored: false,
            computed: false,
            verified,
        };
        let store = Request::Store {
            slot,
            parts: vec![run.part(all.clone())],
            more: None,
            after: RequestId(0),
        };
        let parts = vec![run.part(found..all.end)];
        let reads = vec![run.part(0..found)];
        let id = self.send(slot, store, actions);
        actions.push(Action::Work {
            slot,
            kind: WorkKind::Compute,
            parts,
            reads,
            written_through: Some(id),
        });
    }

    fn finish_if_done(&mut self, slot: SlotId, actions: &mut Vec<Action>) {
        let Some(run) = self.running.get_mut(&slot) else {
            return;
        };
        if let Step::Computing {
            stored: true,
            computed: true,
            verified: true,
        } = run.step
        {
            run.step = Step::Finishing;
            self.send(slot, Request::Finish { slot }, actions);
        }
    }

    fn end(&mut self, slot: SlotId, actions: &mut Vec<Action>) {
        let Some(run) = self.running.remove(&slot) else {
            return;
        };
        self.cache.give_back(&run.pages);
        actions.push(Action::Done(run.served));
        self.admit(actions);
    }

    fn send(&mut self, slot: SlotId, request: Request, actions: &mut Vec<Action>) -> RequestId {
        self.next_id += 1;
        let id = RequestId(self.next_id);
        self.requested.insert(id, slot);
        actions.push(Action::Send { id, request });
        id
    }
}

impl RunningPrompt {
    fn loading(&self) -> Range<u32> {
        self.served.device_pages..self.served.device_pages + self.served.hit_pages
    }

    fn loaded(&self) -> Range<u32> {
        self.served.device_pages..self.served.device_pages + self.served.loaded_pages
    }

    fn part(&self, positions: Range<u32>) -> Part {
        let pages = &self.pages[positions.start as usize..positions.end as usize];
        let pages: PageList = pages.iter().copied().collect();
        Part::new(GroupId(0), positions.start, pages)
    }
}
