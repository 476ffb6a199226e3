"""Random schedules of vLLM's own scheduler with the connector. :mod:`schedules` describes the engine and its checks.

Each seed draws an engine and runs it: hybrid block tables, a pool so small that requests are preempted, several batches
in flight, MultiConnector, resets, aborts, and a leader that fails in every way that docs/wire.md allows.
``KVFERRY_VLLM_FULL=1`` runs 20 times as many seeds, ``KVFERRY_SCHEDULE=SEED`` a single one.
"""

import collections
import os

import pytest
from schedules import Schedule
from shapes import SHAPES

#: Seeds of each shape, and steps of each seed: 10,500 steps together.
SEEDS, STEPS = 6, 250
#: Seen at least so often in the schedules of a shape.
LEAST = {"hits": 15, "load done": 10, "store done": 100, "preempted": 5, "aborted": 30, "reset": 2, "new leader": 2}


def run(seed: int, monkeypatch: pytest.MonkeyPatch) -> collections.Counter[str]:
    with monkeypatch.context() as patches:
        schedule = Schedule(seed, patches)
        try:
            schedule.run(STEPS)
        except BaseException as error:
            error.add_note(f"seed {seed}, in step {schedule.steps}: KVFERRY_SCHEDULE={seed} runs it alone")
            error.add_note(f"{schedule}")
            raise
        return schedule.counts


@pytest.mark.parametrize("shape", SHAPES)
def test_pages_hold_what_their_hashes_say_and_are_all_returned(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = SHAPES.index(shape)
    if "KVFERRY_SCHEDULE" in os.environ:
        seeds = [int(os.environ["KVFERRY_SCHEDULE"])]
        seeds = [seed for seed in seeds if seed % len(SHAPES) == first]
    else:
        count = SEEDS * (20 if os.environ.get("KVFERRY_VLLM_FULL") else 1)
        seeds = [first + len(SHAPES) * number for number in range(count)]
    counts: collections.Counter[str] = collections.Counter()
    for seed in seeds:
        counts += run(seed, monkeypatch)
    print(f"{shape}: {dict(sorted(counts.items()))}")
    if len(seeds) >= SEEDS:
        few = {what: counts[what] for what, least in LEAST.items() if counts[what] < least}
        assert not few, f"too little happens: {few}"


def test_a_seed_determines_a_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(3, monkeypatch) == run(3, monkeypatch)
