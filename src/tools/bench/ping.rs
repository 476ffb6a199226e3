//! Round trips of messages of two parts: between two sockets of the `zeromq` crate, through the gate, and to a leader that
//! refuses a lookup at once. The other side of each is a process of its own; all are measured in turn, some round trips
//! at a time, with client and servers on given cores.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tokio::io::AsyncReadExt as _;
use tokio::time::timeout;
use zeromq::{
    DealerSocket, RouterSocket, Socket as _, SocketRecv as _, SocketSend as _, ZmqMessage,
};

use kvferry::cli::bench::{percentiles, rig};
use kvferry::cli::{block_on, print_line};
use kvferry::error::CommandError;
use kvferry_protocol::Role;
use kvferry_transport::zmtp::{Item, Parser};
use kvferry_transport::{
    Address, CertificateHolder, Connection, Credentials, Frame, Limits, ListenerEvent, OtherUsers,
    Root, TlsTransport, Transport, Written, ZmqTransport, prepare_for,
};
use kvferry_types::{Rank, Replica, WorkerId};

use super::bare_client::BareClient;
use super::placement::{self, Cores, Placement};
use super::rpc::refused_lookup;
use super::rpc_hit::leader_address;

/// Bytes of the bodies of requests.
const BODY_BYTES: [usize; 2] = [200, 64 << 10];
/// Bytes of a lookup's body beside its hashes.
const LOOKUP_BYTES: usize = 64;
/// Bytes of a header, and of the body of an answer.
const ANSWER_BYTES: (usize, usize) = (32, 64);
/// Longest wait for the other side to listen, and for an answer.
const WITHIN: Duration = Duration::from_secs(10);
/// Days for which the certificates of the measurement are valid.
const CERTIFICATE_DAYS: u32 = 1;

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Round trips of each kind.
    #[arg(long, default_value = "2000", value_parser = clap::value_parser!(u32).range(10..=1_000_000))]
    rounds: u32,
    /// Round trips of one kind before the next kind's turn. With 1, each round trip meets a process whose caches the others
    /// have used in between.
    #[arg(long, default_value = "50", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    turn: u32,
    /// The cores of client and servers; may be given several times. Without it, one core and then two, as far as this process
    /// may use them.
    #[arg(long)]
    placement: Vec<Placement>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// One row of the result. Times in microseconds.
#[derive(Debug, serde::Serialize)]
struct Row {
    placement: Placement,
    body_bytes: usize,
    network: &'static str,
    /// Between a DEALER and a ROUTER of the `zeromq` crate.
    zeromq_p50_us: f64,
    zeromq_p99_us: f64,
    /// From kvferry's connection (on ipc over a DEALER of the crate, on TCP with TLS) to a listener that only answers.
    gate_p50_us: f64,
    gate_p99_us: f64,
    gate_to_zeromq: f64,
    /// Between a DEALER of the crate and a leader. On ipc alone.
    bare_leader_p50_us: Option<f64>,
    bare_leader_p99_us: Option<f64>,
    bare_leader_to_zeromq: Option<f64>,
    /// Between kvferry's own client and a leader. On ipc alone.
    leader_p50_us: Option<f64>,
    leader_p99_us: Option<f64>,
    leader_to_zeromq: Option<f64>,
    /// CPU time of the gate's parser for one request.
    parser_ns: f64,
}

impl Arguments {
    pub(crate) fn run(self) -> Result<(), CommandError> {
        let json = self.json;
        let placements = placement::chosen(&self.placement)?;
        // In a task of its own, on the thread of the clients' tasks: two threads would wake each other for each message.
        let all = async move {
            let mut rows = Vec::new();
            for (placement, cores) in placements {
                rows.append(&mut self.measure(placement, &cores).await?);
            }
            Ok(rows)
        };
        let measured = async move { tokio::spawn(all).await };
        let rows = block_on(
            1,
            async move { measured.await.map_err(CommandError::failed)? },
        )?;
        if json {
            print_line(&serde_json::to_string_pretty(&rows).map_err(CommandError::failed)?);
            return Ok(());
        }
        print_line(
            "Round trips between two zeromq sockets, through the gate (TCP: with TLS), and to a leader, from one such socket \
             and from kvferry's client; p50 and p99.",
        );
        print_line(
            "cores         body  network       zeromq us          gate us   ratio   leader by socket    ratio   leader by client    \
             ratio   parser",
        );
        for row in rows {
            let leaders = [
                (
                    row.bare_leader_p50_us,
                    row.bare_leader_p99_us,
                    row.bare_leader_to_zeromq,
                ),
                (row.leader_p50_us, row.leader_p99_us, row.leader_to_zeromq),
            ];
            let leaders = leaders.map(|leader| match leader {
                (Some(p50), Some(p99), Some(ratio)) => {
                    format!("{p50:>8.1} {p99:>9.1}  {ratio:>6.2}")
                }
                _ => format!("{:>26}", "-"),
            });
            let leader = leaders.join("  ");
            print_line(&format!(
                "{:<10} {:>5} B  {:<7}  {:>7.1} {:>8.1}  {:>7.1} {:>8.1}  {:>6.2}  {leader}  {:>6.0} ns",
                row.placement.name(),
                row.body_bytes,
                row.network,
                row.zeromq_p50_us,
                row.zeromq_p99_us,
                row.gate_p50_us,
                row.gate_p99_us,
                row.gate_to_zeromq,
                row.parser_ns,
            ));
        }
        Ok(())
    }

