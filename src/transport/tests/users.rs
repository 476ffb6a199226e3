//! Processes of other users: who may connect, and that a user cannot take the places of others.
//!
//! A thread may change its own user, and the kernel reports that user for the sockets that it connects. This needs root.

use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use rustix::process::Uid;

use super::*;
use crate::skipped::skipped;
use crate::{FdReceiver, OtherUsers, USER_CONNECTIONS_MAX};

const ALICE: u32 = 61_001;
const BOB: u32 = 61_002;

fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        skipped("connecting as other users needs root");
    }
    root
}

/// Calls a function on a thread of another user.
async fn as_user<T: Send + 'static>(uid: u32, call: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, result) = tokio::sync::oneshot::channel();
    std::thread::spawn(move || {
        let user = Uid::from_raw(uid);
        rustix::thread::set_thread_res_uid(user, user, user).expect("root may change its user");
        done.send(call()).ok();
    });
    let result = timeout(TEST_TIMEOUT, result).await;
    result.expect("in time").expect("the thread returns")
}

/// A folder that every user can pass through, as the parent of a socket directory is.
fn passable() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o711)).expect("mode set");
    folder
}

async fn listening(folder: &Path, users: &[u32]) -> (PathBuf, Listener) {
    let path = folder.join("s");
    let limits = Limits::default().with_users(OtherUsers::new(users.iter().copied()));
    let address = Address::Directory(path.clone());
    let listener = ZmqTransport.listen(&address, limits).await;
    (path.join("kvferry.sock"), listener.expect("listens"))
}

fn mode(path: &Path) -> u32 {
    let found = fs::symlink_metadata(path).expect("there");
    found.permissions().mode() & 0o777
}

/// The greeting and READY of a DEALER.
fn handshake() -> Vec<u8> {
    let mut bytes = vec![0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0x7f, 3, 0];
    bytes.extend(b"NULL");
    bytes.resize(64, 0);
    let ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER";
    bytes.extend([4, u8::try_from(ready.len()).expect("short")]);
    bytes.extend(ready);
    bytes
}

/// Connects, and returns the connection if the other side sends its greeting.
fn connect(socket: &Path) -> std::io::Result<UnixStream> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(TEST_TIMEOUT))?;
    stream.write_all(&handshake())?;
    let mut greeting = [0; 64];
    stream.read_exact(&mut greeting)?;
    // READY comes once the connection is open.
    let mut ready = [0; 2];
    stream.read_exact(&mut ready)?;
    Ok(stream)
}

#[tokio::test]
async fn directories_and_sockets_open_for_others_only_with_users() {
    let folder = passable();
    for (users, expected) in [(&[ALICE][..], (0o711, 0o666)), (&[], (0o700, 0o600))] {
        let (socket, listener) = listening(folder.path(), users).await;
        let directory = socket.parent().expect("a directory");
        assert_eq!((mode(directory), mode(&socket)), expected);
        assert_eq!(mode(&directory.join("kvferry.lock")), 0o600);
        listener.close().await;
    }
}

#[tokio::test]
async fn a_named_user_connects_and_another_one_is_refused_and_counted() {
    if !is_root() {
        return;
    }
    let folder = passable();
    let (socket, mut listener) = listening(folder.path(), &[ALICE]).await;
    let at = socket.clone();
    let refused = as_user(BOB, move || connect(&at).err()).await;
    assert!(refused.is_some(), "nothing is sent to him");
    assert_eq!(listener.sender().refused().handshakes, 1);
    let at = socket.clone();
    let connected = as_user(ALICE, move || connect(&at)).await;
    let _connected = connected.expect("she is named");
    match event(&mut listener).await {
        ListenerEvent::Opened { origin, .. } => {
            assert_eq!(origin.caller().user, User::Other(ALICE));
        }
        other => panic!("not opened: {other:?}"),
    }
    let at = socket.clone();
    let own = as_user(0, move || connect(&at)).await;
    let _own = own.expect("this user");
    opened(&mut listener).await;
}

#[tokio::test]
async fn a_user_uses_up_its_own_places_alone() {
    if !is_root() {
        return;
    }
    let folder = passable();
    let (socket, mut listener) = listening(folder.path(), &[ALICE, BOB]).await;
    let mut connections = Vec::new();
    for _ in 0..USER_CONNECTIONS_MAX {
        let at = socket.clone();
        connections.push(as_user(ALICE, move || connect(&at)).await.expect("a place"));
        match event(&mut listener).await {
            ListenerEvent::Opened { .. } => {}
            other => panic!("not opened: {other:?}"),
        }
    }
    let at = socket.clone();
    let one_more = as_user(ALICE, move || connect(&at).err()).await;
    assert!(one_more.is_some(), "her places are taken");
    let at = socket.clone();
    let _of_bob = as_user(BOB, move || connect(&at))
        .await
        .expect("his own place");
    drop(connections);
}

#[tokio::test]
async fn descriptors_are_taken_of_named_users_alone() {
    if !is_root() {
        return;
    }
    let folder = passable();
    let path = folder.path().join("s");
    let _receiver = FdReceiver::bind_for(&path, OtherUsers::new([ALICE])).expect("binds");
    let socket = path.join("fds.sock");
    assert_eq!((mode(&path), mode(&socket)), (0o711, 0o666));
    let answered = |uid| {
        let socket = socket.clone();
        as_user(uid, move || {
            let mut stream = UnixStream::connect(&socket).expect("every user reaches it");
            stream.set_read_timeout(Some(TEST_TIMEOUT)).expect("set");
            // A ticket without its descriptor: refused by an answer, if anything is read. The other side may have closed.
            let sent = stream.write_all(&[1; 16]);
            let mut answer = [9];
            sent.and_then(|()| stream.read_exact(&mut answer))
                .map(|()| answer[0])
        })
    };
    assert_eq!(answered(ALICE).await.ok(), Some(0));
    assert!(answered(BOB).await.is_err());
}
