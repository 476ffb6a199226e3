"""Engines that take turns on one leader: other page sizes, other weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import make_model
from daemon import Daemon, eventually, running
from engine import Engine, config, said, settled, tokens

#: All of them fill half of host memory.
PROMPTS = [tokens(270, seed=100 + number) for number in range(8)]
#: Bytes of a token of the tiny model: 4 layers of 4 heads, keys and values of 32 floats.
TOKEN_BYTES = 4 * 4 * 2 * 32 * 4


@contextmanager
def turn(daemon: Daemon, **changes: Any) -> Iterator[Engine]:
    """An engine that has the leader for itself, and is forgotten behind that."""
    engine = Engine(config(daemon.socket_dir, **changes))
    try:
        daemon.wait_ready()
        yield engine
        settled(engine, daemon)
    finally:
        engine.end()
    daemon.wait_idle()
    eventually("the rank is gone", lambda: not any(rank["attached"] for rank in daemon.status()["ranks"]))


def test_other_weights_of_the_same_shape_are_not_found() -> None:
    with running(ranks=1) as daemon:
        with turn(daemon, model=str(make_model.llama())) as engine:
            first = said(engine.generate(*PROMPTS[:2]))
        with turn(daemon, model=str(make_model.llama(1))) as engine:
            answers = said(engine.generate(*PROMPTS[:2]))
            assert engine.external_hits() == 0
            assert answers != first
            settled(engine, daemon)
            engine.reset()
            assert said(engine.generate(*PROMPTS[:2])) == answers
            assert engine.external_hits() > 0, "its own are found"
