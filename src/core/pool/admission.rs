//! Admission: which pages of a store enter a tier.
//!
//! A rule is applied to each missing page of a store. A page that is not admitted is refused like a page without room. The
//! state of a rule is lost with its pool.

use std::fmt;
use std::str::FromStr;

use crate::pool::policy_error::ParseTierPolicyError;
use kvferry_types::{Anchor, ByteSize, Time};

/// Most rules in one admission: `all`, `seen:K` and `bytes-per-day:N`.
pub const ADMISSION_RULES_MAX: usize = 8;
/// Pages that the sketch of `seen:K` remembers, at most: 8 bytes each, 8 MiB for the pool. Of the pages of one set, the one
/// that was seen longest ago is forgotten first.
pub const SEEN_PAGES_MAX: usize = SETS * WAYS;

const SETS: usize = 1 << 16;
const WAYS: usize = 16;
/// Nanoseconds of a day.
const DAY: u128 = 86_400_000_000_000;
/// Share of a day's bytes that may be written at once.
const BURSTS_PER_DAY: u64 = 24;

/// Which pages enter a tier.
///
/// Written `all`, `seen:2`, `bytes-per-day:10GiB`, or several of them joined by `&` (all of them) and `|` (any of them);
/// `&` binds more closely.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Admission {
    /// Every page.
    #[default]
    All,
    /// Pages that stores have offered this often, 2 to 255 times, this one included. Saves the writes of pages that are
    /// used once.
    SeenTimes(u8),
    /// As many pages as this many bytes a day have room for, counted on one shard. The budget grows evenly, up to an
    /// hour's part of it or one page: no 24 hours admit more than 25/24 of it and one page. Pages that another rule
    /// admits use the budget as well.
    BytesPerDay(u64),
    /// Pages that each of these rules admits.
    AllOf(Vec<Admission>),
    /// Pages that at least one of these rules admits.
    AnyOf(Vec<Admission>),
}

impl fmt::Display for Admission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let join = |f: &mut fmt::Formatter<'_>, rules: &[Self], between: &str| {
            for (index, rule) in rules.iter().enumerate() {
                let between = if index == 0 { "" } else { between };
                write!(f, "{between}{rule}")?;
            }
            Ok(())
        };
        match self {
            Self::All => f.write_str("all"),
            Self::SeenTimes(times) => write!(f, "seen:{times}"),
            Self::BytesPerDay(bytes) => write!(f, "bytes-per-day:{bytes}"),
            Self::AllOf(rules) => join(f, rules, "&"),
            Self::AnyOf(rules) => join(f, rules, "|"),
        }
    }
}

impl FromStr for Admission {
    type Err = ParseTierPolicyError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let refuse = |value: &str, remedy: String| {
            Err(ParseTierPolicyError::new("admission", value, remedy))
        };
        if text.split(['&', '|']).count() > ADMISSION_RULES_MAX {
            return refuse(text, format!("give at most {ADMISSION_RULES_MAX} rules"));
        }
        for (sign, join) in [
            ('|', Self::AnyOf as fn(Vec<Self>) -> Self),
            ('&', Self::AllOf),
        ] {
            if text.contains(sign) {
                let rules: Result<Vec<Self>, _> = text.split(sign).map(str::parse).collect();
                return rules.map(join);
            }
        }
        let rule = match text.split_once(':') {
            None if text == "all" => Some(Self::All),
            Some(("seen", times)) => {
                let times = times.parse().ok().filter(|times| *times >= 2);
                times.map(Self::SeenTimes)
            }
            Some(("bytes-per-day", size)) => {
                let size = size.parse::<ByteSize>().ok().filter(|size| size.0 > 0);
                size.map(|size| Self::BytesPerDay(size.0))
            }
            _ => None,
        };
        let remedy = "give all, seen:K with K from 2 to 255, or bytes-per-day:SIZE";
        rule.map_or_else(|| refuse(text, remedy.to_owned()), Ok)
    }
}

/// When pages are offered, and how large they are.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Offer {
    pub(crate) now: Time,
    /// Bytes of a page on one shard.
    pub(crate) page_bytes: u64,
}

/// An admission with its state.
#[derive(Debug, Default)]
pub(crate) struct Admitter {
    rule: Admission,
    /// The sketch, if a rule needs it.
    seen: Option<Seen>,
    /// One budget for each `bytes-per-day`, in order.
    budgets: Vec<Budget>,
}

impl Admitter {
    pub(crate) fn new(rule: Admission) -> Self {
        let (mut counts, mut budgets) = (false, Vec::new());
        for_each(&rule, &mut |leaf| match leaf {
            Admission::SeenTimes(_) => counts = true,
            Admission::BytesPerDay(bytes) => budgets.push(Budget::new(*bytes)),
            _ => {}
        });
        Self {
            rule,
            seen: counts.then(Seen::new),
            budgets,
        }
    }

    /// True if every page is admitted, so that none need be offered.
    pub(crate) fn admits_all(&self) -> bool {
        self.rule == Admission::All
    }

