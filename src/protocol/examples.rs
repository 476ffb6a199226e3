//! Example messages of every kind: the source of the golden vectors.

mod edges;
mod registrations;

use std::collections::BTreeMap;

use crate::body::{
    Abandon, Attach, AttachDepot, Attached, Cancel, CancelStores, DiskHealth, DiskStatus, Empty,
    Ended, ErrorBody, EventKind, EventReason, EventRecord, Events, FEATURE_TIMELINE, Finish, Flush,
    FlushTier, Hello, Invalidate, Invalidated, Inventory, Load, Lookup, Memory, MemoryAnswer,
    MovesStatus, NumberedStore, OpenTiers, PartBody, RankStatus, ReadEvents, ReadInventory,
    Readiness, RecordBody, Register, Registered, RequestsStatus, Reset, ResetPages, StatedMemory,
    Status, StatusAnswer, Store, StoreResult, Stores, StoresAnswer, TierFlushed, TierPages,
    TierStatus, Tiers, TiersAnswer, TransferBody, TransferOrder, Unregister, Welcome, Written,
};
use crate::codec::Message;
use crate::error::ErrorCode;
use crate::role::Role;
use kvferry_types::{
    Anchor, CancelStoresAnswer, DepotId, DomainId, EndedCopy, Epoch, Fingerprint, FlushAnswer,
    FragmentPair, GroupGeometry, GroupId, LoadAnswer, LookupAnswer, PageList, PageRecord,
    PagesBelow, ResetAnswer, StoreAnswer, Stored, TransferId,
};
use registrations::{device_registration, of_two_groups, registration};

/// One message of each kind, with values that show every field, and messages at the limits of their fields. Names are
/// unique.
pub fn examples() -> Vec<(&'static str, Message)> {
    let mut all = of_each_kind();
    all.extend(edges::edges());
    all
}

