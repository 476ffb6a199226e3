"""A peer that sends any bytes: one connection in ZMTP, without ZMQ, so that the end of the connection shows."""

import itertools
import socket
import struct
from pathlib import Path
from typing import Any, Self

import msgspec
from daemon import TIMEOUT_S

from kvferry import wire

GREETING = b"\xff" + bytes(8) + b"\x7f" + bytes([3, 0]) + b"NULL".ljust(20, b"\0") + bytes(32)
MORE, LONG, COMMAND = 1, 2, 4
#: Long enough for every request that the tests send.
DEADLINE_MS = 30_000
_HEADER = struct.Struct(">4sHHQIHHQ")
_ids = itertools.count(1)


class Closed(Exception):
    """The other side has closed the connection."""


class Received(msgspec.Struct):
    """A received message."""

    kind: int
    id: int
    epoch: int
    body: Any


def frame(flags: int, payload: bytes) -> bytes:
    if len(payload) > 255:
        return struct.pack(">BQ", flags | LONG, len(payload)) + payload
    return struct.pack("BB", flags, len(payload)) + payload


def ready(socket_type: bytes) -> bytes:
    return frame(COMMAND, b"\x05READY\x0bSocket-Type" + struct.pack(">I", len(socket_type)) + socket_type)


def open_socket(directory: Path) -> socket.socket:
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connected.connect(str(directory / "kvferry.sock"))
    return connected


class RawPeer:
    """A connection after the handshake of ZMTP, as a client (DEALER) or as a server (ROUTER) has it."""

    def __init__(self, connected: socket.socket, socket_type: bytes = b"DEALER"):
        self.socket = connected
        self.socket.settimeout(TIMEOUT_S)
        self._bytes = bytearray()
        #: Whether the other side has closed the connection.
        self.has_ended = False
        self.write(GREETING + ready(socket_type))
        self._take(len(GREETING))

    @classmethod
    def connect(cls, directory: Path) -> Self:
        return cls(open_socket(directory))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

    def write(self, data: bytes) -> None:
        """Sends these bytes; the other side may have closed the connection."""
        try:
            self.socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise Closed from error

    def send(self, kind: int, body: bytes, **fields: int) -> int:
        """Sends a message with a new id, if none is given; returns the id."""
        id_ = fields.get("id", 0) or next(_ids)
        version = fields.get("version", wire.VERSION)
        deadline_ms = fields.get("deadline_ms", DEADLINE_MS if wire.is_request(kind) else 0)
        head = _HEADER.pack(
            b"KVFY", version, kind, id_, deadline_ms, fields.get("required", 0), 0, fields.get("epoch", 0)
        )
        self.write(frame(MORE, head) + frame(0, body))
        return id_

    def receive(self) -> Received:
        """Returns the next message, within the deadline of the tests.

        Raises:
            Closed: there is none.
        """
        head, body = self.receive_parts()
        _, _, kind, id_, _, _, _, epoch = _HEADER.unpack(head)
        return Received(kind, id_, epoch, msgspec.msgpack.decode(body))

    def receive_parts(self) -> list[bytes]:
        """Returns the parts of the next message, whatever they are; raises as :meth:`receive`."""
        parts: list[bytes] = []
        while True:
            flags = self._take(1)[0]
            size = int.from_bytes(self._take(8)) if flags & LONG else self._take(1)[0]
            payload = self._take(size)
            if flags & COMMAND:
                continue
            parts.append(payload)
            if not flags & MORE:
                return parts

    def _take(self, count: int) -> bytes:
        while len(self._bytes) < count:
            try:
                data = self.socket.recv(1 << 16)
            except ConnectionResetError:
                data = b""
            if not data:
                self.has_ended = True
                raise Closed
            self._bytes += data
        taken = bytes(self._bytes[:count])
        del self._bytes[:count]
        return taken

    def ask(self, kind: int, body: bytes, **fields: int) -> Received:
        """Sends a request, and returns the first message that answers it."""
        return self.answer_to(self.send(kind, body, **fields))

    def answer_to(self, id_: int) -> Received:
        while (received := self.receive()).id != id_ or wire.is_request(received.kind):
            pass
        return received

    def hello(self, role: str, engine: bytes = b"", **fields: Any) -> Received:
        body = wire.Hello(role=role, engine=engine or bytes(16), name="test", **fields)
        return self.ask(wire.Kind.HELLO, msgspec.msgpack.encode(body), version=wire.HELLO_VERSION)

    def answers_until_pong(self) -> list[Received]:
        """Returns what the other side sent before it answered a ping: everything that it decides by itself."""
        ping = self.send(wire.Kind.PING, b"\x80")
        answers = []
        while (received := self.receive()).id != ping:
            if not wire.is_request(received.kind):
                answers.append(received)
        assert received.kind == wire.Kind.PONG
        return answers
