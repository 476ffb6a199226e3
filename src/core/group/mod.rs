//! Groups of layers: which pages a hit needs of each group, and how far a hit reaches.
//!
//! Layers of one kind keep one page geometry and are one group. A model with several kinds (full attention beside
//! sliding windows, or beside recurrent states) has several groups, and a hit is of use only if every group can continue
//! at its end. The rules are pure functions of tokens and pages: no pool, no request and no engine takes part.
//!
//! Tokens are counted from the beginning of a sequence. A *boundary* is a multiple of `hit_tokens`: a hit ends at one.
//! Page `i` of a group with pages of `B` tokens has the tokens `i * B..(i + 1) * B`.

mod error;
pub(crate) mod model;
pub(crate) mod presence;
mod store;

use std::ops::Range;

use kvferry_types::GroupId;

pub use error::{GroupError, GroupField};
pub use store::{Retention, Written};

/// Most groups of a model: a registration counts them in 8 bits.
pub const GROUPS_MAX: usize = 255;
/// Largest `hit_tokens`: 16 Mi tokens.
pub const HIT_TOKENS_MAX: u32 = 1 << 24;
/// Longest sequence that the rules consider, in tokens. Leaves room for one page behind the last boundary, so that no
/// sum of tokens exceeds 32 bits.
pub const SEQUENCE_TOKENS_MAX: u32 = u32::MAX - HIT_TOKENS_MAX;

/// What the layers of a group read of the tokens before the end of a hit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupKind {
    /// Every token: full attention, also with a latent (MLA).
    Prefix,
    /// The last tokens: a sliding window.
    Window {
        /// Tokens of the window, the token that attends included, and those that the engine keeps beyond it; at least 1.
        tokens: u32,
    },
    /// The tokens of the chunk that the next token belongs to: chunked local attention.
    Chunk {
        /// Tokens of a chunk; at least 1.
        tokens: u32,
    },
    /// The state after the last token: recurrent layers (SSM, linear attention, short convolutions).
    State,
}

impl GroupKind {
    /// The name for messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Prefix => "prefix",
            Self::Window { .. } => "window",
            Self::Chunk { .. } => "chunk",
            Self::State => "state",
        }
    }
}

/// The kind and page size of one group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupSpec {
    /// What the group's layers read.
    pub kind: GroupKind,
    /// Tokens of one page; at least 1.
    pub page_tokens: u32,
    /// Whether draft layers (EAGLE) use the group. They compute the last page of a hit again, so that the group must
    /// also have the page behind the end of a hit. Only for prefix and window groups.
    pub eagle: bool,
}

impl GroupSpec {
    /// The first page that a hit with this end needs, of a sequence without pages in the engine. `end` is a multiple of
    /// the page size, above 0.
    fn first_needed(&self, end: u32) -> u32 {
        let end_page = end / self.page_tokens;
        match self.kind {
            GroupKind::Prefix => 0,
            GroupKind::Window { tokens } => {
                end_page.saturating_sub((tokens - 1).div_ceil(self.page_tokens).max(1))
            }
            GroupKind::Chunk { tokens } => end / tokens * tokens / self.page_tokens,
            GroupKind::State => end_page - 1,
        }
    }

    /// 1 if the group must also have the page behind the end of a hit.
    fn behind(&self) -> u32 {
        u32::from(self.eagle)
    }
}

/// The groups of one model, by id from 0, with the units of its hashes and hits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Groups {
    specs: Vec<GroupSpec>,
    hash_tokens: u32,
    hit_tokens: u32,
}

/// The part of a sequence that a lookup considers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LookupBounds {
    /// Number of hashes: the j-th covers the tokens `0..(j + 1) * hash_tokens`.
    pub hashes: u32,
    /// Tokens that the engine has in its own memory, in every group.
    pub device_tokens: u32,
    /// Largest end of a hit. An engine computes at least the last token of a prompt, so that this is one token less
    /// than the prompt has.
    pub limit_tokens: u32,
}

/// The end of a hit, which every group can continue at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hit {
    device_tokens: u32,
    end_tokens: u32,
}

impl Hit {
    /// Tokens that the engine has in its own memory.
    pub fn device_tokens(self) -> u32 {
        self.device_tokens
    }

    /// The end of the hit: a boundary, and larger than [`Self::device_tokens`].
    pub fn end_tokens(self) -> u32 {
        self.end_tokens
    }
}

/// The pages of a sequence that a tier can read now.
pub trait Presence {
    /// Whether page `page` of a group is readable.
    fn has(&self, group: GroupId, page: u32) -> bool;

    /// The first of `pages` that is not readable.
    fn first_missing(&self, group: GroupId, mut pages: Range<u32>) -> Option<u32> {
        pages.find(|page| !self.has(group, *page))
    }

