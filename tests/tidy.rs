//! Structural rules that neither Cargo nor Clippy checks.

#![expect(clippy::expect_used, reason = "a test says what it expects")]

mod tidy {
    mod circles;
    pub(crate) mod contract_arrows;
    pub(crate) mod python_arrows;
    pub(crate) mod trtllm_arrows;
}

use std::fs;
use std::path::{Path, PathBuf};

use tidy::contract_arrows::CONTRACT_ARROWS;
use tidy::python_arrows::PYTHON_ARROWS;
use tidy::trtllm_arrows::TRTLLM_ARROWS;

/// A module of the Python package, the modules that it may use, and external packages that it imports when it is loaded.
type Arrow = (
    &'static str,
    &'static [&'static str],
    &'static [&'static str],
);

/// Folders of the Python package.
const PYTHON_FOLDERS: &[&str] = &["contract", "sglang", "trtllm", "vllm"];

/// Allowed dependencies between the modules of the product: each may use the modules that are listed after it. Those
/// between packages are the dependency lists of their manifests.
const ARROWS: &[(&str, &[&str])] = &[
    ("config", &[]),
    ("error", &["config"]),
    ("telemetry", &["error"]),
    ("cli", &["config", "error", "telemetry"]),
];

/// Packages without I/O, and the packages that each may depend on.
const WITHOUT_IO: &[(&str, &[&str])] = &[
    (
        "types",
        &[
            "hashbrown",
            "schemars",
            "serde",
            "serde_bytes",
            "smallvec",
            "thiserror",
        ],
    ),
    ("plan", &["kvferry-types", "thiserror"]),
    (
        "core",
        &[
            "kvferry-types",
            "blake3",
            "hashbrown",
            "siphasher",
            "smallvec",
            "thiserror",
        ],
    ),
    (
        "protocol",
        &[
            "kvferry-types",
            "rmp",
            "rmp-serde",
            "schemars",
            "serde",
            "serde_bytes",
            "serde_json",
            "smallvec",
            "thiserror",
        ],
    ),
    (
        "session",
        &["kvferry-types", "kvferry-protocol", "thiserror", "tracing"],
    ),
    (
        "shell",
        &[
            "kvferry-types",
            "kvferry-core",
            "kvferry-protocol",
            "thiserror",
            "tracing",
        ],
    ),
];

/// The only files with `unsafe` in the packages that do not forbid it.
const UNSAFE_FILES: &[&str] = &[
    "src/cuda/driver/api.rs",
    "src/cuda/driver/context.rs",
    "src/cuda/driver/copies.rs",
    "src/cuda/driver/exit.rs",
    "src/cuda/driver/memory.rs",
    "src/cuda/driver/mod.rs",
    "src/cuda/driver/stream.rs",
    "src/cuda/driver/vmm.rs",
    "src/memory/buffer.rs",
    "src/memory/copy/kernel.rs",
    "src/tiers/disk/copy/uring.rs",
];

const LINES_MAX: usize = 800;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Every Rust file below a folder, with its path from the root and its text.
fn sources(folder: &str) -> Vec<(String, String)> {
    files(folder, "rs")
}

fn files(folder: &str, extension: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut folders: Vec<PathBuf> = vec![root().join(folder)];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|found| found == extension) {
                let name = path.strip_prefix(root()).expect("below the root");
                let text = fs::read_to_string(&path).expect("UTF-8");
                found.push((name.to_string_lossy().into_owned(), text));
            }
        }
    }
    found.sort();
    found
}

/// Lines of code, without comments, documentation and inline test modules. Such a module ends at the next brace in the
/// first column.
fn code(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let lines: Vec<&str> = text.lines().collect();
    let mut kept = Vec::new();
    let mut at = 0;
    while let Some(line) = lines.get(at) {
        let next = lines.get(at + 1).copied().unwrap_or_default();
        if line.starts_with("#[cfg(test)]") && next.contains("mod ") && next.ends_with('{') {
            let length = lines[at..].iter().take_while(|line| **line != "}").count();
            at += length + 1;
            continue;
        }
        if !line.trim_start().starts_with("//") {
            kept.push((at + 1, *line));
        }
        at += 1;
    }
    kept.into_iter()
}

