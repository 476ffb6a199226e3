//! One record for each page: where the engine and kvferry have it, and what subscribers were sent.

use std::collections::VecDeque;
use std::sync::Arc;

use hashbrown::HashMap;
use rmpv::{Value, decode, encode};

use crate::batch::{
    Event, Fields, PAGES_OF_EVENT_MAX, Removed, Stored, group_field, group_of, names_group,
};
use crate::feed::Change;
use crate::page::{PageKey, Tier};

/// Pages that are known, at most. A page takes 240 bytes, and at most 5 for each of its tokens: 400 bytes with 32 tokens,
/// 400 MiB in all. Each event whose other fields are new takes 500 bytes more. Pages beyond that are announced as the engine
/// announces them, and not when kvferry has them.
pub const PAGES_MAX: usize = 1 << 20;
/// Pages that are nowhere, at most, of which the tokens are kept: the leader reports a stored page up to a moment after the
/// engine may have given it up. They count towards [`PAGES_MAX`].
pub const GONE_MAX: usize = 1 << 16;
/// Media of an engine that are told apart; pages in others pass through.
const MEDIA_MAX: usize = 8;
/// Fields that events have in common, of which the newest are remembered, so that pages share them.
const SHARED_MAX: usize = 16;
/// Fields with an element for each page of an event.
const BY_PAGE: [&str; 3] = ["extra_keys", "mm_keys", "block_mm_infos"];

/// What subscribers can read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Media: the engine's events pass through, and kvferry's pages are announced beside them.
    Tiers,
    /// No media: a page is announced when the first tier has it, and removed when the last one has lost it.
    Blind,
}

/// Settings of a [`Join`].
#[derive(Debug, Clone, Copy)]
pub struct JoinSettings {
    /// What subscribers can read.
    pub mode: Mode,
    /// Pages that are known, at most.
    pub pages_max: usize,
    /// Those of them that are nowhere, at most.
    pub gone_max: usize,
    /// Subscribers read the group of an event. Otherwise only events of the first group are published: the pages of several
    /// groups have the same numbers.
    pub groups: bool,
}

/// Group of layers and number of a page.
type Key = (u32, PageKey);

/// What the engine's event says of a page.
#[derive(Debug)]
struct About {
    parent: Option<PageKey>,
    /// The page's tokens, one after another in MessagePack: a value takes 8 times as much.
    tokens: Box<[u8]>,
    /// The page's elements of the fields [`BY_PAGE`].
    by_page: Vec<(usize, Value)>,
    shared: Arc<Shared>,
}

/// Fields that all pages of an event have in common.
#[derive(Debug, PartialEq)]
struct Shared {
    page_tokens: u64,
    others: Fields,
}

#[derive(Debug, Default)]
struct Page {
    /// A bit for each medium of the engine that has the page.
    engine: u8,
    /// Places of kvferry that hold it, in each tier.
    places: [u32; 2],
    /// Tiers for which the page was announced, by mode [`Mode::Tiers`]; in [`Mode::Blind`] the first one stands for all.
    announced: [bool; 2],
    about: Option<Box<About>>,
}

impl Page {
    fn is_held(&self) -> bool {
        self.engine != 0 || self.places != [0; 2]
    }

    fn is_empty(&self) -> bool {
        !self.is_held() && self.announced == [false; 2]
    }
}

/// Merges the events of one engine with the pages that kvferry holds for it.
#[derive(Debug)]
pub struct Join {
    settings: JoinSettings,
    pages: HashMap<Key, Page>,
    /// Pages that went nowhere, the oldest first. Some may be somewhere again.
    gone: VecDeque<Key>,
    /// Pages that only kvferry has named so far, the oldest first. Some may be described or forgotten by now.
    undescribed: VecDeque<Key>,
    /// Pages of the engine that have no record were announced: only a clear takes them back.
    unrecorded: bool,
    /// Names of the engine's media, by their bits.
    media: Vec<Option<String>>,
    /// The engine's events name groups: those of removed pages do, too.
    names_groups: bool,
    /// The newest fields that events have in common.
    shared: VecDeque<Arc<Shared>>,
    left_out: u64,
}

