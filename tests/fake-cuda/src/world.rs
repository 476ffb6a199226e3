//! What one process has of the driver: memory, streams, events, and what calls of it have failed.

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use crate::code::{
    self, Code, ILLEGAL_ADDRESS, INVALID_CONTEXT, INVALID_HANDLE, INVALID_VALUE, NOT_INITIALIZED,
};
use crate::memory::{self, Addresses, Block};
use crate::settings::Settings;
use crate::stream::{Event, Stream, lock};

thread_local! {
    /// Number of this thread's context; 0 without one.
    static CURRENT: Cell<u64> = const { Cell::new(0) };
}

/// Device memory that has an address here.
pub(crate) struct Mapping {
    /// Whose addresses these are; those of a reservation are the caller's.
    pub(crate) _addresses: Option<Addresses>,
    pub(crate) bytes: usize,
    pub(crate) block: Arc<Block>,
    pub(crate) offset: usize,
    pub(crate) kind: Kind,
    /// Times that it was opened; 0 as long as nobody has access.
    pub(crate) opened: u32,
    /// Ways in which it may be shared, as `CUmemAllocationHandleType`.
    pub(crate) shareable: u32,
}

/// Physical memory of the virtual memory management.
#[derive(Clone)]
pub(crate) struct Physical {
    pub(crate) block: Arc<Block>,
    /// As of [`Mapping`].
    pub(crate) shareable: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Allocated,
    Imported,
    Virtual,
}

/// Everything that calls change.
#[derive(Default)]
pub(crate) struct Inner {
    /// By their first address.
    pub(crate) mappings: BTreeMap<u64, Mapping>,
    /// Registered host ranges: first address and length.
    pub(crate) registered: BTreeMap<u64, usize>,
    pub(crate) streams: HashMap<u64, Stream>,
    pub(crate) events: HashMap<u64, Arc<Event>>,
    pub(crate) reserved: BTreeMap<u64, Addresses>,
    /// Physical memory of the virtual memory management, by handle.
    pub(crate) physical: HashMap<u64, Physical>,
    /// Contexts that are retained, by device.
    pub(crate) contexts: HashMap<i32, u32>,
    calls: HashMap<&'static str, u64>,
    all_calls: u64,
    last: u64,
}

impl Inner {
    /// A number that nothing else has.
    pub(crate) fn next(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    /// The mapping that holds a range, and how far in it begins.
    pub(crate) fn find(&self, at: u64, bytes: usize) -> Option<(u64, &Mapping, usize)> {
        let (base, mapping) = self.mappings.range(..=at).next_back()?;
        let offset = usize::try_from(at - base).ok()?;
        let fits = offset.checked_add(bytes)? <= mapping.bytes;
        fits.then_some((*base, mapping, offset))
    }

    /// How much of a range lies in one piece of memory.
    fn in_one_piece(&self, at: u64, bytes: usize) -> usize {
        let rest = |(_, mapping, offset): (u64, &Mapping, usize)| mapping.bytes - offset;
        self.find(at, 1).map_or(bytes, rest).min(bytes)
    }

    /// Whether some device memory or reservation begins in or holds this address.
    fn is_device(&self, at: u64) -> bool {
        let in_mapping = self.mappings.range(..=at).next_back();
        let in_reserved = self.reserved.range(..=at).next_back();
        in_mapping.is_some_and(|(base, it)| at - base < it.bytes as u64)
            || in_reserved.is_some_and(|(base, it)| at - base < it.bytes() as u64)
    }

    /// Where this process finds a range, and what keeps it there.
    fn place(&self, at: u64, bytes: usize) -> Result<(*mut u8, Option<Arc<Block>>), Code> {
        if let Some((_, mapping, offset)) = self.find(at, bytes) {
            let stale = mapping.kind == Kind::Imported && mapping.block.is_freed();
            if stale || mapping.opened == 0 {
                return Err(ILLEGAL_ADDRESS);
            }
            let block = Arc::clone(&mapping.block);
            return Ok((block.at(mapping.offset + offset), Some(block)));
        }
        if self.is_device(at) {
            return Err(ILLEGAL_ADDRESS);
        }
        // Registered memory is one piece: a copy over its end would read what another registration, or nobody, pinned.
        if let Some((base, length)) = self.registered.range(..=at).next_back() {
            let end = base + *length as u64;
            if at < end && at + bytes as u64 > end {
                return Err(INVALID_VALUE);
            }
        }
        Ok((at as *mut u8, None))
    }

    /// What was not given back, in words.
    fn left(&self) -> String {
        let of = |kind| self.mappings.values().filter(|it| it.kind == kind).count();
        format!(
            "allocated={} imported={} virtual={} physical={} reserved={} registered={} streams={} events={} contexts={}",
            of(Kind::Allocated),
            of(Kind::Imported),
            of(Kind::Virtual),
            self.physical.len(),
            self.reserved.len(),
            self.registered.len(),
            self.streams.len(),
            self.events.len(),
            self.contexts.values().sum::<u32>(),
        )
    }
}

/// What a call needs before it does anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Needs {
    Nothing,
    Init,
    Context,
}

