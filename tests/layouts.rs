//! Pages of every layout that engines use are copied as a reference copies them, which finds each element by shape and
//! strides alone; and no other byte changes, neither in the engine's memory nor in the depot.

#![expect(clippy::expect_used, reason = "a test says what it expects")]

mod layouts {
    pub mod engine;
    mod named;
    mod random;
    pub mod world;
}
