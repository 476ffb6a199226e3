//! The fields of the frames that a replay needs.

use serde::Deserialize;
use serde::de::IgnoredAny;

use super::file::{CallsError, Frame, FrameKind};
use kvferry_protocol::{
    CancelStores, Empty, ErrorCode, Finish, Load, Lookup, Message, MessageKind, Reset, Store,
};
use kvferry_types::{
    Answer, Attention, CancelStoresAnswer, HASH_BYTES_MAX, HASH_BYTES_MIN, LoadAnswer,
    LookupAnswer, PageHashes, Request, ResetAnswer, StoreAnswer,
};

/// Page hashes that frames may refer to, the last that were written. 8 MiB with 64 bytes each.
const HASH_WINDOW: u64 = 131_072;
/// Most hashes of one request.
const HASHES_MAX: u64 = 131_072;
/// Bytes of one page hash.
const HASH_BYTES: std::ops::RangeInclusive<usize> = HASH_BYTES_MIN..=HASH_BYTES_MAX;

/// Sizes of the engine. Other fields are for readers of the calls.
#[derive(Debug, Clone, Deserialize)]
pub struct Header {
    /// Ranks of the engine.
    pub ranks: u16,
    /// Tokens of the unit of the hashes.
    pub hash_tokens: u32,
    /// Tokens between two ends of hits.
    pub hit_tokens: u32,
    /// The groups, by id.
    pub groups: Vec<HeaderGroup>,
}

/// One group of layers.
#[derive(Debug, Clone, Deserialize)]
pub struct HeaderGroup {
    /// What its layers read.
    pub attention: Attention,
    /// Tokens of a window or a chunk; 0 without one.
    pub window_tokens: u32,
    /// Draft layers use the group.
    pub eagle: bool,
    /// Tokens of a page.
    pub page_tokens: u32,
}

/// Sizes of a leader, as it served the engine.
#[derive(Debug, Clone, Deserialize)]
pub struct LeaderFrame {
    /// The epoch.
    pub epoch: u64,
    /// Version of its program.
    pub version: String,
    /// Pages of the largest block.
    pub ratio: u32,
    /// Ranks of an engine.
    pub ranks: u16,
    /// Engines that it can serve.
    pub replicas: u16,
    /// Number, pages and used pages of each tier.
    pub tiers: Vec<(u8, u64, u64)>,
}

/// A request, with its id in the recording.
#[derive(Debug)]
pub struct Requested {
    /// The id.
    pub id: u64,
    /// The request.
    pub request: Request,
}

/// The kind of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestKind {
    /// A lookup.
    Lookup,
    /// A load.
    Load,
    /// A store.
    Store,
    /// A reset.
    Reset,
    /// A cancel of stores.
    CancelStores,
    /// A finish.
    Finish,
    /// A flush, which no engine of vLLM sends.
    Flush,
}

impl RequestKind {
    /// The kind of a request.
    pub fn of(request: &Request) -> Self {
        match request {
            Request::Lookup { .. } => Self::Lookup,
            Request::Load { .. } => Self::Load,
            Request::Store { .. } => Self::Store,
            Request::Reset { .. } => Self::Reset,
            Request::CancelStores { .. } => Self::CancelStores,
            Request::Finish { .. } => Self::Finish,
            Request::Flush => Self::Flush,
        }
    }

    /// The name for reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Lookup => "lookup",
            Self::Load => "load",
            Self::Store => "store",
            Self::Reset => "reset",
            Self::CancelStores => "cancel_stores",
            Self::Finish => "finish",
            Self::Flush => "flush",
        }
    }

    /// Whether the request copies pages.
    pub fn copies(self) -> bool {
        matches!(self, Self::Load | Self::Store)
    }
}

/// The end of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// Its answer.
    Answered(Answer),
    /// It has none.
    Failed(Failed),
}

/// Why a request has no answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failed {
    /// The error code.
    pub code: u16,
    /// The text.
    pub message: String,
    /// The leader reported it.
    pub reported: bool,
    /// No part of the request runs or will run.
    pub over: bool,
}

