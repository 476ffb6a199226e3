//! Reads of the change log, and of the pages that are present when a reader begins.
//!
//! A reader keeps, for each tier, what each arena page holds. It begins by reading the pages that are present, in slices:
//! the leader walks the slab of each pool, and a cursor names the next position. A slice is taken only when the reader has
//! all records up to that moment, so that its pages follow these records in one order, as if they had been stored then.
//!
//! After every part, what the reader has of a block at a position below the cursor is what the block has: when the position
//! was read, and after each change since. A page of a block at a position from the cursor on is in the reader's map only if
//! it was recorded since the reader began, and is therefore present; otherwise a later slice lists it, unless a record
//! removes or replaces it before. So nothing that the reader has is wrong at any time, and after the last slice it has
//! everything.

use std::collections::BTreeMap;

use crate::index::anchor::Domain;
use crate::index::blocks::BlockIndex;
use crate::pool::changes::{Change, PlacedPages};
use kvferry_types::{DomainId, Epoch, NamespaceId, TierId, Time};

use super::Leader;

/// Pages that a part of the log names, at most.
pub const LOG_READ_PAGES_MAX: u32 = 8192;
/// Positions of slabs that one slice of present pages examines, at most.
const SLICE_POSITIONS_MAX: u32 = 16_384;

/// What a reader of the change log has read so far, and what it reads next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogRead {
    /// The leader whose records the reader has.
    pub epoch: Epoch,
    /// Number of the next record. 0: the reader has none.
    pub from: u64,
    /// Pages that the part names, at most; from 1 to [`LOG_READ_PAGES_MAX`]. A record with more is not divided.
    pub most: u32,
    /// Leaves out other namespaces, and layouts other than that of the tier.
    pub namespace: Option<Vec<u8>>,
    /// The reader wants the pages that are present: from this position on, 0 for the first.
    pub cursor: Option<u64>,
}

/// A part of the change log.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LogPart {
    /// Number of the record after this part.
    pub next: u64,
    /// Records are missing before this part: what the reader has means nothing.
    pub lost: bool,
    /// Records, then present pages.
    pub changes: Vec<(TierId, Change)>,
    /// Where the next present pages begin; `None` if the reader did not want them, or has all of them.
    pub cursor: Option<u64>,
}

impl LogPart {
    /// True if a reader that waits for changes need not be answered yet.
    pub fn is_empty(&self) -> bool {
        self.changes.is_empty() && !self.lost
    }
}

/// The pages that a reader wants.
struct Wanted<'a> {
    leader: &'a Leader,
    namespace: Option<(&'a [u8], NamespaceId)>,
    /// Whether it wants those of a domain.
    known: BTreeMap<(TierId, DomainId), bool>,
}

impl<'a> Wanted<'a> {
    fn of(leader: &'a Leader, read: &'a LogRead) -> Self {
        let key = &leader.settings.anchor_key;
        let namespace = read.namespace.as_deref();
        Self {
            leader,
            namespace: namespace.map(|name| (name, key.namespace(name))),
            known: BTreeMap::new(),
        }
    }

    fn includes(&mut self, tier: TierId, pages: &PlacedPages) -> bool {
        let Some((name, namespace)) = self.namespace else {
            return true;
        };
        let domain = pages.domain;
        domain.namespace() == namespace
            && *self.known.entry((tier, domain)).or_insert_with(|| {
                let key = self.leader.tiers.key(tier);
                // A tier that has closed meanwhile was cleared by a later record.
                key.is_some_and(|key| {
                    let anchors = &self.leader.settings.anchor_key;
                    let layout = &key.layout_fingerprint;
                    Domain::new(anchors, name, layout, domain.group()).id() == domain
                })
            })
    }
}

/// The room that is left in a part.
struct Room {
    pages: u32,
    changes: Vec<(TierId, Change)>,
}

impl Room {
    /// Adds a change. Gives it back if it does not fit: one change fits always.
    fn add(&mut self, tier: TierId, change: Change) -> Result<(), Change> {
        let pages = change.pages().map_or(1, |changed| changed.pages.len());
        let pages = u32::try_from(pages).unwrap_or(u32::MAX);
        if pages > self.pages && !self.changes.is_empty() {
            return Err(change);
        }
        self.pages = self.pages.saturating_sub(pages);
        self.changes.push((tier, change));
        Ok(())
    }
}

impl Leader {
    /// Reads a part of the change log, and present pages for a reader that wants them. The first read begins the recording.
    pub fn read_log(&mut self, now: Time, read: &LogRead) -> LogPart {
        if self.log.is_read(now) {
            for (_, pool) in self.tiers.slowest_first() {
                pool.record_changes();
            }
        }
        let same = read.epoch == self.settings.epoch;
        let records = same.then(|| self.log.since(read.from)).flatten();
        let lost = records.is_none();
        let mut wanted = Wanted::of(self, read);
        let mut room = Room {
            pages: read.most.clamp(1, LOG_READ_PAGES_MAX),
            changes: Vec::new(),
        };
        let mut next = if lost { self.log.end() } else { read.from };
        for (tier, change) in records.into_iter().flatten() {
            let includes = change
                .pages()
                .is_none_or(|pages| wanted.includes(*tier, pages));
            if includes && room.add(*tier, change.clone()).is_err() {
                break;
            }
            next += 1;
        }
        let cursor = read.cursor.map(|cursor| if lost { 0 } else { cursor });
        let cursor = match cursor {
            Some(cursor) if next == self.log.end() => self.slice(cursor, &mut wanted, &mut room),
            cursor => cursor,
        };
        LogPart {
            next,
            lost,
            changes: room.changes,
            cursor,
        }
    }

    /// Adds present pages from a cursor on. Returns where the next ones begin.
    fn slice(&self, cursor: u64, wanted: &mut Wanted<'_>, room: &mut Room) -> Option<u64> {
        let mut positions = SLICE_POSITIONS_MAX;
        for (tier, pool) in self.tiers.serving_pools() {
            let number = u64::from(tier.number());
            let first = match cursor >> 32 {
                at if at < number => 0,
                #[expect(clippy::cast_possible_truncation, reason = "the low half is wanted")]
                at if at == number => cursor as BlockIndex,
                _ => continue,
            };
            for position in first..pool.block_positions() {
                let here = Some(number << 32 | u64::from(position));
                if positions == 0 {
                    return here;
                }
                positions -= 1;
                let pages = pool.readable_at(position);
                let Some(pages) = pages.filter(|pages| wanted.includes(tier, pages)) else {
                    continue;
                };
                if room.add(tier, Change::Stored(pages)).is_err() {
                    return here;
                }
            }
        }
        None
    }
}
