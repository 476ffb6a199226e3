//! A CUDA driver for tests on machines without a GPU: `libcuda.so.1` with the functions that kvferry calls.
//!
//! The library is loaded in place of the real driver, from a folder in `LD_LIBRARY_PATH`, and does not depend on
//! kvferry. Its behaviour follows the documentation of the driver API, and is the least convenient one where the
//! documentation leaves room:
//!
//! * device memory is in memory files; the CPU cannot read or write the addresses that callers get;
//! * each stream is a thread that runs its work late, after random pauses, so that a result for which a caller does not
//!   wait is missing;
//! * every range is looked up when it is used, not when the work is given: memory that was freed, closed or
//!   unregistered too early is an error, as is memory that its owner freed (a stale mapping of another process);
//! * the descriptions of many copies with one call are read again when the copies run, in any order;
//! * a copy must not cross the end of a registered host range;
//! * calls fail without a current context, in a context that was released, or before `cuInit`; the end of a context
//!   frees everything that was created in it;
//! * `cuMemAlloc` returns a part of a block of 2 MiB, and another process opens the whole block; chunks are multiples
//!   of 2 MiB;
//! * calls that are unsafe during a graph's capture invalidate the capture, unless their thread has another capture
//!   mode;
//! * any call can be made to fail at its n-th time, and errors that poison a context do so.
//!
//! The environment variable [`SETTINGS`] configures the driver.

mod code;
mod exports;
mod memory;
mod settings;
mod vmm;
mod world;

pub use settings::SETTINGS;
