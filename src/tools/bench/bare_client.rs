//! A client of a leader on a DEALER of the `zeromq` crate alone, without the session of kvferry's own client: it measures the
//! leader with the same socket as the two sockets that the leader is compared with.

use std::time::Duration;

use tokio::time::timeout;
use zeromq::{DealerSocket, SocketRecv as _, SocketSend as _, ZmqMessage};

use kvferry::error::CommandError;
use kvferry_protocol::{
    Envelope, ErrorCode, HELLO_VERSION, Header, Hello, Message, Role, VERSION, decode, encode,
};
use kvferry_types::{Epoch, RequestId};

use super::rpc::lookup;

/// Longest wait for an answer.
const WITHIN: Duration = Duration::from_secs(10);

/// See the module.
pub(super) struct BareClient {
    socket: DealerSocket,
    next: u64,
}

impl BareClient {
    /// Says hello over a connected socket.
    pub(super) async fn welcomed(socket: DealerSocket) -> Result<Self, CommandError> {
        let mut client = Self { socket, next: 0 };
        let hello = Hello {
            engine: [6; 16],
            ..Hello::new(Role::Engine, "bench")
        };
        match client.answer(HELLO_VERSION, Message::Hello(hello)).await? {
            Message::Welcome(_) => Ok(client),
            other => Err(unexpected(&other)),
        }
    }

    /// A lookup that a leader without ranks refuses.
    pub(super) async fn refused_lookup(&mut self, hash_bytes: usize) -> Result<(), CommandError> {
        match self
            .answer(VERSION, Message::Lookup(lookup(hash_bytes)))
            .await?
        {
            Message::Error(error) if error.code() == ErrorCode::NotReady => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    async fn answer(&mut self, version: u16, message: Message) -> Result<Message, CommandError> {
        self.next += 1;
        let request = Envelope {
            version,
            correlation: RequestId(self.next),
            deadline_ms: u32::try_from(WITHIN.as_millis()).unwrap_or(u32::MAX),
            epoch: Epoch(0),
            message,
        };
        let (header, body) = encode(&request).map_err(CommandError::failed)?;
        let mut sent = ZmqMessage::from(header.to_vec());
        sent.push_back(body.into());
        self.socket.send(sent).await.map_err(CommandError::failed)?;
        let received = timeout(WITHIN, self.socket.recv()).await;
        let received = received.map_err(CommandError::failed)?;
        let received = received.map_err(CommandError::failed)?;
        let (Some(header), Some(body), 2) = (received.get(0), received.get(1), received.len())
        else {
            let text = format!("an answer of {} parts", received.len());
            return Err(CommandError::Failed(text));
        };
        let header = Header::from_bytes(header).map_err(CommandError::failed)?;
        if header.correlation != RequestId(self.next) {
            let text = format!("an answer to {}", header.correlation);
            return Err(CommandError::Failed(text));
        }
        let answer = decode(header, body).map_err(CommandError::failed)?;
        Ok(answer.message)
    }
}

fn unexpected(answer: &Message) -> CommandError {
    CommandError::Failed(format!("unexpected answer {}", answer.kind().name()))
}
