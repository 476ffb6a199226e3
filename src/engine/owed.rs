//! Requests that a rank owes its worker: register its memory, report what is written, take pages back.
//!
//! A request stays owed until a worker has confirmed it, across broken connections and dead workers. A worker that has
//! died copies nothing, and its successor, which has received no orders, confirms an abandoned request at once.

use std::collections::BTreeMap;

use kvferry_protocol::limits::ABANDONED_MAX;
use kvferry_transport::LinkId;

/// A request to the worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Question {
    /// Use this memory. Requests up to `after` are over.
    Register { after: u64 },
    /// Stores up to this request may read their pages.
    Written { through: u64 },
    /// Stop copying for these requests.
    Abandon { requests: Vec<u64> },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Registered {
    No,
    Asked,
    Yes,
}

/// The owed requests of one rank, and which of them are in flight.
#[derive(Debug)]
pub(super) struct Owed {
    link: Option<LinkId>,
    registered: Registered,
    /// Everything up to this request is written.
    written: u64,
    /// The part of `written` that the worker has confirmed since the registration.
    confirmed: u64,
    telling: bool,
    /// The highest request that was ever abandoned. The worker of a later registration must not copy for requests up to
    /// this one.
    over: u64,
    /// Abandoned requests that no worker has confirmed, with the ticket of the order that waits for each.
    abandoned: BTreeMap<u64, u64>,
    abandoning: bool,
}

impl Owed {
    pub(super) fn new() -> Self {
        Self {
            link: None,
            registered: Registered::No,
            written: 0,
            confirmed: 0,
            telling: false,
            over: 0,
            abandoned: BTreeMap::new(),
            abandoning: false,
        }
    }

    /// A worker accepted the connection. The worker has no state of this rank.
    pub(super) fn connected(&mut self, link: LinkId) {
        self.lost();
        self.link = Some(link);
    }

    /// The connection broke, so the worker drops the memory.
    pub(super) fn lost(&mut self) {
        self.link = None;
        self.registered = Registered::No;
        self.confirmed = 0;
        self.telling = false;
        self.abandoning = false;
    }

    /// Records that everything up to this number is written: pages that stores read, and work that loads wait for.
    pub(super) fn wrote(&mut self, through: u64) {
        self.written = self.written.max(through);
    }

    /// The engine takes the pages of a request back. `ticket` is reported when the worker has confirmed.
    pub(super) fn abandon(&mut self, request: u64, ticket: u64) {
        self.over = self.over.max(request);
        self.abandoned.insert(request, ticket);
    }

    /// Returns the next request to send. At most one of each kind is in flight.
    pub(super) fn next(&mut self) -> Option<(LinkId, Question)> {
        let link = self.link?;
        if self.registered == Registered::No {
            self.registered = Registered::Asked;
            return Some((link, Question::Register { after: self.over }));
        }
        // Abandon does not wait for the registration, which may last as long as the leader is absent.
        if !self.abandoning && !self.abandoned.is_empty() {
            self.abandoning = true;
            let requests = self.abandoned.keys().take(ABANDONED_MAX);
            let requests = requests.copied().collect();
            return Some((link, Question::Abandon { requests }));
        }
        if self.registered == Registered::Yes && !self.telling && self.written > self.confirmed {
            self.telling = true;
            let through = self.written;
            return Some((link, Question::Written { through }));
        }
        None
    }

    /// Records the outcome of a request; an unconfirmed one is repeated. Returns the tickets of the orders that this
    /// completes.
    pub(super) fn answered(
        &mut self,
        link: LinkId,
        question: &Question,
        confirmed: bool,
    ) -> Vec<u64> {
        if self.link != Some(link) {
            return Vec::new();
        }
        match question {
            Question::Register { .. } => {
                self.registered = match confirmed {
                    true => Registered::Yes,
                    false => Registered::No,
                };
            }
            Question::Written { through } => {
                self.telling = false;
                if confirmed {
                    self.confirmed = *through;
                }
            }
            Question::Abandon { requests } => {
                self.abandoning = false;
                if confirmed {
                    let ended = requests.iter().filter_map(|id| self.abandoned.remove(id));
                    return ended.collect();
                }
            }
        }
        Vec::new()
    }

