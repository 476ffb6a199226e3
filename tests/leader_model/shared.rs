//! Ranks that hold the same KV: one of them stores it, all of them load it.

use kvferry_core::AttachedDepot;
use kvferry_types::{Part, PerTier, ResetId, Scope, Sharding, TransferId};

use super::*;

/// A leader of one engine with four ranks and two shards.
struct Shared {
    leader: Leader,
    last_request: u64,
}

fn place(rank: u16) -> WorkerId {
    worker(0, rank)
}

fn depot(rank: u16) -> DepotId {
    DepotId(u128::from(rank / 2) + 100)
}

impl Shared {
    fn new() -> Self {
        let mut settings = settings();
        settings.sharding = Sharding::new(4, 2).expect("divides");
        settings.replicas = 1;
        let mut shared = Self {
            leader: Leader::new(settings),
            last_request: 0,
        };
        shared.step(LeaderEvent::EngineOpened(engine_id(0)));
        shared
    }

    /// A leader that serves.
    fn ready() -> Self {
        let mut shared = Self::new();
        let mut requested = Vec::new();
        for rank in 0..4 {
            requested = shared.attach(rank, depot(rank));
        }
        let read: Vec<(WorkerId, DepotId)> = requested
            .into_iter()
            .filter_map(|effect| match effect {
                LeaderEffect::ReadInventory { worker, depot, .. } => Some((worker, depot)),
                _ => None,
            })
            .collect();
        assert_eq!(
            read,
            [(place(0), depot(0)), (place(2), depot(2))],
            "one of each shard"
        );
        for (worker, depot) in read {
            shared.step(LeaderEvent::Inventory {
                worker,
                depot,
                read_id: 1,
                from: 0,
                next: None,
                records: Vec::new(),
            });
        }
        assert!(shared.leader.is_ready());
        shared
    }

    fn step(&mut self, event: LeaderEvent) -> Vec<LeaderEffect> {
        let mut effects = Vec::new();
        self.leader.step(Time(0), event, &mut effects);
        self.leader.check().expect("the second count agrees");
        effects
    }

    fn attach(&mut self, rank: u16, depot: DepotId) -> Vec<LeaderEffect> {
        self.last_request += 1;
        let arrival = LeaderEvent::arrival(
            AttachRequest {
                worker: place(rank),
                ranks: 4,
                shards: 2,
                attach: AttachId(self.last_request),
                depots: PerTier::host(AttachedDepot {
                    depot,
                    epoch: Epoch(0),
                }),
            },
            WorkerMemory {
                engine: engine_id(0),
                geometry: geometry().into(),
                arena_pages: PerTier::host(60),
            },
        );
        arrival
            .into_iter()
            .flat_map(|event| self.step(event))
            .collect()
    }

    fn request(&mut self, request: Request) -> Vec<LeaderEffect> {
        self.last_request += 1;
        self.step(LeaderEvent::Request {
            engine: engine_id(0),
            id: RequestId(self.last_request),
            deadline: Time(0) + Duration::from_secs(5),
            request,
        })
    }

    /// Looks up a sequence, then sends the request. Returns the ranks that copy for it, and the copy.
    fn copies(&mut self, slot: u64, name: u8, request: Request) -> (Vec<u16>, TransferId) {
        self.request(Request::Lookup {
            slot: SlotId(slot),
            namespace: vec![7],
            hashes: sequence(name, 8),
            have_pages: 0,
            limit_pages: None,
        });
        let effects = self.request(request);
        let [
            LeaderEffect::Transfer {
                workers,
                transfer: copy,
            },
        ] = &effects[..]
        else {
            unreachable!("{effects:?}")
        };
        (
            workers.iter().map(|worker| worker.rank.0).collect(),
            copy.id,
        )
    }

    fn store(&mut self, slot: u64, name: u8) -> (Vec<u16>, TransferId) {
        let store = Request::Store {
            slot: SlotId(slot),
            parts: vec![Part::new(GroupId(0), 0, PageList::run(0, 8))],
            more: None,
            after: RequestId(0),
        };
        self.copies(slot, name, store)
    }

    fn ended(&mut self, rank: u16, transfer: TransferId) -> bool {
        let ended = EndedCopy {
            bytes: 64,
            copy_us: 1,
            ..EndedCopy::complete(transfer)
        };
        let effects = self.step(LeaderEvent::Ended {
            worker: place(rank),
            epoch: EPOCH,
            copies: vec![ended],
        });
        !effects.is_empty()
    }
}

#[test]
fn one_rank_of_each_shard_stores_in_turn_and_all_load() {
    let mut shared = Shared::ready();
    for (name, storing_ranks) in [(0, [0, 2]), (2, [1, 3]), (4, [0, 2])] {
        let (ranks, transfer) = shared.store(u64::from(name), name);
        assert_eq!(ranks, storing_ranks);
        assert!(!shared.ended(storing_ranks[0], transfer));
        for other in (0..4).filter(|rank| !storing_ranks.contains(rank)) {
            assert!(!shared.ended(other, transfer), "{other} stores nothing");
        }
        assert!(shared.ended(storing_ranks[1], transfer), "it is answered");
    }
    let load = Request::Load {
        slot: SlotId(9),
        parts: vec![Part::new(GroupId(0), 0, PageList::run(20, 8))],
        after: RequestId(0),
    };
    let (ranks, transfer) = shared.copies(9, 2, load);
    assert_eq!(ranks, [0, 1, 2, 3]);
    for rank in 0..4 {
        assert_eq!(shared.ended(rank, transfer), rank == 3);
    }
}

#[test]
fn ranks_of_a_shard_share_its_depot() {
    let mut shared = Shared::new();
    shared.attach(0, DepotId(1));
    let refused = shared.attach(1, DepotId(2));
    let verdict = admission(&refused);
    let not_shared = Refusal::DepotNotShared {
        worker: place(1),
        other: place(0),
    };
    assert_eq!(verdict, Err(not_shared));
}

#[test]
fn a_depot_is_of_one_shard() {
    let mut shared = Shared::new();
    shared.attach(0, DepotId(1));
    let refused = shared.attach(2, DepotId(1));
    let verdict = admission(&refused);
    let of_two = Refusal::DepotOfTwoShards {
        worker: place(2),
        shard: 0,
    };
    assert_eq!(verdict, Err(of_two));
}

#[test]
fn reset_pages_are_invalidated_once_per_shard() {
    let mut shared = Shared::ready();
    let invalidations = shared.request(Request::Reset {
        tier: None,
        scope: ResetScope::Everything,
    });
    let invalidate = |rank| LeaderEffect::Invalidate {
        tier: None,
        worker: place(rank),
        id: ResetId(1),
        scope: Scope::Everything,
        through: TransferId(1),
        deadline: Time(0) + Duration::from_secs(5),
    };
    assert_eq!(invalidations, [invalidate(0), invalidate(2)]);
    let mut invalidated = |rank| {
        let effects = shared.step(LeaderEvent::Invalidated {
            worker: place(rank),
            epoch: EPOCH,
            id: ResetId(1),
        });
        effects.len()
    };
    assert_eq!(
        [0, 1, 3, 2].map(&mut invalidated),
        [0, 0, 0, 1],
        "0 and 1 are of one shard; 3 is of the shard of 2, which was asked"
    );
}
