//! A CUDA driver for tests, on machines without a GPU: `libcuda.so.1` with the functions that kvferry calls.
//!
//! It is loaded in place of the real one, by a folder in `LD_LIBRARY_PATH`, and knows nothing of kvferry. What it does is
//! what the driver API documents, and where that leaves room, it does the inconvenient thing:
//!
//! * device memory lies in memory files; the addresses that callers get cannot be read or written by the CPU;
//! * each stream is a thread that does its work late, after random pauses, so that what is not waited for is not there;
//! * every range is looked up when it is used, not when the work is given: memory that was freed, closed or unregistered
//!   too early is an error, as is memory that its owner freed (a stale mapping of another process);
//! * what describes many copies of one call is read again when they run, and they run in any order;
//! * a copy must not cross the end of a registered host range;
//! * calls without a current context, in one that was given back, or before `cuInit`, fail; a context takes with it what was
//!   made in it;
//! * `cuMemAlloc` gives a part of a block of 2 MiB, and another process opens all of that block; chunks are multiples of 2 MiB;
//! * calls that a graph's capture must not see end it, unless their thread has said otherwise;
//! * any call can be made to fail at its n-th time, and errors that poison a context do so.
//!
//! [`SETTINGS`] names the variable of the environment that steers it.

mod batch;
mod code;
mod exports;
mod memory;
mod settings;
mod stream;
mod vmm;
mod world;

pub use settings::SETTINGS;
