mod bench;

use proptest::prelude::*;

use self::bench::{Bench, Layout, Shape};
use super::plan::CopyRange;
use super::*;
use crate::SharedBuffer;
use kvferry_types::{PageList, PageRun};

fn pair(src: &[(u32, u32)], dst: &[(u32, u32)]) -> FragmentPair {
    let list = |runs: &[(u32, u32)]| {
        let runs = runs.iter().map(|(start, count)| PageRun {
            start: *start,
            count: *count,
        });
        PageList(runs.collect())
    };
    FragmentPair {
        src: list(src),
        dst: list(dst),
    }
}

fn plan(bench: &Bench, pairs: Vec<FragmentPair>) -> Vec<CopyRange> {
    let plan = bench.job(Direction::Store, pairs).plan().expect("in range");
    plan.steps(0..plan.steps).collect()
}

fn shapes() -> impl Strategy<Value = Shape> {
    prop_oneof![
        (0..9_u64).prop_map(|gap| Shape::SeparateLayers { gap }),
        Just(Shape::Contiguous),
        Just(Shape::Planes),
    ]
}

prop_compose! {
    fn layouts()(
        shape in shapes(),
        layers in 1..4_u64,
        pages in 1..9_u64,
        elements in prop_oneof![1..80_u64, 250..300_u64, Just(256_u64), 1000..1100_u64],
        element_bytes in 1..5_u64,
        lead_bytes in 0..70_u64,
    ) -> Layout {
        Layout { shape, layers, pages, elements, element_bytes, lead_bytes }
    }
}

