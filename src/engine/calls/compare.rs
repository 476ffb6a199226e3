//! Compares the answers of a recording with those of its replay.

use std::collections::BTreeMap;

use super::frames::{Failed, Outcome};
use kvferry_protocol::ErrorCode;
use kvferry_types::{Answer, LookupAnswer};

/// Differences that a report shows.
const SHOWN_MAX: usize = 20;

/// How two outcomes compare.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// All fields that do not depend on time are equal.
    Equal,
    /// They differ in something that is not in the recording, for this reason.
    Incomparable(Reason, String),
    /// They differ.
    Different(String),
}

/// Why two outcomes cannot be compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reason {
    /// A deadline, a hold that expires, a process that was away, the tier that a page has reached.
    Time,
    /// `cancel_stores` stopped the store at some moment.
    Cancel,
    /// A store found room for a different number of pages, here or before.
    Room,
    /// An earlier copy or reset ended differently for one of these reasons: other pages are present since.
    Earlier,
    /// Pages reach the disk, and leave it, in their own time.
    Disk,
    /// The leader was started again.
    Leaders,
    /// Other engines of the leader store pages, and cause evictions and resets.
    Engines,
}

impl std::fmt::Display for Reason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Time => "depend on time: deadlines, holds, processes that were away",
            Self::Cancel => "depend on the moment at which cancel_stores came",
            Self::Room => "depend on pages for which a store found no room at that moment",
            Self::Earlier => "follow a copy or reset that could not be compared",
            Self::Disk => "depend on the disk, which pages reach in their own time",
            Self::Leaders => "depend on a start of the leader, which the replay does not repeat",
            Self::Engines => {
                "depend on other engines of the leader, which are not in the recording"
            }
        })
    }
}

/// Failures that depend on time, or on processes that come and go.
const TIMED: [ErrorCode; 9] = [
    ErrorCode::Limit,
    ErrorCode::NotReady,
    ErrorCode::NotPinned,
    ErrorCode::CopyFailed,
    ErrorCode::StaleRequest,
    ErrorCode::Busy,
    ErrorCode::Deadline,
    ErrorCode::Draining,
    ErrorCode::Leased,
];

/// Further conditions that make answers depend on time.
#[derive(Debug, Clone, Copy, Default)]
pub struct Conditions {
    /// `cancel_stores` stopped the request in the recording.
    pub cancelled: bool,
    /// Pages may have left host memory for a tier below it, in the recording or in the replay.
    pub has_disk: bool,
    /// The engine had several leaders.
    pub several_leaders: bool,
    /// A later one than the first had begun to serve.
    pub restarted: bool,
    /// The leader may have served other engines, too.
    pub other_engines: bool,
    /// An earlier request that changes which pages are present could not be compared.
    pub diverged: bool,
    /// A store has found room for a different number of pages: it finds none while all pages are pinned or are being
    /// filled, which depends on the moment. Other pages are then present from there on, so that answers differ in their
    /// numbers of pages.
    pub full: bool,
}

/// Whether a store that both answer was refused room for a different number of pages.
pub fn refusals_differ(recorded: &Outcome, replayed: &Outcome) -> bool {
    match (recorded, replayed) {
        (Outcome::Answered(Answer::Store(before)), Outcome::Answered(Answer::Store(now))) => {
            before.refused_pages != now.refused_pages
        }
        _ => false,
    }
}

/// Whether other pages may be present after a request that changes which are, so that later answers cannot be compared.
/// The recording must show why: a copy that failed in the replay alone excuses nothing, and the answers that follow from
/// it are differences.
pub fn excuses_later(recorded: &Outcome, verdict: &Verdict) -> bool {
    let has_failed = match recorded {
        Outcome::Failed(_) => true,
        Outcome::Answered(Answer::Store(store)) => store.failed_pages > 0,
        Outcome::Answered(_) => false,
    };
    match verdict {
        Verdict::Incomparable(Reason::Time, _) => has_failed,
        Verdict::Incomparable(..) => true,
        Verdict::Equal | Verdict::Different(_) => false,
    }
}

