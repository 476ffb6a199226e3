//! The driver and the stream actor, on a fake driver that needs no GPU. Each test runs again in a child process, which
//! loads that driver in place of a real one.

mod copies;
mod driver;
#[path = "../../../tests/layouts/engine.rs"]
mod engine;
mod errors;
mod fake;
#[path = "../../../tests/support/fake_cuda.rs"]
mod fake_cuda;
mod neighbour;
mod proofs;
mod together;
mod turns;
mod world;
