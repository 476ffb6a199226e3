//! Recorded calls, made by the test, replayed with real processes.

use std::path::Path;
use std::process::Output;

use serde_json::{Value, json};

use crate::support::kvferry;

const HEADER: u8 = 0;
const REQUEST: u8 = 3;
const ANSWER: u8 = 4;
const LEADER: u8 = 6;
const END: u8 = 7;

/// Writes a recording as docs/recording.md describes it.
struct Calls {
    bytes: Vec<u8>,
    number: u64,
    ids: u64,
}

impl Calls {
    fn new() -> Self {
        let group =
            json!({"attention": "full", "window_tokens": 0, "eagle": false, "page_tokens": 16});
        Self::of(json!([group]))
    }

    fn of(groups: Value) -> Self {
        let bytes = [&b"KVFCALLS"[..], &1_u32.to_be_bytes()].concat();
        let mut calls = Self {
            bytes,
            number: 0,
            ids: 100,
        };
        let header = json!([{"ranks": 2, "hash_tokens": 16, "hit_tokens": 16, "groups": groups, "vllm": "test"}]);
        calls.add(HEADER, &header);
        calls.add(LEADER, &json!([5, "0.1.0", 4, 2, 1, [[2, 64, 0]]]));
        calls
    }

    fn add(&mut self, kind: u8, fields: &Value) {
        let mut body = Vec::new();
        pack(fields, &mut body);
        let length = u32::try_from(body.len()).expect("short").to_be_bytes();
        let number = self.number.to_be_bytes();
        let checked = [&length[..], &number, &number, &[kind], &body].concat();
        self.bytes.extend(length);
        self.bytes.extend(crc32(&checked).to_be_bytes());
        self.bytes.extend(&checked[4..]);
        self.number += 1;
    }

    fn request(&mut self, kind: u8, message: Value, hashes: Value) -> u64 {
        self.ids += 3;
        self.add(REQUEST, &json!([self.ids, kind, 500, message, hashes]));
        self.ids
    }

    fn lookup(&mut self, slot: u64, hashes: Value) -> u64 {
        let message =
            json!({"slot": slot, "namespace": "bytes:", "hash_bytes": 16, "hashes": "bytes:"});
        self.request(16, message, hashes)
    }

    fn store(&mut self, slot: u64, pages: u32, first: u32) -> u64 {
        let parts = json!([{"first_page": 0, "pages": [[first, pages]], "count": pages}]);
        self.request(20, json!({"slot": slot, "parts": parts}), json!([]))
    }

    fn load(&mut self, slot: u64, pages: u32, first: u32) -> u64 {
        let parts = json!([{"first_page": 0, "pages": [[first, pages]], "count": pages}]);
        self.request(
            18,
            json!({"slot": slot, "parts": parts, "after": 5}),
            json!([]),
        )
    }

    fn answer(&mut self, id: u64, answer: Value) {
        self.add(ANSWER, &json!([id, answer]));
    }

    fn found(&mut self, id: u64, hit_pages: u32, pending: bool) {
        self.answer(id, json!({"hit_pages": hit_pages, "pending": pending}));
    }

    fn stored(&mut self, id: u64, stored: u32, present: u32, failed: u32) {
        let answer =
            json!({"stored_pages": stored, "present_pages": present, "failed_pages": failed});
        self.answer(id, answer);
    }

    fn finish(&mut self, slot: u64) {
        let id = self.request(22, json!({"slot": slot}), json!([]));
        self.answer(id, json!({}));
    }

    /// Writes the file, and replays it.
    fn replay(mut self, folder: &Path) -> Output {
        self.add(END, &json!([0, ""]));
        let path = folder.join("calls");
        std::fs::write(&path, &self.bytes).expect("written");
        kvferry(&["replay", "--calls", path.to_str().expect("UTF-8")])
    }
}

/// The new hashes of `count` pages.
fn fresh(count: u8, seed: u8) -> Value {
    let digits: Vec<String> = (0..count)
        .map(|page| format!("{seed:02x}{page:02x}").repeat(8))
        .collect();
    json!([format!("bytes:{}", digits.concat())])
}

