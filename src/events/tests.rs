//! Batches of vLLM's and SGLang's own encoders, and random runs that a router follows.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use rmpv::Value;

use super::*;
use crate::page::Tier;

/// vLLM 0.32: two pages stored from the root (`CPU`), one behind them with its group, one removed, all cleared; rank 0.
const VLLM: &str = "93cb3ff80000000000009488a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392cf0123456789abcdefcffedcba9876543210b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f6964739401020304aa626c6f636b5f73697a6502a76c6f72615f6964c0a66d656469756da3435055a96c6f72615f6e616d65c08aa474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391cffedcba9876543210b1706172656e745f626c6f636b5f68617368cf0123456789abcdefa9746f6b656e5f696473920304aa626c6f636b5f73697a6502a76c6f72615f6964c0a66d656469756da3435055a96c6f72615f6e616d65c0a967726f75705f69647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6e83a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391cf0123456789abcdefa66d656469756da343505581a474797065b0416c6c426c6f636b73436c656172656400";
/// SGLang 0.5.23: two pages stored (`EXTERNAL`, numbers with a sign), the second removed, all cleared; rank 0.
const SGLANG: &str = "93cb3ff80000000000009387a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392cf01acecb507abfe1ad3afb62248697e7cd6b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f6964739400010203aa626c6f636b5f73697a6502a76c6f72615f6964c0a66d656469756da845585445524e414c83a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391d3afb62248697e7cd6a66d656469756da845585445524e414c81a474797065b0416c6c426c6f636b73436c656172656400";

fn bytes(hex: &str) -> Vec<u8> {
    let pairs = hex.as_bytes().chunks(2);
    pairs
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap())
        .collect()
}

#[test]
fn batches_of_engines_are_written_as_they_were_read() {
    for golden in [VLLM, SGLANG] {
        let golden = bytes(golden);
        let batch = Batch::read(&golden).unwrap();
        assert_eq!(batch.write(Shape::Map), golden);
    }
    let batch = Batch::read(&bytes(VLLM)).unwrap();
    assert_eq!(
        (batch.time, batch.rank, batch.signed),
        (1.5, Some(0), false)
    );
    let Event::Stored(stored) = &batch.events[1] else {
        panic!("{:?}", batch.events[1]);
    };
    assert_eq!(stored.pages, [PageKey(0xfedc_ba98_7654_3210)]);
    assert_eq!(stored.parent, Some(PageKey(0x0123_4567_89ab_cdef)));
    assert_eq!(stored.medium.as_deref(), Some("CPU"));
    let batch = Batch::read(&bytes(SGLANG)).unwrap();
    assert!(batch.signed);
    let Event::Removed(removed) = &batch.events[1] else {
        panic!("{:?}", batch.events[1]);
    };
    assert_eq!(
        removed.pages,
        [PageKey((-5_785_398_976_907_936_554_i64).cast_unsigned())]
    );
}

#[test]
fn arrays_are_read_and_written_by_position() {
    let maps = Batch::read(&bytes(VLLM)).unwrap();
    let arrays = maps.write(Shape::Array);
    let value = rmpv::decode::read_value(&mut &arrays[..]).unwrap();
    let events = value[1].as_array().unwrap();
    assert_eq!(events[0][0].as_str(), Some("BlockStored"));
    assert_eq!(events[0][1][1].as_u64(), Some(0xfedc_ba98_7654_3210));
    assert_eq!(events[0][6].as_str(), Some("CPU"));
    assert_eq!(events[2].as_array().map(Vec::len), Some(3));
    assert_eq!(events[3].as_array().map(Vec::len), Some(1));
    let again = Batch::read(&arrays).unwrap();
    assert_eq!(again.events.len(), maps.events.len());
    assert_eq!(again.events[2], maps.events[2]);
    assert_eq!(again.write(Shape::Array), arrays);
}

#[test]
fn hashes_in_bytes_are_known_by_their_last_8() {
    let mut hash = vec![7_u8; 24];
    hash.extend(0x0102_0304_0506_0708_u64.to_be_bytes());
    assert_eq!(
        PageKey::read(&Value::Binary(hash)),
        Some(PageKey(0x0102_0304_0506_0708))
    );
    assert_eq!(PageKey::read(&Value::Binary(vec![1; 7])), None);
}