prop_compose! {
    /// A layout, a permutation of its device pages, a permutation of ten arena pages, and the positions at which the
    /// lists are cut into pairs.
    fn jobs()(layout in layouts())(
        device in Just((0..layout.pages as u32).collect::<Vec<_>>()).prop_shuffle(),
        depot in Just((0..10).collect::<Vec<u32>>()).prop_shuffle(),
        sorted in any::<bool>(),
        cut in 1..5_usize,
        layout in Just(layout),
    ) -> (Layout, Vec<u32>, Vec<u32>, usize) {
        let (mut device, mut depot) = (device, depot);
        if sorted {
            device.sort_unstable();
            depot.sort_unstable();
        }
        (layout, device, depot, cut)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn copies_equal_a_copy_byte_by_byte(
        (layout, device, depot, cut) in jobs(),
        gather in any::<bool>(),
        mode in prop_oneof![Just(CopyMode::Plain), Just(CopyMode::NonTemporal)],
    ) {
        let bench = Bench::new(layout, 10);
        let pages: Vec<_> = device.into_iter().zip(depot).collect();
        let pairs = pages.chunks(cut).map(|chunk| {
            let device = chunk.iter().map(|pages| pages.0).collect();
            let depot = chunk.iter().map(|pages| pages.1).collect();
            if gather {
                FragmentPair { src: device, dst: depot }
            } else {
                FragmentPair { src: depot, dst: device }
            }
        });
        let direction = if gather { Direction::Store } else { Direction::Load };
        let job = bench.job(direction, pairs.collect());
        let expected = bench.expected(&job, bench.snapshot());
        let report = CopyEngine::with_mode(1, mode).expect("no threads").run(&job).expect("copied");
        prop_assert_eq!(report.bytes, pages.len() as u64 * bench.layout.page_bytes);
        prop_assert!(bench.snapshot() == expected);
    }
}

const LARGE: Layout = Layout {
    shape: Shape::SeparateLayers { gap: 7 },
    layers: 3,
    pages: 40,
    elements: 10_001,
    element_bytes: 2,
    lead_bytes: 3,
};

fn backwards(pages: u32) -> Vec<FragmentPair> {
    let pairs = (0..pages).map(|page| FragmentPair {
        src: PageList::run(page, 1),
        dst: PageList::run(pages - 1 - page, 1),
    });
    pairs.collect()
}

#[test]
fn a_pool_copies_the_same_bytes_as_one_thread() {
    for mode in [CopyMode::Plain, CopyMode::NonTemporal, CopyMode::Auto] {
        let engine = CopyEngine::with_mode(4, mode).expect("threads");
        for direction in [Direction::Store, Direction::Load] {
            let bench = Bench::new(LARGE, 40);
            let job = bench.job(direction, backwards(40));
            let expected = bench.expected(&job, bench.snapshot());
            let report = engine.run(&job).expect("copied");
            assert!(report.bytes >= POOL_MIN_BYTES);
            assert_eq!(report.steps, 40 * 3);
            assert!(bench.snapshot() == expected, "{mode:?} {direction:?}");
            assert_eq!(
                Arc::strong_count(&bench.depot),
                2,
                "the pool released the memory"
            );
        }
    }
}

#[test]
fn a_cancelled_copy_stops_and_touches_nothing_more() {
    for threads in [1, 4] {
        let bench = Bench::new(LARGE, 40);
        let engine = CopyEngine::new(threads).expect("threads");
        let mut job = bench.job(Direction::Store, backwards(40));
        job.cancel = Arc::new(CancelFlag::after_looks(30));
        let Err(CopyError::Cancelled {
            bytes_written,
            bytes,
        }) = engine.run(&job)
        else {
            panic!("it went on");
        };
        assert_eq!(bytes, 40 * bench.layout.page_bytes);
        assert!(bytes_written >= 29 * 40_004 - 3 * 40_004, "{bytes_written}");
        assert!(bytes_written < bytes);
        assert_eq!(
            Arc::strong_count(&bench.depot),
            2,
            "the pool released the memory"
        );

        let before = bench.snapshot();
        job.cancel = Arc::default();
        job.cancel.cancel();
        let again = engine.run(&job);
        assert!(matches!(
            again,
            Err(CopyError::Cancelled {
                bytes_written: 0,
                ..
            })
        ));
        assert!(bench.snapshot() == before);
    }
}

#[test]
fn a_store_offers_its_cpu_at_each_step_while_a_load_waits_and_seldom_otherwise() {
    let run = |direction, waits: bool| {
        let bench = Bench::new(LARGE, 40);
        let waiting = WaitingLoads::default();
        let engine = CopyEngine::new(1).expect("threads");
        let engine = engine.yielding_to(waiting.clone());
        let load = waits.then(|| waiting.add());
        let report = engine.run(&bench.job(direction, backwards(40)));
        drop(load);
        assert!(!waiting.any());
        (report.expect("copied"), waiting.offered() as u64)
    };
    let (report, offered) = run(Direction::Store, true);
    assert_eq!(offered, report.steps);
    let (report, offered) = run(Direction::Store, false);
    // Less than a step too late each time, and not across shares.
    let (most, least) = (STORE_YIELD_BYTES, 2 * STORE_YIELD_BYTES);
    let range = report.bytes / least..=report.bytes / most;
    assert!(range.contains(&offered), "{offered} in {report:?}");
    for waits in [false, true] {
        let (_, offered) = run(Direction::Load, waits);
        assert_eq!(offered, 0, "a load");
    }
}

#[test]
fn a_refused_job_copies_nothing() {
    let bench = Bench::new(
        Layout {
            pages: 8,
            elements: 100,
            ..LARGE
        },
        10,
    );
    let engine = CopyEngine::new(1).expect("no threads");
    let before = bench.snapshot();
    let fine = || pair(&[(0, 2)], &[(0, 2)]);
    let run = |direction, bad: FragmentPair| {
        engine
            .run(&bench.job(direction, vec![fine(), bad]))
            .expect_err("refused")
            .to_string()
    };
    let gather = |bad| run(Direction::Store, bad);
    let scatter = |bad| run(Direction::Load, bad);
    assert_eq!(
        gather(pair(&[(7, 2)], &[(4, 2)])),
        "pair 1 names device page 8, there are 8"
    );
    assert_eq!(
        gather(pair(&[(4, 2)], &[(11, 2)])),
        "pair 1 names depot page 11, there are 10"
    );
    assert_eq!(
        scatter(pair(&[(9, 2)], &[(4, 2)])),
        "pair 1 names depot page 10, there are 10"
    );
    assert_eq!(
        scatter(pair(&[(4, 1)], &[(u32::MAX, 1)])),
        format!("pair 1 names device page {}, there are 8", u32::MAX)
    );
    assert_eq!(
        gather(pair(&[(4, 2)], &[(4, 3)])),
        "pair 1 reads 2 pages and writes 3"
    );
    assert_eq!(
        gather(pair(&[(4, 3)], &[(5, 1), (1, 2)])),
        "depot page 1 is written twice in one batch"
    );
    assert!(bench.snapshot() == before);

    let mut job = bench.job(Direction::Store, vec![fine()]);
    let mut layout = PageLayout::clone(&bench.layout);
    layout.fragments[2].base_bytes += 1 << 20;
    job.layout = Arc::new(layout);
    assert!(matches!(
        engine.run(&job),
        Err(CopyError::Layout { fragment: 2 })
    ));
    assert!(bench.snapshot() == before);
}

#[test]
fn streaming_writes_change_exactly_their_range() {
    let buffer = SharedBuffer::create("kvferry-test", 8192).expect("memory");
    for (at, len) in [
        (0, 8192),
        (1, 4096),
        (63, 511),
        (64, 512),
        (7000, 1192),
        (5, 0),
    ] {
        buffer.write_from(0, &[7; 8192]).expect("in bounds");
        let bytes: Vec<u8> = (0..len).map(|byte| byte as u8 ^ 0x80).collect();
        buffer.write_streaming(at, &bytes).expect("in bounds");
        let mut expected = vec![7; 8192];
        expected[at as usize..][..len].copy_from_slice(&bytes);
        let mut found = vec![0; 8192];
        buffer.read_into(0, &mut found).expect("in bounds");
        assert!(found == expected, "{len} bytes at {at}");
    }
    assert!(buffer.write_streaming(8191, &[0; 2]).is_err());
}

#[test]
fn nothing_to_copy_is_no_error() {
    let bench = Bench::new(LARGE, 1);
    let engine = CopyEngine::new(1).expect("no threads");
    for pairs in [
        vec![],
        vec![pair(&[], &[])],
        vec![pair(&[(3, 0)], &[(0, 0)])],
    ] {
        let report = engine
            .run(&bench.job(Direction::Store, pairs))
            .expect("nothing");
        assert_eq!(report, CopyReport::default());
    }
}

#[test]
fn neighbours_are_merged_before_they_are_copied() {
    let contiguous = Layout {
        shape: Shape::Contiguous,
        layers: 2,
        pages: 600,
        elements: 512,
        element_bytes: 2,
        lead_bytes: 0,
    };
    let bench = Bench::new(contiguous, 600);
    assert_eq!(bench.layout.page_bytes, 4096);
    let run = plan(
        &bench,
        vec![pair(&[(10, 3)], &[(20, 3)]), pair(&[(13, 4)], &[(23, 4)])],
    );
    let expected = CopyRange {
        allocation: 0,
        device_bytes: 10 * 4096,
        depot_bytes: bench.depot.pages_at(4096) + 20 * 4096,
        len_bytes: 7 * 4096,
    };
    assert_eq!(run, [expected]);
    let long = plan(&bench, vec![pair(&[(0, 600)], &[(0, 600)])]);
    let lengths: Vec<_> = long.iter().map(|step| step.len_bytes).collect();
    let mut expected = vec![CUT_BYTES; (600 * 4096 / CUT_BYTES) as usize];
    expected.push(600 * 4096 % CUT_BYTES);
    assert_eq!(lengths, expected);
    let job = bench.job(
        Direction::Store,
        vec![
            pair(&[(0, 300)], &[(0, 300)]),
            pair(&[(301, 9)], &[(300, 9)]),
        ],
    );
    let plan_of_both = job.plan().expect("in range");
    let ranges: Vec<_> = plan_of_both.ranges().map(|range| range.len_bytes).collect();
    assert_eq!(
        ranges,
        [300 * 4096, 9 * 4096],
        "whole, as long as both sides go on"
    );

    let planes = Bench::new(
        Layout {
            shape: Shape::Planes,
            ..contiguous
        },
        600,
    );
    assert_eq!(plan(&planes, vec![pair(&[(0, 5)], &[(0, 5)])]).len(), 5 * 4);
    let beside = Bench::new(
        Layout {
            shape: Shape::SeparateLayers { gap: 0 },
            ..contiguous
        },
        9,
    );
    assert_eq!(plan(&beside, vec![pair(&[(0, 5)], &[(0, 5)])]).len(), 5 * 2);
}
