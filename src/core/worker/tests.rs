use super::*;
use kvferry_types::{
    DeviceEnd, Direction, Edge, FragmentPair, GroupId, PageList, PerTier, TierId, User,
};

mod meters;
mod pace;

const ENGINE: EngineId = EngineId([1; 16]);
const PAGE_BYTES: u64 = 4096;

fn bounds() -> MemoryBounds {
    let group = GroupBounds {
        device_pages: 64,
        page_bytes: PAGE_BYTES,
    };
    MemoryBounds {
        groups: vec![group],
    }
}

/// Pages of the depots that the worker reaches.
fn arena_pages() -> PerTier<u32> {
    [(TierId::Host, 32), (TierId::Disk, 64)]
        .into_iter()
        .collect()
}

const FENCE_NS: u64 = 10_000_000_000;

fn copy(id: u64, direction: Direction, request: u64) -> Transfer {
    let pair = FragmentPair {
        src: PageList::run(0, 1),
        dst: PageList::run(0, 1),
    };
    let (edge, after) = match direction {
        Direction::Store => (Edge::STORE, RequestId(request)),
        Direction::Load => (Edge::LOAD, RequestId(0)),
    };
    let device = DeviceEnd {
        group: GroupId(0),
        engine: ENGINE,
        request: RequestId(request),
        after,
    };
    Transfer {
        id: TransferId(id),
        edge,
        device: Some(device),
        page_bytes: PAGE_BYTES,
        pairs: vec![pair],
        record: None,
        deadline: Time(100),
    }
}

/// The transfer, to start once everything up to `after` is written.
fn after(after: u64, transfer: Transfer) -> Transfer {
    let device = transfer.device.map(|device| DeviceEnd {
        after: RequestId(after),
        ..device
    });
    Transfer { device, ..transfer }
}

/// A move from host memory to the disk.
fn between(id: u64) -> Transfer {
    let edge = Edge {
        from: TierId::Host,
        to: TierId::Disk,
    };
    Transfer {
        edge,
        device: None,
        ..store(id, 0)
    }
}

fn load(transfer: u64) -> Transfer {
    copy(transfer, Direction::Load, 1)
}

fn store(transfer: u64, request: u64) -> Transfer {
    copy(transfer, Direction::Store, request)
}

fn step(worker: &mut Worker, now: u64, event: WorkerEvent) -> Vec<WorkerEffect> {
    let mut effects = Vec::new();
    worker.step(Time(now), event, &mut effects);
    worker.check().expect("the second count agrees");
    effects
}

/// A worker with depot, leader and engine that accepts orders.
fn worker() -> Worker {
    serving(WorkerSettings::new(2))
}

/// The same with other settings.
fn serving(settings: WorkerSettings) -> Worker {
    let mut worker = Worker::new(settings);
    step(&mut worker, 0, WorkerEvent::DepotReady);
    let after = RequestId(0);
    let registered = WorkerEvent::Registered {
        engine: ENGINE,
        abandoned_through: after,
        bounds: bounds(),
    };
    step(&mut worker, 0, registered);
    find(&mut worker, 1, 1);
    worker
}

/// Connects the leader of `epoch`, which then admits the worker.
fn find(worker: &mut Worker, epoch: u64, attach: u64) {
    let effects = step(worker, 0, WorkerEvent::LeaderFound(Epoch(epoch)));
    assert!(effects.contains(&attaches(attach)), "{effects:?}");
    admit(worker, 0, attach, 0);
}

/// The attach request of this number.
fn attaches(attach: u64) -> WorkerEffect {
    let attach = AttachId(attach);
    WorkerEffect::Attach { attach }
}

/// The statement of the memory of this number.
fn states(number: u64) -> WorkerEffect {
    let number = MemoryId(number);
    WorkerEffect::StateMemory { number }
}

/// The leader admits the worker: it carries out no order up to `after`. If the worker then states its memory, that is
/// admitted, too. Returns what follows.
fn admit(worker: &mut Worker, now: u64, attach: u64, after: u64) -> Vec<WorkerEffect> {
    let (attach, admitted_after) = (AttachId(attach), Some(TransferId(after)));
    let admitted = WorkerEvent::Admitted {
        attach,
        after: admitted_after,
    };
    match &step(worker, now, admitted)[..] {
        [WorkerEffect::StateMemory { number }] => admit_memory(worker, now, number.0, after),
        effects => effects.to_vec(),
    }
}

