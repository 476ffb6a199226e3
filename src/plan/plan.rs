//! Makes plans.

use std::collections::BTreeMap;
use std::ops::Range;

use kvferry_types::{Attention, Slices};

use crate::compare::{Both, Hex};
use crate::error::{At, PlanError, PlanSide};
use crate::holders::{self, Run};
use crate::pieces::{self, PageTokens, Piece, Pieces};
use crate::side::{Side, SideGroup, SideTensor};

/// How one rank of the target gets its pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// Tokens of a unit of the hashes, where both sides count them alike: a page is found by the hash of its last unit.
    /// `None`: pages can be named by their position in a sequence only.
    pub hash_tokens: Option<u32>,
    /// By id.
    pub groups: Vec<GroupPlan>,
}

/// How one rank of the target gets the pages of a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupPlan {
    /// Tokens of a page of the source.
    pub source_page_tokens: u32,
    /// Tokens of a page of the target.
    pub target_page_tokens: u32,
    /// What is read from each source rank, by ascending rank.
    pub fetches: Vec<Fetch>,
    attention: Attention,
    window_tokens: u32,
}

/// What is read from one source rank for a period of tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fetch {
    /// The rank, or the shard: see [`Side::shards`].
    pub source_rank: u16,
    /// The copies, for the pages of one period.
    pub pieces: Vec<Piece>,
}

impl GroupPlan {
    /// Tokens after which pages of both sides begin together, and the pieces repeat.
    pub fn period_tokens(&self) -> u32 {
        self.tokens().period()
    }

    /// The pages of the target to take, when the source has the KV of the first `tokens` tokens: those that are filled to
    /// the last token, and still attended to by what follows. The first of them begins a period.
    pub fn target_pages(&self, tokens: u64) -> Range<u64> {
        let page_tokens = u64::from(self.target_page_tokens);
        let filled = tokens / page_tokens;
        let wanted = match self.attention {
            Attention::State => 1,
            Attention::SlidingWindow | Attention::ChunkedLocal => {
                u64::from(self.window_tokens).div_ceil(page_tokens) + 1
            }
            Attention::Full | Attention::Other => filled,
        };
        let period_pages = u64::from(self.period_tokens()) / page_tokens;
        let first = filled.saturating_sub(wanted);
        first - first % period_pages..filled
    }

    /// The pages of the source that hold the tokens of these pages of the target.
    pub fn source_pages(&self, target_pages: Range<u64>) -> Range<u64> {
        let (source, target) = (
            u64::from(self.source_page_tokens),
            u64::from(self.target_page_tokens),
        );
        target_pages.start * target / source..(target_pages.end * target).div_ceil(source)
    }

    fn tokens(&self) -> PageTokens {
        PageTokens {
            source: self.source_page_tokens,
            target: self.target_page_tokens,
        }
    }
}

/// Makes the plan of a rank of the target, from 0.
///
/// # Errors
///
/// The first difference between the sides over which no bytes can be carried, and what a registration does not say
/// though it is needed.
pub fn plan(source: &Side, target: &Side, rank: u16) -> Result<Plan, PlanError> {
    if rank >= target.ranks {
        return Err(PlanError::Rank {
            rank,
            ranks: target.ranks,
        });
    }
    let both = Both {
        source,
        target,
        at: At::Registration,
    };
    both.same(
        "groups",
        |side| side.groups.len(),
        "plans are made between engines of one model",
    )?;
    if source.content != target.content {
        let remedy = "use the same model, weights and dtype on both sides";
        return Err(both.differ(
            "content",
            Hex(&source.content),
            Hex(&target.content),
            remedy,
        ));
    }
    let groups = source.groups.iter().zip(&target.groups).enumerate();
    let groups = groups.map(|(id, groups)| group_plan(&both, id, groups, rank));
    Ok(Plan {
        hash_tokens: (source.hash_tokens == target.hash_tokens).then_some(source.hash_tokens),
        groups: groups.collect::<Result<_, _>>()?,
    })
}

/// The target ranks that read each source rank, by source rank: a page of the source is free when all of them have read
/// it.
///
/// # Errors
///
/// Those of [`plan`].
pub fn readers(source: &Side, target: &Side) -> Result<Vec<Vec<u16>>, PlanError> {
    let mut readers = vec![Vec::new(); usize::from(source.ranks)];
    for rank in 0..target.ranks {
        let plan = plan(source, target, rank)?;
        let fetches = plan.groups.iter().flat_map(|group| &group.fetches);
        for fetch in fetches {
            if let Some(found) = readers.get_mut(usize::from(fetch.source_rank))
                && found.last() != Some(&rank)
            {
                found.push(rank);
            }
        }
    }
    Ok(readers)
}