impl Failed {
    /// Whether the leader never received the request.
    pub fn is_unsent(&self) -> bool {
        self.over && !self.reported
    }

    /// Whether the leader refused the request without carrying it out, because of what it served at that time.
    pub fn is_not_served(&self) -> bool {
        let codes = [ErrorCode::NotReady, ErrorCode::Busy, ErrorCode::Draining];
        // A leader that is busy has done nothing either, and does not say so: it keeps no record of such a request.
        let over = self.over || self.code == ErrorCode::Busy.number();
        self.reported && over && codes.iter().any(|code| code.number() == self.code)
    }
}

/// A list of hashes as frames have it.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Item {
    Known(u64, u64),
    Fresh(serde_bytes::ByteBuf),
}

#[derive(Deserialize)]
struct Begin(u64, u16, IgnoredAny, IgnoredAny, IgnoredAny);
#[derive(Deserialize)]
struct RequestFields<M>(IgnoredAny, IgnoredAny, IgnoredAny, M, Vec<Item>);
#[derive(Deserialize)]
struct CallFields(String, IgnoredAny, usize, Vec<Item>);
#[derive(Deserialize)]
struct AnswerFields<A>(u64, A);
#[derive(Deserialize)]
struct FailureFields(u64, u16, String, bool, IgnoredAny, bool);

/// The last page hashes of a file, by number. Writer and reader keep the same.
#[derive(Debug, Default)]
pub struct HashWindow {
    ring: Vec<Box<[u8]>>,
    next: u64,
}

impl HashWindow {
    /// The hashes of a list, packed.
    fn expand(&mut self, items: Vec<Item>, width: usize) -> Result<Vec<u8>, String> {
        let mut packed = Vec::new();
        let room = |packed: &[u8], more: u64| {
            let most = HASHES_MAX.saturating_mul(width as u64);
            let there = (packed.len() as u64).saturating_add(more.saturating_mul(width as u64));
            (there <= most)
                .then_some(())
                .ok_or(format!("more than {HASHES_MAX} page hashes"))
        };
        if !HASH_BYTES.contains(&width) && !items.is_empty() {
            let (least, most) = HASH_BYTES.into_inner();
            return Err(format!(
                "page hashes of {width} bytes: they have {least} to {most}"
            ));
        }
        for item in items {
            match item {
                Item::Known(first, count) => {
                    room(&packed, count)?;
                    let oldest = self.next.saturating_sub(HASH_WINDOW);
                    let end = first.saturating_add(count);
                    if first < oldest || end > self.next {
                        return Err(format!("page hashes {first} to {end} are not known"));
                    }
                    for number in first..end {
                        let known = &self.ring[(number % HASH_WINDOW) as usize];
                        if known.len() != width {
                            return Err(format!(
                                "page hash {number} has {} bytes, not {width}",
                                known.len()
                            ));
                        }
                        packed.extend_from_slice(known);
                    }
                }
                Item::Fresh(bytes) => {
                    if !bytes.len().is_multiple_of(width) {
                        return Err(format!(
                            "{} bytes of page hashes of {width} bytes",
                            bytes.len()
                        ));
                    }
                    room(&packed, (bytes.len() / width) as u64)?;
                    for page in bytes.chunks_exact(width) {
                        let slot = (self.next % HASH_WINDOW) as usize;
                        match self.ring.get_mut(slot) {
                            Some(old) => *old = page.into(),
                            None => self.ring.push(page.into()),
                        }
                        self.next += 1;
                    }
                    packed.extend_from_slice(&bytes);
                }
            }
        }
        Ok(packed)
    }

    /// Reads the hashes of a call, which later frames may refer to. Returns the call's name.
    pub fn call(&mut self, frame: &Frame<'_>) -> Result<String, CallsError> {
        let CallFields(name, _, width, items) = frame.read()?;
        self.expand(items, width)
            .map_err(|why| frame.damaged(why))?;
        Ok(name)
    }

