//! Groups are merged when a flow connects them, and split when it ends.

use std::collections::BTreeSet;

use smallvec::{SmallVec, smallvec};

use super::{FlowId, Links};

impl Links {
    /// Merges the groups of these links, accounted until `at`. Returns the name of the merged group.
    pub(super) fn join(&mut self, links: &[u32], at: u128) -> u32 {
        let mut names: SmallVec<[u32; 8]> = links
            .iter()
            .map(|link| self.links[*link as usize].group)
            .collect();
        names.sort_unstable();
        names.dedup();
        // A group may be ahead of the present time, because ends are rounded to whole nanoseconds.
        let at = names
            .iter()
            .map(|name| self.groups[*name as usize].at)
            .fold(at, u128::max);
        for name in &names {
            self.pass(*name, at);
        }
        let first = names[0];
        for name in &names[1..] {
            let other = &mut self.groups[*name as usize];
            let (links, coupled) = (
                std::mem::take(&mut other.links),
                std::mem::take(&mut other.coupled),
            );
            for link in &links {
                self.links[*link as usize].group = first;
            }
            self.groups[first as usize].links.extend(links);
            self.groups[first as usize].coupled.extend(coupled);
            self.expire(*name);
        }
        first
    }

    /// Makes a separate group of each part that is still connected.
    pub(super) fn split(&mut self, name: u32) {
        let group = &mut self.groups[name as usize];
        let at = group.at;
        let mut links = std::mem::take(&mut group.links);
        links.sort_unstable();
        group.coupled.clear();
        let mut placed: BTreeSet<u32> = BTreeSet::new();
        for first in links {
            if !placed.insert(first) {
                continue;
            }
            let mut part: SmallVec<[u32; 2]> = smallvec![first];
            let mut flows: BTreeSet<FlowId> = BTreeSet::new();
            let mut next = 0;
            while let Some(link) = part.get(next).copied() {
                next += 1;
                for id in &self.links[link as usize].coupled {
                    if flows.insert(*id)
                        && let Some(flow) = self.flows.get(id)
                    {
                        part.extend(
                            flow.links
                                .iter()
                                .copied()
                                .filter(|link| placed.insert(*link)),
                        );
                    }
                }
            }
            for link in &part {
                self.links[*link as usize].group = first;
            }
            let group = &mut self.groups[first as usize];
            group.at = at;
            group.links = part;
            group.coupled = flows.into_iter().collect();
            self.expire(first);
        }
    }
}