#[test]
fn code_after_a_module_of_tests_is_read() {
    let text = "use a;\n#[cfg(test)]\nmod tests;\nuse b;\n#[cfg(test)]\nmod more {\n    use c;\n}\n// d\nuse e;\n";
    let read: Vec<_> = code(text).collect();
    let expected = [
        (1, "use a;"),
        (2, "#[cfg(test)]"),
        (3, "mod tests;"),
        (4, "use b;"),
        (10, "use e;"),
    ];
    assert_eq!(read, expected);
}

/// The top-level module that a file belongs to.
fn module(name: &str) -> Option<&str> {
    let rest = name.strip_prefix("src/")?;
    let first = rest.split('/').next()?;
    let first = first.strip_suffix(".rs").unwrap_or(first);
    (!matches!(first, "lib" | "main")).then_some(first)
}

#[test]
fn modules_use_only_modules_below_them() {
    let mut seen = 0;
    for (name, text) in sources("src") {
        let known =
            module(&name).and_then(|from| ARROWS.iter().find(|(module, _)| *module == from));
        let Some((from, allowed)) = known else {
            continue;
        };
        for (line, text) in code(&text) {
            for used in text.split("crate::").skip(1) {
                let used: String = used
                    .chars()
                    .take_while(|c| c.is_alphanumeric() || *c == '_')
                    .collect();
                let known = ARROWS.iter().any(|(module, _)| *module == used);
                if known && used != *from && !allowed.contains(&used.as_str()) {
                    panic_at(&name, line, &format!("{from} must not use {used}"));
                }
                seen += usize::from(known);
            }
        }
    }
    assert!(seen > 50, "only {seen} uses seen: the test reads nothing");
}

/// The names in a section of a package's manifest.
fn dependencies(package: &str, section: &str) -> Vec<String> {
    let name = format!("src/{package}/Cargo.toml");
    let text = fs::read_to_string(root().join(&name)).expect("a manifest");
    let lines = text.lines().skip_while(|line| *line != section).skip(1);
    let lines = lines.take_while(|line| !line.starts_with('['));
    let names = lines.filter_map(|line| line.split(['.', ' ', '=']).next());
    names
        .filter(|name| !name.is_empty())
        .map(str::to_owned)
        .collect()
}

#[test]
fn packages_without_io_depend_on_nothing_that_does_io() {
    for (package, allowed) in WITHOUT_IO {
        for name in dependencies(package, "[dependencies]") {
            assert!(
                allowed.contains(&name.as_str()),
                "src/{package} must not depend on {name}"
            );
        }
        let rules = fs::read_to_string(root().join(format!("src/{package}/clippy.toml")));
        assert!(
            rules
                .expect("rules for Clippy")
                .contains("std::time::Instant"),
            "src/{package}/clippy.toml does not forbid clocks"
        );
    }
}

#[test]
fn every_package_without_unsafe_code_forbids_it() {
    let mut seen = 0;
    for entry in fs::read_dir(root().join("src")).expect("src") {
        let folder = entry.expect("an entry").path();
        let name = folder
            .file_name()
            .expect("a name")
            .to_string_lossy()
            .into_owned();
        if !folder.join("Cargo.toml").exists()
            || matches!(name.as_str(), "memory" | "cuda" | "tiers")
        {
            continue;
        }
        let lib = fs::read_to_string(folder.join("lib.rs"));
        let lib = lib
            .or_else(|_| fs::read_to_string(folder.join("main.rs")))
            .expect("a root");
        assert!(
            lib.contains("#![forbid(unsafe_code)]"),
            "src/{name} does not forbid unsafe code"
        );
        seen += 1;
    }
    assert!(seen >= 10, "only {seen} packages seen");
}

#[test]
fn unsafe_occurs_in_its_files_only() {
    let words = ["unsafe {", "unsafe fn", "unsafe impl", "unsafe_code"];
    for folder in ["src/memory", "src/cuda", "src/tiers"] {
        for (name, text) in sources(folder) {
            if !UNSAFE_FILES.contains(&name.as_str()) {
                forbid(&name, &text, &words);
            }
        }
    }
    for file in UNSAFE_FILES {
        assert!(
            root().join(file).exists(),
            "{file} is listed and does not exist"
        );
    }
}

