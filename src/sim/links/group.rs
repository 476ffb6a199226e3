//! Groups of links that are connected by flows over several of them, and the progress of time in a group.

use std::collections::BTreeSet;

use smallvec::{SmallVec, smallvec};

use kvferry_types::Time;

use super::{Flow, FlowId, Links, Stage, Utilisation, fixed};

#[derive(Debug)]
pub(super) struct BandwidthLink {
    pub(super) capacity: u64,
    /// Name of the group that the link belongs to.
    pub(super) group: u32,
    /// Work done for each unit of weight since the link was last idle.
    pub(super) virtual_work: u128,
    /// Work per nanosecond for each unit of weight; computed only in groups with coupled flows.
    pub(super) level: u128,
    /// Flows over this link alone, without a cap, ordered by the virtual work at which they end.
    pub(super) singles: BTreeSet<(u128, FlowId)>,
    /// Total weight of `singles`.
    pub(super) single_weight: u64,
    /// All other flows over this link.
    pub(super) coupled: Vec<FlowId>,
    pub(super) used: Utilisation,
    busy_since: Option<Time>,
}

/// Links that advance in time together: a single one, or all that flows over several links connect.
#[derive(Debug)]
pub(super) struct Group {
    pub(super) links: SmallVec<[u32; 2]>,
    /// Flows over several links, or with a cap.
    pub(super) coupled: Vec<FlowId>,
    /// Time with its fraction up to which virtual work and remaining work are accounted.
    pub(super) at: u128,
    /// Time with its fraction at which the group's next flow ends.
    pub(super) next: u128,
    /// The group's entry in the schedule: `next` in whole nanoseconds.
    pub(super) scheduled: Option<Time>,
    pub(super) stale: bool,
}

impl BandwidthLink {
    pub(super) fn new(capacity: u64, group: u32) -> Self {
        Self {
            capacity,
            group,
            virtual_work: 0,
            level: 0,
            singles: BTreeSet::new(),
            single_weight: 0,
            coupled: Vec::new(),
            used: Utilisation::default(),
            busy_since: None,
        }
    }

    pub(super) fn used_until(&self, now: Time) -> Utilisation {
        let busy = self
            .busy_since
            .map_or(0, |since| now.0.saturating_sub(since.0));
        Utilisation {
            bytes: self.used.bytes,
            busy_ns: self.used.busy_ns + busy,
        }
    }

    fn is_idle(&self) -> bool {
        self.singles.is_empty() && self.coupled.is_empty()
    }

    /// Accounts for a flow that has started or ended on this link.
    fn note_use(&mut self, now: Time) {
        match (self.is_idle(), self.busy_since) {
            (true, Some(since)) => {
                self.used.busy_ns += now.0.saturating_sub(since.0);
                self.busy_since = None;
                self.virtual_work = 0;
            }
            (false, None) => self.busy_since = Some(now),
            _ => {}
        }
    }
}

impl Group {
    pub(super) fn of_one(link: u32) -> Self {
        Self {
            links: smallvec![link],
            coupled: Vec::new(),
            at: 0,
            next: u128::MAX,
            scheduled: None,
            stale: false,
        }
    }
}

impl Links {
    /// Processes everything that is due until `now`: at equal times ends before joins.
    pub(super) fn run_to(&mut self, now: Time) {
        loop {
            self.settle();
            let ends = self.schedule.first().copied().filter(|(at, _)| *at <= now);
            let joins = self.joining.first().copied().filter(|(at, _)| *at <= now);
            match (ends, joins) {
                (Some((end, group)), join) if join.is_none_or(|(join, _)| end <= join) => {
                    self.now = self.now.max(end);
                    self.end_next(group);
                }
                (_, Some((join, _))) => {
                    self.now = self.now.max(join);
                    while let Some((_, id)) =
                        self.joining.first().copied().filter(|(at, _)| *at <= join)
                    {
                        self.joining.pop_first();
                        self.put_on(id);
                    }
                }
                _ => break,
            }
        }
        self.now = self.now.max(now);
    }

    /// Recomputes rates and next ends of the groups in which flows started or ended.
    pub(super) fn settle(&mut self) {
        while let Some(name) = self.stale.pop() {
            let group = &mut self.groups[name as usize];
            group.stale = false;
            if let Some(at) = group.scheduled.take() {
                self.schedule.remove(&(at, name));
            }
            if self.links[name as usize].group != name {
                continue;
            }
            if !self.groups[name as usize].coupled.is_empty() {
                self.fill(name);
            }
            let next = self.next_end(name);
            let group = &mut self.groups[name as usize];
            group.next = next;
            if next < u128::MAX {
                let at = fixed::to_time(next).max(self.now);
                group.scheduled = Some(at);
                self.schedule.insert((at, name));
            }
        }
    }

    /// Rate of a flow in bytes per second, with its fraction.
    pub(super) fn exact_rate(&self, id: FlowId) -> Option<u128> {
        let flow = self.flows.get(&id)?;
        let link = &self.links[flow.links[0] as usize];
        Some(match flow.stage {
            Stage::Joining(_) => 0,
            Stage::Coupled { rate, .. } => rate,
            Stage::Single { .. } if self.groups[link.group as usize].coupled.is_empty() => {
                fixed::from_rate(link.capacity) * u128::from(flow.weight)
                    / u128::from(link.single_weight)
            }
            Stage::Single { .. } => link.level * u128::from(flow.weight),
        })
    }

