//! Events of the pages in kvferry alone: for engines that publish none, and of which the sequences are known.

use hashbrown::HashMap;
use hashbrown::hash_map::Entry;
use rmpv::Value;

use crate::batch::{Event, Fields, PAGES_OF_EVENT_MAX, Removed, Stored, group_field};
use crate::feed::Change;
use crate::page::{PageKey, Tier};

/// One group of layers.
#[derive(Debug)]
struct Group {
    /// Tokens of a page.
    page_tokens: u64,
    /// The page before each described one; a page that begins a sequence has its own number.
    before: HashMap<u64, u64>,
}

/// Turns changes of the tiers into events, in their order: a page is announced when the first place of a tier has it, and
/// removed when the last one has lost it. Traces have no tokens, and neither have the events.
///
/// A page takes at most 39 bytes once it is described, and 57 in each tier that has it.
#[derive(Debug)]
pub struct TierEvents {
    groups: Vec<Group>,
    /// Places of each tier that hold a page.
    places: HashMap<(Tier, u32, PageKey), u32>,
}

impl TierEvents {
    /// Knows no page. `page_tokens`: tokens of a page of each group of layers. Pages of other groups have no events.
    pub fn new(page_tokens: impl IntoIterator<Item = u64>) -> Self {
        let group = |page_tokens| Group {
            page_tokens,
            before: HashMap::new(),
        };
        Self {
            groups: page_tokens.into_iter().map(group).collect(),
            places: HashMap::new(),
        }
    }

    /// Describes the pages of a sequence in a group, from its first one on.
    pub fn describe(&mut self, group: u32, pages: impl IntoIterator<Item = PageKey>) {
        let Some(group) = self.groups.get_mut(group as usize) else {
            return;
        };
        let mut before = None;
        for page in pages {
            group
                .before
                .entry(page.0)
                .or_insert_with(|| before.unwrap_or(page.0));
            before = Some(page.0);
        }
    }

    /// Pages that a tier has.
    pub fn held(&self, tier: Tier) -> impl Iterator<Item = (u32, PageKey)> {
        let of_tier = self.places.keys().filter(move |(of, ..)| *of == tier);
        of_tier.map(|(_, group, page)| (*group, *page))
    }

    /// The events of these changes.
    pub fn events(&mut self, changes: &[Change]) -> Vec<Event> {
        let mut out: Vec<Event> = Vec::new();
        let mut last: Option<Change> = None;
        for change in changes {
            if change.group as usize >= self.groups.len() || !self.changes(change) {
                continue;
            }
            let same = last.is_some_and(|last| {
                (last.held, last.tier, last.group) == (change.held, change.tier, change.group)
            });
            let before = last.filter(|_| same).map(|last| last.page);
            last = Some(*change);
            match out.last_mut() {
                Some(Event::Stored(stored))
                    if before.is_some()
                        && before == self.parent(change)
                        && stored.pages.len() < PAGES_OF_EVENT_MAX =>
                {
                    stored.pages.push(change.page);
                }
                Some(Event::Removed(removed))
                    if same && removed.pages.len() < PAGES_OF_EVENT_MAX =>
                {
                    removed.pages.push(change.page);
                }
                _ => out.push(self.event(change)),
            }
        }
        out
    }

    /// Counts a change; returns whether the tier gains or loses the page.
    fn changes(&mut self, change: &Change) -> bool {
        match self.places.entry((change.tier, change.group, change.page)) {
            Entry::Vacant(entry) if change.held => {
                entry.insert(1);
                true
            }
            // A feed takes no page from a place that has none.
            Entry::Vacant(_) => false,
            Entry::Occupied(mut entry) if change.held => {
                *entry.get_mut() += 1;
                false
            }
            Entry::Occupied(mut entry) => {
                *entry.get_mut() -= 1;
                let gone = *entry.get() == 0;
                if gone {
                    entry.remove();
                }
                gone
            }
        }
    }

    /// The page before this one; `None` if it begins a sequence, or is not described.
    fn parent(&self, change: &Change) -> Option<PageKey> {
        let group = self.groups.get(change.group as usize)?;
        let before = group.before.get(&change.page.0).copied()?;
        (before != change.page.0).then_some(PageKey(before))
    }

