//! One of the two transports, for tests that run over both.

use std::sync::Arc;

use super::super::{MemoryTransport, TransportError};
use super::*;

/// A transport, an address on it, and a guard that must live as long.
pub(super) struct Bench {
    pub(super) transport: Arc<dyn Transport>,
    pub(super) address: Address,
    _root: Option<tempfile::TempDir>,
}

impl Bench {
    pub(super) fn memory() -> Self {
        Self {
            transport: Arc::new(MemoryTransport::default()),
            address: Address::Memory("bench".to_owned()),
            _root: None,
        }
    }

    pub(super) fn zmq() -> Self {
        let (root, address) = own_directory();
        Self {
            transport: Arc::new(ZmqTransport),
            address,
            _root: Some(root),
        }
    }

    pub(super) async fn listen(&self, limits: &Limits) -> Listener {
        let listener = self.transport.listen(&self.address, limits.clone()).await;
        listener.expect("listens")
    }

    pub(super) async fn try_connect(&self, limits: &Limits) -> Result<Connection, TransportError> {
        let limits = limits.clone();
        self.transport
            .connect(&self.address, limits, TEST_TIMEOUT)
            .await
    }

    pub(super) async fn connect(&self) -> Connection {
        self.try_connect(&Limits::default())
            .await
            .expect("connects")
    }
}
