//! Arbitrary bytes decode to a message or a typed error, never to a panic, and never allocate memory by a claimed
//! length.

use kvferry_protocol::{
    DecodeError, Envelope, ErrorCode, Header, Load, Message, MessageKind, PartBody, RecordBody,
    TransferBody, TransferOrder, VERSION, VERSION_MIN, decode, encode, examples, limits,
};
use kvferry_types::{Epoch, FragmentPair, PageList, PageRun, RequestId};
use proptest::prelude::*;

fn header(version: u16, kind: u16) -> Header {
    Header {
        version,
        kind,
        correlation: RequestId(1),
        deadline_ms: 1,
        required: 0,
        epoch: Epoch(1),
    }
}

fn envelope(version: u16, message: Message) -> Envelope {
    Envelope {
        version,
        correlation: RequestId(1),
        deadline_ms: 1,
        epoch: Epoch(1),
        message,
    }
}

/// The body of a transfer with these bytes as its pairs.
fn transfer_with_pairs(pairs: &[u8]) -> Vec<u8> {
    let mut body = vec![0x85];
    body.extend_from_slice(b"\xa4from\x01\xa2to\x02\xa6engine\xc4\x10");
    body.extend_from_slice(&[1; 16]);
    body.extend_from_slice(b"\xa5after\x01\xa9transfers\x91\x82\xa2id\x01\xa5pairs");
    body.extend_from_slice(pairs);
    body
}

fn read_pairs(pairs: &[u8]) -> Result<Vec<FragmentPair>, DecodeError> {
    let body = transfer_with_pairs(pairs);
    match decode(header(2, MessageKind::Transfer.number()), &body)?.message {
        Message::Transfer(transfer) => Ok(transfer.transfers[0].pairs.list.clone()),
        other => panic_kind(&other),
    }
}

#[expect(clippy::panic, reason = "this is how the test fails")]
fn panic_kind(message: &Message) -> ! {
    panic!("a {}", message.kind().name())
}

fn page_list(pages: u32) -> impl Strategy<Value = PageList> {
    prop::collection::vec(0_u32..1_000_000, pages as usize)
        .prop_map(|pages| pages.into_iter().collect())
}