    /// The last of `pages` that is not readable.
    fn last_missing(&self, group: GroupId, pages: Range<u32>) -> Option<u32> {
        pages.rev().find(|page| !self.has(group, *page))
    }
}

impl Groups {
    /// Checks the groups of a model.
    ///
    /// # Errors
    /// Names the field, its value and the remedy: no group or more than [`GROUPS_MAX`]; a unit, page, window or chunk of
    /// 0 tokens; pages that are no multiple of `hash_tokens`; `hit_tokens` that are above [`HIT_TOKENS_MAX`] or no
    /// multiple of every page size; draft layers in a chunk or state group.
    pub fn new(
        hash_tokens: u32,
        hit_tokens: u32,
        specs: Vec<GroupSpec>,
    ) -> Result<Self, GroupError> {
        if specs.is_empty() || specs.len() > GROUPS_MAX {
            return Err(GroupError::Count(specs.len()));
        }
        if hash_tokens == 0 {
            return Err(GroupError::ZeroHash);
        }
        if hit_tokens == 0 || hit_tokens > HIT_TOKENS_MAX {
            return Err(GroupError::HitTokens(hit_tokens));
        }
        for (group, spec) in (0..).map(GroupId).zip(&specs) {
            let zero = |field| Err(GroupError::Zero { group, field });
            match spec.kind {
                _ if spec.page_tokens == 0 => return zero(GroupField::Page),
                GroupKind::Window { tokens: 0 } => return zero(GroupField::Window),
                GroupKind::Chunk { tokens: 0 } => return zero(GroupField::Chunk),
                GroupKind::Chunk { .. } | GroupKind::State if spec.eagle => {
                    let kind = spec.kind.name();
                    return Err(GroupError::Eagle { group, kind });
                }
                _ => {}
            }
            let page_tokens = spec.page_tokens;
            if !page_tokens.is_multiple_of(hash_tokens) {
                return Err(GroupError::PageOfHashes {
                    group,
                    page_tokens,
                    hash_tokens,
                });
            }
            if !hit_tokens.is_multiple_of(page_tokens) {
                return Err(GroupError::HitOfPages {
                    group,
                    page_tokens,
                    hit_tokens,
                });
            }
        }
        Ok(Self {
            specs,
            hash_tokens,
            hit_tokens,
        })
    }

    /// The groups, by id.
    pub fn specs(&self) -> impl ExactSizeIterator<Item = (GroupId, &GroupSpec)> {
        // At most `GROUPS_MAX` groups: every index fits.
        let with_id = |(index, spec)| (GroupId(u8::try_from(index).unwrap_or(u8::MAX)), spec);
        self.specs.iter().enumerate().map(with_id)
    }

    /// Tokens between two boundaries.
    pub fn hit_tokens(&self) -> u32 {
        self.hit_tokens
    }

    /// The index of the hash that names page `page` of a group: the hash of all tokens up to the end of that page.
    pub fn hash_index(&self, group: GroupId, page: u32) -> usize {
        let per_page = (self.spec(group).page_tokens / self.hash_tokens) as usize;
        (page as usize + 1) * per_page - 1
    }

    /// The longest hit that every group can continue at, beyond the tokens that the engine has. `None` where no
    /// boundary above `device_tokens` and up to the limit serves all groups.
    ///
    /// Pages of prefix, window and chunk groups below `device_tokens` count as present, because the engine has them; a
    /// state is needed at the end of the hit itself. Pages without a hash are missing. The end only falls from group to
    /// group, and a window's page is examined once, so that the cost is linear in the pages below the limit.
    pub fn reach(&self, bounds: LookupBounds, present: &impl Presence) -> Option<Hit> {
        let hashed = u64::from(bounds.hashes) * u64::from(self.hash_tokens);
        let hashed = u32::try_from(hashed).unwrap_or(u32::MAX);
        let highest = bounds.limit_tokens.min(hashed).min(SEQUENCE_TOKENS_MAX);
        let mut search = Search {
            hit_tokens: self.hit_tokens,
            hashed,
            device_tokens: bounds.device_tokens,
            end: highest / self.hit_tokens * self.hit_tokens,
        };
        let with_holes = |spec: &GroupSpec| spec.kind != GroupKind::Prefix;
        for (group, spec) in self.specs().filter(|(_, spec)| !with_holes(spec)) {
            search.prefix(group, spec, present);
        }
        let mut groups: Vec<(GroupId, &GroupSpec, u32)> = self
            .specs()
            .filter(|(_, spec)| with_holes(spec))
            .map(|(group, spec)| (group, spec, u32::MAX))
            .collect();
        loop {
            let before = search.end;
            for (group, spec, intact) in &mut groups {
                match spec.kind {
                    GroupKind::Prefix => {}
                    GroupKind::State => search.state(*group, spec, present),
                    GroupKind::Window { .. } | GroupKind::Chunk { .. } => {
                        search.range(*group, spec, intact, present);
                    }
                }
            }
            if search.end <= search.device_tokens {
                return None;
            }
            if search.end == before {
                return Some(Hit {
                    device_tokens: bounds.device_tokens,
                    end_tokens: before,
                });
            }
        }
    }