    /// The worker reports that it has no memory of this rank.
    pub(super) fn forgotten(&mut self, link: LinkId) {
        if self.link == Some(link) && self.registered == Registered::Yes {
            self.registered = Registered::No;
            self.confirmed = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: LinkId = LinkId(1);
    const SECOND: LinkId = LinkId(2);

    fn questions(owed: &mut Owed) -> Vec<Question> {
        std::iter::from_fn(|| owed.next())
            .map(|(_, question)| question)
            .collect()
    }

    fn registered(owed: &mut Owed, link: LinkId, after: u64) {
        owed.connected(link);
        let register = Question::Register { after };
        assert_eq!(owed.next(), Some((link, register.clone())));
        assert!(owed.answered(link, &register, true).is_empty());
    }

    #[test]
    fn what_is_written_is_said_once_the_memory_is_registered_and_again_to_the_next_worker() {
        let mut owed = Owed::new();
        owed.wrote(4);
        assert_eq!(owed.next(), None, "nobody is there");
        registered(&mut owed, FIRST, 0);
        let written = Question::Written { through: 4 };
        assert_eq!(questions(&mut owed), std::slice::from_ref(&written));
        owed.answered(FIRST, &written, true);
        assert_eq!(questions(&mut owed), []);
        registered(&mut owed, SECOND, 0);
        assert_eq!(questions(&mut owed), [written]);
    }

    #[test]
    fn what_was_not_confirmed_is_asked_again() {
        let mut owed = Owed::new();
        owed.connected(FIRST);
        let register = Question::Register { after: 0 };
        for _ in 0..2 {
            assert_eq!(questions(&mut owed), std::slice::from_ref(&register));
            owed.answered(FIRST, &register, false);
        }
        registered(&mut owed, FIRST, 0);
        owed.wrote(7);
        let written = Question::Written { through: 7 };
        assert_eq!(questions(&mut owed), std::slice::from_ref(&written));
        owed.wrote(9);
        assert_eq!(questions(&mut owed), [], "one at a time");
        owed.answered(FIRST, &written, false);
        assert_eq!(questions(&mut owed), [Question::Written { through: 9 }]);
    }

    #[test]
    fn an_abandoned_request_waits_for_a_worker_that_says_so_and_is_over_for_all_later_ones() {
        let mut owed = Owed::new();
        registered(&mut owed, FIRST, 0);
        owed.abandon(5, 50);
        owed.abandon(3, 30);
        let both = Question::Abandon {
            requests: vec![3, 5],
        };
        assert_eq!(questions(&mut owed), std::slice::from_ref(&both));
        owed.lost();
        let late = owed.answered(FIRST, &both, true);
        assert!(late.is_empty(), "said by one that is gone");
        owed.connected(SECOND);
        let register = Question::Register { after: 5 };
        assert_eq!(questions(&mut owed), [register, both.clone()]);
        owed.abandon(8, 80);
        assert_eq!(owed.answered(SECOND, &both, true), [30, 50]);
        let rest = Question::Abandon { requests: vec![8] };
        assert_eq!(questions(&mut owed), [rest]);
    }

    #[test]
    fn a_worker_that_has_forgotten_the_memory_gets_it_again() {
        let mut owed = Owed::new();
        registered(&mut owed, FIRST, 0);
        owed.wrote(2);
        let written = Question::Written { through: 2 };
        assert_eq!(questions(&mut owed), std::slice::from_ref(&written));
        owed.forgotten(FIRST);
        owed.answered(FIRST, &written, false);
        assert_eq!(questions(&mut owed), [Question::Register { after: 0 }]);
        owed.forgotten(FIRST);
        assert_eq!(questions(&mut owed), [], "it is on its way");
    }
}
