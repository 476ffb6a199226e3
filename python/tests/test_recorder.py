"""The recording of an engine: every call and every request in one order, and one end."""

import errno
import inspect
import itertools
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import calls_file
import pytest
from calls_file import ANSWER, CALL, END, FAILURE, HEADER, REQUEST, RETURN, Cut, Hashes, frames
from daemon import TIMEOUT_S, eventually
from engine import PAGE_TOKENS, tokens, transfer_config
from real_scheduler import Stepped, engine_config
from test_guard import HOOKS, answer_loads
from test_scheduler import found

from kvferry import recording, wire
from kvferry.client import Client, Failure, Later, PendingRequest
from kvferry.recording import HASH_WINDOW, HashWindow, LeaderSizes, Recorder
from kvferry.vllm.calls import ARGUMENTS
from kvferry.vllm.settings import Settings

MB = 1_000_000
#: Hooks of a rank's side, which are not recorded.
OF_RANKS = {
    "bind_connector_metadata",
    "build_connector_worker_meta",
    "get_block_ids_with_load_errors",
    "get_finished",
    "get_mem_pool_context",
    "get_transfer_results",
    "register_kv_caches",
    "wait_for_save",
}


def recorder(path: Path, **changes: Any) -> Recorder:
    return Recorder(path, **{"bytes_max": MB, "header": {"engine": b"e" * 16}, **changes})


def pages(count: int, first: int = 0) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in range(first, first + count)]


def pending(number: int, message: Any) -> PendingRequest:
    return PendingRequest(number, message, time.monotonic() + 1.0, time.monotonic() + 2.0, None)


def lookup(slot: int, hashes: list[bytes]) -> wire.Lookup:
    return wire.Lookup(slot=slot, namespace=b"n", hash_bytes=32, hashes=b"".join(hashes))


def test_a_recording_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "calls"
    made = recorder(path)
    call = made.called("on_new_request", {"request": "a"}, pages(3))
    first, second = pending(7, lookup(1, pages(5))), pending(8, lookup(2, [*pages(4), *pages(2, 100)]))
    store = pending(9, wire.Store(1, [wire.part(0, [4, [6, 2]])], 32, b"".join(pages(1, 5)), 5))
    reset = pending(10, wire.reset(b"n"))
    for each in (first, second, store, reset):
        made.requested(each)
    made.requested(pending(11, wire.Status()))
    for each in (first, second):
        each.watch = made
        each._end(wire.LookupAnswer(3, pending=True), None)
    made.returned(call, [3, False])
    store.watch = made
    store._end(None, Failure(9, "x" * 1000, reported=True, over=True))
    made.close(TIMEOUT_S)
    read = list(frames(path))
    kinds = [HEADER, CALL, REQUEST, REQUEST, REQUEST, REQUEST, ANSWER, ANSWER, RETURN, FAILURE, END]
    assert [frame.kind for frame in read] == kinds
    known = Hashes()
    name, arguments, hash_bytes, items = read[1].fields
    assert (name, arguments) == ("on_new_request", {"request": "a"})
    assert known.expand(items, hash_bytes) == b"".join(pages(3))
    for frame, sent in ((read[2], pages(5)), (read[3], [*pages(4), *pages(2, 100)])):
        identity, kind, limit_ms, message, items = frame.fields
        assert (identity, kind) == (5 + frame.number, calls_file.LOOKUP)
        assert 900 < limit_ms <= 1000
        assert message["hashes"] == b""
        assert message["namespace"] == b"n"
        assert known.expand(items, message["hash_bytes"]) == b"".join(sent)
    # Only new hashes are written.
    assert read[2].fields[4] == [[0, 3], b"".join(pages(2, 3))]
    assert read[3].fields[4] == [[0, 4], b"".join(pages(2, 100))]
    _, _, _, message, items = read[4].fields
    assert message["parts"] == [{"first_page": 0, "pages": [4, [6, 2]], "count": 3}]
    assert (message["more_from"], message["more_hashes"]) == (5, b"")
    assert known.expand(items, 32) == b"".join(pages(1, 5))
    assert read[6].fields[:1] == [7]
    assert read[6].fields[1]["hit_pages"] == 3
    assert read[8].fields == [call, [3, False]]
    assert read[9].fields == [9, 9, "x" * 256, True, False, True]
    assert read[10].fields == [calls_file.CLOSED, ""]