/// The leader admits the memory of a statement.
fn admit_memory(worker: &mut Worker, now: u64, number: u64, after: u64) -> Vec<WorkerEffect> {
    let (number, after) = (MemoryId(number), Some(TransferId(after)));
    step(worker, now, WorkerEvent::MemoryAdmitted { number, after })
}

fn register(
    worker: &mut Worker,
    now: u64,
    engine: EngineId,
    after: RequestId,
) -> Vec<WorkerEffect> {
    let bounds = bounds();
    let registered = WorkerEvent::Registered {
        engine,
        abandoned_through: after,
        bounds,
    };
    step(worker, now, registered)
}

fn order(
    worker: &mut Worker,
    epoch: u64,
    batch: u64,
    transfers: Vec<Transfer>,
) -> Vec<WorkerEffect> {
    let (epoch, batch) = (Epoch(epoch), BatchId(batch));
    step(
        worker,
        0,
        WorkerEvent::Ordered {
            epoch,
            batch,
            transfers,
            arena_pages: arena_pages(),
        },
    )
}

fn cancel(worker: &mut Worker, batch: u64, transfer: u64) -> Vec<WorkerEffect> {
    let cancel = WorkerEvent::Cancel {
        epoch: Epoch(1),
        batch: BatchId(batch),
        transfers: vec![TransferId(transfer)],
    };
    step(worker, 0, cancel)
}

fn written(worker: &mut Worker, through: u64) -> Vec<WorkerEffect> {
    let through = RequestId(through);
    let engine = ENGINE;
    step(worker, 0, WorkerEvent::Written { engine, through })
}

fn stale(order: u64, followed: u64) -> WorkerEffect {
    WorkerEffect::Refuse(OrderRefusal::StaleEpoch {
        order: Epoch(order),
        followed: Epoch(followed),
    })
}

fn complete(transfer: u64) -> EndedCopy {
    EndedCopy {
        bytes: 1,
        copy_us: 1,
        ..EndedCopy::complete(TransferId(transfer))
    }
}

fn ended(worker: &mut Worker, now: u64, copies: Vec<EndedCopy>) -> Vec<WorkerEffect> {
    step(worker, now, WorkerEvent::CopiesEnded(copies))
}

fn report(batch: u64, copies: Vec<EndedCopy>) -> WorkerEffect {
    let batch = BatchId(batch);
    WorkerEffect::Report { batch, copies }
}

fn start_of(copy: Transfer) -> WorkerEffect {
    WorkerEffect::Start {
        edge: copy.edge,
        copies: vec![copy],
    }
}

fn starts(effects: &[WorkerEffect]) -> Vec<u64> {
    let started = effects.iter().filter_map(|effect| match effect {
        WorkerEffect::Start { copies, .. } => Some(copies),
        _ => None,
    });
    started.flatten().map(|copy| copy.id.0).collect()
}

#[test]
fn a_store_reads_nothing_before_it_is_written_and_unlists_before_it_writes() {
    let mut worker = worker();
    assert_eq!(order(&mut worker, 1, 1, vec![store(1, 5)]), []);
    assert_eq!(written(&mut worker, 4), []);
    let out = WorkerEffect::Unlist {
        tier: TierId::Host,
        run: PageRun { start: 0, count: 1 },
    };
    let start = start_of(store(1, 5));
    assert_eq!(written(&mut worker, 5), [out, start]);
}

#[test]
fn an_order_is_reported_once_when_all_of_it_has_ended() {
    let mut worker = worker();
    order(&mut worker, 1, 1, vec![load(1), load(2)]);
    assert_eq!(ended(&mut worker, 0, vec![complete(2)]), []);
    let effects = ended(&mut worker, 0, vec![complete(1), complete(1)]);
    assert_eq!(effects, [report(1, vec![complete(2), complete(1)])]);
    assert_eq!(worker.open_copies(), 0);
}

#[test]
fn a_repeated_order_is_reported_again_and_not_carried_out() {
    let mut worker = worker();
    order(&mut worker, 1, 1, vec![load(1)]);
    assert_eq!(order(&mut worker, 1, 1, vec![load(1)]), []);
    ended(&mut worker, 0, vec![complete(1)]);
    let effects = order(&mut worker, 1, 1, vec![load(1)]);
    assert_eq!(effects, [report(1, vec![complete(1)])]);
}

