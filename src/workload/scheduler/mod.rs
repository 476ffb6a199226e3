//! The reference engine's scheduler: decides what an engine does with a prompt, without sockets, clocks or memory.
//!
//! The driver of the scheduler sends its requests to a leader and its work to the ranks, and reports the outcomes.

mod groups;
mod prefix;

use std::sync::Arc;
use std::time::Duration;

use crate::hybrid::LayerGroup;
use kvferry_types::{Answer, Fingerprint, GroupId, PageHashes, Part, Request, RequestId, SlotId};

use groups::GroupScheduler;
use prefix::PrefixScheduler;

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
    /// Hashes of its full pages; with several groups, of its full units of the hashes.
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
    /// Have every rank work on these pages of a prompt. [`Scheduler::worked`] must be called when all are done.
    Work {
        /// The prompt's slot.
        slot: SlotId,
        /// The work to do.
        kind: WorkKind,
        /// The whole pages to work on. [`Scheduler::content`] has what they hold.
        parts: Vec<Part>,
        /// The whole pages that a computation reads: they must hold their contents when it begins.
        reads: Vec<Part>,
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

/// The outcome of a prompt. Pages of a model with several groups are counted in units of the hashes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Served {
    /// The prompt's slot.
    pub slot: SlotId,
    /// Length of the prompt.
    pub tokens: u64,
    /// Full pages found in the engine's own cache.
    pub device_pages: u32,
    /// Further pages that were found in G2 and below.
    pub hit_pages: u32,
    /// Those of them that lay below G2.
    pub below_pages: u32,
    /// Pages that were loaded; fewer than `hit_pages` when a load failed.
    pub loaded_pages: u32,
    /// Requests that were refused or failed. The prompt is computed nevertheless.
    pub refusals: u32,
    /// The prompt could not start on arrival, because it or an earlier one needed pages that others held.
    pub waited_for_pages: bool,
    /// The store left pages out, or was refused entirely.
    pub store_refused: bool,
}

/// A prompt that waits for pages.
#[derive(Debug)]
struct WaitingPrompt {
    prompt: Prompt,
    for_pages: bool,
}

/// How an engine with several groups computes a prompt: in steps, each of which stores the pages that it completes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ComputeSteps {
    /// Steps end at multiples of this many tokens, at least 1. Recurrent layers keep a state where a step ends.
    pub tokens: u32,
    /// A step begins when the store of the one before it has ended, so that the order of events does not depend on the
    /// times of copies.
    pub await_stores: bool,
}

/// The scheduler of one engine.
#[derive(Debug)]
pub struct Scheduler(Kind);

#[derive(Debug)]
enum Kind {
    Prefix(Box<PrefixScheduler>),
    Groups(Box<GroupScheduler>),
}

/// Calls a method of the scheduler of either kind.
macro_rules! each {
    ($scheduler:expr, $inner:ident => $call:expr) => {
        match $scheduler {
            Kind::Prefix($inner) => $call,
            Kind::Groups($inner) => $call,
        }
    };
}

impl Scheduler {
    /// The scheduler of a model with one group of full attention, with `device_pages` of memory, of which it keeps at
    /// most `cached_pages` cached when idle.
    pub fn new(device_pages: u32, cached_pages: u32) -> Self {
        let scheduler = PrefixScheduler::new(device_pages, cached_pages);
        Self(Kind::Prefix(Box::new(scheduler)))
    }

    /// The scheduler of a model with several groups. Its memory has `device_pages` pages and, as page 0, the null page,
    /// which holds nothing. At most `cached_pages` stay cached when no prompt holds them.
    pub fn of_groups(
        groups: Vec<LayerGroup>,
        device_pages: u32,
        cached_pages: u32,
        steps: ComputeSteps,
    ) -> Self {
        let scheduler = GroupScheduler::new(groups, device_pages, cached_pages, steps);
        Self(Kind::Groups(Box::new(scheduler)))
    }

    /// Adds a prompt, which waits until its pages fit. Prompts are admitted in the order of their arrival.
    pub fn arrive(&mut self, prompt: Prompt, actions: &mut Vec<Action>) {
        each!(&mut self.0, its => its.arrive(prompt, actions));
    }

    /// Prompts that run or wait.
    pub fn open_prompts(&self) -> usize {
        each!(&self.0, its => its.open_prompts())
    }

    /// Pages that running prompts hold: 0 when none runs.
    pub fn held_pages(&self) -> u32 {
        each!(&self.0, its => its.held_pages())
    }

    /// The hash of a whole page of a running prompt, which covers all tokens up to the end of the page; `None` if the
    /// prompt does not run or has no such page.
    pub fn content(&self, slot: SlotId, group: GroupId, page: u32) -> Option<Fingerprint> {
        each!(&self.0, its => its.content(slot, group, page))
    }

    /// Draws the id of a request that the caller makes itself, above those of all earlier requests.
    pub fn draw_id(&mut self) -> RequestId {
        each!(&mut self.0, its => its.draw_id())
    }

    /// Handles an answer of the leader. With `None` the request was refused, and the prompt continues without it.
    /// Answers to unknown requests have no effect.
    pub fn answered(&mut self, id: RequestId, answer: Option<Answer>, actions: &mut Vec<Action>) {
        each!(&mut self.0, its => its.answered(id, answer, actions));
    }

    /// The leader has not answered this request in time. After a lookup the prompt continues without an answer. After a
    /// load or a store, the copies that may still run must be known to have ended first.
    pub fn abandoned(&mut self, id: RequestId, actions: &mut Vec<Action>) {
        each!(&mut self.0, its => its.abandoned(id, actions));
    }

    /// Handles the end of a piece of work on all ranks.
    pub fn worked(&mut self, slot: SlotId, kind: WorkKind, actions: &mut Vec<Action>) {
        each!(&mut self.0, its => its.worked(slot, kind, actions));
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

fn count(pages: usize) -> u32 {
    u32::try_from(pages).unwrap_or(u32::MAX)
}
