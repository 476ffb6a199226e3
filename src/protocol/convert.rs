//! Conversions between message bodies and the types of the core.

use crate::body::{
    CancelStores, CancelStoresAnswer, CopyResult, Empty, ErrorBody, Finish, Invalidate, Inventory,
    Load, LoadAnswer, Lookup, LookupAnswer, ReadInventory, Readiness, RecordBody, Reset,
    ResetAnswer, Store, StoreAnswer,
};
use crate::codec::Message;
use crate::error::ErrorCode;
use crate::limits::{PAGE_RECORD_BYTES, TEXT_BYTES_MAX};
use kvferry_types::{
    Anchor, Answer, DomainId, EndedCopy, Epoch, Fingerprint, Generation, HASH_BYTES_MAX,
    HASH_BYTES_MIN, NamespaceId, OpId, PageHashes, PageRecord, Record, Request, RequestId, ResetId,
    ResetScope, Scope, SlotId, Stored,
};

impl From<Request> for Message {
    fn from(request: Request) -> Self {
        match request {
            Request::Lookup {
                slot,
                namespace,
                hashes,
                device_pages,
            } => Self::Lookup(Lookup {
                slot: slot.0,
                namespace,
                hash_bytes: width(&hashes),
                hashes: hashes.into_bytes(),
                device_pages,
            }),
            Request::Load {
                slot,
                first_page,
                destination,
                after,
            } => Self::Load(Load {
                after: after.0,
                slot: slot.0,
                first_page,
                destination: destination.into(),
            }),
            Request::Store {
                slot,
                first_page,
                more,
                source,
            } => {
                let (more_from, more) = more.unzip();
                Self::Store(Store {
                    slot: slot.0,
                    first_page,
                    source: source.into(),
                    hash_bytes: more.as_ref().map_or(0, width),
                    more_hashes: more.map_or_else(Vec::new, PageHashes::into_bytes),
                    more_from: more_from.unwrap_or(0),
                })
            }
            Request::Reset { scope } => Self::Reset(reset(scope)),
            Request::CancelStores { slot } => Self::CancelStores(CancelStores {
                slot: slot.map(|slot| slot.0),
            }),
            Request::Finish { slot } => Self::Finish(Finish { slot: slot.0 }),
        }
    }
}

impl TryFrom<Message> for Request {
    type Error = ErrorBody;

    /// Fails for messages that no engine sends, and for hashes whose length does not match their width.
    fn try_from(message: Message) -> Result<Self, ErrorBody> {
        match message {
            Message::Lookup(lookup) => Ok(Self::Lookup {
                slot: SlotId(lookup.slot),
                namespace: lookup.namespace,
                hashes: page_hashes("hashes", lookup.hash_bytes, lookup.hashes)?,
                device_pages: lookup.device_pages,
            }),
            Message::Load(load) => Ok(Self::Load {
                slot: SlotId(load.slot),
                first_page: load.first_page,
                destination: load.destination.list,
                after: RequestId(load.after),
            }),
            Message::Store(store) => Ok(Self::Store {
                slot: SlotId(store.slot),
                first_page: store.first_page,
                more: match store.more_hashes.is_empty() {
                    true => None,
                    false => Some((
                        store.more_from,
                        page_hashes("more_hashes", store.hash_bytes, store.more_hashes)?,
                    )),
                },
                source: store.source.list,
            }),
            Message::Reset(reset) => Ok(Self::Reset {
                scope: reset_scope(reset)?,
            }),
            Message::CancelStores(cancel) => Ok(Self::CancelStores {
                slot: cancel.slot.map(SlotId),
            }),
            Message::Finish(finish) => Ok(Self::Finish {
                slot: SlotId(finish.slot),
            }),
            other => Err(ErrorBody::new(
                ErrorCode::UnknownKind,
                format!("{} is not for a leader to answer", other.kind().name()),
            )),
        }
    }
}

impl From<Answer> for Message {
    fn from(answer: Answer) -> Self {
        match answer {
            Answer::Lookup { hit_pages, pending } => {
                Self::LookupAnswer(LookupAnswer { hit_pages, pending })
            }
            Answer::Load { pages } => Self::LoadAnswer(LoadAnswer { pages }),
            Answer::Store {
                stored_pages,
                present_pages,
                refused_pages,
                failed_pages,
            } => Self::StoreAnswer(StoreAnswer {
                stored_pages,
                present_pages,
                refused_pages,
                failed_pages,
            }),
            Answer::Reset { pages } => Self::ResetAnswer(ResetAnswer { pages }),
            Answer::CancelStores { stores } => {
                Self::CancelStoresAnswer(CancelStoresAnswer { stores })
            }
            Answer::Finish => Self::FinishAnswer(Empty {}),
        }
    }
}

