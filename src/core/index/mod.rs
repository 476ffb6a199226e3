//! Where the blocks of a tier are, what they hold, and how they are found.
//!
//! [`arena`] allocates runs of pages, [`blocks`] holds what is in them and how old it is. [`anchor`] names a page of a
//! namespace; [`block_index`] finds the blocks that begin with it, [`page_index`] those that hold it.

pub(crate) mod anchor;
pub(crate) mod arena;
pub(crate) mod block_index;
pub(crate) mod blocks;
pub(crate) mod cells;
pub(crate) mod contradiction;
pub(crate) mod namespaces;
pub(crate) mod page_index;
pub(crate) mod prefetch;
pub(crate) mod sequence_cursor;
pub(crate) mod shard_set;
pub(crate) mod start_filter;
