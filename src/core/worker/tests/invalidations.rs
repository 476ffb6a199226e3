//! Invalidations are accepted only from the leader that the worker follows.

use super::*;

#[test]
fn an_invalidation_of_another_epoch_changes_nothing() {
    let mut worker = worker();
    let mut invalidate = |epoch: u64| {
        let invalidate = WorkerEvent::Invalidate {
            tier: None,
            epoch: Epoch(epoch),
            id: ResetId(3),
            scope: Scope::Everything,
            through: TransferId(9),
            deadline: Time(100),
        };
        step(&mut worker, 0, invalidate)
    };
    assert_eq!(invalidate(2), [stale(2, 1)]);
    assert_eq!(invalidate(0), [stale(0, 1)]);
    let id = ResetId(3);
    let through = kvferry_types::Stored {
        epoch: Epoch(1),
        transfer: TransferId(9),
    };
    let scope = Scope::Everything;
    let deadline = Time(100);
    let invalidations = WorkerEffect::Invalidate {
        tier: None,
        id,
        scope,
        through,
        deadline,
    };
    assert_eq!(invalidate(1), [invalidations]);
}
