//! How copies are submitted to a GPU's driver.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// How a worker submits its copies to the GPU's driver. Written `async` or `batch`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GpuCopy {
    /// One call per copy (`cuMemcpyAsync`), which every driver supports.
    Async,
    /// One call for many copies (`cuMemcpyBatchAsync`), from CUDA 12.8 on. A driver without that call gets one call per
    /// copy.
    #[default]
    Batch,
}

/// The text is neither `async` nor `batch`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is no way to copy: write async or batch")]
pub struct ParseGpuCopyError(String);

impl GpuCopy {
    const ALL: [Self; 2] = [Self::Async, Self::Batch];

    const fn name(self) -> &'static str {
        match self {
            Self::Async => "async",
            Self::Batch => "batch",
        }
    }
}

impl FromStr for GpuCopy {
    type Err = ParseGpuCopyError;

    fn from_str(text: &str) -> Result<Self, ParseGpuCopyError> {
        let found = Self::ALL.into_iter().find(|way| way.name() == text.trim());
        found.ok_or_else(|| ParseGpuCopyError(text.to_owned()))
    }
}

impl fmt::Display for GpuCopy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ways_are_written_as_they_are_read() {
        for way in GpuCopy::ALL {
            assert_eq!(way.to_string().parse(), Ok(way));
            let json = serde_json::to_string(&way).expect("a text");
            assert_eq!(json, format!("\"{way}\""));
        }
        let error = "kernel".parse::<GpuCopy>().expect_err("not yet");
        assert_eq!(
            error.to_string(),
            "'kernel' is no way to copy: write async or batch"
        );
    }
}
