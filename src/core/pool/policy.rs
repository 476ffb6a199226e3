//! The policy of a tier: how its pool places, evicts and admits pages.
//!
//! One text describes a policy, such as `pieces=2`: settings separated by commas or spaces, each with a default. The
//! configuration, the flags of a replay and the log use that text.

use std::fmt;
use std::str::FromStr;

use crate::eviction::EvictionPolicy;
use crate::pool::admission::Admission;
use crate::pool::policy_error::ParseTierPolicyError;

/// Most pieces over which a run may be split before a page is evicted for it. Each piece is a block of its own, which
/// costs a transfer, and a probe of the index in each later lookup.
pub const PIECES_MAX: u32 = 32;

/// How the pool of one tier decides. [`Default`] is the policy of host memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TierPolicy {
    /// Most pieces over which a run without a long enough hole is split before a page is evicted for it: 0 to
    /// [`PIECES_MAX`]. 0 and 1 split no run before the bound on eviction is reached; from there on, all policies split
    /// over as many holes as needed.
    ///
    /// More pieces keep more of the older pages, and make more and smaller transfers. Default: 2, for host memory, where a
    /// transfer costs microseconds. A disk wants one large piece: 0.
    pub pieces_max: u32,
    /// Which block is evicted first. Default: the least recently used one.
    pub eviction: EvictionPolicy,
    /// Pages of a namespace from which on its own blocks are evicted first for its stores, at least 1. Up to then, and
    /// while there is room, its stores evict as those of others do. Default: none.
    pub quota_pages: Option<u32>,
    /// Which pages enter the tier. Default: all.
    pub admission: Admission,
}

impl Default for TierPolicy {
    fn default() -> Self {
        Self {
            pieces_max: 2,
            eviction: EvictionPolicy::Lru,
            quota_pages: None,
            admission: Admission::All,
        }
    }
}

impl TierPolicy {
    /// Evicts first, and splits a run only when the bound on eviction is reached.
    pub fn evict_first() -> Self {
        Self {
            pieces_max: 0,
            ..Self::default()
        }
    }
}

/// The settings of a policy's text.
const SETTINGS: &str = "pieces=N, eviction=POLICY, quota=PAGES, admission=RULE";

impl FromStr for TierPolicy {
    type Err = ParseTierPolicyError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut policy = Self::default();
        let settings = text.split([',', ' ']).filter(|setting| !setting.is_empty());
        for setting in settings {
            let (name, value) = setting.split_once('=').unwrap_or((setting, ""));
            match name {
                "pieces" => {
                    let pieces = value.parse().ok().filter(|pieces| *pieces <= PIECES_MAX);
                    policy.pieces_max = pieces.ok_or_else(|| {
                        let remedy = format!("give 0 to {PIECES_MAX}");
                        ParseTierPolicyError::new(name, value, remedy)
                    })?;
                }
                "eviction" => {
                    let mut all = EvictionPolicy::ALL.into_iter();
                    policy.eviction = all.find(|way| way.name() == value).ok_or_else(|| {
                        let remedy = "give lru, arc or priority".to_owned();
                        ParseTierPolicyError::new(name, value, remedy)
                    })?;
                }
                "quota" => {
                    let pages = value.parse().ok().filter(|pages| *pages > 0);
                    policy.quota_pages = Some(pages.ok_or_else(|| {
                        let remedy = "give a number of pages above 0".to_owned();
                        ParseTierPolicyError::new(name, value, remedy)
                    })?);
                }
                "admission" => policy.admission = value.parse()?,
                _ => {
                    let remedy = format!("the settings are {SETTINGS}");
                    return Err(ParseTierPolicyError::new("policy", setting, remedy));
                }
            }
        }
        Ok(policy)
    }
}

impl fmt::Display for TierPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pieces={}", self.pieces_max)?;
        if self.eviction != EvictionPolicy::Lru {
            write!(f, ",eviction={}", self.eviction.name())?;
        }
        if let Some(pages) = self.quota_pages {
            write!(f, ",quota={pages}")?;
        }
        match &self.admission {
            Admission::All => Ok(()),
            admission => write!(f, ",admission={admission}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::eviction::RuleLimits;
    use crate::pool::tests::{domain, sequence, stored};
    use kvferry_types::PageRun;

    /// Stores a sequence of 4 pages where holes of 2, 1 and 1 pages are free, and the oldest of two other blocks begins
    /// at page 8. Returns the evicted runs, and those of the stored pages.
    fn stored_with(pieces_max: u32) -> (Vec<PageRun>, Vec<PageRun>) {
        let mut pool = stored(&sequence(16, 0), 16).with_policy(
            TierPolicy {
                pieces_max,
                ..TierPolicy::default()
            },
            RuleLimits::new(),
        );
        for (block, pages) in [(0, 2), (1, 1), (3, 1)] {
            pool.trim(block, pages);
        }
        let pins = [(0, 2), (1, 3), (3, 3)].map(|(block, pages)| pool.pin(block, pages));
        let (mut reserved, mut evicted) = (Vec::new(), Vec::new());
        let hashes = sequence(4, 1);
        let room = pool.reserve(
            &domain(),
            hashes.view(),
            0,
            4,
            None,
            &mut 90,
            &mut reserved,
            &mut evicted,
        );
        assert_eq!((room, pool.check()), (4, Ok(())));
        pins.into_iter().for_each(|pin| pool.unpin(pin));
        (evicted, reserved.iter().map(|piece| piece.run).collect())
    }

    #[test]
    fn a_run_is_split_before_an_eviction_if_few_enough_holes_have_room() {
        let run = |start, count| PageRun { start, count };
        for pieces_max in [0, 1, 2] {
            let evicted_first = (vec![run(8, 4)], vec![run(7, 4)]);
            assert_eq!(stored_with(pieces_max), evicted_first, "{pieces_max}");
        }
        for pieces_max in [3, 4] {
            let (evicted, pieces) = stored_with(pieces_max);
            assert_eq!(evicted, [], "{pieces_max}");
            assert_eq!(pieces[0], run(2, 2));
            let mut ends = [pieces[1], pieces[2]];
            ends.sort_by_key(|piece| piece.start);
            assert_eq!(ends, [run(7, 1), run(15, 1)]);
        }
    }

    #[test]
    fn a_policy_is_read_back_from_its_text() {
        for text in [
            "",
            "pieces=0",
            "pieces=32",
            "admission=seen:2|all pieces=1",
            "eviction=arc quota=7",
            "eviction=priority",
        ] {
            let policy: TierPolicy = text.parse().expect("a policy");
            assert_eq!(policy.to_string().parse(), Ok(policy));
        }
        assert_eq!("".parse(), Ok(TierPolicy::default()));
        assert_eq!("pieces=0".parse(), Ok(TierPolicy::evict_first()));
    }

    #[test]
    fn an_error_names_the_setting_its_value_and_the_remedy() {
        let error = |text: &str| text.parse::<TierPolicy>().expect_err(text).to_string();
        assert_eq!(error("pieces=33"), "pieces is '33': give 0 to 32");
        assert_eq!(error("pieces"), "pieces is '': give 0 to 32");
        let unknown = "policy is 'color=red': the settings are pieces=N, eviction=POLICY, quota=PAGES, \
             admission=RULE";
        assert_eq!(error("color=red"), unknown);
    }
}
