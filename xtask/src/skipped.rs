//! Skipped tests, which `tests/support/skipped.rs` writes into a file, one per line.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

/// Environment variable with the path of that file.
pub(crate) const LIST: &str = "SKIPPED_TESTS";

/// Creates an empty list for this run.
pub(crate) fn start(root: &Path) -> Result<PathBuf, String> {
    let list = root.join("target/skipped-tests");
    let made = fs::create_dir_all(root.join("target")).and_then(|()| fs::write(&list, ""));
    made.map_err(|error| format!("{}: {error}", list.display()))?;
    Ok(list)
}

/// Prints the skipped tests, if there are any. In continuous integration (`CI=true`) they are a failure, because
/// everything that a test needs must be available there.
pub(crate) fn finish(list: &Path) -> Result<(), String> {
    let text = fs::read_to_string(list).map_err(|error| format!("{}: {error}", list.display()))?;
    let Some(said) = summary(&text) else {
        return Ok(());
    };
    println!("{said}");
    match is_ci(std::env::var_os("CI").as_deref()) {
        true => Err("with CI=true, a skipped test is a failure".to_owned()),
        false => Ok(()),
    }
}

fn is_ci(variable: Option<&OsStr>) -> bool {
    variable.is_some_and(|value| value.eq_ignore_ascii_case("true") || value == "1")
}

/// A summary that lists each skip once, or `None` without skips.
fn summary(text: &str) -> Option<String> {
    let skips: BTreeSet<&str> = text.lines().filter(|line| !line.is_empty()).collect();
    let lines: Vec<String> = skips.iter().map(|line| format!("  {line}")).collect();
    (!skips.is_empty()).then(|| format!("skipped tests: {}\n{}", skips.len(), lines.join("\n")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_skip_is_listed_once() {
        assert_eq!(summary(""), None);
        let text = "b: no traces\na: no files\nb: no traces\n";
        let said = summary(text).expect("two");
        assert_eq!(said, "skipped tests: 2\n  a: no files\n  b: no traces");
    }

    #[test]
    fn a_skipped_test_fails_only_in_continuous_integration() {
        for (value, expected) in [("true", true), ("1", true), ("false", false), ("", false)] {
            assert_eq!(is_ci(Some(OsStr::new(value))), expected, "{value}");
        }
        assert!(!is_ci(None));
    }
}
