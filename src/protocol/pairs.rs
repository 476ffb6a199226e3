//! Lists of pages and fragment pairs as MessagePack. One decoder reads the forms of both versions, also mixed.
//!
//! * version 1: `pairs` is a list of `[src, dst]`, both page indices; a list of pages is a list of page indices;
//! * version 2: `pairs` is a list of `[[items], [items]]`, where an item is a page index or a run `[start, count]`; a
//!   list of pages is a list of items.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error as _, SeqAccess, Visitor};
use serde::ser::{SerializeSeq, SerializeTuple, Serializer};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use crate::limits::{PAGE_ITEMS_MAX, PAIRS_MAX, beyond};
use kvferry_types::{FragmentPair, PageList, PageRun};

/// Most list items for which capacity is reserved before they are decoded.
const EXPECTED_MAX: usize = 256;

/// A list of pages on the wire.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pages {
    /// Pages in order, as runs.
    pub list: PageList,
    /// Encode page by page, as version 1 does.
    pub(super) flat: bool,
}

/// Fragment pairs on the wire.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pairs {
    /// Pairs in order.
    pub list: Vec<FragmentPair>,
    /// Encode page by page, as version 1 does.
    pub(super) flat: bool,
}

impl From<PageList> for Pages {
    fn from(list: PageList) -> Self {
        Self { list, flat: false }
    }
}

impl From<Vec<FragmentPair>> for Pairs {
    fn from(list: Vec<FragmentPair>) -> Self {
        Self { list, flat: false }
    }
}

struct Items<'a>(&'a PageList);

impl Serialize for Items<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut seq = serializer.serialize_seq(Some(self.0.0.len()))?;
        for run in &self.0.0 {
            match run.count {
                1 => seq.serialize_element(&run.start)?,
                _ => seq.serialize_element(&(run.start, run.count))?,
            }
        }
        seq.end()
    }
}

impl Serialize for Pages {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.flat {
            serializer.collect_seq(self.list.iter_pages().collect::<Vec<_>>())
        } else {
            Items(&self.list).serialize(serializer)
        }
    }
}

struct Sides<'a>(&'a FragmentPair);

impl Serialize for Sides<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut tuple = serializer.serialize_tuple(2)?;
        tuple.serialize_element(&Items(&self.0.src))?;
        tuple.serialize_element(&Items(&self.0.dst))?;
        tuple.end()
    }
}

impl Serialize for Pairs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.flat {
            let pages = self
                .list
                .iter()
                .flat_map(|p| p.src.iter_pages().zip(p.dst.iter_pages()));
            serializer.collect_seq(pages.collect::<Vec<_>>())
        } else {
            serializer.collect_seq(self.list.iter().map(Sides))
        }
    }
}

impl<'de> Deserialize<'de> for Pages {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut budget = PAGE_ITEMS_MAX;
        Ok(deserializer
            .deserialize_seq(ListedPages(&mut budget))?
            .into())
    }
}

/// Decodes a list of items. Unlike a side of a pair, it is not a page alone.
struct ListedPages<'a>(&'a mut usize);

impl<'de> Visitor<'de> for ListedPages<'_> {
    type Value = PageList;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of page indices and runs [start, count]")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<PageList, A::Error> {
        Side(self.0).visit_seq(seq)
    }
}

impl<'de> Deserialize<'de> for Pairs {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct List;
        impl<'de> Visitor<'de> for List {
            type Value = Pairs;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of pairs [src, dst] or [[srcs], [dsts]]")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Pairs, A::Error> {
                let mut budget = 2 * PAGE_ITEMS_MAX;
                let mut list: Vec<FragmentPair> = Vec::with_capacity(expected(&seq));
                while let Some(pair) = seq.next_element_seed(Pair(&mut budget))? {
                    if list.len() == PAIRS_MAX {
                        return Err(A::Error::custom(beyond("pairs", PAIRS_MAX)));
                    }
                    if list.len() == list.capacity() {
                        // Twice as many would be 32 times the bytes of the shortest pairs.
                        list.reserve_exact(list.len() / 4 + EXPECTED_MAX);
                    }
                    list.push(pair);
                }
                Ok(list.into())
            }
        }
        deserializer.deserialize_seq(List)
    }
}

