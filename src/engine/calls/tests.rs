//! Recordings that are made byte by byte.

use flate2::Crc;
use serde::Serialize;
use serde_bytes::Bytes;
use serde_json::json;

use super::file::{CallsError, EndReason, Ending, Frames};
use super::frames::{HashWindow, Requested};
use super::plan::{Known, Plan};
use kvferry_types::Request;

const HEADER: u8 = 0;
const CALL: u8 = 1;
const REQUEST: u8 = 3;
const ANSWER: u8 = 4;
const FAILURE: u8 = 5;
const LEADER: u8 = 6;
const END: u8 = 7;

const LOOKUP: u16 = 16;
const STORE: u16 = 20;
const FINISH: u16 = 22;
const CANCEL_STORES: u16 = 26;

/// Writes a recording.
struct File {
    bytes: Vec<u8>,
    number: u64,
}

impl File {
    fn new() -> Self {
        let bytes = [&b"KVFCALLS"[..], &1_u32.to_be_bytes()].concat();
        let mut file = Self { bytes, number: 0 };
        let group = json!({"attention": "full", "window_tokens": 0, "eagle": false, "page_tokens": 16, "table": 0});
        let header = json!({"ranks": 1, "hash_tokens": 16, "hit_tokens": 16, "groups": [group], "vllm": "0.32"});
        file.add(HEADER, &(header,));
        file
    }

    fn add(&mut self, kind: u8, fields: &impl Serialize) -> &mut Self {
        let body = rmp_serde::to_vec_named(fields).expect("fields");
        let number = self.number;
        self.add_as(number, kind, &body)
    }

    fn add_as(&mut self, number: u64, kind: u8, body: &[u8]) -> &mut Self {
        let length = (body.len() as u32).to_be_bytes();
        let rest = [&number.to_be_bytes()[..], &number.to_be_bytes(), &[kind]].concat();
        let mut checksum = Crc::new();
        checksum.update(&length);
        checksum.update(&rest);
        checksum.update(body);
        self.bytes.extend(length);
        self.bytes.extend(checksum.sum().to_be_bytes());
        self.bytes.extend(rest);
        self.bytes.extend(body);
        self.number += 1;
        self
    }

    fn request(&mut self, id: u64, kind: u16, message: &serde_json::Value) -> &mut Self {
        self.add(REQUEST, &(id, kind, 500, message, [(); 0]))
    }

    fn lookup(&mut self, id: u64, hashes: &impl Serialize) -> &mut Self {
        #[derive(Serialize)]
        struct Lookup<'a> {
            slot: u64,
            namespace: &'a Bytes,
            hash_bytes: u8,
            hashes: &'a Bytes,
        }
        let message = Lookup {
            slot: id,
            namespace: Bytes::new(b"n"),
            hash_bytes: 16,
            hashes: Bytes::new(b""),
        };
        self.add(REQUEST, &(id, LOOKUP, 500, message, hashes))
    }

    fn end(&mut self, reason: u8) -> &mut Self {
        self.add(END, &(reason, "why"))
    }
}

fn small() -> File {
    let mut file = File::new();
    file.add(CALL, &("hook", json!({"request": "a"}), 0, [(); 0]))
        .request(1, FINISH, &json!({"slot": 7}))
        .add(ANSWER, &(1, json!({})))
        .end(0);
    file
}

fn pages(numbers: std::ops::Range<u8>) -> Vec<u8> {
    numbers.flat_map(|number| [number; 16]).collect()
}

#[test]
fn a_recording_is_read_to_its_end_mark() {
    let plan = Plan::read(&small().bytes[..]).expect("a recording");
    assert_eq!((plan.frames, plan.calls, plan.ends.len()), (4, 1, 1));
    assert_eq!(plan.ends[0].known, Known::Answered);
    assert_eq!(plan.ends[0].frame, 3);
    let why = "why".to_owned();
    assert_eq!(plan.ending, Ending::Marked(EndReason::Closed, why));
}

#[test]
fn a_file_that_was_cut_is_read_up_to_there() {
    let bytes = small().bytes;
    for length in 0..bytes.len() {
        let read = Plan::read(&bytes[..length]);
        if length < 12 {
            assert!(matches!(read, Err(CallsError::Foreign)), "{length}");
            continue;
        }
        match read {
            Ok(plan) => assert!(
                matches!(plan.ending, Ending::Cut(_) | Ending::Unmarked),
                "{length}: {:?}",
                plan.ending
            ),
            Err(error) => assert!(matches!(error, CallsError::Empty), "{length}: {error}"),
        }
    }
}

