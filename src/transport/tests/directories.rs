//! Tests of the directory checks and of the lock on a directory.

use std::fs;
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _, symlink};
use std::path::Path;

use super::super::directory::Claim;
use super::super::skipped::skipped;
use super::super::{FdReceiver, OtherUsers, OwnDirectory, TransportError};
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
async fn a_directory_that_others_use_is_not_to_be_closed_to_them() {
    let root = tempfile::tempdir().expect("temporary directory");
    let path = root.path().join("shared");
    fs::create_dir(&path).expect("made");
    set_mode(&path, 0o1777);
    let below = format!("such as {}", path.join("kvferry").display());
    let text = refused(&path).await;
    assert!(text.contains(&below) && !text.contains("chmod"), "{text}");
    set_mode(&path, 0o755);
    fs::create_dir(path.join("of another program")).expect("made");
    let text = refused(&path).await;
    assert!(
        text.contains(&below) && text.contains("if kvferry alone uses it"),
        "{text}"
    );
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

/// A kubelet makes volumes with mode 0777, or with one for a group, and without the sticky bit.
#[tokio::test]
async fn a_parent_that_others_can_write_is_no_obstacle() {
    let root = tempfile::tempdir().expect("temporary directory");
    for bits in [0o777, 0o2777, 0o2775, 0o2770, 0o1777] {
        let parent = root.path().join(format!("{bits:o}"));
        fs::create_dir(&parent).expect("made");
        set_mode(&parent, bits);
        let address = Address::Directory(parent.join("own"));
        let mut listener = ZmqTransport
            .listen(&address, Limits::default())
            .await
            .expect("listens");
        let connecting = ZmqTransport.connect(&address, Limits::default(), TEST_TIMEOUT);
        let _client = connecting.await.expect("connects");
        opened(&mut listener).await;
    }
}

/// Whoever can write to the parent can put another directory in the place of the one that was checked.
#[tokio::test]
async fn what_is_opened_through_a_directory_lies_in_the_one_that_was_checked() {
    let root = tempfile::tempdir().expect("temporary directory");
    let path = root.path().join("own");
    let directory = super::super::prepare_for(&path, &OtherUsers::default()).expect("made");
    directory.replace("file", b"own").expect("written");
    let mut claim = Claim::take(directory, "kvferry.sock").expect("free");
    fs::rename(&path, root.path().join("moved")).expect("moved");
    fs::create_dir(&path).expect("another one");
    fs::write(path.join("file"), "another's").expect("written");

    let refused = claim
        .bind(&OtherUsers::default())
        .expect_err("another directory");
    assert!(refused.to_string().contains("kvferry.sock"), "{refused}");
    let checked = OwnDirectory::open(&root.path().join("moved")).expect("checked");
    fs::rename(root.path().join("moved"), root.path().join("again")).expect("moved");
    assert_eq!(checked.read("file").expect("read"), b"own");
    let through = fs::read(checked.through("file")).expect("read");
    assert_eq!(through, b"own");
}

/// The user of a pod cannot change the mode of a volume, and can name a directory in it.
#[tokio::test]
async fn a_directory_of_another_user_in_which_one_can_be_made_is_refused_with_a_path_in_it() {
    if !rustix::process::geteuid().is_root() {
        return skipped("it needs root, which gives a directory to another user");
    }
    let root = tempfile::tempdir().expect("temporary directory");
    let path = root.path().join("volume");
    fs::create_dir(&path).expect("made");
    set_mode(&path, 0o777);
    std::os::unix::fs::chown(&path, Some(12_345), None).expect("given");
    let text = refused(&path).await;
    let inside = path.join("kvferry");
    assert!(text.contains(&inside.display().to_string()), "{text}");
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
    super::super::prepare_for(path, &OtherUsers::default()).expect("made");
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
