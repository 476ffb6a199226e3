//! Prefault: allocates a depot's memory before the first copy needs it.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};

use super::available::{MemoryAvailable, MemoryLimit};
use super::buffer::SharedBuffer;
use super::depot::Depot;
use super::node::NumaNode;

/// Chunks start at multiples of this, whatever size is configured: one huge page.
const CHUNK_ALIGN_BYTES: u64 = 2 << 20;
/// Unit of `st_blocks`, whatever the file system's own block is.
const STAT_BLOCK_BYTES: u64 = 512;

/// How memory is prefaulted.
#[derive(Debug, Clone)]
pub struct Prefault {
    /// Number of threads; 0 counts as 1.
    pub threads: usize,
    /// Bytes that a thread prefaults before it reports; rounded up to a multiple of 2 MiB.
    pub chunk_bytes: u64,
    /// The node on which the threads run, and from which the memory is therefore allocated. `None`: any node.
    pub node: Option<NumaNode>,
}

/// Result of a prefault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefaultReport {
    /// Bytes of the depot, all of which are in memory now.
    pub bytes: u64,
    /// The system accepted the advice to use huge pages. `shmem_enabled` determines whether it follows it.
    pub huge_pages_advised: bool,
}

/// Why a depot's memory is not completely allocated. Memory that was allocated stays allocated.
#[derive(Debug, thiserror::Error)]
pub enum PrefaultError {
    /// There is less memory than the depot still needs.
    #[error(
        "the depot needs {needed_bytes} more bytes, {limit} has {available_bytes}: give it a \
         smaller depot, or raise that limit"
    )]
    MemoryShort {
        /// Bytes of the depot that were not in memory yet.
        needed_bytes: u64,
        /// Bytes that were available.
        available_bytes: u64,
        /// The limit of the memory.
        limit: MemoryLimit,
    },
    /// The cancel flag was set.
    #[error("cancelled with {done_bytes} of {total_bytes} bytes in memory")]
    Cancelled {
        /// Bytes that were prefaulted.
        done_bytes: u64,
        /// Bytes of the depot.
        total_bytes: u64,
    },
    /// No thread could be started.
    #[error("cannot start a thread that touches the depot's memory: {0}")]
    Threads(io::Error),
    /// A system call failed.
    #[error("cannot take the depot's memory: {0}")]
    Io(io::Error),
}

impl Depot {
    /// Allocates all memory of the depot and keeps its contents.
    ///
    /// `progress(done_bytes, total_bytes)` is called on the caller's thread, first with 0, then with growing numbers up
    /// to the total. `cancel` is checked between chunks. When `prefault` returns, all its threads have ended.
    pub fn prefault(
        &self,
        by: &Prefault,
        progress: &dyn Fn(u64, u64),
        cancel: &AtomicBool,
    ) -> Result<PrefaultReport, PrefaultError> {
        let buffer = self.buffer();
        refuse_short(buffer)?;
        let huge_pages_advised = buffer.advise_huge_pages();
        let total_bytes = buffer.len();
        progress(0, total_bytes);
        let walk = Walk {
            buffer,
            chunk_bytes: by
                .chunk_bytes
                .clamp(1, 1 << 40)
                .next_multiple_of(CHUNK_ALIGN_BYTES),
            next_chunk: AtomicU64::new(0),
            failed: AtomicBool::new(false),
            cancel,
            node: by.node.as_ref(),
        };
        let done_bytes = walk.run(by.threads.max(1), &|done| progress(done, total_bytes))?;
        if done_bytes < total_bytes {
            return Err(PrefaultError::Cancelled {
                done_bytes,
                total_bytes,
            });
        }
        Ok(PrefaultReport {
            bytes: total_bytes,
            huge_pages_advised,
        })
    }
}

