//! Seats, which only one process has at a time: that of a worker, an engine's name, that of an engine's memory. A
//! live holder keeps its seat. After its end the successor gets the seat at once.

use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvferry_actors::{LeaderArguments, run_leader};
use kvferry_core::{AnchorKey, LeaderSettings};
use kvferry_protocol::{Abandon, ErrorCode, Message, Reset, ResetPages, Role, Status, Unregister};
use kvferry_transport::{Client, Failure, Limits, MemoryTransport};
use kvferry_types::{Epoch, Ratio, RequestId, WorkerId};

use super::unregister::{Memory, register, registered};
use super::workers::{accept_all, rank, rank_of, worker};
use super::world::{
    Answered, Engine, HEARTBEAT, Puppet, Received, TEST_TIMEOUT, client, hello, leader, lookup,
    puppets, server, soon,
};

/// Workers that a leader requested to be ended, each with the process that the leader names.
type Kills = Vec<(WorkerId, Option<i32>)>;

/// Another process, which does nothing until it is ended.
struct Other(Child);

impl Other {
    fn start() -> Self {
        let mut child = Command::new("cat");
        Self(child.stdin(Stdio::piped()).spawn().expect("it runs"))
    }

    fn pid(&self) -> i32 {
        i32::try_from(self.0.id()).expect("small")
    }

    fn end(mut self) {
        self.0.kill().expect("it lives");
        self.0.wait().expect("it has ended");
    }
}

fn quiet(transport: &MemoryTransport, role: Role, engine: u8) -> Client {
    let (client, mut incoming) = client(transport, hello(role, engine, 0), Limits::default());
    tokio::spawn(async move { while incoming.recv().await.is_some() {} });
    client
}

fn assert_in_use<T: std::fmt::Debug>(answer: Answered<T>, pid: i32) {
    let failure = answer.expect_err("the place is in use");
    assert_eq!(failure.code, ErrorCode::NotReady, "{failure}");
    assert!(!failure.over, "nothing is known of such a request");
    let text = format!("in use by process {pid}");
    assert!(failure.message.contains(&text), "{failure}");
}

#[tokio::test(start_paused = true)]
async fn the_seat_of_a_live_worker_is_kept_and_its_successor_gets_it() {
    let transport = MemoryTransport::default();
    let (process, _) = leader(&transport, 1).await;
    let engine = Engine::start(&transport, 1);
    let (first, second) = (Other::start(), Other::start());
    let mut holder = Puppet::start(&transport.of_process(first.pid()), 0);
    let mut beside = Puppet::start(&transport, 1);
    holder.begin().await;
    beside.begin().await;
    engine.until_ready().await;

    let mut newcomer = Puppet::start(&transport.of_process(second.pid()), 0);
    assert!(matches!(newcomer.receive().await, Received::Welcomed(1)));
    assert_in_use(newcomer.request_attach().await, first.pid());
    // The newcomer is still refused after a while in which both send heartbeats.
    tokio::time::sleep(HEARTBEAT * 20).await;
    assert_in_use(newcomer.request_attach().await, first.pid());
    assert!(engine.status().await.ready, "the holder goes on");
    engine.lookup(1, 1, 4).await.expect("an answer");
    let requesting = engine.clone();
    let requested = tokio::spawn(async move { requesting.store(2, 1, 4, TEST_TIMEOUT).await });
    for worker in [&mut holder, &mut beside] {
        let order = worker.order().await;
        worker.ended(&order, true);
    }
    requested.await.expect("no panic").expect("stored");

    // A new connection of the same process replaces the older one.
    let mut again = Puppet::start(&transport.of_process(first.pid()), 0);
    again.begin().await;

    first.end();
    newcomer.attach().await;
    assert!(engine.status().await.ready, "the successor has its place");
    process.stop().await;
}