#[test]
fn what_is_no_batch_is_refused_with_the_field() {
    let event = |fields: Vec<(&str, Value)>| {
        let fields = fields
            .into_iter()
            .map(|(name, value)| (Value::from(name), value));
        let batch = Value::Array(vec![
            Value::F64(1.0),
            Value::Array(vec![Value::Map(fields.collect())]),
        ]);
        let mut bytes = Vec::new();
        rmpv::encode::write_value(&mut bytes, &batch).unwrap();
        bytes
    };
    let hashes = || Value::Array(vec![Value::from(1)]);
    let stored = |field: &'static str, value: Value| {
        let mut fields = vec![
            ("type", Value::from("BlockStored")),
            ("block_hashes", hashes()),
        ];
        fields.retain(|(name, _)| *name != field);
        fields.push((field, value));
        event(fields)
    };
    for (batch, text) in [
        (vec![0x92], "not MessagePack"),
        (vec![0x93, 1, 0x90, 0xc0, 0xc0], "1 bytes follow the batch"),
        (vec![0x91, 0xc0], "[time, events] is expected"),
        (vec![0x90], "[time, events] is expected"),
        (event(vec![]), "a map with a type"),
        (
            stored("block_hashes", Value::from(3)),
            "block_hashes is an integer: a list of hashes",
        ),
        (
            stored("parent_block_hash", Value::from("x")),
            "parent_block_hash is a text of 1 bytes: a hash is expected",
        ),
        (
            stored("token_ids", Value::from(1)),
            "token_ids is an integer: a list is expected",
        ),
        (
            stored("block_size", Value::from(-1)),
            "block_size is a negative integer: an integer from 0 on is expected",
        ),
        (
            stored("medium", Value::from(1)),
            "medium is an integer: a text is expected",
        ),
        (vec![0x91; 40], "not MessagePack"),
    ] {
        let error = Batch::read(&batch).unwrap_err().to_string();
        assert!(error.contains(text), "{error} has no {text}");
    }
    let long = vec![0; BATCH_BYTES_MAX + 1];
    assert!(matches!(Batch::read(&long), Err(EventError::Long(_))));
}

/// The tokens of a page, which its number determines.
fn tokens(page: u64) -> [Value; 2] {
    [Value::from(page), Value::from(page + 1000)]
}

/// Pages are numbered in sequences of 8: a page's parent is the one before it.
fn parent(page: u64) -> Option<PageKey> {
    (!page.is_multiple_of(8)).then(|| PageKey(page - 1))
}

fn group_fields(group: Option<u32>) -> Vec<(String, Value)> {
    let field = group.map(|group| ("group_idx".to_owned(), Value::from(group)));
    field.into_iter().collect()
}

fn engine_stored_in(group: Option<u32>, first: u64, count: u64, medium: Option<&str>) -> Event {
    let pages = first..first + count;
    let mut others = vec![("lora_id".to_owned(), Value::Nil)];
    others.extend(group_fields(group));
    let keys = pages
        .clone()
        .map(|page| Value::Array(vec![Value::from(page)]));
    others.push(("extra_keys".to_owned(), Value::Array(keys.collect())));
    Event::Stored(Stored {
        pages: pages.clone().map(PageKey).collect(),
        parent: parent(first),
        tokens: pages.flat_map(tokens).collect(),
        page_tokens: 2,
        medium: medium.map(str::to_owned),
        others,
    })
}

fn engine_stored(first: u64, count: u64, medium: Option<&str>) -> Event {
    engine_stored_in(None, first, count, medium)
}

fn engine_removed_in(group: Option<u32>, pages: &[u64], medium: Option<&str>) -> Event {
    Event::Removed(Removed {
        pages: pages.iter().copied().map(PageKey).collect(),
        medium: medium.map(str::to_owned),
        others: group_fields(group),
    })
}

fn engine_removed(pages: &[u64], medium: Option<&str>) -> Event {
    engine_removed_in(None, pages, medium)
}

/// Group and number of a page.
type InGroup = (u32, PageKey);

/// A router: pages by medium.
#[derive(Debug, Default)]
struct Router(BTreeMap<Option<String>, BTreeSet<InGroup>>);

