//! The comparison of what both sides say.

use std::fmt;

use crate::error::{At, PlanError};
use crate::side::{Counts, SideTensor};

/// The same part of both sides.
#[derive(Debug)]
pub(crate) struct Both<'a, T> {
    pub(crate) source: &'a T,
    pub(crate) target: &'a T,
    pub(crate) at: At,
}

impl<T> Both<'_, T> {
    /// Checks that both sides say the same in a field.
    pub(crate) fn same<V: PartialEq + fmt::Display>(
        &self,
        field: &'static str,
        value: impl Fn(&T) -> V,
        remedy: &'static str,
    ) -> Result<(), PlanError> {
        let (source, target) = (value(self.source), value(self.target));
        if source == target {
            return Ok(());
        }
        Err(self.differ(field, source, target, remedy))
    }

    /// The error of a field in which the sides differ.
    pub(crate) fn differ(
        &self,
        field: &'static str,
        source: impl fmt::Display,
        target: impl fmt::Display,
        remedy: &'static str,
    ) -> PlanError {
        PlanError::Differ {
            at: self.at,
            field,
            source_value: source.to_string(),
            target_value: target.to_string(),
            remedy,
        }
    }
}

impl Both<'_, SideTensor> {
    /// Checks that the axes inside a page have the same order in memory, and the same length where they do not depend on
    /// the engine. An axis of one index has no order.
    pub(crate) fn same_axes(&self) -> Result<(), PlanError> {
        let others =
            |tensor: &SideTensor| -> Vec<u64> { tensor.others().map(|axis| axis.length).collect() };
        let (ours, theirs) = (others(self.source), others(self.target));
        if ours != theirs {
            return Err(self.differ(
                "bytes of a head and token",
                format!("{ours:?}"),
                format!("{theirs:?}"),
                "plans are made between engines of one model and dtype",
            ));
        }
        let (ours, theirs) = (self.order(self.source), self.order(self.target));
        if ours != theirs {
            return Err(self.differ(
                "order of the axes in memory",
                ours,
                theirs,
                "start both engines with one KV layout",
            ));
        }
        Ok(())
    }

    /// The axes that have an order at both sides, outermost first.
    fn order(&self, tensor: &SideTensor) -> String {
        let (source, target) = (self.source, self.target);
        let orderless = |counts| {
            counts != Counts::Other && (source.length(counts) == 1 || target.length(counts) == 1)
        };
        let axes = tensor.axes.iter().filter(|axis| !orderless(axis.counts));
        let names = axes.map(|axis| match axis.counts {
            Counts::Heads => "heads",
            Counts::Tokens => "tokens",
            Counts::Other => "other",
        });
        names.collect::<Vec<&str>>().join(", ")
    }
}

/// Displays opaque bytes: at most 16 of them.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Hex<'a>(pub(crate) &'a [u8]);

impl fmt::Display for Hex<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = self.0.get(..16).unwrap_or(self.0);
        for byte in shown {
            write!(f, "{byte:02x}")?;
        }
        if shown.len() < self.0.len() {
            f.write_str("...")?;
        }
        Ok(())
    }
}
