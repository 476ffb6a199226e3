//! No two files of a package use each other, directly or through others, except parent and child: what belongs together
//! stands in one file, and a reader can begin at the bottom.

use std::collections::{BTreeMap, BTreeSet};

use crate::{code, root, sources};

/// Path of a module below its package: empty for `lib.rs`.
type Module = Vec<String>;

/// The modules of one package: their names, imports and uses.
#[derive(Default)]
struct Package {
    /// Names that a module defines.
    defined: BTreeMap<Module, BTreeSet<String>>,
    /// Names that a module imports or re-exports, each with its path.
    imported: BTreeMap<Module, Vec<(String, Vec<String>)>>,
    /// Paths that a module uses, imports included.
    used: BTreeMap<Module, Vec<Vec<String>>>,
}

impl Package {
    fn of(files: &[(Module, String)]) -> Self {
        let mut read = Self::default();
        for (module, text) in files {
            let lines: Vec<&str> = code(text).map(|(_, line)| line).collect();
            let text = lines.join("\n");
            let defined = lines.iter().filter_map(|line| definition(line));
            read.defined.insert(module.clone(), defined.collect());
            let mut imported = Vec::new();
            let mut used = Vec::new();
            for tree in imports(&text) {
                expand(&[], tree, &mut |path, name| {
                    imported.push((name.to_owned(), path.clone()));
                    used.push(path);
                });
            }
            used.extend(inline_paths(&text));
            read.imported.insert(module.clone(), imported);
            read.used.insert(module.clone(), used);
        }
        read
    }

    /// The module that defines the item at `path`, as seen from `from`. None for items of other packages.
    fn resolve(&self, from: &Module, path: &[String], depth: usize) -> Option<Module> {
        let mut at = from.clone();
        let mut rest = path;
        match rest.first()?.as_str() {
            "crate" => {
                at.clear();
                rest = &rest[1..];
            }
            "self" => rest = &rest[1..],
            "super" => {
                while rest.first().is_some_and(|name| name == "super") {
                    at.pop();
                    rest = &rest[1..];
                }
            }
            name => {
                let child = [at.clone(), vec![name.to_owned()]].concat();
                if !self.defined.contains_key(&child) {
                    return None;
                }
            }
        }
        while let Some(name) = rest.first() {
            let child = [at.clone(), vec![name.clone()]].concat();
            if !self.defined.contains_key(&child) {
                break;
            }
            at = child;
            rest = &rest[1..];
        }
        let Some(item) = rest.first() else {
            return Some(at);
        };
        let is_here = self
            .defined
            .get(&at)
            .is_some_and(|names| names.contains(item));
        if is_here || depth == 0 {
            return Some(at);
        }
        let imports = self.imported.get(&at)?;
        let found = imports.iter().find(|(name, _)| name == item);
        match found {
            Some((_, path)) => self.resolve(&at, path, depth - 1),
            None => Some(at),
        }
    }

    /// The modules that each module uses, without its parents and children.
    fn arrows(&self) -> BTreeMap<&Module, BTreeSet<Module>> {
        let arrows = self.used.iter().map(|(module, paths)| {
            let targets = paths
                .iter()
                .filter_map(|path| self.resolve(module, path, 8));
            let others = targets.filter(|to| !to.starts_with(module) && !module.starts_with(to));
            (module, others.collect())
        });
        arrows.collect()
    }
}

/// The module of a file, by its path below the package; None for tests.
fn module(path: &str) -> Option<Module> {
    let path = path.trim_start_matches('/').strip_suffix(".rs")?;
    let mut module: Module = path.split('/').map(str::to_owned).collect();
    let last = module.last()?.clone();
    if module
        .iter()
        .any(|name| name == "tests" || name.ends_with("_tests"))
    {
        return None;
    }
    if matches!(last.as_str(), "mod" | "lib" | "main") {
        module.pop();
    }
    Some(module)
}

