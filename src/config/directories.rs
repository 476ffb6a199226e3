//! A list of directories, written as paths with commas between them.

use std::fmt;
use std::path::{Component, Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Directories, in order.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub struct Directories(pub Vec<PathBuf>);

impl Directories {
    /// The paths, relative ones from the current directory.
    pub fn absolute(&self) -> std::io::Result<Self> {
        let paths = self.0.iter().map(std::path::absolute);
        Ok(Self(paths.collect::<std::io::Result<_>>()?))
    }

    /// True if every path is absolute.
    pub fn are_absolute(&self) -> bool {
        self.0.iter().all(|path| path.is_absolute())
    }

    /// The first directory that lies inside another one, or equals it: the outer one, and the inner one. Reads only the
    /// paths, and follows no links.
    pub fn overlapping(&self) -> Option<(&Path, &Path)> {
        let plain: Vec<PathBuf> = self.0.iter().map(|path| without_dots(path)).collect();
        let pairs = (0..plain.len())
            .flat_map(|inner| (0..plain.len()).map(move |outer| (outer, inner)))
            .filter(|(outer, inner)| outer != inner);
        let mut overlapping =
            pairs.filter(|(outer, inner)| plain[*inner].starts_with(&plain[*outer]));
        let (outer, inner) = overlapping.next()?;
        Some((&self.0[outer], &self.0[inner]))
    }
}

/// The path without `.` and `..`, by its text alone.
fn without_dots(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for component in path.components() {
        match component {
            Component::CurDir => {}
            Component::ParentDir => {
                plain.pop();
            }
            other => plain.push(other),
        }
    }
    plain
}

impl From<String> for Directories {
    fn from(text: String) -> Self {
        let paths = text
            .split(',')
            .map(str::trim)
            .filter(|path| !path.is_empty());
        Self(paths.map(PathBuf::from).collect())
    }
}

impl FromStr for Directories {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(text.to_owned().into())
    }
}

impl From<Directories> for String {
    fn from(directories: Directories) -> Self {
        directories.to_string()
    }
}

impl fmt::Display for Directories {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let paths: Vec<String> = self
            .0
            .iter()
            .map(|path| path.display().to_string())
            .collect();
        f.write_str(&paths.join(","))
    }
}
