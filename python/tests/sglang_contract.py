"""A run of the contract suite with a real SGLang: for ``test_sglang.py``, all of whose tests share one engine."""

import contextlib
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from contract_run import Run, scripted
from daemon import eventually
from engine import said, tokens
from sglang_engine import PAGE_TOKENS, SglangEngine

from kvferry.contract.peers import Settings
from kvferry.contract.rules import Outcome
from kvferry.contract.script import DEFAULT, Event, Script

#: Rules that the linker never exercises, and why.
NEVER = {"one-store-of-a-page": "each slot has one store"}
BASE = tokens(PAGE_TOKENS * 5 + 7, seed=41)


def prompts(number: int) -> list[list[int]]:
    """Prompts of which one has the pages of another one behind a new beginning, and some continue others."""
    base = tokens(PAGE_TOKENS * 5 + 7, seed=100 + number)
    moved = tokens(PAGE_TOKENS, seed=200 + number) + base[PAGE_TOKENS:]
    longer = base[: PAGE_TOKENS * 5] + tokens(PAGE_TOKENS * 3, seed=300 + number)
    return [base, base[: PAGE_TOKENS * 3] + tokens(PAGE_TOKENS * 2 + 5, seed=400 + number), moved, base, longer, moved]


def served(socket_dir: Path) -> bool:
    """Whether some process listens in the directory."""
    for path in socket_dir.glob("*/*.sock"):
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as probe, contextlib.suppress(OSError):
            probe.connect(os.fspath(path))
            return True
    return False


def play(socket_dir: Path, started: Callable[[], SglangEngine]) -> Run:
    """Plays a kvferry in this directory until the engine has exercised every rule. Returns the run with its report."""
    engine = started()
    # What SGLang compiles at its first use keeps the client's thread from running for seconds.
    engine.generate(BASE, max_tokens=1)
    eventually("the processes of an earlier daemon are gone", lambda: not served(socket_dir))
    script = Script([*DEFAULT, Event("finish", 12, "drop")])
    settings = Settings(request_credits=3, heartbeat_ms=2000)
    with scripted(script, settings, socket_dir=socket_dir) as run:
        registered = "registration-proven"
        eventually("the rank is registered", lambda: run.kvferry.report.outcome(registered) is Outcome.KEPT)
        answers: dict[tuple[int, ...], object] = {}

        def rest() -> None:
            """Waits until nothing is stored: a flush of SGLang's cache ends stores that run."""
            eventually("nothing is owed", lambda: not run.kvferry.waits())
            engine.flush()

        def alone(name: str, prompt: list[int], salt: str = "") -> None:
            with run.declared(name, f"salt {salt}", prompt):
                answer = said(engine.generate({"tokens": prompt, "cache_salt": salt} if salt else prompt))
                rest()
            assert answers.setdefault(tuple(prompt), answer) == answer, f"{name} has another result than before"

        def round_(number: int) -> None:
            for at, prompt in enumerate(prompts(number)):
                alone(f"prompt {number}.{at}", prompt)
            engine.generate(*prompts(number))
            rest()

        rest()
        begun = time.monotonic()
        for salt in ("one", "two"):
            alone(f"salted {salt}", BASE, salt)
        rounds = run.rounds(round_, NEVER)
        eventually("nothing is owed", lambda: not run.kvferry.waits())
        print(f"{rounds} rounds, {time.monotonic() - begun:.1f} s")
    return run