def test_hashes_that_left_the_window_are_written_again() -> None:
    window, known = HashWindow(), Hashes()
    every = pages(HASH_WINDOW + 10)
    for first in range(0, len(every), 1000):
        packed = b"".join(every[first : first + 1000])
        assert known.expand(window.compact(packed, 32), 32) == packed
    old = b"".join(every[:10])
    assert window.compact(old, 32) == [old], "they left"
    # They took the places of ten others.
    assert window.compact(b"".join(every[20:30]), 32) == [[20, 10]]
    assert isinstance(window.compact(every[10], 32)[0], bytes)
    assert len(window._numbers) == len(window._ring) == HASH_WINDOW


def test_frames_of_many_threads_have_one_order(tmp_path: Path) -> None:
    path = tmp_path / "calls"
    made = recorder(path, bytes_max=100 * MB)
    begin = threading.Barrier(4)

    def work(thread: int) -> None:
        begin.wait()
        for number in range(2000):
            call = made.called("hook", {"thread": thread, "number": number})
            made.returned(call, number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    made.close(TIMEOUT_S)
    found = calls_file.calls(path)
    assert len(found) == 8000
    for thread in range(4):
        own = [(arguments["number"], answer) for _, arguments, answer in found if arguments["thread"] == thread]
        assert own == [(number, number) for number in range(2000)]


def test_an_answer_is_recorded_before_its_caller_knows_it(tmp_path: Path) -> None:
    """A caller may send a request because of an answer, which must stand before it in the record."""
    order: list[str] = []

    class Watch:
        def requested(self, pending: PendingRequest) -> None:
            order.append("requested")
            assert client._new == type(client._new)(), "the client's thread cannot have it yet"

        def ended(self, pending: PendingRequest) -> None:
            assert not pending.done
            order.append("ended")

    client = Client(tmp_path, wire.Hello(role="engine", engine=b"e" * 16), first_id=1, watch=Watch())
    client.start()
    handle = client.request(wire.Finish(1), 0.05, until=lambda pending: order.append("until"))
    assert handle.wait(TIMEOUT_S)
    eventually("the caller knows", lambda: len(order) == 3)
    assert order == ["requested", "ended", "until"]
    client.close()
    refused = client.request(wire.Finish(1), 0.05)
    assert refused.failure is not None
    assert order[3:] == ["requested", "ended"]


class Disk:
    """Holds up writes until they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.free, self.writing = threading.Event(), threading.Event()
        write = os.write

        def slow(file: int, data: Any) -> int:
            if len(data) > 50_000:
                self.writing.set()
            assert self.free.wait(TIMEOUT_S)
            return write(file, data)

        monkeypatch.setattr(recording.os, "write", slow)


def test_a_slow_disk_holds_no_caller_up_and_leaves_no_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recording, "QUEUE_BYTES_MAX", 100_000)
    disk = Disk(monkeypatch)
    path = tmp_path / "calls"
    made = recorder(path)
    begun = time.monotonic()
    for number in range(1000):
        made.called("hook", {"number": number})
        assert made._queue_bytes <= 100_000
    assert time.monotonic() - begun < TIMEOUT_S / 2
    assert not made.recording
    # What comes later is not recorded, although the queue has room again.
    disk.free.set()
    eventually("the queue is written", lambda: not made._thread.is_alive())
    made.called("hook", {"number": 1000})
    made.close(TIMEOUT_S)
    found = [arguments["number"] for _, arguments, _ in calls_file.calls(path)]
    assert found == list(range(len(found)))
    assert 100 < len(found) < 1000
    assert calls_file.ended(path) == calls_file.SLOW
    assert caplog.text.count("the recording") == 1
    assert "100000 bytes wait to be written" in caplog.text


def test_a_request_that_cannot_be_encoded_ends_the_recording_and_no_call(tmp_path: Path) -> None:
    def fails() -> wire.Lookup:
        raise ValueError("no message")

    path = tmp_path / "calls"
    made = recorder(path)
    made.requested(pending(7, Later(wire.Kind.LOOKUP, fails)))
    assert not made.recording
    made.close(TIMEOUT_S)
    assert calls_file.ended(path) == calls_file.FAULT


def test_what_is_being_written_counts_towards_the_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "QUEUE_BYTES_MAX", 100_000)
    made = recorder(tmp_path / "calls")
    eventually("the header is written", lambda: made._frames == 1)
    disk = Disk(monkeypatch)
    made.called("hook", {"text": "x" * 60_000})
    assert disk.writing.wait(TIMEOUT_S)
    made.called("hook", {"text": "x" * 60_000})
    assert not made.recording, "together they are more than the limit"
    disk.free.set()
    made.close(TIMEOUT_S)
    assert calls_file.ended(tmp_path / "calls") == calls_file.SLOW


def test_room_is_there_again_after_a_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "QUEUE_BYTES_MAX", 100_000)
    made = recorder(tmp_path / "calls")
    for number in range(5):
        made.called("hook", {"text": "x" * 60_000})
        eventually("the frame is written", lambda number=number: made._frames == number + 2 and not made._queue_bytes)
    made.close(TIMEOUT_S)
    assert len(list(calls_file.calls(tmp_path / "calls"))) == 5


def test_a_full_file_ends_with_its_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "calls"
    made = recorder(path, bytes_max=20_000)
    for number in range(1000):
        made.called("hook", {"number": number})
    eventually("the recording has ended", lambda: not made.recording)
    made.close(TIMEOUT_S)
    assert 19_000 < path.stat().st_size <= 20_000
    found = [arguments["number"] for _, arguments, _ in calls_file.calls(path)]
    assert found == list(range(len(found)))
    assert calls_file.ended(path) == calls_file.FULL
    assert caplog.text.count("the recording") == 1


def test_a_failing_disk_ends_the_recording_after_a_whole_frame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write, left = os.write, 5000
    failed = False

    def failing(file: int, data: Any) -> int:
        nonlocal left, failed
        if failed:
            # The end mark finds room.
            return write(file, data)
        if left == 0:
            failed = True
            raise OSError(errno.ENOSPC, "No space left on device")
        part = data[:left]
        left -= len(part)
        return write(file, part)

    monkeypatch.setattr(recording.os, "write", failing)
    path = tmp_path / "calls"
    made = recorder(path)
    for number in range(1000):
        made.called("hook", {"number": number})
    eventually("the recording has ended", lambda: not made.recording)
    made.close(TIMEOUT_S)
    found = [arguments["number"] for _, arguments, _ in calls_file.calls(path)]
    assert found == list(range(len(found)))
    assert 50 < len(found) < 1000
    assert calls_file.ended(path) == calls_file.DISK
    assert "No space left on device" in caplog.text


def test_a_disk_without_any_room_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = recorder(tmp_path / "calls", file=os.open("/dev/full", os.O_WRONLY))
    made.called("hook", {})
    made.close(TIMEOUT_S)
    assert "ends after 0 frames: [Errno 28] No space left on device" in caplog.text
    assert "has no end mark" in caplog.text


#: Records calls for ever, below a limit on the size of files.
WRITER = """
import sys
from pathlib import Path
from kvferry.recording import Recorder
made = Recorder(Path(sys.argv[1]), bytes_max=1 << 30, header={})
number = 0
print("begun", flush=True)
while made.recording:
    made.called("hook", {"number": number})
    number += 1
made.close(10.0)
"""


def write_in_process(path: Path, **popen: Any) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True, **popen)


def test_a_limit_on_the_size_of_files_ends_the_recording(tmp_path: Path) -> None:
    path = tmp_path / "calls"

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_007, 300_007))

    process = write_in_process(path, preexec_fn=limit)
    assert process.wait(TIMEOUT_S) == 0
    found = list(numbers(path))
    assert found == list(range(len(found)))
    assert len(found) > 4000
    assert calls_file.ended(path) == calls_file.DISK, "the end mark took the place of the last frames"


def test_the_file_of_a_killed_engine_simply_ends(tmp_path: Path) -> None:
    path = tmp_path / "calls"
    process = write_in_process(path)
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    eventually("much is written", lambda: path.stat().st_size > 100_000)
    process.send_signal(signal.SIGKILL)
    process.wait(TIMEOUT_S)
    found: list[int] = []
    with pytest.raises(Cut):
        found.extend(frame.fields[1]["number"] for frame in frames(path) if frame.kind == CALL)
    assert found == [] or found == list(range(len(found)))
    assert list(itertools.islice(numbers(path), 1000)) == list(range(1000))


def numbers(path: Path) -> Any:
    for frame in frames(path):
        if frame.kind == CALL:
            yield frame.fields[1]["number"]


def test_a_frame_that_is_too_long_ends_the_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "FRAME_BYTES_MAX", 1000)
    path = tmp_path / "calls"
    made = recorder(path)
    made.called("hook", {"number": 0})
    made.called("hook", {"number": "x" * 2000})
    made.called("hook", {"number": 2})
    eventually("the recording has ended", lambda: not made.recording)
    made.close(TIMEOUT_S)
    assert [arguments["number"] for _, arguments, _ in calls_file.calls(path)] in ([], [0])
    assert calls_file.ended(path) == calls_file.FAULT


class FakeClient:
    """A client without a leader."""

    def __init__(self) -> None:
        self.listening, self.epoch = True, 5
        self.asked: list[PendingRequest] = []

    def request(self, message: Any, timeout_s: float) -> PendingRequest:
        self.asked.append(pending(len(self.asked), message))
        return self.asked[-1]


def test_the_sizes_of_each_leader_are_recorded_once_it_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    path = tmp_path / "calls"
    made = recorder(path)
    sizes, client = LeaderSizes(made), FakeClient()
    monkeypatch.setattr(recording.time, "monotonic", lambda: now)
    ranks = [wire.RankStatus(rank=rank, attached=True) for rank in range(2)]

    def answer(**changes: Any) -> None:
        tiers = [wire.TierStatus(tier=2, pages=100, used_pages=7)]
        said = wire.StatusAnswer(version="1", epoch=client.epoch, ratio=8, ready=True, ranks=ranks, tiers=tiers)
        client.asked[-1]._end(wire.StatusAnswer(**{**vars_of(said), **changes}), None)

    client.listening = False
    assert sizes.turn(client) is None
    client.listening = True
    assert sizes.turn(client) == now + 1.0
    assert sizes.turn(client) is None, "until the answer"
    answer(ready=False)
    assert sizes.turn(client) == now + 1.0
    assert len(client.asked) == 1
    now += 1.0
    assert sizes.turn(client) == now + 1.0
    answer()
    assert sizes.turn(client) is None
    now += 10.0
    assert sizes.turn(client) is None
    assert len(client.asked) == 2
    client.epoch = 6
    sizes.turn(client)
    client.asked[-1]._end(None, Failure(12, "late", reported=False))
    assert sizes.turn(client) == now + 1.0
    now += 1.0
    sizes.turn(client)
    answer()
    sizes.turn(client)
    made.close(TIMEOUT_S)
    found = [frame.fields for frame in frames(path) if frame.kind == calls_file.LEADER]
    assert found == [[epoch, "1", 8, 2, 1, [[2, 100, 7]]] for epoch in (5, 6)]


def vars_of(message: Any) -> dict[str, Any]:
    return {name: getattr(message, name) for name in message.__struct_fields__}


# The hooks of vLLM.


def test_every_hook_of_the_schedulers_side_is_recorded() -> None:
    assert set(ARGUMENTS) - {"reset_prefix_cache"} == set(HOOKS) - OF_RANKS
    page = (Path(__file__).parents[2] / "docs" / "recording.md").read_text()
    assert [name for name in ARGUMENTS if f"`{name}`" not in page] == []


def only_file(folder: Path) -> Path:
    (path,) = folder.glob("calls.*")
    return path


def recorded(tmp_path: Path, **extra: Any) -> Stepped:
    return Stepped(config=engine_config(transfer_config(tmp_path, record=str(tmp_path / "calls"), **extra)))


def test_calls_are_recorded_with_their_answers(tmp_path: Path) -> None:
    engine = recorded(tmp_path)
    found(engine, 2)
    prompt = tokens(PAGE_TOKENS * 4 + 3, seed=1)
    request = engine.add(prompt)
    for _ in engine.until_over(request):
        answer_loads(engine, wire.LoadAnswer(2))
    engine.connector.has_pending_push_work()
    engine.scheduler.reset_prefix_cache()
    engine.connector.reset_cache()
    engine.connector.request_finished(engine.add([1, 2]), [])
    # As by another caller, who names the arguments.
    engine.connector.get_num_new_matched_tokens(request=request, num_computed_tokens=0)
    engine.connector.shutdown()
    path = only_file(tmp_path)
    read = list(frames(path))
    header = read[0].fields[0]
    assert (header["ranks"], header["replica"], header["hash_tokens"]) == (1, 0, PAGE_TOKENS)
    assert header["groups"][0]["attention"] == "full"
    assert header["settings"]["record"] == str(tmp_path / "calls")
    made = calls_file.calls(path)
    names = [name for name, _, _ in made]
    assert set(names) >= set(ARGUMENTS) - {"has_pending_block_frees"}
    assert names[0] == "bind_gpu_block_pool"
    assert made[0][1] == {"pages": 64}
    arguments = {name: arguments for name, arguments, _ in reversed(made)}
    answers = {name: answer for name, _, answer in reversed(made)}
    assert arguments["on_new_request"] == {"request": "r0", "tokens": 131, "prompt_tokens": 131, "lora": None}
    arrived = next(frame for frame in read if frame.kind == CALL and frame.fields[0] == "on_new_request")
    _, _, hash_bytes, items = arrived.fields
    assert Hashes().expand(items, hash_bytes) == b"".join(map(bytes, request.block_hashes[:4]))
    asked = arguments["get_num_new_matched_tokens"]
    assert asked == {"request": "r0", "computed": 0, "hashes": 4}
    assert answers["get_num_new_matched_tokens"] == [2 * PAGE_TOKENS, True]
    allocated = arguments["update_state_after_alloc"]
    assert (allocated["request"], allocated["external"]) == ("r0", 2 * PAGE_TOKENS)
    assert len(allocated["tables"][0]) >= 2
    steps = [(arguments, answer) for name, arguments, answer in made if name == "build_connector_meta"]
    scheduled = [step["scheduled"] for step, _ in steps if step["scheduled"]]
    assert sum(each["r0"] for each in scheduled) == sum(engine.scheduled(request))
    first = next(step for step, _ in steps if step["scheduled"])
    ((name, computed, anew, tables),) = first["changes"]
    assert (name, computed, anew) == ("r0", 2 * PAGE_TOKENS, True)
    assert tables[0][:2] == allocated["tables"][0][:2]
    assert any(answer["written_through"] for _, answer in steps)
    ended = arguments["request_finished_all_groups"]
    assert (ended["request"], ended["status"]) == ("r0", "FINISHED_LENGTH_CAPPED")
    assert len(ended["tables"][0]) == 5
    results = [answer for name, _, answer in made if name == "update_connector_output"]
    assert ["r0"] in results, "the end of the load"
    assert answers["reset_prefix_cache"] in (True, False)
    assert answers["reset_cache"] is True
    assert answers["has_pending_push_work"] in (True, False)
    assert calls_file.ended(path) == calls_file.CLOSED


def test_what_cannot_be_recorded_ends_the_recording_and_no_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(scheduler_output: Any) -> dict[str, Any]:
        raise LookupError("injected")

    engine = recorded(tmp_path)
    monkeypatch.setitem(ARGUMENTS, "build_connector_meta", broken)
    found(engine, 0)
    engine.run(engine.add(tokens(PAGE_TOKENS * 2, seed=1)))
    assert engine.connector.fault == ""
    engine.connector.shutdown()
    assert calls_file.ended(only_file(tmp_path)) == calls_file.FAULT
    assert "the arguments of build_connector_meta: LookupError('injected')" in caplog.text


def test_a_hook_that_fails_is_recorded_with_the_answer_that_vllm_gets(tmp_path: Path) -> None:
    engine = recorded(tmp_path)
    found(engine, 0)
    engine.connector._scheduler.matched_tokens = lambda *given: 1 // 0
    engine.run(engine.add(tokens(PAGE_TOKENS * 2, seed=1)))
    assert engine.connector.fault == "get_num_new_matched_tokens"
    engine.connector.shutdown()
    answers = [answer for name, _, answer in calls_file.calls(only_file(tmp_path)) if name == engine.connector.fault]
    assert answers
    assert all(answer == [0, False] for answer in answers)


def test_without_the_setting_nothing_is_recorded(tmp_path: Path) -> None:
    engine = Stepped(config=engine_config(transfer_config(tmp_path)))
    assert engine.connector.calls is None
    assert engine.rank.calls is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"record": "calls"}, "record is 'calls': give an absolute path"),
        ({"record": "/tmp/"}, "record is '/tmp/': give an absolute path"),
        ({"record": 7}, "record is 7: give an absolute path"),
        ({"record": "/a", "record_mb_max": 0}, "record_mb_max is 0: give a whole number from 1 to 1000000"),
    ],
)
def test_a_wrong_setting_is_refused(extra: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match="kv_connector_extra_config") as refused:
        Settings.read(extra)
    assert text in str(refused.value)


def test_a_file_that_cannot_be_created_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be created: No such file or directory: name a file in a folder"):
        Stepped(config=engine_config(transfer_config(tmp_path, record=str(tmp_path / "missing" / "calls"))))


def test_each_start_has_a_file_of_its_own_for_its_owner_alone(tmp_path: Path) -> None:
    for _ in range(2):
        recorded(tmp_path).connector.shutdown()
    files = list(tmp_path.glob("calls.0.*"))
    assert len(files) == 2
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in files)


def test_the_hooks_of_the_interface_are_those_that_are_described() -> None:
    """A hook may be called with its arguments by name."""
    from kvferry.vllm import KvferryConnector

    for name, describe in ARGUMENTS.items():
        if name != "reset_prefix_cache":
            known = list(inspect.signature(getattr(KvferryConnector, name)).parameters)[1:]
            assert list(inspect.signature(describe).parameters) == known, name


def test_a_warning_names_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        made = recorder(tmp_path / "calls")
        made.fault("something")
        made.close(TIMEOUT_S)
    assert f"the recording {tmp_path / 'calls'} ends after" in caplog.text
