"""Tests that a real vLLM computes the same with kvferry as without, with models that have several groups of pages."""

import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from daemon import Daemon, eventually, running
from engine import DEVICE_PAGES, Engine, config, said, settled, tokens
from hybrid_models import HYBRIDS

#: Models of the short form: windows with pages of other sizes, states, and chunks.
SHORT = ("gemma4", "lfm2", "llama4")
NAMES = tuple(HYBRIDS) if os.environ.get("KVFERRY_VLLM_FULL") else SHORT
BASE = tokens(300, seed=1)
#: Prompts that repeat, extend and leave a prefix, and one that has a single full page.
PROMPTS = [BASE, BASE + tokens(77, seed=2), BASE[:160] + tokens(100, seed=3), BASE[:40]]


@dataclass
class Run:
    """An engine with one of the models, its daemon, and its answers without any hit."""

    name: str
    daemon: Daemon
    engine: Engine
    cold: list
    groups: list[str]
    #: Hits end at multiples of so many tokens.
    hit_tokens: int

    def stored(self) -> None:
        """Stores the prompts, and clears the engine's own cache."""
        self.engine.reset(connector=True)
        for prompt in PROMPTS:
            self.engine.generate(prompt)
        settled(self.engine, self.daemon)
        self.engine.reset()

    def hits(self, prompt: list[int]) -> int:
        """Generates, compares with the cold answer, and returns the tokens that were loaded."""
        before = self.engine.external_hits()
        (answer,) = self.engine.generate(prompt)
        assert said([answer]) == [self.cold[PROMPTS.index(prompt)]], (self.name, answer["cached"])
        return self.engine.external_hits() - before

    def longest(self, prompt: list[int]) -> int:
        """The longest possible hit of a prompt."""
        return (len(prompt) - 1) // self.hit_tokens * self.hit_tokens


@pytest.fixture(scope="module", params=NAMES)
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    model = HYBRIDS[request.param]
    with running(ranks=1) as daemon, pytest.MonkeyPatch.context() as environment:
        for name, value in model.environment.items():
            environment.setenv(name, value)
        wanted = {"model": str(model.make()), "max_model_len": 1024, **model.exact}
        extra = {"load_timeout_ms": 2000, "shared_after_reset": True, "store_pages_percent": 100}
        engine = Engine(config(daemon.socket_dir, extra=extra, **wanted))
        try:
            daemon.pid()
            daemon.wait_ready()
            cold = []
            for prompt in PROMPTS:
                engine.reset(connector=True)
                answers = engine.generate(prompt)
                assert answers[0]["cached"] == 0
                cold += said(answers)
            groups = engine.request("groups")
            assert len(groups) > 1, groups
            yield Run(request.param, daemon, engine, cold, groups, engine.request("units")["hit"])
        finally:
            engine.end()


def test_warm_results_equal_cold_results(run: Run) -> None:
    run.stored()
    for prompt in PROMPTS:
        run.engine.reset()
        run.hits(prompt)
    run.engine.reset()
    assert run.hits(BASE) == run.longest(BASE)
    run.engine.reset()
    # The second prompt's own last page was stored by its first answer.
    assert run.hits(PROMPTS[1]) == run.longest(PROMPTS[1])


def test_a_part_on_the_device_is_continued(run: Run) -> None:
    run.stored()
    run.engine.generate(BASE[:130], max_tokens=1)
    assert 0 < run.hits(PROMPTS[1]) < len(PROMPTS[1]) - 130


def test_changed_bytes_in_host_memory_change_the_results(run: Run) -> None:
    run.stored()
    run.daemon.poison()
    run.engine.request("verify", on=False)
    answers = said(run.engine.generate(BASE))
    run.engine.request("verify", on=True)
    assert answers != run.cold[:1], "pages of kvferry were not used"
    run.engine.reset(connector=True)
    run.engine.request("wipe")
    assert run.hits(BASE) == 0


def test_changed_pages_are_found_and_computed(run: Run) -> None:
    run.stored()
    run.daemon.poison()
    before = run.engine.request("verified")
    assert said(run.engine.generate(BASE)) == run.cold[:1]
    assert run.engine.request("verified")[2] > before[2]
    run.engine.reset(connector=True)


def test_changed_bytes_of_each_group_change_the_results(run: Run) -> None:
    for group in range(len(run.groups)):
        run.stored()
        run.engine.request("spoil", group=group)
        answers = said(run.engine.generate(BASE))
        assert run.engine.request("spoiled") > 0
        assert answers != run.cold[:1], f"pages of group {group} were not used"
    run.engine.reset(connector=True)


def test_pages_of_each_group_are_needed_for_a_hit(run: Run) -> None:
    """Every group is left out of all stores in turn."""
    run.engine.reset(connector=True)
    for group, kind in enumerate(run.groups):
        run.engine.request("leave_out", group=group)
        run.stored()
        run.engine.request("leave_out", group=None)
        # A hit that ends with a chunk of 128 tokens needs none of its pages.
        assert run.hits(BASE) == (256 if kind == "chunked_local" else 0), kind
        run.engine.reset(connector=True)


def test_a_load_that_fails_is_computed(run: Run) -> None:
    run.stored()
    run.engine.request("fail_load")
    run.hits(BASE)
    assert "were not loaded and are computed" in run.engine.logged()
    run.engine.reset()
    assert run.hits(BASE) == run.longest(BASE), "the next one is loaded"


def test_nothing_is_left_held(run: Run) -> None:
    run.stored()
    free = DEVICE_PAGES - 1
    eventually("all pages are free", lambda: run.engine.request("step")["free"] == free)
    run.daemon.wait_idle()
