//! A worker's disk on a file system of its own: read-only, full, unmounted.

use kvferry_tiers::disk::fsck::fsck;

use super::loop_disk::{LoopDisk, run};
use super::*;

fn unmount(disk: &LoopDisk) {
    run("umount", &["--lazy", &disk.path().to_string_lossy()]);
}

/// Mounts the file system again: `ro`, or `abort` as after an error of the disk.
fn remount(disk: &LoopDisk, options: &str) {
    let options = format!("remount,{options}");
    run("mount", &["-o", &options, &disk.path().to_string_lossy()]);
}

fn tier(disk: &LoopDisk) -> DiskDirectories {
    DiskDirectories::open(&[disk.path().join("kvferry")]).expect("a tier")
}

#[test]
#[ignore = "needs root and loop devices: cargo xtask disk"]
fn on_a_loop_device_a_disk_that_is_remounted_read_only_is_read_on_and_written_again() {
    let mounted = LoopDisk::new(128);
    let mut rig = Rig::new(tier(&mounted));
    assert!(rig.write(0).expect("taken").ended.complete);
    rig.flushed();
    // What the file system does after an error of the disk. It has to be mounted anew after that.
    remount(&mounted, "abort");
    let end = rig.write(16).expect("taken");
    assert!(!end.ended.complete, "{end:?}");
    rig.until_health(DiskHealth::ReadOnly);
    assert_eq!(rig.read(0), Some(PAGES));
    assert!(rig.reset().is_err());
    assert_eq!(rig.read(0), Some(PAGES));
    unmount(&mounted);
    rig.until_health(DiskHealth::Off);
    mounted.mount();
    rig.serves(0);
    assert!(rig.write(16).expect("taken").ended.complete);
    rig.disk.end();
}

#[test]
#[ignore = "needs root and loop devices: cargo xtask disk"]
fn on_a_loop_device_a_small_disk_is_full_and_serves_what_it_has() {
    let mounted = LoopDisk::new(48);
    let mut rig = Rig::new(tier(&mounted));
    let pages = rig.disk.set(PAGE_BYTES).expect("open").capacity_pages();
    let mut served = Vec::new();
    for to in (0..pages).step_by(16) {
        let Some(end) = rig.write(to) else {
            break;
        };
        if end.ended.complete {
            served.push(to);
        }
    }
    rig.until_health(DiskHealth::Full);
    assert!(!served.is_empty() && served.len() < (pages / 16) as usize);
    let room = rig.disk.set(PAGE_BYTES).expect("open").capacity_pages();
    assert!(room < pages, "{room} of {pages} pages");
    for from in served {
        assert_eq!(rig.read(from), Some(PAGES));
    }
    rig.flushed();
    let status = rig.disk.status();
    assert!(status.used_bytes <= status.cap_bytes && status.day_written_bytes > 0);
    rig.disk.end();
}

#[test]
#[ignore = "needs root and loop devices: cargo xtask disk"]
fn on_a_loop_device_a_disk_that_is_unmounted_is_missing_until_it_is_mounted_again() {
    let mounted = LoopDisk::new(128);
    let mut rig = Rig::new(tier(&mounted));
    assert!(rig.write(0).expect("taken").ended.complete);
    rig.flushed();
    unmount(&mounted);
    rig.until_health(DiskHealth::Off);
    assert!(rig.read(0).is_none());
    let left = std::fs::read_dir(mounted.path()).expect("read").count();
    assert_eq!(left, 0, "nothing is written below the mount point");
    mounted.mount();
    rig.serves(0);
    assert!(rig.write(16).expect("taken").ended.complete);
    rig.disk.end();
}

#[test]
#[ignore = "needs root and loop devices: cargo xtask disk"]
fn on_a_loop_device_a_disk_that_is_mounted_read_only_can_be_checked() {
    let mounted = LoopDisk::new(128);
    let mut rig = Rig::new(tier(&mounted));
    assert!(rig.write(0).expect("taken").ended.complete);
    rig.disk.end();
    drop(rig);
    remount(&mounted, "ro");
    let paths = [mounted.path().join("kvferry")];
    let report = fsck(&paths, false, &|_, _| {}).expect("it can be read");
    assert_eq!(report.findings_total, 0, "{report:?}");
    assert_eq!(report.shards, 1);
    let kept = std::fs::read_dir(&paths[0]).expect("read").count();
    assert!(kept > 0);
}
