//! Streams, and submitted copies that hold their memory until they have ended.
#![expect(unsafe_code, reason = "calls into the CUDA driver")]

use std::mem::ManuallyDrop;
use std::ptr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::sys;

use super::Context;
use super::copies::{Batches, Descriptors, Piece, Sides};
use super::memory::{DeviceSide, HostMemory};
use super::types::Code;
use crate::error::CudaError;
use kvferry_memory::{CopyRange, TIMELINE_BYTES};
use kvferry_types::{Direction, Timeline};

const NOT_READY: Code = 600;
/// `CU_STREAM_NON_BLOCKING`: does not synchronise with the default stream.
const STREAM_NON_BLOCKING: u32 = 1;
/// `CU_EVENT_DISABLE_TIMING`.
const EVENT_DISABLE_TIMING: u32 = 2;
/// How long the drop of submitted work waits for its end. After this limit its memory is never released.
const DROP_LIMIT: Duration = Duration::from_secs(2);
const DROP_PAUSE: Duration = Duration::from_micros(200);

/// A CUDA stream: executes work in order, concurrently with other streams.
pub struct Stream {
    pub(super) context: Arc<Context>,
    pub(super) handle: sys::CUstream,
    /// Issues batched copies; `None` where each copy is a call of its own.
    pub(super) batches: Option<Batches>,
}

// SAFETY: a stream may be used by any thread that has made its context current.
unsafe impl Send for Stream {}
// SAFETY: as above; the driver does its own locking.
unsafe impl Sync for Stream {}

/// Why copies were not submitted to a stream, all or in part.
#[derive(Debug)]
pub enum NotSubmitted {
    /// A call was refused. Copies that were submitted before, if any, are in flight.
    Refused(CudaError, Option<Submitted>),
    /// Copies are in flight, and nothing reports their end.
    EndUnknown(CudaError),
}

impl NotSubmitted {
    /// The error of the driver, or of a check before it was called.
    pub fn error(&self) -> CudaError {
        match self {
            Self::Refused(error, _) | Self::EndUnknown(error) => *error,
        }
    }
}

impl Stream {
    /// Creates a stream in which each copy is a call of its own.
    pub fn new(context: &Arc<Context>) -> Result<Arc<Self>, CudaError> {
        Self::giving(context, 1)
    }

    /// Creates a stream that issues up to `copies_a_call` copies by one call of the driver, as long as the driver
    /// accepts that.
    pub fn giving(context: &Arc<Context>, copies_a_call: usize) -> Result<Arc<Self>, CudaError> {
        let together = copies_a_call > 1 && context.copies_together()?;
        let (api, mut handle) = (context.bind()?, ptr::null_mut());
        // SAFETY: writes one handle.
        let code =
            unsafe { (api.cuStreamCreateWithPriority)(&raw mut handle, STREAM_NON_BLOCKING, 0) };
        context.check("cuStreamCreateWithPriority", code)?;
        Ok(Arc::new(Self {
            context: Arc::clone(context),
            handle,
            batches: together.then(|| Batches::new(copies_a_call)),
        }))
    }

    /// Submits copies to the stream. Both memories are kept until the end of the copies, which the returned value
    /// reports.
    ///
    /// A range that does not lie in the memories is refused without a call of the driver for it; ranges before it may
    /// be in flight.
    pub fn submit(
        self: &Arc<Self>,
        direction: Direction,
        device: Arc<dyn DeviceSide>,
        host: Arc<dyn HostMemory>,
        ranges: &mut dyn Iterator<Item = CopyRange>,
    ) -> Result<Submitted, Box<NotSubmitted>> {
        let nothing = |error| Box::new(NotSubmitted::Refused(error, None));
        let (on_device, in_host) = (Arc::clone(&device), Arc::clone(&host));
        let mut submitted = Submitted::new(self, device, Some(host)).map_err(nothing)?;
        let sides = Sides {
            direction,
            device: &*on_device,
            host: &*in_host,
        };
        let copied = self.give(&sides, ranges, &mut submitted);
        if submitted.end == End::Over {
            // Nothing was submitted.
            return match copied {
                Ok(()) => Ok(submitted),
                Err(error) => Err(nothing(error)),
            };
        }
        self.seal(submitted, copied)
    }

