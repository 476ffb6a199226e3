//! Limits of the typed clients: lists without pages, full sets of transfers, and what a dropped client still sends.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use kvferry_client::{
    EngineClient, EngineSettings, FINISH_LIMIT, PromptPages, RequestGuard, StoreGuard, StoredPages,
    TRANSFERS_MAX, TransferPages,
};
use kvferry_protocol::{
    Empty, ErrorBody, ErrorCode, LookupAnswer, Message, MessageKind, StoreAnswer,
};
use kvferry_transport::{Limits, MemoryTransport, Server, ServerEvent};
use kvferry_types::{EngineId, GroupId, PageHashes, PageList, PageRun, Part, RequestId, SlotId};
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::client_edges::stored;
use super::clients::{Loading, Owner, PAGES, WITHIN, engine, load, prompt, until_nothing_is_left};
use super::world::{address, server, soon};

#[tokio::test(start_paused = true)]
async fn lists_without_pages_are_refused_and_their_pages_are_free() {
    let world = Loading::start(None).await;
    let lists = [
        PageList::default(),
        PageList::run(3, 0),
        PageList::run(u32::MAX, 1),
    ];
    for list in lists {
        let (loaded, kept) = (Owner::new().0, Owner::new().0);
        let load = world.found.load(
            vec![Part::new(GroupId(0), 0, list.clone())],
            RequestId(0),
            loaded,
            WITHIN,
        );
        let refused = load.await.expect_err("it names no page");
        assert_eq!(refused.failure.code, ErrorCode::Invalid);
        assert!(
            refused.failure.message.contains("parts.pages"),
            "{refused:?}"
        );
        assert!(
            matches!(refused.pages, TransferPages::Free(_)),
            "{refused:?}"
        );
        let source = StoredPages {
            parts: vec![Part::new(GroupId(0), 0, list)],
            ..stored()
        };
        let refused = world.found.store(source, kept, WITHIN).await;
        let refused = refused.expect_err("it names no page");
        assert_eq!(refused.failure.code, ErrorCode::Invalid);
        assert!(
            refused.failure.message.contains("parts.pages"),
            "{refused:?}"
        );
        assert!(
            matches!(refused.pages, TransferPages::Free(_)),
            "{refused:?}"
        );
    }
    world.process.stop().await;
}

#[tokio::test(start_paused = true)]
async fn lookups_finishes_and_cancels_pass_while_every_transfer_waits() {
    let world = Loading::start(None).await;
    let other = PromptPages {
        namespace: b"other".to_vec(),
        ..prompt(11)
    };
    let storing = world.client.lookup(other, WITHIN).await.expect("an answer");
    let limit = Duration::from_secs(120);
    let mut stores = Vec::new();
    for _ in 0..TRANSFERS_MAX {
        stores.push(storing.store(stored(), (), limit));
        tokio::task::yield_now().await;
    }
    let refused = storing.store(stored(), (), limit).await;
    let refused = refused.expect_err("too many transfers");
    assert_eq!(refused.failure.code, ErrorCode::Busy);
    assert!(
        matches!(refused.pages, TransferPages::Free(())),
        "{refused:?}"
    );
    tokio::time::sleep(Duration::from_millis(10)).await;
    let begun = Instant::now();
    let next = world.client.lookup(prompt(12), WITHIN).await;
    next.expect("an answer")
        .finish()
        .await
        .expect("it is finished");
    let cancelled = world.client.cancel_stores(Some(SlotId(99)), WITHIN).await;
    assert_eq!(cancelled, Ok(0));
    assert!(begun.elapsed() < Duration::from_secs(1));
    world.open.send_replace(true);
    for store in stores {
        let (answer, ()) = soon("its end", store).await.expect("it is stored");
        assert_eq!(answer.stored_pages + answer.present_pages, PAGES);
    }
    world.process.stop().await;
}

/// Guards of a dropped client would otherwise keep the engine's place at the leader from its next process.
#[tokio::test(start_paused = true)]
async fn a_dropped_client_closes_its_connection_while_guards_live() {
    let world = Loading::start(None).await;
    let later = engine(&world.transport.of_process(4242), None);
    let failure = later.lookup(prompt(8), WITHIN).await.expect_err("in use");
    assert_eq!(failure.code, ErrorCode::NotReady);
    drop(world.client);
    assert!(until_nothing_is_left(&world.status).await < 3.0);
    let next = later.lookup(prompt(9), WITHIN).await;
    assert_eq!(next.expect("the place is free").hit_pages(), PAGES);
    drop(world.found);
    world.process.stop().await;
}

