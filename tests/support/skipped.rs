//! Tests that cannot run on this machine say so; `cargo xtask test` lists them at its end.

use std::io::Write as _;

/// Variable with the path of the file that collects the skips of a whole run, a line each.
const LIST: &str = "SKIPPED_TESTS";

/// Says that the calling test is skipped, and why. The caller returns.
pub fn skipped(why: &str) {
    let test = std::thread::current();
    let line = format!("{}: {why}\n", test.name().unwrap_or("a test"));
    // Past the harness, which hides what tests that pass print.
    let said = std::io::stderr().write_all(format!("skipped: {line}").as_bytes());
    said.expect("standard error");
    if let Some(list) = std::env::var_os(LIST) {
        let list = std::fs::File::options()
            .append(true)
            .create(true)
            .open(list);
        // One call: other tests append at the same time.
        let written = list.expect("the list of skips").write_all(line.as_bytes());
        written.expect("the list of skips");
    }
}
