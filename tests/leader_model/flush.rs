//! Flushes: answered after everything that was stored before is on the disk and durable on every shard.

use kvferry_core::{MOVE_ATTEMPTS_MAX, TierPolicy};
use kvferry_types::{Answer, FlushAnswer, TierId};

use super::moves::{DOWN, RATIO, Tiered};
use super::*;

fn flush(tiered: &mut Tiered) -> Option<Reply> {
    tiered.flushes.clear();
    tiered.request(Request::Flush)
}

/// The workers that were requested confirm. Returns the answer to the last request.
fn confirmed(tiered: &mut Tiered) -> Option<Reply> {
    for (worker, id) in std::mem::take(&mut tiered.flushes) {
        tiered.step(LeaderEvent::TierFlushed {
            worker,
            epoch: EPOCH,
            id,
        });
    }
    tiered.answer()
}

fn durable(pages: u32) -> Option<Reply> {
    Some(Ok(Answer::Flush(FlushAnswer { pages })))
}

#[test]
fn a_flush_is_answered_after_the_moves_before_it_and_every_shards_confirmation() {
    let mut tiered = Tiered::new(64, &[DOWN]);
    // Four moves run at one time: the others wait.
    (0..6).for_each(|name| tiered.stored(2 * name));
    assert_eq!(flush(&mut tiered), None);
    for left in [4, 2] {
        assert_eq!(tiered.flushes, [], "{left} moves have not ended");
        assert_eq!(tiered.end_all(DOWN), left);
    }
    let workers: Vec<_> = tiered.flushes.iter().map(|(worker, _)| *worker).collect();
    let all: Vec<_> = (0..RANKS).map(|rank| worker(0, rank)).collect();
    assert_eq!(workers, all);
    let last = tiered.flushes.pop().expect("a worker");
    assert_eq!(confirmed(&mut tiered), None, "a shard is missing");
    tiered.flushes.push(last);
    assert_eq!(confirmed(&mut tiered), durable(6 * RATIO));
}

#[test]
fn a_flush_does_not_wait_for_what_is_stored_after_it() {
    let mut tiered = Tiered::new(64, &[DOWN]);
    tiered.stored(0);
    let before = tiered.take(DOWN);
    assert_eq!(flush(&mut tiered), None);
    tiered.stored(1);
    let after = tiered.take(DOWN);
    assert_eq!(tiered.flushes, []);
    before.iter().for_each(|one| tiered.end(one, RATIO, false));
    let flushes = std::mem::take(&mut tiered.flushes);
    assert_eq!(flushes.len(), usize::from(RANKS));
    after.iter().for_each(|one| tiered.end(one, RATIO, false));
    assert_eq!(tiered.flushes, [], "requested once");
}

#[test]
fn a_write_that_fails_is_tried_again_before_what_was_stored_later_and_a_flush_waits_for_it() {
    let mut tiered = Tiered::new(64, &[DOWN]);
    tiered.stored(0);
    assert_eq!(flush(&mut tiered), None);
    for name in 1..=6 {
        tiered.stored(2 * name);
    }
    let ordered = tiered.take(DOWN);
    let source = ordered[0].pairs[0].src.clone();
    tiered.end(&ordered[0], RATIO / 2, false);
    let again = tiered.take(DOWN);
    let sources: Vec<_> = again.iter().map(|one| &one.pairs[0].src).collect();
    assert_eq!(sources, [&source], "the first in the queue");
    ordered[1..]
        .iter()
        .for_each(|one| tiered.end(one, RATIO, false));
    assert_eq!(tiered.flushes, [], "it has not ended");
    tiered.end(&again[0], RATIO, false);
    assert_eq!(tiered.flushes.len(), usize::from(RANKS));
    assert_eq!(tiered.leader.counts().moves_left_out, 0);
}

#[test]
fn a_write_that_fails_each_time_is_left_out_and_counted() {
    let mut tiered = Tiered::new(64, &[DOWN]);
    tiered.stored(0);
    assert_eq!(flush(&mut tiered), None);
    for _ in 0..MOVE_ATTEMPTS_MAX {
        assert_eq!(tiered.flushes, []);
        let [one] = &tiered.take(DOWN)[..] else {
            panic!("one move");
        };
        tiered.end(one, 0, false);
    }
    assert_eq!(tiered.take(DOWN), []);
    assert_eq!(tiered.leader.counts().moves_left_out, 1);
    assert_eq!(confirmed(&mut tiered), durable(0));
}

