"""connector.py SOCKET_DIR: stores the KV pages of a prompt in kvferry, loads them back, and compares every byte.

Written from docs/wire.md and schema/ alone, with pyzmq and msgpack: the least that an engine with one rank has to do.
"""

import hashlib
import mmap
import os
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

import msgpack
import zmq

HEADER = struct.Struct(">4sHHQIHHQ")  # magic, version, kind, id, deadline_ms, required, zero, epoch
HELLO, WELCOME, ERROR, PING, PONG = 1, 2, 3, 4, 5
LOOKUP, LOAD, STORE, FINISH, REGISTER, WRITTEN, UNREGISTER = 16, 18, 20, 22, 32, 34, 38
PAGES, PAGE_TOKENS, PAGE_BYTES = 32, 16, 2048


class Refused(Exception):
    """An error that kvferry has sent."""

    def __init__(self, kind: int, error: dict[str, Any]):
        super().__init__(f"request of kind {kind}: {error['message']} (code {error['code']})")
        self.retry = error.get("retry", False)


class Connection:
    """A connection after its hello."""

    all: list["Connection"] = []  # noqa: RUF012 (served together, so that none falls silent)

    def __init__(self, path: str, role: str, engine: bytes):
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RECONNECT_IVL, -1)  # a new connection would need another hello
        self.socket.connect(f"ipc://{path}")
        self.last, self.answers, self.version, self.sent, self.heartbeat = 0, {}, 1, 0.0, 60.0
        Connection.all.append(self)
        welcome = self.ask(HELLO, {"version_min": 1, "version_max": 2, "role": role, "engine": engine}, 5.0)
        self.version, self.heartbeat = welcome["version"], welcome["heartbeat_ms"] / 1000

    def send(self, kind: int, body: dict[str, Any], seconds: float = 10.0, number: int | None = None) -> int:
        """Sends a message; returns its id."""
        if number is None:
            number = self.last = self.last + 1
        header = HEADER.pack(b"KVFY", self.version, kind, number, int(seconds * 1000), 0, 0, 0)
        self.socket.send_multipart([header, msgpack.packb(body)])
        self.sent = time.monotonic()
        return number

    def serve(self) -> None:
        """Reads what has arrived, and shows that this process lives."""
        while self.socket.poll(0):
            header, body = self.socket.recv_multipart()
            _, _, kind, number, *_ = HEADER.unpack(header)
            if kind == PING:
                self.send(PONG, {}, 0, number)  # an answer has no deadline
            elif kind == WELCOME or kind % 2:
                self.answers[number] = kind, msgpack.unpackb(body)
        if time.monotonic() - self.sent > self.heartbeat / 2:
            self.send(PING, {})

    def answer(self, kind: int, number: int, seconds: float = 10.0) -> dict[str, Any]:
        """Waits for the answer to a request."""
        end = time.monotonic() + seconds + 2.0
        while number not in self.answers:
            if time.monotonic() > end:
                raise TimeoutError(f"request of kind {kind}: no answer within {seconds + 2.0} s")
            for one in Connection.all:
                one.serve()
            self.socket.poll(10)
        found, body = self.answers.pop(number)
        if found == ERROR:
            raise Refused(kind, body)
        if found != kind + 1:  # an answer to an older request with this id
            raise OSError(f"request of kind {kind}: the answer has kind {found}")
        return body

    def ask(self, kind: int, body: dict[str, Any], seconds: float = 10.0) -> dict[str, Any]:
        """Sends a request, and waits for its answer."""
        return self.answer(kind, self.send(kind, body, seconds), seconds)


