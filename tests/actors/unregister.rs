//! A rank unregisters its memory: every request is answered, and after the answer none of the memory is mapped.

use std::io::Write;
use std::sync::Arc;

use kvferry_protocol::{Empty, ErrorBody, ErrorCode, Message, Register, Role, Unregister};
use kvferry_transport::{
    Client, ClientSettings, Failure, Incoming, Limits, MemoryTransport, Server,
};
use kvferry_types::{
    Allocation, AllocationHandle, AllocationKind, Attention, GroupMemory, Nonce, Rank,
    Registration, TensorRole, TensorView,
};

use super::workers::{accept_all, rank, ranks, stating, worker};
use super::world::{Answered, TEST_TIMEOUT, hello, server, soon};

const PAGES: u32 = 4;
const PAGE_BYTES: u64 = 64;
const NONCE: [u8; 16] = [7; 16];

/// An engine's registered KV memory, as a file.
pub struct Memory(tempfile::NamedTempFile);

impl Memory {
    pub fn new() -> Self {
        let mut file = tempfile::NamedTempFile::new_in("/dev/shm").expect("a file in memory");
        let mut bytes = vec![0; PAGES as usize * PAGE_BYTES as usize];
        bytes[..NONCE.len()].copy_from_slice(&NONCE);
        file.write_all(&bytes).expect("written");
        Self(file)
    }

    pub fn registration(&self, engine: u8) -> Message {
        let path = self.0.path().to_str().expect("a text").to_owned();
        let registration = Registration {
            groups: vec![GroupMemory {
                attention: Attention::Full,
                window_tokens: 0,
                eagle: false,
                engine_page_tokens: 16,
                device_pages: PAGES,
                layers: 1,
                tensors: vec![TensorView {
                    layer: 0,
                    role: TensorRole::Latent,
                    allocation: 0,
                    offset_bytes: 0,
                    shape: vec![PAGES.into(), 16, PAGE_BYTES / 16],
                    strides: vec![PAGE_BYTES, PAGE_BYTES / 16, 1],
                    element_bytes: 1,
                    page_axis: 0,
                    page_bytes: PAGE_BYTES,
                    page_stride_bytes: PAGE_BYTES,
                    slices: None,
                }],
            }],
            hash_tokens: 0,
            hit_tokens: 0,
            content: b"test".to_vec(),
            rank: Rank(0),
            tp_size: 1,
            shard: 0,
            allocations: vec![Allocation {
                kind: AllocationKind::SharedMemory,
                handle: AllocationHandle::Path(path),
                bytes: u64::from(PAGES) * PAGE_BYTES,
            }],
            nonce: Nonce {
                allocation: 0,
                offset_bytes: 0,
                bytes: NONCE.to_vec(),
            },
            proofs: Vec::new(),
            device_uuid: None,
            timeline: None,
        };
        Message::Register(Register {
            abandoned_through: 0,
            engine: [engine; 16],
            registration,
            check_only: false,
        })
    }

    /// Whether this process, in which the worker runs, has the memory mapped.
    pub fn is_open(&self) -> bool {
        let maps = std::fs::read_to_string("/proc/self/maps").expect("a list");
        maps.contains(self.0.path().to_str().expect("a text"))
    }
}

/// Registers memory, retries while the worker answers `NotReady`, and returns the final answer.
pub async fn register(rank: &Client, memory: &Memory, engine: u8) -> Answered<Message> {
    loop {
        let answer = rank
            .request(memory.registration(engine), TEST_TIMEOUT)
            .await;
        match answer {
            Err(failure) if failure.code == ErrorCode::NotReady => {
                tokio::task::yield_now().await;
            }
            answer => return answer,
        }
    }
}

async fn unregister(rank: &Client) -> Answered<Empty> {
    rank.call(Unregister {}, TEST_TIMEOUT).await
}

/// Unregisters, and retries while the worker answers `NotReady`.
async fn unregister_at_last(rank: &Client) -> Answered<Empty> {
    loop {
        match unregister(rank).await {
            Err(Failure {
                code: ErrorCode::NotReady,
                ..
            }) => {
                tokio::task::yield_now().await;
            }
            answer => return answer,
        }
    }
}

/// Registers memory and lets the leader accept it.
pub async fn registered(leader: &mut Server, rank: &Client, memory: &Memory, engine: u8) {
    let agreeing = accept_all(leader);
    let answer = tokio::select! {
        answer = register(rank, memory, engine) => answer,
        () = agreeing => unreachable!("it goes on"),
    };
    assert!(matches!(answer, Ok(Message::Registered(_))), "{answer:?}");
    assert!(memory.is_open(), "registered, and open nowhere");
}

fn assert_taken_back(answer: Answered<Empty>, memory: &Memory) {
    assert!(answer.is_ok(), "{answer:?}");
    assert!(!memory.is_open(), "taken back, and still open");
}