/// The name that a line at the margin defines.
fn definition(line: &str) -> Option<String> {
    let line = line.strip_prefix("pub").map_or(line, |rest| {
        rest.split_once(") ")
            .filter(|_| rest.starts_with('('))
            .map_or(rest, |(_, rest)| rest)
    });
    let mut words = line.trim_start_matches(' ').split(' ');
    if line.starts_with("  ") {
        return None;
    }
    let mut word = words.next()?;
    while matches!(word, "const" | "async" | "unsafe" | "extern")
        && !words.clone().next()?.ends_with(':')
    {
        word = words.next()?;
    }
    let kinds = [
        "struct",
        "enum",
        "trait",
        "fn",
        "type",
        "const",
        "static",
        "union",
        "macro_rules!",
    ];
    if !kinds.contains(&word) {
        return None;
    }
    let name = words.next()?;
    let end = name.find(|letter: char| !letter.is_alphanumeric() && letter != '_');
    Some(name[..end.unwrap_or(name.len())].to_owned())
}

/// The trees of all `use` items at the margin.
fn imports(text: &str) -> impl Iterator<Item = &str> {
    let items = text.split("\n").scan(0, |at, line| {
        let begin = *at;
        *at += line.len() + 1;
        Some((begin, line))
    });
    items.filter_map(move |(begin, line)| {
        let is_use = line.starts_with("use ") || (line.starts_with("pub") && line.contains("use "));
        if !is_use {
            return None;
        }
        let item = &text[begin..];
        let begin = item.find("use ")? + 4;
        let end = item.find(';')?;
        item.get(begin..end)
    })
}

/// Passes the path and the local name of every item of a `use` tree.
fn expand(prefix: &[String], tree: &str, found: &mut dyn FnMut(Vec<String>, &str)) {
    let tree = tree.trim();
    let Some(open) = tree.find('{') else {
        let (path, name) = tree.split_once(" as ").unwrap_or((tree, ""));
        let mut path: Vec<String> = prefix
            .iter()
            .cloned()
            .chain(path.split("::").map(|part| part.trim().to_owned()))
            .collect();
        if path.last().is_some_and(|last| last == "self") {
            path.pop();
        }
        let last = path.last().cloned().unwrap_or_default();
        found(path, if name.is_empty() { &last } else { name.trim() });
        return;
    };
    let mut prefix = prefix.to_vec();
    let before = tree[..open].trim_end_matches("::");
    prefix.extend(
        before
            .split("::")
            .filter(|part| !part.trim().is_empty())
            .map(|part| part.trim().to_owned()),
    );
    let inner = tree[open + 1..].trim_end().trim_end_matches('}');
    let inner = match tree.matches('{').count() {
        1 => inner,
        _ => &tree[open + 1..tree.trim_end().len() - 1],
    };
    let (mut depth, mut begin) = (0, 0);
    for (at, letter) in inner.char_indices() {
        match letter {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                expand_part(&prefix, &inner[begin..at], found);
                begin = at + 1;
            }
            _ => {}
        }
    }
    expand_part(&prefix, &inner[begin..], found);
}

fn expand_part(prefix: &[String], part: &str, found: &mut dyn FnMut(Vec<String>, &str)) {
    if !part.trim().is_empty() {
        expand(prefix, part, found);
    }
}

/// Paths that begin with `crate::` or `super::` inside the code.
fn inline_paths(text: &str) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    for line in text.lines().filter(|line| !line.contains("use ")) {
        for begin in ["crate::", "super::"] {
            let mut rest = line;
            while let Some(at) = rest.find(begin) {
                let is_word = rest[..at].ends_with(|letter: char| {
                    letter.is_alphanumeric() || letter == '_' || letter == ':'
                });
                rest = &rest[at..];
                let end = rest.find(|letter: char| {
                    !letter.is_alphanumeric() && letter != '_' && letter != ':'
                });
                let path = rest[..end.unwrap_or(rest.len())].trim_end_matches(':');
                if !is_word {
                    found.push(path.split("::").map(str::to_owned).collect());
                }
                rest = &rest[begin.len()..];
            }
        }
    }
    found
}

/// Modules that reach themselves, in groups that reach each other.
fn circles(arrows: &BTreeMap<&Module, BTreeSet<Module>>) -> BTreeSet<BTreeSet<Module>> {
    let reach = |from: &Module| {
        let mut reached = BTreeSet::new();
        let mut open = vec![from.clone()];
        while let Some(at) = open.pop() {
            for to in arrows.get(&at).into_iter().flatten() {
                if reached.insert(to.clone()) {
                    open.push(to.clone());
                }
            }
        }
        reached
    };
    let reached: BTreeMap<&Module, BTreeSet<Module>> = arrows
        .keys()
        .map(|module| (*module, reach(module)))
        .collect();
    let mut groups = BTreeSet::new();
    for (module, reaches) in &reached {
        if reaches.contains(*module) {
            let together = reaches.iter().filter(|other| {
                reached
                    .get(other)
                    .is_some_and(|back| back.contains(*module))
            });
            groups.insert(together.cloned().collect());
        }
    }
    groups
}

