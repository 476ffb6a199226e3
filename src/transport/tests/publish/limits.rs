//! The publisher against many peers, and peers that break its rules.

use super::super::super::zmtp::TOPIC_BYTES_MAX;
use super::*;

#[tokio::test]
async fn a_thousand_connections_stop_at_the_limits() {
    let (publisher, events, replay) = publisher(PublisherLimits::default()).await;
    let mut open = subscriber(events, "").await;
    joined(&publisher, &mut open).await;
    for port in [events, replay] {
        let mut streams = Vec::new();
        for at in 0..1000 {
            let bytes = match at % 3 {
                0 => Vec::new(),
                1 => zmtp::greeting().to_vec(),
                _ if port == events => hello("SUB"),
                _ => hello("DEALER"),
            };
            streams.push(raw(port, &bytes).await);
        }
        let number = publisher.publish("during the flood");
        while next(&mut open).await.0 < number {}
    }
    // The places of this address are free again once its connections have ended.
    let served = async {
        loop {
            let mut stream = raw(events, &hello("SUB")).await;
            if stream.read_exact(&mut [0; 65]).await.is_ok() {
                return;
            }
        }
    };
    timeout(TEST_TIMEOUT, served).await.expect("served");
    serves(&publisher, (events, replay)).await;
}

#[tokio::test]
async fn one_address_does_not_take_the_places_of_others() {
    let limits = PublisherLimits {
        connections: 4,
        of_address: 2,
        ..PublisherLimits::default()
    };
    let (_publisher, events, _) = publisher(limits).await;
    let mut open = Vec::new();
    for _ in 0..2 {
        let mut stream = raw(events, &hello("SUB")).await;
        read_hello(&mut stream, "PUB").await;
        open.push(stream);
    }
    read_to_end(&mut raw(events, &hello("SUB")).await).await;
    let socket = tokio::net::TcpSocket::new_v4().expect("a socket");
    socket
        .bind("127.0.0.2:0".parse().expect("an address"))
        .expect("bound");
    let at = format!("127.0.0.1:{events}").parse().expect("an address");
    let mut other = socket.connect(at).await.expect("connects");
    write(&mut other, &hello("SUB")).await;
    read_hello(&mut other, "PUB").await;
}

#[tokio::test]
async fn subscriptions_without_end_take_no_memory_and_too_long_ones_are_refused() {
    let (publisher, events, replay) = publisher(PublisherLimits::default()).await;
    let mut stream = raw(events, &hello("SUB")).await;
    read_hello(&mut stream, "PUB").await;
    let mut bytes = Vec::new();
    for at in 0..200_000_u32 {
        bytes.extend_from_slice(&[0, 9, 1]);
        bytes.extend_from_slice(format!("{at:08}").as_bytes());
    }
    bytes.extend_from_slice(b"\x00\x01\x01\x04\x07\x04PING\x00\x05");
    write(&mut stream, &bytes).await;
    let mut pong = [0; 7];
    let read = timeout(TEST_TIMEOUT, stream.read_exact(&mut pong)).await;
    read.expect("in time").expect("open");
    let number = publisher.publish("for this one");
    assert_eq!(read_batch(&mut stream).await, number);
    let long = u16::try_from(2 + TOPIC_BYTES_MAX).expect("short");
    let head = [&[2, 0, 0, 0, 0, 0, 0][..], &long.to_be_bytes()].concat();
    write(&mut stream, &head).await;
    read_to_end(&mut stream).await;
    serves(&publisher, (events, replay)).await;
    assert!(
        Publisher::new(
            &"x".repeat(TOPIC_BYTES_MAX + 1),
            0,
            PublisherLimits::default()
        )
        .is_err()
    );
}

#[tokio::test]
async fn hostile_bytes_close_their_connection_alone() {
    let (publisher, events, replay) = publisher(PublisherLimits::default()).await;
    let mut open = subscriber(events, "").await;
    joined(&publisher, &mut open).await;
    let claimed = |flags: u8| [&[flags][..], &(1_u64 << 62).to_be_bytes()].concat();
    let greeting = zmtp::greeting().to_vec();
    let curve = [&greeting[..12], b"CURVE", &greeting[17..]].concat();
    let both: Vec<Vec<u8>> = vec![
        b"GET / HTTP/1.1\r\nHost: kvferry\r\n\r\n".to_vec(),
        [&greeting[..], &claimed(2)].concat(),
        [&greeting[..], &claimed(6)].concat(),
        curve,
        hello("PUB"),
        hello("ROUTER"),
        [&greeting[..], b"\x04\x09\x05READY\x01x\x00"].concat(),
    ];
    let to_events: &[&[u8]] = &[
        &claimed(2),
        &claimed(3),
        &claimed(6),
        &[1, 1, 1, 0, 0],
        &[0, 1, 2],
        &[0, 0],
        &[8, 0],
        b"\x04\x0a\x09SUBSCRIBX",
    ];
    let to_replay: &[&[u8]] = &[
        &claimed(2),
        &claimed(3),
        &claimed(6),
        &[0, 8, 0, 0, 0, 0, 0, 0, 0, 0],
        &[1, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        &[1, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0],
        &[1, 0, 1, 0, 0, 0],
        b"\x04\x0a\x09SUBSCRIBE",
    ];
    let after = |hello: Vec<u8>, rest: &[&[u8]]| {
        let bytes = rest.iter().map(|rest| [&hello[..], rest].concat());
        bytes.collect::<Vec<_>>()
    };
    let cases = both.iter().map(|bytes| (events, bytes.clone()));
    let cases = cases.chain(both.iter().map(|bytes| (replay, bytes.clone())));
    let cases = cases.chain(
        after(hello("SUB"), to_events)
            .into_iter()
            .map(|bytes| (events, bytes)),
    );
    let cases = cases.chain(
        after(hello("REQ"), to_replay)
            .into_iter()
            .map(|bytes| (replay, bytes)),
    );
    for (port, bytes) in cases {
        for piece in [bytes.len(), 1] {
            let mut stream = raw(port, b"").await;
            for piece in bytes.chunks(piece) {
                write(&mut stream, piece).await;
            }
            read_to_end(&mut stream).await;
        }
        let number = publisher.publish("meanwhile");
        while next(&mut open).await.0 < number {}
    }
    serves(&publisher, (events, replay)).await;
}

#[tokio::test]
async fn silence_ends_at_the_handshake_deadline() {
    let limits = PublisherLimits {
        handshake: Duration::from_millis(200),
        ..PublisherLimits::default()
    };
    let (publisher, events, replay) = publisher(limits).await;
    for port in [events, replay] {
        for start in [&[][..], &zmtp::greeting()[..30], &zmtp::greeting()] {
            read_to_end(&mut raw(port, start).await).await;
        }
    }
    serves(&publisher, (events, replay)).await;
}