def retried(request: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Repeats what is not ready yet: the worker may touch its memory, the leader may read inventories."""
    end = time.monotonic() + 60.0
    while True:
        try:
            return request()
        except Refused as refused:
            if not refused.retry or time.monotonic() > end:
                raise
            time.sleep(0.2)


def share(path: str, descriptor: int) -> bytes:
    """Hands the memory to the worker; returns the ticket that names it in a registration."""
    ticket = os.urandom(16)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(5.0)
        sock.connect(path)
        socket.send_fds(sock, [ticket], [descriptor])
        if sock.recv(1) != b"\x01":
            raise OSError("the worker did not keep the descriptor")
    return ticket


def register(directory: str, rank: Connection, engine: bytes, descriptor: int, nonce: bytes) -> dict[str, Any]:
    """Describes the memory: one group of one layer, whose pages lie one behind another."""
    tensor = {"layer": 0, "role": "kv", "allocation": 0, "offset_bytes": 0, "element_bytes": 2}
    tensor |= {"shape": [PAGES, PAGE_BYTES // 2], "strides": [PAGE_BYTES // 2, 1]}
    tensor |= {"page_axis": 0, "page_bytes": PAGE_BYTES, "page_stride_bytes": PAGE_BYTES}
    group = {"engine_page_tokens": PAGE_TOKENS, "device_pages": PAGES, "layers": 1, "tensors": [tensor]}
    handle = {"ticket": share(f"{directory}/worker-0-0/fds.sock", descriptor)}
    memory = {"kind": "shared_memory", "handle": handle, "bytes": (PAGES + 1) * PAGE_BYTES}
    proof = {"allocation": 0, "offset_bytes": PAGES * PAGE_BYTES, "bytes": nonce}
    registration = {"groups": [group], "allocations": [memory], "nonce": proof, "content": b"a model in bfloat16"}
    registration |= {"rank": 0, "tp_size": 1, "shard": 0}
    return rank.ask(REGISTER, {"engine": engine, "registration": registration})


def main(directory: str) -> None:
    """Plays an engine with one prompt."""
    engine = os.urandom(16)  # a new name for each process, so that its ids may begin with 1
    scheduler = Connection(f"{directory}/leader/kvferry.sock", "engine", engine)
    rank = Connection(f"{directory}/worker-0-0/kvferry.sock", "rank", engine)
    descriptor, nonce = os.memfd_create("kv"), os.urandom(16)
    os.ftruncate(descriptor, (PAGES + 1) * PAGE_BYTES)
    memory = mmap.mmap(descriptor, (PAGES + 1) * PAGE_BYTES)
    memory[PAGES * PAGE_BYTES : PAGES * PAGE_BYTES + 16] = nonce  # behind the pages
    print("registered", retried(lambda: register(directory, rank, engine, descriptor, nonce)))

    prompt = list(range(1000, 1330))  # 20 full pages, and 10 tokens more
    count, hashes, last = len(prompt) // PAGE_TOKENS, [], bytes(32)
    for start in range(0, count * PAGE_TOKENS, PAGE_TOKENS):
        tokens = struct.pack(">16I", *prompt[start : start + PAGE_TOKENS])
        hashes.append(last := hashlib.sha256(last + tokens).digest())  # a chain
    lookup = {"namespace": b"no tenant", "hash_bytes": 32, "hashes": b"".join(hashes)}
    lookup["limit_pages"] = (len(prompt) - 1) // PAGE_TOKENS  # the last token must be computed
    print("lookup", retried(lambda: scheduler.ask(LOOKUP, {"slot": 1, **lookup})))

    first = 5  # of the engine's pages; as in a model, their bytes follow from the tokens
    kv = bytes(first * PAGE_BYTES) + b"".join(hashlib.shake_256(one).digest(PAGE_BYTES) for one in hashes)
    kv += bytes(PAGES * PAGE_BYTES - len(kv))
    memory[: len(kv)] = kv
    parts = [{"first_page": 0, "pages": list(range(first, first + count)), "count": count}]
    store = scheduler.send(STORE, {"slot": 1, "parts": parts})
    rank.ask(WRITTEN, {"through": store})
    print("store", scheduler.answer(STORE, store))
    scheduler.ask(FINISH, {"slot": 1})

    memory[: len(kv)] = bytes(len(kv))
    print("lookup", scheduler.ask(LOOKUP, {"slot": 2, **lookup}))
    print("load", scheduler.ask(LOAD, {"slot": 2, "parts": parts}))
    if memory[: len(kv)] != kv:
        sys.exit("error: wrong bytes")
    print(f"{count} pages, {count * PAGE_BYTES} bytes are right, and the other pages untouched")
    scheduler.ask(FINISH, {"slot": 2})
    print("unregistered", rank.ask(UNREGISTER, {}))


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except (Refused, OSError) as error:
        sys.exit(f"error: {error}")
    finally:
        zmq.Context.instance().destroy(0)
