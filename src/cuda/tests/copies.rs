//! Copies of every layout, in both directions, with fragments of every size: each byte must equal the reference,
//! however late the driver is.

use std::sync::Arc;

use crate::{BATCH_COPIES_MAX, CopierReport, Sharing};
use kvferry_memory::CancelFlag;
use kvferry_types::Direction;

use super::engine::{AXES, Axis, Engine, Roles, Scales};
use super::fake;
use super::world::{Wanted, Ways, World};

/// Worlds per process. Each world starts with streams of its own, and so with delays of its own.
const SEEDS_A_PROCESS: u64 = 250;

fn engine(chance: &mut fastrand::Rng) -> Engine {
    let mut order = AXES.to_vec();
    chance.shuffle(&mut order);
    if chance.bool() {
        // The elements of one head of one token are contiguous, as in every known engine.
        order.retain(|axis| *axis != Axis::Content);
        order.push(Axis::Content);
    }
    let mut view = AXES.to_vec();
    chance.shuffle(&mut view);
    let gap = |chance: &mut fastrand::Rng| match chance.u8(0..4) {
        0 => chance.u64(1..6),
        _ => 0,
    };
    let gaps = std::array::from_fn(|_| gap(chance));
    // Mostly small pieces of odd lengths; sometimes a page is one piece of up to 2 MiB.
    let large = chance.u8(0..16) == 0;
    if large {
        order = AXES.to_vec();
    }
    let (tokens, content) = match large {
        true => (16, 1 << chance.u32(8..15)),
        false => (chance.u64(1..5), chance.u64(1..40)),
    };
    let scales = (chance.u8(0..3) == 0).then(|| Scales {
        per_page: chance.u64(1..5),
        element_bytes: [1, 2, 4][chance.usize(0..3)],
        page_first: chance.bool(),
        own_allocation: chance.bool(),
    });
    Engine {
        order,
        gaps: if large { [0; 6] } else { gaps },
        view,
        layers: chance.u64(1..4),
        pages: chance.u64(3..8),
        heads: if large { 1 } else { chance.u64(1..4) },
        tokens,
        content,
        element_bytes: [1, 2, 4][chance.usize(0..3)],
        lead_bytes: chance.u64(0..70),
        roles: [Roles::Split, Roles::Packed, Roles::Latent][chance.usize(0..3)],
        allocation_per_layer: chance.bool(),
        scales,
    }
}

/// Copies that may run concurrently: no page is in two of them.
fn copies(chance: &mut fastrand::Rng, device_pages: u32, depot_pages: u32) -> Vec<Wanted> {
    let mut on_device: Vec<u32> = (0..device_pages).collect();
    let mut in_depot: Vec<u32> = (0..depot_pages).collect();
    chance.shuffle(&mut on_device);
    if chance.bool() {
        chance.shuffle(&mut in_depot);
    }
    let mut pages: Vec<(u32, u32)> = on_device.into_iter().zip(in_depot).collect();
    if chance.bool() {
        pages.sort_unstable();
    }
    let directions = [Direction::Store, Direction::Load];
    let mut wanted = Vec::new();
    while !pages.is_empty() {
        let count = chance.usize(1..=pages.len());
        wanted.push(Wanted {
            direction: directions[chance.usize(0..2)],
            pages: pages.drain(..count).collect(),
            pages_a_part: chance.usize(1..4),
        });
    }
    wanted
}

pub(super) fn one_seed(seed: u64) {
    let mut chance = fastrand::Rng::with_seed(seed);
    let engine = engine(&mut chance);
    let (device_pages, depot_pages) = (engine.pages as u32, chance.u32(3..9));
    // Pinned in small chunks, so that copies cross their ends.
    let chunk_bytes = 4096 << chance.u32(0..6);
    let ways = Ways {
        sharing: [None, None, Some(Sharing::Fd), Some(Sharing::Fabric)][chance.usize(0..4)],
        copies_a_call: [1, 1, 7, BATCH_COPIES_MAX][chance.usize(0..4)],
    };
    let registration = engine.registration();
    let world = World::with_ways(registration, depot_pages, chunk_bytes, seed, ways);
    let mut world = world.expect("a driver without errors");
    for round in 0..2 {
        let wanted = copies(&mut chance, device_pages, depot_pages);
        let transfers: Vec<_> = wanted.iter().map(|each| world.start(each)).collect();
        wanted.iter().for_each(|each| world.expect(each));
        for (copy, each) in world.wait(&transfers).iter().zip(&wanted) {
            assert!(copy.complete, "seed {seed}");
            assert_eq!(
                copy.complete_pages as usize,
                each.pages.len(),
                "seed {seed}"
            );
            assert_eq!(
                copy.bytes,
                each.pages.len() as u64 * world.layout.page_bytes
            );
        }
        world.check(&format!("seed {seed}, round {round}"));
    }
    // A store must hold the bytes that were there when its end was reported, even if the pages are overwritten
    // afterwards; and must not have read them before the engine's device had written them.
    world.engine_writes(&mut chance);
    let store = Wanted {
        direction: Direction::Store,
        pages: (0..device_pages.min(depot_pages))
            .map(|page| (page, page))
            .collect(),
        pages_a_part: 2,
    };
    let transfer = world.start(&store);
    world.expect(&store);
    world.wait(&[transfer]);
    for index in 0..world.on_device.len() as u32 {
        world.overwrite(index, 0xEE);
    }
    world.check(&format!("seed {seed}, pages given back"));
    // Both memories are dropped with the world while copies run: the driver would report an access to freed memory.
    world.start(&store);
}

