"""Round trips over ipc: between two sockets of libzmq, and to a leader that refuses a lookup.

Run it by ``cargo xtask engines ping``. The leader gets the lookups from the same kind of socket, and from kvferry's
client, which has a thread of its own. Messages have two parts, of 32 bytes and of the stated size. The other side of
each is a process. All are measured in turn, 50 round trips at a time: first on one core, then with the caller on one
core and the other sides on another, because the choice of cores changes a round trip more than the program does. Prints
p50 and p99 in microseconds, and the ratio of the p50 to that of the two sockets.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import zmq
from daemon import PROGRAM, environment, eventually

from kvferry import wire
from kvferry.client import Client
from kvferry.sockets import SOCKET_NAME

BODY_BYTES = (200, 64 << 10)
#: Bytes of a lookup's body beside its hashes, and of a hash.
LOOKUP_BYTES, HASH_BYTES = 64, 16
#: Bytes of the parts of an answer.
ANSWER_BYTES = (32, 64)
TURN = 50
WITHIN_S = 10.0
HELLO = wire.Hello(role="engine", engine=b"\6" * 16, name="bench")


def echo(endpoint: str) -> None:
    """Answers each message, until the process is ended."""
    socket = zmq.Context.instance().socket(zmq.ROUTER)
    socket.bind(endpoint)
    parts = [bytes(size) for size in ANSWER_BYTES]
    while True:
        peer, _, _ = socket.recv_multipart()
        socket.send_multipart([peer, *parts])


class Socket:
    """A DEALER of libzmq. Its calls do nothing but what their names say."""

    def __init__(self, endpoint: str):
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVTIMEO, int(WITHIN_S * 1000))
        self._socket.connect(endpoint)
        self._last = 0

    def exchange(self, parts: tuple[bytes, bytes]) -> list[bytes]:
        self._socket.send_multipart(parts)
        return self._socket.recv_multipart()

    def request(self, message: msgspec.Struct, kind: int, version: int = wire.VERSION) -> wire.Envelope:
        """Sends a request of kvferry, and returns its answer."""
        self._last += 1
        header = wire.header(version, kind, self._last, int(WITHIN_S * 1000), 0)
        answer = wire.read(self.exchange((header, wire.body_of(message))))
        assert answer.correlation == self._last, answer
        return answer

    def close(self) -> None:
        self._socket.close()


def lookup(body_bytes: int) -> wire.Lookup:
    hashes = (body_bytes - LOOKUP_BYTES) // HASH_BYTES * HASH_BYTES
    return wire.Lookup(slot=1, namespace=b"", hash_bytes=HASH_BYTES, hashes=bytes(hashes))


@contextlib.contextmanager
def process(command: list[str]) -> Iterator[None]:
    running = subprocess.Popen(command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        running.kill()
        running.wait(WITHIN_S)


def measure(rounds: int, round_trips: dict[str, Callable[[], None]]) -> dict[str, list[float]]:
    """Times of each kind in microseconds, in order. The first tenth warms caches up and does not count."""
    took: dict[str, list[float]] = {name: [] for name in round_trips}
    left = warm_up = rounds // 10
    left += rounds
    while left > 0:
        turn = min(TURN, left)
        left -= turn
        for name, round_trip in round_trips.items():
            for _ in range(turn):
                begun = time.perf_counter_ns()
                round_trip()
                took[name].append((time.perf_counter_ns() - begun) / 1000)
    return {name: sorted(times[warm_up:]) for name, times in took.items()}


def run(rounds: int, cores: str, caller: int, others: int) -> None:
    """Measures with the caller on one core and the processes on another, or the same."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        endpoint = f"ipc://{folder / 'echo'}"
        os.sched_setaffinity(0, {others})
        stack.enter_context(process([sys.executable, __file__, "--echo", endpoint]))
        stack.enter_context(process([PROGRAM, "leader", "--log", "error", "--socket-dir", str(folder / "k")]))
        os.sched_setaffinity(0, {caller})
        served = folder / "k" / "leader" / SOCKET_NAME
        eventually("a leader listens", served.exists)

        echoing, leader = Socket(endpoint), Socket(f"ipc://{served}")
        stack.callback(echoing.close)
        stack.callback(leader.close)
        welcome = leader.request(HELLO, wire.Kind.HELLO, version=wire.HELLO_VERSION)
        assert welcome.kind == wire.Kind.WELCOME, welcome
        hello = msgspec.structs.replace(HELLO, engine=b"\7" * 16)
        client = stack.enter_context(Client(folder / "k" / "leader", hello, first_id=1))

        for body_bytes in BODY_BYTES:
            parts, request = (bytes(32), bytes(body_bytes)), lookup(body_bytes)

            def by_socket(request: wire.Lookup = request) -> None:
                answer = leader.request(request, wire.Kind.LOOKUP)
                assert answer.body.code == wire.Code.NOT_READY, answer

            def by_client(request: wire.Lookup = request) -> None:
                pending = client.request(request, WITHIN_S)
                assert pending.wait(2 * WITHIN_S)
                assert pending.failure.code == wire.Code.NOT_READY, pending.failure

            def between_sockets(parts: tuple[bytes, bytes] = parts) -> None:
                echoing.exchange(parts)

            took = measure(
                rounds, {"sockets": between_sockets, "leader by socket": by_socket, "leader by client": by_client}
            )
            p50 = {name: times[len(times) // 2] for name, times in took.items()}
            for name, times in took.items():
                p99 = times[len(times) * 99 // 100]
                ratio = p50[name] / p50["sockets"]
                print(f"{cores:<9} {body_bytes:>6} B  {name:<16} {p50[name]:>7.1f} {p99:>8.1f} us  {ratio:>5.2f}")


def siblings(core: int) -> str | None:
    """The threads that share a core with this one: the same text for each. None where the system does not tell."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text()
    except OSError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2000, help="round trips of each kind")
    parser.add_argument("--echo", metavar="ENDPOINT", help="answer here, as the other side of a measurement")
    options = parser.parse_args()
    if options.echo:
        echo(options.echo)  # does not return
    first, *more = sorted(os.sched_getaffinity(0))
    run(options.rounds, "one core", first, first)
    if other := [core for core in more if siblings(core) is None or siblings(core) != siblings(first)]:
        run(options.rounds, "two cores", first, other[0])


if __name__ == "__main__":
    main()
