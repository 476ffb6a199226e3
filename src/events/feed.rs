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

/// Places that are known, at most, 60 bytes each; further pages are left out until the reader begins again. While it
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
    /// The page's group of layers, as the engine numbers it.
    pub group: u32,
    /// The page.
    pub page: PageKey,
}

/// The pages that a feed follows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Followed {
    /// Their namespace.
    pub namespace: Vec<u8>,
    /// The engine's number of each group of layers, in the order in which the engine registers its groups. Empty: both number
    /// the groups alike. Pages of groups that are not listed are left out.
    pub groups: Vec<u32>,
}

impl Followed {
    /// A namespace, of an engine that numbers its groups as it registers them.
    pub const fn new(namespace: Vec<u8>) -> Self {
        Self {
            namespace,
            groups: Vec::new(),
        }
    }

    /// The engine's number of a registered group.
    fn group(&self, registered: u8) -> Option<u32> {
        if self.groups.is_empty() {
            Some(registered.into())
        } else {
            self.groups.get(usize::from(registered)).copied()
        }
    }
}

/// Group and number of a page.
type Held = (u32, PageKey);
type Places = HashMap<(Tier, u32), Held>;

/// What has been read of a namespace. Follows none at first.
#[derive(Debug)]
pub struct Feed {
    followed: Option<Followed>,
    places_max: usize,
    epoch: u64,
    next: u64,
    cursor: Option<u64>,
    places: Places,
    /// Places from before the reader began again. Their pages count as held until it has begun, and until this time.
    before: Places,
    before_until: Time,
    left_out: u64,
}

impl Default for Feed {
    fn default() -> Self {
        Self::with_places(PLACES_MAX)
    }
}

impl Feed {
    /// A feed that knows this number of places at most, instead of [`PLACES_MAX`].
    pub fn with_places(places_max: usize) -> Self {
        Self {
            followed: None,
            places_max,
            epoch: 0,
            next: 0,
            cursor: None,
            places: Places::new(),
            before: Places::new(),
            before_until: Time(0),
            left_out: 0,
        }
    }

    /// Follows these pages from now on, and no others; `None`: no page is held.
    pub fn follow(&mut self, followed: Option<Followed>) -> Vec<Change> {
        if self.followed == followed {
            return Vec::new();
        }
        let changes = self.forget();
        self.followed = followed;
        changes
    }

    /// Whether these pages are followed.
    pub fn follows(&self, followed: Option<&Followed>) -> bool {
        self.followed.as_ref() == followed
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
        let namespace = self.followed.as_ref()?.namespace.clone();
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

    /// Pages that were left out, because too many places are known.
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
        if events.lost && self.cursor.is_none() {
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
            _ if hash_bytes == 0 => {}
            EventKind::Unknown => {}
            EventKind::Stored => {
                let followed = self.followed.as_ref();
                let Some(group) = followed.and_then(|followed| followed.group(record.group)) else {
                    return;
                };
                for (place, hash) in (record.place..).zip(record.hashes.chunks_exact(hash_bytes)) {
                    if let Some(page) = PageKey::of_hash(hash) {
                        self.put((tier, place), (group, page), changes);
                    }
                }
            }
            EventKind::Gone => {
                let pages = record.hashes.len() / hash_bytes;
                for place in (record.place..).take(pages) {
                    if let Some(page) = self.places.remove(&(tier, place)) {
                        changes.push(change(false, tier, page));
                    }
                }
            }
        }
    }

    fn put(&mut self, place: (Tier, u32), page: Held, changes: &mut Vec<Change>) {
        let (tier, _) = place;
        let full = self.places.len() >= self.places_max;
        match self.places.get_mut(&place) {
            Some(known) if *known == page => return,
            Some(known) => {
                let before = std::mem::replace(known, page);
                changes.push(change(false, tier, before));
            }
            None if full => {
                self.left_out += 1;
                return;
            }
            None => {
                self.places.insert(place, page);
            }
        }
        changes.push(change(true, tier, page));
    }
}

const fn change(held: bool, tier: Tier, (group, page): Held) -> Change {
    Change {
        held,
        tier,
        group,
        page,
    }
}