fn seeds(part: u64) {
    // Memory in chunks is so small here that pages cross chunk ends only where the driver has smaller chunks than
    // usual.
    let granule_kib = [4, 2048][part as usize % 2];
    let settings = format!("seed={part};delay_us=300;strict=1;granule_kib={granule_kib}");
    fake::anywhere(&settings, || {
        (part * SEEDS_A_PROCESS..(part + 1) * SEEDS_A_PROCESS).for_each(one_seed);
    });
}

#[test]
fn late_streams_first_seeds() {
    seeds(0);
}

#[test]
fn late_streams_second_seeds() {
    seeds(1);
}

#[test]
fn late_streams_third_seeds() {
    seeds(2);
}

#[test]
fn late_streams_fourth_seeds() {
    seeds(3);
}

/// Separate layers, tokens before heads, as in many engines.
pub(super) fn plain(roles: Roles) -> Engine {
    let order = [
        Axis::Layer,
        Axis::Page,
        Axis::Half,
        Axis::Token,
        Axis::Head,
        Axis::Content,
    ];
    Engine::new(order, roles)
}

#[test]
fn a_cancelled_copy_reports_the_pages_that_were_copied() {
    fake::anywhere("delay_us=2000", || {
        for (seed, before) in [(1, true), (2, false), (3, false), (4, false)] {
            let mut world = World::new(plain(Roles::Packed).registration(), 9, 4096, seed);
            let mut wanted = Wanted {
                direction: Direction::Load,
                pages: (0..7).map(|page| (page, page)).collect(),
                pages_a_part: 1,
            };
            let cancel = Arc::new(CancelFlag::default());
            if before {
                cancel.cancel();
            }
            let transfer = world.start_with(&wanted, Arc::clone(&cancel));
            // During the copy or after its end, depending on the machine.
            cancel.cancel();
            let ended = world.wait(&[transfer])[0];
            assert!(
                !before || ended.complete_pages == 0,
                "cancelled before it began"
            );
            assert_eq!(ended.complete, ended.complete_pages == 7, "{ended:?}");
            wanted.pages.truncate(ended.complete_pages as usize);
            world.expect(&wanted);
            world.check("what came before the cancel");
        }
    });
}

#[test]
fn the_end_of_the_actor_waits_for_running_copies() {
    fake::anywhere("delay_us=2000", || {
        for seed in 0..20 {
            let mut world = World::new(plain(Roles::Packed).registration(), 9, 4096, seed);
            world.start(&Wanted {
                direction: Direction::Store,
                pages: (0..7).map(|page| (page, page)).collect(),
                pages_a_part: 1,
            });
            // Both memories are dropped with the world: if copies still ran, the driver would report it.
            drop(world);
        }
    });
}

/// Work that the engine has reported as done is no longer waited for: the device's word is not read for it, and not
/// reported.
#[test]
fn the_timeline_is_not_read_for_work_that_the_engine_reported() {
    fake::anywhere("", || {
        let mut world = World::new(plain(Roles::Packed).registration(), 9, 4096, 1);
        for _ in 0..50 {
            let said = world.engine_says_so_by_itself();
            world.start(&Wanted {
                direction: Direction::Store,
                pages: (0..7).map(|page| (page, page)).collect(),
                pages_a_part: 1,
            });
            // The word may have been read before the engine's report, when it had a lower number.
            while let CopierReport::Written(all) = world.outcome() {
                assert!(all.iter().all(|it| it.through < said), "{all:?}");
            }
        }
    });
}
