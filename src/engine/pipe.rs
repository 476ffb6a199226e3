//! The protocol between the engine's scheduler and its ranks: frames over pipes, a 32-bit big-endian length and
//! MessagePack.
//!
//! Internal to the reference engine, and not part of kvferry's protocol.

use std::io;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use kvferry_types::{Fingerprint, GroupId, RequestId};
use kvferry_workload::scheduler::WorkKind;

/// Longest frame, 64 MiB: the work of a prompt of 16 million tokens in pages of 16 takes 21 MiB.
pub const PIPE_FRAME_BYTES_MAX: u32 = 64 << 20;

/// An order of the scheduler to a rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankOrder {
    /// Number of the order, repeated in the report.
    pub ticket: u64,
    /// 0 poison, 1 compute, 2 verify, 3 abandon.
    pub kind: u8,
    /// Device pages, 4 bytes little-endian each.
    #[serde(with = "serde_bytes")]
    pub pages: Vec<u8>,
    /// Fingerprints of the pages' contents, 16 bytes big-endian each.
    #[serde(with = "serde_bytes")]
    pub contents: Vec<u8>,
    /// Group of each page, 1 byte each.
    #[serde(with = "serde_bytes")]
    pub groups: Vec<u8>,
    /// Report to the worker that everything up to this request is written; 0 for no report.
    pub written_through: u64,
    /// The request to abandon; 0 for none.
    pub abandon: u64,
}

/// The task of an order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OrderTask {
    /// Work on pages.
    Work(WorkKind),
    /// Report when the worker copies nothing for this request, and never will again.
    Abandon(RequestId),
}

/// A rank's report of an order.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankReport {
    /// Number of the order; 0 for the first registration, and for a fatal error.
    pub ticket: u64,
    /// Bytes that were compared.
    pub verified_bytes: u64,
    /// Bytes that were wrong.
    pub mismatched_bytes: u64,
    /// The first wrong byte, or why the rank ends; empty on success.
    pub complaint: String,
    /// The rank cannot continue.
    pub fatal: bool,
}

impl RankOrder {
    /// Creates an order of work, without pages.
    pub fn new(ticket: u64, kind: WorkKind, written_through: u64) -> Self {
        let kind = match kind {
            WorkKind::Poison => 0,
            WorkKind::Compute => 1,
            WorkKind::Verify => 2,
        };
        Self {
            ticket,
            kind,
            pages: Vec::new(),
            contents: Vec::new(),
            groups: Vec::new(),
            written_through,
            abandon: 0,
        }
    }

    /// Creates an order to stop all copies of a request.
    pub fn abandon(ticket: u64, request: RequestId) -> Self {
        Self {
            ticket,
            kind: 3,
            pages: Vec::new(),
            contents: Vec::new(),
            groups: Vec::new(),
            written_through: 0,
            abandon: request.0,
        }
    }

    /// Adds a page of a group with its content.
    pub fn add_page(&mut self, group: GroupId, page: u32, content: Fingerprint) {
        self.groups.push(group.0);
        self.pages.extend_from_slice(&page.to_le_bytes());
        self.contents.extend_from_slice(&content.0.to_be_bytes());
    }

    /// The pages that were added.
    pub fn pages(&self) -> impl Iterator<Item = (GroupId, u32, Fingerprint)> {
        let groups = self.groups.iter().map(|group| GroupId(*group));
        let pages = self.pages.as_chunks::<4>().0.iter();
        let contents = self.contents.as_chunks::<16>().0.iter();
        let all = groups.zip(pages).zip(contents);
        all.map(|((group, page), content)| {
            let content = Fingerprint(u128::from_be_bytes(*content));
            (group, u32::from_le_bytes(*page), content)
        })
    }

    /// The order's task; `None` for an unknown kind.
    pub fn task(&self) -> Option<OrderTask> {
        match self.kind {
            0 => Some(OrderTask::Work(WorkKind::Poison)),
            1 => Some(OrderTask::Work(WorkKind::Compute)),
            2 => Some(OrderTask::Work(WorkKind::Verify)),
            3 => Some(OrderTask::Abandon(RequestId(self.abandon))),
            _ => None,
        }
    }
}

/// Writes one frame.
pub async fn write<T: Serialize>(
    pipe: &mut (impl AsyncWrite + Unpin),
    value: &T,
) -> io::Result<()> {
    let body = rmp_serde::to_vec_named(value).map_err(io::Error::other)?;
    let length = u32::try_from(body.len())
        .ok()
        .filter(|length| *length <= PIPE_FRAME_BYTES_MAX);
    let length = length.ok_or_else(|| io::Error::other("frame too long"))?;
    pipe.write_all(&length.to_be_bytes()).await?;
    pipe.write_all(&body).await?;
    pipe.flush().await
}

/// Reads one frame; `None` when the other side has closed the pipe.
pub async fn read<T: DeserializeOwned>(
    pipe: &mut (impl AsyncRead + Unpin),
) -> io::Result<Option<T>> {
    let mut length = [0; 4];
    match pipe.read_exact(&mut length).await {
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        Err(error) => return Err(error),
    }
    let length = u32::from_be_bytes(length);
    if length > PIPE_FRAME_BYTES_MAX {
        return Err(io::Error::other(format!("frame of {length} bytes")));
    }
    let mut body = vec![0; length as usize];
    pipe.read_exact(&mut body).await?;
    let mut reader = rmp_serde::Deserializer::new(&body[..]);
    T::deserialize(&mut reader)
        .map(Some)
        .map_err(io::Error::other)
}
