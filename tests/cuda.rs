//! The CUDA driver and the stream actor, on a driver for tests that needs no GPU.

#![expect(clippy::expect_used, reason = "a test says what it expects")]

#[path = "layouts/engine.rs"]
mod engine;

mod cuda {
    pub mod copies;
    pub mod driver;
    pub mod errors;
    pub mod fake;
    #[path = "../support/fake_cuda.rs"]
    pub mod fake_cuda;
    pub mod world;
}
