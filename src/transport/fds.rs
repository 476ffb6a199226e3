//! Transfer of file descriptors to a worker, over a Unix socket of its own.
//!
//! A sender connects, sends up to [`TOGETHER_MAX`] tickets of 16 bytes with one descriptor each (`SCM_RIGHTS`), and
//! reads one byte that answers all of them: [`ACCEPTED`] or [`REFUSED`]. More may follow on the same connection. The
//! worker takes a descriptor by its ticket, which it receives in a message. At most [`UNTAKEN_MAX`] descriptors of a user
//! wait, each for [`UNTAKEN_TTL`] or until its sender's process ends. Tickets are secrets of their sender and must be random.

use std::collections::HashMap;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use rustix::process::{Resource, getrlimit};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, Interest};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{oneshot, watch};
use tokio::time::{sleep, timeout};

use kvferry_types::User;

use super::directory::{self, Claim, FD_SOCKET_NAME};
use super::handshake_permits::HandshakePermits;
use super::process::ProcessWatch;
use super::{OtherUsers, OwnDirectory, SharedLogLimit, TransportError, prepare_for};

/// Length of a [`Ticket`] in bytes.
pub const TICKET_BYTES: usize = 16;
/// Most descriptors of one user that wait to be taken; further ones are refused. Each chunk of an engine's memory is one
/// descriptor. Worst case for each user: about 16 MiB beside the descriptors themselves.
pub const UNTAKEN_MAX: usize = 16_448;
/// The limit of open files of this process, divided by this, is the most that waiting descriptors of all other users may be
/// together. The rest is for its disk, its connections, and the memory of its own user's engines.
const OTHERS_DIVISOR: u64 = 4;
/// Most descriptors in one message: the limit of Linux.
pub const TOGETHER_MAX: usize = 253;
/// Time after which a descriptor that was not taken is closed.
pub const UNTAKEN_TTL: Duration = Duration::from_secs(30);

/// Most connections served at once, of this process's user and of all others. A further one closes the oldest.
pub(super) const CONNECTIONS_MAX: usize = 16;
/// Time limit of one connection. A worker's rank sends [`UNTAKEN_MAX`] descriptors in well under a second.
const CONNECTION_DEADLINE: Duration = Duration::from_secs(30);
/// Time limit for the next message of a sender.
const MESSAGE_DEADLINE: Duration = Duration::from_secs(5);
/// Pause after `accept` failed, so that a persistent failure does not cause a busy loop.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Answer to a message whose descriptors now wait to be taken.
const ACCEPTED: u8 = 1;
/// Answer to any other message.
const REFUSED: u8 = 0;

static REFUSALS: SharedLogLimit = SharedLogLimit::new();
static ACCEPT_ERRORS: SharedLogLimit = SharedLogLimit::new();
static EXPIRED: SharedLogLimit = SharedLogLimit::new();

/// Identifies one descriptor: 16 random bytes, chosen by its sender.
pub type Ticket = [u8; TICKET_BYTES];

