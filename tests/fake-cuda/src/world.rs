//! The driver's state in one process: memory, streams, events, and failures of calls.

pub(crate) mod stream;

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::File;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use crate::code::{
    self, CAPTURE_UNSUPPORTED, CONTEXT_IS_DESTROYED, Code, ILLEGAL_ADDRESS, INVALID_CONTEXT,
    INVALID_HANDLE, INVALID_VALUE, NOT_INITIALIZED,
};
use crate::memory::{self, Addresses, Block};
use crate::settings::Settings;
use crate::world::stream::{Event, Stream, lock};

thread_local! {
    /// Number of this thread's context, or 0.
    static CURRENT: Cell<u64> = const { Cell::new(0) };
    /// This thread's capture mode, initially `CU_STREAM_CAPTURE_MODE_GLOBAL`.
    static CAPTURE_MODE: Cell<i32> = const { Cell::new(CAPTURE_GLOBAL) };
}

/// `CU_STREAM_CAPTURE_MODE_GLOBAL`: unsafe calls of this thread, and of other threads in this mode, end a capture.
pub(crate) const CAPTURE_GLOBAL: i32 = 0;
/// Calls that are not allowed during a capture. A real driver has more of them.
const UNSAFE_IN_CAPTURE: [&str; 6] = [
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemcpyDtoH_v2",
    "cuEventQuery",
];

/// Name of a thread in a call that does not return.
const BLOCKED: &str = "in-driver";

/// A running capture.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Capture {
    pub(crate) mode: i32,
    pub(crate) invalidated: bool,
}

/// Device memory that is mapped at an address in this process.
pub(crate) struct Mapping {
    /// The addresses, if the mapping owns them. Those of a reservation belong to the caller.
    pub(crate) _addresses: Option<Addresses>,
    pub(crate) bytes: usize,
    pub(crate) block: Arc<Block>,
    pub(crate) offset: usize,
    pub(crate) kind: Kind,
    /// Number of times it was opened. 0 while access was not granted.
    pub(crate) opened: u32,
    /// Ways in which the memory may be shared, as `CUmemAllocationHandleType`.
    pub(crate) shareable: u32,
    /// The context with which the mapping ends. `None` for chunks.
    pub(crate) context: Option<u64>,
}

/// A range of registered host memory.
#[derive(Clone, Copy)]
pub(crate) struct Registered {
    pub(crate) bytes: usize,
    pub(crate) context: u64,
}

/// Unreleased objects that ended with their contexts.
#[derive(Default)]
struct Died {
    allocated: usize,
    imported: usize,
    registered: usize,
    streams: usize,
    events: usize,
}

/// Calls that are recorded for a test.
#[derive(Default)]
struct Trace {
    /// Successive copies of one direction: whether from a device, and how many.
    copies: Vec<(bool, u64)>,
    threads: BTreeMap<&'static str, HashSet<ThreadId>>,
}

/// Physical memory of the virtual memory management.
#[derive(Clone)]
pub(crate) struct Physical {
    pub(crate) block: Arc<Block>,
    /// As in [`Mapping`].
    pub(crate) shareable: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Allocated,
    Imported,
    Virtual,
}

/// The state that calls change.
#[derive(Default)]
pub(crate) struct Inner {
    /// By first address.
    pub(crate) mappings: BTreeMap<u64, Mapping>,
    /// Registered host ranges, by first address.
    pub(crate) registered: BTreeMap<u64, Registered>,
    /// Streams and events, each with its context.
    pub(crate) streams: HashMap<u64, (u64, Stream)>,
    pub(crate) events: HashMap<u64, (u64, Arc<Event>)>,
    pub(crate) reserved: BTreeMap<u64, Addresses>,
    /// Physical memory of the virtual memory management, by handle.
    pub(crate) physical: HashMap<u64, Physical>,
    /// Number of times that each device's context is retained.
    pub(crate) contexts: HashMap<i32, u32>,
    /// The locked file, held while this process has contexts in exclusive mode.
    pub(crate) exclusive: Option<File>,
    /// By captured stream.
    pub(crate) captures: HashMap<u64, Capture>,
    /// Number of opened handles, counted only with the setting `stale`, and the memory of the last one.
    opened: u64,
    shown: Weak<Block>,
    died: Died,
    trace: Trace,
    /// Number of calls that do not return.
    blocked: u64,
    calls: HashMap<&'static str, u64>,
    all_calls: u64,
    last: u64,
}