fn of_each_kind() -> Vec<(&'static str, Message)> {
    let pages = |list: &[u32]| list.iter().copied().collect::<PageList>();
    let gather = FragmentPair {
        src: pages(&[7, 9, 4, 5]),
        dst: PageList::run(96, 4),
    };
    let single = FragmentPair {
        src: pages(&[3]),
        dst: pages(&[200]),
    };
    vec![
        ("hello", Message::Hello(hello())),
        (
            "hello_features",
            Message::Hello(Hello {
                features: FEATURE_TIMELINE,
                ..hello()
            }),
        ),
        (
            "welcome_features",
            Message::Welcome(Welcome {
                version: 2,
                heartbeat_ms: 1000,
                request_credits: 1024,
                byte_credits: 64 << 20,
                deadline_max_ms: 120_000,
                program: String::new(),
                limits: BTreeMap::new(),
                features: FEATURE_TIMELINE,
            }),
        ),
        (
            "welcome",
            Message::Welcome(Welcome {
                version: 2,
                heartbeat_ms: 1000,
                request_credits: 1024,
                byte_credits: 64 << 20,
                deadline_max_ms: 120_000,
                program: "kvferry 0.1.0".into(),
                limits: [("body_bytes", 8 << 20), ("page_hashes", 131_072)]
                    .map(|(name, most)| (name.to_owned(), most))
                    .into(),
                features: 0,
            }),
        ),
        (
            "error",
            Message::Error(ErrorBody::new(
                ErrorCode::UnknownSlot,
                "slot 7 is unknown: look up first",
            )),
        ),
        ("ping", Message::Ping(Empty {})),
        ("pong", Message::Pong(Empty {})),
        (
            "lookup",
            Message::Lookup(Lookup {
                slot: 7,
                namespace: b"tenant".to_vec(),
                hash_bytes: 16,
                hashes: (0..48).collect(),
                have_pages: 1,
                limit_pages: Some(2),
            }),
        ),
        (
            "lookup_answer",
            Message::LookupAnswer(LookupAnswer {
                hit_pages: 2,
                pending: true,
                below_pages: PagesBelow::disk(1),
                ready_in_ms: Some(12),
                declined_pages: 3,
            }),
        ),
        (
            "load",
            Message::Load(Load {
                slot: 7,
                parts: vec![PartBody {
                    group: 0,
                    first_page: 1,
                    pages: pages(&[7, 9, 10]).into(),
                    count: 3,
                    priority: None,
                }],
                after: 0,
            }),
        ),
        (
            "load_after",
            Message::Load(Load {
                slot: 7,
                parts: vec![PartBody {
                    group: 0,
                    first_page: 1,
                    pages: pages(&[7, 9, 10]).into(),
                    count: 3,
                    priority: None,
                }],
                after: 12,
            }),
        ),
        ("load_answer", Message::LoadAnswer(LoadAnswer { pages: 3 })),
        (
            "store",
            Message::Store(Store {
                slot: 7,
                parts: vec![PartBody {
                    group: 0,
                    first_page: 0,
                    pages: pages(&[1, 2, 3, 70_000]).into(),
                    count: 4,
                    priority: None,
                }],
                hash_bytes: 16,
                more_hashes: vec![0xab; 16],
                more_from: 8,
                after: 1,
            }),
        ),
        (
            "store_parts",
            Message::Store(Store {
                slot: 7,
                parts: vec![
                    PartBody {
                        group: 0,
                        first_page: 0,
                        pages: pages(&[1, 2, 3, 4]).into(),
                        count: 4,
                        priority: None,
                    },
                    PartBody {
                        group: 1,
                        first_page: 3,
                        pages: pages(&[9]).into(),
                        count: 1,
                        priority: Some(7),
                    },
                ],
                hash_bytes: 0,
                more_hashes: Vec::new(),
                more_from: 0,
                after: 0,
            }),
        ),
        (
            "store_answer",
            Message::StoreAnswer(StoreAnswer {
                stored_pages: 1,
                present_pages: 2,
                refused_pages: 3,
                failed_pages: 4,
            }),
        ),
        (
            "stores",
            Message::Stores(Stores {
                stores: vec![numbered_store(20, 7), numbered_store(21, 8)],
            }),
        ),
        (
            "stores_answer",
            Message::StoresAnswer(StoresAnswer {
                results: vec![
                    StoreResult {
                        answer: Some(StoreAnswer {
                            stored_pages: 1,
                            present_pages: 0,
                            refused_pages: 0,
                            failed_pages: 0,
                        }),
                        error: None,
                    },
                    StoreResult {
                        answer: None,
                        error: Some(ErrorBody::new(ErrorCode::Busy, "8 stores wait: retry")),
                    },
                ],
            }),
        ),
        ("finish", Message::Finish(Finish { slot: 7 })),
        ("finish_answer", Message::FinishAnswer(Empty {})),
        (
            "reset",
            Message::Reset(Reset {
                which: ResetPages::Hashes,
                namespace: Some(serde_bytes::ByteBuf::from(b"tenant".to_vec())),
                hash_bytes: 16,
                hashes: vec![0xab; 32],
                tier: 3,
            }),
        ),
        (
            "reset_answer",
            Message::ResetAnswer(ResetAnswer {
                pages: 2,
                below_pages: PagesBelow::default(),
            }),
        ),
        ("flush", Message::Flush(Flush {})),
        (
            "flush_answer",
            Message::FlushAnswer(FlushAnswer { pages: 900 }),
        ),
        (
            "read_events",
            Message::ReadEvents(ReadEvents {
                epoch: 3,
                from: 71,
                wait_ms: 5000,
                most: 4096,
                namespace: None,
                cursor: None,
            }),
        ),
        (
            "read_events_begin",
            Message::ReadEvents(ReadEvents {
                most: 4096,
                namespace: Some(b"tenant".to_vec().into()),
                cursor: Some(0),
                ..ReadEvents::default()
            }),
        ),
        ("events", Message::Events(events())),
        (
            "events_lost",
            Message::Events(Events {
                epoch: 3,
                next: 71,
                lost: true,
                hash_bytes: 16,
                records: Vec::new(),
                cursor: Some(2 << 32 | 9),
            }),
        ),
        (
            "cancel_stores",
            Message::CancelStores(CancelStores { slot: Some(7) }),
        ),
        (
            "cancel_stores_all",
            Message::CancelStores(CancelStores { slot: None }),
        ),
        (
            "cancel_stores_answer",
            Message::CancelStoresAnswer(CancelStoresAnswer { stores: 2 }),
        ),
        (
            "register",
            Message::Register(Register {
                abandoned_through: 0,
                engine: [1; 16],
                registration: registration(),
                check_only: false,
            }),
        ),
        (
            "register_group",
            Message::Register(Register {
                abandoned_through: 0,
                engine: [1; 16],
                check_only: true,
                registration: of_two_groups(),
            }),
        ),
        (
            "register_device",
            Message::Register(Register {
                abandoned_through: 0,
                engine: [1; 16],
                registration: device_registration(),
                check_only: false,
            }),
        ),
        (
            "registered",
            Message::Registered(Registered {
                arena_pages: 4096,
                page_bytes: 4096,
                not_served: String::new(),
            }),
        ),
        (
            "registered_not_served",
            Message::Registered(Registered {
                arena_pages: 0,
                page_bytes: 4096,
                not_served: "group 1 has layers with a sliding window, which are not served yet"
                    .to_owned(),
            }),
        ),
        (
            "written",
            Message::Written(Written {
                through: 12,
                timeline: false,
            }),
        ),
        (
            "written_timeline",
            Message::Written(Written {
                through: 12,
                timeline: true,
            }),
        ),
        ("written_answer", Message::WrittenAnswer(Empty {})),
        (
            "abandon",
            Message::Abandon(Abandon {
                requests: vec![12, 14],
            }),
        ),
        ("abandon_answer", Message::AbandonAnswer(Empty {})),
        ("unregister", Message::Unregister(Unregister {})),
        ("unregistered", Message::Unregistered(Empty {})),
        (
            "attach",
            Message::Attach(Attach {
                replica: 0,
                rank: 1,
                ranks: 2,
                kv_shards: 2,
                attach: 2,
                depots: vec![AttachDepot {
                    tier: 2,
                    depot: [8; 16],
                    epoch: 6,
                }],
            }),
        ),
        (
            "attached",
            Message::Attached(Attached {
                attach: 2,
                after: 39,
            }),
        ),
        (
            "memory",
            Message::Memory(Memory {
                number: 3,
                memory: Some(StatedMemory {
                    engine: [1; 16],
                    geometry: GroupGeometry {
                        group: GroupId(0),
                        engine_page_tokens: 16,
                        layers: 2,
                        page_bytes: 4096,
                        device_pages: 1024,
                        content_digest: [10; 16],
                        layout_fingerprint: [9; 16],
                        ..GroupGeometry::default()
                    }
                    .into(),
                    arena_pages: vec![TierPages {
                        tier: 2,
                        pages: 4096,
                    }],
                }),
            }),
        ),
        (
            "memory_without",
            Message::Memory(Memory {
                number: 4,
                memory: None,
            }),
        ),
        (
            "memory_answer",
            Message::MemoryAnswer(MemoryAnswer {
                number: 3,
                after: 39,
            }),
        ),
        (
            "tiers",
            Message::Tiers(Tiers {
                number: 5,
                page_bytes: 65_536,
                layout_fingerprint: [9; 16],
                pages: vec![TierPages {
                    tier: 3,
                    pages: 8192,
                }],
            }),
        ),
        (
            "tiers_answer",
            Message::TiersAnswer(TiersAnswer { number: 5 }),
        ),
        (
            "open_tiers",
            Message::OpenTiers(OpenTiers {
                page_bytes: 65_536,
                layout_fingerprint: [9; 16],
            }),
        ),
        ("open_tiers_answer", Message::OpenTiersAnswer(Empty {})),
        (
            "transfer",
            Message::Transfer(TransferOrder {
                from: 1,
                to: 2,
                engine: Some([1; 16]),
                request: 11,
                after: 11,
                group: 0,
                page_bytes: 65_536,
                transfers: vec![
                    TransferBody {
                        id: 40,
                        pairs: vec![gather].into(),
                        record: Some(RecordBody {
                            anchor: [2; 16],
                            domain: [4; 16],
                            block_start: 96,
                            first: 0,
                            phase: 0,
                            transfer: 40,
                            fingerprints: vec![6; 64],
                        }),
                    },
                    TransferBody {
                        id: 41,
                        pairs: vec![single].into(),
                        record: None,
                    },
                ],
            }),
        ),
        (
            "ended",
            Message::Ended(Ended {
                rank: 1,
                copies: vec![
                    EndedCopy {
                        bytes: 16_384,
                        copy_us: 12,
                        ..EndedCopy::complete(TransferId(40))
                    },
                    EndedCopy::failed(TransferId(41)),
                ],
            }),
        ),
        (
            "cancel",
            Message::Cancel(Cancel {
                transfers: vec![40, 41],
            }),
        ),
        (
            "invalidate",
            Message::Invalidate(Invalidate {
                reset: 3,
                namespace: vec![4; 8],
                fingerprints: vec![6; 32],
                through: 17,
                tier: 3,
            }),
        ),
        (
            "invalidated",
            Message::Invalidated(Invalidated { reset: 3 }),
        ),
        (
            "flush_tier",
            Message::FlushTier(FlushTier { flush: 5, tier: 3 }),
        ),
        (
            "tier_flushed",
            Message::TierFlushed(TierFlushed { flush: 5 }),
        ),
        (
            "read_inventory",
            Message::ReadInventory(ReadInventory {
                depot: [8; 16],
                page_bytes: 4096,
                read_id: 2,
                from: 64,
            }),
        ),
        ("inventory", Message::Inventory(inventory())),
        (
            "readiness",
            Message::Readiness(Readiness {
                ready_bytes: 64 << 20,
                bytes: 8 << 30,
                pinned_bytes: None,
                problem: "not enough memory".to_owned(),
                disk: None,
            }),
        ),
        (
            "readiness_pinned",
            Message::Readiness(Readiness {
                ready_bytes: 8 << 30,
                bytes: 8 << 30,
                pinned_bytes: Some(1 << 30),
                problem: String::new(),
                disk: Some(Box::new(DiskStatus {
                    bad_reads: 4,
                    ..disk_status()
                })),
            }),
        ),
        ("readiness_answer", Message::ReadinessAnswer(Empty {})),
        ("status", Message::Status(Status { check: true })),
        ("status_answer", Message::StatusAnswer(status_answer())),
        (
            "status_answer_slow_disk",
            Message::StatusAnswer(slow_disk()),
        ),
    ]
}

