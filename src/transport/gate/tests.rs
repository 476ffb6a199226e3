//! The gate over streams that pass a chosen number of bytes at a time.

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex, split};

use super::*;
use crate::listener::PEER_FRAMES_MAX;
use crate::stream::CHUNK_BYTES;
use crate::zmtp::{self, Part};
use crate::{Address, CloseReason, Frame, Listener, ListenerEvent};

/// Deadline that suffices on a loaded machine; reached only when a test fails.
const TEST_TIMEOUT: Duration = Duration::from_secs(20);
const PING: &[u8] = b"\x04\x0b\x04PING\x00\x05ctx!";
const PONG: &[u8] = b"\x04\x09\x04PONGctx!";

/// A listener whose connections the test makes.
struct Bench {
    gate: Arc<Gate>,
    handshakes: Arc<HandshakePermits>,
    listener: Listener,
}

impl Bench {
    fn new(limits: Limits) -> Self {
        let limits = Arc::new(limits);
        let address = Address::Memory("gate".to_owned());
        let (listener, intake) = Listener::new(address, &limits, |_| Box::new(()));
        Self {
            gate: Arc::new(Gate::new(intake, limits)),
            handshakes: HandshakePermits::new(HANDSHAKES_MAX),
            listener,
        }
    }

    /// Connects over a stream that holds at most `piece` bytes in each direction.
    fn connect(&self, piece: usize) -> DuplexStream {
        let (ours, theirs) = duplex(piece);
        let (gate, handshake) = (self.gate.clone(), self.handshakes.take());
        tokio::spawn(async move {
            let (read, write) = split(theirs);
            let origin = Origin::Local {
                user: User::Own,
                pid: None,
            };
            let shaking = open_connection(&gate, read, write, origin);
            assert!(serve(&gate, shaking, handshake).await.is_none());
        });
        ours
    }

    async fn event(&mut self) -> ListenerEvent {
        let next = timeout(TEST_TIMEOUT, self.listener.next()).await;
        next.expect("an event in time").expect("tasks run")
    }

    async fn opened(&mut self) -> PeerId {
        match self.event().await {
            ListenerEvent::Opened { peer, .. } => peer,
            other => panic!("not opened: {other:?}"),
        }
    }

    async fn arrived(&mut self) -> (PeerId, Frame) {
        match self.event().await {
            ListenerEvent::Frame { peer, frame } => (peer, frame),
            other => panic!("not a frame: {other:?}"),
        }
    }

    async fn closed(&mut self) -> CloseReason {
        match self.event().await {
            ListenerEvent::Closed { reason, .. } => reason,
            other => panic!("not closed: {other:?}"),
        }
    }
}

fn hello() -> Vec<u8> {
    [&zmtp::greeting()[..], &zmtp::ready("DEALER", b"")].concat()
}

fn welcome() -> Vec<u8> {
    [&zmtp::greeting()[..], &zmtp::ready("ROUTER", b"")].concat()
}

fn message(frame: &Frame) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (part, payload) in [(Part::Header, &frame.header), (Part::Body, &frame.body)] {
        zmtp::put_head(&mut bytes, part, payload.len() as u64);
        bytes.extend_from_slice(payload);
    }
    bytes
}

async fn read(stream: &mut DuplexStream, bytes: usize) -> Vec<u8> {
    let mut read = vec![0; bytes];
    let reading = timeout(TEST_TIMEOUT, stream.read_exact(&mut read)).await;
    reading.expect("in time").expect("open");
    read
}

#[tokio::test]
async fn frames_cut_at_every_point_pass_whole_in_both_directions() {
    let frames = [
        Frame::new("h", "body"),
        Frame::new("", ""),
        Frame::new(vec![1; 256], vec![2; 300]),
    ];
    let messages = frames.iter().map(message).collect::<Vec<_>>().concat();
    let said = [&hello()[..], PING, &messages].concat();
    let expected = [&welcome()[..], PONG, &messages].concat();
    let mut bench = Bench::new(Limits::default());
    for piece in 1..=said.len() {
        let client = bench.connect(piece);
        let (mut client_read, mut client_write) = split(client);
        let (said, bytes) = (said.clone(), expected.len());
        let writing = tokio::spawn(async move {
            client_write.write_all(&said).await.expect("open");
            client_write
        });
        let reading = tokio::spawn(async move {
            let mut got = vec![0; bytes];
            client_read.read_exact(&mut got).await.expect("open");
            got
        });
        let peer = bench.opened().await;
        for frame in &frames {
            assert_eq!(bench.arrived().await, (peer, frame.clone()), "{piece}");
        }
        for frame in &frames {
            let sent = bench.listener.sender().try_send(peer, frame.clone());
            sent.expect("sent");
        }
        let got = timeout(TEST_TIMEOUT, reading).await.expect("in time");
        let mut got = got.expect("no panic");
        // The PONG may come between any two messages.
        let at = (0..got.len()).find(|at| got[*at..].starts_with(PONG));
        got.drain(at.expect("a PONG")..at.expect("a PONG") + PONG.len());
        assert_eq!(got, [&welcome()[..], &messages].concat(), "{piece}");
        drop(writing.await.expect("no panic"));
        assert_eq!(bench.closed().await, CloseReason::ByPeer);
    }
}