#[test]
fn an_order_after_its_own_cancel_is_not_carried_out() {
    let mut worker = worker();
    assert_eq!(
        cancel(&mut worker, 8, 1),
        [report(8, vec![refused(TransferId(1))])]
    );
    let effects = order(&mut worker, 1, 9, vec![load(1)]);
    assert_eq!(effects, [report(9, vec![refused(TransferId(1))])]);
}

#[test]
fn a_cancel_reports_ended_copies_and_stops_the_others() {
    let mut worker = worker();
    order(&mut worker, 1, 1, vec![load(1), load(2)]);
    ended(&mut worker, 0, vec![complete(1)]);
    assert_eq!(cancel(&mut worker, 8, 1), [report(8, vec![complete(1)])]);
    let effects = cancel(&mut worker, 9, 2);
    assert_eq!(
        effects,
        [WorkerEffect::Stop(TransferId(2)), report(9, vec![])]
    );
    assert_eq!(cancel(&mut worker, 10, 2), [report(10, vec![])]);
}

#[test]
fn a_copy_that_ended_too_long_ago_is_refused() {
    let mut worker = worker();
    let all = WORKER_ENDED_MAX as u64 + 1;
    for transfer in 1..=all {
        order(&mut worker, 1, transfer, vec![load(transfer)]);
        ended(&mut worker, 0, vec![complete(transfer)]);
    }
    assert_eq!(worker.orders.remembered(), WORKER_ENDED_MAX);
    let effects = order(&mut worker, 1, all + 1, vec![load(1)]);
    assert_eq!(effects, [report(all + 1, vec![refused(TransferId(1))])]);
}

#[test]
fn no_more_copies_run_than_the_limit() {
    let mut worker = worker();
    let effects = order(&mut worker, 1, 1, (1..=3).map(load).collect());
    assert_eq!(starts(&effects), [1, 2]);
    assert_eq!(starts(&ended(&mut worker, 0, vec![complete(1)])), [3]);
}

#[test]
fn a_late_copy_is_stopped_and_reported_only_when_it_has_ended() {
    let mut worker = worker();
    order(&mut worker, 1, 1, vec![load(1)]);
    let effects = step(&mut worker, 100, WorkerEvent::Tick);
    assert_eq!(effects, [WorkerEffect::Stop(TransferId(1))]);
    let effects = ended(&mut worker, 101, vec![refused(TransferId(1))]);
    assert_eq!(effects, [report(1, vec![refused(TransferId(1))])]);
}

#[test]
fn a_store_that_ends_late_or_stopped_is_incomplete() {
    for (now, stop) in [(101, false), (50, true)] {
        let mut worker = worker();
        order(&mut worker, 1, 1, vec![store(1, 1)]);
        written(&mut worker, 1);
        if stop {
            cancel(&mut worker, 2, 1);
        }
        let effects = ended(&mut worker, now, vec![complete(1)]);
        let late = EndedCopy {
            complete: false,
            ..complete(1)
        };
        assert_eq!(effects, [report(1, vec![late])]);
    }
}

#[test]
fn a_store_is_listed_before_its_end_is_reported() {
    let mut worker = worker();
    let record = Record {
        anchor: kvferry_types::Anchor(1),
        domain: kvferry_types::DomainId(2),
        block_start: 0,
        first: 0,
        phase: 0,
        stored: kvferry_types::Stored::default(),
        fingerprints: vec![kvferry_types::Fingerprint(3)],
    };
    let copy = Transfer {
        record: Some(record.clone()),
        ..store(1, 1)
    };
    order(&mut worker, 1, 1, vec![copy]);
    written(&mut worker, 1);
    let effects = ended(&mut worker, 0, vec![complete(1)]);
    assert_eq!(
        effects,
        [
            WorkerEffect::List {
                tier: TierId::Host,
                record
            },
            report(1, vec![complete(1)])
        ]
    );
}

