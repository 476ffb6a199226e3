//! Requests of engines and their answers as messages, and back.

use crate::body::{
    CancelStores, Empty, ErrorBody, Finish, Flush, Load, Lookup, PartBody, Reset, ResetPages,
    Store, tier_of,
};
use crate::codec::Message;
use crate::error::ErrorCode;
use kvferry_types::{
    Answer, HASH_BYTES_MAX, HASH_BYTES_MIN, PageHashes, Part, Request, RequestId, ResetScope,
    SlotId, TierId,
};

impl From<Request> for Message {
    fn from(request: Request) -> Self {
        match request {
            Request::Lookup {
                slot,
                namespace,
                hashes,
                have_pages,
                limit_pages,
            } => Self::Lookup(Lookup {
                slot: slot.0,
                namespace,
                hash_bytes: width(&hashes),
                hashes: hashes.into_bytes(),
                have_pages,
                limit_pages,
            }),
            Request::Load { slot, parts, after } => Self::Load(Load {
                after: after.0,
                slot: slot.0,
                parts: parts.into_iter().map(PartBody::from).collect(),
            }),
            Request::Store {
                slot,
                parts,
                more,
                after,
            } => {
                let (more_from, more) = more.unzip();
                Self::Store(Store {
                    slot: slot.0,
                    parts: parts.into_iter().map(PartBody::from).collect(),
                    hash_bytes: more.as_ref().map_or(0, width),
                    more_hashes: more.map_or_else(Vec::new, PageHashes::into_bytes),
                    more_from: more_from.unwrap_or(0),
                    after: after.0,
                })
            }
            Request::Reset { scope, tier } => Self::Reset(reset(scope, tier)),
            Request::Flush => Self::Flush(Flush {}),
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
                have_pages: lookup.have_pages,
                limit_pages: lookup.limit_pages,
            }),
            Message::Load(load) => Ok(Self::Load {
                slot: SlotId(load.slot),
                parts: parts(load.parts)?,
                after: RequestId(load.after),
            }),
            Message::Store(store) => Ok(Self::Store {
                slot: SlotId(store.slot),
                parts: parts(store.parts)?,
                more: match store.more_hashes.is_empty() {
                    true => None,
                    false => Some((
                        store.more_from,
                        page_hashes("more_hashes", store.hash_bytes, store.more_hashes)?,
                    )),
                },
                after: RequestId(store.after),
            }),
            Message::Reset(reset) => Ok(Self::Reset {
                tier: tier_of("tier", reset.tier)?,
                scope: reset_scope(reset)?,
            }),
            Message::Flush(Flush {}) => Ok(Self::Flush),
            Message::CancelStores(cancel) => Ok(Self::CancelStores {
                slot: cancel.slot.map(SlotId),
            }),
            Message::Finish(finish) => Ok(Self::Finish {
                slot: SlotId(finish.slot),
            }),
            other => Err(ErrorBody::new(
                ErrorCode::Forbidden,
                format!("{} is not for a leader to answer", other.kind().name()),
            )),
        }
    }
}

impl From<Answer> for Message {
    fn from(answer: Answer) -> Self {
        match answer {
            Answer::Lookup(answer) => Self::LookupAnswer(answer),
            Answer::Load(answer) => Self::LoadAnswer(answer),
            Answer::Store(answer) => Self::StoreAnswer(answer),
            Answer::Reset(answer) => Self::ResetAnswer(answer),
            Answer::Flush(answer) => Self::FlushAnswer(answer),
            Answer::CancelStores(answer) => Self::CancelStoresAnswer(answer),
            Answer::Finish => Self::FinishAnswer(Empty {}),
        }
    }
}

impl Message {
    /// Returns the answer to an engine's request, or `None` for any other message.
    pub fn answer(&self) -> Option<Answer> {
        match *self {
            Self::LookupAnswer(answer) => Some(Answer::Lookup(answer)),
            Self::LoadAnswer(answer) => Some(Answer::Load(answer)),
            Self::StoreAnswer(answer) => Some(Answer::Store(answer)),
            Self::ResetAnswer(answer) => Some(Answer::Reset(answer)),
            Self::FlushAnswer(answer) => Some(Answer::Flush(answer)),
            Self::CancelStoresAnswer(answer) => Some(Answer::CancelStores(answer)),
            Self::FinishAnswer(Empty {}) => Some(Answer::Finish),
            _ => None,
        }
    }
}

fn parts(bodies: Vec<PartBody>) -> Result<Vec<Part>, ErrorBody> {
    bodies.into_iter().map(Part::try_from).collect()
}

fn reset(scope: ResetScope, tier: Option<TierId>) -> Reset {
    let (which, namespace, hashes) = match scope {
        ResetScope::Everything => (ResetPages::All, None, None),
        ResetScope::Namespace(namespace) => (ResetPages::Namespace, Some(namespace), None),
        ResetScope::Pages(namespace, hashes) => (ResetPages::Hashes, Some(namespace), Some(hashes)),
    };
    Reset {
        which,
        namespace: namespace.map(serde_bytes::ByteBuf::from),
        hash_bytes: hashes.as_ref().map_or(0, width),
        hashes: hashes.map_or_else(Vec::new, PageHashes::into_bytes),
        tier: tier.map_or(0, TierId::number),
    }
}

fn reset_scope(reset: Reset) -> Result<ResetScope, ErrorBody> {
    let hashed = !reset.hashes.is_empty();
    let text = match (reset.which, reset.namespace, hashed) {
        (ResetPages::All, None, false) => return Ok(ResetScope::Everything),
        (ResetPages::Namespace, Some(namespace), false) => {
            return Ok(ResetScope::Namespace(namespace.into_vec()));
        }
        (ResetPages::Hashes, Some(namespace), true) => {
            let hashes = page_hashes("hashes", reset.hash_bytes, reset.hashes)?;
            return Ok(ResetScope::Pages(namespace.into_vec(), hashes));
        }
        (ResetPages::All, ..) => "which is all: leave namespace and hashes out",
        (ResetPages::Namespace, ..) => "which is namespace: name it, and leave hashes out",
        (ResetPages::Hashes, ..) => "which is hashes: name them, and their namespace",
        (ResetPages::Unknown, ..) => {
            "which is a word that this version does not know: name all, namespace or hashes, or update kvferry"
        }
    };
    Err(ErrorBody::new(ErrorCode::Invalid, text))
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

#[cfg(test)]
mod tests {
    use super::*;
    use kvferry_types::{PageList, PageRun};

    /// A load of pages in one of both shapes, beside a count.
    fn load(pages: PageList, count: u64) -> Result<Request, ErrorBody> {
        let part = PartBody {
            group: 0,
            first_page: 0,
            pages: pages.into(),
            count,
            priority: None,
        };
        Request::try_from(Message::Load(Load {
            slot: 1,
            parts: vec![part],
            after: 0,
        }))
    }

    #[test]
    fn pages_that_were_meant_as_a_run_are_refused_by_their_count() {
        let pages: PageList = [5, 2].into_iter().collect();
        let run = PageList([PageRun { start: 5, count: 3 }].as_slice().into());
        assert!(load(pages.clone(), 2).is_ok());
        assert!(load(run.clone(), 3).is_ok());
        let refused = load(pages, 3).expect_err("two pages");
        assert_eq!(refused.code, ErrorCode::Invalid.number());
        assert!(refused.message.starts_with("count is 3, and pages names 2"));
        let refused = load(run, 2).expect_err("three pages");
        assert!(refused.message.starts_with("count is 2, and pages names 3"));
    }
}
