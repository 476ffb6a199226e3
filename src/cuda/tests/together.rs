//! Copies that are given many by one call: by drivers that take them, by older ones, and by those that refuse them.

use crate::cuda::Outcome;
use crate::types::Direction;

use super::copies::{one_seed, plain};
use super::engine::Roles;
use super::errors::TOGETHER;
use super::world::{Wanted, World};
use super::{fake, fake_cuda};

const CALL: &str = "cuMemcpyBatchAsync";
const NEWER_CALL: &str = "cuMemcpyBatchAsync_v2";

/// Three stores, byte by byte; what the driver said of its failures.
fn stores() {
    let mut world = World::with_ways(plain(Roles::Packed).registration(), 9, 4096, 3, TOGETHER)
        .expect("a driver without errors");
    for first in 0..3 {
        let store = Wanted {
            direction: Direction::Store,
            pages: (0..6).map(|page| (page, first + page)).collect(),
            pages_a_part: 2,
        };
        let op = world.start(&store);
        world.expect(&store);
        assert!(world.wait(&[op])[0].whole);
        world.check("all of it, together or one by one");
    }
}

/// The first refusal is the last such call: another would lose the GPU.
#[test]
fn a_driver_that_refuses_them_once_is_not_asked_again() {
    let settings = format!("delay_us=200;fail=*/{NEWER_CALL}/1/801;fail=*/{NEWER_CALL}/2/719");
    let Some(said) = fake::under(&settings, stores) else {
        return;
    };
    assert!(
        said.contains("cuMemcpyBatchAsync_v2 fails with 801"),
        "{said}"
    );
}

/// The GPU is lost by such a call: everything under way has no end that anybody knows.
#[test]
fn a_gpu_that_is_lost_by_them_is_told() {
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
            Outcome::Lost(error) => assert_eq!((error.call, error.code), (NEWER_CALL, 719)),
            other => panic!("{other:?}"),
        }
    });
}

fn with_older_driver(functions: &[&str], settings: &str) -> Option<String> {
    if fake::is_inside() {
        stores();
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
fn a_driver_of_cuda_12_8_takes_them_by_the_call_of_then() {
    // The last failure shows that there are such calls.
    let failure = format!("fail=*/{CALL}/20/1");
    let Some(said) = with_older_driver(&[NEWER_CALL], &failure) else {
        return;
    };
    assert!(said.contains("cuMemcpyBatchAsync fails with 1"), "{said}");
}

#[test]
fn a_driver_before_that_gets_them_one_by_one() {
    with_older_driver(&[CALL, NEWER_CALL], "");
}