impl Message {
    /// Returns the answer to an engine's request, or `None` for any other message.
    pub fn answer(&self) -> Option<Answer> {
        match *self {
            Self::LookupAnswer(LookupAnswer { hit_pages, pending }) => {
                Some(Answer::Lookup { hit_pages, pending })
            }
            Self::LoadAnswer(LoadAnswer { pages }) => Some(Answer::Load { pages }),
            Self::StoreAnswer(StoreAnswer {
                stored_pages,
                present_pages,
                refused_pages,
                failed_pages,
            }) => Some(Answer::Store {
                stored_pages,
                present_pages,
                refused_pages,
                failed_pages,
            }),
            Self::ResetAnswer(ResetAnswer { pages }) => Some(Answer::Reset { pages }),
            Self::CancelStoresAnswer(CancelStoresAnswer { stores }) => {
                Some(Answer::CancelStores { stores })
            }
            Self::FinishAnswer(Empty {}) => Some(Answer::Finish),
            _ => None,
        }
    }
}

impl From<&EndedCopy> for CopyResult {
    fn from(copy: &EndedCopy) -> Self {
        Self {
            op: copy.op.0,
            complete: copy.complete,
            complete_pages: copy.complete_pages,
            bytes: copy.bytes,
            copy_us: copy.copy_us,
        }
    }
}

impl From<&CopyResult> for EndedCopy {
    fn from(copy: &CopyResult) -> Self {
        Self {
            op: OpId(copy.op),
            complete: copy.complete,
            complete_pages: copy.complete_pages,
            bytes: copy.bytes,
            copy_us: copy.copy_us,
        }
    }
}

impl From<&Record> for RecordBody {
    fn from(record: &Record) -> Self {
        Self {
            anchor: record.anchor.0.to_be_bytes(),
            domain: record.domain.0.to_be_bytes(),
            block_start: record.block_start,
            first: record.first,
            phase: record.phase,
            generation: record.stored.generation.0,
            fingerprints: packed(&record.fingerprints),
        }
    }
}

impl RecordBody {
    pub(super) fn into_record(self, epoch: Epoch) -> Record {
        Record {
            anchor: Anchor(u128::from_be_bytes(self.anchor)),
            domain: DomainId(u128::from_be_bytes(self.domain)),
            block_start: self.block_start,
            first: self.first,
            phase: self.phase,
            stored: Stored {
                epoch,
                generation: Generation(self.generation),
            },
            fingerprints: unpacked(&self.fingerprints),
        }
    }
}

impl Invalidate {
    /// Builds the order to remove the pages of a scope from the inventory, as far as they were stored at or before
    /// `through`.
    pub fn new(id: ResetId, scope: &Scope, through: Generation) -> Self {
        let (namespace, fingerprints) = match scope {
            Scope::Everything => (Vec::new(), Vec::new()),
            Scope::Namespace(namespace) => (namespace.0.to_be_bytes().to_vec(), Vec::new()),
            Scope::Pages(namespace, pages) => {
                (namespace.0.to_be_bytes().to_vec(), packed(pages.as_slice()))
            }
        };
        Self {
            reset: id.0,
            namespace,
            fingerprints,
            through: through.0,
        }
    }

    /// Returns the scope of pages to remove. Fails if `namespace` has neither 0 nor 8 bytes.
    pub fn scope(&self) -> Result<Scope, ErrorBody> {
        let namespace = match (
            <[u8; 8]>::try_from(self.namespace.as_slice()),
            self.namespace.len(),
        ) {
            (Ok(namespace), _) => NamespaceId(u64::from_be_bytes(namespace)),
            (Err(_), 0) => return Ok(Scope::Everything),
            (Err(_), length) => {
                let text = format!("namespace has {length} bytes: none, or 8");
                return Err(ErrorBody::new(ErrorCode::Invalid, text));
            }
        };
        Ok(match self.fingerprints.is_empty() {
            true => Scope::Namespace(namespace),
            false => Scope::Pages(
                namespace,
                unpacked(&self.fingerprints).into_iter().collect(),
            ),
        })
    }
}

impl Inventory {
    /// Builds the answer to `asked`.
    pub fn new(asked: &ReadInventory, next: Option<u32>, pages: &[PageRecord]) -> Self {
        let mut records = Vec::with_capacity(pages.len() * PAGE_RECORD_BYTES);
        for page in pages {
            records.extend(page.page.to_be_bytes());
            records.extend(page.block_start.to_be_bytes());
            records.extend(page.index.to_be_bytes());
            records.extend(page.phase.to_be_bytes());
            records.extend(page.stored.epoch.0.to_be_bytes());
            records.extend(page.stored.generation.0.to_be_bytes());
            records.extend(page.anchor.0.to_be_bytes());
            records.extend(page.domain.0.to_be_bytes());
            records.extend(page.fingerprint.0.to_be_bytes());
        }
        Self {
            depot: asked.depot,
            reading: asked.reading,
            from: asked.from,
            next,
            records,
        }
    }

    /// Returns the listed pages. Bytes after the last complete record are ignored.
    pub fn pages(&self) -> Vec<PageRecord> {
        let (records, _) = self.records.as_chunks::<PAGE_RECORD_BYTES>();
        records.iter().map(page_record).collect()
    }
}

