//! Models with several groups of layers: what a lookup finds equals the rules over the set of stored pages, and a load
//! reads exactly the pages that it names, of the group that it names.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use kvferry_core::{GroupKind, Groups, LookupBounds, Model, Presence};
use kvferry_types::{Attention, Edge, MemoryGeometry, Part, Transfer};
use proptest::prelude::*;

use super::moves::Tiered;
use super::*;

const DEVICE_PAGES: u32 = 256;
const HASHES: u32 = 48;
const HASH_TOKENS: u32 = 16;

/// Groups as (attention, tokens of a window or chunk, hashes of a page, draft layers), and hashes between two boundaries.
type Described = (u32, Vec<(Attention, u32, u32, bool)>);

fn models() -> Vec<Described> {
    use Attention::{ChunkedLocal, Full, SlidingWindow, State};
    vec![
        (1, vec![(Full, 0, 1, false), (SlidingWindow, 70, 1, false)]),
        (6, vec![(Full, 0, 2, false), (SlidingWindow, 100, 3, false)]),
        (4, vec![(State, 0, 4, false), (Full, 0, 4, false)]),
        (2, vec![(Full, 0, 2, false), (ChunkedLocal, 128, 2, false)]),
        (2, vec![(Full, 0, 2, true), (SlidingWindow, 60, 1, true)]),
        (
            4,
            vec![
                (Full, 0, 1, false),
                (SlidingWindow, 40, 2, false),
                (State, 0, 4, false),
            ],
        ),
        (2, vec![(SlidingWindow, 90, 2, false)]),
    ]
}

fn geometry_of((hit_hashes, groups): &Described) -> MemoryGeometry {
    let groups = (0..)
        .zip(groups)
        .map(|(id, (attention, tokens, hashes, eagle))| GroupGeometry {
            group: GroupId(id),
            attention: *attention,
            window_tokens: *tokens,
            eagle: *eagle,
            engine_page_tokens: hashes * HASH_TOKENS,
            layers: 2,
            page_bytes: 64 * u64::from(id + 1),
            device_pages: DEVICE_PAGES,
            content_digest: [0; 16],
            layout_fingerprint: [id; 16],
        });
    MemoryGeometry {
        hash_tokens: HASH_TOKENS,
        hit_tokens: hit_hashes * HASH_TOKENS,
        groups: groups.collect(),
    }
}

/// The pages that were stored.
#[derive(Default)]
struct StoredPages(BTreeSet<(GroupId, u32)>);

impl Presence for StoredPages {
    fn has(&self, group: GroupId, page: u32) -> bool {
        self.0.contains(&(group, page))
    }
}

struct Grouped {
    tiered: Tiered,
    groups: Groups,
    /// Hashes of a page of each group.
    per_page: Vec<u32>,
    stored: StoredPages,
    /// The page that each arena page holds.
    arena: BTreeMap<u32, (GroupId, u32)>,
}

impl Grouped {
    fn new(described: &Described, page_index: bool) -> Self {
        let geometry = geometry_of(described);
        let model = Model::new(geometry.clone()).expect("its groups agree");
        let mut grouped = Self {
            tiered: Tiered::of(geometry, 220, &[], page_index),
            groups: model.groups().clone(),
            per_page: described.1.iter().map(|group| group.2).collect(),
            stored: StoredPages::default(),
            arena: BTreeMap::new(),
        };
        grouped.lookup(0, None);
        grouped
    }

    fn lookup(&mut self, device_pages: u32, limit_pages: Option<u32>) -> u32 {
        let answer = self.tiered.request(Request::Lookup {
            slot: SlotId(1),
            namespace: vec![7],
            hashes: sequence(1, HASHES as usize),
            have_pages: device_pages,
            limit_pages,
        });
        match answer {
            Some(Ok(Answer::Lookup(found))) => found.hit_pages,
            other => unreachable!("{other:?}"),
        }
    }

    fn pages_of(&self, group: GroupId) -> u32 {
        HASHES / self.per_page[usize::from(group.0)]
    }

    /// The arena pages of a transfer, with the engine's pages: page `p` of a group lies in device page `100 + p`, or in
    /// `p` for a load.
    fn pairs(transfer: &Transfer) -> Vec<(u32, u32)> {
        let pairs = transfer.pairs.iter();
        let pages = pairs.flat_map(|pair| pair.src.iter_pages().zip(pair.dst.iter_pages()));
        pages.collect()
    }

