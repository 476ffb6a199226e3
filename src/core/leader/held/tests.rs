//! Limits on held pages, and what counts for them.

use std::num::NonZeroU64;
use std::sync::Arc;

use super::*;
use crate::index::anchor::AnchorKey;
use crate::index::namespaces::{NamespaceRule, Namespaces};
use crate::leader::LeaderSettings;
use crate::leader::event::{LeaderEffect, LeaderEvent};
use crate::leader::tests::{ENGINE, arrival};
use kvferry_types::{
    Answer, DepotId, EndedCopy, Epoch, LookupAnswer, PageHashes, PageList, Part, PerTier, Rank,
    Ratio, Replica, Request, RequestId, SlotId, Time, Transfer, WorkerId,
};

const OTHER: EngineId = EngineId([2; 16]);
const WORKER: WorkerId = WorkerId {
    replica: Replica(0),
    rank: Rank(0),
};

/// A leader, and what it answered last.
struct World {
    leader: Leader,
    next: u64,
    copies: Vec<Transfer>,
}

impl World {
    /// A leader with 32 pages that serves one engine, where namespaces that begin with `a/` hold at most 6 pages.
    fn new() -> Self {
        Self::with(|_| {})
    }

    fn with(change: impl FnOnce(&mut LeaderSettings)) -> Self {
        let rule = NamespaceRule {
            prefix: b"a/".to_vec(),
            users: [kvferry_types::User::Own].into(),
            held_pages: NonZeroU64::new(6),
            // As many as there are, so that no block is evicted for it.
            stored_pages: PerTier::host(32),
            secret: None,
        };
        let ratio = Ratio::new(4).expect("in bounds");
        let namespaces = Arc::new(Namespaces::new(vec![rule]));
        let key = AnchorKey::new([1; 32]).with_namespaces(Arc::clone(&namespaces));
        let mut settings = LeaderSettings::new(Epoch(1), 1, ratio, key);
        settings.namespaces = namespaces;
        settings.halves_held_pages = true;
        settings.replicas = 2;
        change(&mut settings);
        let mut world = Self {
            leader: Leader::new(settings),
            next: 0,
            copies: Vec::new(),
        };
        let [attach, memory] = arrival(1, (0, 1), 32);
        let [attach_other, _] = arrival_of_other();
        let opened = LeaderEvent::EngineOpened(ENGINE);
        for event in [opened, attach, attach_other, memory] {
            world.step(Time(0), event);
        }
        let inventory = LeaderEvent::Inventory {
            worker: WORKER,
            depot: DepotId(1),
            read_id: 1,
            from: 0,
            next: None,
            records: Vec::new(),
        };
        world.step(Time(0), inventory);
        assert!(world.leader.is_ready());
        world
    }

    /// The memory of a second engine arrives.
    fn second_engine(&mut self) {
        let [_, memory] = arrival_of_other();
        self.step(Time(0), memory);
        self.step(Time(0), LeaderEvent::EngineOpened(OTHER));
    }

    fn step(&mut self, now: Time, event: LeaderEvent) -> Option<Result<Answer, Refusal>> {
        let mut effects = Vec::new();
        self.leader.step(now, event, &mut effects);
        assert_eq!(self.leader.check(), Ok(()));
        let mut answer = None;
        for effect in effects {
            match effect {
                LeaderEffect::Answer { answer: given, .. } => answer = Some(given),
                LeaderEffect::Transfer { transfer, .. } => self.copies.push(transfer),
                _ => {}
            }
        }
        answer
    }

    fn request(&mut self, engine: EngineId, request: Request) -> Option<Result<Answer, Refusal>> {
        self.next += 1;
        let event = LeaderEvent::Request {
            engine,
            id: RequestId(self.next),
            deadline: Time(1_000_000_000),
            request,
        };
        self.step(Time(0), event)
    }

    /// Reports the ends of all copies.
    fn end_copies(&mut self) {
        let copies = std::mem::take(&mut self.copies);
        let copies = copies.iter().map(|transfer| EndedCopy {
            bytes: 64,
            copy_us: 1,
            ..EndedCopy::complete(transfer.id)
        });
        let event = LeaderEvent::Ended {
            worker: WORKER,
            epoch: self.leader.epoch(),
            copies: copies.collect(),
        };
        self.step(Time(0), event);
    }

    fn lookup(
        &mut self,
        engine: EngineId,
        slot: u64,
        namespace: &[u8],
        (name, pages): (u8, u32),
    ) -> Result<u32, Refusal> {
        let lookup = Request::Lookup {
            slot: SlotId(slot),
            namespace: namespace.to_vec(),
            hashes: hashes(name, pages),
            have_pages: 0,
            limit_pages: None,
        };
        match self.request(engine, lookup) {
            Some(Ok(Answer::Lookup(LookupAnswer { hit_pages, .. }))) => Ok(hit_pages),
            Some(Err(refusal)) => Err(refusal),
            other => panic!("{other:?}"),
        }
    }