#[test]
fn hashes_of_a_call_take_no_more_memory_than_those_of_a_request() {
    for width in [0_usize, 15, 65, 1 << 20] {
        let mut file = File::new();
        let wide = vec![7; width.max(1)];
        file.add(
            CALL,
            &(
                "hook",
                json!({}),
                width,
                (Bytes::new(&wide), (0_u64, 1_u64)),
            ),
        );
        let error = Plan::read(&file.bytes[..])
            .expect_err("a width")
            .to_string();
        let text = format!("page hashes of {width} bytes: they have 16 to 64");
        assert!(error.contains(&text), "{error}");
    }
}

#[test]
fn used_pages_of_a_hostile_leader_are_counted_without_overflow() {
    let mut file = File::new();
    let tiers = [(2_u8, 8_u64, u64::MAX), (3, 8, 1)];
    file.add(LEADER, &(1_u64, "0.1", 4_u32, 1_u32, 1_u32, tiers));
    let plan = Plan::read(&file.bytes[..]).expect("a recording");
    assert_eq!(plan.used_pages, u64::MAX);
}

#[test]
fn every_changed_byte_is_noticed() {
    let bytes = small().bytes;
    for at in 0..bytes.len() {
        for bit in [0, 7] {
            let mut changed = bytes.clone();
            changed[at] ^= 1 << bit;
            match Plan::read(&changed[..]) {
                Err(CallsError::Foreign) => assert!(at < 8),
                Err(CallsError::Version(_)) => assert!((8..12).contains(&at)),
                Err(CallsError::Damaged { .. }) => assert!(at >= 12),
                // A length that is too large reaches beyond the end of the file.
                Ok(plan) => assert!(matches!(plan.ending, Ending::Cut(_)), "byte {at}"),
                Err(CallsError::Empty) => assert!((12..16).contains(&at), "byte {at}"),
                Err(error) => panic!("byte {at}: {error}"),
            }
        }
    }
}

#[test]
fn a_gap_is_damage_and_names_its_frame() {
    let mut file = File::new();
    file.add_as(2, CALL, b"");
    let error = Plan::read(&file.bytes[..]).expect_err("a gap").to_string();
    assert!(error.starts_with("frame 1, at byte "), "{error}");
    assert!(error.ends_with("its number is 2: frames are missing, or out of order"));
}

#[test]
fn other_files_and_versions_are_refused() {
    let foreign = Plan::read(&b"{\"timestamp\": 1}"[..]).expect_err("foreign");
    assert!(foreign.to_string().contains("does not begin with KVFCALLS"));
    let mut newer = small().bytes;
    newer[11] = 2;
    let error = Plan::read(&newer[..]).expect_err("newer").to_string();
    assert!(
        error.contains("version 2 of the format, this program reads 1"),
        "{error}"
    );
    assert!(matches!(
        Plan::read(&small().bytes[..12]),
        Err(CallsError::Empty)
    ));
}

#[test]
fn nothing_may_follow_the_end_mark() {
    let mut bytes = small().bytes;
    bytes.push(0);
    let error = Plan::read(&bytes[..]).expect_err("more").to_string();
    assert!(error.contains("bytes follow the end mark"), "{error}");
}

#[test]
fn a_frame_that_is_too_long_is_refused_before_it_is_read() {
    let mut bytes = File::new().bytes;
    bytes.extend(u32::MAX.to_be_bytes());
    bytes.extend([0; 21]);
    let error = Plan::read(&bytes[..]).expect_err("too long").to_string();
    assert!(
        error.contains("4294967295 bytes, a frame has at most 16777216"),
        "{error}"
    );
}

/// The hashes of the lookups of a file.
fn lookups(file: &File) -> Result<Vec<Vec<u8>>, CallsError> {
    let mut frames = Frames::new(&file.bytes[..])?;
    let mut window = HashWindow::default();
    let mut found = Vec::new();
    while let Some(frame) = frames.next()? {
        if frame.number == 0 {
            continue;
        }
        let Requested { request, .. } = window.request(&frame)?;
        if let Request::Lookup { hashes, .. } = request {
            found.push(hashes.into_bytes());
        }
    }
    Ok(found)
}