impl Router {
    fn apply(&mut self, events: &[Event], strict: &BTreeSet<Option<String>>) {
        let group_of = |others: &[(String, Value)]| {
            let named = others.iter().find(|(name, _)| name == "group_idx");
            let group = named.and_then(|(_, group)| group.as_u64());
            group.map_or(0, |group| u32::try_from(group).unwrap())
        };
        for event in events {
            match event {
                Event::Stored(stored) => {
                    let group = group_of(&stored.others);
                    let mut before = stored.parent;
                    let held = self.0.entry(stored.medium.clone()).or_default();
                    for (at, page) in stored.pages.iter().enumerate() {
                        assert_eq!(before, parent(page.0), "the parent of {page:?}");
                        assert_eq!(stored.tokens[2 * at..2 * at + 2], tokens(page.0));
                        let extra = stored.others.iter().find(|(name, _)| name == "extra_keys");
                        assert_eq!(
                            extra.map(|(_, keys)| keys[at][0].as_u64()),
                            Some(Some(page.0))
                        );
                        before = Some(*page);
                        let new = held.insert((group, *page));
                        assert!(new || !strict.contains(&stored.medium), "{page:?} twice");
                    }
                }
                Event::Removed(removed) => {
                    let group = group_of(&removed.others);
                    let held = self.0.entry(removed.medium.clone()).or_default();
                    for page in &removed.pages {
                        let known = held.remove(&(group, *page));
                        assert!(
                            known || !strict.contains(&removed.medium),
                            "{page:?} is not there"
                        );
                    }
                }
                Event::Cleared => panic!("subscribers clear every medium"),
                Event::Other(_) => {}
            }
        }
    }

    fn held(&self, medium: Option<&str>) -> BTreeSet<InGroup> {
        self.0
            .get(&medium.map(str::to_owned))
            .cloned()
            .unwrap_or_default()
    }
}

#[derive(Debug, Clone)]
enum Act {
    Stored {
        group: u32,
        first: u64,
        count: u64,
        medium: bool,
    },
    Removed {
        group: u32,
        pages: Vec<u64>,
        medium: bool,
    },
    Cleared,
    Lost,
    /// Whether each is stored, on a disk; group and page.
    Kvferry(Vec<(bool, bool, u32, u64)>),
}

fn act() -> impl Strategy<Value = Act> {
    let run = (0..2_u32, 0..4_u64, 0..8_u64, 1..8_u64, any::<bool>());
    let pages = proptest::collection::vec(0..32_u64, 1..6);
    let change = (any::<bool>(), any::<bool>(), 0..2_u32, 0..32_u64);
    prop_oneof![
        4 => run.prop_map(|(group, sequence, at, count, medium)| Act::Stored {
            group,
            first: sequence * 8 + at,
            count: count.min(8 - at),
            medium,
        }),
        3 => (0..2_u32, pages, any::<bool>())
            .prop_map(|(group, pages, medium)| Act::Removed { group, pages, medium }),
        1 => Just(Act::Cleared),
        1 => Just(Act::Lost),
        6 => proptest::collection::vec(change, 1..12).prop_map(Act::Kvferry),
    ]
}

fn medium(second: bool) -> Option<&'static str> {
    Some(if second { "GPU_2" } else { "GPU" })
}

/// Where each page really is.
#[derive(Default)]
struct Truth {
    engine: BTreeMap<Option<&'static str>, BTreeSet<InGroup>>,
    kvferry: BTreeMap<(Tier, InGroup), u32>,
    /// Pages that the engine has described while they were anywhere.
    described: BTreeSet<InGroup>,
}

impl Truth {
    fn held(&self, tier: Tier) -> BTreeSet<InGroup> {
        let held = self
            .kvferry
            .keys()
            .filter(|(of, page)| *of == tier && self.described.contains(page));
        held.map(|(_, page)| *page).collect()
    }

    fn anywhere(&self) -> BTreeSet<InGroup> {
        let mut all: BTreeSet<_> = self.engine.values().flatten().copied().collect();
        all.extend(Tier::ALL.iter().flat_map(|tier| self.held(*tier)));
        all
    }

