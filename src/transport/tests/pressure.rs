//! Tests of limits and of peers that do not read. The tests in `semantics` run them over all transports.

use super::super::{Closed, SendError, Violation};
use super::bench::Bench;
use super::*;

pub(super) async fn takes_what_is_as_long_as_the_limit_and_refuses_one_byte_more(bench: Bench) {
    let limits = Limits {
        header_bytes: 8,
        body_bytes: 300,
        ..Limits::default()
    };
    let mut listener = bench.listen(&limits).await;
    let mut client = bench.try_connect(&limits).await.expect("connects");
    let peer = opened(&mut listener).await;
    let longest = Frame::new(vec![1; 8], vec![2; 300]);
    let refused = |part, bytes, limit| SendError::TooLong { part, bytes, limit };
    let long_header = Frame::new(vec![1; 9], vec![2; 300]);
    let long_body = Frame::new(vec![1; 8], vec![2; 301]);

    client.send(longest.clone()).await.expect("sent");
    assert_eq!(arrived(&mut listener).await, (peer, longest.clone()));
    let header = client.send(long_header.clone()).await;
    assert_eq!(header, Err(refused("header", 9, 8)));
    assert_eq!(
        client.send(long_body.clone()).await,
        Err(refused("body", 301, 300))
    );

    let sender = listener.sender();
    assert_eq!(
        sender.try_send(peer, long_header),
        Err(refused("header", 9, 8))
    );
    assert_eq!(
        sender.send(peer, long_body).await,
        Err(refused("body", 301, 300))
    );
    sender.send(peer, longest.clone()).await.expect("sent");
    assert_eq!(received(&mut client).await, longest);
}

pub(super) async fn closes_a_client_that_sends_too_much(bench: Bench) {
    let limits = Limits {
        header_bytes: 8,
        body_bytes: 300,
        ..Limits::default()
    };
    for (sent, violation) in [
        (Frame::new(vec![1; 9], ""), Violation::HeaderTooLong),
        (Frame::new("h", vec![1; 301]), Violation::BodyTooLong),
    ] {
        let mut listener = bench.listen(&limits).await;
        let mut client = bench.connect().await;
        let peer = opened(&mut listener).await;
        client.send(sent).await.expect("within its own limits");
        let reason = CloseReason::Violation(violation);
        assert_eq!(closed(&mut listener).await, (peer, reason));
        let end = timeout(TEST_TIMEOUT, client.recv()).await.expect("in time");
        assert_eq!(end, Err(Closed::ByServer));
        listener.close().await;
    }
}

pub(super) async fn closes_the_connection_when_the_server_sends_too_much(bench: Bench) {
    let mut listener = bench.listen(&Limits::default()).await;
    let small = Limits {
        body_bytes: 300,
        ..Limits::default()
    };
    let mut client = bench.try_connect(&small).await.expect("connects");
    let peer = opened(&mut listener).await;
    let sent = listener
        .sender()
        .try_send(peer, Frame::new("h", vec![1; 301]));
    sent.expect("within its own limits");
    let end = timeout(TEST_TIMEOUT, client.recv()).await.expect("in time");
    assert_eq!(end, Err(Closed::Violation(Violation::BodyTooLong)));
    assert_eq!(closed(&mut listener).await, (peer, CloseReason::ByPeer));
}

/// Limits with small queues and short timeouts.
fn tight() -> Limits {
    Limits {
        body_bytes: 64 << 10,
        pending_bytes: 256 << 10,
        slow_after: Duration::from_millis(300),
        ..Limits::default()
    }
}

pub(super) async fn closes_a_client_that_does_not_read(bench: Bench) {
    let mut listener = bench.listen(&tight()).await;
    let client = bench.connect().await;
    let peer = opened(&mut listener).await;
    let sender = listener.sender();
    let mut error = None;
    for _ in 0..10_000 {
        let sent = sender.send(peer, Frame::new("h", vec![0; 64 << 10])).await;
        error = sent.err();
        if error.is_some() {
            break;
        }
    }
    assert!(
        matches!(error, Some(SendError::Slow | SendError::Gone)),
        "{error:?}"
    );
    assert_eq!(
        closed(&mut listener).await,
        (peer, CloseReason::SlowConsumer)
    );
    drop(client);
}

