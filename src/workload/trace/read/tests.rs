use std::io::Write;
use std::path::PathBuf;

use super::*;

const THREE: &str = "\
{\"timestamp\":5,\"input_length\":40,\"output_length\":3,\"hash_ids\":[0,1,2]}\n\
\n  \r\n\
{\"timestamp\":2,\"input_length\":32,\"output_length\":4,\"hash_ids\":[0,1]}\r\n\
{\"timestamp\":5,\"input_length\":20,\"output_length\":5,\"hash_ids\":[0]}";

struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("a folder"))
    }

    fn file(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.0.path().join(name);
        std::fs::write(&path, bytes).expect("a file");
        path
    }

    fn error(&self, bytes: &[u8]) -> TraceError {
        read(&self.file("trace.jsonl", bytes), 16, None).expect_err("bad trace")
    }
}

fn zstd(text: &[u8]) -> Vec<u8> {
    zstd::encode_all(text, 1).expect("compressed")
}

fn gzip(text: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(text).expect("compressed");
    encoder.finish().expect("compressed")
}

#[test]
fn sorts_by_time_and_leaves_partial_blocks_out() {
    let folder = Folder::new();
    let trace = read(&folder.file("chat.jsonl", THREE.as_bytes()), 16, None).expect("a trace");
    assert_eq!((trace.name.as_str(), trace.block_tokens), ("chat", 16));
    let seen: Vec<_> = trace
        .requests
        .iter()
        .map(|r| {
            (
                r.timestamp_us,
                r.input_tokens,
                r.output_tokens,
                r.blocks.as_slice(),
            )
        })
        .collect();
    let expected: [(u64, u64, u64, &[u64]); 3] = [
        (2_000, 32, 4, &[0, 1]),
        (5_000, 40, 3, &[0, 1]),
        (5_000, 20, 5, &[0]),
    ];
    assert_eq!(seen, expected);
}

#[test]
fn compression_is_recognised_by_content_and_changes_nothing() {
    let folder = Folder::new();
    let plain = read(&folder.file("chat.jsonl.zst", THREE.as_bytes()), 16, None).expect("plain");
    let mut frames = vec![0x50, 0x2a, 0x4d, 0x18, 3, 0, 0, 0, 1, 2, 3];
    let (head, tail) = THREE.as_bytes().split_at(20);
    frames.extend(zstd(head));
    frames.extend(zstd(tail));
    let members = [gzip(head), gzip(tail)].concat();
    for bytes in [
        zstd(THREE.as_bytes()),
        gzip(THREE.as_bytes()),
        frames,
        members,
    ] {
        let path = folder.file("chat", &bytes);
        assert_eq!(read(&path, 16, None).expect("compressed"), plain);
    }
}

#[test]
fn a_limit_takes_the_first_in_order_of_time_once_all_are_checked() {
    let folder = Folder::new();
    let path = folder.file("t", THREE.as_bytes());
    let all = read(&path, 16, None).expect("a trace");
    let two = read(&path, 16, Some(2)).expect("a trace");
    assert_eq!(two.requests, all.requests[..2]);
    assert_ne!(two.digest, all.digest);
    assert_eq!(read(&path, 16, Some(99)).expect("a trace"), all);
    assert!(matches!(
        read(&path, 16, Some(0)),
        Err(TraceError::LimitZero { .. })
    ));
    let damaged = folder.file("d", format!("{THREE}\n{{").as_bytes());
    assert!(matches!(
        read(&damaged, 16, Some(1)),
        Err(TraceError::Line { line: 6, .. })
    ));
}

#[test]
fn errors_name_the_file_and_the_line() {
    let folder = Folder::new();
    let error = folder
        .error(THREE.replace("\"output_length\":5,", "").as_bytes())
        .to_string();
    assert!(
        error.contains("trace.jsonl, line 5: 'output_length' is missing"),
        "{error}"
    );
    let error = folder.error(b"\n\n{\"a\":\"\xff\"}").to_string();
    assert!(
        error.contains("trace.jsonl, line 3: not UTF-8 from byte 7 on"),
        "{error}"
    );
    for empty in ["", " \n\n\t"] {
        assert!(matches!(
            folder.error(empty.as_bytes()),
            TraceError::Empty { .. }
        ));
    }
    let missing = folder.0.path().join("none");
    let error = read(&missing, 16, None).expect_err("no file").to_string();
    assert!(error.contains("none: cannot open this trace"), "{error}");
    assert!(matches!(
        read(folder.0.path(), 16, None),
        Err(TraceError::Read { .. })
    ));
    assert!(matches!(
        read(&missing, 0, None),
        Err(TraceError::ZeroBlock)
    ));
}

