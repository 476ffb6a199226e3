//! A fast encoder and decoder for [`TransferOrder`], without serde's dispatch for each page.
//!
//! Transfers are the largest messages by far: thousands of page numbers, of one, two, three or five bytes each, and a
//! decoder that branches on the length mispredicts often. [`write()`] produces the bytes that serde produces. [`read`]
//! accepts exactly that layout and returns `None` for anything else, which serde then decodes, errors included. So
//! there is one format, and one decoder that decides what is wrong.

use rmp::decode::{read_array_len, read_bin_len, read_int, read_map_len};
use rmp::encode::{write_array_len, write_bin, write_map_len, write_nil, write_str, write_uint};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use crate::body::{RecordBody, TransferBody, TransferOrder};
use crate::limits::{DEPTH_MAX, PAGE_ITEMS_MAX, PAIRS_MAX};
use crate::named::Named;
use crate::trail::Trail;
use kvferry_types::{FragmentPair, PageList, PageRun};

/// Most list items for which capacity is reserved before they are decoded.
const EXPECTED_MAX: usize = 256;
/// Fewest bytes of a pair: three list headers and two pages.
const PAIR_BYTES_MIN: usize = 5;
/// Nesting depth around a record: the body, the list of transfers, the transfer.
const RECORD_DEPTH: usize = 3;
/// The nil marker: "MessagePack specification", formats nil.
const NIL: u8 = 0xc0;

/// How a number is encoded, by its first byte: "MessagePack specification", formats positive fixint and uint 8 to 32.
/// In a big-endian word of eight bytes, the number starts after `skip_bits` and is followed by `drop_bits`.
#[derive(Clone, Copy)]
struct Number {
    bytes: u8,
    skip_bits: u8,
    drop_bits: u8,
}

/// Indexed by the first byte; `bytes` is 0 where the byte starts no such number.
const NUMBERS: [Number; 256] = {
    let none = Number {
        bytes: 0,
        skip_bits: 0,
        drop_bits: 0,
    };
    let mut numbers = [none; 256];
    let mut first = 0;
    while first < 0x80 {
        numbers[first] = Number {
            bytes: 1,
            skip_bits: 0,
            drop_bits: 56,
        };
        first += 1;
    }
    let mut log = 0;
    while log < 3 {
        let width = 1 << log;
        numbers[0xcc + log] = Number {
            bytes: 1 + width,
            skip_bits: 8,
            drop_bits: 64 - 8 * width,
        };
        log += 1;
    }
    numbers
};

/// Appends the encoded body. Serializing into memory fails only for values that MessagePack cannot express.
pub(super) fn write(
    transfer: &TransferOrder,
    out: &mut Vec<u8>,
) -> Result<(), rmp_serde::encode::Error> {
    write_map_len(out, 8)?;
    write_str(out, "from")?;
    write_uint(out, transfer.from.into())?;
    write_str(out, "to")?;
    write_uint(out, transfer.to.into())?;
    write_str(out, "engine")?;
    match &transfer.engine {
        Some(engine) => write_bin(out, engine)?,
        None => write_nil(out).map_err(rmp::encode::ValueWriteError::InvalidMarkerWrite)?,
    }
    write_str(out, "request")?;
    write_uint(out, transfer.request)?;
    write_str(out, "after")?;
    write_uint(out, transfer.after)?;
    write_str(out, "group")?;
    write_uint(out, transfer.group.into())?;
    write_str(out, "page_bytes")?;
    write_uint(out, transfer.page_bytes)?;
    write_str(out, "transfers")?;
    write_array_len(out, length(transfer.transfers.len()))?;
    for copy in &transfer.transfers {
        write_map_len(out, 3)?;
        write_str(out, "id")?;
        write_uint(out, copy.id)?;
        write_str(out, "pairs")?;
        write_array_len(out, length(copy.pairs.list.len()))?;
        for pair in &copy.pairs.list {
            write_array_len(out, 2)?;
            write_items(&pair.src, out)?;
            write_items(&pair.dst, out)?;
        }
        write_str(out, "record")?;
        match &copy.record {
            Some(record) => {
                record.serialize(&mut rmp_serde::Serializer::new(&mut *out).with_struct_map())?;
            }
            None => write_nil(out).map_err(rmp::encode::ValueWriteError::InvalidMarkerWrite)?,
        }
    }
    Ok(())
}

/// The length of a list for its header. Lists are checked before encoding against limits far below `u32::MAX`.
fn length(items: usize) -> u32 {
    u32::try_from(items).unwrap_or(u32::MAX)
}