impl Join {
    /// Knows no page.
    pub fn new(settings: JoinSettings) -> Self {
        Self {
            settings,
            pages: HashMap::new(),
            gone: VecDeque::new(),
            undescribed: VecDeque::new(),
            unrecorded: false,
            media: Vec::new(),
            names_groups: false,
            shared: VecDeque::new(),
            left_out: 0,
        }
    }

    /// Pages that were not noted, because of [`JoinSettings::pages_max`].
    pub const fn left_out(&self) -> u64 {
        self.left_out
    }

    /// Pages that are known.
    pub fn len(&self) -> usize {
        self.pages.len()
    }

    /// Whether no page is known.
    pub fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    /// Takes the events of a batch of the engine; returns those to publish.
    pub fn engine(&mut self, events: Vec<Event>) -> Vec<Event> {
        let mut out = Vec::with_capacity(events.len());
        for event in events {
            let others = match &event {
                Event::Stored(stored) => &stored.others,
                Event::Removed(removed) => &removed.others,
                Event::Cleared => {
                    out.extend(self.engine_lost());
                    continue;
                }
                Event::Other(_) => {
                    out.push(event);
                    continue;
                }
            };
            self.names_groups |= names_group(others);
            let group = group_of(others);
            if group != Some(0) && !self.settings.groups {
                continue;
            }
            match (event, group) {
                (Event::Stored(stored), Some(group)) => self.engine_stored(group, stored, &mut out),
                (Event::Removed(removed), Some(group)) => {
                    self.engine_removed(group, removed, &mut out);
                }
                // Its group has no number: it passes through.
                (event, _) => {
                    self.unrecorded |= matches!(event, Event::Stored(_));
                    out.push(event);
                }
            }
        }
        out
    }

    /// Adds the removal of these pages, in their order.
    fn removed(&self, pages: &[Key], medium: Option<&str>, out: &mut Vec<Event>) {
        let of_groups = pages.chunk_by(|(one, _), (other, _)| one == other);
        for pages in of_groups.flat_map(|pages| pages.chunks(PAGES_OF_EVENT_MAX)) {
            let group = pages.first().filter(|_| self.names_groups);
            out.push(Event::Removed(Removed {
                pages: pages.iter().map(|(_, page)| *page).collect(),
                medium: medium.map(str::to_owned),
                others: group
                    .map(|(group, _)| group_field(*group))
                    .into_iter()
                    .collect(),
            }));
        }
    }

    /// Takes back all pages that the engine has, one by one: subscribers apply `AllBlocksCleared` to the pages in kvferry as
    /// well. If pages without a record were announced, nothing else takes them back: then everything is cleared, and what
    /// kvferry has is announced again.
    pub fn engine_lost(&mut self) -> Vec<Event> {
        if std::mem::take(&mut self.unrecorded) {
            return self.clear();
        }
        let mut out = Vec::new();
        for bit in 0..self.media.len() {
            let mask = 1_u8 << bit;
            let mut pages = Vec::new();
            for (key, page) in &mut self.pages {
                if page.engine & mask != 0 {
                    page.engine &= !mask;
                    pages.push(*key);
                }
            }
            pages.sort_unstable();
            if self.settings.mode == Mode::Tiers {
                self.removed(&pages, self.media[bit].as_deref(), &mut out);
            } else {
                self.diff(&pages, &mut out);
            }
            self.drop_empty(&pages);
        }
        out
    }

    fn clear(&mut self) -> Vec<Event> {
        for page in self.pages.values_mut() {
            page.engine = 0;
            page.announced = [false; 2];
        }
        let keys = self.parents_first();
        let mut out = vec![Event::Cleared];
        self.diff(&keys, &mut out);
        self.drop_empty(&keys);
        out
    }

