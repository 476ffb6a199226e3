//! Transfers that name missing pages, other tiers or records that do not fit are refused.

use super::*;

/// A copy from pages `src` to pages `dst`, each given as start and count.
fn pages(transfer: u64, direction: Direction, src: (u32, u32), dst: (u32, u32)) -> Transfer {
    let list = |(start, count)| {
        PageList(
            [kvferry_types::PageRun { start, count }]
                .into_iter()
                .collect(),
        )
    };
    let pair = FragmentPair {
        src: list(src),
        dst: list(dst),
    };
    let pairs = vec![pair];
    Transfer {
        pairs,
        ..copy(transfer, direction, 1)
    }
}

#[test]
fn a_copy_of_missing_pages_is_refused_before_anything_is_written() {
    use Direction::{Load, Store};
    let record = |block_start, first, count: usize| {
        Some(Record {
            anchor: kvferry_types::Anchor(1),
            domain: kvferry_types::DomainId(2),
            block_start,
            first,
            phase: 0,
            stored: Stored::default(),
            fingerprints: vec![kvferry_types::Fingerprint(3); count],
        })
    };
    let with = |transfer: Transfer, record| Transfer { record, ..transfer };
    let last = u32::MAX;
    let hostile = |transfer| {
        let good = pages(transfer, Store, (0, 4), (8, 4));
        [
            pages(transfer, Store, (0, 1), (32, 1)),
            pages(transfer, Store, (0, 2), (31, 2)),
            pages(transfer, Store, (64, 1), (0, 1)),
            pages(transfer, Store, (0, 1), (last, last)),
            pages(transfer, Store, (last, last), (last, last)),
            pages(transfer, Store, (0, 2), (0, 1)),
            pages(transfer, Store, (0, 0), (0, 0)),
            pages(transfer, Load, (32, 1), (0, 1)),
            pages(transfer, Load, (0, 1), (64, 1)),
            with(pages(transfer, Load, (8, 4), (0, 4)), record(8, 0, 4)),
            with(good.clone(), record(9, 0, 4)),
            with(good.clone(), record(8, 1, 4)),
            with(good.clone(), record(8, 0, 3)),
            with(good.clone(), record(8, 0, 5)),
            with(good.clone(), record(last, u16::MAX, 4)),
            with(good.clone(), record(8, u16::MAX, 4)),
            Transfer {
                pairs: Vec::new(),
                ..good.clone()
            },
            Transfer {
                pairs: vec![FragmentPair {
                    src: PageList::default(),
                    dst: PageList::default(),
                }],
                ..good.clone()
            },
            Transfer {
                edge: Edge {
                    from: TierId::Device,
                    to: TierId::Remote,
                },
                ..good.clone()
            },
            // The disk has 64 pages, host memory has 32, and neither is an engine's.
            Transfer {
                pairs: pages(transfer, Store, (32, 1), (0, 1)).pairs,
                ..between(transfer)
            },
            Transfer {
                pairs: pages(transfer, Store, (0, 1), (64, 1)).pairs,
                ..between(transfer)
            },
            Transfer {
                device: good.device,
                ..between(transfer)
            },
            Transfer {
                device: None,
                ..good.clone()
            },
            Transfer {
                page_bytes: PAGE_BYTES / 2,
                ..good
            },
        ]
    };
    let mut worker = worker();
    written(&mut worker, 1);
    for case in 0..hostile(0).len() {
        let transfer = 1 + case as u64;
        let copy = hostile(transfer)[case].clone();
        let effects = order(&mut worker, 1, transfer, vec![copy.clone()]);
        let [WorkerEffect::Invalid { problem, .. }, answer] = &effects[..] else {
            unreachable!("{copy:?}: {effects:?}")
        };
        assert_eq!(
            *answer,
            report(transfer, vec![refused(TransferId(transfer))]),
            "{problem}"
        );
    }
    let good = pages(100, Store, (60, 4), (28, 4));
    let effects = order(&mut worker, 1, 100, vec![with(good, record(26, 2, 4))]);
    assert_eq!(starts(&effects), [100]);
}
