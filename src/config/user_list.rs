//! A list of users, written as their ids with commas between them.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use kvferry_transport::{OtherUsers, USERS_MAX};

/// The id that the kernel reports for the users of other user namespaces, all alike.
pub const UNKNOWN_UID: u32 = 65_534;

/// Users whose processes may connect, beside kvferry's own.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UserList(BTreeSet<u32>);

impl UserList {
    /// The users as the transport knows them.
    pub fn others(&self) -> OtherUsers {
        OtherUsers::new(self.0.iter().copied())
    }

    /// True for one of the users.
    pub fn contains(&self, uid: u32) -> bool {
        self.0.contains(&uid)
    }
}

impl fmt::Display for UserList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ids: Vec<String> = self.0.iter().map(u32::to_string).collect();
        f.write_str(&ids.join(","))
    }
}

impl FromStr for UserList {
    type Err = ();

    /// Reads at most [`USERS_MAX`] ids. Names are not resolved: a name may stand for another id in a container.
    fn from_str(text: &str) -> Result<Self, ()> {
        let parts = text.split(',').map(str::trim);
        let ids = parts.filter(|part| !part.is_empty()).map(|part| {
            let id = part.parse().ok();
            id.filter(|id| *id != UNKNOWN_UID && *id != u32::MAX)
        });
        let ids: BTreeSet<u32> = ids.collect::<Option<_>>().ok_or(())?;
        match ids.len() <= USERS_MAX {
            true => Ok(Self(ids)),
            false => Err(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_has_a_bounded_number_of_ids() {
        for (text, list) in [
            ("", ""),
            ("7", "7"),
            (" 1002, 1001,,1002 ", "1001,1002"),
            ("0", "0"),
        ] {
            let users: UserList = text.parse().expect(text);
            assert_eq!(users.to_string(), list);
        }
        let full: Vec<String> = (1..=USERS_MAX).map(|id| id.to_string()).collect();
        assert!(full.join(",").parse::<UserList>().is_ok());
        let more = format!("{},1000", full.join(","));
        for wrong in [
            more.as_str(),
            "alice",
            "-1",
            "1;2",
            "65534",
            "4294967295",
            "4294967296",
        ] {
            assert_eq!(wrong.parse::<UserList>(), Err(()), "{wrong}");
        }
    }
}
