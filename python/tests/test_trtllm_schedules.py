"""Random schedules of the connector for TensorRT-LLM: :mod:`trtllm_executor`, a real leader and real workers.

Each seed draws requests that share prompts, salts, adapters, aborts, evictions of the device, refused and shortened
requests, and processes of kvferry that are killed or stopped at random times. Every forward pass compares what it
reads, and every load is compared at its end. ``KVFERRY_VLLM_FULL=1`` runs 1,000 seeds, ``KVFERRY_SCHEDULE=SEED`` a
single one, with an engine and a kvferry of its own.

:mod:`test_trtllm_planted` lists mistakes that were planted in ``kvferry.trtllm``.
"""

import collections
import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trtllm_stubs
from daemon import Daemon, eventually, running
from signals import stop
from trtllm_executor import BLOCK, VOCABULARY, Executor
from trtllm_faults import Flaky, between
from trtllm_stubs import NEW, OLD

from kvferry.admin import AdminClient
from kvferry.client import Failure

#: Seeds of each kind of engine in one run, and in all.
SEEDS, SEEDS_FULL = 40, 333
#: Prompts that requests begin with.
PROMPTS = 4
#: Schedules of one engine, one after another.
TOGETHER = 20
KINDS = [(NEW, 1), (NEW, 2), (OLD, 2)]
#: Seen at least so often in the schedules of a kind, for each 40 of them.
LEAST = {"requests": 150, "loaded blocks": 100, "aborted": 10, "held": 10, "refused": 20, "shortened": 3}
LEAST |= {"while loading": 2, "worker killed": 2, "leader killed": 1, "worker stopped": 2, "reset": 1}
#: Longest time of a schedule.
REST_S = 60.0


@contextlib.contextmanager
def engine(daemon: Daemon, connector: Any, model: Path, ranks: int, seed: int) -> Iterator[tuple[Executor, Flaky]]:
    draw = random.Random(seed)
    executor = Executor(
        connector,
        str(model),
        ranks=ranks,
        seed=seed,
        blocks=draw.choice((24, 40, 80)),
        chunk=draw.choice((3, 8, 64)),
        partial=draw.choice((0.0, 0.3)),
        forgets=draw.choice((0.1, 0.5)),
        overlap=draw.random() < 0.5,
    )
    try:
        eventually("the ranks are registered", lambda: executor.registered)
        daemon.wait_ready()
        yield executor, between(executor)
    finally:
        executor.close()


def known_prompt(number: int) -> list[int]:
    draw = random.Random(f"prompt {number}")
    return [draw.randrange(VOCABULARY) for _ in range(draw.randint(BLOCK, 10 * BLOCK))]


class Schedule:
    """One schedule, drawn from a seed, on an engine that may have run others before."""

    def __init__(self, seed: int, executor: Executor, flaky: Flaky, daemon: Daemon):
        self.executor, self.flaky, self.daemon = executor, flaky, daemon
        self.draw = executor.draw = flaky._draw = random.Random(seed)
        self.counts: collections.Counter[str] = collections.Counter()
        self.stopped: list[int] = []
        flaky.loads = self.draw.choice((0.0, 0.2, 0.5))
        flaky.stores = self.draw.choice((0.0, 0.0, 0.3))
        # Most schedules kill nothing: a process that starts again takes a second.
        self.kills = self.draw.choice(("", "", "", "", "", "worker", "leader", "stop", "reset", "worker"))

    def run(self) -> None:
        executor, draw = self.executor, self.draw
        # Prompts are shared with other schedules, whose pages kvferry may still have.
        shared = [known_prompt(draw.randrange(PROMPTS)) for _ in range(3)]
        begun, loaded = len(executor.finished), executor.calls["loaded"]
        refused, shortened = self.flaky.refused, self.flaky.shortened
        left = draw.randint(6, 14)
        kill_at, disturbed = draw.randint(5, 30), False
        for turn in range(draw.randint(40, 80)):
            if left and draw.random() < 0.4:
                left -= 1
                self._add(draw.choice(shared))
            if draw.random() < 0.3:
                executor.evict(draw.randint(1, 80))
            if draw.random() < 0.04 and executor.requests:
                executor.abort(draw.choice(executor.requests))
                self.counts["aborted"] += 1
            loads = any(each.state == "loading" for each in executor.requests)
            # If possible while copies run. A reset would remove pages that were promised.
            fits = not loads if self.kills == "reset" else loads or executor.held or turn > kill_at + 15
            if not disturbed and turn >= kill_at and fits:
                disturbed = True
                self._disturb()
                self.counts["while loading"] += loads
            executor.iterate()
            self.counts["held"] += bool(executor.held)
            if draw.random() < 0.2:
                time.sleep(draw.choice((0.0, 0.001, 0.005)))
        self._go_on()
        self.flaky.loads = self.flaky.stores = 0.0
        executor.rest(REST_S)
        over = executor.finished[begun:]
        self.counts["requests"] += len(over)
        self.counts["loads"] += executor.calls["loaded"] - loaded
        self.counts["loaded blocks"] += sum(each.matched // BLOCK for each in over)
        self.counts["refused"] += self.flaky.refused - refused
        self.counts["shortened"] += self.flaky.shortened - shortened
        for each in over:
            assert each.calls["match"] == each.calls["alloc"] == 1
        if self.kills:
            eventually("the ranks are registered", lambda: executor.registered)
            self.daemon.wait_ready()

    def _add(self, known: list[int]) -> None:
        draw = self.draw
        tokens = known[: draw.randint(1, len(known))]
        if draw.random() < 0.5:
            tokens = tokens + [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 5))]
        other: dict[str, Any] = {}
        if draw.random() < 0.2:
            other["cache_salt_id"] = draw.choice((1, 2))
        if draw.random() < 0.15:
            other["lora_task_id"] = draw.choice((1, 2))
        if draw.random() < 0.05:
            other["multimodal_hashes"] = [[draw.randrange(3)]]
        self.executor.add(tokens, draw.randint(1, 10), **other)

    def _disturb(self) -> None:
        daemon = self.daemon
        match self.kills:
            case "worker":
                daemon.killed(self.draw.choice(daemon.workers))
            case "leader":
                daemon.killed(daemon.leader)
            case "stop":
                self.stopped = [self.draw.choice(daemon.workers)]
                stop(self.stopped[0])
                self.counts["worker stopped"] += 1
                return
            case "reset":
                with AdminClient(daemon.socket_dir / "leader") as admin, contextlib.suppress(Failure):
                    admin.reset_all()
                    self.counts["reset"] += 1
                return
            case _:
                return
        self.counts[f"{self.kills} killed"] += 1

    def _go_on(self) -> None:
        for pid in self.stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self.stopped = []


