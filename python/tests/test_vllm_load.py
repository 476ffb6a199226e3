"""A real vLLM under a mixed load: prompts that share, branch and grow, preemptions, aborts, evictions, a disk, kills.

The device has so few pages that vLLM preempts, and host memory so few (23, of about 100 that the first 48 requests
fill) that it evicts pages for which later requests ask. The disk alone has those. ``--full`` runs 400 requests in each
test; the short form the first 48 of them, and 32 where requests run one at a time.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from daemon import Daemon
from engine import Engine, config
from mixed_load import (
    COUNT,
    FULL,
    changes,
    leaks_nothing,
    run,
    says_the_same,
    serves_from_every_tier,
    survives_kills,
)

#: Requests that are also run one at a time.
ALONE = COUNT if FULL else 32


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("load")
    daemon = Daemon(folder / "s", g2="3MiB", g3="48MiB", g3_dir=folder / "disk", ratio=4)
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
    before = engine.external_hits()
    with ThreadPoolExecutor() as pool:
        ours, theirs = pool.map(lambda one: run(one, count=ALONE, seed=97, at_a_time=1), (engine, alone))
    assert engine.external_hits() > before
    says_the_same(ours, theirs)
    leaks_nothing(engine, daemon, ours)


def test_kills_of_every_process_stop_no_engine(engine: Engine, daemon: Daemon) -> None:
    survives_kills(engine, daemon)