/// Compares the missing bytes with the available ones before the system allocates them, because the system may answer a
/// shortage by killing this process.
fn refuse_short(buffer: &SharedBuffer) -> Result<(), PrefaultError> {
    let needed_bytes = missing_bytes(buffer)?;
    let available = MemoryAvailable::for_file(buffer.fd());
    if needed_bytes > available.bytes {
        return Err(short(needed_bytes, available));
    }
    Ok(())
}

fn missing_bytes(buffer: &SharedBuffer) -> Result<u64, PrefaultError> {
    let stat = rustix::fs::fstat(buffer.fd()).map_err(|errno| PrefaultError::Io(errno.into()))?;
    let present = u64::try_from(stat.st_blocks).unwrap_or(0) * STAT_BLOCK_BYTES;
    Ok(buffer.len().saturating_sub(present))
}

fn short(needed_bytes: u64, available: MemoryAvailable) -> PrefaultError {
    PrefaultError::MemoryShort {
        needed_bytes,
        available_bytes: available.bytes,
        limit: available.limit,
    }
}

/// One pass over a buffer, shared by its threads.
struct Walk<'a> {
    buffer: &'a SharedBuffer,
    chunk_bytes: u64,
    next_chunk: AtomicU64,
    failed: AtomicBool,
    cancel: &'a AtomicBool,
    node: Option<&'a NumaNode>,
}

