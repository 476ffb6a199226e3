//! The users beside that of this process whose processes may connect.

use std::collections::BTreeSet;

use kvferry_types::User;

/// Most users beside that of this process. Each adds [`USER_CONNECTIONS_MAX`] connections to those of a listener, and
/// [`UNTAKEN_MAX`](super::UNTAKEN_MAX) descriptors to those that may wait at a worker.
pub const USERS_MAX: usize = 16;
/// Most connections of one other user to a listener, open or in the handshake.
pub const USER_CONNECTIONS_MAX: usize = 8;

/// Users beside that of this process, by their ids. Empty: nobody else may connect.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OtherUsers(BTreeSet<u32>);

impl OtherUsers {
    /// Users with these ids. The id of this process's own user adds nothing.
    pub fn new(ids: impl IntoIterator<Item = u32>) -> Self {
        let own = own_uid();
        Self(ids.into_iter().filter(|uid| *uid != own).collect())
    }

    /// True if nobody else may connect.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Number of users.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// The user with this id, if its processes may connect.
    pub(super) fn find(&self, uid: u32) -> Option<User> {
        match uid == own_uid() {
            true => Some(User::Own),
            false => self.0.contains(&uid).then_some(User::Other(uid)),
        }
    }
}

/// Id of the user of this process.
pub fn own_uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_is_found_only_if_it_is_named_or_that_of_this_process() {
        let own = own_uid();
        let (named, other) = (own.wrapping_add(1), own.wrapping_add(2));
        let users = OtherUsers::new([named, own]);
        assert_eq!(users.find(own), Some(User::Own));
        assert_eq!(users.find(named), Some(User::Other(named)));
        assert_eq!(users.find(other), None);
        assert_eq!(users.len(), 1);
        let nobody = OtherUsers::default();
        assert!(nobody.is_empty());
        assert_eq!(nobody.find(own), Some(User::Own));
        assert_eq!(nobody.find(named), None);
    }
}
