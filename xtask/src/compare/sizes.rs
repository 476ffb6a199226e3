//! Sizes of programs, and lines of code.

use std::path::Path;

use super::Row;
use super::measures::Unit;
use super::side::{PROGRAMS, Side};

/// Folders whose lines are counted, with the endings of the files.
const CODE: [(&str, &[&str]); 3] = [("src", &["rs"]), ("tests", &["rs"]), ("python", &["py"])];

pub(super) fn measure(sides: &[Side; 2], only: &str) -> Vec<Row> {
    let mut rows = Vec::new();
    for program in PROGRAMS {
        rows.push(row(
            format!("size of {program}"),
            Unit::Bytes,
            sides,
            |side| {
                let path = side.program(program);
                let found = std::fs::metadata(&path);
                found
                    .map(|found| found.len())
                    .map_err(|error| format!("{}: {error}", path.display()))
            },
        ));
    }
    for (folder, endings) in CODE {
        rows.push(row(
            format!("lines in {folder}"),
            Unit::Lines,
            sides,
            |side| {
                let folder = side.sources.join(folder);
                lines(&folder, endings).map_err(|error| format!("{}: {error}", folder.display()))
            },
        ));
    }
    rows.retain(|row| row.name.contains(only));
    rows
}

fn row(
    name: String,
    unit: Unit,
    sides: &[Side; 2],
    measure: impl Fn(&Side) -> Result<u64, String>,
) -> Row {
    let sides = sides.each_ref().map(|side| Ok(vec![measure(side)? as f64]));
    Row { name, unit, sides }
}

/// Lines of the files with these endings, in the folder and those below it.
fn lines(folder: &Path, endings: &[&str]) -> std::io::Result<u64> {
    let mut sum = 0;
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        let ending = path.extension().and_then(|ending| ending.to_str());
        if path.is_dir() {
            sum += lines(&path, endings)?;
        } else if ending.is_some_and(|ending| endings.contains(&ending)) {
            sum += std::fs::read(&path)?
                .iter()
                .filter(|byte| **byte == b'\n')
                .count() as u64;
        }
    }
    Ok(sum)
}