impl Inner {
    /// A new number, unique in this process.
    pub(crate) fn next(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    /// The mapping that contains a range: its address, the mapping, and the range's offset in it.
    pub(crate) fn find(&self, at: u64, bytes: usize) -> Option<(u64, &Mapping, usize)> {
        let (base, mapping) = self.mappings.range(..=at).next_back()?;
        let offset = usize::try_from(at - base).ok()?;
        let fits = offset.checked_add(bytes)? <= mapping.bytes;
        fits.then_some((*base, mapping, offset))
    }

    /// The memory that an opened handle maps: its own, or with the setting `stale` that of the handle before. The
    /// second value tells which.
    pub(crate) fn shown(&mut self, block: Block, settings: &Settings) -> (Arc<Block>, bool) {
        let block = Arc::new(block);
        let Some(stale) = settings.stale else {
            return (block, false);
        };
        self.opened += 1;
        let before = std::mem::replace(&mut self.shown, Arc::downgrade(&block));
        match before.upgrade() {
            Some(before) if self.opened == stale => (before, true),
            _ => (block, false),
        }
    }

    /// Number of bytes of a range that are in one piece of memory.
    fn in_one_piece(&self, at: u64, bytes: usize) -> usize {
        let rest = |(_, mapping, offset): (u64, &Mapping, usize)| mapping.bytes - offset;
        self.find(at, 1).map_or(bytes, rest).min(bytes)
    }

    /// Whether this address is in device memory or in a reservation.
    fn is_device(&self, at: u64) -> bool {
        let in_mapping = self.mappings.range(..=at).next_back();
        let in_reserved = self.reserved.range(..=at).next_back();
        in_mapping.is_some_and(|(base, it)| at - base < it.bytes as u64)
            || in_reserved.is_some_and(|(base, it)| at - base < it.bytes() as u64)
    }

    /// Address of a range in this process, and the block that keeps it mapped.
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
        // Registered memory is one piece: a copy across its end would access memory that is pinned by another
        // registration, or not at all.
        if let Some((base, it)) = self.registered.range(..=at).next_back() {
            let end = base + it.bytes as u64;
            if at < end && at + bytes as u64 > end {
                return Err(INVALID_VALUE);
            }
        }
        Ok((at as *mut u8, None))
    }

    /// Device memory that this process has allocated, in bytes.
    fn taken(&self) -> usize {
        let allocated = self.mappings.values();
        let allocated = allocated.filter(|it| it.kind == Kind::Allocated);
        let allocated: usize = allocated.map(|it| it.block.bytes()).sum();
        let chunks: usize = self.physical.values().map(|it| it.block.bytes()).sum();
        allocated + chunks
    }

    /// Checks that `bytes` more fit into the device memory.
    pub(crate) fn check_room(&self, bytes: usize, settings: &Settings) -> Result<(), Code> {
        let contexts = self.contexts.values().filter(|count| **count > 0).count();
        let taken = self.taken() + contexts * settings.context_bytes;
        let fits = |limit| taken.saturating_add(bytes) <= limit;
        let fits = settings.memory_bytes.is_none_or(fits);
        fits.then_some(()).ok_or(code::OUT_OF_MEMORY)
    }

    /// Whether a context is retained.
    pub(crate) fn lives(&self, context: u64) -> bool {
        let device = i32::try_from(context).map_or(0, |context| context - 1);
        self.contexts.get(&device).is_some_and(|count| *count > 0)
    }

    /// Looks up a stream.
    pub(crate) fn stream(&self, stream: u64) -> Result<&Stream, Code> {
        let found = self.streams.get(&stream).map(|(_, stream)| stream);
        found.ok_or(INVALID_HANDLE)
    }

    /// Looks up an event.
    pub(crate) fn event(&self, event: u64) -> Result<Arc<Event>, Code> {
        let found = self.events.get(&event).map(|(_, event)| Arc::clone(event));
        found.ok_or(INVALID_HANDLE)
    }

