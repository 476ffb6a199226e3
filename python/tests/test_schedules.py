"""Random schedules of vLLM's own scheduler with the connector. :mod:`schedules` describes the engine and its checks.

Each seed draws an engine and runs it: hybrid block tables, a pool so small that requests are preempted, several batches
in flight, MultiConnector, resets, aborts, and a leader that fails in every way that docs/wire.md allows.
``KVFERRY_VLLM_FULL=1`` runs 20 times as many seeds, ``KVFERRY_SCHEDULE=SEED`` a single one.

Mistakes that were planted in ``kvferry``, one at a time, and what the default seeds reported:

===================================================  ==================================================
a store names a page before it is full               other tokens in a page that is stored
a store does not hold its pages                      a reference that nothing explains
a load names pages that the device has               a load that is no hit of its lookup
states are found by their position in the table      another state in a page that is stored
pages are freed after a failure without ``over``     a page is free and read
a window is one page short; a chunk is not loaded    a load that is no hit of its lookup
a reset of the pool does not spoil running loads     a request reads pages of older weights
a reset of the pool does not spoil ended loads       a request reads pages of older weights
``load.after`` is left out                           a step in flight overwrites what was loaded
zeros of the same step are not awaited               a request reads zeros
an answer of an older leader is used                 a slot that the leader does not know
a store goes to a slot of an older leader            a slot that the leader does not know
one rank confirms the end of a copy for all          a page is free and read
a part of a load counts as all of it                 other tokens in a page that a request reads
a reset keeps the namespace                          older weights in a page that is stored
pages on the device from before a reset are stored   older weights in a page that is stored
``finish`` is left out                               slots that stay open
===================================================  ==================================================

Not found, since other rules have the same effect: to use a load that was requested before a reset of the connector
alone (vLLM then keeps pages of older weights, too); not to skip pages that were full before a reset (none of their
request's pages are stored any more); to abandon no copy when the connection is lost (deadlines end them later).
"""

import collections
import os
import tempfile
from pathlib import Path

import pytest
from schedules import Schedule
from shapes import SHAPES

#: Seeds of each shape, and steps of each seed: 15,750 steps together.
SEEDS, STEPS = 9, 250
#: Seen at least so often in the schedules of a shape.
LEAST = {"hits": 15, "load done": 10, "store done": 100, "preempted": 5, "aborted": 30, "reset": 2, "new leader": 1}
LEAST |= {"pages verified": 30, "pages found wrong": 3}


def run(seed: int, monkeypatch: pytest.MonkeyPatch) -> collections.Counter[str]:
    with monkeypatch.context() as patches, tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        schedule = Schedule(seed, patches, directory)
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
