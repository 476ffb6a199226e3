//! Shared memory that other processes may write at any time.
#![expect(
    unsafe_code,
    reason = "raw copies in and out of memory that other processes share"
)]

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use memmap2::{Advice, MmapOptions, MmapRaw};
use rustix::fs::{FileType, FsWord, MemfdFlags, Mode, OFlags, SealFlags};

/// `f_type` of tmpfs and of a memfd, from `linux/magic.h`.
const TMPFS_MAGIC: FsWord = 0x0102_1994;
/// `f_type` of hugetlbfs, from `linux/magic.h`.
const HUGETLBFS_MAGIC: FsWord = 0x9584_58f6;
/// Smallest page of memory on the supported machines, in bytes.
const SYSTEM_PAGE_BYTES: usize = 4096;
const WORD_BYTES: u64 = 8;

/// A shared, writable mapping of a file in memory.
///
/// Another process may change the bytes at any time, so that no reference into them is ever formed. Concurrent copies
/// of the same range give undefined contents, but touch nothing outside of it: callers must ensure one writer per
/// range.
pub struct SharedBuffer {
    map: MmapRaw,
    fd: OwnedFd,
}

/// Why memory could not be mapped, or a range of it could not be used.
#[derive(Debug, thiserror::Error)]
pub enum BufferError {
    /// A system call failed.
    #[error("cannot {action}: {source}")]
    Io {
        /// The operation that failed, as in "cannot map the memory".
        action: &'static str,
        /// The error of the system call.
        source: io::Error,
    },
    /// A buffer of 0 bytes, or of more than fit into the address space.
    #[error("a buffer of {0} bytes cannot be mapped")]
    Size(u64),
    /// The file is shorter than described.
    #[error("the memory has {file_bytes} bytes, {bytes} were announced: announce its real size")]
    TooShort {
        /// Bytes of the file.
        file_bytes: u64,
        /// Bytes that the engine announced.
        bytes: u64,
    },
    /// A range that does not lie in the buffer.
    #[error("{len_bytes} bytes at {offset_bytes} do not lie in a buffer of {bytes} bytes")]
    OutOfRange {
        /// Start of the range.
        offset_bytes: u64,
        /// Length of the range.
        len_bytes: u64,
        /// Length of the buffer.
        bytes: u64,
    },
    /// A word that does not start at a multiple of its length.
    #[error("{0} is no multiple of 8 bytes")]
    Unaligned(u64),
    /// A relative path.
    #[error("'{0}' is not an absolute path")]
    NotAbsolute(PathBuf),
    /// A directory, device, socket or pipe.
    #[error("'{0}' is not a regular file")]
    NotRegular(PathBuf),
    /// A file of another user.
    #[error("'{path}' belongs to user {owner}, not to user {ours}: run both as the same user")]
    NotOurs {
        /// The file.
        path: PathBuf,
        /// User id of the file's owner.
        owner: u32,
        /// User id of this process.
        ours: u32,
    },
    /// A file on a disk.
    #[error("'{0}' is not in memory: put it on a tmpfs such as /dev/shm, or on hugetlbfs")]
    NotMemory(PathBuf),
    /// A descriptor of a file on a disk.
    #[error(
        "the descriptor is not of a file in memory: hand over a memfd, or a file on tmpfs or hugetlbfs"
    )]
    NotMemoryFd,
}

impl BufferError {
    fn io(action: &'static str) -> impl FnOnce(rustix::io::Errno) -> Self {
        move |errno| Self::Io {
            action,
            source: errno.into(),
        }
    }
}

/// Whether a file lies on tmpfs or hugetlbfs, as a memfd does.
fn is_memory(fd: &OwnedFd) -> Result<bool, BufferError> {
    let system = rustix::fs::fstatfs(fd).map_err(BufferError::io("look at the file system"))?;
    Ok(system.f_type == TMPFS_MAGIC || system.f_type == HUGETLBFS_MAGIC)
}

