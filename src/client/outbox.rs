//! Requests that a rank owes its worker: register its memory, report what is written, take pages back.
//!
//! A request stays owed until a worker has confirmed it, across broken connections and dead workers. A worker that has
//! died copies nothing, and its successor, which has received no orders, confirms an abandoned request at once.

use std::collections::BTreeSet;

use kvferry_protocol::limits::ABANDONED_MAX;
use kvferry_transport::LinkId;

/// A request to the worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum RankRequest {
    /// Use this memory. The engine gives up all requests up to `abandoned_through`.
    Register { abandoned_through: u64 },
    /// Everything up to this number is written: pages that stores read, and work that loads wait for.
    Written { through: u64 },
    /// Stop copying for these requests.
    Abandon { requests: Vec<u64> },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RegistrationState {
    No,
    Requested,
    Yes,
}

/// The owed requests of one rank, and which of them are in flight.
#[derive(Debug)]
pub(super) struct Outbox {
    link: Option<LinkId>,
    registered: RegistrationState,
    /// Everything up to this request is written.
    written: u64,
    /// The part of `written` that the worker has confirmed since the registration.
    confirmed: u64,
    reporting: bool,
    /// The highest request that was ever abandoned. The worker of a later registration must not copy for requests up to
    /// this one.
    abandoned_through: u64,
    /// Abandoned requests that no worker has confirmed.
    abandoned: BTreeSet<u64>,
    abandoning: bool,
}

