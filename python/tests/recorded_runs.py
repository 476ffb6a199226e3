"""Recorded engines: vLLM's scheduler with a real leader, one recording for each engine, and their replay."""

import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from daemon import PROGRAM, TIMEOUT_S, Daemon, environment, eventually
from engine import PAGE_TOKENS, tokens, transfer_config
from real_scheduler import Stepped, engine_config, memory
from vllm.v1.core.kv_cache_utils import resolve_cache_hit_alignment_tokens, resolve_kv_cache_block_sizes
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request, RequestStatus

from kvferry.engine_client import EngineClient

PAGES = 64
WINDOW_TOKENS = 100
#: Elements of a state, as many as a page of attention has.
_STATE = PAGE_TOKENS * 2 * 4 * 32


class Recorded:
    """An engine of one rank that is recorded."""

    def __init__(self, daemon: Daemon, folder: Path, *, kind: str = "full", pages: int = PAGES, **extra: Any):
        self.daemon = daemon
        self._folder, self._replica = folder, extra.get("replica", 0)
        extra = {"record": str(folder / "calls"), "store_run_pages": 1, "store_pages_percent": 50, **extra}
        config = engine_config(transfer_config(daemon.socket_dir, **extra))
        kv = memory(pages) if kind == "full" else _hybrid(config, kind, pages)
        self.engine = engine = Stepped(pages=pages, config=config, kv=kv, client=EngineClient)
        page: Any = torch.zeros(pages, 2, PAGE_TOKENS, 4, 32)
        tensors: dict[str, Any] = {f"layer.{at}": page.clone() for at in range(len(kv.kv_cache_groups))}
        if kind == "state":
            tensors["layer.0"] = [torch.zeros(pages, _STATE)]
        engine.rank.register_kv_caches(tensors)
        self.side = engine.connector._scheduler

    @property
    def path(self) -> Path:
        (path,) = self._folder.glob(f"calls.{self._replica}.*")
        return path

    def wait_recorded(self) -> None:
        """Waits until the sizes of the present leader are recorded."""
        self.daemon.wait_ready()

        def known() -> bool:
            client = self.side._client
            return client.listening and self.side._sizes._epoch == client.epoch

        eventually("the leader's sizes are recorded", known)

    def until_over(self, *requests: Request) -> None:
        def over() -> bool:
            self.engine.step()
            return all(RequestStatus.is_finished(request.status) for request in requests)

        eventually("the requests end", over)

    def until_idle(self) -> None:
        eventually("every request has ended", lambda: self.engine.step() and not self.side._client._count)

    def ask(self, *prompts: list[int]) -> None:
        self.until_over(*[self.engine.add(prompt) for prompt in prompts])

    def turns(self, count: int, seed: int = 1, each: Callable[[int], None] = lambda turn: None) -> None:
        """Sends pairs of prompts, of which some are known and some continue known ones, and resets vLLM's own cache."""
        draw = random.Random(seed)
        prompts = [tokens(PAGE_TOKENS * draw.randint(2, 10) + 5, at) for at in range(12)]
        for turn in range(count):
            first = draw.choice(prompts)
            longer = draw.choice(prompts)[: draw.randint(40, 200)] + tokens(70, 1000 * seed + turn)
            self.ask(first, longer)
            if turn % 3 == 2:
                self.engine.scheduler.reset_prefix_cache()
            each(turn)

    def end(self) -> None:
        self.until_idle()
        self.engine.connector.shutdown()
        self.engine.rank.shutdown()


def _hybrid(config: Any, kind: str, pages: int) -> KVCacheConfig:
    """Two groups: a window or a state, and full attention."""
    attention: dict[str, Any] = {
        "block_size": PAGE_TOKENS,
        "num_kv_heads": 4,
        "head_size": 32,
        "dtype": torch.float32,
    }
    if kind == "state":
        config.cache_config.mamba_cache_mode = "align"
        first: Any = MambaSpec(
            block_size=PAGE_TOKENS, shapes=((_STATE,),), dtypes=(torch.float32,), mamba_cache_mode="align"
        )
    else:
        first = SlidingWindowSpec(**attention, sliding_window=WINDOW_TOKENS)
    specs = [first, FullAttentionSpec(**attention)]
    groups = [KVCacheGroupSpec([f"layer.{at}"], spec) for at, spec in enumerate(specs)]
    found = KVCacheConfig(pages, [], groups)
    register_all_kvcache_specs(config)
    config.cache_config.num_gpu_blocks = pages
    block, unit = resolve_kv_cache_block_sizes(found, config)
    found.hash_block_size = unit
    found.cache_hit_alignment_tokens = resolve_cache_hit_alignment_tokens(found, config, block, unit)
    return found


def replayed(path: Path, *arguments: str) -> tuple[int, dict[str, list[str]], str]:
    """Returns the exit code, the rows of the report, and what was written to standard error."""
    command = [PROGRAM, "replay", "--calls", str(path), *arguments]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=4 * TIMEOUT_S)
    rows: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        rows.setdefault(line[:16].strip(), []).append(line[17:])
    return done.returncode, rows, done.stderr