impl SharedBuffer {
    /// Creates zeroed memory of `bytes` bytes without a path; `name` shows in `/proc/PID/maps`.
    ///
    /// The memory is sealed against shrinking and growing, so that no holder of the descriptor can make this process
    /// fault.
    pub fn create(name: &str, bytes: u64) -> Result<Self, BufferError> {
        let name = CString::new(name).map_err(|error| BufferError::Io {
            action: "name the memory",
            source: error.into(),
        })?;
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create(name, flags).map_err(BufferError::io("create memory"))?;
        rustix::fs::ftruncate(&fd, bytes).map_err(BufferError::io("size the memory"))?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&fd, seals).map_err(BufferError::io("seal the memory"))?;
        Self::map(fd, bytes)
    }

    /// Maps the first `bytes` bytes of a file that another process handed over.
    ///
    /// A memfd without seals is accepted too: its owner can then shrink it, and this process dies of SIGBUS at its next
    /// access. Pass only descriptors of peers that may do that (an engine and its own worker).
    pub fn from_fd(fd: OwnedFd, bytes: u64) -> Result<Self, BufferError> {
        let stat = rustix::fs::fstat(&fd).map_err(BufferError::io("look at the memory"))?;
        let file_bytes = u64::try_from(stat.st_size).unwrap_or(0);
        if file_bytes < bytes {
            return Err(BufferError::TooShort { file_bytes, bytes });
        }
        match is_memory(&fd)? {
            true => Self::map(fd, bytes),
            false => Err(BufferError::NotMemoryFd),
        }
    }

    /// Opens and maps the first `bytes` bytes of a file in memory. The path must be absolute, its last part no symbolic
    /// link, and the file a regular one of this process's user on tmpfs or hugetlbfs.
    ///
    /// The owner of the file can shrink it, as with [`Self::from_fd`].
    pub fn open_path(path: &Path, bytes: u64) -> Result<Self, BufferError> {
        if !path.is_absolute() {
            return Err(BufferError::NotAbsolute(path.to_owned()));
        }
        // NONBLOCK keeps the open of a pipe from waiting for its other end; on a regular file it has no effect.
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let fd = rustix::fs::open(path, flags, Mode::empty())
            .map_err(BufferError::io("open the memory's path"))?;
        let stat = rustix::fs::fstat(&fd).map_err(BufferError::io("look at the memory"))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(BufferError::NotRegular(path.to_owned()));
        }
        let ours = rustix::process::getuid().as_raw();
        if stat.st_uid != ours {
            return Err(BufferError::NotOurs {
                path: path.to_owned(),
                owner: stat.st_uid,
                ours,
            });
        }
        if !is_memory(&fd)? {
            return Err(BufferError::NotMemory(path.to_owned()));
        }
        Self::from_fd(fd, bytes)
    }

    fn map(fd: OwnedFd, bytes: u64) -> Result<Self, BufferError> {
        let len = usize::try_from(bytes)
            .ok()
            .filter(|len| *len > 0 && isize::try_from(*len).is_ok())
            .ok_or(BufferError::Size(bytes))?;
        let map = MmapOptions::new().len(len).map_raw(&fd);
        let map = map.map_err(|source| BufferError::Io {
            action: "map the memory",
            source,
        })?;
        // KV of requests must not lie in core dumps, which nobody expects there.
        let left_out = map.advise(Advice::DontDump);
        left_out.map_err(|source| BufferError::Io {
            action: "leave the memory out of core dumps",
            source,
        })?;
        Ok(Self { map, fd })
    }

    /// Length in bytes, at least 1.
    #[expect(clippy::len_without_is_empty, reason = "a buffer is never empty")]
    pub fn len(&self) -> u64 {
        self.map.len() as u64
    }

    /// Address in this process as a number, for devices that copy by themselves, such as a GPU.
    pub fn address(&self) -> usize {
        self.map.as_mut_ptr().expose_provenance()
    }

    /// The descriptor of the memory.
    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Another descriptor of the same memory, to be passed to another process.
    pub fn try_clone_fd(&self) -> Result<OwnedFd, BufferError> {
        self.fd.try_clone().map_err(|source| BufferError::Io {
            action: "duplicate the memory's descriptor",
            source,
        })
    }

    /// Copies `out.len()` bytes, starting at `offset_bytes`, into `out`.
    pub fn read_into(&self, offset_bytes: u64, out: &mut [u8]) -> Result<(), BufferError> {
        let from = self.range(offset_bytes, out.len() as u64)?;
        // SAFETY: `range` checked that the bytes lie in the mapping, which lives as long as `self`; `out` is borrowed
        // exclusively and cannot overlap the mapping, because no reference into it is ever formed.
        unsafe { std::ptr::copy_nonoverlapping(from.cast_const(), out.as_mut_ptr(), out.len()) }
        Ok(())
    }

    /// Copies `bytes` into the buffer, starting at `offset_bytes`.
    pub fn write_from(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), BufferError> {
        let to = self.range(offset_bytes, bytes.len() as u64)?;
        // SAFETY: as in `read_into`, with the roles exchanged; the mapping is writable.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) }
        Ok(())
    }

    /// Writes the aligned word at `offset_bytes` with release order: after all earlier writes of this thread.
    pub fn store_word(&self, offset_bytes: u64, word: u64) -> Result<(), BufferError> {
        self.word(offset_bytes)?
            .store(word.to_le(), Ordering::Release);
        Ok(())
    }

    /// Reads the aligned word at `offset_bytes` with acquire order: before all later reads of this thread.
    pub fn load_word(&self, offset_bytes: u64) -> Result<u64, BufferError> {
        let word = self.word(offset_bytes)?.load(Ordering::Acquire);
        Ok(u64::from_le(word))
    }

    /// Changes the aligned word at `offset_bytes` from `from` to `to`. Returns `false`, without a change, if it has
    /// another value.
    pub fn exchange_word(
        &self,
        offset_bytes: u64,
        from: u64,
        to: u64,
    ) -> Result<bool, BufferError> {
        let word = self.word(offset_bytes)?;
        let changed = word.compare_exchange(
            from.to_le(),
            to.to_le(),
            Ordering::AcqRel,
            Ordering::Acquire,
        );
        Ok(changed.is_ok())
    }

    fn word(&self, offset_bytes: u64) -> Result<&AtomicU64, BufferError> {
        let at = self.range(offset_bytes, WORD_BYTES)?.cast::<u64>();
        if !at.is_aligned() {
            return Err(BufferError::Unaligned(offset_bytes));
        }
        // SAFETY: `range` checked that the word lies in the mapping, which lives as long as `self`, and the check above
        // that it is aligned. Other processes may change the word at any time, which an atomic allows.
        Ok(unsafe { AtomicU64::from_ptr(at) })
    }

    /// Start of a range, after a check that all of it lies in the mapping. The pointer is valid for reads and writes of
    /// `len_bytes` bytes as long as `self` lives.
    pub(super) fn range(&self, offset_bytes: u64, len_bytes: u64) -> Result<*mut u8, BufferError> {
        let bytes = self.len();
        match offset_bytes.checked_add(len_bytes) {
            // An offset within the mapping fits in usize, because the mapping's length does.
            Some(end) if end <= bytes => {
                Ok(self.map.as_mut_ptr().wrapping_add(offset_bytes as usize))
            }
            _ => Err(BufferError::OutOfRange {
                offset_bytes,
                len_bytes,
                bytes,
            }),
        }
    }

    /// Device and inode: equal for two buffers of the same memory.
    pub(super) fn file_id(&self) -> Result<(u64, u64), BufferError> {
        let stat = rustix::fs::fstat(&self.fd).map_err(BufferError::io("look at the memory"))?;
        Ok((stat.st_dev, stat.st_ino))
    }

    /// The descriptor, for calls that do not move its offset.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Keeps the whole mapping in memory: it is never swapped out.
    pub(super) fn lock(&self) -> io::Result<()> {
        self.map.lock()
    }

    /// Advises the use of huge pages. Returns true when the system accepted the advice, which does not mean that it
    /// follows it.
    pub(super) fn advise_huge_pages(&self) -> bool {
        self.map.advise(Advice::HugePage).is_ok()
    }

    /// Allocates and maps all pages of a range for writing and keeps their contents. Fails instead of raising SIGBUS
    /// where memory is short.
    pub(super) fn populate(&self, offset_bytes: u64, len_bytes: u64) -> Result<(), io::Error> {
        self.range(offset_bytes, len_bytes)
            .map_err(io::Error::other)?;
        self.map.advise_range(
            Advice::PopulateWrite,
            offset_bytes as usize,
            len_bytes as usize,
        )
    }

    /// Does what [`Self::populate`] does, on kernels before 5.14, which lack that advice: allocates first, which fails
    /// where memory is short, then touches each page without changing its contents.
    pub(super) fn touch(&self, offset_bytes: u64, len_bytes: u64) -> Result<(), io::Error> {
        let start = self
            .range(offset_bytes, len_bytes)
            .map_err(io::Error::other)?;
        let mode = rustix::fs::FallocateFlags::empty();
        rustix::fs::fallocate(&self.fd, mode, offset_bytes, len_bytes)?;
        for at in (0..len_bytes as usize).step_by(SYSTEM_PAGE_BYTES) {
            // SAFETY: `range` checked that the byte lies in the mapping, and a byte is always aligned. No copy of this
            // process runs at the same time: memory is prefaulted before the first copy.
            let byte = unsafe { AtomicU8::from_ptr(start.wrapping_add(at)) };
            byte.fetch_or(0, Ordering::Relaxed);
        }
        Ok(())
    }
}

