//! Reads and writes a few bytes of device memory, through pinned host memory of its own.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::device_memories::DeviceMemories;
use super::driver::{Context, DeviceSide, HostMemory, PinnedRange, Stream, Submitted};
use super::error::CudaError;
use kvferry_memory::{BufferError, CopyRange, SharedBuffer};
use kvferry_types::{Direction, Timeline};

/// Time limit of one copy of a few bytes; the GPU may be busy with an engine's work.
const SMALL_COPY_LIMIT: Duration = Duration::from_secs(10);
/// Polls without sleeping for this long, then sleeps between polls.
const SMALL_COPY_SPIN: Duration = Duration::from_micros(100);
const SMALL_COPY_PAUSE: Duration = Duration::from_micros(50);
/// Minimum size of a window's host memory, in bytes.
const WINDOW_BYTES: u64 = 1 << 16;
/// Writes that may be in flight without being waited for.
const WRITES_MAX: usize = 32;

/// Reads and writes bytes of device memory, in order.
pub struct DeviceIo {
    context: Arc<Context>,
    stream: Arc<Stream>,
    staging: Arc<Staging>,
    /// Writes in flight, in order, each with its host memory.
    writes: VecDeque<(Submitted, Option<Arc<Staging>>)>,
    free: Vec<Arc<Staging>>,
}

impl DeviceIo {
    /// Creates a window with a stream of its own.
    pub fn new(context: &Arc<Context>) -> Result<Self, SmallCopyError> {
        Ok(Self {
            context: Arc::clone(context),
            stream: Stream::new(context)?,
            staging: Staging::new(context, WINDOW_BYTES)?,
            writes: VecDeque::new(),
            free: Vec::new(),
        })
    }

    /// Reads the bytes of several ranges (offset and length), one after another, into `out`.
    pub fn read(
        &mut self,
        memory: &Arc<DeviceMemories>,
        allocation: u32,
        ranges: &[(u64, u64)],
        out: &mut [u8],
    ) -> Result<(), SmallCopyError> {
        check_length(ranges, out.len())?;
        self.make_room(out.len() as u64)?;
        let host = Arc::clone(&self.staging);
        wait(self.submit(Direction::Store, memory, allocation, ranges, host)?)?;
        Ok(self.staging.buffer.read_into(0, out)?)
    }

    /// Writes bytes to several ranges (offset and length), one after another.
    pub fn write(
        &mut self,
        memory: &Arc<DeviceMemories>,
        allocation: u32,
        ranges: &[(u64, u64)],
        bytes: &[u8],
    ) -> Result<(), SmallCopyError> {
        check_length(ranges, bytes.len())?;
        self.make_room(bytes.len() as u64)?;
        self.staging.buffer.write_from(0, bytes)?;
        let host = Arc::clone(&self.staging);
        wait(self.submit(Direction::Load, memory, allocation, ranges, host)?)
    }

    /// Writes bytes without waiting for the end: they are written before anything that is submitted to this window
    /// later.
    pub fn write_later(
        &mut self,
        memory: &Arc<DeviceMemories>,
        allocation: u32,
        ranges: &[(u64, u64)],
        bytes: &[u8],
    ) -> Result<(), SmallCopyError> {
        check_length(ranges, bytes.len())?;
        self.take_over()?;
        let wanted = bytes.len() as u64;
        let large = |staging: &Arc<Staging>| staging.buffer.len() >= wanted;
        let host = match self.free.iter().position(large) {
            Some(place) => self.free.swap_remove(place),
            None => Staging::new(&self.context, wanted.max(WINDOW_BYTES))?,
        };
        host.buffer.write_from(0, bytes)?;
        let kept = Arc::clone(&host);
        let submitted = self.submit(Direction::Load, memory, allocation, ranges, host)?;
        self.writes.push_back((submitted, Some(kept)));
        Ok(())
    }

    /// Makes the device write `value` to a word after everything that was submitted to this window before.
    pub fn mark(
        &mut self,
        memory: &Arc<DeviceMemories>,
        word: Timeline,
        value: u64,
    ) -> Result<(), SmallCopyError> {
        self.take_over()?;
        let device = Arc::clone(memory) as Arc<dyn DeviceSide>;
        let submitted = self.stream.write_word(device, word, value);
        let submitted = submitted.map_err(|refused| refused.error())?;
        self.writes.push_back((submitted, None));
        Ok(())
    }