#[test]
fn a_copy_that_does_not_stop_ends_the_worker() {
    let mut worker = worker();
    order(&mut worker, 1, 1, vec![load(1)]);
    step(&mut worker, 100, WorkerEvent::Tick);
    assert_eq!(worker.next_timeout(), Some(Time(100 + FENCE_NS)));
    assert_eq!(step(&mut worker, 99 + FENCE_NS, WorkerEvent::Tick), []);
    let effects = step(&mut worker, 100 + FENCE_NS, WorkerEvent::Tick);
    assert_eq!(effects, [WorkerEffect::ExitProcess]);
}

#[test]
fn a_waiting_copy_ends_at_its_deadline() {
    let mut worker = worker();
    order(&mut worker, 1, 1, vec![store(1, 5)]);
    let effects = step(&mut worker, 100, WorkerEvent::Tick);
    assert_eq!(effects, [report(1, vec![refused(TransferId(1))])]);
}

#[test]
fn a_new_leader_receives_no_report_of_old_orders_and_no_attach_before_they_have_ended() {
    let mut worker = worker();
    order(&mut worker, 1, 1, vec![load(1), store(2, 5)]);
    let effects = step(&mut worker, 1, WorkerEvent::LeaderFound(Epoch(2)));
    assert_eq!(effects, [WorkerEffect::Stop(TransferId(1))]);
    assert_eq!(
        order(&mut worker, 1, 2, vec![load(3)]),
        [stale(1, 2)],
        "an old order"
    );
    assert_eq!(
        order(&mut worker, 2, 2, vec![load(3)]),
        [report(2, vec![refused(TransferId(3))])],
        "before it was admitted"
    );
    let effects = ended(&mut worker, 2, vec![complete(1)]);
    assert_eq!(effects, [attaches(2)]);
    admit(&mut worker, 3, 2, 7);
    assert_eq!(
        order(&mut worker, 2, 2, vec![load(7)]),
        [report(2, vec![refused(TransferId(7))])]
    );
    assert_eq!(starts(&order(&mut worker, 2, 3, vec![load(8)])), [8]);
}

#[test]
fn copies_without_registered_memory_are_refused() {
    let mut worker = worker();
    step(&mut worker, 0, WorkerEvent::MemoryGone(ENGINE));
    assert_eq!(admit_memory(&mut worker, 0, 2, 0), []);
    let effects = order(&mut worker, 1, 1, vec![load(1)]);
    assert_eq!(effects, [report(1, vec![refused(TransferId(1))])]);
}

#[test]
fn an_abandoned_request_is_over_when_the_abandon_is_answered() {
    let mut worker = worker();
    order(&mut worker, 1, 1, vec![store(1, 3), store(2, 4)]);
    written(&mut worker, 3);
    let abandon = |requests: &[u64]| WorkerEvent::Abandon {
        engine: ENGINE,
        user: User::Own,
        number: 9,
        requests: requests.iter().copied().map(RequestId).collect(),
    };
    let effects = step(&mut worker, 1, abandon(&[3, 4, 5]));
    assert_eq!(
        effects,
        [WorkerEffect::Stop(TransferId(1))],
        "one copy runs"
    );
    assert_eq!(step(&mut worker, 1, abandon(&[3, 4, 5])), [], "asked again");
    let late = EndedCopy {
        complete: false,
        ..complete(1)
    };
    let effects = ended(&mut worker, 2, vec![complete(1)]);
    let copies = vec![refused(TransferId(2)), late];
    assert_eq!(
        effects,
        [report(1, copies), WorkerEffect::Abandoned { number: 9 }]
    );
    let effects = order(&mut worker, 1, 2, vec![store(3, 5)]);
    assert_eq!(
        effects,
        [report(2, vec![refused(TransferId(3))])],
        "ordered afterwards"
    );
}

