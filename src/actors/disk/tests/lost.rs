//! Disks whose files are removed, or put back, while a worker uses them; and what the status says of the files.

use std::fs;
use std::path::{Path, PathBuf};

use super::*;

/// The shard's directory, and that of its only set.
fn shard(root: &tempfile::TempDir) -> PathBuf {
    root.path().join("disk/shard-0")
}

fn set_of(root: &tempfile::TempDir) -> PathBuf {
    let found = fs::read_dir(shard(root)).expect("read");
    let mut found = found.map(|entry| entry.expect("read").path());
    found.find(|path| path.is_dir()).expect("a set")
}

fn first_segment(root: &tempfile::TempDir) -> PathBuf {
    set_of(root).join("segment-00000")
}

fn empty(directory: &Path) {
    for entry in fs::read_dir(directory).expect("read") {
        let path = entry.expect("read").path();
        match path.is_dir() {
            true => fs::remove_dir_all(path).expect("removed"),
            false => fs::remove_file(path).expect("removed"),
        }
    }
}

/// A disk with pages that are durable.
fn written() -> (Rig, tempfile::TempDir) {
    let root = tempfile::tempdir().expect("a directory");
    let mut rig = Rig::new(directory(&root));
    assert!(rig.write(0).expect("taken").ended.complete);
    rig.flushed();
    (rig, root)
}

type Remove = fn(&tempfile::TempDir);

/// Where things are moved to.
fn away(root: &tempfile::TempDir) -> PathBuf {
    root.path().join("away")
}

const REMOVALS: [(&str, Remove); 7] = [
    ("the shard", |root| {
        fs::remove_dir_all(shard(root)).expect("removed");
    }),
    ("the set", |root| {
        fs::remove_dir_all(set_of(root)).expect("removed");
    }),
    ("a segment", |root| {
        fs::remove_file(first_segment(root)).expect("removed");
    }),
    ("everything", |root| empty(&root.path().join("disk"))),
    ("a segment that still exists elsewhere", |root| {
        fs::rename(first_segment(root), away(root)).expect("moved");
    }),
    ("a segment with another link", |root| {
        fs::hard_link(first_segment(root), away(root)).expect("linked");
        fs::remove_file(first_segment(root)).expect("removed");
    }),
    ("a segment in whose place another file lies", |root| {
        fs::rename(first_segment(root), away(root)).expect("moved");
        fs::write(first_segment(root), [0; 4096]).expect("written");
    }),
];

#[test]
fn files_that_are_removed_are_made_again_and_their_pages_are_misses() {
    for (what, remove) in REMOVALS {
        let (mut rig, root) = written();
        let changes = rig.changes;
        remove(&root);
        rig.until(what, |disk| disk.open.is_none());
        let reason = rig.disk.status().reason;
        assert!(reason.contains("removed or replaced"), "{what}: {reason}");
        rig.until_health(DiskHealth::Ok);
        assert_eq!(rig.changes, changes + 2, "{what}: closed and opened");
        assert_eq!(rig.read(0), Some(0), "{what}: the pages are gone");
        assert!(rig.write(16).expect("taken").ended.complete, "{what}");
        assert_eq!(rig.read(16), Some(PAGES), "{what}");
        assert_eq!(rig.flush(), Ok(()), "{what}");
        let written = u64::from(PAGES) * PAGE_BYTES;
        assert!(bytes_below(&set_of(&root)) >= written, "{what}");
        assert_eq!(rig.reset(), Ok(()), "{what}");
        // What a later process finds.
        rig.disk.end();
        let mut next = Rig::new(directory(&root));
        assert_eq!(next.read(16), Some(0), "{what}");
    }
}

/// Right after the removal, before anyone looks.
#[test]
fn a_reset_is_carried_out_on_a_disk_that_has_lost_its_files() {
    for (what, remove) in REMOVALS {
        let (mut rig, root) = written();
        remove(&root);
        assert_eq!(rig.reset(), Ok(()), "{what}");
        rig.until_health(DiskHealth::Ok);
        assert_eq!(rig.read(0), Some(0), "{what}");
        assert!(rig.write(0).expect("taken").ended.complete, "{what}");
        assert_eq!(rig.read(0), Some(PAGES), "{what}");
    }
}

