//! The checker's model of the cost gate: what lookups offered, and when pages may be declined.

use std::collections::{BTreeMap, BTreeSet};

use kvferry_types::{
    Answer, EndedCopy, EngineId, Request, RequestId, SlotId, TierId, Transfer, TransferId,
};

/// A request that names pages of a slot.
#[derive(Debug, Clone, Copy)]
enum Asked {
    /// The slot, the pages that the engine has, and the number of hashes.
    Lookup(SlotId, u32, u32),
    /// The first page of the load, and the end of what the last lookup offered then.
    Load(u32, u32),
}

/// What lookups of one leader offered.
#[derive(Debug, Default)]
pub(super) struct GateModel {
    asked: BTreeMap<(EngineId, RequestId), Asked>,
    /// End of what the last lookup of a slot offered.
    offered: BTreeMap<(EngineId, SlotId), u32>,
    /// Moves to host memory that were ordered.
    up: BTreeSet<TransferId>,
    /// One of them has moved bytes: the leader knows the rate of an edge.
    measured: bool,
}

impl GateModel {
    /// Notes a request that reaches the leader. `plain`: the engine's model has one group, whose pages are the unit of the
    /// hashes.
    pub(super) fn arrived(
        &mut self,
        (engine, id): (EngineId, RequestId),
        request: &Request,
        plain: bool,
    ) {
        let asked = match request {
            Request::Lookup {
                slot,
                hashes,
                have_pages,
                ..
            } => {
                let hashes = u32::try_from(hashes.len()).unwrap_or(u32::MAX);
                Asked::Lookup(*slot, *have_pages, hashes)
            }
            Request::Load { slot, parts, .. } if plain && parts.len() == 1 => {
                let first = parts.first().map_or(0, |part| part.first_page);
                let offered = self.offered.get(&(engine, *slot));
                Asked::Load(first, offered.copied().unwrap_or(0))
            }
            _ => return,
        };
        self.asked.entry((engine, id)).or_insert(asked);
    }

    /// Notes an ordered transfer.
    pub(super) fn ordered(&mut self, copy: &Transfer) {
        if copy.edge.to == TierId::Host && copy.edge.from > TierId::Host {
            self.up.insert(copy.id);
        }
    }

    /// Notes the end of a transfer on a worker.
    pub(super) fn ended(&mut self, ended: &EndedCopy) {
        self.measured |= self.up.contains(&ended.transfer) && ended.bytes > 0 && ended.copy_us > 0;
    }

    /// Checks an answer. `on`: the leader has a prefill rate.
    pub(super) fn answered(
        &mut self,
        (engine, id): (EngineId, RequestId),
        answer: &Answer,
        on: bool,
    ) -> Option<String> {
        match (self.asked.get(&(engine, id)).copied()?, answer) {
            (Asked::Lookup(slot, device, hashes), Answer::Lookup(answer)) => {
                let end = device + answer.hit_pages;
                self.offered.insert((engine, slot), end);
                let declined = answer.declined_pages;
                if declined > 0 && !on {
                    return Some(format!("{id} declines {declined} pages without a gate"));
                }
                if declined > 0 && !self.measured {
                    return Some(format!(
                        "{id} declines {declined} pages, and no rate was measured"
                    ));
                }
                (end + declined > hashes).then(|| {
                    format!("{id} offers the pages to {end} and declines {declined} of {hashes}")
                })
            }
            (Asked::Load(first, offered), Answer::Load(answer)) if answer.pages > 0 => {
                let end = first + answer.pages;
                (end > offered)
                    .then(|| format!("{id} loads the pages to {end}, {offered} were offered"))
            }
            _ => None,
        }
    }
}
