//! Reasons why no plan can be made.

use std::fmt;

use kvferry_types::{Attention, TensorRole};

/// Limit on the pieces of a plan for one group and one source rank: 4 MiB.
pub const PIECES_MAX: usize = 65_536;

/// One of the two engines of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlanSide {
    /// The engine whose pages are read.
    Source,
    /// The engine whose pages are written.
    Target,
    /// A registration that is checked by itself.
    Alone,
}

impl fmt::Display for PlanSide {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Source => "source",
            Self::Target => "target",
            Self::Alone => "registration",
        })
    }
}

/// The part of a registration that an error is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum At {
    /// The registration as a whole.
    Registration,
    /// A group, by its id.
    Group(usize),
    /// A tensor: group, layer and role.
    Tensor(usize, u32, TensorRole),
}

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Registration => Ok(()),
            Self::Group(group) => write!(f, "group {group}: "),
            Self::Tensor(group, layer, role) => {
                write!(f, "group {group}, layer {layer}, {}: ", role.name())
            }
        }
    }
}

/// A reason why no plan can be made: the field, the values, and what would help.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// Both sides must say the same.
    #[error(
        "{at}{field} is {source_value} at the source and {target_value} at the target: {remedy}"
    )]
    Differ {
        /// Where.
        at: At,
        /// Name of the field.
        field: &'static str,
        /// Value at the source.
        source_value: String,
        /// Value at the target.
        target_value: String,
        /// What would help.
        remedy: &'static str,
    },
    /// Two numbers of one side, neither of which divides the other.
    #[error(
        "{at}the {side} has {field} {value} and tp_size {ranks}, of which neither divides the other: its ranks hold \
         unequal slices, which no plan covers"
    )]
    Unequal {
        /// The side.
        side: PlanSide,
        /// Where.
        at: At,
        /// Name of the field.
        field: &'static str,
        /// Its value.
        value: u64,
        /// Ranks of the side.
        ranks: u16,
    },
    /// A field is needed, and absent.
    #[error(
        "{at}the {side} does not say {field}, without which only pages of equal engines can be copied: the sides differ \
         in {difference}"
    )]
    Unnamed {
        /// The side.
        side: PlanSide,
        /// Where.
        at: At,
        /// Name of the field.
        field: &'static str,
        /// The field in which the sides differ.
        difference: &'static str,
    },
    /// A registration contradicts itself.
    #[error("{at}the {side} has {field} {value}, but {expected}")]
    Contradiction {
        /// The side.
        side: PlanSide,
        /// Where.
        at: At,
        /// Name of the field.
        field: &'static str,
        /// Its value.
        value: u64,
        /// What other fields of the side say.
        expected: String,
    },
    /// The division over the ranks is unknown to this version.
    #[error("{at}slices at the {side} has a word that this version does not know: no plan is made")]
    UnknownSlices {
        /// The side.
        side: PlanSide,
        /// Where.
        at: At,
    },
    /// The kind of attention is unknown to this version.
    #[error("{at}attention is {} at the {side}, which this version cannot plan", .attention.name())]
    Attention {
        /// The side.
        side: PlanSide,
        /// Where.
        at: At,
        /// The kind.
        attention: Attention,
    },
    /// The rank is beyond those of the target.
    #[error("rank is {rank}, but the target has {ranks} ranks: give one from 0 to {}", ranks.saturating_sub(1))]
    Rank {
        /// The rank.
        rank: u16,
        /// Ranks of the target.
        ranks: u16,
    },
    /// Pages fall into too many pieces.
    #[error(
        "{at}a page falls into more than {PIECES_MAX} pieces: the order of its axes in memory makes runs too short; an \
         order with heads before tokens has longer ones"
    )]
    Pieces {
        /// Where.
        at: At,
    },
}