/// Decodes one pair and counts its items against the budget of the list.
struct Pair<'a>(&'a mut usize);

impl<'de> DeserializeSeed<'de> for Pair<'_> {
    type Value = FragmentPair;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<FragmentPair, D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Pair<'_> {
    type Value = FragmentPair;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a pair of two: sources and destinations")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<FragmentPair, A::Error> {
        let short = || A::Error::custom("a pair has two sides");
        let src = seq.next_element_seed(Side(self.0))?.ok_or_else(short)?;
        let dst = seq.next_element_seed(Side(self.0))?.ok_or_else(short)?;
        if seq.next_element::<serde::de::IgnoredAny>()?.is_some() {
            return Err(short());
        }
        if src.pages() != dst.pages() {
            let (from, to) = (src.pages(), dst.pages());
            return Err(A::Error::custom(format!(
                "a pair of {from} source and {to} destination pages"
            )));
        }
        Ok(FragmentPair { src, dst })
    }
}

/// Decodes one side of a pair: one page index, or a list of items.
struct Side<'a>(&'a mut usize);

impl<'de> DeserializeSeed<'de> for Side<'_> {
    type Value = PageList;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<PageList, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Side<'_> {
    type Value = PageList;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a page index, or a list of page indices and runs [start, count]")
    }

    fn visit_u64<E: serde::de::Error>(self, page: u64) -> Result<PageList, E> {
        spend(self.0)?;
        Ok(PageList::run(index(page)?, 1))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<PageList, A::Error> {
        let mut runs = SmallVec::with_capacity(expected(&seq));
        while let Some(Item(run)) = seq.next_element()? {
            spend(self.0)?;
            runs.push(run);
        }
        if runs.is_empty() {
            return Err(A::Error::custom("an empty list of pages"));
        }
        Ok(PageList(runs))
    }
}

/// One item: a page index or a run `[start, count]`.
struct Item(PageRun);

impl<'de> Deserialize<'de> for Item {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;
        impl<'de> Visitor<'de> for Either {
            type Value = Item;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a page index or a run [start, count]")
            }

            fn visit_u64<E: serde::de::Error>(self, page: u64) -> Result<Item, E> {
                Ok(Item(PageRun::one(index(page)?)))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Item, A::Error> {
                let short = || A::Error::custom("a run is [start, count]");
                let start: u32 = seq.next_element()?.ok_or_else(short)?;
                let count: u32 = seq.next_element()?.ok_or_else(short)?;
                if seq.next_element::<serde::de::IgnoredAny>()?.is_some() {
                    return Err(short());
                }
                let run = PageRun { start, count };
                if count == 0 || run.end() > u64::from(u32::MAX) {
                    return Err(A::Error::custom(format!(
                        "run [{start}, {count}] holds no page index"
                    )));
                }
                Ok(Item(run))
            }
        }
        deserializer.deserialize_any(Either)
    }
}

/// Capacity to reserve for a list that claims a length, at most [`EXPECTED_MAX`] items (a few KiB). A false claim ends
/// the message, so at most one such allocation is unused at a time.
fn expected<'de, A: SeqAccess<'de>>(seq: &A) -> usize {
    seq.size_hint().unwrap_or(0).min(EXPECTED_MAX)
}

fn index<E: serde::de::Error>(page: u64) -> Result<u32, E> {
    u32::try_from(page)
        .ok()
        .filter(|page| *page < u32::MAX)
        .ok_or_else(|| E::custom(format!("{page} is no page index")))
}

fn spend<E: serde::de::Error>(budget: &mut usize) -> Result<(), E> {
    match budget.checked_sub(1) {
        Some(left) => *budget = left,
        None => {
            return Err(E::custom(beyond("items of pages", PAGE_ITEMS_MAX)));
        }
    }
    Ok(())
}
