//! The tests of the Python package, with a real vLLM and a real SGLang on the CPU.
//!
//! vLLM and its dependencies, about 2.5 GB, are installed once into a folder of the user's cache (`install`), SGLang into
//! another one (`sglang`). The package is built from this tree and installed below `target/`, so that the tests run what
//! a user gets.

mod install;
mod sglang;

use std::path::{Path, PathBuf};
use std::process::Command;

use install::Installed;

/// Runs the Python tests. `--full`: every combination of engine, dtype and ranks; `--install`: only the installation.
/// Other arguments are passed to pytest.
pub(crate) fn run(root: &Path, arguments: &[String]) -> Result<(), String> {
    if arguments.iter().any(|argument| argument == "--install") {
        let installed = install::installed(root)?;
        return sglang::installed(root, &installed).map(drop);
    }
    succeed(&mut prepare(root, arguments)?, "the Python tests")
}

/// Installs and builds all that the Python tests need. Returns the command that runs them.
pub(crate) fn prepare(root: &Path, arguments: &[String]) -> Result<Command, String> {
    let installed = install::installed(root)?;
    let sglang = sglang::installed(root, &installed)?;
    lint(root, &installed)?;
    let package = build(root, &installed, "dev")?;
    build_packages(root)?;
    let full = arguments.iter().any(|argument| argument == "--full");
    let mut pytest = installed.python();
    pytest
        .args(["-m", "pytest"])
        .args(arguments.iter().filter(|argument| *argument != "--full"))
        .current_dir(root)
        .env("PYTHONPATH", &package)
        .env(
            "FAKE_CUDA_LIBRARY",
            root.join("target/debug/libkvferry_fake_cuda.so"),
        )
        .env("KVFERRY_TOOLS", root.join("target/debug/kvferry-tools"))
        .env("KVFERRY_SGLANG_PYTHON", sglang)
        .env("KVFERRY_VLLM_FULL", if full { "1" } else { "" });
    Ok(pytest)
}

fn lint(root: &Path, installed: &Installed) -> Result<(), String> {
    for task in [&["check"][..], &["format", "--check"]] {
        let mut ruff = Command::new(installed.tool("ruff"));
        ruff.args(task)
            .args(["--no-cache", "python", "examples"])
            .current_dir(root);
        succeed(&mut ruff, "ruff")?;
    }
    Ok(())
}

/// Measurements with engines and clients: a name, the script, and its arguments.
const ENGINES: [(&str, &str, &[&str]); 5] = [
    ("decode", "python/benches/cost.py", &["decode"]),
    ("prompts", "python/benches/cost.py", &["prompts"]),
    ("overhead", "python/benches/engines.py", &["overhead"]),
    ("gain", "python/benches/engines.py", &["gain"]),
    ("ping", "python/benches/ping.py", &[]),
];

/// Tests that take longer with `--full`: a name, and the files.
const LONG: [(&str, &[&str]); 2] = [
    (
        "tests",
        &[
            "test_vllm_load.py",
            "test_vllm_hybrid.py",
            "test_vllm_hybrid_load.py",
        ],
    ),
    (
        "sglang",
        &[
            "test_merged_events.py",
            "test_sglang.py",
            "test_sglang_pools.py",
            "test_sglang_transfers.py",
            "test_sglang_offloads.py",
            "test_sglang_at_once.py",
            "test_sglang_counts.py",
            "test_sglang_ranks.py",
            "test_engines_together.py",
        ],
    ),
];

/// Measures the connector with an optimised program, one measurement after another, then runs the long tests: the parts
/// that are named, or all of them. Arguments after the first part go to its script.
pub(crate) fn engines(root: &Path, arguments: &[String]) -> Result<(), String> {
    let part = arguments.first().map_or("", String::as_str);
    let selected = |name: &str| part.is_empty() || part == name;
    let measured = ENGINES.iter().map(|(name, _, _)| *name);
    let names: Vec<&str> = measured.chain(LONG.map(|(name, _)| name)).collect();
    if !part.is_empty() && !names.contains(&part) {
        return Err(format!(
            "'{part}' is no part of engines: give one of {}",
            names.join(", ")
        ));
    }
    let installed = install::installed(root)?;
    let package = match ENGINES.iter().any(|(name, ..)| selected(name)) {
        true => build(root, &installed, "dist")?,
        false => PathBuf::new(),
    };
    let path = std::env::join_paths([package, root.join("python/tests")])
        .map_err(|error| error.to_string())?;
    for (name, script, script_arguments) in ENGINES {
        if !selected(name) {
            continue;
        }
        println!("{name}:");
        let mut python = installed.python();
        python
            .arg(script)
            .args(script_arguments)
            .args(arguments.iter().skip(1))
            .current_dir(root)
            .env("PYTHONPATH", &path);
        succeed(&mut python, name)?;
    }
    for (name, files) in LONG {
        if !selected(name) {
            continue;
        }
        let mut tests = vec!["--full".to_owned()];
        tests.extend(files.iter().map(|file| format!("python/tests/{file}")));
        tests.extend(arguments.iter().skip(1).cloned());
        println!("{name}:");
        succeed(&mut prepare(root, &tests)?, "the long tests")?;
    }
    Ok(())
}

/// Builds the package as a user's `pip install .` would, and installs it into a folder of its own.
fn build(root: &Path, installed: &Installed, profile: &str) -> Result<PathBuf, String> {
    let package = root.join("target/python");
    let path = std::env::var_os("PATH").unwrap_or_default();
    let tools = std::iter::once(installed.tools()).chain(std::env::split_paths(&path));
    let tools = std::env::join_paths(tools).map_err(|error| error.to_string())?;
    let mut uv = Command::new(installed.tool("uv"));
    uv.args(["pip", "install", "--quiet", "--python"])
        .arg(installed.tool("python"))
        .arg("--target")
        .arg(&package)
        .args(["--no-deps", "--no-build-isolation", "--no-cache"])
        .args(["--reinstall", "."])
        .current_dir(root)
        .env("PATH", tools)
        .env(
            "MATURIN_PEP517_ARGS",
            format!("--profile {profile} --locked"),
        )
        .env("CARGO_TARGET_DIR", root.join("target"));
    crate::without_package(&mut uv);
    succeed(&mut uv, "building the Python package")?;
    Ok(package)
}

/// Builds the CUDA driver for tests, and the program that applies the rules of groups.
fn build_packages(root: &Path) -> Result<(), String> {
    let packages = ["kvferry-fake-cuda", "kvferry-tools"].map(|name| ["--package", name]);
    let mut cargo = crate::cargo_command();
    cargo
        .args(["build", "--quiet", "--locked"])
        .args(packages.as_flattened())
        .current_dir(root)
        .env("CARGO_TARGET_DIR", root.join("target"));
    succeed(&mut cargo, "building the programs of the Python tests")
}

fn succeed(command: &mut Command, what: &str) -> Result<(), String> {
    match command.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("{what} ended with {status}")),
        Err(error) => Err(format!("{what}: {error}")),
    }
}
