//! Checks that no published golden vector of a public message has changed since the messages were frozen.
//!
//! The messages are frozen from the first commit on whose `schema/messages.json` says `"status": "frozen"`. The check
//! compares the working tree with that commit and with every later one that changed a vector, so that a vector cannot be
//! changed, removed or renamed, and one that was added later stays, too. Vectors between leader and workers may change.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use serde_json::Value;

const CATALOGUE: &str = "schema/messages.json";
const VECTORS: &str = "schema/golden";
/// The published vectors with the ids that git gives their contents, so that a tree with a part of the history, or with
/// none, is compared as well.
const PUBLISHED: &str = "schema/golden/published.txt";

/// Fails with one line for each published vector that is not what it was. Prints why nothing is compared where that is so.
pub(crate) fn check(root: &Path) -> Result<(), String> {
    let catalogue = std::fs::read_to_string(root.join(CATALOGUE));
    let catalogue = catalogue.map_err(|error| format!("{CATALOGUE}: {error}"))?;
    if !is_frozen(&catalogue)? {
        println!("golden vectors: the messages are provisional, and may change");
        return Ok(());
    }
    let mut wrong = differs_from_the_list(root, &catalogue)?;
    if !root.join(".git").exists() {
        println!(
            "golden vectors: compared with {PUBLISHED} alone, because this tree has no history"
        );
        return report(wrong);
    }
    if git(root, &["rev-parse", "--is-shallow-repository"])?.trim() == "true" {
        println!(
            "golden vectors: compared with a part of their history only, because this clone has no more: `git fetch \
             --unshallow` gets it"
        );
    }
    for commit in commits(root)? {
        let listed = git(
            root,
            &["ls-tree", "-r", "--name-only", &commit, "--", VECTORS],
        )?;
        let then = git(root, &["show", &format!("{commit}:{CATALOGUE}")])?;
        for name in listed.lines().filter(|name| name.ends_with(".hex")) {
            let published = git(root, &["show", &format!("{commit}:{name}")])?;
            if !is_public(&then, &published)? {
                continue;
            }
            match std::fs::read_to_string(root.join(name)) {
                Ok(now) if now == published => {}
                Ok(_) => {
                    wrong.insert(format!("{name} has changed since {commit}"));
                }
                Err(_) => {
                    wrong.insert(format!("{name} is gone since {commit}"));
                }
            }
        }
    }
    report(wrong)
}

/// One line for each public vector that differs from the list, is not in it, or is gone.
fn differs_from_the_list(root: &Path, catalogue: &str) -> Result<BTreeSet<String>, String> {
    let listed = std::fs::read_to_string(root.join(PUBLISHED));
    let listed = listed.map_err(|error| format!("{PUBLISHED}: {error}"))?;
    let mut listed: BTreeMap<&str, &str> = listed
        .lines()
        .filter_map(|line| line.split_once("  "))
        .map(|(id, name)| (name, id))
        .collect();
    let mut wrong = BTreeSet::new();
    for version in ["v1", "v2"] {
        let folder = root.join(VECTORS).join(version);
        let Ok(files) = std::fs::read_dir(&folder) else {
            continue;
        };
        for file in files {
            let path = file
                .map_err(|error| format!("{}: {error}", folder.display()))?
                .path();
            let name = path
                .strip_prefix(root)
                .unwrap_or(&path)
                .display()
                .to_string();
            if !name.ends_with(".hex") {
                continue;
            }
            let text =
                std::fs::read_to_string(&path).map_err(|error| format!("{name}: {error}"))?;
            if !is_public(catalogue, &text)? {
                continue;
            }
            let id = git(root, &["hash-object", "--no-filters", "--", &name])?;
            match listed.remove(name.as_str()) {
                Some(published) if published == id.trim() => {}
                Some(_) => {
                    wrong.insert(format!("{name} is not the one in {PUBLISHED}"));
                }
                None => {
                    wrong.insert(format!(
                        "{name} is new: add \"{}  {name}\" to {PUBLISHED}",
                        id.trim()
                    ));
                }
            }
        }
    }
    wrong.extend(
        listed
            .keys()
            .map(|name| format!("{name} is in {PUBLISHED}, and is gone")),
    );
    Ok(wrong)
}

