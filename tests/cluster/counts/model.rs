//! What a lookup must find, by the rules of the layers and by where pages lie.

use std::collections::{BTreeMap, BTreeSet};

use kvferry_workload::hashes::PageHasher;
use kvferry_workload::hybrid::LayerKind;
use kvferry_workload::models::{Model, ModelGroup, units};
use kvferry_workload::trace::{Shape, TraceRequest, generate};

use super::RANKS;
use crate::cluster::replay_events::{Held, Page};

/// The pages of a model.
#[derive(Debug)]
pub struct Pages {
    pub model: Model,
    pub groups: Vec<ModelGroup>,
    /// Tokens of a hash, in which hits are counted.
    pub unit: u32,
}

/// What a lookup must find.
#[derive(Debug, Default)]
pub struct Hit {
    pub tokens: u64,
    /// Tokens of those for which a page is read from the disk.
    pub below_tokens: u64,
    /// Tokens by tier and group.
    pub by_group: BTreeMap<(&'static str, usize), u64>,
    pub pages: u64,
    pub pages_below: u64,
    /// Bytes of the pages on one rank.
    pub bytes: u64,
}

impl Pages {
    pub fn of(model: Model) -> Self {
        let unit = model.unit_tokens();
        Self {
            model,
            groups: model.groups(unit, RANKS).expect("two ranks"),
            unit,
        }
    }

    /// Bytes of a page in host memory and on the disk, on one rank.
    pub fn place_bytes(&self) -> u64 {
        let bytes = self.groups.iter().map(|group| group.geometry.page_bytes());
        bytes.max().expect("a group")
    }

    /// Requests of a few long conversations with equal beginnings.
    pub fn requests(&self, requests: u32) -> Vec<TraceRequest> {
        let shape = Shape {
            block_tokens: self.unit,
            requests,
            conversations: 4,
            system_prompts: 2,
            prompt_tokens_max: 3_000,
            ..Shape::default()
        };
        generate(&shape, 1).requests
    }

    /// The longest hit of a request from its first token on, and the number of its hashes.
    pub fn hit(&self, asked: &TraceRequest, held: &Held) -> (Hit, u64) {
        let hasher = PageHasher::new(self.unit, self.unit).expect("equal sizes");
        let hashes = hasher.hash(&asked.blocks);
        let pages = self.groups.iter().map(|group| {
            let pages = hashes.view_of(group.layers.page_tokens / self.unit);
            pages.fingerprints(0).map(|page| page.0 as u64).collect()
        });
        let pages: Vec<Vec<u64>> = pages.collect();
        let known = asked.blocks.len() as u64 * u64::from(self.unit);
        // An engine with several groups computes at least one token.
        let last = match self.groups.len() {
            1 => known,
            _ => known.min(asked.input_tokens - 1),
        };
        let step = units(&self.groups).1;
        let mut ends = (0..=last as u32 / step).rev().map(|steps| steps * step);
        let hit = ends.find_map(|end| self.hit_until(end, &pages, held));
        (hit.expect("no hit needs no page"), hashes.len() as u64)
    }

    /// The hit of the first `end` tokens of a sequence with these pages in each group; `None` when a page that is read for
    /// the next token lies nowhere.
    fn hit_until(&self, end: u32, pages: &[Vec<u64>], held: &Held) -> Option<Hit> {
        let lies =
            |medium: &str, page: &Page| held.get(medium).is_some_and(|held| held.contains(page));
        let mut hit = Hit {
            tokens: end.into(),
            ..Hit::default()
        };
        let mut below = BTreeSet::new();
        for (group, (of, pages)) in self.groups.iter().zip(pages).enumerate() {
            let size = of.layers.page_tokens;
            for page in first_read(of.layers.kind, end) / size..end / size {
                let number = (group as u64, pages[page as usize]);
                let tier = match lies("CPU", &number) {
                    true => "g2",
                    false if lies("STORAGE", &number) => "g3",
                    false => return None,
                };
                *hit.by_group.entry((tier, group)).or_default() += u64::from(size);
                hit.pages += 1;
                hit.bytes += of.geometry.page_bytes();
                if tier == "g3" {
                    below.extend(page * size..(page + 1) * size);
                    hit.pages_below += 1;
                }
            }
        }
        hit.below_tokens = below.len() as u64;
        Some(hit)
    }
}

/// The first token that layers read to compute token `end`.
fn first_read(kind: LayerKind, end: u32) -> u32 {
    match kind {
        LayerKind::Full => 0,
        LayerKind::Window(tokens) => end.saturating_sub(tokens - 1),
        LayerKind::Chunk(tokens) => end - end % tokens,
        LayerKind::Recurrent => end.saturating_sub(1),
    }
}
