//! A list of blocks, least recently used first.
//!
//! A held block that the search for a victim meets leaves the order until it is released, so finding victims costs the
//! same in the mean however many blocks are held. A block that becomes evictable again returns to the place that its
//! last touch gave it. Nearly all blocks are touched and evicted in a linked list; the few that return, or that come
//! from another list, are kept in a tree beside it until their next touch.

use std::collections::BTreeMap;

use kvferry_types::NamespaceId;

/// Position of a block in the slab. Valid while the block lives.
pub type BlockIndex = u32;

/// Marks the end of the list.
const NONE: u32 = u32::MAX;

/// Links of a block that is not in the order, and of one that is in the tree.
const OUT: u32 = NONE - 1;
const RETURNED: u32 = NONE - 2;

/// The place of one block in the order: 24 bytes of the block's record, so that a touch reads no further cache line.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    /// Number of the block's last touch.
    touched: u64,
    /// The next older block in the list, [`OUT`] or [`RETURNED`].
    older: u32,
    /// The next newer block in the list.
    newer: u32,
    /// The list that the block belongs to.
    list: u8,
}

impl Place {
    /// The place of a block that no list has yet.
    pub(super) fn new(list: u8, touched: u64) -> Self {
        Self {
            touched,
            older: OUT,
            newer: NONE,
            list,
        }
    }

    /// True if the order has the block.
    pub fn is_in_order(&self) -> bool {
        self.older != OUT
    }

    /// Number of the block's last touch.
    pub fn touched(&self) -> u64 {
        self.touched
    }

    /// The list that the block belongs to.
    pub fn list(&self) -> u8 {
        self.list
    }

    pub(super) fn set_list(&mut self, list: u8) {
        self.list = list;
    }
}

/// The records that carry the places, by position in the slab.
pub trait Places {
    fn place(&self, index: BlockIndex) -> &Place;
    fn place_mut(&mut self, index: BlockIndex) -> &mut Place;
    /// The namespace of a block.
    fn namespace(&self, index: BlockIndex) -> NamespaceId;
    /// Pages of a block, those that are filled included.
    fn pages(&self, index: BlockIndex) -> u32;
}

/// A list of blocks. See the module.
#[derive(Debug)]
pub(super) struct AgeList {
    /// Ends of the list, which ascends by touch.
    oldest: u32,
    newest: u32,
    /// Blocks that returned after a newer one was in the list, by touch.
    returned: BTreeMap<u64, BlockIndex>,
}

impl Default for AgeList {
    fn default() -> Self {
        Self {
            oldest: NONE,
            newest: NONE,
            returned: BTreeMap::new(),
        }
    }
}

impl AgeList {
    /// Makes a block the most recently used one. `touched` is larger than that of all others.
    pub(super) fn touch(&mut self, places: &mut impl Places, index: BlockIndex, touched: u64) {
        let is_in = places.place(index).is_in_order();
        if is_in {
            self.remove(places, index);
        }
        places.place_mut(index).touched = touched;
        if is_in {
            self.append(places, index);
        }
    }

    /// The first block in the order. It may be held.
    pub(super) fn oldest(&self, places: &impl Places) -> Option<BlockIndex> {
        let returned = self.returned.first_key_value();
        match (self.oldest, returned) {
            (NONE, returned) => returned.map(|(_, index)| *index),
            (oldest, Some((touched, index))) if *touched < places.place(oldest).touched => {
                Some(*index)
            }
            (oldest, _) => Some(oldest),
        }
    }

    /// Puts a block into the order, at the place of its last touch.
    pub(super) fn insert(&mut self, places: &mut impl Places, index: BlockIndex) {
        let touched = places.place(index).touched;
        if self.newest == NONE || places.place(self.newest).touched < touched {
            return self.append(places, index);
        }
        places.place_mut(index).older = RETURNED;
        self.returned.insert(touched, index);
    }

    /// Adds a block to the list as the newest one.
    fn append(&mut self, places: &mut impl Places, index: BlockIndex) {
        let newest = std::mem::replace(&mut self.newest, index);
        let place = places.place_mut(index);
        (place.older, place.newer) = (newest, NONE);
        match newest {
            NONE => self.oldest = index,
            newest => places.place_mut(newest).newer = index,
        }
    }