    async fn measure(&self, placement: Placement, cores: &Cores) -> Result<Vec<Row>, CommandError> {
        cores.move_to_servers()?;
        let folder = rig::folder()?;
        let root = folder.path();
        let keys =
            Root::open_or_make(&root.join("keys"), Some("bench")).map_err(CommandError::failed)?;
        let listening = written(&keys, CertificateHolder::Leader)?;
        let worker = CertificateHolder::Worker(WorkerId {
            replica: Replica(0),
            rank: Rank(0),
        });
        let connecting = TlsTransport::new(credentials(&written(&keys, worker)?)?);
        let (plain, secured) = (free_port()?, free_port()?);
        let ipc = format!("ipc://{}", root.join("echo.sock").display());
        let (plain_tcp, gate) = (format!("tcp://{plain}"), root.join("gate"));
        let mut children = [
            echo(&["--zeromq", &ipc], root)?,
            echo(&["--zeromq", &plain_tcp], root)?,
            echo(&["--gate", &gate.display().to_string()], root)?,
            echo(
                &[
                    "--tls",
                    &secured,
                    "--credentials",
                    &listening.display().to_string(),
                ],
                root,
            )?,
            rig::process(
                &[
                    "kvferry",
                    "leader",
                    "--supervised",
                    "--log",
                    "warn",
                    "--socket-dir",
                ],
                root,
            )?,
        ];
        cores.move_to_client()?;
        let (client, mut incoming) = rig::client(leader_address(root), Role::Engine);
        tokio::spawn(async move { while incoming.recv().await.is_some() {} });
        let endpoint = root.join("leader").join("kvferry.sock");
        let endpoint = format!("ipc://{}", endpoint.display());
        let mut bare_client = BareClient::welcomed(dealer(&endpoint).await?).await?;
        let mut ipc = (
            dealer(&ipc).await?,
            connection(&ZmqTransport, Address::Directory(gate)).await?,
        );
        let mut tcp = (
            dealer(&plain_tcp).await?,
            connection(&connecting, Address::Tcp(secured)).await?,
        );
        let mut rows = Vec::new();
        for body_bytes in BODY_BYTES {
            let frame = Frame::new(vec![1; ANSWER_BYTES.0], vec![1; body_bytes]);
            // Whole hashes.
            let hash_bytes = (body_bytes - LOOKUP_BYTES) / rig::HASH_BYTES * rig::HASH_BYTES;
            let mut took: [Vec<f64>; 6] = Default::default();
            let [zeromq, gate, bare, leader, plain, secured] = &mut took;
            // The first rounds warm caches up.
            let warm_up = self.rounds / 10;
            let mut left = self.rounds + warm_up;
            while left > 0 {
                let turn = self.turn.min(left);
                left -= turn;
                for _ in 0..turn {
                    zeromq.push(ping(&mut ipc.0, &frame).await?);
                }
                for _ in 0..turn {
                    gate.push(through(&mut ipc.1, &frame).await?);
                }
                for _ in 0..turn {
                    bare.push(timed(bare_client.refused_lookup(hash_bytes)).await?);
                }
                for _ in 0..turn {
                    leader.push(timed(refused_lookup(&client, hash_bytes)).await?);
                }
                for _ in 0..turn {
                    plain.push(ping(&mut tcp.0, &frame).await?);
                }
                for _ in 0..turn {
                    secured.push(through(&mut tcp.1, &frame).await?);
                }
            }
            let [zeromq, gate, bare, leader, plain, secured] =
                took.map(|mut took| took.split_off(warm_up as usize));
            let parser_ns = parser_ns(&frame, self.rounds)?;
            let over_ipc = ("ipc", [zeromq, gate], Some([bare, leader]));
            let over_tcp = ("tcp", [plain, secured], None);
            for (network, sockets, leaders) in [over_ipc, over_tcp] {
                let placed = (placement, body_bytes, network);
                rows.push(row(placed, sockets, leaders, parser_ns));
            }
        }
        for child in &mut children {
            child.kill().await.map_err(CommandError::failed)?;
        }
        Ok(rows)
    }
}

