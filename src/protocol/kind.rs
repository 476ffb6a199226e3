//! Kinds of messages. Numbers are never reused. A number also determines whether a message is a request or an answer:
//! see [`Class`].

use crate::role::Role;

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident = $number:literal, $text:literal;)*) => {
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
        }
    };
}

kinds! {
    /// First message of a client: its role, its identity, and the versions that it supports.
    Hello = 1, "hello";
    /// Answer to `hello`: the chosen version, the epoch of the server, the credits.
    Welcome = 2, "welcome";
    /// Answer to any request that is not carried out.
    Error = 3, "error";
    /// Sent when nothing else was sent for a heartbeat.
    Ping = 4, "ping";
    /// Answer to `ping`.
    Pong = 5, "pong";
    /// Engine to leader: finds and holds the pages of a sequence.
    Lookup = 16, "lookup";
    /// Answer to `lookup`: the number of pages found.
    LookupAnswer = 17, "lookup_answer";
    /// Engine to leader: copies held pages to device pages.
    Load = 18, "load";
    /// Answer to `load`, after the last copy has ended.
    LoadAnswer = 19, "load_answer";
    /// Engine to leader: copies device pages to host memory.
    Store = 20, "store";
    /// Answer to `store`, after the last copy has ended: how many pages lookups find.
    StoreAnswer = 21, "store_answer";
    /// Engine to leader: ends a running request and releases its holds.
    Finish = 22, "finish";
    /// Answer to `finish`.
    FinishAnswer = 23, "finish_answer";
    /// Engine or operator to leader: removes pages from every tier.
    Reset = 24, "reset";
    /// Answer to `reset`: the number of pages removed.
    ResetAnswer = 25, "reset_answer";
    /// Engine to leader: stops stores in flight.
    CancelStores = 26, "cancel_stores";
    /// Answer to `cancel_stores`, once no page of those stores is read any longer.
    CancelStoresAnswer = 27, "cancel_stores_answer";
    /// Engine or operator to leader: moves what is stored to the disk, and makes it durable there.
    Flush = 28, "flush";
    /// Answer to `flush`: the number of pages on the disk.
    FlushAnswer = 29, "flush_answer";
    /// Engine or operator to leader: reads which pages the tiers gained and lost, and waits for the next change.
    ReadEvents = 30, "read_events";
    /// Answer to `read_events`.
    Events = 31, "events";
    /// Engine rank to worker: describes and hands over the rank's KV memory.
    Register = 32, "register";
    /// Answer to `register`, after the worker has mapped the memory and the leader has admitted it.
    Registered = 33, "registered";
    /// Engine rank to worker: everything up to this request is written, pages that stores read as well as work that
    /// loads wait for.
    Written = 34, "written";
    /// Answer to `written`.
    WrittenAnswer = 35, "written_answer";
    /// Engine rank to worker: stops the copies for these requests, and forbids later ones.
    Abandon = 36, "abandon";
    /// Answer to `abandon`, once none of those copies runs any longer.
    AbandonAnswer = 37, "abandon_answer";
    /// Engine rank to worker: gives back the rank's KV memory.
    Unregister = 38, "unregister";
    /// Answer to `unregister`, after the worker has closed the memory.
    Unregistered = 39, "unregistered";
    /// Worker to leader: its depots are ready, and no earlier order is in flight.
    Attach = 48, "attach";
    /// Answer to `attach`.
    Attached = 49, "attached";
    /// Leader to worker: begins copies.
    Transfer = 50, "transfer";
    /// Answer to `transfer`: how each copy ended.
    Ended = 51, "ended";
    /// Leader to worker: stops copies, whose ends are still reported.
    Cancel = 52, "cancel";
    /// Leader to worker: removes pages from the inventory of the worker's shard.
    Invalidate = 54, "invalidate";
    /// Answer to `invalidate`, after the last page is removed.
    Invalidated = 55, "invalidated";
    /// Leader to worker: reads a part of the inventory of the worker's shard.
    ReadInventory = 56, "read_inventory";
    /// Answer to `read_inventory`: the pages that the part lists.
    Inventory = 57, "inventory";
    /// Worker to leader: progress of a worker that cannot serve yet.
    Readiness = 58, "readiness";
    /// Answer to `readiness`.
    ReadinessAnswer = 59, "readiness_answer";
    /// Worker to leader: the engine memory that it has from now on, or that it has none.
    Memory = 60, "memory";
    /// Answer to `memory`: it is in use.
    MemoryAnswer = 61, "memory_answer";
    /// Leader to worker: makes durable what was written to a tier of the worker's shard.
    FlushTier = 62, "flush_tier";
    /// Answer to `flush_tier`, after everything is durable.
    TierFlushed = 63, "tier_flushed";
    /// Any client to leader: requests its state.
    Status = 64, "status";
    /// Answer to `status`.
    StatusAnswer = 65, "status_answer";
    /// Engine to leader: several `store` requests in one message.
    Stores = 66, "stores";
    /// Answer to `stores`, after the last of them has ended: how each one ended.
    StoresAnswer = 67, "stores_answer";
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
        match MessageKind::from_number(number) {
            Some(MessageKind::Hello | MessageKind::Ping) => Self::Request,
            Some(MessageKind::Welcome | MessageKind::Error | MessageKind::Pong) => Self::Answer,
            _ if number.is_multiple_of(2) => Self::Request,
            _ => Self::Answer,
        }
    }
}

impl MessageKind {
    /// Returns whether the kind is a request or an answer.
    pub fn class(self) -> Class {
        Class::of(self.number())
    }

    /// Whether a client of this role sends the kind after its hello. A server refuses other kinds by the header alone.
    pub fn sent_by(self, role: Role) -> bool {
        match self {
            Self::Hello | Self::Ping | Self::Pong => true,
            Self::Lookup
            | Self::Load
            | Self::Store
            | Self::Stores
            | Self::Finish
            | Self::CancelStores => role == Role::Engine,
            Self::Reset | Self::Flush | Self::ReadEvents => {
                matches!(role, Role::Engine | Role::Admin)
            }
            Self::Register | Self::Written | Self::Abandon | Self::Unregister => role == Role::Rank,
            Self::Attach
            | Self::Memory
            | Self::Readiness
            | Self::Ended
            | Self::Invalidated
            | Self::Inventory
            | Self::TierFlushed
            | Self::Error => role == Role::Worker,
            Self::Status => matches!(role, Role::Engine | Role::Worker | Role::Admin),
            _ => false,
        }
    }

    /// Whether a server sends the kind to its clients as a request.
    pub fn sent_to_clients(self) -> bool {
        matches!(
            self,
            Self::Ping
                | Self::Transfer
                | Self::Cancel
                | Self::Invalidate
                | Self::ReadInventory
                | Self::FlushTier
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_a_kind_determines_its_class() {
        for kind in MessageKind::ALL {
            let answered = crate::call::answer(*kind);
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
    fn every_request_has_a_role_that_may_send_it() {
        let roles = [Role::Engine, Role::Rank, Role::Worker, Role::Admin];
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