    /// Ends a context, with everything that was created in it.
    fn destroy(&mut self, context: u64) {
        let before = (self.streams.len(), self.events.len(), self.registered.len());
        self.streams.retain(|_, (of, _)| *of != context);
        self.events.retain(|_, (of, _)| *of != context);
        self.registered.retain(|_, it| it.context != context);
        self.died.streams += before.0 - self.streams.len();
        self.died.events += before.1 - self.events.len();
        self.died.registered += before.2 - self.registered.len();
        let died = &mut self.died;
        self.mappings.retain(|_, mapping| {
            if mapping.context != Some(context) {
                return true;
            }
            match mapping.kind {
                Kind::Allocated => {
                    died.allocated += 1;
                    mapping.block.free(mapping.offset, mapping.bytes);
                }
                _ => died.imported += 1,
            }
            false
        });
    }

    /// The text of the report: everything that was not released, including what ended with a context.
    fn left(&self) -> String {
        let of = |kind| self.mappings.values().filter(|it| it.kind == kind).count();
        let died = &self.died;
        format!(
            "allocated={} imported={} virtual={} physical={} reserved={} registered={} streams={} events={} contexts={}",
            of(Kind::Allocated) + died.allocated,
            of(Kind::Imported) + died.imported,
            of(Kind::Virtual),
            self.physical.len(),
            self.reserved.len(),
            self.registered.len() + died.registered,
            self.streams.len() + died.streams,
            self.events.len() + died.events,
            self.contexts.values().sum::<u32>(),
        )
    }
}

impl Trace {
    fn words(&self) -> String {
        let copies = self.copies.iter();
        let copies = copies.map(|(from_device, count)| {
            let way = if *from_device { "d2h" } else { "h2d" };
            format!("{way} {count}\n")
        });
        let threads = self.threads.iter();
        let threads = threads.map(|(call, threads)| format!("threads {call} {}\n", threads.len()));
        copies.chain(threads).collect()
    }
}

/// Precondition of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Needs {
    Nothing,
    Init,
    Context,
}

/// The driver's state in this process.
pub(crate) struct World {
    settings: Settings,
    inner: Mutex<Inner>,
    ready: AtomicBool,
    poison: AtomicU32,
    /// Number of calls for many copies.
    batches: AtomicU64,
    /// Number of copies made.
    copies: AtomicU64,
    /// Held by a call for its duration.
    busy: Mutex<()>,
}