#[test]
fn an_abandon_is_answered_when_the_last_copy_has_ended() {
    let mut worker = worker();
    let copies = [(1, 5), (2, 5), (3, 6)]
        .map(|(transfer, request)| copy(transfer, Direction::Load, request));
    order(&mut worker, 1, 1, copies.to_vec());
    let (engine, number) = (ENGINE, 9);
    let requests = BTreeSet::from([RequestId(5)]);
    let abandon = WorkerEvent::Abandon {
        engine,
        user: User::Own,
        number,
        requests,
    };
    let effects = step(&mut worker, 1, abandon);
    let stops = effects.iter().filter_map(|effect| match effect {
        WorkerEffect::Stop(transfer) => Some(transfer.0),
        _ => None,
    });
    assert_eq!(
        stops.collect::<Vec<u64>>(),
        [1, 2],
        "3 is of another request"
    );
    let received =
        |effects: Vec<WorkerEffect>| effects.contains(&WorkerEffect::Abandoned { number });
    assert!(!received(effects));
    assert!(!received(ended(&mut worker, 2, vec![complete(2)])));
    assert!(received(ended(&mut worker, 3, vec![complete(1)])));
    assert!(!received(ended(&mut worker, 4, vec![complete(3)])), "once");
}

#[test]
fn a_running_copy_is_not_started_by_another_order() {
    let mut worker = worker();
    assert_eq!(starts(&order(&mut worker, 1, 1, vec![load(7)])), [7]);
    assert_eq!(
        order(&mut worker, 1, 2, vec![load(7)]),
        [report(2, Vec::new())],
        "it has not ended: its end is not reported"
    );
    assert_eq!(
        order(&mut worker, 1, 3, Vec::new()),
        [report(3, Vec::new())]
    );
    let effects = ended(&mut worker, 2, vec![complete(7)]);
    assert_eq!(effects, [report(1, vec![complete(7)])]);
}

#[test]
fn a_cancel_of_another_epoch_stops_nothing() {
    let mut worker = worker();
    order(&mut worker, 1, 1, vec![load(7)]);
    let cancel = |epoch| WorkerEvent::Cancel {
        epoch: Epoch(epoch),
        batch: BatchId(2),
        transfers: vec![TransferId(7)],
    };
    assert_eq!(step(&mut worker, 1, cancel(2)), [stale(2, 1)]);
    let effects = step(&mut worker, 1, cancel(1));
    assert_eq!(
        effects,
        [WorkerEffect::Stop(TransferId(7)), report(2, Vec::new())]
    );
}

#[test]
fn requests_from_before_a_registration_are_over() {
    let mut worker = Worker::new(WorkerSettings::new(2));
    step(&mut worker, 0, WorkerEvent::DepotReady);
    let (engine, after) = (ENGINE, RequestId(4));
    register(&mut worker, 0, engine, after);
    find(&mut worker, 1, 1);
    let effects = order(&mut worker, 1, 1, vec![store(1, 4)]);
    assert_eq!(effects, [report(1, vec![refused(TransferId(1))])]);
    order(&mut worker, 1, 2, vec![store(2, 5)]);
    assert_eq!(starts(&written(&mut worker, 5)), [2]);
}

#[test]
fn abandoned_requests_are_remembered_within_a_limit() {
    let mut worker = worker();
    let requests: BTreeSet<RequestId> = (10..=10 + WORKER_ABANDONED_MAX as u64)
        .map(RequestId)
        .collect();
    let (engine, number) = (ENGINE, 1);
    let abandon = WorkerEvent::Abandon {
        engine,
        user: User::Own,
        number,
        requests,
    };
    assert_eq!(
        step(&mut worker, 0, abandon),
        [WorkerEffect::Abandoned { number }]
    );
    let effects = order(&mut worker, 1, 1, vec![store(1, 10)]);
    assert_eq!(effects, [report(1, vec![refused(TransferId(1))])]);
}

#[test]
fn as_many_abandoned_requests_as_the_limit_are_remembered_one_by_one() {
    let mut worker = worker();
    let abandon = |requests: std::ops::Range<u64>| WorkerEvent::Abandon {
        engine: ENGINE,
        user: User::Own,
        number: 1,
        requests: requests.map(RequestId).collect(),
    };
    step(
        &mut worker,
        0,
        abandon(10..10 + WORKER_ABANDONED_MAX as u64),
    );
    let older = |transfer| copy(transfer, Direction::Load, 8);
    assert_eq!(starts(&order(&mut worker, 1, 1, vec![older(1)])), [1]);
    step(&mut worker, 0, abandon(9..10));
    let effects = order(&mut worker, 1, 2, vec![older(2)]);
    assert_eq!(effects, [report(2, vec![refused(TransferId(2))])]);
}

