//! Replays the corpus of the fuzzers: seeds, and inputs that once violated a property.

#![expect(clippy::expect_used, reason = "a test says what it expects")]
#![expect(unsafe_code, reason = "an allocator that counts")]

#[path = "support/counting_allocator.rs"]
mod counting_allocator;

use std::fs;
use std::path::PathBuf;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use counting_allocator::CountingAllocator;
use kvferry_fuzzing::{TARGETS, allocated, run};
use kvferry_protocol::MessageKind;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Bytes of the corpus, at most.
const CORPUS_BYTES_MAX: u64 = 300 << 10;
/// No input of a message's size takes longer, also on a busy machine.
const INPUT_TIME: Duration = Duration::from_secs(10);

fn corpus() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus")
}

/// The inputs of a target, ordered by name.
fn inputs(target: &str) -> Vec<(String, Vec<u8>)> {
    let folder = corpus().join(target);
    let entries = fs::read_dir(&folder).expect("a folder for each target");
    let mut inputs: Vec<(String, Vec<u8>)> = entries
        .map(|entry| {
            let path = entry.expect("an entry").path();
            let name = path.file_name().expect("a name").to_string_lossy();
            (name.into_owned(), fs::read(&path).expect("a file"))
        })
        .collect();
    inputs.sort();
    inputs
}

/// Runs an input in a thread of its own, so that one that never ends is reported.
fn replay(target: &'static str, bytes: Vec<u8>) -> Result<(), &'static str> {
    let (ended, end) = mpsc::channel();
    let running = thread::spawn(move || {
        run(target, &bytes);
        ended.send(()).is_ok()
    });
    match end.recv_timeout(INPUT_TIME) {
        Err(RecvTimeoutError::Timeout) => Err("it does not end"),
        Ok(()) | Err(RecvTimeoutError::Disconnected) => match running.join() {
            Ok(_) => Ok(()),
            Err(_) => Err("its property is violated"),
        },
    }
}

#[test]
fn every_input_of_the_corpus_keeps_its_property() {
    let mut failed = Vec::new();
    for (target, _) in TARGETS {
        let inputs = inputs(target);
        assert!(!inputs.is_empty(), "{target} has no inputs");
        for (name, bytes) in inputs {
            if let Err(why) = replay(target, bytes) {
                failed.push(format!("fuzz/corpus/{target}/{name}: {why}"));
            }
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

#[test]
fn the_corpus_is_small_and_belongs_to_targets() {
    let mut total = 0;
    for entry in fs::read_dir(corpus()).expect("the corpus") {
        let folder = entry.expect("an entry").path();
        let name = folder.file_name().expect("a name").to_string_lossy();
        let known = TARGETS.iter().any(|(target, _)| *target == name);
        assert!(known, "fuzz/corpus/{name} belongs to no target");
        for (_, bytes) in inputs(&name) {
            total += bytes.len() as u64;
        }
    }
    assert!(total <= CORPUS_BYTES_MAX, "{total} bytes");
}

/// The shortest pairs of pages take three bytes each, and 48 in memory: more than any other item.
#[test]
fn a_transfer_of_many_short_pairs_takes_memory_in_proportion() {
    let version = 1;
    let kind = MessageKind::ALL
        .iter()
        .position(|kind| *kind == MessageKind::Transfer);
    let kind = u8::try_from(kind.expect("a kind")).expect("small");
    // Just beyond a power of two, where a list that doubles is half empty.
    for pairs in [1_100_u16, 17_000, 33_000] {
        let mut body = vec![version, kind, 0x82];
        body.extend(b"\xa5after\x01\xa9transfers\x91\x82\xa2id\x01\xa5pairs\xdc");
        body.extend(pairs.to_be_bytes());
        body.extend([0x92, 1, 2].repeat(pairs.into()));
        run("body", &body);
    }
}

#[test]
fn the_allocator_counts() {
    let (value, held) = allocated::most_held(|| {
        drop(vec![1_u8; 1000]);
        vec![1_u8; 500]
    });
    assert!(allocated::is_counted());
    assert!((1000..1500).contains(&held), "{held}");
    drop(value);
}