    /// All pages, each behind its parent: routers may not find a page whose parent they do not know.
    fn parents_first(&self) -> Vec<Key> {
        let mut children: HashMap<Key, Vec<Key>> = HashMap::new();
        let mut roots: Vec<Key> = Vec::new();
        for (key, page) in &self.pages {
            let parent = page.about.as_deref().and_then(|about| about.parent);
            let parent = parent.map(|parent| (key.0, parent));
            match parent.filter(|parent| parent != key && self.pages.contains_key(parent)) {
                Some(parent) => children.entry(parent).or_default().push(*key),
                None => roots.push(*key),
            }
        }
        roots.sort_unstable();
        let mut found = Vec::with_capacity(self.pages.len());
        while let Some(key) = roots.pop() {
            found.push(key);
            roots.extend(children.remove(&key).unwrap_or_default());
        }
        // Pages whose numbers are equal by chance may be each other's parents.
        let mut circles: Vec<Key> = children.into_values().flatten().collect();
        circles.sort_unstable();
        found.extend(circles);
        found
    }

    /// Takes changes of the pages in kvferry; returns the events to publish: stored pages first, in the order of the
    /// changes, then removed ones, the last one first.
    pub fn kvferry(&mut self, changes: &[Change]) -> Vec<Event> {
        let mut touched = Vec::with_capacity(changes.len());
        for change in changes {
            if change.group != 0 && !self.settings.groups {
                continue;
            }
            let key = (change.group, change.page);
            let known = self.pages.contains_key(&key);
            if !known && (!change.held || self.is_full(false)) {
                self.left_out += u64::from(change.held);
                continue;
            }
            if !known {
                self.undescribed.push_back(key);
            }
            let page = self.pages.entry(key).or_default();
            let places = &mut page.places[change.tier.index()];
            *places = if change.held {
                places.saturating_add(1)
            } else {
                places.saturating_sub(1)
            };
            touched.push(key);
        }
        let mut out = Vec::new();
        self.diff(&touched, &mut out);
        self.drop_empty(&touched);
        out
    }

    /// Whether no further page can be noted. Forgets pages that are nowhere to make room, and for a page of the engine also
    /// those that no event has described, of which nothing is announced.
    fn is_full(&mut self, of_engine: bool) -> bool {
        while self.pages.len() >= self.settings.pages_max {
            let made = self.forget_oldest() || (of_engine && self.forget_undescribed());
            if !made {
                return true;
            }
        }
        false
    }

    fn forget_undescribed(&mut self) -> bool {
        while let Some(key) = self.undescribed.pop_front() {
            let page = self.pages.get(&key);
            if page.is_some_and(|page| page.about.is_none() && page.engine == 0) {
                self.pages.remove(&key);
                self.left_out += 1;
                return true;
            }
        }
        false
    }

    fn forget_oldest(&mut self) -> bool {
        let Some(key) = self.gone.pop_front() else {
            return false;
        };
        if self.pages.get(&key).is_some_and(Page::is_empty) {
            self.pages.remove(&key);
        }
        true
    }

    /// The bit of a medium, 0 if there are too many.
    fn medium(&mut self, medium: Option<&str>) -> u8 {
        let known = self
            .media
            .iter()
            .position(|known| known.as_deref() == medium);
        let at = known.or_else(|| {
            (self.media.len() < MEDIA_MAX).then(|| {
                self.media.push(medium.map(str::to_owned));
                self.media.len() - 1
            })
        });
        at.map_or(0, |at| 1 << at)
    }

    fn engine_stored(&mut self, group: u32, stored: Stored, out: &mut Vec<Event>) {
        let bit = self.medium(stored.medium.as_deref());
        let about = if stored.is_described() {
            about(&stored, &mut self.shared)
        } else {
            Vec::new()
        };
        let mut about = about.into_iter();
        let mut unnoted = Vec::new();
        let keys: Vec<Key> = stored.pages.iter().map(|page| (group, *page)).collect();
        for key in &keys {
            let about = about.next();
            if !self.pages.contains_key(key) && (bit == 0 || self.is_full(true)) {
                self.left_out += u64::from(bit != 0);
                unnoted.push(*key);
                continue;
            }
            let page = self.pages.entry(*key).or_default();
            page.engine |= bit;
            if page.about.is_none() {
                page.about = about.map(Box::new);
            }
        }
        self.unrecorded |= !unnoted.is_empty();
        match self.settings.mode {
            Mode::Tiers => out.push(Event::Stored(stored)),
            // Without a record of its pages, an event can only pass through as a whole.
            Mode::Blind if unnoted.len() == keys.len() => out.push(Event::Stored(Stored {
                medium: None,
                ..stored
            })),
            Mode::Blind => {}
        }
        // Pages that kvferry has had since before they were described.
        self.diff(&keys, out);
    }

