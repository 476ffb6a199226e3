"""Adapters: which of their pages are found and stored."""

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from daemon import eventually
from test_scheduler import PAGE_TOKENS, Engine, Request, found, request

from kvferry import files, wire

#: Name of an adapter's file.
ADAPTER = "adapter_model.safetensors"
LOCAL = files.Local("/x", (), 0.0)


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_adapters_have_separate_namespaces(engine: Engine, tmp_path: Path) -> None:
    found(engine, 0)
    seen = set()
    here, there = str(folder(tmp_path / "here")), str(folder(tmp_path / "there"))
    for number, (name, path) in enumerate(((None, None), ("one", here), ("one", there), ("two", here))):
        asking = request(f"{name}{path}", 9)
        asking.lora_request = name and adapter(name, path, number=number)
        engine.side.matched_tokens(asking, 0)
        seen.add(engine.leader.last(wire.Lookup).message.namespace)
    assert len(seen) == 4


def folder(path: Path, content: str = "one") -> Path:
    """Creates an adapter's folder."""
    path.mkdir(exist_ok=True)
    (path / ADAPTER).write_text(content)
    return path


def named(engine: Engine, asking: Request) -> bytes | None:
    """Returns the namespace of a request that vLLM is about to schedule."""
    engine.side.matched_tokens(asking, 0)
    return engine.side.track(asking).namespace


def adapter(name: str, path: str, *, number: int = 1, anew: bool = False) -> SimpleNamespace:
    return SimpleNamespace(lora_int_id=number, lora_name=name, lora_path=path, load_inplace=anew)


def test_an_adapter_whose_files_change_is_not_cached_until_it_is_loaded_again(engine: Engine, tmp_path: Path) -> None:
    """vLLM evicts adapters and reads their files again without a notice."""

    def namespace(number: int, path: Path = tmp_path, **how: bool) -> bytes | None:
        engine.step({})
        asking = request(f"r{time.monotonic_ns()}", 9)
        asking.lora_request = adapter("one", str(path), number=number, **how)
        return named(engine, asking)

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
    assert namespace(2) is None, "the time of the last read is unknown"
    assert namespace(3) == second
    assert namespace(3, folder(tmp_path / "elsewhere")) is None
    assert namespace(3) is None, "its weights were replaced in place"


