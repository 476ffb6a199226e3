//! Reads and writes by io_uring: one thread has several parts in flight.
//!
//! The kernel may go on with a request after the process has died. It then reads or writes the private buffers, which die
//! with the process, and the file, which stays locked until the last request on it has ended: the next process to open the
//! file waits for that lock.
#![expect(unsafe_code, reason = "requests name buffers by address")]

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Duration;

use io_uring::{IoUring, opcode, types};

use super::super::buffer::AlignedBuffer;
use super::job::{Job, Operation, Part};
use super::queue::Task;
use super::{Shared, push_parts};

/// A part in flight. The buffer stays where it is until the last of the operations has ended.
struct Slot {
    buffer: AlignedBuffer,
    part: Option<PartInFlight>,
}

struct PartInFlight {
    job: Arc<Job>,
    part: Part,
    bytes: usize,
    operations: Vec<Operation>,
    left: usize,
    result: io::Result<()>,
}

/// A ring with a slot for each part in flight.
pub(super) struct Ring {
    ring: IoUring,
    slots: Vec<Slot>,
    in_flight: usize,
}

/// Pause after a wait for completions that failed.
const WAIT_PAUSE: Duration = Duration::from_micros(100);

/// Operations of a part that a request can name: a part of 4 MiB has at most 1,024 extents.
const OPERATION_BITS: u32 = 16;

impl Ring {
    /// Sets up a ring for `depth` parts in flight. Fails where the kernel has no io_uring, or does not permit it.
    pub(super) fn new(depth: usize) -> io::Result<Self> {
        let entries = u32::try_from(depth.next_power_of_two()).unwrap_or(u32::MAX);
        let ring = IoUring::new(entries.max(1))?;
        let mut probe = io_uring::Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        let supported = [opcode::Read::CODE, opcode::Write::CODE];
        if !supported.iter().all(|code| probe.is_supported(*code)) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let slots = (0..depth.max(1)).map(|_| Slot {
            buffer: AlignedBuffer::new(0),
            part: None,
        });
        Ok(Self {
            ring,
            slots: slots.collect(),
            in_flight: 0,
        })
    }

    /// Carries out tasks until the queue is closed and empty.
    pub(super) fn run(mut self, shared: &Arc<Shared>) {
        loop {
            while self.in_flight < self.slots.len() {
                let task = match self.in_flight {
                    0 => shared.queue.pop(),
                    _ => shared.queue.try_pop(),
                };
                match task {
                    Some(Task::Prepare(job)) => {
                        shared.report(job.prepare());
                        push_parts(shared, &job);
                    }
                    Some(Task::Part(job, part)) => self.begin(shared, job, part),
                    None if self.in_flight == 0 => return,
                    None => break,
                }
            }
            if let Err(error) = self.ring.submit_and_wait(1) {
                // Interrupted, or the completion queue is full: what has ended is taken below. A ring that cannot wait at
                // all must not occupy a core meanwhile.
                tracing::debug!(%error, "waiting for a disk");
                std::thread::sleep(WAIT_PAUSE);
            }
            self.take_ended(shared);
        }
    }

    fn begin(&mut self, shared: &Shared, job: Arc<Job>, part: Part) {
        if !job.begin() {
            return;
        }
        let free = self.slots.iter().position(|slot| slot.part.is_none());
        let Some(index) = free else {
            let error = io::Error::other("no slot for a part");
            return shared.report(job.end_unbegun(part, error));
        };
        let slot = &mut self.slots[index];
        let bytes = job.buffer_bytes(part);
        if slot.buffer.bytes().len() < bytes {
            slot.buffer = AlignedBuffer::new(bytes);
        }
        let operations = job.operations(part, &mut slot.buffer.bytes_mut()[..bytes]);
        let operations = match operations {
            Ok(operations) => operations,
            Err(error) => {
                return shared.report(job.end_unbegun(part, error));
            }
        };
        slot.part = Some(PartInFlight {
            job,
            part,
            bytes,
            left: operations.len(),
            operations,
            result: Ok(()),
        });
        self.in_flight += 1;
        self.push(index);
    }

