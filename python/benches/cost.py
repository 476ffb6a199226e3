"""Costs of the connector beside vLLM's scheduler, with a real kvferry and without a model. Pages have 16 tokens.

``decode``: 256 requests run, and each step computes one token of each, so that 16 pages are full in a step. Steps begin
at a fixed interval, in which an engine would run its model. Prints

* the time in the connector's hooks of a step, scheduler and rank, p50 and p99;
* the CPU time of the connector's own threads, as a share of the wall time. The threads hold Python's lock for at most
  that time; the threads of the socket library, which never do, do not count.

``prompts``: prompts of 32,768 tokens arrive one after another, and are computed in chunks of 8,192: cold ones, and warm
ones of which host memory has all pages. Half of them arrive 20 ms before their first step, as in a busy engine, half
just before it, as in an idle one. Prints the longest call of each hook of the scheduler's side for a prompt.

``--connector``: the same with the scheduler's side of a connector that vLLM has itself, without its rank and without
copies (:mod:`other_connectors`).
"""

import argparse
import contextlib
import gc
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import other_connectors
import torch
from daemon import Daemon, eventually
from real_scheduler import Stepped, engine_config, transfer_config
from vllm.utils.gc_utils import freeze_gc_heap
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

from kvferry.engine_client import EngineClient

PAGE_TOKENS = 16
HEADS, HEAD_SIZE, LAYERS = 4, 32, 4
#: Bytes of a page: keys and values of all layers, 4 bytes each.
PAGE_BYTES = LAYERS * HEADS * PAGE_TOKENS * 2 * HEAD_SIZE * 4

#: Hooks that vLLM calls in or around a step.
SCHEDULER_HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished_all_groups",
    "has_pending_block_frees",
)
RANK_HOOKS = (
    "bind_connector_metadata",
    "wait_for_save",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "build_connector_worker_meta",
)


class Collections:
    """CPU time of Python's garbage collections on the thread of the hooks.

    They fall into whichever call allocates when they are due.
    """

    def __init__(self) -> None:
        self.spent_s = self._begun = 0.0
        self._thread = threading.get_ident()
        gc.callbacks.append(self._collects)

    def _collects(self, phase: str, _info: dict[str, int]) -> None:
        if threading.get_ident() != self._thread:
            return
        if phase == "start":
            self._begun = time.thread_time()
        else:
            self.spent_s += time.thread_time() - self._begun


COLLECTIONS = Collections()


class Clocked:
    """Adds up the time in some methods of an object."""

    def __init__(self, owner: Any, names: tuple[str, ...]):
        self.calls = []
        self.own = []
        for name in names:
            setattr(owner, name, self._timed(getattr(owner, name)))

    #: Seconds of each call since the last :meth:`take`.
    calls: list[float]
    #: CPU time of each of these calls, without garbage collections.
    own: list[float]

    def _timed(self, call: Any) -> Any:
        def timed(*arguments: Any, **named: Any) -> Any:
            begun, cpu, collections = time.perf_counter(), time.thread_time(), COLLECTIONS.spent_s
            try:
                return call(*arguments, **named)
            finally:
                self.calls.append(time.perf_counter() - begun)
                self.own.append(time.thread_time() - cpu - (COLLECTIONS.spent_s - collections))

        return timed

    def take(self) -> list[float]:
        calls, self.calls, self.own = self.calls, [], []
        return calls


def memory(pages: int) -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=PAGE_TOKENS, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=torch.float32)
    layers = [f"layer.{layer}" for layer in range(LAYERS)]
    return KVCacheConfig(pages, [], [KVCacheGroupSpec(layers, spec)])


def cpu_s(threads: list[threading.Thread]) -> float:
    """CPU time of threads of this process, from the system."""
    ticks = 0
    for thread in threads:
        fields = Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / 100


def connector_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("kvferry")]