fn group_plan(
    sides: &Both<'_, Side>,
    id: usize,
    (source, target): (&SideGroup, &SideGroup),
    rank: u16,
) -> Result<GroupPlan, PlanError> {
    let both = Both {
        source,
        target,
        at: At::Group(id),
    };
    for (side, group) in [(PlanSide::Source, source), (PlanSide::Target, target)] {
        if group.attention == Attention::Other {
            return Err(PlanError::Attention {
                side,
                at: both.at,
                attention: group.attention,
            });
        }
    }
    let model = "plans are made between engines of one model";
    both.same(
        "attention",
        |group| group.attention.name().to_owned(),
        model,
    )?;
    both.same("window_tokens", |group| group.window_tokens, model)?;
    both.same(
        "layers",
        |group| group.layers,
        "both sides hold all layers of the model: no pipeline parallelism",
    )?;
    both.same("the number of tensors", |group| group.tensors.len(), model)?;
    let pages = PageTokens {
        source: source.page_tokens,
        target: target.page_tokens,
    };
    let (longer, shorter) = (pages.period(), pages.source.min(pages.target));
    if source.attention == Attention::State {
        both.same(
            "engine_page_tokens",
            |group| group.page_tokens,
            "pages of a state are neither split nor joined",
        )?;
    } else if longer % shorter != 0 {
        let remedy = "one of them must divide the other: start both engines with one page size";
        return Err(both.differ("engine_page_tokens", pages.source, pages.target, remedy));
    }
    let mut found: BTreeMap<u16, Pieces> = BTreeMap::new();
    for (source, target) in source.tensors.iter().zip(&target.tensors) {
        let at = At::Tensor(id, target.layer, target.role);
        let tensors = Both { source, target, at };
        tensors.same(
            "layer and role",
            |tensor| format!("{} {}", tensor.layer, tensor.role.name()),
            model,
        )?;
        tensor_pieces(&mut found, sides, &tensors, pages, rank)?;
    }
    let fetches = found.into_iter().map(|(source_rank, pieces)| Fetch {
        source_rank,
        pieces: pieces.into_found(),
    });
    Ok(GroupPlan {
        source_page_tokens: pages.source,
        target_page_tokens: pages.target,
        fetches: fetches.collect(),
        attention: target.attention,
        window_tokens: target.window_tokens,
    })
}

/// Adds the pieces of one (layer, role), by source rank.
fn tensor_pieces(
    found: &mut BTreeMap<u16, Pieces>,
    sides: &Both<'_, Side>,
    both: &Both<'_, SideTensor>,
    pages: PageTokens,
    rank: u16,
) -> Result<(), PlanError> {
    let (sources, targets) = (sides.source.ranks, sides.target.ranks);
    let at = both.at;
    let model = "plans are made between engines of one model";
    match (&both.source.slices, &both.target.slices) {
        (Some(Slices::Other), _) => Err(PlanError::UnknownSlices {
            side: PlanSide::Source,
            at,
        }),
        (_, Some(Slices::Other)) => Err(PlanError::UnknownSlices {
            side: PlanSide::Target,
            at,
        }),
        (
            Some(Slices::Heads { kv_heads: ours, .. }),
            Some(Slices::Heads {
                kv_heads: theirs, ..
            }),
        ) => {
            if ours != theirs {
                return Err(both.differ("kv_heads", ours, theirs, model));
            }
            both.same_axes()?;
            for run in holders::heads(u64::from(*ours), sources, targets, rank) {
                let pieces = found.entry(run.source_rank).or_default();
                pieces::tokens(pieces, at, (both.source, both.target), pages, run)?;
            }
            Ok(())
        }
        (Some(Slices::Whole { .. }), Some(Slices::Whole { .. })) => {
            both.same_axes()?;
            let run = Run {
                source_rank: holders::whole(sources, targets, rank),
                first_there: 0,
                first_here: 0,
                count: 1,
            };
            let pieces = found.entry(run.source_rank).or_default();
            pieces::tokens(pieces, at, (both.source, both.target), pages, run)
        }
        (Some(Slices::Parts { parts: ours }), Some(Slices::Parts { parts: theirs })) => {
            if ours != theirs {
                return Err(both.differ(
                    "parts",
                    format!("{ours:?}"),
                    format!("{theirs:?}"),
                    model,
                ));
            }
            let (mut source_offset, mut target_offset) =
                (both.source.offset_bytes, both.target.offset_bytes);
            for part in ours {
                let dim = u64::from(part.dim);
                for run in holders::heads(dim, sources, targets, rank) {
                    let piece = Piece {
                        source_page: 0,
                        source_offset: source_offset + run.first_there * part.row_bytes,
                        target_page: 0,
                        target_offset: target_offset + run.first_here * part.row_bytes,
                        bytes: run.count * part.row_bytes,
                        count: 1,
                        source_step: 0,
                        target_step: 0,
                    };
                    found.entry(run.source_rank).or_default().push(at, piece)?;
                }
                source_offset += dim / u64::from(sources) * part.row_bytes;
                target_offset += dim / u64::from(targets) * part.row_bytes;
            }
            Ok(())
        }
        (Some(ours), Some(theirs)) => Err(both.differ("slices", ours.name(), theirs.name(), model)),
        (ours, _) => {
            let side = if ours.is_none() {
                PlanSide::Source
            } else {
                PlanSide::Target
            };
            for (difference, equal) in [
                ("tp_size", sources == targets),
                ("engine_page_tokens", pages.source == pages.target),
                (
                    "shape or strides",
                    both.source.registered == both.target.registered,
                ),
                (
                    "page_bytes",
                    both.source.page_bytes == both.target.page_bytes,
                ),
            ] {
                if !equal {
                    return Err(PlanError::Unnamed {
                        side,
                        at,
                        field: "slices",
                        difference,
                    });
                }
            }
            let piece = Piece {
                source_page: 0,
                source_offset: both.source.offset_bytes,
                target_page: 0,
                target_offset: both.target.offset_bytes,
                bytes: both.source.page_bytes,
                count: 1,
                source_step: 0,
                target_step: 0,
            };
            found.entry(rank).or_default().push(at, piece)
        }
    }
}
