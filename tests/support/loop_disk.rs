//! A file system on a loop device, for tests that need a disk with faults of its own: full, read-only, slow. Needs root.

use std::path::{Path, PathBuf};
use std::process::Command;

/// A mounted ext4 file system in a file, removed when dropped.
#[derive(Debug)]
pub struct LoopDisk {
    device: String,
    folder: tempfile::TempDir,
    throttle: Option<PathBuf>,
}

/// Runs a program of the system, which must succeed. Returns its output.
fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output();
    let output = output.expect("a program of the system");
    assert!(
        output.status.success(),
        "{program} {arguments:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

impl LoopDisk {
    /// A file system of this many MiB.
    pub fn new(mib: u64) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let image = folder.path().join("image");
        let file = std::fs::File::create(&image).expect("a file");
        file.set_len(mib << 20).expect("room");
        let image = image.to_string_lossy();
        run("mkfs.ext4", &["-q", "-m", "0", &image]);
        // Direct I/O on the backing file: otherwise the page cache would take the writes of a slow disk.
        let device = run("losetup", &["--direct-io=on", "--find", "--show", &image]);
        let mounted = folder.path().join("disk");
        std::fs::create_dir(&mounted).expect("a folder");
        let disk = Self {
            device,
            folder,
            throttle: None,
        };
        disk.mount();
        disk
    }

    /// Mounts the file system.
    pub fn mount(&self) {
        run("mount", &[&self.device, &self.path().to_string_lossy()]);
    }

    /// Unmounts the file system, also while files are open.
    #[allow(dead_code, reason = "not every test needs it")]
    pub fn unmount(&self) {
        run("umount", &["--lazy", &self.path().to_string_lossy()]);
    }

    /// The directory of the file system.
    pub fn path(&self) -> PathBuf {
        self.folder.path().join("disk")
    }

    /// Limits the writes of a process to this many bytes a second, by the block controller of cgroups, version 1.
    #[allow(dead_code, reason = "not every test needs it")]
    pub fn slow_writes_of(&mut self, pid: u32, bytes_per_s: u64) {
        let group = Path::new("/sys/fs/cgroup/blkio").join(format!("kvferry-test-{pid}"));
        std::fs::create_dir(&group).expect("the block controller of cgroups, version 1");
        let name = self.device.trim_start_matches("/dev/");
        let number = std::fs::read_to_string(format!("/sys/block/{name}/dev")).expect("a number");
        let limit = format!("{} {bytes_per_s}", number.trim());
        let file = group.join("blkio.throttle.write_bps_device");
        std::fs::write(file, limit).expect("a limit");
        std::fs::write(group.join("cgroup.procs"), pid.to_string()).expect("a member");
        self.throttle = Some(group);
    }

    /// Mounts the file system again with other options: `ro`, `rw`, or `abort` as after an
    /// error of the disk.
    #[allow(dead_code, reason = "not every test needs it")]
    pub fn remount(&self, options: &str) {
        let options = format!("remount,{options}");
        run("mount", &["-o", &options, &self.path().to_string_lossy()]);
    }
}

impl Drop for LoopDisk {
    fn drop(&mut self) {
        // Of a test that has failed, as much as possible is removed.
        let path = self.path();
        for (program, arguments) in [
            ("umount", vec!["--lazy", path.to_str().unwrap_or_default()]),
            ("losetup", vec!["--detach", self.device.as_str()]),
        ] {
            let ended = Command::new(program).args(arguments).status();
            if !ended.is_ok_and(|status| status.success()) {
                eprintln!("{program} of {} failed", self.device);
            }
        }
        if let Some(group) = &self.throttle
            && let Err(error) = std::fs::remove_dir(group)
        {
            eprintln!("{}: {error}", group.display());
        }
    }
}
