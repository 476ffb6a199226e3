"""vLLM and SGLang on one host: beside each other on two leaders, and one after the other on one leader.

Both engines get the same prompts, and models of the same shape with other weights: a page of the other engine would
change an answer. Long form only, because SGLang takes a minute to start.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import make_model
import pytest
from daemon import Daemon, eventually, running
from engine import PAGE_TOKENS, Answer, Engine, config, said, tokens
from sglang_engine import SglangEngine, arguments, in_shared_memory, left_behind, why_not
from test_sglang import cached

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
    pytest.mark.skipif(not os.environ.get("KVFERRY_VLLM_FULL"), reason="starts several engines"),
]
#: vLLM gets all prompts, SGLang the last ones.
PROMPTS = [tokens(300, seed=40 + number) for number in range(3)]
OF_SGLANG = PROMPTS[1:]
#: Full pages of a prompt, which are those that are stored: the answers fill no further page.
PAGES = len(PROMPTS[0]) // PAGE_TOKENS
LOADABLE = (len(PROMPTS[0]) - 1) // PAGE_TOKENS * PAGE_TOKENS
MORE_TOKENS = 8


@pytest.fixture(autouse=True)
def nothing_stays_in_shared_memory() -> Iterator[None]:
    before = in_shared_memory()
    yield
    assert not left_behind(in_shared_memory() - before)


class Vllm:
    """A real vLLM, whose loaded pages are compared with what some vLLM has stored."""

    def __init__(self, daemon: Daemon):
        self.engine = Engine(config(daemon.socket_dir))

    def generate(self, *, hit: int) -> list[Any]:
        """Answers each prompt alone; kvferry must bring ``hit`` tokens of each."""
        self.engine.reset()
        before = self.engine.external_hits()
        answers = [said(self.engine.generate(prompt, max_tokens=MORE_TOKENS)) for prompt in PROMPTS]
        assert self.engine.external_hits() - before == hit * len(PROMPTS)
        return answers

    def wrong(self) -> int:
        """Returns how many loaded pages did not hold what was stored."""
        return self.engine.request("verified")[2]


def sglang_answers(engine: SglangEngine, *, hit: int) -> list[Any]:
    """Answers each prompt alone; kvferry must bring ``hit`` tokens of each."""
    engine.flush()
    answers = [engine.generate(prompt, max_tokens=MORE_TOKENS) for prompt in OF_SGLANG]
    assert [cached(each) for each in answers] == [[(0, hit)]] * len(OF_SGLANG)
    return [said(each) for each in answers]


def wait_pages(daemon: Daemon, count: int) -> None:
    """Waits until stores are over, and the leader has exactly so many pages."""

    def settled() -> bool:
        status = daemon.status()
        return not status["copies_under_way"] and status["tiers"][0]["page_states"].get("ready") == count

    eventually(f"the leader has {count} pages", settled)


def wait_sound(daemon: Daemon) -> None:
    """Waits until nothing is held, and the leader's second count finds no contradiction."""
    daemon.wait_idle()
    assert not daemon.status("--check")["contradiction"]


def wait_gone(daemon: Daemon) -> None:
    eventually("the rank is gone", lambda: not any(rank["attached"] for rank in daemon.status()["ranks"]))
    wait_sound(daemon)


def wait_served(daemon: Daemon, engine: SglangEngine) -> None:
    eventually("SGLang's memory is served", lambda: "its worker has the KV memory" in engine.logged())
    daemon.pid()
    daemon.wait_ready()


@contextmanager
def sglang(daemon: Daemon, **changes: Any) -> Iterator[SglangEngine]:
    engine = SglangEngine(arguments(daemon.socket_dir, model_path=str(make_model.llama(1)), **changes))
    try:
        yield engine
    finally:
        engine.end()


@contextmanager
def vllm(daemon: Daemon) -> Iterator[Vllm]:
    engine = Vllm(daemon)
    try:
        daemon.pid()
        daemon.wait_ready()
        yield engine
    finally:
        engine.engine.end(signal.SIGTERM)


def at_once(first: Vllm, second: SglangEngine, prompt: list[int]) -> tuple[list[Answer], list[Answer]]:
    """Both engines answer the prompt at the same time."""
    second.begin(prompt, max_tokens=MORE_TOKENS)
    return first.engine.generate(prompt, max_tokens=MORE_TOKENS), second.result()


