//! The publisher: what subscribers and clients of its replay receive, also slow ones. Its limits are tested in `limits`.

mod limits;

use std::io;

use bytes::Bytes;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use zeromq::{DealerSocket, Socket as _, SocketRecv as _, SocketSend as _, SubSocket, ZmqMessage};

use super::super::zmtp;
use super::super::{PublicAddress, Publisher, PublisherLimits};
use super::*;

const TOPIC: &str = "kv@pod@model";
const FIRST: u64 = 1000;
const END: u64 = u64::MAX;

/// A publisher on ports of its own, and the ports of its PUB and its ROUTER.
async fn publisher(limits: PublisherLimits) -> (Publisher, u16, u16) {
    let mut publisher = Publisher::new(TOPIC, FIRST, limits).expect("a topic");
    let any = PublicAddress::Tcp("127.0.0.1:0".to_owned());
    let events = publisher.serve_subscribers(&any).await.expect("listens");
    let replay = publisher.serve_replays(&any).await.expect("listens");
    (publisher, events.expect("a port"), replay.expect("a port"))
}

async fn subscriber(port: u16, topic: &str) -> SubSocket {
    let mut socket = SubSocket::new();
    let connected = socket.connect(&format!("tcp://127.0.0.1:{port}")).await;
    connected.expect("connects");
    socket.subscribe(topic).await.expect("subscribes");
    socket
}

fn parts(message: ZmqMessage) -> Vec<Bytes> {
    message.into_vec()
}

async fn next(socket: &mut SubSocket) -> (u64, Bytes) {
    let message = timeout(TEST_TIMEOUT, socket.recv()).await;
    let parts = parts(message.expect("a batch in time").expect("open"));
    assert_eq!((parts.len(), &parts[0][..]), (3, TOPIC.as_bytes()));
    (number(&parts[1]), parts[2].clone())
}

fn number(bytes: &[u8]) -> u64 {
    u64::from_be_bytes(bytes.try_into().expect("8 bytes"))
}

/// Publishes empty batches until a subscriber receives one; returns its number. The subscription takes a moment.
async fn joined(publisher: &Publisher, socket: &mut SubSocket) -> u64 {
    let reads = async {
        loop {
            publisher.publish(Bytes::new());
            if let Ok(batch) = timeout(Duration::from_millis(20), next(socket)).await {
                return batch.0;
            }
        }
    };
    timeout(TEST_TIMEOUT, reads).await.expect("subscribed")
}

/// Requests the batches from a number on; returns them without the end.
async fn replayed(port: u16, from: u64) -> Vec<(u64, Bytes)> {
    let mut socket = DealerSocket::new();
    let connected = socket.connect(&format!("tcp://127.0.0.1:{port}")).await;
    connected.expect("connects");
    let mut request = ZmqMessage::from(Bytes::new());
    request.push_back(Bytes::copy_from_slice(&from.to_be_bytes()));
    socket.send(request).await.expect("sent");
    let mut batches = Vec::new();
    loop {
        let message = timeout(TEST_TIMEOUT, socket.recv()).await;
        let parts = parts(message.expect("in time").expect("open"));
        assert_eq!((parts.len(), parts[0].len()), (4, 0));
        if number(&parts[2]) == END {
            assert_eq!((parts[1].len(), parts[3].len()), (0, 0));
            return batches;
        }
        assert_eq!(&parts[1][..], TOPIC.as_bytes());
        batches.push((number(&parts[2]), parts[3].clone()));
    }
}

fn hello(socket_type: &str) -> Vec<u8> {
    [&zmtp::greeting()[..], &zmtp::ready(socket_type, b"")].concat()
}

/// A raw peer that has sent these bytes.
async fn raw(port: u16, bytes: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(("127.0.0.1", port))
        .await
        .expect("connects");
    write(&mut stream, bytes).await;
    stream
}

/// Writes as much as the publisher takes; it may close the connection meanwhile.
async fn write(stream: &mut TcpStream, bytes: &[u8]) {
    if let Err(error) = stream.write_all(bytes).await {
        let expected = [io::ErrorKind::BrokenPipe, io::ErrorKind::ConnectionReset];
        assert!(expected.contains(&error.kind()), "{error}");
    }
}

async fn read_to_end(stream: &mut TcpStream) {
    let mut buffer = [0; 65536];
    let end = async { while let Ok(1..) = stream.read(&mut buffer).await {} };
    timeout(TEST_TIMEOUT, end).await.expect("closed in time");
}

