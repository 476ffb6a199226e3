//! Checks and measurements on a machine with an NVIDIA GPU: run here, or packed for a machine without cargo.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use cargo_metadata::Message;

use super::{cargo, cargo_with, root};

/// Maximum size of the archive. Some machines accept no larger upload.
const PACK_BYTES_MAX: u64 = 48 << 20;
/// Allowed endings of the archive's name. `tar` chooses the compression by the ending.
const ENDINGS: &[&str] = &[".tar.gz", ".tgz", ".tar.xz"];
/// The folder in the archive.
const FOLDER: &str = "kvferry-gpu";
/// The library that replaces NVIDIA's driver in tests. Tests expect it beside their programs.
const DRIVER_FOR_TESTS: &str = "libkvferry_fake_cuda.so";
/// Scripts that run on the other machine, by file name.
const SCRIPTS: &[(&str, &str)] = &[
    ("run.sh", include_str!("../gpu/run.sh")),
    ("engine_loop.py", include_str!("../gpu/engine_loop.py")),
    ("neighbour.py", include_str!("../gpu/neighbour.py")),
    ("torch_rank.py", include_str!("../gpu/torch_rank.py")),
    ("vllm_engine.py", include_str!("../gpu/vllm_engine.py")),
    ("vllm_models.py", include_str!("../gpu/vllm_models.py")),
    ("vllm_session.py", include_str!("../gpu/vllm_session.py")),
];

/// The Python package, in the tree and in the archive.
const PACKAGE: &str = "python/kvferry";

/// Runs `cargo xtask gpu` or `cargo xtask gpu --pack FILE`.
pub(crate) fn run(arguments: &[String]) -> Result<(), String> {
    match arguments {
        [] => here(),
        [flag, file] if flag == "--pack" => pack(Path::new(file)),
        other => Err(format!(
            "gpu takes nothing, or --pack FILE, and not '{}'",
            other.join(" ")
        )),
    }
}

/// Runs the tests of the driver for tests with the machine's own driver, then measures the machine's links.
fn here() -> Result<(), String> {
    let on_gpu = [("CUDA_TESTS", OsStr::new("gpu"))];
    let copies = ["tests::copies", "tests::neighbour"];
    let library = [
        "test",
        "--locked",
        "--package",
        "kvferry-cuda",
        "--lib",
        "--",
        "--test-threads=1",
    ];
    cargo_with(&on_gpu, &[&library[..], &copies].concat())?;
    let processes = ["on_gpus", "--test-threads=1"];
    let cluster = ["test", "--locked", "--test", "cluster", "--"];
    cargo_with(&on_gpu, &[&cluster[..], &processes].concat())?;
    cargo(&["run", "--profile", "dist", "--locked", "--", "bench", "gpu"])
}

/// Builds programs and tests, and packs them with the script that runs them.
fn pack(file: &Path) -> Result<(), String> {
    let name = file.file_name().map(OsStr::to_string_lossy);
    let name = name.unwrap_or_default();
    if !ENDINGS.iter().any(|ending| name.ends_with(ending)) {
        return Err(format!(
            "--pack {}: let its name end in one of {}",
            file.display(),
            ENDINGS.join(", ")
        ));
    }
    let program = built(&["build", "--profile", "dist", "--locked", "--bin", "kvferry"])?;
    let copies = [
        "test",
        "--locked",
        "--package",
        "kvferry-cuda",
        "--lib",
        "--no-run",
    ];
    let mut tests = built(&copies)?;
    tests.extend(built(&[
        "test", "--locked", "--test", "cluster", "--no-run",
    ])?);
    let parent = root().join("target/gpu-pack");
    let folder = parent.join(FOLDER);
    let io = |error: std::io::Error| format!("{}: {error}", folder.display());
    if folder.exists() {
        fs::remove_dir_all(&folder).map_err(io)?;
    }
    fs::create_dir_all(folder.join("tests")).map_err(io)?;
    let library = find(&tests, "kvferry_cuda", true)?;
    let beside = library.parent().unwrap_or(Path::new("."));
    for (from, to) in [
        (find(&program, "kvferry", false)?, "kvferry"),
        (library.clone(), "tests/library"),
        (find(&tests, "cluster", true)?, "tests/cluster"),
        (
            beside.join(DRIVER_FOR_TESTS),
            &format!("tests/{DRIVER_FOR_TESTS}"),
        ),
    ] {
        let to = folder.join(to);
        fs::copy(&from, &to).map_err(|error| format!("{}: {error}", from.display()))?;
        tool("strip", &["--strip-unneeded".into(), to.into()])?;
    }
    for (name, text) in SCRIPTS {
        fs::write(folder.join(name), text).map_err(io)?;
    }
    copy_modules(&root().join(PACKAGE), &folder.join(PACKAGE))?;
    fs::write(folder.join("VERSION"), version()).map_err(io)?;
    archive(&parent, file)?;
    let bytes = fs::metadata(file).map_err(io)?.len();
    if bytes > PACK_BYTES_MAX {
        return Err(format!(
            "{} has {:.1} MiB, and at most {} are wanted: a name that ends in .tar.xz packs more tightly",
            file.display(),
            mib(bytes),
            PACK_BYTES_MAX >> 20
        ));
    }
    println!(
        "{}: {:.1} MiB. On the machine with the GPU: tar -xf {name} && bash {FOLDER}/run.sh",
        file.display(),
        mib(bytes)
    );
    Ok(())
}