#[test]
fn a_failed_write_keeps_its_place_although_its_block_was_queued_again_by_a_use() {
    let mut tiered = Tiered::new(64, &[DOWN]);
    (0..4).for_each(|name| tiered.stored(2 * name));
    assert_eq!(flush(&mut tiered), None);
    let running = tiered.take(DOWN);
    let source = running[0].pairs[0].src.clone();
    // The pages are not on the disk yet: the use queues the block, behind four that run and a later one.
    tiered.stored(9);
    tiered.lookup(0);
    tiered.end(&running[0], 0, false);
    running[1..]
        .iter()
        .for_each(|one| tiered.end(one, RATIO, false));
    assert_eq!(tiered.flushes, [], "the first one has not ended");
    let again = tiered.take(DOWN);
    assert_eq!(again[0].pairs[0].src, source, "before the later one");
    tiered.end(&again[0], RATIO, false);
    assert_eq!(tiered.flushes.len(), usize::from(RANKS));
    assert_eq!(again.len(), 2, "queued once");
}

/// A transfer that is late on one worker counts as late everywhere, although others may report it complete.
#[test]
fn a_write_that_is_complete_and_late_is_tried_again() {
    let mut tiered = Tiered::new(64, &[DOWN]);
    tiered.stored(0);
    let first = tiered.take(DOWN);
    tiered.now = tiered.now + Duration::from_secs(61);
    tiered.step(LeaderEvent::Tick);
    let later = tiered.now + Duration::from_secs(5);
    assert_eq!(tiered.request_until(later, Request::Flush), None);
    tiered.end(&first[0], RATIO, false);
    assert_eq!(tiered.ready(TierId::Disk), 0, "nothing late is served");
    assert_eq!(tiered.flushes, []);
    assert_eq!(tiered.end_all(DOWN), 1);
    assert_eq!(confirmed(&mut tiered), durable(RATIO));
}

#[test]
fn blocks_wait_for_a_disk_that_closes_and_a_flush_waits_with_them() {
    let mut tiered = Tiered::new(64, &[DOWN]);
    (0..6).for_each(|name| tiered.stored(2 * name));
    assert_eq!(flush(&mut tiered), None);
    let request = tiered.last_request();
    let running = tiered.take(DOWN);
    let state = |tiered: &mut Tiered, number: u64, disk: u32| {
        for rank in 0..RANKS {
            let memory = Some(tiered.memory_with(64, disk));
            tiered.step(LeaderEvent::Memory(MemoryStatement {
                worker: worker(0, rank),
                number: MemoryId(number),
                memory,
            }));
        }
    };
    state(&mut tiered, 100, 0);
    assert!(tiered.leader.pool_of(TierId::Disk).is_none());
    running.iter().for_each(|one| tiered.end(one, 0, false));
    assert_eq!((tiered.take(DOWN).len(), tiered.flushes.len()), (0, 0));
    // The disk has less room than before.
    state(&mut tiered, 101, 56);
    for left in [4, 2] {
        assert_eq!(tiered.flushes, [], "{left} moves have not ended");
        assert_eq!(tiered.end_all(DOWN), left);
    }
    confirmed(&mut tiered);
    assert_eq!(tiered.answered(request), durable(6 * RATIO));
    assert_eq!(tiered.leader.counts().moves_left_out, 0);
}

#[test]
fn nothing_is_written_before_a_worker_that_comes_back_has_the_disk_open() {
    let mut tiered = Tiered::new(64, &[DOWN]);
    (0..6).for_each(|name| tiered.stored(2 * name));
    let running = tiered.take(DOWN);
    tiered.step(LeaderEvent::WorkerLost(worker(0, 0)));
    running.iter().for_each(|one| tiered.end(one, 0, false));
    assert_eq!(tiered.take(DOWN).len(), 0);
    tiered.attach(0, 64, 0);
    assert_eq!((tiered.end_all(DOWN), tiered.end_all(DOWN)), (4, 2));
    assert_eq!(tiered.ready(TierId::Disk), 6 * RATIO);
    assert_eq!(tiered.leader.counts().moves_left_out, 0);
}