/// Waits for a request of this kind, and answers lookups. Returns the kinds of all messages.
async fn receive(server: &mut Server, kind: MessageKind) -> Vec<MessageKind> {
    let mut received = Vec::new();
    let wait = async {
        while !received.contains(&kind) {
            for event in server.next().await.expect("the server receives") {
                let ServerEvent::Message { peer, envelope } = event else {
                    continue;
                };
                if envelope.message.kind() == MessageKind::Lookup {
                    let nothing = Message::LookupAnswer(LookupAnswer {
                        hit_pages: 0,
                        ..LookupAnswer::default()
                    });
                    let replier = server.replier();
                    replier.reply(peer, envelope.correlation, nothing);
                }
                received.push(envelope.message.kind());
            }
        }
    };
    soon(kind.name(), wait).await;
    received
}

/// The guard of a lookup that the server answers.
async fn found(client: &EngineClient, server: &mut Server) -> RequestGuard {
    let finding = client.lookup(prompt(1), WITHIN);
    let (found, _) = tokio::join!(finding, receive(server, MessageKind::Lookup));
    found.expect("an answer")
}

/// A guard, and a store that the server has received.
async fn storing(client: &EngineClient, server: &mut Server) -> (RequestGuard, StoreGuard<()>) {
    let found = found(client, server).await;
    let store = found.store(stored(), (), Duration::from_secs(100));
    receive(server, MessageKind::Store).await;
    (found, store)
}

#[tokio::test(start_paused = true)]
async fn a_dropped_client_cancels_its_stores_at_a_leader_that_comes_later() {
    let transport = MemoryTransport::default();
    let mut first = server(&transport, 1, Limits::default()).await;
    let client = engine(&transport, None);
    let (found, store) = storing(&client, &mut first).await;
    drop(first);
    drop(client);
    tokio::time::sleep(Duration::from_secs(20)).await;
    let mut second = server(&transport, 2, Limits::default()).await;
    receive(&mut second, MessageKind::CancelStores).await;
    drop((store, found));
}

#[tokio::test(start_paused = true)]
async fn a_lookup_with_a_long_timeout_that_is_dropped_opens_no_slot_that_stays() {
    let transport = MemoryTransport::default();
    let client = engine(&transport, None);
    let mut finding = Box::pin(client.lookup(prompt(1), Duration::MAX));
    assert!(super::clients::poll_once(&mut finding).await.is_none());
    drop(finding);
    tokio::time::sleep(FINISH_LIMIT * 2 / 3 - WITHIN).await;
    let mut leader = server(&transport, 1, Limits::default()).await;
    let received = receive(&mut leader, MessageKind::Finish).await;
    assert_eq!(received, [MessageKind::Lookup, MessageKind::Finish]);
}

/// A leader keeps the answer to a refused cancel: under the same id it would be refused for ever.
#[tokio::test(start_paused = true)]
async fn a_dropped_client_repeats_a_refused_cancel_under_another_id() {
    let transport = MemoryTransport::default();
    let mut leader = server(&transport, 1, Limits::default()).await;
    let client = engine(&transport, None);
    let (found, store) = storing(&client, &mut leader).await;
    drop(client);
    let mut cancels = Vec::new();
    let refusing = async {
        while cancels.len() < 2 {
            for event in leader.next().await.expect("the server receives") {
                if let ServerEvent::Message { peer, envelope } = event
                    && let Message::CancelStores(_) = envelope.message
                {
                    cancels.push(envelope.correlation);
                    let refused = ErrorBody::new(ErrorCode::Limit, "16 are open");
                    let replier = leader.replier();
                    replier.reply(peer, envelope.correlation, Message::Error(refused));
                }
            }
        }
    };
    soon("two cancels", refusing).await;
    assert!(cancels[0] < cancels[1], "{cancels:?}");
    drop((store, found));
}

