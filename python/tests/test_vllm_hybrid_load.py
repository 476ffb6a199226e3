"""A real vLLM under a mixed load, with models that have several groups of pages: see :mod:`mixed_load`.

The short form has windows and states. ``--full`` runs every model, and 400 requests in each load.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from daemon import Daemon
from engine import PAGE_TOKENS, Answer, Engine, config, settled, tokens, wait_steps
from hybrid_models import HYBRIDS
from mixed_load import (
    FULL,
    LOGPROB_MAX,
    changes,
    leaks_nothing,
    says_the_same,
    serves_from_every_tier,
    survives_kills,
)
from mixed_load import run as run_load

NAMES = tuple(HYBRIDS) if FULL else ("gemma3", "lfm2")
#: Requests of a load, and how many of them are also run one at a time.
COUNT, ALONE = (400, 100) if FULL else (32, 32)
#: Pages of a device for all of these prompts.
PROMPTS_PAGES = 2500
#: A request that runs first and grows, until the device has too few pages for a second one with it.
GROWS, GROWS_BY = tokens(400, seed=51), 230
#: The second one, the youngest, which vLLM therefore preempts.
PREEMPTED, PREEMPTED_BY = tokens(230, seed=52), 225


@dataclass
class Run:
    """An engine with one of the models, and one without kvferry."""

    daemon: Daemon
    engine: Engine
    alone: Engine
    #: Largest difference of log-probabilities that comes from rounding.
    logprob_max: float

    def loads(self) -> int:
        return int(self.engine.statistics()["loads/whole"])


@pytest.fixture(scope="module", params=NAMES)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    model, folder = HYBRIDS[request.param], tmp_path_factory.mktemp("load")
    wanted = {**changes(), "model": str(model.make()), **model.arguments}
    daemon = Daemon(folder / "s", g2="2MiB", g3="48MiB", g3_dir=folder / "disk", ratio=4)
    daemon.start()
    engines: list[Engine] = []
    try:
        with pytest.MonkeyPatch.context() as environment, ThreadPoolExecutor() as pool:
            for name, value in model.environment.items():
                environment.setenv(name, value)
            start_both(pool, engines, folder / "s", wanted)
            # Which pages are large depends on the kernels that the processor has.
            if (size := engines[0].request("units")["page"]) > PAGE_TOKENS:
                while engines:
                    engines.pop().end()
                wanted["num_gpu_blocks_override"] = wanted["num_gpu_blocks_override"] * PAGE_TOKENS // size + 2
                start_both(pool, engines, folder / "s", wanted)
        daemon.pid()
        daemon.wait_ready()
        assert len(engines[0].request("groups")) > 1
        yield Run(daemon, *engines, 0.3 if coarse(wanted) else LOGPROB_MAX)
    finally:
        for engine in engines:
            engine.end()
        daemon.kill()


def coarse(wanted: dict[str, Any]) -> bool:
    """Whether the model's numbers are coarser than float32."""
    return wanted.get("dtype") == "bfloat16"


def start_both(pool: ThreadPoolExecutor, engines: list[Engine], socket_dir: Path, wanted: dict[str, Any]) -> None:
    """Starts an engine with kvferry and one without."""
    # Stores hold more of the few pages than they may by default.
    ours = config(socket_dir, extra={"store_pages_percent": 50}, **wanted)
    if coarse(wanted):
        # Parts of a prompt of other lengths round otherwise, so much that tokens change. With pages for all prompts,
        # the engine without kvferry finds what the other one loads, so that both compute the same parts.
        wanted = {**wanted, "num_gpu_blocks_override": PROMPTS_PAGES}
    configs = (ours, config(None, **wanted))
    starts = [pool.submit(Engine, each) for each in configs]
    engines += [start.result() for start in starts if start.exception() is None]
    for start in starts:
        start.result()


def verifies(engine: Engine, before: list[int]) -> None:
    """Checks that loaded pages were compared since ``before``, and that each held what was stored."""
    right, unknown, wrong = (now - then for now, then in zip(engine.request("verified"), before, strict=True))
    assert wrong == 0
    assert right > unknown, "few of the pages could be verified"


def test_a_mixed_load_is_served_from_every_tier_and_leaks_nothing(run: Run) -> None:
    before = run.engine.request("verified")
    serves_from_every_tier(run.engine, run.daemon, count=COUNT)
    verifies(run.engine, before)


def test_answers_are_those_of_an_engine_without_kvferry(run: Run) -> None:
    hits, before = run.engine.external_hits(), run.engine.request("verified")
    with ThreadPoolExecutor() as pool:
        engines = (run.engine, run.alone)
        ours, theirs = pool.map(lambda engine: run_load(engine, count=ALONE, seed=97, at_a_time=1), engines)
    assert run.engine.external_hits() > hits
    says_the_same(ours, theirs, within=run.logprob_max)
    verifies(run.engine, before)
    leaks_nothing(run.engine, run.daemon, ours)


def test_a_request_that_is_preempted_after_its_load_is_loaded_again(run: Run) -> None:
    run.engine.reset(connector=True)
    (cold,) = run.engine.generate(PREEMPTED, max_tokens=PREEMPTED_BY)
    settled(run.engine, run.daemon)
    run.engine.reset()
    add(run.engine, "grows", GROWS, GROWS_BY)
    status_is(run.engine, "grows", "RUNNING")
    loads = run.loads()
    add(run.engine, "preempted", PREEMPTED, PREEMPTED_BY)
    status_is(run.engine, "preempted", "RUNNING")
    assert run.loads() == loads + 1
    status_is(run.engine, "preempted", "PREEMPTED")
    state = wait_steps(run.engine, "it is done", lambda state: "preempted" in state["done"])
    if "chunked_local" not in run.engine.request("groups"):
        # Requests that attend to chunks give pages back as they grow, and the device keeps those of the other one.
        assert run.loads() > loads + 1
    says_the_same(result(state["done"]["preempted"]), result(cold), within=run.logprob_max)


@pytest.mark.skipif(not FULL, reason="kills take long")
def test_kills_of_every_process_stop_no_engine(run: Run) -> None:
    survives_kills(run.engine, run.daemon, count=ALONE)
    assert run.engine.request("verified")[2] == 0, "wrong pages"
    ours, theirs = (run_load(engine, count=32, seed=98, at_a_time=1) for engine in (run.engine, run.alone))
    says_the_same(ours, theirs, within=run.logprob_max)


def result(answer: Answer) -> dict[str, Any]:
    """Returns an answer as the results of a load have it."""
    return {"answers": {"one": answer["tokens"]}, "logprobs": {"one": answer["logprobs"]}}


def add(engine: Engine, name: str, prompt: list[int], max_tokens: int) -> None:
    engine.request("add", id=name, tokens=prompt, max_tokens=max_tokens)


def status_is(engine: Engine, name: str, wanted: str) -> dict[str, Any]:
    """Runs steps until a request has this status. vLLM appends a suffix to the name."""

    def reached(state: dict[str, Any]) -> bool:
        assert name not in state["done"], f"{name} was never {wanted}"
        return any(each.startswith(name) and status == wanted for each, status in state["status"].items())

    return wait_steps(engine, f"{name} is {wanted}", reached)
