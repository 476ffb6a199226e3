//! The error that an engine or a worker receives when the core refuses a request.

use kvferry_core::Refusal;
use kvferry_protocol::{ErrorBody, ErrorCode};

pub(super) fn to_error(refusal: &Refusal) -> ErrorBody {
    let code = match refusal {
        Refusal::NotReady { .. }
        | Refusal::AnotherEngine { .. }
        | Refusal::EpochUsed { .. }
        | Refusal::NotAttached { .. }
        | Refusal::OnlyRead
        | Refusal::NotOpen
        | Refusal::Reading => ErrorCode::NotReady,
        Refusal::RankDisagrees { .. } => ErrorCode::RankDisagrees,
        Refusal::Groups { .. } => ErrorCode::Invalid,
        Refusal::NoSuchWorker { .. }
        | Refusal::SettingDiffers { .. }
        | Refusal::DepotNotShared { .. }
        | Refusal::DepotMissing { .. }
        | Refusal::DepotOfTwoShards { .. }
        | Refusal::DepotTooSmall { .. }
        | Refusal::DepotTooLarge { .. }
        | Refusal::NothingLasts
        | Refusal::Invalid { .. } => ErrorCode::Invalid,
        Refusal::StillRead { .. } | Refusal::FlushUnfinished | Refusal::FlushUnconfirmed { .. } => {
            ErrorCode::Deadline
        }
        Refusal::Draining => ErrorCode::Draining,
        Refusal::Leased { .. } => ErrorCode::Leased,
        Refusal::ResetUnconfirmed { .. } | Refusal::ResetUnfinished => ErrorCode::ResetUnconfirmed,
        Refusal::UnknownSlot(_) => ErrorCode::UnknownSlot,
        Refusal::NotPinned { .. } => ErrorCode::NotPinned,
        Refusal::Limit { .. } => ErrorCode::Limit,
        Refusal::Crowded { .. } => ErrorCode::Busy,
        Refusal::CopyFailed(_) | Refusal::NotLoaded => ErrorCode::CopyFailed,
        Refusal::StaleRequest(_) => ErrorCode::StaleRequest,
    };
    ErrorBody {
        over: refusal.is_over(),
        ..ErrorBody::new(code, refusal.to_string())
    }
}
