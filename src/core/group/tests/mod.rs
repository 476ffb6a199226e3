mod cases;
mod examples;
mod oracle;
mod properties;
mod store;

use super::*;

/// Pages per group, as a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Table(pub(super) Vec<Vec<bool>>);

impl Table {
    /// All of the first `pages` pages of each group.
    fn full(pages: &[u32]) -> Self {
        Self(
            pages
                .iter()
                .map(|count| vec![true; *count as usize])
                .collect(),
        )
    }

    fn without(mut self, group: usize, page: usize) -> Self {
        self.0[group][page] = false;
        self
    }

    /// Only these pages of a group.
    fn only(mut self, group: usize, pages: &[usize]) -> Self {
        for (page, present) in self.0[group].iter_mut().enumerate() {
            *present = pages.contains(&page);
        }
        self
    }
}

impl Presence for Table {
    fn has(&self, group: GroupId, page: u32) -> bool {
        let pages = &self.0[usize::from(group.0)];
        pages.get(page as usize).copied().unwrap_or(false)
    }
}

fn spec(kind: GroupKind, page_tokens: u32) -> GroupSpec {
    GroupSpec {
        kind,
        page_tokens,
        eagle: false,
    }
}

fn groups(hash_tokens: u32, hit_tokens: u32, specs: &[GroupSpec]) -> Groups {
    Groups::new(hash_tokens, hit_tokens, specs.to_vec()).expect("groups with rules")
}