/// Reads the publisher's greeting and READY.
async fn read_hello(stream: &mut TcpStream, socket_type: &str) {
    let ready = zmtp::ready(socket_type, b"");
    let mut bytes = vec![0; 64 + ready.len()];
    let read = timeout(TEST_TIMEOUT, stream.read_exact(&mut bytes)).await;
    read.expect("in time").expect("open");
    assert_eq!(bytes[64..], ready);
}

/// Reads one frame of a message: whether another one follows, and its bytes.
async fn read_part(stream: &mut TcpStream) -> (bool, Vec<u8>) {
    let read = async {
        let flags = stream.read_u8().await.expect("open");
        let bytes = match flags & 2 {
            0 => u64::from(stream.read_u8().await.expect("open")),
            _ => stream.read_u64().await.expect("open"),
        };
        let mut part = vec![0; usize::try_from(bytes).expect("short")];
        stream.read_exact(&mut part).await.expect("open");
        (flags & 1 == 1, part)
    };
    timeout(TEST_TIMEOUT, read).await.expect("a part in time")
}

/// Reads a batch of the PUB; returns its number.
async fn read_batch(stream: &mut TcpStream) -> u64 {
    assert_eq!(read_part(stream).await, (true, TOPIC.as_bytes().to_vec()));
    let (more, bytes) = read_part(stream).await;
    assert!(more, "no payload");
    assert!(!read_part(stream).await.0, "a fourth part");
    number(&bytes)
}

/// Asserts that honest peers get what they should.
async fn serves(publisher: &Publisher, ports: (u16, u16)) {
    let mut socket = subscriber(ports.0, TOPIC).await;
    let first = joined(publisher, &mut socket).await;
    let number = publisher.publish("still here");
    while next(&mut socket).await.0 < number {}
    let batches = replayed(ports.1, first).await;
    let numbers: Vec<u64> = batches.iter().map(|(number, _)| *number).collect();
    assert_eq!(numbers, (first..=number).collect::<Vec<_>>());
    assert_eq!(batches.last().expect("kept").1, "still here");
}

#[tokio::test]
async fn a_subscriber_receives_topic_number_and_payload() {
    let (publisher, events, replay) = publisher(PublisherLimits::default()).await;
    for topic in ["", "kv@", TOPIC] {
        let mut socket = subscriber(events, topic).await;
        joined(&publisher, &mut socket).await;
        let number = publisher.publish(vec![7; 100_000]);
        let last = loop {
            let (at, payload) = next(&mut socket).await;
            if at == number {
                break payload;
            }
        };
        assert_eq!(last, vec![7; 100_000]);
    }
    serves(&publisher, (events, replay)).await;
}

#[tokio::test]
async fn the_bytes_of_a_batch_and_of_a_replay_are_those_of_the_format() {
    let (publisher, events, replay) = publisher(PublisherLimits::default()).await;
    let mut stream = raw(events, &hello("SUB")).await;
    read_hello(&mut stream, "PUB").await;
    write(&mut stream, b"\x00\x01\x01").await;
    // The answer to a PING shows that the subscription before it was read.
    write(&mut stream, b"\x04\x07\x04PING\x00\x05").await;
    let mut pong = [0; 7];
    stream.read_exact(&mut pong).await.expect("open");
    assert_eq!(publisher.publish("one"), FIRST);
    let mut got = vec![0; 14 + 10 + 5];
    stream.read_exact(&mut got).await.expect("open");
    let numbered = [&[1, 8][..], &FIRST.to_be_bytes()].concat();
    let topic = [&[1, 12][..], TOPIC.as_bytes()].concat();
    let batch = [&topic[..], &numbered, b"\x00\x03one"].concat();
    assert_eq!(got, batch);

    let mut stream = raw(replay, &hello("DEALER")).await;
    read_hello(&mut stream, "ROUTER").await;
    write(&mut stream, &[&b"\x01\x00\x00\x08"[..], &[0; 8]].concat()).await;
    let end = b"\x01\x00\x01\x00\x01\x08\xff\xff\xff\xff\xff\xff\xff\xff\x00\x00";
    let expected = [&b"\x01\x00"[..], &batch, end].concat();
    let mut got = vec![0; expected.len()];
    stream.read_exact(&mut got).await.expect("open");
    assert_eq!(got, expected);
}

