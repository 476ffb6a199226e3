//! Planted bugs: text changes that are applied to a copy of the tree, to prove that the tests find them.
//!
//! Each file below `tests/planted` is one bug:
//!
//! ```toml
//! # What is wrong, in a sentence.
//! sim_seeds = 2000                                # found by one of the first 2,000 simulated worlds, or:
//! test = ["--test", "leader_model", "tier::"]     # found by a test: arguments of `cargo test`
//!
//! [[change]]                                      # as many as needed
//! file = "src/core/leader/load.rs"
//! find = '''text that occurs exactly once in that file'''
//! replace = '''what stands there instead'''
//! ```

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// Events of each simulated world.
const STEPS: &str = "4000";
/// The program without a bug, below `target/planted`.
const SOUND: &str = "kvferry-tools-sound";
/// The program with a bug, below `target/planted`.
const PROGRAM: &str = "target/debug/kvferry-tools";
/// Builds it.
const BUILD: [&str; 4] = ["build", "--locked", "--package", "kvferry-tools"];
/// Number of worlds that are run at a time, until one of them shows the bug.
const SEEDS_AT_ONCE: u64 = 100;

/// A text change in one file.
#[derive(Debug)]
struct Change {
    file: PathBuf,
    find: String,
    replace: String,
}

/// The check that must find a bug.
#[derive(Debug)]
enum Found {
    /// One of the first `seeds` simulated worlds.
    Sim { seeds: u64 },
    /// `cargo test` with these arguments.
    Test(Vec<String>),
}

/// One planted bug.
#[derive(Debug)]
struct Planted {
    name: String,
    found: Found,
    changes: Vec<Change>,
}

impl Planted {
    fn parse(name: &str, text: &str) -> Result<Self, String> {
        let table: toml::Table = text.parse().map_err(|error| format!("{name}: {error}"))?;
        let missing = |what: &str| format!("tests/planted/{name}.toml: {what}");
        let word = |change: &toml::Value, key: &str| {
            let value = change.get(key).and_then(toml::Value::as_str);
            value
                .map(str::to_owned)
                .ok_or_else(|| missing(&format!("every [[change]] has a text '{key}'")))
        };
        let seeds = table.get("sim_seeds").and_then(toml::Value::as_integer);
        let test = table.get("test").and_then(toml::Value::as_array);
        let found = match (seeds, test) {
            (Some(seeds), None) => Found::Sim {
                seeds: u64::try_from(seeds).map_err(|error| error.to_string())?,
            },
            (None, Some(words)) => {
                let words = words.iter().filter_map(toml::Value::as_str);
                Found::Test(words.map(str::to_owned).collect())
            }
            _ => {
                return Err(missing(
                    "one of 'sim_seeds' and 'test' states how it is found",
                ));
            }
        };
        let changes = table.get("change").and_then(toml::Value::as_array);
        let changes: Result<Vec<Change>, String> = changes
            .ok_or_else(|| missing("at least one [[change]] is needed"))?
            .iter()
            .map(|change| {
                Ok(Change {
                    file: word(change, "file")?.into(),
                    find: word(change, "find")?,
                    replace: word(change, "replace")?,
                })
            })
            .collect();
        Ok(Self {
            name: name.to_owned(),
            found,
            changes: changes?,
        })
    }

    /// The changed files, with their new text.
    fn apply(&self, root: &Path) -> Result<Vec<(PathBuf, String)>, String> {
        let mut files: Vec<(PathBuf, String)> = Vec::new();
        for Change {
            file,
            find,
            replace,
        } in &self.changes
        {
            let at = match files.iter().position(|(known, _)| known == file) {
                Some(at) => at,
                None => {
                    let text = fs::read_to_string(root.join(file))
                        .map_err(|error| format!("{}: {}: {error}", self.name, file.display()))?;
                    files.push((file.clone(), text));
                    files.len() - 1
                }
            };
            let text = &mut files[at].1;
            let times = text.matches(find.as_str()).count();
            if times != 1 || find == replace {
                return Err(format!(
                    "tests/planted/{}.toml: the text to find occurs {times} times in {}, and must once: bring it up to \
                     date with the source:\n{find}",
                    self.name,
                    file.display()
                ));
            }
            *text = text.replacen(find.as_str(), replace, 1);
        }
        Ok(files)
    }
}