fn write_items(list: &PageList, out: &mut Vec<u8>) -> Result<(), rmp_serde::encode::Error> {
    write_array_len(out, length(list.0.len()))?;
    for run in &list.0 {
        if run.count == 1 {
            write_page(run.start, out);
        } else {
            write_array_len(out, 2)?;
            write_page(run.start, out);
            write_page(run.count, out);
        }
    }
    Ok(())
}

/// Writes the shortest form without a branch: appends a full eight-byte word, then truncates the excess.
fn write_page(page: u32, out: &mut Vec<u8>) {
    const FORMS: [(u64, u32, usize); 4] = [(0, 56, 1), (0xcc, 48, 2), (0xcd, 40, 3), (0xce, 24, 5)];
    let form =
        usize::from(page >= 1 << 7) + usize::from(page >= 1 << 8) + usize::from(page >= 1 << 16);
    let (first, shift, bytes) = FORMS[form];
    let word = first << 56 | u64::from(page) << shift;
    let end = out.len() + bytes;
    out.extend_from_slice(&word.to_be_bytes());
    out.truncate(end);
}

/// Decodes a body that [`write()`] produced. `None` for everything else, including bodies beyond a limit.
pub(super) fn read(body: &[u8]) -> Option<TransferOrder> {
    let mut rest = body;
    let from = &mut rest;
    (read_map_len(from).ok()? == 8).then_some(())?;
    key(from, "from")?;
    let from_tier = read_int(from).ok()?;
    key(from, "to")?;
    let to = read_int(from).ok()?;
    key(from, "engine")?;
    let engine = read_engine(from)?;
    key(from, "request")?;
    let request = read_int(from).ok()?;
    key(from, "after")?;
    let after = read_int(from).ok()?;
    key(from, "group")?;
    let group = read_int(from).ok()?;
    key(from, "page_bytes")?;
    let page_bytes = read_int(from).ok()?;
    key(from, "transfers")?;
    let expected = read_array_len(from).ok()? as usize;
    let mut transfers = Vec::with_capacity(expected.min(EXPECTED_MAX));
    for _ in 0..expected {
        transfers.push(read_transfer(from)?);
    }
    let transfer = TransferOrder {
        from: from_tier,
        to,
        engine,
        request,
        after,
        group,
        page_bytes,
        transfers,
    };
    rest.is_empty().then_some(transfer)
}

fn read_engine(from: &mut &[u8]) -> Option<Option<[u8; 16]>> {
    if let [NIL, behind @ ..] = *from {
        *from = behind;
        return Some(None);
    }
    (read_bin_len(from).ok()? == 16).then_some(())?;
    let (engine, behind) = from.split_first_chunk::<16>()?;
    *from = behind;
    Some(Some(*engine))
}

fn read_transfer(from: &mut &[u8]) -> Option<TransferBody> {
    (read_map_len(from).ok()? == 3).then_some(())?;
    key(from, "id")?;
    let id = read_int(from).ok()?;
    key(from, "pairs")?;
    let pairs = read_array_len(from).ok()? as usize;
    if pairs > PAIRS_MAX {
        return None;
    }
    let mut budget = 2 * PAGE_ITEMS_MAX;
    let mut list = Vec::with_capacity(pairs.min(from.len() / PAIR_BYTES_MIN));
    for _ in 0..pairs {
        (read_array_len(from).ok()? == 2).then_some(())?;
        let (src, src_pages) = read_items(from, &mut budget)?;
        let (dst, dst_pages) = read_items(from, &mut budget)?;
        (src_pages == dst_pages).then_some(())?;
        list.push(FragmentPair { src, dst });
    }
    key(from, "record")?;
    Some(TransferBody {
        id,
        pairs: list.into(),
        record: read_record(from)?,
    })
}

fn read_record(from: &mut &[u8]) -> Option<Option<RecordBody>> {
    if let [NIL, behind @ ..] = *from {
        *from = behind;
        return Some(None);
    }
    let mut reader = rmp_serde::Deserializer::new(*from);
    reader.set_max_depth(DEPTH_MAX - RECORD_DEPTH);
    let record = RecordBody::deserialize(Named(&mut reader, &Trail::default())).ok()?;
    *from = reader.get_ref();
    Some(Some(record))
}

/// Consumes a field name; `None` if the next value is another.
fn key(from: &mut &[u8], name: &str) -> Option<()> {
    let (first, behind) = from.split_first()?;
    // The names are short enough for the format fixstr.
    if usize::from(*first) != 0xa0 | name.len() {
        return None;
    }
    *from = behind.strip_prefix(name.as_bytes())?;
    Some(())
}

