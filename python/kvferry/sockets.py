"""Sockets of clients: where a process of kvferry listens, and when a connection to it is gone."""

import errno
import os
import stat
from pathlib import Path

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvferry import wire

#: Longest path of a Unix socket, in bytes.
SOCKET_PATH_BYTES_MAX = 107
SOCKET_NAME = "kvferry.sock"
#: Environment variable with the uid that kvferry runs as, where that is not the engine's.
SERVER_UID = "KVFERRY_SERVER_UID"

_GONE_EVENTS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class Connection:
    """One connection to the process that listens in a directory. It is never made again by itself.

    No method waits. A send over a connection that is gone raises :class:`zmq.Again`.
    """

    def __init__(self, context: zmq.Context, directory: Path):
        """Connects.

        Raises:
            OSError: naming the path, what is wrong with it, and the remedy.
        """
        # Held open until the end: libzmq connects in another thread.
        self._directory = open_directory(directory)
        try:
            path = _socket_in(self._directory, directory)
            self.socket = context.socket(zmq.DEALER)
        except BaseException:
            os.close(self._directory)
            raise
        try:
            self.socket.setsockopt(zmq.LINGER, 0)
            self.socket.setsockopt(zmq.RECONNECT_IVL, -1)
            self.socket.setsockopt(zmq.MAXMSGSIZE, wire.BODY_BYTES_MAX)
            self.socket.setsockopt(zmq.SNDHWM, 0)
            # A send without a peer would wait for one for ever, and the peer is gone.
            self.socket.setsockopt(zmq.SNDTIMEO, 0)
            self.socket.setsockopt(zmq.RCVHWM, 0)
            self.monitor = self.socket.get_monitor_socket(_GONE_EVENTS)
        except BaseException:
            self.socket.close(0)
            os.close(self._directory)
            raise
        try:
            self.socket.connect(f"ipc://{path}")
        except BaseException:
            self.close()
            raise

    @property
    def descriptors(self) -> tuple[int, int]:
        """Descriptors that become readable when :attr:`readable` may have become true. They may do so without that."""
        return self.socket.getsockopt(zmq.FD), self.monitor.getsockopt(zmq.FD)

    @property
    def readable(self) -> bool:
        """Whether a message was received, or an end of the connection.

        After any other use of the connection this must be read before its descriptors are waited for, because they
        show a change only once.
        """
        return any(each.getsockopt(zmq.EVENTS) & zmq.POLLIN for each in (self.socket, self.monitor))

    def send(self, message: tuple[bytes, bytes]) -> None:
        """Sends a message: header and body."""
        self.socket.send_multipart(message)

    def receive(self) -> list[bytes] | None:
        """Returns the parts of the next message that was received; None if there is none."""
        try:
            return self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def gone(self) -> bool:
        """Whether the connection has ended, or could not be made."""
        gone = False
        while self.monitor.poll(0):
            gone |= bool(recv_monitor_message(self.monitor, zmq.NOBLOCK)["event"] & _GONE_EVENTS)
        return gone

    def close(self) -> None:
        """Closes the sockets; nothing is sent any more."""
        self.socket.disable_monitor()
        # Otherwise it stays open until it is collected, and its context cannot end before.
        self.monitor.close(0)
        self.socket.close(0)
        directory, self._directory = self._directory, -1
        if directory >= 0:
            os.close(directory)


def _socket_in(opened: int, directory: Path) -> str:
    """Returns a path to the socket in an open directory, which is valid while it is open.

    Raises:
        OSError: naming the path, what is wrong with it, and the remedy.
    """
    path, through = directory / SOCKET_NAME, inside(opened, SOCKET_NAME)
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        raise OSError(f"{path} is longer than the {SOCKET_PATH_BYTES_MAX} bytes of a socket's path")
    if not os.path.exists(through):
        raise OSError(f"no process listens at {path}")
    return through


def inside(opened: int, name: str) -> str:
    """Returns a path to a file in an open directory, which is valid while it is open."""
    return f"/proc/self/fd/{opened}/{name}"


def serves(uid: int) -> bool:
    """Whether kvferry runs as this user: that of this process, or the one that :data:`SERVER_UID` names."""
    return uid == os.geteuid() or str(uid) == os.environ.get(SERVER_UID)


def open_directory(directory: Path) -> int:
    """Opens a socket directory, and refuses one in which another user could put a socket. The caller closes it.

    It belongs to this process's user, or to the one that :data:`SERVER_UID` names. Others may pass through it (0711)
    where kvferry has its setting ``users``. What is opened through the descriptor lies in the directory that was
    checked; the path may name another one by then, where somebody else can write to a directory above.

    Raises:
        OSError: naming the directory, what is wrong with it, and the remedy.
    """
    flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        opened = os.open(directory, flags)
    except FileNotFoundError:
        raise OSError(f"{directory} does not exist: is kvferry running with this socket_dir?") from None
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        raise OSError(f"{directory} is a link or no directory: name a directory itself") from None
    try:
        _check(directory, os.fstat(opened))
        if not os.path.exists(inside(opened, "")):
            raise OSError(f"{directory} is reached through /proc, which is missing: mount it")
    except BaseException:
        os.close(opened)
        raise
    return opened


def _check(directory: Path, found: os.stat_result) -> None:
    if not serves(found.st_uid):
        raise OSError(
            f"{directory} belongs to uid {found.st_uid}: run the engine and kvferry as one user, or set {SERVER_UID} "
            "to the uid of kvferry, whose setting users must have this one"
        )
    if stat.S_IMODE(found.st_mode) & 0o777 not in (0o700, 0o711):
        raise OSError(f"{directory} must be open to its owner alone; run chmod 700 {directory}")