    /// Reads a request.
    pub fn request(&mut self, frame: &Frame<'_>) -> Result<Requested, CallsError> {
        let Begin(id, kind, ..) = frame.read()?;
        let message = match MessageKind::from_number(kind) {
            Some(MessageKind::Lookup) => {
                let RequestFields(_, _, _, mut lookup, items) =
                    frame.read::<RequestFields<Lookup>>()?;
                let width = usize::from(lookup.hash_bytes);
                lookup.hashes = self
                    .expand(items, width)
                    .map_err(|why| frame.damaged(why))?;
                Message::Lookup(lookup)
            }
            Some(MessageKind::Store) => {
                let RequestFields(_, _, _, mut store, items) =
                    frame.read::<RequestFields<Store>>()?;
                let width = usize::from(store.hash_bytes);
                store.more_hashes = self
                    .expand(items, width)
                    .map_err(|why| frame.damaged(why))?;
                Message::Store(store)
            }
            Some(MessageKind::Load) => Message::Load(frame.read::<RequestFields<Load>>()?.3),
            Some(MessageKind::Finish) => Message::Finish(frame.read::<RequestFields<Finish>>()?.3),
            Some(MessageKind::Reset) => Message::Reset(frame.read::<RequestFields<Reset>>()?.3),
            Some(MessageKind::CancelStores) => {
                Message::CancelStores(frame.read::<RequestFields<CancelStores>>()?.3)
            }
            _ => return Err(frame.damaged(format!("requests of kind {kind} are not recorded"))),
        };
        let request = Request::try_from(message).map_err(|error| frame.damaged(error.message))?;
        Ok(Requested { id, request })
    }
}

/// The id of the request that a frame ends.
pub fn ended_id(frame: &Frame<'_>) -> Result<u64, CallsError> {
    match frame.kind {
        FrameKind::Failure => Ok(frame.read::<FailureFields>()?.0),
        _ => Ok(frame.read::<AnswerFields<IgnoredAny>>()?.0),
    }
}

/// Reads the answer to a request.
pub fn answer(frame: &Frame<'_>, kind: RequestKind) -> Result<Answer, CallsError> {
    fn of<A: serde::de::DeserializeOwned>(frame: &Frame<'_>) -> Result<A, CallsError> {
        Ok(frame.read::<AnswerFields<A>>()?.1)
    }
    match kind {
        RequestKind::Lookup => Ok(Answer::Lookup(of::<LookupAnswer>(frame)?)),
        RequestKind::Load => Ok(Answer::Load(of::<LoadAnswer>(frame)?)),
        RequestKind::Store => Ok(Answer::Store(of::<StoreAnswer>(frame)?)),
        RequestKind::Reset => Ok(Answer::Reset(of::<ResetAnswer>(frame)?)),
        RequestKind::CancelStores => Ok(Answer::CancelStores(of::<CancelStoresAnswer>(frame)?)),
        RequestKind::Finish => of::<Empty>(frame).map(|_| Answer::Finish),
        RequestKind::Flush => Err(frame.damaged("a flush is not recorded")),
    }
}

/// Reads a failure.
pub fn failure(frame: &Frame<'_>) -> Result<Failed, CallsError> {
    let FailureFields(_, code, message, reported, _, over) = frame.read()?;
    Ok(Failed {
        code,
        message,
        reported,
        over,
    })
}

/// Hashes of a slot after a request that names some. A lookup replaces them, a store extends them.
pub fn hashes_after(
    known: Option<PageHashes>,
    request: &Request,
) -> Result<Option<PageHashes>, String> {
    match request {
        Request::Lookup { hashes, .. } => Ok(Some(hashes.clone())),
        Request::Store {
            more: Some((from, more)),
            ..
        } => {
            let Some(mut known) = known else {
                return Ok(None);
            };
            let extended = known.extend_from(*from as usize, more);
            extended.map_err(|_| "a store names other page hashes than its slot has".to_owned())?;
            Ok(Some(known))
        }
        _ => Ok(known),
    }
}
