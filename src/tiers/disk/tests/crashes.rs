//! Losses of power at every write.

use std::collections::{BTreeMap, BTreeSet};

use kvferry_types::{PageRecord, PageRun, Stored};

use super::world::{RATIO, World, key};

const CAP: u64 = 4 << 20;

/// What the tier must do, as far as its calls have returned.
#[derive(Debug, Default)]
struct Promises {
    /// Pages that were reported durable and that nothing has overwritten or removed since.
    durable: BTreeMap<u32, PageRecord>,
    /// Namespaces that were reset, with the last store that the reset covers.
    resets: BTreeMap<u64, Stored>,
    /// Number of pages that the set counts as durable.
    counted: u64,
}

/// The pages that this process lists.
fn listed(world: &World) -> BTreeMap<u32, PageRecord> {
    let records = world.set().table().records(0..u32::MAX);
    records
        .into_iter()
        .map(|record| (record.page, record))
        .collect()
}

/// One process: a random sequence of stores, growths, resets and flushes, until the disk says that it is dead.
fn run(
    world: &mut World,
    promises: &mut Promises,
    rng: &mut fastrand::Rng,
    steps: usize,
) -> std::io::Result<()> {
    let capacity = world.set().capacity_pages();
    if rng.bool() {
        world.set().discard_free()?;
    }
    for _ in 0..steps {
        promises.counted = world.set().durable_pages();
        match rng.u32(0..100) {
            0..=69 => {
                let blocks: Vec<(u32, u64, u32)> = {
                    let set = world.set();
                    let table = set.table();
                    let blocks = table.blocks().map(|(start, block)| {
                        (start, block.domain.namespace().0, block.pages.len() as u32)
                    });
                    blocks.collect()
                };
                let grown = rng.bool().then(|| rng.choice(&blocks).copied()).flatten();
                let grown = grown.filter(|(.., pages)| *pages < RATIO);
                let fresh = (rng.u32(0..capacity), rng.u64(0..3), 0);
                let (start, namespace, first) = grown.unwrap_or(fresh);
                let room = capacity.saturating_sub(start + first).min(RATIO - first);
                if room == 0 {
                    continue;
                }
                let count = rng.u32(1..=room);
                let record = world.record(start, (first as u16, count), namespace);
                // From the first write on, the pages that are overwritten are not promised any longer, nor those behind
                // them in their blocks.
                let run = PageRun {
                    start: start + first,
                    count,
                };
                world.set().table().unlist(run);
                let left = listed(world);
                promises.durable.retain(|page, _| left.contains_key(page));
                promises.counted = world.set().durable_pages();
                if rng.bool() {
                    world.set().write_dirty(0, 100)?;
                }
                world.store(&record)?;
            }
            70..=79 => {
                let namespace = rng.u64(0..3);
                let of = |record: &PageRecord| record.domain.namespace().0 == namespace;
                promises.durable.retain(|_, record| !of(record));
                promises.counted = 0;
                let through = world.reset(Some(namespace))?;
                promises.resets.insert(namespace, through);
            }
            80..=94 => {
                world.set().write_dirty(0, rng.usize(1..20))?;
            }
            _ => {
                world.tier().flush()?;
                promises.durable = listed(world);
                let (_, pages) = world.set().listed();
                assert_eq!(world.set().durable_pages(), pages);
            }
        }
    }
    Ok(())
}

/// Recovers after a crash and checks the promises. Returns the pages that are served.
fn check(world: &mut World, promises: &Promises, seed: u64) -> usize {
    world.tier = None;
    let found = world
        .start(key(1))
        .unwrap_or_else(|error| panic!("seed {seed}: {error}"));
    let served = world.served();
    assert_eq!(
        served,
        listed(world),
        "seed {seed}: pages are listed that are not there"
    );
    let counted = promises.counted;
    assert!(
        served.len() as u64 >= counted,
        "seed {seed}: {} pages are found, and {counted} were counted as durable",
        served.len()
    );
    for (page, promised) in &promises.durable {
        let record = served.get(page);
        let record =
            record.unwrap_or_else(|| panic!("seed {seed}: page {page} was durable: {found:?}"));
        assert_eq!(record, promised, "seed {seed}");
    }
    for record in served.values() {
        let reset = promises.resets.get(&record.domain.namespace().0);
        assert!(
            reset.is_none_or(|through| *through < record.stored),
            "seed {seed}: {record:?} was reset"
        );
    }
    let used: u64 = world
        .disks
        .iter()
        .map(super::sim_files::SimDisk::used)
        .sum();
    assert!(used <= CAP, "seed {seed}: {used} bytes");
    // A second recovery finds the same.
    world.tier = None;
    let again = world.start(key(1)).expect("opened");
    assert_eq!(again.bad_slots, 0, "seed {seed}: {again:?}");
    assert_eq!(
        (again.overwritten_pages, again.reset_pages, again.lost_pages),
        (0, 0, 0),
        "seed {seed}: {found:?} {again:?}"
    );
    assert_eq!(world.served(), served, "seed {seed}");
    served.len()
}

/// One world: a few processes, each of which ends in a crash at a random change.
fn world(seed: u64) -> (usize, BTreeSet<u64>) {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut world = World::new(1 + (seed % 2) as usize, CAP);
    let mut promises = Promises::default();
    let mut served = 0;
    let mut at = BTreeSet::new();
    world.start(key(1)).expect("a fresh disk");
    for _ in 0..3 {
        let before: u64 = world
            .disks
            .iter()
            .map(super::sim_files::SimDisk::changes)
            .sum();
        let budget = rng.u64(0..200);
        for disk in &world.disks {
            disk.die_after(Some(budget));
        }
        let steps = rng.usize(1..60);
        let ended = run(&mut world, &mut promises, &mut rng, steps);
        let after: u64 = world
            .disks
            .iter()
            .map(super::sim_files::SimDisk::changes)
            .sum();
        if ended.is_err() {
            at.insert(after - before);
        }
        world.disks.iter().for_each(|disk| disk.crash(&mut rng));
        served += check(&mut world, &promises, seed);
        // What is served now is durable; what is not is gone.
        promises.durable = world.served();
        promises.counted = promises.durable.len() as u64;
        assert_eq!(world.set().durable_pages(), promises.counted, "{seed}");
    }
    (served, at)
}

#[test]
fn nothing_durable_is_lost_and_nothing_wrong_is_served_after_a_crash() {
    let mut served = 0;
    let mut at = BTreeSet::new();
    for seed in 0..1000 {
        let (pages, died) = world(seed);
        served += pages;
        at.extend(died);
    }
    assert!(served > 20_000, "{served} pages are served");
    assert!(at.len() > 100, "crashes at {} different changes", at.len());
}
