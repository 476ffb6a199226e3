//! The exported functions of the driver, as declared in the header of the CUDA toolkit.
#![expect(
    unsafe_code,
    reason = "a C interface, with the names that the driver has"
)]

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::fs::File;
use std::sync::Arc;
use std::time::Duration;

use crate::code::{
    self, ALREADY_REGISTERED, CAPTURE_INVALIDATED, Code, DEVICE_UNAVAILABLE, INVALID_CONTEXT,
    INVALID_DEVICE, INVALID_HANDLE, INVALID_VALUE, NO_DEVICE, NOT_READY, NOT_REGISTERED,
    OUT_OF_MEMORY, SUCCESS,
};
use crate::memory::{Addresses, Block, Part, give, take};
use crate::vmm::{self, HANDLE_BYTES};
use crate::world::stream::batch::{Attributes, Lists};
use crate::world::stream::{Stream, Work};
use crate::world::{Capture, Kind, Mapping, Needs, Physical, Registered, World};

const POSIX_FD: c_uint = 1;
const FABRIC: c_uint = 8;

fn call(
    name: &'static str,
    needs: Needs,
    body: impl FnOnce(&'static World) -> Result<(), Code>,
) -> Code {
    let world = World::get();
    match world.enter(name, needs).and_then(|()| body(world)) {
        Ok(()) => SUCCESS,
        Err(code) => code,
    }
}

/// `CUipcMemHandle`, which is passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
struct Handle([u8; HANDLE_BYTES]);

/// The fields of `CUmemAllocationProp` that this driver reads.
#[repr(C)]
#[derive(Clone, Copy)]
struct Properties {
    kind: c_uint,
    shareable: c_uint,
    location_kind: c_uint,
    location: c_int,
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Access {
    location_kind: c_uint,
    location: c_int,
    flags: c_uint,
}

/// Writes the report when the process ends.
#[used]
#[unsafe(link_section = ".fini_array")]
static AT_EXIT: extern "C" fn() = at_exit;

extern "C" fn at_exit() {
    World::get().report();
}

fn device(world: &World, device: c_int) -> Result<c_int, Code> {
    let known = (0..world.settings().devices).contains(&device);
    known.then_some(device).ok_or(INVALID_DEVICE)
}

/// Defines exported functions: each with its name, its preconditions and its body.
macro_rules! exported {
    ($($needs:ident fn $name:ident($($argument:ident: $kind:ty),*) |$world:ident| $body:block)*) => { $(
        /// Declared in the header of the CUDA toolkit.
        // SAFETY: a name of the C interface that this library stands in for.
        #[unsafe(no_mangle)]
        extern "C" fn $name($($argument: $kind),*) -> Code {
            call(stringify!($name), Needs::$needs, |$world| $body)
        }
    )* };
}

exported! {
    Nothing fn cuInit(flags: c_uint) |world| {
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        std::thread::sleep(Duration::from_millis(world.settings().init_ms));
        if world.settings().init != SUCCESS {
            return Err(world.settings().init);
        }
        if world.settings().devices == 0 {
            return Err(NO_DEVICE);
        }
        world.begin();
        Ok(())
    }

    Nothing fn cuDriverGetVersion(version: *mut c_int) |world| {
        give(version, world.settings().version)
    }

    Init fn cuDeviceGetCount(count: *mut c_int) |world| { give(count, world.settings().devices) }

    Init fn cuDeviceGet(found: *mut c_int, ordinal: c_int) |world| {
        give(found, device(world, ordinal)?)
    }

    Init fn cuDeviceGetUuid(uuid: *mut [u8; 16], of: c_int) |world| {
        // All instances of a GPU share the GPU's name.
        let number = device(world, of)?;
        give(uuid, uuid_of(if world.settings().mig { 0 } else { number }))
    }

    Init fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], of: c_int) |world| {
        let mut own = uuid_of(device(world, of)?);
        if world.settings().mig {
            own[..4].copy_from_slice(b"inst");
        }
        give(uuid, own)
    }

    Init fn cuDeviceGetName(text: *mut c_char, length: c_int, of: c_int) |world| {
        device(world, of)?;
        let name = b"kvferry fake GPU\0";
        if usize::try_from(length).is_ok_and(|length| length < name.len()) {
            return Err(INVALID_VALUE);
        }
        give(text.cast(), *name)
    }

    Init fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_uint, of: c_int) |world| {
        device(world, of)?;
        match world.settings().attributes.get(&attribute) {
            Some(found) => give(value, *found),
            None => Err(INVALID_VALUE),
        }
    }

    Init fn cuDeviceGetPCIBusId(text: *mut [u8; 13], length: c_int, of: c_int) |world| {
        device(world, of)?;
        if length < 13 {
            return Err(INVALID_VALUE);
        }
        give(text, *b"0000:fe:00.0\0")
    }

    Init fn cuDevicePrimaryCtxRetain(context: *mut u64, of: c_int) |world| {
        let number = device(world, of)?;
        let mut inner = world.inner();
        if let (Some(path), None) = (&world.settings().exclusive, &inner.exclusive) {
            inner.exclusive = Some(claimed(path)?);
        }
        if !inner.lives(number as u64 + 1) {
            inner.check_room(world.settings().context_bytes, world.settings())?;
        }
        *inner.contexts.entry(number).or_default() += 1;
        give(context, number as u64 + 1)
    }

    Init fn cuDevicePrimaryCtxRelease_v2(of: c_int) |world| {
        let number = device(world, of)?;
        let mut inner = world.inner();
        let count = inner.contexts.get_mut(&number).filter(|count| **count > 0);
        let count = count.ok_or(INVALID_CONTEXT)?;
        if *count > 1 {
            *count -= 1;
            return Ok(());
        }
        drop(inner);
        world.destroy(number as u64 + 1);
        let mut inner = world.inner();
        inner.contexts.remove(&number);
        if inner.contexts.is_empty() {
            inner.exclusive = None;
        }
        Ok(())
    }

    Init fn cuCtxSetCurrent(context: u64) |world| {
        if context > 0 && !world.inner().lives(context) {
            return Err(INVALID_CONTEXT);
        }
        World::make_current(context);
        Ok(())
    }

    Context fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) |_world| {
        give(least, 0)?;
        give(greatest, -5)
    }

    Init fn cuCtxGetCurrent(context: *mut u64) |_world| { give(context, World::current()) }

    Context fn cuCtxGetDevice(of: *mut c_int) |_world| {
        // Contexts are numbered by their devices, from 1 on.
        give(of, World::current() as c_int - 1)
    }

    Context fn cuStreamCreateWithPriority(stream: *mut u64, _flags: c_uint, _priority: c_int) |world| {
        new_stream(world, stream)
    }

    Context fn cuStreamDestroy_v2(stream: u64) |world| {
        let gone = world.inner().streams.remove(&stream);
        gone.map(|_| ()).ok_or(INVALID_HANDLE)
    }

    Context fn cuStreamSynchronize(stream: u64) |world| {
        let drained = world.inner().stream(stream)?.drained();
        drained();
        world.poisoned().map_or(Ok(()), Err)
    }

    Context fn cuEventCreate(event: *mut u64, _flags: c_uint) |world| {
        let mut inner = world.inner();
        let number = inner.next();
        inner.events.insert(number, (World::current(), Arc::default()));
        give(event, number)
    }

    Context fn cuEventDestroy_v2(event: u64) |world| {
        world.inner().events.remove(&event).map(|_| ()).ok_or(INVALID_HANDLE)
    }

    Context fn cuEventRecord(event: u64, stream: u64) |world| {
        let event = world.inner().event(event)?;
        let number = event.record();
        world.give(stream, Work::Record(event, number))
    }

    Context fn cuStreamWaitEvent(stream: u64, event: u64, _flags: c_uint) |world| {
        let event = world.inner().event(event)?;
        // Later records of the event do not count. A stream does not wait for an event that was never recorded.
        let number = event.recorded();
        world.give(stream, Work::WaitEvent(event, number))
    }

    Context fn cuEventQuery(event: u64) |world| {
        let event = world.inner().event(event)?;
        match event.is_ready() {
            true => Ok(()),
            false => Err(NOT_READY),
        }
    }

    Context fn cuMemAlloc_v2(at: *mut u64, bytes: usize) |world| {
        if bytes == 0 {
            return Err(INVALID_VALUE);
        }
        let mut inner = world.inner();
        let number = inner.next();
        let part = Part::new(bytes, number).ok_or(OUT_OF_MEMORY)?;
        inner.check_room(part.block_bytes, world.settings())?;
        let addresses = Addresses::reserve(part.block_bytes)?;
        let block = Arc::new(Block::create(part.block_bytes, fresh(number))?);
        let base = addresses.base() + part.offset as u64;
        inner.mappings.insert(base, Mapping {
            _addresses: Some(addresses),
            bytes: part.bytes,
            block,
            offset: part.offset,
            kind: Kind::Allocated,
            opened: 1,
            shareable: 0,
            context: Some(World::current()),
        });
        give(at, base)
    }

    Context fn cuMemFree_v2(at: u64) |world| {
        let mut inner = world.inner();
        if inner.mappings.get(&at).is_none_or(|it| it.kind != Kind::Allocated) {
            return Err(INVALID_VALUE);
        }
        let gone = inner.mappings.remove(&at);
        drop(inner);
        if let Some(mapping) = gone {
            mapping.block.free(mapping.offset, mapping.bytes);
        }
        Ok(())
    }

    Context fn cuMemGetAddressRange_v2(base: *mut u64, bytes: *mut usize, at: u64) |world| {
        let inner = world.inner();
        let (first, mapping, _) = inner.find(at, 1).ok_or(INVALID_VALUE)?;
        if !base.is_null() {
            give(base, first)?;
        }
        if !bytes.is_null() {
            give(bytes, mapping.bytes)?;
        }
        Ok(())
    }

    Context fn cuMemcpyAsync(to: u64, from: u64, bytes: usize, stream: u64) |world| {
        if bytes == 0 {
            return Ok(());
        }
        let pinned = world.check_copy(to, from, bytes)?;
        world.trace_copy(from);
        world.give(stream, Work::Copy { to, from, bytes, pinned })
    }

    Context fn cuMemcpyBatchAsync(to: *const u64, from: *const u64, bytes: *const usize, count: usize, attributes: *const Attributes, attributes_of: *const usize, attributes_count: usize, failed: *mut usize, stream: u64) |world| {
        give(failed, usize::MAX)?;
        let lists = Lists { to, from, bytes, count, attributes, attributes_of, attributes_count };
        lists.give(world, stream)
    }

    Context fn cuMemcpyBatchAsync_v2(to: *const u64, from: *const u64, bytes: *const usize, count: usize, attributes: *const Attributes, attributes_of: *const usize, attributes_count: usize, stream: u64) |world| {
        let lists = Lists { to, from, bytes, count, attributes, attributes_of, attributes_count };
        lists.give(world, stream)
    }

    Context fn cuMemcpyHtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: u64) |world| {
        world.give(stream, Work::Copy { to, from, bytes, pinned: None })
    }

    Context fn cuStreamCreate(stream: *mut u64, _flags: c_uint) |world| {
        new_stream(world, stream)
    }

    Nothing fn cuThreadExchangeStreamCaptureMode(mode: *mut c_int) |_world| {
        let wanted = take(mode)?;
        // Global, thread-local, relaxed.
        if !(0..=2).contains(&wanted) {
            return Err(INVALID_VALUE);
        }
        give(mode, World::exchange_capture_mode(wanted))
    }

    Context fn cuStreamBeginCapture_v2(stream: u64, mode: c_int) |world| {
        let mut inner = world.inner();
        inner.stream(stream)?;
        inner.captures.insert(stream, Capture { mode, invalidated: false });
        Ok(())
    }

    Context fn cuStreamEndCapture(stream: u64, graph: *mut u64) |world| {
        let capture = world.inner().captures.remove(&stream).ok_or(INVALID_VALUE)?;
        give(graph, 0)?;
        match capture.invalidated {
            true => Err(CAPTURE_INVALIDATED),
            false => Ok(()),
        }
    }

    Context fn cuMemcpyDtoH_v2(to: u64, from: u64, bytes: usize) |world| {
        world.copy(to, from, bytes, None)
    }

    Context fn cuMemHostRegister_v2(at: u64, bytes: usize, _flags: c_uint) |world| {
        if at == 0 || bytes == 0 {
            return Err(INVALID_VALUE);
        }
        let mut inner = world.inner();
        let before = inner.registered.range(..at + bytes as u64).next_back();
        if before.is_some_and(|(base, it)| base + it.bytes as u64 > at) {
            return Err(ALREADY_REGISTERED);
        }
        let context = World::current();
        inner.registered.insert(at, Registered { bytes, context });
        Ok(())
    }

    Context fn cuMemHostUnregister(at: u64) |world| {
        let bytes = world.inner().registered.get(&at).map(|it| it.bytes);
        if let Some((least, fifo)) = &world.settings().unpin
            && bytes.is_some_and(|bytes| bytes >= *least)
        {
            // The open returns when the other side is opened, and the read ends when the other side is closed.
            if let Err(error) = std::fs::read(fifo) {
                crate::settings::complain(&format!("{fifo}: {error}"));
            }
        }
        world.inner().registered.remove(&at).map(|_| ()).ok_or(NOT_REGISTERED)
    }

    Context fn cuIpcGetMemHandle(handle: *mut [u8; HANDLE_BYTES], at: u64) |world| {
        let inner = world.inner();
        let (_, mapping, _) = inner.find(at, 1).ok_or(INVALID_VALUE)?;
        if mapping.kind != Kind::Allocated {
            return Err(INVALID_VALUE);
        }
        give(handle, vmm::handle(&mapping.block, mapping.offset, world.settings().namespace))
    }

    Context fn cuIpcOpenMemHandle_v2(at: *mut u64, handle: Handle, flags: c_uint) |world| {
        let Handle(handle) = handle;
        // CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS is the only flag, and is required.
        if flags != 1 {
            return Err(INVALID_VALUE);
        }
        if vmm::is_ours(&handle) {
            return Err(INVALID_CONTEXT);
        }
        let (block, offset) = (vmm::open(&handle, world.settings().namespace)?, vmm::offset(&handle));
        let mut inner = world.inner();
        let (block, is_stale) = inner.shown(block, world.settings());
        let open = inner.mappings.iter_mut().find(|(_, it)| it.kind == Kind::Imported && it.block.id() == block.id());
        if let Some((base, mapping)) = open.filter(|_| !is_stale) {
            mapping.opened += 1;
            return give(at, *base + offset);
        }
        let addresses = Addresses::reserve(block.bytes())?;
        let base = addresses.base();
        inner.mappings.insert(base, Mapping {
            _addresses: Some(addresses),
            bytes: block.bytes(),
            block,
            offset: 0,
            kind: Kind::Imported,
            opened: 1,
            shareable: 0,
            context: Some(World::current()),
        });
        // The whole block is accessible, also the part before the memory of the handle.
        give(at, base + offset)
    }

    Context fn cuIpcCloseMemHandle(at: u64) |world| {
        let mut inner = world.inner();
        let (base, _, _) = inner.find(at, 1).ok_or(INVALID_VALUE)?;
        let mapping = inner.mappings.get_mut(&base).filter(|it| it.kind == Kind::Imported);
        let mapping = mapping.ok_or(INVALID_VALUE)?;
        mapping.opened -= 1;
        if mapping.opened == 0 {
            inner.mappings.remove(&base);
        }
        Ok(())
    }

    Context fn cuStreamWriteValue64_v2(stream: u64, at: u64, value: u64, _flags: c_uint) |world| {
        world.give(stream, Work::WriteValue { at, value })
    }

    Context fn cuStreamWaitValue64_v2(stream: u64, at: u64, value: u64, flags: c_uint) |world| {
        // CU_STREAM_WAIT_VALUE_GEQ, the only condition that this driver supports.
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        world.give(stream, Work::WaitValue { at, value })
    }

    Context fn cuMemGetAllocationGranularity(bytes: *mut usize, _properties: *const c_void, _option: c_uint) |world| {
        give(bytes, world.settings().granule_bytes)
    }

    Context fn cuMemCreate(handle: *mut u64, bytes: usize, properties: *const Properties, _flags: u64) |world| {
        let properties = take(properties)?;
        device(world, properties.location)?;
        // CU_MEM_ALLOCATION_TYPE_PINNED, on a device (CU_MEM_LOCATION_TYPE_DEVICE).
        let right = properties.kind == 1 && properties.location_kind == 1;
        if bytes == 0 || !bytes.is_multiple_of(world.settings().granule_bytes) || !right {
            return Err(INVALID_VALUE);
        }
        let mut inner = world.inner();
        inner.check_room(bytes, world.settings())?;
        let id = fresh(inner.next());
        let block = Arc::new(Block::create(bytes, id)?);
        inner.physical.insert(id, Physical { block, shareable: properties.shareable });
        give(handle, id)
    }

    Context fn cuMemRelease(handle: u64) |world| {
        world.inner().physical.remove(&handle).map(|_| ()).ok_or(INVALID_VALUE)
    }

    Context fn cuMemExportToShareableHandle(shared: *mut c_void, handle: u64, kind: c_uint, _flags: u64) |world| {
        let found = world.inner().physical.get(&handle).cloned();
        let Physical { block, shareable } = found.ok_or(INVALID_VALUE)?;
        match kind & shareable {
            POSIX_FD => give(shared.cast::<c_int>(), vmm::export(&block)?),
            FABRIC => give(shared.cast(), vmm::handle(&block, 0, world.settings().namespace)),
            _ => Err(INVALID_VALUE),
        }
    }

    Context fn cuMemImportFromShareableHandle(handle: *mut u64, shared: *mut c_void, kind: c_uint) |world| {
        let block = match kind {
            // The descriptor itself is passed in place of a pointer.
            POSIX_FD => vmm::import(c_int::try_from(shared as usize).map_err(|_| INVALID_VALUE)?)?,
            // Fabric handles are valid wherever NVLink reaches.
            FABRIC => vmm::open_anywhere(&take(shared.cast::<[u8; HANDLE_BYTES]>())?)?,
            _ => return Err(INVALID_VALUE),
        };
        let mut inner = world.inner();
        let (block, _) = inner.shown(block, world.settings());
        let number = fresh(inner.next());
        inner.physical.insert(number, Physical { block, shareable: 0 });
        give(handle, number)
    }

    Context fn cuMemRetainAllocationHandle(handle: *mut u64, at: u64) |world| {
        let mut inner = world.inner();
        let (_, mapping, _) = inner.find(at, 1).ok_or(INVALID_VALUE)?;
        if mapping.kind != Kind::Virtual {
            return Err(INVALID_VALUE);
        }
        let physical = Physical { block: Arc::clone(&mapping.block), shareable: mapping.shareable };
        let number = fresh(inner.next());
        inner.physical.insert(number, physical);
        give(handle, number)
    }

    Context fn cuMemAddressReserve(at: *mut u64, bytes: usize, _alignment: usize, _wanted: u64, _flags: u64) |world| {
        if bytes == 0 || !bytes.is_multiple_of(world.settings().granule_bytes) {
            return Err(INVALID_VALUE);
        }
        let addresses = Addresses::reserve(bytes)?;
        let base = addresses.base();
        world.inner().reserved.insert(base, addresses);
        give(at, base)
    }

    Context fn cuMemAddressFree(at: u64, bytes: usize) |world| {
        let mut inner = world.inner();
        if inner.mappings.range(at..at + bytes as u64).next().is_some() {
            return Err(INVALID_VALUE);
        }
        inner.reserved.remove(&at).map(|_| ()).ok_or(INVALID_VALUE)
    }

    Context fn cuMemMap(at: u64, bytes: usize, offset: usize, handle: u64, _flags: u64) |world| {
        let mut inner = world.inner();
        let Physical { block, shareable } = inner.physical.get(&handle).cloned().ok_or(INVALID_VALUE)?;
        let reserved = inner.reserved.range(..=at).next_back();
        let fits = reserved.is_some_and(|(base, it)| at + bytes as u64 <= base + it.bytes() as u64)
            // A chunk can only be mapped as a whole.
            && offset == 0
            && bytes == block.bytes()
            && inner.find(at, 1).is_none();
        if !fits {
            return Err(INVALID_VALUE);
        }
        inner.mappings.insert(at, Mapping {
            _addresses: None,
            bytes,
            block,
            offset,
            kind: Kind::Virtual,
            opened: 0,
            shareable,
            context: None,
        });
        Ok(())
    }

    Context fn cuMemSetAccess(at: u64, bytes: usize, access: *const Access, count: usize) |world| {
        let access = take(access)?;
        device(world, access.location)?;
        let mut inner = world.inner();
        // CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE.
        if count != 1 || access.location_kind != 1 || access.flags != 3 {
            return Err(INVALID_VALUE);
        }
        for (_, mapping) in inner.mappings.range_mut(at..at + bytes as u64) {
            mapping.opened = 1;
        }
        Ok(())
    }

    Context fn cuMemUnmap(at: u64, bytes: usize) |world| {
        let mut inner = world.inner();
        let inside: Vec<u64> = inner.mappings.range(at..at + bytes as u64).map(|(base, _)| *base).collect();
        for base in inside {
            inner.mappings.remove(&base);
        }
        Ok(())
    }
}

