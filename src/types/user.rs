//! The users of the processes at the other end of connections.

use std::fmt;

/// The user of a process, as the kernel reports it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum User {
    /// The user of kvferry's own processes.
    #[default]
    Own,
    /// Another user, by its id.
    Other(u32),
}

impl fmt::Display for User {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Own => f.write_str("the user of kvferry"),
            Self::Other(uid) => write!(f, "uid {uid}"),
        }
    }
}

/// The process at the other end of a connection.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Caller {
    /// Its user.
    pub user: User,
    /// Its id, if the system shows it.
    pub pid: Option<i32>,
}

impl From<Option<i32>> for Caller {
    /// A process of kvferry's own user.
    fn from(pid: Option<i32>) -> Self {
        Self {
            user: User::Own,
            pid,
        }
    }
}