    /// Writes a word of device memory after everything before it in the stream is done and its writes are visible to
    /// others.
    pub fn write_word(
        self: &Arc<Self>,
        device: Arc<dyn DeviceSide>,
        word: Timeline,
        value: u64,
    ) -> Result<Submitted, Box<NotSubmitted>> {
        let nothing = |error| Box::new(NotSubmitted::Refused(error, None));
        let call = "cuStreamWriteValue64_v2";
        let at = device.memory(word.allocation);
        let at = at.and_then(|memory| memory.range(word.offset_bytes, TIMELINE_BYTES));
        let api = self.context.bind().map_err(nothing)?;
        let at = at.ok_or_else(|| nothing(CudaError::OutOfRange("the word of a timeline")))?;
        let write = api.cuStreamWriteValue64_v2;
        let write = write.ok_or_else(|| nothing(CudaError::NoFunction(call)))?;
        let mut submitted = Submitted::new(self, device, None).map_err(nothing)?;
        // SAFETY: the word lies in memory that `submitted` keeps until the stream has executed this write. Without a
        // flag the driver orders earlier writes before it.
        let code = unsafe { write(self.handle, at, value, 0) };
        self.context.check(call, code).map_err(nothing)?;
        submitted.set_under_way();
        self.seal(submitted, Ok(()))
    }

    /// Records the event that reports the end of work, of which all or a part was submitted to the stream.
    fn seal(
        self: &Arc<Self>,
        mut submitted: Submitted,
        given: Result<(), CudaError>,
    ) -> Result<Submitted, Box<NotSubmitted>> {
        let recorded = submitted.event.record(self);
        match (given, recorded) {
            (Ok(()), Ok(())) => {
                submitted.end = End::AtEvent;
                Ok(submitted)
            }
            (Err(error), Ok(())) => {
                submitted.end = End::AtEvent;
                Err(Box::new(NotSubmitted::Refused(error, Some(submitted))))
            }
            (given, Err(error)) => {
                // No event reports the end of this work: wait for the stream, or never release the memory.
                let error = given.err().unwrap_or(error);
                match self.synchronize() {
                    Ok(()) => {
                        submitted.end = End::Over;
                        Err(Box::new(NotSubmitted::Refused(error, None)))
                    }
                    Err(_) => Err(Box::new(NotSubmitted::EndUnknown(error))),
                }
            }
        }
    }

    /// Waits until everything in the stream is done.
    fn synchronize(&self) -> Result<(), CudaError> {
        let api = self.context.bind()?;
        // SAFETY: the stream is owned by `self`.
        let code = unsafe { (api.cuStreamSynchronize)(self.handle) };
        self.context.check("cuStreamSynchronize", code)
    }
}

impl Stream {
    /// Most copies of one call: 1 where each copy is a call of its own.
    pub fn copies_a_call(&self) -> usize {
        let batches = self.batches.as_ref();
        let batches = batches.filter(|_| !self.context.has_refused_batches());
        batches.map_or(1, |batches| batches.most())
    }

    /// Submits copies to the stream. After an error some may have been submitted.
    pub(super) fn give(
        &self,
        sides: &Sides<'_>,
        ranges: &mut dyn Iterator<Item = CopyRange>,
        submitted: &mut Submitted,
    ) -> Result<(), CudaError> {
        let mut pieces = ranges.flat_map(|range| sides.pieces(range));
        let batches = self.batches.as_ref();
        let Some(batches) = batches.filter(|_| !self.context.has_refused_batches()) else {
            return pieces.try_for_each(|piece| self.copy(piece?, submitted));
        };
        loop {
            let descriptors = batches.next(&mut pieces)?;
            if descriptors.len() == 0 {
                batches.give_back([descriptors]);
                return Ok(());
            }
            self.copy_together(submitted.keep(descriptors), submitted)?;
        }
    }

    fn copy(&self, piece: Piece, submitted: &mut Submitted) -> Result<(), CudaError> {
        let api = self.context.bind()?;
        let Piece { to, from, bytes } = piece;
        // SAFETY: both ranges lie in memory that `submitted` keeps until the stream has executed this copy. Other
        // processes may write the same bytes, which are then arbitrary; nothing in this process has references to them.
        let code = unsafe { (api.cuMemcpyAsync)(to, from, bytes, self.handle) };
        self.context.check("cuMemcpyAsync", code)?;
        submitted.set_under_way();
        Ok(())
    }

    /// Submits the copies of one of the lists that `submitted` keeps by one call, or one by one where the driver
    /// refuses that call.
    fn copy_together(&self, list: usize, submitted: &mut Submitted) -> Result<(), CudaError> {
        let count = submitted.descriptors()[list].len();
        if count > 1 && !self.context.has_refused_batches() {
            // If the call is refused, nothing guarantees that none of the copies was submitted.
            submitted.set_under_way();
            match submitted.descriptors()[list].submit(&self.context, self.handle) {
                Ok(()) => return Ok(()),
                Err(error) if error.is_fatal() => return Err(error),
                Err(error) => self.context.refused_batch(error),
            }
        }
        (0..count).try_for_each(|index| {
            let piece = submitted.descriptors()[list].piece(index);
            self.copy(piece, submitted)
        })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let handle = self.handle;
        self.context.give_back("cuStreamDestroy_v2", |api| {
            // SAFETY: the stream was created here. Work that is still in it continues; its memory is held by the
            // [`Submitted`] of that work.
            unsafe { (api.cuStreamDestroy_v2)(handle) }
        });
    }
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Stream({:?})", self.context)
    }
}

