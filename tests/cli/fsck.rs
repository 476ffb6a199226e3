//! `kvferry fsck` on directories of a disk tier.

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use kvferry_tiers::disk::{DiskDirectories, DiskTier, SetKey};
use serde_json::Value;

use crate::refused;
use crate::support::{kvferry, socket_dir};

const KEY: SetKey = SetKey {
    layout: [3; 16],
    page_bytes: 8192,
    ratio: 16,
    shards: 1,
};

/// A tier on two disks with one set, which a process has open.
fn tier(folder: &Path) -> (String, PathBuf, DiskTier) {
    let paths = [folder.join("one"), folder.join("two")];
    let directories = DiskDirectories::open(&paths).expect("opened");
    let tier = DiskTier::take(&directories, 0, 64 << 20).expect("usable");
    let tier = tier.expect("not locked");
    tier.open(KEY, &|_, _| {}).expect("opened");
    let names = paths.each_ref().map(|path| path.to_str().expect("UTF-8"));
    let set = paths[0].join("shard-0").join(KEY.name());
    (names.join(","), set, tier)
}

/// Runs a check. Returns its exit code and its report, which fits the schema.
fn checked(directories: &str, more: &[&str]) -> (Option<i32>, Value) {
    let arguments = [&["fsck", directories, "--json"], more].concat();
    let output = kvferry(&arguments);
    let report: Value = serde_json::from_slice(&output.stdout).expect("a report");
    let schema = Path::new(env!("CARGO_MANIFEST_DIR")).join("schema/fsck.json");
    let schema = fs::read_to_string(schema).expect("a schema");
    let schema: Value = serde_json::from_str(&schema).expect("JSON");
    let validator = jsonschema::validator_for(&schema).expect("a valid schema");
    let errors: Vec<String> = validator
        .iter_errors(&report)
        .map(|error| error.to_string())
        .collect();
    assert!(errors.is_empty(), "{errors:?}");
    (output.status.code(), report)
}

fn kinds(report: &Value) -> Vec<&str> {
    let findings = report["findings"].as_array().expect("a list").iter();
    findings.filter_map(|one| one["kind"].as_str()).collect()
}

#[test]
fn a_tier_is_refused_while_it_is_in_use_and_checked_afterwards() {
    let folder = socket_dir();
    let (directories, set, tier) = tier(folder.path());
    let pid = format!("process {}", std::process::id());
    refused(
        &["fsck", &directories],
        1,
        &["shard 0 is in use", "stop kvferry first", &pid],
    );
    tier.close().expect("closed");
    drop(tier);
    let (code, report) = checked(&directories, &[]);
    assert_eq!((code, &report["clean"]), (Some(0), &Value::Bool(true)));
    let output = kvferry(&["fsck", &directories]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("findings   0, 0 repaired"), "{text}");
    assert!(output.stderr.is_empty(), "progress is for terminals");

    // A set without segments has no index of its own.
    let mut new = fs::OpenOptions::new();
    let new = new.write(true).create_new(true).mode(0o600);
    let index = new.open(set.join("index")).expect("created");
    index.write_all_at(&[7; 4096], 0).expect("written");
    new.open(set.join("segment-00000")).expect("created");
    fs::write(set.join("notes"), "mine").expect("written");
    let (code, report) = checked(&directories, &[]);
    assert_eq!(code, Some(1));
    assert_eq!(kinds(&report), ["segment", "index"]);
    assert_eq!(
        (&report["unknown_total"], &report["repaired"]),
        (&1.into(), &0.into())
    );
    let (code, report) = checked(&directories, &["--repair"]);
    assert_eq!((code, &report["repaired"]), (Some(0), &2.into()));
    let (code, report) = checked(&directories, &[]);
    assert_eq!((code, kinds(&report)), (Some(0), Vec::new()));
    assert!(set.join("notes").exists());
}

#[test]
fn directories_without_a_tier_are_refused_with_the_remedy() {
    let folder = socket_dir();
    let (directories, ..) = tier(folder.path());
    let (first, second) = directories.split_once(',').expect("two");
    let name = folder.path().to_str().expect("UTF-8");
    refused(&["fsck", name], 1, &["no disk tier is there", "g3_dir"]);
    refused(&["fsck", first], 1, &["is disk 0 of 2", "all of them"]);
    let turned = format!("{second},{first}");
    refused(&["fsck", &turned], 1, &["is disk 1 of 2", "in their order"]);
    let missing = folder.path().join("missing");
    let missing = missing.to_str().expect("UTF-8");
    refused(&["fsck", missing], 1, &[missing, "No such file"]);
    assert!(!Path::new(missing).exists(), "a check creates nothing");
    refused(&["fsck", ","], 78, &["no directory is named"]);
}