#[test]
fn hashes_are_read_from_runs_of_known_ones_and_new_ones() {
    let mut file = File::new();
    file.lookup(1, &[Bytes::new(&pages(0..4))]);
    file.lookup(2, &((0, 2), Bytes::new(&pages(9..10)), (3, 1)));
    file.lookup(3, &[(4, 1)]);
    let expected = [
        pages(0..4),
        [pages(0..2), pages(9..10), pages(3..4)].concat(),
        pages(9..10),
    ];
    assert_eq!(lookups(&file).expect("lookups"), expected);
    for unknown in [
        (5_u64, 1_u64),
        (4, 2),
        (u64::MAX, 1),
        (0, u64::MAX),
        (0, 200_000),
    ] {
        let mut file = File::new();
        file.lookup(1, &[Bytes::new(&pages(0..5))])
            .lookup(2, &[unknown]);
        let error = lookups(&file).expect_err("unknown").to_string();
        let named =
            error.contains("are not known") || error.contains("more than 131072 page hashes");
        assert!(named && error.contains("frame 2"), "{unknown:?}: {error}");
    }
}

#[test]
fn the_end_of_each_request_is_known_beforehand() {
    let store = json!({"slot": 1, "parts": [{"first_page": 0, "pages": [[4, 3]], "count": 3}]});
    let done = |failed| json!({"stored_pages": 0, "present_pages": 0, "refused_pages": 0, "failed_pages": failed});
    let mut file = File::new();
    for id in 1..=6 {
        file.request(id, STORE, &store);
    }
    file.add(FAILURE, &(1, 9, "a copy failed", true, false, true))
        .request(7, CANCEL_STORES, &json!({}))
        .add(ANSWER, &(2, done(3)))
        .add(ANSWER, &(3, done(0)))
        .add(FAILURE, &(4, 12, "stopped", true, true, true))
        .add(ANSWER, &(7, json!({"stores": 3})))
        .add(FAILURE, &(5, 12, "late", false, true, false))
        .add(FAILURE, &(6, 11, "too many", false, true, true))
        .request(8, FINISH, &json!({"slot": 1}));
    let plan = Plan::read(&file.bytes[..]).expect("a recording");
    let known: Vec<Known> = plan.ends.iter().map(|end| end.known).collect();
    let expected = [
        Known::Refused,
        Known::Cancelled,
        Known::Answered,
        Known::Cancelled,
        Known::Late,
        Known::Unsent,
        Known::Answered,
        Known::Nothing,
    ];
    assert_eq!(known, expected);
    assert_eq!(plan.device_pages, 7);
    assert_eq!(plan.ending, Ending::Unmarked);
}

#[test]
fn fields_neither_nest_deeply_nor_are_followed_by_others() {
    let mut deep = File::new();
    let body = [&[0x94, 0xa1, b'h'][..], &[0x91; 100], &[0xc0, 0x00, 0x90]].concat();
    deep.add_as(1, CALL, &body);
    let error = Plan::read(&deep.bytes[..]).expect_err("deep").to_string();
    assert!(
        error.contains("frame 1") && error.contains("depth"),
        "{error}"
    );
    let mut more = File::new();
    more.add_as(1, CALL, &[0x94, 0xa1, b'h', 0xc0, 0x00, 0x90, 0xc0, 0xc0]);
    let error = Plan::read(&more.bytes[..]).expect_err("more").to_string();
    assert!(error.contains("2 bytes follow its fields"), "{error}");
}

#[test]
fn contradictions_are_named() {
    let finish = json!({"slot": 1});
    let mut twice = File::new();
    twice
        .request(1, FINISH, &finish)
        .request(1, FINISH, &finish);
    let mut unknown = File::new();
    unknown.add(ANSWER, &(1, json!({})));
    let mut kind = File::new();
    kind.request(1, 64, &json!({}));
    let mut pages = File::new();
    let count = 4_000_000_000_u32;
    let many =
        json!({"slot": 1, "parts": [{"first_page": 0, "pages": [[0, count]], "count": count}]});
    pages.request(1, STORE, &many);
    for (file, text) in [
        (twice, "request 1 is open already"),
        (unknown, "request 1 is not open"),
        (kind, "requests of kind 64 are not recorded"),
        (pages, "pages"),
    ] {
        let error = Plan::read(&file.bytes[..]).expect_err(text).to_string();
        assert!(error.contains(text), "{error}");
    }
}
