//! Checks that the licence of every dependency is allowed by `deny.toml`.

use std::fs;
use std::path::Path;

use cargo_metadata::MetadataCommand;
use spdx::{Expression, LicenseReq, Licensee};

/// Fails with one line for each dependency whose licence is not allowed.
pub(crate) fn check(root: &Path) -> Result<(), String> {
    let allowed = allowed(root)?;
    let metadata = MetadataCommand::new()
        .current_dir(root)
        .other_options(vec!["--locked".to_owned()])
        .exec()
        .map_err(|error| error.to_string())?;
    let mut wrong = Vec::new();
    for package in &metadata.packages {
        let name = format!("{} {}", package.name, package.version);
        let Some(text) = &package.license else {
            wrong.push(format!("{name} names no licence"));
            continue;
        };
        // Some packages still use the obsolete form "MIT/Apache-2.0".
        let expression = Expression::parse(&text.replace('/', " OR "));
        let expression = expression.map_err(|error| format!("{name}: {error}"))?;
        let fits =
            |required: &LicenseReq| allowed.iter().any(|licence| licence.satisfies(required));
        if !expression.evaluate(fits) {
            wrong.push(format!("{name} is under {text}"));
        }
    }
    if wrong.is_empty() {
        println!(
            "{} packages, all under licences that deny.toml allows",
            metadata.packages.len()
        );
        return Ok(());
    }
    Err(format!(
        "not allowed by deny.toml:\n  {}",
        wrong.join("\n  ")
    ))
}

fn allowed(root: &Path) -> Result<Vec<Licensee>, String> {
    let text = fs::read_to_string(root.join("deny.toml")).map_err(|error| error.to_string())?;
    let table: toml::Table = text
        .parse()
        .map_err(|error| format!("deny.toml: {error}"))?;
    let list = table
        .get("licenses")
        .and_then(|section| section.get("allow"));
    let list = list
        .and_then(toml::Value::as_array)
        .ok_or("deny.toml has no licenses.allow")?;
    list.iter()
        .map(|entry| {
            let name = entry
                .as_str()
                .ok_or("deny.toml: licenses.allow holds strings")?;
            Licensee::parse(name).map_err(|error| format!("deny.toml: {name}: {error}"))
        })
        .collect()
}
