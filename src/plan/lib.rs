//! Plans of transfers between two engines whose ranks hold other slices of the KV: unequal tensor parallelism, pages of
//! other sizes, replicated heads.
//!
//! A plan is made once from one registration of each side, without I/O. Afterwards a transfer only adds page numbers. No
//! plan is made from what the registrations do not say: see [`PlanError`].
//!
//! Who holds what, with `ranks` T, `kv_heads` K, and divisions that round down:
//!
//! | tensor | rank r holds |
//! | --- | --- |
//! | heads, T <= K | the heads from r K / T to (r + 1) K / T |
//! | heads, T > K | head r K / T, as its T / K - 1 neighbours |
//! | latent | everything |
//! | state | of each part with global dimension C, the rows from r C / T to (r + 1) C / T |

#![forbid(unsafe_code)]

mod compare;
mod error;
mod holders;
mod pieces;
mod plan;
mod side;
#[cfg(test)]
mod tests;

pub use error::{At, PIECES_MAX, PlanError, PlanSide};
pub use pieces::Piece;
pub use plan::{Fetch, GroupPlan, Plan, plan, readers};
pub use side::{Side, SideGroup};
