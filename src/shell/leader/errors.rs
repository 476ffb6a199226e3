//! The error that an engine or a worker receives when the core refuses a request.

use std::fmt::Write as _;

use kvferry_core::{Refusal, RefusalReason};
use kvferry_protocol::{ErrorBody, ErrorCode};

/// Bytes that most texts of refusals fit into.
const TEXT_BYTES: usize = 192;

pub(super) fn to_error(refusal: &Refusal) -> ErrorBody {
    let code = match refusal.reason() {
        RefusalReason::NotReady => ErrorCode::NotReady,
        RefusalReason::RankDisagrees => ErrorCode::RankDisagrees,
        RefusalReason::Invalid => ErrorCode::Invalid,
        RefusalReason::Deadline => ErrorCode::Deadline,
        RefusalReason::Draining => ErrorCode::Draining,
        RefusalReason::Leased => ErrorCode::Leased,
        RefusalReason::ResetUnconfirmed => ErrorCode::ResetUnconfirmed,
        RefusalReason::UnknownSlot => ErrorCode::UnknownSlot,
        RefusalReason::NotPinned => ErrorCode::NotPinned,
        RefusalReason::Limit => ErrorCode::Limit,
        RefusalReason::Busy => ErrorCode::Busy,
        RefusalReason::CopyFailed => ErrorCode::CopyFailed,
        RefusalReason::StaleRequest => ErrorCode::StaleRequest,
        RefusalReason::Quota => ErrorCode::Quota,
    };
    let mut text = String::with_capacity(TEXT_BYTES);
    // Writing to a string does not fail.
    write!(text, "{refusal}").ok();
    ErrorBody {
        over: refusal.is_over(),
        ..ErrorBody::new(code, text)
    }
}
