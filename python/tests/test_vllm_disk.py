"""Tests that a real vLLM is served from the disk after a restart of everything, with the same results."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from daemon import Daemon, eventually
from engine import PAGE_TOKENS, Engine, config, said, settled, tokens

from kvferry.admin import AdminClient

BASE = tokens(270, seed=21)
#: Prompts that share, branch and extend prefixes.
PROMPTS = [BASE, BASE[:150] + tokens(90, seed=22), BASE + tokens(140, seed=23), tokens(PAGE_TOKENS * 4, seed=24)]


def loadable(prompt: list[int]) -> int:
    """Returns the number of tokens in full pages, at most all but the last token of the prompt."""
    return (len(prompt) - 1) // PAGE_TOKENS * PAGE_TOKENS


def pages() -> int:
    """Returns the number of different full pages of all prompts."""
    ends = [(prompt, end) for prompt in PROMPTS for end in range(1, len(prompt) // PAGE_TOKENS + 1)]
    return len({tuple(prompt[: end * PAGE_TOKENS]) for prompt, end in ends})


def loads_everything(engine: Engine, cold: list[Any]) -> None:
    """Checks each prompt with an engine that has no page of it, and that computes none that can be loaded."""
    for prompt, expected in zip(PROMPTS, cold, strict=True):
        engine.reset()
        before = engine.external_hits()
        answers = engine.generate(prompt)
        assert said(answers) == [expected]
        assert answers[0]["cached"] == engine.external_hits() - before == loadable(prompt)


@pytest.fixture
def disk(tmp_path: Path) -> dict[str, Any]:
    return {"g3": "256MiB", "g3_dir": tmp_path / "disk"}


def test_results_are_equal_after_a_restart_of_everything(tmp_path: Path, disk: dict[str, Any]) -> None:
    socket_dir = tmp_path / "s"

    def run(work: Callable[[Engine, Daemon], None], end: Callable[[Daemon], None], **settings: Any) -> None:
        daemon = Daemon(socket_dir, **disk, **settings)
        daemon.start()
        try:
            engine = Engine(config(socket_dir, extra={"shared_after_reset": True}))
            try:
                daemon.pid()
                work(engine, daemon)
            finally:
                engine.end()
            end(daemon)
        finally:
            daemon.kill()

    cold: list[Any] = []

    def compute(engine: Engine, daemon: Daemon) -> None:
        for prompt in PROMPTS:
            engine.reset(connector=True)
            cold.extend(said(engine.generate(prompt)))
        engine.reset(connector=True)
        settled(engine, daemon)
        assert said(engine.generate(*PROMPTS)) == cold
        settled(engine, daemon)

    def warm(engine: Engine, daemon: Daemon) -> None:
        eventually("the disk is read", lambda: daemon.counter("recovered_pages") >= pages())
        loads_everything(engine, cold)
        with AdminClient(daemon.socket_dir / "leader", name="test") as admin:
            assert admin.flush() == daemon.flush() >= pages(), "pages of generated tokens come on top"

    # At the end in order, pages that are only in host memory are moved to the disk first.
    run(compute, Daemon.stop)
    run(warm, Daemon.kill)
    # Without host memory, pages come from the disk through a small buffer.
    run(warm, Daemon.stop, g2="0")