/// Every bug below `tests/planted`, by name.
fn all(root: &Path) -> Result<Vec<Planted>, String> {
    let folder = root.join("tests/planted");
    let entries =
        fs::read_dir(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let mut all = Vec::new();
    for entry in entries {
        let path = entry.map_err(|error| error.to_string())?.path();
        let name = path.file_stem().and_then(|name| name.to_str());
        let Some(name) = name.filter(|_| path.extension().is_some_and(|is| is == "toml")) else {
            return Err(format!("{}: only .toml files belong here", path.display()));
        };
        let text = fs::read_to_string(&path).map_err(|error| error.to_string())?;
        all.push(Planted::parse(name, &text)?);
    }
    all.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(all)
}

/// Applies each bug whose name contains `only` to a copy of the tree, and fails when a bug is not found.
pub(crate) fn run(root: &Path, only: &str) -> Result<(), String> {
    let place = root.join("target/planted");
    let tree = place.join("tree");
    let bugs: Vec<Planted> = all(root)?
        .into_iter()
        .filter(|bug| bug.name.contains(only))
        .collect();
    copy_tree(root, &tree)?;
    if bugs
        .iter()
        .any(|bug| matches!(bug.found, Found::Sim { .. }))
    {
        let output = cargo(&place, &BUILD)?;
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).into_owned());
        }
        let text = |error: std::io::Error| format!("{}: {error}", place.display());
        fs::copy(place.join(PROGRAM), place.join(SOUND)).map_err(text)?;
    }
    let mut missed = Vec::new();
    for bug in &bugs {
        let files = bug.apply(root)?;
        for (file, text) in &files {
            write(&tree.join(file), text.as_bytes())?;
        }
        let found = look_for(bug, &place);
        for (file, _) in &files {
            copy_file(root, &tree, file)?;
        }
        match found? {
            Evidence::Found(how) => println!("{}: found: {how}", bug.name),
            Evidence::Missed => {
                println!("{}: MISSED", bug.name);
                missed.push(bug.name.as_str());
            }
            Evidence::Unbuilt(why) => {
                println!(
                    "{}: DOES NOT BUILD: bring it up to date with the source:\n{why}",
                    bug.name
                );
                missed.push(bug.name.as_str());
            }
        }
    }
    println!(
        "{} of {} changes of text found",
        bugs.len() - missed.len(),
        bugs.len()
    );
    match missed.is_empty() {
        true => Ok(()),
        false => Err(format!("missed, or not built: {}", missed.join(", "))),
    }
}

/// Runs cargo in the copy of the tree.
fn cargo(place: &Path, arguments: &[&str]) -> Result<Output, String> {
    crate::cargo_command()
        .current_dir(place.join("tree"))
        .env("CARGO_TARGET_DIR", place.join("target"))
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("cargo: {error}"))
}

/// Runs simulated worlds with a program below `place`.
fn sim(place: &Path, program: &str, seeds: &str) -> Result<Output, String> {
    Command::new(place.join(program))
        .current_dir(place)
        .args(["sim", "--seeds", seeds, "--steps", STEPS])
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("sim: {error}"))
}

/// The outcome of the check of a bug.
enum Evidence {
    /// The line of the check that shows the bug.
    Found(String),
    /// The check passed.
    Missed,
    /// The tree with the bug does not build: the compiler's errors.
    Unbuilt(String),
}

/// Runs the check of a bug.
fn look_for(bug: &Planted, place: &Path) -> Result<Evidence, String> {
    let unbuilt = |arguments: &[&str]| {
        let output = cargo(place, arguments)?;
        let text = || String::from_utf8_lossy(&output.stderr).into_owned();
        Ok::<_, String>((!output.status.success()).then(text))
    };
    match &bug.found {
        Found::Test(words) => {
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            // The last word selects the tests, the others select what is built.
            let (_, what) = words.split_last().ok_or("a test has arguments")?;
            let build = [&["test", "--locked", "--no-run"], what].concat();
            if let Some(why) = unbuilt(&build)? {
                return Ok(Evidence::Unbuilt(why));
            }
            let output = cargo(place, &[&["test", "--locked"], &words[..]].concat())?;
            let text = String::from_utf8_lossy(&output.stdout);
            let failed = text.lines().find(|line| line.ends_with("... FAILED"));
            let failed = failed.filter(|_| !output.status.success());
            Ok(failed.map_or(Evidence::Missed, |line| Evidence::Found(line.to_owned())))
        }
        Found::Sim { seeds } => {
            if let Some(why) = unbuilt(&BUILD)? {
                return Ok(Evidence::Unbuilt(why));
            }
            let mut from = 0;
            while from < *seeds {
                let to = (from + SEEDS_AT_ONCE).min(*seeds);
                let range = format!("{from}..{to}");
                let output = sim(place, PROGRAM, &range)?;
                if !output.status.success() {
                    // A world that also fails without the bug proves nothing about it.
                    if !sim(place, SOUND, &range)?.status.success() {
                        return Err(format!(
                            "some of the seeds {range} fail without the bug: mend that first"
                        ));
                    }
                    let (said, panicked) = (&output.stdout, &output.stderr);
                    let text = [said.as_slice(), panicked].concat();
                    let text = String::from_utf8_lossy(&text).into_owned();
                    let line = text
                        .lines()
                        .find(|line| line.starts_with("seed ") || line.contains("panicked"));
                    let line =
                        line.ok_or_else(|| format!("sim ended without a finding:\n{text}"))?;
                    return Ok(Evidence::Found(line.to_owned()));
                }
                from = to;
            }
            Ok(Evidence::Missed)
        }
    }
}