    /// A page that is nowhere is forgotten, with its tokens.
    fn forget(&mut self) {
        let engine: BTreeSet<_> = self.engine.values().flatten().copied().collect();
        let kvferry: BTreeSet<_> = self.kvferry.keys().map(|(_, page)| *page).collect();
        self.described
            .retain(|page| engine.contains(page) || kvferry.contains(page));
    }

    fn engine(&mut self, act: &Act) {
        match act {
            Act::Stored {
                group,
                first,
                count,
                medium: second,
            } => {
                let pages = (*first..first + count).map(|page| (*group, PageKey(page)));
                self.described.extend(pages.clone());
                self.engine
                    .entry(medium(*second))
                    .or_default()
                    .extend(pages);
            }
            Act::Removed {
                group,
                pages,
                medium: second,
            } => {
                let held = self.engine.entry(medium(*second)).or_default();
                held.retain(|(of, page)| of != group || !pages.contains(&page.0));
            }
            Act::Cleared | Act::Lost => self.engine.clear(),
            Act::Kvferry(_) => {}
        }
    }

    /// Applies those changes that a feed can report: it never takes a page from a place that has none.
    fn kvferry(&mut self, changes: &[(bool, bool, u32, u64)]) -> Vec<Change> {
        let mut made = Vec::new();
        for (held, disk, group, page) in changes {
            let tier = if *disk { Tier::Disk } else { Tier::Host };
            let key = (tier, (*group, PageKey(*page)));
            let places = self.kvferry.get(&key).copied().unwrap_or(0);
            match (held, places) {
                (false, 0) => continue,
                (false, 1) => {
                    self.kvferry.remove(&key);
                }
                (false, _) => *self.kvferry.entry(key).or_default() -= 1,
                (true, _) => *self.kvferry.entry(key).or_default() += 1,
            }
            made.push(Change {
                held: *held,
                tier,
                group: *group,
                page: PageKey(*page),
            });
        }
        made
    }
}

/// Leaves what subscribers read who know no groups.
fn first_group(pages: BTreeSet<InGroup>, groups: bool) -> BTreeSet<InGroup> {
    let read = pages.into_iter().filter(|(group, _)| groups || *group == 0);
    read.collect()
}

proptest! {
    /// After every step a router that reads the merged stream has exactly the pages that engine and kvferry have, of each
    /// group that it reads, each announced once and removed once in the media of kvferry.
    #[test]
    fn a_router_has_what_engine_and_kvferry_have(
        acts in proptest::collection::vec(act(), 1..60),
        blind in any::<bool>(),
        groups in any::<bool>(),
        gone_max in prop_oneof![Just(0_usize), Just(1000)],
    ) {
        let mode = if blind { Mode::Blind } else { Mode::Tiers };
        let mut join = Join::new(JoinSettings { mode, pages_max: 1000, gone_max, groups });
        let strict: BTreeSet<_> = if blind {
            [None].into_iter().collect()
        } else {
            Tier::ALL.iter().map(|tier| Some(tier.medium().to_owned())).collect()
        };
        let (mut truth, mut router) = (Truth::default(), Router::default());
        for act in &acts {
            truth.engine(act);
            let events = match act {
                Act::Stored { group, first, count, medium: second } => {
                    join.engine(vec![engine_stored_in(Some(*group), *first, *count, medium(*second))])
                }
                Act::Removed { group, pages, medium: second } => {
                    join.engine(vec![engine_removed_in(Some(*group), pages, medium(*second))])
                }
                Act::Cleared => join.engine(vec![Event::Cleared]),
                Act::Lost => join.engine_lost(),
                Act::Kvferry(changes) => {
                    let changes = truth.kvferry(changes);
                    join.kvferry(&changes)
                }
            };
            if gone_max == 0 {
                truth.forget();
            }
            router.apply(&events, &strict);
            let of = |pages| first_group(pages, groups);
            if blind {
                prop_assert_eq!(router.held(None), of(truth.anywhere()));
            } else {
                for second in [false, true] {
                    let held = truth.engine.get(&medium(second)).cloned().unwrap_or_default();
                    prop_assert_eq!(router.held(medium(second)), of(held));
                }
                for tier in Tier::ALL {
                    prop_assert_eq!(router.held(Some(tier.medium())), of(truth.held(tier)));
                }
            }
        }
        let known: BTreeSet<_> = truth.kvferry.keys().map(|(_, page)| *page).chain(truth.anywhere()).collect();
        if gone_max == 0 {
            let known = first_group(known, groups);
            prop_assert_eq!(join.len(), known.len(), "pages that are nowhere are forgotten");
        }
    }
}