    fn event(&self, change: &Change) -> Event {
        let pages = vec![change.page];
        let medium = Some(change.tier.medium().to_owned());
        let group = (self.groups.len() > 1).then(|| group_field(change.group));
        if !change.held {
            return Event::Removed(Removed {
                pages,
                medium,
                others: group.into_iter().collect(),
            });
        }
        let mut others: Fields = vec![("lora_name".to_owned(), Value::Nil)];
        others.extend(group);
        let of_group = self.groups.get(change.group as usize);
        Event::Stored(Stored {
            pages,
            parent: self.parent(change),
            tokens: Vec::new(),
            page_tokens: of_group.map_or(0, |group| group.page_tokens),
            medium,
            others,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change(held: bool, tier: Tier, group: u32, page: u64) -> Change {
        Change {
            held,
            tier,
            group,
            page: PageKey(page),
        }
    }

    /// Kind, medium, group, parent and pages of an event.
    fn told(event: &Event) -> (bool, String, Option<u64>, Option<u64>, Vec<u64>) {
        let group = |others: &Fields| {
            let group = others.iter().find(|(name, _)| name == "group_idx");
            group.and_then(|(_, group)| group.as_u64())
        };
        let (held, medium, others, parent, pages) = match event {
            Event::Stored(stored) => (
                true,
                &stored.medium,
                &stored.others,
                stored.parent,
                &stored.pages,
            ),
            Event::Removed(removed) => (
                false,
                &removed.medium,
                &removed.others,
                None,
                &removed.pages,
            ),
            other => panic!("{other:?}"),
        };
        let pages = pages.iter().map(|page| page.0).collect();
        let parent = parent.map(|page| page.0);
        (
            held,
            medium.clone().unwrap_or_default(),
            group(others),
            parent,
            pages,
        )
    }

    #[test]
    fn consecutive_pages_share_an_event_and_every_change_keeps_its_place() {
        let mut events = TierEvents::new([16]);
        events.describe(0, [1, 2, 3].map(PageKey));
        events.describe(0, [1, 2, 9].map(PageKey));
        let (host, disk) = (Tier::Host, Tier::Disk);
        let made = events.events(&[
            change(true, host, 0, 1),
            change(true, host, 0, 2),
            change(true, host, 0, 9),
            change(true, host, 0, 3),
            change(true, disk, 0, 1),
            change(false, host, 0, 9),
            change(false, host, 0, 2),
            change(true, host, 0, 9),
        ]);
        let cpu = || "CPU".to_owned();
        assert_eq!(
            made.iter().map(told).collect::<Vec<_>>(),
            [
                (true, cpu(), None, None, vec![1, 2, 9]),
                (true, cpu(), None, Some(2), vec![3]),
                (true, "STORAGE".to_owned(), None, None, vec![1]),
                (false, cpu(), None, None, vec![9, 2]),
                (true, cpu(), None, Some(2), vec![9]),
            ]
        );
        let held: Vec<_> = events.held(disk).collect();
        assert_eq!(held, [(0, PageKey(1))]);
    }

    #[test]
    fn a_page_in_two_places_is_announced_once_and_removed_once() {
        let mut events = TierEvents::new([16]);
        let host = Tier::Host;
        let made = events.events(&[
            change(true, host, 0, 5),
            change(true, host, 0, 5),
            change(false, host, 0, 5),
        ]);
        assert_eq!(made.len(), 1);
        let made = events.events(&[change(false, host, 0, 5), change(false, host, 0, 5)]);
        assert_eq!(
            made.iter().map(told).collect::<Vec<_>>(),
            [(false, "CPU".to_owned(), None, None, vec![5])]
        );
        assert_eq!(events.held(host).count(), 0);
    }

    #[test]
    fn groups_are_told_apart_and_named() {
        let mut events = TierEvents::new([16, 64]);
        events.describe(0, [1, 2].map(PageKey));
        events.describe(1, [2].map(PageKey));
        let made = events.events(&[
            change(true, Tier::Host, 0, 2),
            change(true, Tier::Host, 1, 2),
            change(true, Tier::Host, 2, 2),
            change(false, Tier::Host, 0, 2),
        ]);
        let cpu = || "CPU".to_owned();
        assert_eq!(
            made.iter().map(told).collect::<Vec<_>>(),
            [
                (true, cpu(), Some(0), Some(1), vec![2]),
                (true, cpu(), Some(1), None, vec![2]),
                (false, cpu(), Some(0), None, vec![2]),
            ]
        );
        let Event::Stored(stored) = &made[1] else {
            panic!("{made:?}");
        };
        assert_eq!((stored.page_tokens, stored.tokens.len()), (64, 0));
    }

    #[test]
    fn an_event_has_a_limited_number_of_pages() {
        let mut events = TierEvents::new([16]);
        let pages = PAGES_OF_EVENT_MAX as u64 + 1;
        events.describe(0, (0..pages).map(PageKey));
        for held in [true, false] {
            let changes: Vec<_> = (0..pages)
                .map(|page| change(held, Tier::Host, 0, page))
                .collect();
            assert_eq!(events.events(&changes).len(), 2);
        }
    }
}
