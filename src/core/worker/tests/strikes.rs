//! Strikes are accepted only from the leader that the worker follows.

use super::*;

#[test]
fn a_strike_of_another_epoch_strikes_nothing() {
    let mut worker = worker();
    let mut strike = |epoch: u64| {
        let strike = WorkerEvent::Strike {
            epoch: Epoch(epoch),
            id: ResetId(3),
            scope: Scope::Everything,
            through: Generation(9),
            deadline: Time(100),
        };
        step(&mut worker, 0, strike)
    };
    assert_eq!(strike(2), [stale(2, 1)]);
    assert_eq!(strike(0), [stale(0, 1)]);
    let id = ResetId(3);
    let through = kvferry_types::Stored {
        epoch: Epoch(1),
        generation: Generation(9),
    };
    let scope = Scope::Everything;
    let deadline = Time(100);
    let strikes = WorkerEffect::Strike {
        id,
        scope,
        through,
        deadline,
    };
    assert_eq!(strike(1), [strikes]);
}
