//! A file system on a loop device, for tests that need a disk with faults of its own: full, read-only, slow. Needs root.

use std::path::PathBuf;
use std::process::Command;

/// A mounted ext4 file system in a file, removed when dropped.
#[derive(Debug)]
pub struct LoopDisk {
    /// The device.
    pub device: String,
    folder: tempfile::TempDir,
}

/// Runs a program of the system, which must succeed. Returns its output.
pub fn run(program: &str, arguments: &[&str]) -> String {
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
        let disk = Self { device, folder };
        disk.mount();
        disk
    }

    /// Mounts the file system.
    pub fn mount(&self) {
        run("mount", &[&self.device, &self.path().to_string_lossy()]);
    }

    /// The directory of the file system.
    pub fn path(&self) -> PathBuf {
        self.folder.path().join("disk")
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
    }
}
