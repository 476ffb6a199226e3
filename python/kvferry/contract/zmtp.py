"""A listening Unix socket that speaks ZMTP 3.0, mechanism NULL, as a ROUTER does.

ZMQ's own ROUTER shows neither the process at the other end nor the end of a connection, and cannot close one: the
checks need all three.
"""

import contextlib
import os
import socket
import struct
from pathlib import Path

from kvferry import wire

_GREETING = b"\xff" + bytes(8) + b"\x7f" + bytes([3, 0]) + b"NULL".ljust(20, b"\0") + bytes(32)
_MORE, _LONG, _COMMAND = 1, 2, 4
#: Most bytes that wait to be sent on one connection; beyond that its reader has stopped, and it is closed.
UNSENT_BYTES_MAX = 64 << 20
#: Most parts of a message before the connection is closed: every message of the wire has two.
PARTS_MAX = 8
_READ_BYTES = 1 << 18


class Ended(Exception):
    """The connection has ended, or its bytes are not ZMTP. The text names the reason."""


def listen(path: Path) -> socket.socket:
    """Listens at a path.

    Raises:
        OSError: a process listens there already, or the path cannot be used.
    """
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
        try:
            probe.connect(os.fspath(path))
        except FileNotFoundError:
            pass
        except ConnectionRefusedError:
            path.unlink()
        else:
            raise OSError(f"{path} is served by another process: give another --socket-dir")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(os.fspath(path))
    os.chmod(path, 0o600)
    listener.listen(64)
    listener.setblocking(False)
    return listener


class ZmtpConnection:
    """One accepted connection. Never waits."""

    def __init__(self, accepted: socket.socket):
        accepted.setblocking(False)
        self.socket = accepted
        size = struct.calcsize("3i")
        #: Process id of the peer; 0 if it is in another PID namespace.
        self.process, _, _ = struct.unpack("3i", accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
        self._received = bytearray()
        self._unsent = bytearray(_GREETING)
        self._greeted = False
        self._ready = False
        self._parts: list[bytes] = []
        self.flush()

    @property
    def wants_to_send(self) -> bool:
        """Whether bytes wait until the socket takes them."""
        return bool(self._unsent)

    def flush(self) -> None:
        """Sends what the socket takes.

        Raises:
            Ended: the peer is gone, or reads nothing.
        """
        try:
            while self._unsent:
                del self._unsent[: self.socket.send(self._unsent)]
        except BlockingIOError:
            if len(self._unsent) > UNSENT_BYTES_MAX:
                raise Ended(f"the peer has not read {len(self._unsent)} bytes") from None
        except OSError as error:
            raise Ended(str(error)) from error

    def send(self, parts: list[bytes]) -> None:
        """Sends a message, or raises :class:`Ended`."""
        for at, part in enumerate(parts):
            self._frame(_MORE if at + 1 < len(parts) else 0, part)
        self.flush()

    def _frame(self, flags: int, part: bytes) -> None:
        if len(part) > 255:
            self._unsent += struct.pack(">BQ", flags | _LONG, len(part))
        else:
            self._unsent += struct.pack("BB", flags, len(part))
        self._unsent += part

    def receive(self) -> list[list[bytes]]:
        """Reads what there is; returns the complete messages.

        Raises:
            Ended: the peer has closed the connection, or sent something else than ZMTP.
        """
        try:
            data = self.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise Ended(str(error)) from error
        if not data:
            raise Ended("the peer closed the connection")
        self._received += data
        if not self._greeted:
            if len(self._received) < len(_GREETING):
                return []
            greeting = bytes(self._received[: len(_GREETING)])
            if greeting[:1] != b"\xff" or greeting[10] < 3 or greeting[12:32].rstrip(b"\0") != b"NULL":
                raise Ended("the greeting is not that of ZMTP 3 with the mechanism NULL")
            del self._received[: len(_GREETING)]
            self._greeted = True
            kind = b"\x0bSocket-Type" + struct.pack(">I", 6) + b"ROUTER"
            self._frame(_COMMAND, b"\x05READY" + kind)
            self.flush()
        return self._messages()

    def _messages(self) -> list[list[bytes]]:
        messages = []
        while (frame := self._next_frame()) is not None:
            flags, body = frame
            if flags & _COMMAND:
                if body.startswith(b"\x05READY"):
                    self._ready = True
                elif body.startswith(b"\x04PING"):
                    self._frame(_COMMAND, b"\x04PONG" + body[7:])
                    self.flush()
                continue
            if not self._ready:
                raise Ended("a message came before READY")
            self._parts.append(body)
            if len(self._parts) > PARTS_MAX:
                raise Ended(f"a message has more than {PARTS_MAX} parts")
            if not flags & _MORE:
                messages.append(self._parts)
                self._parts = []
        return messages

    def _next_frame(self) -> tuple[int, bytes] | None:
        received = self._received
        if len(received) < 2:
            return None
        flags = received[0]
        begin, size = 2, received[1]
        if flags & _LONG:
            if len(received) < 9:
                return None
            begin, size = 9, int.from_bytes(received[1:9], "big")
        if size > wire.BODY_BYTES_MAX:
            raise Ended(f"a part has {size} bytes: at most {wire.BODY_BYTES_MAX}")
        if len(received) < begin + size:
            return None
        body = bytes(received[begin : begin + size])
        del received[: begin + size]
        return flags, body

    def close(self) -> None:
        """Closes the connection."""
        self.socket.close()
