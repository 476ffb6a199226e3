//! What a pool counts: blocks and pages since the start, and pages by state.

/// Counters since the start, in blocks unless the name has pages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PoolCounts {
    /// Blocks reserved for new runs.
    pub stored: u64,
    /// Growths reserved.
    pub grown: u64,
    /// New blocks for a sequence that diverges from another one inside a block.
    pub branched: u64,
    /// Additional blocks, because a run was split over several holes.
    pub split: u64,
    /// Number of times that a block lost pages to eviction: all of them or a part from its tail.
    pub evicted: u64,
    /// Pages evicted.
    pub evicted_pages: u64,
    /// Runs that found no room, wholly or partly.
    pub refused: u64,
    /// Pages that found no room.
    pub refused_pages: u64,
    /// Pages that the policy did not admit.
    pub unadmitted_pages: u64,
    /// Most pages evicted for one allocation.
    pub largest_eviction_pages: u32,
}

impl PoolCounts {
    /// Adds the counters of another pool. `largest_eviction_pages` is the larger one.
    pub(crate) fn with(self, other: Self) -> Self {
        Self {
            stored: self.stored + other.stored,
            grown: self.grown + other.grown,
            branched: self.branched + other.branched,
            split: self.split + other.split,
            evicted: self.evicted + other.evicted,
            evicted_pages: self.evicted_pages + other.evicted_pages,
            refused: self.refused + other.refused,
            refused_pages: self.refused_pages + other.refused_pages,
            unadmitted_pages: self.unadmitted_pages + other.unadmitted_pages,
            largest_eviction_pages: self
                .largest_eviction_pages
                .max(other.largest_eviction_pages),
        }
    }
}

/// Pages by state. The sum is the capacity.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PageStates {
    /// In holes of the arena.
    pub free: u32,
    /// Reserved, with no copy ordered yet.
    pub reserved: u32,
    /// Copies may be writing them.
    pub filling: u32,
    /// Readable.
    pub ready: u32,
    /// The deadline has passed, and copies may still be writing them.
    pub quarantined: u32,
    /// Their place failed, and is not used again until the tier is opened anew.
    pub out_of_use: u32,
}

impl PageStates {
    /// Each state with its name, as status and reports show it.
    pub fn by_name(self) -> [(&'static str, u32); 6] {
        let Self {
            free,
            reserved,
            filling,
            ready,
            quarantined,
            out_of_use,
        } = self;
        [
            ("free", free),
            ("reserved", reserved),
            ("filling", filling),
            ("ready", ready),
            ("quarantined", quarantined),
            ("out_of_use", out_of_use),
        ]
    }
}
