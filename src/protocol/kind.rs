//! Kinds of messages. Numbers are never reused. A number also determines whether a message is a request or an answer:
//! see [`Class`].

use crate::body::Role;

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident = $number:literal, $text:literal;)*) => {
        /// The type of a message. See `schema/messages.json`.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(u16)]
        pub enum Kind {
            $($(#[$doc])* $name = $number,)*
        }

        impl Kind {
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
        }
    };
}

kinds! {
    /// First message of a client: who it is, which versions it speaks.
    Hello = 1, "hello";
    /// Answer to hello: the version that was chosen, the epoch, the credits.
    Welcome = 2, "welcome";
    /// Answer to any request that is not carried out.
    Error = 3, "error";
    /// Are you there?
    Ping = 4, "ping";
    /// Yes.
    Pong = 5, "pong";
    /// Engine to leader: which pages of a sequence are there?
    Lookup = 16, "lookup";
    /// Answer to a lookup.
    LookupAnswer = 17, "lookup_answer";
    /// Engine to leader: copy found pages to device pages.
    Load = 18, "load";
    /// Answer to a load: every page is in place.
    LoadAnswer = 19, "load_answer";
    /// Engine to leader: keep these device pages.
    Store = 20, "store";
    /// Answer to a store: a lookup finds them.
    StoreAnswer = 21, "store_answer";
    /// Engine to leader: the request is over.
    Finish = 22, "finish";
    /// Answer to finish.
    FinishAnswer = 23, "finish_answer";
    /// Forget pages.
    Reset = 24, "reset";
    /// They are forgotten.
    ResetAnswer = 25, "reset_answer";
    /// Engine to leader: stop stores that are under way.
    CancelStores = 26, "cancel_stores";
    /// No page of theirs is read any more.
    CancelStoresAnswer = 27, "cancel_stores_answer";
    /// Engine rank to worker: this is my KV memory.
    Register = 32, "register";
    /// Answer to register: worker and leader have taken it.
    Registered = 33, "registered";
    /// Engine rank to worker: everything up to this number is written: pages that stores read, and work that loads
    /// wait for.
    Written = 34, "written";
    /// Answer to written.
    WrittenAnswer = 35, "written_answer";
    /// Nothing may be copied any more for these requests.
    Abandon = 36, "abandon";
    /// Nothing is.
    AbandonAnswer = 37, "abandon_answer";
    /// Engine rank to worker: let my KV memory go.
    Unregister = 38, "unregister";
    /// Answer to unregister: nothing of it is open any more.
    Unregistered = 39, "unregistered";
    /// Worker to leader: memory and depot are ready.
    Attach = 48, "attach";
    /// Answer to attach.
    Attached = 49, "attached";
    /// Leader to worker: copy.
    Transfer = 50, "transfer";
    /// Answer to a transfer: how each copy ended.
    Ended = 51, "ended";
    /// Leader to worker: stop copies; their ends are still reported.
    Cancel = 52, "cancel";
    /// Strike pages out of an inventory.
    Strike = 54, "strike";
    /// They are struck out.
    Struck = 55, "struck";
    /// Read a part of an inventory.
    ReadInventory = 56, "read_inventory";
    /// What it lists.
    Inventory = 57, "inventory";
    /// Worker to leader: how far a worker is that cannot serve yet.
    Preparing = 58, "preparing";
    /// Answer to preparing.
    PreparingAnswer = 59, "preparing_answer";
    /// Anyone to leader: how is it going?
    Status = 64, "status";
    /// Answer to status.
    StatusAnswer = 65, "status_answer";
}

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
        match Kind::from_number(number) {
            Some(Kind::Hello | Kind::Ping) => Self::Request,
            Some(Kind::Welcome | Kind::Error | Kind::Pong) => Self::Answer,
            _ if number.is_multiple_of(2) => Self::Request,
            _ => Self::Answer,
        }
    }
}

impl Kind {
    /// Returns whether the kind is a request or an answer.
    pub fn class(self) -> Class {
        Class::of(self.number())
    }

    /// Whether a client of this role sends the kind after its hello. A server refuses other kinds by the header alone.
    pub fn said_by(self, role: Role) -> bool {
        match self {
            Self::Hello | Self::Ping | Self::Pong => true,
            Self::Lookup | Self::Load | Self::Store | Self::Finish | Self::CancelStores => {
                role == Role::Engine
            }
            Self::Reset => matches!(role, Role::Engine | Role::Admin),
            Self::Register | Self::Written | Self::Abandon | Self::Unregister => role == Role::Rank,
            Self::Attach
            | Self::Preparing
            | Self::Ended
            | Self::Struck
            | Self::Inventory
            | Self::Error => role == Role::Worker,
            Self::Status => matches!(role, Role::Engine | Role::Worker | Role::Admin),
            _ => false,
        }
    }

    /// Whether a server sends the kind to its clients as a request.
    pub fn asked_of_clients(self) -> bool {
        matches!(
            self,
            Self::Ping | Self::Transfer | Self::Cancel | Self::Strike | Self::ReadInventory
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_says_whether_it_wants_an_answer() {
        for kind in Kind::ALL {
            let answered = crate::catalogue::answer(*kind);
            assert_eq!(
                answered.is_some(),
                kind.class() == Class::Request,
                "{}",
                kind.name()
            );
            assert!(answered.is_none_or(|answer| answer.class() == Class::Answer));
        }
        assert_eq!(Class::of(998), Class::Request);
        assert_eq!(Class::of(999), Class::Answer);
    }

    #[test]
    fn every_request_is_somebodys_to_say() {
        let roles = [Role::Engine, Role::Rank, Role::Worker, Role::Admin];
        for kind in Kind::ALL {
            let said = roles.iter().any(|role| kind.said_by(*role));
            assert!(
                kind.class() == Class::Answer || said || kind.asked_of_clients(),
                "{}",
                kind.name()
            );
            let known = matches!(kind, Kind::Hello | Kind::Ping | Kind::Pong);
            assert_eq!(kind.said_by(Role::Unknown), known, "{}", kind.name());
        }
    }
}