#[test]
fn removals_name_the_group_as_the_engine_does() {
    let settings = JoinSettings {
        mode: Mode::Tiers,
        pages_max: 1000,
        gone_max: 0,
        groups: true,
    };
    for group in [None, Some(0), Some(3)] {
        let mut join = Join::new(settings);
        join.engine(vec![engine_stored_in(group, 0, 2, Some("GPU"))]);
        let change = |held, page| Change {
            held,
            tier: Tier::Host,
            group: group.unwrap_or(0),
            page: PageKey(page),
        };
        let stored = join.kvferry(&[change(true, 0), change(true, 1)]);
        assert_eq!(stored, [engine_stored_in(group, 0, 2, Some("CPU"))]);
        let gone = join.kvferry(&[change(false, 0), change(false, 1)]);
        assert_eq!(gone, [engine_removed_in(group, &[1, 0], Some("CPU"))]);
        let lost = join.engine_lost();
        assert_eq!(lost, [engine_removed_in(group, &[0, 1], Some("GPU"))]);
    }
}

#[test]
fn consecutive_pages_share_an_event_and_the_last_one_goes_first() {
    let mut join = Join::new(JoinSettings {
        mode: Mode::Tiers,
        pages_max: 1000,
        gone_max: 0,
        groups: true,
    });
    join.engine(vec![engine_stored(0, 4, Some("GPU"))]);
    let change = |held, page| Change {
        held,
        tier: Tier::Host,
        group: 0,
        page: PageKey(page),
    };
    let stored = join.kvferry(&[0, 1, 3].map(|page| change(true, page)));
    let pages = |event: &Event| match event {
        Event::Stored(stored) => stored.pages.iter().map(|page| page.0).collect::<Vec<_>>(),
        Event::Removed(removed) => removed.pages.iter().map(|page| page.0).collect(),
        other => panic!("{other:?}"),
    };
    assert_eq!(
        stored.iter().map(pages).collect::<Vec<_>>(),
        [vec![0, 1], vec![3]]
    );
    let removed = join.kvferry(&[0, 1, 3].map(|page| change(false, page)));
    assert_eq!(
        removed.iter().map(pages).collect::<Vec<_>>(),
        [vec![3, 1, 0]]
    );
}

#[test]
fn pages_beyond_the_limit_pass_through() {
    for (mode, medium) in [(Mode::Tiers, Some("GPU")), (Mode::Blind, None)] {
        let mut join = Join::new(JoinSettings {
            mode,
            pages_max: 2,
            gone_max: 1000,
            groups: true,
        });
        join.engine(vec![engine_stored(0, 2, Some("GPU"))]);
        let events = join.engine(vec![engine_stored(8, 2, Some("GPU"))]);
        assert_eq!(events, [engine_stored(8, 2, medium)]);
        assert_eq!((join.len(), join.left_out()), (2, 2));
        let events = join.engine(vec![engine_removed(&[8, 9], Some("GPU"))]);
        assert_eq!(events, [engine_removed(&[8, 9], medium)]);
    }
}

/// A page of the first group that host memory has or has not.
fn change(page: u64, held: bool) -> Change {
    Change {
        held,
        tier: Tier::Host,
        group: 0,
        page: PageKey(page),
    }
}

#[test]
fn pages_beyond_the_limit_are_cleared_and_those_in_kvferry_announced_again() {
    for mode in [Mode::Tiers, Mode::Blind] {
        let mut join = Join::new(JoinSettings {
            mode,
            pages_max: 3,
            gone_max: 1000,
            groups: true,
        });
        join.engine(vec![engine_stored(0, 3, Some("GPU"))]);
        let held: Vec<Change> = [2, 0, 1].map(|page| change(page, true)).to_vec();
        let events = join.kvferry(&held);
        assert_eq!(events.is_empty(), mode == Mode::Blind);
        join.engine(vec![engine_stored(8, 2, Some("GPU"))]);
        let medium = (mode == Mode::Tiers).then_some("CPU");
        // The pages of the host in one event, because each follows its parent.
        let again = [Event::Cleared, engine_stored(0, 3, medium)];
        assert_eq!(join.engine(vec![Event::Cleared]), again);
        assert_eq!(join.engine_lost(), [], "the engine has no page");
    }
}