    fn finish(&mut self, engine: EngineId, slot: u64) {
        let slot = SlotId(slot);
        self.request(engine, Request::Finish { slot });
    }

    /// Stores a sequence, as a prompt that has ended.
    fn store(&mut self, namespace: &[u8], (name, pages): (u8, u32)) {
        let found = self.lookup(ENGINE, 99, namespace, (name, pages));
        assert_eq!(found, Ok(0));
        let store = Request::Store {
            slot: SlotId(99),
            parts: vec![Part::new(GroupId(0), 0, PageList::run(0, pages))],
            more: None,
            after: RequestId(0),
        };
        assert_eq!(self.request(ENGINE, store), None);
        self.end_copies();
        self.finish(ENGINE, 99);
    }

    fn of_rule(&self) -> u64 {
        self.leader.held_of_rules[0].pages()
    }

    fn of_engine(&self) -> u64 {
        self.leader
            .sessions
            .get(ENGINE)
            .map_or(0, |session| session.held().pages())
    }
}

/// The worker of the second replica, with the memory of [`OTHER`].
fn arrival_of_other() -> [LeaderEvent; 2] {
    arrival(1, (0, 1), 32).map(|event| match event {
        LeaderEvent::Attach(mut attached) => {
            attached.worker.replica = Replica(1);
            LeaderEvent::Attach(attached)
        }
        LeaderEvent::Memory(mut stated) => {
            stated.worker.replica = Replica(1);
            if let Some(memory) = &mut stated.memory {
                memory.engine = OTHER;
            }
            LeaderEvent::Memory(stated)
        }
        other => other,
    })
}

fn hashes(name: u8, pages: u32) -> PageHashes {
    let bytes = (0..pages).flat_map(|page| {
        let mut hash = [name; 16];
        hash[12..].copy_from_slice(&page.to_be_bytes());
        hash
    });
    PageHashes::packed(16, bytes.collect()).expect("16 bytes a page")
}

#[test]
fn a_lookup_beyond_the_pages_of_its_rule_is_refused_until_others_end() {
    let mut world = World::new();
    world.store(b"a/1", (1, 4));
    world.store(b"a/2", (2, 4));
    world.store(b"b", (3, 4));
    assert_eq!(world.lookup(ENGINE, 1, b"a/1", (1, 4)), Ok(4));
    let refused = world
        .lookup(ENGINE, 2, b"a/2", (2, 4))
        .expect_err("8 pages");
    let quota = Refusal::Quota {
        limit: "held_pages of the namespace",
        max: 6,
        held: 4,
        pages: 4,
    };
    assert_eq!(refused, quota);
    assert_eq!(world.lookup(ENGINE, 3, b"b", (3, 4)), Ok(4), "no rule");
    assert_eq!(world.lookup(ENGINE, 2, b"a/2", (2, 2)), Ok(2), "6 pages");
    // A later lookup of a slot releases what the earlier one held.
    assert_eq!(world.lookup(ENGINE, 1, b"a/1", (1, 3)), Ok(3));
    world.finish(ENGINE, 2);
    world.finish(ENGINE, 1);
    assert_eq!(world.of_rule(), 0);
    assert_eq!(world.lookup(ENGINE, 2, b"a/2", (2, 4)), Ok(4));
    // The hold expires.
    let late = Time(0) + world.leader.settings.hold_for;
    world.step(late, LeaderEvent::Tick);
    assert_eq!((world.of_rule(), world.of_engine()), (0, 0));
    let refused = super::super::COUNTERS
        .iter()
        .find(|counter| counter.name == "refused_lookups_quota");
    let value = refused.expect("a counter").value;
    assert_eq!(
        value(
            &world.leader.counts(),
            &world.leader.pool_counts(TierId::Host)
        ),
        1
    );
}

#[test]
fn the_usage_of_a_rule_has_its_held_and_its_stored_pages() {
    let mut world = World::new();
    let usage = |world: &World| {
        let all: Vec<_> = world.leader.rule_usage().collect();
        let [of_a] = &all[..] else {
            panic!("{all:?}");
        };
        assert_eq!(of_a.rule.prefix, b"a/");
        (of_a.held_pages, of_a.stored_pages.clone())
    };
    assert_eq!(usage(&world), (0, PerTier::host(0)));
    world.store(b"a/1", (1, 4));
    world.store(b"b", (3, 3));
    assert_eq!(usage(&world), (0, PerTier::host(4)));
    assert_eq!(world.lookup(ENGINE, 1, b"a/1", (1, 2)), Ok(2));
    assert_eq!(world.lookup(ENGINE, 2, b"b", (3, 3)), Ok(3));
    assert_eq!(usage(&world), (2, PerTier::host(4)));
    world.finish(ENGINE, 1);
    assert_eq!(usage(&world), (0, PerTier::host(4)));
}