/// Compares a recorded outcome with the replayed one.
pub fn compare(recorded: &Outcome, replayed: &Outcome, conditions: Conditions) -> Verdict {
    let difference = match (recorded, replayed) {
        (Outcome::Failed(before), Outcome::Failed(now)) if before.code == now.code => {
            return Verdict::Equal;
        }
        (Outcome::Answered(before), Outcome::Answered(now)) => {
            let fields = fields(before, now);
            let strict: Vec<_> = fields.iter().filter(|field| !field.timed).collect();
            let timed: Vec<_> = fields.iter().filter(|field| field.timed).collect();
            let text = |fields: &[&Field]| {
                let texts: Vec<_> = fields.iter().map(|field| field.to_string()).collect();
                texts.join(", ")
            };
            match (&strict[..], &timed[..]) {
                ([], []) => return Verdict::Equal,
                ([], timed) => {
                    let reason = match conditions.cancelled {
                        true => Reason::Cancel,
                        false => Reason::Time,
                    };
                    return Verdict::Incomparable(reason, text(timed));
                }
                (strict, _) => text(strict),
            }
        }
        (before, now) => format!("answer: {} recorded, {} replayed", name(before), name(now)),
    };
    let is_lookup = matches!(recorded, Outcome::Answered(Answer::Lookup(_)));
    let both_answer = matches!(
        (recorded, replayed),
        (Outcome::Answered(_), Outcome::Answered(_))
    );
    let timed = is_timed(recorded) || (is_timed(replayed) && !is_silence(replayed));
    let refused = is_failure(recorded) || (is_failure(replayed) && !is_silence(replayed));
    let reasons = [
        (Reason::Cancel, conditions.cancelled),
        (Reason::Room, conditions.full && both_answer),
        (Reason::Leaders, conditions.restarted && both_answer),
        (Reason::Leaders, conditions.several_leaders && refused),
        (
            Reason::Engines,
            conditions.other_engines && (both_answer || timed),
        ),
        (
            Reason::Disk,
            conditions.has_disk && is_lookup && both_answer,
        ),
        (Reason::Earlier, conditions.diverged && both_answer),
        (Reason::Time, timed),
    ];
    match reasons.into_iter().find(|(_, holds)| *holds) {
        Some((reason, _)) => Verdict::Incomparable(reason, difference),
        None => Verdict::Different(difference),
    }
}

fn is_failure(outcome: &Outcome) -> bool {
    matches!(outcome, Outcome::Failed(_))
}

/// Whether no answer came by the deadline. Requests have the same time in the replay as in the recording, so a missing
/// answer in the replay alone is a difference.
fn is_silence(outcome: &Outcome) -> bool {
    matches!(outcome, Outcome::Failed(failed) if failed.code == ErrorCode::Deadline.number())
}

fn is_timed(outcome: &Outcome) -> bool {
    match outcome {
        Outcome::Answered(_) => false,
        Outcome::Failed(failed) => {
            !failed.reported || TIMED.iter().any(|code| code.number() == failed.code)
        }
    }
}

fn name(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Answered(answer) => format!("{answer:?}"),
        Outcome::Failed(Failed { code, message, .. }) => {
            format!("{} ({message})", ErrorCode::from_number(*code).name())
        }
    }
}

/// A field that differs.
struct Field {
    name: &'static str,
    recorded: u64,
    replayed: u64,
    timed: bool,
}

impl std::fmt::Display for Field {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            name,
            recorded,
            replayed,
            ..
        } = self;
        write!(f, "{name}: {recorded} recorded, {replayed} replayed")
    }
}

