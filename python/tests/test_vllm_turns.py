"""Tests of engines that use one leader in turn: other page sizes, other weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import make_model
from daemon import Daemon, eventually, running
from engine import Engine, config, said, settled, tokens

#: Prompts whose pages fill half of host memory.
PROMPTS = [tokens(270, seed=100 + number) for number in range(8)]
#: Bytes of a token of the tiny model: 4 layers of 4 heads, keys and values of 32 floats.
TOKEN_BYTES = 4 * 4 * 2 * 32 * 4


@contextmanager
def turn(daemon: Daemon, **changes: Any) -> Iterator[Engine]:
    """Runs one engine alone with the leader, and waits afterwards until the leader has forgotten it."""
    engine = Engine(config(daemon.socket_dir, **changes))
    try:
        daemon.wait_ready()
        yield engine
        settled(engine, daemon)
    finally:
        engine.end()
    daemon.wait_idle()
    eventually("the rank is gone", lambda: not any(rank["attached"] for rank in daemon.status()["ranks"]))


def test_pages_of_another_size_in_between_corrupt_no_pages() -> None:
    """The second engine's pages overwrite the memory of the first one's pages: the third engine must not load them.

    There is room beside the first engine's pages, so that none of them has to be evicted. A page number that is free in
    the first engine's pool means, with half the page size, bytes in the middle of the first engine's pages.
    """
    room = 2 * sum(len(prompt) for prompt in PROMPTS) * TOKEN_BYTES
    with running(ranks=1, g2=str(room)) as daemon:
        with turn(daemon, block_size=64) as engine:
            expected = [said(engine.generate(prompt)) for prompt in PROMPTS]
        with turn(daemon, block_size=32) as engine:
            published = daemon.counter("published_pages")
            for prompt in PROMPTS[:4]:
                engine.generate(prompt)
            settled(engine, daemon)
            assert daemon.counter("published_pages") - published > len(PROMPTS), "the second engine stored nothing"
        with turn(daemon, block_size=64) as engine:
            assert [said(engine.generate(prompt)) for prompt in PROMPTS] == expected


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
            assert engine.external_hits() > 0, "the engine's own pages are found"
