//! Random bytes of the system.

use std::io;

use crate::error::EngineError;

/// Fills `bytes` with random bytes of the system.
pub(super) fn random(bytes: &mut [u8]) -> Result<(), EngineError> {
    let flags = rustix::rand::GetRandomFlags::empty();
    match rustix::rand::getrandom(&mut *bytes, flags) {
        Ok(count) if count == bytes.len() => Ok(()),
        Ok(_) => Err(EngineError::Random(io::ErrorKind::UnexpectedEof.into())),
        Err(error) => Err(EngineError::Random(error.into())),
    }
}
