"""Sends changed messages and raw bytes to a leader and a worker: ``live_fuzz.py SOCKET_DIR SEED MESSAGES``.

A process of its own, which is no engine: what it sends is refused or has no effect on others. It ends when it has sent
all of it, whatever the other side does, and prints how many messages and connections these were.
"""

import contextlib
import json
import random
import select
import struct
import sys
from pathlib import Path
from typing import Any

import msgspec
from raw_peer import COMMAND, GREETING, MORE, Closed, RawPeer, frame, open_socket, ready

from kvferry.wire import Kind

SCHEMA = Path(__file__).parents[2] / "schema"
ROLES = {"leader": ("engine", "admin", "worker"), "worker-0-0": ("rank",)}
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
    while select.select([peer.socket], [], [], 0)[0]:
        if not peer.socket.recv(1 << 18):
            raise Closed


def talk(draw: random.Random, directory: Path, known: list[tuple[bytes, bytes]], messages: int) -> int:
    """One connection with changed messages. Returns how many were sent."""
    sent = 0
    peer, role = None, ""
    try:
        peer = RawPeer.connect(directory)
        if draw.random() < 0.95:
            role = draw.choice(ROLES[directory.name])
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


def babble(draw: random.Random, directory: Path) -> None:
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
        with contextlib.closing(open_socket(directory)) as stream:
            stream.sendall(draw.choice(streams))
    except OSError:
        # The other side may close any connection.
        pass


def main(socket_dir: Path, seed: int, messages: int) -> None:
    draw = random.Random(seed)
    known = examples()
    sent = connections = 0
    while sent < messages:
        directory = socket_dir / draw.choice(list(ROLES))
        connections += 1
        if draw.random() < 0.2:
            babble(draw, directory)
            sent += 1
        else:
            sent += talk(draw, directory, known, messages - sent)
    print(json.dumps({"messages": sent, "connections": connections}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