/// Locks the file that stands for the GPUs in exclusive mode. Another process may hold the lock.
fn claimed(path: &str) -> Result<File, Code> {
    let file = File::create(path).map_err(|_| INVALID_VALUE)?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(_) => Err(DEVICE_UNAVAILABLE),
    }
}

/// The name of a GPU.
fn uuid_of(number: c_int) -> [u8; 16] {
    let mut bytes = *b"kvferry-fake-GPU";
    bytes[15] = b'0'.wrapping_add(number.to_le_bytes()[0]);
    bytes
}

fn new_stream(world: &World, stream: *mut u64) -> Result<(), Code> {
    let mut inner = world.inner();
    let number = inner.next();
    inner
        .streams
        .insert(number, (World::current(), Stream::start(number)?));
    give(stream, number)
}

/// A handle that no other process returns.
fn fresh(number: u64) -> u64 {
    (u64::from(std::process::id()) << 32) | number
}

/// Declared in the header of the CUDA toolkit. Never fails, and is not counted.
// SAFETY: a name of the C interface that this library stands in for.
#[unsafe(no_mangle)]
extern "C" fn cuGetErrorName(error: Code, text: *mut *const c_char) -> Code {
    match give(text, code::name(error).as_ptr()) {
        Ok(()) => SUCCESS,
        Err(code) => code,
    }
}
