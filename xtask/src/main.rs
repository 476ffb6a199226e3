//! Development tasks; `cargo xtask` lists them.

#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a tool for the terminal"
)]

mod chaos;
mod compare;
mod containers;
mod fuzz;
mod gpu;
mod licences;
mod planted;
mod skipped;
mod vectors;
mod vllm;

use std::ffi::OsStr;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode};

const HELP: &str = "cargo xtask TASK

  test       run every test of the workspace, and the Python tests; lists
             at its end which were skipped and why, which with CI=true is a failure
  sim        run simulated worlds with faults: --seeds A..B [--steps N] [--jobs N] [--trace]; a seed
             that fails is printed with the command that repeats it, and is added to tests/seeds.txt
  planted    which lies of its hosts the simulator finds, and by which seeds; then which bugs of
             tests/planted the tests find, each built in a copy of the tree: [PART OF A NAME] of these
  chaos      kill and stop real processes at random under a replay that compares every byte:
             [--minutes 30] [--seed 1] [--device cpu|cuda]: cuda is the driver for tests
  containers the pod of docs/deploy.md in two containers, and an operator's first hour, as root with podman, buildah and
             runc (apt-get install them): [--program FILE], one that was built before
  disk       the tests that need disks with faults of their own, as root on a machine with loop devices and
             the block controller of cgroups (version 1)
  fuzz       run the fuzzers of fuzz/, 10 minutes or 10 million runs each, and print their figures: [TARGET...]
             [--runs N] [--seconds N] [--at-once N]; needs cargo-fuzz. live: send 100,000 changed messages to
             real processes
  gpu        on a machine with an NVIDIA GPU: the tests of copies with its driver, and kvferry bench gpu;
             [--pack FILE.tar.gz] packs all of it for such a machine without cargo and network
  vllm       the Python tests, with a real vLLM and a real SGLang on the CPU, which are installed into the cache
             folder once: [--full] every combination, [--install] nothing else, [ARGUMENTS of pytest]
  engines    measure the vLLM connector: [decode|prompts|overhead|gain] costs beside vLLM's scheduler, times of a
             real engine with and without kvferry; [ping] round trips beside those of libzmq; [tests] the long
             form of the tests under load and of hybrid models; [sglang] the long form of SGLang's tests, with
             two ranks, faults, and vLLM beside it; without a name, all of them
  compare    measure REV and this tree in turn, both as they are shipped: instructions (by valgrind), times, sizes;
             prints a table with what differs by more than the noise: REV [--only PART OF A NAME]
             [--build]: the first command, too, which fails above its limit
  licences   check that every dependency's licence is allowed by deny.toml
  check      format, lints, licences, tests: what CI runs";

fn main() -> ExitCode {
    let task = std::env::args().nth(1).unwrap_or_default();
    let result = match task.as_str() {
        "test" => test(),
        "sim" => sim(),
        "planted" => planted(),
        "disk" => disk(),
        "fuzz" => fuzz::run(root(), &std::env::args().skip(2).collect::<Vec<String>>()),
        "gpu" => gpu::run(&std::env::args().skip(2).collect::<Vec<String>>()),
        "containers" => containers::run(root(), &std::env::args().skip(2).collect::<Vec<String>>()),
        "chaos" => chaos::run(&std::env::args().skip(2).collect::<Vec<String>>()),
        "vllm" => vllm::run(root(), &std::env::args().skip(2).collect::<Vec<String>>()),
        "engines" => vllm::engines(root(), &std::env::args().skip(2).collect::<Vec<String>>()),
        "compare" => compare::run(root(), &std::env::args().skip(2).collect::<Vec<String>>()),
        "licences" => licences::check(root()),
        "check" => check(),
        "" | "help" | "--help" => {
            println!("{HELP}");
            Ok(())
        }
        other => Err(format!("unknown task '{other}'\n\n{HELP}")),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("error: {why}");
            ExitCode::FAILURE
        }
    }
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .unwrap_or(Path::new("."))
}

/// Cargo's folder for this tree.
fn target() -> PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
    target.unwrap_or_else(|| root().join("target"))
}