/// Copies the Python modules of a folder and of the folders in it.
fn copy_modules(from: &Path, to: &Path) -> Result<(), String> {
    let io = |error: std::io::Error| format!("{}: {error}", from.display());
    fs::create_dir_all(to).map_err(io)?;
    for entry in fs::read_dir(from).map_err(io)? {
        let entry = entry.map_err(io)?;
        let (path, to) = (entry.path(), to.join(entry.file_name()));
        if path.is_dir() {
            if path.file_name() != Some(OsStr::new("__pycache__")) {
                copy_modules(&path, &to)?;
            }
        } else if path.extension().is_some_and(|ending| ending == "py") {
            fs::copy(&path, &to).map_err(io)?;
        }
    }
    Ok(())
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// The version of the built tree, for the log of a run.
fn version() -> String {
    let mut git = Command::new("git");
    git.args(["describe", "--always", "--dirty", "--abbrev=12"]);
    let output = git.current_dir(root()).output();
    let described = output.ok().filter(|output| output.status.success());
    let described = described.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    described.unwrap_or_else(|| "a tree without git\n".to_owned())
}

fn archive(parent: &Path, file: &Path) -> Result<(), String> {
    let arguments: [OsString; 9] = [
        "--create".into(),
        "--auto-compress".into(),
        "--sort=name".into(),
        "--owner=0".into(),
        "--group=0".into(),
        "--file".into(),
        file.into(),
        "--directory".into(),
        parent.into(),
    ];
    tool("tar", &[&arguments[..], &[FOLDER.into()]].concat())
}

fn tool(name: &str, arguments: &[OsString]) -> Result<(), String> {
    match Command::new(name).args(arguments).status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("{name} ended with {status}")),
        Err(error) => Err(format!("{name}: {error}")),
    }
}

/// A program that was built.
struct Built {
    target: String,
    is_test: bool,
    path: PathBuf,
}

fn find(built: &[Built], target: &str, is_test: bool) -> Result<PathBuf, String> {
    let found = built
        .iter()
        .find(|built| built.target == target && built.is_test == is_test);
    let found = found.ok_or_else(|| format!("cargo built no {target}"))?;
    Ok(found.path.clone())
}

/// Runs cargo. Returns the programs that it built or found to be up to date.
fn built(arguments: &[&str]) -> Result<Vec<Built>, String> {
    let mut cargo = crate::cargo_command();
    cargo
        .args(arguments)
        .arg("--message-format=json-render-diagnostics")
        .current_dir(root())
        .stdout(Stdio::piped());
    let mut child = cargo.spawn().map_err(|error| format!("cargo: {error}"))?;
    let mut found = Vec::new();
    if let Some(messages) = child.stdout.take() {
        for message in Message::parse_stream(BufReader::new(messages)) {
            let message = message.map_err(|error| format!("cargo: {error}"))?;
            if let Message::CompilerArtifact(artifact) = message
                && let Some(path) = artifact.executable
            {
                found.push(Built {
                    target: artifact.target.name,
                    is_test: artifact.profile.test,
                    path: path.into(),
                });
            }
        }
    }
    match child.wait() {
        Ok(status) if status.success() => Ok(found),
        Ok(status) => Err(format!("cargo {} ended with {status}", arguments.join(" "))),
        Err(error) => Err(format!("cargo: {error}")),
    }
}

#[cfg(test)]
mod tests;