#[tokio::test]
async fn long_frames_pass_between_short_ones() {
    let mut bench = Bench::new(Limits::default());
    let sizes = [0, 1, 255, 256, CHUNK_BYTES - 9, CHUNK_BYTES, 1 << 20, 3];
    let frames: Vec<_> = sizes
        .iter()
        .enumerate()
        .map(|(n, bytes)| Frame::new(vec![n as u8; n], vec![n as u8; *bytes]))
        .collect();
    let messages = frames.iter().map(message).collect::<Vec<_>>().concat();
    let mut client = bench.connect(1000);
    client.write_all(&hello()).await.expect("open");
    let peer = bench.opened().await;
    for frame in &frames {
        let sent = bench.listener.sender().try_send(peer, frame.clone());
        sent.expect("sent");
    }
    assert_eq!(read(&mut client, welcome().len()).await, welcome());
    assert!(read(&mut client, messages.len()).await == messages);
    let writing = tokio::spawn(async move { client.write_all(&messages).await.map(|()| client) });
    for frame in &frames {
        assert!(bench.arrived().await == (peer, frame.clone()));
    }
    writing.await.expect("no panic").expect("open");
    assert_eq!(bench.closed().await, CloseReason::ByPeer);
}

#[tokio::test]
async fn a_client_that_closes_inside_a_long_body_leaves_nothing() {
    let limits = Limits {
        connections: 1,
        ..Limits::default()
    };
    let mut bench = Bench::new(limits.clone());
    let frame = Frame::new("h", vec![7; limits.body_bytes]);
    let whole = message(&frame);
    for part in [20, CHUNK_BYTES, whole.len() / 2, whole.len() - 1] {
        let mut client = bench.connect(CHUNK_BYTES);
        client.write_all(&hello()).await.expect("open");
        bench.opened().await;
        read(&mut client, welcome().len()).await;
        client.write_all(&whole[..part]).await.expect("open");
        drop(client);
        assert_eq!(bench.closed().await, CloseReason::ByPeer);
    }
    let mut client = bench.connect(CHUNK_BYTES);
    client.write_all(&hello()).await.expect("open");
    let peer = bench.opened().await;
    client.write_all(&whole).await.expect("open");
    assert!(bench.arrived().await == (peer, frame));
}

#[tokio::test]
async fn a_peer_that_sends_faster_than_it_is_read_delays_others_by_its_places_only() {
    let mut bench = Bench::new(Limits::default());
    let flood = Frame::new("h", "flood");
    let mut fast = bench.connect(1 << 20);
    fast.write_all(&hello()).await.expect("open");
    let fast_peer = bench.opened().await;
    let many = message(&flood).repeat(PEER_FRAMES_MAX * 10);
    fast.write_all(&many).await.expect("open");
    // As many frames as it has places; the others stay outside, however often its task runs.
    let queued = async {
        while bench.listener.queued() < PEER_FRAMES_MAX {
            tokio::task::yield_now().await;
        }
    };
    timeout(TEST_TIMEOUT, queued).await.expect("in time");
    for _ in 0..1000 {
        tokio::task::yield_now().await;
    }
    assert_eq!(bench.listener.queued(), PEER_FRAMES_MAX);
    let mut other = bench.connect(1 << 20);
    let said = [hello(), message(&Frame::new("h", "other"))].concat();
    other.write_all(&said).await.expect("open");
    let mut before = 0;
    loop {
        match bench.event().await {
            ListenerEvent::Frame { peer, .. } if peer == fast_peer => before += 1,
            ListenerEvent::Opened { .. } => {}
            ListenerEvent::Frame { frame, .. } => {
                assert_eq!(frame, Frame::new("h", "other"));
                break;
            }
            other => panic!("{other:?}"),
        }
    }
    // The task of the first may refill its places while the listener empties them.
    assert!(before <= 2 * PEER_FRAMES_MAX, "{before} frames came first");
    for _ in before..PEER_FRAMES_MAX * 10 {
        assert_eq!(bench.arrived().await, (fast_peer, flood.clone()));
    }
}

