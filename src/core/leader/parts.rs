//! The parts of loads and stores: pages of one group, with the engine's own pages that hold them.

use std::collections::BTreeMap;

use crate::group::model::Model;
use crate::leader::refusal::Refusal;
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
            let value = format!(
                "{} to {}, and the group has pages 0 to {}",
                run.start,
                run.end().saturating_sub(1),
                device_pages.saturating_sub(1)
            );
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

/// Refuses the parts of a load that name a device page of a group twice: two pages of the sequence would be written into
/// it. Pages of different groups are different memory here, because the leader does not know how the groups share theirs.
pub(super) fn check_destinations(parts: &[Part]) -> Result<(), Refusal> {
    // Pages in ascending order, as engines often name them, need no list.
    let ascending = |part: &Part| {
        let mut runs = part.pages.0.windows(2);
        runs.all(|pair| pair[0].end() <= u64::from(pair[1].start))
    };
    if let [part] = parts
        && ascending(part)
    {
        return Ok(());
    }
    let mut groups: BTreeMap<GroupId, Vec<PageRun>> = BTreeMap::new();
    for part in parts {
        let runs = groups.entry(part.group).or_default();
        runs.extend_from_slice(&part.pages.0);
    }
    for (group, mut runs) in groups {
        // One number for each run: 4,096 single pages in any order are sorted in 32 us.
        runs.sort_unstable_by_key(|run| u64::from(run.start) << 32 | u64::from(run.count));
        let twice = runs
            .windows(2)
            .find(|pair| pair[0].end() > u64::from(pair[1].start));
        if let Some(pair) = twice {
            return Err(Refusal::Invalid {
                field: "parts.pages",
                value: format!("device page {} of {group}, twice", pair[1].start),
                remedy: "name each device page once in a load, because two pages would be written into it",
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvferry_types::PageList;

    fn part(group: u8, runs: &[(u32, u32)]) -> Part {
        let runs = runs.iter().map(|(start, count)| PageRun {
            start: *start,
            count: *count,
        });
        Part::new(GroupId(group), 0, PageList(runs.collect()))
    }

    #[test]
    fn a_device_page_is_a_destination_once_in_each_group() {
        let refused: [(&[Part], u32); 6] = [
            (&[part(0, &[(5, 1), (5, 1)])], 5),
            (&[part(0, &[(0, 4), (3, 2)])], 3),
            (&[part(0, &[(9, 2), (0, 10)])], 9),
            (&[part(0, &[(7, 1), (2, 1), (7, 1)])], 7),
            (&[part(0, &[(1, 2)]), part(0, &[(2, 1)])], 2),
            (
                &[part(0, &[(1, 2)]), part(1, &[(4, 4)]), part(1, &[(7, 1)])],
                7,
            ),
        ];
        for (parts, page) in refused {
            let Err(Refusal::Invalid { field, value, .. }) = check_destinations(parts) else {
                panic!("{parts:?} are taken");
            };
            let group = parts[parts.len() - 1].group;
            let named = format!("device page {page} of {group}, twice");
            assert_eq!((field, value), ("parts.pages", named));
        }
        let taken: [&[Part]; 5] = [
            &[part(0, &[(5, 1), (6, 1)])],
            &[part(0, &[(6, 1), (5, 1)])],
            &[part(0, &[(0, 4), (4, 2)])],
            &[part(0, &[(1, 2)]), part(0, &[(3, 1), (0, 1)])],
            &[part(0, &[(1, 2)]), part(1, &[(1, 2)])],
        ];
        for parts in taken {
            assert_eq!(check_destinations(parts), Ok(()), "{parts:?}");
        }
    }
}
