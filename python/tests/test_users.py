"""Engines of several users of the machine at one leader: each has its own namespaces, and nothing of another user's.

Each tenant is a process that was forked from this one and has changed its user, which needs root.
"""

import contextlib
import ctypes
import logging
import multiprocessing
import os
import socket
import stat
import subprocess
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from daemon import PROGRAM, TIMEOUT_S, Daemon, environment, eventually, running
from raw_peer import RawPeer

from kvferry import wire
from kvferry.engine_client import EngineClient
from kvferry.memory import Group, KvMemory, Place
from kvferry.rank import RankSession
from kvferry.served import Part
from kvferry.sockets import SERVER_UID, open_directory

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="changing the user of a process needs root")

ALICE, BOB, MALLORY = 61_001, 61_002, 61_003
PAGES = 16
HASHES = [number.to_bytes(16, "big") for number in range(1, 4)]
PR_SET_DUMPABLE = 4
#: Number of the message ``measure``.
MEASURE = 68
#: All of them draw the same name.
ENGINE = b"e" * 16
OF_ALICE, OF_BOB = b"a/prompts", b"b/prompts"
RULES = f"""
[[namespace]]
prefix = "a/"
users = [{ALICE}]
held_pages = 5
secret_file = "SECRET"

[[namespace]]
prefix = "b/"
users = [{BOB}]
"""


class Engine:
    """A scheduler and a rank, in a tenant's process."""

    def __init__(self, socket_dir: Path, replica: int):
        self.directory = socket_dir
        self.tensor = torch.zeros((PAGES, 1, 8, 4))
        memory = KvMemory(
            [Group({"layer": self.tensor}, engine_page_tokens=8, device_pages=PAGES)],
            Place(rank=0, tp_size=1, shard=0, content=b"test"),
        )
        self.rank = RankSession(socket_dir / f"worker-{replica}-0", ENGINE, 0, replica, memory)
        self.client = EngineClient(socket_dir / "leader", ENGINE, first_id=1, name="test")
        self.client.start()

    def registered(self) -> bool:
        return self.rank.registered

    def _ended(self, pending: Any) -> Any:
        assert pending.wait(TIMEOUT_S)
        return pending.answer if pending.failure is None else wire.Code(pending.failure.code).name

    def lookup(self, slot: int, namespace: bytes) -> Any:
        found = self._ended(self.client.lookup(slot, HASHES, namespace=namespace, timeout_s=TIMEOUT_S))
        return found if isinstance(found, str) else found.hit_pages

    def store(self, slot: int, pages: list[int], content: float) -> Any:
        for page in pages:
            self.tensor[page] = content
        store = self.client.store(slot, [Part(0, 0, pages)], timeout_s=TIMEOUT_S)
        self.rank.wrote(store.id)
        stored = self._ended(store)
        return stored if isinstance(stored, str) else stored.stored_pages

    def load(self, slot: int, pages: list[int]) -> Any:
        """Loads pages; returns their bytes."""
        loaded = self._ended(self.client.load(slot, [Part(0, 0, pages)], timeout_s=TIMEOUT_S))
        return loaded if isinstance(loaded, str) else [self.tensor[page].unique().tolist() for page in pages]

    def finish(self, slot: int) -> None:
        self._ended(self.client.finish(slot, timeout_s=TIMEOUT_S))

    def reset(self, namespace: bytes) -> Any:
        done = self._ended(self.client.reset(namespace, timeout_s=TIMEOUT_S))
        return done if isinstance(done, str) else done.pages

    def read(self, namespace: bytes | None) -> Any:
        read = self._ended(self.client.read_events(cursor=0, namespace=namespace, timeout_s=TIMEOUT_S))
        return read if isinstance(read, str) else sum(len(record.hashes) // 16 for record in read.records)

    def raw(self, place: str, role: str, kind: int | None, body: bytes = b"\x80") -> str:
        """Sends a hello, and a message; returns the code of the error that answers it, or the kind of the answer."""
        with RawPeer.connect(self.directory / place) as peer:
            hello = wire.Hello(role=role, engine=ENGINE)
            peer.send(wire.Kind.HELLO, msgspec.msgpack.encode(hello), version=1)
            answer = peer.receive()
            if answer.kind == wire.Kind.WELCOME and kind is not None:
                sent = peer.send(kind, body)
                answer = peer.receive()
                while answer.id != sent:
                    answer = peer.receive()
        if answer.kind == wire.Kind.ERROR:
            return wire.Code(answer.body["code"]).name
        return wire.Kind(answer.kind).name

    def second_rank(self, replica: int, wait_s: float) -> bool:
        """Whether memory can be registered at another seat."""
        memory = KvMemory(
            [Group({"layer": torch.zeros((PAGES, 1, 8, 4))}, engine_page_tokens=8, device_pages=PAGES)],
            Place(rank=0, tp_size=1, shard=0, content=b"test"),
        )
        texts: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: texts.append(record.getMessage())
        logging.getLogger("kvferry").addHandler(handler)
        rank = RankSession(self.directory / f"worker-{replica}-0", ENGINE, 0, replica, memory)
        try:
            eventually("an answer", lambda: rank.registered or any("in use by" in text for text in texts), wait_s)
            return rank.registered
        finally:
            rank.close()

    def close(self) -> None:
        self.client.close()
        self.rank.close()


def _live(uid: int, orders: Connection, socket_dir: Path, replica: int | None) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    # As in a process that began as this user: what it has in /proc is its own.
    assert ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1) == 0
    os.environ[SERVER_UID] = "0"
    logging.getLogger("kvferry").setLevel(logging.DEBUG)
    engine = Engine(socket_dir, replica) if replica is not None else None
    while (order := orders.recv()) is not None:
        name, arguments = order
        try:
            found = globals()[name](*arguments) if engine is None else getattr(engine, name)(*arguments)
            orders.send((True, found))
        except BaseException as error:
            orders.send((False, f"{type(error).__name__}: {error}"))
    if engine is not None:
        engine.close()


