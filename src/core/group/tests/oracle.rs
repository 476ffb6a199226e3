//! The end of a hit, found by trying every boundary with rules for single tokens.

use super::*;

/// The highest boundary that every group can continue at.
pub(super) fn reach(groups: &Groups, bounds: LookupBounds, present: &Table) -> Option<u32> {
    let hashed = bounds.hashes * groups.hash_tokens;
    let mut found = None;
    for end in 1..=bounds.limit_tokens.min(hashed) {
        let all = |(group, spec): (GroupId, &GroupSpec)| {
            let page_is_there = |page: u32| {
                let hashed = (page + 1) * spec.page_tokens <= hashed;
                hashed && present.0[usize::from(group.0)][page as usize]
            };
            let of_engine = |page: u32| (page + 1) * spec.page_tokens <= bounds.device_tokens;
            can_continue(spec, end, of_engine, page_is_there)
        };
        let boundary = end.is_multiple_of(groups.hit_tokens);
        if boundary && end > bounds.device_tokens && groups.specs().all(all) {
            found = Some(end);
        }
    }
    found
}

/// Whether the layers of a group can compute the token behind `end`.
fn can_continue(
    spec: &GroupSpec,
    end: u32,
    of_engine: impl Fn(u32) -> bool,
    is_there: impl Fn(u32) -> bool,
) -> bool {
    let page_of = |token: u32| token / spec.page_tokens;
    let usable = |token: u32| of_engine(page_of(token)) || is_there(page_of(token));
    let drafted = !spec.eagle || is_there(page_of(end));
    let tokens = match spec.kind {
        GroupKind::Prefix => (0..end).all(usable),
        // The next token has the position `end` and attends to itself. A page of the window names it as cached, also
        // where the token attends to nothing else.
        GroupKind::Window { tokens } => {
            usable(end - 1) && (0..end).all(|token| end - token >= tokens || usable(token))
        }
        GroupKind::Chunk { tokens } => {
            (0..end).all(|token| token / tokens != end / tokens || usable(token))
        }
        GroupKind::State => is_there(page_of(end - 1)),
    };
    tokens && drafted
}
