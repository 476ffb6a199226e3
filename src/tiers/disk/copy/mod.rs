//! Copies between host memory and a disk, on threads of their own.
//!
//! Each part of a copy goes through private, aligned memory of its thread. So a disk needs no alignment of host memory;
//! the checksum covers just the bytes that are written, or that were read before anyone sees them; and what a disk
//! delivers late, after the copy was given up or the process has died, reaches no memory that is shared.

mod job;
mod queue;
mod uring;

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use kvferry_types::TransferId;

use super::buffer::AlignedBuffer;
pub use job::{DiskCopy, DiskCopyEnd};
use job::{Job, Operation};
use queue::{Queue, Task};
use uring::Ring;

/// Default number of reads and writes in flight.
pub const DISK_DEPTH: usize = 16;
/// Largest number of them.
pub const DISK_DEPTH_MAX: usize = 256;

/// How reads and writes are submitted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum DiskIo {
    /// By io_uring where the kernel permits it, else by threads.
    #[default]
    Auto,
    /// By io_uring, on a few threads.
    IoUring,
    /// By threads that block, one for each read or write in flight.
    Threads,
}

impl DiskIo {
    const NAMES: [(Self, &'static str); 3] = [
        (Self::Auto, "auto"),
        (Self::IoUring, "io_uring"),
        (Self::Threads, "threads"),
    ];
}

impl std::fmt::Display for DiskIo {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name = Self::NAMES.iter().find(|(io, _)| io == self);
        f.write_str(name.map_or("", |(_, name)| name))
    }
}

impl std::str::FromStr for DiskIo {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let found = Self::NAMES.iter().find(|(_, name)| *name == text);
        found
            .map(|(io, _)| *io)
            .ok_or_else(|| "auto, io_uring or threads".to_owned())
    }
}

/// Threads that share the parts in flight with io_uring: each also copies and computes checksums.
const RING_THREADS: usize = 8;

/// Receives the ends of copies, on the thread that ended the last part.
type Ended = Box<dyn Fn(DiskCopyEnd) + Send + Sync>;

struct Shared {
    queue: Queue,
    running: Mutex<HashMap<TransferId, Arc<Job>>>,
    ended: Ended,
}

impl Shared {
    fn running(&self) -> MutexGuard<'_, HashMap<TransferId, Arc<Job>>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn report(&self, end: Option<DiskCopyEnd>) {
        if let Some(end) = end {
            self.running().remove(&end.ended.transfer);
            (self.ended)(end);
        }
    }
}

/// Carries out copies between host memory and a disk. Dropped: stops all copies and waits for what is in flight.
pub struct DiskCopier {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl DiskCopier {
    /// Starts threads that have `depth` reads and writes in flight together. `ended` receives the end of each copy.
    ///
    /// Memory: 4 MiB for each read or write in flight, or one page where pages are larger.
    ///
    /// # Errors
    ///
    /// The error of the system if a thread cannot be started, or with [`DiskIo::IoUring`] no ring.
    pub fn start(
        (depth, io): (usize, DiskIo),
        ended: impl Fn(DiskCopyEnd) + Send + Sync + 'static,
    ) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            queue: Queue::default(),
            running: Mutex::default(),
            ended: Box::new(ended),
        });
        let mut copier = Self {
            shared: Arc::clone(&shared),
            threads: Vec::new(),
        };
        let depth = depth.clamp(1, DISK_DEPTH_MAX);
        let rings = match io {
            DiskIo::Threads => None,
            DiskIo::IoUring => Some(rings(depth)?),
            DiskIo::Auto => match rings(depth) {
                Ok(rings) => Some(rings),
                Err(error) => {
                    tracing::info!(%error, "no io_uring: the disk is read and written by threads");
                    None
                }
            },
        };
        match rings {
            Some(rings) => rings
                .into_iter()
                .try_for_each(|ring| copier.spawn(move |shared| ring.run(shared)))?,
            None => (0..depth).try_for_each(|_| copier.spawn(run))?,
        }
        Ok(copier)
    }

    fn spawn(&mut self, run: impl FnOnce(&Arc<Shared>) + Send + 'static) -> io::Result<()> {
        let shared = Arc::clone(&self.shared);
        let thread = std::thread::Builder::new().name("kvferry-disk".to_owned());
        self.threads.push(thread.spawn(move || run(&shared))?);
        Ok(())
    }

    /// Begins a copy. Reads go before writes.
    pub fn copy(&self, copy: DiskCopy) {
        let id = copy.transfer.id;
        let job = Arc::new(Job::new(copy));
        self.shared.running().insert(id, Arc::clone(&job));
        if job.parts.is_empty() {
            return self.shared.report(job.stop());
        }
        match job.write {
            true => self.shared.queue.push(Task::Prepare(job)),
            false => self.push_parts(&job),
        }
    }

    fn push_parts(&self, job: &Arc<Job>) {
        push_parts(&self.shared, job);
    }

    /// Stops a copy. A read ends at once; a write ends when what is in flight has ended.
    pub fn stop(&self, transfer: TransferId) {
        let job = self.shared.running().get(&transfer).cloned();
        if let Some(job) = job {
            self.shared.report(job.stop());
        }
    }
}

impl Drop for DiskCopier {
    fn drop(&mut self) {
        let running: Vec<TransferId> = self.shared.running().keys().copied().collect();
        running.into_iter().for_each(|transfer| self.stop(transfer));
        self.shared.queue.close();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a disk thread panicked");
            }
        }
    }
}

impl std::fmt::Debug for DiskCopier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DiskCopier({} threads)", self.threads.len())
    }
}

fn push_parts(shared: &Shared, job: &Arc<Job>) {
    let parts = job
        .parts
        .iter()
        .map(|part| Task::Part(Arc::clone(job), *part));
    shared.queue.push_all(job.write, parts);
}

/// Carries out tasks until the queue is closed and empty.
fn run(shared: &Arc<Shared>) {
    let mut buffer = AlignedBuffer::new(0);
    while let Some(task) = shared.queue.pop() {
        match task {
            Task::Prepare(job) => {
                shared.report(job.prepare());
                push_parts(shared, &job);
            }
            Task::Part(job, _) if !job.begin() => {}
            Task::Part(job, part) => {
                let bytes = job.buffer_bytes(part);
                if buffer.bytes().len() < bytes {
                    buffer = AlignedBuffer::new(bytes);
                }
                let part_buffer = &mut buffer.bytes_mut()[..bytes];
                shared.report(match job.operations(part, part_buffer) {
                    Ok(operations) => {
                        let result = carry_out(job.write, &operations, part_buffer);
                        job.end(part, part_buffer, result)
                    }
                    Err(error) => job.end_unbegun(part, error),
                });
            }
        }
    }
}

fn carry_out(write: bool, operations: &[Operation], buffer: &mut [u8]) -> io::Result<()> {
    operations
        .iter()
        .try_for_each(|one| one.carry_out(write, &mut buffer[one.bytes.clone()]))
}

/// Rings that have `depth` parts in flight together.
fn rings(depth: usize) -> io::Result<Vec<Ring>> {
    let threads = depth.min(RING_THREADS);
    let of = |thread: usize| depth / threads + usize::from(thread < depth % threads);
    (0..threads).map(|thread| Ring::new(of(thread))).collect()
}
