//! Messages at the limits of their fields: lengths and numbers at which encodings change, empty values, longest values.

use kvferry_types::{LookupAnswer, PageList, PagesBelow, ResetAnswer};

use crate::body::{
    Abandon, ErrorBody, Finish, Hello, Load, Lookup, PartBody, Reset, ResetPages, Status,
    StatusAnswer, Store, Welcome,
};
use crate::codec::Message;
use crate::error::ErrorCode;
use crate::limits::{NAMESPACE_BYTES_MAX, TEXT_BYTES_MAX};
use crate::role::Role;

/// Numbers at which MessagePack changes from one encoding to the next.
const STEPS: [u64; 11] = [
    0,
    127,
    128,
    255,
    256,
    65_535,
    65_536,
    (1 << 32) - 1,
    1 << 32,
    1 << 63,
    u64::MAX,
];
/// The last page index.
const PAGE_LAST: u32 = u32::MAX - 1;

pub(super) fn edges() -> Vec<(&'static str, Message)> {
    let part = |pages: PageList| PartBody {
        group: u8::MAX,
        first_page: u32::MAX,
        count: pages.pages(),
        pages: pages.into(),
        priority: Some(0),
    };
    let pages: PageList = STEPS
        .iter()
        .filter_map(|page| u32::try_from(*page).ok())
        .map(|page| page.min(PAGE_LAST))
        .collect();
    let lookup = |hash_bytes: u8, namespace: usize| Lookup {
        slot: u64::MAX,
        namespace: vec![b'n'; namespace],
        hash_bytes,
        hashes: vec![0xff; usize::from(hash_bytes)],
        have_pages: 0,
        limit_pages: Some(u32::MAX),
    };
    let reset = |namespace: Option<&[u8]>| Reset {
        which: match namespace {
            None => ResetPages::All,
            Some(_) => ResetPages::Namespace,
        },
        namespace: namespace.map(|bytes| bytes.to_vec().into()),
        hash_bytes: 0,
        hashes: Vec::new(),
        tier: 0,
    };
    let mut named = vec![
        (
            "edge_abandon_ids",
            Message::Abandon(Abandon {
                requests: STEPS.to_vec(),
            }),
        ),
        (
            "edge_load_pages",
            Message::Load(Load {
                slot: 0,
                parts: vec![part(pages)],
                after: u64::MAX,
            }),
        ),
        (
            "edge_load_last_run",
            Message::Load(Load {
                slot: 1 << 63,
                parts: vec![part(PageList::run(PAGE_LAST - 9, 10))],
                after: 0,
            }),
        ),
        (
            "edge_load_no_part",
            Message::Load(Load {
                slot: 1,
                parts: Vec::new(),
                after: 0,
            }),
        ),
        (
            "edge_store_least",
            Message::Store(Store {
                slot: 0,
                parts: vec![PartBody {
                    group: 0,
                    first_page: 0,
                    pages: [0_u32].into_iter().collect::<PageList>().into(),
                    count: 1,
                    priority: None,
                }],
                hash_bytes: 0,
                more_hashes: Vec::new(),
                more_from: 0,
                after: 0,
            }),
        ),
        ("edge_lookup_narrowest", Message::Lookup(lookup(16, 0))),
        (
            "edge_lookup_widest",
            Message::Lookup(lookup(64, NAMESPACE_BYTES_MAX)),
        ),
        (
            "edge_lookup_answer_least",
            Message::LookupAnswer(LookupAnswer::default()),
        ),
        (
            "edge_lookup_answer_most",
            Message::LookupAnswer(LookupAnswer {
                hit_pages: u32::MAX,
                pending: true,
                below_pages: PagesBelow {
                    disk: u32::MAX - 1,
                    remote: 1,
                },
                ready_in_ms: Some(u32::MAX),
                declined_pages: u32::MAX,
            }),
        ),
        (
            "edge_reset_answer_most",
            Message::ResetAnswer(ResetAnswer {
                pages: u32::MAX,
                below_pages: PagesBelow {
                    disk: u32::MAX - 1,
                    remote: 1,
                },
            }),
        ),
        ("edge_reset_everything", Message::Reset(reset(None))),
        (
            "edge_reset_empty_namespace",
            Message::Reset(reset(Some(b""))),
        ),
        (
            "edge_error_longest",
            Message::Error(ErrorBody::new(
                ErrorCode::Internal,
                "\u{e9}".repeat(TEXT_BYTES_MAX / 2),
            )),
        ),
        (
            "edge_welcome_least",
            Message::Welcome(Welcome {
                version: 1,
                heartbeat_ms: 1,
                request_credits: 1,
                byte_credits: 1,
                deadline_max_ms: 1,
                program: String::new(),
                limits: std::collections::BTreeMap::new(),
                features: u64::MAX,
            }),
        ),
        (
            "edge_status_least",
            Message::Status(Status { check: false }),
        ),
        (
            "edge_status_answer_least",
            Message::StatusAnswer(StatusAnswer::default()),
        ),
    ];
    for (name, slot) in [
        ("edge_finish_0", 0),
        ("edge_finish_127", 127),
        ("edge_finish_128", 128),
        ("edge_finish_2_32", 1 << 32),
        ("edge_finish_2_63", 1 << 63),
        ("edge_finish_last", u64::MAX),
    ] {
        named.push((name, Message::Finish(Finish { slot })));
    }
    for (name, role) in [
        ("edge_hello_rank", Role::Rank),
        ("edge_hello_worker", Role::Worker),
        ("edge_hello_admin", Role::Admin),
        ("edge_hello_supervisor", Role::Supervisor),
    ] {
        let hello = Hello {
            rank: u16::MAX,
            replica: u16::MAX,
            ..Hello::new(role, "")
        };
        named.push((name, Message::Hello(hello)));
    }
    named
}
