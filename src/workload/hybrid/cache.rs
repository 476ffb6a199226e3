//! Lookups in the engine's own memory, and the pages of running sequences.

use std::ops::Range;

use kvferry_types::{Fingerprint, GroupId};

use super::device::{DevicePages, NULL};
use super::{LayerGroup, LayerKind, with_ids};

/// A page that is copied between device memory and a lower tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct PageCopy {
    /// The group.
    pub group: GroupId,
    /// Position of the page in the sequence.
    pub page: u32,
    /// The page of device memory.
    pub device_page: u32,
}

/// One step of a computation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ComputeStep {
    /// Number of pages that were taken for it, those that the step does not complete included.
    pub taken: usize,
    /// The pages that the step completes.
    pub writes: Vec<PageCopy>,
    /// Those of them that a later hit can need.
    pub stores: Vec<PageCopy>,
}

/// The pages of one sequence while it runs.
#[derive(Debug)]
pub struct RunningSequence {
    hashes: Vec<Fingerprint>,
    /// Device pages of each group, by position; the null page where no later token reads one.
    tables: Vec<Vec<u32>>,
    /// Tokens with KV.
    computed: u32,
    /// Pages of each group that were found, loaded or offered to a store.
    offered: Vec<u32>,
}

impl RunningSequence {
    /// Tokens whose KV is in device memory.
    pub fn computed_tokens(&self) -> u32 {
        self.computed
    }

    /// Pages that the sequence holds.
    pub fn held_pages(&self) -> usize {
        let tables = self.tables.iter().flatten();
        tables.filter(|page| **page != NULL).count()
    }

    /// The device pages of a group, by position; 0 is the null page. Panics if there is no such group, as a slice does.
    pub fn table(&self, group: GroupId) -> &[u32] {
        &self.tables[usize::from(group.0)]
    }
}

/// Device memory of an engine with several groups, and what it finds there.
#[derive(Debug)]
pub struct HybridCache {
    groups: Vec<LayerGroup>,
    hash_tokens: u32,
    block_tokens: u32,
    pages: DevicePages,
}

impl HybridCache {
    /// A cache of `pages` device pages, which all groups share and of which at most `idle_max` stay cached while no
    /// sequence holds them. The groups are at most 256 with pages and chunks of at
    /// least one token. The hash unit is the greatest common divisor of the page sizes; hits end at multiples of the
    /// least common multiple.
    pub fn new(groups: Vec<LayerGroup>, pages: u32, idle_max: u32) -> Self {
        let sizes = || groups.iter().map(|group| group.page_tokens);
        Self {
            hash_tokens: sizes().fold(0, gcd),
            block_tokens: sizes().fold(1, |all, size| all / gcd(all, size) * size),
            groups,
            pages: DevicePages::new(pages, idle_max),
        }
    }

    /// Tokens by which one hash of a sequence extends the previous one.
    pub fn hash_tokens(&self) -> u32 {
        self.hash_tokens
    }

    /// Tokens between two ends of hits.
    pub fn block_tokens(&self) -> u32 {
        self.block_tokens
    }

    /// Pages that running sequences hold.
    pub fn held_pages(&self) -> usize {
        self.pages.held()
    }

    /// Pages that a sequence can get now: free ones and idle ones.
    pub fn available_pages(&self) -> usize {
        self.pages.available()
    }

    /// Whether page `page` of a sequence is cached.
    pub fn has(&self, group: GroupId, hashes: &[Fingerprint], page: u32) -> bool {
        self.find(group, hashes, page).is_some()
    }

    /// The tokens of a sequence, at most `limit`, that need not be computed. Each group in turn shortens the result of
    /// the others, until all accept it.
    pub fn lookup(&self, hashes: &[Fingerprint], limit: u32) -> u32 {
        let hashed = u32::try_from(hashes.len()).unwrap_or(u32::MAX);
        let hashed = hashed.saturating_mul(self.hash_tokens);
        let mut end = self.aligned(limit.min(hashed));
        loop {
            let before = end;
            for (group, layers) in with_ids(&self.groups) {
                end = self.longest(group, layers, hashes, end);
            }
            if end == before {
                return end;
            }
        }
    }

