//! The error of an audit.

use thiserror::Error;

/// Two counts of one thing that differ, as an audit such as [`crate::Leader::check`] finds them. The text names the
/// first such pair and both counts. Always a defect of the program.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct Contradiction(String);

impl From<String> for Contradiction {
    fn from(text: String) -> Self {
        Self(text)
    }
}

impl From<&str> for Contradiction {
    fn from(text: &str) -> Self {
        Self(text.to_owned())
    }
}
