//! The actors over the in-memory transport and with paused time, which advances only while all tasks wait: a leader
//! with scripted engines and workers, and a worker with a scripted leader.

#![expect(
    clippy::expect_used,
    clippy::panic,
    reason = "a test says what it expects"
)]

mod actors {
    mod client_edges;
    mod client_limits;
    mod clients;
    mod deadlines;
    mod drain;
    mod epochs;
    mod orders;
    mod pressure;
    mod rank_edges;
    mod restart;
    mod seats;
    mod supervision;
    mod unregister;
    mod workers;
    mod world;
}