/// The packages of the workspace, and the program, each with its modules and their texts.
fn packages() -> Vec<(String, Vec<(Module, String)>)> {
    let manifest = std::fs::read_to_string(root().join("Cargo.toml")).expect("a manifest");
    let (_, rest) = manifest.split_once("members = [").expect("members");
    let (members, _) = rest.split_once(']').expect("an end of members");
    let members: Vec<&str> = members.split('"').skip(1).step_by(2).collect();
    let folders = members.iter().copied().chain(["src"]);
    let packages = folders.map(|folder| {
        let inner = format!("{folder}/src");
        let top = if root().join(&inner).is_dir() {
            &inner
        } else {
            folder
        };
        let files = sources(top).into_iter().filter(|(path, _)| {
            let of_another =
                |member: &&str| member.len() > top.len() && path.starts_with(&format!("{member}/"));
            !members.iter().any(of_another)
        });
        let modules =
            files.filter_map(|(path, text)| Some((module(path.strip_prefix(top)?)?, text)));
        (folder.to_owned(), modules.collect())
    });
    packages.collect()
}

#[test]
fn no_files_of_a_package_use_each_other_but_parent_and_child() {
    let mut found = String::new();
    for (name, files) in packages() {
        let package = Package::of(&files);
        let arrows = package.arrows();
        assert!(!arrows.is_empty(), "{name} has no files");
        for circle in circles(&arrows) {
            found += &format!("\n{name}:");
            for module in &circle {
                let targets = arrows[module].intersection(&circle).map(|to| to.join("::"));
                let targets: Vec<String> = targets.collect();
                found += &format!("\n    {} uses {}", module.join("::"), targets.join(", "));
            }
        }
    }
    assert!(found.is_empty(), "files use each other:{found}");
}

/// In each package, a file that another one uses is made to use that one.
#[test]
fn a_circle_is_found_in_each_package() {
    let mut planted = 0;
    for (name, mut files) in packages() {
        let package = Package::of(&files);
        let arrows = package.arrows();
        let mut pairs = arrows.iter().flat_map(|(from, targets)| {
            let named = package.defined[*from].first().map(|item| (*from, item));
            targets
                .iter()
                .filter_map(move |to| Some((named?, to.clone())))
        });
        let Some(((from, item), to)) = pairs.next() else {
            continue;
        };
        let path = [from.join("::"), item.clone()].join("::");
        let from = from.clone();
        let (_, text) = files
            .iter_mut()
            .find(|(module, _)| *module == to)
            .expect("a file");
        text.insert_str(0, &format!("use crate::{path};\n"));
        let package = Package::of(&files);
        let found = circles(&package.arrows());
        assert!(
            found
                .iter()
                .any(|circle| circle.contains(&from) && circle.contains(&to)),
            "{name}: {from:?} and {to:?}"
        );
        planted += 1;
    }
    assert!(planted >= 19, "{planted} packages have arrows");
}

#[test]
fn trees_of_imports_are_expanded() {
    let mut found = Vec::new();
    expand(
        &[],
        "super::{a::{B, C as D}, e, self}",
        &mut |path, name| {
            found.push((path.join("::"), name.to_owned()));
        },
    );
    let expected = [
        ("super::a::B", "B"),
        ("super::a::C", "D"),
        ("super::e", "e"),
        ("super", "super"),
    ];
    assert_eq!(
        found,
        expected.map(|(path, name)| (path.to_owned(), name.to_owned()))
    );
}

#[test]
fn a_circle_is_found_and_a_chain_is_not() {
    let module = |name: &str| vec![name.to_owned()];
    let (a, b, c) = (module("a"), module("b"), module("c"));
    let mut arrows = BTreeMap::from([
        (&a, BTreeSet::from([b.clone()])),
        (&b, BTreeSet::from([c.clone()])),
        (&c, BTreeSet::new()),
    ]);
    assert!(circles(&arrows).is_empty());
    arrows.insert(&c, BTreeSet::from([b.clone()]));
    assert_eq!(circles(&arrows), [[b.clone(), c.clone()].into()].into());
}