/// The end of a connection does not end the copies of its process.
#[tokio::test(start_paused = true)]
async fn the_seat_of_a_lost_worker_is_kept_while_it_owes_copies() {
    let transport = MemoryTransport::default();
    let (process, _) = leader(&transport, 1).await;
    let engine = Engine::start(&transport, 1);
    let (first, second) = (Other::start(), Other::start());
    let mut holder = Puppet::start(&transport.of_process(first.pid()), 0);
    let mut beside = Puppet::start(&transport, 1);
    holder.begin().await;
    beside.begin().await;
    engine.until_ready().await;
    engine.lookup(1, 1, 4).await.expect("an answer");
    let requesting = engine.clone();
    let requested = tokio::spawn(async move { requesting.store(2, 1, 4, TEST_TIMEOUT).await });
    let order = beside.order().await;
    beside.ended(&order, true);
    holder.order().await;
    holder.leave().await;

    let mut newcomer = Puppet::start(&transport.of_process(second.pid()), 0);
    assert!(matches!(newcomer.receive().await, Received::Welcomed(1)));
    assert_in_use(newcomer.request_attach().await, first.pid());
    first.end();
    newcomer.attach().await;
    match requested.await.expect("no panic") {
        Ok(answer) => assert_eq!(answer.failed_pages, 4),
        other => panic!("{other:?} instead of the answer to a store"),
    }
    process.stop().await;
}