#[test]
fn requests_older_than_an_abandoned_one_are_still_copied() {
    let mut worker = worker();
    let (engine, number) = (ENGINE, 1);
    let requests = BTreeSet::from([RequestId(5)]);
    let abandon = WorkerEvent::Abandon {
        engine,
        user: User::Own,
        number,
        requests,
    };
    step(&mut worker, 0, abandon);
    let late = copy(1, Direction::Load, 5);
    let effects = order(&mut worker, 1, 1, vec![late]);
    assert_eq!(effects, [report(1, vec![refused(TransferId(1))])]);
    let other = copy(2, Direction::Load, 4);
    assert_eq!(starts(&order(&mut worker, 1, 2, vec![other])), [2]);
}

#[test]
fn the_end_of_an_old_copy_is_not_reported_for_a_new_copy_with_its_number() {
    let mut worker = worker();
    order(&mut worker, 1, 1, vec![load(7)]);
    step(&mut worker, 1, WorkerEvent::LeaderFound(Epoch(2)));
    ended(&mut worker, 2, vec![complete(7)]);
    admit(&mut worker, 3, 2, 6);
    assert_eq!(starts(&order(&mut worker, 2, 1, vec![load(7)])), [7]);
}

#[test]
fn a_load_starts_at_once_however_many_stores_run_and_wait() {
    let mut worker = worker();
    let stores = (1..=100).map(|transfer| store(transfer, 1)).collect();
    order(&mut worker, 1, 1, stores);
    assert_eq!(
        starts(&written(&mut worker, 1)),
        [1, 2],
        "places for stores"
    );
    let loads = (201..=203).map(load).collect();
    assert_eq!(starts(&order(&mut worker, 1, 2, loads)), [201, 202]);
    assert_eq!(starts(&ended(&mut worker, 0, vec![complete(1)])), [3]);
    assert_eq!(starts(&ended(&mut worker, 0, vec![complete(202)])), [203]);
}

#[test]
fn a_queue_does_not_grow_by_copies_that_were_stopped_in_it() {
    let mut worker = worker();
    order(&mut worker, 1, 1, vec![load(1), load(2)]);
    for transfer in 3..3000 {
        order(&mut worker, 1, transfer, vec![load(transfer)]);
        cancel(&mut worker, 10_000 + transfer, transfer);
    }
    let queued = worker.copies.queue_len(Edge::LOAD);
    assert!(queued < 100, "{queued} copies that are over");
    order(&mut worker, 1, 3000, vec![load(3000)]);
    assert_eq!(starts(&ended(&mut worker, 0, vec![complete(1)])), [3000]);
}

#[test]
fn an_order_before_the_admission_of_the_worker_is_refused_permanently() {
    let mut worker = worker();
    step(&mut worker, 1, WorkerEvent::LeaderFound(Epoch(2)));
    let refusal = [report(5, vec![refused(TransferId(9))])];
    assert_eq!(order(&mut worker, 2, 5, vec![load(9)]), refusal);
    let invalidate = WorkerEvent::Invalidate {
        tier: None,
        epoch: Epoch(2),
        id: ResetId(1),
        scope: Scope::Everything,
        through: TransferId(0),
        deadline: Time(100),
    };
    let not_attached = WorkerEffect::Refuse(OrderRefusal::NotAttached);
    assert_eq!(step(&mut worker, 1, invalidate), [not_attached]);
    // The order was sent after the attach and arrived before the answer to it: the leader took the refusal as the
    // copy's end.
    admit(&mut worker, 2, 2, 8);
    let refusal = [report(6, vec![refused(TransferId(9))])];
    assert_eq!(order(&mut worker, 2, 6, vec![load(9)]), refusal);
    assert_eq!(starts(&order(&mut worker, 2, 7, vec![load(10)])), [10]);
}

#[test]
fn an_order_that_is_repeated_while_other_memory_comes_does_not_end_what_still_runs() {
    let mut worker = worker();
    order(&mut worker, 1, 1, vec![load(1)]);
    register(&mut worker, 1, EngineId([2; 16]), RequestId(0));
    assert_eq!(
        order(&mut worker, 1, 2, vec![load(1), load(2)]),
        [report(2, vec![refused(TransferId(2))])],
        "1 is being stopped"
    );
    assert_eq!(cancel(&mut worker, 3, 1), [report(3, Vec::new())]);
    let effects = ended(&mut worker, 2, vec![refused(TransferId(1))]);
    assert_eq!(effects[0], report(1, vec![refused(TransferId(1))]));
}

