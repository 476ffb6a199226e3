//! Tests of the directory checks and of the lock on a directory.

use std::fs;
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _, symlink};
use std::path::Path;

use super::super::{FdReceiver, TransportError};
use super::*;

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("mode set");
}

fn mode(path: &Path) -> u32 {
    let found = fs::symlink_metadata(path).expect("there");
    found.permissions().mode() & 0o7777
}

async fn refused(path: &Path) -> String {
    let address = Address::Directory(path.to_owned());
    let listening = ZmqTransport.listen(&address, Limits::default()).await;
    let connecting = ZmqTransport.connect(&address, Limits::default(), TEST_TIMEOUT);
    let (listening, connecting) = (listening.err(), connecting.await.err());
    let texts = [listening, connecting].map(|error| error.expect("refused").to_string());
    assert_eq!(texts[0], texts[1]);
    let receiving = FdReceiver::bind(path).err().expect("refused").to_string();
    assert_eq!(texts[0], receiving);
    receiving
}

#[tokio::test]
async fn makes_everything_for_its_owner_alone() {
    let (_root, address, listener) = zmq_listener(Limits::default()).await;
    let Address::Directory(path) = &address else {
        panic!("not a directory");
    };
    assert_eq!(mode(path), 0o700);
    let mut sockets = 0;
    for entry in fs::read_dir(path).expect("readable") {
        let entry = entry.expect("readable");
        assert_eq!(mode(&entry.path()), 0o600, "{:?}", entry.path());
        sockets += usize::from(entry.file_type().expect("known").is_socket());
    }
    assert_eq!(sockets, 1);
    listener.close().await;
    assert!(!path.join("kvferry.sock").exists());
}

#[tokio::test]
async fn refuses_a_directory_that_others_can_reach() {
    let root = tempfile::tempdir().expect("temporary directory");
    let path = root.path().join("open");
    fs::create_dir(&path).expect("made");
    for bits in [0o701, 0o710, 0o720, 0o740, 0o755, 0o777] {
        set_mode(&path, bits);
        let text = refused(&path).await;
        assert!(
            text.contains(&format!("{} (mode {bits:04o})", path.display())),
            "{text}"
        );
        assert!(
            text.contains(&format!("chmod 700 {}", path.display())),
            "{text}"
        );
    }
}

#[tokio::test]
async fn refuses_links_and_files() {
    let root = tempfile::tempdir().expect("temporary directory");
    let real = root.path().join("real");
    fs::create_dir(&real).expect("made");
    set_mode(&real, 0o700);
    let link = root.path().join("link");
    symlink(&real, &link).expect("linked");
    assert!(refused(&link).await.contains("is a link or no directory"));
    let file = root.path().join("file");
    fs::write(&file, "").expect("written");
    assert!(refused(&file).await.contains("is a link or no directory"));
}

#[tokio::test]
async fn refuses_a_parent_in_which_others_could_swap_it() {
    let root = tempfile::tempdir().expect("temporary directory");
    let parent = root.path().join("parent");
    let path = parent.join("own");
    fs::create_dir(&parent).expect("made");
    fs::create_dir(&path).expect("made");
    set_mode(&path, 0o700);
    set_mode(&parent, 0o777);
    let text = refused(&path).await;
    assert!(
        text.contains(&format!("chmod go-w {}", parent.display())),
        "{text}"
    );
    set_mode(&parent, 0o1777);
    let address = Address::Directory(path);
    let listening = ZmqTransport.listen(&address, Limits::default()).await;
    listening.expect("a sticky parent is fine");
}

#[tokio::test]
async fn refuses_a_path_that_no_socket_can_have() {
    let root = tempfile::tempdir().expect("temporary directory");
    let address = Address::Directory(root.path().join("x".repeat(100)));
    let listening = ZmqTransport.listen(&address, Limits::default()).await;
    assert!(matches!(
        listening.err(),
        Some(TransportError::PathTooLong(_))
    ));
}

#[tokio::test]
async fn refuses_to_replace_a_file_that_is_no_socket() {
    let (_root, address, listener) = zmq_listener(Limits::default()).await;
    listener.close().await;
    let Address::Directory(path) = &address else {
        panic!("not a directory");
    };
    fs::write(path.join("kvferry.sock"), "precious").expect("written");
    let listening = ZmqTransport.listen(&address, Limits::default()).await;
    let text = listening.err().expect("refused").to_string();
    assert!(text.contains("is no socket"), "{text}");
    let left = fs::read_to_string(path.join("kvferry.sock"));
    assert_eq!(left.expect("still there"), "precious");
}

#[tokio::test]
async fn leaves_the_socket_of_another_process_in_its_place() {
    let (_root, address, listener) = zmq_listener(Limits::default()).await;
    let Address::Directory(path) = &address else {
        panic!("not a directory");
    };
    let socket = path.join("kvferry.sock");
    fs::remove_file(&socket).expect("removed");
    let other = std::os::unix::net::UnixListener::bind(&socket).expect("binds");
    listener.close().await;
    std::os::unix::net::UnixStream::connect(&socket).expect("the other listens");
    drop(other);
}

#[tokio::test]
async fn replaces_the_socket_of_a_listener_that_was_killed() {
    let (_root, address) = own_directory();
    let Address::Directory(path) = &address else {
        panic!("not a directory");
    };
    super::super::directory::prepare(path).expect("made");
    let socket = path.join("kvferry.sock");
    drop(std::os::unix::net::UnixListener::bind(&socket).expect("binds"));
    assert!(socket.exists());
    fs::write(path.join("kvferry.lock"), "1\n").expect("written");
    let mut listener = ZmqTransport
        .listen(&address, Limits::default())
        .await
        .expect("listens");
    let connecting = ZmqTransport.connect(&address, Limits::default(), TEST_TIMEOUT);
    let _client = connecting.await.expect("connects");
    opened(&mut listener).await;
}

#[tokio::test]
async fn names_the_process_that_holds_the_directory() {
    let (_root, address, _listener) = zmq_listener(Limits::default()).await;
    let second = ZmqTransport.listen(&address, Limits::default()).await;
    let text = second.err().expect("refused").to_string();
    let expected = format!("{address} is in use by process {}", std::process::id());
    assert_eq!(text, expected);
}