impl World {
    /// The state of this process, created by the first call.
    pub(crate) fn get() -> &'static Self {
        static WORLD: OnceLock<World> = OnceLock::new();
        WORLD.get_or_init(|| Self {
            settings: Settings::read(),
            inner: Mutex::default(),
            ready: AtomicBool::new(false),
            poison: AtomicU32::new(code::SUCCESS),
            batches: AtomicU64::new(0),
            copies: AtomicU64::new(0),
            busy: Mutex::default(),
        })
    }

    pub(crate) fn settings(&self) -> &Settings {
        &self.settings
    }

    pub(crate) fn inner(&self) -> MutexGuard<'_, Inner> {
        lock(&self.inner)
    }

    /// Handles `cuInit`.
    pub(crate) fn begin(&self) {
        self.ready.store(true, Ordering::SeqCst);
    }

    /// Sets this thread's context; 0 for none.
    pub(crate) fn make_current(context: u64) {
        CURRENT.set(context);
    }

    /// Sets this thread's capture mode, and returns the previous one.
    pub(crate) fn exchange_capture_mode(mode: i32) -> i32 {
        CAPTURE_MODE.replace(mode)
    }

    /// Ends a context that was released for the last time, after all work in its streams is done.
    pub(crate) fn destroy(&self, context: u64) {
        let streams: Vec<_> = {
            let inner = self.inner();
            let streams = inner.streams.values().filter(|(of, _)| *of == context);
            streams.map(|(_, stream)| stream.drained()).collect()
        };
        streams.into_iter().for_each(|drained| drained());
        self.inner().destroy(context);
    }

    /// Records a copy that was given by a call of its own.
    pub(crate) fn trace_copy(&self, from: u64) {
        if self.settings.trace.is_none() {
            return;
        }
        let mut inner = self.inner();
        let from_device = inner.is_device(from);
        let copies = &mut inner.trace.copies;
        match copies.last_mut() {
            Some((last, count)) if *last == from_device => *count += 1,
            _ => copies.push((from_device, 1)),
        }
    }

    /// This thread's context, or 0.
    pub(crate) fn current() -> u64 {
        CURRENT.get()
    }

    /// Records an error from which the context does not recover.
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

    /// The error that poisoned the context, if any.
    pub(crate) fn poisoned(&self) -> Option<Code> {
        let code = self.poison.load(Ordering::SeqCst);
        (code != code::SUCCESS).then_some(code)
    }

    /// Starts a call: counts it, applies the settings that make it fail or block, and checks its preconditions.
    pub(crate) fn enter(&self, call: &'static str, needs: Needs) -> Result<(), Code> {
        let (of_it, of_all) = {
            let mut inner = self.inner();
            if self.settings.trace.is_some() {
                let threads = inner.trace.threads.entry(call).or_default();
                threads.insert(std::thread::current().id());
            }
            inner.all_calls += 1;
            let all = inner.all_calls;
            let count = inner.calls.entry(call).or_default();
            *count += 1;
            (*count, all)
        };
        if let Some((name, nth)) = &self.settings.block
            && name == call
            && *nth == of_it
        {
            self.inner().blocked += 1;
            crate::settings::complain(&format!("{call} does not return, as wanted"));
            // Tests wait for a thread with this name, which proves that a thread is in the call.
            if let Err(error) = std::fs::write("/proc/thread-self/comm", BLOCKED) {
                crate::settings::complain(&format!("the thread keeps its name: {error}"));
            }
            loop {
                std::thread::park();
            }
        }
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
        if needs == Needs::Context {
            self.check_context(call)?;
            if self.settings.call_us > 0 {
                let _busy = lock(&self.busy);
                let until = Instant::now() + Duration::from_micros(self.settings.call_us);
                while Instant::now() < until {
                    std::hint::spin_loop();
                }
            }
        }
        match self.poisoned() {
            Some(code) if needs != Needs::Nothing => Err(code),
            _ => Ok(()),
        }
    }

    /// Checks that this thread's context is retained, and that the call invalidates no capture.
    fn check_context(&self, call: &'static str) -> Result<(), Code> {
        let mut inner = self.inner();
        if !inner.lives(CURRENT.get()) {
            return Err(CONTEXT_IS_DESTROYED);
        }
        if CAPTURE_MODE.get() != CAPTURE_GLOBAL || !UNSAFE_IN_CAPTURE.contains(&call) {
            return Ok(());
        }
        let captures = inner.captures.values_mut();
        let captures = captures.filter(|capture| capture.mode == CAPTURE_GLOBAL);
        let spoiled = captures.map(|capture| capture.invalidated = true).count();
        (spoiled == 0).then_some(()).ok_or(CAPTURE_UNSUPPORTED)
    }

    /// Number of the next call for many copies, from 1 on.
    pub(crate) fn next_batch(&self) -> u64 {
        self.batches.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// Copies between two ranges, each in device or host memory.
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

    /// Checks that a copy of these ranges can be given to a stream. Returns the base of the registered host memory that
    /// it touches, if any.
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
                let registered = registered.filter(|(base, it)| at < *base + it.bytes as u64);
                pinned = registered.map(|(base, _)| *base);
                if pinned.is_none() && self.settings.strict {
                    crate::settings::complain("a copy of host memory that is not registered");
                    return Err(INVALID_VALUE);
                }
            }
        }
        Ok(pinned)
    }

    /// Reads a word in device memory.
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
    pub(crate) fn give(&self, stream: u64, work: crate::world::stream::Work) -> Result<(), Code> {
        let inner = self.inner();
        inner.stream(stream)?.give(work);
        Ok(())
    }

    /// Writes the trace and the report at the end of the process, where a test requests them. Aborts the process when a
    /// call is still blocked, as a driver crashes whose library is unloaded during a call.
    pub(crate) fn report(&self) {
        if let Some(folder) = &self.settings.trace {
            let path = format!("{folder}/{}", std::process::id());
            if let Err(error) = std::fs::write(&path, self.inner().trace.words()) {
                crate::settings::complain(&format!("{path}: {error}"));
            }
        }
        if self.inner().blocked > 0 {
            crate::settings::complain("the process ends under a call");
            std::process::abort();
        }
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
