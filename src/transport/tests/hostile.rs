//! The gate against clients that violate the protocol. After each of them an honest client is served.

use std::io;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;

use super::super::gate::HANDSHAKES_MAX;
use super::super::zmtp::{self, Part};
use super::super::{OtherUsers, TransportError, Violation};
use super::*;

/// Returns a greeting and the READY of a DEALER with this identity.
fn hello(identity: &[u8]) -> Vec<u8> {
    let mut bytes = zmtp::greeting().to_vec();
    bytes.extend(zmtp::ready("DEALER", identity));
    bytes
}

fn message(header: &[u8], body: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (part, payload) in [(Part::Header, header), (Part::Body, body)] {
        zmtp::put_head(&mut bytes, part, payload.len() as u64);
        bytes.extend_from_slice(payload);
    }
    bytes
}

async fn raw(address: &Address) -> UnixStream {
    let Address::Directory(path) = address else {
        panic!("not a directory");
    };
    UnixStream::connect(path.join("kvferry.sock"))
        .await
        .expect("connects")
}

/// Writes as much as the gate accepts; the gate may close the connection meanwhile.
async fn write(stream: &mut UnixStream, bytes: &[u8]) {
    if let Err(error) = stream.write_all(bytes).await {
        let kind = error.kind();
        let expected = [io::ErrorKind::BrokenPipe, io::ErrorKind::ConnectionReset];
        assert!(expected.contains(&kind), "{error}");
    }
}

/// Reads until the gate closes.
async fn read_to_end(stream: &mut UnixStream) {
    let mut buffer = [0; 4096];
    let end = async { while let Ok(1..) = stream.read(&mut buffer).await {} };
    timeout(TEST_TIMEOUT, end).await.expect("closed in time");
}

/// Reads the gate's greeting and READY.
async fn read_hello(stream: &mut UnixStream) {
    let mut bytes = vec![0; 64 + zmtp::ready("ROUTER", b"").len()];
    let read = timeout(TEST_TIMEOUT, stream.read_exact(&mut bytes)).await;
    read.expect("in time").expect("open");
    assert_eq!(bytes[64..], zmtp::ready("ROUTER", b""));
}

/// Returns a raw client after the handshake, and its id at the listener.
async fn shaken(address: &Address, listener: &mut Listener) -> (UnixStream, PeerId) {
    let mut stream = raw(address).await;
    write(&mut stream, &hello(b"")).await;
    read_hello(&mut stream).await;
    let peer = opened(listener).await;
    (stream, peer)
}

/// Asserts that a new client gets its echo and that the listener has no other event.
async fn serves(address: &Address, listener: &mut Listener) {
    let connecting = ZmqTransport.connect(address, Limits::default(), TEST_TIMEOUT);
    let mut client = connecting.await.expect("connects");
    let peer = opened(listener).await;
    client.send(frame("h", "still here")).await.expect("sent");
    let (from, sent) = arrived(listener).await;
    assert_eq!(from, peer);
    listener.sender().send(peer, sent).await.expect("sent");
    assert_eq!(received(&mut client).await, frame("h", "still here"));
    drop(client);
    assert_eq!(closed(listener).await, (peer, CloseReason::ByPeer));
}

/// Asserts that the bytes are refused before the connection is open, sent in one piece and byte by byte.
async fn refused_before_open(bytes: &[u8]) {
    let (_root, address, mut listener) = zmq_listener(Limits::default()).await;
    for piece in [bytes.len(), 1] {
        let mut stream = raw(&address).await;
        for piece in bytes.chunks(piece) {
            write(&mut stream, piece).await;
        }
        read_to_end(&mut stream).await;
    }
    serves(&address, &mut listener).await;
    let refused = listener.sender().refused();
    assert_eq!((refused.handshakes, refused.violations), (2, 0));
}

#[tokio::test]
async fn a_client_that_only_looks_whether_a_process_listens_is_not_refused() {
    let (_root, address, mut listener) = zmq_listener(Limits::default()).await;
    for (bytes, refused) in [(&b""[..], 0), (&zmtp::greeting(), 1)] {
        let mut stream = raw(&address).await;
        write(&mut stream, bytes).await;
        stream.shutdown().await.expect("closed");
        read_to_end(&mut stream).await;
        serves(&address, &mut listener).await;
        assert_eq!(listener.sender().refused().handshakes, refused);
    }
}

