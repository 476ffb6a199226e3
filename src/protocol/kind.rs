//! Kinds of messages. Numbers are never reused. A number also determines whether a message is a request or an answer:
//! see [`Class`].

use crate::role::Role;
use crate::table::for_each_kind;

/// A sender of the table: the role of a client, or `None` for a server.
macro_rules! sender {
    (Server) => {
        None
    };
    ($role:ident) => {
        Some(Role::$role)
    };
}

/// A class of the table.
macro_rules! class {
    (answer) => {
        Class::Answer
    };
    ($request:ident) => {
        Class::Request
    };
}

macro_rules! kinds {
    ($($(#[$doc:meta])* $number:literal $name:ident $text:literal: $body:ident, [$($sender:ident)*] to $receiver:ident,
        $stability:ident, $class:ident $($answer:ident $(($answer_body:ty))?)?;)*) => {
        /// The type of a message. See `schema/messages.json`.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(u16)]
        pub enum MessageKind {
            $($(#[$doc])* $name = $number,)*
        }

        impl MessageKind {
            /// Every kind, ordered by number.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// Returns the kind of a number; `None` if the number is not assigned.
            pub fn from_number(number: u16) -> Option<Self> {
                match number {
                    $($number => Some(Self::$name),)*
                    _ => None,
                }
            }

            /// Name of the kind in the schema and in logs.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)*
                }
            }

            /// Number of the kind on the wire.
            pub fn number(self) -> u16 {
                self as u16
            }

            /// Whether the kind is a request or an answer.
            pub fn class(self) -> Class {
                match self {
                    $(Self::$name => class!($class),)*
                }
            }

            /// The kind that answers a request; `None` for answers.
            pub fn answer(self) -> Option<Self> {
                match self {
                    $($(Self::$name => Some(Self::$answer),)?)*
                    _ => None,
                }
            }

            /// The other side: `leader`, `worker`, `server` for either of them, `client`, or `peer` for any.
            pub fn receiver(self) -> &'static str {
                match self {
                    $(Self::$name => stringify!($receiver),)*
                }
            }

            /// `public` for kinds of engines, ranks and tools; `internal` for those between leader and workers.
            pub fn stability(self) -> &'static str {
                match self {
                    $(Self::$name => stringify!($stability),)*
                }
            }

            /// The roles of the clients that send the kind; `None` stands for a server.
            fn senders(self) -> &'static [Option<Role>] {
                match self {
                    $(Self::$name => &[$(sender!($sender)),*],)*
                }
            }
        }
    };
}

for_each_kind!(kinds);

/// Whether a number stands for a request or an answer. Defined for unassigned numbers too, so that a message of a newer
/// peer can be answered or dropped without decoding its body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// Gets one answer: `hello`, `ping`, and the even numbers.
    Request,
    /// Answers a request and gets none: `welcome`, `error`, `pong`, and the odd numbers.
    Answer,
}

impl Class {
    /// Returns the class of a number, assigned or not.
    pub fn of(number: u16) -> Self {
        match MessageKind::from_number(number) {
            Some(kind) => kind.class(),
            None if number.is_multiple_of(2) => Self::Request,
            None => Self::Answer,
        }
    }
}

impl MessageKind {
    /// Whether a client of this role sends the kind. A server refuses other kinds by the header alone.
    pub fn sent_by(self, role: Role) -> bool {
        self.senders().contains(&Some(role))
    }

    /// Whether servers send the kind to their clients.
    pub fn sent_by_server(self) -> bool {
        self.senders().contains(&None)
    }

    /// Whether a server sends the kind to its clients as a request.
    pub fn sent_to_clients(self) -> bool {
        self.class() == Class::Request && self.sent_by_server()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_a_kind_determines_its_class() {
        for kind in MessageKind::ALL {
            let answered = kind.answer();
            assert_eq!(
                answered.is_some(),
                kind.class() == Class::Request,
                "{}",
                kind.name()
            );
            assert!(answered.is_none_or(|answer| answer.class() == Class::Answer));
        }
        for kind in MessageKind::ALL.iter().filter(|kind| kind.number() >= 16) {
            assert_eq!(
                kind.class() == Class::Request,
                kind.number().is_multiple_of(2),
                "{}",
                kind.name()
            );
        }
        assert_eq!(Class::of(998), Class::Request);
        assert_eq!(Class::of(999), Class::Answer);
    }

    #[test]
    fn every_request_has_a_role_that_may_send_it() {
        let roles = [
            Role::Engine,
            Role::Rank,
            Role::Worker,
            Role::Admin,
            Role::Supervisor,
        ];
        for kind in MessageKind::ALL {
            let said = roles.iter().any(|role| kind.sent_by(*role));
            assert!(
                kind.class() == Class::Answer || said || kind.sent_to_clients(),
                "{}",
                kind.name()
            );
            let known = matches!(
                kind,
                MessageKind::Hello | MessageKind::Ping | MessageKind::Pong
            );
            assert_eq!(kind.sent_by(Role::Unknown), known, "{}", kind.name());
        }
    }
}
