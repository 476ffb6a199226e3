//! The digest of decisions: a hash that is equal exactly when two runs made the same decisions.
//!
//! Covers, per request in the order in which requests finished: tokens per tier, page ranges stored and loaded with
//! their arena pages, evictions and refusals. Leaves out what may differ between a live run and a replay in virtual
//! time: ids, epochs, times and the order in which ranks answered.

use kvferry_types::{GroupId, PageRun};

/// What reports show in place of a digest that is not kept.
pub const NOT_RECORDED: &str = "not recorded";

/// One decision of the leader about a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// A lookup: pages that the engine has, and further pages found in G2.
    Found {
        /// Pages of the prompt in the engine's own cache.
        device_pages: u32,
        /// Pages found in G2 after those.
        hit_pages: u32,
    },
    /// Pages from `position` of the sequence on are loaded from `run`.
    Loaded {
        /// Position of the first page.
        position: u32,
        /// The arena pages that are read.
        run: PageRun,
    },
    /// Pages from `position` of the sequence on are stored to `run`.
    Stored {
        /// Position of the first page.
        position: u32,
        /// The arena pages that are written.
        run: PageRun,
        /// True when the pages grow an existing block, false when they begin one of their own.
        grown: bool,
    },
    /// These arena pages were evicted to make room.
    Evicted(PageRun),
    /// `count` pages from `position` on found no room, or were not admitted.
    Refused {
        /// Position of the first page.
        position: u32,
        /// Number of pages.
        count: u32,
    },
}

/// Digest of the decisions about one request.
#[derive(Debug, Clone, Default)]
pub struct RequestDigest(Option<Box<blake3::Hasher>>);

impl RequestDigest {
    /// Creates a digest that records decisions, or one that ignores them.
    pub fn new(record: bool) -> Self {
        Self(record.then(Box::default))
    }

    /// Adds a decision about pages of a group. Those about the first group are those of a model with one group.
    pub fn add(&mut self, tokens_per_page: u32, group: GroupId, decision: Decision) {
        let Some(hasher) = &mut self.0 else { return };
        if group != GroupId(0) {
            hasher.update(&7_u64.to_le_bytes());
            hasher.update(&u64::from(group.0).to_le_bytes());
        }
        let tokens = |pages: u32| u64::from(pages) * u64::from(tokens_per_page);
        let pages = |run: PageRun| [u64::from(run.start), u64::from(run.count)];
        let words = match decision {
            Decision::Found {
                device_pages,
                hit_pages,
            } => [1, tokens(device_pages), tokens(hit_pages), 0],
            Decision::Loaded { position, run } => {
                [2, position.into(), pages(run)[0], pages(run)[1]]
            }
            Decision::Stored {
                position,
                run,
                grown,
            } => [
                3 + u64::from(grown),
                position.into(),
                pages(run)[0],
                pages(run)[1],
            ],
            Decision::Evicted(run) => [5, 0, pages(run)[0], pages(run)[1]],
            Decision::Refused { position, count } => [6, position.into(), count.into(), 0],
        };
        for word in words {
            hasher.update(&word.to_le_bytes());
        }
    }
}

/// Digest of a whole run.
#[derive(Debug, Clone, Default)]
pub struct RunDigest(Option<Box<blake3::Hasher>>);

impl RunDigest {
    /// Creates a digest that covers the requests that are added, or one that ignores them.
    pub fn new(record: bool) -> Self {
        Self(record.then(Box::default))
    }

    /// Adds a request that finished.
    pub fn add(&mut self, request: &RequestDigest) {
        if let (Some(run), Some(request)) = (&mut self.0, &request.0) {
            run.update(request.finalize().as_bytes());
        }
    }

    /// The digest so far, `blake3:` and 64 hexadecimal digits; `None` for one that ignores requests.
    pub fn hex(&self) -> Option<String> {
        let run = self.0.as_ref()?;
        Some(format!("blake3:{}", run.finalize().to_hex()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(tokens_per_page: u32, device_pages: u32, hit_pages: u32) -> String {
        let mut request = RequestDigest::new(true);
        let found = Decision::Found {
            device_pages,
            hit_pages,
        };
        request.add(tokens_per_page, GroupId(0), found);
        let mut run = RunDigest::new(true);
        run.add(&request);
        run.hex().expect("it is recorded")
    }

    #[test]
    fn hits_are_counted_in_tokens() {
        assert_eq!(digest(16, 2, 4), digest(32, 1, 2));
        for other in [digest(16, 3, 4), digest(16, 2, 3), digest(32, 2, 4)] {
            assert_ne!(digest(16, 2, 4), other);
        }
    }

    #[test]
    fn kinds_of_decisions_with_equal_numbers_have_different_digests() {
        let run = PageRun { start: 7, count: 4 };
        let position = 3;
        let stored = |grown| Decision::Stored {
            position,
            run,
            grown,
        };
        let all = [
            Decision::Loaded { position, run },
            stored(false),
            stored(true),
        ];
        let digests: std::collections::BTreeSet<String> = all
            .into_iter()
            .map(|decision| {
                let (mut request, mut whole) = (RequestDigest::new(true), RunDigest::new(true));
                request.add(16, GroupId(0), decision);
                whole.add(&request);
                whole.hex().expect("it is recorded")
            })
            .collect();
        assert_eq!(digests.len(), 3);
        let of_group = |group| {
            let (mut request, mut whole) = (RequestDigest::new(true), RunDigest::new(true));
            request.add(16, GroupId(group), stored(false));
            whole.add(&request);
            whole.hex().expect("it is recorded")
        };
        assert_eq!(of_group(1), of_group(1));
        assert_ne!(of_group(1), of_group(2));
        assert!(digests.contains(&of_group(0)) && !digests.contains(&of_group(1)));
    }
}
