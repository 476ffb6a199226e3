//! One of the transports, for tests that run over all of them.

use std::sync::Arc;

use super::super::{BoxFuture, MemoryTransport, TlsTransport, TransportError};
use super::tls::{Keys, free_address};
use super::*;

/// Listens with the credentials of a leader, and connects with those of a worker.
struct OverTls {
    listening: TlsTransport,
    connecting: TlsTransport,
}

impl Transport for OverTls {
    fn listen<'a>(
        &'a self,
        address: &'a Address,
        limits: Limits,
    ) -> BoxFuture<'a, Result<Listener, TransportError>> {
        self.listening.listen(address, limits)
    }

    fn connect<'a>(
        &'a self,
        address: &'a Address,
        limits: Limits,
        deadline: Duration,
    ) -> BoxFuture<'a, Result<Connection, TransportError>> {
        self.connecting.connect(address, limits, deadline)
    }
}

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

    pub(super) fn tls() -> Self {
        let keys = Keys::make();
        let address = free_address();
        Self {
            transport: Arc::new(OverTls {
                listening: keys.transport("leader"),
                connecting: keys.transport("worker/0/0"),
            }),
            address,
            _root: None,
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