#[tokio::test(start_paused = true)]
async fn unregistered_memory_is_closed_and_may_be_registered_again() {
    let transport = MemoryTransport::default();
    let mut leader = server(&transport, 1, Limits::default()).await;
    let (worker, _directory) = worker(&transport).await;
    let (rank, memory) = (rank(&transport), Memory::new());
    for _ in 0..3 {
        registered(&mut leader, &rank, &memory, 1).await;
        assert_taken_back(unregister(&rank).await, &memory);
        assert_taken_back(unregister(&rank).await, &memory);
    }
    worker.stop().await;
}

/// Another connection of the engine may unregister its memory. A registration in the name of another engine than that of
/// the hello is refused.
#[tokio::test(start_paused = true)]
async fn memory_is_found_by_its_connection_or_by_its_engine() {
    let transport = MemoryTransport::default();
    let mut leader = server(&transport, 1, Limits::default()).await;
    let (worker, _directory) = worker(&transport).await;
    let (first, memory) = (rank(&transport), Memory::new());
    let failure = first.request(memory.registration(2), TEST_TIMEOUT).await;
    let failure = failure.expect_err("its hello names engine 1");
    assert_eq!(failure.code, ErrorCode::Invalid);
    assert!(!memory.is_open());
    registered(&mut leader, &first, &memory, 1).await;
    assert_taken_back(unregister(&first).await, &memory);
    registered(&mut leader, &first, &memory, 1).await;
    let second = rank(&transport);
    assert_taken_back(unregister(&second).await, &memory);
    worker.stop().await;
}

/// The previous leader had accepted the memory, and the next one refuses it. The rank has no open request that could
/// carry the refusal.
#[tokio::test(start_paused = true)]
async fn a_rank_whose_memory_the_next_leader_refuses_is_disconnected() {
    let transport = MemoryTransport::default();
    let mut leader = server(&transport, 1, Limits::default()).await;
    let (worker, _directory) = worker(&transport).await;
    let settings = ClientSettings {
        address: ranks(),
        hello: hello(Role::Rank, 1, 0),
        limits: Limits::default(),
    };
    let (rank, mut said) = Client::start(Arc::new(transport.clone()), settings);
    let memory = Memory::new();
    registered(&mut leader, &rank, &memory, 1).await;
    leader.close().await;
    let mut leader = server(&transport, 2, Limits::default()).await;
    let requested = stating(&mut leader).await;
    let refused = ErrorBody::new(ErrorCode::RankDisagrees, "another engine has the place");
    leader
        .replier()
        .refuse(requested.peer, requested.requested, refused);
    let lost = async { while !matches!(said.recv().await, Some(Incoming::Lost)) {} };
    soon("the end of the rank's connection", lost).await;
    // The rank registers again and receives the reason while the refusal lasts.
    let refusing = async {
        loop {
            let requested = stating(&mut leader).await;
            let refused = ErrorBody::new(ErrorCode::RankDisagrees, "still there");
            leader
                .replier()
                .refuse(requested.peer, requested.requested, refused);
        }
    };
    let answer = tokio::select! {
        answer = register(&rank, &memory, 1) => answer,
        () = refusing => unreachable!("it goes on"),
    };
    let failure = answer.expect_err("it is refused");
    assert_eq!(failure.code, ErrorCode::RankDisagrees, "{failure}");
    registered(&mut leader, &rank, &memory, 1).await;
    worker.stop().await;
}

/// Unregisters before the leader has accepted the memory.
#[tokio::test(start_paused = true)]
async fn a_registration_that_is_withdrawn_meanwhile_is_answered() {
    let transport = MemoryTransport::default();
    let mut leader = server(&transport, 1, Limits::default()).await;
    let (worker, _directory) = worker(&transport).await;
    let (rank, memory) = (rank(&transport), Memory::new());
    let taken_back = async {
        stating(&mut leader).await;
        assert!(
            memory.is_open(),
            "the leader is asked, and it is open nowhere"
        );
        unregister(&rank).await
    };
    let (requested, answer) = tokio::join!(register(&rank, &memory, 1), taken_back);
    let failure = requested.expect_err("it was taken back");
    assert_eq!(failure.code, ErrorCode::Invalid, "{failure}");
    assert!(
        failure.message.contains("unregistered meanwhile"),
        "{failure}"
    );
    assert_taken_back(answer, &memory);
    worker.stop().await;
}

/// Both requests are sent at once, so that the memory is unregistered while it is being opened, or before.
#[tokio::test(start_paused = true)]
async fn register_and_unregister_are_both_answered_in_any_order() {
    let transport = MemoryTransport::default();
    let mut leader = server(&transport, 1, Limits::default()).await;
    let (worker, _directory) = worker(&transport).await;
    let (rank, memory) = (rank(&transport), Memory::new());
    registered(&mut leader, &rank, &memory, 1).await;
    for _ in 0..50 {
        let both = async { tokio::join!(register(&rank, &memory, 1), unregister_at_last(&rank)) };
        let (requested, answer) = soon("both answers", both).await;
        assert!(
            requested.is_err(),
            "taken back before the leader agreed: {requested:?}"
        );
        assert_taken_back(answer, &memory);
    }
    worker.stop().await;
}
