//! A leader that learns from a worker that its epoch was used before.

use std::sync::{Arc, Mutex};

use kvferry_actors::{LeaderArguments, run_leader};
use kvferry_core::{AnchorKey, LeaderSettings};
use kvferry_transport::{Limits, MemoryTransport};
use kvferry_types::{Epoch, Ratio};

use super::world::{Puppet, RANKS, server, soon};

#[tokio::test(start_paused = true)]
async fn a_leader_whose_epoch_a_depot_has_seen_notes_that_and_ends() {
    let transport = MemoryTransport::default();
    let noted: Arc<Mutex<Vec<Epoch>>> = Arc::default();
    let notes = Arc::clone(&noted);
    let ratio = Ratio::new(4).expect("in bounds");
    let settings = LeaderSettings::new(Epoch(1), RANKS, ratio, AnchorKey::new([7; 32]));
    let started = run_leader(LeaderArguments {
        set_log: None,
        restarts: None,
        settings,
        server: server(&transport, 1, Limits::default()).await,
        supervisor: None,
        raise_epoch: Some(Box::new(move |epoch| {
            notes.lock().expect("no panic").push(epoch);
            Ok(())
        })),
    });
    let (mut process, _) = started.await.expect("a leader");
    let mut worker = Puppet::start(&transport, 0);
    worker.depot_epoch = 7;
    worker.receive().await;
    let requested = tokio::spawn(async move { worker.request_attach().await });
    let why = soon("the end of the leader", process.failed()).await;
    assert!(why.contains("read by a leader of epoch 7"), "{why}");
    assert_eq!(*noted.lock().expect("no panic"), [Epoch(7)]);
    requested.abort();
}
