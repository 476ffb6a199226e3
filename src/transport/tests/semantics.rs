//! Behaviour that all transports share: each test runs over each of them.

use super::super::{Closed, SendError, TransportError, UsedBy};
use super::bench::Bench;
use super::pressure::*;
use super::*;

macro_rules! over_all {
    ($($name:ident)*) => {
        mod memory {
            $(#[tokio::test] async fn $name() { super::$name(super::Bench::memory()).await; })*
        }
        mod zmq {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() { super::$name(super::Bench::zmq()).await; })*
        }
        mod tls {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() { super::$name(super::Bench::tls()).await; })*
        }
    };
}

over_all! {
    echoes_in_order
    keeps_two_clients_apart
    says_when_a_client_goes_after_all_it_sent
    disconnects_after_what_was_sent
    delivers_what_was_received_before_a_send_failed
    tells_the_client_when_the_listener_goes
    frees_the_address_at_close
    refuses_a_second_listener
    refuses_one_connection_too_many
    takes_what_is_as_long_as_the_limit_and_refuses_one_byte_more
    closes_a_client_that_sends_too_much
    closes_the_connection_when_the_server_sends_too_much
    closes_a_client_that_does_not_read
    closes_a_client_for_which_too_much_waits
    holds_back_a_client_of_a_listener_that_does_not_read
    reads_while_a_send_waits_for_room
    refuses_sends_to_a_peer_that_is_gone
    waits_for_a_listener_and_not_longer_than_told
    ends_waits_for_room_when_the_server_is_gone
    refuses_limits_that_contradict
}

async fn echoes_in_order(bench: Bench) {
    let mut listener = bench.listen(&Limits::default()).await;
    let mut client = bench.connect().await;
    let peer = opened(&mut listener).await;
    let sender = listener.sender();
    for n in 0..200 {
        client.send(frame("q", &n.to_string())).await.expect("sent");
    }
    for n in 0..200 {
        let (from, sent) = arrived(&mut listener).await;
        assert_eq!((from, &sent), (peer, &frame("q", &n.to_string())));
        sender.try_send(peer, sent).expect("sent");
    }
    for n in 0..200 {
        assert_eq!(received(&mut client).await, frame("q", &n.to_string()));
    }
    let large = Frame::new(vec![1; 256], vec![7; 4 << 20]);
    client.send(large.clone()).await.expect("sent");
    assert_eq!(arrived(&mut listener).await, (peer, large.clone()));
    sender.send(peer, large.clone()).await.expect("sent");
    assert_eq!(received(&mut client).await, large);
    let empty = frame("", "");
    client.send(empty.clone()).await.expect("sent");
    assert_eq!(arrived(&mut listener).await, (peer, empty.clone()));
    sender.send(peer, empty.clone()).await.expect("sent");
    assert_eq!(received(&mut client).await, empty);
}

async fn keeps_two_clients_apart(bench: Bench) {
    let mut listener = bench.listen(&Limits::default()).await;
    let mut one = bench.connect().await;
    let first = opened(&mut listener).await;
    let mut two = bench.connect().await;
    let second = opened(&mut listener).await;
    assert_ne!(first, second);
    two.send(frame("h", "from two")).await.expect("sent");
    assert_eq!(
        arrived(&mut listener).await,
        (second, frame("h", "from two"))
    );
    let sender = listener.sender();
    sender
        .send(second, frame("h", "to two"))
        .await
        .expect("sent");
    sender
        .send(first, frame("h", "to one"))
        .await
        .expect("sent");
    assert_eq!(received(&mut one).await, frame("h", "to one"));
    assert_eq!(received(&mut two).await, frame("h", "to two"));
}

async fn says_when_a_client_goes_after_all_it_sent(bench: Bench) {
    let mut listener = bench.listen(&Limits::default()).await;
    let mut client = bench.connect().await;
    let peer = opened(&mut listener).await;
    for n in 0..50 {
        client.send(frame("h", &n.to_string())).await.expect("sent");
    }
    drop(client);
    for n in 0..50 {
        assert_eq!(
            arrived(&mut listener).await,
            (peer, frame("h", &n.to_string()))
        );
    }
    assert_eq!(closed(&mut listener).await, (peer, CloseReason::ByPeer));
}

async fn disconnects_after_what_was_sent(bench: Bench) {
    let mut listener = bench.listen(&Limits::default()).await;
    let mut client = bench.connect().await;
    let peer = opened(&mut listener).await;
    let sender = listener.sender();
    let last = Frame::new("last", vec![3; 1 << 20]);
    for _ in 0..8 {
        sender.try_send(peer, last.clone()).expect("sent");
    }
    sender.disconnect(peer);
    for _ in 0..8 {
        assert_eq!(received(&mut client).await, last);
    }
    let end = timeout(TEST_TIMEOUT, client.recv()).await.expect("in time");
    assert_eq!(end, Err(Closed::ByServer));
    assert_eq!(client.recv().await, Err(Closed::ByServer));
    assert_eq!(closed(&mut listener).await, (peer, CloseReason::ByUs));
}