/// Why a descriptor was not transferred.
#[derive(Debug, thiserror::Error)]
pub enum FdError {
    /// The receiver's directory is missing or not safe.
    #[error(transparent)]
    Directory(#[from] TransportError),
    /// No answer by the deadline.
    #[error("no answer within {0:?}")]
    Late(Duration),
    /// The receiver refused: too many descriptors wait, or the ticket is in use.
    #[error("the receiver refused the descriptor")]
    Refused,
    /// A system call failed.
    #[error("cannot hand over a descriptor: {0}")]
    Io(#[from] io::Error),
}

/// Receives descriptors until it is dropped, and then closes those not taken.
pub struct FdReceiver {
    untaken: Arc<Untaken>,
    _claim: Arc<Claim>,
    _alive: watch::Sender<()>,
}

struct Untaken {
    waiting: Mutex<AllWaiting>,
    /// Most descriptors of all other users together.
    most_of_others: usize,
}

/// The descriptors that wait, and how many each user has.
#[derive(Default)]
struct AllWaiting {
    by_ticket: HashMap<Ticket, Waiting>,
    of_user: HashMap<User, usize>,
}

/// A descriptor that waits. Dropping it ends its expiry timer.
struct Waiting {
    fd: OwnedFd,
    user: User,
    _expiry: oneshot::Sender<()>,
}

impl Untaken {
    fn new(most_of_others: usize) -> Self {
        Self {
            waiting: Mutex::default(),
            most_of_others,
        }
    }

    fn waiting(&self) -> MutexGuard<'_, AllWaiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores a descriptor, if its user and all other users have room and the ticket is not in use. The returned receiver
    /// completes when the descriptor is taken or removed.
    fn keep(&self, user: User, ticket: Ticket, fd: OwnedFd) -> Option<oneshot::Receiver<()>> {
        let mut waiting = self.waiting();
        let AllWaiting { by_ticket, of_user } = &mut *waiting;
        let others = of_user.iter().filter(|(user, _)| **user != User::Own);
        let of_others: usize = others.map(|(_, count)| count).sum();
        let crowded = user != User::Own && of_others >= self.most_of_others;
        let count = of_user.entry(user).or_default();
        if crowded || *count >= UNTAKEN_MAX || by_ticket.contains_key(&ticket) {
            return None;
        }
        *count += 1;
        let (expiry, taken) = oneshot::channel();
        let entry = Waiting {
            fd,
            user,
            _expiry: expiry,
        };
        by_ticket.insert(ticket, entry);
        Some(taken)
    }

    fn remove(&self, ticket: &Ticket) -> Option<Waiting> {
        let mut waiting = self.waiting();
        let removed = waiting.by_ticket.remove(ticket)?;
        if let Some(count) = waiting.of_user.get_mut(&removed.user) {
            *count -= 1;
        }
        Some(removed)
    }
}

impl FdReceiver {
    /// Listens in `directory`, which is created with mode 0700 if missing. Needs a tokio runtime.
    ///
    /// # Errors
    /// [`TransportError`]: a directory that other users can access, one that another receiver uses, or a failed system
    /// call.
    pub fn bind(directory: &Path) -> Result<Self, TransportError> {
        Self::bind_for(directory, OtherUsers::default())
    }

    /// As [`Self::bind`], where processes of these users may send descriptors, too.
    ///
    /// # Errors
    /// As [`Self::bind`].
    pub fn bind_for(directory: &Path, users: OtherUsers) -> Result<Self, TransportError> {
        let directory = prepare_for(directory, &users)?;
        let mut claim = Claim::take(directory, FD_SOCKET_NAME)?;
        let socket = claim.bind(&users)?;
        let files = getrlimit(Resource::Nofile).current;
        let most_of_others = files.map_or(usize::MAX, |files| (files / OTHERS_DIVISOR) as usize);
        let untaken = Arc::new(Untaken::new(most_of_others));
        let (alive, gone) = watch::channel(());
        tokio::spawn(accept(socket, users, Arc::downgrade(&untaken), gone));
        Ok(Self {
            untaken,
            _claim: claim.watched(),
            _alive: alive,
        })
    }

    /// Takes the descriptor that was sent with this ticket; `None` if it did not arrive, expired or was taken before.
    pub fn take(&self, ticket: &Ticket) -> Option<OwnedFd> {
        Some(self.untaken.remove(ticket)?.fd)
    }
}

async fn accept(
    socket: UnixListener,
    users: OtherUsers,
    untaken: Weak<Untaken>,
    mut gone: watch::Receiver<()>,
) {
    let places = HandshakePermits::new(CONNECTIONS_MAX);
    let of_others = HandshakePermits::new(CONNECTIONS_MAX);
    loop {
        let accepted = tokio::select! {
            accepted = socket.accept() => accepted,
            _ = gone.changed() => return,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                if let Some(left_out) = ACCEPT_ERRORS.line() {
                    tracing::warn!(%error, left_out, "cannot accept a connection for descriptors");
                }
                sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        // Before anything is read, and before a place is taken: processes of all users may reach the socket.
        let user = match user_of(&stream, &users) {
            Ok(user) => user,
            Err(error) => {
                log_refused(&error);
                continue;
            }
        };
        let untaken = untaken.clone();
        let mut place = match user {
            User::Own => places.take(),
            User::Other(_) => of_others.take(),
        };
        tokio::spawn(async move {
            let ended = tokio::select! {
                biased;
                ended = converse(stream, user, untaken) => ended,
                () = place.lost() => Err(io::Error::other("it was the oldest of too many")),
                () = sleep(CONNECTION_DEADLINE) => Err(io::Error::other("it takes too long")),
            };
            if let Err(error) = ended {
                log_refused(&error);
            }
        });
    }
}

fn log_refused(error: &io::Error) {
    if let Some(left_out) = REFUSALS.line() {
        tracing::info!(%error, left_out, "refused descriptors");
    }
}

/// The user of a sender, if it may send descriptors.
fn user_of(stream: &UnixStream, users: &OtherUsers) -> io::Result<User> {
    let uid = stream.peer_cred()?.uid();
    let user = users.find(uid);
    user.ok_or_else(|| io::Error::other(format!("the sender runs as uid {uid}")))
}

/// Receives messages of one sender until it closes the connection.
async fn converse(mut stream: UnixStream, user: User, untaken: Weak<Untaken>) -> io::Result<()> {
    let (lives, ended) = watch::channel(());
    let pid = stream.peer_cred().ok().and_then(|peer| peer.pid());
    // `lives` is dropped when the process has ended, which closes `ended` for the expiry of the descriptors.
    let process = pid.and_then(|pid| ProcessWatch::start(pid, move || drop(lives)));
    let sender = Arc::new(Sender { ended, process });
    loop {
        let served = serve(&mut stream, user, &untaken, &sender);
        match timeout(MESSAGE_DEADLINE, served).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) if error.kind() == io::ErrorKind::NotConnected => {
                tracing::debug!(%error, "a connection for descriptors");
                return Ok(());
            }
            Ok(Err(error)) => return Err(error),
            Err(_) => return Err(io::Error::other("a descriptor did not come in time")),
        }
    }
}

/// The sender of descriptors.
struct Sender {
    ended: watch::Receiver<()>,
    /// `None` where the end of the process cannot be observed.
    process: Option<ProcessWatch>,
}

impl Sender {
    async fn end(&self) {
        match self.process {
            Some(_) => {
                let mut ended = self.ended.clone();
                while ended.changed().await.is_ok() {}
            }
            None => std::future::pending().await,
        }
    }
}

type Kept = Vec<(Ticket, oneshot::Receiver<()>)>;

/// Receives one message and answers it.
async fn serve(
    stream: &mut UnixStream,
    user: User,
    untaken: &Weak<Untaken>,
    sender: &Arc<Sender>,
) -> io::Result<()> {
    let kept = match receive(stream).await {
        Ok(came) => keep_all(user, came, untaken),
        Err(error) => Err(error),
    };
    let kept = kept.map(|kept| {
        // Before the answer, because this ends there if the sender reads none.
        for (ticket, taken) in kept {
            let (untaken, sender) = (untaken.clone(), Arc::clone(sender));
            tokio::spawn(async move { expire(&untaken, &ticket, taken, &sender).await });
        }
    });
    let answer = match kept {
        Ok(_) => ACCEPTED,
        Err(_) => REFUSED,
    };
    if let Err(error) = stream.write_all(&[answer]).await {
        tracing::debug!(%error, "the sender of a descriptor did not wait");
    }
    kept
}

/// Stores all descriptors, or none.
fn keep_all(user: User, came: Vec<(Ticket, OwnedFd)>, untaken: &Weak<Untaken>) -> io::Result<Kept> {
    let refused = || io::Error::other("too many wait, or the ticket is known");
    let untaken = untaken.upgrade().ok_or_else(refused)?;
    let mut kept = Kept::new();
    for (ticket, fd) in came {
        match untaken.keep(user, ticket, fd) {
            Some(taken) => kept.push((ticket, taken)),
            None => {
                for (ticket, _) in kept {
                    untaken.remove(&ticket);
                }
                return Err(refused());
            }
        }
    }
    Ok(kept)
}

async fn expire(
    untaken: &Weak<Untaken>,
    ticket: &Ticket,
    taken: oneshot::Receiver<()>,
    sender: &Sender,
) {
    tokio::select! {
        _ = taken => return,
        () = sleep(UNTAKEN_TTL) => {
            if let Some(left_out) = EXPIRED.line() {
                tracing::info!(left_out, "closed an unclaimed descriptor");
            }
        }
        () = sender.end() => tracing::debug!("closed a descriptor whose sender has ended"),
    }
    if let Some(untaken) = untaken.upgrade() {
        untaken.remove(ticket);
    }
}

/// Receives one message: tickets, and one descriptor for each. Closes the descriptors of an invalid message.
async fn receive(stream: &mut UnixStream) -> io::Result<Vec<(Ticket, OwnedFd)>> {
    let mut tickets = vec![0; TICKET_BYTES * TOGETHER_MAX];
    let mut fds = Vec::new();
    let mut filled = 0;
    let wrong = |bytes: usize, fds: usize| {
        let text = format!("it has {bytes} bytes and {fds} descriptors");
        Err(io::Error::other(text))
    };
    loop {
        let part = &mut tickets[filled..];
        let bytes = stream
            .async_io(Interest::READABLE, || {
                receive_some(stream.as_fd(), part, &mut fds)
            })
            .await?;
        if bytes == 0 && filled == 0 {
            // Not an error: for example a client that only checked which process serves this socket.
            return Err(io::Error::new(
                io::ErrorKind::NotConnected,
                "nothing was sent",
            ));
        }
        filled += bytes;
        let wanted = fds.len() * TICKET_BYTES;
        match filled.cmp(&wanted) {
            std::cmp::Ordering::Equal => break,
            // A message may arrive in parts, but each descriptor must have its ticket.
            std::cmp::Ordering::Less if bytes > 0 && !filled.is_multiple_of(TICKET_BYTES) => {}
            _ => return wrong(filled, fds.len()),
        }
    }
    let whole = tickets[..filled].as_chunks().0;
    Ok(whole.iter().copied().zip(fds).collect())
}

fn receive_some(
    stream: BorrowedFd<'_>,
    part: &mut [u8],
    fds: &mut Vec<OwnedFd>,
) -> io::Result<usize> {
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(TOGETHER_MAX))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut slices = [IoSliceMut::new(part)];
    let received = recvmsg(stream, &mut slices, &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    match received.flags.contains(ReturnFlags::CTRUNC) || fds.len() > TOGETHER_MAX {
        true => Err(io::Error::other(
            "it has too many descriptors, or this process has as many as it may (ulimit -n)",
        )),
        false => Ok(received.bytes),
    }
}

/// Sends `fd` to the [`FdReceiver`] in `directory` under `ticket`, and waits until it is accepted. The caller keeps its
/// own copy of the descriptor.
///
/// # Errors
/// As [`send_fds`].
pub async fn send_fd(
    directory: &Path,
    ticket: &Ticket,
    fd: BorrowedFd<'_>,
    deadline: Duration,
) -> Result<(), FdError> {
    send_fds(directory, &[(*ticket, fd)], deadline).await
}

/// Sends several descriptors, as [`send_fd`] does for one.
///
/// # Errors
/// [`FdError`]; the receiver may then have some of the descriptors. After [`FdError::Late`] the fate of the message in
/// flight is unknown.
pub async fn send_fds(
    directory: &Path,
    fds: &[(Ticket, BorrowedFd<'_>)],
    deadline: Duration,
) -> Result<(), FdError> {
    directory::socket_path(directory, FD_SOCKET_NAME)?;
    let directory = OwnDirectory::open(directory)?;
    let socket = directory.through(FD_SOCKET_NAME);
    let mut connected: Option<UnixStream> = None;
    for together in fds.chunks(TOGETHER_MAX) {
        let tickets: Vec<u8> = together.iter().flat_map(|(ticket, _)| *ticket).collect();
        let fds: Vec<BorrowedFd<'_>> = together.iter().map(|(_, fd)| *fd).collect();
        let exchange = async {
            let stream = match &mut connected {
                Some(stream) => stream,
                none => none.insert(UnixStream::connect(&socket).await?),
            };
            let sent = stream
                .async_io(Interest::WRITABLE, || {
                    send_both(stream.as_fd(), &tickets, &fds)
                })
                .await?;
            stream.write_all(&tickets[sent..]).await?;
            stream.read_u8().await
        };
        match timeout(deadline, exchange).await {
            Ok(Ok(ACCEPTED)) => {}
            Ok(Ok(_)) => return Err(FdError::Refused),
            Ok(Err(error)) => return Err(error.into()),
            Err(_) => return Err(FdError::Late(deadline)),
        }
    }
    Ok(())
}

fn send_both(stream: BorrowedFd<'_>, tickets: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(fds.len()))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    ancillary.push(SendAncillaryMessage::ScmRights(fds));
    Ok(sendmsg(
        stream,
        &[IoSlice::new(tickets)],
        &mut ancillary,
        SendFlags::NOSIGNAL,
    )?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each user has room for more than all of them have together.
    #[test]
    fn waiting_descriptors_of_other_users_leave_files_for_the_own_one() {
        let untaken = Untaken::new(4);
        let keep = |user, ticket| {
            let fd = std::fs::File::open("/dev/null").expect("opens").into();
            untaken.keep(user, [ticket; TICKET_BYTES], fd)
        };
        let kept: Vec<_> = (0..6)
            .map(|number| keep(User::Other(1001 + u32::from(number % 2)), number).is_some())
            .collect();
        assert_eq!(kept, [true, true, true, true, false, false]);
        assert!(keep(User::Own, 9).is_some());
        untaken.remove(&[0; TICKET_BYTES]).expect("it waited");
        assert!(keep(User::Other(1003), 10).is_some());
    }
}
