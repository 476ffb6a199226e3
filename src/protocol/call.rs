//! The answer of each request, for the types and for the kinds.

use crate::body::{
    Abandon, Attach, Attached, Cancel, CancelStores, Empty, Ended, Events, Finish, Flush,
    FlushTier, Hello, Invalidate, Invalidated, Inventory, Load, Lookup, Memory, MemoryAnswer,
    ReadEvents, ReadInventory, Readiness, Register, Registered, Reset, Status, StatusAnswer, Store,
    Stores, StoresAnswer, TierFlushed, TransferOrder as Transfer, Unregister, Welcome, Written,
};
use crate::codec::Message;
use crate::kind::MessageKind;
use kvferry_types::{
    CancelStoresAnswer, FlushAnswer, LoadAnswer, LookupAnswer, ResetAnswer, StoreAnswer,
};

/// The body of a request, with the type of its answer. Every request may be answered by an error instead.
pub trait Call: Into<Message> {
    /// The body of the answer.
    type Answer;
    /// Kind of the request.
    const KIND: MessageKind;

    /// Returns the body of an answer, or a message that does not answer this request.
    fn answer(message: Message) -> Result<Self::Answer, Box<Message>>;
}

macro_rules! calls {
    ($($request:ident => $answer:ident($body:ty);)*) => {
        /// The kind that answers a request; `None` for answers.
        pub(super) fn answer(kind: MessageKind) -> Option<MessageKind> {
            match kind {
                MessageKind::Ping => Some(MessageKind::Pong),
                $(MessageKind::$request => Some(MessageKind::$answer),)*
                _ => None,
            }
        }

        $(
            impl Call for $request {
                type Answer = $body;
                const KIND: MessageKind = MessageKind::$request;

                fn answer(message: Message) -> Result<$body, Box<Message>> {
                    match message {
                        Message::$answer(answer) => Ok(answer),
                        other => Err(Box::new(other)),
                    }
                }
            }

            impl From<$request> for Message {
                fn from(request: $request) -> Self {
                    Self::$request(request)
                }
            }
        )*
    };
}

calls! {
    Hello => Welcome(Welcome);
    Lookup => LookupAnswer(LookupAnswer);
    Load => LoadAnswer(LoadAnswer);
    Store => StoreAnswer(StoreAnswer);
    Stores => StoresAnswer(StoresAnswer);
    Finish => FinishAnswer(Empty);
    Reset => ResetAnswer(ResetAnswer);
    Flush => FlushAnswer(FlushAnswer);
    CancelStores => CancelStoresAnswer(CancelStoresAnswer);
    ReadEvents => Events(Events);
    Register => Registered(Registered);
    Written => WrittenAnswer(Empty);
    Abandon => AbandonAnswer(Empty);
    Unregister => Unregistered(Empty);
    Attach => Attached(Attached);
    Memory => MemoryAnswer(MemoryAnswer);
    Transfer => Ended(Ended);
    Cancel => Ended(Ended);
    Invalidate => Invalidated(Invalidated);
    ReadInventory => Inventory(Inventory);
    FlushTier => TierFlushed(TierFlushed);
    Readiness => ReadinessAnswer(Empty);
    Status => StatusAnswer(StatusAnswer);
}