/// Right after the removal, before anyone looks: what is written to a removed file is found by no start.
#[test]
fn a_flush_promises_nothing_of_files_that_were_removed() {
    for (what, remove) in REMOVALS {
        let (mut rig, root) = written();
        remove(&root);
        let flushed = rig.flush();
        assert!(flushed.is_err() || rig.read(0) == Some(0), "{what}");
        rig.until_health(DiskHealth::Ok);
        assert_eq!(rig.read(0), Some(0), "{what}");
        assert!(rig.write(0).expect("taken").ended.complete, "{what}");
        assert_eq!(rig.flush(), Ok(()), "{what}");
    }
}

/// The directory of a shard is moved away, the pages are reset, and the directory is put back.
#[test]
fn pages_that_were_reset_do_not_come_back_with_an_old_directory() {
    for running in [true, false] {
        let (mut rig, root) = written();
        let away = root.path().join("away");
        if !running {
            rig.disk.end();
        }
        fs::rename(shard(&root), &away).expect("moved");
        if !running {
            rig = Rig::new(directory(&root));
        } else {
            rig.until("noticed", |disk| disk.open.is_none());
            rig.until_health(DiskHealth::Ok);
        }
        assert_eq!(rig.read(0), Some(0));
        assert_eq!(rig.reset(), Ok(()));
        assert_eq!(rig.flush(), Ok(()));
        rig.disk.end();
        fs::remove_dir_all(shard(&root)).expect("removed");
        fs::rename(&away, shard(&root)).expect("put back");
        let mut next = Rig::new(directory(&root));
        assert_eq!(next.read(0), Some(0), "{running}");
        assert!(next.write(0).expect("taken").ended.complete);
        next.disk.end();
        // The directory is the shard's from now on.
        let mut last = Rig::new(directory(&root));
        assert_eq!(last.read(0), Some(PAGES));
    }
}

/// Copies a directory, or a file.
fn copy(from: &Path, to: &Path) {
    if from.is_file() {
        fs::copy(from, to).expect("copied");
        return;
    }
    fs::create_dir(to).expect("created");
    for entry in fs::read_dir(from).expect("read") {
        let path = entry.expect("read").path();
        copy(&path, &to.join(path.file_name().expect("a name")));
    }
}

fn remove(path: &Path) {
    match path.is_dir() {
        true => fs::remove_dir_all(path).expect("removed"),
        false if path.exists() => fs::remove_file(path).expect("removed"),
        false => {}
    }
}

/// How a set or a segment is taken away, and put back after a reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Taken {
    /// Moved while a worker has it open.
    Running,
    /// Moved between two workers.
    Between,
    /// Copied, so that the worker notices nothing.
    Copied,
}

#[test]
fn pages_that_were_reset_do_not_come_back_with_an_old_set_or_segment() {
    let places: [fn(&tempfile::TempDir) -> PathBuf; 2] = [set_of, first_segment];
    for place in places {
        for taken in [Taken::Running, Taken::Between, Taken::Copied] {
            let (mut rig, root) = written();
            let (place, away) = (place(&root), away(&root));
            let what = format!("{}, {taken:?}", place.display());
            if taken == Taken::Between {
                rig.disk.end();
            }
            match taken {
                Taken::Copied => copy(&place, &away),
                _ => fs::rename(&place, &away).expect("moved"),
            }
            match taken {
                Taken::Running => {
                    rig.until("noticed", |disk| disk.open.is_none());
                    rig.until_health(DiskHealth::Ok);
                }
                Taken::Between => rig = Rig::new(directory(&root)),
                Taken::Copied => {}
            }
            assert_eq!(rig.reset(), Ok(()), "{what}");
            assert!(rig.write(16).expect("taken").ended.complete, "{what}");
            assert_eq!(rig.flush(), Ok(()), "{what}");
            rig.disk.end();
            remove(&place);
            fs::rename(&away, &place).expect("put back");
            let mut next = Rig::new(directory(&root));
            assert_eq!(next.read(0), Some(0), "{what}");
            assert!(next.write(0).expect("taken").ended.complete, "{what}");
            next.disk.end();
            // It is used from now on.
            let mut last = Rig::new(directory(&root));
            assert_eq!(last.read(0), Some(PAGES), "{what}");
        }
    }
}

