//! Reports tests that cannot run on this machine. `cargo xtask test` lists them at its end.

use std::io::Write as _;

/// Environment variable with the path of the file that collects the skips of a whole run, one per line.
const LIST: &str = "SKIPPED_TESTS";

/// Reports that the calling test is skipped, and why. The caller must return afterwards.
pub fn skipped(why: &str) {
    let test = std::thread::current();
    let line = format!("{}: {why}\n", test.name().unwrap_or("a test"));
    // Written directly to standard error, because the harness hides what passing tests print.
    let said = std::io::stderr().write_all(format!("skipped: {line}").as_bytes());
    said.expect("standard error");
    if let Some(list) = std::env::var_os(LIST) {
        let list = std::fs::File::options()
            .append(true)
            .create(true)
            .open(list);
        // Written with one call, because other tests append at the same time.
        let written = list.expect("the list of skips").write_all(line.as_bytes());
        written.expect("the list of skips");
    }
}
