//! A real worker with a scripted leader: every order is answered, also orders that a correct leader never sends.

use std::time::Duration;

use kvferry_protocol::{
    Cancel, Ended, ErrorCode, Invalidate, Message, ReadInventory, RecordBody, TransferBody,
    TransferOrder,
};
use kvferry_transport::{Limits, MemoryTransport, PeerId, Server, ServerEvent};
use kvferry_types::{FragmentPair, PageList, PageRun, RequestId};

use super::unregister::{Memory, register};
use super::workers::{
    Statement, accept, agree, attaching, rank, settle, statement, worker, worker_with_room,
};
use super::world::{server, soon};

const WITHIN: Duration = Duration::from_secs(60);

/// Waits for the worker's next answer to one of these orders. Returns the order's id and the answer.
async fn answer(leader: &mut Server, orders: &[u64]) -> (u64, Message) {
    let wait = async {
        loop {
            for event in leader.next().await.expect("the leader receives") {
                if let ServerEvent::Message { envelope, .. } = event
                    && orders.contains(&envelope.correlation.0)
                    && !matches!(
                        envelope.message,
                        Message::Attach(_) | Message::Memory(_) | Message::Readiness(_)
                    )
                {
                    return (envelope.correlation.0, envelope.message);
                }
            }
        }
    };
    soon("an answer of the worker", wait).await
}

fn order(leader: &Server, peer: PeerId, id: u64, message: Message) {
    let unsent = leader
        .replier()
        .order(&[peer], RequestId(id), message, WITHIN);
    assert_eq!(unsent, [], "order {id}");
}

fn invalidate() -> Message {
    Message::Invalidate(Invalidate {
        reset: 3,
        namespace: Vec::new(),
        fingerprints: Vec::new(),
        through: 0,
        tier: 0,
    })
}

/// Must hold for either order of two tasks that become ready together. A single-threaded runtime runs the last one
/// first.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn an_order_sent_with_the_welcome_reaches_an_admitted_worker() {
    let transport = MemoryTransport::default();
    let mut leader = server(&transport, 1, Limits::default()).await;
    let (worker, _directory) = worker(&transport).await;
    let requested = attaching(&mut leader).await;
    agree(&leader, requested);
    order(&leader, requested.peer, 7, invalidate());
    let (_, invalidated) = answer(&mut leader, &[7]).await;
    assert!(
        matches!(invalidated, Message::Invalidated(_)),
        "{invalidated:?}"
    );
    worker.stop().await;
}

/// Needs real time: slices take time, and paused time does not advance while they run. A depot of small pages takes
/// many slices, and the leader's deadline for the reset passes after the first.
#[tokio::test]
async fn pages_of_a_reset_whose_deadline_has_passed_are_not_all_invalidated() {
    let transport = MemoryTransport::default();
    let mut leader = server(&transport, 1, Limits::default()).await;
    let (worker, _directory) = worker_with_room(&transport, 64 << 20).await;
    let requested = attaching(&mut leader).await;
    settle(&mut leader, requested).await;
    let divide = ReadInventory {
        depot: requested.depot,
        page_bytes: 64,
        read_id: 1,
        from: u32::MAX,
    };
    order(&leader, requested.peer, 6, Message::ReadInventory(divide));
    let (_, inventory) = answer(&mut leader, &[6]).await;
    assert!(matches!(inventory, Message::Inventory(_)), "{inventory:?}");
    let short = Duration::from_millis(1);
    let unsent = leader
        .replier()
        .order(&[requested.peer], RequestId(7), invalidate(), short);
    assert_eq!(unsent, []);
    let (_, given_up) = answer(&mut leader, &[7]).await;
    let Message::Error(error) = given_up else {
        panic!("{given_up:?}")
    };
    assert_eq!(error.code(), ErrorCode::Deadline, "{}", error.message);
    // The next invalidation is carried out.
    order(&leader, requested.peer, 8, invalidate());
    let (_, invalidated) = answer(&mut leader, &[8]).await;
    assert!(
        matches!(invalidated, Message::Invalidated(_)),
        "{invalidated:?}"
    );
    worker.stop().await;
}

#[tokio::test(start_paused = true)]
async fn orders_to_a_worker_that_is_not_admitted_are_answered() {
    let transport = MemoryTransport::default();
    let mut leader = server(&transport, 1, Limits::default()).await;
    let (worker, _directory) = worker(&transport).await;
    let requested = attaching(&mut leader).await;
    order(&leader, requested.peer, 7, invalidate());
    let (_, refused) = answer(&mut leader, &[7]).await;
    let Message::Error(error) = refused else {
        panic!("{refused:?}")
    };
    assert_eq!(error.code(), ErrorCode::NotReady, "{}", error.message);
    let copies = vec![(1, store(0, 0, 1))];
    order(&leader, requested.peer, 8, transfer(4096, copies));
    let (_, ended) = answer(&mut leader, &[8]).await;
    assert_eq!(not_whole(ended), [1]);
    let cancel = Message::Cancel(Cancel {
        transfers: vec![1, 2],
    });
    order(&leader, requested.peer, 9, cancel);
    let (_, ended) = answer(&mut leader, &[9]).await;
    assert_eq!(not_whole(ended), [1, 2]);
    worker.stop().await;
}