class Kvferry:
    """kvferry's connector with its rank, and a daemon that copies."""

    def __init__(self, daemon: Daemon):
        self._daemon = daemon

    def engine(self, pages: int, **changes: Any) -> Stepped:
        """vLLM's scheduler and a rank whose memory a worker has."""
        transfer = transfer_config(self._daemon.socket_dir, verify=0)
        config = engine_config(transfer, block_size=PAGE_TOKENS, **changes)
        stepped = Stepped(pages=pages, config=config, kv=memory(pages), client=EngineClient)
        kv = torch.zeros(LAYERS, pages, HEADS, PAGE_TOKENS, 2 * HEAD_SIZE)
        stepped.rank.register_kv_caches({f"layer.{layer}": kv[layer] for layer in range(LAYERS)})
        self._daemon.wait_ready()
        return stepped

    def stored_pages(self) -> int:
        return self._daemon.counter("published_pages")

    def copies(self) -> bool:
        return bool(self._daemon.status()["copies_under_way"])


class Other:
    """The scheduler's side of a connector that vLLM has itself, with a stand-in for the rank."""

    def __init__(self, connector: str, memory_bytes: int):
        self._transfer = other_connectors.transfer_config(connector, memory_bytes)
        self._rank = other_connectors.STAND_INS[connector]()
        name = other_connectors.NAMES[connector]
        print(f"{name}, scheduler's side only: its rank is a stand-in that copies nothing and reports each transfer")
        print("as finished in the next step")

    def engine(self, pages: int, **changes: Any) -> Stepped:
        config = engine_config(self._transfer, block_size=PAGE_TOKENS, **changes)
        kv = memory(pages)
        layer_bytes = PAGE_BYTES // LAYERS
        tensor = KVCacheTensor(pages * PAGE_BYTES, kv.kv_cache_groups[0].layer_names, pages * layer_bytes, layer_bytes)
        return Stepped(pages=pages, config=config, kv=replace(kv, kv_cache_tensors=[tensor]), rank=self._rank)

    def stored_pages(self) -> int:
        return self._rank.stored_pages

    def copies(self) -> bool:
        return self._rank.busy()


def engine(connector: Kvferry | Other, pages: int, **changes: Any) -> Stepped:
    stepped = connector.engine(pages, **changes)
    # As vLLM's engine does after its start.
    freeze_gc_heap()
    return stepped


def percentiles(seconds: list[float]) -> str:
    ordered = sorted(each * 1e6 for each in seconds)
    p50, p99 = (ordered[int((len(ordered) - 1) * share)] for share in (0.5, 0.99))
    return f"p50 {p50:.0f} us, p99 {p99:.0f} us, most {ordered[-1]:.0f} us"


