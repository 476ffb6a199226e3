"""Tests of engines of every kind with kvferry: starts and ends, several ranks, unsupported models."""

import itertools
import os
import re
import signal

import make_model
import pytest
from daemon import Daemon, eventually, running
from engine import Engine, Server, config, said, settled, shared_memory, tokens
from hybrid_models import HYBRIDS
from test_vllm import BASE, PROMPTS, json_like, loadable

FULL = bool(os.environ.get("KVFERRY_VLLM_FULL"))
#: Longest delay of a start without kvferry: less than any wait for kvferry.
DELAY_MAX_S = 15.0
#: Each engine, dtype and number of ranks at least once; with --full every combination.
SOME = [("processes", "bfloat16", 2)]
ALL = list(itertools.product(["in-process", "processes", "serve"], ["float32", "bfloat16"], [1, 2]))


def make(kind: str, wanted: dict) -> Engine | Server:
    return Server(wanted) if kind == "serve" else Engine(wanted, in_process=kind == "in-process")


@pytest.mark.parametrize(("kind", "dtype", "ranks"), ALL if FULL else SOME)
def test_warm_results_equal_cold_results(kind: str, dtype: str, ranks: int) -> None:
    with running(ranks=ranks) as daemon:
        engine = make(kind, config(daemon.socket_dir, dtype=dtype, tensor_parallel_size=ranks))
        try:
            daemon.wait_ready()
            cold = [engine.generate(PROMPTS[0]), engine.generate(PROMPTS[2])]
            eventually("copies are over", lambda: not daemon.status()["copies_under_way"])
            engine.reset()
            hits = engine.external_hits()
            warm = [engine.generate(PROMPTS[0]), engine.generate(PROMPTS[2])]
            assert [said(answers) for answers in warm] == [said(answers) for answers in cold]
            found = engine.external_hits() - hits
            assert found > loadable([PROMPTS[0]])
            check_statistics(engine, ranks)
            print(f"{kind}, {dtype}, {ranks} ranks: {found} tokens loaded, bit for bit the same")
            daemon.poison()
            engine.reset()
            assert said(engine.generate(PROMPTS[0])) == said(cold[0])
            for rank in range(ranks):
                found_wrong = re.search(
                    rf"rank {rank}: \d+ of the pages .* do not hold what was stored", engine.logged()
                )
                assert found_wrong, "no bytes of kvferry were used"
        finally:
            engine.end(signal.SIGTERM)
        daemon.wait_idle()


def check_statistics(engine: Engine | Server, ranks: int) -> None:
    """vLLM's metrics have what the connector counted in the scheduler and in each rank."""
    found = engine.statistics()
    assert found["hit_tokens/host"] == engine.external_hits() > 0
    assert found["hit_tokens/disk"] == found["pages_recomputed"] == found["failed"] == 0
    assert found["loads/whole"] == found["load_time_seconds"] == found["load_copy_time_seconds"] > 0
    assert found["load_bytes"] > 0
    assert found["stores/done"] == found["store_time_seconds"] > 0
    assert found["store_pages/stored"] > 0
    assert found["connected"] == 1
    assert [found[f"rank_registered/{rank}"] for rank in range(ranks)] == [1] * ranks
    assert found["hook_time_seconds/build_connector_meta"] > 0
    assert found["hook_time_seconds/wait_for_save"] > 0
    assert not [name for name in found if name.startswith("refusals")]


def test_an_engine_that_started_before_kvferry_uses_it_later() -> None:
    """An engine starts without kvferry, uses it when it appears, and ends; its successor finds the stored pages."""
    plain = Engine(config(None))
    expected = said(plain.generate(*PROMPTS))
    plain.end()
    before = shared_memory()
    with running(ranks=1) as daemon:
        daemon.stop()
        engine = Engine(config(daemon.socket_dir))
        assert sum(engine.started["connector_s"]) < DELAY_MAX_S
        assert said(engine.generate(*PROMPTS)) == expected
        warning = "requests run without the cache"
        eventually("the warning is logged", lambda: warning in engine.logged())
        daemon.start()
        daemon.wait_ready()

        def stored() -> bool:
            engine.reset()
            assert said(engine.generate(BASE)) == expected[:1]
            return daemon.counter("published_pages") >= loadable([BASE]) // 32

        eventually("pages are stored", stored)
        assert engine.logged().count(warning) == 1
        assert shared_memory() == before, "the memory has no name while it is used"
        engine.end(signal.SIGTERM)
        daemon.wait_idle()
        forgotten(daemon)

        engine = Engine(config(daemon.socket_dir))
        daemon.wait_ready()
        assert said(engine.generate(BASE)) == expected[:1]
        assert engine.external_hits() == loadable([BASE])
        daemon.kill()
        # kvferry has ended; the results are the same.
        engine.request("reset")
        assert said(engine.generate(*PROMPTS)) == expected
        engine.end(signal.SIGINT)
        assert shared_memory() == before


