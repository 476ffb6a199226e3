//! Which requests the engines of a user may send: their own namespaces, and nothing about those of all.
//!
//! Operators are processes of kvferry's own user, or have its certificates, and may request everything.

use std::fmt;

use super::seats::PeerRole;
use super::{LeaderHost, LeaderShell};
use kvferry_core::Namespaces;
use kvferry_protocol::{ErrorBody, ErrorCode, Message, ResetPages};
use kvferry_types::{PeerId, User};

/// Characters of a namespace that an error shows.
const SHOWN_MAX: usize = 64;

impl<P: fmt::Debug> LeaderShell<P> {
    /// Refuses requests of engines about namespaces that are not their user's.
    pub(super) fn check_access(
        &mut self,
        host: &dyn LeaderHost<Process = P>,
        peer: PeerId,
        message: &Message,
    ) -> Result<(), ErrorBody> {
        if !matches!(self.roles.get(&peer), Some(PeerRole::Engine(_))) {
            return Ok(());
        }
        let user = self.other_users.get(&peer).copied().unwrap_or_default();
        let refused = refusal(&self.settings.namespaces, user, message);
        if refused.is_some()
            && let Some(left_out) = self.forbidden_lines.line(host.now())
        {
            let kind = message.kind().name();
            tracing::warn!(%user, kind, left_out, "request refused: it is not for engines of this user");
        }
        refused.map_or(Ok(()), |text| {
            Err(ErrorBody::new(ErrorCode::Forbidden, text))
        })
    }
}

/// Why an engine of a user may not send a message.
fn refusal(namespaces: &Namespaces, user: User, message: &Message) -> Option<String> {
    let named = |field: &str, namespace: &[u8]| {
        (!namespaces.permits(user, namespace)).then(|| {
            let shown: String = namespace.escape_ascii().map(char::from).take(SHOWN_MAX).collect();
            format!(
                "{field} is '{shown}', and is not of {user}: use a namespace whose entry in the file of the setting \
                 `namespaces` names this user"
            )
        })
    };
    match message {
        Message::Lookup(lookup) => named("lookup.namespace", &lookup.namespace),
        Message::Reset(reset) => match (&reset.which, &reset.namespace) {
            (ResetPages::All, _) => Some(
                "reset.which is 'all', which is for operators (`kvferry reset`): name a namespace, with which 'namespace'"
                    .to_owned(),
            ),
            (ResetPages::Namespace | ResetPages::Hashes, Some(namespace)) => {
                named("reset.namespace", namespace)
            }
            (ResetPages::Unknown, Some(_)) => None,
            // It names no pages, and is refused as invalid.
            (_, None) => None,
        },
        Message::ReadEvents(read) => match &read.namespace {
            Some(namespace) => named("read_events.namespace", namespace),
            None => (user != User::Own).then(|| {
                format!("read_events.namespace is absent: {user} names a namespace of its own")
            }),
        },
        Message::Flush(_) => (user != User::Own).then(|| {
            format!("flush moves the pages of all users to the disk, and {user} is not that of kvferry: leave it out")
        }),
        Message::Status(status) => (status.check && user != User::Own)
            .then(|| format!("status.check is true: {user} requests a status without it")),
        _ => None,
    }
}