    /// Stores these runs of pages in one request. The copies of every third request fail.
    fn store(&mut self, runs: &[(GroupId, Range<u32>)], fails: bool) {
        let parts = runs.iter().map(|(group, pages)| {
            let device = PageList::run(100 + pages.start, pages.end - pages.start);
            Part::new(*group, pages.start, device)
        });
        let answer = self.tiered.request(Request::Store {
            slot: SlotId(1),
            parts: parts.collect(),
            more: None,
            after: RequestId(0),
        });
        for transfer in self.tiered.take(Edge::STORE) {
            let group = transfer.device.expect("the engine's memory").group;
            let pages = Self::pairs(&transfer);
            for (device, arena) in &pages {
                let page = (group, device - 100);
                assert!(!self.stored.0.contains(&page), "{page:?} is stored already");
                if !fails {
                    self.stored.0.insert(page);
                    self.arena.insert(*arena, page);
                }
            }
            let whole = u32::try_from(pages.len()).expect("few pages");
            self.tiered
                .end(&transfer, if fails { 0 } else { whole }, false);
        }
        let answer = answer.or_else(|| self.tiered.answer());
        let Some(Ok(Answer::Store(answer))) = answer else {
            unreachable!("{answer:?}");
        };
        let wanted: u32 = runs.iter().map(|(_, pages)| pages.end - pages.start).sum();
        let all = answer.stored_pages + answer.present_pages + answer.failed_pages;
        assert_eq!((all, answer.refused_pages), (wanted, 0), "{answer:?}");
    }

    /// Tokens of hits that were counted for the first prefix group, which a hit needs from its first token on.
    fn prefix_tokens(&self) -> Option<u64> {
        let mut specs = self.groups.specs();
        let (prefix, _) = specs.find(|(_, spec)| spec.kind == GroupKind::Prefix)?;
        let hits = self.tiered.leader.hit_tokens().iter();
        let of_prefix = hits.filter(|((_, group), _)| *group == prefix);
        Some(of_prefix.map(|(_, tokens)| tokens).sum())
    }