/// Asserts that the bytes close an open connection for this reason, sent in one piece and byte by byte.
async fn closed_after_open(bytes: &[u8], violation: Violation) {
    let (_root, address, mut listener) = zmq_listener(Limits::default()).await;
    for piece in [bytes.len(), 1] {
        let (mut stream, peer) = shaken(&address, &mut listener).await;
        for piece in bytes.chunks(piece) {
            write(&mut stream, piece).await;
        }
        read_to_end(&mut stream).await;
        let reason = CloseReason::Violation(violation);
        assert_eq!(closed(&mut listener).await, (peer, reason));
    }
    serves(&address, &mut listener).await;
    let refused = listener.sender().refused();
    assert_eq!((refused.handshakes, refused.violations), (0, 2));
    let long = matches!(violation, Violation::HeaderTooLong | Violation::BodyTooLong);
    assert_eq!(refused.too_long, if long { 2 } else { 0 }, "{violation}");
}

fn forged(flags: u8) -> Vec<u8> {
    [&[flags][..], &(1_u64 << 40).to_be_bytes()].concat()
}

#[tokio::test]
async fn a_forged_length_before_ready() {
    let greeted = |flags| [&zmtp::greeting()[..], &forged(flags)].concat();
    refused_before_open(&greeted(2)).await;
    refused_before_open(&greeted(6)).await;
}

#[tokio::test]
async fn a_forged_length_after_ready() {
    closed_after_open(&forged(3), Violation::HeaderTooLong).await;
    closed_after_open(&forged(6), Violation::CommandTooLong).await;
    let body = [&[1, 1, b'h'][..], &forged(2)].concat();
    closed_after_open(&body, Violation::BodyTooLong).await;
}

#[tokio::test]
async fn other_socket_types_and_mechanisms() {
    for other in ["REQ", "PUB", "ROUTER", "STREAM"] {
        let ready = zmtp::ready(other, b"");
        refused_before_open(&[&zmtp::greeting()[..], &ready].concat()).await;
    }
    let mut curve = zmtp::greeting();
    curve[12..17].copy_from_slice(b"CURVE");
    refused_before_open(&curve).await;
}

#[tokio::test]
async fn unknown_commands_and_single_parts() {
    closed_after_open(b"\x04\x0a\x09SUBSCRIBE", Violation::UnexpectedCommand).await;
    closed_after_open(&[0, 1, b'x'], Violation::Parts).await;
}

/// Pseudo-random bytes, equal in every run.
fn noise(seed: u64, bytes: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let step = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()[3]
    };
    std::iter::repeat_with(step).take(bytes).collect()
}

#[tokio::test]
async fn random_bytes_at_every_stage() {
    let limits = Limits {
        handshake: Duration::from_millis(300),
        ..Limits::default()
    };
    let (_root, address, mut listener) = zmq_listener(limits).await;
    for seed in 0..150 {
        let start = match seed % 3 {
            0 => Vec::new(),
            1 => zmtp::greeting().to_vec(),
            _ => hello(b"noisy"),
        };
        let mut stream = raw(&address).await;
        write(&mut stream, &[start, noise(seed, 3000)].concat()).await;
        drop(stream);
    }
    // Connections that reached READY were opened and are closed again; the others left no trace.
    let mut open = 0;
    let honest = ZmqTransport.connect(&address, Limits::default(), TEST_TIMEOUT);
    let mut honest = honest.await.expect("connects");
    honest.send(frame("h", "honest")).await.expect("sent");
    let mut seen = false;
    while !seen || open > 1 {
        match event(&mut listener).await {
            ListenerEvent::Opened { .. } => open += 1,
            ListenerEvent::Closed { .. } => open -= 1,
            ListenerEvent::Frame { frame: sent, .. } => seen |= sent == frame("h", "honest"),
        }
    }
}

#[tokio::test]
async fn endless_parts_of_one_byte() {
    let (_root, address, mut listener) = zmq_listener(Limits::default()).await;
    let (mut stream, peer) = shaken(&address, &mut listener).await;
    write(&mut stream, &[1, 1, b'x'].repeat(2_000_000)).await;
    let reason = CloseReason::Violation(Violation::Parts);
    assert_eq!(closed(&mut listener).await, (peer, reason));
    serves(&address, &mut listener).await;
}

