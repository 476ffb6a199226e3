//! The actors over the transport in memory, with time that only waiting moves: a leader among engines and workers that do
//! what a test says, and a worker beside a leader that does.

#![expect(
    clippy::expect_used,
    clippy::panic,
    reason = "a test says what it expects"
)]

mod actors {
    mod deadlines;
    mod drain;
    mod epochs;
    mod orders;
    mod places;
    mod pressure;
    mod restart;
    mod supervision;
    mod unregister;
    mod workers;
    mod world;
}