class Tenant:
    """A process of another user, with an engine in the seat of a replica or without one."""

    def __init__(self, uid: int, socket_dir: Path, replica: int | None = None):
        context = multiprocessing.get_context("fork")
        self._orders, other = context.Pipe()
        self._process = context.Process(target=_live, args=(uid, other, socket_dir, replica), daemon=True)
        self._process.start()

    def __call__(self, name: str, *arguments: Any) -> Any:
        self._orders.send((name, arguments))
        assert self._orders.poll(TIMEOUT_S), f"{name} does not return"
        good, found = self._orders.recv()
        assert good, found
        return found

    def end(self) -> None:
        self._orders.send(None)
        self._process.join(TIMEOUT_S)
        assert self._process.exitcode == 0

    def kill(self) -> None:
        self._process.kill()
        self._process.join(TIMEOUT_S)


@contextlib.contextmanager
def tenants(daemon: Daemon, *uids: int) -> Iterator[list[Tenant]]:
    """The engines of users, one in the seat of each replica, once their memory is registered. Each must end well."""
    engines = [Tenant(uid, daemon.socket_dir, replica) for replica, uid in enumerate(uids)]
    try:
        for engine in engines:
            eventually("the memory is registered", lambda engine=engine: engine("registered"))
        daemon.wait_ready()
        yield engines
        for engine in engines:
            engine.end()
    finally:
        for engine in engines:
            engine.kill()


def reached(socket_dir: Path) -> list[str]:
    """What a process gets of each socket: its first bytes, or the error."""
    found = []
    for path in (
        socket_dir / "leader/kvferry.sock",
        socket_dir / "worker-0-0/kvferry.sock",
        socket_dir / "worker-0-0/fds.sock",
    ):
        with socket.socket(socket.AF_UNIX) as connected:
            connected.settimeout(TIMEOUT_S)
            try:
                connected.connect(str(path))
                connected.sendall(b"\xff" + bytes(15))
                found.append(connected.recv(1).hex())
            except OSError as error:
                found.append(type(error).__name__)
    return found