impl Outbox {
    pub(super) fn new() -> Self {
        Self {
            link: None,
            registered: RegistrationState::No,
            written: 0,
            confirmed: 0,
            reporting: false,
            abandoned_through: 0,
            abandoned: BTreeSet::new(),
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
        self.registered = RegistrationState::No;
        self.confirmed = 0;
        self.reporting = false;
        self.abandoning = false;
    }

    /// Records that everything up to this number is written: pages that stores read, and work that loads wait for.
    pub(super) fn wrote(&mut self, through: u64) {
        self.written = self.written.max(through);
    }

    /// The engine takes the pages of a request back.
    pub(super) fn abandon(&mut self, request: u64) {
        self.abandoned_through = self.abandoned_through.max(request);
        self.abandoned.insert(request);
    }

    /// Returns the next request to send. At most one of each kind is in flight.
    pub(super) fn next(&mut self) -> Option<(LinkId, RankRequest)> {
        let link = self.link?;
        if self.registered == RegistrationState::No {
            self.registered = RegistrationState::Requested;
            return Some((
                link,
                RankRequest::Register {
                    abandoned_through: self.abandoned_through,
                },
            ));
        }
        // Abandon does not wait for the registration, which may last as long as the leader is absent.
        if !self.abandoning && !self.abandoned.is_empty() {
            self.abandoning = true;
            let requests = self.abandoned.iter().take(ABANDONED_MAX);
            let requests = requests.copied().collect();
            return Some((link, RankRequest::Abandon { requests }));
        }
        if self.registered == RegistrationState::Yes
            && !self.reporting
            && self.written > self.confirmed
        {
            self.reporting = true;
            let through = self.written;
            return Some((link, RankRequest::Written { through }));
        }
        None
    }

    /// Records the outcome of a request; an unconfirmed one is repeated. Returns the requests whose end it confirms.
    pub(super) fn answered(
        &mut self,
        link: LinkId,
        request: &RankRequest,
        confirmed: bool,
    ) -> Vec<u64> {
        if self.link != Some(link) {
            return Vec::new();
        }
        match request {
            RankRequest::Register { .. } => {
                self.registered = match confirmed {
                    true => RegistrationState::Yes,
                    false => RegistrationState::No,
                };
            }
            RankRequest::Written { through } => {
                self.reporting = false;
                if confirmed {
                    self.confirmed = *through;
                }
            }
            RankRequest::Abandon { requests } => {
                self.abandoning = false;
                if confirmed {
                    return requests
                        .iter()
                        .filter(|id| self.abandoned.remove(id))
                        .copied()
                        .collect();
                }
            }
        }
        Vec::new()
    }

    /// The worker reports that it has no memory of this rank.
    pub(super) fn memory_dropped(&mut self, link: LinkId) {
        if self.link == Some(link) && self.registered == RegistrationState::Yes {
            self.registered = RegistrationState::No;
            self.confirmed = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: LinkId = LinkId(1);
    const SECOND: LinkId = LinkId(2);

    fn questions(outbox: &mut Outbox) -> Vec<RankRequest> {
        std::iter::from_fn(|| outbox.next())
            .map(|(_, question)| question)
            .collect()
    }

    fn registered(outbox: &mut Outbox, link: LinkId, abandoned_through: u64) {
        outbox.connected(link);
        let register = RankRequest::Register { abandoned_through };
        assert_eq!(outbox.next(), Some((link, register.clone())));
        assert!(outbox.answered(link, &register, true).is_empty());
    }

    #[test]
    fn written_pages_are_reported_after_the_registration_and_again_to_the_next_worker() {
        let mut outbox = Outbox::new();
        outbox.wrote(4);
        assert_eq!(outbox.next(), None, "nobody is there");
        registered(&mut outbox, FIRST, 0);
        let written = RankRequest::Written { through: 4 };
        assert_eq!(questions(&mut outbox), std::slice::from_ref(&written));
        outbox.answered(FIRST, &written, true);
        assert_eq!(questions(&mut outbox), []);
        registered(&mut outbox, SECOND, 0);
        assert_eq!(questions(&mut outbox), [written]);
    }

    #[test]
    fn an_unconfirmed_request_is_sent_again() {
        let mut outbox = Outbox::new();
        outbox.connected(FIRST);
        let register = RankRequest::Register {
            abandoned_through: 0,
        };
        for _ in 0..2 {
            assert_eq!(questions(&mut outbox), std::slice::from_ref(&register));
            outbox.answered(FIRST, &register, false);
        }
        registered(&mut outbox, FIRST, 0);
        outbox.wrote(7);
        let written = RankRequest::Written { through: 7 };
        assert_eq!(questions(&mut outbox), std::slice::from_ref(&written));
        outbox.wrote(9);
        assert_eq!(questions(&mut outbox), [], "one at a time");
        outbox.answered(FIRST, &written, false);
        assert_eq!(
            questions(&mut outbox),
            [RankRequest::Written { through: 9 }]
        );
    }

    #[test]
    fn an_abandoned_request_waits_for_a_confirmation_and_is_over_for_every_later_worker() {
        let mut outbox = Outbox::new();
        registered(&mut outbox, FIRST, 0);
        outbox.abandon(5);
        outbox.abandon(3);
        let both = RankRequest::Abandon {
            requests: vec![3, 5],
        };
        assert_eq!(questions(&mut outbox), std::slice::from_ref(&both));
        outbox.lost();
        let late = outbox.answered(FIRST, &both, true);
        assert!(late.is_empty(), "said by one that is gone");
        outbox.connected(SECOND);
        let register = RankRequest::Register {
            abandoned_through: 5,
        };
        assert_eq!(questions(&mut outbox), [register, both.clone()]);
        outbox.abandon(8);
        assert_eq!(outbox.answered(SECOND, &both, true), [3, 5]);
        let rest = RankRequest::Abandon { requests: vec![8] };
        assert_eq!(questions(&mut outbox), [rest]);
    }

    #[test]
    fn memory_is_registered_again_with_a_worker_that_lost_it() {
        let mut outbox = Outbox::new();
        registered(&mut outbox, FIRST, 0);
        outbox.wrote(2);
        let written = RankRequest::Written { through: 2 };
        assert_eq!(questions(&mut outbox), std::slice::from_ref(&written));
        outbox.memory_dropped(FIRST);
        outbox.answered(FIRST, &written, false);
        assert_eq!(
            questions(&mut outbox),
            [RankRequest::Register {
                abandoned_through: 0
            }]
        );
        outbox.memory_dropped(FIRST);
        assert_eq!(questions(&mut outbox), [], "it is on its way");
    }
}