/// `c_char` is signed on x86-64 and unsigned on aarch64: code with arrays of it in the driver's structures would
/// compile on only one of them.
#[test]
fn structures_of_the_driver_contain_bytes_and_no_characters() {
    let mut seen = 0;
    for (name, text) in sources("src/cuda/driver") {
        for (line, text) in code(&text) {
            let words = ["c_char; ", "i8; ", "i8::", "CUipcMemHandle", "cast_signed"];
            if let Some(word) = words.iter().find(|word| text.contains(**word)) {
                panic_at(&name, line, &format!("{word}: take u8"));
            }
            seen += 1;
        }
    }
    assert!(seen > 500, "only {seen} lines seen: the test reads nothing");
}

#[test]
fn no_file_exceeds_the_line_limit() {
    for folder in ["src", "tests", "xtask"] {
        for (name, text) in sources(folder) {
            let lines = text.lines().count();
            assert!(
                lines <= LINES_MAX,
                "{name} has {lines} lines, more than {LINES_MAX}"
            );
        }
    }
    for (name, text) in files("python", "py") {
        let lines = text.lines().count();
        assert!(
            lines <= LINES_MAX,
            "{name} has {lines} lines, more than {LINES_MAX}"
        );
    }
}

fn python_arrows() -> impl Iterator<Item = &'static Arrow> {
    let parts = [PYTHON_ARROWS, CONTRACT_ARROWS, TRTLLM_ARROWS];
    parts.into_iter().flatten()
}

#[test]
fn python_modules_use_only_modules_below_them() {
    let mut seen = 0;
    for (name, text) in files("python/kvferry", "py") {
        let module = name
            .strip_prefix("python/kvferry/")
            .and_then(|name| name.strip_suffix(".py"));
        let arrows = python_arrows().find(|(from, _, _)| Some(*from) == module);
        let (from, allowed, packages) =
            arrows.unwrap_or_else(|| panic_at(&name, 0, "belongs to no known module"));
        // Indented imports are skipped: they are only for type checkers, or they handle a missing package.
        let below = |folder: &str, module: &str| match module {
            "" => String::new(),
            _ => format!("{folder}/{module}"),
        };
        for (line, text) in text.lines().enumerate() {
            let words: Vec<&str> = text.split([' ', '.', ',']).collect();
            let used: Vec<String> = match words[..] {
                ["from", "kvferry", folder, "import", ref modules @ ..]
                    if PYTHON_FOLDERS.contains(&folder) =>
                {
                    modules.iter().map(|module| below(folder, module)).collect()
                }
                ["from", "kvferry", folder, module, ..] if PYTHON_FOLDERS.contains(&folder) => {
                    vec![below(folder, module)]
                }
                ["from", "kvferry", "import", ref modules @ ..] => {
                    modules.iter().map(ToString::to_string).collect()
                }
                ["from", "kvferry", module, ..] => vec![module.to_owned()],
                [
                    "from" | "import",
                    package @ ("sglang" | "tensorrt_llm" | "torch" | "vllm" | "zmq"),
                    ..,
                ] => {
                    if !packages.contains(&package) {
                        panic_at(&name, line + 1, &format!("{from} must not use {package}"));
                    }
                    continue;
                }
                _ => continue,
            };
            for used in used.into_iter().filter(|used| !used.is_empty()) {
                seen += 1;
                if !allowed.contains(&used.as_str()) {
                    panic_at(&name, line + 1, &format!("{from} must not use {used}"));
                }
            }
        }
    }
    assert!(seen > 15, "only {seen} uses seen: the test reads nothing");
}

#[test]
fn the_page_of_the_structure_names_every_python_module() {
    let page = fs::read_to_string(root().join("docs/architecture.md")).expect("a page");
    for (module, _, _) in python_arrows() {
        let module = module.rsplit('/').next().unwrap_or(module);
        let named = page.contains(&format!("`{module}`"));
        assert!(
            named || module == "__init__",
            "docs/architecture.md names no `{module}`"
        );
    }
}

#[test]
fn no_source_contains_a_todo() {
    for folder in ["src", "xtask"] {
        for (name, text) in sources(folder) {
            for (line, text) in text.lines().enumerate() {
                for word in ["TODO", "FIXME", "XXX", "HACK"] {
                    if text.contains(word) {
                        panic_at(&name, line + 1, word);
                    }
                }
            }
        }
    }
}

