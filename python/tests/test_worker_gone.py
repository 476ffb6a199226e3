"""The deaths of workers on another machine, played over TLS on this one: what a leader does, and who states them."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from daemon import PROGRAM, TIMEOUT_S, environment, eventually
from test_merged_events import hash_of, port

from kvferry.engine_client import EngineClient
from kvferry.memory import Group, KvMemory, Place
from kvferry.rank import RankSession
from kvferry.served import Part

ENGINE = b"g" * 16
PAGES = 8
PAGE_TOKENS = 8
#: The leader's lines about a worker that owes a copy after the fence time, and about a statement.
HELPLESS = "its process is unknown: end it by hand"
STATED = "worker has ended, as its supervisor reports"
#: How long a client waits for the end of a copy: beyond the fence time, and far below the limit of a test.
GRACE_S = 50.0


class Hosts:
    """A leader and the worker of rank 0 on one host, and rank 1 on another one, in directories of their own."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.near, self.far, self.keys = folder / "near", folder / "far", folder / "keys"
        self.at = f"127.0.0.1:{port()}"
        self.processes: list[subprocess.Popen] = []
        self.log = folder / "leader.log"
        self.run("keygen", str(self.keys), "--deployment", "test", "--ranks", "2")
        #: The credentials of the other host.
        self.far_keys = folder / "far-keys"
        self.far_keys.mkdir(mode=0o700)
        shutil.copy(self.keys / "worker-0-1.pem", self.far_keys)

    def run(self, *command: str, fails: bool = False) -> str:
        done = subprocess.run([PROGRAM, *command], env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S)
        assert (done.returncode != 0) == fails, done.stderr
        return done.stderr if fails else done.stdout

    def start(self, command: list[str], directory: Path, log: Path | None = None) -> subprocess.Popen:
        common = ["--socket-dir", str(directory), "--ranks", "2", "--g2", "32MiB"]
        with contextlib.ExitStack() as files:
            stderr = files.enter_context((log or self.folder / "log").open("ab"))
            process = subprocess.Popen(
                [PROGRAM, *command, *common], env=environment(), stdin=subprocess.DEVNULL, stderr=stderr
            )
        self.processes.append(process)
        return process

    def leader(self) -> subprocess.Popen:
        return self.start(
            ["leader", "--listen", self.at, "--credentials", str(self.keys / "leader.pem")], self.near, self.log
        )

    def near_worker(self) -> subprocess.Popen:
        return self.start(["worker", "--rank", "0"], self.near)

    def far_worker(self) -> subprocess.Popen:
        credentials = str(self.far_keys / "worker-0-1.pem")
        return self.start(["worker", "--rank", "1", "--leader", self.at, "--credentials", credentials], self.far)

    def state_gone(self, *flags: str, fails: bool = False) -> str:
        credentials = str(self.far_keys / "worker-0-1.pem")
        place = ["--leader", self.at, "--credentials", credentials, "--socket-dir", str(self.far)]
        return self.run("worker-gone", *place, *flags, fails=fails)

    def status(self) -> dict[str, Any]:
        return json.loads(self.run("status", "--json", "--socket-dir", str(self.near)))

    def logged(self, text: str, times: int = 1) -> None:
        eventually(text, lambda: self.log.read_text().count(text) >= times)

    def end(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT)
            process.kill()
            process.wait(TIMEOUT_S)


class PlayedEngine:
    """The scheduler beside the leader, and the two ranks."""

    def __init__(self, hosts: Hosts):
        self.hosts = hosts
        self.ranks = [self.rank(hosts.near, 0), self.rank(hosts.far, 1)]
        self.client = EngineClient(hosts.near / "leader", ENGINE, first_id=1, name="test")
        self.client.start()
        self.slot = 0

    def rank(self, directory: Path, rank: int) -> RankSession:
        group = Group(
            {"layer": torch.zeros(PAGES, 2, PAGE_TOKENS, 8)}, engine_page_tokens=PAGE_TOKENS, device_pages=PAGES
        )
        memory = KvMemory([group], Place(rank=rank, tp_size=2, shard=rank, content=b"test"))
        return RankSession(directory / f"worker-0-{rank}", ENGINE, rank, 0, memory)

    def lookup(self, page: int) -> bool:
        self.slot += 1
        pending = self.client.lookup(self.slot, [hash_of(page)], timeout_s=TIMEOUT_S)
        assert pending.wait(TIMEOUT_S)
        return pending.failure is None

    def stores(self, page: int, *, ranks: tuple[int, ...], timeout_s: float) -> Any:
        """A store of one page that only these ranks have written."""
        eventually("lookups are served", lambda: self.lookup(page))
        pending = self.client.store(self.slot, [Part(0, 0, [page])], timeout_s=timeout_s, grace_s=GRACE_S)
        for rank in ranks:
            self.ranks[rank].wrote(pending.id)
        return pending

    def close(self) -> None:
        self.client.close()
        for rank in self.ranks:
            rank.close()


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    hosts = Hosts(tmp_path)
    try:
        yield hosts
    finally:
        hosts.end()