impl std::fmt::Debug for SharedBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SharedBuffer({} B)", self.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_memory_cannot_change_its_size() {
        let buffer = SharedBuffer::create("kvferry-test", 8192).expect("memory");
        assert!(rustix::fs::ftruncate(buffer.fd(), 4096).is_err());
        assert!(rustix::fs::ftruncate(buffer.fd(), 1 << 20).is_err());
        let more = rustix::fs::fcntl_add_seals(buffer.fd(), SealFlags::WRITE);
        assert!(
            more.is_err(),
            "a seal on seals keeps others from making it read-only"
        );
        let flags = rustix::io::fcntl_getfd(buffer.fd()).expect("flags");
        assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
    }

    #[test]
    fn memory_is_left_out_of_core_dumps() {
        let _buffer = SharedBuffer::create("kvferry-no-dump", 8192).expect("memory");
        let maps = std::fs::read_to_string("/proc/self/smaps").expect("the maps");
        let mut of_buffer = maps
            .lines()
            .skip_while(|line| !line.contains("kvferry-no-dump"));
        let flags = of_buffer.find(|line| line.starts_with("VmFlags:"));
        let flags = flags.expect("flags of the mapping");
        assert!(flags.split_whitespace().any(|flag| flag == "dd"), "{flags}");
    }

    #[test]
    fn a_descriptor_of_a_file_on_a_disk_is_refused() {
        // A folder of the tree is on no tmpfs where the tests are built on a disk.
        let file = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).expect("a file");
        file.set_len(4096).expect("sized");
        let fd = OwnedFd::from(file);
        let on_disk = !is_memory(&fd).expect("a file system");
        let found = SharedBuffer::from_fd(fd, 4096);
        assert_eq!(matches!(found, Err(BufferError::NotMemoryFd)), on_disk);
    }

    #[test]
    fn two_mappings_see_the_same_bytes() {
        let buffer = SharedBuffer::create("kvferry-test", 100).expect("memory");
        let fd = buffer.try_clone_fd().expect("descriptor");
        let other = SharedBuffer::from_fd(fd, 100).expect("mapping");
        buffer.write_from(97, b"abc").expect("in bounds");
        let mut seen = [0; 4];
        other.read_into(96, &mut seen).expect("in bounds");
        assert_eq!(&seen, b"\0abc");
    }

    #[test]
    fn words_are_aligned_and_within() {
        let buffer = SharedBuffer::create("kvferry-test", 100).expect("memory");
        buffer.store_word(88, 0x0102).expect("in bounds");
        assert_eq!(buffer.load_word(88).expect("in bounds"), 0x0102);
        let mut low = [0; 1];
        buffer.read_into(88, &mut low).expect("in bounds");
        assert_eq!(low, [2]);
        let found = buffer.store_word(44, 1);
        assert!(matches!(found, Err(BufferError::Unaligned(44))));
        assert!(buffer.load_word(96).is_err());
    }

    #[test]
    fn ranges_outside_are_refused() {
        let buffer = SharedBuffer::create("kvferry-test", 100).expect("memory");
        for (offset, len) in [(100, 1), (0, 101), (u64::MAX, 2), (1 << 40, 0)] {
            let found = buffer.range(offset, len);
            assert!(
                matches!(found, Err(BufferError::OutOfRange { .. })),
                "{offset} {len}"
            );
        }
        assert!(buffer.range(100, 0).is_ok());
        assert!(buffer.write_from(98, b"abc").is_err());
        assert!(buffer.read_into(98, &mut [0; 3]).is_err());
    }

    #[test]
    fn sizes_that_cannot_be_mapped_are_refused() {
        assert!(matches!(
            SharedBuffer::create("kvferry-test", 0),
            Err(BufferError::Size(0))
        ));
        let fd = SharedBuffer::create("kvferry-test", 100)
            .expect("memory")
            .try_clone_fd();
        let found = SharedBuffer::from_fd(fd.expect("descriptor"), 101);
        assert!(matches!(
            found,
            Err(BufferError::TooShort {
                file_bytes: 100,
                bytes: 101
            })
        ));
    }

    #[test]
    fn paths_outside_memory_are_refused() {
        let shm = tempfile::tempdir_in("/dev/shm").expect("a tmpfs");
        let file = shm.path().join("kv");
        std::fs::write(&file, [7; 4096]).expect("written");
        let buffer = SharedBuffer::open_path(&file, 4096).expect("mapped");
        let mut seen = [0; 1];
        buffer.read_into(4095, &mut seen).expect("in bounds");
        assert_eq!(seen, [7]);

        let link = shm.path().join("link");
        std::os::unix::fs::symlink(&file, &link).expect("linked");
        assert!(matches!(
            SharedBuffer::open_path(&link, 1),
            Err(BufferError::Io { .. })
        ));
        assert!(SharedBuffer::open_path(shm.path(), 1).is_err());
        let relative = SharedBuffer::open_path(Path::new("kv"), 1);
        assert!(matches!(relative, Err(BufferError::NotAbsolute(_))));
        let null = SharedBuffer::open_path(Path::new("/dev/null"), 1);
        assert!(matches!(null, Err(BufferError::NotRegular(_))));
        let proc = SharedBuffer::open_path(Path::new("/proc/self/comm"), 1);
        assert!(matches!(proc, Err(BufferError::NotMemory(_))));
    }
}