#[test]
fn an_order_of_several_copies_begins_those_that_are_new() {
    let mut worker = worker();
    order(&mut worker, 1, 1, vec![load(1)]);
    let effects = order(&mut worker, 1, 2, vec![load(1), load(2), load(2)]);
    assert_eq!(starts(&effects), [2]);
    let effects = ended(&mut worker, 0, vec![complete(2)]);
    assert_eq!(effects, [report(2, vec![complete(2)])]);
    let effects = ended(&mut worker, 0, vec![complete(1)]);
    assert_eq!(effects, [report(1, vec![complete(1)])]);
}

#[test]
fn an_abandoned_request_with_the_highest_number_stops_no_other_copies() {
    let mut worker = worker();
    let abandon = |worker: &mut Worker, engine, request| {
        let (number, requests) = (1, BTreeSet::from([RequestId(request)]));
        let abandon = WorkerEvent::Abandon {
            engine,
            user: User::Own,
            number,
            requests,
        };
        step(worker, 0, abandon)
    };
    abandon(&mut worker, ENGINE, u64::MAX);
    abandon(&mut worker, ENGINE, 7);
    // The engine registers again: the requests that it abandoned are over, and no others.
    register(&mut worker, 0, ENGINE, RequestId(3));
    admit_memory(&mut worker, 0, 2, 0);
    let of = |transfer, request| copy(transfer, Direction::Load, request);
    let copies = vec![of(1, 3), of(2, 7), of(3, 8), of(4, u64::MAX), of(5, 6)];
    assert_eq!(starts(&order(&mut worker, 1, 1, copies)), [3, 5]);
    let other = EngineId([9; 16]);
    for engine in 0..50 {
        abandon(&mut worker, EngineId([engine; 16]), 1);
    }
    abandon(&mut worker, other, 1);
    assert!(worker.abandoned.engines() <= WORKER_ENGINES_MAX);
    assert_eq!(
        order(&mut worker, 1, 2, vec![of(9, 7)]).len(),
        1,
        "still over"
    );
}

mod abandoned;
mod checks;
mod invalidations;
mod link;
mod writes;

#[test]
fn an_outdated_inventory_request_is_refused() {
    let mut worker = worker();
    let old = |number, last| Err(OrderRefusal::OldRead { number, last });
    assert_eq!(worker.take_read(Epoch(1), 3), Ok(()));
    assert_eq!(worker.take_read(Epoch(1), 3), old(3, 3), "repeated");
    assert_eq!(worker.take_read(Epoch(1), 2), old(2, 3), "overtaken");
    let stale = OrderRefusal::StaleEpoch {
        order: Epoch(2),
        followed: Epoch(1),
    };
    assert_eq!(worker.take_read(Epoch(2), 9), Err(stale));
    // The worker states its memory again: requests from before that are refused.
    register(&mut worker, 0, ENGINE, RequestId(0));
    let refused = worker.take_read(Epoch(1), 4);
    assert_eq!(refused, Err(OrderRefusal::NotAttached));
    admit_memory(&mut worker, 0, 2, 5);
    assert_eq!(worker.take_read(Epoch(1), 5), old(5, 5));
    assert_eq!(worker.take_read(Epoch(1), 6), Ok(()));
    // Another leader starts its numbers at 1 again.
    find(&mut worker, 2, 2);
    assert_eq!(worker.take_read(Epoch(2), 1), Ok(()));
}

#[test]
fn a_copy_is_ready_when_it_is_ordered_and_its_pages_are_written() {
    let mut worker = worker();
    let ready = |worker: &Worker, id| worker.ready_at(TransferId(id));
    order(&mut worker, 1, 1, vec![store(1, 5), load(2)]);
    assert_eq!(ready(&worker, 1), None);
    assert_eq!(ready(&worker, 2), Some(Time(0)));
    let (engine, through) = (ENGINE, RequestId(5));
    step(&mut worker, 7, WorkerEvent::Written { engine, through });
    assert_eq!(ready(&worker, 1), Some(Time(7)));
    ended(&mut worker, 8, vec![complete(1)]);
    assert_eq!(ready(&worker, 1), None, "it has ended");
}
