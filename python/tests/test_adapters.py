"""Adapters: which of their pages are found and stored."""

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from daemon import eventually
from test_scheduler import PAGE_TOKENS, Engine, found, request

from kvferry import content, wire

#: A file of an adapter.
ADAPTER = "adapter_model.safetensors"
LOCAL = content.Local("files", 0.0)


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_adapters_are_apart(engine: Engine, tmp_path: Path) -> None:
    found(engine, 0)
    seen = set()
    here, there = str(tmp_path), str(tmp_path.parent)
    for number, (name, path) in enumerate(((None, None), ("one", here), ("one", there), ("two", here))):
        asking = request(f"{name}{path}", 9)
        asking.lora_request = name and adapter(name, path, number=number)
        engine.side.matched_tokens(asking, 0)
        seen.add(engine.leader.last(wire.Lookup).message.namespace)
    assert len(seen) == 4


def adapter(name: str, path: str, *, number: int = 1, anew: bool = False) -> SimpleNamespace:
    return SimpleNamespace(lora_int_id=number, lora_name=name, lora_path=path, load_inplace=anew)


def test_an_adapter_whose_files_change_is_not_cached_until_it_is_loaded_anew(engine: Engine, tmp_path: Path) -> None:
    """vLLM reads the files again when the adapter had to give way to others, and does not say so."""

    def namespace(number: int, path: Path = tmp_path, **how: bool) -> bytes | None:
        engine.step({})
        asking = request(f"r{time.monotonic_ns()}", 9)
        asking.lora_request = adapter("one", str(path), number=number, **how)
        return engine.side.track(asking).namespace

    (tmp_path / ADAPTER).write_text("one")
    first = namespace(1)
    assert namespace(1) == first
    (tmp_path / ADAPTER).write_text("another")
    assert namespace(1) is None
    second = namespace(2)
    assert second not in (None, first), "it was unloaded, and loaded again"
    assert namespace(2) == second
    assert namespace(1) is None
    assert namespace(2, anew=True) is None, "vLLM reads its files in each step"
    assert namespace(2) is None, "nobody knows when they were read last"
    assert namespace(3) == second
    (tmp_path / "elsewhere").mkdir()
    assert namespace(3, tmp_path / "elsewhere") is None
    assert namespace(3) is None, "its weights were replaced in place"


def test_more_adapters_than_can_be_remembered_are_not_cached(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvferry.namespaces.ADAPTERS_MAX", 2)
    seen = []
    for number in (1, 2, 3, 4, 2):
        asking = request(f"r{time.monotonic_ns()}", 9)
        asking.lora_request = adapter(f"number {number}", str(tmp_path), number=number)
        seen.append(engine.side.track(asking).namespace is not None)
    assert seen == [True, True, False, False, True]
    assert caplog.text.count("adapters were loaded") == 1


def test_a_request_that_waits_is_named_by_the_files_that_are_there_when_it_is_scheduled(
    engine: Engine, tmp_path: Path
) -> None:
    (tmp_path / ADAPTER).write_text("one")
    found(engine, 2)
    asking = request("a", 16)
    asking.lora_request = adapter("one", str(tmp_path))
    assert engine.side.matched_tokens(asking, 0) == 2 * PAGE_TOKENS
    engine.step({})
    (tmp_path / ADAPTER).write_text("another")
    engine.allocate(asking, [1, 2, 3, 4], 2 * PAGE_TOKENS)
    assert not engine.leader.count(wire.Load)
    step = engine.step({})
    assert (step.loaded, step.failed_pages) == (["a"], [1, 2]), "they are computed"
    again = engine.leader.last(wire.Lookup).message
    assert again.device_pages * again.hash_bytes == len(again.hashes), "the leader holds nothing of what was found"
    assert engine.side.matched_tokens(asking, 0) == 0


def test_what_runs_while_its_adapter_is_replaced_stores_nothing_more(engine: Engine, tmp_path: Path) -> None:
    found(engine, 0)
    running, anew = request("a", 16), request("b", 9)
    running.lora_request = adapter("one", str(tmp_path))
    engine.side.matched_tokens(running, 0)
    engine.tables["a"] = [1, 2, 3, 4]
    engine.step({running: 8})
    assert engine.leader.count(wire.Store) == 1
    running.num_computed_tokens = 8
    anew.lora_request = adapter("one", str(tmp_path / ".."), anew=True)
    engine.side.matched_tokens(anew, 0)
    engine.step({running: 8})
    assert engine.leader.count(wire.Store) == 1


@pytest.mark.parametrize("change", ["a file is added", "an owner is set", "it is away for a moment"])
def test_an_adapter_stays_known_when_what_vllm_reads_of_it_does_not_change(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / ADAPTER).write_text("one")
    began = time.time()
    monkeypatch.setattr(content, "began_at", lambda: began)

    def namespace() -> bytes | None:
        engine.step({})
        asking = request(f"r{time.monotonic_ns()}", 9)
        asking.lora_request = adapter("one", str(folder))
        return engine.side.track(asking).namespace

    first = namespace()
    assert first is not None
    match change:
        case "a file is added":
            (folder / "README.md").write_text("new")
        case "an owner is set":
            os.chown(folder / ADAPTER, os.getuid(), os.getgid())
        case "it is away for a moment":
            folder.rename(tmp_path / "away")
            assert namespace() is None
            (tmp_path / "away").rename(folder)
    assert namespace() == first


def test_a_request_whose_files_were_not_seen_in_time_stores_nothing(engine: Engine, tmp_path: Path) -> None:
    """Another request of the same adapter has seen them."""
    found(engine, 0)
    folder = tmp_path / "adapter"
    for name, there in (("a", True), ("b", False)):
        if there:
            folder.mkdir()
        else:
            folder.rename(tmp_path / "away")
        asking = request(name, 12)
        asking.lora_request = adapter("one", str(folder))
        assert engine.side.matched_tokens(asking, 0) == 0
        engine.tables[name] = [1, 2, 3]
        engine.step({asking: 12})
        assert engine.leader.count(wire.Store) == 1


def test_files_are_looked_at_once_in_a_step(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(engine.side._namespaces._looks, "_look", lambda path: seen.append(path))
    asking = request("a", 9)
    asking.lora_request = adapter("one", str(tmp_path))
    for step in range(1, 4):
        for _ in range(5):
            engine.side.matched_tokens(asking, 0)
        assert len(seen) == step
        engine.step({})


def test_files_that_hang_keep_no_other_request_waiting(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvferry.looks.LOOKS_S", 0.01)
    goes_on = threading.Event()
    monkeypatch.setattr(engine.side._namespaces._looks, "_look", lambda path: goes_on.wait(60) and LOCAL)
    engine.step({})
    found(engine, 2)
    for name, path in (("a", "/x"), ("b", "/y"), ("c", None)):
        asking = request(name, 12)
        asking.lora_request = path and adapter("one", path)
        assert engine.side.matched_tokens(asking, 0) == (0 if path else 2 * PAGE_TOKENS)
        engine.tables[name] = [1, 2, 3]
        engine.step({asking: 12})
    assert engine.leader.count(wire.Store) == 1, "what is not known is not stored"
    assert caplog.text.count("looking at /x takes longer") == 1
    goes_on.set()
    monkeypatch.setattr("kvferry.looks.LOOKS_S", 60.0)

    def known() -> bool:
        engine.step({})
        asking = request(f"r{time.monotonic_ns()}", 12)
        asking.lora_request = adapter("one", "/x")
        return engine.side.matched_tokens(asking, 0) == 2 * PAGE_TOKENS

    eventually("its files can be looked at again", known)