#[tokio::test(start_paused = true)]
async fn two_processes_with_the_same_engine_name_do_not_displace_each_other() {
    let transport = MemoryTransport::default();
    let (process, _) = leader(&transport, 1).await;
    let (first, second) = (Other::start(), Other::start());
    let holder = Engine::start(&transport.of_process(first.pid()), 1);
    let workers = puppets(&transport).await;
    holder.until_ready().await;
    let newcomer = Engine::start(&transport.of_process(second.pid()), 1);
    for round in 0..20 {
        let answer = newcomer.lookup(100 + round, 7, 4).await;
        assert_in_use(answer, first.pid());
        holder.lookup(1 + round, 1, 4).await.expect("an answer");
        tokio::time::sleep(HEARTBEAT / 2).await;
    }
    first.end();
    newcomer.lookup(200, 7, 4).await.expect("its turn");
    drop(workers);
    process.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_command_gets_its_own_answers_whatever_its_name() {
    let transport = MemoryTransport::default();
    let (process, _) = leader(&transport, 1).await;
    let engine = Engine::start(&transport, 1);
    let invalidated = Arc::new(Mutex::new(0));
    for worker in puppets(&transport).await {
        worker.obey_and_count(Arc::clone(&invalidated));
    }
    engine.until_ready().await;
    let reset = |namespace: &[u8]| Reset {
        which: ResetPages::Namespace,
        tier: 0,
        namespace: Some(namespace.to_vec().into()),
        hash_bytes: 0,
        hashes: Vec::new(),
    };
    // Neither tool has an engine's name, and both use the same request id: both requests are carried out.
    for (namespace, invalidations) in [(b"a", 2), (b"b", 4)] {
        let tool = quiet(&transport, Role::Admin, 0);
        let requested = tool.call_as(RequestId(1), reset(namespace), TEST_TIMEOUT, Duration::ZERO);
        let answer = soon("an answer", requested).await;
        assert!(answer.is_ok(), "{answer:?}");
        assert_eq!(*invalidated.lock().expect("no panic"), invalidations);
    }
    // A tool with an engine's name receives none of that engine's answers, and the engine still receives its own.
    let thief = quiet(&transport, Role::Admin, 1);
    let requested = thief.call_as(RequestId(7), reset(b"c"), TEST_TIMEOUT, Duration::ZERO);
    soon("an answer", requested).await.expect("it is done");
    engine.lookup(8, 1, 4).await.expect("an answer");
    let requested = thief.call(lookup(1, 4), TEST_TIMEOUT).await;
    let failure = requested.expect_err("it is no engine");
    assert_eq!(failure.code, ErrorCode::Forbidden);
    process.stop().await;
}

#[tokio::test(start_paused = true)]
async fn one_second_count_is_made_per_second_and_others_get_the_time_to_retry() {
    let transport = MemoryTransport::default();
    let (process, _) = leader(&transport, 1).await;
    let admins = [(); 3].map(|()| quiet(&transport, Role::Admin, 0));
    let status = async |who: &Client, check| who.call(Status { check }, TEST_TIMEOUT).await;
    let (mut counted, mut busy) = (0, 0);
    for round in 0..100 {
        match status(&admins[round % 3], true).await {
            Ok(_) => counted += 1,
            Err(Failure { code, message, .. }) => {
                assert_eq!(code, ErrorCode::Busy, "{message}");
                assert!(message.contains("retry in"), "{message}");
                busy += 1;
            }
        }
    }
    assert_eq!((counted, busy), (1, 99));
    status(&admins[0], false).await.expect("without a count");
    tokio::time::sleep(Duration::from_millis(1001)).await;
    status(&admins[1], true).await.expect("a second later");
    process.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_supervisor_receives_the_process_to_end_and_an_unsupervised_one_is_ended_too() {
    let transport = MemoryTransport::default();
    let reported: Arc<Mutex<Kills>> = Arc::default();
    let receives = Arc::clone(&reported);
    let ratio = Ratio::new(4).expect("in bounds");
    let settings = LeaderSettings::new(Epoch(1), 1, ratio, AnchorKey::new([7; 32]));
    let fence = settings.fence;
    let started = run_leader(LeaderArguments {
        set_log: None,
        restarts: None,
        settings,
        server: server(&transport, 1, Limits::default()).await,
        supervisor: Some(Box::new(move |worker, pid| {
            receives.lock().expect("no panic").push((worker, pid));
        })),
        raise_epoch: None,
    });
    let (process, _) = started.await.expect("a leader");
    // The process takes the seat, then sends nothing further.
    let mut stranger = Other::start();
    let holder = quiet(&transport.of_process(stranger.pid()), Role::Worker, 0);
    let waiting = quiet(&transport, Role::Engine, 1);
    let status = async || waiting.call(Status { check: false }, TEST_TIMEOUT).await;
    status().await.expect("an answer");
    tokio::time::sleep(fence + HEARTBEAT).await;
    status().await.expect("an answer");
    let received = reported.lock().expect("no panic").clone();
    assert_eq!(
        received.iter().map(|(_, pid)| *pid).collect::<Vec<_>>(),
        [Some(stranger.pid())]
    );
    assert!(
        matches!(stranger.0.try_wait(), Ok(None)),
        "the supervisor may end it"
    );
    tokio::time::sleep(fence).await;
    status().await.expect("an answer");
    // `wait` closes the child's input, which would end it as well: the signal below proves that it was killed.
    let ended = stranger.0.wait().expect("it has ended");
    assert_eq!(ended.signal(), Some(9), "{ended}");
    drop(holder);
    process.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_live_engines_memory_is_not_replaced_or_taken_back_by_another_process() {
    let transport = MemoryTransport::default();
    let mut leader = server(&transport, 1, Limits::default()).await;
    let (worker, _directory) = worker(&transport).await;
    let (first, second) = (Other::start(), Other::start());
    let (holder, stranger) = (
        rank(&transport.of_process(first.pid())),
        rank(&transport.of_process(second.pid())),
    );
    let next = rank_of(&transport.of_process(second.pid()), 2);
    let (memory, other) = (Memory::new(), Memory::new());
    registered(&mut leader, &holder, &memory, 1).await;

    let requested = next.request(other.registration(2), TEST_TIMEOUT).await;
    assert_in_use(requested, first.pid());
    let requested = stranger
        .request(Message::Unregister(Unregister {}), TEST_TIMEOUT)
        .await;
    assert_in_use(requested, first.pid());
    let abandon = Message::Abandon(Abandon {
        requests: vec![u64::MAX],
    });
    assert_in_use(stranger.request(abandon, TEST_TIMEOUT).await, first.pid());
    assert!(memory.is_open(), "it is used as before");
    assert!(!other.is_open());

    // The engine has ended, and the next one gets its seat.
    first.end();
    let agreeing = accept_all(&mut leader);
    let answer = tokio::select! {
        answer = register(&next, &other, 2) => answer,
        () = agreeing => unreachable!("it goes on"),
    };
    assert!(matches!(answer, Ok(Message::Registered(_))), "{answer:?}");
    assert!(other.is_open());
    worker.stop().await;
}
