//! The system's allocator, which counts what each thread holds.

use std::alloc::{GlobalAlloc, Layout, System};

use kvferry_fuzzing::allocated::{note_allocated, note_freed};

pub(crate) struct CountingAllocator;

// SAFETY: every call is passed on to the system's allocator, and counting neither allocates nor unwinds.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note_allocated(layout.size());
        // SAFETY: the caller's layout is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        note_freed(layout.size());
        // SAFETY: the pointer was allocated by the system's allocator with this layout.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note_freed(layout.size());
        note_allocated(size);
        // SAFETY: the pointer was allocated by the system's allocator with this layout.
        unsafe { System.realloc(pointer, layout, size) }
    }
}