#[test]
fn a_write_that_is_tried_again_is_admitted_once() {
    let page_bytes = geometry().page_bytes;
    // The budget of an hour has room for one block.
    let admission = format!(
        "admission=bytes-per-day:{}",
        24 * u64::from(RATIO) * page_bytes
    );
    let policy: TierPolicy = admission.parse().expect("a policy");
    let mut tiered = Tiered::with(geometry().into(), 64, &[DOWN], |settings| {
        settings.tier_policies.insert(TierId::Disk, policy);
    });
    tiered.stored(0);
    let [one] = &tiered.take(DOWN)[..] else {
        panic!("one move");
    };
    tiered.end(one, 0, false);
    assert_eq!(tiered.end_all(DOWN), 1);
    assert_eq!(tiered.ready(TierId::Disk), RATIO);
    tiered.stored(2);
    assert_eq!(tiered.end_all(DOWN), 0, "the budget is used");
}

#[test]
fn a_worker_that_comes_back_receives_the_flush_again() {
    let mut tiered = Tiered::new(64, &[DOWN]);
    tiered.stored(0);
    assert_eq!(tiered.end_all(DOWN), 1);
    assert_eq!(flush(&mut tiered), None);
    let (first, id) = tiered.flushes[0];
    tiered.flushes.remove(0);
    assert_eq!(confirmed(&mut tiered), None);
    tiered.step(LeaderEvent::WorkerLost(first));
    // An answer of the connection that is gone does not count.
    let (worker, epoch) = (first, EPOCH);
    tiered.step(LeaderEvent::TierFlushed { worker, epoch, id });
    assert_eq!(tiered.answer(), None);
    let request = tiered.last_request();
    tiered.attach(first.rank.0, 64, 0);
    assert_eq!(tiered.flushes, [(first, id)]);
    confirmed(&mut tiered);
    // Its disk is read again, and lists nothing here.
    assert_eq!(tiered.answered(request), durable(0));
}

#[test]
fn a_late_flush_is_refused_with_what_it_waits_for() {
    for (moved, refusal) in [
        (false, Refusal::FlushUnfinished),
        (
            true,
            Refusal::FlushUnconfirmed {
                shards: RANKS.into(),
            },
        ),
    ] {
        let mut tiered = Tiered::new(64, &[DOWN]);
        tiered.stored(0);
        if moved {
            tiered.end_all(DOWN);
        }
        assert_eq!(flush(&mut tiered), None);
        tiered.now = tiered.now + Duration::from_secs(6);
        tiered.step(LeaderEvent::Tick);
        assert_eq!(tiered.answer(), Some(Err(refusal)));
    }
}

#[test]
fn a_flush_without_a_disk_tier_is_refused() {
    let mut world = World::new();
    world.request(1, Request::Flush);
    let mut answers = world.requests.values();
    let refused = answers.find(|(request, _)| *request == Request::Flush);
    let refused = refused.and_then(|(_, answer)| answer.clone());
    assert_eq!(refused, Some(Err(Refusal::NothingLasts)));
}

#[test]
fn a_flush_of_a_disk_that_is_only_read_is_refused_at_once() {
    let mut tiered = Tiered::new(64, &[DOWN]);
    for (writable, refusal) in [(false, Some(Err(Refusal::OnlyRead))), (true, None)] {
        tiered.step(LeaderEvent::Writable {
            worker: worker(0, 1),
            tier: TierId::Disk,
            writable,
        });
        assert_eq!(flush(&mut tiered), refusal);
    }
}

#[test]
fn a_disk_that_is_not_open_on_a_rank_refuses_flushes_and_resets_at_once() {
    let mut tiered = Tiered::new(64, &[DOWN]);
    tiered.stored(0);
    assert_eq!(tiered.end_all(DOWN), 1);
    // The engine has left, and one disk is closed.
    for (number, rank) in (100..).zip(0..RANKS) {
        tiered.step(LeaderEvent::Memory(MemoryStatement {
            worker: worker(0, rank),
            number: MemoryId(number),
            memory: None,
        }));
    }
    tiered.step(LeaderEvent::WorkerLost(worker(0, 0)));
    assert_eq!(flush(&mut tiered), Some(Err(Refusal::NotOpen)));
    let reset = |tier| Request::Reset {
        scope: ResetScope::Everything,
        tier,
    };
    let refused = Some(Err(Refusal::NotOpen));
    assert_eq!(tiered.request(reset(None)), refused);
    assert_eq!(tiered.request(reset(Some(TierId::Disk))), refused);
    assert_eq!(tiered.ready(TierId::Host), RATIO, "nothing was removed");
}