#[test]
fn a_hit_of_more_pages_than_its_rule_holds_is_cut() {
    let mut world = World::new();
    world.store(b"a/1", (1, 12));
    // Blocks have 4 pages: two of them would be 8.
    assert_eq!(world.lookup(ENGINE, 1, b"a/1", (1, 12)), Ok(4));
    assert_eq!(world.of_rule(), 4);
    assert_eq!(world.leader.counts().withheld_pages, 8);
}

#[test]
fn pages_before_a_found_one_in_its_block_count_because_they_cannot_be_evicted() {
    let mut world = World::with(|settings| settings.page_index = true);
    world.store(b"a/1", (1, 4));
    world.store(b"a/2", (2, 4));
    let last_page = |name| {
        let hashes = hashes(name, 4).into_bytes();
        PageHashes::packed(16, hashes[48..].to_vec()).expect("one hash")
    };
    let mut lookup = |slot, namespace: &[u8], name| {
        let lookup = Request::Lookup {
            slot: SlotId(slot),
            namespace: namespace.to_vec(),
            hashes: last_page(name),
            have_pages: 0,
            limit_pages: None,
        };
        let answer = world.request(ENGINE, lookup).expect("an answer");
        (answer, (world.of_rule(), world.of_engine()))
    };
    let (found, counts) = lookup(1, b"a/1", 1);
    assert!(
        matches!(found, Ok(Answer::Lookup(LookupAnswer { hit_pages: 1, .. }))),
        "{found:?}"
    );
    assert_eq!(counts, (4, 4));
    // A second block would be 8 pages of the 6.
    let (refused, _) = lookup(2, b"a/2", 2);
    assert!(
        matches!(
            refused,
            Err(Refusal::Quota {
                held: 4,
                pages: 4,
                ..
            })
        ),
        "{refused:?}"
    );
}

#[test]
fn a_store_follows_a_lookup_that_was_refused() {
    let mut world = World::new();
    world.store(b"a/1", (1, 8));
    world.store(b"a/2", (2, 4));
    assert_eq!(world.lookup(ENGINE, 2, b"a/2", (2, 4)), Ok(4));
    assert!(world.lookup(ENGINE, 1, b"a/1", (1, 8)).is_err());
    let store = Request::Store {
        slot: SlotId(1),
        parts: vec![Part::new(GroupId(0), 0, PageList::run(0, 8))],
        more: None,
        after: RequestId(0),
    };
    let answer = world.request(ENGINE, store);
    assert!(matches!(answer, Some(Ok(Answer::Store(_)))), "{answer:?}");
}

#[test]
fn pages_of_a_load_count_until_it_has_ended() {
    let mut world = World::new();
    world.store(b"a/1", (1, 4));
    assert_eq!(world.lookup(ENGINE, 1, b"a/1", (1, 4)), Ok(4));
    // The load ends inside the block, and its slot is finished while it runs.
    let load = Request::Load {
        slot: SlotId(1),
        parts: vec![Part::new(GroupId(0), 0, PageList::run(8, 3))],
        after: RequestId(0),
    };
    assert_eq!(world.request(ENGINE, load), None);
    world.finish(ENGINE, 1);
    assert_eq!((world.of_rule(), world.of_engine()), (3, 3));
    let refused = world.lookup(ENGINE, 2, b"a/1", (1, 4));
    assert!(
        matches!(refused, Err(Refusal::Quota { held: 3, .. })),
        "{refused:?}"
    );
    world.end_copies();
    assert_eq!((world.of_rule(), world.of_engine()), (0, 0));
}

#[test]
fn an_engine_among_several_holds_half_of_host_memory() {
    let mut world = World::new();
    for name in 1..=6 {
        world.store(b"b", (name, 4));
    }
    for slot in 1..=5 {
        let name = u8::try_from(slot).expect("small");
        assert_eq!(
            world.lookup(ENGINE, slot, b"b", (name, 4)),
            Ok(4),
            "the only engine"
        );
    }
    world.second_engine();
    // 20 of 32 pages are held, more than half.
    assert_eq!(world.lookup(ENGINE, 6, b"b", (6, 4)), Ok(0));
    assert_eq!(world.leader.counts().withheld_pages, 4);
    assert_eq!(
        world.lookup(OTHER, 1, b"b", (6, 4)),
        Ok(4),
        "another engine"
    );
    world.finish(ENGINE, 1);
    world.finish(ENGINE, 2);
    assert_eq!(world.of_engine(), 12);
    assert_eq!(world.lookup(ENGINE, 6, b"b", (6, 4)), Ok(4));
    assert_eq!(world.of_engine(), 16);
}