def listed(socket_dir: Path) -> list[str]:
    """What a process of another user can read in the directories."""
    found = []
    for path in (
        socket_dir,
        socket_dir / "leader",
        socket_dir / "leader/anchor-key",
        socket_dir / "leader/kvferry.lock",
    ):
        try:
            if path.is_dir():
                list(path.iterdir())
            else:
                path.read_bytes()
            found.append(str(path))
        except PermissionError:
            pass
    return found


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    secret = tmp_path / "secret"
    secret.write_bytes(os.urandom(32))
    secret.chmod(0o600)
    path = tmp_path / "namespaces.toml"
    path.write_text(RULES.replace("SECRET", str(secret)))
    path.chmod(0o644)
    return path


@pytest.fixture
def daemon(rules: Path) -> Iterator[Daemon]:
    with running(ranks=1, replicas=2, g2="16MiB", users=f"{ALICE},{BOB}", namespaces=rules) as daemon:
        daemon.socket_dir.parent.chmod(0o711)
        yield daemon


def test_a_tenant_gets_nothing_of_another_and_cannot_disturb_it(daemon: Daemon) -> None:
    with tenants(daemon, ALICE, BOB) as (alice, bob):
        assert alice("lookup", 1, OF_ALICE) == 0
        assert alice("store", 1, [1, 2, 3], 7.0) == 3
        alice("finish", 1)
        assert alice("lookup", 2, OF_ALICE) == 3

        # He names her namespace, and all of them.
        assert bob("lookup", 1, OF_ALICE) == "FORBIDDEN"
        assert bob("lookup", 1, b"") == "FORBIDDEN"
        assert bob("reset", OF_ALICE) == "FORBIDDEN"
        assert bob("read", OF_ALICE) == "FORBIDDEN"
        assert bob("read", None) == "FORBIDDEN"
        assert bob("raw", "leader", "engine", wire.Kind.RESET, msgspec.msgpack.encode({"which": "all"})) == "FORBIDDEN"
        assert bob("raw", "leader", "engine", wire.Kind.STATUS, msgspec.msgpack.encode({"check": True})) == "FORBIDDEN"
        # He has drawn the name of her engine, and ends its requests and copies.
        bob("finish", 2)
        abandon = msgspec.msgpack.encode({"requests": [1, 2, 3, 4, 5]})
        assert bob("raw", "worker-0-0", "rank", wire.Kind.ABANDON, abandon) == "ABANDON_ANSWER"
        assert bob("raw", "worker-0-0", "rank", wire.Kind.UNREGISTER) == "UNREGISTERED"
        # He is no operator and no worker, and does not get her seat.
        for place, role in (("leader", "admin"), ("leader", "worker"), ("worker-0-0", "admin")):
            assert bob("raw", place, role, None) == "FORBIDDEN"
        assert not bob("second_rank", 0, TIMEOUT_S)
        # The same hashes are other pages in a namespace of his own.
        assert bob("lookup", 3, OF_BOB) == 0
        assert bob("store", 3, [1, 2, 3], 9.0) == 3
        bob("finish", 3)
        assert bob("lookup", 4, OF_BOB) == 3
        assert bob("load", 4, [4, 5, 6]) == [[9.0]] * 3
        assert bob("read", OF_BOB) == 3

        # Her slot is still open, and her pages are there, with her bytes.
        assert alice("load", 2, [8, 9, 10]) == [[7.0]] * 3
        alice("finish", 2)
        assert alice("read", OF_ALICE) == 3
        # He removes his own pages, and no others.
        bob("finish", 4)
        assert bob("reset", OF_BOB) == 3
        assert alice("lookup", 3, OF_ALICE) == 3
        # Her lookups hold 5 pages at most.
        assert alice("lookup", 4, OF_ALICE) == "QUOTA"
        of_alice, of_bob = measured(daemon.socket_dir)["namespaces"]
        assert of_alice == {"entry": 1, "held_pages": 3, "held_pages_max": 5, "stored": []}
        assert of_bob == {"entry": 2, "held_pages": 0, "stored": []}
        alice("finish", 3)
        assert alice("lookup", 5, OF_ALICE) == 3
        alice("finish", 5)
        status = daemon.status("--check")
        assert status["counters"]["refused_lookups_quota"] == 1


