//! A Python environment with vLLM for the CPU, outside the tree.

use std::ffi::OsString;
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use super::succeed;

/// Files that determine the installation. A change of any of them creates a new environment.
const RECIPE: &[&str] = &[
    "python/tests/requirements.in",
    "python/tests/constraints.txt",
    "python/tests/overrides.txt",
    "python/tests/cuda_stubs.py",
];
/// Source of the library that replaces `sched_yield` in engines. Compiled when the library is missing. Not part of the
/// recipe, because a change of it needs no new environment.
const SCHED_YIELD: &str = "python/tests/sched_yield.c";
const UV: &str = "uv==0.13.9";
/// Version of the package metadata that vLLM's command line looks up as `vllm`. The wheel has another name.
const VERSION: &str = "0.32.0+cpu";

/// An installed environment.
pub(super) struct Installed {
    folder: PathBuf,
    /// The library that was compiled from [`SCHED_YIELD`].
    sched_yield: PathBuf,
}

impl Installed {
    /// The environment's own folder.
    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Folder of the environment's programs.
    pub(super) fn tools(&self) -> PathBuf {
        self.folder.join("venv/bin")
    }

    pub(super) fn tool(&self, name: &str) -> PathBuf {
        self.tools().join(name)
    }

    /// Python, configured to run vLLM here: one thread for each process, no compiling at run time, no network. Bytecode
    /// is always cached, whatever the caller's environment sets, because each engine would otherwise start half a
    /// minute later.
    pub(super) fn python(&self) -> Command {
        let mut python = Command::new(self.tool("python"));
        let mut preloaded = self.sched_yield.clone().into_os_string();
        preloaded.push(":");
        preloaded.push(self.folder.join("venv/lib/libiomp5.so"));
        python
            .env("LD_LIBRARY_PATH", self.folder.join("stubs"))
            .env("LD_PRELOAD", preloaded)
            .env("VLLM_CPU_OMP_THREADS_BIND", "nobind")
            .env("OMP_NUM_THREADS", "1")
            .env("TORCH_COMPILE_DISABLE", "1")
            .env("VLLM_CPU_KVCACHE_SPACE", "1")
            .env("VLLM_NO_USAGE_STATS", "1")
            .env("HF_HUB_OFFLINE", "1")
            .env("PYTHONPYCACHEPREFIX", self.folder.join("bytecode"))
            .env_remove("PYTHONDONTWRITEBYTECODE");
        python
    }
}

/// The environment, installed if missing. One run installs it, and others wait.
pub(super) fn installed(root: &Path) -> Result<Installed, String> {
    let mut recipe = DefaultHasher::new();
    (UV, VERSION).hash(&mut recipe);
    for name in RECIPE {
        let text = fs::read(root.join(name)).map_err(|error| format!("{name}: {error}"))?;
        text.hash(&mut recipe);
    }
    let folder = cache().join(format!("vllm-{:016x}", recipe.finish()));
    let io = |error: std::io::Error| format!("{}: {error}", folder.display());
    fs::create_dir_all(&folder).map_err(io)?;
    let lock = File::create(folder.join("lock")).map_err(io)?;
    lock.lock().map_err(io)?;
    let complete = folder.join("complete");
    let installed = Installed {
        folder: folder.clone(),
        sched_yield: compiled(root, &folder)?,
    };
    if !complete.exists() {
        println!(
            "installing vLLM for the CPU (about 2.5 GB) into {}",
            folder.display()
        );
        install(root, &installed)?;
        File::create(complete).map_err(io)?;
    }
    Ok(installed)
}

/// Compiles [`SCHED_YIELD`]. The file's name contains a hash of the source, so that trees of two versions each preload
/// their own library. The file is renamed into place, because engines of another run may have it mapped.
fn compiled(root: &Path, folder: &Path) -> Result<PathBuf, String> {
    let source = root.join(SCHED_YIELD);
    let text = fs::read(&source).map_err(|error| format!("{SCHED_YIELD}: {error}"))?;
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    let library = folder.join(format!("sched_yield-{:016x}.so", hasher.finish()));
    if !library.exists() {
        let new = library.with_extension("new");
        let mut cc = Command::new("cc");
        cc.args(["-O1", "-shared", "-fPIC", "-o"])
            .arg(&new)
            .arg(&source);
        succeed(&mut cc, "compiling python/tests/sched_yield.c")?;
        fs::rename(&new, &library).map_err(|error| format!("{}: {error}", library.display()))?;
    }
    Ok(library)
}

/// The user's cache folder, or the system's temporary folder.
pub(super) fn cache() -> PathBuf {
    let given = |name: &str| std::env::var_os(name).filter(|value: &OsString| !value.is_empty());
    let base = given("XDG_CACHE_HOME").map(PathBuf::from);
    let base = base.or_else(|| given("HOME").map(|home| PathBuf::from(home).join(".cache")));
    base.unwrap_or_else(std::env::temp_dir).join("kvferry")
}

fn install(root: &Path, installed: &Installed) -> Result<(), String> {
    let folder = &installed.folder;
    let venv = folder.join("venv");
    let mut python = Command::new("python3");
    python.args(["-m", "venv", "--clear"]).arg(&venv);
    succeed(
        &mut python,
        "python3 -m venv (Debian: apt install python3-venv)",
    )?;
    let mut pip = Command::new(installed.tool("pip"));
    pip.args(["install", "--quiet", "--disable-pip-version-check", UV]);
    succeed(&mut pip, "pip install uv")?;

    let mut uv = Command::new(installed.tool("uv"));
    uv.args(["pip", "install", "--python"])
        .arg(installed.tool("python"))
        .args(["--requirement", "python/tests/requirements.in"])
        .args(["--constraint", "python/tests/constraints.txt"])
        .args(["--override", "python/tests/overrides.txt"])
        .current_dir(root);
    succeed(&mut uv, "installing vLLM")?;

    let packages = site_packages(&venv)?;
    let mut stubs = Command::new(installed.tool("python"));
    stubs
        .arg("python/tests/cuda_stubs.py")
        .arg(packages.join("torch"))
        .arg(folder.join("stubs"))
        .current_dir(root);
    succeed(&mut stubs, "building stubs of CUDA's libraries")?;

    let named = packages.join(format!("vllm-{VERSION}.dist-info"));
    let metadata = format!("Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}\n");
    fs::create_dir_all(&named)
        .and_then(|()| fs::write(named.join("METADATA"), metadata))
        .map_err(|error| format!("{}: {error}", named.display()))
}

pub(super) fn site_packages(venv: &Path) -> Result<PathBuf, String> {
    let lib = venv.join("lib");
    let entries = fs::read_dir(&lib).map_err(|error| format!("{}: {error}", lib.display()))?;
    entries
        .flatten()
        .map(|entry| entry.path().join("site-packages"))
        .find(|path| path.is_dir())
        .ok_or_else(|| format!("{} has no site-packages", lib.display()))
}