/// The loss of all of these places, in their order.
fn lost(places: &mut Places) -> Vec<Change> {
    let mut places: Vec<_> = std::mem::take(places).into_iter().collect();
    places.sort_unstable();
    places
        .into_iter()
        .map(|((tier, _), page)| change(false, tier, page))
        .collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    const HASH_BYTES: u8 = 16;

    /// A leader with a log of its last records, and the present pages in slices.
    struct FakeLeader {
        epoch: u64,
        first: u64,
        records: Vec<EventRecord>,
        present: BTreeMap<(u8, u32), u64>,
    }

    impl FakeLeader {
        fn new(epoch: u64) -> Self {
            Self {
                epoch,
                first: 1,
                records: Vec::new(),
                present: BTreeMap::new(),
            }
        }

        fn end(&self) -> u64 {
            self.first + self.records.len() as u64
        }

        fn store(&mut self, tier: u8, place: u32, page: u64) {
            self.present.insert((tier, place), page);
            self.records
                .push(record(EventKind::Stored, tier, place, page));
        }

        fn evict(&mut self, tier: u8, place: u32) {
            if let Some(page) = self.present.remove(&(tier, place)) {
                self.records
                    .push(record(EventKind::Gone, tier, place, page));
            }
        }

        fn clear(&mut self, tier: u8) {
            self.present.retain(|(of, _), _| *of != tier);
            self.records.push(EventRecord {
                event: EventKind::Cleared,
                tier,
                ..EventRecord::default()
            });
        }

        fn drop_records(&mut self) {
            self.first = self.end() + 1;
            self.records.clear();
        }

        /// Answers with one record at a time, and with two present pages in a slice.
        fn answer(&self, read: &ReadEvents) -> Events {
            let known = read.epoch == self.epoch && (self.first..=self.end()).contains(&read.from);
            let mut events = Events {
                epoch: self.epoch,
                next: if known { read.from } else { self.end() },
                lost: !known,
                hash_bytes: HASH_BYTES,
                ..Events::default()
            };
            if known && read.from < self.end() {
                events
                    .records
                    .push(self.records[(read.from - self.first) as usize].clone());
                events.next += 1;
            }
            let cursor = read.cursor.map(|cursor| if known { cursor } else { 0 });
            events.cursor = match cursor {
                Some(cursor) if events.next == self.end() => {
                    let at = |(tier, place): &(u8, u32)| u64::from(*tier) << 32 | u64::from(*place);
                    let mut left = self.present.iter().filter(|(key, _)| at(key) >= cursor);
                    for ((tier, place), page) in left.by_ref().take(2) {
                        events
                            .records
                            .push(record(EventKind::Stored, *tier, *place, *page));
                    }
                    left.next().map(|(key, _)| at(key))
                }
                cursor => cursor,
            };
            events
        }
    }

    fn record(event: EventKind, tier: u8, place: u32, page: u64) -> EventRecord {
        let mut hashes = vec![0; 8];
        hashes.extend(page.to_be_bytes());
        EventRecord {
            event,
            tier,
            place,
            hashes,
            ..EventRecord::default()
        }
    }

    /// What a reader of the changes has: the number of places for each page.
    #[derive(Default)]
    struct Held(BTreeMap<(Tier, PageKey), u32>);

    impl Held {
        fn apply(&mut self, changes: Vec<Change>) {
            for change in changes {
                let key = (change.tier, change.page);
                if change.held {
                    *self.0.entry(key).or_default() += 1;
                } else {
                    let places = self
                        .0
                        .get_mut(&key)
                        .expect("a page in no place cannot leave one");
                    *places -= 1;
                    if *places == 0 {
                        self.0.remove(&key);
                    }
                }
            }
        }
    }

    fn truth(leader: &FakeLeader) -> BTreeMap<(Tier, PageKey), u32> {
        let mut held = BTreeMap::new();
        for ((tier, _), page) in &leader.present {
            let tier = Tier::of_number(*tier).expect("the tiers of the test are known");
            *held.entry((tier, PageKey(*page))).or_default() += 1;
        }
        held
    }

    #[derive(Debug, Clone)]
    enum Act {
        Store(u8, u32, u64),
        Evict(u8, u32),
        Clear(u8),
        DropRecords,
        Restart { keeps: bool },
        Forget,
        Read,
    }

    fn act() -> impl Strategy<Value = Act> {
        let tier = || 2..4_u8;
        prop_oneof![
            8 => (tier(), 0..8_u32, 0..6_u64).prop_map(|(tier, place, page)| Act::Store(tier, place, page)),
            5 => (tier(), 0..8_u32).prop_map(|(tier, place)| Act::Evict(tier, place)),
            1 => tier().prop_map(Act::Clear),
            1 => Just(Act::DropRecords),
            1 => any::<bool>().prop_map(|keeps| Act::Restart { keeps }),
            1 => Just(Act::Forget),
            10 => Just(Act::Read),
        ]
    }

    proptest! {
        /// Whatever happens between its reads, a feed that has read everything has exactly the pages that are present.
        #[test]
        fn a_feed_has_what_the_leader_has(acts in proptest::collection::vec(act(), 1..80)) {
            let mut leader = FakeLeader::new(1);
            let (mut feed, mut held) = (Feed::default(), Held::default());
            prop_assert!(feed.read(Duration::ZERO).is_none(), "no namespace is followed");
            held.apply(feed.follow(Some(Followed::new(b"n".to_vec()))));
            let mut now = Time(0);
            for act in acts {
                match act {
                    Act::Store(tier, place, page) => leader.store(tier, place, page),
                    Act::Evict(tier, place) => leader.evict(tier, place),
                    Act::Clear(tier) => leader.clear(tier),
                    Act::DropRecords => leader.drop_records(),
                    Act::Restart { keeps } => {
                        let present = std::mem::take(&mut leader.present);
                        leader = FakeLeader::new(leader.epoch + 1);
                        if keeps {
                            leader.present = present;
                        }
                    }
                    Act::Forget => held.apply(feed.forget()),
                    Act::Read => {
                        let read = feed.read(Duration::ZERO).expect("a namespace is followed");
                        held.apply(feed.answered(now, &leader.answer(&read)));
                    }
                }
            }
            for _ in 0..300 {
                let read = feed.read(Duration::ZERO).expect("a namespace is followed");
                held.apply(feed.answered(now, &leader.answer(&read)));
            }
            now = now + RECOVERY;
            held.apply(feed.turn(now));
            prop_assert_eq!(&held.0, &truth(&leader));
            held.apply(feed.follow(None));
            prop_assert!(held.0.is_empty());
        }
    }

    #[test]
    fn pages_stay_held_while_a_new_leader_reads_the_inventories() {
        let mut leader = FakeLeader::new(1);
        leader.store(2, 0, 7);
        let (mut feed, mut held) = (Feed::default(), Held::default());
        held.apply(feed.follow(Some(Followed::new(b"n".to_vec()))));
        let read = |feed: &mut Feed, leader: &FakeLeader, held: &mut Held, now| {
            let request = feed.read(Duration::ZERO).expect("a namespace is followed");
            held.apply(feed.answered(now, &leader.answer(&request)));
        };
        for _ in 0..4 {
            read(&mut feed, &leader, &mut held, Time(0));
        }
        let page = (Tier::Host, PageKey(7));
        assert!(held.0.contains_key(&page));
        let mut leader = FakeLeader::new(2);
        for _ in 0..4 {
            read(&mut feed, &leader, &mut held, Time(0));
        }
        assert!(
            held.0.contains_key(&page),
            "the leader has not listed it yet"
        );
        assert_eq!(feed.next_turn(), Some(Time(0) + RECOVERY));
        leader.store(2, 3, 7);
        read(&mut feed, &leader, &mut held, Time(1));
        assert_eq!(held.0.get(&page), Some(&2));
        held.apply(feed.turn(Time(0) + RECOVERY));
        assert_eq!(held.0.get(&page), Some(&1));
    }

    #[test]
    fn pages_have_the_engines_number_of_their_group() {
        for (groups, known) in [(vec![], vec![0, 1, 2]), (vec![1, 4], vec![1, 4])] {
            let mut leader = FakeLeader::new(1);
            for group in 0..3 {
                leader.present.insert((2, group.into()), 7);
                leader.records.push(EventRecord {
                    group,
                    ..record(EventKind::Stored, 2, group.into(), 7)
                });
            }
            let mut feed = Feed::default();
            let followed = Followed {
                groups,
                ..Followed::new(b"n".to_vec())
            };
            feed.follow(Some(followed));
            (feed.epoch, feed.next, feed.cursor) = (1, 1, None);
            let mut changes = Vec::new();
            for _ in 0..3 {
                let read = feed.read(Duration::ZERO).expect("a namespace is followed");
                changes.extend(feed.answered(Time(0), &leader.answer(&read)));
            }
            let groups: Vec<_> = changes.iter().map(|change| change.group).collect();
            assert_eq!(groups, known);
        }
    }

    #[test]
    fn a_record_of_a_later_kind_is_skipped() {
        let mut leader = FakeLeader::new(1);
        leader.store(2, 0, 7);
        let (mut feed, mut held) = (Feed::default(), Held::default());
        held.apply(feed.follow(Some(Followed::new(b"n".to_vec()))));
        let mut events =
            leader.answer(&feed.read(Duration::ZERO).expect("a namespace is followed"));
        events.records.push(record(EventKind::Unknown, 2, 0, 1));
        held.apply(feed.answered(Time(0), &events));
        assert_eq!(held.0.len(), 1);
        let read = feed.read(Duration::ZERO).expect("a namespace is followed");
        assert_eq!((read.epoch, read.from), (events.epoch, events.next));
    }
}
