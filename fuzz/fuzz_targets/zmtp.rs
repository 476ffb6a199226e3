#![no_main]

#[path = "../../tests/support/counting_allocator.rs"]
mod counting_allocator;

#[global_allocator]
static ALLOCATOR: counting_allocator::CountingAllocator = counting_allocator::CountingAllocator;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| kvferry_fuzzing::zmtp(bytes));