/// MessagePack. A text that begins with `bytes:` stands for bytes, in hexadecimal.
fn pack(value: &Value, out: &mut Vec<u8>) {
    let length = |count: usize| u32::try_from(count).expect("short").to_be_bytes();
    match value {
        Value::Null => out.push(0xc0),
        Value::Bool(is) => out.push(0xc2 + u8::from(*is)),
        Value::Number(number) => {
            out.push(0xcf);
            out.extend(number.as_u64().expect("a whole number").to_be_bytes());
        }
        Value::String(text) => match text.strip_prefix("bytes:") {
            Some(digits) => {
                out.push(0xc6);
                out.extend(length(digits.len() / 2));
                let byte = |at| u8::from_str_radix(&digits[at..at + 2], 16).expect("hexadecimal");
                out.extend((0..digits.len()).step_by(2).map(byte));
            }
            None => {
                out.push(0xdb);
                out.extend(length(text.len()));
                out.extend(text.as_bytes());
            }
        },
        Value::Array(items) => {
            out.push(0xdd);
            out.extend(length(items.len()));
            items.iter().for_each(|item| pack(item, out));
        }
        Value::Object(fields) => {
            out.push(0xdf);
            out.extend(length(fields.len()));
            for (name, field) in fields {
                pack(&json!(name), out);
                pack(field, out);
            }
        }
    }
}

fn crc32(bytes: &[u8]) -> u32 {
    let shifted = |crc: u32| match crc & 1 {
        1 => (crc >> 1) ^ 0xedb8_8320,
        _ => crc >> 1,
    };
    let byte = |crc: u32, byte: &u8| (0..8).fold(crc ^ u32::from(*byte), |crc, _| shifted(crc));
    !bytes.iter().fold(u32::MAX, byte)
}

/// The value of a row of the report.
fn row(output: &Output, name: &str) -> String {
    let text = String::from_utf8_lossy(&output.stdout);
    let line = text.lines().find(|line| line.starts_with(name));
    let line =
        line.unwrap_or_else(|| panic!("{name}: {text}{}", String::from_utf8_lossy(&output.stderr)));
    line[17..].to_owned()
}

fn all_equal(output: &Output, compared: u64) {
    let errors = String::from_utf8_lossy(&output.stderr);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{errors}");
    assert_eq!(row(output, "compared"), compared.to_string());
    assert_eq!(row(output, "equal"), compared.to_string());
    assert_eq!(row(output, "let go early"), "0");
}

#[test]
fn recorded_calls_are_replayed_and_a_wrong_answer_is_named() {
    let folder = tempfile::tempdir().expect("a folder");
    for hit_pages in [4, 3] {
        let mut calls = Calls::new();
        let lookup = calls.lookup(1, fresh(4, 1));
        calls.found(lookup, 0, false);
        let store = calls.store(1, 4, 10);
        calls.stored(store, 4, 0, 0);
        calls.finish(1);
        let lookup = calls.lookup(2, json!([[0, 4]]));
        calls.found(lookup, hit_pages, false);
        let load = calls.load(2, 4, 20);
        calls.answer(load, json!({"pages": 4}));
        let store = calls.store(2, 4, 20);
        calls.stored(store, 0, 4, 0);
        calls.finish(2);
        let reset = calls.request(
            24,
            json!({"which": "namespace", "namespace": "bytes:"}),
            json!([]),
        );
        calls.answer(reset, json!({"pages": 4}));
        let lookup = calls.lookup(3, json!([[0, 4]]));
        calls.found(lookup, 0, false);
        let output = calls.replay(folder.path());
        if hit_pages == 4 {
            all_equal(&output, 9);
            // Four pages of 1 KiB on both ranks.
            assert_eq!(row(&output, "bytes verified"), "8192");
            assert_eq!(row(&output, "bytes wrong"), "0");
            assert_eq!(
                row(&output, "replayed with"),
                "64 pages of host memory, ratio 4"
            );
        } else {
            assert_eq!(output.status.code(), Some(1));
            assert_eq!(row(&output, "different"), "1");
            let errors = String::from_utf8_lossy(&output.stderr);
            let text = "1 of 9 answers differ, the first: frame 9, lookup 112: hit_pages: 3 recorded, 4 replayed";
            assert!(errors.contains(text), "{errors}");
        }
    }
}