/// Copies every file that git tracks or does not ignore. Files that are already equal stay untouched, so that cargo
/// builds no more than it must.
fn copy_tree(root: &Path, tree: &Path) -> Result<(), String> {
    let listed = Command::new("git")
        .current_dir(root)
        .args([
            "ls-files",
            "-z",
            "--cached",
            "--others",
            "--exclude-standard",
        ])
        .output()
        .map_err(|error| format!("git: {error}"))?;
    if !listed.status.success() {
        return Err(String::from_utf8_lossy(&listed.stderr).into_owned());
    }
    let files = String::from_utf8_lossy(&listed.stdout).into_owned();
    let files = files.split('\0').map(Path::new);
    let files: BTreeSet<&Path> = files.filter(|file| root.join(file).is_file()).collect();
    for file in &files {
        copy_file(root, tree, file)?;
    }
    remove_others(tree, Path::new(""), &files)
}

/// Removes the files of an earlier copy that are not in `files`, from `folder` of the copy on.
fn remove_others(tree: &Path, folder: &Path, files: &BTreeSet<&Path>) -> Result<(), String> {
    let text = |error: std::io::Error| format!("{}: {error}", tree.join(folder).display());
    for entry in fs::read_dir(tree.join(folder)).map_err(text)? {
        let entry = entry.map_err(text)?;
        let file = folder.join(entry.file_name());
        if entry.file_type().map_err(text)?.is_dir() {
            remove_others(tree, &file, files)?;
        } else if !files.contains(file.as_path()) {
            fs::remove_file(entry.path()).map_err(text)?;
        }
    }
    Ok(())
}

fn copy_file(root: &Path, tree: &Path, file: &Path) -> Result<(), String> {
    let bytes = fs::read(root.join(file));
    let bytes = bytes.map_err(|error| format!("{}: {error}", file.display()))?;
    write(&tree.join(file), &bytes)
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), String> {
    if fs::read(path).is_ok_and(|known| known == bytes) {
        return Ok(());
    }
    let text = |error: std::io::Error| format!("{}: {error}", path.display());
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(text)?;
    }
    fs::write(path, bytes).map_err(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_keeps_no_file_that_the_tree_has_not() {
        let tree = std::env::temp_dir().join(format!("kvferry-planted-{}", std::process::id()));
        let files = ["a.rs", "b/c.rs", "b/d/e.rs"];
        for file in files {
            write(&tree.join(file), b"text").expect("a file");
        }
        let kept: BTreeSet<&Path> = files[1..2].iter().map(Path::new).collect();
        remove_others(&tree, Path::new(""), &kept).expect("files are removed");
        let there = files.map(|file| tree.join(file).is_file());
        fs::remove_dir_all(&tree).expect("the folder is removed");
        assert_eq!(there, [false, true, false]);
    }

    #[test]
    fn every_planted_bug_fits_the_source() {
        let root = crate::root();
        let bugs = all(root).expect("tests/planted");
        assert!(!bugs.is_empty());
        for bug in bugs {
            let files = bug.apply(root).unwrap_or_else(|why| panic!("{why}"));
            assert!(!files.is_empty(), "{}", bug.name);
        }
    }

    #[test]
    fn a_bug_without_changes_or_a_check_is_refused() {
        let change = "[[change]]\nfile = \"a\"\nfind = \"b\"\nreplace = \"c\"\n";
        assert!(Planted::parse("good", &format!("sim_seeds = 3\n{change}")).is_ok());
        assert!(Planted::parse("how", change).is_err());
        assert!(Planted::parse("both", &format!("sim_seeds = 3\ntest = []\n{change}")).is_err());
        assert!(Planted::parse("what", "sim_seeds = 3\n").is_err());
        assert!(Planted::parse("text", "sim_seeds = 3\n[[change]]\nfile = \"a\"\n").is_err());
    }
}
