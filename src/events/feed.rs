//! Follows which pages of a namespace each tier of kvferry holds, by the leader's change log.
//!
//! A map from the places of the tiers to pages begins with the pages that are present, and follows the records, as
//! docs/wire.md describes under `read_events`.

use std::time::Duration;

use hashbrown::HashMap;
use kvferry_protocol::{EventKind, EventRecord, Events, ReadEvents};
use kvferry_types::Time;
use serde_bytes::ByteBuf;

use crate::page::{PageKey, Tier};

/// Places that are known, at most, 40 bytes each; further pages are left out until the reader begins again. While it
/// begins again, it has the places from before as well.
pub const PLACES_MAX: usize = 4 << 20;
/// Pages of one answer.
const READ_PAGES: u32 = 4096;
/// Time for which pages that a new leader does not list yet count as held: it first reads the inventories.
const RECOVERY: Duration = Duration::from_secs(5);

/// One place of a tier has gained or lost a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Change {
    /// Whether the place holds the page from now on.
    pub held: bool,
    /// The tier.
    pub tier: Tier,
    /// The page.
    pub page: PageKey,
}

type Places = HashMap<(Tier, u32), PageKey>;

/// What has been read of a namespace. Follows none at first.
#[derive(Debug, Default)]
pub struct Feed {
    namespace: Option<Vec<u8>>,
    epoch: u64,
    next: u64,
    cursor: Option<u64>,
    places: Places,
    /// Places from before the reader began again. Their pages count as held until it has begun, and until this time.
    before: Places,
    before_until: Time,
    left_out: u64,
}

impl Feed {
    /// Follows this namespace from now on, and no other; `None`: no page is held.
    pub fn follow(&mut self, namespace: Option<Vec<u8>>) -> Vec<Change> {
        if self.namespace == namespace {
            return Vec::new();
        }
        let changes = self.forget();
        self.namespace = namespace;
        changes
    }

    /// Whether this namespace is followed.
    pub fn follows(&self, namespace: Option<&[u8]>) -> bool {
        self.namespace.as_deref() == namespace
    }

    /// Drops what was read: no leader has answered for long. The next read begins again.
    pub fn forget(&mut self) -> Vec<Change> {
        let mut changes = lost(&mut self.before);
        changes.extend(lost(&mut self.places));
        (self.epoch, self.next, self.cursor) = (0, 0, Some(0));
        changes
    }

    /// The next read, which may wait for a change if everything is read; `None` while no namespace is followed.
    pub fn read(&self, wait: Duration) -> Option<ReadEvents> {
        let namespace = self.namespace.clone()?;
        let waits = self.cursor.is_none();
        let wait = if waits { wait } else { Duration::ZERO };
        Some(ReadEvents {
            epoch: self.epoch,
            from: self.next,
            wait_ms: u32::try_from(wait.as_millis()).unwrap_or(u32::MAX),
            most: READ_PAGES,
            namespace: Some(ByteBuf::from(namespace)),
            cursor: self.cursor,
        })
    }

    /// Pages that were left out because of [`PLACES_MAX`].
    pub const fn left_out(&self) -> u64 {
        self.left_out
    }

    /// Takes the answer of the last read.
    pub fn answered(&mut self, now: Time, events: &Events) -> Vec<Change> {
        let mut changes = Vec::new();
        if events.lost {
            self.begin_again(now, events.epoch, &mut changes);
        }
        for record in &events.records {
            self.apply(record, usize::from(events.hash_bytes), &mut changes);
        }
        let unknown = |record: &EventRecord| record.event == EventKind::Unknown;
        if events.records.iter().any(unknown) {
            // A later kind: what it changes is unknown.
            changes.extend(self.forget());
        } else if events.lost && self.cursor.is_none() {
            // Only changes were requested: the pages that are present come first.
            (self.epoch, self.next, self.cursor) = (0, 0, Some(0));
        } else {
            (self.epoch, self.next, self.cursor) = (events.epoch, events.next, events.cursor);
        }
        changes.extend(self.turn(now));
        changes
    }

    /// Drops the places from before the reader began again, once it has begun and their time is over.
    pub fn turn(&mut self, now: Time) -> Vec<Change> {
        if self.cursor.is_none() && now >= self.before_until {
            lost(&mut self.before)
        } else {
            Vec::new()
        }
    }

    /// When [`Self::turn`] has something to do; `None`: not before the next answer.
    pub fn next_turn(&self) -> Option<Time> {
        (self.cursor.is_none() && !self.before.is_empty()).then_some(self.before_until)
    }

    fn begin_again(&mut self, now: Time, epoch: u64, changes: &mut Vec<Change>) {
        if self.before.is_empty() {
            self.before = std::mem::take(&mut self.places);
            let recovers = self.epoch != 0 && epoch != self.epoch;
            self.before_until = if recovers { now + RECOVERY } else { now };
        } else {
            // The reader had not begun: what it read since may be gone, what it had before is held until it has begun.
            changes.extend(lost(&mut self.places));
        }
        self.left_out = 0;
    }

    fn apply(&mut self, record: &EventRecord, hash_bytes: usize, changes: &mut Vec<Change>) {
        let Some(tier) = Tier::of_number(record.tier) else {
            return;
        };
        match record.event {
            EventKind::Cleared => {
                let cleared = self.places.extract_if(|(of, _), _| *of == tier);
                changes.extend(lost(&mut cleared.collect()));
            }
            // The events of an engine have one group of layers.
            _ if record.group != 0 || hash_bytes == 0 => {}
            EventKind::Unknown => {}
            EventKind::Stored => {
                for (place, hash) in (record.place..).zip(record.hashes.chunks_exact(hash_bytes)) {
                    if let Some(page) = PageKey::of_hash(hash) {
                        self.put(tier, place, page, changes);
                    }
                }
            }
            EventKind::Gone => {
                let pages = record.hashes.len() / hash_bytes;
                for place in (record.place..).take(pages) {
                    if let Some(page) = self.places.remove(&(tier, place)) {
                        changes.push(Change {
                            held: false,
                            tier,
                            page,
                        });
                    }
                }
            }
        }
    }

    fn put(&mut self, tier: Tier, place: u32, page: PageKey, changes: &mut Vec<Change>) {
        let full = self.places.len() >= PLACES_MAX;
        match self.places.get_mut(&(tier, place)) {
            Some(known) if *known == page => return,
            Some(known) => {
                let page = std::mem::replace(known, page);
                changes.push(Change {
                    held: false,
                    tier,
                    page,
                });
            }
            None if full => {
                self.left_out += 1;
                return;
            }
            None => {
                self.places.insert((tier, place), page);
            }
        }
        changes.push(Change {
            held: true,
            tier,
            page,
        });
    }
}

/// The loss of all of these places, in their order.
fn lost(places: &mut Places) -> Vec<Change> {
    let mut places: Vec<_> = std::mem::take(places).into_iter().collect();
    places.sort_unstable();
    places
        .into_iter()
        .map(|((tier, _), page)| Change {
            held: false,
            tier,
            page,
        })
        .collect()
}