    /// Starts a sequence with the longest hit of at most `limit` tokens. Holds the pages that the next token reads.
    pub fn begin(&mut self, hashes: Vec<Fingerprint>, limit: u32) -> RunningSequence {
        let end = self.lookup(&hashes, limit);
        let mut tables = Vec::new();
        for (group, layers) in with_ids(&self.groups) {
            let read_from = layers.kind.first_read(end);
            let mut table = Vec::new();
            for page in 0..end / layers.page_tokens {
                let read = (page + 1) * layers.page_tokens > read_from;
                let found = self.find(group, &hashes, page).filter(|_| read);
                if let Some(found) = found {
                    self.pages.hold(found);
                }
                table.push(found.unwrap_or(NULL));
            }
            tables.push(table);
        }
        let sizes = self.groups.iter().map(|layers| end / layers.page_tokens);
        RunningSequence {
            offered: sizes.collect(),
            hashes,
            tables,
            computed: end,
        }
    }

    /// Allocates the pages that a lower tier loads for a hit of `hit_tokens` beyond the computed tokens. Returns `None`
    /// and changes nothing if memory is short, or if the hit begins or ends at no multiple of
    /// [`Self::block_tokens`]. After the
    /// copies, call [`Self::loaded`]; if they failed, [`Self::finish`] and begin again.
    pub fn load(
        &mut self,
        sequence: &mut RunningSequence,
        hit_tokens: u32,
    ) -> Option<Vec<PageCopy>> {
        let end = sequence.computed + hit_tokens;
        let ends = [sequence.computed, end];
        if !ends.iter().all(|end| end.is_multiple_of(self.block_tokens)) {
            return None;
        }
        let mut wanted = Vec::new();
        for (group, layers) in with_ids(&self.groups) {
            let size = layers.page_tokens;
            let read_from = layers.kind.first_read(end);
            let new = sequence.computed / size..end / size;
            let read = new.filter(|page| (page + 1) * size > read_from);
            wanted.extend(read.map(|page| (group, page)));
        }
        if wanted.len() > self.pages.available() {
            return None;
        }
        let mut copies = Vec::new();
        for (group, page) in wanted {
            let device_page = self.put(sequence, group, page)?;
            copies.push(PageCopy {
                group,
                page,
                device_page,
            });
        }
        sequence.computed = end;
        for (layers, (table, offered)) in self
            .groups
            .iter()
            .zip(sequence.tables.iter_mut().zip(&mut sequence.offered))
        {
            *offered = end / layers.page_tokens;
            table.resize(*offered as usize, NULL);
        }
        self.drop_unread(sequence);
        Some(copies)
    }

    /// Makes the pages of a load findable.
    pub fn loaded(&mut self, sequence: &RunningSequence) {
        self.record(sequence);
    }

    /// The whole pages that the next token reads.
    pub fn reads(&self, sequence: &RunningSequence) -> Vec<PageCopy> {
        let computed = sequence.computed;
        let mut reads = Vec::new();
        for (group, layers) in with_ids(&self.groups) {
            let size = layers.page_tokens;
            let whole = computed / size;
            let first = match layers.kind {
                LayerKind::Recurrent if computed.is_multiple_of(size) => whole.saturating_sub(1),
                LayerKind::Recurrent => whole,
                kind => kind.first_read(computed) / size,
            };
            reads.extend(self.whole(sequence, group, first..whole));
        }
        reads
    }

    /// Begins to compute the next `tokens` in one step. After it, call [`Self::computed`]. The engine stores pages in
    /// the step that completes them, because the next one may drop them. Returns `None` and changes nothing but pages
    /// that no token reads if memory is short.
    pub fn advance(&mut self, sequence: &mut RunningSequence, tokens: u32) -> Option<ComputeStep> {
        self.drop_unread(sequence);
        let from = sequence.computed;
        let end = from + tokens;
        let mut wanted = Vec::new();
        for (group, layers) in with_ids(&self.groups) {
            let table = sequence.table(group);
            let pages = end.div_ceil(layers.page_tokens);
            let have = u32::try_from(table.len()).unwrap_or(u32::MAX);
            if layers.kind != LayerKind::Recurrent {
                wanted.extend((have..pages).map(|page| (group, page)));
            } else if have < pages {
                wanted.push((group, pages - 1));
            }
        }
        if wanted.len() > self.pages.available() {
            return None;
        }
        let mut step = ComputeStep {
            taken: wanted.len(),
            writes: Vec::new(),
            stores: Vec::new(),
        };
        for (group, page) in wanted {
            self.put(sequence, group, page)?;
        }
        sequence.computed = end;
        for (group, layers) in with_ids(&self.groups) {
            let index = usize::from(group.0);
            let whole = self.hashed_tokens(sequence).min(end) / layers.page_tokens;
            // A state is complete at the end of the step only.
            let first = match layers.kind {
                LayerKind::Recurrent if end == whole * layers.page_tokens => whole - 1,
                LayerKind::Recurrent => whole,
                _ => from / layers.page_tokens,
            };
            let writes = self.whole(sequence, group, first..whole);
            let offered = sequence.offered[index];
            let stores = writes.iter().filter(|written| {
                written.page >= offered && self.can_serve(layers, written.page, end)
            });
            step.stores.extend(stores);
            step.writes.extend(writes);
            sequence.offered[index] = whole.max(offered);
        }
        Some(step)
    }

