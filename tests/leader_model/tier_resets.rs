//! Resets of one tier: it forgets its pages, on every shard, and the other tiers keep theirs.

use kvferry_types::{PagesBelow, TierId};

use super::moves::{DOWN, RATIO, Tiered};
use super::*;

fn reset(tiered: &mut Tiered, tier: TierId) -> Option<Reply> {
    tiered.invalidations.clear();
    let scope = ResetScope::Everything;
    let tier = Some(tier);
    tiered.request(Request::Reset { scope, tier })
}

/// Every shard confirms the last reset. Returns the answer.
fn confirmed(tiered: &mut Tiered) -> Option<Reply> {
    for (worker, id, _) in std::mem::take(&mut tiered.invalidations) {
        tiered.step(LeaderEvent::Invalidated {
            worker,
            epoch: EPOCH,
            id,
        });
    }
    tiered.answer()
}

/// The answer to a reset that removed these pages of host memory and of the disk.
fn removed([host, disk]: [u32; 2]) -> Option<Reply> {
    Some(Ok(Answer::Reset(ResetAnswer {
        pages: host + disk,
        below_pages: PagesBelow::disk(disk),
    })))
}

fn of_one(tier: TierId) -> [u32; 2] {
    match tier {
        TierId::Host => [RATIO, 0],
        _ => [0, RATIO],
    }
}

fn ready(tiered: &Tiered, tier: TierId) -> u32 {
    let pool = tiered.leader.pool_of(tier).expect("it serves");
    pool.page_states().ready
}

fn finish(tiered: &mut Tiered, name: u8) {
    let slot = SlotId(name.into());
    tiered.request(Request::Finish { slot });
}

/// Sequence 0 in host memory and on the disk.
fn in_both() -> Tiered {
    let mut tiered = Tiered::new(64, &[DOWN]);
    tiered.stored(0);
    assert_eq!(tiered.end_all(DOWN), 1);
    tiered
}

#[test]
fn a_reset_of_one_tier_keeps_the_pages_of_the_other_one() {
    for (tier, other) in [(TierId::Disk, TierId::Host), (TierId::Host, TierId::Disk)] {
        let mut tiered = in_both();
        assert_eq!(reset(&mut tiered, tier), None, "the shards are awaited");
        assert_eq!((ready(&tiered, tier), ready(&tiered, other)), (0, RATIO));
        let tiers: Vec<_> = tiered.invalidations.iter().map(|order| order.2).collect();
        assert_eq!(tiers, vec![Some(tier); usize::from(RANKS)]);
        assert_eq!(confirmed(&mut tiered), removed(of_one(tier)));
        assert_eq!(tiered.lookup(0), RATIO, "{other} has the pages");
    }
}

#[test]
fn a_reset_of_one_tier_is_refused_only_while_pages_of_that_tier_are_held() {
    let mut tiered = in_both();
    assert_eq!(tiered.lookup(0), RATIO);
    let refused = reset(&mut tiered, TierId::Host);
    assert_eq!(refused, Some(Err(Refusal::Leased { holders: 1 })));
    assert_eq!(reset(&mut tiered, TierId::Disk), None);
    assert_eq!(confirmed(&mut tiered), removed(of_one(TierId::Disk)));
    finish(&mut tiered, 0);
    assert_eq!(reset(&mut tiered, TierId::Host), None);
    assert_eq!(confirmed(&mut tiered), removed(of_one(TierId::Host)));
    assert_eq!(tiered.lookup(0), 0);
}

#[test]
fn a_move_into_a_tier_that_is_reset_is_cancelled_and_awaited() {
    let mut tiered = Tiered::new(64, &[DOWN]);
    tiered.stored(0);
    let moves = tiered.take(DOWN);
    assert_eq!(reset(&mut tiered, TierId::Disk), None);
    assert_eq!(
        tiered.invalidations,
        [],
        "the move may still list its pages"
    );
    moves.iter().for_each(|one| tiered.end(one, RATIO, false));
    assert_eq!(ready(&tiered, TierId::Disk), 0);
    assert_eq!(confirmed(&mut tiered), removed(of_one(TierId::Disk)));
    assert_eq!(ready(&tiered, TierId::Host), RATIO);
}

#[test]
fn a_reset_of_a_tier_that_the_leader_does_not_have_is_refused() {
    let mut tiered = in_both();
    for tier in [TierId::Remote, TierId::Device] {
        let refused = reset(&mut tiered, tier);
        let Some(Err(Refusal::Invalid { field, value, .. })) = refused else {
            unreachable!("{refused:?}")
        };
        assert_eq!((field, value), ("tier", tier.to_string()));
    }
}

#[test]
fn a_reset_of_a_disk_that_is_only_read_is_refused_at_once_and_removes_nothing() {
    let mut tiered = in_both();
    let writable = |tiered: &mut Tiered, writable| {
        tiered.step(LeaderEvent::Writable {
            worker: worker(0, 1),
            tier: TierId::Disk,
            writable,
        });
    };
    let everywhere = |tiered: &mut Tiered| {
        tiered.invalidations.clear();
        tiered.request(Request::Reset {
            scope: ResetScope::Everything,
            tier: None,
        })
    };
    writable(&mut tiered, false);
    assert_eq!(everywhere(&mut tiered), Some(Err(Refusal::OnlyRead)));
    let refused = reset(&mut tiered, TierId::Disk);
    assert_eq!(refused, Some(Err(Refusal::OnlyRead)));
    assert_eq!(tiered.invalidations, []);
    for tier in [TierId::Host, TierId::Disk] {
        assert_eq!(ready(&tiered, tier), RATIO, "{tier}");
    }
    assert_eq!(
        reset(&mut tiered, TierId::Host),
        None,
        "its pages are in memory"
    );
    assert_eq!(confirmed(&mut tiered), removed(of_one(TierId::Host)));
    writable(&mut tiered, true);
    assert_eq!(everywhere(&mut tiered), None);
    assert_eq!(confirmed(&mut tiered), removed(of_one(TierId::Disk)));
}

#[test]
fn a_reset_of_all_tiers_says_how_many_pages_each_of_them_had() {
    let mut tiered = in_both();
    finish(&mut tiered, 0);
    assert_eq!(reset(&mut tiered, TierId::Host), None);
    assert_eq!(confirmed(&mut tiered), removed([RATIO, 0]));
    tiered.stored(1);
    finish(&mut tiered, 1);
    assert_eq!(tiered.end_all(DOWN), 1);
    let held = [TierId::Host, TierId::Disk].map(|tier| ready(&tiered, tier));
    assert!(held[0] > 0 && held[1] > held[0], "{held:?}");
    tiered.invalidations.clear();
    let scope = ResetScope::Everything;
    let awaited = tiered.request(Request::Reset { scope, tier: None });
    assert_eq!(awaited, None);
    assert_eq!(confirmed(&mut tiered), removed(held));
}
