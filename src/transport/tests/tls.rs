//! Peers of other machines: certificates, their claims, and what comes instead of a handshake.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, HandshakeKind, RootCertStore, version::TLS13};

use super::super::gate::{CERTIFICATE_CONNECTIONS_MAX, Gate, HANDSHAKES_MAX};
use super::super::{
    Claims, Client, ClientSettings, Credentials, KeygenError, Root, Server, ServerEvent,
    ServerSettings, TlsTransport, TransportError, Written, zmtp,
};
use super::*;
use kvferry_protocol::{ErrorCode, Hello, Message, Role, Status};
use kvferry_types::Epoch;

const YEAR: Duration = Duration::from_secs(365 * 86_400);

/// A directory with the root of deployment `test`.
pub(super) struct Keys {
    folder: tempfile::TempDir,
    root: Root,
}

fn holder(name: &str) -> crate::CertificateHolder {
    let claims: Claims = format!("kvferry://test/{name}").parse().expect("a holder");
    claims.holder
}

impl Keys {
    pub(super) fn make() -> Self {
        let folder = tempfile::tempdir().expect("temporary directory");
        let root = Root::open_or_make(&folder.path().join("keys"), Some("test")).expect("made");
        Self { folder, root }
    }

    fn directory(&self) -> PathBuf {
        self.folder.path().join("keys")
    }

    /// Writes the credentials of a process.
    fn file(&self, name: &str) -> PathBuf {
        match self.root.write(holder(name), 1, false).expect("written") {
            Written::New(path) | Written::Kept(path) => path,
        }
    }

    pub(super) fn transport(&self, name: &str) -> TlsTransport {
        TlsTransport::new(Credentials::load(&self.file(name)).expect("loaded"))
    }

    async fn listen(&self, limits: Limits) -> (Address, Listener, Arc<Gate>) {
        let address = free_address();
        let opened = self.transport("leader").open(&address, limits).await;
        let (listener, gate) = opened.expect("listens");
        (address, listener, gate)
    }
}

/// An address of this machine at which nothing listens.
pub(super) fn free_address() -> Address {
    let free = std::net::TcpListener::bind("127.0.0.1:0").expect("binds");
    Address::Tcp(free.local_addr().expect("an address").to_string())
}

fn at(address: &Address) -> &str {
    match address {
        Address::Tcp(at) => at,
        other => panic!("{other}"),
    }
}

async fn raw(address: &Address) -> TcpStream {
    TcpStream::connect(at(address)).await.expect("connects")
}

/// Reads until the other side closes.
async fn read_to_end(stream: &mut TcpStream) {
    let mut buffer = [0; 4096];
    let end = async { while let Ok(1..) = stream.read(&mut buffer).await {} };
    timeout(TEST_TIMEOUT, end).await.expect("closed in time");
}

