//! Progressive filling: max-min fair rates, weighted and capped, of one group.

use super::{FlowId, Links, Stage, fixed};

/// Capacity of a link that is not assigned yet.
#[derive(Debug, Clone, Copy)]
struct LinkRoom {
    link: u32,
    /// Rate that is not assigned to frozen flows.
    rate: u128,
    /// Weight of the flows that are not frozen.
    weight: u64,
}

/// A flow of the group, not frozen yet.
#[derive(Debug, Clone, Copy)]
struct Rising {
    id: FlowId,
    weight: u32,
    cap: Option<u128>,
}

impl LinkRoom {
    /// Rate for each unit of weight at which the link is full.
    fn level(&self) -> Option<u128> {
        self.rate.checked_div(u128::from(self.weight))
    }
}

impl Rising {
    /// Rate for each unit of weight at which the flow reaches its cap.
    fn level(&self) -> u128 {
        self.cap
            .map_or(u128::MAX, |cap| cap / u128::from(self.weight))
    }
}

impl Links {
    /// Raises the rates of all flows of a group together, by weight. The flows of a full link and a flow that reaches
    /// its cap are frozen; the others rise until none is left. Rates are rounded down, so that no link exceeds its
    /// capacity.
    pub(super) fn fill(&mut self, name: u32) {
        let group = &self.groups[name as usize];
        let mut rooms: Vec<LinkRoom> = group
            .links
            .iter()
            .map(|link| LinkRoom {
                link: *link,
                rate: fixed::from_rate(self.links[*link as usize].capacity),
                weight: self.links[*link as usize].single_weight,
            })
            .collect();
        rooms.sort_unstable_by_key(|room| room.link);
        let mut rising = Vec::with_capacity(group.coupled.len());
        for id in &group.coupled {
            let Some(flow) = self.flows.get(id) else {
                continue;
            };
            rising.push(Rising {
                id: *id,
                weight: flow.weight,
                cap: flow.cap.map(fixed::from_rate),
            });
            for link in &flow.links {
                if let Ok(at) = rooms.binary_search_by_key(link, |room| room.link) {
                    rooms[at].weight += u64::from(flow.weight);
                }
            }
        }
        // The lowest cap comes last, so that it can be popped.
        rising.sort_unstable_by_key(|flow| (std::cmp::Reverse(flow.level()), flow.id));
        for room in &rooms {
            self.links[room.link as usize].level = 0;
        }
        loop {
            let full = rooms
                .iter()
                .enumerate()
                .filter_map(|(index, room)| room.level().map(|level| (level, index)))
                .min();
            let Some((level, index)) = full else { break };
            let capped = rising.last().copied().filter(|flow| flow.level() <= level);
            if let Some((flow, cap)) = capped.and_then(|flow| Some((flow, flow.cap?))) {
                rising.pop();
                self.freeze(flow, cap, &mut rooms);
                continue;
            }
            let link = &mut self.links[rooms[index].link as usize];
            link.level = level;
            rooms[index].rate = rooms[index]
                .rate
                .saturating_sub(level * u128::from(link.single_weight));
            rooms[index].weight -= link.single_weight;
            let full = rooms[index].link;
            let (stay, rise): (Vec<Rising>, Vec<Rising>) = rising.into_iter().partition(|flow| {
                let flow = self.flows.get(&flow.id);
                flow.is_some_and(|flow| flow.links.contains(&full))
            });
            for flow in stay {
                self.freeze(flow, level * u128::from(flow.weight), &mut rooms);
            }
            rising = rise;
        }
    }

    /// Fixes the rate of a flow and subtracts it from its links.
    fn freeze(&mut self, rising: Rising, at: u128, rooms: &mut [LinkRoom]) {
        let Some(flow) = self.flows.get_mut(&rising.id) else {
            return;
        };
        if let Stage::Coupled { rate, .. } = &mut flow.stage {
            *rate = at;
        }
        for link in &flow.links {
            if let Ok(index) = rooms.binary_search_by_key(link, |room| room.link) {
                rooms[index].rate = rooms[index].rate.saturating_sub(at);
                rooms[index].weight -= u64::from(rising.weight);
            }
        }
    }
}
