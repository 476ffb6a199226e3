//! A rank's memory, as its session registers it.

use std::sync::Arc;

use crate::error::EngineError;
use crate::layout::pages_bytes;
use crate::memory::RankMemory;
use crate::random::random;
use crate::settings::RankSettings;
use kvferry_client::SessionMemory;
use kvferry_types::{Nonce, Registration, Timeline};

/// Length of a nonce, in bytes.
const NONCE_BYTES: usize = 32;

/// The memory of a rank with what its registration names.
pub(super) struct RegisteredRank {
    pub(super) settings: RankSettings,
    pub(super) memory: Arc<RankMemory>,
}

impl SessionMemory for RegisteredRank {
    type Error = EngineError;

    fn timeline(&self) -> Option<Timeline> {
        self.memory.timeline()
    }

    fn finish_writes(&self) -> Result<(), EngineError> {
        self.memory.finish()
    }

    async fn registration(&self) -> Result<Registration, EngineError> {
        let mut proof = [0; NONCE_BYTES];
        random(&mut proof)?;
        let nonce = Nonce {
            allocation: 0,
            offset_bytes: pages_bytes(&self.settings),
            bytes: proof.to_vec(),
        };
        let place = (nonce.offset_bytes, proof.len() as u64);
        self.memory.write(&[place], &mut proof)?;
        self.memory.finish()?;
        let described = self.memory.hand_over(&self.settings.worker_dir).await?;
        Ok(described.complete(&self.settings, nonce))
    }
}