fn inventory() -> Inventory {
    let page = PageRecord {
        page: 70,
        anchor: Anchor(1),
        domain: DomainId(2),
        block_start: 68,
        index: 2,
        phase: 5,
        stored: Stored {
            epoch: Epoch(3),
            transfer: TransferId(40),
        },
        fingerprint: Fingerprint(6),
    };
    let requested = ReadInventory {
        depot: DepotId(7).0.to_be_bytes(),
        page_bytes: 4096,
        read_id: 2,
        from: 64,
    };
    Inventory::new(&requested, Some(128), &[page])
}

fn events() -> Events {
    let stored = EventRecord {
        event: EventKind::Stored,
        tier: 3,
        namespace: vec![0xa1; 8],
        layout: vec![0xb2; 7],
        group: 1,
        place: 640,
        hashes: (0..32).collect(),
        why: None,
    };
    let gone = EventRecord {
        event: EventKind::Gone,
        tier: 2,
        group: 0,
        place: 7,
        hashes: (16..32).collect(),
        why: Some(EventReason::Evicted),
        ..stored.clone()
    };
    let cleared = EventRecord {
        event: EventKind::Cleared,
        tier: 2,
        ..EventRecord::default()
    };
    Events {
        epoch: 3,
        next: 74,
        lost: false,
        hash_bytes: 16,
        records: vec![stored, gone, cleared],
        cursor: None,
    }
}

