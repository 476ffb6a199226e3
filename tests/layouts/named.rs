//! One test for each kind of layout.

use kvferry_memory::CopyMode;
use kvferry_types::{Direction, TensorRole};

use super::engine::Axis::{Content, Half, Head, Layer, Page, Token};
use super::engine::{Engine, Roles, Scales, registration, view};
use super::world::World;

/// Copies both ways. Returns allocation, start and length of each fragment of page 0.
fn fragments(engine: &Engine) -> Vec<(u32, u64, u64)> {
    let world = World::new(engine.registration());
    world.copy_both_ways();
    let fragments = world.layout.fragments.iter();
    fragments
        .map(|it| (it.allocation, it.base_bytes, it.page_bytes))
        .collect()
}

/// The depot's bytes of page 1 after a store of it.
fn stored(engine: &Engine) -> Vec<u8> {
    let world = World::new(engine.registration());
    let copied = world.copy(Direction::Store, &[(1, 4)], 1, CopyMode::Plain);
    copied.expect("as the reference has it");
    world.depot_page(4)
}

#[test]
fn fully_contiguous() {
    let mut engine = Engine::new([Page, Layer, Half, Token, Head, Content], Roles::Split);
    engine.content = 8;
    let of_128: Vec<_> = (0..6).map(|index| (0, index * 128, 128)).collect();
    assert_eq!(fragments(&engine), of_128);
    let world = World::new(engine.registration());
    let pages: Vec<_> = (0..7).map(|page| (page, page + 2)).collect();
    let copied = world.copy(Direction::Store, &pages, 3, CopyMode::Plain);
    let report = copied.expect("as the reference has it");
    assert_eq!(report.steps, 1, "a run of pages is one range");
}

#[test]
fn layer_separate_page_first_packed() {
    let mut engine = Engine::new([Layer, Page, Half, Token, Head, Content], Roles::Packed);
    assert_eq!(
        fragments(&engine),
        [(0, 0, 160), (0, 1120, 160), (0, 2240, 160)]
    );
    engine.allocation_per_layer = true;
    assert_eq!(fragments(&engine), [(0, 0, 160), (1, 0, 160), (2, 0, 160)]);
}

#[test]
fn layer_separate_page_first_split() {
    let mut engine = Engine::new([Layer, Page, Half, Token, Head, Content], Roles::Split);
    engine.allocation_per_layer = true;
    let expected = [
        (0, 0, 80),
        (0, 80, 80),
        (1, 0, 80),
        (1, 80, 80),
        (2, 0, 80),
        (2, 80, 80),
    ];
    assert_eq!(fragments(&engine), expected);
}

#[test]
fn layer_separate_outer_first() {
    let mut engine = Engine::new([Layer, Half, Page, Token, Head, Content], Roles::Split);
    engine.allocation_per_layer = true;
    let expected = [
        (0, 0, 80),
        (0, 560, 80),
        (1, 0, 80),
        (1, 560, 80),
        (2, 0, 80),
        (2, 560, 80),
    ];
    assert_eq!(fragments(&engine), expected, "two tensors");
    let split = stored(&engine);
    engine.roles = Roles::Packed;
    assert_eq!(fragments(&engine), expected, "one tensor of two planes");
    assert!(stored(&engine) == split);
}

#[test]
fn outer_first_over_all_layers() {
    for roles in [Roles::Split, Roles::Packed] {
        let engine = Engine::new([Half, Layer, Page, Token, Head, Content], roles);
        let found = fragments(&engine);
        assert_eq!(found[..3], [(0, 0, 80), (0, 1680, 80), (0, 560, 80)]);
    }
}

#[test]
fn mla_with_one_plane() {
    // vLLM's FP8 layout: 512 bytes of latent, 4 scales of 4 bytes, 64 rotary values of 2 bytes.
    let mut engine = Engine::new([Layer, Page, Half, Token, Head, Content], Roles::Latent);
    engine.heads = 1;
    engine.content = 656;
    engine.element_bytes = 1;
    assert_eq!(
        fragments(&engine),
        [(0, 0, 2624), (0, 7 * 2624, 2624), (0, 14 * 2624, 2624)]
    );
}

#[test]
fn elements_of_1_2_and_4_bytes() {
    for element_bytes in [1, 2, 4] {
        for order in [
            [Page, Layer, Half, Token, Head, Content],
            [Layer, Half, Page, Head, Token, Content],
        ] {
            let mut engine = Engine::new(order, Roles::Packed);
            engine.element_bytes = element_bytes;
            let found = fragments(&engine);
            let page_bytes: u64 = found.iter().map(|it| it.2).sum();
            assert_eq!(page_bytes, 3 * 80 * u64::from(element_bytes));
        }
    }
}

#[test]
fn scales_of_4_to_16_bytes_a_page() {
    for (per_page, element_bytes) in [(1, 4), (3, 2), (5, 1), (4, 4)] {
        for (page_first, own_allocation) in
            [(true, true), (true, false), (false, true), (false, false)]
        {
            let mut engine = Engine::new([Layer, Half, Page, Token, Head, Content], Roles::Split);
            engine.element_bytes = 1;
            engine.scales = Some(Scales {
                per_page,
                element_bytes,
                page_first,
                own_allocation,
            });
            let scale_bytes = u64::from(element_bytes);
            let found = fragments(&engine);
            let of_a_page = if page_first {
                vec![per_page * scale_bytes; 6]
            } else {
                vec![scale_bytes; 6 * per_page as usize]
            };
            let lengths: Vec<u64> = found[6..].iter().map(|it| it.2).collect();
            assert_eq!(lengths, of_a_page);
            assert_eq!(found[6].0, u32::from(own_allocation));
        }
    }
}