def decode(connector: Kvferry | Other, arguments: argparse.Namespace) -> None:
    prompt, running, steps = 64, arguments.running, arguments.steps
    arriving = running // 2
    stepped = engine(
        connector,
        running * ((prompt + arriving + steps) // PAGE_TOKENS + 3),
        max_model_len=prompt + arriving + steps + 64,
        max_num_seqs=running,
        max_num_batched_tokens=8192,
    )
    requests = []
    for number in range(running):
        requests.append(stepped.add([number % 1000] * 16 + list(range(prompt - 16)), max_tokens=arriving + steps + 48))
        # Two arrive in each step, so that their pages are not full in the same steps.
        if number % 2:
            stepped.step()
    scheduler, rank = Clocked(stepped.connector, SCHEDULER_HOOKS), Clocked(stepped.rank, RANK_HOOKS)
    eventually("every request decodes", lambda: stepped.step() and all(each.num_output_tokens for each in requests))
    scheduler.take(), rank.take()
    before = connector.stored_pages()
    threads = connector_threads()
    hooks: list[tuple[float, float]] = []
    began, began_cpu = time.perf_counter(), cpu_s(threads)
    late = 0
    for number in range(steps):
        stepped.step()
        hooks.append((sum(scheduler.take()), sum(rank.take())))
        pause = began + (number + 1) * arguments.step_ms / 1000 - time.perf_counter()
        late += pause < 0
        time.sleep(max(pause, 0.0))
    wall_s, used_s = time.perf_counter() - began, cpu_s(threads) - began_cpu
    print(f"{running} running requests, {steps} steps of {arguments.step_ms:.0f} ms in {wall_s:.1f} s, {late} late")
    print(f"pages stored: {connector.stored_pages() - before}")
    print("hooks of the scheduler in a step:", percentiles([each for each, _ in hooks]))
    print("hooks of the rank in a step:", percentiles([each for _, each in hooks]))
    names = ", ".join(thread.name for thread in threads) or "none"
    print(f"threads of the connector ({names}): {100 * used_s / wall_s:.2f} % of the time")


def prompts(connector: Kvferry | Other, arguments: argparse.Namespace) -> None:
    tokens = 32_768
    stepped = engine(
        connector, 3 * tokens // PAGE_TOKENS, max_model_len=tokens + 64, max_num_seqs=4, max_num_batched_tokens=8192
    )
    # As many different prompts as host memory has room for, with some to spare.
    different = int(arguments.g2_gib * 2**30 * 3 // 4) // PAGE_BYTES // (tokens // PAGE_TOKENS)
    every = {name: Clocked(stepped.connector, (name,)) for name in SCHEDULER_HOOKS}
    kinds = [(kind, arrival) for kind in ("cold", "warm") for arrival in ("a busy", "an idle")]
    for at, (kind, arrival) in enumerate(kinds):
        spent: dict[str, list[float]] = {name: [] for name in SCHEDULER_HOOKS}
        own: dict[str, list[float]] = {name: [] for name in SCHEDULER_HOOKS}
        loaded = 0
        # Warm prompts are sent once before they are measured.
        once = range(-different, 0) if kind == "warm" else range(0)
        for number in [*once, *range(arguments.prompts)]:
            first = 1_000 * at + (number % different if kind == "warm" else number)
            prompt = [first, *range(tokens - 1)]
            # The copies of the last one are over, and no page of the device serves it.
            eventually("copies are over", lambda: stepped.step() and not connector.copies())
            eventually("the pages are reset", lambda: stepped.step() and stepped.scheduler.reset_prefix_cache())
            for each in every.values():
                each.take()
            asking = stepped.add(prompt, max_tokens=1)
            if arrival == "a busy":
                time.sleep(arguments.step_ms / 1000)
            stepped.run(asking)
            if number < 0:
                continue
            loaded += sum(stepped.scheduled(asking)) < tokens
            for name, each in every.items():
                own[name] += [max(each.own)] if each.own else []
                spent[name] += [max(calls)] if (calls := each.take()) else []
        print(f"{arguments.prompts} {kind} prompts of {tokens} tokens, {arrival} engine, {loaded} of them loaded")
        for name, times in spent.items():
            if times:
                print(f"  {name}: {percentiles(times)}; its own CPU time: {percentiles(own[name])}")


@contextlib.contextmanager
def started(arguments: argparse.Namespace) -> Iterator[Kvferry | Other]:
    """The connector that is measured, with host memory of the given size."""
    if arguments.connector != "kvferry":
        yield Other(arguments.connector, int(arguments.g2_gib * 2**30))
        return
    with tempfile.TemporaryDirectory(prefix="kvferry-cost-") as folder:
        daemon = Daemon(Path(folder) / "s", ranks=1, g2=f"{int(arguments.g2_gib * 1024)}MiB")
        daemon.start()
        try:
            yield Kvferry(daemon)
        finally:
            daemon.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["decode", "prompts"])
    parser.add_argument("--connector", choices=["kvferry", *other_connectors.NAMES], default="kvferry")
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--g2-gib", type=float, default=4.0)
    arguments = parser.parse_args()
    with started(arguments) as connector:
        {"decode": decode, "prompts": prompts}[arguments.what](connector, arguments)


if __name__ == "__main__":
    # The model has no part in it.
    os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
    main()
