"""A leader and a worker under changed messages and raw bytes: afterwards they serve as before.

``KVFERRY_FUZZ_MESSAGES`` sets the number of messages; ``cargo xtask fuzz live`` sends 100,000.
"""

import contextlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import live_fuzz
import torch
from daemon import PROGRAM, TIMEOUT_S, Daemon, environment, eventually, running
from raw_peer import RawPeer
from test_every_message import BY_NAME, PlayedLeader, measured
from test_typed_clients import answer_of

from kvferry import wire
from kvferry.admin import AdminClient
from kvferry.client import Failure, PendingRequest
from kvferry.engine_client import EngineClient
from kvferry.memory import Group, KvMemory, Place
from kvferry.rank import RankSession
from kvferry.served import Part

MESSAGES = int(os.environ.get("KVFERRY_FUZZ_MESSAGES", "6000"))
#: Seconds that 1,000 messages may take on a busy machine.
SECONDS_PER_THOUSAND = 10
ENGINE = b"f" * 16
PAGES = 8
HASHES = [number.to_bytes(16, "big") for number in range(7, 10)]
#: The number of `probe`: a worker keeps the memory of its first probe.
PROBE = BY_NAME["probe"]["number"]
#: Growth of a process's memory over the messages, after as many messages before.
GROWTH = 1.1