fn page_record(bytes: &[u8; PAGE_RECORD_BYTES]) -> PageRecord {
    /// Reads the big-endian number of `N` bytes at `at`.
    fn number<const N: usize>(bytes: &[u8; PAGE_RECORD_BYTES], at: usize) -> u128 {
        let of = |sum: u128, byte: &u8| sum << 8 | u128::from(*byte);
        bytes[at..at + N].iter().fold(0, of)
    }
    PageRecord {
        page: number::<4>(bytes, 0) as u32,
        block_start: number::<4>(bytes, 4) as u32,
        index: number::<2>(bytes, 8) as u16,
        phase: number::<2>(bytes, 10) as u16,
        stored: Stored {
            epoch: Epoch(number::<8>(bytes, 12) as u64),
            generation: Generation(number::<8>(bytes, 20) as u64),
        },
        anchor: Anchor(number::<16>(bytes, 28)),
        domain: DomainId(number::<16>(bytes, 44)),
        fingerprint: Fingerprint(number::<16>(bytes, 60)),
    }
}

fn packed(pages: &[Fingerprint]) -> Vec<u8> {
    let pages: Vec<[u8; 16]> = pages.iter().map(|page| page.0.to_be_bytes()).collect();
    pages.into_flattened()
}

fn unpacked(bytes: &[u8]) -> Vec<Fingerprint> {
    let (pages, _) = bytes.as_chunks::<16>();
    pages
        .iter()
        .map(|page| Fingerprint(u128::from_be_bytes(*page)))
        .collect()
}

fn reset(scope: ResetScope) -> Reset {
    let (namespace, hashes) = match scope {
        ResetScope::Everything => (None, None),
        ResetScope::Namespace(namespace) => (Some(namespace), None),
        ResetScope::Pages(namespace, hashes) => (Some(namespace), Some(hashes)),
    };
    Reset {
        namespace: namespace.map(serde_bytes::ByteBuf::from),
        hash_bytes: hashes.as_ref().map_or(0, width),
        hashes: hashes.map_or_else(Vec::new, PageHashes::into_bytes),
    }
}

fn reset_scope(reset: Reset) -> Result<ResetScope, ErrorBody> {
    match (reset.namespace, reset.hashes.is_empty()) {
        (None, true) => Ok(ResetScope::Everything),
        (None, false) => {
            let text = "hashes without a namespace: say whose pages";
            Err(ErrorBody::new(ErrorCode::Invalid, text))
        }
        (Some(namespace), true) => Ok(ResetScope::Namespace(namespace.into_vec())),
        (Some(namespace), false) => {
            let hashes = page_hashes("hashes", reset.hash_bytes, reset.hashes)?;
            Ok(ResetScope::Pages(namespace.into_vec(), hashes))
        }
    }
}

impl ErrorBody {
    /// Builds an error with the retry flag of its code, and with `over` false, so that the engine must not reuse any
    /// page. A message longer than [`TEXT_BYTES_MAX`] is cut.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self {
            code: code.number(),
            message: cut(message.into()),
            retry: code.retry(),
            over: false,
        }
    }

    /// Builds an error for a request that can never succeed: `retry` is false, whatever the code implies.
    pub fn for_good(code: ErrorCode, message: impl Into<String>) -> Self {
        Self {
            retry: false,
            ..Self::new(code, message)
        }
    }

    /// Returns the code. Unknown numbers map to [`ErrorCode::Internal`].
    pub fn code(&self) -> ErrorCode {
        ErrorCode::from_number(self.code)
    }
}

impl Readiness {
    /// Builds a progress report. A `problem` longer than [`TEXT_BYTES_MAX`] is cut.
    pub fn new(ready_bytes: u64, bytes: u64, pinned_bytes: Option<u64>, problem: String) -> Self {
        Self {
            ready_bytes,
            bytes,
            pinned_bytes,
            problem: cut(problem),
        }
    }
}

/// Cuts a text to at most [`TEXT_BYTES_MAX`] bytes, at a character boundary.
fn cut(mut text: String) -> String {
    if text.len() > TEXT_BYTES_MAX {
        let end = (0..=TEXT_BYTES_MAX)
            .rev()
            .find(|end| text.is_char_boundary(*end));
        text.truncate(end.unwrap_or(0));
    }
    text
}

fn width(hashes: &PageHashes) -> u8 {
    u8::try_from(hashes.width()).unwrap_or(0)
}

fn page_hashes(field: &str, width: u8, bytes: Vec<u8>) -> Result<PageHashes, ErrorBody> {
    let length = bytes.len();
    PageHashes::packed(usize::from(width), bytes).ok_or_else(|| {
        let text = format!(
            "{field} has {length} bytes and hash_bytes is {width}: hashes of {HASH_BYTES_MIN} to \
             {HASH_BYTES_MAX} bytes, packed without gaps"
        );
        ErrorBody::new(ErrorCode::Invalid, text)
    })
}