/// Waits until this many connections were refused at the TLS port.
async fn refused(gate: &Gate, count: u64) {
    let counted = async {
        while gate.refused().tls.load(Ordering::Relaxed) < count {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(TEST_TIMEOUT, counted)
        .await
        .expect("counted in time");
    assert_eq!(gate.refused().tls.load(Ordering::Relaxed), count);
}

/// Asserts that a client with a certificate gets its echo, and that the listener has no other event.
async fn serves(keys: &Keys, address: &Address, listener: &mut Listener) {
    let transport = keys.transport("worker/0/0");
    let connecting = transport.connect(address, Limits::default(), TEST_TIMEOUT);
    let mut client = connecting.await.expect("connects");
    let peer = opened(listener).await;
    let echo = frame("h", "still here");
    client.send(echo.clone()).await.expect("sent");
    assert_eq!(arrived(listener).await, (peer, echo.clone()));
    listener
        .sender()
        .send(peer, echo.clone())
        .await
        .expect("sent");
    assert_eq!(received(&mut client).await, echo);
    drop(client);
    assert_eq!(closed(listener).await, (peer, CloseReason::ByPeer));
}

/// Connects with credentials that need not be valid, and asserts that the listener refuses them.
async fn refuses(keys: &Keys, text: &str) -> String {
    let (address, mut listener, gate) = keys.listen(Limits::default()).await;
    let transport = TlsTransport::new(Credentials::parse(text.as_bytes()).expect("parsed"));
    let connecting = transport.connect(&address, Limits::default(), TEST_TIMEOUT);
    let error = connecting.await.err();
    let Some(TransportError::Refused { detail, .. } | TransportError::Untrusted { detail, .. }) =
        error
    else {
        panic!("{error:?}");
    };
    refused(&gate, 1).await;
    serves(keys, &address, &mut listener).await;
    detail
}

/// The sections of a file of credentials: certificate, key, root.
fn sections(text: &str) -> Vec<String> {
    let sections = text.split_inclusive("-----END").collect::<Vec<_>>();
    assert_eq!(sections.len(), 4, "three sections");
    let mut whole = Vec::new();
    let mut rest = text;
    while let Some((_, after)) = rest.split_once("-----BEGIN ") {
        let (kind, _) = after.split_once("-----").expect("a kind");
        let end = format!("-----END {kind}-----");
        let (body, left) = after.split_once(&end).expect("an end");
        whole.push(format!("-----BEGIN {body}{end}\n"));
        rest = left;
    }
    whole
}

#[tokio::test]
async fn a_peer_with_a_certificate_is_served_and_its_claims_are_known() {
    let keys = Keys::make();
    let (address, mut listener, gate) = keys.listen(Limits::default()).await;
    let transport = keys.transport("worker/3/1");
    let connecting = transport.connect(&address, Limits::default(), TEST_TIMEOUT);
    let _client = connecting.await.expect("connects");
    match event(&mut listener).await {
        ListenerEvent::Opened { origin, .. } => assert_eq!(
            origin,
            Origin::Certificate("kvferry://test/worker/3/1".parse().expect("claims"))
        ),
        other => panic!("{other:?}"),
    }
    refused(&gate, 0).await;
}

#[tokio::test]
async fn a_certificate_of_another_root_is_refused_on_both_sides() {
    let (keys, others) = (Keys::make(), Keys::make());
    let until = Duration::from_secs(4_000_000_000);
    let other = others
        .root
        .issue(holder("worker/0/0"), Duration::ZERO, until);
    let other = sections(&other.expect("made"));
    let own = sections(&fs::read_to_string(keys.file("worker/0/0")).expect("read"));
    // A client that trusts this root, with the certificate of the other one.
    refuses(&keys, &[&other[0][..], &other[1], &own[2]].concat()).await;
    // A client that does not trust the listener.
    let detail = refuses(&keys, &other.concat()).await;
    assert!(detail.contains("use files of one directory"), "{detail}");
}

#[tokio::test]
async fn an_expired_certificate_is_refused() {
    let keys = Keys::make();
    let now = std::time::UNIX_EPOCH.elapsed().expect("after 1970");
    let expired = keys
        .root
        .issue(holder("worker/0/0"), now - 2 * YEAR, now - YEAR);
    let expired = expired.expect("made");
    refuses(&keys, &expired).await;
    let path = keys.directory().join("expired.pem");
    fs::write(&path, &expired).expect("written");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("set");
    let error = Credentials::load(&path).expect_err("expired").to_string();
    assert!(error.contains("has expired"), "{error}");
    assert!(error.contains("kvferry keygen DIR --renew"), "{error}");
    let early = keys
        .root
        .issue(holder("worker/0/0"), now + YEAR, now + 2 * YEAR);
    refuses(&keys, &early.expect("made")).await;
}

#[tokio::test]
async fn a_leaders_certificate_is_no_clients_and_no_others_is_a_leaders() {
    let keys = Keys::make();
    refuses(
        &keys,
        &fs::read_to_string(keys.file("leader")).expect("read"),
    )
    .await;
    for other in ["worker/0/0", "admin", "monitor"] {
        let transport = keys.transport(other);
        let error = transport.listen(&free_address(), Limits::default()).await;
        let error = error.err().expect("refused").to_string();
        assert!(error.contains("those of the leader"), "{error}");
    }
    // A worker that listens all the same is not taken for the leader.
    let worker = Credentials::load(&keys.file("worker/0/0")).expect("loaded");
    let acceptor = worker.acceptor().expect("set up");
    let listening = tokio::net::TcpListener::bind("127.0.0.1:0")
        .await
        .expect("binds");
    let address = Address::Tcp(listening.local_addr().expect("an address").to_string());
    tokio::spawn(async move {
        let (stream, _) = listening.accept().await.expect("accepted");
        assert!(acceptor.accept(stream).await.is_err());
    });
    let transport = keys.transport("worker/0/1");
    let connecting = transport.connect(&address, Limits::default(), TEST_TIMEOUT);
    let error = connecting.await.err();
    assert!(
        matches!(error, Some(TransportError::Untrusted { .. })),
        "{error:?}"
    );
}

/// A client that trusts the root of `keys` and has no certificate.
fn nobody(keys: &Keys) -> ClientConfig {
    let root = fs::read(keys.directory().join("root.pem")).expect("read");
    let root = CertificateDer::from_pem_slice(&root).expect("a certificate");
    let mut roots = RootCertStore::empty();
    roots.add(root).expect("a root");
    ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(&[&TLS13])
        .expect("a version")
        .with_root_certificates(roots)
        .with_no_client_auth()
}

#[tokio::test]
async fn a_peer_without_a_certificate_is_refused_before_it_sends_a_message() {
    let keys = Keys::make();
    let (address, mut listener, gate) = keys.listen(Limits::default()).await;
    // Both are refused by TLS itself, before any claims are read.
    for (alpn, alert) in [
        (&b"kvferry/1"[..], "CertificateRequired"),
        (b"http/1.1", "NoApplicationProtocol"),
    ] {
        let before = gate.refused().tls.load(Ordering::Relaxed);
        let mut config = nobody(&keys);
        config.alpn_protocols = vec![alpn.to_vec()];
        let name = ServerName::try_from("leader.kvferry").expect("a name");
        let connector = TlsConnector::from(Arc::new(config));
        let end = async {
            let mut stream = connector.connect(name, raw(&address).await).await?;
            stream.write_all(&zmtp::greeting()).await?;
            stream.write_all(&zmtp::ready("DEALER", b"")).await?;
            stream.flush().await?;
            stream.read_to_end(&mut Vec::new()).await
        };
        let end = timeout(TEST_TIMEOUT, end).await.expect("in time");
        let error = end.expect_err("refused").to_string();
        assert!(error.contains(alert), "{error}");
        refused(&gate, before + 1).await;
    }
    serves(&keys, &address, &mut listener).await;
}

#[tokio::test]
async fn every_handshake_is_a_full_one() {
    let keys = Keys::make();
    let (address, _listener, _gate) = keys.listen(Limits::default()).await;
    let text = fs::read(keys.file("worker/0/0")).expect("read");
    let credentials = Credentials::parse(&text).expect("parsed");
    let (connector, name) = credentials.connector().expect("set up");
    let mut config = ClientConfig::clone(connector.config());
    config.resumption = tokio_rustls::rustls::client::Resumption::in_memory_sessions(8);
    let connector = TlsConnector::from(Arc::new(config));
    for _ in 0..3 {
        let connecting = connector.connect(name.clone(), raw(&address).await);
        let mut stream = connecting.await.expect("connects");
        // A ticket would come before the greeting.
        stream.read_exact(&mut [0; 1]).await.expect("greeted");
        let kind = stream.get_ref().1.handshake_kind();
        assert_eq!(kind, Some(HandshakeKind::Full));
    }
}

#[tokio::test]
async fn other_bytes_than_a_handshake_are_refused() {
    let keys = Keys::make();
    let (address, mut listener, gate) = keys.listen(Limits::default()).await;
    let hello = [&zmtp::greeting()[..], &zmtp::ready("DEALER", b"")].concat();
    let long = vec![0x16; 1 << 20];
    let others = [&hello[..], b"GET / HTTP/1.1\r\n\r\n", &[0; 600], &long];
    for (count, bytes) in others.iter().enumerate() {
        let mut stream = raw(&address).await;
        // The gate may close meanwhile.
        stream.write_all(bytes).await.ok();
        read_to_end(&mut stream).await;
        refused(&gate, count as u64 + 1).await;
    }
    serves(&keys, &address, &mut listener).await;
}

/// The first bytes of a ClientHello that promise more.
const HALF: &[u8] = &[0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3, 7, 7, 7, 7, 7];

#[tokio::test]
async fn half_handshakes_are_refused_and_others_are_served_meanwhile() {
    let limits = Limits {
        handshake: Duration::from_secs(3),
        ..Limits::default()
    };
    let keys = Keys::make();
    let (address, mut listener, gate) = keys.listen(limits).await;
    let transport = keys.transport("worker/0/1");
    let connecting = transport.connect(&address, Limits::default(), TEST_TIMEOUT);
    let mut client = connecting.await.expect("connects");
    let peer = opened(&mut listener).await;
    let mut half = Vec::new();
    for n in 0..500 {
        let mut stream = raw(&address).await;
        stream.write_all(HALF).await.expect("written");
        half.push(stream);
        if n % 50 == 0 {
            let echo = frame("h", &n.to_string());
            client.send(echo.clone()).await.expect("sent");
            assert_eq!(arrived(&mut listener).await, (peer, echo.clone()));
            listener
                .sender()
                .send(peer, echo.clone())
                .await
                .expect("sent");
            assert_eq!(received(&mut client).await, echo);
        }
    }
    // A new peer of the same address, and one of another that is slow, too.
    serves(&keys, &address, &mut listener).await;
    for stream in &mut half {
        read_to_end(stream).await;
    }
    refused(&gate, 500).await;
    serves(&keys, &address, &mut listener).await;
}

#[tokio::test]
async fn half_handshakes_of_other_machines_take_no_place_of_this_one() {
    let limits = Limits {
        handshake: TEST_TIMEOUT * 3,
        ..Limits::default()
    };
    let keys = Keys::make();
    let (_root, local) = own_directory();
    let remote = free_address();
    let transport = keys.transport("leader");
    let at = at(&remote).parse().expect("an address");
    let mut listener = transport
        .listen_beside(&local, at, limits)
        .await
        .expect("listens");
    let Address::Directory(path) = &local else {
        panic!("not a directory");
    };
    let slow = tokio::net::UnixStream::connect(path.join("kvferry.sock")).await;
    let mut slow = slow.expect("connects");
    let mut half = Vec::new();
    for _ in 0..HANDSHAKES_MAX * 2 {
        let mut stream = raw(&remote).await;
        stream.write_all(HALF).await.expect("written");
        half.push(stream);
    }
    // The first is closed for one of the others; the oldest of this machine is not.
    read_to_end(&mut half[0]).await;
    let hello = [&zmtp::greeting()[..], &zmtp::ready("DEALER", b"")].concat();
    slow.write_all(&hello).await.expect("open");
    opened(&mut listener).await;
}

#[tokio::test]
async fn half_handshakes_of_one_address_do_not_end_those_of_another() {
    let limits = Limits {
        handshake: TEST_TIMEOUT * 3,
        ..Limits::default()
    };
    let keys = Keys::make();
    let (address, _listener, gate) = keys.listen(limits).await;
    let socket = TcpSocket::new_v4().expect("a socket");
    socket
        .bind("127.0.0.2:0".parse().expect("an address"))
        .expect("binds");
    let mut slow = socket
        .connect(at(&address).parse().expect("an address"))
        .await
        .expect("connects");
    slow.write_all(HALF).await.expect("written");
    let mut half = Vec::new();
    for _ in 0..HANDSHAKES_MAX * 2 {
        let mut stream = raw(&address).await;
        stream.write_all(HALF).await.expect("written");
        half.push(stream);
    }
    let of_source = super::super::gate::HANDSHAKES_OF_SOURCE_MAX;
    refused(&gate, (HANDSHAKES_MAX * 2 - of_source) as u64).await;
    let read = timeout(Duration::from_millis(50), slow.read(&mut [0; 1])).await;
    assert!(read.is_err(), "it was closed");
}

/// Starts a server at a TLS port, and one client with the credentials and the hello.
async fn greeted(keys: &Keys, name: &str, hello: Hello) -> Result<Role, ErrorCode> {
    let (address, listener, _gate) = keys.listen(Limits::default()).await;
    let mut server = Server::new(
        listener,
        ServerSettings {
            epoch: Epoch(1),
            heartbeat: Duration::from_secs(1),
            roles: vec![Role::Engine, Role::Worker, Role::Admin],
            features: 0,
            worker_seats: None,
        },
    );
    let settings = ClientSettings {
        address,
        hello,
        limits: Limits::default(),
    };
    let client = Client::without_incoming(Arc::new(keys.transport(name)), settings);
    let request = Message::Status(Status::default());
    let asking = tokio::spawn(async move { client.request(request, TEST_TIMEOUT).await });
    let serving = async {
        loop {
            for event in server.next().await.expect("tasks run") {
                if let ServerEvent::Opened { hello, caller, .. } = event {
                    assert_eq!(caller.pid, None);
                    return hello.role;
                }
            }
        }
    };
    tokio::select! {
        role = serving => Ok(role),
        failed = asking => Err(failed.expect("no panic").expect_err("nothing answers").code),
    }
}

#[tokio::test]
async fn a_hello_is_compared_with_the_certificate() {
    let keys = Keys::make();
    let worker = |replica, rank| Hello {
        replica,
        rank,
        ..Hello::new(Role::Worker, "test")
    };
    let admin = Hello::new(Role::Admin, "test");
    let engine = Hello::new(Role::Engine, "test");
    for (name, hello, expected) in [
        ("worker/1/2", worker(1, 2), Ok(Role::Worker)),
        ("worker/1/2", worker(1, 1), Err(ErrorCode::Invalid)),
        ("worker/1/2", worker(2, 2), Err(ErrorCode::Invalid)),
        ("worker/1/2", admin.clone(), Err(ErrorCode::Invalid)),
        ("worker/1/2", engine.clone(), Err(ErrorCode::Invalid)),
        ("admin", admin.clone(), Ok(Role::Admin)),
        ("admin", worker(0, 0), Err(ErrorCode::Invalid)),
        ("admin", engine, Err(ErrorCode::Invalid)),
        ("monitor", admin, Ok(Role::Admin)),
    ] {
        assert_eq!(greeted(&keys, name, hello).await, expected, "{name}");
    }
}

#[tokio::test]
async fn one_listener_serves_both_kinds_of_sockets_within_one_limit() {
    let keys = Keys::make();
    let (_root, local) = own_directory();
    let remote = free_address();
    let limits = Limits {
        connections: 2,
        ..Limits::default()
    };
    let at = at(&remote).parse().expect("an address");
    let listening = keys
        .transport("leader")
        .listen_beside(&local, at, limits)
        .await;
    let mut listener = listening.expect("listens");
    let one = ZmqTransport
        .connect(&local, Limits::default(), TEST_TIMEOUT)
        .await;
    let one = one.expect("connects");
    opened(&mut listener).await;
    let worker = keys.transport("worker/0/0");
    let two = worker
        .connect(&remote, Limits::default(), TEST_TIMEOUT)
        .await;
    let two = two.expect("connects");
    opened(&mut listener).await;
    let third = ZmqTransport
        .connect(&local, Limits::default(), TEST_TIMEOUT)
        .await;
    assert!(matches!(third.err(), Some(TransportError::Refused { .. })));
    let third = worker
        .connect(&remote, Limits::default(), TEST_TIMEOUT)
        .await;
    assert!(matches!(third.err(), Some(TransportError::Refused { .. })));
    drop((one, two));
    listener.close().await;
    std::net::TcpListener::bind(at).expect("the port is free");
}

#[tokio::test]
async fn the_holder_of_a_certificate_cannot_use_up_the_places_of_others() {
    let keys = Keys::make();
    let (address, mut listener, gate) = keys.listen(Limits::default()).await;
    let transport = keys.transport("worker/0/1");
    let mut open = Vec::new();
    for _ in 0..CERTIFICATE_CONNECTIONS_MAX {
        let connecting = transport.connect(&address, Limits::default(), TEST_TIMEOUT);
        open.push((
            connecting.await.expect("connects"),
            opened(&mut listener).await,
        ));
    }
    let more = transport
        .connect(&address, Limits::default(), TEST_TIMEOUT)
        .await;
    assert!(matches!(more.err(), Some(TransportError::Refused { .. })));
    refused(&gate, 1).await;
    serves(&keys, &address, &mut listener).await;
    let (client, peer) = open.remove(0);
    drop(client);
    assert_eq!(closed(&mut listener).await, (peer, CloseReason::ByPeer));
    let connecting = transport.connect(&address, Limits::default(), TEST_TIMEOUT);
    let _again = connecting.await.expect("connects");
    opened(&mut listener).await;
}

#[test]
fn credentials_that_others_can_read_are_refused() {
    let keys = Keys::make();
    let path = keys.file("leader");
    let refusal = |path: &std::path::Path| {
        let error = Credentials::load(path).expect_err("refused").to_string();
        assert!(error.contains(&path.display().to_string()), "{error}");
        error
    };
    for (mode, remedy) in [
        (0o604, "chmod 600"),
        (0o444, "chmod 440"),
        (0o620, "chmod 600"),
        (0o660, "chmod 640"),
    ] {
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("set");
        let error = refusal(&path);
        assert!(error.contains(remedy), "{error}");
    }
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("set");
    Credentials::load(&path).expect("loaded");
    assert!(refusal(&keys.directory()).contains("is no regular file"));
    assert!(refusal(&keys.directory().join("none.pem")).contains("cannot be read"));
    let whole = sections(&fs::read_to_string(&path).expect("read"));
    let part = keys.directory().join("part.pem");
    for (parts, missing) in [
        (vec![1, 2], "a certificate that does not name one process"),
        (vec![0, 2], "no private key"),
        (vec![0, 1], "no root"),
        (vec![1], "no certificate"),
    ] {
        let text: String = parts.iter().map(|part| &whole[*part][..]).collect();
        fs::write(&part, text).expect("written");
        fs::set_permissions(&part, fs::Permissions::from_mode(0o600)).expect("set");
        let error = refusal(&part);
        assert!(error.contains(missing) || parts == [1, 2], "{error}");
    }
}

/// A kubelet writes the files of a Secret into a directory of their time, and exchanges the link to that directory.
#[test]
fn credentials_of_a_volume_with_links_are_read_also_by_the_group_of_a_pod() {
    let keys = Keys::make();
    let volume = keys.directory().join("volume");
    let dated = volume.join("..2026_11_29");
    fs::create_dir_all(&dated).expect("made");
    let file = dated.join("leader.pem");
    fs::copy(keys.file("leader"), &file).expect("copied");
    symlink("..2026_11_29", volume.join("..data")).expect("linked");
    let path = volume.join("leader.pem");
    symlink("..data/leader.pem", &path).expect("linked");
    for mode in [0o400, 0o600] {
        fs::set_permissions(&file, fs::Permissions::from_mode(mode)).expect("set");
        Credentials::load(&path).expect("loaded");
    }
    if !rustix::process::geteuid().is_root() {
        return crate::skipped::skipped("it needs root, which gives a file to another group");
    }
    for mode in [0o440, 0o640] {
        fs::set_permissions(&file, fs::Permissions::from_mode(mode)).expect("set");
        Credentials::load(&path).expect("loaded");
    }
    std::os::unix::fs::chown(&file, None, Some(54_321)).expect("given");
    let error = Credentials::load(&path).expect_err("refused").to_string();
    assert!(error.contains("gid 54321"), "{error}");
    assert!(error.contains("fsGroup"), "{error}");
    std::os::unix::fs::chown(&file, Some(54_321), Some(0)).expect("given");
    let error = Credentials::load(&path).expect_err("refused").to_string();
    assert!(error.contains("belongs to uid 54321"), "{error}");
}

#[test]
fn a_root_is_made_once_and_its_key_stays_in_its_file() {
    let keys = Keys::make();
    let directory = keys.directory();
    let mode =
        |path: &std::path::Path| fs::metadata(path).expect("there").permissions().mode() & 0o777;
    let key = fs::read_to_string(directory.join("root.key")).expect("read");
    let leader = keys.file("leader");
    assert_eq!(mode(&directory), 0o700);
    assert_eq!(mode(&directory.join("root.key")), 0o600);
    assert_eq!(mode(&leader), 0o600);
    let before = fs::read_to_string(&leader).expect("read");
    assert!(!before.contains(key.trim()), "the root's key is in it");

    let again = Root::open_or_make(&directory, Some("test")).expect("opened");
    assert_eq!(
        fs::read_to_string(directory.join("root.key")).expect("read"),
        key
    );
    let kept = again.write(holder("leader"), 1, false).expect("kept");
    assert_eq!(kept, Written::Kept(leader.clone()));
    assert_eq!(fs::read_to_string(&leader).expect("read"), before);
    let renewed = again.write(holder("leader"), 1, true).expect("renewed");
    assert_eq!(renewed, Written::New(leader.clone()));
    assert_ne!(fs::read_to_string(&leader).expect("read"), before);
    Credentials::load(&leader).expect("of the same root");

    let named = Root::open_or_make(&directory, None).expect("without a name, that of the root");
    let kept = named.write(holder("leader"), 1, false).expect("kept");
    assert_eq!(kept, Written::Kept(leader.clone()));
    let other = Root::open_or_make(&directory, Some("other")).err();
    assert!(
        matches!(other, Some(KeygenError::OtherDeployment { .. })),
        "{other:?}"
    );
    let invalid = Root::open_or_make(&directory, Some("Not a name")).err();
    assert!(
        matches!(invalid, Some(KeygenError::Deployment(_))),
        "{invalid:?}"
    );
}
