//! Contradictions between the groups of a model.

use kvferry_types::GroupId;

use super::{GROUPS_MAX, HIT_TOKENS_MAX};

/// A size of a group, in tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupField {
    /// Tokens of one page.
    Page,
    /// Tokens of a window.
    Window,
    /// Tokens of a chunk.
    Chunk,
}

impl std::fmt::Display for GroupField {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Page => "page_tokens",
            Self::Window => "window_tokens",
            Self::Chunk => "chunk_tokens",
        })
    }
}

/// Why a set of groups has no rules. Each error names the field, the value and the remedy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GroupError {
    /// The groups are not in the order of their ids.
    #[error("{0} is out of order: list the groups by id, from 0")]
    Order(GroupId),
    /// A kind that this version does not know.
    #[error("attention of {0} is a kind that this version does not know")]
    Kind(GroupId),
    /// There is no group, or there are too many.
    #[error("groups is {0}: a model has 1 to {GROUPS_MAX} groups of layers with cached pages")]
    Count(usize),
    /// The hash unit is empty.
    #[error("hash_tokens is 0: give the tokens by which one page hash extends the previous one")]
    ZeroHash,
    /// The alignment of hits is out of bounds.
    #[error(
        "hit_tokens is {0}: give 1 to {HIT_TOKENS_MAX} tokens, the least common multiple of the page \
         sizes of all groups"
    )]
    HitTokens(u32),
    /// A size of a group is 0 tokens.
    #[error("{field} of {group} is 0: give at least one token")]
    Zero {
        /// The group.
        group: GroupId,
        /// The size.
        field: GroupField,
    },
    /// A page does not end where a hash ends.
    #[error(
        "page_tokens of {group} is {page_tokens}, no multiple of hash_tokens ({hash_tokens}): hash in \
         units that divide every page, such as their greatest common divisor"
    )]
    PageOfHashes {
        /// The group.
        group: GroupId,
        /// Tokens of its pages.
        page_tokens: u32,
        /// Tokens of one hash.
        hash_tokens: u32,
    },
    /// A hit could end inside a page.
    #[error(
        "hit_tokens is {hit_tokens}, no multiple of page_tokens of {group} ({page_tokens}): align hits \
         to the least common multiple of the page sizes of all groups"
    )]
    HitOfPages {
        /// The group.
        group: GroupId,
        /// Tokens of its pages.
        page_tokens: u32,
        /// Tokens between two boundaries.
        hit_tokens: u32,
    },
    /// Draft layers in a group without a rule for them.
    #[error(
        "eagle of {group} is true, and its kind is {kind}: draft layers are supported in prefix and \
         window groups; put them into a group of their own"
    )]
    Eagle {
        /// The group.
        group: GroupId,
        /// Name of the group's kind.
        kind: &'static str,
    },
}