    /// Looks up, compares the hit with the rules, and loads it.
    fn find_and_load(&mut self, device_hashes: u32, limit: Option<u32>) {
        let bounds = LookupBounds {
            hashes: HASHES,
            device_tokens: device_hashes * HASH_TOKENS,
            limit_tokens: limit.unwrap_or(HASHES) * HASH_TOKENS,
        };
        let expected = self.groups.reach(bounds, &self.stored);
        let before = self.prefix_tokens();
        let hit_pages = self.lookup(device_hashes, limit);
        let hit_tokens = expected.map_or(0, |hit| hit.end_tokens() - hit.device_tokens());
        assert_eq!(hit_pages * HASH_TOKENS, hit_tokens, "{bounds:?}");
        let counted = self.prefix_tokens().zip(before);
        assert!(
            counted.is_none_or(|(now, before)| now - before == u64::from(hit_tokens)),
            "{bounds:?}"
        );
        let Some(hit) = expected else { return };
        let groups: Vec<GroupId> = self.groups.specs().map(|(group, _)| group).collect();
        let loaded = groups
            .iter()
            .map(|group| (*group, self.groups.loaded(*group, hit)));
        let loaded: Vec<(GroupId, Range<u32>)> =
            loaded.filter(|(_, pages)| !pages.is_empty()).collect();
        if loaded.is_empty() {
            return;
        }
        let parts = loaded.iter().map(|(group, pages)| {
            Part::new(
                *group,
                pages.start,
                PageList::run(pages.start, pages.end - pages.start),
            )
        });
        let answer = self.tiered.request(Request::Load {
            slot: SlotId(1),
            parts: parts.collect(),
            after: RequestId(0),
        });
        assert_eq!(answer, None, "the hit is held");
        let mut read: BTreeSet<(GroupId, u32)> = BTreeSet::new();
        for transfer in self.tiered.take(Edge::LOAD) {
            let group = transfer.device.expect("the engine's memory").group;
            let pages = Self::pairs(&transfer);
            for (arena, device) in &pages {
                assert_eq!(
                    self.arena.get(arena),
                    Some(&(group, *device)),
                    "other pages"
                );
                read.insert((group, *device));
            }
            let whole = u32::try_from(pages.len()).expect("few pages");
            self.tiered.end(&transfer, whole, false);
        }
        let named: BTreeSet<(GroupId, u32)> = loaded
            .iter()
            .flat_map(|(group, pages)| pages.clone().map(|page| (*group, page)))
            .collect();
        assert_eq!(read, named);
        let pages = u32::try_from(named.len()).expect("few pages");
        let answer = self.tiered.answer();
        assert_eq!(answer, Some(Ok(Answer::Load(LoadAnswer { pages }))));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn a_hit_of_several_groups_follows_the_rules_and_its_pages_are_read(
        model in prop::sample::select(models()),
        page_index in any::<bool>(),
        steps in prop::collection::vec(
            (any::<u8>(), 0_u32..HASHES, 1_u32..HASHES, 0_u8..8, prop::option::of(0_u32..HASHES)),
            1..24,
        ),
    ) {
        let mut grouped = Grouped::new(&model, page_index);
        for (group, first, count, what, limit) in steps {
            if what < 5 {
                let groups = grouped.per_page.len();
                let mut runs: Vec<(GroupId, Range<u32>)> = Vec::new();
                // One run of a group, or the pages of all groups for the same tokens.
                for id in 0..groups {
                    let id = GroupId(u8::try_from(id).expect("few groups"));
                    let named = usize::from(group) % (groups + 2);
                    if named < groups && named != usize::from(id.0) {
                        continue;
                    }
                    let per_page = grouped.per_page[usize::from(id.0)];
                    let last = grouped.pages_of(id);
                    let start = (first / per_page).min(last - 1);
                    let end = (start + count.div_ceil(per_page)).min(last);
                    runs.push((id, start..end));
                }
                grouped.store(&runs, what == 4);
            } else {
                let device = first / model.0 * model.0;
                grouped.find_and_load(if what == 5 { 0 } else { device }, limit);
            }
        }
        grouped.find_and_load(0, None);
    }
}

#[test]
fn parts_that_contradict_the_model_are_refused_by_field() {
    let mut grouped = Grouped::new(&models()[0], false);
    let mut refused = |parts: Vec<Part>| {
        let request = Request::Store {
            slot: SlotId(1),
            parts,
            more: None,
            after: RequestId(0),
        };
        match grouped.tiered.request(request) {
            Some(Err(Refusal::Invalid { field, .. })) => field,
            other => unreachable!("{other:?}"),
        }
    };
    let part =
        |group, first_page, start| Part::new(GroupId(group), first_page, PageList::run(start, 2));
    assert_eq!(refused(Vec::new()), "parts");
    assert_eq!(refused(vec![part(2, 0, 0)]), "parts.group");
    assert_eq!(refused(vec![part(1, 0, DEVICE_PAGES - 1)]), "parts.pages");
    assert_eq!(
        refused(vec![Part::new(GroupId(0), 0, PageList::default())]),
        "parts.pages"
    );
    assert_eq!(
        refused(vec![part(1, HASHES - 1, 0)]),
        "parts.pages",
        "no hash"
    );
    let overlapping = vec![part(1, 4, 0), part(0, 4, 2), part(1, 5, 4)];
    assert_eq!(refused(overlapping), "parts.first_page");
}

#[test]
fn a_load_of_several_groups_is_carried_out_as_a_whole() {
    let mut grouped = Grouped::new(&models()[0], false);
    let all = [(GroupId(0), 0..8), (GroupId(1), 0..8)];
    grouped.store(&all, false);
    assert_eq!(grouped.lookup(0, None), 8);
    let answer = grouped.tiered.request(Request::Load {
        slot: SlotId(1),
        parts: vec![
            Part::new(GroupId(0), 0, PageList::run(0, 8)),
            Part::new(GroupId(1), 3, PageList::run(11, 5)),
        ],
        after: RequestId(0),
    });
    assert_eq!(answer, None);
    let copies = grouped.tiered.take(Edge::LOAD);
    assert_eq!(copies.len(), 2, "one for each group");
    grouped.tiered.end(&copies[0], 8, false);
    assert_eq!(
        grouped.tiered.answer(),
        None,
        "the other one may still write"
    );
    grouped.tiered.end(&copies[1], 4, false);
    let answer = grouped.tiered.answer();
    assert!(
        matches!(answer, Some(Err(Refusal::CopyFailed(_)))),
        "{answer:?}"
    );
}

/// The beginning of a sequence is as new as the tail that a lookup finds, also where the engine has that beginning itself:
/// without it, the rest could not be reached.
#[test]
fn a_lookup_uses_the_pages_of_a_prefix_that_the_engine_has() {
    let geometry = geometry_of(&models()[0]);
    for device_pages in [8, 16] {
        let mut tiered = Tiered::of(geometry.clone(), 128, &[], false);
        let lookup = |tiered: &mut Tiered, name: u8, device_pages| {
            tiered.request(Request::Lookup {
                slot: SlotId(name.into()),
                namespace: vec![7],
                hashes: sequence(name, 16),
                have_pages: device_pages,
                limit_pages: None,
            })
        };
        for name in [0, 2] {
            lookup(&mut tiered, name, 0);
            let part = |group| Part::new(GroupId(group), 0, PageList::run(0, 16));
            let answer = tiered.request(Request::Store {
                slot: SlotId(name.into()),
                parts: vec![part(0), part(1)],
                more: None,
                after: RequestId(0),
            });
            assert_eq!(answer, None);
            let stores = tiered.take(Edge::STORE);
            stores.iter().for_each(|copy| tiered.end(copy, 8, false));
        }
        lookup(&mut tiered, 0, device_pages);
        let root = |name| sequence(name, 1).fingerprint(0);
        let host = tiered.leader.pool().expect("it serves");
        // The window's block begins with the same page, and is older.
        let blocks: Vec<_> = host.view().map(|block| block.fingerprints[0]).collect();
        let age = |name| blocks.iter().rposition(|first| *first == root(name));
        let prefix = (age(0), age(2));
        assert!(
            prefix.0 > prefix.1,
            "{prefix:?} with {device_pages} pages in the engine"
        );
    }
}
