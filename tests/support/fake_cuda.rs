//! Locates the CUDA driver for tests and puts it in place of a real one.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// File names under which a program looks for the driver: the first and the last that it tries.
const NAMES: [&str; 2] = ["libcuda.so", "libcuda.so.1"];

/// Environment variable: `gpu` runs the tests that also work with a real driver on the machine's GPU.
pub const PLACE: &str = "CUDA_TESTS";

/// Whether those tests run on the machine's own driver.
pub fn on_gpu() -> bool {
    std::env::var_os(PLACE).is_some_and(|place| place == "gpu")
}

/// Path of the built driver for tests. Cargo puts the library beside the test programs.
pub fn library() -> PathBuf {
    let program = std::env::current_exe().expect("a program");
    let folder = program.parent().expect("in a folder");
    let library = folder.join("libkvferry_fake_cuda.so");
    assert!(library.exists(), "{} was not built", library.display());
    library
}

/// Creates a folder in which `library` is linked under the driver's file names.
pub fn folder(library: &Path) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    for name in NAMES {
        std::os::unix::fs::symlink(library, folder.path().join(name)).expect("a link");
    }
    folder
}

/// A copy of the built driver that lacks these functions. The second folder holds the library itself.
pub fn without(functions: &[&str]) -> (tempfile::TempDir, tempfile::TempDir) {
    let mut bytes = std::fs::read(library()).expect("the library");
    for function in functions {
        let name = format!("\0{function}\0");
        let places: Vec<usize> = bytes
            .windows(name.len())
            .enumerate()
            .filter(|(_, window)| *window == name.as_bytes())
            .map(|(at, _)| at)
            .collect();
        assert!(!places.is_empty(), "{function} is there");
        for at in places {
            // The tables of names stay as they are: a search for the old name reaches this entry, whose name differs.
            bytes[at + 1] = b'x';
        }
    }
    let home = tempfile::tempdir().expect("a folder");
    let library = home.path().join("older.so");
    std::fs::write(&library, bytes).expect("written");
    (folder(&library), home)
}

/// Environment variables with which a process loads the driver of this folder, with these settings.
pub fn variables(folder: &Path, settings: &str) -> [(&'static str, OsString); 2] {
    let mut path = folder.as_os_str().to_owned();
    if let Some(before) = std::env::var_os("LD_LIBRARY_PATH") {
        path.push(":");
        path.push(before);
    }
    [
        ("LD_LIBRARY_PATH", path),
        (kvferry_fake_cuda::SETTINGS, settings.into()),
    ]
}
