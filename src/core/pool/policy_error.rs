//! The error of a policy's text.

/// Why a text describes no policy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field} is {value}: {remedy}")]
pub struct ParseTierPolicyError {
    field: String,
    value: String,
    remedy: String,
}

impl ParseTierPolicyError {
    pub(crate) fn new(field: &str, value: &str, remedy: String) -> Self {
        Self {
            field: field.to_owned(),
            value: format!("'{value}'"),
            remedy,
        }
    }
}