fn pair() -> impl Strategy<Value = FragmentPair> {
    (1_u32..40).prop_flat_map(|pages| {
        let gather =
            (page_list(pages), 0_u32..1_000_000).prop_map(move |(src, start)| FragmentPair {
                src,
                dst: PageList::run(start, pages),
            });
        let pairwise =
            (page_list(pages), page_list(pages)).prop_map(|(src, dst)| FragmentPair { src, dst });
        prop_oneof![gather, pairwise]
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn random_bodies_are_answered(kind in 0_u16..80, body in prop::collection::vec(any::<u8>(), 0..300)) {
        let known = MessageKind::from_number(kind).is_some();
        match decode(header(2, kind), &body) {
            Err(error) => prop_assert_eq!(matches!(error, DecodeError::UnknownKind(_)), !known),
            Ok(received) => prop_assert!(known && received.message.kind().number() == kind),
        }
    }

    #[test]
    fn damaged_messages_are_answered(
        which in any::<prop::sample::Index>(),
        version in VERSION_MIN..=VERSION,
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in any::<prop::sample::Index>(),
    ) {
        let all = examples();
        let (_, message) = &all[which.index(all.len())];
        let (_, body) = encode(&envelope(version, message.clone())).expect("an example can be said");
        let mut damaged = body.clone();
        for (at, byte) in damage {
            let at = at.index(damaged.len());
            damaged[at] = byte;
        }
        if let Ok(received) = decode(header(version, message.kind().number()), &damaged) {
            prop_assert_eq!(received.message.kind(), message.kind());
        }
        let cut = cut.index(body.len());
        prop_assert!(decode(header(version, message.kind().number()), &body[..cut]).is_err());
    }

    #[test]
    fn random_headers_are_answered(bytes in prop::collection::vec(any::<u8>(), 0..40)) {
        if let Ok(header) = Header::from_bytes(&bytes) {
            let mut read = bytes;
            read[22..24].fill(0);
            prop_assert_eq!(header.to_bytes().to_vec(), read);
        }
    }

    #[test]
    fn pairs_survive_both_versions(pairs in prop::collection::vec(pair(), 1..30)) {
        let transfers = vec![TransferBody { id: 9, pairs: pairs.clone().into(), record: None }];
        let transfer = TransferOrder { from: 1, to: 2, engine: Some([1; 16]), request: 3, after: 3, group: 2, page_bytes: 4096, transfers };
        let page_by_page = |pairs: &[FragmentPair]| -> Vec<(u32, u32)> {
            pairs.iter().flat_map(|pair| pair.src.iter_pages().zip(pair.dst.iter_pages())).collect()
        };
        for version in VERSION_MIN..=VERSION {
            let said = envelope(version, Message::Transfer(transfer.clone()));
            let (head, body) = encode(&said).expect("it can be said");
            let received = decode(Header::from_bytes(&head).expect("a header"), &body).expect("it is received");
            let Message::Transfer(received) = received.message else { return Err(TestCaseError::fail("a transfer")) };
            let received = &received.transfers[0].pairs.list;
            prop_assert_eq!(page_by_page(received), page_by_page(&pairs));
            if version == 2 {
                prop_assert_eq!(received, &pairs);
            }
        }
    }
}

#[test]
fn one_list_may_mix_the_shapes_of_both_versions() {
    // [[1, 2], [[3, [5, 2]], [[10, 3]]], [4, [7]]]
    let pairs = read_pairs(&[
        0x93, 0x92, 1, 2, 0x92, 0x92, 3, 0x92, 5, 2, 0x91, 0x92, 10, 3, 0x92, 4, 0x91, 7,
    ]);
    let pairs = pairs.expect("both shapes");
    let flat: Vec<(Vec<u32>, Vec<u32>)> = pairs
        .iter()
        .map(|p| (p.src.iter_pages().collect(), p.dst.iter_pages().collect()))
        .collect();
    assert_eq!(
        flat,
        [
            (vec![1], vec![2]),
            (vec![3, 5, 6], vec![10, 11, 12]),
            (vec![4], vec![7])
        ]
    );
}

#[test]
fn meaningless_shapes_are_refused() {
    let cases: [(&str, &[u8]); 14] = [
        ("unequal sides", &[0x91, 0x92, 1, 0x91, 0x92, 2, 3]),
        ("one side", &[0x91, 0x91, 1]),
        ("three sides", &[0x91, 0x93, 1, 2, 3]),
        ("an empty side", &[0x91, 0x92, 0x90, 0x90]),
        ("a run of no pages", &[0x91, 0x92, 0x91, 0x92, 5, 0, 1]),
        (
            "a run of three numbers",
            &[0x91, 0x92, 0x91, 0x93, 5, 1, 1, 1],
        ),
        (
            "a run beyond the index space",
            &[0x91, 0x92, 0x91, 0x92, 0xce, 255, 255, 255, 255, 2, 1],
        ),
        ("a negative page", &[0x91, 0x92, 0xff, 1]),
        (
            "a fraction",
            &[0x91, 0x92, 0xcb, 0x3f, 0xf0, 0, 0, 0, 0, 0, 0, 1],
        ),
        ("nil", &[0x91, 0x92, 0xc0, 1]),
        ("true", &[0x91, 0x92, 0xc3, 1]),
        ("a text", &[0x91, 0x92, 0xa1, b'1', 1]),
        ("a map", &[0x91, 0x92, 0x80, 1]),
        (
            "a page beyond 32 bits",
            &[0x91, 0x92, 0xcf, 0, 0, 0, 1, 0, 0, 0, 0, 1],
        ),
    ];
    for (what, pairs) in cases {
        let error = read_pairs(pairs).expect_err(what);
        assert_eq!(error.code(), ErrorCode::Malformed, "{what}: {error}");
    }
}

#[test]
fn nesting_and_claimed_lengths_cost_nothing() {
    let deep = vec![0x91; 100_000];
    assert!(read_pairs(&deep).is_err());
    for kind in MessageKind::ALL {
        assert!(decode(header(2, kind.number()), &deep).is_err());
        // An unknown field, nested equally deep.
        let mut unknown = vec![0x81, 0xa1, b'?'];
        unknown.extend_from_slice(&deep);
        assert!(decode(header(2, kind.number()), &unknown).is_err());
        for claim in [
            b"\xdd\xff\xff\xff\xff".as_slice(),
            b"\xdf\xff\xff\xff\xff",
            b"\xc6\xff\xff\xff\xff",
        ] {
            assert!(decode(header(2, kind.number()), claim).is_err());
        }
    }
    assert!(read_pairs(b"\xdd\xff\xff\xff\xff").is_err());
    assert!(read_pairs(b"\x91\x92\xdd\xff\xff\xff\xff").is_err());
}

#[test]
fn bytes_after_a_body_are_refused_and_unknown_fields_are_skipped() {
    let ping = MessageKind::Ping.number();
    assert!(decode(header(2, ping), &[0x80]).is_ok());
    let trailing = decode(header(2, ping), &[0x80, 0x80]).expect_err("too much");
    assert!(
        matches!(trailing, DecodeError::Trailing { bytes: 1, .. }),
        "{trailing}"
    );
    // Trailing bytes are refused even if they are incomplete.
    let broken = decode(header(2, ping), &[0x80, 0x91]).expect_err("too much");
    assert!(
        matches!(broken, DecodeError::Trailing { bytes: 1, .. }),
        "{broken}"
    );
    assert!(decode(header(2, ping), b"\x81\xa5later\x92\x01\xa1x").is_ok());
    assert!(matches!(
        decode(header(3, ping), &[0x80]),
        Err(DecodeError::Version(3))
    ));
    assert!(matches!(
        decode(header(0, ping), &[0x80]),
        Err(DecodeError::Version(0))
    ));
}

#[test]
fn limits_hold_on_both_sides() {
    let load = |pages: u64| {
        let runs = [PageRun {
            start: 0,
            count: u32::try_from(pages).expect("small"),
        }];
        let list = PageList(runs.as_slice().into());
        envelope(
            2,
            Message::Load(Load {
                slot: 1,
                parts: vec![PartBody {
                    group: 0,
                    first_page: 0,
                    count: list.pages(),
                    pages: list.into(),
                    priority: None,
                }],
                after: 0,
            }),
        )
    };
    assert!(encode(&load(limits::PAGES_MAX)).is_ok());
    let error = encode(&load(limits::PAGES_MAX + 1)).expect_err("too many pages");
    assert!(
        error
            .to_string()
            .contains("pages is 1048577, more than the limit of 1048576"),
        "{error}"
    );
    // An equal message from a sender that does not check its limits: 82 a4 slot 01, a5 parts of one: 83 aa first_page, count
    // 00, a5 pages [[0, n]].
    let mut body =
        b"\x82\xa4slot\x01\xa5parts\x91\x83\xaafirst_page\x00\xa5count\x00\xa5pages\x91\x92\x00\xce".to_vec();
    body.extend_from_slice(
        &u32::try_from(limits::PAGES_MAX + 1)
            .expect("small")
            .to_be_bytes(),
    );
    assert!(decode(header(2, MessageKind::Load.number()), &body).is_err());
    let long = vec![0; limits::BODY_BYTES_MAX + 1];
    let error = decode(header(2, MessageKind::Load.number()), &long).expect_err("too long");
    assert_eq!(error.code(), ErrorCode::Limit);
}

#[test]
fn a_struct_is_a_map_and_no_list() {
    let ended = MessageKind::Ended.number();
    // {rank: 0, copies: [{transfer: 1, complete: true}]}
    let named = b"\x82\xa4rank\x00\xa6copies\x91\x82\xa8transfer\x01\xa8complete\xc3";
    assert!(decode(header(2, ended), named).is_ok());
    // {rank: 0, copies: [[1, true]]}, and the whole body without names.
    let inner = b"\x82\xa4rank\x00\xa6copies\x91\x92\x01\xc3";
    let outer = b"\x92\x00\x91\x82\xa8transfer\x01\xa8complete\xc3";
    for body in [inner.as_slice(), outer] {
        let error = decode(header(2, ended), body).expect_err("a list");
        assert_eq!(error.code(), ErrorCode::Malformed, "{error}");
        assert!(
            error.to_string().contains("a map with the fields"),
            "{error}"
        );
    }
    // The fast reader of transfers accepts only bodies as this program writes them, and applies the same rule to their
    // records.
    let record = RecordBody {
        anchor: [1; 16],
        domain: [2; 16],
        block_start: 0,
        first: 0,
        phase: 0,
        transfer: 1,
        fingerprints: vec![3; 16],
    };
    let pair = FragmentPair {
        src: PageList::run(0, 1),
        dst: PageList::run(0, 1),
    };
    let transfer = TransferBody {
        id: 1,
        pairs: vec![pair].into(),
        record: Some(record.clone()),
    };
    let order = Message::Transfer(TransferOrder {
        group: 0,
        page_bytes: 4096,
        from: 1,
        to: 2,
        engine: Some([1; 16]),
        request: 1,
        after: 1,
        transfers: vec![transfer],
    });
    let (_, mut body) = encode(&envelope(2, order)).expect("it can be said");
    let named = rmp_serde::to_vec_named(&record).expect("it can be said");
    assert!(body.ends_with(&named), "the record is last");
    assert!(decode(header(2, MessageKind::Transfer.number()), &body).is_ok());
    body.truncate(body.len() - named.len());
    body.extend(rmp_serde::to_vec(&record).expect("it can be said"));
    let error = decode(header(2, MessageKind::Transfer.number()), &body).expect_err("a list");
    assert_eq!(error.code(), ErrorCode::Malformed, "{error}");
}
