"""vLLM's own classes read the file of ``kvferry replay --events``, and a router rebuilds the tiers from it."""

import json
import subprocess
from pathlib import Path

import msgspec
from daemon import PROGRAM, TIMEOUT_S, environment
from router import Router
from vllm.distributed.kv_events import BlockStored, KVEventBatch


def test_classes_of_vllm_read_the_events_of_a_replay(tmp_path: Path) -> None:
    events, report = tmp_path / "events", tmp_path / "report"
    sizes = ["--requests", "100", "--g1-pages", "16", "--g2-pages", "1000", "--g3-pages", "4000", "--speedup", "20"]
    command = [PROGRAM, "replay", "--mode", "offline", "--quiet", *sizes, "--json", report, "--events", events]
    subprocess.run([str(word) for word in command], env=environment(), check=True, timeout=TIMEOUT_S)
    router, last = Router(), 0.0
    for line in events.read_bytes().splitlines():
        batch = msgspec.json.decode(line, type=KVEventBatch)
        assert batch.ts >= last
        last = batch.ts
        assert batch.data_parallel_rank is None
        # The router fails for a page that a medium gets or loses twice.
        router.take(batch.events)
    stored = [event for event in router.events if isinstance(event, BlockStored)]
    assert {event.block_size for event in stored} == {16}
    assert not any(event.token_ids for event in stored)
    told = json.loads(report.read_text())
    held = {medium: {page[2] for page in router.pages() if page[0] == medium} for medium in ("CPU", "STORAGE")}
    assert 0 < len(held["CPU"]) <= told["arena"]["used_pages"]
    assert 0 < len(held["STORAGE"]) <= told["moves"]["g3_used_pages"]
    assert last > 0