def resident(pid: int) -> int:
    """Bytes of a process in memory, without those that it shares with others, such as depots."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":") for line in lines if line.startswith("Rss"))
    return sum(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssFile"))


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


class Remote:
    """A leader that listens at a port with TLS, and its worker, on this machine."""

    def __init__(self, folder: Path):
        self.socket_dir, self.keys = folder / "s", folder / "keys"
        self._run("keygen", str(self.keys), "--deployment", "test")
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        common = ["--socket-dir", str(self.socket_dir), "--g2", "64MiB"]
        credentials = ["--credentials", str(self.keys / "leader.pem")]
        self._leader = self._started("leader", "--listen", f"127.0.0.1:{self.port}", *credentials, *common)
        try:
            self._worker = self._started("worker", "--rank", "0", *common)
        except BaseException:
            self._leader.kill()
            raise

    @staticmethod
    def _run(*arguments: str) -> None:
        done = subprocess.run([PROGRAM, *arguments], env=environment(), capture_output=True, timeout=TIMEOUT_S)
        assert done.returncode == 0, done.stderr

    @staticmethod
    def _started(*arguments: str) -> subprocess.Popen:
        quiet = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return subprocess.Popen([PROGRAM, *arguments], env=environment(), **quiet)

    @property
    def leader(self) -> int:
        assert self._leader.poll() is None, "the leader has ended"
        return self._leader.pid

    @property
    def workers(self) -> list[int]:
        assert self._worker.poll() is None, "the worker has ended"
        return [self._worker.pid]

    def close(self) -> None:
        for process in (self._worker, self._leader):
            process.send_signal(signal.SIGKILL)
            process.wait(TIMEOUT_S)


class Engine:
    """An engine that stores, loads and compares."""

    def __init__(self, daemon: Daemon | Remote):
        self.tensor = torch.arange(PAGES * 8 * 4, dtype=torch.float32).reshape(PAGES, 1, 8, 4)
        group = Group({"layer": self.tensor}, engine_page_tokens=8, device_pages=PAGES)
        memory = KvMemory([group], Place(rank=0, tp_size=1, shard=0, content=b"test"))
        self.rank = RankSession(daemon.socket_dir / "worker-0-0", ENGINE, 0, 0, memory)
        self.client = EngineClient(daemon.socket_dir / "leader", ENGINE, first_id=1, name="test")
        self.client.start()
        self._slot = 0

    def close(self) -> None:
        self.client.close()
        self.rank.close()

    def stores_and_loads(self) -> None:
        self._slot += 2
        namespace = f"n{self._slot}".encode()
        slot, other = self._slot, self._slot + 1
        assert answer_of(self._lookup(slot, namespace)) == wire.LookupAnswer(0)
        store = self.client.store(slot, [Part(0, 0, [4, 5, 1])], timeout_s=TIMEOUT_S)
        self.rank.wrote(store.id)
        assert answer_of(store) == wire.StoreAnswer(stored_pages=3, present_pages=0)
        expected = [self.tensor[page].clone() for page in (4, 5, 1)]
        self.tensor[[0, 7, 2]] = -1.0
        assert answer_of(self._lookup(other, namespace)) == wire.LookupAnswer(3)
        load = self.client.load(other, [Part(0, 0, [0, 7, 2])], timeout_s=TIMEOUT_S)
        assert answer_of(load) == wire.LoadAnswer(3)
        for page, content in zip((0, 7, 2), expected, strict=True):
            assert torch.equal(self.tensor[page], content), f"page {page}"
        for each in (slot, other):
            answer_of(self.client.finish(each, timeout_s=TIMEOUT_S))

    def _lookup(self, slot: int, namespace: bytes) -> PendingRequest:
        return self.client.lookup(slot, HASHES, namespace=namespace, timeout_s=TIMEOUT_S)

    def round_trips(self, until: Callable[[], bool]) -> list[float]:
        """Times of lookups, one after another, until this returns true."""
        times = []
        while not until() or len(times) < 50:
            begun = time.perf_counter()
            answer_of(self._lookup(1, b"round trips"))
            times.append(time.perf_counter() - begun)
        answer_of(self.client.finish(1, timeout_s=TIMEOUT_S))
        return times


@contextlib.contextmanager
def attackers(daemon: Daemon | Remote, seeds: range) -> Iterator[list[subprocess.Popen]]:
    command = [sys.executable, live_fuzz.__file__, str(daemon.socket_dir)]
    each = str(MESSAGES // len(seeds))
    port = [str(daemon.port), str(daemon.keys)] if isinstance(daemon, Remote) else []
    processes = [subprocess.Popen([*command, str(seed), each, *port], stdout=subprocess.PIPE) for seed in seeds]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait(TIMEOUT_S)


def shown(name: str, times: list[float]) -> None:
    ordered = sorted(times)
    median, late, most = statistics.median(ordered), ordered[int(len(ordered) * 0.99)], ordered[-1]
    figures = f"median {median * 1e6:.0f} us, p99 {late * 1e6:.0f} us, most {most * 1e6:.0f} us"
    print(f"{name}: {len(times)} lookups, {figures}")


def attacked(daemon: Daemon | Remote, engine: Engine, seeds: range) -> list[float]:
    """Round trips of the engine while others send their messages."""
    until = time.monotonic() + TIMEOUT_S + MESSAGES / 1000 * SECONDS_PER_THOUSAND
    with attackers(daemon, seeds) as processes:

        def over() -> bool:
            assert time.monotonic() < until, "the messages are not sent in time"
            return all(process.poll() is not None for process in processes)

        times = engine.round_trips(over)
        for process in processes:
            assert process.returncode == 0
            assert process.stdout is not None
            sent = json.loads(process.stdout.read())
            print(sent)
            assert sent["messages"] >= MESSAGES // len(seeds)
    return times


def check_served(daemon: Daemon | Remote) -> None:
    """Sends the messages while an engine looks pages up, and compares what the processes hold before and after them."""
    with AdminClient(daemon.socket_dir / "leader", name="test") as admin:
        engine = Engine(daemon)
        try:

            def served() -> bool:
                with contextlib.suppress(Failure):
                    return engine.rank.registered and admin.status().ready
                return False

            eventually("lookups are served", served)
            engine.stores_and_loads()
            # The first messages fill caches, which later ones use again.
            attacked(daemon, engine, range(2))
            # Everything is open that a message may have closed, or that the first message of a kind opens.
            engine.stores_and_loads()
            with RawPeer.connect(daemon.socket_dir / "worker-0-0") as peer:
                peer.hello("admin")
                assert peer.ask(PROBE, b"\x80").kind == PROBE + 1
            processes = {"leader": daemon.leader, "worker": daemon.workers[0]}
            before = {name: (resident(pid), descriptors(pid)) for name, pid in processes.items()}
            shown("alone", engine.round_trips(lambda: True))
            shown("beside the messages", attacked(daemon, engine, range(2, 4)))
            assert {"leader": daemon.leader, "worker": daemon.workers[0]} == processes, "a process ended"
            engine.stores_and_loads()
            for name, pid in processes.items():
                had, opened = before[name]
                print(f"{name}: {had} bytes before, {resident(pid)} after")
                eventually(
                    f"the {name} closes what it opened", lambda pid=pid, opened=opened: descriptors(pid) <= opened
                )
                eventually(f"the {name} gives its memory back", lambda pid=pid, had=had: resident(pid) <= had * GROWTH)

            def counted() -> wire.StatusAnswer | None:
                # One of the messages may have asked for a second count less than a second ago.
                with contextlib.suppress(Failure):
                    return admin.status(check=True)
                return None

            status = eventually("the leader counts a second time", counted)
            assert status.contradiction == ""
            assert status.ranks[0].attached
            # The messages came to the leader's sessions, and the other bytes to its gate.
            counted = measured(daemon.socket_dir / "leader")["connections"]
            refused = {code: count for code, count in counted["refused_messages"].items() if count}
            print(refused, counted["refused_handshakes"])
            assert {"malformed", "unknown_kind"} <= refused.keys()
            assert counted["refused_handshakes"] > 0
        finally:
            engine.close()


def test_a_leader_and_a_worker_serve_after_any_messages() -> None:
    with running(ranks=1, log=Path(os.devnull)) as daemon:
        check_served(daemon)


def test_a_leader_serves_after_any_messages_and_bytes_at_its_port() -> None:
    """The same inside TLS, with certificates, and bytes that are no TLS."""
    with tempfile.TemporaryDirectory(prefix="kvferry-") as folder:
        remote = Remote(Path(folder))
        try:
            check_served(remote)
        finally:
            remote.close()


def test_a_worker_takes_any_orders() -> None:
    """The same from the other side: a leader that orders anything."""
    draw = random.Random(5)
    epoch, count = 5, MESSAGES // 4
    known = live_fuzz.examples()
    with tempfile.TemporaryDirectory(prefix="kvferry-") as folder:
        leader = PlayedLeader(Path(folder))
        command = [PROGRAM, "worker", "--rank", "0", "--g2", "64MiB", "--socket-dir", str(leader.socket_dir)]
        worker = subprocess.Popen(command, env=environment(), stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            connections = sent = 0
            while sent < count:
                side = leader.accept(epoch)
                connections += 1
                # A header that cannot be read ends the connection, and the worker connects again.
                with side.peer:
                    sent += orders(draw, side.peer, known, min(500, count - sent))
                assert worker.poll() is None, f"the worker ended after {sent} orders"
            side = leader.accept(epoch + 1)
            assert side.barrier() == []
            print(f"{sent} orders over {connections} connections")
        finally:
            worker.kill()
            worker.wait(TIMEOUT_S)


def orders(draw: random.Random, peer: RawPeer, known: list[tuple[bytes, bytes]], most: int) -> int:
    sent = 0
    try:
        for _ in range(most):
            head, body = live_fuzz.changed_message(draw, *draw.choice(known))
            sent += 1
            peer.write(live_fuzz.frame(live_fuzz.MORE, head) + live_fuzz.frame(0, body))
            if sent % 8 == 0:
                live_fuzz.discard(peer)
    except (live_fuzz.Closed, OSError):
        pass
    return sent
