//! The end of a process that has a thread in the driver.
#![expect(unsafe_code, reason = "a function of the C library")]

use std::ffi::c_int;

// SAFETY: by its manual it may be called at any time, by any thread.
unsafe extern "C" {
    safe fn _exit(status: c_int) -> !;
}

/// Ends this process as it is, without what it has registered for its end: the driver takes itself apart there, under any
/// thread that is still in one of its functions, and would crash.
pub fn end_process(status: u8) -> ! {
    _exit(status.into())
}
