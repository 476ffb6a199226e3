"""Tests of the contract suite: a real kvferry and a reference engine pass, planted mistakes are found by name."""

import contextlib
import io
import json
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from contract_engine import ToyEngine, tokens
from daemon import TIMEOUT_S, eventually, running

from kvferry import wire
from kvferry.contract.__main__ import CANNOT_RUN, FAILED, PASSED, main
from kvferry.contract.hash_checks import Prompt
from kvferry.contract.leader_checks import LeaderChecks, Target
from kvferry.contract.live import Unavailable
from kvferry.contract.rules import Outcome, Report
from kvferry.contract.script import DEFAULT, Event, Script
from kvferry.contract.scripted import Driver, ScriptedKvferry
from kvferry.contract.server import Settings

SETTINGS = Settings(heartbeat_ms=200)
ABCD = tokens("a", "b", "c", "d")
#: Prompts that share, branch and repeat pages: enough for every event of the default script.
PROMPTS = [
    ("abcd", ABCD),
    ("abef", tokens("a", "b", "e", "f")),
    ("xbcd", tokens("x", "b", "c", "d")),
    ("abcd", ABCD),
    ("abcdg", tokens("a", "b", "c", "d", "g")),
    ("h", tokens("h", "i", "j")),
    ("abefk", tokens("a", "b", "e", "f", "k")),
    ("l", tokens("l", "m")),
    ("lo", tokens("l", "m", "o")),
    ("xbcd", tokens("x", "b", "c", "d")),
    ("p", tokens("p", "q")),
    ("pr", tokens("p", "q", "r")),
]


class Run:
    """A scripted kvferry, and the report after it."""

    def __init__(self, socket_dir: Path, kvferry: ScriptedKvferry):
        self.socket_dir = socket_dir
        self.kvferry = kvferry
        self.report: Report | None = None

    def prompt(self, engine: ToyEngine, name: str, prompt: list[int], salt: str = "") -> int:
        self.kvferry.begin(Prompt(name, f"{engine.model} {salt}", tuple(prompt)))
        try:
            return engine.run(prompt, salt)
        finally:
            self.kvferry.end()

    @property
    def broken(self) -> dict[str, list[str]]:
        assert self.report is not None
        return {name: [each.text for each in self.report.breaks(name)] for name in self.report.named(Outcome.BROKEN)}


@contextlib.contextmanager
def scripted(script: Script | None = None, settings: Settings = SETTINGS, **more: object) -> Iterator[Run]:
    with tempfile.TemporaryDirectory(prefix="kvferry-") as directory:
        socket_dir = Path(directory) / "s"
        kvferry = ScriptedKvferry(socket_dir, settings, Script(()) if script is None else script, **more)
        kvferry.start()
        run = Run(socket_dir, kvferry)
        try:
            yield run
        finally:
            run.report = kvferry.stop()
            print(run.report.as_text())


# A running kvferry.


def test_a_real_kvferry_keeps_every_rule() -> None:
    with running(ranks=1, g2="64MiB") as daemon:
        report = LeaderChecks(Target(daemon.socket_dir)).run()
        print(report.as_text())
        assert report.named(Outcome.BROKEN) == []
        assert report.named(Outcome.NOT_EXERCISED) == []
        daemon.wait_idle()


LIES = {
    "": (),
    "never_over": ("load-pinned", "hashes-of-a-slot", "finish-closes", "deadline-of-a-store"),
    "keeps_slots": ("finish-closes",),
    "reads_early": ("store-waits", "load-after"),
    "wrong_bytes": ("load-bytes",),
    "ignores_holds": ("held-pages",),
    "forgets_answers": ("retry-answer", "retry-reconnect"),
    "answers_twice": ("one-answer",),
    "closes_unknown": ("unknown-request",),
    "one_page_less": ("store-found",),
}


@pytest.mark.parametrize("lie", LIES)
def test_the_checks_of_a_leader_find_its_mistakes(lie: str) -> None:
    with tempfile.TemporaryDirectory(prefix="kvferry-") as directory:
        kvferry = ScriptedKvferry(Path(directory) / "s", SETTINGS, Script(()), lies=frozenset([lie]) - {""})
        kvferry.start()
        report = LeaderChecks(Target(Path(directory) / "s")).run()
        kvferry.stop()
        print(report.as_text())
        broken = report.named(Outcome.BROKEN)
        assert set(LIES[lie]) <= set(broken)
        assert bool(broken) == bool(lie)


# A connector.


def test_a_correct_engine_keeps_every_rule() -> None:
    with scripted(Script()) as run:
        engine = ToyEngine(run.socket_dir)
        loaded = [run.prompt(engine, name, prompt) for name, prompt in PROMPTS]
        run.prompt(engine, "salted", ABCD, "salt")
        assert sum(loaded) > 10, loaded
        time.sleep(4 * SETTINGS.heartbeat_ms / 1000)
        engine.close()
    assert run.report is not None
    assert run.broken == {}
    assert not any("not played" in note for note in run.report.notes), run.report.notes
    not_seen = {"credits", "load-after-lower", "written-again"}
    assert set(run.report.named(Outcome.NOT_EXERCISED)) <= not_seen