    fn engine_removed(&mut self, group: u32, of_engine: Removed, out: &mut Vec<Event>) {
        let bit = self.medium(of_engine.medium.as_deref());
        let mut unnoted = Vec::new();
        let keys: Vec<Key> = of_engine.pages.iter().map(|page| (group, *page)).collect();
        for key in &keys {
            match self.pages.get_mut(key) {
                Some(page) => page.engine &= !bit,
                None => unnoted.push(*key),
            }
        }
        match self.settings.mode {
            Mode::Tiers => out.push(Event::Removed(of_engine)),
            // Subscribers may have them only if some were announced without a record.
            Mode::Blind if self.left_out > 0 => self.removed(&unnoted, None, out),
            Mode::Blind => {}
        }
        self.diff(&keys, out);
        self.drop_empty(&keys);
    }

    fn drop_empty(&mut self, keys: &[Key]) {
        for key in keys {
            match self.pages.get(key) {
                Some(page) if !page.is_empty() => {}
                Some(page) if page.about.is_some() => self.gone.push_back(*key),
                // Nothing is known of it.
                Some(_) => drop(self.pages.remove(key)),
                None => {}
            }
        }
        while self.gone.len() > self.settings.gone_max {
            self.forget_oldest();
        }
        if self.undescribed.len() > 2 * self.settings.pages_max {
            let pages = &self.pages;
            self.undescribed
                .retain(|key| pages.get(key).is_some_and(|page| page.about.is_none()));
        }
    }

    /// Publishes the differences between where these pages are and what was announced.
    fn diff(&mut self, keys: &[Key], out: &mut Vec<Event>) {
        let places: &[(usize, Option<&str>)] = match self.settings.mode {
            Mode::Tiers => &[
                (0, Some(Tier::Host.medium())),
                (1, Some(Tier::Disk.medium())),
            ],
            Mode::Blind => &[(0, None)],
        };
        let blind = self.settings.mode == Mode::Blind;
        // A page that moves is announced in its new tier first.
        for (at, medium) in places.iter().rev() {
            let mut run: Option<Run> = None;
            for key in keys {
                let Some(page) = self.pages.get_mut(key) else {
                    continue;
                };
                let held = if blind {
                    page.is_held()
                } else {
                    page.places[*at] > 0
                };
                let Some(about) = page
                    .about
                    .as_deref()
                    .filter(|_| held && !page.announced[*at])
                else {
                    continue;
                };
                page.announced[*at] = true;
                match &mut run {
                    Some(run) if run.takes(*key, about) => run.add(*key, about),
                    _ => {
                        out.extend(run.take().map(|run| run.event(*medium)));
                        run = Some(Run::of(*key, about));
                    }
                }
            }
            out.extend(run.map(|run| run.event(*medium)));
        }
        for (at, medium) in places.iter().rev() {
            let mut gone = Vec::new();
            for key in keys.iter().rev() {
                let Some(page) = self.pages.get_mut(key) else {
                    continue;
                };
                let held = if blind {
                    page.is_held()
                } else {
                    page.places[*at] > 0
                };
                if !held && page.announced[*at] {
                    page.announced[*at] = false;
                    gone.push(*key);
                }
            }
            self.removed(&gone, *medium, out);
        }
    }
}

/// Consecutive pages of a sequence and group, which one event announces.
struct Run {
    group: u32,
    pages: Vec<PageKey>,
    parent: Option<PageKey>,
    tokens: Vec<Value>,
    by_page: Vec<(usize, Vec<Value>)>,
    shared: Arc<Shared>,
}