async fn delivers_what_was_received_before_a_send_failed(bench: Bench) {
    let mut listener = bench.listen(&Limits::default()).await;
    let sender = listener.sender();
    // The write may fail before the next read or after it.
    for _ in 0..32 {
        let mut client = bench.connect().await;
        let peer = opened(&mut listener).await;
        for n in 0..8 {
            let sent = sender.try_send(peer, frame("h", &n.to_string()));
            sent.expect("sent");
        }
        sender.disconnect(peer);
        assert_eq!(closed(&mut listener).await, (peer, CloseReason::ByUs));
        // One read takes them all: what the runtime has not reported when a write fails is lost.
        assert_eq!(received(&mut client).await, frame("h", "0"));
        let fails = async { while client.send(frame("h", "b")).await.is_ok() {} };
        timeout(TEST_TIMEOUT, fails).await.expect("in time");
        for n in 1..8 {
            assert_eq!(received(&mut client).await, frame("h", &n.to_string()));
        }
        let end = timeout(TEST_TIMEOUT, client.recv()).await.expect("in time");
        assert_eq!(end, Err(Closed::ByServer));
    }
}

async fn tells_the_client_when_the_listener_goes(bench: Bench) {
    let mut listener = bench.listen(&Limits::default()).await;
    let mut client = bench.connect().await;
    opened(&mut listener).await;
    drop(listener);
    let end = timeout(TEST_TIMEOUT, client.recv()).await.expect("in time");
    assert_eq!(end, Err(Closed::ByServer));
    assert_eq!(client.send(frame("h", "b")).await, Err(SendError::Gone));
}

async fn frees_the_address_at_close(bench: Bench) {
    for _ in 0..3 {
        let mut listener = bench.listen(&Limits::default()).await;
        let mut client = bench.connect().await;
        let peer = opened(&mut listener).await;
        client.send(frame("h", "b")).await.expect("sent");
        assert_eq!(arrived(&mut listener).await.0, peer);
        timeout(TEST_TIMEOUT, listener.close())
            .await
            .expect("in time");
    }
}

async fn refuses_a_second_listener(bench: Bench) {
    let _listener = bench.listen(&Limits::default()).await;
    let second = bench.transport.listen(&bench.address, Limits::default());
    let own = match bench.address {
        Address::Tcp(_) => UsedBy::Unknown,
        _ => UsedBy::process(std::process::id()),
    };
    match second.await.err() {
        Some(TransportError::InUse { address, by }) => {
            assert_eq!((address, by), (bench.address.clone(), own));
        }
        other => panic!("not in use: {other:?}"),
    }
}

async fn refuses_one_connection_too_many(bench: Bench) {
    let limits = Limits {
        connections: 2,
        ..Limits::default()
    };
    let mut listener = bench.listen(&limits).await;
    let _one = bench.connect().await;
    let two = bench.connect().await;
    opened(&mut listener).await;
    let second = opened(&mut listener).await;
    let third = bench.try_connect(&Limits::default()).await.err();
    assert!(
        matches!(third, Some(TransportError::Refused { .. })),
        "{third:?}"
    );
    drop(two);
    assert_eq!(closed(&mut listener).await, (second, CloseReason::ByPeer));
    let _again = bench.connect().await;
    opened(&mut listener).await;
}

async fn refuses_sends_to_a_peer_that_is_gone(bench: Bench) {
    let mut listener = bench.listen(&Limits::default()).await;
    let client = bench.connect().await;
    let peer = opened(&mut listener).await;
    drop(client);
    closed(&mut listener).await;
    let sender = listener.sender();
    assert_eq!(
        sender.send(peer, frame("h", "b")).await,
        Err(SendError::Gone)
    );
    assert_eq!(sender.try_send(peer, frame("h", "b")), Err(SendError::Gone));
    assert_eq!(
        sender.try_send(PeerId(0), frame("h", "b")),
        Err(SendError::Gone)
    );
    sender.disconnect(peer);
}

async fn waits_for_a_listener_and_not_longer_than_told(bench: Bench) {
    let short = Duration::from_millis(30);
    let connecting = bench
        .transport
        .connect(&bench.address, Limits::default(), short);
    match connecting.await.err() {
        Some(TransportError::Unreachable { waited, .. }) => assert_eq!(waited, short),
        other => panic!("not unreachable: {other:?}"),
    }
    let limits = Limits::default();
    let (connection, mut listener) =
        tokio::join!(bench.try_connect(&limits), bench.listen(&limits));
    connection.expect("connects");
    opened(&mut listener).await;
}

async fn refuses_limits_that_contradict(bench: Bench) {
    let contradictions = [
        Limits {
            connections: 0,
            ..Limits::default()
        },
        Limits {
            pending_bytes: 1 << 20,
            ..Limits::default()
        },
        Limits {
            body_bytes: usize::MAX,
            ..Limits::default()
        },
    ];
    for limits in contradictions {
        let refused = bench.transport.listen(&bench.address, limits).await.err();
        assert!(
            matches!(refused, Some(TransportError::Limits(_))),
            "{refused:?}"
        );
    }
}