fn report(wrong: BTreeSet<String>) -> Result<(), String> {
    match wrong.is_empty() {
        true => Ok(()),
        false => {
            let lines: Vec<String> = wrong.into_iter().collect();
            Err(format!(
                "published golden vectors never change: restore them, and add the new form under another name or in another \
                 version:\n{}",
                lines.join("\n")
            ))
        }
    }
}

/// The first commit with frozen messages, and the later ones that changed a vector, oldest first.
fn commits(root: &Path) -> Result<Vec<String>, String> {
    let changed = git(
        root,
        &["log", "--reverse", "--format=%H", "--", CATALOGUE, VECTORS],
    )?;
    let mut all = Vec::new();
    for commit in changed.lines() {
        if all.is_empty() {
            let shown = git(root, &["show", &format!("{commit}:{CATALOGUE}")]);
            // The commit may be older than the file.
            if !shown.is_ok_and(|text| is_frozen(&text).unwrap_or(false)) {
                continue;
            }
        }
        all.push(commit.to_owned());
    }
    Ok(all)
}

fn is_frozen(catalogue: &str) -> Result<bool, String> {
    Ok(json(catalogue)?["status"] == "frozen")
}

/// Whether the message of a vector is public in a catalogue.
fn is_public(catalogue: &str, vector: &str) -> Result<bool, String> {
    let number = vector
        .get(12..16)
        .and_then(|digits| u64::from_str_radix(digits, 16).ok());
    let number = number.ok_or_else(|| format!("no header: {vector:.40}"))?;
    let catalogue = json(catalogue)?;
    let kinds = catalogue["kinds"].as_array().into_iter().flatten();
    let kind = kinds.into_iter().find(|kind| kind["number"] == number);
    Ok(kind.is_some_and(|kind| kind["stability"] == "public"))
}

fn json(text: &str) -> Result<Value, String> {
    serde_json::from_str(text).map_err(|error| format!("{CATALOGUE}: {error}"))
}