fn row(
    (placement, body_bytes, network): (Placement, usize, &'static str),
    [zeromq, gate]: [Vec<f64>; 2],
    leaders: Option<[Vec<f64>; 2]>,
    parser_ns: f64,
) -> Row {
    let (zeromq_p50_us, zeromq_p99_us) = percentiles(zeromq);
    let (gate_p50_us, gate_p99_us) = percentiles(gate);
    let leaders = leaders.map(|leaders| leaders.map(percentiles));
    let (bare, leader) = (
        leaders.map(|[bare, _]| bare),
        leaders.map(|[_, leader]| leader),
    );
    Row {
        placement,
        body_bytes,
        network,
        zeromq_p50_us,
        zeromq_p99_us,
        gate_p50_us,
        gate_p99_us,
        gate_to_zeromq: gate_p50_us / zeromq_p50_us,
        bare_leader_p50_us: bare.map(|(p50, _)| p50),
        bare_leader_p99_us: bare.map(|(_, p99)| p99),
        bare_leader_to_zeromq: bare.map(|(p50, _)| p50 / zeromq_p50_us),
        leader_p50_us: leader.map(|(p50, _)| p50),
        leader_p99_us: leader.map(|(_, p99)| p99),
        leader_to_zeromq: leader.map(|(p50, _)| p50 / zeromq_p50_us),
        parser_ns,
    }
}

async fn timed<T>(
    work: impl Future<Output = Result<T, CommandError>>,
) -> Result<f64, CommandError> {
    let begun = Instant::now();
    work.await?;
    Ok(begun.elapsed().as_secs_f64() * 1e6)
}

async fn ping(dealer: &mut DealerSocket, frame: &Frame) -> Result<f64, CommandError> {
    timed(async {
        let mut message = ZmqMessage::from(frame.header.clone());
        message.push_back(frame.body.clone());
        dealer.send(message).await.map_err(CommandError::failed)?;
        let answer = timeout(WITHIN, dealer.recv()).await;
        let answer = answer.map_err(CommandError::failed)?;
        answer.map_err(CommandError::failed)
    })
    .await
}

async fn through(connection: &mut Connection, frame: &Frame) -> Result<f64, CommandError> {
    timed(async {
        let sent = connection.send(frame.clone()).await;
        sent.map_err(CommandError::failed)?;
        let answer = timeout(WITHIN, connection.recv()).await;
        let answer = answer.map_err(CommandError::failed)?;
        answer.map_err(CommandError::failed)
    })
    .await
}

/// The time in which the gate's parser reads one message that lies in memory, in nanoseconds: the median over batches.
fn parser_ns(frame: &Frame, rounds: u32) -> Result<f64, CommandError> {
    const BATCH: u32 = 100;
    let mut stream = vec![1, ANSWER_BYTES.0 as u8];
    stream.extend(&frame.header);
    match u8::try_from(frame.body.len()) {
        Ok(bytes) => stream.extend([0, bytes]),
        Err(_) => {
            stream.push(2);
            stream.extend((frame.body.len() as u64).to_be_bytes());
        }
    }
    stream.extend(&frame.body);
    let mut parser = Parser::client(&Limits::default());
    let mut read = |mut bytes: &[u8]| {
        let mut payload = 0;
        while let Some(item) = parser.next(&mut bytes).map_err(CommandError::failed)? {
            if let Item::Payload(part) = item {
                payload += part.len();
            }
        }
        Ok::<_, CommandError>(payload)
    };
    read(&greeting_and_ready())?;
    let mut took = Vec::new();
    for _ in 0..rounds.div_ceil(BATCH).max(10) {
        let begun = Instant::now();
        for _ in 0..BATCH {
            if read(&stream)? != ANSWER_BYTES.0 + frame.body.len() {
                return Err(CommandError::Failed("the parser lost bytes".to_owned()));
            }
        }
        took.push(begun.elapsed().as_secs_f64() * 1e9 / f64::from(BATCH));
    }
    Ok(percentiles(took).0)
}

/// What a DEALER sends first: the greeting of ZMTP 3.0 with the mechanism NULL, and READY.
fn greeting_and_ready() -> Vec<u8> {
    let mut bytes = vec![0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3, 0];
    bytes.extend(b"NULL");
    bytes.resize(64, 0);
    let ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER";
    bytes.extend([4, ready.len() as u8]);
    bytes.extend(ready);
    bytes
}

fn free_port() -> Result<String, CommandError> {
    let free = std::net::TcpListener::bind("127.0.0.1:0").map_err(CommandError::failed)?;
    let address = free.local_addr().map_err(CommandError::failed)?;
    Ok(address.to_string())
}

fn written(keys: &Root, holder: CertificateHolder) -> Result<PathBuf, CommandError> {
    let written = keys.write(holder, CERTIFICATE_DAYS, false);
    match written.map_err(CommandError::failed)? {
        Written::New(path) | Written::Kept(path) => Ok(path),
    }
}

fn credentials(path: &Path) -> Result<Credentials, CommandError> {
    Credentials::load(path).map_err(CommandError::failed)
}

fn echo(arguments: &[&str], folder: &Path) -> Result<tokio::process::Child, CommandError> {
    let arguments = [&["bench", "echo"], arguments].concat();
    rig::process(&arguments, folder)
}

/// Connects to a socket of the crate, which may not listen yet.
async fn dealer(endpoint: &str) -> Result<DealerSocket, CommandError> {
    let until = Instant::now() + WITHIN;
    loop {
        let mut socket = DealerSocket::new();
        match socket.connect(endpoint).await {
            Ok(()) => return Ok(socket),
            Err(error) if Instant::now() > until => return Err(CommandError::failed(error)),
            Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
        }
    }
}

async fn connection(
    transport: &dyn Transport,
    address: Address,
) -> Result<Connection, CommandError> {
    let connected = transport.connect(&address, Limits::default(), WITHIN);
    connected.await.map_err(CommandError::failed)
}

/// `kvferry-tools bench echo`: answers each message with one of a fixed size, until its standard input ends.
#[derive(Debug, clap::Args)]
pub(crate) struct EchoArguments {
    /// Endpoint of a ROUTER of the `zeromq` crate.
    #[arg(long)]
    zeromq: Option<String>,
    /// Directory of a listener.
    #[arg(long)]
    gate: Option<PathBuf>,
    /// Address of a listener with TLS.
    #[arg(long, requires = "credentials")]
    tls: Option<String>,
    /// Credentials of the listener with TLS.
    #[arg(long)]
    credentials: Option<PathBuf>,
    /// Folder of the measurement.
    folder: PathBuf,
}

impl EchoArguments {
    pub(crate) fn run(self) -> Result<(), CommandError> {
        block_on(1, async move {
            let answers = tokio::spawn(self.answers());
            tokio::select! {
                () = end_of_input() => Ok(()),
                ended = answers => ended.map_err(CommandError::failed)?,
            }
        })
    }

    async fn answers(self) -> Result<(), CommandError> {
        if let Some(endpoint) = &self.zeromq {
            return router(endpoint).await;
        }
        let (transport, address): (Box<dyn Transport>, _) =
            match (self.gate, self.tls, self.credentials) {
                (Some(directory), ..) => {
                    prepare_for(&directory, &OtherUsers::default())
                        .map_err(CommandError::failed)?;
                    (Box::new(ZmqTransport), Address::Directory(directory))
                }
                (_, Some(address), Some(path)) => {
                    let transport = TlsTransport::new(credentials(&path)?);
                    (Box::new(transport), Address::Tcp(address))
                }
                _ => {
                    return Err(CommandError::Failed(format!(
                        "nothing to answer in {:?}",
                        self.folder
                    )));
                }
            };
        let listener = transport.listen(&address, Limits::default()).await;
        let mut listener = listener.map_err(CommandError::failed)?;
        let sender = listener.sender();
        while let Some(event) = listener.next().await {
            if let ListenerEvent::Frame { peer, .. } = event {
                let (header, body) = ANSWER_BYTES;
                let answer = Frame::new(vec![2; header], vec![2; body]);
                sender
                    .send(peer, answer)
                    .await
                    .map_err(CommandError::failed)?;
            }
        }
        Ok(())
    }
}

async fn router(endpoint: &str) -> Result<(), CommandError> {
    let mut socket = RouterSocket::new();
    socket.bind(endpoint).await.map_err(CommandError::failed)?;
    loop {
        let request = socket.recv().await.map_err(CommandError::failed)?;
        let Some(identity) = request.get(0) else {
            return Err(CommandError::Failed(
                "a message without an identity".to_owned(),
            ));
        };
        let mut answer = ZmqMessage::from(identity.clone());
        answer.push_back(vec![2; ANSWER_BYTES.0].into());
        answer.push_back(vec![2; ANSWER_BYTES.1].into());
        socket.send(answer).await.map_err(CommandError::failed)?;
    }
}

async fn end_of_input() {
    let mut byte = [0];
    while matches!(tokio::io::stdin().read(&mut byte).await, Ok(1)) {}
}
