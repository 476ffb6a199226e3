//! Batched copies: with drivers that accept them, older ones, and those that refuse them.

use crate::CopierReport;
use kvferry_types::Direction;

use super::copies::{one_seed, plain};
use super::engine::Roles;
use super::errors::TOGETHER;
use super::world::{Wanted, World};
use super::{fake, fake_cuda};

const CALL: &str = "cuMemcpyBatchAsync";
const NEWER_CALL: &str = "cuMemcpyBatchAsync_v2";

fn world() -> World {
    let registration = plain(Roles::Packed).registration();
    World::with_ways(registration, 9, 4096, 3, TOGETHER).expect("a driver without errors")
}

/// Copies in both directions, compared byte by byte.
fn both_ways() {
    let mut world = world();
    for (first, direction) in [
        (0, Direction::Store),
        (1, Direction::Load),
        (2, Direction::Store),
        (3, Direction::Load),
    ] {
        let copy = Wanted {
            direction,
            pages: (0..6).map(|page| (page, first + page)).collect(),
            pages_a_part: 2,
        };
        let transfer = world.start(&copy);
        world.expect(&copy);
        assert!(world.wait(&[transfer])[0].complete);
        world.check("all of it, together or one by one");
    }
}

/// The first refusal ends batched calls: another call would lose the GPU.
#[test]
fn a_driver_that_refuses_a_batch_gets_no_other_batch() {
    let settings = format!("delay_us=200;fail=*/{NEWER_CALL}/1/801;fail=*/{NEWER_CALL}/2/719");
    let Some(said) = fake::under(&settings, both_ways) else {
        return;
    };
    assert!(
        said.contains("cuMemcpyBatchAsync_v2 fails with 801"),
        "{said}"
    );
}

/// A batched call loses the GPU: the end of the copies in flight cannot be observed.
#[test]
fn a_gpu_that_is_lost_in_a_batch_is_reported() {
    let settings = format!("delay_us=200;fail=*/{NEWER_CALL}/2/719");
    fake::under(&settings, || {
        let registration = plain(Roles::Packed).registration();
        let mut world =
            World::with_ways(registration, 9, 4096, 3, TOGETHER).expect("a driver without errors");
        world.start(&Wanted {
            direction: Direction::Load,
            pages: (0..6).map(|page| (page, page)).collect(),
            pages_a_part: 2,
        });
        match world.outcome() {
            CopierReport::Lost(error) => {
                assert_eq!((error.call(), error.code()), (Some(NEWER_CALL), Some(719)));
            }
            other => panic!("{other:?}"),
        }
    });
}

fn with_older_driver(functions: &[&str], settings: &str) -> Option<String> {
    if fake::is_inside() {
        both_ways();
        (0..40).for_each(one_seed);
        return None;
    }
    let (folder, _home) = fake_cuda::without(functions);
    let settings = format!("delay_us=100;{settings}");
    Some(fake::succeeded(
        &fake::again(folder.path(), &settings),
        "an older driver",
    ))
}

#[test]
fn a_driver_of_cuda_12_8_gets_its_own_batched_call() {
    // The failure of the 20th call shows that such calls are made.
    let failure = format!("fail=*/{CALL}/20/1");
    let Some(said) = with_older_driver(&[NEWER_CALL], &failure) else {
        return;
    };
    assert!(said.contains("cuMemcpyBatchAsync fails with 1"), "{said}");
}

#[test]
fn a_driver_without_batched_copies_gets_single_copies() {
    with_older_driver(&[CALL, NEWER_CALL], "");
}

/// A driver that executes half of the copies of a call, refuses the call, and refuses the copies that follow one by
/// one: the half must not be reported as ended before it has.
#[test]
fn the_executed_half_of_a_refused_batch_is_awaited() {
    // The creation of the world takes two copies.
    let settings = "delay_us=20000;half=1;fail=*/cuMemcpyAsync/3/1";
    let said = fake::under(settings, || {
        for pages in [1, 6] {
            let mut world = world();
            let refused = Wanted {
                direction: Direction::Store,
                pages: (0..pages).map(|page| (page, page)).collect(),
                pages_a_part: 6,
            };
            let transfer = world.start(&refused);
            let ended = world.wait(&[transfer])[0];
            if ended.complete {
                // The driver accepts all copies of the second world.
                world.expect(&refused);
            } else {
                assert_eq!(ended.complete_pages, 0, "{ended:?}");
                for page in 0..pages {
                    world.overwrite_in_depot(page, 0xEE);
                }
            }
            // Copies that were still in flight have ended after this one.
            let next = Wanted {
                direction: Direction::Store,
                pages: vec![(0, 8), (1, 7)],
                pages_a_part: 2,
            };
            let transfer = world.start(&next);
            world.expect(&next);
            world.wait(&[transfer]);
            world.check("nothing came late");
        }
    });
    let Some(said) = said else { return };
    assert!(said.contains("cuMemcpyAsync fails with 1"), "{said}");
}

/// All copies of the refused call are then submitted one by one.
#[test]
fn the_executed_half_of_a_refused_batch_may_be_copied_twice() {
    fake::under_and_clean("delay_us=500;half=2", || {
        both_ways();
        (0..40).for_each(one_seed);
    });
}

/// On some systems the device address of registered host memory differs from the process's address: single copies
/// translate it, batched copies do not.
#[test]
fn host_memory_that_has_another_address_for_the_device_is_copied_one_by_one() {
    fake::under_and_clean("delay_us=100;host_pointers=0", || {
        both_ways();
        (0..20).for_each(one_seed);
    });
}
