//! Operators change the filter of a process's log.

use std::fmt;

use crate::HolderPeers;
use kvferry_protocol::{ErrorBody, ErrorCode, Message, SetLog, SetLogAnswer};

/// Longest filter, in bytes.
const FILTER_BYTES_MAX: usize = 1024;

/// Changes the filter, and returns the answer.
pub(crate) fn set_log<P: fmt::Debug>(
    host: &mut dyn HolderPeers<Process = P>,
    SetLog { filter }: &SetLog,
) -> Message {
    let changed = match filter.len() {
        0..=FILTER_BYTES_MAX => host.set_log(filter),
        bytes => Err(format!(
            "set_log.filter has {bytes} bytes: write at most {FILTER_BYTES_MAX}"
        )),
    };
    match changed {
        Ok(before) => Message::SetLogAnswer(SetLogAnswer { before }),
        Err(why) => Message::Error(ErrorBody::new(ErrorCode::Invalid, why)),
    }
}
