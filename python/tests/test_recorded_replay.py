"""A recorded engine is replayed with the same answers: vLLM's scheduler with a real leader, and ``replay --calls``."""

import random
import shutil
from pathlib import Path

import calls_file
import pytest
import torch
from calls_file import LOAD, LOOKUP, REQUEST, STORE, frames
from daemon import Daemon, eventually, running
from engine import PAGE_TOKENS, tokens, transfer_config
from real_scheduler import Stepped, engine_config
from recorded_runs import replayed
from vllm.v1.request import Request, RequestStatus

from kvferry.engine_client import EngineClient

PAGES = 64
#: Pages of host memory: fewer than the prompts have, so that pages are evicted and refused.
HOST_PAGES = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("calls")


@pytest.fixture(scope="module")
def recording(folder: Path) -> Path:
    """A recording of an engine that stores, loads, resets and aborts, beside a small host memory."""
    with running(ranks=1, ratio=4, g2=f"{HOST_PAGES}x32KiB") as daemon:
        run_engine(daemon, folder)
    (path,) = folder.glob("calls.0.*")
    return path


def run_engine(daemon: Daemon, folder: Path) -> None:
    transfer = transfer_config(daemon.socket_dir, record=str(folder / "calls"), store_run_pages=1)
    engine = Stepped(pages=PAGES, config=engine_config(transfer), client=EngineClient)
    engine.rank.register_kv_caches({"layer.0": torch.zeros(PAGES, 2, PAGE_TOKENS, 4, 32)})
    daemon.wait_ready()
    side = engine.connector._scheduler
    eventually("the leader's sizes are recorded", lambda: side._sizes._epoch)
    draw = random.Random(1)
    prompts = [tokens(PAGE_TOKENS * draw.randint(2, 10) + 5, seed) for seed in range(12)]

    def until_over(*requests: Request) -> None:
        def over() -> bool:
            engine.step()
            return all(RequestStatus.is_finished(request.status) for request in requests)

        eventually("the requests end", over)

    for number in range(40):
        first = draw.choice(prompts)
        # Two at a time, of which one continues a known prompt.
        both = [engine.add(first), engine.add(draw.choice(prompts)[: draw.randint(40, 200)] + tokens(70, 100 + number))]
        if number % 8 == 3:
            engine.step()
            engine.scheduler.finish_requests(both[1].request_id, RequestStatus.FINISHED_ABORTED)
        until_over(*both)
        if number % 5 == 4:
            engine.scheduler.reset_prefix_cache()
        if number == 25:
            eventually("a reset of the connector", lambda: engine.step() and engine.connector.reset_cache())
    # What is in flight ends before the engine does.
    eventually("every request has ended", lambda: engine.step() and not side._client._count)
    engine.connector.shutdown()
    engine.rank.shutdown()


def test_a_recorded_run_replays_with_the_same_answers(recording: Path) -> None:
    assert calls_file.ended(recording) == calls_file.CLOSED
    sent = [frame.fields[1] for frame in frames(recording) if frame.kind == REQUEST]
    assert min(sent.count(kind) for kind in (LOOKUP, LOAD, STORE)) >= 10, "too little happens"
    code, rows, errors = replayed(recording)
    print(rows, errors)
    assert code == 0, (rows, errors)
    assert rows["different"] == ["0"]
    assert rows["not comparable"] == ["0"]
    assert rows["equal"] == rows["compared"]
    assert int(rows["compared"][0]) > len(sent) - 10
    assert int(rows["bytes verified"][0]) > 10 * 1024
    assert rows["bytes wrong"] == ["0"]
    assert rows["replayed with"] == [f"{HOST_PAGES} pages of host memory, ratio 4"]
    assert rows["ends"] == ["with the engine"]


def test_other_sizes_give_other_answers(recording: Path) -> None:
    code, rows, errors = replayed(recording, "--g2-pages", "400")
    print(rows, errors)
    assert code == 1
    assert int(rows["different"][0]) > 0
    assert int(rows["different"][0]) + int(rows["equal"][0]) + int(rows["not comparable"][0]) == int(
        rows["compared"][0]
    )
    assert "answers differ, the first: frame" in errors
    assert "recorded" in rows["difference"][0]
    assert "replayed" in rows["difference"][0]


def test_a_recording_that_was_cut_is_replayed_to_there(recording: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut"
    shutil.copy(recording, path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size * 2 // 3)
    code, rows, errors = replayed(path)
    assert code == 0, (rows, errors)
    assert "the file was cut" in rows["ends"][0] or "without an end mark" in rows["ends"][0]
    assert int(rows["compared"][0]) > 10
    assert rows["equal"] == rows["compared"]


def test_a_damaged_recording_is_refused_and_named(recording: Path, tmp_path: Path) -> None:
    path = tmp_path / "damaged"
    data = bytearray(recording.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    code, rows, errors = replayed(path)
    assert code == 65
    assert rows == {}
    assert f"--calls {path}: frame" in errors