@contextlib.contextmanager
def played(hosts: Hosts) -> Iterator[PlayedEngine]:
    engine = PlayedEngine(hosts)
    try:
        yield engine
    finally:
        engine.close()


def killed(process: subprocess.Popen) -> None:
    process.kill()
    process.wait(TIMEOUT_S)


def test_a_copy_of_a_dead_worker_waits_until_its_end_is_stated(hosts: Hosts) -> None:
    hosts.leader()
    hosts.near_worker()
    far = hosts.far_worker()
    with played(hosts) as engine:
        store = engine.stores(1, ranks=(0,), timeout_s=1.0)
        eventually("the copy runs", lambda: hosts.status()["copies_under_way"])
        # A host that stands still: no end of a connection comes, and the leader closes it for its silence.
        far.send_signal(signal.SIGSTOP)
        hosts.logged("worker lost")
        refused = hosts.state_gone(fails=True)
        assert f"runs as process {far.pid}: end it first" in refused
        killed(far)
        # The fence time after the deadline: the leader can end nothing on another machine.
        hosts.logged(HELPLESS)
        assert not store.done, store.answer or store.failure
        assert "counts the worker of rank 1 as ended" in hosts.state_gone()
        assert store.wait(TIMEOUT_S)
        assert store.failure is None
        assert store.answer.failed_pages == 1
        hosts.logged(STATED)
        # The successor serves.
        hosts.far_worker()
        again = engine.stores(2, ranks=(0, 1), timeout_s=TIMEOUT_S)
        assert again.wait(TIMEOUT_S)
        assert again.failure is None
        assert again.answer.stored_pages == 1


def test_a_new_leader_parks_loads_until_the_end_is_stated(hosts: Hosts) -> None:
    first = hosts.leader()
    hosts.near_worker()
    far = hosts.far_worker()
    with played(hosts) as engine:
        assert engine.stores(1, ranks=(0, 1), timeout_s=TIMEOUT_S).wait(TIMEOUT_S)
        killed(far)
        killed(first)
        hosts.leader()
        load = engine.client.load(99, [Part(0, 0, [3])], timeout_s=TIMEOUT_S, grace_s=GRACE_S)
        hosts.logged(HELPLESS)
        assert not load.done, load.answer or load.failure
        hosts.state_gone()
        assert load.wait(TIMEOUT_S)
        assert load.failure is not None
        assert load.failure.over, "it may use its pages again"


def test_a_supervisor_states_each_end_before_it_starts_the_successor(hosts: Hosts) -> None:
    hosts.leader()
    hosts.near_worker()
    command = ["up", "--leader", hosts.at, "--credentials", str(hosts.far_keys)]
    supervisor = hosts.start(command, hosts.far)

    def worker() -> int:
        assert supervisor.poll() is None, "up has ended"
        children = Path(f"/proc/{supervisor.pid}/task/{supervisor.pid}/children").read_text().split()
        return int(children[0]) if children else 0

    with played(hosts) as engine:
        before = eventually("the worker runs", worker)
        store = engine.stores(1, ranks=(0,), timeout_s=TIMEOUT_S)
        eventually("the copy runs", lambda: hosts.status()["copies_under_way"])
        os.kill(before, signal.SIGKILL)
        assert store.wait(TIMEOUT_S)
        assert store.failure is None
        assert store.answer.failed_pages == 1
        hosts.logged(STATED)
        eventually("a successor runs", lambda: worker() not in (0, before))
        again = engine.stores(2, ranks=(0, 1), timeout_s=TIMEOUT_S)
        assert again.wait(TIMEOUT_S)
        assert again.failure is None
        assert again.answer.stored_pages == 1
        # Ended in order: no successor comes, and the leader knows that.
        supervisor.send_signal(signal.SIGTERM)
        assert supervisor.wait(TIMEOUT_S) == 0
        hosts.logged(STATED, times=2)


def test_what_a_supervisor_cannot_state_is_refused(hosts: Hosts) -> None:
    hosts.leader()
    assert "leader is missing" in hosts.run("worker-gone", fails=True)
    assert "does not exist" in hosts.state_gone(fails=True)
    # Nothing of the worker was ever seen: its seat counts as empty.
    assert "as ended" in hosts.state_gone("--host-is-off")
    place = ["--leader", hosts.at, "--credentials", str(hosts.keys / "admin.pem"), "--host-is-off"]
    assert "give those of the worker" in hosts.run("worker-gone", *place, fails=True)
    empty = hosts.folder / "empty"
    empty.mkdir()
    up = ["up", "--ranks", "2", "--socket-dir", str(hosts.far), "--leader", hosts.at]
    assert "without credentials" in hosts.run(*up, fails=True)
    assert "has no file worker-REPLICA-RANK.pem" in hosts.run(*up, "--credentials", str(empty), fails=True)
    up[2] = "1"
    assert "beyond replicas 1 and ranks 1" in hosts.run(*up, "--credentials", str(hosts.far_keys), fails=True)