/// An older copy is put in the place of a segment that a worker has open, and found when the disk is opened again.
#[test]
fn pages_that_were_reset_do_not_come_back_with_a_segment_that_is_replaced_under_a_worker() {
    let (mut rig, root) = written();
    let (segment, away) = (first_segment(&root), away(&root));
    fs::copy(&segment, &away).expect("copied");
    assert_eq!(rig.reset(), Ok(()));
    assert_eq!(rig.flush(), Ok(()));
    fs::rename(&away, &segment).expect("replaced");
    rig.until("noticed", |disk| disk.open.is_none());
    rig.until_health(DiskHealth::Ok);
    assert_eq!(rig.read(0), Some(0));
    assert!(rig.write(0).expect("taken").ended.complete);
    assert_eq!(rig.read(0), Some(PAGES));
}

/// Bytes of all files below a directory.
fn bytes_below(directory: &Path) -> u64 {
    let entries = fs::read_dir(directory).expect("read");
    let bytes = entries.map(|entry| {
        let entry = entry.expect("read");
        let metadata = entry.metadata().expect("read");
        match metadata.is_dir() {
            true => bytes_below(&entry.path()),
            false => metadata.len(),
        }
    });
    bytes.sum()
}

#[test]
fn the_status_has_the_bytes_of_all_files_with_an_engine_and_without() {
    let (mut rig, root) = written();
    for to in [16, 256, 512] {
        assert!(rig.write(to).expect("taken").ended.complete);
    }
    assert_eq!(rig.flush(), Ok(()));
    let measured = |rig: &mut Rig, what: &str| {
        let files = bytes_below(&shard(&root));
        rig.until(what, |disk| disk.status().used_bytes == files);
        let status = rig.disk.status();
        assert!(status.used_bytes > 0 && status.used_bytes <= status.cap_bytes);
    };
    measured(&mut rig, "counted with an engine");
    let written = rig.disk.status();
    let pages = 4 * u64::from(PAGES);
    assert_eq!(
        (written.listed_pages, written.durable_pages),
        (pages, pages)
    );
    assert_eq!(written.written_bytes, pages * PAGE_BYTES);
    assert_eq!(written.day_written_bytes, pages * PAGE_BYTES);
    rig.disk.end();
    let mut idle = Rig::idle(directory(&root), false);
    measured(&mut idle, "counted without an engine");
    assert_eq!(idle.health(), DiskHealth::Off);
}

#[test]
fn a_smaller_cap_takes_effect_when_a_worker_starts_and_keeps_what_fits() {
    let (mut rig, root) = written();
    let pages = rig.disk.open.as_ref().map(|(_, set)| set.capacity_pages());
    for to in (0..pages.expect("it is open") - PAGES).step_by(16) {
        assert!(rig.write(to).expect("taken").ended.complete);
    }
    let cap = CAP_BYTES / 2;
    assert!(bytes_below(&shard(&root)) > cap);
    rig.disk.end();
    let mut idle = Rig::with_cap(directory(&root), false, cap);
    idle.until("trimmed", |_| bytes_below(&shard(&root)) <= cap);
    idle.want();
    idle.until("open", |disk| disk.open.is_some());
    assert_eq!(idle.read(0), Some(PAGES), "the first segments are kept");
    assert!(bytes_below(&shard(&root)) <= cap);
}

/// Changes a bit of the page that has this byte. Returns false if no file of the set has such a page.
fn flip(set: &Path, byte: u8) -> bool {
    let files = fs::read_dir(set).expect("read");
    files.map(|entry| entry.expect("read").path()).any(|path| {
        let mut bytes = fs::read(&path).expect("read");
        let mut units = bytes.chunks_exact(4096);
        let Some(unit) = units.position(|unit| unit.iter().all(|of| *of == byte)) else {
            return false;
        };
        bytes[unit * 4096 + 7] ^= 0x40;
        fs::write(&path, &bytes).expect("written");
        true
    })
}

#[test]
fn pages_that_have_changed_are_counted_when_they_are_read() {
    let (mut rig, root) = written();
    let mut flipped = 0;
    for to in [16, 32, 48, 64] {
        assert!(rig.write(to).expect("taken").ended.complete);
    }
    assert_eq!(rig.flush(), Ok(()));
    // Every other run: a read ends at its first page.
    for run in [16_u32, 48] {
        assert!(flip(&set_of(&root), byte_of(run)), "page {run}");
        flipped += 1;
    }
    for from in [0, 32, 64] {
        assert_eq!(rig.read(from), Some(PAGES));
    }
    assert_eq!(rig.disk.status().bad_reads, 0);
    for from in [16, 48] {
        assert_eq!(rig.read(from), Some(0));
    }
    let status = rig.disk.status();
    assert_eq!((status.bad_reads, status.bad_pages), (flipped, 0));
}