fn hello() -> Hello {
    Hello {
        version_min: 1,
        version_max: 2,
        role: Role::Engine,
        engine: [1; 16],
        rank: 0,
        name: "example".to_owned(),
        replica: 0,
        features: 0,
    }
}

fn disk_status() -> DiskStatus {
    DiskStatus {
        health: DiskHealth::ReadOnly,
        reason: "cannot write: Read-only file system (os error 30)".to_owned(),
        used_bytes: 1 << 30,
        cap_bytes: 4 << 30,
        listed_pages: 500,
        durable_pages: 480,
        written_bytes: 7 << 30,
        day_written_bytes: 2 << 30,
        scrubbed_pages: 1000,
        bad_pages: 3,
        unreadable_pages: 2,
        quarantined_pages: 1,
        bad_reads: 0,
    }
}

/// Blocks left host memory before the disk took them, and what it has was found to have changed.
fn slow_disk() -> StatusAnswer {
    let status = status_answer();
    let ranks = status.ranks.into_iter().map(|rank| RankStatus {
        disk: rank.disk.map(|disk| {
            Box::new(DiskStatus {
                bad_reads: 4,
                ..*disk
            })
        }),
        ..rank
    });
    StatusAnswer {
        ranks: ranks.collect(),
        moves: status
            .moves
            .map(|moves| Box::new(MovesStatus { gone: 6, ..*moves })),
        ..status_answer()
    }
}

