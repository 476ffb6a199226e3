//! Readers of the change log: what they rebuild from it is what lookups find.

use std::collections::{BTreeMap, BTreeSet};

use super::*;
use kvferry_core::{Change, Domain, GoneReason, LOG_IDLE, LogRead, MatchGoal};
use kvferry_types::{DomainId, Fingerprint, TierId};

/// A reader that keeps what each arena page holds.
struct Reader {
    read: LogRead,
    held: BTreeMap<u32, (DomainId, Fingerprint)>,
    reasons: BTreeSet<&'static str>,
}

impl Reader {
    fn new() -> Self {
        Self {
            read: LogRead {
                epoch: Epoch(0),
                from: 0,
                most: 7,
                namespace: None,
                cursor: Some(0),
            },
            held: BTreeMap::new(),
            reasons: BTreeSet::new(),
        }
    }

    /// Reads one part. Returns whether records before it were lost, and whether the reader has everything now.
    fn read(&mut self, world: &mut World) -> (bool, bool) {
        let part = world.leader.read_log(world.now, &self.read);
        if part.next < world.leader.log_end() {
            // The pages that are present now are of a later moment than the records so far.
            assert_eq!(part.cursor, self.read.cursor, "a slice before its records");
        }
        if part.lost {
            self.held.clear();
        }
        let count = part.changes.iter().map(|(_, change)| change.pages());
        let count: usize = count
            .map(|pages| pages.map_or(1, |all| all.pages.len()))
            .sum();
        assert!(
            count <= self.read.most as usize || part.changes.len() == 1,
            "{count} pages in a part"
        );
        for (tier, change) in part.changes {
            assert_eq!(tier, TierId::Host);
            let (stored, pages) = match change {
                Change::Stored(pages) => (true, pages),
                Change::Gone(pages, reason) => {
                    self.reasons.insert(match reason {
                        GoneReason::Evicted => "evicted",
                        GoneReason::Damaged => "damaged",
                        GoneReason::Reset => "reset",
                    });
                    (false, pages)
                }
                Change::Cleared => {
                    self.held.clear();
                    continue;
                }
            };
            for (place, page) in (pages.start..).zip(&pages.pages) {
                match stored {
                    true => self.held.insert(place, (pages.domain, *page)),
                    false => self.held.remove(&place),
                };
            }
        }
        self.read.epoch = world.leader.epoch();
        self.read.from = part.next;
        let begins = part.lost && self.read.cursor.is_none();
        self.read.cursor = if begins { Some(0) } else { part.cursor };
        let has_all = self.read.cursor.is_none() && part.next == world.leader.log_end();
        (part.lost, has_all)
    }

    fn read_all(&mut self, world: &mut World) {
        while !self.read(world).1 {}
    }

    fn pages(&self) -> BTreeSet<(DomainId, Fingerprint)> {
        self.held.values().copied().collect()
    }
}

/// The pages that lookups of the model's sequences find, from whatever position.
fn found(world: &World) -> BTreeSet<(DomainId, Fingerprint)> {
    let mut found = BTreeSet::new();
    let (Some(pool), Some(key)) = (world.leader.pool(), world.leader.tier_key(TierId::Host)) else {
        return found;
    };
    let anchors = AnchorKey::new([3; 32]);
    for namespace in [[0], [1]] {
        let layout = &key.layout_fingerprint;
        let domain = Domain::new(&anchors, &namespace, layout, GroupId(0));
        for name in 0..4 {
            let hashes = sequence(name, 40);
            for position in 0..hashes.len() {
                let run = pool.longest(&domain, hashes.view(), position, MatchGoal::Readable);
                let pages = run.map_or(0, |run| run.ready as usize);
                let pages = (position..position + pages).map(|page| hashes.fingerprint(page));
                found.extend(pages.map(|page| (domain.id(), page)));
            }
        }
    }
    found
}