#[tokio::test]
async fn silence_ends_at_the_handshake_deadline() {
    let limits = Limits {
        handshake: Duration::from_millis(200),
        ..Limits::default()
    };
    let (_root, address, mut listener) = zmq_listener(limits).await;
    for start in [&[][..], &zmtp::greeting()[..30], &zmtp::greeting()] {
        let mut stream = raw(&address).await;
        write(&mut stream, start).await;
        read_to_end(&mut stream).await;
    }
    serves(&address, &mut listener).await;
}

#[tokio::test]
async fn a_flood_of_silent_connections_ends_and_harms_no_open_one() {
    let limits = Limits {
        handshake: Duration::from_millis(500),
        ..Limits::default()
    };
    let (_root, address, mut listener) = zmq_listener(limits).await;
    let (mut open, peer) = shaken(&address, &mut listener).await;
    let mut flood = Vec::new();
    for _ in 0..HANDSHAKES_MAX * 3 {
        flood.push(raw(&address).await);
    }
    write(&mut open, &message(b"h", b"during the flood")).await;
    let during = frame("h", "during the flood");
    assert_eq!(arrived(&mut listener).await, (peer, during));
    for stream in &mut flood {
        read_to_end(stream).await;
    }
    serves(&address, &mut listener).await;
}

#[tokio::test]
async fn silent_connections_do_not_keep_others_out() {
    let limits = Limits {
        handshake: TEST_TIMEOUT * 3,
        ..Limits::default()
    };
    let (_root, address, mut listener) = zmq_listener(limits).await;
    let mut silent = Vec::new();
    for _ in 0..HANDSHAKES_MAX {
        silent.push(raw(&address).await);
    }
    serves(&address, &mut listener).await;
    read_to_end(&mut silent[0]).await;
}

#[tokio::test]
async fn a_flood_of_open_connections_stops_at_the_limit() {
    let limits = Limits {
        connections: 3,
        ..Limits::default()
    };
    let (_root, address, mut listener) = zmq_listener(limits).await;
    let mut open = Vec::new();
    for _ in 0..3 {
        open.push(shaken(&address, &mut listener).await);
    }
    for _ in 0..20 {
        let mut stream = raw(&address).await;
        write(&mut stream, &hello(b"")).await;
        read_to_end(&mut stream).await;
    }
    let (stream, peer) = open.remove(0);
    drop(stream);
    assert_eq!(closed(&mut listener).await, (peer, CloseReason::ByPeer));
    serves(&address, &mut listener).await;
}

#[tokio::test]
async fn an_identity_cannot_be_taken_over() {
    let (_root, address, mut listener) = zmq_listener(Limits::default()).await;
    let (mut victim, first) = shaken(&address, &mut listener).await;
    let mut thief = raw(&address).await;
    write(&mut thief, &hello(&first.0.to_be_bytes())).await;
    read_hello(&mut thief).await;
    let second = opened(&mut listener).await;
    assert_ne!(first, second);
    write(&mut thief, &message(b"h", b"thief")).await;
    assert_eq!(arrived(&mut listener).await, (second, frame("h", "thief")));
    let sent = message(b"h", b"for the victim");
    let sender = listener.sender();
    sender
        .try_send(first, frame("h", "for the victim"))
        .expect("sent");
    let mut got = vec![0; sent.len()];
    let read = timeout(TEST_TIMEOUT, victim.read_exact(&mut got)).await;
    read.expect("in time").expect("open");
    assert_eq!(got, sent);
}

#[tokio::test]
async fn a_half_closed_client_is_closed() {
    let (_root, address, mut listener) = zmq_listener(Limits::default()).await;
    let (mut stream, peer) = shaken(&address, &mut listener).await;
    write(&mut stream, &message(b"h", b"last")).await;
    stream.shutdown().await.expect("half closed");
    assert_eq!(arrived(&mut listener).await, (peer, frame("h", "last")));
    assert_eq!(closed(&mut listener).await, (peer, CloseReason::ByPeer));
    read_to_end(&mut stream).await;
    serves(&address, &mut listener).await;
}

