//! A Python environment with SGLang, on top of the one with vLLM: both use its torch.

use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use super::install::{Installed, cache, site_packages};
use super::succeed;

/// Files that determine the installation, besides the environment below. A change of any of them creates a new one.
const RECIPE: &[&str] = &[REQUIREMENTS, STAND_IN];
/// SGLang and the packages that it imports and the environment below lacks. Installed without their dependencies:
/// those are for GPUs.
const REQUIREMENTS: &str = "python/tests/sglang-requirements.txt";
/// Imported by SGLang on every CPU, which calls none of it.
const STAND_IN: &str = "python/tests/sgl_kernel/__init__.py";

/// Python of the environment, which is installed if missing. One run installs it, and others wait.
pub(super) fn installed(root: &Path, below: &Installed) -> Result<PathBuf, String> {
    let mut recipe = DefaultHasher::new();
    below.folder().hash(&mut recipe);
    for name in RECIPE {
        let text = fs::read(root.join(name)).map_err(|error| format!("{name}: {error}"))?;
        text.hash(&mut recipe);
    }
    let folder = cache().join(format!("sglang-{:016x}", recipe.finish()));
    let io = |error: std::io::Error| format!("{}: {error}", folder.display());
    fs::create_dir_all(&folder).map_err(io)?;
    let lock = File::create(folder.join("lock")).map_err(io)?;
    lock.lock().map_err(io)?;
    let complete = folder.join("complete");
    let venv = folder.join("venv");
    if !complete.exists() {
        println!("installing SGLang for the CPU into {}", folder.display());
        install(root, below, &venv)?;
        File::create(complete).map_err(io)?;
    }
    Ok(venv.join("bin/python"))
}

fn install(root: &Path, below: &Installed, venv: &Path) -> Result<(), String> {
    let mut python = Command::new("python3");
    python
        .args(["-m", "venv", "--clear", "--without-pip"])
        .arg(venv);
    succeed(
        &mut python,
        "python3 -m venv (Debian: apt install python3-venv)",
    )?;
    let packages = site_packages(venv)?;
    let io = |error: std::io::Error| format!("{}: {error}", packages.display());
    let path = format!(
        "{}\n",
        site_packages(&below.folder().join("venv"))?.display()
    );
    fs::write(packages.join("below.pth"), path).map_err(io)?;
    let mut uv = Command::new(below.tool("uv"));
    uv.args(["pip", "install", "--no-deps", "--python"])
        .arg(venv.join("bin/python"))
        .args(["--requirement", REQUIREMENTS])
        .current_dir(root);
    succeed(&mut uv, "installing SGLang")?;
    let stand_in = packages.join("sgl_kernel");
    fs::create_dir_all(&stand_in)
        .and_then(|()| fs::copy(root.join(STAND_IN), stand_in.join("__init__.py")))
        .map(drop)
        .map_err(io)
}