/// The operations of an `Ended` message, none of which may be complete.
fn not_whole(message: Message) -> Vec<u64> {
    let Message::Ended(Ended { copies, .. }) = message else {
        panic!("{message:?} instead of the end of copies")
    };
    assert!(copies.iter().all(|copy| !copy.complete), "{copies:?}");
    copies.iter().map(|copy| copy.transfer.0).collect()
}

fn pages(start: u32, count: u32) -> PageList {
    PageList([PageRun { start, count }].into_iter().collect())
}

/// A store of `count` device pages from `src` on, with a record that begins at `block`.
fn store(src: u32, block: u32, count: u32) -> (FragmentPair, Option<RecordBody>) {
    let pair = FragmentPair {
        src: pages(src, count),
        dst: pages(block, count),
    };
    let record = RecordBody {
        anchor: [1; 16],
        domain: [2; 16],
        block_start: block,
        first: 0,
        phase: 0,
        transfer: 1,
        fingerprints: vec![3; 16 * count.min(8) as usize],
    };
    (pair, Some(record))
}

fn transfer(page_bytes: u64, copies: Vec<(u64, (FragmentPair, Option<RecordBody>))>) -> Message {
    let transfers = copies.into_iter().map(|(id, (pair, record))| TransferBody {
        id,
        pairs: vec![pair].into(),
        record,
    });
    Message::Transfer(TransferOrder {
        group: 0,
        page_bytes,
        from: 1,
        to: 2,
        engine: Some([1; 16]),
        request: 1,
        after: 0,
        transfers: transfers.collect(),
    })
}

/// Needs real time: copies run on threads, for which paused time does not wait.
#[tokio::test]
async fn orders_that_name_missing_pages_are_refused_and_the_worker_continues() {
    let transport = MemoryTransport::default();
    let mut leader = server(&transport, 1, Limits::default()).await;
    let (worker, _directory) = worker(&transport).await;
    let (rank, memory) = (rank(&transport), Memory::new());
    let mut peer = None;
    let agreeing = async {
        loop {
            let stated = statement(&mut leader).await;
            accept(&leader, stated);
            if let Statement::Attach(attaching) = stated {
                peer = Some((attaching.peer, attaching.depot));
            }
        }
    };
    let registered = tokio::select! {
        answer = register(&rank, &memory, 1) => answer,
        () = agreeing => unreachable!("it goes on"),
    };
    let Ok(Message::Registered(registered)) = registered else {
        panic!("{registered:?}")
    };
    let (peer, depot) = peer.expect("it has attached");
    let written = kvferry_protocol::Written {
        through: 9,
        timeline: false,
    };
    let said = rank.request(Message::Written(written), WITHIN).await;
    assert!(said.is_ok(), "{said:?}");

    let (beyond, page_bytes) = (registered.arena_pages, registered.page_bytes);
    let with = |first: u16, (pair, record): (FragmentPair, Option<RecordBody>)| {
        let record = record.map(|record| RecordBody { first, ..record });
        (pair, record)
    };
    let moved = |block_start, (pair, record): (FragmentPair, Option<RecordBody>)| {
        let record = record.map(|record| RecordBody {
            block_start,
            ..record
        });
        (pair, record)
    };
    let hostile = [
        store(0, beyond, 1),
        store(0, beyond - 1, 2),
        store(0, u32::MAX - 9, 4),
        store(4, 0, 1),
        store(u32::MAX - 2, 0, 1),
        moved(1, store(0, 0, 1)),
        moved(u32::MAX, store(0, 0, 1)),
        with(u16::MAX, store(0, 0, 2)),
    ];
    let other_size = (40, transfer(page_bytes / 2, vec![(40, store(0, 0, 1))]));
    let hostile = (1..).zip(hostile);
    let hostile = hostile.map(|(id, copy)| (id, transfer(page_bytes, vec![(id, copy)])));
    for (id, hostile) in hostile.chain([other_size]) {
        let shown = format!("{hostile:?}");
        order(&leader, peer, id, hostile);
        let (_, ended) = answer(&mut leader, &[id]).await;
        assert_eq!(not_whole(ended), [id], "{shown}");
    }
    // Orders that read or empty the inventory are checked, too.
    for (id, page_bytes) in [(50, 0), (51, 1), (52, u64::MAX), (53, 32)] {
        let read = ReadInventory {
            depot,
            page_bytes,
            read_id: 1,
            from: u32::MAX,
        };
        order(&leader, peer, id, Message::ReadInventory(read));
        let (_, refused) = answer(&mut leader, &[id]).await;
        assert!(matches!(refused, Message::Error(_)), "{refused:?}");
    }
    // From here on the depot holds pages of this size.
    let read = ReadInventory {
        depot,
        page_bytes: registered.page_bytes,
        read_id: 2,
        from: 0,
    };
    order(&leader, peer, 99, Message::ReadInventory(read));
    let (_, inventory) = answer(&mut leader, &[99]).await;
    assert!(matches!(inventory, Message::Inventory(_)), "{inventory:?}");
    order(
        &leader,
        peer,
        100,
        transfer(page_bytes, vec![(100, store(0, 0, 2))]),
    );
    let (_, ended) = answer(&mut leader, &[100]).await;
    let Message::Ended(ended) = ended else {
        panic!("{ended:?}")
    };
    assert!(ended.copies[0].complete, "{ended:?}");
    worker.stop().await;
}