    /// Offers a page, once for each store that misses it. Returns whether it is admitted.
    pub(crate) fn admits(&mut self, page: Anchor, offer: Offer) -> bool {
        let times = self.seen.as_mut().map_or(0, |seen| seen.note(page));
        for budget in &mut self.budgets {
            budget.grow(offer);
        }
        let mut budgets = self.budgets.iter();
        let admitted = holds(&self.rule, times, offer.page_bytes, &mut budgets);
        if admitted {
            for budget in &mut self.budgets {
                budget.spend(offer.page_bytes);
            }
        }
        admitted
    }

    /// Of the pages that were admitted since the last call, the last `pages` found no room: gives back what they took of
    /// the budgets.
    pub(crate) fn settle(&mut self, pages: u32, offer: Offer) {
        for budget in &mut self.budgets {
            budget.settle(pages, offer);
        }
    }
}

/// Calls `each` with the rules that are not made of others, in order.
fn for_each(rule: &Admission, each: &mut impl FnMut(&Admission)) {
    match rule {
        Admission::AllOf(rules) | Admission::AnyOf(rules) => {
            rules.iter().for_each(|rule| for_each(rule, each));
        }
        leaf => each(leaf),
    }
}

/// Whether a rule admits a page that was seen `times` times. Evaluates every part, because each takes its budget.
fn holds<'a>(
    rule: &Admission,
    times: u8,
    page_bytes: u64,
    budgets: &mut impl Iterator<Item = &'a Budget>,
) -> bool {
    match rule {
        Admission::All => true,
        Admission::SeenTimes(least) => times >= *least,
        Admission::BytesPerDay(_) => budgets.next().is_some_and(|budget| budget.has(page_bytes)),
        Admission::AllOf(rules) => rules.iter().fold(true, |all, rule| {
            all & holds(rule, times, page_bytes, budgets)
        }),
        Admission::AnyOf(rules) => rules.iter().fold(false, |any, rule| {
            any | holds(rule, times, page_bytes, budgets)
        }),
    }
}

/// Bytes that may be written. In units of 1/[`DAY`] byte, so that no part of a byte is lost.
#[derive(Debug)]
struct Budget {
    bytes_per_day: u64,
    left: u128,
    grown_until: Option<Time>,
    /// What each page took that was admitted and may find no room: at most the pages of a block.
    taken: Vec<u128>,
}

impl Budget {
    fn new(bytes_per_day: u64) -> Self {
        Self {
            bytes_per_day,
            left: u128::from(bytes_per_day / BURSTS_PER_DAY) * DAY,
            grown_until: None,
            taken: Vec::new(),
        }
    }

    fn grow(&mut self, offer: Offer) {
        let before = self.grown_until.replace(offer.now);
        let elapsed = before.map_or(0, |before| offer.now.0.saturating_sub(before.0));
        self.add(u128::from(elapsed) * u128::from(self.bytes_per_day), offer);
    }

    fn settle(&mut self, pages: u32, offer: Offer) {
        let kept = self.taken.len().saturating_sub(pages as usize);
        let given_back = self.taken.drain(..).skip(kept).sum();
        self.add(given_back, offer);
    }

    /// Adds to what is left, up to a burst.
    fn add(&mut self, more: u128, offer: Offer) {
        let burst = (self.bytes_per_day / BURSTS_PER_DAY).max(offer.page_bytes);
        let most = u128::from(burst) * DAY;
        self.left = self.left.saturating_add(more).min(most);
    }

    fn has(&self, bytes: u64) -> bool {
        self.left >= u128::from(bytes) * DAY
    }

    /// Takes the bytes of a page, or what is left: another rule may have admitted the page.
    fn spend(&mut self, bytes: u64) {
        let taken = self.left.min(u128::from(bytes) * DAY);
        self.left -= taken;
        self.taken.push(taken);
    }
}

/// How often each page was offered. Each set of the sketch holds the pages that were seen last of those that fall into
/// it, newest first: a tag of 56 bits and a count of 8 bits. Tags are parts of keyed hashes, so two pages are taken for
/// one only by chance, once in 2^52 comparisons with a full set.
#[derive(Debug)]
struct Seen(Vec<[u64; WAYS]>);

impl Seen {
    fn new() -> Self {
        Self(vec![[0; WAYS]; SETS])
    }

