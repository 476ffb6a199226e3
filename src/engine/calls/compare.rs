//! Compares the answers of a recording with those of its replay.

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
    /// They differ in something that depends on time: a deadline, a hold that expires, a process that was away, the
    /// tier that a page has reached, the moment of a cancel.
    Timed(String),
    /// They differ.
    Different(String),
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

/// What else may make answers depend on time.
#[derive(Debug, Clone, Copy, Default)]
pub struct Conditions {
    /// `cancel_stores` stopped the request in the recording.
    pub cancelled: bool,
    /// There is a tier below host memory, in the recording or in the replay: pages reach it in their own time.
    pub has_disk: bool,
    /// The engine had several leaders.
    pub several_leaders: bool,
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
                ([], timed) => return Verdict::Timed(text(timed)),
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
    let timed = conditions.cancelled
        || (conditions.full && both_answer)
        || (conditions.has_disk && is_lookup && both_answer)
        || is_timed(recorded, conditions)
        || (is_timed(replayed, conditions) && !is_silence(replayed));
    match timed {
        true => Verdict::Timed(difference),
        false => Verdict::Different(difference),
    }
}

/// Whether no answer came by the deadline. Requests have the same time in the replay as in the recording, so a missing
/// answer in the replay alone is a difference.
fn is_silence(outcome: &Outcome) -> bool {
    matches!(outcome, Outcome::Failed(failed) if failed.code == ErrorCode::Deadline.number())
}

fn is_timed(outcome: &Outcome, conditions: Conditions) -> bool {
    match outcome {
        Outcome::Answered(_) => false,
        Outcome::Failed(failed) => {
            conditions.several_leaders
                || !failed.reported
                || TIMED.iter().any(|code| code.number() == failed.code)
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
                below_pages.into(),
                b.below_pages.into(),
                true,
            ));
            let declined = (declined_pages.into(), b.declined_pages.into());
            all.push(("declined_pages", declined.0, declined.1, true));
        }
        (Answer::Load(a), Answer::Load(b)) => {
            all.push(("pages", a.pages.into(), b.pages.into(), false));
        }
        (Answer::Store(a), Answer::Store(b)) => {
            all.push((
                "stored_pages",
                a.stored_pages.into(),
                b.stored_pages.into(),
                false,
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

/// What a replay of calls found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CallsReport {
    /// Requests that were sent.
    pub sent: u64,
    /// Requests that the recorded engine could not send, and the replay does not.
    pub unsent: u64,
    /// Requests without an end in the recording.
    pub unanswered: u64,
    /// Answers that were compared.
    pub compared: u64,
    /// Answers that are equal.
    pub equal: u64,
    /// Answers that differ because of the time.
    pub timed: u64,
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
    /// The first differences because of the time.
    pub timed_differences: Vec<String>,
}

impl CallsReport {
    /// Counts the verdict on the request `what`.
    pub(super) fn add(&mut self, what: &str, verdict: Verdict) {
        self.compared += 1;
        let (list, text) = match verdict {
            Verdict::Equal => {
                self.equal += 1;
                return;
            }
            Verdict::Timed(text) => {
                self.timed += 1;
                (&mut self.timed_differences, text)
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
    use kvferry_types::StoreAnswer;

    fn lookup(hit_pages: u32, below_pages: u32) -> Outcome {
        Outcome::Answered(Answer::Lookup(LookupAnswer {
            hit_pages,
            below_pages,
            ready_in_ms: Some(below_pages),
            ..LookupAnswer::default()
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
        assert_eq!(tier, Verdict::Timed(text));
        let disk = Conditions {
            has_disk: true,
            ..NONE
        };
        assert!(matches!(
            compare(&lookup(3, 0), &lookup(4, 0), disk),
            Verdict::Timed(_)
        ));
        for code in TIMED {
            let verdict = compare(&failed(code, true), &lookup(3, 0), NONE);
            assert!(matches!(verdict, Verdict::Timed(_)), "{code:?}");
            let verdict = compare(&lookup(3, 0), &failed(code, true), NONE);
            let silent = code == ErrorCode::Deadline;
            assert_eq!(matches!(verdict, Verdict::Timed(_)), !silent, "{code:?}");
        }
        let local = compare(&failed(ErrorCode::Internal, false), &lookup(3, 0), NONE);
        assert!(matches!(local, Verdict::Timed(_)));
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
            assert!(matches!(verdict, Verdict::Timed(_)), "{verdict:?}");
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
            Verdict::Timed(_)
        ));
    }
}
