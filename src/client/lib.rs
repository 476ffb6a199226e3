//! Clients of kvferry, for engines in Rust, tools and tests.
//!
//! [`EngineClient`] is the scheduler's connection to a leader: lookups, loads and stores, whose guards give holds and
//! device pages back however they end. [`RankSession`] keeps the memory of one engine rank registered with its worker.
//! [`AdminClient`] reads the state of a leader and resets pages. All of them reconnect by themselves, and repeat what
//! was not answered.

#![forbid(unsafe_code)]

mod admin;
mod engine;
mod outbox;
mod rank;
mod shared;
mod transfer;

pub use admin::AdminClient;
pub use engine::{EngineClient, EngineSettings, PromptPages, RequestGuard, StoredPages};
pub use kvferry_transport::Failure;
pub use rank::{RankFailure, RankSession, RankSessionSettings, SessionMemory};
pub use shared::{AbandonOnRanks, FINISH_LIMIT, NotConfirmed, SLOTS_MAX};
pub use transfer::{
    LoadGuard, PagesInUse, StoreGuard, TRANSFERS_MAX, TransferFailure, TransferPages,
};
