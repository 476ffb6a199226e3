//! What must hold with the rules as built, and what each broken rule breaks.

use super::super::harness::{breaks, holds};
use super::{AWAITED, ENDED, Epochs, NOTHING_OLD, ONE_WRITER, READABLE, Rule};

impl Epochs {
    fn restarted(rule: Rule) -> Self {
        Self {
            rule,
            stores: vec![1, 1],
            breaks: 0,
            remaps: 0,
            deaths: 0,
            tiers: 0,
        }
    }

    fn one_leader(rule: Rule, breaks: u8, remaps: u8, deaths: u8) -> Self {
        Self {
            rule,
            stores: vec![2],
            breaks,
            remaps,
            deaths,
            tiers: 0,
        }
    }

    fn with_tiers(rule: Rule, store: u64, remaps: u8) -> Self {
        Self {
            tiers: 1,
            stores: vec![store],
            ..Self::one_leader(rule, 0, remaps, 0)
        }
    }
}

#[test]
fn nothing_of_an_older_leader_has_an_effect() {
    holds("epochs, restarted", Epochs::restarted(Rule::Built));
    let model = Epochs {
        breaks: 1,
        ..Epochs::restarted(Rule::Built)
    };
    holds("epochs, restarted, a connection breaks", model);
    let model = Epochs {
        deaths: 1,
        ..Epochs::restarted(Rule::Built)
    };
    holds("epochs, restarted, a worker dies", model);
}

#[test]
fn a_worker_runs_only_awaited_copies_over_broken_connections() {
    let model = Epochs::one_leader(Rule::Built, 1, 0, 0);
    holds("epochs, connections break", model);
}

#[test]
fn a_worker_runs_only_awaited_copies_when_memory_is_registered_again() {
    let model = Epochs::one_leader(Rule::Built, 0, 1, 0);
    holds("epochs, memory registered anew", model);
}

#[test]
fn a_worker_runs_only_awaited_copies_when_workers_die() {
    let model = Epochs::one_leader(Rule::Built, 0, 0, 1);
    holds("epochs, workers die", model);
}

#[test]
fn a_worker_runs_only_awaited_copies_when_its_tiers_change() {
    let with_tiers = |store, remaps| Epochs::with_tiers(Rule::Built, store, remaps);
    holds("epochs, tiers change", with_tiers(2, 0));
    holds("epochs, tiers and memory change", with_tiers(1, 1));
}

#[test]
fn a_leader_that_ends_copies_with_a_statement_of_tiers_does_not_await_them() {
    let model = || Epochs::with_tiers(Rule::TiersEnd, 2, 0);
    breaks("epochs: tiers end copies", model, AWAITED);
}

#[test]
fn acknowledgements_to_an_older_leader_serve_incomplete_pages() {
    breaks(
        "epochs: any acknowledgement",
        || Epochs::restarted(Rule::AnyAck),
        READABLE,
    );
}

#[test]
fn orders_of_an_older_leader_are_carried_out() {
    breaks(
        "epochs: any order",
        || Epochs::restarted(Rule::AnyOrder),
        NOTHING_OLD,
    );
}

#[test]
fn a_repeated_order_runs_after_its_end() {
    let model = || Epochs::one_leader(Rule::RunAgain, 0, 0, 0);
    breaks("epochs: run again", model, ENDED);
    breaks("epochs: run again", model, ONE_WRITER);
}

#[test]
fn an_order_after_a_forgotten_cancel_runs_after_its_end() {
    let model = || Epochs::one_leader(Rule::ForgetCancel, 0, 0, 0);
    breaks("epochs: forgotten cancel", model, ENDED);
}

#[test]
fn a_worker_that_attaches_too_early_writes_pages_that_no_leader_awaits() {
    let model = || Epochs::restarted(Rule::AttachEarly);
    breaks("epochs: early attach", model, AWAITED);
}

#[test]
fn a_repeated_attach_over_the_next_connection_writes_pages_that_no_leader_awaits() {
    let model = || Epochs::one_leader(Rule::AttachAgain, 1, 0, 0);
    breaks("epochs: attach again", model, AWAITED);
}

#[test]
fn a_worker_that_states_its_memory_too_early_writes_pages_that_no_leader_awaits() {
    let model = || Epochs::one_leader(Rule::StateEarly, 0, 1, 0);
    breaks("epochs: early statement", model, AWAITED);
}