/// Decodes a list of pages and returns it with its number of pages.
fn read_items(from: &mut &[u8], budget: &mut usize) -> Option<(PageList, u64)> {
    let items = read_array_len(from).ok()? as usize;
    *budget = budget.checked_sub(items).filter(|_| items > 0)?;
    let mut runs = SmallVec::with_capacity(items.min(EXPECTED_MAX));
    let mut pages = 0;
    for _ in 0..items {
        let run = match read_number(from) {
            Some(start) if start < u32::MAX => PageRun::one(start),
            Some(_) => return None,
            None => {
                (read_array_len(from).ok()? == 2).then_some(())?;
                let (start, count) = (read_number(from)?, read_number(from)?);
                let run = PageRun { start, count };
                (count > 0 && run.end() <= u64::from(u32::MAX)).then_some(run)?
            }
        };
        pages += u64::from(run.count);
        runs.push(run);
    }
    Some((PageList(runs), pages))
}

/// Decodes the next number, in any of its forms. Consumes nothing if the next value is not a number.
fn read_number(from: &mut &[u8]) -> Option<u32> {
    let word = match from.first_chunk::<8>() {
        Some(word) => u64::from_be_bytes(*word),
        None => {
            let mut word = [0; 8];
            word[..from.len()].copy_from_slice(from);
            u64::from_be_bytes(word)
        }
    };
    let number = NUMBERS[usize::from((word >> 56) as u8)];
    if number.bytes == 0 {
        return None;
    }
    *from = from.get(usize::from(number.bytes)..)?;
    Some((word << number.skip_bits >> number.drop_bits) as u32)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn written(transfer: &TransferOrder) -> Vec<u8> {
        let mut bytes = Vec::new();
        write(transfer, &mut bytes).expect("memory");
        bytes
    }

    fn by_serde(transfer: &TransferOrder) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut serializer = rmp_serde::Serializer::new(&mut bytes).with_struct_map();
        transfer.serialize(&mut serializer).expect("memory");
        bytes
    }

    fn read_by_serde(bytes: &[u8]) -> Option<TransferOrder> {
        let mut reader = rmp_serde::Deserializer::new(bytes);
        reader.set_max_depth(DEPTH_MAX);
        let transfer = TransferOrder::deserialize(&mut reader).ok()?;
        reader.get_ref().is_empty().then_some(transfer)
    }

    /// Page numbers of every encoded length, including the boundary values.
    fn page() -> impl Strategy<Value = u32> {
        let borders = [0, 127, 128, 255, 256, 65_535, 65_536, u32::MAX - 1];
        prop_oneof![
            prop::sample::select(borders.to_vec()),
            0..300_u32,
            0..70_000_u32,
            0..u32::MAX
        ]
    }

    fn side(pages: u32) -> impl Strategy<Value = PageList> {
        let single = prop::collection::vec(page(), pages as usize);
        let one_run = (0..1_000_000_u32).prop_map(move |start| PageList::run(start, pages));
        prop_oneof![
            single.prop_map(|pages| pages.into_iter().collect()),
            one_run
        ]
    }

    fn pair() -> impl Strategy<Value = FragmentPair> {
        let sides = (1..300_u32).prop_flat_map(|pages| (side(pages), side(pages)));
        sides.prop_map(|(src, dst)| FragmentPair { src, dst })
    }

    prop_compose! {
        fn record()(
            anchor: [u8; 16],
            block_start: u32,
            transfer: u64,
            fingerprints in prop::collection::vec(any::<u8>(), 0..64),
        ) -> RecordBody {
            RecordBody {
                anchor,
                domain: [7; 16],
                block_start,
                first: 1,
                phase: 2,
                transfer,
                fingerprints,
            }
        }
    }

    prop_compose! {
        fn copy()(
            id: u64,
            pairs in prop::collection::vec(pair(), 0..6),
            record in prop::option::of(record()),
        ) -> TransferBody {
            TransferBody { id, pairs: pairs.into(), record }
        }
    }

    prop_compose! {
        fn transfer()(
            from: u8,
            to: u8,
            engine: Option<[u8; 16]>,
            request: u64,
            after: u64,
            group: u8,
            page_bytes: u64,
            transfers in prop::collection::vec(copy(), 0..20),
        ) -> TransferOrder {
            TransferOrder { from, to, engine, request, after, group, page_bytes, transfers }
        }
    }

    proptest! {
        #[test]
        fn the_bytes_are_those_of_serde_and_come_back(transfer in transfer()) {
            let bytes = written(&transfer);
            prop_assert_eq!(&bytes, &by_serde(&transfer));
            prop_assert_eq!(read(&bytes), Some(transfer));
        }

        #[test]
        fn the_reader_agrees_with_serde(
            transfer in transfer(),
            damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..3),
            cut in prop::option::weighted(0.1, any::<prop::sample::Index>()),
        ) {
            let mut bytes = written(&transfer);
            for (at, byte) in damage {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            if let Some(cut) = cut {
                bytes.truncate(cut.index(bytes.len()));
            }
            if let Some(read) = read(&bytes) {
                prop_assert_eq!(read_by_serde(&bytes), Some(read));
            }
        }
    }

    /// A load with one pair whose two lists are replaced by these bytes.
    fn with_lists(lists: &[u8]) -> Vec<u8> {
        let transfer = TransferOrder {
            group: 0,
            page_bytes: 4096,
            from: 2,
            to: 1,
            engine: Some([1; 16]),
            request: 3,
            after: 2,
            transfers: vec![TransferBody {
                id: 4,
                pairs: vec![FragmentPair {
                    src: PageList::run(5, 1),
                    dst: PageList::run(6, 1),
                }]
                .into(),
                record: None,
            }],
        };
        let bytes = written(&transfer);
        let pair = b"\x92\x91\x05\x91\x06";
        let at = bytes.windows(pair.len()).position(|window| window == pair);
        let (before, behind) = bytes.split_at(at.expect("the pair"));
        [before, b"\x92", lists, &behind[pair.len()..]].concat()
    }

    #[test]
    fn lists_that_break_a_rule_are_left_to_serde() {
        assert!(read(&with_lists(b"\x91\x05\x91\x06")).is_some());
        for (what, lists) in [
            ("no pages", &b"\x90\x90"[..]),
            ("other numbers of pages", b"\x92\x05\x06\x91\x06"),
            ("no page index", b"\x91\xce\xff\xff\xff\xff\x91\x06"),
            ("an empty run", b"\x91\x92\x05\x00\x91\x06"),
            (
                "a run beyond all pages",
                b"\x91\x92\xce\xff\xff\xff\xff\x01\x91\x06",
            ),
            ("a run of three numbers", b"\x91\x93\x05\x01\x01\x91\x06"),
        ] {
            let bytes = with_lists(lists);
            assert_eq!(read(&bytes), None, "{what}");
            assert_eq!(read_by_serde(&bytes), None, "{what}");
        }
        let version_1 = with_lists(b"\x05\x06");
        assert_eq!(read(&version_1), None);
        assert!(read_by_serde(&version_1).is_some(), "pages of version 1");
        let long = with_lists(b"\x91\xcd\x00\x05\x91\x06");
        assert!(read(&long).is_some(), "a number longer than it must be");
        assert_eq!(read(&long), read_by_serde(&long));
    }

    #[test]
    fn a_record_is_nested_no_deeper_than_serde_accepts() {
        let nested = |lists: usize| {
            let record = RecordBody {
                anchor: [1; 16],
                domain: [2; 16],
                block_start: 3,
                first: 0,
                phase: 0,
                transfer: 4,
                fingerprints: Vec::new(),
            };
            let transfer = TransferOrder {
                group: 0,
                page_bytes: 4096,
                from: 1,
                to: 2,
                engine: Some([1; 16]),
                request: 3,
                after: 2,
                transfers: vec![TransferBody {
                    id: 4,
                    pairs: Vec::new().into(),
                    record: Some(record),
                }],
            };
            let mut bytes = written(&transfer);
            let at = bytes.windows(2).rposition(|window| window == [0x87, 0xa6]);
            bytes[at.expect("a map of seven, and its first key")] = 0x88;
            bytes.extend(b"\xa1x");
            bytes.extend(vec![0x91; lists]);
            bytes.push(NIL);
            bytes
        };
        let mut taken = 0;
        for lists in 0..2 * DEPTH_MAX {
            let bytes = nested(lists);
            assert_eq!(read(&bytes), read_by_serde(&bytes), "{lists} lists");
            taken += usize::from(read(&bytes).is_some());
        }
        assert!((1..2 * DEPTH_MAX).contains(&taken));
    }

    #[test]
    fn more_items_than_a_message_may_have_are_left_to_serde() {
        let full = |items: usize| {
            let list = |first: u32| (0..items as u32).map(|page| first + 2 * page).collect();
            let pair = FragmentPair {
                src: list(0),
                dst: list(1),
            };
            let transfers = vec![TransferBody {
                id: 1,
                pairs: vec![pair].into(),
                record: None,
            }];
            written(&TransferOrder {
                group: 0,
                page_bytes: 4096,
                from: 2,
                to: 3,
                engine: None,
                request: 0,
                after: 2,
                transfers,
            })
        };
        assert!(read(&full(PAGE_ITEMS_MAX)).is_some());
        assert!(read(&full(PAGE_ITEMS_MAX + 1)).is_none());
    }
}