    /// Makes the pages of a step findable.
    pub fn computed(&mut self, sequence: &RunningSequence) {
        self.record(sequence);
    }

    /// Holds pages, beside the sequence that has them, while they are copied.
    pub fn hold(&mut self, copies: &[PageCopy]) {
        for copy in copies {
            self.pages.hold(copy.device_page);
        }
    }

    /// Ends [`Self::hold`].
    pub fn release(&mut self, copies: &[PageCopy]) {
        for copy in copies {
            self.pages.release(copy.device_page);
        }
    }

    /// Pages for all tokens of a sequence, which it needs at most.
    pub fn pages_for(&self, tokens: u32) -> usize {
        let groups = self.groups.iter();
        let pages = groups.map(|layers| tokens.div_ceil(layers.page_tokens) as usize);
        pages.sum()
    }

    /// Number of tokens of one page of a group; `None` if there is no such group.
    pub fn page_tokens(&self, group: GroupId) -> Option<u32> {
        let layers = self.groups.get(usize::from(group.0))?;
        Some(layers.page_tokens)
    }

    /// Whether some layers continue from a state.
    pub fn has_states(&self) -> bool {
        let mut groups = self.groups.iter();
        groups.any(|layers| layers.kind == LayerKind::Recurrent)
    }

    /// Gives the pages of a sequence back, those of full attention last and the tail before the root, so that what every
    /// hit needs stays longest.
    pub fn finish(&mut self, sequence: RunningSequence) {
        let mut order: Vec<usize> = (0..self.groups.len()).collect();
        order.sort_by_key(|index| self.groups[*index].kind == LayerKind::Full);
        for index in order {
            for page in sequence.tables[index].iter().rev() {
                if *page != NULL {
                    self.pages.release(*page);
                }
            }
        }
    }

    /// The longest end up to `max` that one group can continue at; 0 without one.
    fn longest(
        &self,
        group: GroupId,
        layers: &LayerGroup,
        hashes: &[Fingerprint],
        max: u32,
    ) -> u32 {
        let size = layers.page_tokens;
        let behind = u32::from(layers.drafted);
        let has = |page: &u32| self.has(group, hashes, *page);
        match layers.kind {
            LayerKind::Full => {
                let run = (0..max / size + behind).take_while(has).count();
                let run = u32::try_from(run).unwrap_or(u32::MAX);
                self.aligned(run.saturating_sub(behind) * size).min(max)
            }
            LayerKind::Window(_) => {
                let mut run: Option<u32> = None;
                for page in (0..max / size + behind).rev() {
                    if !has(&page) {
                        run = None;
                        continue;
                    }
                    let here = (page + 1 - behind) * size;
                    let aligned = here > 0 && here.is_multiple_of(self.block_tokens);
                    run = run.or(aligned.then_some(here));
                    if let Some(end) = run
                        && page * size <= layers.kind.first_read(end)
                        && page * size < end
                    {
                        return end;
                    }
                }
                0
            }
            LayerKind::Chunk(_) => {
                let mut max = max;
                while max > 0 {
                    let start = layers.kind.first_read(max);
                    let run = (start / size..max / size).take_while(has).count();
                    let run = u32::try_from(run).unwrap_or(u32::MAX);
                    let end = self.aligned((start / size + run) * size);
                    if end >= start {
                        return end;
                    }
                    max = end;
                }
                0
            }
            LayerKind::Recurrent => {
                let blocks = (1..=max / self.block_tokens).rev();
                let mut ends = blocks.map(|block| block * self.block_tokens);
                ends.find(|end| has(&(end / size - 1))).unwrap_or(0)
            }
        }
    }