/// The fields of two answers to the same request that differ. `ready_in_ms` is an estimate, and not compared.
fn fields(recorded: &Answer, replayed: &Answer) -> Vec<Field> {
    let mut all: Vec<(&'static str, u64, u64, bool)> = Vec::new();
    match (recorded, replayed) {
        (Answer::Lookup(a), Answer::Lookup(b)) => {
            let LookupAnswer {
                hit_pages,
                pending,
                below_pages,
                ready_in_ms: _,
                declined_pages,
            } = *a;
            all.push(("hit_pages", hit_pages.into(), b.hit_pages.into(), false));
            all.push(("pending", pending.into(), b.pending.into(), false));
            all.push((
                "below_pages",
                below_pages.total().into(),
                b.below_pages.total().into(),
                true,
            ));
            let declined = (declined_pages.into(), b.declined_pages.into());
            all.push(("declined_pages", declined.0, declined.1, true));
        }
        (Answer::Load(a), Answer::Load(b)) => {
            all.push(("pages", a.pages.into(), b.pages.into(), false));
        }
        (Answer::Store(a), Answer::Store(b)) => {
            // Pages whose copy failed on one side are stored on the other.
            let failed = a.failed_pages != b.failed_pages;
            all.push((
                "stored_pages",
                a.stored_pages.into(),
                b.stored_pages.into(),
                failed,
            ));
            all.push((
                "present_pages",
                a.present_pages.into(),
                b.present_pages.into(),
                false,
            ));
            all.push((
                "refused_pages",
                a.refused_pages.into(),
                b.refused_pages.into(),
                false,
            ));
            all.push((
                "failed_pages",
                a.failed_pages.into(),
                b.failed_pages.into(),
                true,
            ));
        }
        (Answer::Reset(a), Answer::Reset(b)) => {
            all.push(("pages", a.pages.into(), b.pages.into(), false));
        }
        (Answer::CancelStores(a), Answer::CancelStores(b)) => {
            all.push(("stores", a.stores.into(), b.stores.into(), true));
        }
        (Answer::Finish, Answer::Finish) | (Answer::Flush(_), Answer::Flush(_)) => {}
        _ => all.push(("kind", 0, 1, false)),
    }
    let differ = all.into_iter().filter(|(_, before, now, _)| before != now);
    differ
        .map(|(name, recorded, replayed, timed)| Field {
            name,
            recorded,
            replayed,
            timed,
        })
        .collect()
}

/// Result of a replay of calls.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CallsReport {
    /// Requests that were sent.
    pub sent: u64,
    /// Requests that the recorded engine could not send, and the replay does not.
    pub unsent: u64,
    /// Requests that the recorded leader refused because it was not ready, busy or about to end. They had no effect, and
    /// are not sent: the leader of the replay would carry them out.
    pub not_served: u64,
    /// Requests without an end in the recording.
    pub unanswered: u64,
    /// Answers that were compared.
    pub compared: u64,
    /// Answers that are equal.
    pub equal: u64,
    /// Answers that differ and cannot be compared, by reason.
    pub incomparable: BTreeMap<Reason, u64>,
    /// Answers that differ.
    pub different: u64,
    /// Copies that were let go earlier than in the recording, because others waited for them.
    pub early: u64,
    /// Bytes of loaded pages that were compared with what was stored.
    pub verified_bytes: u64,
    /// Bytes of those that were wrong.
    pub mismatched_bytes: u64,
    /// The first wrong byte.
    pub complaint: String,
    /// The first differences.
    pub differences: Vec<String>,
    /// The first differences that cannot be compared.
    pub incomparable_differences: Vec<String>,
}

impl CallsReport {
    /// Answers that cannot be compared, for all reasons.
    pub fn incomparable_ends(&self) -> u64 {
        self.incomparable.values().sum()
    }

