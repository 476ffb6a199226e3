//! The engine in virtual time: the reference engine's scheduler, a device that computes, and measurements.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use kvferry_types::{Answer, Part, Request, RequestId, SlotId, StoreAnswer, Time};
use kvferry_workload::scheduler::{Action, REQUEST_TIMEOUT, Scheduler, Served, WorkKind};

use super::agenda::Agenda;
use super::compute::TimedDevice;
use super::{Arrival, Measurements, TimedEvent, TimedSettings};

/// A prompt that is not over.
#[derive(Debug, Clone, Copy)]
struct OpenPrompt {
    tokens: u64,
    output_tokens: u64,
    arrived_at: Time,
    admitted_at: Time,
    /// When the prefill ends; `None` before it is queued.
    first_token_at: Option<Time>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RequestKind {
    Lookup,
    Load,
    Store,
    Finish,
}

#[derive(Debug)]
pub(super) struct TimedEngine {
    scheduler: Scheduler,
    device: TimedDevice,
    message_latency: Duration,
    decode_per_token: Duration,
    page_tokens: u64,
    open: HashMap<SlotId, OpenPrompt>,
    requests: HashMap<RequestId, (RequestKind, Time)>,
    /// Stores of prompts that are not computed yet.
    unwritten: BTreeSet<RequestId>,
    last_store: RequestId,
    first_arrival: Option<Time>,
    last_end: Time,
    actions: Vec<Action>,
    served: Vec<Served>,
    seen: Measurements,
}

impl TimedEngine {
    pub(super) fn new(scheduler: Scheduler, settings: &TimedSettings, page_tokens: u32) -> Self {
        Self {
            scheduler,
            device: TimedDevice::new(settings.prefill, settings.serial_prefill),
            message_latency: settings.message_latency,
            decode_per_token: settings.decode_per_token,
            page_tokens: u64::from(page_tokens),
            open: HashMap::new(),
            requests: HashMap::new(),
            unwritten: BTreeSet::new(),
            last_store: RequestId(0),
            first_arrival: None,
            last_end: Time(0),
            actions: Vec::new(),
            served: Vec::new(),
            seen: Measurements::default(),
        }
    }

    pub(super) fn open_prompts(&self) -> usize {
        self.scheduler.open_prompts()
    }

    pub(super) fn held_pages(&self) -> u32 {
        self.scheduler.held_pages()
    }

    pub(super) fn arrive(&mut self, now: Time, arrival: Arrival) {
        let open = OpenPrompt {
            tokens: arrival.prompt.tokens,
            output_tokens: arrival.output_tokens,
            arrived_at: now,
            admitted_at: now,
            first_token_at: None,
        };
        self.first_arrival.get_or_insert(now);
        self.open.insert(arrival.prompt.slot, open);
        self.scheduler.arrive(arrival.prompt, &mut self.actions);
    }

    pub(super) fn answered(&mut self, now: Time, id: RequestId, answer: Option<Answer>) {
        let Some((requested, at)) = self.requests.remove(&id) else {
            return;
        };
        let took = nanoseconds(at, now);
        match requested {
            RequestKind::Lookup => self.seen.lookup_ns.push(took),
            RequestKind::Load => self.seen.load_ns.push(took),
            RequestKind::Store
                if !matches!(
                    answer,
                    Some(Answer::Store(StoreAnswer {
                        failed_pages: 0,
                        ..
                    }))
                ) =>
            {
                self.seen.late_stores += 1;
            }
            RequestKind::Store | RequestKind::Finish => {}
        }
        self.scheduler.answered(id, answer, &mut self.actions);
    }

    /// Handles the end of a prompt's prefill. Returns the request up to which everything is written, when the prompt is
    /// stored.
    pub(super) fn computed(
        &mut self,
        now: Time,
        slot: SlotId,
        stores: Option<RequestId>,
    ) -> Option<RequestId> {
        if let Some(open) = self.open.get(&slot) {
            let first_token = nanoseconds(open.arrived_at, now);
            self.seen.first_token_ns.push(first_token);
        }
        self.last_end = self.last_end.max(now);
        match stores {
            Some(id) => self.unwritten.remove(&id),
            None => self.open.remove(&slot).is_some(),
        };
        self.scheduler
            .worked(slot, WorkKind::Compute, &mut self.actions);
        let before_next = |id: &RequestId| RequestId(id.0 - 1);
        stores.map(|_| self.unwritten.first().map_or(self.last_store, before_next))
    }

    pub(super) fn take_served(&mut self, served: &mut Vec<Served>) {
        served.append(&mut self.served);
    }