#[test]
fn scales_in_the_tail_of_each_page() {
    // 42 bytes of keys and values, 2 unused bytes, 8 bytes of scales, 4 unused bytes.
    let data = view((0, TensorRole::Kv, 0), 3, vec![(7, 56), (42, 1)], 0, 1);
    let scales = view((1, TensorRole::Kv, 0), 47, vec![(7, 14), (2, 1)], 0, 4);
    let world = World::new(registration(7, 2, &[3 + 7 * 56], vec![data, scales]));
    world.copy_both_ways();
    let device_page: Vec<usize> = world.registration.groups[0]
        .tensors
        .iter()
        .flat_map(|tensor| super::engine::addresses(tensor, 2))
        .collect();
    let by_hand: Vec<usize> = (115..157).chain(159..167).collect();
    assert_eq!(device_page, by_hand);
}

#[test]
fn gaps_between_pages() {
    for roles in [Roles::Split, Roles::Packed] {
        let mut engine = Engine::new([Layer, Page, Half, Token, Head, Content], roles);
        engine.gaps[2] = 13;
        let world = World::new(engine.registration());
        assert_eq!(world.layout.fragments[0].page_stride_bytes, 186);
        world.copy_both_ways();
    }
}

#[test]
fn gaps_between_pages_that_the_depot_has_side_by_side() {
    let mut engine = Engine::new([Layer, Page, Half, Token, Head, Content], Roles::Packed);
    engine.layers = 1;
    engine.content = 8;
    engine.gaps[2] = 3;
    let world = World::new(engine.registration());
    let pages: Vec<_> = (0..7).map(|page| (page, page + 2)).collect();
    for direction in [Direction::Store, Direction::Load] {
        let copied = world.copy(direction, &pages, 7, CopyMode::Plain);
        let report = copied.expect("as the reference has it");
        assert_eq!((report.bytes, report.steps), (7 * 256, 7));
    }
}

#[test]
fn gaps_between_tokens() {
    let mut engine = Engine::new([Layer, Page, Half, Token, Head, Content], Roles::Latent);
    engine.gaps[4] = 3;
    let found = fragments(&engine);
    assert_eq!(
        found[..5],
        [
            (0, 0, 20),
            (0, 26, 20),
            (0, 52, 20),
            (0, 78, 20),
            (0, 728, 20)
        ]
    );
}

#[test]
fn odd_places_and_odd_lengths() {
    for lead_bytes in [1, 3, 7, 13, 63, 65] {
        for (content, gap) in [(1, 1), (13, 0), (131, 2), (611, 5)] {
            let mut engine = Engine::new([Page, Layer, Half, Head, Token, Content], Roles::Split);
            engine.element_bytes = 1;
            engine.content = content;
            engine.tokens = 1;
            engine.heads = 1;
            engine.gaps[1] = gap;
            engine.lead_bytes = lead_bytes;
            let found = fragments(&engine);
            assert_eq!(found[1], (0, lead_bytes + content, content));
        }
    }
}

#[test]
fn several_allocations() {
    // Keys of both layers in one allocation, values of the first layer in another, and values of the second layer in a
    // third.
    let tensors = vec![
        view((0, TensorRole::K, 0), 5, vec![(7, 9), (9, 1)], 0, 2),
        view((0, TensorRole::V, 1), 0, vec![(9, 1), (7, 20)], 1, 2),
        view((1, TensorRole::K, 0), 131, vec![(7, 9), (9, 1)], 0, 2),
        view((1, TensorRole::V, 2), 1, vec![(7, 33), (33, 1)], 0, 1),
    ];
    let world = World::new(registration(7, 2, &[257, 280, 232], tensors));
    assert_eq!(world.layout.page_bytes, 18 * 3 + 33);
    world.copy_both_ways();
}

#[test]
fn places_that_would_be_neighbours_in_one_allocation() {
    let tensors = vec![
        view((0, TensorRole::K, 0), 0, vec![(7, 64), (32, 1)], 0, 1),
        view((0, TensorRole::V, 1), 32, vec![(7, 64), (32, 1)], 0, 1),
    ];
    World::new(registration(7, 1, &[448, 448], tensors)).copy_both_ways();
}

#[test]
fn all_orders_of_vllm() {
    // vLLM names the orders by layer, block (a page), head, token (N) and content, in which K and V are packed.
    let orders = [
        ("LBHNC", [Half, Layer, Page, Head, Token, Content], 3),
        ("LBNHC", [Half, Layer, Page, Token, Head, Content], 3),
        ("LHBNC", [Half, Layer, Head, Page, Token, Content], 6),
        ("BLHNC", [Half, Page, Layer, Head, Token, Content], 3),
        ("BLNHC", [Half, Page, Layer, Token, Head, Content], 3),
        ("BHLNC", [Half, Page, Head, Layer, Token, Content], 6),
    ];
    let engine = |order| Engine::new(order, Roles::Latent);
    for (name, order, pieces) in orders {
        assert_eq!(fragments(&engine(order)).len(), pieces, "{name}");
        let layout = World::new(engine(order).registration()).layout;
        let other = World::new(engine(orders[0].1).registration()).layout;
        assert_eq!(
            layout.layout_fingerprint == other.layout_fingerprint,
            name.contains("HNC") || name.contains("HBNC") || name.contains("HLNC"),
            "{name}: heads before tokens make the same page"
        );
    }
}

#[test]
fn layers_inside_a_page() {
    let engine = Engine::new([Page, Layer, Head, Half, Token, Content], Roles::Packed);
    let world = World::new(engine.registration());
    world.copy_both_ways();
    let copied = world.copy(Direction::Store, &[(5, 1)], 1, CopyMode::Plain);
    let report = copied.expect("as the reference has it");
    assert_eq!(report.steps, 1, "a page of all layers is one range");
}