    /// Counts the verdict on the request `what`.
    pub(super) fn add(&mut self, what: &str, verdict: Verdict) {
        self.compared += 1;
        let (list, text) = match verdict {
            Verdict::Equal => {
                self.equal += 1;
                return;
            }
            Verdict::Incomparable(reason, text) => {
                *self.incomparable.entry(reason).or_default() += 1;
                (&mut self.incomparable_differences, text)
            }
            Verdict::Different(text) => {
                self.different += 1;
                (&mut self.differences, text)
            }
        };
        if list.len() < SHOWN_MAX {
            list.push(format!("{what}: {text}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvferry_types::{PagesBelow, StoreAnswer};

    fn lookup(hit_pages: u32, below_pages: u32) -> Outcome {
        Outcome::Answered(Answer::Lookup(LookupAnswer {
            hit_pages,
            below_pages: PagesBelow::disk(below_pages),
            ready_in_ms: Some(below_pages),
            ..LookupAnswer::default()
        }))
    }

    fn store(stored_pages: u32, failed_pages: u32) -> Outcome {
        Outcome::Answered(Answer::Store(StoreAnswer {
            stored_pages,
            failed_pages,
            present_pages: 0,
            refused_pages: 0,
        }))
    }

    fn failed(code: ErrorCode, reported: bool) -> Outcome {
        Outcome::Failed(Failed {
            code: code.number(),
            message: "why".to_owned(),
            reported,
            over: false,
        })
    }

    const NONE: Conditions = Conditions {
        cancelled: false,
        has_disk: false,
        several_leaders: false,
        restarted: false,
        other_engines: false,
        diverged: false,
        full: false,
    };

    #[test]
    fn each_field_is_compared_and_named() {
        assert_eq!(compare(&lookup(3, 0), &lookup(3, 0), NONE), Verdict::Equal);
        let text = "hit_pages: 3 recorded, 4 replayed".to_owned();
        assert_eq!(
            compare(&lookup(3, 1), &lookup(4, 2), NONE),
            Verdict::Different(text)
        );
        let store = |stored_pages, present_pages, refused_pages| {
            Outcome::Answered(Answer::Store(StoreAnswer {
                stored_pages,
                present_pages,
                refused_pages,
                failed_pages: 0,
            }))
        };
        for other in [store(2, 1, 1), store(1, 2, 1), store(1, 1, 2)] {
            let verdict = compare(&store(1, 1, 1), &other, NONE);
            assert!(matches!(verdict, Verdict::Different(_)), "{verdict:?}");
        }
    }

    #[test]
    fn what_depends_on_time_is_a_class_of_its_own() {
        let tier = compare(&lookup(3, 1), &lookup(3, 2), NONE);
        let text = "below_pages: 1 recorded, 2 replayed".to_owned();
        assert_eq!(tier, Verdict::Incomparable(Reason::Time, text));
        let disk = Conditions {
            has_disk: true,
            ..NONE
        };
        assert!(matches!(
            compare(&lookup(3, 0), &lookup(4, 0), disk),
            Verdict::Incomparable(..)
        ));
        for code in TIMED {
            let verdict = compare(&failed(code, true), &lookup(3, 0), NONE);
            assert!(matches!(verdict, Verdict::Incomparable(..)), "{code:?}");
            let verdict = compare(&lookup(3, 0), &failed(code, true), NONE);
            let silent = code == ErrorCode::Deadline;
            assert_eq!(
                matches!(verdict, Verdict::Incomparable(..)),
                !silent,
                "{code:?}"
            );
        }
        let local = compare(&failed(ErrorCode::Internal, false), &lookup(3, 0), NONE);
        assert!(matches!(local, Verdict::Incomparable(..)));
    }

    #[test]
    fn refusals_of_room_depend_on_time_with_all_that_follows() {
        let store = |stored_pages, refused_pages| {
            Outcome::Answered(Answer::Store(StoreAnswer {
                stored_pages,
                present_pages: 0,
                refused_pages,
                failed_pages: 0,
            }))
        };
        assert!(refusals_differ(&store(6, 0), &store(0, 6)));
        assert!(!refusals_differ(&store(6, 0), &store(5, 0)));
        assert!(!refusals_differ(&lookup(3, 0), &lookup(4, 0)));
        let internal = failed(ErrorCode::Internal, true);
        assert!(!refusals_differ(&store(6, 3), &internal));
        let full = Conditions { full: true, ..NONE };
        for before in [store(6, 3), lookup(3, 0)] {
            let verdict = compare(&before, &internal, full);
            assert!(matches!(verdict, Verdict::Different(_)), "{verdict:?}");
        }
        for (before, now) in [(store(6, 0), store(0, 6)), (lookup(3, 0), lookup(4, 0))] {
            let verdict = compare(&before, &now, full);
            assert!(matches!(verdict, Verdict::Incomparable(..)), "{verdict:?}");
        }
    }

    #[test]
    fn a_refusal_instead_of_an_answer_is_a_difference() {
        let refused = failed(ErrorCode::UnknownSlot, true);
        for (before, now) in [(&refused, &lookup(1, 0)), (&lookup(1, 0), &refused)] {
            let verdict = compare(before, now, NONE);
            assert!(matches!(verdict, Verdict::Different(_)), "{verdict:?}");
        }
        assert_eq!(compare(&refused, &refused, NONE), Verdict::Equal);
        let leaders = Conditions {
            several_leaders: true,
            ..NONE
        };
        assert!(matches!(
            compare(&refused, &lookup(1, 0), leaders),
            Verdict::Incomparable(..)
        ));
    }

    #[test]
    fn copies_that_fail_in_the_replay_alone_excuse_no_later_answer() {
        let failed_here = (store(6, 0), store(0, 6));
        let failed_there = (store(0, 6), store(6, 0));
        for ((recorded, replayed), excuses) in [(failed_here, false), (failed_there, true)] {
            let verdict = compare(&recorded, &replayed, NONE);
            assert!(
                matches!(verdict, Verdict::Incomparable(Reason::Time, _)),
                "{verdict:?}"
            );
            assert_eq!(excuses_later(&recorded, &verdict), excuses);
        }
        let copy_failed = failed(ErrorCode::CopyFailed, true);
        for (recorded, replayed, excuses) in [
            (store(6, 0), copy_failed.clone(), false),
            (copy_failed, store(6, 0), true),
        ] {
            let verdict = compare(&recorded, &replayed, NONE);
            assert_eq!(excuses_later(&recorded, &verdict), excuses);
        }
        assert!(!excuses_later(&store(6, 6), &Verdict::Equal));
    }

    #[test]
    fn each_reason_is_named_and_excuses_no_other_failure() {
        let with = |change: fn(&mut Conditions)| {
            let mut conditions = NONE;
            change(&mut conditions);
            conditions
        };
        let cases = [
            (Reason::Cancel, with(|all| all.cancelled = true)),
            (Reason::Room, with(|all| all.full = true)),
            (Reason::Leaders, with(|all| all.restarted = true)),
            (Reason::Engines, with(|all| all.other_engines = true)),
            (Reason::Disk, with(|all| all.has_disk = true)),
            (Reason::Earlier, with(|all| all.diverged = true)),
        ];
        for (reason, conditions) in cases {
            let text = "hit_pages: 3 recorded, 4 replayed".to_owned();
            assert_eq!(
                compare(&lookup(3, 0), &lookup(4, 0), conditions),
                Verdict::Incomparable(reason, text)
            );
            assert_eq!(
                compare(&lookup(3, 0), &lookup(3, 0), conditions),
                Verdict::Equal
            );
            let refused = compare(
                &lookup(3, 0),
                &failed(ErrorCode::UnknownSlot, true),
                conditions,
            );
            let excused = matches!(refused, Verdict::Incomparable(..));
            assert_eq!(excused, reason == Reason::Cancel, "{reason:?}");
        }
    }

    #[test]
    fn a_report_counts_each_reason() {
        let mut report = CallsReport::default();
        for reason in [Reason::Disk, Reason::Engines, Reason::Disk] {
            report.add("a", Verdict::Incomparable(reason, "why".to_owned()));
        }
        assert_eq!(report.incomparable_ends(), 3);
        assert_eq!(report.incomparable[&Reason::Disk], 2);
        assert_eq!((report.compared, report.equal, report.different), (3, 0, 0));
    }
}