/// The replay is much faster than the recorded engine, and its leader must decide in the same order nevertheless.
#[test]
fn a_lookup_finds_what_was_stored_before_its_answer_and_nothing_else() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut calls = Calls::new();
    for (slot, seed, hit_pages, pending) in [(1, 1, 0, true), (3, 2, 4, false)] {
        let lookup = calls.lookup(slot, fresh(4, seed));
        calls.found(lookup, 0, false);
        let store = calls.store(slot, 4, 10);
        let first = json!([[4 * (u32::from(seed) - 1), 4]]);
        let lookup = calls.lookup(slot + 1, first);
        if pending {
            // Decided while the store ran.
            calls.found(lookup, hit_pages, pending);
            calls.stored(store, 4, 0, 0);
        } else {
            // Sent while the store ran, and decided after it.
            calls.stored(store, 4, 0, 0);
            calls.found(lookup, hit_pages, pending);
        }
        calls.finish(slot);
        calls.finish(slot + 1);
    }
    all_equal(&calls.replay(folder.path()), 10);
}

#[test]
fn an_engine_with_several_groups_is_replayed() {
    let folder = tempfile::tempdir().expect("a folder");
    let group = |attention: &str, window: u32| json!({"attention": attention, "window_tokens": window, "eagle": false, "page_tokens": 16});
    let mut calls = Calls::of(json!([group("full", 0), group("sliding_window", 32)]));
    let parts = |first: u32| {
        json!([
            {"first_page": 0, "pages": [[first, 4]], "count": 4},
            {"first_page": 2, "pages": [[first + 4, 2]], "count": 2, "group": 1},
        ])
    };
    let lookup = calls.lookup(1, fresh(4, 1));
    calls.found(lookup, 0, false);
    let store = calls.request(20, json!({"slot": 1, "parts": parts(1)}), json!([]));
    calls.stored(store, 6, 0, 0);
    let lookup = calls.lookup(2, json!([[0, 4]]));
    calls.found(lookup, 4, false);
    let load = calls.request(18, json!({"slot": 2, "parts": parts(11)}), json!([]));
    calls.answer(load, json!({"pages": 6}));
    let output = calls.replay(folder.path());
    all_equal(&output, 4);
    // Six pages of 1 KiB on both ranks.
    assert_eq!(row(&output, "bytes verified"), "12288");
    assert_eq!(row(&output, "bytes wrong"), "0");
}

#[test]
fn a_cancelled_store_is_cancelled_again() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut calls = Calls::new();
    let lookup = calls.lookup(1, fresh(8, 1));
    calls.found(lookup, 0, false);
    let before = calls.store(1, 4, 10);
    calls.stored(before, 4, 0, 0);
    let store = calls.store(1, 8, 10);
    let cancel = calls.request(26, json!({}), json!([]));
    calls.stored(store, 0, 4, 4);
    calls.answer(cancel, json!({"stores": 1}));
    let lookup = calls.lookup(2, json!([[0, 8]]));
    calls.found(lookup, 4, false);
    all_equal(&calls.replay(folder.path()), 5);
}

#[test]
fn a_store_that_the_leader_did_not_serve_is_not_carried_out() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut calls = Calls::new();
    let lookup = calls.lookup(1, fresh(8, 1));
    calls.found(lookup, 0, false);
    let store = calls.store(1, 8, 10);
    calls.add(5, &json!([store, 5, "not ready", true, true, true]));
    let lookup = calls.lookup(2, json!([[0, 8]]));
    calls.found(lookup, 0, false);
    let output = calls.replay(folder.path());
    all_equal(&output, 2);
    assert_eq!(row(&output, "not served"), "1");
    assert_eq!(row(&output, "result"), "all 2 answers are equal");
}

