//! Tests of descriptor transfer: each descriptor is taken once or closed.

use std::fs::File;
use std::io::{self, IoSlice, Read as _, Seek as _, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use super::super::fds::CONNECTIONS_MAX;
use super::super::{
    FdError, FdReceiver, TICKET_BYTES, Ticket, UNTAKEN_MAX, UNTAKEN_TTL, send_fd, send_fds,
};
use super::*;

fn bench() -> (tempfile::TempDir, PathBuf, FdReceiver) {
    let root = tempfile::tempdir().expect("temporary directory");
    let path = root.path().join("own");
    let receiver = FdReceiver::bind(&path).expect("binds");
    (root, path, receiver)
}

/// A pipe. Its reading end sees the end of the stream only when every copy of the writing end is closed.
fn pipe() -> (io::PipeReader, io::PipeWriter) {
    io::pipe().expect("a pipe")
}

/// Completes when every copy of the writing end is closed.
async fn all_closed(mut reader: io::PipeReader) {
    let reading = tokio::task::spawn_blocking(move || reader.read(&mut [0; 1]));
    let read = timeout(TEST_TIMEOUT, reading)
        .await
        .expect("closed in time");
    assert_eq!(read.expect("no panic").expect("read"), 0);
}

/// Lets this process open so many files; says that it cannot and returns false where the system forbids it.
fn may_open(wanted: u64) -> bool {
    let limit = rustix::process::Resource::Nofile;
    let mut files = rustix::process::getrlimit(limit);
    if files.maximum.is_some_and(|most| most < wanted) {
        crate::skipped::skipped(&format!(
            "a process may not open {wanted} files here (ulimit -Hn)"
        ));
        return false;
    }
    files.current = files.current.map(|now| now.max(wanted));
    rustix::process::setrlimit(limit, files).expect("up to the maximum");
    true
}

/// Sends these bytes with these descriptors in one message.
fn send_raw(stream: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(fds)));
    }
    sendmsg(
        stream,
        &[IoSlice::new(bytes)],
        &mut ancillary,
        SendFlags::empty(),
    )?;
    Ok(())
}