impl Walk<'_> {
    /// Runs the threads and reports the bytes done so far, on the caller's thread.
    fn run(&self, threads: usize, report: &dyn Fn(u64)) -> Result<u64, PrefaultError> {
        let (sender, receiver) = sync_channel(threads);
        std::thread::scope(|scope| {
            for started in 0..threads {
                let sender = sender.clone();
                let thread = std::thread::Builder::new().name("kvferry-prefault".to_owned());
                match thread.spawn_scoped(scope, move || self.chunks(&sender)) {
                    Ok(_) => {}
                    Err(error) if started == 0 => return Err(PrefaultError::Threads(error)),
                    Err(error) => {
                        tracing::warn!(%error, started, "host memory is touched by fewer threads");
                        break;
                    }
                }
            }
            drop(sender);
            let mut done_bytes = 0;
            let mut outcome = Ok(());
            for chunk in receiver {
                match chunk {
                    Ok(bytes) => {
                        done_bytes += bytes;
                        report(done_bytes);
                    }
                    Err(error) => outcome = outcome.and(Err(error)),
                }
            }
            outcome
                .map(|()| done_bytes)
                .map_err(|error| self.explain(error))
        })
    }

    /// Body of one thread: prefaults the next chunk until there is none. The channel closes when the last thread ends.
    fn chunks(&self, done: &SyncSender<io::Result<u64>>) {
        if let Some(Err(error)) = self.node.map(NumaNode::run_here) {
            // The CPU set of this container may forbid it, for example. Memory of another node is better than none.
            tracing::warn!(%error, "host memory comes from any NUMA node");
        }
        let stop = || self.cancel.load(Ordering::Relaxed) || self.failed.load(Ordering::Relaxed);
        while !stop() {
            let start = self.next_chunk.fetch_add(1, Ordering::Relaxed) * self.chunk_bytes;
            if start >= self.buffer.len() {
                return;
            }
            let bytes = self.chunk_bytes.min(self.buffer.len() - start);
            let taken = self.take(start, bytes).map(|()| bytes);
            if taken.is_err() {
                self.failed.store(true, Ordering::Relaxed);
            }
            if done.send(taken).is_err() {
                return;
            }
        }
    }

    fn take(&self, start: u64, bytes: u64) -> io::Result<()> {
        match self.buffer.populate(start, bytes) {
            // Kernels before 5.14 do not have this advice.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                self.buffer.touch(start, bytes)
            }
            outcome => outcome,
        }
    }

    /// The system reports ENOMEM, ENOSPC or (for a fault that would raise SIGBUS) EFAULT when memory is short.
    fn explain(&self, error: io::Error) -> PrefaultError {
        use rustix::io::Errno;
        let short_of = [Errno::NOMEM, Errno::NOSPC, Errno::FAULT];
        let is_short = short_of
            .iter()
            .any(|errno| error.raw_os_error() == Some(errno.raw_os_error()));
        match missing_bytes(self.buffer) {
            Ok(needed) if is_short => short(needed, MemoryAvailable::for_file(self.buffer.fd())),
            _ => PrefaultError::Io(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    fn by(threads: usize, chunk_bytes: u64) -> Prefault {
        Prefault {
            threads,
            chunk_bytes,
            node: None,
        }
    }

    #[test]
    fn memory_of_a_node_is_allocated() {
        let depot = Depot::create(5 << 20).expect("memory");
        let node = NumaNode::of_this_thread().expect("processors");
        let node = Some(node);
        let by = Prefault { node, ..by(2, 1) };
        let report = depot.prefault(&by, &|_, _| (), &AtomicBool::new(false));
        assert_eq!(report.expect("memory").bytes, 5 << 20);
    }

    #[test]
    fn progress_grows_to_the_total_and_contents_stay() {
        let depot = Depot::create((9 << 20) + 123).expect("memory");
        depot
            .buffer()
            .write_from(5 << 20, b"kept")
            .expect("in bounds");
        let seen = RefCell::new(Vec::new());
        let progress = |done, total| seen.borrow_mut().push((done, total));
        let report = depot
            .prefault(&by(3, 1), &progress, &AtomicBool::new(false))
            .expect("enough memory");
        assert_eq!(report.bytes, depot.bytes());
        let seen = seen.into_inner();
        assert_eq!(seen.first(), Some(&(0, depot.bytes())));
        assert_eq!(seen.last(), Some(&(depot.bytes(), depot.bytes())));
        assert!(
            seen.windows(2).all(|pair| pair[0].0 < pair[1].0),
            "{seen:?}"
        );
        assert_eq!(missing_bytes(depot.buffer()).expect("readable"), 0);
        let mut kept = [0; 4];
        depot
            .buffer()
            .read_into(5 << 20, &mut kept)
            .expect("in bounds");
        assert_eq!(&kept, b"kept");
    }

    #[test]
    fn touching_allocates_memory_without_changing_it() {
        let depot = Depot::create(3 << 20).expect("memory");
        depot
            .buffer()
            .write_from(4096, &[255; 4096])
            .expect("in bounds");
        depot.buffer().touch(0, 3 << 20).expect("enough memory");
        let mut kept = [0; 4096];
        depot
            .buffer()
            .read_into(4096, &mut kept)
            .expect("in bounds");
        assert_eq!(kept, [255; 4096]);
        assert_eq!(missing_bytes(depot.buffer()).expect("readable"), 0);
    }

    #[test]
    fn a_cancel_stops_between_chunks() {
        let depot = Depot::create(9 << 20).expect("memory");
        let cancel = AtomicBool::new(false);
        let stop = |done, _| {
            if done > 0 {
                cancel.store(true, Ordering::Relaxed);
            }
        };
        assert!(
            depot
                .prefault(&by(1, 2 << 20), &stop, &AtomicBool::new(false))
                .is_ok()
        );
        let found = depot.prefault(&by(2, 2 << 20), &|_, _| (), &cancel);
        assert!(matches!(
            found,
            Err(PrefaultError::Cancelled { done_bytes: 0, .. })
        ));
    }

    #[test]
    fn too_little_memory_is_refused_before_it_is_allocated() {
        let depot = Depot::create(1 << 45).expect("a promise");
        let found = depot.prefault(&by(1, 2 << 20), &|_, _| (), &AtomicBool::new(false));
        let Err(PrefaultError::MemoryShort {
            needed_bytes,
            available_bytes,
            ..
        }) = found
        else {
            panic!("{found:?}");
        };
        assert!(available_bytes < needed_bytes);
    }
}
