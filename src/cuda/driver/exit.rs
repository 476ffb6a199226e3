//! Ends a process that has a thread in the driver.
#![expect(unsafe_code, reason = "a function of the C library")]

use std::ffi::c_int;

// SAFETY: according to its manual the function may be called at any time, by any thread.
unsafe extern "C" {
    safe fn _exit(status: c_int) -> !;
}

/// Ends this process at once, without its exit handlers: the driver's handler frees the driver's state while a thread
/// may still be in one of its functions, and would crash.
pub fn end_process(status: u8) -> ! {
    _exit(status.into())
}