/// Sends these bytes with these descriptors in one message over a connection of its own, and returns the answer.
async fn raw(path: &Path, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<u8> {
    let stream = UnixStream::connect(path.join("fds.sock"))?;
    send_raw(&stream, bytes, fds)?;
    stream.shutdown(std::net::Shutdown::Write)?;
    let answer = tokio::task::spawn_blocking(move || {
        let mut answer = [0; 1];
        (&stream).read_exact(&mut answer).map(|()| answer[0])
    });
    timeout(TEST_TIMEOUT, answer)
        .await
        .expect("in time")
        .expect("no panic")
}

const TICKET: Ticket = [7; TICKET_BYTES];

#[tokio::test]
async fn a_descriptor_is_taken_once() {
    let (_root, path, receiver) = bench();
    let mut file = tempfile::tempfile().expect("a file");
    file.write_all(b"the same file").expect("written");
    send_fd(&path, &TICKET, file.as_fd(), TEST_TIMEOUT)
        .await
        .expect("sent");
    assert!(receiver.take(&[8; TICKET_BYTES]).is_none());
    let mut taken = File::from(receiver.take(&TICKET).expect("came"));
    assert!(receiver.take(&TICKET).is_none());
    let flags = rustix::io::fcntl_getfd(&taken).expect("flags");
    assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
    taken.rewind().expect("rewound");
    let mut text = String::new();
    taken.read_to_string(&mut text).expect("read");
    assert_eq!(text, "the same file");
}

#[tokio::test]
async fn refuses_a_ticket_that_waits_already() {
    let (_root, path, receiver) = bench();
    let (first_reader, first) = pipe();
    let (second_reader, second) = pipe();
    send_fd(&path, &TICKET, first.as_fd(), TEST_TIMEOUT)
        .await
        .expect("sent");
    let again = send_fd(&path, &TICKET, second.as_fd(), TEST_TIMEOUT).await;
    assert!(matches!(again, Err(FdError::Refused)), "{again:?}");
    drop(second);
    all_closed(second_reader).await;
    drop(first);
    drop(receiver.take(&TICKET).expect("the first one is kept"));
    all_closed(first_reader).await;
}

#[tokio::test]
async fn refuses_none_and_several_and_closes_them() {
    let (_root, path, receiver) = bench();
    for count in [0, 2, 3, 8] {
        let (reader, writer) = pipe();
        let fds = vec![writer.as_fd(); count];
        assert_eq!(
            raw(&path, &TICKET, &fds).await.expect("answered"),
            0,
            "{count}"
        );
        drop(fds);
        drop(writer);
        all_closed(reader).await;
        assert!(receiver.take(&TICKET).is_none());
    }
}

#[tokio::test]
async fn a_truncated_message_is_refused_and_its_descriptors_closed() {
    let (_root, path, receiver) = bench();
    let (reader, writer) = pipe();
    let answer = raw(&path, &TICKET[..15], &[writer.as_fd()]).await;
    assert_eq!(answer.expect("answered"), 0);
    drop(writer);
    all_closed(reader).await;
    assert!(receiver.take(&TICKET).is_none());
}

#[tokio::test]
async fn the_number_of_waiting_descriptors_is_bounded() {
    let (_root, path, receiver) = bench();
    let (reader, writer) = pipe();
    if !may_open(UNTAKEN_MAX as u64 + 256) {
        return;
    }
    let ticket = |n: usize| (n as u128).to_be_bytes();
    let all: Vec<_> = (0..UNTAKEN_MAX)
        .map(|n| (ticket(n), writer.as_fd()))
        .collect();
    send_fds(&path, &all, TEST_TIMEOUT).await.expect("sent");
    let none = usize::MAX;
    let one_more = send_fd(&path, &ticket(none), writer.as_fd(), TEST_TIMEOUT).await;
    assert!(matches!(one_more, Err(FdError::Refused)), "{one_more:?}");
    drop(receiver.take(&ticket(5)).expect("came"));
    send_fd(&path, &ticket(none), writer.as_fd(), TEST_TIMEOUT)
        .await
        .expect("sent");
    drop(writer);
    drop(receiver);
    all_closed(reader).await;
}

/// Silent senders are closed after 5 s, which is longer than the 2 s of the other sender. A single attempt may fail on
/// a stalled machine, but not all five.
#[tokio::test]
async fn silent_senders_do_not_keep_others_out() {
    let (_root, path, receiver) = bench();
    let (_reader, writer) = pipe();
    let mut silent = Vec::new();
    for attempt in 0..5 {
        for _ in 0..CONNECTIONS_MAX {
            silent.push(UnixStream::connect(path.join("fds.sock")).expect("connects"));
        }
        let short = Duration::from_secs(2);
        match send_fd(&path, &[attempt; 16], writer.as_fd(), short).await {
            Ok(()) => return assert!(receiver.take(&[attempt; 16]).is_some()),
            Err(error) => assert!(matches!(error, FdError::Late(_)), "{error}"),
        }
    }
    panic!("nobody else was served");
}

#[tokio::test]
async fn an_unclaimed_descriptor_is_closed() {
    let (_root, path, receiver) = bench();
    let (reader, writer) = pipe();
    send_fd(&path, &TICKET, writer.as_fd(), TEST_TIMEOUT)
        .await
        .expect("sent");
    drop(writer);
    tokio::time::pause();
    tokio::time::sleep(UNTAKEN_TTL / 2).await;
    drop(receiver.take(&TICKET).expect("still there"));
    all_closed_paused(reader);

    tokio::time::resume();
    let (reader, writer) = pipe();
    send_fd(&path, &TICKET, writer.as_fd(), TEST_TIMEOUT)
        .await
        .expect("sent");
    drop(writer);
    tokio::time::pause();
    tokio::time::sleep(UNTAKEN_TTL * 2).await;
    assert!(receiver.take(&TICKET).is_none());
    all_closed_paused(reader);
}

#[tokio::test]
async fn a_descriptor_whose_answer_finds_no_room_is_closed() {
    /// More answers than a socket takes unread.
    const ANSWERS_MAX: u128 = 4096;
    if !may_open(ANSWERS_MAX as u64 + 4096) {
        return;
    }
    let (_root, path, receiver) = bench();
    let (reader, writer) = pipe();
    let stream = UnixStream::connect(path.join("fds.sock")).expect("connects");
    let unread = || u128::from(rustix::io::ioctl_fionread(&stream).expect("counted"));
    for sent in 1.. {
        assert!(sent < ANSWERS_MAX, "there is room for each answer");
        let ticket: Ticket = u128::to_be_bytes(sent);
        send_raw(&stream, &ticket, &[writer.as_fd()]).expect("sent");
        let until = std::time::Instant::now() + Duration::from_secs(1);
        while unread() < sent && std::time::Instant::now() < until {
            tokio::task::yield_now().await;
        }
        if unread() < sent {
            break;
        }
    }
    drop(writer);
    tokio::time::pause();
    tokio::time::sleep(UNTAKEN_TTL * 3).await;
    all_closed_paused(reader);
    drop(receiver);
}

/// As [`all_closed`], for copies that are known to be closed while the clock is paused.
fn all_closed_paused(mut reader: io::PipeReader) {
    rustix::io::ioctl_fionbio(&reader, true).expect("set");
    let read = reader.read(&mut [0; 1]).expect("all copies are closed");
    assert_eq!(read, 0);
}

#[tokio::test]
async fn a_missing_receiver_is_reported_in_time() {
    let (_root, path, receiver) = bench();
    let (_reader, writer) = pipe();
    drop(receiver);
    let gone = send_fd(&path, &TICKET, writer.as_fd(), TEST_TIMEOUT).await;
    assert!(matches!(gone, Err(FdError::Io(_))), "{gone:?}");
    let _mute = std::os::unix::net::UnixListener::bind(path.join("fds.sock")).expect("binds");
    let short = Duration::from_millis(50);
    let late = send_fd(&path, &TICKET, writer.as_fd(), short).await;
    assert!(matches!(late, Err(FdError::Late(_))), "{late:?}");
}