    /// Carries out the actions of the scheduler. Work on pages takes no time, except for the prefill.
    pub(super) fn act(&mut self, now: Time, agenda: &mut Agenda<TimedEvent>) {
        let mut actions = std::mem::take(&mut self.actions);
        let mut next = 0;
        while let Some(action) = actions.get_mut(next) {
            next += 1;
            match std::mem::replace(action, Action::Idle) {
                // The engine waits for the answer to every load and store: nothing is abandoned.
                Action::Idle | Action::Abandon { .. } => {}
                Action::Done(served) => self.done(now, served, agenda),
                Action::Work {
                    slot,
                    kind: WorkKind::Compute,
                    parts,
                    written_through,
                    ..
                } => {
                    let found = found_pages(&parts);
                    self.compute(now, slot, found, written_through, agenda);
                }
                Action::Work { slot, kind, .. } => self.scheduler.worked(slot, kind, &mut actions),
                Action::Send { id, mut request } => {
                    // Work that a load waits for takes no time here, so the load need not wait.
                    if let Request::Load { after, .. } = &mut request {
                        *after = RequestId(0);
                    }
                    // The store waits for the prefill: add the time of the prefill to its deadline.
                    let mut from = now;
                    if let Request::Store { .. } = request
                        && let Some(Action::Work { slot, parts, .. }) = actions.get(next)
                    {
                        let (slot, found) = (*slot, found_pages(parts));
                        next += 1;
                        from = self.compute(now, slot, found, Some(id), agenda);
                    }
                    self.send(now, from, id, request, agenda);
                }
            }
        }
        actions.clear();
        self.actions = actions;
    }

    fn done(&mut self, now: Time, served: Served, agenda: &mut Agenda<TimedEvent>) {
        self.last_end = self.last_end.max(now);
        if let Some(open) = self.open.get(&served.slot).copied() {
            if served.waited_for_pages {
                let waited = nanoseconds(open.arrived_at, open.admitted_at);
                self.seen.page_wait_ns.push(waited);
            }
            match open.first_token_at {
                Some(_) => _ = self.open.remove(&served.slot),
                // A prompt shorter than a page: the scheduler requests no work for it, but the device computes it.
                None => _ = self.compute(now, served.slot, 0, None, agenda),
            }
        }
        self.served.push(served);
    }

    /// Queues the prefill of a prompt without its first pages, which were found. Returns when the prefill ends.
    fn compute(
        &mut self,
        now: Time,
        slot: SlotId,
        found_pages: u32,
        stores: Option<RequestId>,
        agenda: &mut Agenda<TimedEvent>,
    ) -> Time {
        let Some(open) = self.open.get_mut(&slot) else {
            return now;
        };
        let found = u64::from(found_pages) * self.page_tokens;
        let end = self.device.compute(now, open.tokens.saturating_sub(found));
        open.first_token_at = Some(end);
        if let Some(id) = stores {
            self.unwritten.insert(id);
            self.last_store = self.last_store.max(id);
        }
        agenda.add(end, TimedEvent::Computed { slot, stores });
        end
    }

    /// Sends a request to the leader. Its deadline is [`REQUEST_TIMEOUT`] after `from`, or after the time of sending if
    /// that is later.
    fn send(
        &mut self,
        now: Time,
        from: Time,
        id: RequestId,
        request: Request,
        agenda: &mut Agenda<TimedEvent>,
    ) {
        let mut sent_at = now;
        let requested = match &request {
            Request::Lookup { slot, .. } => {
                if let Some(open) = self.open.get_mut(slot) {
                    open.admitted_at = now;
                }
                RequestKind::Lookup
            }
            Request::Load { .. } => RequestKind::Load,
            Request::Store { .. }
            | Request::Reset { .. }
            | Request::Flush
            | Request::CancelStores { .. } => RequestKind::Store,
            Request::Finish { slot } => {
                if let Some(open) = self.open.get(slot)
                    && let Some(first) = open.first_token_at
                {
                    let tokens = u32::try_from(open.output_tokens).unwrap_or(u32::MAX);
                    sent_at = now.max(first + self.decode_per_token.saturating_mul(tokens));
                }
                RequestKind::Finish
            }
        };
        self.requests.insert(id, (requested, sent_at));
        let deadline = from.max(sent_at) + REQUEST_TIMEOUT;
        agenda.add(
            sent_at + self.message_latency,
            TimedEvent::Requested {
                id,
                deadline,
                request,
            },
        );
    }

    /// The measurements until `now`, the end of the last event.
    pub(super) fn seen(&mut self, now: Time) -> Measurements {
        let mut seen = std::mem::take(&mut self.seen);
        let first = self.first_arrival.unwrap_or_default();
        seen.span = first.until(self.last_end);
        seen.ran = first.until(now);
        seen.prefill = self.device.busy();
        seen
    }
}

/// Pages before those that a prefill computes.
fn found_pages(parts: &[Part]) -> u32 {
    parts.first().map_or(0, |part| part.first_page)
}

fn nanoseconds(from: Time, to: Time) -> u64 {
    u64::try_from(from.until(to).as_nanos()).unwrap_or(u64::MAX)
}
