//! Which pages of a group are worth storing: those that a hit can need.

use std::ops::Range;

use kvferry_types::GroupId;

use super::{GroupKind, GroupSpec, Groups, SEQUENCE_TOKENS_MAX};

/// The ends of hits for which window and chunk groups keep pages. Pages of prefix groups serve every longer hit, and are
/// kept in any case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retention<'a> {
    /// Keeps the pages for every multiple of this many tokens, rounded up to a multiple of `hit_tokens`. 1 keeps them for
    /// every boundary; `None` for the listed ends only.
    pub every_tokens: Option<u32>,
    /// Ends to keep in addition, ascending: the end of a prompt, or a point at which prompts branch. Ends that are no
    /// boundaries serve no hit and have no effect.
    pub ends: &'a [u32],
}

impl Retention<'_> {
    /// Keeps all pages that any hit can need.
    pub const EVERY_BOUNDARY: Self = Self {
        every_tokens: Some(1),
        ends: &[],
    };
}

/// The pages of a sequence that an engine can store from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Written<'a> {
    /// The first page of the group that no earlier store covers.
    pub first_page: u32,
    /// Tokens whose KV is final. Tokens that draft layers may still write again are not among them.
    pub tokens: u32,
    /// Boundaries at which the engine handed a state over, in tokens, in any order. A state is known by its boundary
    /// alone: the page at that position of the engine's table may have been freed, or hold a later state.
    pub states: &'a [u32],
}

impl Groups {
    /// Appends the runs of pages of a group that are worth storing, ascending. `has` is whether the engine holds a page;
    /// pages that it dropped have no bytes.
    ///
    /// * prefix: all pages from `first_page` on, up to the first that the engine does not hold;
    /// * window, chunk: the pages that the engine holds and that a hit with a kept end needs;
    /// * state: the page before each boundary of `written.states`, each as a run of its own.
    ///
    /// Only whole pages below `written.tokens` are considered. The cost is linear in them and in the listed ends.
    pub fn storable(
        &self,
        group: GroupId,
        written: Written<'_>,
        retention: Retention<'_>,
        has: impl Fn(u32) -> bool,
        runs: &mut Vec<Range<u32>>,
    ) {
        let spec = self.spec(group);
        let tokens = written.tokens.min(SEQUENCE_TOKENS_MAX);
        let pages = written.first_page..tokens / spec.page_tokens;
        match spec.kind {
            GroupKind::Prefix => {
                let end = pages.clone().find(|page| !has(*page)).unwrap_or(pages.end);
                if end > pages.start {
                    runs.push(pages.start..end);
                }
            }
            GroupKind::Window { .. } | GroupKind::Chunk { .. } => {
                let mut kept = Kept::new(self.hit_tokens, retention);
                let first = runs.len();
                for page in pages.filter(|page| kept.needs(spec, *page) && has(*page)) {
                    match runs[first..].last_mut() {
                        Some(run) if run.end == page => run.end += 1,
                        _ => runs.push(page..page + 1),
                    }
                }
            }
            GroupKind::State => {
                let served = |end: &&u32| **end > 0 && end.is_multiple_of(self.hit_tokens);
                let ends = written.states.iter().filter(served);
                let states = ends.map(|end| end / spec.page_tokens - 1);
                let mut states: Vec<u32> = states.filter(|page| pages.contains(page)).collect();
                states.sort_unstable();
                states.dedup();
                runs.extend(states.into_iter().map(|page| page..page + 1));
            }
        }
    }
}

/// The kept ends, for queries about pages in ascending order.
struct Kept<'a> {
    hit_tokens: u32,
    /// Tokens between two ends that are kept without being listed; a multiple of `hit_tokens`.
    every: Option<u64>,
    /// Listed ends that are not below the page of the last query.
    ends: &'a [u32],
}

impl<'a> Kept<'a> {
    fn new(hit_tokens: u32, retention: Retention<'a>) -> Self {
        let every = retention.every_tokens.map(|tokens| {
            let hits = u64::from(tokens.max(1)).div_ceil(u64::from(hit_tokens));
            hits * u64::from(hit_tokens)
        });
        Self {
            hit_tokens,
            every,
            ends: retention.ends,
        }
    }

    /// Whether a hit with a kept end needs the page. The lowest end at or above the end of the page decides, because the
    /// first page that an end needs never falls as the end grows.
    fn needs(&mut self, spec: &GroupSpec, page: u32) -> bool {
        let start = page * spec.page_tokens;
        let page_end = start + spec.page_tokens;
        if spec.eagle && start > 0 {
            let regular = self
                .every
                .is_some_and(|every| u64::from(start).is_multiple_of(every));
            let listed =
                start.is_multiple_of(self.hit_tokens) && self.skip_below(start) == Some(start);
            if regular || listed {
                return true;
            }
        }
        let regular = self
            .every
            .map(|every| u64::from(page_end).next_multiple_of(every));
        let regular = regular.and_then(|end| u32::try_from(end).ok());
        let listed = self.skip_below(page_end);
        [regular, listed]
            .into_iter()
            .flatten()
            .any(|end| spec.first_needed(end) <= page)
    }

    /// The lowest listed boundary at or above `tokens`.
    fn skip_below(&mut self, tokens: u32) -> Option<u32> {
        while let Some((end, rest)) = self.ends.split_first() {
            if *end >= tokens && end.is_multiple_of(self.hit_tokens) {
                return Some(*end);
            }
            self.ends = rest;
        }
        None
    }
}