    /// Waits until everything is written.
    pub fn finish(&mut self) -> Result<(), SmallCopyError> {
        while let Some((submitted, host)) = self.writes.pop_front() {
            self.over(submitted, host)?;
        }
        Ok(())
    }

    /// Keeps the number of writes in flight below its limit.
    fn take_over(&mut self) -> Result<(), SmallCopyError> {
        while let Some((first, _)) = self.writes.front_mut() {
            let over = first.poll()?;
            if !over && self.writes.len() < WRITES_MAX {
                break;
            }
            if let Some((submitted, host)) = self.writes.pop_front() {
                self.over(submitted, host)?;
            }
        }
        Ok(())
    }

    fn over(
        &mut self,
        submitted: Submitted,
        host: Option<Arc<Staging>>,
    ) -> Result<(), SmallCopyError> {
        wait(submitted)?;
        if self.free.len() < WRITES_MAX {
            self.free.extend(host);
        }
        Ok(())
    }

    /// Ensures that the host memory is free and large enough. A failed copy may still use it; the next copy then gets
    /// other memory.
    fn make_room(&mut self, len_bytes: u64) -> Result<(), SmallCopyError> {
        let free = Arc::get_mut(&mut self.staging).is_some();
        if !free || self.staging.buffer.len() < len_bytes {
            self.staging = Staging::new(&self.context, len_bytes.max(WINDOW_BYTES))?;
        }
        Ok(())
    }

    fn submit(
        &self,
        direction: Direction,
        memory: &Arc<DeviceMemories>,
        allocation: u32,
        ranges: &[(u64, u64)],
        host: Arc<Staging>,
    ) -> Result<Submitted, SmallCopyError> {
        let mut depot_bytes = 0;
        let mut ranges = ranges.iter().map(|(device_bytes, len_bytes)| {
            let range = CopyRange {
                allocation,
                device_bytes: *device_bytes,
                depot_bytes,
                len_bytes: *len_bytes,
            };
            depot_bytes += len_bytes;
            range
        });
        let device = Arc::clone(memory) as Arc<dyn DeviceSide>;
        let submitted = self.stream.submit(direction, device, host, &mut ranges);
        Ok(submitted.map_err(|refused| refused.error())?)
    }
}

fn wait(mut submitted: Submitted) -> Result<(), SmallCopyError> {
    let begun = Instant::now();
    while !submitted.poll()? {
        match begun.elapsed() {
            waited if waited < SMALL_COPY_SPIN => std::thread::yield_now(),
            waited if waited < SMALL_COPY_LIMIT => std::thread::sleep(SMALL_COPY_PAUSE),
            _ => return Err(SmallCopyError::Late),
        }
    }
    Ok(())
}

fn check_length(ranges: &[(u64, u64)], bytes: usize) -> Result<(), SmallCopyError> {
    let described: u64 = ranges.iter().map(|(_, len_bytes)| len_bytes).sum();
    match described == bytes as u64 {
        true => Ok(()),
        false => Err(SmallCopyError::Length { described, bytes }),
    }
}

/// Pinned host memory for small copies: the driver accepts copies of pinned memory without waiting for them.
pub(super) struct Staging {
    _pinned: PinnedRange,
    pub(super) buffer: Arc<SharedBuffer>,
}

impl Staging {
    pub(super) fn new(context: &Arc<Context>, bytes: u64) -> Result<Arc<Self>, SmallCopyError> {
        let buffer = Arc::new(SharedBuffer::create("kvferry-staging", bytes)?);
        let _pinned = PinnedRange::register(context, &buffer, 0, bytes)?;
        Ok(Arc::new(Self { _pinned, buffer }))
    }
}

impl HostMemory for Staging {
    fn buffer(&self) -> &SharedBuffer {
        &self.buffer
    }

    fn end_of_part(&self, _offset_bytes: u64) -> u64 {
        self.buffer.len()
    }
}

/// Why some bytes of device memory were not read or written.
#[derive(Debug, thiserror::Error)]
pub enum SmallCopyError {
    /// A call of the driver failed.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// Host memory could not be created or accessed.
    #[error(transparent)]
    Buffer(#[from] BufferError),
    /// The ranges add up to another length than the bytes.
    #[error("ranges of {described} bytes for {bytes} bytes")]
    Length {
        /// Bytes of the ranges.
        described: u64,
        /// Bytes of the caller's buffer.
        bytes: usize,
    },
    /// The copy did not end within 10 s.
    #[error("a copy of a few bytes was not done within 10 s: the GPU does not answer")]
    Late,
}