#[test]
fn every_decision_has_a_status_a_date_and_a_successor() {
    let folder = root().join("docs/adr");
    let entries = fs::read_dir(&folder).expect("docs/adr");
    let mut seen = 0;
    for entry in entries {
        let path = entry.expect("an entry").path();
        let text = fs::read_to_string(&path).expect("a decision");
        let line = text.lines().nth(2).unwrap_or_default();
        let name = path.display();
        let parts = ["Status: ", "Date: 20", "Superseded by: "];
        for part in parts {
            assert!(
                line.contains(part),
                "{name}: its third line has no '{part}'"
            );
        }
        seen += 1;
    }
    assert!(seen > 15, "only {seen} decisions seen");
}

#[test]
fn the_map_of_packages_names_them_all() {
    let page = fs::read_to_string(root().join("docs/architecture.md")).expect("a page");
    let (_, after) = page.split_once("`a <- b`").expect("the map of packages");
    let map = after.split("```").nth(1).expect("the map of packages");
    for entry in fs::read_dir(root().join("src")).expect("src") {
        let folder = entry.expect("an entry").path();
        if folder.join("Cargo.toml").exists() {
            let name = folder.file_name().expect("a name").to_string_lossy();
            assert!(
                map.contains(&*name),
                "the map in docs/architecture.md lacks {name}"
            );
        }
    }
}

/// The replaced words of `docs/style.md`.
fn replaced_words() -> Vec<String> {
    let page = fs::read_to_string(root().join("docs/style.md")).expect("a page");
    let table = page.split("## Words that were replaced").nth(1);
    let rows = table.expect("the table").lines();
    let rows = rows.filter_map(|line| line.strip_prefix("| ")?.strip_suffix(" |"));
    let cells = rows.skip(2).filter_map(|row| row.rsplit(" | ").next());
    let words = cells.flat_map(|cell| cell.split(", "));
    words.map(str::to_owned).collect()
}

/// The lower-case words of a line: names are divided at underscores and at capital letters.
fn words(line: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut lower = false;
    for c in line.chars() {
        if !c.is_alphanumeric() || (c.is_uppercase() && lower) {
            words.push(String::new());
        }
        lower = c.is_lowercase();
        if let (true, Some(word)) = (c.is_alphanumeric(), words.last_mut()) {
            word.extend(c.to_lowercase());
        }
    }
    words
}

#[test]
fn words_are_divided_as_names_are() {
    let found = words("fn call_Strike(WorkerEffect::StrikeOut, HTTPGhost)");
    let found: Vec<&str> = found.iter().map(String::as_str).collect();
    for word in ["call", "strike", "worker", "effect", "out"] {
        assert!(found.contains(&word), "{word}: {found:?}");
    }
}

#[test]
fn words_that_were_replaced_do_not_return() {
    let replaced = replaced_words();
    assert!(replaced.len() > 8, "{replaced:?}");
    let history = ["docs/style.md", "docs/reliability.md", "docs/adr/"];
    let texts = [
        sources("src"),
        sources("tests"),
        sources("xtask"),
        files("python/kvferry", "py"),
        files("docs", "md"),
    ];
    for (name, text) in texts.into_iter().flatten() {
        if name == "tests/tidy.rs" || history.iter().any(|kept| name.starts_with(kept)) {
            continue;
        }
        for (line, text) in text.lines().enumerate() {
            let found = words(text).into_iter().find(|word| replaced.contains(word));
            if let Some(word) = found {
                panic_at(
                    &name,
                    line + 1,
                    &format!("'{word}': docs/style.md has another word"),
                );
            }
        }
    }
}

fn forbid(name: &str, text: &str, words: &[&str]) {
    for (line, text) in code(text) {
        for word in words {
            if text.contains(word) {
                panic_at(name, line, &format!("{word:?} has no place here"));
            }
        }
    }
}

#[expect(clippy::panic, reason = "this is how a rule fails")]
fn panic_at(name: &str, line: usize, why: &str) -> ! {
    panic!("{name}:{line}: {why}")
}
