//! Resets between attaches, pools that are closed and opened, and workers that answer in between.

use kvferry_core::AttachedDepot;
use kvferry_types::{PerTier, ResetId, Scope};

use super::inventory::Reader;
use super::*;

const DEADLINE: Duration = Duration::from_secs(60);

/// Replica and rank of each worker that received an invalidation from a step.
fn requested(effects: &[LeaderEffect]) -> Vec<(u16, u16)> {
    let invalidate = |effect: &LeaderEffect| match effect {
        LeaderEffect::Invalidate {
            worker, id, scope, ..
        } => {
            assert_eq!((*id, scope), (ResetId(1), &Scope::Everything));
            Some((worker.replica.0, worker.rank.0))
        }
        _ => None,
    };
    effects.iter().filter_map(invalidate).collect()
}

fn reset(reader: &mut Reader) -> Vec<LeaderEffect> {
    let deadline = reader.now + DEADLINE;
    let scope = ResetScope::Everything;
    reader.step(LeaderEvent::Request {
        engine: engine_id(0),
        id: RequestId(1),
        deadline,
        request: Request::Reset { scope, tier: None },
    })
}

fn invalidated(reader: &mut Reader, rank: u16) -> Vec<LeaderEffect> {
    invalidated_in(reader, rank, EPOCH)
}

fn invalidated_in(reader: &mut Reader, rank: u16, epoch: Epoch) -> Vec<LeaderEffect> {
    let (worker, id) = (worker(0, rank), ResetId(1));
    reader.step(LeaderEvent::Invalidated { worker, epoch, id })
}

fn answer(effects: &[LeaderEffect]) -> Option<Reply> {
    effects.iter().find_map(|effect| match effect {
        LeaderEffect::Answer { answer, .. } => Some(answer.clone()),
        _ => None,
    })
}

/// A pool with another capacity opens when every shard but one has removed the pages. Its recovered pages are
/// forgotten in slices, and the last shard answers between two slices.
#[test]
fn a_reset_whose_last_shard_answers_while_a_new_pool_is_swept_is_answered_with_the_last_slice() {
    let mut reader = Reader::served();
    let mut settings = settings();
    settings.reset_slice_pages = 1;
    reader.leader = Leader::new(settings);
    for engine in 0..2 {
        reader.step(LeaderEvent::EngineOpened(engine_id(engine)));
    }
    reader.attach_all();
    for rank in 0..RANKS {
        reader.part((0, rank), 0, None, &[]);
    }
    let mut invalidations = requested(&reset(&mut reader));
    while invalidations.len() < usize::from(RANKS) {
        reader.now = reader.leader.next_timeout().expect("a slice");
        invalidations.extend(requested(&reader.step(LeaderEvent::Tick)));
    }
    assert_eq!(invalidations, [(0, 0), (0, 1), (0, 2)]);
    for rank in 1..RANKS {
        assert_eq!(invalidated(&mut reader, rank), []);
    }
    // A worker that has answered registers its memory again, with a smaller depot: the pool is closed, and the
    // inventories are read again.
    reader.attach_with(1, 1, 50);
    assert!(!reader.leader.is_ready());
    for rank in 0..RANKS {
        reader.part((0, rank), 0, None, &[0, 1, 2, 3]);
    }
    assert!(reader.leader.is_ready());
    assert_eq!(
        answer(&invalidated(&mut reader, 0)),
        None,
        "pages of the new pool have still to be forgotten"
    );
    let deadline = reader.now + DEADLINE / 2;
    let reported = loop {
        reader.now = reader.leader.next_timeout().expect("a slice");
        assert!(reader.now < deadline, "nobody goes on with the reset");
        let effects = reader.step(LeaderEvent::Tick);
        assert_eq!(requested(&effects), [], "every shard has answered");
        if let Some(reported) = answer(&effects) {
            break reported;
        }
    };
    assert_eq!(
        reported,
        Ok(Answer::Reset(ResetAnswer {
            pages: 4,
            ..ResetAnswer::default()
        }))
    );
}

/// A leader that stood still receives an attach twice. Its first answer came too late for the worker, which therefore
/// refused the invalidation after it. The second answer admits the worker.
#[test]
fn an_invalidation_is_repeated_after_each_answer_to_an_attach() {
    let mut reader = Reader::served();
    assert_eq!(requested(&reset(&mut reader)), [(0, 0), (0, 1), (0, 2)]);
    for replica in 0..2 {
        reader.step(LeaderEvent::WorkerDead(worker(replica, 1)));
    }
    let attached = AttachRequest {
        worker: worker(0, 1),
        ranks: RANKS,
        shards: RANKS,
        attach: AttachId(100),
        depots: PerTier::host(AttachedDepot {
            depot: DepotId(1),
            epoch: Epoch(0),
        }),
    };
    for copy in 0..2 {
        let effects = reader.step(LeaderEvent::Attach(attached.clone()));
        let admitted = effects
            .iter()
            .position(|effect| matches!(effect, LeaderEffect::Admit { verdict: Ok(_), .. }));
        let invalidate = effects
            .iter()
            .position(|effect| matches!(effect, LeaderEffect::Invalidate { .. }));
        assert_eq!(requested(&effects), [(0, 1)], "answer {copy}: {effects:?}");
        assert!(admitted < invalidate, "the order is behind the answer");
    }
    for rank in [0, 2, 1] {
        let reported = answer(&invalidated(&mut reader, rank));
        assert_eq!(reported.is_some(), rank == 1);
    }
}

/// Every leader numbers its resets from 1: the answer to an earlier leader's reset can have the number of a reset of
/// this leader.
#[test]
fn an_answer_to_a_reset_of_another_epoch_does_not_count() {
    let mut reader = Reader::served();
    assert_eq!(requested(&reset(&mut reader)), [(0, 0), (0, 1), (0, 2)]);
    for epoch in [Epoch(EPOCH.0 - 1), Epoch(EPOCH.0 + 1)] {
        for rank in 0..RANKS {
            assert_eq!(invalidated_in(&mut reader, rank, epoch), []);
        }
    }
    for rank in 0..RANKS {
        let reported = answer(&invalidated(&mut reader, rank));
        assert_eq!(reported.is_some(), rank == RANKS - 1);
    }
}
