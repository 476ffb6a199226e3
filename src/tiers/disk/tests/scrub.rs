//! The scrub of an open set.

use std::time::{Duration, Instant};

use kvferry_types::PageRun;

use super::super::format::segment_name;
use super::super::scrub::{SCRUB_EVERY, Scrub, ScrubPass, ScrubStep};
use super::world::{World, key};

const RATE: u64 = 1 << 20;

fn filled() -> World {
    let mut world = World::new(2, 4 << 20);
    world.start(key(1)).expect("fresh disks");
    for start in [0, 20, 40, 60, 80] {
        let record = world.record(start, (0, 10), 1);
        world.store(&record).expect("stored");
    }
    world.tier().flush().expect("flushed");
    world
}

fn flip(world: &World, page: u32) {
    let geometry = *world.set().geometry();
    let extent = geometry.extents(page, 1)[0];
    world.disks[extent.disk].flip_bit(&segment_name(extent.segment), extent.at + 7, 3);
}

/// Steps until a pass ends. Returns it, all steps, and the time that it took.
fn pass(world: &World, scrub: &mut Scrub) -> (ScrubPass, Vec<ScrubStep>, Duration) {
    let begun = scrub.due();
    let mut steps = Vec::new();
    loop {
        let now = scrub.due();
        let step = scrub.step(&world.set(), now);
        let ended = step.ended;
        steps.push(step);
        if let Some(pass) = ended {
            return (pass, steps, now - begun);
        }
    }
}

#[test]
fn a_pass_reads_every_listed_page_no_faster_than_the_limit() {
    let world = filled();
    let now = Instant::now();
    let mut scrub = Scrub::new(&world.set(), RATE, now).expect("a limit");
    let (ended, steps, time) = pass(&world, &mut scrub);
    let bytes = 50 * world.set().geometry().stride;
    let expected = ScrubPass {
        pages: 50,
        bytes,
        ..ScrubPass::default()
    };
    assert_eq!(ended, expected);
    assert!(steps.iter().all(|step| step.removed.is_empty()));
    let least = Duration::from_secs_f64(bytes as f64 / RATE as f64);
    assert!(
        time >= least.mul_f64(0.999) && time <= least.mul_f64(1.001),
        "{time:?}"
    );
    // The next pass begins a day later.
    assert_eq!(scrub.due(), now + SCRUB_EVERY);
    let early = scrub.step(&world.set(), now + SCRUB_EVERY / 2);
    assert!(early.ended.is_none() && early.removed.is_empty());
    let (second, ..) = pass(&world, &mut scrub);
    assert_eq!(second, expected);
}

#[test]
fn a_step_before_its_time_reads_nothing() {
    let world = filled();
    let now = Instant::now();
    let mut scrub = Scrub::new(&world.set(), RATE, now).expect("a limit");
    scrub.step(&world.set(), now);
    let due = scrub.due();
    assert!(due > now);
    flip(&world, 20);
    assert!(
        scrub
            .step(&world.set(), due - Duration::from_nanos(1))
            .removed
            .is_empty()
    );
    assert_eq!(scrub.due(), due);
    assert_eq!(scrub.step(&world.set(), due).removed.len(), 1);
}

#[test]
fn without_a_limit_there_is_no_scrub() {
    let world = filled();
    assert!(Scrub::new(&world.set(), 0, Instant::now()).is_none());
}

#[test]
fn a_changed_page_is_removed_with_those_behind_it_in_its_block() {
    let mut world = filled();
    flip(&world, 44);
    flip(&world, 47);
    let mut scrub = Scrub::new(&world.set(), RATE, Instant::now()).expect("a limit");
    let (ended, steps, _) = pass(&world, &mut scrub);
    let removed: Vec<PageRun> = steps.into_iter().flat_map(|step| step.removed).collect();
    let run = PageRun {
        start: 44,
        count: 6,
    };
    assert_eq!(removed, [run]);
    assert_eq!((ended.bad_pages, ended.removed_pages), (1, 6));
    let served = world.served();
    assert_eq!(served.len(), 44);
    // The removal is durable with the next flush.
    world.tier().flush().expect("flushed");
    world.tier = None;
    world.start(key(1)).expect("opened");
    assert_eq!(world.served(), served);
}

#[test]
fn a_page_that_is_stored_again_while_it_is_read_stays() {
    let mut world = filled();
    let set = world.set();
    let block = set.table().block(20).expect("listed").clone();
    // Between the reading of the bytes and the removal, another store lists the page.
    let record = world.record(20, (0, 10), 1);
    world.store(&record).expect("stored");
    assert_eq!(set.unlist_bad(20, 3, &block.pages[3]), None);
    assert_eq!(world.served().len(), 50);
    let block = set.table().block(20).expect("listed").clone();
    let run = PageRun {
        start: 23,
        count: 7,
    };
    assert_eq!(set.unlist_bad(20, 3, &block.pages[3]), Some(run));
}

#[test]
fn pages_that_are_being_written_are_not_read() {
    let world = filled();
    let run = PageRun {
        start: 40,
        count: 10,
    };
    world.set().unlist(run);
    flip(&world, 42);
    let mut scrub = Scrub::new(&world.set(), RATE, Instant::now()).expect("a limit");
    let (ended, ..) = pass(&world, &mut scrub);
    assert_eq!((ended.pages, ended.bad_pages), (40, 0));
}

#[test]
fn the_first_pages_of_an_empty_set_are_verified_soon() {
    let mut world = World::new(1, 4 << 20);
    world.start(key(1)).expect("a fresh disk");
    let now = Instant::now();
    let mut scrub = Scrub::new(&world.set(), RATE, now).expect("a limit");
    assert!(scrub.step(&world.set(), now).ended.is_none());
    assert_eq!(scrub.due(), now + Duration::from_secs(60));
    let record = world.record(20, (0, 10), 1);
    world.store(&record).expect("stored");
    let (ended, ..) = pass(&world, &mut scrub);
    assert_eq!(ended.pages, 10);
}