fn git(root: &Path, arguments: &[&str]) -> Result<String, String> {
    let output = Command::new("git")
        .current_dir(root)
        .args(arguments)
        .output();
    let output = output.map_err(|error| format!("git: {error}"))?;
    match output.status.success() {
        true => String::from_utf8(output.stdout).map_err(|error| format!("git: {error}")),
        false => Err(format!(
            "git {}: {}",
            arguments.join(" "),
            String::from_utf8_lossy(&output.stderr).trim()
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A repository with a catalogue and two vectors: of a public and of an internal message.
    struct Repository(std::path::PathBuf);

    impl Repository {
        fn new(name: &str) -> Self {
            let path =
                std::env::temp_dir().join(format!("kvferry-vectors-{name}-{}", std::process::id()));
            let made = Self(path);
            std::fs::create_dir_all(made.0.join("schema/golden/v2")).expect("made");
            made.git(&["init", "--quiet"]);
            made.vector("lookup", 16, "aa");
            made.vector("attach", 48, "aa");
            made
        }

        fn git(&self, arguments: &[&str]) {
            let identity = ["-c", "user.name=test", "-c", "user.email=test@localhost"];
            git(&self.0, &[&identity[..], arguments].concat()).expect("git");
        }

        fn write(&self, name: &str, text: &str) {
            std::fs::write(self.0.join(name), text).expect("written");
        }

        fn vector(&self, name: &str, kind: u16, body: &str) {
            let text = format!("4b5646590002{kind:04x}{}\n{body}\n", "00".repeat(24));
            self.write(&format!("schema/golden/v2/{name}.hex"), &text);
        }

        fn catalogue(&self, status: &str) {
            let text = serde_json::json!({
                "status": status,
                "kinds": [
                    { "number": 16, "stability": "public" },
                    { "number": 48, "stability": "internal" },
                ],
            });
            self.write(CATALOGUE, &text.to_string());
        }

        /// Lists the public vectors as they are.
        fn publish(&self) {
            let mut text = String::new();
            for name in ["lookup", "lookup_later"] {
                let path = format!("schema/golden/v2/{name}.hex");
                if self.0.join(&path).exists() {
                    let id = git(&self.0, &["hash-object", &path]).expect("git");
                    text += &format!("{}  {path}\n", id.trim());
                }
            }
            self.write(PUBLISHED, &text);
        }

        fn commit(&self) {
            self.git(&["add", "--all"]);
            self.git(&["commit", "--quiet", "--message", "a change"]);
        }

        fn checked(&self) -> Result<(), String> {
            check(&self.0)
        }
    }

    impl Drop for Repository {
        fn drop(&mut self) {
            std::fs::remove_dir_all(&self.0).ok();
        }
    }

    #[test]
    fn vectors_of_public_messages_never_change_once_they_are_frozen() {
        let made = Repository::new("frozen");
        made.catalogue("provisional");
        made.commit();
        made.vector("lookup", 16, "bb");
        assert_eq!(made.checked(), Ok(()), "provisional");
        made.catalogue("frozen");
        made.publish();
        made.commit();
        made.vector("attach", 48, "bb");
        made.commit();
        assert_eq!(made.checked(), Ok(()), "of an internal message");
        made.vector("lookup_later", 16, "cc");
        let error = made.checked().expect_err("it is not listed");
        assert!(error.contains("lookup_later.hex is new: add"), "{error}");
        made.publish();
        made.commit();

        for name in ["lookup", "lookup_later"] {
            let path = format!("schema/golden/v2/{name}.hex");
            let published = std::fs::read_to_string(made.0.join(&path)).expect("a vector");
            made.vector(name, 16, "dd");
            let error = made.checked().expect_err("it has changed");
            assert!(
                error.contains(&format!("{path} is not the one in")),
                "{error}"
            );
            // Also where the list says the same.
            made.publish();
            let error = made.checked().expect_err("it has changed");
            assert!(
                error.contains(&format!("{path} has changed since")),
                "{error}"
            );
            // Also in a commit.
            made.commit();
            assert!(made.checked().is_err());
            std::fs::remove_file(made.0.join(&path)).expect("removed");
            let error = made.checked().expect_err("it is gone");
            assert!(error.contains(&format!("{path} is gone since")), "{error}");
            made.git(&["reset", "--quiet", "--hard", "HEAD~1"]);
            assert_eq!(
                std::fs::read_to_string(made.0.join(&path)).expect("a vector"),
                published
            );
            assert_eq!(made.checked(), Ok(()));
        }
    }

    #[test]
    fn a_clone_with_a_part_of_the_history_is_compared_with_that_part() {
        let made = Repository::new("whole");
        made.catalogue("frozen");
        made.publish();
        made.commit();
        made.vector("lookup_later", 16, "cc");
        made.publish();
        made.commit();
        let clone = Repository::new("shallow");
        std::fs::remove_dir_all(&clone.0).expect("removed");
        let (from, to) = (
            format!("file://{}", made.0.display()),
            clone.0.display().to_string(),
        );
        made.git(&["clone", "--quiet", "--depth", "1", &from, &to]);
        assert_eq!(clone.checked(), Ok(()));
        clone.vector("lookup", 16, "dd");
        let error = clone.checked().expect_err("it has changed");
        assert!(error.contains("lookup.hex has changed since"), "{error}");
    }

    #[test]
    fn a_tree_without_history_is_compared_with_the_list() {
        let made = Repository::new("bare");
        made.catalogue("frozen");
        made.publish();
        std::fs::remove_dir_all(made.0.join(".git")).expect("removed");
        assert_eq!(made.checked(), Ok(()));
        made.vector("lookup", 16, "dd");
        let error = made.checked().expect_err("it has changed");
        assert!(error.contains("lookup.hex is not the one in"), "{error}");
    }
}