def test_a_tenant_with_many_namespaces_evicts_its_own_pages(rules: Path) -> None:
    rules.write_text(rules.read_text().replace("held_pages = 5", "g2_pages = 9"))
    with running(ranks=1, replicas=2, g2="32KiB", users=f"{ALICE},{BOB}", namespaces=rules) as daemon:
        daemon.socket_dir.parent.chmod(0o711)
        with tenants(daemon, ALICE, BOB) as (alice, bob):
            assert bob("lookup", 1, OF_BOB) == 0
            assert bob("store", 1, [1, 2, 3], 9.0) == 3
            bob("finish", 1)
            places = daemon.status("--check")["tiers"][0]["pages"]
            names = [b"a/%d" % number for number in range(places // 3 + 3)]
            for slot, name in enumerate(names):
                assert alice("lookup", slot, name) == 0
                assert alice("store", slot, [1, 2, 3], 7.0) == 3
                alice("finish", slot)
            # The memory is full, and the pages that were stored first are of a tenant within its limit.
            assert alice("lookup", 1000, names[0]) == 0
            assert alice("lookup", 1001, names[-1]) == 3
            assert bob("lookup", 2, OF_BOB) == 3
            assert bob("load", 2, [4, 5, 6]) == [[9.0]] * 3
            # It stores where the other one is above its limit.
            for slot in range(3, 6):
                name = b"b/%d" % slot
                assert bob("lookup", slot, name) == 0
                assert bob("store", slot, [1, 2, 3], 5.0) == 3
            assert bob("lookup", 6, OF_BOB) == 3
            [stored] = measured(daemon.socket_dir)["namespaces"][0]["stored"]
            assert (stored["tier"], stored["pages_max"]) == (2, 9)
            # Its last page may be evicted for the other one.
            assert 9 <= stored["pages"] <= places - 12


def test_a_mistake_in_the_file_of_namespaces_costs_no_stored_page(tmp_path: Path, rules: Path) -> None:
    log = tmp_path / "log"
    settings = {"users": f"{ALICE},{BOB}", "namespaces": rules, "log": log}
    with running(ranks=1, replicas=1, g2="16MiB", **settings) as daemon:
        daemon.socket_dir.parent.chmod(0o711)
        with tenants(daemon, ALICE) as (alice,):
            assert alice("lookup", 1, OF_ALICE) == 0
            assert alice("store", 1, [1, 2, 3], 7.0) == 3
            good = rules.read_text()
            rules.write_text(good.replace("held_pages", "held_page"))
            daemon.killed(daemon.leader)
            for text in ("unknown field `held_page`", "leader cannot start with its present configuration"):
                eventually(f"the log has '{text}'", lambda text=text: text in log.read_text())
            rules.write_text(good)
            eventually("the pages are found", lambda: alice("lookup", 2, OF_ALICE) == 3)
            assert alice("load", 2, [8, 9, 10]) == [[7.0]] * 3


def test_status_of_another_users_leader_names_that_user(tmp_path: Path) -> None:
    leader = tmp_path / "leader"
    leader.mkdir()
    for path in (tmp_path, leader):
        os.chown(path, ALICE, ALICE)
    command = [PROGRAM, "status", "--socket-dir", str(tmp_path)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode != 0
    assert f"belongs to uid {ALICE}: run the command as that user" in done.stderr


def test_a_seat_is_free_for_another_user_once_its_process_has_ended(daemon: Daemon) -> None:
    alice, bob = Tenant(ALICE, daemon.socket_dir, 0), Tenant(BOB, daemon.socket_dir, 1)
    try:
        for tenant in (alice, bob):
            eventually("the memory is registered", lambda tenant=tenant: tenant("registered"))
        assert not bob("second_rank", 0, TIMEOUT_S)
        alice.kill()
        eventually("the seat is free", lambda: bob("second_rank", 0, TIMEOUT_S))
    finally:
        alice.kill()
        bob.kill()


def measured(socket_dir: Path) -> dict[str, Any]:
    """The numbers of the leader that its status does not have."""
    with RawPeer.connect(socket_dir / "leader") as peer:
        peer.send(wire.Kind.HELLO, msgspec.msgpack.encode(wire.Hello(role="admin", engine=bytes(16))), version=1)
        assert peer.receive().kind == wire.Kind.WELCOME
        sent = peer.send(MEASURE, b"\x80")
        answer = peer.receive()
        while answer.id != sent:
            answer = peer.receive()
        return answer.body


def refused_connections(socket_dir: Path) -> int:
    """Connections that the leader has refused before they were open."""
    return measured(socket_dir)["connections"]["refused_handshakes"]


def test_a_user_that_is_not_named_gets_no_byte(daemon: Daemon) -> None:
    before = refused_connections(daemon.socket_dir)
    mallory = Tenant(MALLORY, daemon.socket_dir)
    try:
        nothing = {"", "ConnectionResetError", "BrokenPipeError"}
        assert set(mallory("reached", daemon.socket_dir)) <= nothing
        assert mallory("listed", daemon.socket_dir) == []
        mallory.end()
    finally:
        mallory.kill()
    assert refused_connections(daemon.socket_dir) == before + 1


def on_disk(daemon: Daemon) -> int | None:
    """Pages on the disk that the leader knows, whether anybody finds them or not; None until the disk is open."""
    disks = [tier for tier in daemon.status()["tiers"] if tier["tier"] == 3 and tier["pages"]]
    return disks[0]["used_pages"] if disks else None


def test_without_the_secret_no_page_is_found_after_a_restart(rules: Path, tmp_path: Path) -> None:
    with running(
        ranks=1,
        g2="16MiB",
        g3="64MiB",
        g3_dir=tmp_path / "disk",
        users=str(ALICE),
        namespaces=rules,
    ) as daemon:
        daemon.socket_dir.parent.chmod(0o711)
        secret = tmp_path / "secret"
        kept, other = secret.read_bytes(), os.urandom(32)
        for number, (present, pages) in enumerate([(kept, 0), (kept, 3), (other, 0), (kept, 3)]):
            if number:
                daemon.stop()
                secret.write_bytes(present)
                daemon.start()
            with tenants(daemon, ALICE) as (alice,):
                eventually("the disk is read", lambda number=number: on_disk(daemon) == (3 if number else 0))
                eventually(
                    f"{pages} pages of start {number}",
                    lambda alice=alice, pages=pages: alice("lookup", 1, OF_ALICE) == pages,
                )
                if not number:
                    assert alice("store", 1, [1, 2, 3], 7.0) == 3
                    alice("finish", 1)
                    assert daemon.flush() >= 3
                elif pages:
                    assert alice("load", 1, [4, 5, 6]) == [[7.0]] * 3
                alice("finish", 1)


def test_a_client_accepts_the_directory_of_the_server_that_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "s"
    directory.mkdir(mode=0o700)
    os.chown(directory, ALICE, ALICE)
    monkeypatch.delenv(SERVER_UID, raising=False)
    with pytest.raises(OSError, match=f"belongs to uid {ALICE}"):
        open_directory(directory)
    monkeypatch.setenv(SERVER_UID, str(BOB))
    with pytest.raises(OSError, match=f"belongs to uid {ALICE}"):
        open_directory(directory)
    monkeypatch.setenv(SERVER_UID, str(ALICE))
    for mode, good in ((0o700, True), (0o711, True), (0o755, False), (0o733, False), (0o777, False)):
        directory.chmod(mode)
        assert stat.S_IMODE(directory.stat().st_mode) == mode
        if good:
            os.close(open_directory(directory))
        else:
            with pytest.raises(OSError, match="run chmod 700"):
                open_directory(directory)
