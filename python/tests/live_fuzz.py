"""Sends changed messages and raw bytes to a leader and a worker: ``live_fuzz.py SOCKET_DIR SEED MESSAGES [PORT KEYS]``.

With the port of a leader on this machine, and the directory of the keys of its deployment, everything goes to this port
instead: inside TLS, with the certificates of an operator, a monitor and a worker, and bytes that are no TLS.

A process of its own, which is no engine: what it sends is refused or has no effect on others. It ends when it has sent
all of it, whatever the other side does, and prints how many messages and connections these were.
"""

import contextlib
import json
import random
import select
import socket
import ssl
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from raw_peer import COMMAND, GREETING, MORE, Closed, RawPeer, frame, open_socket, ready

from kvferry.wire import Kind

SCHEMA = Path(__file__).parents[2] / "schema"
#: Seconds that the other side of a connection may take to answer.
TIMEOUT_S = 60.0
#: Numbers at the borders of the types.
NUMBERS = (0, 1, 2, 255, 256, 65535, 65536, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1, -1, -(2**63))
#: Messages of an operator that change what others get from this kvferry: as an admin they are not sent.
OPERATORS = {Kind.DRAIN, Kind.SET_LOG}
#: Messages on one connection, at most.
PER_CONNECTION = 200


def examples() -> list[tuple[bytes, bytes]]:
    """The header and the body of every golden message."""
    found = []
    for path in sorted((SCHEMA / "golden").glob("v*/*.hex")):
        head, *body = path.read_text().split()
        found.append((bytes.fromhex(head), bytes.fromhex("".join(body))))
    return found