def forgotten(daemon: Daemon) -> None:
    def gone() -> bool:
        return not any(rank["attached"] for rank in daemon.status()["ranks"])

    eventually("the worker has unmapped the memory", gone)


def test_results_are_equal_when_prompts_exceed_the_device() -> None:
    """Prompts exceed the device's pages, with overlapping steps: they are preempted, resumed and loaded again.

    With --full more prompts, and longer answers.
    """
    pages = 40
    count, more = (6, 120) if FULL else (4, 60)
    prompts = [tokens(400, seed=20 + number) for number in range(count)]
    with running(ranks=1) as daemon:
        wanted = config(daemon.socket_dir, num_gpu_blocks_override=pages, max_model_len=1024, async_scheduling=True)
        engine = Engine(wanted, in_process=False)
        try:
            daemon.wait_ready()
            alone = [said(engine.generate(prompt, max_tokens=more)) for prompt in prompts]
            settled(engine, daemon)
            engine.reset()
            together = [[each] for each in said(engine.generate(*prompts, max_tokens=more))]
            assert together == alone
            engine.reset(connector=True)
            together = [[each] for each in said(engine.generate(*prompts, max_tokens=more))]
            assert together == alone
            assert engine.request("metrics").get("vllm:num_preemptions", 0) > 0
        finally:
            engine.end()
        daemon.wait_idle()


def test_windows_with_the_pages_of_full_attention_are_served() -> None:
    """The same model with vLLM configured to give every layer the same pages: one group."""
    wanted = {"model": str(make_model.gemma()), "load_format": "dummy", "max_model_len": 1024}
    with running(ranks=1) as daemon:
        engine = Engine(config(daemon.socket_dir, disable_hybrid_kv_cache_manager=True, **wanted))
        try:
            daemon.wait_ready()
            cold = said(engine.generate(BASE))
            settled(engine, daemon)
            engine.reset()
            assert said(engine.generate(BASE)) == cold
            assert engine.external_hits() > 0
        finally:
            engine.end()


@pytest.mark.parametrize("name", ["gemma3", "lfm2"])
def test_every_group_is_loaded_on_each_of_two_ranks(name: str) -> None:
    """Windows and full attention, states and full attention: with heads, or channels, divided between the ranks."""
    model = HYBRIDS[name]
    with running(ranks=2) as daemon:
        wanted = {"model": str(model.make()), "max_model_len": 1024, "tensor_parallel_size": 2, **model.exact}
        extra = {"store_pages_percent": 100}
        engine = Engine(config(daemon.socket_dir, extra=extra, **wanted), in_process=False)
        try:
            daemon.wait_ready()
            cold = said(engine.generate(BASE))
            settled(engine, daemon)
            engine.reset()
            assert said(engine.generate(BASE)) == cold
            assert engine.external_hits() == (len(BASE) - 1) // model.chunk_tokens * model.chunk_tokens
            assert not found_wrong(engine)
            daemon.poison()
            engine.reset()
            assert said(engine.generate(BASE)) == cold
            assert found_wrong(engine) == set(itertools.product("01", "01"))
        finally:
            engine.end()
        daemon.wait_idle()


def found_wrong(engine: Engine) -> set[tuple[str, ...]]:
    """Returns ranks and groups whose loaded pages did not hold what was stored."""
    wrong = r"rank (\d+): \d+ of the pages \d+ to \d+ of group (\d+) of request \S+ do not hold what was stored"
    return set(re.findall(wrong, engine.logged()))


def test_json_keeps_every_bit() -> None:
    assert json_like([([1], [[(2, 0.1)]])]) == [([1], [[[2, 0.1]]])]