pub(super) async fn closes_a_client_for_which_too_much_waits(bench: Bench) {
    let patient = Limits {
        slow_after: TEST_TIMEOUT * 10,
        ..tight()
    };
    let mut listener = bench.listen(&patient).await;
    let _client = bench.connect().await;
    let peer = opened(&mut listener).await;
    let sender = listener.sender();
    let body = vec![0; 64 << 10];
    let error =
        (0..100_000).find_map(|_| sender.try_send(peer, Frame::new("h", body.clone())).err());
    assert_eq!(error, Some(SendError::Slow));
    assert_eq!(
        closed(&mut listener).await,
        (peer, CloseReason::SlowConsumer)
    );
    assert_eq!(sender.try_send(peer, frame("h", "b")), Err(SendError::Gone));
}

pub(super) async fn holds_back_a_client_of_a_listener_that_does_not_read(bench: Bench) {
    let mut listener = bench.listen(&tight()).await;
    let mut client = bench.try_connect(&tight()).await.expect("connects");
    let peer = opened(&mut listener).await;
    let body = Frame::new("h", vec![9; 64 << 10]);
    let mut sent = 0;
    let error = loop {
        match client.send(body.clone()).await {
            Ok(()) => sent += 1,
            Err(error) => break error,
        }
        assert!(sent < 1000, "nothing holds the client back");
    };
    assert_eq!(error, SendError::Slow);
    for _ in 0..sent {
        assert_eq!(arrived(&mut listener).await, (peer, body.clone()));
    }
    client.send(frame("h", "goes on")).await.expect("sent");
    assert_eq!(arrived(&mut listener).await, (peer, frame("h", "goes on")));
}

/// The client reads nothing, so that only its sends can show that the server is gone.
pub(super) async fn ends_waits_for_room_when_the_server_is_gone(bench: Bench) {
    let patient = Limits {
        slow_after: TEST_TIMEOUT * 10,
        ..tight()
    };
    let mut listener = bench.listen(&tight()).await;
    let mut client = bench.try_connect(&patient).await.expect("connects");
    opened(&mut listener).await;
    let body = Frame::new("h", vec![9; 64 << 10]);
    // Full when a send waits for longer than the server takes to read what it has room for.
    while let Ok(sent) = timeout(tight().slow_after, client.send(body.clone())).await {
        sent.expect("room, or a wait for it");
    }
    let ends = async {
        loop {
            match client.send(body.clone()).await {
                Err(SendError::Gone) => return,
                sent => sent.expect("room in what the server has left"),
            }
        }
    };
    let both = async { tokio::join!(ends, listener.close()) };
    timeout(TEST_TIMEOUT, both).await.expect("in time");
}

/// A server closes a client that reads nothing, so a client must read while it waits for room.
pub(super) async fn reads_while_a_send_waits_for_room(bench: Bench) {
    const FRAMES: u8 = 32;
    let patient = Limits {
        pending_bytes: 4 << 20,
        slow_after: TEST_TIMEOUT * 10,
        ..tight()
    };
    let server = Limits {
        pending_bytes: 4 << 20,
        ..tight()
    };
    let mut listener = bench.listen(&server).await;
    let mut client = bench.try_connect(&patient).await.expect("connects");
    let peer = opened(&mut listener).await;
    let body = Frame::new("h", vec![9; 64 << 10]);
    let mut sent = 0;
    while let Ok(queued) = timeout(server.slow_after, client.send(body.clone())).await {
        queued.expect("room, or a wait for it");
        sent += 1;
    }
    for n in 0..FRAMES {
        let frame = Frame::new("h", vec![n; 64 << 10]);
        listener.sender().try_send(peer, frame).expect("queued");
    }
    // Longer than the server waits for a client that reads nothing.
    let waits = timeout(server.slow_after * 2, client.send(body.clone())).await;
    assert!(waits.is_err(), "there is no room: {waits:?}");
    for _ in 0..sent {
        assert_eq!(arrived(&mut listener).await, (peer, body.clone()));
    }
    for n in 0..FRAMES {
        assert_eq!(
            received(&mut client).await,
            Frame::new("h", vec![n; 64 << 10])
        );
    }
}
