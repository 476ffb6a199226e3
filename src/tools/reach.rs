//! `kvferry-tools reach`: applies the rules of groups to sets of pages, one JSON object per line.
//!
//! Tests compare the answers with those of an engine's own prefix cache. A line of the input:
//!
//! ```json
//! {"hash_tokens": 16, "hit_tokens": 32, "hashes": 8, "device_tokens": 0, "limit_tokens": 127,
//!  "groups": [{"kind": "prefix", "page_tokens": 16, "pages": "11111110"},
//!             {"kind": "window", "page_tokens": 32, "tokens": 64, "eagle": false, "pages": "0110"}],
//!  "store": {"tokens": 128, "every_tokens": 1, "ends": []}}
//! ```
//!
//! `pages` has a character for each page of the group from its first on: 1 for a page that is there. `store` may be
//! absent. The answer: `end_tokens` is `null` without a hit; the lists have `[first, end]` of the pages of each group.
//!
//! ```json
//! {"end_tokens": 96, "needed": [[0, 6], [1, 3]], "loaded": [[0, 6], [1, 3]], "stored": [[[0, 8]], [[0, 4]]]}
//! ```

use std::io::BufRead;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use kvferry::cli::print_line;
use kvferry::error::CommandError;
use kvferry_core::{
    GroupError, GroupKind, GroupSpec, Groups, LookupBounds, Presence, Retention, Written,
};
use kvferry_types::GroupId;

/// Reads from the standard input until it ends.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    hash_tokens: u32,
    hit_tokens: u32,
    hashes: u32,
    device_tokens: u32,
    limit_tokens: u32,
    groups: Vec<GroupLine>,
    store: Option<StoreLine>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct GroupLine {
    kind: KindName,
    page_tokens: u32,
    #[serde(default)]
    tokens: u32,
    #[serde(default)]
    eagle: bool,
    pages: String,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
enum KindName {
    Prefix,
    Window,
    Chunk,
    State,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct StoreLine {
    tokens: u32,
    every_tokens: Option<u32>,
    ends: Vec<u32>,
}

/// The first page of a run and the page behind its last.
type Run = [u32; 2];

#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Answer {
    Reach {
        end_tokens: Option<u32>,
        needed: Vec<Run>,
        loaded: Vec<Run>,
        #[serde(skip_serializing_if = "Vec::is_empty")]
        stored: Vec<Vec<Run>>,
    },
    /// The groups contradict each other.
    Error { error: String },
}

impl Arguments {
    /// Answers every line.
    ///
    /// # Errors
    /// The standard input cannot be read, or a line is not of the expected form. Its number is named.
    pub(super) fn run(self) -> Result<(), CommandError> {
        for (number, line) in (1..).zip(std::io::stdin().lock().lines()) {
            let line = line.map_err(CommandError::failed)?;
            let data = |error| CommandError::Data(format!("line {number}: {error}"));
            let line: Line = serde_json::from_str(&line).map_err(data)?;
            let answer = answer(&line).unwrap_or_else(|error| Answer::Error {
                error: error.to_string(),
            });
            print_line(&serde_json::to_string(&answer).map_err(data)?);
        }
        Ok(())
    }
}

impl GroupLine {
    fn spec(&self) -> GroupSpec {
        let tokens = self.tokens;
        let kind = match self.kind {
            KindName::Prefix => GroupKind::Prefix,
            KindName::Window => GroupKind::Window { tokens },
            KindName::Chunk => GroupKind::Chunk { tokens },
            KindName::State => GroupKind::State,
        };
        GroupSpec {
            kind,
            page_tokens: self.page_tokens,
            eagle: self.eagle,
        }
    }
}

impl Presence for Line {
    fn has(&self, group: GroupId, page: u32) -> bool {
        let pages = self.groups[usize::from(group.0)].pages.as_bytes();
        pages.get(page as usize) == Some(&b'1')
    }
}

fn answer(line: &Line) -> Result<Answer, GroupError> {
    let specs = line.groups.iter().map(GroupLine::spec).collect();
    let groups = Groups::new(line.hash_tokens, line.hit_tokens, specs)?;
    let ids = || groups.specs().map(|(group, _)| group);
    let bounds = LookupBounds {
        hashes: line.hashes,
        device_tokens: line.device_tokens,
        limit_tokens: line.limit_tokens,
    };
    let hit = groups.reach(bounds, line);
    let (needed, loaded) = match hit {
        Some(hit) => (
            ids().map(|group| run(&groups.needed(group, hit))).collect(),
            ids().map(|group| run(&groups.loaded(group, hit))).collect(),
        ),
        None => (Vec::new(), Vec::new()),
    };
    let stored = line.store.as_ref().map(|store| {
        let written = Written {
            first_page: 0,
            tokens: store.tokens,
            states: &store.ends,
        };
        let retention = Retention {
            every_tokens: store.every_tokens,
            ends: &store.ends,
        };
        let stored = |group| {
            let mut runs = Vec::new();
            groups.storable(group, written, retention, |_| true, &mut runs);
            runs.iter().map(run).collect()
        };
        ids().map(stored).collect()
    });
    Ok(Answer::Reach {
        end_tokens: hit.map(|hit| hit.end_tokens()),
        needed,
        loaded,
        stored: stored.unwrap_or_default(),
    })
}

fn run(pages: &Range<u32>) -> Run {
    [pages.start, pages.end]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answered(line: &str) -> String {
        let line: Line = serde_json::from_str(line).expect("a line");
        let answer = answer(&line).unwrap_or_else(|error| Answer::Error {
            error: error.to_string(),
        });
        serde_json::to_string(&answer).expect("an answer")
    }

    #[test]
    fn a_line_is_answered_as_documented() {
        let line = r#"{"hash_tokens": 16, "hit_tokens": 32, "hashes": 8, "device_tokens": 0, "limit_tokens": 127,
            "groups": [{"kind": "prefix", "page_tokens": 16, "pages": "11111110"},
                       {"kind": "window", "page_tokens": 32, "tokens": 64, "eagle": false, "pages": "0110"}],
            "store": {"tokens": 128, "every_tokens": 1, "ends": []}}"#;
        let expected = r#"{"end_tokens":96,"needed":[[0,6],[1,3]],"loaded":[[0,6],[1,3]],"stored":[[[0,8]],[[0,4]]]}"#;
        assert_eq!(answered(line), expected);
    }

    #[test]
    fn contradictions_are_answered() {
        let line = r#"{"hash_tokens": 16, "hit_tokens": 16, "hashes": 8, "device_tokens": 0, "limit_tokens": 127,
            "groups": [{"kind": "state", "page_tokens": 32, "pages": ""}]}"#;
        assert!(
            answered(line).starts_with(r#"{"error":"hit_tokens is 16, no multiple"#),
            "{line}"
        );
    }
}