#[tokio::test]
async fn other_topics_and_ended_subscriptions_bring_nothing() {
    let (publisher, events, _) = publisher(PublisherLimits::default()).await;
    let mut stream = raw(events, &hello("SUB")).await;
    read_hello(&mut stream, "PUB").await;
    let message = |flag: u8, topic: &str| {
        let length = u8::try_from(topic.len() + 1).expect("short");
        [&[0, length, flag][..], topic.as_bytes()].concat()
    };
    let ping = b"\x04\x07\x04PING\x00\x05";
    let silent = [
        vec![message(1, "other"), message(1, "kv@pod@model+")],
        vec![message(1, "kv"), message(0, "kv")],
        vec![message(0, ""), message(0, "kv")],
        // As commands of ZMTP 3.1.
        vec![b"\x04\x0c\x09SUBSCRIBEkv\x04\x09\x06CANCELkv".to_vec()],
    ];
    for messages in silent {
        write(&mut stream, &[&messages.concat()[..], ping].concat()).await;
        publisher.publish("not for this one");
        let mut pong = [0; 7];
        let read = timeout(TEST_TIMEOUT, stream.read_exact(&mut pong)).await;
        read.expect("in time").expect("open");
        assert_eq!(&pong, b"\x04\x05\x04PONG", "a batch came");
    }
    // Two of three are ended: the third one counts.
    for start in [
        [
            message(1, ""),
            message(1, "kv"),
            message(1, "kv@"),
            message(0, "kv"),
            message(0, ""),
        ]
        .concat(),
        b"\x04\x0d\x09SUBSCRIBEkv@".to_vec(),
    ] {
        write(&mut stream, &[&start[..], ping].concat()).await;
        let mut pong = [0; 7];
        stream.read_exact(&mut pong).await.expect("open");
        let number = publisher.publish("for this one");
        assert_eq!(read_batch(&mut stream).await, number);
        write(&mut stream, &message(0, "kv@")).await;
    }
}

#[tokio::test]
async fn a_slow_subscriber_sees_a_gap_and_delays_nobody() {
    let limits = PublisherLimits {
        kept_batches: 4,
        ..PublisherLimits::default()
    };
    let (publisher, events, replay) = publisher(limits).await;
    let mut slow = raw(events, &[&hello("SUB")[..], b"\x00\x01\x01"].concat()).await;
    read_hello(&mut slow, "PUB").await;
    let mut fast = subscriber(events, "").await;
    joined(&publisher, &mut fast).await;
    // More than the buffers of the system take, while the slow one reads nothing.
    let mut last = 0;
    for _ in 0..64 {
        last = publisher.publish(vec![1; 1 << 20]);
        while next(&mut fast).await.0 < last {}
    }
    let mut numbers = Vec::new();
    while numbers.last() != Some(&last) {
        numbers.push(read_batch(&mut slow).await);
    }
    assert!(numbers.is_sorted_by(|a, b| a < b), "{numbers:?}");
    let gap = numbers.windows(2).find(|pair| pair[1] > pair[0] + 1);
    assert!(gap.is_some(), "nothing was dropped: {numbers:?}");
    serves(&publisher, (events, replay)).await;
}

/// Takes a subscriber's place, and waits until it is free while a batch is sent that is longer than what the system keeps for a
/// connection.
async fn frees_the_place_of_one_that(reads: impl AsyncFn(&mut TcpStream)) {
    let limits = PublisherLimits {
        slow_after: Duration::from_millis(700),
        connections: 1,
        ..PublisherLimits::default()
    };
    let (publisher, events, replay) = publisher(limits).await;
    let mut slow = raw(events, &[&hello("SUB")[..], b"\x00\x01\x01"].concat()).await;
    read_hello(&mut slow, "PUB").await;
    let mut refused = raw(events, &hello("SUB")).await;
    read_to_end(&mut refused).await;
    publisher.publish(vec![1; 64 << 20]);
    let freed = async {
        loop {
            let mut stream = raw(events, &hello("SUB")).await;
            let mut bytes = [0; 65];
            if stream.read_exact(&mut bytes).await.is_ok() {
                return;
            }
        }
    };
    let freed = timeout(TEST_TIMEOUT, freed);
    let reading = async {
        reads(&mut slow).await;
        std::future::pending::<()>().await;
    };
    tokio::select! {
        freed = freed => freed.expect("the place is free"),
        () = reading => {}
    }
    drop(slow);
    serves(&publisher, (events, replay)).await;
}

#[tokio::test]
async fn a_subscriber_that_takes_nothing_is_closed_and_frees_its_place() {
    frees_the_place_of_one_that(async |_: &mut TcpStream| {}).await;
}

