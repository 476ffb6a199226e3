//! Checks copies of pages in every layout that engines use against a reference that finds each element only by shape
//! and strides. No other byte may change, neither in the engine's memory nor in the depot.

#![expect(clippy::expect_used, reason = "a test says what it expects")]

mod layouts {
    pub mod engine;
    mod named;
    mod random;
    pub mod world;
}