/// Refuses the first message of each kind as older than the answers that are kept, and returns the ids of all `finish`
/// and `cancel_stores` until there are two of each.
async fn refuse_once(leader: &mut Server) -> (Vec<RequestId>, Vec<RequestId>) {
    let (mut finishes, mut cancels) = (Vec::new(), Vec::new());
    while finishes.len() < 2 || cancels.len() < 2 {
        for event in leader.next().await.expect("the server receives") {
            let ServerEvent::Message { peer, envelope } = event else {
                continue;
            };
            let ids = match envelope.message {
                Message::Finish(_) => &mut finishes,
                Message::CancelStores(_) => &mut cancels,
                _ => continue,
            };
            if ids.is_empty() {
                let refused = ErrorBody::new(ErrorCode::StaleRequest, "forgotten");
                let replier = leader.replier();
                replier.reply(peer, envelope.correlation, Message::Error(refused));
            }
            ids.push(envelope.correlation);
        }
    }
    (finishes, cancels)
}

/// Among thousands of requests, the answers of later ones can displace the id of a `finish` or of the cancel.
#[tokio::test(start_paused = true)]
async fn a_finish_and_a_cancel_that_came_too_late_are_repeated_under_later_ids() {
    let transport = MemoryTransport::default();
    let mut leader = server(&transport, 1, Limits::default()).await;
    let client = engine(&transport, None);
    let (found, store) = storing(&client, &mut leader).await;
    drop(client);
    let (finishes, cancels) = soon("two of each", refuse_once(&mut leader)).await;
    assert!(finishes[0] < finishes[1], "{finishes:?}");
    assert!(cancels[0] < cancels[1], "{cancels:?}");
    assert!(
        finishes[0] < cancels[0],
        "a store of the guard could have an id between them"
    );
    drop((store, found));
}

/// Nothing was sent, so that neither a leader nor a rank has to confirm anything.
#[tokio::test(start_paused = true)]
async fn a_dropped_load_that_was_never_sent_is_over_at_its_deadline() {
    let transport = MemoryTransport::default();
    let mut leader = server(&transport, 1, Limits::default()).await;
    let silent = |_: RequestId| std::future::pending();
    let client = engine(&transport, Some(Arc::new(silent)));
    let found = found(&client, &mut leader).await;
    drop(leader);
    let lost = async {
        let soon_over = Duration::from_millis(10);
        while !client
            .status(false, soon_over)
            .await
            .expect_err("no leader")
            .unsent
        {}
    };
    soon("the loss of the connection", lost).await;
    let (owner, dropped) = Owner::new();
    let begun = Instant::now();
    drop(load(&found, owner));
    let closed = client.closed();
    drop((found, client));
    tokio::time::timeout(FINISH_LIMIT + 3 * WITHIN, closed)
        .await
        .expect("the client closes");
    assert!(dropped.load(Ordering::Relaxed), "nothing writes to them");
    assert!(begun.elapsed() >= FINISH_LIMIT, "the finish was given up");
}

/// Answers each load with an error that says nothing of its copies, and counts the loads.
async fn never_reports(mut leader: Server, loads: Arc<AtomicUsize>) {
    while let Some(events) = leader.next().await {
        for event in events {
            let ServerEvent::Message { peer, envelope } = event else {
                continue;
            };
            let answer = match envelope.message {
                Message::Lookup(_) => Message::LookupAnswer(LookupAnswer::default()),
                Message::Load(_) => {
                    loads.fetch_add(1, Ordering::Relaxed);
                    Message::Error(ErrorBody::new(ErrorCode::Internal, "a defect"))
                }
                Message::Finish(_) => Message::FinishAnswer(Empty {}),
                _ => continue,
            };
            leader.replier().reply(peer, envelope.correlation, answer);
        }
    }
}

/// As with an answer that cannot be read, which the leader gives again each time.
#[tokio::test(start_paused = true)]
async fn a_load_whose_end_is_never_reported_is_given_up_once_every_rank_has_confirmed() {
    let transport = MemoryTransport::default();
    let leader = server(&transport, 1, Limits::default()).await;
    let loads = Arc::new(AtomicUsize::new(0));
    let serving = tokio::spawn(never_reports(leader, Arc::clone(&loads)));
    let confirms = |_: RequestId| async {
        tokio::time::sleep(Duration::from_secs(10)).await;
        Ok(())
    };
    let client = engine(&transport, Some(Arc::new(confirms)));
    let found = client.lookup(prompt(1), WITHIN).await.expect("an answer");
    let (owner, dropped) = Owner::new();
    let failed = load(&found, owner).await.expect_err("it is refused");
    let TransferPages::InUse(pages) = failed.pages else {
        panic!("the error does not say that nothing is copied");
    };
    let begun = Instant::now();
    assert!(!dropped.load(Ordering::Relaxed));
    assert!(soon("the ranks confirm", pages.freed()).await.is_some());
    assert!(begun.elapsed() >= Duration::from_secs(10));
    let closed = client.closed();
    drop((found, client));
    // Loads are reported within 120 s, or given up.
    tokio::time::timeout(Duration::from_secs(150), closed)
        .await
        .expect("the client closes");
    let repeated = loads.load(Ordering::Relaxed);
    assert!((5..50).contains(&repeated), "{repeated} loads");
    serving.abort();
}

