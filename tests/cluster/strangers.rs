//! A leader with peers that send much and never identify themselves.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvferry_protocol::{Header, Hello, MessageKind, Role, Status, VERSION, limits};
use kvferry_transport::{
    Address, Client, ClientSettings, Frame, Incoming, Limits, Transport, ZmqTransport,
};
use kvferry_types::{Epoch, RequestId};
use tokio::sync::mpsc::Receiver;

use crate::support::{Running, kvferry, socket_dir};

const TEST_TIMEOUT: Duration = Duration::from_secs(60);
const ATTACK: Duration = Duration::from_secs(10);
const ATTACKERS: usize = 3;
/// Maximum growth of the leader's resident memory: the bytes that its limits let it hold meanwhile, and what an
/// allocator keeps of them.
const LEFT_OVER_BYTES: u64 = 128 << 20;

fn resident_bytes(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let line = status.lines().find(|line| line.starts_with("VmRSS:"));
    let kib = line.and_then(|line| line.split_whitespace().nth(1));
    kib.and_then(|kib| kib.parse::<u64>().ok())
        .expect("a number")
        << 10
}

/// Orders for a worker, with a body of the maximum length in which each item takes few bytes.
fn orders() -> Frame {
    let mut body = b"\x84\xa6engine\xc4\x10".to_vec();
    body.extend_from_slice(&[1; 16]);
    body.extend_from_slice(
        b"\xa5store\xc3\xa7request\x01\xa6copies\x91\x83\xa2op\x01\xa6record\xc0\xa5pairs\xdd",
    );
    let pairs = u32::try_from((limits::BODY_BYTES_MAX - body.len() - 4) / 3).expect("small");
    body.extend_from_slice(&pairs.to_be_bytes());
    body.extend([0x92, 1, 2].repeat(pairs as usize));
    let header = Header {
        version: VERSION,
        kind: MessageKind::Transfer.number(),
        correlation: RequestId(1),
        deadline_ms: 1000,
        required: 0,
        epoch: Epoch(1),
    };
    Frame::new(header.to_bytes().to_vec(), body)
}

/// Connects, repeats the same message until the connection is closed, and starts again. Counts the closed connections.
async fn attack(leader: Address, over: Arc<AtomicBool>, closed: Arc<AtomicU64>) {
    let orders = orders();
    while !over.load(Ordering::Relaxed) {
        let connecting = ZmqTransport.connect(&leader, Limits::default(), TEST_TIMEOUT);
        let Ok(mut connection) = connecting.await else {
            continue;
        };
        let until_closed = async {
            loop {
                tokio::select! {
                    biased;
                    received = connection.recv() => if received.is_err() { return },
                    () = std::future::ready(()) => {}
                }
                if connection.send(orders.clone()).await.is_err() {
                    return;
                }
            }
        };
        tokio::time::timeout(TEST_TIMEOUT, until_closed)
            .await
            .expect("a peer that never says hello is closed");
        closed.fetch_add(1, Ordering::Relaxed);
    }
}

fn tool(leader: Address) -> (Client, Receiver<Incoming>) {
    let settings = ClientSettings {
        address: leader,
        hello: Hello::new(Role::Admin, "test"),
        limits: Limits::default(),
    };
    Client::start(Arc::new(ZmqTransport), settings)
}

#[test]
fn peers_that_never_send_a_hello_are_closed_and_others_are_served() {
    let folder = socket_dir();
    let name = folder.path().to_str().expect("UTF-8");
    let leader = Running::start(&["leader", "--socket-dir", name]);
    let begun = Instant::now();
    while !kvferry(&["status", "--socket-dir", name]).status.success() {
        assert!(begun.elapsed() < TEST_TIMEOUT, "it does not serve");
    }
    let address = Address::Directory(folder.path().join("leader"));
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime");
    runtime.block_on(among_strangers(address, leader.0.id()));
}

async fn among_strangers(address: Address, leader: u32) {
    let (tool, mut says) = tool(address.clone());
    let status = || tool.call(Status { check: false }, TEST_TIMEOUT);
    assert!(status().await.is_ok());
    let before = resident_bytes(leader);
    let (over, closed) = (
        Arc::new(AtomicBool::new(false)),
        Arc::new(AtomicU64::new(0)),
    );
    let attackers: Vec<_> = (0..ATTACKERS)
        .map(|_| {
            tokio::spawn(attack(
                address.clone(),
                Arc::clone(&over),
                Arc::clone(&closed),
            ))
        })
        .collect();
    let begun = Instant::now();
    let mut longest = Duration::ZERO;
    while begun.elapsed() < ATTACK {
        let requested = Instant::now();
        let answer = status().await;
        assert!(answer.is_ok(), "{answer:?}");
        longest = longest.max(requested.elapsed());
    }
    over.store(true, Ordering::Relaxed);
    for attacker in attackers {
        attacker.await.expect("no panic");
    }
    assert!(closed.load(Ordering::Relaxed) >= ATTACKERS as u64);
    assert!(matches!(says.try_recv(), Ok(Incoming::Welcomed { .. })));
    let disturbed = says.try_recv();
    assert!(
        disturbed.is_err(),
        "the other client was disturbed: {disturbed:?}"
    );
    assert!(
        longest < Duration::from_secs(10),
        "an answer took {longest:?}"
    );
    let after = begun.elapsed();
    while resident_bytes(leader) > before + LEFT_OVER_BYTES {
        let bytes = resident_bytes(leader);
        assert!(
            begun.elapsed() < after + TEST_TIMEOUT,
            "{before} bytes before, {bytes} after it"
        );
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}
