//! The answer of each request, for their types.

use crate::body::{
    Abandon, Attach, Attached, Cancel, CancelStores, Drain, DrainAnswer, Empty, Ended, Events,
    Finish, Flush, FlushTier, Hello, Invalidate, Invalidated, Inventory, Load, Lookup, Measure,
    MeasureAnswer, Memory, MemoryAnswer, OpenTiers, Probe, ProbeAnswer, ReadEvents, ReadInventory,
    Readiness, Register, Registered, Reset, SetLog, SetLogAnswer, Status, StatusAnswer, Store,
    Stores, StoresAnswer, TierFlushed, Tiers, TiersAnswer, TransferOrder, Unregister, Welcome,
    WorkerGone, WorkerGoneAnswer, Written,
};
use crate::codec::Message;
use crate::kind::MessageKind;
use crate::table::for_each_kind;
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
    ($($(#[$doc:meta])* $number:literal $name:ident $text:literal: $body:ident, [$($sender:ident)*] to $receiver:ident,
        $stability:ident, $class:ident $($answer:ident $(($answer_body:ty))?)?;)*) => {
        $($($(
            impl Call for $body {
                type Answer = $answer_body;
                const KIND: MessageKind = MessageKind::$name;

                fn answer(message: Message) -> Result<$answer_body, Box<Message>> {
                    match message {
                        Message::$answer(answer) => Ok(answer),
                        other => Err(Box::new(other)),
                    }
                }
            }

            impl From<$body> for Message {
                fn from(request: $body) -> Self {
                    Self::$name(request)
                }
            }
        )?)?)*
    };
}

for_each_kind!(calls);
