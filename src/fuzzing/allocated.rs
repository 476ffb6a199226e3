//! Counts the memory that a piece of code holds at the same time.
//!
//! The counts are fed by the process's allocator (`tests/support/counting_allocator.rs`), and are those of one thread.

use std::cell::Cell;

thread_local! {
    static HELD: Cell<usize> = const { Cell::new(0) };
    static MOST: Cell<usize> = const { Cell::new(0) };
    static COUNTED: Cell<bool> = const { Cell::new(false) };
}

/// The allocator gave this many bytes to the current thread.
pub fn note_allocated(bytes: usize) {
    // A thread that ends allocates after its counts are gone.
    let _gone = HELD.try_with(|held| {
        held.set(held.get().wrapping_add(bytes));
        // Memory of other threads that was freed here makes the count negative.
        let held = held.get().cast_signed().max(0).cast_unsigned();
        let _gone = MOST.try_with(|most| most.set(most.get().max(held)));
    });
    let _gone = COUNTED.try_with(|counted| counted.set(true));
}

/// The current thread gave this many bytes back.
pub fn note_freed(bytes: usize) {
    let _gone = HELD.try_with(|held| held.set(held.get().wrapping_sub(bytes)));
}

/// Runs `code`. Also returns how many bytes it held beyond those before it, at the moment at which these were most.
pub fn most_held<T>(code: impl FnOnce() -> T) -> (T, usize) {
    HELD.set(0);
    MOST.set(0);
    let value = code();
    (value, MOST.get())
}

/// Whether the process's allocator feeds the counts. Without it, bounds on memory hold always.
pub fn is_counted() -> bool {
    COUNTED.get()
}
