//! Random layouts and random lists of pages.

use std::collections::HashSet;

use kvferry_memory::{CopyMode, validate};
use kvferry_types::{Direction, Registration};
use proptest::prelude::*;

use super::engine::{AXES, Engine, Roles, Scales, addresses};
use super::world::{ARENA_PAGES, World};

fn scales() -> impl Strategy<Value = Option<Scales>> {
    let some = (1..5_u64, element_bytes(), any::<bool>(), any::<bool>()).prop_map(
        |(per_page, element_bytes, page_first, own_allocation)| Scales {
            per_page,
            element_bytes,
            page_first,
            own_allocation,
        },
    );
    prop::option::of(some)
}

fn element_bytes() -> impl Strategy<Value = u32> {
    prop_oneof![Just(1), Just(2), Just(4)]
}

fn gap() -> impl Strategy<Value = u64> {
    prop_oneof![3 => Just(0), 1 => 1..6_u64]
}

prop_compose! {
    fn engines()(
        order in Just(AXES.to_vec()).prop_shuffle(),
        usual in any::<bool>(),
        view in Just(AXES.to_vec()).prop_shuffle(),
        gaps in prop::array::uniform6(gap()),
        (layers, pages, heads) in (1..4_u64, 1..8_u64, 1..4_u64),
        // Long contents reach the streaming stores. They have few tokens, so that a page stays below the maximum of
        // fragments.
        (tokens, content) in prop_oneof![3 => (1..5_u64, 1..20_u64), 1 => (Just(1), 250..300_u64)],
        element_bytes in element_bytes(),
        lead_bytes in 0..70_u64,
        roles in prop_oneof![Just(Roles::Split), Just(Roles::Packed), Just(Roles::Latent)],
        allocation_per_layer in any::<bool>(),
        scales in scales(),
    ) -> Engine {
        let mut order = order;
        if usual {
            // The elements of one head for one token are adjacent, as in every known engine.
            order.retain(|axis| *axis != AXES[5]);
            order.push(AXES[5]);
        }
        Engine {
            order, gaps, view, layers, pages, heads, tokens, content, element_bytes, lead_bytes, roles,
            allocation_per_layer, scales,
        }
    }
}

/// A copy for a layout that is not known yet: `sources` are reduced to existing pages and may repeat, destinations are
/// the first ones of an order.
#[derive(Debug, Clone)]
struct Copy {
    direction: Direction,
    sources: Vec<u32>,
    destinations: Vec<u32>,
    sorted: bool,
    cut: usize,
    mode: CopyMode,
}

prop_compose! {
    fn copies()(
        direction in prop_oneof![Just(Direction::Store), Just(Direction::Load)],
        sources in prop::collection::vec(any::<u32>(), 1..=ARENA_PAGES as usize),
        destinations in Just((0..ARENA_PAGES).collect::<Vec<u32>>()).prop_shuffle(),
        sorted in any::<bool>(),
        cut in 1..6_usize,
        mode in prop_oneof![Just(CopyMode::Plain), Just(CopyMode::NonTemporal)],
    ) -> Copy {
        Copy { direction, sources, destinations, sorted, cut, mode }
    }
}

impl Copy {
    /// The pages of the copy as pairs (device page, depot page).
    fn pages(&self, device_pages: u32) -> Vec<(u32, u32)> {
        let (there, written) = match self.direction {
            Direction::Store => (device_pages, ARENA_PAGES),
            Direction::Load => (ARENA_PAGES, device_pages),
        };
        let mut sources: Vec<u32> = self.sources.iter().map(|page| page % there).collect();
        let destinations = self.destinations.iter().copied();
        let mut destinations: Vec<u32> = destinations.filter(|page| *page < written).collect();
        if self.sorted {
            sources.sort_unstable();
            sources.dedup();
            destinations.sort_unstable();
        }
        let pairs = sources.into_iter().zip(destinations);
        match self.direction {
            Direction::Store => pairs.collect(),
            Direction::Load => pairs.map(|(depot, device)| (device, depot)).collect(),
        }
    }
}

/// Changes one number of one tensor by `by`.
fn spoil(registration: &mut Registration, tensor: usize, field: usize, by: i64) {
    let count = registration.groups[0].tensors.len();
    let tensor = &mut registration.groups[0].tensors[tensor % count];
    let axes = tensor.strides.len();
    let value = match field % (axes + 1) {
        axis if axis < axes => &mut tensor.strides[axis],
        _ => &mut tensor.offset_bytes,
    };
    *value = value.saturating_add_signed(by);
    let page_stride = tensor.strides[tensor.page_axis as usize];
    tensor.page_stride_bytes = page_stride * u64::from(tensor.element_bytes);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(192))]

    #[test]
    fn copies_equal_those_of_the_reference(
        engine in engines(),
        copies in prop::collection::vec(copies(), 1..4),
    ) {
        let world = World::new(engine.registration());
        for copy in copies {
            let pages = copy.pages(world.registration.groups[0].device_pages);
            let copied = world.copy(copy.direction, &pages, copy.cut, copy.mode);
            let report = copied.map_err(TestCaseError::fail)?;
            prop_assert_eq!(report.bytes, pages.len() as u64 * world.layout.page_bytes);
        }
    }

    #[test]
    fn stored_bytes_come_back_unchanged(engine in engines(), shift in 0..ARENA_PAGES) {
        let world = World::new(engine.registration());
        let pages = world.registration.groups[0].device_pages.min(ARENA_PAGES);
        let there: Vec<_> = (0..pages).map(|page| (page, (page + shift) % ARENA_PAGES)).collect();
        let elsewhere: Vec<_> = there.iter().map(|(page, depot)| (pages - 1 - page, *depot)).collect();
        for (direction, pages) in [
            (Direction::Store, &there),
            (Direction::Load, &elsewhere),
            (Direction::Load, &there),
        ] {
            world.copy(direction, pages, 2, CopyMode::Auto).map_err(TestCaseError::fail)?;
        }
    }

    #[test]
    fn accepted_layouts_share_no_byte(
        engine in engines(),
        (tensor, field, by) in (any::<usize>(), any::<usize>(), -9..10_i64),
    ) {
        let mut registration = engine.registration();
        spoil(&mut registration, tensor, field, by);
        match validate(&registration) {
            Ok(_) => {
                let mut claimed = HashSet::new();
                for tensor in &registration.groups[0].tensors {
                    let memory = &registration.allocations[tensor.allocation as usize];
                    for page in 0..registration.groups[0].device_pages {
                        for at in addresses(tensor, page) {
                            prop_assert!((at as u64) < memory.bytes);
                            prop_assert!(claimed.insert((tensor.allocation, at)));
                        }
                    }
                }
            }
            Err(error) => {
                prop_assert!(by != 0, "{error}");
                prop_assert!(error.field.starts_with("groups[0].tensors["), "{error}");
            }
        }
    }
}