def run(kind: tuple[str, int], seeds: list[int], monkeypatch: pytest.MonkeyPatch, model: Path) -> collections.Counter:
    path, ranks = kind
    counts: collections.Counter[str] = collections.Counter()
    first = seeds[0]
    with (
        trtllm_stubs.installed(trtllm_stubs.interface(path)),
        running(ranks=ranks, g2="32MiB") as daemon,
        monkeypatch.context() as patches,
    ):
        draw = random.Random(first)
        for name, value in {
            "SOCKET_DIR": daemon.socket_dir,
            "LOOKUP_BUDGET_MS": 200,
            "STORE_HOLD_MS": draw.choice((30, 100)),
        }.items():
            patches.setenv(f"KVFERRY_TRTLLM_{name}", str(value))
        with engine(daemon, trtllm_stubs.connector(), model, ranks, first) as (executor, flaky):
            for seed in seeds:
                schedule = Schedule(seed, executor, flaky, daemon)
                try:
                    schedule.run()
                except BaseException as error:
                    error.add_note(f"{ranks} ranks, seed {seed} after {first}: KVFERRY_SCHEDULE={seed} runs it alone")
                    raise
                finally:
                    schedule._go_on()
                counts += schedule.counts
            # A batch, so that the last ends are known to all ranks.
            executor.complete([1])
            executor.rest()
            eventually("the ranks are registered", lambda: executor.registered)

            def is_idle() -> bool:
                # An engine that iterates sends the ends of its requests again, where they were lost.
                executor.iterate()
                status = daemon.status()
                return not (status["pins"] or status["copies_under_way"] or status["slots"])

            eventually("nothing is held", is_idle)
            assert not executor.scheduler._side._tracked
            for rank in executor.ranks:
                assert not rank.worker._saving
                assert not rank.worker._loading
                assert not rank.worker._abandoned
                assert not rank.worker._given_back
                assert not rank.worker._stores
                assert not rank.worker._of
    return counts


@pytest.mark.parametrize("kind", KINDS, ids=["1 rank", "2 ranks", "old path"])
def test_every_block_that_is_read_is_that_of_its_tokens(
    kind: tuple[str, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    number = KINDS.index(kind)
    full = bool(os.environ.get("KVFERRY_VLLM_FULL"))
    seeds = [number + len(KINDS) * each for each in range(SEEDS_FULL + (number == 0) if full else SEEDS)]
    if "KVFERRY_SCHEDULE" in os.environ:
        seeds = [seed for seed in [int(os.environ["KVFERRY_SCHEDULE"])] if seed % len(KINDS) == number]
    counts: collections.Counter[str] = collections.Counter()
    for at in range(0, len(seeds), TOGETHER):
        counts += run(kind, seeds[at : at + TOGETHER], monkeypatch, tmp_path)
    print(f"{kind}: {len(seeds)} schedules, {dict(sorted(counts.items()))}")
    if len(seeds) >= SEEDS:
        few = {what: counts[what] for what, least in LEAST.items() if counts[what] < least * (len(seeds) // SEEDS)}
        assert not few, f"too little happens: {few}"