    /// Takes a block out of the order.
    pub(super) fn remove(&mut self, places: &mut impl Places, index: BlockIndex) {
        let place = places.place_mut(index);
        let Place {
            touched,
            older,
            newer,
            ..
        } = *place;
        place.older = OUT;
        if older == RETURNED {
            self.returned.remove(&touched);
            return;
        }
        match older {
            NONE => self.oldest = newer,
            older => places.place_mut(older).newer = newer,
        }
        match newer {
            NONE => self.newest = older,
            newer => places.place_mut(newer).older = older,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    impl Places for Vec<Place> {
        fn place(&self, index: BlockIndex) -> &Place {
            &self[index as usize]
        }

        fn place_mut(&mut self, index: BlockIndex) -> &mut Place {
            &mut self[index as usize]
        }

        fn namespace(&self, _: BlockIndex) -> NamespaceId {
            NamespaceId(0)
        }

        fn pages(&self, _: BlockIndex) -> u32 {
            1
        }
    }

    /// An order with the places of its blocks.
    #[derive(Default)]
    struct Ordered {
        order: AgeList,
        places: Vec<Place>,
        touches: u64,
    }

    impl Ordered {
        fn add(&mut self, index: BlockIndex) {
            self.touches += 1;
            let place = Place::new(0, self.touches);
            match self.places.get_mut(index as usize) {
                Some(vacant) => *vacant = place,
                None => self.places.push(place),
            }
        }

        fn touch(&mut self, index: BlockIndex) {
            self.touches += 1;
            self.order.touch(&mut self.places, index, self.touches);
        }

        fn set_evictable(&mut self, index: BlockIndex, evictable: bool) {
            match (evictable, self.contains(index)) {
                (true, false) => self.order.insert(&mut self.places, index),
                (false, true) => self.order.remove(&mut self.places, index),
                _ => {}
            }
        }

        fn oldest(&self) -> Option<BlockIndex> {
            self.order.oldest(&self.places)
        }

        fn contains(&self, index: BlockIndex) -> bool {
            self.places[index as usize].is_in_order()
        }
    }

    /// Removes the blocks one after another, in the order of their eviction.
    fn evicted(mut order: Ordered) -> Vec<BlockIndex> {
        std::iter::from_fn(|| {
            let oldest = order.oldest()?;
            order.set_evictable(oldest, false);
            Some(oldest)
        })
        .collect()
    }

    fn four() -> Ordered {
        let mut order = Ordered::default();
        for index in 0..4 {
            order.add(index);
            order.set_evictable(index, true);
        }
        order
    }

    #[test]
    fn blocks_are_evicted_in_the_order_of_their_last_touch() {
        assert_eq!(evicted(four()), [0, 1, 2, 3]);
        let mut order = four();
        order.touch(0);
        order.touch(2);
        order.touch(2);
        assert_eq!(evicted(order), [1, 3, 0, 2]);
    }

    #[test]
    fn a_block_returns_to_the_place_of_its_last_touch() {
        let mut order = four();
        order.set_evictable(1, false);
        order.set_evictable(3, false);
        assert!(!order.contains(1) && order.contains(2));
        order.set_evictable(3, true);
        order.set_evictable(1, true);
        assert_eq!(evicted(order), [0, 1, 2, 3]);
        let mut order = four();
        order.set_evictable(1, false);
        order.touch(1);
        assert!(!order.contains(1), "a touch makes nothing evictable");
        order.add(4);
        order.set_evictable(4, true);
        order.set_evictable(1, true);
        assert_eq!(evicted(order), [0, 2, 3, 1, 4]);
    }

    #[test]
    fn a_returned_block_leaves_the_tree_when_it_is_touched_or_held_again() {
        let mut order = four();
        for index in [0, 1] {
            order.set_evictable(index, false);
            order.set_evictable(index, true);
        }
        assert_eq!(order.order.returned.len(), 2);
        order.touch(0);
        order.set_evictable(1, false);
        assert!(order.order.returned.is_empty());
        assert_eq!(evicted(order), [2, 3, 0]);
    }

    #[test]
    fn a_place_in_the_slab_is_used_again() {
        let mut order = four();
        order.set_evictable(0, false);
        order.add(0);
        assert!(!order.contains(0));
        order.set_evictable(0, true);
        assert_eq!(evicted(order), [1, 2, 3, 0]);
    }

    proptest! {
        #[test]
        fn the_order_equals_a_sort_by_touch(steps in vec((0_u32..24, 0_u8..4), 1..400)) {
            let mut order = Ordered::default();
            let mut naive: Vec<(u64, bool)> = Vec::new();
            for (touch, (index, step)) in (1..).zip(steps) {
                let index = index.min(naive.len() as u32);
                match (naive.get_mut(index as usize), step) {
                    (None, _) => {
                        order.add(index);
                        naive.push((touch, false));
                    }
                    (Some(place), 0 | 1) => {
                        order.touch(index);
                        place.0 = touch;
                    }
                    (Some(place), step) => {
                        place.1 = step == 2;
                        order.set_evictable(index, place.1);
                    }
                }
                let evictable = naive.iter().zip(0..).filter(|(place, _)| place.1);
                let oldest = evictable.min_by_key(|(place, _)| place.0);
                prop_assert_eq!(order.oldest(), oldest.map(|(_, index)| index));
            }
        }
    }
}
