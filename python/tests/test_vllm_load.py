"""A real vLLM under a mixed load: prompts that share, branch and grow, preemptions, aborts, evictions, a disk, kills.

The device has so few pages that vLLM preempts, host memory so few that it evicts (47, of about 100 that the first 48
requests fill), and each tier is used. ``--full`` runs 400 requests in each test; otherwise the first of them.
"""

import random
import threading
import time
from collections.abc import Iterator

import pytest
from daemon import Daemon
from engine import Engine, config
from mixed_load import COUNT, LIMIT_S, changes, leaks_nothing, run, serves_from_every_tier

#: Longest time in which no request of an engine may go on: the deadline of a load that no worker ends, the fence behind
#: it, and 2 s.
PAUSE_MAX_S = 2.0 + 12.0 + 2.0
#: Time between two kills.
KILL_EVERY_S = (2.0, 5.0)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("load")
    daemon = Daemon(folder / "s", g2="6MiB", g3="48MiB", g3_dir=folder / "disk", ratio=4)
    daemon.start()
    try:
        yield daemon
    finally:
        daemon.kill()


@pytest.fixture(scope="module")
def engine(daemon: Daemon) -> Iterator[Engine]:
    engine = Engine(config(daemon.socket_dir, **changes()))
    try:
        daemon.pid()
        yield engine
    finally:
        engine.end()


@pytest.fixture(scope="module")
def alone() -> Iterator[Engine]:
    """An engine without kvferry."""
    engine = Engine(config(None, **changes()))
    try:
        yield engine
    finally:
        engine.end()


def test_a_mixed_load_is_served_from_every_tier_and_leaks_nothing(engine: Engine, daemon: Daemon) -> None:
    serves_from_every_tier(engine, daemon)


def test_answers_are_those_of_an_engine_without_kvferry(engine: Engine, alone: Engine, daemon: Daemon) -> None:
    """One request at a time: the arithmetic of a batch depends on its size."""
    before = engine.external_hits()
    ours, theirs = (run(one, at_a_time=1) for one in (engine, alone))
    assert engine.external_hits() > before
    assert ours["answers"] == theirs["answers"]
    leaks_nothing(engine, daemon, ours)


def test_kills_of_every_process_stop_no_engine(engine: Engine, daemon: Daemon) -> None:
    over = threading.Event()
    kills: list[str] = []

    def kill() -> None:
        draw = random.Random(7)
        while not over.wait(draw.uniform(*KILL_EVERY_S)):
            whom = draw.choice(["leader", "worker", "up"])
            if whom == "up":
                daemon.kill()
                daemon.start()
            elif pids := daemon.children(whom):
                daemon.killed(pids[0])
            kills.append(whom)

    killer = threading.Thread(target=kill)
    killer.start()
    rounds = []
    try:
        # At least one kill of each.
        until = time.monotonic() + LIMIT_S
        while not rounds or (set(kills) != {"leader", "worker", "up"} and time.monotonic() < until):
            rounds.append(run(engine, seed=10 + len(rounds), aborts=0.1))
    finally:
        over.set()
        killer.join()
    assert set(kills) == {"leader", "worker", "up"}
    for done in rounds:
        assert len(done["answers"]) + len(done["aborted"]) == COUNT
        assert done["held"] == 0
        assert done["longest_step_s"] < PAUSE_MAX_S
        assert done["longest_pause_s"] < PAUSE_MAX_S, "no request went on"
    # Without a restart of the engine, pages are found again.
    daemon.pid()
    before = engine.external_hits()
    done = run(engine, seed=99)
    assert engine.external_hits() > before
    leaks_nothing(engine, daemon, done)