#[tokio::test]
async fn a_subscriber_that_takes_too_long_for_a_batch_is_closed_and_frees_its_place() {
    frees_the_place_of_one_that(async |slow: &mut TcpStream| {
        let mut bytes = vec![0; 64 << 10];
        while let Ok(1..) = slow.read(&mut bytes).await {
            // In time for the limit on a subscriber that takes nothing.
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
}

#[tokio::test]
async fn a_slow_client_of_the_replay_delays_nobody() {
    let (publisher, events, replay) = publisher(PublisherLimits::default()).await;
    for _ in 0..64 {
        publisher.publish(vec![1; 1 << 20]);
    }
    // Requests without reading the answers: one is answered, one waits, and no further one is read.
    let request = [&b"\x01\x00\x00\x08"[..], &[0; 8]].concat();
    let mut slow = raw(replay, &hello("DEALER")).await;
    read_hello(&mut slow, "ROUTER").await;
    write(&mut slow, &request.repeat(100)).await;
    serves(&publisher, (events, replay)).await;
    let mut batches = 0;
    while batches < 64 {
        let parts = [
            read_part(&mut slow).await,
            read_part(&mut slow).await,
            read_part(&mut slow).await,
            read_part(&mut slow).await,
        ];
        assert_eq!(number(&parts[2].1), FIRST + batches);
        batches += 1;
    }
}

#[tokio::test]
async fn a_replay_ends_although_batches_are_published_meanwhile() {
    let limits = PublisherLimits {
        kept_batches: 8,
        ..PublisherLimits::default()
    };
    let (publisher, _, replay) = publisher(limits).await;
    for _ in 0..8 {
        publisher.publish(vec![1; 4 << 20]);
    }
    let mut client = raw(replay, &hello("DEALER")).await;
    read_hello(&mut client, "ROUTER").await;
    write(&mut client, &[&b"\x01\x00\x00\x08"[..], &[0; 8]].concat()).await;
    let mut numbers = Vec::new();
    loop {
        let mut parts = Vec::new();
        while parts.last().is_none_or(|(more, _)| *more) {
            parts.push(read_part(&mut client).await);
        }
        let number = number(&parts[2].1);
        if number == END {
            break;
        }
        numbers.push(number);
        publisher.publish("meanwhile");
    }
    assert!(numbers.len() <= 8, "{numbers:?}");
    assert!(
        numbers.iter().all(|number| *number < FIRST + 8),
        "{numbers:?}"
    );
    assert_eq!(numbers[0], FIRST);
}

#[tokio::test]
async fn a_unix_socket_is_served_replaced_and_removed() {
    let folder = tempfile::tempdir().expect("temporary directory");
    let path = folder.path().join("events");
    // A process that was killed leaves its socket behind.
    drop(std::os::unix::net::UnixListener::bind(&path).expect("binds"));
    let at = PublicAddress::Ipc(path.clone());
    let open = async || {
        let mut publisher = Publisher::new(TOPIC, FIRST, PublisherLimits::default())?;
        publisher.serve_subscribers(&at).await?;
        io::Result::Ok(publisher)
    };
    let publisher = open().await.expect("listens");
    let second = open().await.err().map(|error| error.kind());
    assert_eq!(second, Some(io::ErrorKind::AddrInUse));
    let mut socket = SubSocket::new();
    let connected = socket.connect(&format!("ipc://{}", path.display())).await;
    connected.expect("connects");
    socket.subscribe("").await.expect("subscribes");
    joined(&publisher, &mut socket).await;
    drop(publisher);
    assert!(!path.exists(), "the socket was left behind");
    std::fs::write(&path, "a file").expect("written");
    let refused = open().await.err().map(|error| error.kind());
    assert_eq!(
        refused,
        Some(io::ErrorKind::AddrInUse),
        "a file was removed"
    );
}

#[tokio::test]
async fn the_end_of_a_publisher_closes_its_connections() {
    let (publisher, events, replay) = publisher(PublisherLimits::default()).await;
    let mut streams = vec![
        raw(events, &hello("SUB")).await,
        raw(replay, &hello("REQ")).await,
    ];
    read_hello(&mut streams[0], "PUB").await;
    read_hello(&mut streams[1], "ROUTER").await;
    streams.push(raw(events, b"").await);
    drop(publisher);
    for stream in &mut streams {
        read_to_end(stream).await;
    }
}