/// Sent, the message would break the connection, and again after each reconnect.
#[tokio::test(start_paused = true)]
async fn a_message_beyond_the_limit_of_the_connection_fails_alone() {
    let transport = MemoryTransport::default();
    let mut leader = server(&transport, 1, Limits::default()).await;
    let mut settings = EngineSettings::new(address(), EngineId([1; 16]), "test");
    settings.limits.body_bytes = 1000;
    let client = EngineClient::start(Arc::new(transport.clone()), settings);
    let found = found(&client, &mut leader).await;
    let long = PromptPages {
        hashes: PageHashes::packed(16, vec![1; 16 * 4096]).expect("16 bytes a page"),
        ..prompt(2)
    };
    let refused = client.lookup(long, WITHIN).await.expect_err("too long");
    assert_eq!(refused.code, ErrorCode::Limit);
    assert!(refused.unsent && !refused.retry, "{refused:?}");
    let scattered = (0..1000).map(|page| PageRun {
        start: 2 * page,
        count: 1,
    });
    let list = PageList(scattered.collect());
    let load = found
        .load(
            vec![Part::new(GroupId(0), 0, list)],
            RequestId(0),
            (),
            WITHIN,
        )
        .await;
    let refused = load.expect_err("too long");
    assert_eq!(refused.failure.code, ErrorCode::Limit);
    assert!(
        matches!(refused.pages, TransferPages::Free(())),
        "{refused:?}"
    );
    drop(found);
    receive(&mut leader, MessageKind::Finish).await;
}

/// The ranks' confirmation frees the pages, not the credits of the connection.
#[tokio::test(start_paused = true)]
async fn an_abandoned_transfer_counts_until_its_end_is_reported() {
    let ranks = |_: RequestId| async { Ok(()) };
    let transport = MemoryTransport::default();
    let mut leader = server(&transport, 1, Limits::default()).await;
    let client = engine(&transport, Some(Arc::new(ranks)));
    let found = found(&client, &mut leader).await;
    let replier = leader.replier();
    let (received, mut requests) = mpsc::unbounded_channel();
    let receiving = tokio::spawn(async move {
        while let Some(events) = leader.next().await {
            for event in events {
                if let ServerEvent::Message { peer, envelope } = event {
                    let sent = received.send((peer, envelope.correlation));
                    sent.expect("the test runs");
                }
            }
        }
    });
    let mut stores = Vec::new();
    for _ in 0..TRANSFERS_MAX {
        stores.push(found.store(stored(), (), Duration::from_millis(1)));
        tokio::task::yield_now().await;
    }
    for store in stores {
        let late = soon("its deadline", store).await.expect_err("it is late");
        let TransferPages::InUse(pages) = late.pages else {
            panic!("{:?}", late.pages)
        };
        assert_eq!(soon("the pages", pages.freed()).await, Some(()));
    }
    let refused = found.store(stored(), (), WITHIN).await;
    let refused = refused.expect_err("no credits");
    assert_eq!(refused.failure.code, ErrorCode::Busy);
    let (peer, id) = requests.recv().await.expect("a store");
    let failed = StoreAnswer {
        stored_pages: 0,
        present_pages: 0,
        refused_pages: 0,
        failed_pages: PAGES,
    };
    replier.reply(peer, id, Message::StoreAnswer(failed));
    tokio::time::sleep(WITHIN).await;
    let store = found.store(stored(), (), Duration::from_millis(1)).await;
    let late = store.expect_err("nothing answers");
    assert_eq!(late.failure.code, ErrorCode::Deadline);
    receiving.abort();
}