    /// Submits the operations of a slot. Files without a descriptor are read and written at once.
    fn push(&mut self, index: usize) {
        let slot = &mut self.slots[index];
        let Some(in_flight) = &mut slot.part else {
            return;
        };
        let write = in_flight.job.write;
        let mut requests = Vec::new();
        for (number, operation) in in_flight.operations.iter().enumerate() {
            let bytes = &mut slot.buffer.bytes_mut()[operation.bytes.clone()];
            let len = u32::try_from(bytes.len());
            let (Some(fd), Ok(len)) = (operation.file.descriptor(), len) else {
                in_flight.left -= 1;
                let done = operation.carry_out(write, bytes);
                if in_flight.result.is_ok() {
                    in_flight.result = done;
                }
                continue;
            };
            let fd = types::Fd(fd.as_raw_fd());
            let entry = match write {
                true => opcode::Write::new(fd, bytes.as_ptr(), len)
                    .offset(operation.at)
                    .build(),
                false => opcode::Read::new(fd, bytes.as_mut_ptr(), len)
                    .offset(operation.at)
                    .build(),
            };
            let data = (index as u64) << OPERATION_BITS | number as u64;
            requests.push(entry.user_data(data));
        }
        for entry in requests {
            loop {
                // SAFETY: the request names a range of the slot's buffer and a descriptor of `operations`. Both stay until
                // its completion was taken: a slot with a part in flight gets no other one, its buffer is not replaced, and
                // `drop` waits for all completions.
                let pushed = unsafe { self.ring.submission().push(&entry) };
                if pushed.is_ok() {
                    break;
                }
                if let Err(error) = self.ring.submit() {
                    tracing::debug!(%error, "submitting to a disk");
                    std::thread::yield_now();
                }
            }
        }
    }

    /// Takes the completions, and ends the parts of which all operations have ended.
    fn take_ended(&mut self, shared: &Shared) {
        self.take_completions();
        for index in 0..self.slots.len() {
            let slot = &mut self.slots[index];
            let Some(part) = slot.part.take_if(|part| part.left == 0) else {
                continue;
            };
            self.in_flight -= 1;
            let buffer = &mut slot.buffer.bytes_mut()[..part.bytes];
            shared.report(part.job.end(part.part, buffer, part.result));
        }
    }

    fn take_completions(&mut self) {
        let ended: Vec<(u64, i32)> = self
            .ring
            .completion()
            .map(|entry| (entry.user_data(), entry.result()))
            .collect();
        for (data, result) in ended {
            let (index, number) = (data >> OPERATION_BITS, data & ((1 << OPERATION_BITS) - 1));
            self.operation_ended(index as usize, number as usize, result);
        }
    }

    fn operation_ended(&mut self, index: usize, number: usize, result: i32) {
        let Some(slot) = self.slots.get_mut(index) else {
            return;
        };
        let Some(part) = &mut slot.part else {
            return;
        };
        part.left -= 1;
        let Some(operation) = part.operations.get(number) else {
            return;
        };
        let bytes = &mut slot.buffer.bytes_mut()[operation.bytes.clone()];
        let done = match usize::try_from(result) {
            Ok(count) if count == bytes.len() => Ok(()),
            // The rest of a short read or write, or all of one that was interrupted.
            Ok(_) => operation.carry_out(part.job.write, bytes),
            Err(_) if matches!(-result, EINTR | EAGAIN) => {
                operation.carry_out(part.job.write, bytes)
            }
            Err(_) => Err(io::Error::from_raw_os_error(-result)),
        };
        if part.result.is_ok() {
            part.result = done;
        }
    }
}

const EINTR: i32 = 4;
const EAGAIN: i32 = 11;

impl Drop for Ring {
    fn drop(&mut self) {
        // Buffers must outlive the requests that name them.
        while self
            .slots
            .iter()
            .any(|slot| slot.part.as_ref().is_some_and(|part| part.left > 0))
        {
            if self.ring.submit_and_wait(1).is_err() {
                std::thread::yield_now();
            }
            self.take_completions();
        }
    }
}
