//! The parts of loads and stores: pages of one group, with the engine's own pages that hold them.

use crate::model::Model;
use crate::refusal::Refusal;
use kvferry_types::{GroupId, PRIORITIES, PageRun, Part};

/// Position after the last page of a part.
pub(super) fn end_of(part: &Part) -> u32 {
    let pages = u32::try_from(part.pages.pages()).unwrap_or(u32::MAX);
    part.first_page.saturating_add(pages)
}

/// Refuses parts of groups that the model does not have, pages that the engine does not have, empty lists, and parts of
/// one group that overlap. Replicas may have different numbers of pages.
pub(super) fn check_parts(model: &Model, parts: &[Part]) -> Result<(), Refusal> {
    let invalid = |field, value, remedy| {
        Err(Refusal::Invalid {
            field,
            value,
            remedy,
        })
    };
    if parts.is_empty() {
        return invalid("parts", "empty".to_owned(), "name at least one page");
    }
    let groups = model.geometry().groups.len();
    for part in parts {
        if usize::from(part.group.0) >= groups {
            let remedy = "name a group that the ranks registered";
            return invalid("parts.group", part.group.0.to_string(), remedy);
        }
        if part.pages.0.is_empty() {
            let remedy = "name at least one page";
            return invalid("parts.pages", "empty".to_owned(), remedy);
        }
        if part.priority >= PRIORITIES {
            let remedy = "give a priority from 0 to 7, or none";
            return invalid("parts.priority", part.priority.to_string(), remedy);
        }
        let device_pages = model.geometry().device_pages(part.group);
        let outside = |run: &&PageRun| run.end() > u64::from(device_pages) || run.count == 0;
        if let Some(run) = part.pages.0.iter().find(outside) {
            let value = format!("[{}, {}]", run.start, run.count);
            return invalid("parts.pages", value, "name pages that the ranks registered");
        }
    }
    let mut ranges: Vec<(GroupId, u32, u64)> = parts
        .iter()
        .map(|part| {
            let end = u64::from(part.first_page) + part.pages.pages();
            (part.group, part.first_page, end)
        })
        .collect();
    ranges.sort_unstable();
    let overlap = ranges
        .windows(2)
        .find(|pair| pair[0].0 == pair[1].0 && u64::from(pair[1].1) < pair[0].2);
    match overlap {
        None => Ok(()),
        Some(pair) => invalid(
            "parts.first_page",
            format!("{} of {}", pair[1].1, pair[1].0),
            "name each page of a group once",
        ),
    }
}
