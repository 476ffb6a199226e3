//! Why requests are not carried out.

use kvferry_protocol::{Call, ErrorBody, ErrorCode, Message, MessageKind};

/// Why a request was not carried out.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}: {message}", code.name())]
pub struct Failure {
    /// The kind of failure.
    pub code: ErrorCode,
    /// One line for operators.
    pub message: String,
    /// True when the same request may succeed later.
    pub retry: bool,
    /// True when the leader reports that nothing of the request runs, or will run.
    pub over: bool,
    /// True when this call sent nothing. An earlier request under the same id may still run.
    pub unsent: bool,
}

impl Failure {
    /// A failure on this side: the state of the request on the other side is unknown.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
            retry: code.retry(),
            over: false,
            unsent: false,
        }
    }

    /// A failure of a request that was not sent.
    pub fn unsent(code: ErrorCode, message: impl Into<String>) -> Self {
        Self {
            unsent: true,
            ..Self::new(code, message)
        }
    }

    /// The failure for an answer of another kind than the request's: the other side does not follow the protocol.
    pub fn unexpected(requested: MessageKind, answer: &Message) -> Self {
        let (requested, answered) = (requested.name(), answer.kind().name());
        let text = format!(
            "{requested} was answered by {answered}: the other side does not follow the protocol"
        );
        Self::new(ErrorCode::Internal, text)
    }
}

impl From<ErrorBody> for Failure {
    fn from(body: ErrorBody) -> Self {
        Self {
            code: body.code(),
            message: body.message,
            retry: body.retry,
            over: body.over,
            unsent: false,
        }
    }
}

impl From<Failure> for ErrorBody {
    fn from(failure: Failure) -> Self {
        Self {
            retry: failure.retry,
            over: failure.over,
            ..Self::new(failure.code, failure.message)
        }
    }
}

/// The body of the answer to a request of type `C`.
///
/// # Errors
/// [`Failure::unexpected`] for an answer of another kind.
pub fn answer_of<C: Call>(answer: Message) -> Result<C::Answer, Failure> {
    C::answer(answer).map_err(|other| Failure::unexpected(C::KIND, &other))
}