    /// Whether a hit can need a page that the step up to `end` completed. A state serves its own boundary only, and
    /// exists only where the step ended.
    fn can_serve(&self, layers: &LayerGroup, page: u32, end: u32) -> bool {
        let start = page * layers.page_tokens;
        let page_end = start + layers.page_tokens;
        let next = page_end.next_multiple_of(self.block_tokens);
        let is_behind = layers.drafted && start > 0 && start.is_multiple_of(self.block_tokens);
        match layers.kind {
            LayerKind::Full => true,
            LayerKind::Window(_) | LayerKind::Chunk(_) => {
                is_behind || layers.kind.first_read(next) < page_end
            }
            LayerKind::Recurrent => page_end == end && next == end,
        }
    }

    fn hashed_tokens(&self, sequence: &RunningSequence) -> u32 {
        let hashes = u32::try_from(sequence.hashes.len()).unwrap_or(u32::MAX);
        hashes.saturating_mul(self.hash_tokens)
    }

    /// The pages of a range that are in a table and have a hash.
    fn whole(
        &self,
        sequence: &RunningSequence,
        group: GroupId,
        pages: Range<u32>,
    ) -> Vec<PageCopy> {
        let table = sequence.table(group);
        let pages = pages.filter_map(|page| {
            let device_page = *table.get(page as usize)?;
            self.content(group, &sequence.hashes, page)?;
            (device_page != NULL).then_some(PageCopy {
                group,
                page,
                device_page,
            })
        });
        pages.collect()
    }

    /// Puts a new page into a table, behind null pages where the table is shorter.
    fn put(&mut self, sequence: &mut RunningSequence, group: GroupId, page: u32) -> Option<u32> {
        let device_page = self.pages.take()?;
        let table = &mut sequence.tables[usize::from(group.0)];
        table.resize(page as usize, NULL);
        table.push(device_page);
        Some(device_page)
    }

    /// Frees the pages that neither the next token nor a later one reads.
    fn drop_unread(&mut self, sequence: &mut RunningSequence) {
        for (layers, table) in self.groups.iter().zip(&mut sequence.tables) {
            let read_from = layers.kind.first_read(sequence.computed);
            let unread = (read_from / layers.page_tokens) as usize;
            let unread = unread.min(table.len());
            for page in table[..unread].iter_mut().rev() {
                if *page != NULL {
                    self.pages.release(*page);
                    *page = NULL;
                }
            }
        }
    }

    /// Makes the whole pages of a sequence findable; of states, only the one where the computed tokens end, and only at
    /// the end of a page.
    fn record(&mut self, sequence: &RunningSequence) {
        for (group, layers) in with_ids(&self.groups) {
            let whole = sequence.computed / layers.page_tokens;
            let partial = !sequence.computed.is_multiple_of(layers.page_tokens);
            for (page, device_page) in (0..whole).zip(sequence.table(group)) {
                let is_state = layers.kind == LayerKind::Recurrent;
                let replaced = is_state && (partial || page + 1 != whole);
                let new = *device_page != NULL && !self.pages.is_cached(*device_page);
                if let Some(content) = self.content(group, &sequence.hashes, page)
                    && new
                    && !replaced
                {
                    self.pages.written(*device_page, group, content);
                }
            }
        }
    }

    fn find(&self, group: GroupId, hashes: &[Fingerprint], page: u32) -> Option<u32> {
        self.pages.find(group, self.content(group, hashes, page)?)
    }

    /// The hash of all tokens up to the end of a page.
    fn content(&self, group: GroupId, hashes: &[Fingerprint], page: u32) -> Option<Fingerprint> {
        let size = u64::from(self.groups.get(usize::from(group.0))?.page_tokens);
        let last = (u64::from(page) + 1) * size / u64::from(self.hash_tokens) - 1;
        hashes.get(usize::try_from(last).ok()?).copied()
    }

    #[cfg(test)]
    pub(super) fn insert(&mut self, group: GroupId, hashes: &[Fingerprint], page: u32) {
        if let (Some(content), Some(device_page)) =
            (self.content(group, hashes, page), self.pages.take())
        {
            self.pages.written(device_page, group, content);
            self.pages.release(device_page);
        }
    }

    fn aligned(&self, tokens: u32) -> u32 {
        tokens / self.block_tokens * self.block_tokens
    }
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}
