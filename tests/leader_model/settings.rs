//! Leaders and workers that were started with different settings.

use kvferry_core::AttachedDepot;
use kvferry_types::PerTier;
use kvferry_types::Sharding;

use super::*;

/// How far an epoch may be ahead of that of a leader.
const CENTURY_MS: u64 = 100 * 366 * 24 * 3600 * 1000;

/// A leader for this number of ranks and shards, with one engine, which is known.
fn leader(ranks: u16, shards: u16) -> Leader {
    let mut settings = settings();
    settings.sharding = Sharding::new(ranks, shards).expect("divides");
    settings.replicas = 1;
    let mut leader = Leader::new(settings);
    let opened = LeaderEvent::EngineOpened(engine_id(0));
    leader.step(Time(0), opened, &mut Vec::new());
    leader
}

/// Attaches a worker that was started for this number of ranks and shards, with the engine's memory.
fn attach(leader: &mut Leader, rank: u16, settings: (u16, u16)) -> Vec<LeaderEffect> {
    attach_depot(leader, rank, settings, Epoch(0))
}

/// Attaches like [`attach`], with a depot that a leader of this epoch has read last.
fn attach_depot(
    leader: &mut Leader,
    rank: u16,
    (ranks, shards): (u16, u16),
    depot_epoch: Epoch,
) -> Vec<LeaderEffect> {
    let attached = LeaderEvent::arrival(
        AttachRequest {
            worker: worker(0, rank),
            ranks,
            shards,
            attach: AttachId(depot_epoch.0.saturating_add(1)),
            depots: PerTier::host(AttachedDepot {
                depot: DepotId(rank.into()),
                epoch: depot_epoch,
            }),
        },
        WorkerMemory {
            engine: engine_id(0),
            geometry: geometry().into(),
            arena_pages: PerTier::host(60),
        },
    );
    let mut effects = Vec::new();
    for event in attached {
        leader.step(Time(0), event, &mut effects);
        leader.check().expect("the second count agrees");
    }
    effects
}

/// If the worker of rank 0 were admitted, the replica would be complete for the leader, and loads would be answered
/// although rank 1 copied nothing.
#[test]
fn a_worker_of_an_engine_with_more_ranks_than_the_leader_is_refused() {
    let mut leader = leader(1, 1);
    for rank in 0..2 {
        let effects = attach(&mut leader, rank, (2, 2));
        let expected = Refusal::SettingDiffers {
            worker: worker(0, rank),
            setting: "ranks",
            value: 2,
            expected: 1,
        };
        let reads = |effect: &LeaderEffect| matches!(effect, LeaderEffect::ReadInventory { .. });
        assert!(!effects.iter().any(reads), "{effects:?}");
        assert_eq!(admission(&effects), Err(expected));
    }
    assert!(!leader.is_ready());
    assert_eq!(leader.attached_workers(), 0);
    let mut effects = Vec::new();
    let requested = LeaderEvent::Request {
        engine: engine_id(0),
        id: RequestId(1),
        deadline: Time(1),
        request: Request::Lookup {
            slot: SlotId(0),
            namespace: Vec::new(),
            hashes: sequence(0, 4),
            have_pages: 0,
            limit_pages: None,
        },
    };
    leader.step(Time(0), requested, &mut effects);
    let [
        LeaderEffect::Answer {
            answer: Err(why), ..
        },
    ] = &effects[..]
    else {
        panic!("{effects:?}");
    };
    let why = why.to_string();
    let expected = "attach.ranks of rank 1 is 2, and this leader was started for 1: start leader and workers \
                    with the same ranks";
    assert!(why.contains(expected), "{why}");
}

#[test]
fn a_worker_with_other_settings_is_refused_and_one_with_the_same_is_admitted() {
    let all = [(4, 4), (4, 2), (4, 1), (2, 2), (2, 1), (1, 1)];
    for own in all {
        for theirs in all.into_iter().chain([(0, 0), (4, 0), (0, 1)]) {
            let mut leader = leader(own.0, own.1);
            let reported = admission(&attach(&mut leader, 0, theirs));
            let differs = |setting, value, expected| {
                let worker = worker(0, 0);
                Err(Refusal::SettingDiffers {
                    worker,
                    setting,
                    value,
                    expected,
                })
            };
            let expected = if own.0 != theirs.0 {
                differs("ranks", theirs.0, own.0)
            } else if own.1 != theirs.1 {
                differs("kv_shards", theirs.1, own.1)
            } else {
                Ok(TransferId(0))
            };
            assert_eq!(reported, expected, "{own:?} {theirs:?}");
        }
    }
}

/// A later epoch ends the leader, so that only a worker that it would take may report one.
#[test]
fn a_later_epoch_is_not_looked_at_before_seat_and_settings() {
    let later = Epoch(EPOCH.0 + 1);
    let mut leader = leader(1, 1);
    let refused = admission(&attach_depot(&mut leader, 7, (1, 1), later));
    assert!(
        matches!(refused, Err(Refusal::NoSuchWorker { .. })),
        "{refused:?}"
    );
    let refused = admission(&attach_depot(&mut leader, 0, (2, 1), later));
    assert!(
        matches!(refused, Err(Refusal::SettingDiffers { .. })),
        "{refused:?}"
    );
}

/// The epoch of this leader was used before: its readings would be refused, and its invalidations would spare the pages
/// that were stored then.
#[test]
fn a_depot_that_has_seen_the_epoch_of_a_leader_that_has_read_nothing_is_refused() {
    for seen in [EPOCH, Epoch(EPOCH.0 + 1), Epoch(EPOCH.0 + CENTURY_MS)] {
        let mut leader = leader(1, 1);
        let effects = attach_depot(&mut leader, 0, (1, 1), seen);
        let reads = |effect: &LeaderEffect| matches!(effect, LeaderEffect::ReadInventory { .. });
        assert!(!effects.iter().any(reads), "{effects:?}");
        let used = Refusal::EpochUsed {
            worker: worker(0, 0),
            depot_epoch: seen,
            epoch: EPOCH,
        };
        assert_eq!(admission(&effects), Err(used));
    }
    for seen in [EPOCH.0 + CENTURY_MS + 1, u64::MAX - 1, u64::MAX].map(Epoch) {
        let mut leader = leader(1, 1);
        let effects = attach_depot(&mut leader, 0, (1, 1), seen);
        let unknown = Refusal::EpochUnknown {
            worker: worker(0, 0),
            depot_epoch: seen,
            epoch: EPOCH,
        };
        assert_eq!(admission(&effects), Err(unknown), "{seen:?}");
    }
    let mut leader = leader(1, 1);
    let effects = attach_depot(&mut leader, 0, (1, 1), Epoch(EPOCH.0 - 1));
    let [
        LeaderEffect::Admit { .. },
        LeaderEffect::AdmitMemory { .. },
        LeaderEffect::ReadInventory {
            read_id: reading, ..
        },
    ] = &effects[..]
    else {
        panic!("{effects:?}");
    };
    leader.step(
        Time(0),
        LeaderEvent::Inventory {
            worker: worker(0, 0),
            depot: DepotId(0),
            read_id: *reading,
            from: 0,
            next: None,
            records: Vec::new(),
        },
        &mut Vec::new(),
    );
    assert!(leader.is_ready());
    let again = attach_depot(&mut leader, 0, (1, 1), EPOCH);
    assert!(admission(&again).is_ok(), "it was this leader who read it");
}