#[tokio::test]
async fn a_client_that_reads_byte_by_byte_gets_all_and_others_are_served_meanwhile() {
    let mut bench = Bench::new(Limits::default());
    let frame = Frame::new("h", vec![5; 10_000]);
    let mut slow = bench.connect(zmtp::GREETING_BYTES);
    let hello = hello();
    slow.write_all(&hello).await.expect("open");
    let slow_peer = bench.opened().await;
    for _ in 0..3 {
        let sent = bench.listener.sender().try_send(slow_peer, frame.clone());
        sent.expect("sent");
    }
    let mut other = bench.connect(1 << 10);
    other.write_all(&hello).await.expect("open");
    let peer = bench.opened().await;
    let echo = Frame::new("h", "other");
    read(&mut other, welcome().len()).await;
    for _ in 0..10 {
        other.write_all(&message(&echo)).await.expect("open");
        assert_eq!(bench.arrived().await, (peer, echo.clone()));
        let sent = bench.listener.sender().try_send(peer, echo.clone());
        sent.expect("sent");
        assert_eq!(read(&mut other, message(&echo).len()).await, message(&echo));
    }
    bench.listener.sender().disconnect(slow_peer);
    let expected = [welcome(), message(&frame).repeat(3)].concat();
    for byte in &expected {
        assert_eq!(read(&mut slow, 1).await, [*byte]);
    }
    let end = timeout(TEST_TIMEOUT, slow.read(&mut [0; 1])).await;
    assert_eq!(end.expect("in time").expect("read"), 0);
    assert_eq!(bench.closed().await, CloseReason::ByUs);
}

#[tokio::test(start_paused = true)]
async fn a_client_that_reads_some_bytes_now_and_then_is_closed_when_a_frame_has_waited_too_long() {
    let slow_after = Duration::from_secs(2);
    let limits = Limits {
        slow_after,
        ..Limits::default()
    };
    let mut bench = Bench::new(limits);
    let mut client = bench.connect(100);
    let (mut read_half, mut write) = split(&mut client);
    let hello = hello();
    let (written, peer) = tokio::join!(write.write_all(&hello), bench.opened());
    written.expect("open");
    let queued = tokio::time::Instant::now();
    // The first one is read in time. The second one is taken out of the queue only then, and would be read within the limit
    // that begins there.
    for bytes in [CHUNK_BYTES + 1, 100_000] {
        let frame = Frame::new("h", vec![5; bytes]);
        bench.listener.sender().try_send(peer, frame).expect("sent");
    }
    let reading = async {
        let mut bytes = [0; 100];
        while let Ok(1..) = read_half.read(&mut bytes).await {
            tokio::time::sleep(slow_after / 200).await;
        }
    };
    let pings = async {
        loop {
            tokio::time::sleep(slow_after / 20).await;
            if write.write_all(PING).await.is_err() {
                return std::future::pending::<()>().await;
            }
        }
    };
    let reason = tokio::select! {
        (reason, ()) = async { tokio::join!(bench.closed(), reading) } => reason,
        () = pings => unreachable!("they do not end"),
    };
    assert_eq!(reason, CloseReason::SlowConsumer);
    assert_eq!(queued.elapsed().as_secs(), (slow_after * 6).as_secs());
}

#[tokio::test(start_paused = true)]
async fn a_client_that_reads_slowly_cannot_put_off_its_end() {
    let limits = Limits::default();
    let slow_after = limits.slow_after;
    let mut bench = Bench::new(limits);
    let mut client = bench.connect(100);
    let (read_half, mut write) = split(&mut client);
    let mut read_half = read_half;
    let hello = hello();
    let (written, peer) = tokio::join!(write.write_all(&hello), bench.opened());
    written.expect("open");
    let frame = Frame::new("h", vec![5; 100_000]);
    bench.listener.sender().try_send(peer, frame).expect("sent");
    let asked = tokio::time::Instant::now();
    bench.listener.sender().disconnect(peer);
    // Each read is in time for the limit of one write.
    let reading = async {
        let mut bytes = [0; 100];
        while let Ok(1..) = read_half.read(&mut bytes).await {
            tokio::time::sleep(slow_after / 2).await;
        }
    };
    let (reason, ()) = tokio::join!(bench.closed(), reading);
    assert_eq!(reason, CloseReason::ByUs);
    assert!(asked.elapsed() <= slow_after * 2, "{:?}", asked.elapsed());
}
