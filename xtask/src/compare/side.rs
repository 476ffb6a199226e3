//! The two builds that are compared: their sources and their programs.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The places of the sides in lists.
pub(super) const BASE: usize = 0;
pub(super) const TREE: usize = 1;

/// The programs that are measured. They are built in the profile in which they are shipped.
pub(super) const PROGRAMS: [&str; 2] = ["kvferry", "kvferry-tools"];
const BUILD: [&str; 8] = [
    "build",
    "--profile",
    "dist",
    "--locked",
    "--package",
    "kvferry",
    "--package",
    "kvferry-tools",
];

/// One side: a revision, or this tree.
pub(super) struct Side {
    /// The commit, and what this tree changes.
    pub(super) title: String,
    /// The sources.
    pub(super) sources: PathBuf,
    /// The folder of the programs.
    programs: PathBuf,
}

impl Side {
    /// Unpacks a revision below `target/compare`, and builds it, unless an earlier run has.
    pub(super) fn of_revision(root: &Path, revision: &str) -> Result<Self, String> {
        let commit = format!("{revision}^{{commit}}");
        let commit = git(root, &["rev-parse", "--verify", "--quiet", &commit])
            .map_err(|_| format!("'{revision}' is no revision of this repository"))?;
        let folder = crate::target().join("compare").join(&commit);
        let (sources, programs) = (folder.join("sources"), folder.join("programs"));
        let side = Self {
            title: git(root, &["log", "-1", "--format=%h %cs", &commit])?,
            sources,
            programs,
        };
        if PROGRAMS.iter().all(|name| side.program(name).exists()) {
            return Ok(side);
        }
        unpack(root, &commit, &side.sources)?;
        let built = folder.join("build");
        build(&side.sources, &built)?;
        let copied = std::fs::create_dir_all(&side.programs).and_then(|()| {
            PROGRAMS.iter().try_for_each(|name| {
                std::fs::copy(built.join("dist").join(name), side.program(name)).map(drop)
            })
        });
        let removed = copied.and_then(|()| std::fs::remove_dir_all(&built));
        removed.map_err(|error| format!("{}: {error}", folder.display()))?;
        Ok(side)
    }

    pub(super) fn of_tree(root: &Path) -> Result<Self, String> {
        build(root, &crate::target())?;
        let commit = git(root, &["log", "-1", "--format=%h %cs"])?;
        let changed = git(root, &["status", "--porcelain", "--untracked-files=no"])?;
        let changed = if changed.is_empty() {
            ""
        } else {
            " with changes"
        };
        Ok(Self {
            title: format!("{commit}{changed}"),
            sources: root.to_path_buf(),
            programs: crate::target().join("dist"),
        })
    }

    pub(super) fn program(&self, name: &str) -> PathBuf {
        self.programs.join(name)
    }
}

/// The output of git, without the line's end.
pub(super) fn git(root: &Path, arguments: &[&str]) -> Result<String, String> {
    let output = Command::new("git")
        .current_dir(root)
        .args(arguments)
        .output();
    let output = output.map_err(|error| format!("git: {error}"))?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout)
            .trim_end()
            .to_owned()),
        false => Err(format!(
            "git {}: {}",
            arguments.join(" "),
            String::from_utf8_lossy(&output.stderr).trim_end()
        )),
    }
}

fn unpack(root: &Path, commit: &str, sources: &Path) -> Result<(), String> {
    let error = |error: std::io::Error| format!("{}: {error}", sources.display());
    std::fs::create_dir_all(sources).map_err(error)?;
    let mut archive = Command::new("git")
        .current_dir(root)
        .args(["archive", commit])
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|error| format!("git archive: {error}"))?;
    let mut tar = Command::new("tar");
    tar.arg("-x").current_dir(sources);
    if let Some(packed) = archive.stdout.take() {
        tar.stdin(packed);
    }
    let unpacked = tar.status().map_err(|error| format!("tar: {error}"))?;
    let packed = archive
        .wait()
        .map_err(|error| format!("git archive: {error}"))?;
    match packed.success() && unpacked.success() {
        true => Ok(()),
        false => Err(format!(
            "{commit} was not unpacked into {}",
            sources.display()
        )),
    }
}

fn build(sources: &Path, target: &Path) -> Result<(), String> {
    println!("building {}", sources.display());
    let mut cargo = crate::cargo_command();
    cargo.current_dir(sources).args(BUILD).arg("--quiet");
    let status = cargo.env("CARGO_TARGET_DIR", target).status();
    match status.map_err(|error| format!("cargo: {error}"))? {
        status if status.success() => Ok(()),
        status => Err(format!(
            "the build of {} ended with {status}",
            sources.display()
        )),
    }
}