    /// Counts a page, and returns how often it was seen, up to 255.
    fn note(&mut self, page: Anchor) -> u8 {
        #[expect(
            clippy::cast_possible_truncation,
            reason = "parts of a hash are wanted"
        )]
        let (place, tag) = ((page.0 >> 64) as usize % SETS, (page.0 as u64) & !0xff);
        let set = &mut self.0[place];
        let found = set
            .iter()
            .position(|entry| *entry != 0 && entry & !0xff == tag);
        let at = found.unwrap_or(WAYS - 1);
        let before = found.map_or(0, |at| set[at] & 0xff);
        let count = (before + 1).min(0xff);
        set[..=at].rotate_right(1);
        set[0] = tag | count;
        u8::try_from(count).unwrap_or(u8::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn page(number: u128) -> Anchor {
        Anchor(number << 64 | (number + 1) << 8)
    }

    fn offer(seconds: u64) -> Offer {
        Offer {
            now: Time(0) + Duration::from_secs(seconds),
            page_bytes: 100,
        }
    }

    fn admitter(text: &str) -> Admitter {
        Admitter::new(text.parse().expect("a rule"))
    }

    #[test]
    fn a_page_without_room_costs_no_budget() {
        let mut admitter = admitter("bytes-per-day:24000B");
        let mut admitted = 0;
        while admitter.admits(page(admitted), offer(0)) {
            admitted += 1;
        }
        assert_eq!(admitted, 10, "an hour's share");
        admitter.settle(3, offer(0));
        let more = (0..5).filter(|more| admitter.admits(page(100 + more), offer(0)));
        assert_eq!(more.count(), 3);
        admitter.settle(0, offer(0));
        admitter.settle(1_000, offer(0));
        assert!(
            !admitter.admits(page(200), offer(0)),
            "those pages have room"
        );
    }

    #[test]
    fn a_page_that_another_rule_admits_gives_back_what_it_took() {
        let mut any = admitter("seen:2|bytes-per-day:2400");
        assert!(any.admits(page(0), offer(0)));
        any.settle(0, offer(0));
        assert!(!any.admits(page(1), offer(0)), "the budget is empty");
        assert!(any.admits(page(1), offer(0)), "seen twice");
        any.settle(1, offer(0));
        assert!(!any.admits(page(2), offer(0)), "the budget is still empty");
    }

    #[test]
    fn a_rule_is_read_back_from_its_text() {
        let (seen, bytes) = (Admission::SeenTimes(2), Admission::BytesPerDay(10 << 10));
        let both = Admission::AllOf(vec![seen.clone(), bytes.clone()]);
        let any = Admission::AnyOf(vec![both.clone(), Admission::All]);
        for (text, rule) in [
            ("all", Admission::All),
            ("seen:2", seen),
            ("bytes-per-day:10KiB", bytes),
            ("seen:2&bytes-per-day:10KiB", both),
            ("seen:2&bytes-per-day:10KiB|all", any),
        ] {
            assert_eq!(text.parse(), Ok(rule.clone()));
            assert_eq!(rule.to_string().parse(), Ok(rule));
        }
        for text in ["", "seen:1", "seen:256", "bytes-per-day:0", "all|", "never"] {
            let error = text.parse::<Admission>().expect_err(text).to_string();
            assert!(error.starts_with("admission is '"), "{error}");
        }
        let many = ["all"; ADMISSION_RULES_MAX + 1].join("&");
        let error = many.parse::<Admission>().expect_err("too many").to_string();
        assert!(error.ends_with("give at most 8 rules"), "{error}");
    }

    #[test]
    fn pages_are_admitted_when_they_have_been_seen_often_enough() {
        let mut admitter = admitter("seen:3");
        let verdicts = |admitter: &mut Admitter, number| {
            [0; 4].map(|_| admitter.admits(page(number), offer(0)))
        };
        for number in 0..3 {
            assert_eq!(verdicts(&mut admitter, number), [false, false, true, true]);
        }
    }

    #[test]
    fn the_sketch_forgets_the_pages_of_a_set_that_were_seen_longest_ago() {
        let mut seen = Seen::new();
        let in_one_set = |number: usize| page((number * SETS) as u128);
        for number in 0..WAYS {
            assert_eq!(seen.note(in_one_set(number)), 1);
        }
        assert_eq!(seen.note(in_one_set(0)), 2);
        assert_eq!(seen.note(in_one_set(WAYS)), 1, "takes the place of page 1");
        assert_eq!(seen.note(in_one_set(0)), 3);
        assert_eq!(seen.note(in_one_set(1)), 1, "was forgotten");
        for _ in 0..300 {
            seen.note(in_one_set(0));
        }
        assert_eq!(seen.note(in_one_set(0)), 255);
    }

    #[test]
    fn a_budget_grows_with_time_and_bounds_what_is_written() {
        // 100 bytes an hour.
        let mut admitter = admitter("bytes-per-day:2400");
        let mut admitted = 0;
        for second in 0..=86_400 {
            admitted += u64::from(admitter.admits(page(0), offer(second)));
        }
        assert_eq!(admitted, 25);
        let week = 8 * 86_400;
        assert!(admitter.admits(page(0), offer(week)));
        assert!(
            !admitter.admits(page(0), offer(week)),
            "an hour's part at once"
        );
    }

    #[test]
    fn a_page_that_another_rule_admits_uses_the_budget() {
        let mut any = admitter("seen:2|bytes-per-day:2400");
        assert!(any.admits(page(0), offer(0)), "by the budget");
        assert!(!any.admits(page(1), offer(0)));
        assert!(any.admits(page(1), offer(1800)), "seen twice");
        assert!(
            !any.admits(page(2), offer(3600)),
            "half of the budget was used"
        );
        let mut all = admitter("seen:2&bytes-per-day:2400");
        assert!(!all.admits(page(0), offer(0)));
        assert!(all.admits(page(0), offer(0)), "nothing was used so far");
        assert!(!all.admits(page(0), offer(0)));
    }
}
