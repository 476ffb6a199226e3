//! Example messages of the requests of operators and supervisors.

use std::collections::BTreeMap;

use crate::body::{
    Connections, Drain, DrainAnswer, Durations, EdgeMeasure, GroupHits, Measure, MeasureAnswer,
    NamespaceMeasure, Probe, ProbeAnswer, SetLog, SetLogAnswer, StoredPages, WorkerGone,
    WorkerGoneAnswer,
};
use crate::codec::Message;

/// See [`examples`](crate::examples()).
pub(crate) fn examples() -> Vec<(&'static str, Message)> {
    vec![
        ("measure", Message::Measure(Measure {})),
        ("measure_answer", Message::MeasureAnswer(of_leader())),
        (
            "measure_answer_of_worker",
            Message::MeasureAnswer(of_worker()),
        ),
        ("probe", Message::Probe(Probe {})),
        (
            "probe_answer",
            Message::ProbeAnswer(ProbeAnswer {
                tiers: 2,
                copied_bytes: 4096,
                draining: true,
            }),
        ),
        ("drain", Message::Drain(Drain { resume: true })),
        (
            "drain_answer",
            Message::DrainAnswer(DrainAnswer {
                drained: false,
                loads: 1,
                stores: 2,
                transfers: 3,
            }),
        ),
        (
            "set_log",
            Message::SetLog(SetLog {
                filter: "info,kvferry=debug".to_owned(),
            }),
        ),
        (
            "set_log_answer",
            Message::SetLogAnswer(SetLogAnswer {
                before: "info".to_owned(),
            }),
        ),
        ("worker_gone", Message::WorkerGone(WorkerGone {})),
        (
            "worker_gone_answer",
            Message::WorkerGoneAnswer(WorkerGoneAnswer { gone: true }),
        ),
    ]
}

fn of_leader() -> MeasureAnswer {
    MeasureAnswer {
        connections: Connections {
            engines: 1,
            ranks: 0,
            workers: 2,
            admins: 3,
            strangers: 4,
            open_requests: 5,
            open_bytes: 600,
            malformed_messages: 7,
            refused_handshakes: 8,
            refused_hellos: 9,
            repeated_requests: 12,
            refused_messages: [("malformed".to_owned(), 11)].into(),
            errors: [("busy".to_owned(), 10)].into(),
        },
        hits: vec![GroupHits {
            tier: 3,
            group: 1,
            tokens: 320,
        }],
        edges: Vec::new(),
        refused_orders: BTreeMap::new(),
        namespaces: vec![NamespaceMeasure {
            entry: 2,
            held_pages: 30,
            held_pages_max: Some(400),
            stored: vec![StoredPages {
                tier: 2,
                pages: 5000,
                pages_max: 60000,
            }],
        }],
        draining: true,
    }
}

fn of_worker() -> MeasureAnswer {
    MeasureAnswer {
        edges: vec![EdgeMeasure {
            from: 1,
            to: 2,
            complete: 11,
            incomplete: 1,
            bytes: 1200,
            waiting: 2,
            queued: 3,
            running: 4,
            queue: Durations {
                counts: vec![1, 0, 11],
                sum_us: 4000,
            },
            copy: Durations {
                counts: vec![12],
                sum_us: 500,
            },
        }],
        refused_orders: [("stale_epoch".to_owned(), 13)].into(),
        ..MeasureAnswer::default()
    }
}
