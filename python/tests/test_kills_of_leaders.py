"""A leader that is killed while 200 requests a second run, for both kinds of clients.

Each caller computes a page, stores it, and loads a page that it stored before. It overwrites its pages as soon as its
client allows that, so that a second effect of a request shows: a copy that runs after its end changes a page, and a
page that was stored twice takes two places.
"""

import collections
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from daemon import TIMEOUT_S, Daemon, eventually, running
from test_typed_clients import CLIENTS, Clients

from kvferry.memory import Group, KvMemory, Place
from kvferry.rank import RankSession
from kvferry.requests import PendingRequest
from kvferry.served import Part

CALLERS = 40
#: Rounds of all callers a second. A round has 2 to 6 requests, 5 where all goes well.
ROUNDS_PER_S = 40
SECONDS = 6.0
KILLS = 4
#: Time between two reports of written work, for which stores and loads wait: several are in flight at each kill.
STEP_S = 0.2
#: Deadlines of requests, and the time after them in which an answer may come.
LIMIT_S, GRACE_S = 10.0, 12.0
#: How late the end of a request may be known on a busy machine.
MARGIN_S = 1.0
FREE = -1.0
TOKENS, NUMBERS = 8, 4


class Scene:
    """An engine with one rank."""

    def __init__(self, daemon: Daemon, clients: Clients):
        # For each caller the page that it computes, and the one that it loads into.
        self.tensor = torch.full((2 * CALLERS, 1, TOKENS, NUMBERS), FREE)
        group = Group({"layer": self.tensor}, engine_page_tokens=TOKENS, device_pages=2 * CALLERS)
        name = os.urandom(16)
        memory = KvMemory([group], Place(rank=0, tp_size=1, shard=0, content=b"kills of leaders"))
        self.rank = RankSession(daemon.socket_dir / "worker-0-0", name, 0, 0, memory)
        self.engine = clients.engine(daemon.socket_dir / "leader", name, first_id=1, name="test")
        self.engine.start()
        self.slots = itertools.count(1)
        self.ends: collections.Counter[str] = collections.Counter()
        self.late: list[float] = []
        #: Hashes of all pages that were offered, and of those whose stores were answered, with their contents.
        self.offered: list[bytes] = []
        self.stored: dict[bytes, float] = {}
        #: Requests that were sent before a kill and were not answered then.
        self.repeated = 0
        self._open: set[PendingRequest] = set()
        self._abandoned: dict[int, threading.Event] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._steps = threading.Thread(target=self._report, daemon=True)
        self._steps.start()

    def _report(self) -> None:
        """Reports the work of each step as written: pages are computed before their stores are requested."""
        while not self._closing.wait(STEP_S):
            self.rank.wrote(self.engine.draw())

    def kill(self, daemon: Daemon) -> None:
        os.kill(daemon.leader, signal.SIGKILL)
        with self._lock:
            self.repeated += sum(pending.sent_at is not None and not pending.done for pending in self._open)

    def ended(self, kind: str, pending: PendingRequest) -> Any:
        """Waits for a request; returns its answer, or None for a failure."""
        with self._lock:
            self._open.add(pending)
        assert pending.wait(LIMIT_S + GRACE_S + TIMEOUT_S), f"a {kind} did not end"
        failure = pending.failure
        with self._lock:
            self._open.discard(pending)
            self.ends[f"{kind} {'answered' if failure is None else 'refused' if failure.reported else 'expired'}"] += 1
            self.late.append(pending.ended_at - pending.expires)
        return pending.answer

    def free(self, pending: PendingRequest) -> None:
        """Takes the pages of an ended load or store back."""
        if not pending.pages_in_use:
            return
        over = threading.Event()
        with self._lock:
            self.ends["abandoned"] += 1
            self._abandoned[pending.id] = over
        self.rank.abandon([pending.id])
        end = time.monotonic() + TIMEOUT_S
        while not over.wait(0.02):
            assert time.monotonic() < end, "no worker has given pages back"
            with self._lock:
                for identity in self.rank.over():
                    self._abandoned.pop(identity).set()

    def close(self) -> None:
        self._closing.set()
        self._steps.join(TIMEOUT_S)
        self.engine.close()
        self.rank.close()