/// See the module.
pub(crate) struct World {
    settings: Settings,
    inner: Mutex<Inner>,
    ready: AtomicBool,
    poison: AtomicU32,
    /// Calls for many copies.
    batches: AtomicU64,
    /// Copies that were done.
    copies: AtomicU64,
}

impl World {
    /// The world of this process.
    pub(crate) fn get() -> &'static Self {
        static WORLD: OnceLock<World> = OnceLock::new();
        WORLD.get_or_init(|| Self {
            settings: Settings::read(),
            inner: Mutex::default(),
            ready: AtomicBool::new(false),
            poison: AtomicU32::new(code::SUCCESS),
            batches: AtomicU64::new(0),
            copies: AtomicU64::new(0),
        })
    }

    pub(crate) fn settings(&self) -> &Settings {
        &self.settings
    }

    pub(crate) fn inner(&self) -> MutexGuard<'_, Inner> {
        lock(&self.inner)
    }

    /// `cuInit` was called.
    pub(crate) fn begin(&self) {
        self.ready.store(true, Ordering::SeqCst);
    }

    /// Makes a context this thread's own; 0 for none.
    pub(crate) fn make_current(context: u64) {
        CURRENT.set(context);
    }

    /// This thread's own; 0 for none.
    pub(crate) fn current() -> u64 {
        CURRENT.get()
    }

    /// An error from which the context does not recover.
    pub(crate) fn poison(&self, code: Code) {
        let fatal = if code::poisons(code) {
            code
        } else {
            ILLEGAL_ADDRESS
        };
        let first =
            self.poison
                .compare_exchange(code::SUCCESS, fatal, Ordering::SeqCst, Ordering::SeqCst);
        if first.is_ok() {
            crate::settings::complain(&format!("error {code}: nothing works any more"));
        }
    }

    /// That error, once there was one.
    pub(crate) fn poisoned(&self) -> Option<Code> {
        let code = self.poison.load(Ordering::SeqCst);
        (code != code::SUCCESS).then_some(code)
    }

    /// A call begins: it is counted, and may have to fail.
    pub(crate) fn enter(&self, call: &'static str, needs: Needs) -> Result<(), Code> {
        let (of_it, of_all) = {
            let mut inner = self.inner();
            inner.all_calls += 1;
            let all = inner.all_calls;
            let count = inner.calls.entry(call).or_default();
            *count += 1;
            (*count, all)
        };
        for fail in &self.settings.fails {
            let now = (fail.call == call && fail.nth == of_it)
                || (fail.call == "*" && fail.nth == of_all);
            if now && self.settings.may_fail() {
                let code = fail.code;
                crate::settings::complain(&format!("{call} fails with {code}, as wanted"));
                if code::poisons(fail.code) {
                    self.poison(fail.code);
                }
                return Err(fail.code);
            }
        }
        if needs != Needs::Nothing && !self.ready.load(Ordering::SeqCst) {
            return Err(NOT_INITIALIZED);
        }
        if needs == Needs::Context && CURRENT.get() == 0 {
            return Err(INVALID_CONTEXT);
        }
        match self.poisoned() {
            Some(code) if needs != Needs::Nothing => Err(code),
            _ => Ok(()),
        }
    }

    /// Number of the next call for many copies, from 1 on.
    pub(crate) fn next_batch(&self) -> u64 {
        self.batches.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// Copies between two ranges, each of a device or of the host.
    pub(crate) fn copy(
        &self,
        to: u64,
        from: u64,
        bytes: usize,
        pinned: Option<u64>,
    ) -> Result<(), Code> {
        let number = self.copies.fetch_add(1, Ordering::SeqCst) + 1;
        if self.settings.skip == Some(number) {
            return Ok(());
        }
        let mut done = 0;
        while done < bytes {
            let (to, from) = (to + done as u64, from + done as u64);
            let inner = self.inner();
            if pinned.is_some_and(|base| !inner.registered.contains_key(&base)) {
                return Err(ILLEGAL_ADDRESS);
            }
            let len = inner.in_one_piece(to, bytes - done);
            let len = inner.in_one_piece(from, len);
            let (to, keep_to) = inner.place(to, len)?;
            let (from, keep_from) = inner.place(from, len)?;
            drop(inner);
            memory::copy(to, from, len)?;
            drop((keep_to, keep_from));
            done += len;
        }
        Ok(())
    }

    /// Whether a copy of these ranges can be given to a stream, and which registered host memory it touches.
    pub(crate) fn check_copy(&self, to: u64, from: u64, bytes: usize) -> Result<Option<u64>, Code> {
        let inner = self.inner();
        let mut pinned = None;
        for at in [to, from] {
            let mut done = 0;
            let mut device = None;
            while done < bytes {
                let here = at + done as u64;
                let len = inner.in_one_piece(here, bytes - done);
                (_, device) = inner.place(here, len)?;
                done += len;
            }
            if device.is_none() {
                let registered = inner.registered.range(..=at).next_back();
                let registered = registered.filter(|(base, length)| at < *base + **length as u64);
                pinned = registered.map(|(base, _)| *base);
            }
        }
        Ok(pinned)
    }

    /// A word in device memory.
    pub(crate) fn value(&self, at: u64) -> Result<u64, Code> {
        let (block, offset) = self.word(at)?;
        Ok(block.value(offset)?.load(Ordering::SeqCst))
    }

    pub(crate) fn write_value(&self, at: u64, value: u64) -> Result<(), Code> {
        let (block, offset) = self.word(at)?;
        block.value(offset)?.store(value, Ordering::SeqCst);
        Ok(())
    }

    fn word(&self, at: u64) -> Result<(Arc<Block>, usize), Code> {
        let inner = self.inner();
        let (_, mapping, offset) = inner.find(at, 8).ok_or(INVALID_VALUE)?;
        Ok((Arc::clone(&mapping.block), mapping.offset + offset))
    }

    /// Gives work to a stream.
    pub(crate) fn give(&self, stream: u64, work: crate::stream::Work) -> Result<(), Code> {
        let inner = self.inner();
        let stream = inner.streams.get(&stream).ok_or(INVALID_HANDLE)?;
        stream.give(work);
        Ok(())
    }

    /// The process ends: says what it did not give back, if somebody wants to know.
    pub(crate) fn report(&self) {
        let Some(folder) = &self.settings.report else {
            return;
        };
        let path = format!("{folder}/{}", std::process::id());
        let text = format!(
            "{} poison={}\n",
            self.inner().left(),
            self.poisoned().unwrap_or(code::SUCCESS)
        );
        if let Err(error) = std::fs::write(&path, text) {
            crate::settings::complain(&format!("{path}: {error}"));
        }
    }
}