def test_more_adapters_than_can_be_remembered_are_not_cached(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvferry.vllm.namespaces.ADAPTERS_MAX", 2)
    found(engine, 0)
    folder(tmp_path)
    seen = []
    for number in (1, 2, 3, 4, 2):
        asking = request(f"r{time.monotonic_ns()}", 9)
        asking.lora_request = adapter(f"number {number}", str(tmp_path), number=number)
        seen.append(named(engine, asking) is not None)
    assert seen == [True, True, False, False, True]
    assert caplog.text.count("adapters were loaded") == 1


def test_a_waiting_request_is_named_by_the_files_at_the_time_of_scheduling(engine: Engine, tmp_path: Path) -> None:
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
    assert again.have_pages * again.hash_bytes == len(again.hashes), "the leader holds none of the found pages"
    assert engine.side.matched_tokens(asking, 0) == 0


def test_a_request_that_runs_while_its_adapter_is_replaced_stores_nothing_more(engine: Engine, tmp_path: Path) -> None:
    found(engine, 0)
    running, anew = request("a", 16), request("b", 9)
    running.lora_request = adapter("one", str(folder(tmp_path / "one")))
    engine.side.matched_tokens(running, 0)
    engine.tables["a"] = [1, 2, 3, 4]
    engine.step({running: 8})
    assert engine.leader.count(wire.Store) == 1
    running.num_computed_tokens = 8
    anew.lora_request = adapter("one", str(folder(tmp_path / "two")), anew=True)
    engine.side.matched_tokens(anew, 0)
    engine.step({running: 8})
    assert engine.leader.count(wire.Store) == 1


@pytest.mark.parametrize("unseen_before", [False, True])
@pytest.mark.parametrize("change", ["a file is added", "it is away for a moment"])
def test_an_adapter_stays_known_while_the_files_that_vllm_reads_are_unchanged(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, unseen_before: bool
) -> None:
    there = folder(tmp_path / "adapter")
    found(engine, 0)
    monkeypatch.setattr("kvferry.vllm.namespaces.CLOCK_S", 0.0)
    if unseen_before:
        eventually("the file clock advances", lambda: time.time() > there.stat().st_ctime)
        runs(engine, adapter("one", str(there)), 0, monkeypatch, seen=False)
        monkeypatch.setattr("kvferry.looks.LOOKS_S", 60.0)
    began = time.time()
    monkeypatch.setattr(files, "began_at", lambda: began)

    def namespace() -> bytes | None:
        engine.step({})
        asking = request(f"r{time.monotonic_ns()}", 9)
        asking.lora_request = adapter("one", str(there))
        return named(engine, asking)

    first = namespace()
    assert first is not None
    match change:
        case "a file is added":
            eventually("the file clock advances", lambda: newer_file(there / "README.md") > began)
        case "it is away for a moment":
            there.rename(tmp_path / "away")
            assert namespace() is None
            (tmp_path / "away").rename(there)
    assert namespace() == first


def newer_file(path: Path) -> float:
    """Creates a file; returns when that changed its folder."""
    path.unlink(missing_ok=True)
    path.write_text("new")
    return path.parent.stat().st_ctime


def test_a_request_whose_files_were_not_checked_in_time_stores_nothing(engine: Engine, tmp_path: Path) -> None:
    """Another request of the same adapter has checked the files."""
    found(engine, 0)
    path = folder(tmp_path / "adapter")
    for name, there in (("a", True), ("b", False)):
        if not there:
            path.rename(tmp_path / "away")
        asking = request(name, 12)
        asking.lora_request = adapter("one", str(path))
        assert engine.side.matched_tokens(asking, 0) == 0
        engine.tables[name] = [1, 2, 3]
        engine.step({asking: 12})
        assert engine.leader.count(wire.Store) == 1


def test_a_loaded_request_that_waits_for_its_adapter_stores_no_pages_of_newer_files(
    engine: Engine, tmp_path: Path
) -> None:
    """vLLM loads the adapter when there is room for it, possibly long after the request's pages were loaded."""
    found(engine, 2)
    asking = request("a", 16)
    asking.lora_request = adapter("one", str(folder(tmp_path)))
    assert engine.side.matched_tokens(asking, 0) == 2 * PAGE_TOKENS
    engine.allocate(asking, [1, 2, 3, 4], 2 * PAGE_TOKENS)
    engine.leader.last(wire.Load).end(wire.LoadAnswer(2))
    engine.step()
    engine.step()
    folder(tmp_path, "another")
    asking.num_computed_tokens = 2 * PAGE_TOKENS
    engine.allocate(asking, [1, 2, 3, 4], 0)
    engine.step({asking: 2 * PAGE_TOKENS})
    assert engine.leader.count(wire.Store) == 0


@pytest.mark.parametrize("reset", [False, True])
def test_a_request_that_arrived_in_a_pause_is_named_by_the_files_after_the_pause(
    engine: Engine, tmp_path: Path, reset: bool
) -> None:
    """A paused engine begins no step."""
    found(engine, 0)
    asking = request("a", 16)
    asking.lora_request = adapter("one", str(folder(tmp_path)))
    engine.side.track(asking)
    if reset:
        assert engine.side.reset()
    folder(tmp_path, "another")
    engine.side.matched_tokens(asking, 0)
    engine.allocate(asking, [1, 2, 3, 4], 0)
    engine.step({asking: 16})
    if engine.leader.count(wire.Store):
        fresh = request("b", 9)
        fresh.lora_request = adapter("one", str(tmp_path), number=2)
        name = engine.leader.last(wire.Lookup).message.namespace
        assert named(engine, fresh) == name
    else:
        assert reset, "the request was named by the older files"


def test_pages_that_were_computed_with_unknown_files_are_not_stored_as_those_of_known_ones(
    engine: Engine, tmp_path: Path
) -> None:
    """The files are missing for a moment, and other files are present when the adapter is loaded again."""
    found(engine, 0)
    path = tmp_path / "adapter"
    first, second = request("a", 16), request("b", 17)
    first.lora_request = adapter("one", str(path))
    second.lora_request = adapter("one", str(path), number=2)
    second.block_hashes = first.block_hashes
    engine.side.matched_tokens(first, 0)
    engine.allocate(first, [1, 2, 3, 4], 0)
    engine.step({first: 16})
    engine.side.finished(first)
    folder(path)
    engine.side.matched_tokens(second, 16)
    engine.allocate(second, [1, 2, 3, 4, 5], 0)
    second.num_computed_tokens = 16
    engine.step({second: 1})
    assert engine.leader.count(wire.Store) == 0


@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize("seen_before", [False, True])
@pytest.mark.parametrize("reset", [False, True])
def test_files_that_were_checked_too_late_are_known_again_if_unchanged(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: bool, seen_before: bool, reset: bool
) -> None:
    """vLLM may have read the older or the newer files, and keeps their weights."""
    found(engine, 0)
    path = folder(tmp_path / "adapter")
    # Files that the test changes are newer by more than the clocks' difference.
    monkeypatch.setattr("kvferry.vllm.namespaces.CLOCK_S", -60.0 if not changed else 60.0)
    for step, (seen, computed) in enumerate(((seen_before, 0), (False, 0), (True, 8), (True, 0))):
        if step == 2 and reset:
            engine.side._namespaces.device_is_empty()
        stores = engine.leader.count(wire.Store)
        runs(engine, adapter("one", str(path)), computed, monkeypatch, seen=seen)
        assert (engine.leader.count(wire.Store) > stores) == (seen and not (changed and step > 1))


def runs(
    engine: Engine, lora: SimpleNamespace, computed: int, monkeypatch: pytest.MonkeyPatch, *, seen: bool = True
) -> None:
    """Runs a request with an adapter whose files can be checked in time (``seen``), or not."""
    asking = request(f"r{time.monotonic_ns()}", 16)
    asking.lora_request = lora
    monkeypatch.setattr("kvferry.looks.LOOKS_S", 60.0 if seen else 0.0)
    engine.step()
    engine.side.matched_tokens(asking, computed)
    engine.allocate(asking, [1, 2, 3, 4], 0)
    asking.num_computed_tokens = computed
    engine.step({asking: 16 - computed})
    engine.side.finished(asking)


@pytest.mark.parametrize("seen_first", [False, True])
def test_pages_of_one_adapter_number_are_not_stored_as_those_of_another(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen_first: bool
) -> None:
    """vLLM computes with the weights that it loaded under a number, whatever name and path a request has."""
    found(engine, 0)
    one, two = (str(folder(tmp_path / name)) for name in ("one", "two"))
    if seen_first:
        runs(engine, adapter("one", one, number=1), 0, monkeypatch)
    stores = engine.leader.count(wire.Store)
    runs(engine, adapter("two", two, number=1), 0, monkeypatch, seen=False)
    runs(engine, adapter("two", two, number=2), 8, monkeypatch)
    assert engine.leader.count(wire.Store) == stores
    runs(engine, adapter("two", two, number=2), 0, monkeypatch)
    assert engine.leader.count(wire.Store) == stores + 1


@pytest.mark.parametrize("first_seen", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_an_adapter_number_reused_under_another_name_unchecked_is_not_cached(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first_seen: bool, in_place: bool
) -> None:
    """vLLM may have either adapter under the number after the first was evicted."""
    found(engine, 0)
    one, two = (str(folder(tmp_path / name)) for name in ("one", "two"))
    runs(engine, adapter("one", one), 0, monkeypatch, seen=first_seen)
    stores = engine.leader.count(wire.Store)
    runs(engine, adapter("two", two, anew=in_place), 0, monkeypatch, seen=False)
    for name, path in (("one", one), ("two", two)):
        runs(engine, adapter(name, path), 0, monkeypatch)
    assert engine.leader.count(wire.Store) == stores


def test_an_unchecked_adapter_number_reused_for_another_path_is_not_cached(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found(engine, 0)
    one, two = (str(folder(tmp_path / name)) for name in ("one", "two"))
    monkeypatch.setattr("kvferry.vllm.namespaces.CLOCK_S", -60.0)
    runs(engine, adapter("one", one), 0, monkeypatch, seen=False)
    runs(engine, adapter("two", two), 0, monkeypatch)
    assert engine.leader.count(wire.Store) == 0


@pytest.mark.parametrize("in_place", [False, True])
def test_pages_of_an_adapter_number_with_other_files_are_not_stored_under_its_first_name(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_place: bool
) -> None:
    """A request continues with the new weights and the old name. Then the first path is loaded again."""
    found(engine, 0)
    old, new = (str(folder(tmp_path / name)) for name in ("old", "new"))
    runs(engine, adapter("one", old), 0, monkeypatch)
    runs(engine, adapter("one", new, anew=in_place), 0, monkeypatch)
    stores = engine.leader.count(wire.Store)
    runs(engine, adapter("one", old, number=2), 8, monkeypatch)
    assert engine.leader.count(wire.Store) == stores
    runs(engine, adapter("one", old, number=2), 0, monkeypatch)
    assert engine.leader.count(wire.Store) == stores + 1


def test_a_running_request_stores_nothing_after_the_files_of_its_adapter_change(engine: Engine, tmp_path: Path) -> None:
    """vLLM reads the files again after an eviction of the adapter, and schedules its requests as before."""
    found(engine, 0)
    one, two = (str(folder(tmp_path / name, name)) for name in ("one", "two"))
    link = tmp_path / "current"
    link.symlink_to(one)
    asking = request("a", 16)
    asking.lora_request = adapter("one", str(link))
    engine.side.matched_tokens(asking, 0)
    engine.allocate(asking, [1, 2, 3, 4], 0)
    engine.step({asking: 8})
    assert engine.leader.count(wire.Store) == 1
    asking.num_computed_tokens = 8
    link.unlink()
    link.symlink_to(two)
    engine.step({asking: 8})
    assert engine.leader.count(wire.Store) == 1


def test_a_request_whose_files_are_not_checked_in_a_step_stores_its_pages_in_a_later_one(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found(engine, 0)
    asking = request("a", 16)
    asking.lora_request = adapter("one", str(folder(tmp_path)))
    engine.side.matched_tokens(asking, 0)
    engine.allocate(asking, [1, 2, 3, 4], 0)
    for step, seen in enumerate((False, True)):
        monkeypatch.setattr("kvferry.looks.LOOKS_S", 60.0 if seen else 0.0)
        engine.step()
        asking.num_computed_tokens = 8 * step
        engine.step({asking: 8})
    store = engine.leader.last(wire.Store).message
    assert (engine.leader.count(wire.Store), store.parts[0].first_page) == (1, 0)


@pytest.mark.parametrize("newer", [False, True])
def test_an_adapter_loaded_again_from_unchanged_files_is_stored_after_its_earlier_pages(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, newer: bool
) -> None:
    found(engine, 0)
    path = str(folder(tmp_path))
    began = time.time() + (-60.0 if newer else 60.0)
    monkeypatch.setattr(files, "began_at", lambda: began)
    for number in (1, 2):
        runs(engine, adapter("one", path, number=number), 8 * (number - 1), monkeypatch)
    assert engine.leader.count(wire.Store) == 2


def test_a_request_whose_pages_turn_out_to_be_of_other_files_stores_nothing_more(
    engine: Engine, tmp_path: Path
) -> None:
    """The adapter's former number got other files while its requests ran; that is detected after this one began."""
    found(engine, 0)
    old, new = (str(folder(tmp_path / name)) for name in ("old", "new"))
    begins, behind, other = request("a", 16), request("b", 16), request("c", 9)
    begins.lora_request, behind.lora_request = (adapter("one", old, number=number) for number in (1, 2))
    other.lora_request = adapter("one", new, number=1)
    for asking, computed in ((begins, 0), (behind, 8)):
        engine.side.matched_tokens(asking, computed)
        engine.allocate(asking, [1, 2, 3, 4], 0)
        asking.num_computed_tokens = computed
    engine.side.matched_tokens(other, 0)
    engine.step({behind: 8})
    assert engine.leader.count(wire.Store) == 0


def test_an_adapter_path_that_is_not_utf_8_is_no_fault(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found(engine, 0)
    path = folder(Path(os.fsdecode(bytes(tmp_path) + b"/\xff")))
    runs(engine, adapter("one", str(path)), 0, monkeypatch)
    assert engine.leader.count(wire.Store) == 1


def test_unchecked_adapters_beyond_the_limit_are_not_cached(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.vllm.namespaces.ADAPTERS_MAX", 2)
    found(engine, 0)
    path = str(folder(tmp_path))
    runs(engine, adapter("known", path, number=1), 0, monkeypatch)
    runs(engine, adapter("two", path, number=2), 0, monkeypatch, seen=False)
    runs(engine, adapter("known", path, number=1), 0, monkeypatch, seen=False)
    stores = engine.leader.count(wire.Store)
    for number in (1, 2, 3):
        runs(engine, adapter("known", path, number=number), 0, monkeypatch)
    assert engine.leader.count(wire.Store) == stores
    assert len(engine.side._namespaces._adapters) == 2


@pytest.mark.parametrize("reset", [False, True])
def test_a_request_after_pages_of_other_files_stores_nothing_once_it_has_a_namespace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reset: bool
) -> None:
    """The files are checked at a reset, or when vLLM schedules the request again with its pages."""
    engine = Engine(shared_after_reset=True)
    found(engine, 0)
    engine.leader.answers[wire.Reset] = wire.ResetAnswer(0)
    monkeypatch.setattr("kvferry.vllm.namespaces.CLOCK_S", -60.0)
    path = str(folder(tmp_path / "adapter"))
    runs(engine, adapter("one", path, number=1), 0, monkeypatch)
    folder(tmp_path / "adapter", "another")
    asking = request("a", 16)
    asking.lora_request = adapter("one", path, number=2)
    monkeypatch.setattr("kvferry.looks.LOOKS_S", 0.0)
    engine.step()
    engine.side.matched_tokens(asking, 8)
    engine.allocate(asking, [1, 2, 3, 4], 0)
    asking.num_computed_tokens = 8
    monkeypatch.setattr("kvferry.looks.LOOKS_S", 60.0)
    engine.step({asking: 4})
    if reset:
        assert engine.side.reset()
    else:
        engine.allocate(asking, [1, 2, 3, 4], 0)
    engine.step({asking: 4})
    assert engine.leader.count(wire.Store) == 1


def test_a_check_that_succeeds_late_detects_that_the_device_has_pages_of_other_files(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of an adapter that was loaded again are checked when its request is scheduled, not earlier."""
    found(engine, 0)
    path = folder(tmp_path / "adapter")
    for number, computed in ((1, 0), (2, 8)):
        folder(path, "one" * number)
        asking = request(f"r{number}", 16)
        asking.lora_request = adapter("one", str(path), number=number)
        monkeypatch.setattr("kvferry.looks.LOOKS_S", 60.0 if number == 1 else 0.0)
        engine.step()
        engine.side.matched_tokens(asking, computed)
        monkeypatch.setattr("kvferry.looks.LOOKS_S", 60.0)
        engine.side._namespaces.next_step()
        engine.allocate(asking, [1, 2, 3, 4], 0)
        asking.num_computed_tokens = computed
        engine.step({asking: 16 - computed})
    assert engine.leader.count(wire.Store) == 1


def test_names_beyond_the_limit_count_as_older_ones_on_the_device(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.vllm.namespaces.ON_DEVICE_MAX", 1)
    found(engine, 0)
    for name, computed in (("a", 0), ("b", 8), ("c", 0)):
        asking = request(name, 16)
        asking.lora_request = adapter(name, str(folder(tmp_path)), number=ord(name))
        stores = engine.leader.count(wire.Store)
        engine.side.matched_tokens(asking, computed)
        engine.allocate(asking, [1, 2, 3, 4], 0)
        engine.step({asking: 16 - computed})
        assert engine.leader.count(wire.Store) - stores == (0 if computed else 1)
    for number in range(3):
        asking = request(f"unknown {number}", 16)
        asking.lora_request = adapter("one", str(tmp_path / f"away {number}"), number=1000 + number)
        engine.side.matched_tokens(asking, 0)
        engine.allocate(asking, [1, 2, 3, 4], 0)
    assert len(engine.side._namespaces._on_device) == 1


def test_files_are_checked_once_per_step(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(engine.side._namespaces._looks, "_look", lambda path: seen.append(path))
    asking = request("a", 9)
    asking.lora_request = adapter("one", str(tmp_path))
    for step in range(1, 4):
        for _ in range(5):
            engine.side.matched_tokens(asking, 0)
        assert len(seen) == step
        engine.step({})


def test_files_that_hang_delay_no_other_request(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvferry.looks.LOOKS_S", 0.01)
    goes_on = threading.Event()
    monkeypatch.setattr(engine.side._namespaces._looks, "_look", lambda path: goes_on.wait(60) and LOCAL)
    engine.step({})
    found(engine, 2)
    for name, path in (("a", "/x"), ("b", "/y"), ("c", None)):
        asking = request(name, 12)
        asking.lora_request = path and adapter("one", path, number=ord(name))
        assert engine.side.matched_tokens(asking, 0) == (0 if path else 2 * PAGE_TOKENS)
        engine.tables[name] = [1, 2, 3]
        engine.step({asking: 12})
    assert engine.leader.count(wire.Store) == 1, "unknown weights are not stored"
    assert caplog.text.count("looking at /x takes longer") == 1
    goes_on.set()
    monkeypatch.setattr("kvferry.looks.LOOKS_S", 60.0)

    def known() -> bool:
        engine.step({})
        asking = request(f"r{time.monotonic_ns()}", 12)
        asking.lora_request = adapter("one", "/x", number=ord("a"))
        return engine.side.matched_tokens(asking, 0) == 2 * PAGE_TOKENS

    eventually("its files can be checked again", known)