class Caller:
    """One of the engine's requests after the other, in a thread."""

    def __init__(self, scene: Scene, number: int):
        self.scene = scene
        self.number = number
        self.page, self.target = scene.tensor[2 * number], scene.tensor[2 * number + 1]
        self.rng = random.Random(number)
        self.own: list[bytes] = []
        self.problem: BaseException | None = None

    def run(self, until: float) -> None:
        try:
            at = time.monotonic() + self.rng.random() * CALLERS / ROUNDS_PER_S
            for turn in itertools.count():
                time.sleep(max(at - time.monotonic(), 0.0))
                if time.monotonic() >= until:
                    return
                at += CALLERS / ROUNDS_PER_S
                self.store(turn)
                self.load()
        except BaseException as error:
            self.problem = error

    def quiet(self) -> None:
        for name, page in (("computes", self.page), ("loads into", self.target)):
            assert bool((page == FREE).all()), f"a copy ran after its end: the page that caller {self.number} {name}"

    def store(self, turn: int) -> None:
        scene, slot = self.scene, next(self.scene.slots)
        content = float(self.number * 10_000 + turn)
        key = int(content + 1).to_bytes(16, "big")
        found = scene.ended("lookup", scene.engine.lookup(slot, [key], timeout_s=LIMIT_S))
        if found is not None:
            assert found.hit_pages == 0, "this page was never stored"
            self.page.fill_(content)
            with scene._lock:
                scene.offered.append(key)
            parts = [Part(0, 0, [2 * self.number])]
            store = scene.engine.store(slot, parts, timeout_s=LIMIT_S, grace_s=GRACE_S)
            answer = scene.ended("store", store)
            scene.free(store)
            self.page.fill_(FREE)
            if answer is not None and answer.stored_pages + answer.present_pages:
                self.own.append(key)
                scene.stored[key] = content
        scene.ended("finish", scene.engine.finish(slot, timeout_s=LIMIT_S))

    def load(self) -> None:
        self.quiet()
        if not self.own:
            return
        scene, slot, key = self.scene, next(self.scene.slots), self.rng.choice(self.own)
        found = scene.ended("lookup", scene.engine.lookup(slot, [key], timeout_s=LIMIT_S))
        if found is not None and found.hit_pages:
            parts, after = [Part(0, 0, [2 * self.number + 1])], scene.engine.draw()
            load = scene.engine.load(slot, parts, after=after, timeout_s=LIMIT_S, grace_s=GRACE_S)
            answer = scene.ended("load", load)
            scene.free(load)
            if answer is not None and answer.pages:
                assert bool((self.target == scene.stored[key]).all()), "a load brought other bytes"
            self.target.fill_(FREE)
        scene.ended("finish", scene.engine.finish(slot, timeout_s=LIMIT_S))


@pytest.fixture(params=CLIENTS)
def scene(request: pytest.FixtureRequest) -> Iterator[tuple[Daemon, Scene]]:
    with running(ranks=1, g2="64MiB") as daemon:
        made = Scene(daemon, CLIENTS[request.param])
        try:
            eventually("lookups are served", lambda: made.rank.registered and daemon.status().get("ready"))
            yield daemon, made
        finally:
            made.close()


def test_every_request_ends_in_time_and_has_one_effect_while_leaders_are_killed(scene: tuple[Daemon, Scene]) -> None:
    daemon, made = scene
    begun = time.monotonic()
    callers = [Caller(made, number) for number in range(CALLERS)]
    threads = [threading.Thread(target=caller.run, args=(begun + SECONDS,), daemon=True) for caller in callers]
    for thread in threads:
        thread.start()
    for kill in range(KILLS):
        time.sleep(max(begun + (kill + 1) * SECONDS / (KILLS + 1) - time.monotonic(), 0.0))
        eventually("the client is connected", lambda kill=kill: made.engine.link > kill)
        made.kill(daemon)
    for thread in threads:
        thread.join(LIMIT_S + GRACE_S + TIMEOUT_S)
    assert not any(thread.is_alive() for thread in threads)
    for caller in callers:
        if caller.problem is not None:
            raise caller.problem
    print(dict(made.ends), f"{made.repeated} repeated", f"latest end {max(made.late):.3f} s after its time")
    assert max(made.late) < MARGIN_S
    assert made.repeated > KILLS, "the kills met no requests"
    expired = [kind for kind in made.ends if kind.endswith("expired")]
    assert expired == [], "another leader is there long before the deadlines, and answers requests that are repeated"
    eventually("the client is connected to the last leader", lambda: made.engine.link > KILLS)
    answered = sum(made.ends[f"{kind} answered"] for kind in ("lookup", "store", "load", "finish"))
    assert answered > 200, made.ends
    assert made.ends["load answered"] > 20, made.ends

    eventually("lookups are served", lambda: daemon.status().get("ready"))
    found = 0
    for key in made.offered:
        slot = next(made.slots)
        hit = made.ended("lookup", made.engine.lookup(slot, [key], timeout_s=LIMIT_S)).hit_pages
        assert hit or key not in made.stored, "a page that was stored is lost"
        found += hit
        made.ended("finish", made.engine.finish(slot, timeout_s=LIMIT_S))
    status = daemon.status("--check")
    assert status["contradiction"] == ""
    assert status["tiers"][0]["page_states"]["ready"] == found, "a page was stored twice"
    for caller in callers:
        caller.quiet()


def test_a_copy_after_its_end_is_seen() -> None:
    """The check that the test above relies on."""
    scene = SimpleNamespace(tensor=torch.full((2 * CALLERS, 1, TOKENS, NUMBERS), FREE))
    caller = Caller(scene, 3)  # type: ignore[arg-type]
    caller.quiet()
    for page, name in ((caller.target, "loads into"), (caller.page, "computes")):
        page[0, 0, 0] = 7.0
        with pytest.raises(AssertionError, match=name):
            caller.quiet()
        page.fill_(FREE)