def changed_value(draw: random.Random, value: Any) -> Any:
    """Another value in the place of one, or the value with a change inside."""
    if isinstance(value, dict) and value and draw.random() < 0.8:
        key = draw.choice(list(value))
        changed = dict(value)
        match draw.randrange(6):
            case 0:
                del changed[key]
            case 1:
                changed[draw.choice(["?", "slot", "parts", "engine", "x" * draw.randrange(300)])] = value[key]
            case _:
                changed[key] = changed_value(draw, value[key])
        return changed
    if isinstance(value, list) and value and draw.random() < 0.8:
        at = draw.randrange(len(value))
        match draw.randrange(4):
            case 0:
                return value * draw.choice([0, 2, 50, 3000 // len(value)])
            case 1:
                return value[:at]
            case _:
                return [*value[:at], changed_value(draw, value[at]), *value[at + 1 :]]
    if isinstance(value, bytes) and draw.random() < 0.7:
        return draw.choice([b"", value[:-1], value * 2, value + b"!", draw.randbytes(len(value)), bytes(5000)])
    if isinstance(value, int) and not isinstance(value, bool) and draw.random() < 0.8:
        return draw.choice([draw.choice(NUMBERS), value + 1, max(value - 1, 0), draw.randrange(2**20)])
    return draw.choice(
        [None, True, 1.5, "", "text\n", b"\0" * 16, [], {}, [[]], {"a": 1}, draw.choice(NUMBERS), [1] * 100]
    )


def changed_bytes(draw: random.Random, body: bytes) -> bytes:
    damaged = bytearray(body or b"\x80")
    for _ in range(draw.randrange(1, 5)):
        at = draw.randrange(len(damaged))
        match draw.randrange(4):
            case 0:
                damaged[at] = draw.randrange(256)
            case 1:
                damaged[at] ^= 1 << draw.randrange(8)
            case 2:
                damaged[at:at] = draw.randbytes(draw.randrange(1, 9))
            case _:
                del damaged[at:]
                damaged += b"\xc0"
    return bytes(damaged)


def changed_message(draw: random.Random, head: bytes, body: bytes) -> tuple[bytes, bytes]:
    """A message with a change in its body, its header, or in neither."""
    match draw.randrange(8):
        case 0 | 1 | 2 | 3:
            try:
                body = msgspec.msgpack.encode(changed_value(draw, msgspec.msgpack.decode(body)))
            except (msgspec.DecodeError, OverflowError, ValueError):
                body = changed_bytes(draw, body)
        case 4 | 5:
            body = changed_bytes(draw, body)
        case 6:
            changed = bytearray(head)
            changed[draw.randrange(len(changed))] = draw.randrange(256)
            head = bytes(changed)[: draw.choice([32, 32, 32, 31, 0])]
    # A new id most of the time, and an earlier one otherwise: a repeated request is not read.
    if len(head) == 32 and draw.random() < 0.9:
        head = head[:8] + struct.pack(">Q", draw.randrange(1, 2**48)) + head[16:]
    return head, body


def discard(peer: RawPeer) -> None:
    """Reads what was answered, without waiting."""
    # Bytes that TLS has decrypted are not shown by the socket.
    while getattr(peer.socket, "pending", int)() or select.select([peer.socket], [], [], 0)[0]:
        if not peer.socket.recv(1 << 18):
            raise Closed


class Way(NamedTuple):
    """A way to a process."""

    #: The roles that a process may have over it, most of the time.
    roles: tuple[str, ...]
    #: Opens a connection.
    open: Callable[[], socket.socket]
    #: Sends bytes that begin no connection.
    babble: Callable[[random.Random], None]


def local(directory: Path, *roles: str) -> Way:
    def open_() -> socket.socket:
        return open_socket(directory)

    return Way(roles, open_, lambda draw: babble(draw, open_))


def tls_context(pem: Path | None, protocol: str = "kvferry/1") -> ssl.SSLContext:
    """The client's side of TLS with the certificates of a file of ``kvferry keygen``, or with none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols([protocol])
    if pem is None:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    else:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_verify_locations(pem)
        context.load_cert_chain(pem)
    return context


def remote(port: int, pem: Path, role: str) -> Way:
    """The leader's port, with the certificate of one holder."""
    context = tls_context(pem)

    def open_() -> socket.socket:
        connected = socket.create_connection(("127.0.0.1", port), TIMEOUT_S)
        try:
            return context.wrap_socket(connected, server_hostname="leader.kvferry")
        except BaseException:
            connected.close()
            raise

    def babble_(draw: random.Random) -> None:
        if draw.random() < 0.5:
            babble(draw, open_)
        else:
            babble_outside(draw, port, pem)

    # A hello that differs from the certificate is refused.
    return Way((role,) * 12 + ("engine", "worker", "admin"), open_, babble_)


def talk(draw: random.Random, way: Way, known: list[tuple[bytes, bytes]], messages: int) -> int:
    """One connection with changed messages. Returns how many were sent."""
    sent = 0
    peer, role = None, ""
    try:
        peer = RawPeer(way.open())
        if draw.random() < 0.95:
            role = draw.choice(way.roles)
            peer.hello(role, draw.randbytes(16), rank=draw.choice([0, 0, 1, 65535]))
        for _ in range(min(messages, draw.randrange(1, PER_CONNECTION))):
            head, body = changed_message(draw, *draw.choice(known))
            sent += 1
            # A message may be the hello of an admin, too.
            if role in ("admin", "") and int.from_bytes(head[6:8], "big") in OPERATORS:
                continue
            peer.write(frame(MORE, head) + frame(0, body))
            if sent % 8 == 0:
                discard(peer)
    except (Closed, OSError):
        # The other side may close any connection.
        pass
    finally:
        if peer is not None:
            peer.close()
    return sent


def babble(draw: random.Random, open_: Callable[[], socket.socket]) -> None:
    """One connection whose bytes are not ZMTP, or end in the middle of it."""
    dealer = GREETING + ready(b"DEALER")
    command = frame(COMMAND, b"\x04PING\0\0" + draw.randbytes(draw.randrange(20)))
    streams = [
        draw.randbytes(draw.randrange(200)),
        dealer[: draw.randrange(len(dealer))],
        dealer + draw.randbytes(draw.randrange(300)),
        dealer + command * draw.randrange(20),
        dealer + frame(MORE, b"h") * draw.randrange(5),
        dealer + b"\x03" + draw.randbytes(8),
        GREETING + ready(draw.choice([b"ROUTER", b"REQ", b"", b"X" * 200])),
        changed_bytes(draw, dealer + frame(MORE, bytes(32)) + frame(0, b"\x80")),
    ]
    try:
        with contextlib.closing(open_()) as stream:
            stream.sendall(draw.choice(streams))
    except OSError:
        # The other side may close any connection.
        pass


def client_hello(context: ssl.SSLContext) -> bytes:
    """The first bytes of a client of TLS."""
    received, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(received, sent, server_hostname="leader.kvferry").do_handshake()
    return sent.read()


def babble_outside(draw: random.Random, port: int, pem: Path) -> None:
    """One connection to the port of TLS that comes to no session of TLS: other bytes, or a client that is refused."""
    hello = client_hello(tls_context(pem))
    dealer = GREETING + ready(b"DEALER")
    streams = [
        b"",
        draw.randbytes(draw.randrange(1, 300)),
        dealer + frame(MORE, bytes(32)) + frame(0, b"\x80"),
        b"GET / HTTP/1.1\r\n\r\n",
        hello[: draw.randrange(len(hello))],
        changed_bytes(draw, hello),
        hello + draw.randbytes(draw.randrange(1, 300)),
        # A record of the largest length, of which the beginning comes.
        b"\x16\x03\x03\xff\xff" + draw.randbytes(100),
    ]
    refused = [tls_context(None), tls_context(pem, "h2"), None, None, None, None]
    context = draw.choice(refused)
    try:
        with contextlib.closing(socket.create_connection(("127.0.0.1", port), TIMEOUT_S)) as stream:
            if context is None:
                stream.sendall(draw.choice(streams))
            else:
                with context.wrap_socket(stream, server_hostname="leader.kvferry") as session:
                    session.sendall(dealer)
                    session.recv(100)
    except OSError:
        # An error of TLS is one, too.
        pass


def ways(socket_dir: Path, port: int | None, keys: Path | None) -> list[Way]:
    if port is None or keys is None:
        leader = local(socket_dir / "leader", "engine", "admin", "worker")
        return [leader, local(socket_dir / "worker-0-0", "rank")]
    holders = (("admin", "admin"), ("monitor", "admin"), ("worker-0-0", "worker"))
    return [remote(port, keys / f"{holder}.pem", role) for holder, role in holders]


def main(socket_dir: Path, seed: int, messages: int, port: int | None = None, keys: Path | None = None) -> None:
    draw = random.Random(seed)
    known = examples()
    choices = ways(socket_dir, port, keys)
    sent = connections = 0
    while sent < messages:
        way = draw.choice(choices)
        connections += 1
        if draw.random() < 0.2:
            way.babble(draw)
            sent += 1
        else:
            sent += talk(draw, way, known, messages - sent)
    print(json.dumps({"messages": sent, "connections": connections}))


if __name__ == "__main__":
    arguments = sys.argv[1:]
    remote_leader = (int(arguments[3]), Path(arguments[4])) if len(arguments) > 3 else ()
    main(Path(arguments[0]), int(arguments[1]), int(arguments[2]), *remote_leader)