#[test]
fn answers_that_follow_a_store_that_cannot_be_compared_are_no_differences() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut calls = Calls::new();
    let lookup = calls.lookup(1, fresh(8, 1));
    calls.found(lookup, 0, false);
    let store = calls.store(1, 8, 10);
    // The copy failed there, and succeeds here.
    calls.add(5, &json!([store, 9, "a copy failed", true, true, true]));
    let lookup = calls.lookup(2, json!([[0, 8]]));
    calls.found(lookup, 0, false);
    let output = calls.replay(folder.path());
    assert!(output.status.success(), "{output:?}");
    assert_eq!(row(&output, "different"), "0");
    assert_eq!(row(&output, "not comparable"), "2");
    let text = "1 of 3 answers are equal, 2 cannot be compared";
    assert_eq!(row(&output, "result"), text);
    let text = String::from_utf8_lossy(&output.stdout);
    let reason = "1 follow a copy or reset that could not be compared";
    assert!(text.contains(reason), "{text}");
}

#[test]
fn answers_of_a_leader_with_other_engines_depend_on_them() {
    let folder = tempfile::tempdir().expect("a folder");
    let replayed = |replicas: u16| {
        let mut calls = Calls::new();
        calls.add(6, &json!([5, "0", 4, 2, replicas, [[2, 64, 0]]]));
        let lookup = calls.lookup(1, fresh(8, 1));
        calls.found(lookup, 0, false);
        let lookup = calls.lookup(2, json!([[0, 8]]));
        calls.found(lookup, 8, false);
        calls.replay(folder.path())
    };
    assert_eq!(row(&replayed(1), "different"), "1");
    let output = replayed(2);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(row(&output, "different"), "0");
    let reason = "1 depend on other engines of the leader, which are not in the recording";
    assert_eq!(row(&output, "of these"), reason);
}

#[test]
fn a_disk_explains_a_hit_only_once_host_memory_may_have_been_full() {
    let folder = tempfile::tempdir().expect("a folder");
    let replayed = |host_pages: u32| {
        let mut calls = Calls::new();
        calls.add(
            6,
            &json!([5, "0", 4, 2, 1, [[2, host_pages, 0], [3, 512, 0]]]),
        );
        let lookup = calls.lookup(1, fresh(8, 1));
        calls.found(lookup, 0, false);
        let store = calls.store(1, 8, 10);
        calls.stored(store, 8, 0, 0);
        let lookup = calls.lookup(2, json!([[0, 8]]));
        calls.found(lookup, 7, false);
        calls.replay(folder.path())
    };
    let output = replayed(64);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert_eq!(row(&output, "different"), "1");
    let output = replayed(12);
    assert!(output.status.success(), "{output:?}");
    let reason = "1 depend on the disk, which pages reach in their own time";
    assert_eq!(row(&output, "of these"), reason);
}

#[test]
fn a_file_that_is_no_recording_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("trace.jsonl");
    std::fs::write(&path, "{\"timestamp\": 1, \"hash_ids\": []}\n").expect("written");
    let name = path.to_str().expect("UTF-8");
    let output = kvferry(&["replay", "--calls", name]);
    assert_eq!(output.status.code(), Some(65));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(errors.contains("does not begin with KVFCALLS"), "{errors}");
    let output = kvferry(&["replay", "--calls", name, "--ranks", "2"]);
    assert_eq!(output.status.code(), Some(2));
    for (flag, value) in [("--ratio", "4"), ("--g2-policy", "pieces=2")] {
        let beside = ["--socket-dir", "/nowhere", flag, value];
        let output = kvferry(&[&["replay", "--calls", name], &beside[..]].concat());
        assert_eq!(output.status.code(), Some(78), "{output:?}");
        let text = String::from_utf8_lossy(&output.stderr);
        let refusal = format!("{flag} has no effect with --socket-dir /nowhere");
        assert!(text.contains(&refusal), "{text}");
    }
    let output = kvferry(&["replay", "--calls", name, "--cost-gate"]);
    assert_eq!(output.status.code(), Some(2));
}