#[derive(Debug, Clone)]
enum LogStep {
    World(Step),
    Reset(Option<u8>),
    /// A part of at most this many pages is read.
    Read(u32),
    /// A new reader begins.
    Begin,
}

fn log_step() -> impl Strategy<Value = LogStep> {
    prop_oneof![
        20 => step().prop_map(LogStep::World),
        1 => prop::option::of(0_u8..2).prop_map(LogStep::Reset),
        5 => (1_u32..40).prop_map(LogStep::Read),
        1 => Just(LogStep::Begin),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn a_reader_that_has_all_records_has_the_pages_that_lookups_find(
        steps in prop::collection::vec(log_step(), 1..120),
    ) {
        let mut world = World::new();
        let mut reader = Reader::new();
        for step in steps {
            match step {
                LogStep::World(step) => world.take(step),
                LogStep::Reset(namespace) => {
                    let scope = match namespace {
                        Some(name) => ResetScope::Namespace(vec![name]),
                        None => ResetScope::Everything,
                    };
                    world.request(0, Request::Reset { scope, tier: None });
                }
                LogStep::Read(most) => {
                    reader.read.most = most;
                    if reader.read(&mut world).1 {
                        prop_assert_eq!(reader.pages(), found(&world));
                    }
                }
                LogStep::Begin => reader = Reader::new(),
            }
        }
        world.settle();
        reader.read_all(&mut world);
        prop_assert_eq!(reader.pages(), found(&world));
    }
}

/// A world in which one engine has stored this many pages.
fn with_stored(pages: usize) -> World {
    let mut world = World::new();
    store(&mut world, 0, pages);
    world
}

fn store(world: &mut World, name: u8, pages: usize) {
    let (engine, slot) = (0, u64::from(name));
    let lookup = Step::Lookup {
        engine,
        slot,
        name,
        pages,
        device_pages: 0,
    };
    for step in [lookup, Step::Store { engine, slot }] {
        world.take(step);
    }
    let open: Vec<TransferId> = world.open.keys().copied().collect();
    for (transfer, rank) in open
        .iter()
        .flat_map(|id| (0..RANKS).map(move |rank| (*id, rank)))
    {
        world.report(transfer, rank, true, EPOCH);
    }
    world.take(Step::Finish { engine, slot });
}

#[test]
fn evictions_and_resets_are_in_the_log_with_their_reasons() {
    let mut world = with_stored(40);
    let mut reader = Reader::new();
    reader.read_all(&mut world);
    assert_eq!(reader.pages().len(), 40);
    for name in 1..4 {
        store(&mut world, name, 40);
    }
    reader.read_all(&mut world);
    assert_eq!(reader.reasons, ["evicted"].into());
    assert_eq!(reader.pages(), found(&world));
    let scope = ResetScope::Everything;
    world.request(0, Request::Reset { scope, tier: None });
    let (_, answer) = world.requests.last_key_value().expect("a request").1;
    assert!(matches!(answer, Some(Ok(Answer::Reset(_)))), "{answer:?}");
    reader.read_all(&mut world);
    assert_eq!(reader.pages(), BTreeSet::new(), "the reset was answered");
    assert_eq!(reader.reasons, ["evicted", "reset"].into());
}

#[test]
fn a_reader_that_stays_away_for_a_minute_begins_again() {
    let mut world = with_stored(8);
    let mut reader = Reader::new();
    reader.read_all(&mut world);
    for (away, lost) in [
        (LOG_IDLE, false),
        (LOG_IDLE + Duration::from_nanos(1), true),
    ] {
        world.now = world.now + away;
        world.event(LeaderEvent::Tick);
        assert_eq!(reader.read(&mut world), (lost, !lost), "after {away:?}");
    }
    let end = world.leader.log_end();
    reader.read_all(&mut world);
    assert_eq!(reader.pages(), found(&world));
    world.now = world.now + 2 * LOG_IDLE;
    store(&mut world, 1, 30);
    assert_eq!(world.leader.log_end(), end + 1, "nothing is recorded");
}

/// A reader that began before the pools open gets their pages as records, and gets to know that one has closed.
#[test]
fn a_tier_that_opens_is_listed_and_one_that_closes_is_cleared() {
    let mut site = inventory::Reader::new();
    for engine in 0..2 {
        site.step(LeaderEvent::EngineOpened(engine_id(engine)));
    }
    site.attach_all();
    let mut read = Reader::new().read;
    read.most = 100;
    let part = site.leader.read_log(site.now, &read);
    assert_eq!(
        (part.lost, part.cursor, part.changes.len()),
        (true, None, 0)
    );
    read = LogRead {
        epoch: EPOCH,
        from: part.next,
        cursor: None,
        ..read
    };
    let listed: Vec<u32> = (0..8).collect();
    for rank in 0..RANKS {
        site.part((0, rank), 0, None, &listed);
    }
    assert!(site.leader.is_ready());
    let part = site.leader.read_log(site.now, &read);
    let stored = part.changes.iter().map(|(_, change)| match change {
        Change::Stored(pages) => pages.pages.len(),
        other => unreachable!("{other:?}"),
    });
    assert_eq!((part.lost, stored.sum::<usize>()), (false, 8));
    read.from = part.next;
    // Another number of pages is another pool.
    site.attach_with(0, 0, 40);
    let part = site.leader.read_log(site.now, &read);
    assert_eq!(part.changes, [(TierId::Host, Change::Cleared)]);
    read.from = part.next;
    assert!(site.leader.read_log(site.now, &read).is_empty());
}

#[test]
fn a_reader_that_loses_records_between_two_slices_gets_the_first_slice_again() {
    let mut world = with_stored(40);
    let mut reader = Reader::new();
    for lost in [true, false] {
        assert_eq!(reader.read(&mut world), (lost, false), "a slice of 7 pages");
    }
    world.now = world.now + 2 * LOG_IDLE;
    world.event(LeaderEvent::Tick);
    assert_eq!(reader.read(&mut world), (true, false));
    reader.read_all(&mut world);
    assert_eq!(reader.pages(), found(&world));
    assert_eq!(reader.pages().len(), 40);
}

/// [`Reader::read`] checks it: the second record does not fit into the part, and the next present block would.
#[test]
fn present_pages_come_after_all_records_so_far() {
    let mut world = with_stored(8);
    store(&mut world, 2, 2);
    let mut reader = Reader::new();
    assert_eq!(reader.read(&mut world), (true, false), "one block of 8");
    for (name, pages) in [(4, 4), (6, 8)] {
        store(&mut world, name, pages);
    }
    assert_eq!(reader.read(&mut world), (false, false));
    assert_eq!(reader.pages().len(), 12, "the first record");
    reader.read_all(&mut world);
    assert_eq!(reader.pages().len(), 22);
}

/// The position of a reader belongs to one leader.
#[test]
fn records_of_another_epoch_are_lost() {
    let mut world = with_stored(8);
    let mut reader = Reader::new();
    reader.read_all(&mut world);
    assert_eq!(reader.read(&mut world), (false, true));
    reader.read.epoch = Epoch(EPOCH.0 + 1);
    assert_eq!(reader.read(&mut world), (true, false));
}

#[test]
fn a_reader_of_a_namespace_gets_the_pages_of_that_namespace_alone() {
    let mut world = with_stored(8);
    for (namespace, pages) in [(vec![0], 8), (vec![1], 0)] {
        let mut reader = Reader::new();
        reader.read.namespace = Some(namespace);
        reader.read_all(&mut world);
        assert_eq!(reader.pages().len(), pages, "present pages");
        store(&mut world, 1, 20);
        let scope = ResetScope::Everything;
        world.request(0, Request::Reset { scope, tier: None });
        store(&mut world, 0, 8);
        reader.read_all(&mut world);
        assert_eq!(reader.pages().len(), pages, "records");
        assert_eq!(reader.reasons.len(), pages.min(1));
    }
}