def test_two_engines_on_two_leaders_serve_at_the_same_time_and_share_nothing() -> None:
    with running(ranks=1, ratio=1) as ours, running(ranks=1, ratio=1) as theirs, vllm(ours) as first:
        with sglang(theirs) as second:
            wait_served(theirs, second)
            cold = [at_once(first, second, prompt) for prompt in OF_SGLANG]
            assert [cached(answers) for _, answers in cold] == [[(0, 0)]] * len(OF_SGLANG)
            wait_pages(ours, PAGES * len(OF_SGLANG))
            wait_pages(theirs, PAGES * len(OF_SGLANG))
            of_sglang = [said(answers) for _, answers in cold]
            of_vllm = [said(answers) for answers, _ in cold]
            of_vllm.insert(0, said(first.engine.generate(PROMPTS[0], max_tokens=MORE_TOKENS)))
            wait_pages(ours, PAGES * len(PROMPTS))
            wait_pages(theirs, PAGES * len(OF_SGLANG))
            for _ in range(3):
                first.engine.reset()
                second.flush()
                before = first.engine.external_hits()
                warm = [at_once(first, second, prompt) for prompt in OF_SGLANG]
                assert [said(answers) for answers, _ in warm] == of_vllm[1:]
                assert [said(answers) for _, answers in warm] == of_sglang
                assert first.engine.external_hits() - before == LOADABLE * len(OF_SGLANG)
                assert [cached(answers) for _, answers in warm] == [[(0, LOADABLE)]] * len(OF_SGLANG)
            assert first.wrong() == 0

            # Changed bytes of one leader reach its engine, and not the other one.
            theirs.poison()
            assert sglang_answers(second, hit=LOADABLE) != of_sglang
            assert first.generate(hit=LOADABLE) == of_vllm
            assert first.wrong() == 0
            theirs.poison()
            ours.poison()
            assert sglang_answers(second, hit=LOADABLE) == of_sglang
            assert first.generate(hit=LOADABLE) == of_vllm, "the changed pages are computed"
            assert first.wrong() == LOADABLE // PAGE_TOKENS * len(PROMPTS)

            # One kvferry ends: the engine of the other one loads as before.
            ours.kill()
            assert first.generate(hit=0) == of_vllm
            assert sglang_answers(second, hit=LOADABLE) == of_sglang
        wait_gone(theirs)


def test_engines_that_use_one_leader_in_turn_share_nothing() -> None:
    with running(ranks=1, ratio=1) as daemon:
        with vllm(daemon) as first:
            of_vllm = first.generate(hit=0)
            wait_pages(daemon, PAGES * len(PROMPTS))
            # SGLang starts while vLLM has the leader's seat: it computes, and vLLM notices nothing.
            with sglang(daemon) as second:
                for _ in range(2):
                    of_sglang = sglang_answers(second, hit=0)
                assert "its worker has the KV memory" not in second.logged()
                assert first.generate(hit=LOADABLE) == of_vllm
                wait_pages(daemon, PAGES * len(PROMPTS))
                first.engine.end(signal.SIGTERM)
                wait_served(daemon, second)
                # The pages of vLLM are there still, of the same size, and none of them is found.
                wait_pages(daemon, PAGES * len(PROMPTS))
                assert sglang_answers(second, hit=0) == of_sglang
                wait_pages(daemon, PAGES * (len(PROMPTS) + len(OF_SGLANG)))
                assert sglang_answers(second, hit=LOADABLE) == of_sglang
            wait_gone(daemon)
        with vllm(daemon) as first:
            assert first.generate(hit=LOADABLE) == of_vllm, "vLLM finds its own pages again"
            assert first.wrong() == 0
        wait_gone(daemon)

        # Pages of another size: the depot is emptied, and each engine finds its own new pages alone.
        with sglang(daemon, page_size=2 * PAGE_TOKENS) as second:
            wait_served(daemon, second)
            large = [each[0][0] for each in sglang_answers(second, hit=0)]
            assert large == [each[0][0] for each in of_sglang]
            wait_pages(daemon, PAGES // 2 * len(OF_SGLANG))
            again = sglang_answers(second, hit=PAGES // 2 * 2 * PAGE_TOKENS)
            assert [each[0][0] for each in again] == large
        wait_gone(daemon)
        with vllm(daemon) as first:
            assert first.generate(hit=0) == of_vllm
            wait_pages(daemon, PAGES * len(PROMPTS))
            assert first.generate(hit=LOADABLE) == of_vllm
            assert first.wrong() == 0
        wait_gone(daemon)