impl Run {
    fn of(key: Key, about: &About) -> Self {
        let mut run = Self {
            group: key.0,
            pages: Vec::new(),
            parent: about.parent,
            tokens: Vec::new(),
            by_page: about
                .by_page
                .iter()
                .map(|(name, _)| (*name, Vec::new()))
                .collect(),
            shared: Arc::clone(&about.shared),
        };
        run.add(key, about);
        run
    }

    fn takes(&self, (group, _): Key, about: &About) -> bool {
        self.group == group
            && self.pages.last() == about.parent.as_ref()
            && self.pages.len() < PAGES_OF_EVENT_MAX
            && (Arc::ptr_eq(&self.shared, &about.shared) || self.shared == about.shared)
            && self.by_page.len() == about.by_page.len()
            && self
                .by_page
                .iter()
                .zip(&about.by_page)
                .all(|(ours, theirs)| ours.0 == theirs.0)
    }

    fn add(&mut self, (_, page): Key, about: &About) {
        self.pages.push(page);
        decoded(&about.tokens, &mut self.tokens);
        for ((_, values), (_, value)) in self.by_page.iter_mut().zip(&about.by_page) {
            values.push(value.clone());
        }
    }

    fn event(self, medium: Option<&str>) -> Event {
        let mut others = self.shared.others.clone();
        for (name, values) in self.by_page {
            others.push((BY_PAGE[name].to_owned(), Value::Array(values)));
        }
        Event::Stored(Stored {
            pages: self.pages,
            parent: self.parent,
            tokens: self.tokens,
            page_tokens: self.shared.page_tokens,
            medium: medium.map(str::to_owned),
            others,
        })
    }
}

/// What a described event says of each of its pages.
fn about(stored: &Stored, known: &mut VecDeque<Arc<Shared>>) -> Vec<About> {
    let mut others = Fields::new();
    let mut by_page: Vec<(usize, &[Value])> = Vec::new();
    for (name, value) in &stored.others {
        let number = BY_PAGE.iter().position(|by_page| by_page == name);
        match (number, value) {
            (Some(number), Value::Array(values)) if values.len() == stored.pages.len() => {
                by_page.push((number, values));
            }
            _ => others.push((name.clone(), value.clone())),
        }
    }
    let shared = Shared {
        page_tokens: stored.page_tokens,
        others,
    };
    let shared = match known.iter().find(|known| ***known == shared) {
        Some(known) => Arc::clone(known),
        None => {
            known.truncate(SHARED_MAX - 1);
            known.push_front(Arc::new(shared));
            Arc::clone(&known[0])
        }
    };
    let size = usize::try_from(stored.page_tokens).unwrap_or(usize::MAX);
    let mut parent = stored.parent;
    let pages = stored
        .pages
        .iter()
        .zip(stored.tokens.chunks_exact(size))
        .enumerate();
    pages
        .map(|(at, (key, tokens))| About {
            parent: parent.replace(*key),
            tokens: encoded(tokens),
            by_page: by_page
                .iter()
                .map(|(name, values)| (*name, values[at].clone()))
                .collect(),
            shared: Arc::clone(&shared),
        })
        .collect()
}

/// The tokens of a page, one after another.
fn encoded(tokens: &[Value]) -> Box<[u8]> {
    let mut bytes = Vec::with_capacity(5 * tokens.len());
    for token in tokens {
        if let Err(error) = encode::write_value(&mut bytes, token) {
            // A vector takes every byte.
            tracing::error!(%error, "a token was not encoded");
        }
    }
    bytes.into()
}

fn decoded(mut bytes: &[u8], tokens: &mut Vec<Value>) {
    while !bytes.is_empty() {
        match decode::read_value(&mut bytes) {
            Ok(token) => tokens.push(token),
            // [`encoded`] has written whole values.
            Err(error) => return tracing::error!(%error, "a token was not decoded"),
        }
    }
}