#[test]
fn a_wrong_number_of_hash_ids_reports_the_expected_number_and_the_fitting_block_size() {
    let folder = Folder::new();
    let path = folder.file("trace.jsonl", THREE.as_bytes());
    let error = read(&path, 64, None).expect_err("not 64").to_string();
    let expected = "line 1: 'hash_ids' has 3 ids, expected 0 or 1 for 'input_length' 40 at 64 \
                    tokens a block: --trace-block-tokens 16 fits every line";
    assert!(error.ends_with(expected), "{error}");
    let odd = THREE.replace("[0]", "[0,1,2,3,4,5,6,7]");
    let error = folder.error(odd.as_bytes()).to_string();
    assert!(
        error.contains("line 5: 'hash_ids' has 8 ids, expected 1 or 2 for"),
        "{error}"
    );
    assert!(
        error.ends_with("the last one also for a part of it"),
        "{error}"
    );
    assert!(!error.contains("--trace-block-tokens"), "{error}");
    let error = read(
        &folder.file("x", format!("{THREE}\n[").as_bytes()),
        64,
        None,
    );
    let error = error.expect_err("not 64").to_string();
    assert!(
        error.contains("line 1:") && !error.contains("fits every line"),
        "{error}"
    );
}

#[test]
fn a_stream_cut_anywhere_is_refused() {
    let folder = Folder::new();
    for (bytes, format) in [
        (zstd(THREE.as_bytes()), "zstd"),
        (gzip(THREE.as_bytes()), "gzip"),
    ] {
        for length in 4..bytes.len() {
            let error = folder.error(&bytes[..length]);
            assert!(
                matches!(&error, TraceError::Truncated { format: f, .. } if *f == format),
                "{length}: {error:?}"
            );
        }
        let mut damaged = bytes.clone();
        let middle = damaged.len() / 2;
        damaged[middle] ^= 0x55;
        assert!(
            read(&folder.file("d", &damaged), 16, None).is_err(),
            "{format}"
        );
    }
}

#[test]
fn a_line_may_be_as_long_as_the_limit_and_no_longer() {
    let folder = Folder::new();
    let first = THREE.lines().next().expect("a line");
    let mut long = first.as_bytes().to_vec();
    long.resize(LINE_BYTES_MAX, b' ');
    long.push(b'\n');
    assert!(read(&folder.file("fits", &zstd(&long)), 16, None).is_ok());
    long.insert(first.len(), b' ');
    let error = read(&folder.file("long", &zstd(&long)), 16, None).expect_err("too long");
    assert!(
        matches!(
            &error,
            TraceError::Line {
                line: 1,
                reason: LineError::TooLong,
                ..
            }
        ),
        "{error:?}"
    );
}

#[test]
fn a_window_beyond_the_limit_is_refused() {
    let folder = Folder::new();
    let compress = |log| {
        let mut encoder = zstd::Encoder::new(Vec::new(), 1).expect("an encoder");
        encoder.window_log(log).expect("a window");
        encoder.write_all(THREE.as_bytes()).expect("compressed");
        encoder.finish().expect("compressed")
    };
    let largest = compress(ZSTD_WINDOW_LOG_MAX);
    assert!(read(&folder.file("27", &largest), 16, None).is_ok());
    let error = folder.error(&compress(ZSTD_WINDOW_LOG_MAX + 1));
    assert!(
        matches!(error, TraceError::Damaged { format: "zstd", .. }),
        "{error:?}"
    );
}

#[test]
fn the_built_in_workload_reads_back_unchanged() {
    let folder = Folder::new();
    let made = crate::trace::generate(&crate::trace::Shape::default(), 3);
    let mut text = String::new();
    for request in &made.requests {
        text += &format!(
            "{{\"timestamp\": {}.{:03}, \"input_length\": {}, \"output_length\": {}, \"hash_ids\": {:?}}}\n",
            request.timestamp_us / 1_000,
            request.timestamp_us % 1_000,
            request.input_tokens,
            request.output_tokens,
            request.blocks,
        );
    }
    let read = read(&folder.file("made.jsonl", text.as_bytes()), 16, None).expect("a trace");
    assert_eq!((read.requests, read.digest), (made.requests, made.digest));
}

/// The path of a real trace; `None`, reported as skipped, if it is not there.
fn real(file: &str) -> Option<PathBuf> {
    let named = std::env::var_os("KVFERRY_SHARED").map(PathBuf::from);
    let shared =
        named.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared"));
    let path = shared.join("traces").join(file);
    if path.exists() {
        return Some(path);
    }
    crate::skipped::skipped(&format!(
        "{} is not there (set KVFERRY_SHARED)",
        path.display()
    ));
    None
}

#[test]
fn reads_the_real_traces_whole() {
    let cases = [
        (
            "mooncake_conversation_trace.jsonl.zst",
            512,
            12_031,
            276_491,
        ),
        ("weka40_flat64.jsonl.zst", 64, 2_609, 4_815_431),
    ];
    for (file, block_tokens, requests, blocks) in cases {
        let Some(path) = real(file) else { continue };
        let trace = read(&path, block_tokens, None).expect("a trace");
        let found: usize = trace
            .requests
            .iter()
            .map(|request| request.blocks.len())
            .sum();
        assert_eq!((trace.requests.len(), found), (requests, blocks), "{file}");
        let error = read(&path, 16, None).expect_err("another size").to_string();
        assert!(
            error.contains(&format!("--trace-block-tokens {block_tokens} ")),
            "{error}"
        );
    }
}
