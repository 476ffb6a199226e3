//! The CUDA driver for tests, in place of a real one.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// The names under which a driver is looked for, the first and the last of them.
const NAMES: [&str; 2] = ["libcuda.so", "libcuda.so.1"];

/// Variable that is set to `gpu` where the tests that a real driver can run too are to run on it.
pub const PLACE: &str = "CUDA_TESTS";

/// Whether they run on the machine's own driver.
pub fn on_gpu() -> bool {
    std::env::var_os(PLACE).is_some_and(|place| place == "gpu")
}

/// The built driver for tests. Cargo puts it beside the test programs.
pub fn library() -> PathBuf {
    let program = std::env::current_exe().expect("a program");
    let folder = program.parent().expect("in a folder");
    let library = folder.join("libkvferry_fake_cuda.so");
    assert!(library.exists(), "{} was not built", library.display());
    library
}

/// A folder with a library under the names of the driver.
pub fn folder(library: &Path) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    for name in NAMES {
        std::os::unix::fs::symlink(library, folder.path().join(name)).expect("a link");
    }
    folder
}

/// The built driver without some of its functions.
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
            // The tables of names stay as they are: the name that was looked for is not the one that is found.
            bytes[at + 1] = b'x';
        }
    }
    let home = tempfile::tempdir().expect("a folder");
    let library = home.path().join("older.so");
    std::fs::write(&library, bytes).expect("written");
    (folder(&library), home)
}

/// The variables with which a process finds the driver there, under these settings.
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
