//! The reference engine's scheduler: decides what an engine does with a prompt, without sockets, clocks or memory.
//!
//! Steps of a prompt: wait for pages -> look up -> load the found pages -> compute the rest -> store -> finish. The
//! driver of the scheduler sends its requests to a leader and its work to the ranks, and reports the outcomes.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use crate::cache::PagedCache;
use kvferry_types::{
    Answer, Fingerprint, GroupId, LoadAnswer, LookupAnswer, PageHashes, PageList, Part, Request,
    RequestId, SlotId, StoreAnswer,
};

/// Largest number of prompts that run at one time; further ones wait. Bounds the work and the requests in flight.
pub const RUNNING_PROMPTS_MAX: usize = 256;

/// Deadline of each request. Not a latency target: a lookup or load that is not answered by then is replaced by
/// computing.
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(20);

/// A prompt to serve.
#[derive(Debug, Clone)]
pub struct Prompt {
    /// The request's slot, unique per prompt.
    pub slot: SlotId,
    /// Namespace of the pages: salt, tenant, adapter.
    pub namespace: Arc<[u8]>,
    /// Length in tokens.
    pub tokens: u64,
    /// Hashes of its full pages.
    pub hashes: Arc<PageHashes>,
}

/// Work of the ranks on pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WorkKind {
    /// Overwrite with a pattern that no page has, so that a page that is not loaded is detected.
    Poison,
    /// Write the expected content, as a forward pass would.
    Compute,
    /// Compare with the expected content.
    Verify,
}

/// An action for the driver to carry out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Send a request to the leader.
    Send {
        /// The request's id; ids increase.
        id: RequestId,
        /// The request.
        request: Request,
    },
    /// Have every rank work on these positions of a prompt. [`Scheduler::worked`] must be called when all are done.
    Work {
        /// The prompt's slot.
        slot: SlotId,
        /// The work to do.
        kind: WorkKind,
        /// Positions in the sequence.
        positions: Range<u32>,
        /// When set, everything up to this request is written after this work, and ranks report that to their workers.
        written_through: Option<RequestId>,
    },
    /// Report to every rank's worker that this load or store is over. Call [`Scheduler::answered`] with `None` once
    /// each worker has confirmed that nothing is copied for the request, or is dead: the prompt needs its pages.
    Abandon {
        /// The load or store.
        id: RequestId,
    },
    /// The prompt is done.
    Done(Served),
    /// No action: left in place of an action that was taken out of its list.
    Idle,
}

/// The outcome of a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Served {
    /// The prompt's slot.
    pub slot: SlotId,
    /// Length of the prompt.
    pub tokens: u64,
    /// Full pages found in the engine's own cache.
    pub device_pages: u32,
    /// Further pages that were found in G2.
    pub hit_pages: u32,
    /// Pages that were loaded; fewer than `hit_pages` when a load failed.
    pub loaded_pages: u32,
    /// Requests that were refused or failed. The prompt is computed nevertheless.
    pub refusals: u32,
    /// The prompt could not start on arrival, because it or an earlier one needed pages that others held.
    pub waited_for_pages: bool,
    /// The store left pages out, or was refused entirely.
    pub store_refused: bool,
}

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
struct WaitingPrompt {
    prompt: Prompt,
    for_pages: bool,
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

/// The scheduler of one engine.
#[derive(Debug)]
pub struct Scheduler {
    cache: PagedCache,
    waiting: VecDeque<WaitingPrompt>,
    running: HashMap<SlotId, RunningPrompt>,
    requested: HashMap<RequestId, SlotId>,
    next_id: u64,
}

impl Scheduler {
    /// Creates a scheduler with `device_pages` of memory, which keeps at most `cached_pages` of them cached when idle.
    pub fn new(device_pages: u32, cached_pages: u32) -> Self {
        Self {
            cache: PagedCache::new(device_pages, cached_pages),
            waiting: VecDeque::new(),
            running: HashMap::new(),
            requested: HashMap::new(),
            next_id: 0,
        }
    }