/// A CUDA event: a point in a stream.
struct Event {
    context: Arc<Context>,
    handle: sys::CUevent,
}

// SAFETY: an event may be used by any thread that has made its context current.
unsafe impl Send for Event {}

impl Event {
    fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        let (api, mut handle) = (context.bind()?, ptr::null_mut());
        // SAFETY: writes one handle.
        let code = unsafe { (api.cuEventCreate)(&raw mut handle, EVENT_DISABLE_TIMING) };
        context.check("cuEventCreate", code)?;
        Ok(Self {
            context: Arc::clone(context),
            handle,
        })
    }

    fn record(&self, stream: &Stream) -> Result<(), CudaError> {
        let api = self.context.bind()?;
        // SAFETY: the event and the stream are live, and of one context.
        let code = unsafe { (api.cuEventRecord)(self.handle, stream.handle) };
        self.context.check("cuEventRecord", code)
    }

    fn reached(&self) -> Result<bool, CudaError> {
        let api = self.context.bind()?;
        // SAFETY: the event is live.
        let code = unsafe { (api.cuEventQuery)(self.handle) };
        match code {
            NOT_READY => Ok(false),
            _ => self.context.check("cuEventQuery", code).map(|()| true),
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let handle = self.handle;
        self.context.give_back("cuEventDestroy_v2", |api| {
            // SAFETY: the event was created here; the driver keeps what a stream still needs of it.
            unsafe { (api.cuEventDestroy_v2)(handle) }
        });
    }
}

/// Memory that copies in flight access.
struct Kept {
    _device: Arc<dyn DeviceSide>,
    _host: Option<Arc<dyn HostMemory>>,
    descriptors: Vec<Descriptors>,
}

/// Copies in flight, and the memory that they access. The memory is released when the copies are known to have ended,
/// and never if that cannot be known.
pub struct Submitted {
    stream: Arc<Stream>,
    event: Event,
    keeps: ManuallyDrop<Kept>,
    end: End,
}

/// When the end of copies is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// They have ended, or none was submitted.
    Over,
    /// They have ended when the event is reached.
    AtEvent,
    /// Their end cannot be observed.
    Unknown,
}

impl Submitted {
    fn new(
        stream: &Arc<Stream>,
        device: Arc<dyn DeviceSide>,
        host: Option<Arc<dyn HostMemory>>,
    ) -> Result<Self, CudaError> {
        Ok(Self {
            stream: Arc::clone(stream),
            event: Event::new(&stream.context)?,
            keeps: ManuallyDrop::new(Kept {
                _device: device,
                _host: host,
                descriptors: Vec::new(),
            }),
            end: End::Over,
        })
    }

    /// Records that something was submitted, whose end is unknown until an event is recorded.
    pub(super) fn set_under_way(&mut self) {
        self.end = End::Unknown;
    }

    /// Keeps descriptors that the driver may read until the copies have ended. Returns their index.
    pub(super) fn keep(&mut self, descriptors: Descriptors) -> usize {
        self.keeps.descriptors.push(descriptors);
        self.keeps.descriptors.len() - 1
    }

    /// The descriptors that are kept.
    pub(super) fn descriptors(&mut self) -> &mut Vec<Descriptors> {
        &mut self.keeps.descriptors
    }

    /// Returns true if the copies have ended.
    pub fn poll(&mut self) -> Result<bool, CudaError> {
        let over = match self.end {
            End::Over => true,
            End::AtEvent => self.event.reached()?,
            End::Unknown => false,
        };
        if over {
            self.end = End::Over;
        }
        Ok(over)
    }

    /// Never releases the memory, because the process is about to end.
    pub fn leak(mut self) {
        self.end = End::Unknown;
    }
}

impl Drop for Submitted {
    fn drop(&mut self) {
        let until = Instant::now() + DROP_LIMIT;
        while self.end != End::Over {
            match self.poll() {
                Ok(true) => {}
                Ok(false) if self.end == End::AtEvent && Instant::now() < until => {
                    std::thread::sleep(DROP_PAUSE);
                }
                not_over => {
                    tracing::error!(
                        ?not_over,
                        "copies whose end is not known: their memory stays"
                    );
                    return;
                }
            }
        }
        // SAFETY: taken here, once, and not used after this.
        let kept = unsafe { ManuallyDrop::take(&mut self.keeps) };
        if let Some(batches) = &self.stream.batches {
            batches.give_back(kept.descriptors);
        }
    }
}

impl std::fmt::Debug for Submitted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Submitted({:?}, {:?})", self.stream, self.end)
    }
}