fn numbered_store(id: u64, slot: u64) -> NumberedStore {
    NumberedStore {
        id,
        deadline_ms: 30_000,
        store: Store {
            slot,
            parts: vec![PartBody {
                group: 0,
                first_page: 8,
                pages: PageList::run(12, 8).into(),
                count: 8,
                priority: None,
            }],
            hash_bytes: 0,
            more_hashes: Vec::new(),
            more_from: 0,
            after: 0,
        },
    }
}

fn status_answer() -> StatusAnswer {
    StatusAnswer {
        version: "0.1.0".to_owned(),
        epoch: 3,
        ready: true,
        draining: false,
        ratio: 32,
        hash_tokens: 16,
        ranks: vec![RankStatus {
            rank: 0,
            attached: true,
            pid: 4711,
            replica: 0,
            stores: 1,
            loads: 2,
            host_ready_bytes: 8 << 30,
            host_bytes: 8 << 30,
            host_pinned_bytes: None,
            problem: String::new(),
            connected: None,
            disk: Some(Box::new(disk_status())),
        }],
        slots: 1,
        pins: 2,
        copies_under_way: 3,
        requests: Box::new(RequestsStatus {
            storing_pages: 40,
            loading_pages: 8,
            engines: 1,
            open_requests: 4,
            open_loads: 1,
            open_stores: 2,
            parked_requests: 0,
        }),
        counters: [("stored".to_owned(), 6)].into(),
        tiers: vec![TierStatus {
            tier: 3,
            pages: 7,
            used_pages: 6,
            blocks: 2,
            hit_pages: 4,
            lookup_pages: 9,
            evicted_pages: 1,
            quarantined_pages: 1,
            page_states: [("ready".to_owned(), 6)].into(),
        }],
        moves: Some(Box::new(MovesStatus {
            under_way: 1,
            waiting: 2,
            ordered: 3,
            pages: 90,
            left_out: 4,
            bad_sources: 5,
            gone: 0,
        })),
        decisions_digest: Some("blake3:00".to_owned()),
        contradiction: Some(String::new()),
        restarts: Vec::new(),
    }
}