#[tokio::test]
async fn a_message_cut_short_is_not_delivered() {
    let (_root, address, mut listener) = zmq_listener(Limits::default()).await;
    let whole = message(b"header", b"body");
    for cut in 1..whole.len() {
        let (mut stream, peer) = shaken(&address, &mut listener).await;
        write(&mut stream, &whole[..cut]).await;
        drop(stream);
        assert_eq!(closed(&mut listener).await, (peer, CloseReason::ByPeer));
    }
    serves(&address, &mut listener).await;
}

#[tokio::test]
async fn a_ping_is_answered_and_disturbs_nothing() {
    let (_root, address, mut listener) = zmq_listener(Limits::default()).await;
    let (mut stream, peer) = shaken(&address, &mut listener).await;
    let ping = b"\x04\x0b\x04PING\x00\x05ctx!";
    let pong = b"\x04\x09\x04PONGctx!";
    for _ in 0..3 {
        write(&mut stream, ping).await;
        let mut got = [0; 11];
        let read = timeout(TEST_TIMEOUT, stream.read_exact(&mut got)).await;
        read.expect("in time").expect("open");
        assert_eq!(&got, pong);
    }
    let sent = message(b"h", b"between pings");
    write(&mut stream, &sent).await;
    let (_, sent_frame) = arrived(&mut listener).await;
    listener.sender().try_send(peer, sent_frame).expect("sent");
    let mut got = vec![0; sent.len()];
    stream.read_exact(&mut got).await.expect("open");
    assert_eq!(got, sent);
}

#[tokio::test]
async fn pings_without_reading_the_answers_pile_up_nowhere() {
    let limits = Limits {
        slow_after: Duration::from_millis(300),
        ..Limits::default()
    };
    let (_root, address, mut listener) = zmq_listener(limits).await;
    let (mut stream, peer) = shaken(&address, &mut listener).await;
    let pings = b"\x04\x0b\x04PING\x00\x05ctx!".repeat(200_000);
    write(&mut stream, &pings).await;
    write(&mut stream, &message(b"h", b"after them")).await;
    match event(&mut listener).await {
        ListenerEvent::Frame { frame: sent, .. } => assert_eq!(sent, frame("h", "after them")),
        ListenerEvent::Closed { reason, .. } => assert_eq!(reason, CloseReason::SlowConsumer),
        other => panic!("{peer}: {other:?}"),
    }
}

#[tokio::test]
async fn a_pong_never_splits_a_message() {
    let (_root, address, mut listener) = zmq_listener(Limits::default()).await;
    let (mut stream, peer) = shaken(&address, &mut listener).await;
    let body = vec![0x55; 1 << 20];
    let sender = listener.sender();
    for _ in 0..8 {
        sender
            .try_send(peer, Frame::new("h", body.clone()))
            .expect("sent");
        write(&mut stream, b"\x04\x07\x04PING\x00\x05").await;
    }
    let whole = message(b"h", &body);
    let mut messages = 0;
    while messages < 8 {
        let mut flags = [0; 1];
        stream.read_exact(&mut flags).await.expect("open");
        let (expected, counts) = match flags {
            [4] => (b"\x04\x05\x04PONG".to_vec(), 0),
            [1] => (whole.clone(), 1),
            other => panic!("flags {other:?}"),
        };
        let mut rest = vec![0; expected.len() - 1];
        stream.read_exact(&mut rest).await.expect("open");
        assert!(rest == expected[1..], "a message was split");
        messages += counts;
    }
}

#[tokio::test]
async fn a_server_that_speaks_no_zmtp_is_an_error_in_time() {
    let (_root, address) = own_directory();
    let Address::Directory(path) = &address else {
        panic!("not a directory");
    };
    super::super::prepare_for(path, &OtherUsers::default()).expect("made");
    let mute = tokio::net::UnixListener::bind(path.join("kvferry.sock")).expect("binds");
    let short = Duration::from_millis(100);
    let error = ZmqTransport
        .connect(&address, Limits::default(), short)
        .await;
    assert!(matches!(
        error.err(),
        Some(TransportError::Unreachable { .. })
    ));
    drop(mute);
}
