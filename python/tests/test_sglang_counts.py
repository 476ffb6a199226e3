"""Tests of the statistics of the linker for SGLang."""

import logging
import time
from pathlib import Path
from typing import Any

import pytest
from daemon import eventually
from test_sglang_transfers import OneRank, hashes, one_rank, recorded, stopped

from kvferry.sglang import counts as counts_module
from kvferry.sglang import lookups, offloads
from kvferry.sglang.counts import COUNTERS, PREFIX, Counts


def counted(engine: OneRank) -> dict[str, float]:
    """Counts that are not 0, but for times."""
    values = engine.leader.counts._values.items()
    return {f"{name}/{each}": value for (name, each), value in values if value and name != "load_seconds"}


def test_each_lookup_load_and_store_is_counted_once() -> None:
    with one_rank() as (_, engine):
        engine.store("a", [3, 4], 1)
        engine.store("a", [3, 4], 1)
        names = hashes("a", 3)
        for _ in range(3):
            assert engine.find("r", names) == 2
        assert engine.find("missing", hashes("b", 2)) == 0
        assert engine.find("missing", hashes("b", 2)) == 0
        assert engine.transfers.load("r", names[:2], [8, 9])
        assert engine.leader.counts._values["load_seconds", "whole"] > 0
        assert engine.find("dropped", names) == 2
        engine.transfers.reset()
        assert counted(engine) == {
            "lookups/hit": 2,
            "lookups/miss": 1,
            "loads/whole": 1,
            "load_pages/whole": 2,
            "stores/done": 2,
            "store_pages/stored": 2,
            "store_pages/present": 2,
        }


def test_failures_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    with one_rank(load_timeout_ms=300, keep_on_flush=True) as (daemon, engine):
        engine.store("a", [3, 4], 1)
        engine.transfers._written = lambda _work: None
        assert engine.transfers.offload(hashes("b", 3), [5, 6, 7])
        monkeypatch.setattr(offloads, "RESET_LIMIT_S", 0.05)
        with stopped(daemon.leader):
            engine.transfers.reset()
        eventually("the leader is connected", lambda: engine.leader._client.listening)
        engine.transfers._written = engine.session.wrote
        assert engine.find("r", hashes("a", 2)) == 2
        with stopped(daemon.pid()):
            assert not engine.transfers.load("r", hashes("a", 2), [8, 9])
        eventually("the pause ends", lambda: not engine.leader.breaker.pauses)
        monkeypatch.setattr(lookups, "DROP_S", 0.0)
        with stopped(daemon.leader):
            engine.transfers.find("late", hashes("c", 1))
            engine.transfers.ended_offloads()
        assert counted(engine) == {
            "lookups/hit": 1,
            "lookups/late": 1,
            "loads/failed": 1,
            "load_pages/failed": 2,
            "stores/done": 1,
            "stores/failed": 1,
            "store_pages/stored": 2,
            "store_pages/failed": 3,
        }


def test_the_log_has_a_line_with_what_is_new(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvferry")
    counts = Counts()
    with recorded() as records:
        assert counts.look() > time.monotonic() + 50
        counts._count("lookups", "hit", 3)
        assert not records
        monkeypatch.setattr(counts_module, "LOG_EVERY_S", 0.0)
        counts.look()
        counts.look()
        counts._count("loads", "whole", 2)
        counts._count("load_seconds", "whole", 0.006)
        counts.look()
    first, second = [record.getMessage() for record in records]
    assert "lookups: 3 hit; loads: none" in first
    assert "lookups: none; loads: 2 whole, of pages: none, 3.0 ms each" in second


def test_a_running_engine_logs_the_line(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvferry")
    monkeypatch.setattr(counts_module, "LOG_EVERY_S", 0.2)
    with recorded() as records, one_rank() as (_, engine):
        engine.store("a", [3, 4], 1)
        eventually("a line", lambda: any("stores: 1 done" in record.getMessage() for record in records))


def test_counters_are_on_the_page_and_one_that_fails_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from prometheus_client import REGISTRY

    counts = Counts(exported=True)
    # A second engine in the same process has the same counters.
    assert Counts(exported=True)._exported == counts._exported
    counts._count("store_pages", "stored", 5)
    assert REGISTRY.get_sample_value(f"{PREFIX}store_pages_total", {"outcome": "stored"}) == 5

    def broken(**_: Any) -> None:
        raise OSError("injected")

    monkeypatch.setattr(counts._exported["loads"], "labels", broken)
    with recorded() as records:
        counts._count("loads", "whole")
        counts._count("loads", "whole")
    assert [record.getMessage() for record in records] == [
        "kvferry: counters on SGLang's Prometheus page stand still from now on"
    ]
    assert counts._values["loads", "whole"] == 2


def test_the_guide_lists_every_counter() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "sglang.md").read_text()
    for name, (_, outcomes) in COUNTERS.items():
        assert f"| `{name}` | {', '.join(outcomes)} |" in guide