    /// Adds a prompt, which waits until its pages fit. Prompts are admitted in the order of their arrival.
    pub fn arrive(&mut self, prompt: Prompt, actions: &mut Vec<Action>) {
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
    pub fn open_prompts(&self) -> usize {
        self.running.len() + self.waiting.len()
    }

    /// Pages that running prompts hold: 0 when none runs.
    pub fn held_pages(&self) -> u32 {
        self.cache.held_pages()
    }

    /// Hashes and device pages of a running prompt; `None` if it does not run.
    pub fn pages_of(&self, slot: SlotId) -> Option<(&PageHashes, &[u32])> {
        self.running
            .get(&slot)
            .map(|run| (&*run.prompt.hashes, run.pages.as_slice()))
    }

    /// Draws the id of a request that the caller makes itself, above those of all earlier requests.
    pub fn draw_id(&mut self) -> RequestId {
        self.next_id += 1;
        RequestId(self.next_id)
    }

    /// Handles an answer of the leader. With `None` the request was refused, and the prompt continues without it.
    /// Answers to unknown requests have no effect.
    pub fn answered(&mut self, id: RequestId, answer: Option<Answer>, actions: &mut Vec<Action>) {
        let Some(slot) = self.requested.remove(&id) else {
            return;
        };
        let Some(run) = self.running.get_mut(&slot) else {
            return;
        };
        run.served.refusals += u32::from(answer.is_none());
        match (run.step, answer) {
            (Step::LookingUp, Some(Answer::Lookup(LookupAnswer { hit_pages, .. })))
                if hit_pages > 0 =>
            {
                run.served.hit_pages = hit_pages;
                run.step = Step::Poisoning;
                let positions = run.loading();
                let kind = WorkKind::Poison;
                // A number among those of the requests, so that the load is ordered after this work.
                self.next_id += 1;
                run.overwritten = RequestId(self.next_id);
                actions.push(Action::Work {
                    slot,
                    kind,
                    positions,
                    written_through: Some(run.overwritten),
                });
            }
            (Step::LookingUp, _) => self.compute(slot, actions),
            (Step::Loading, Some(Answer::Load(LoadAnswer { pages }))) => {
                run.served.loaded_pages = pages.min(run.served.hit_pages);
                let positions = run.loaded();
                let kind = WorkKind::Verify;
                actions.push(Action::Work {
                    slot,
                    kind,
                    positions,
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
    pub fn abandoned(&mut self, id: RequestId, actions: &mut Vec<Action>) {
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
    pub fn worked(&mut self, slot: SlotId, kind: WorkKind, actions: &mut Vec<Action>) {
        let Some(run) = self.running.get_mut(&slot) else {
            return;
        };
        match (kind, run.step) {
            (WorkKind::Poison, Step::Poisoning) => {
                run.step = Step::Loading;
                let first_page = run.served.device_pages;
                let pages = run.loading();
                let (destination, after) = (run.page_list(pages), run.overwritten);
                self.send(
                    slot,
                    Request::Load {
                        slot,
                        parts: vec![Part::new(GroupId(0), first_page, destination)],
                        after,
                    },
                    actions,
                );
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
                device_pages,
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
        let source = run.page_list(all.clone());
        let store = Request::Store {
            slot,
            parts: vec![Part::new(GroupId(0), 0, source)],
            more: None,
        };
        let id = self.send(slot, store, actions);
        let (kind, positions) = (WorkKind::Compute, found..all.end);
        actions.push(Action::Work {
            slot,
            kind,
            positions,
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

impl Prompt {
    /// Names the contents of the pages in the engine's own cache. Equal tokens of two namespaces have different names.
    fn contents(&self) -> impl Iterator<Item = Fingerprint> {
        let mut owner = [0; 16];
        if !self.namespace.is_empty() {
            owner.copy_from_slice(&blake3::hash(&self.namespace).as_bytes()[..16]);
        }
        let owner = u128::from_be_bytes(owner);
        let pages = 0..self.hashes.len();
        pages.map(move |position| Fingerprint(self.hashes.fingerprint(position).0 ^ owner))
    }
}

impl RunningPrompt {
    fn loading(&self) -> Range<u32> {
        self.served.device_pages..self.served.device_pages + self.served.hit_pages
    }

    fn loaded(&self) -> Range<u32> {
        self.served.device_pages..self.served.device_pages + self.served.loaded_pages
    }

    fn page_list(&self, positions: Range<u32>) -> PageList {
        self.pages[positions.start as usize..positions.end as usize]
            .iter()
            .copied()
            .collect()
    }
}

fn count(pages: usize) -> u32 {
    u32::try_from(pages).unwrap_or(u32::MAX)
}