    /// Time at which the next flow of a group ends; `u128::MAX` when none does.
    fn next_end(&self, name: u32) -> u128 {
        let group = &self.groups[name as usize];
        let mut soonest = u128::MAX;
        for index in &group.links {
            let link = &self.links[*index as usize];
            let Some((tag, _)) = link.singles.first() else {
                continue;
            };
            let work = tag.saturating_sub(link.virtual_work);
            let span = if group.coupled.is_empty() {
                Some(fixed::shared_span(work, link.capacity, link.single_weight))
            } else {
                fixed::span(work, link.level)
            };
            soonest = soonest.min(span.unwrap_or(u128::MAX));
        }
        for id in &group.coupled {
            if let Some(Stage::Coupled { left, rate }) = self.flows.get(id).map(|flow| flow.stage) {
                soonest = soonest.min(fixed::span(left, rate).unwrap_or(u128::MAX));
            }
        }
        group.at.saturating_add(soonest)
    }

    /// Accounts for the work of a group until `at`.
    pub(super) fn pass(&mut self, name: u32, at: u128) {
        let group = &mut self.groups[name as usize];
        let span = at.saturating_sub(group.at);
        group.at = group.at.max(at);
        let coupled = !group.coupled.is_empty();
        for index in &group.links {
            let link = &mut self.links[*index as usize];
            if link.single_weight == 0 {
                continue;
            }
            let work = match coupled {
                true => fixed::work(link.level, span),
                false => fixed::shared_work(span, link.capacity, link.single_weight),
            };
            link.virtual_work = link.virtual_work.saturating_add(work);
        }
        for id in &group.coupled {
            if let Some(Stage::Coupled { left, rate }) =
                self.flows.get_mut(id).map(|flow| &mut flow.stage)
            {
                *left = left.saturating_sub(fixed::work(*rate, span));
            }
        }
    }

    /// Advances a group to its next end, and ends the flows that end there.
    fn end_next(&mut self, name: u32) {
        self.pass(name, self.groups[name as usize].next);
        let group = &self.groups[name as usize];
        let mut over: SmallVec<[FlowId; 4]> = SmallVec::new();
        for index in &group.links {
            let link = &self.links[*index as usize];
            let done = link
                .singles
                .iter()
                .take_while(|(tag, _)| *tag <= link.virtual_work);
            over.extend(done.map(|(_, id)| *id));
        }
        over.extend(group.coupled.iter().copied().filter(|id| {
            let stage = self.flows.get(id).map(|flow| flow.stage);
            matches!(stage, Some(Stage::Coupled { left: 0, .. }))
        }));
        for id in over {
            let flow = self
                .flows
                .get(&id)
                .map(|flow| (flow.links.clone(), flow.bytes));
            let Some((links, bytes)) = flow else { continue };
            self.remove(id);
            for link in links {
                self.links[link as usize].used.bytes += bytes;
            }
            self.ended.push((self.now, id));
        }
        self.expire(name);
    }

    /// Removes a flow that has joined its links, at the present time. Returns the work that it has left.
    pub(super) fn take_off(&mut self, id: FlowId) -> Option<u128> {
        let first = *self.flows.get(&id)?.links.first()?;
        let name = self.links[first as usize].group;
        self.pass(name, fixed::from_time(self.now));
        let flow = self.flows.get(&id)?;
        let left = match flow.stage {
            Stage::Joining(_) => return None,
            Stage::Single { tag } => {
                let rest = tag.saturating_sub(self.links[first as usize].virtual_work);
                rest.saturating_mul(u128::from(flow.weight))
            }
            Stage::Coupled { left, .. } => left,
        };
        self.remove(id);
        self.expire(name);
        Some(left)
    }

    /// Removes a flow. A group that it connected is split.
    fn remove(&mut self, id: FlowId) {
        let Some(flow) = self.flows.remove(&id) else {
            return;
        };
        let name = self.links[flow.links[0] as usize].group;
        for index in &flow.links {
            let link = &mut self.links[*index as usize];
            match flow.stage {
                Stage::Single { tag } => {
                    link.singles.remove(&(tag, id));
                    link.single_weight -= u64::from(flow.weight);
                }
                Stage::Coupled { .. } => link.coupled.retain(|other| *other != id),
                Stage::Joining(_) => {}
            }
            link.note_use(self.now);
        }
        if let Stage::Coupled { .. } = flow.stage {
            self.groups[name as usize]
                .coupled
                .retain(|other| *other != id);
            if flow.links.len() > 1 {
                self.split(name);
            }
        }
    }

    /// Puts a flow on its links at the present time.
    pub(super) fn put_on(&mut self, id: FlowId) {
        let Some(Flow {
            links,
            bytes,
            weight,
            cap,
            ..
        }) = self.flows.get(&id).cloned()
        else {
            return;
        };
        let at = fixed::from_time(self.now);
        let work = fixed::from_bytes(bytes);
        let stage = if links.len() == 1 && cap.is_none() {
            let name = self.links[links[0] as usize].group;
            self.pass(name, at);
            let link = &mut self.links[links[0] as usize];
            let tag = link
                .virtual_work
                .saturating_add(work.div_ceil(u128::from(weight)));
            link.singles.insert((tag, id));
            link.single_weight += u64::from(weight);
            self.expire(name);
            Stage::Single { tag }
        } else {
            let name = self.join(&links, at);
            for link in &links {
                self.links[*link as usize].coupled.push(id);
            }
            self.groups[name as usize].coupled.push(id);
            self.expire(name);
            Stage::Coupled {
                left: work,
                rate: 0,
            }
        };
        for link in &links {
            self.links[*link as usize].note_use(self.now);
        }
        if let Some(flow) = self.flows.get_mut(&id) {
            flow.stage = stage;
        }
    }

    /// Marks the rates and the next end of a group for recomputation.
    pub(super) fn expire(&mut self, name: u32) {
        let group = &mut self.groups[name as usize];
        if !group.stale {
            group.stale = true;
            self.stale.push(name);
        }
    }
}