/// Runs every test. The Python tests, which wait for engines much of the time, run beside the others; their output
/// follows at the end. Lists skipped tests last.
fn test() -> Result<(), String> {
    vectors::check(root())?;
    let list = skipped::start(root())?;
    let all = ["test", "--workspace", "--locked", "--all-targets"];
    cargo(&[&all[..], &["--no-run"]].concat())?;
    let mut beside = Beside::start(vllm::prepare(root(), &[])?)?;
    let tested = cargo_with(&[(skipped::LIST, list.as_os_str())], &all);
    // Waits also after a failure, which tells nothing about the Python tests.
    let beside = beside.succeed("the Python tests");
    tested.and(beside)?;
    skipped::finish(&list)
}

/// A command that runs beside other ones, with its output in a file below `target/`.
struct Beside {
    child: Child,
    output: PathBuf,
}

impl Beside {
    fn start(mut command: Command) -> Result<Self, String> {
        let output = root().join("target/python-tests.log");
        let error = |error| format!("{}: {error}", output.display());
        let file = File::create(&output).map_err(error)?;
        let errors = file.try_clone().map_err(error)?;
        println!(
            "the Python tests run beside the others, into {}",
            output.display()
        );
        let child = command.stdout(file).stderr(errors).spawn().map_err(error)?;
        Ok(Self { child, output })
    }

    /// Waits for the end, and prints the output.
    fn succeed(&mut self, what: &str) -> Result<(), String> {
        let status = self
            .child
            .wait()
            .map_err(|error| format!("{what}: {error}"))?;
        let output = std::fs::read(&self.output).map_err(|error| format!("{what}: {error}"))?;
        println!("{}", String::from_utf8_lossy(&output));
        match status.success() {
            true => Ok(()),
            false => Err(format!("{what} ended with {status}")),
        }
    }
}

/// Runs `kvferry-tools sim`, with the rest of the command line as its arguments.
fn sim() -> Result<(), String> {
    let given: Vec<String> = std::env::args().skip(2).collect();
    let mut arguments = vec![
        "run",
        "--profile",
        "dist",
        "--locked",
        "--quiet",
        "--package",
        "kvferry-tools",
        "--",
        "sim",
    ];
    arguments.extend(["--corpus", "tests/seeds.txt"]);
    arguments.extend(given.iter().map(String::as_str));
    cargo(&arguments)
}

fn planted() -> Result<(), String> {
    if let Some(only) = std::env::args().nth(2) {
        return planted::run(root(), &only);
    }
    let name = "every_lie_is_found";
    let only = std::env::var_os("KVFERRY_PLANTED").unwrap_or_default();
    let task = [
        "test",
        "--locked",
        "--package",
        "kvferry-sim",
        "--lib",
        name,
        "--",
        "--nocapture",
    ];
    cargo_with(&[("KVFERRY_PLANTED", &only)], &task)?;
    planted::run(root(), "")
}

/// Runs the tests on loop devices, one after another: each sets up a device of its own.
fn disk() -> Result<(), String> {
    let packages = ["-p", "kvferry-tiers", "-p", "kvferry-actors"];
    let tests = ["--", "--ignored", "--nocapture", "--test-threads", "1"];
    cargo(&[&["test", "--locked"], &packages[..], &tests[..], &["on_a_"]].concat())
}

fn check() -> Result<(), String> {
    cargo(&["fmt", "--all", "--check"])?;
    cargo(&[
        "clippy",
        "--workspace",
        "--all-targets",
        "--locked",
        "--",
        "-D",
        "warnings",
    ])?;
    licences::check(root())?;
    test()
}

/// The cargo that runs this program.
fn cargo_command() -> Command {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    without_package(&mut cargo);
    cargo
}

/// Removes the variables of this package from a command that builds. A build script that looks at them, such as that of
/// `ring`, would run again after each change between `cargo` and `cargo xtask`, and all that depends on it be compiled.
fn without_package(command: &mut Command) {
    for (name, _) in std::env::vars_os() {
        let shown = name.to_string_lossy();
        if shown.starts_with("CARGO_PKG_") || shown.starts_with("CARGO_MANIFEST_") {
            command.env_remove(&name);
        }
    }
}

fn cargo(arguments: &[&str]) -> Result<(), String> {
    cargo_with(&[], arguments)
}

fn cargo_with(variables: &[(&str, &OsStr)], arguments: &[&str]) -> Result<(), String> {
    let status = cargo_command()
        .current_dir(root())
        .envs(variables.iter().copied())
        .args(arguments)
        .status();
    match status {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("cargo {} ended with {status}", arguments.join(" "))),
        Err(error) => Err(format!("cargo: {error}")),
    }
}