    /// The hit between two ends that an engine names, which may be shorter than the one that a lookup found. `None` if
    /// the end is no boundary or not beyond `device_tokens`.
    pub fn hit(&self, device_tokens: u32, end_tokens: u32) -> Option<Hit> {
        let ends = end_tokens > device_tokens && end_tokens <= SEQUENCE_TOKENS_MAX;
        (ends && end_tokens.is_multiple_of(self.hit_tokens)).then_some(Hit {
            device_tokens,
            end_tokens,
        })
    }

    /// The pages of a group that a hit needs and the engine lacks; a lookup pins exactly these. The page behind the end
    /// that a group with draft layers must have is not among them: the engine computes its tokens.
    ///
    /// With pages of `B` tokens, `L` tokens in the engine and an end `E`:
    /// prefix `[L/B, E/B)`; window of `W` tokens `[max(L/B, E/B - max(1, ceil((W - 1)/B))), E/B)`; chunk of `C` tokens
    /// `[max(L/B, floor(E/C) * C / B), E/B)`, no page where `C` divides `E`; state `[E/B - 1, E/B)`.
    pub fn needed(&self, group: GroupId, hit: Hit) -> Range<u32> {
        let spec = self.spec(group);
        let end = hit.end_tokens / spec.page_tokens;
        let first = spec.first_needed(hit.end_tokens);
        first.max(hit.device_tokens / spec.page_tokens).min(end)..end
    }

    /// The pages of a group that a load writes for a hit: those for which the engine has allocated device pages. They are
    /// [`Self::needed`], except for a window of one token, which needs a page to be found and reads none.
    pub fn loaded(&self, group: GroupId, hit: Hit) -> Range<u32> {
        let needed = self.needed(group, hit);
        match self.spec(group).kind {
            GroupKind::Window { tokens: 1 } => needed.end..needed.end,
            _ => needed,
        }
    }

    /// Panics if there is no such group, as a slice does.
    fn spec(&self, group: GroupId) -> &GroupSpec {
        &self.specs[usize::from(group.0)]
    }
}

/// A search for the end of a hit, which falls from boundary to boundary. The end is void once it is not above
/// `device_tokens`.
struct Search {
    hit_tokens: u32,
    hashed: u32,
    device_tokens: u32,
    end: u32,
}

impl Search {
    fn is_over(&self) -> bool {
        self.end <= self.device_tokens
    }

    fn fall_to(&mut self, tokens: u32) {
        self.end = tokens / self.hit_tokens * self.hit_tokens;
    }

    /// Lowers the end to the run of pages that begins where the engine's pages end.
    fn prefix(&mut self, group: GroupId, spec: &GroupSpec, present: &impl Presence) {
        if self.is_over() {
            return;
        }
        let size = spec.page_tokens;
        let until = (self.end / size + spec.behind()).min(self.hashed / size);
        let run = self.device_tokens / size..until;
        let run_end = present.first_missing(group, run).unwrap_or(until);
        let usable = run_end.saturating_sub(spec.behind()) * size;
        self.fall_to(usable.min(self.end));
    }

    /// Lowers the end to the highest boundary with a state.
    fn state(&mut self, group: GroupId, spec: &GroupSpec, present: &impl Presence) {
        while !self.is_over() && !present.has(group, self.end / spec.page_tokens - 1) {
            self.end -= self.hit_tokens;
        }
    }

    /// Lowers the end to the highest boundary for which the group has all pages that a window or a chunk needs. Where
    /// page `i` is missing, the next candidate is the highest boundary up to the beginning of that page: every boundary
    /// in between needs page `i`.
    ///
    /// All pages from `intact` up to the end are known to be there, so that none of them is examined again.
    fn range(
        &mut self,
        group: GroupId,
        spec: &GroupSpec,
        intact: &mut u32,
        present: &impl Presence,
    ) {
        let size = spec.page_tokens;
        while !self.is_over() {
            let end = self.end / size;
            if spec.eagle && (end >= self.hashed / size || !present.has(group, end)) {
                self.end -= self.hit_tokens;
                continue;
            }
            let first = spec.first_needed(self.end).max(self.device_tokens / size);
            let Some(missing) = present.last_missing(group, first..end.min(*intact)) else {
                *intact = first.min(*intact);
                return;
            };
            *intact = u32::MAX;
            self.fall_to(missing * size);
        }
    }
}

#[cfg(test)]
mod tests;
