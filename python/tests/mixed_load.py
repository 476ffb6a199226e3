"""What tests of a mixed load share: its size, how an engine is sent it, and what must be left of it."""

import os
import random
import threading
import time
from typing import Any

from daemon import Daemon, eventually
from engine import Engine, settled, wait_steps

FULL = bool(os.environ.get("KVFERRY_VLLM_FULL"))
#: Requests of a load.
COUNT = 400 if FULL else 48
#: So few pages of the device that vLLM preempts.
DEVICE_PAGES = 36
AT_A_TIME = 8
#: Deadline of a load's requests, on two busy cores.
LIMIT_S = 15.0 * COUNT
#: Largest difference of log-probabilities that chunks of other lengths make in float32. A page that is not loaded makes
#: larger ones, and seldom another token.
LOGPROB_MAX = 1e-3
#: Answers of which one may have another token, with coarser numbers than float32.
ANSWERS_PER_FLIP = 20
#: Longest time in which no request of an engine may go on: the deadline of a load that no worker ends, the fence behind
#: it, and 2 s.
PAUSE_MAX_S = 2.0 + 12.0 + 2.0
#: Time between two kills.
KILL_EVERY_S = (2.0, 5.0)
#: Processes that are killed, and least kills of each.
KILLED = ("leader", "worker", "up")
KILLS = 2


def changes() -> dict[str, Any]:
    """Arguments of an engine for the load."""
    return {
        "num_gpu_blocks_override": DEVICE_PAGES,
        "max_num_seqs": AT_A_TIME,
        "max_num_batched_tokens": 256,
        "max_model_len": 640,
    }


def run(
    engine: Engine, *, count: int = COUNT, seed: int = 1, at_a_time: int = AT_A_TIME, aborts: float = 0.0
) -> dict[str, Any]:
    return engine.request("load", within_s=LIMIT_S, count=count, seed=seed, at_a_time=at_a_time, aborts=aborts)


def serves_from_every_tier(engine: Engine, daemon: Daemon, *, count: int = COUNT) -> None:
    """Sends the load, and checks that it had preemptions, aborts, evictions and loads from the disk."""
    hits = engine.external_hits()
    done = run(engine, count=count, aborts=0.1)
    assert len(done["answers"]) + len(done["aborted"]) == count
    assert done["aborted"]
    assert done["preemptions"] > 0, "the device has enough pages"
    assert engine.external_hits() > hits
    leaks_nothing(engine, daemon, done)
    status = daemon.status()
    host, disk = (next(tier for tier in status["tiers"] if tier["tier"] == number) for number in (2, 3))
    assert host["evicted_pages"] > 0, "host memory has enough pages"
    assert disk["hit_pages"] > 0, "nothing was loaded from the disk"


def says_the_same(ours: dict[str, Any], theirs: dict[str, Any], *, within: float = LOGPROB_MAX) -> None:
    """Checks tokens, and log-probabilities up to rounding: the arithmetic of a batch depends on its size.

    Compares all of the likeliest tokens that both name, up to the first step with another token: of two tokens that are
    about equally likely, coarse rounding chooses either, and what follows cannot be compared. That may happen in one of
    :data:`ANSWERS_PER_FLIP` answers, and in a single one.
    """
    assert ours["answers"].keys() == theirs["answers"].keys()
    differences, flipped = {}, {}
    for name, answer in ours["answers"].items():
        differences[name] = 0.0
        steps = zip(answer, theirs["answers"][name], ours["logprobs"][name], theirs["logprobs"][name], strict=True)
        for at, (our, their, *likeliest) in enumerate(steps):
            mine, other = map(dict, likeliest)
            both = [abs(mine[token] - other[token]) for token in mine.keys() & other.keys()]
            differences[name] = max(differences[name], *both, abs(mine[our] - other[their]))
            if our != their:
                flipped[name] = {"at": at, our: (mine[our], other.get(our)), their: (mine.get(their), other[their])}
                break
    assert max(differences.values()) < within, (differences, flipped)
    allowed = max(len(differences) // ANSWERS_PER_FLIP, 1) if within > LOGPROB_MAX else 0
    assert len(flipped) <= allowed, flipped


def leaks_nothing(engine: Engine, daemon: Daemon, done: dict[str, Any]) -> None:
    assert done["held"] == 0, "pages of the engine"
    settled(engine, daemon)
    wait_steps(engine, "the connector has no records", lambda _state: not engine.request("records"))
    eventually("nothing is pinned", lambda: not daemon.status()["pins"])
    # The audit compares every page's state with those who hold it.
    assert daemon.status("--check")["contradiction"] == ""


def survives_kills(engine: Engine, daemon: Daemon, *, count: int = COUNT) -> None:
    """Sends loads while leader, worker and ``up`` are killed in turn, and one after that, which must find pages."""
    over = threading.Event()
    kills: list[str] = []

    def kill() -> None:
        draw = random.Random(7)
        left: list[str] = []
        while not over.wait(draw.uniform(*KILL_EVERY_S)):
            left = left or draw.sample(KILLED, len(KILLED))
            if left[-1] == "up":
                daemon.kill()
                daemon.start()
            elif pids := daemon.children(left[-1]):
                daemon.killed(pids[0])
            else:
                # The process is being started.
                continue
            kills.append(left.pop())

    def enough() -> bool:
        return all(kills.count(each) >= KILLS for each in KILLED)

    killer = threading.Thread(target=kill)
    killer.start()
    rounds = []
    try:
        until = time.monotonic() + LIMIT_S
        while not rounds or (not enough() and time.monotonic() < until):
            rounds.append(run(engine, count=count, seed=10 + len(rounds), aborts=0.1))
    finally:
        over.set()
        killer.join()
    assert enough(), kills
    for done in rounds:
        assert len(done["answers"]) + len(done["aborted"]) == count
        assert done["held"] == 0
        assert done["longest_step_s"] < PAUSE_MAX_S
        assert done["longest_pause_s"] < PAUSE_MAX_S, "no request went on"
    # Without a restart of the engine, pages are found again.
    daemon.pid()
    before = engine.external_hits()
    done = run(engine, count=count, seed=99)
    assert engine.external_hits() > before
    leaks_nothing(engine, daemon, done)