#[test]
fn pages_that_no_event_describes_make_room_for_those_of_the_engine() {
    let mut join = Join::new(JoinSettings {
        mode: Mode::Tiers,
        pages_max: 4,
        gone_max: 1000,
        groups: true,
    });
    let held: Vec<Change> = (0..4).map(|page| change(page, true)).collect();
    assert_eq!(join.kvferry(&held), []);
    join.engine(vec![engine_stored(8, 2, Some("GPU"))]);
    assert_eq!((join.len(), join.left_out()), (4, 2));
    let events = join.kvferry(&[change(8, true)]);
    assert_eq!(events, [engine_stored(8, 1, Some("CPU"))]);
    // Others of kvferry make no room.
    join.kvferry(&[change(20, true)]);
    assert_eq!((join.len(), join.left_out()), (4, 3));
}

#[test]
fn other_events_pass_through_and_so_do_groups_without_a_number() {
    let mut join = Join::new(JoinSettings {
        mode: Mode::Tiers,
        pages_max: 10,
        gone_max: 0,
        groups: true,
    });
    let other = Event::Other(Value::from("later"));
    let Event::Stored(mut stored) = engine_stored(0, 1, Some("GPU")) else {
        panic!()
    };
    stored
        .others
        .push(("group_idx".to_owned(), Value::from("first")));
    let events = vec![other, Event::Stored(stored)];
    assert_eq!(join.engine(events.clone()), events);
    assert!(join.is_empty());
    // Nothing but a clear takes the page of the unknown group back.
    assert_eq!(join.engine_lost(), [Event::Cleared]);
    assert_eq!(join.engine_lost(), []);
}

#[test]
fn a_batch_in_json_has_the_fields_in_the_order_of_messagepack() {
    let batch = Batch::read(&bytes(VLLM)).unwrap();
    let mut json = Vec::new();
    batch.write_json(Shape::Map, &mut json).unwrap();
    assert_eq!(
        String::from_utf8(json).unwrap(),
        concat!(
            r#"[1.5,[{"type":"BlockStored","block_hashes":[81985529216486895,18364758544493064720],"#,
            r#""parent_block_hash":null,"token_ids":[1,2,3,4],"block_size":2,"lora_id":null,"medium":"CPU","#,
            r#""lora_name":null},{"type":"BlockStored","block_hashes":[18364758544493064720],"#,
            r#""parent_block_hash":81985529216486895,"token_ids":[3,4],"block_size":2,"lora_id":null,"#,
            r#""medium":"CPU","lora_name":null,"group_idx":0,"kv_cache_spec_kind":"full_attention"},"#,
            r#"{"type":"BlockRemoved","block_hashes":[81985529216486895],"medium":"CPU"},"#,
            r#"{"type":"AllBlocksCleared"}],0]"#,
        )
    );
}

#[test]
fn pages_that_are_nowhere_make_room_and_are_limited() {
    let mut join = Join::new(JoinSettings {
        mode: Mode::Tiers,
        pages_max: 4,
        gone_max: 3,
        groups: true,
    });
    join.engine(vec![engine_stored(0, 4, Some("GPU"))]);
    join.engine(vec![engine_removed(&[0, 1, 2, 3], Some("GPU"))]);
    assert_eq!(join.len(), 3, "the oldest one is forgotten");
    let change = |page| Change {
        held: true,
        tier: Tier::Host,
        group: 0,
        page: PageKey(page),
    };
    // The leader's record came after the engine's.
    assert_eq!(join.kvferry(&[change(3)]).len(), 1);
    assert_eq!(join.kvferry(&[change(0)]), [], "its tokens are forgotten");
    join.engine(vec![engine_stored(8, 2, Some("GPU"))]);
    assert_eq!(
        (join.len(), join.left_out()),
        (4, 0),
        "pages that are nowhere made room"
    );
}
