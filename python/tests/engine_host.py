"""A process with a vLLM engine that executes commands: one JSON object a line in, one a line out.

Usage: ``engine_host.py REPLY_FD``; the first line is the engine's configuration.
"""

import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import load
import records


def sampling(order: dict[str, Any]) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=order.get("max_tokens", 16), logprobs=5, ignore_eos=True)


def prompt(order: dict[str, Any]) -> dict[str, Any]:
    given = {"prompt_token_ids": order["tokens"]}
    if order.get("salt"):
        given["cache_salt"] = order["salt"]
    return given


class Host:
    """The engine, and the commands that it executes."""

    def __init__(self, config: dict[str, Any]):
        spent = watch_connector()
        from vllm import LLM

        begun = time.monotonic()
        self.llm = LLM(**config)
        self.started = {"start_s": time.monotonic() - begun, "connector_s": spent}

    def generate(self, order: dict[str, Any]) -> list[dict[str, Any]]:
        prompts = [prompt(each) for each in order["prompts"]]
        outputs = self.llm.generate(prompts, sampling(order), use_tqdm=False)
        return [answer(output) for output in outputs]

    def reset(self, order: dict[str, Any]) -> bool:
        return self.llm.llm_engine.reset_prefix_cache(order.get("running", False), order.get("connector", False))

    def metrics(self, order: dict[str, Any]) -> dict[str, float]:
        found = {metric.name: getattr(metric, "value", None) for metric in self.llm.get_metrics()}
        return {name: value for name, value in found.items() if isinstance(value, (int, float))}

    def statistics(self, order: dict[str, Any]) -> list[tuple[str, dict[str, str], float]]:
        """The connector's metrics: name, labels, and value; of a histogram the number of values."""
        found = [metric for metric in self.llm.get_metrics() if metric.name.startswith("vllm:kvferry_")]
        return [
            (metric.name, metric.labels, metric.value if hasattr(metric, "value") else metric.count) for metric in found
        ]

    # Available only with the engine in this process.

    def load(self, order: dict[str, Any]) -> dict[str, Any]:
        """Serves a mixed load."""
        wanted = load.requests(order["count"], order["seed"], aborts=order.get("aborts", 0.0))
        return load.Driver(self.llm.llm_engine, wanted, sampling, order["at_a_time"]).run()

    def timed(self, order: dict[str, Any]) -> dict[str, Any]:
        """Measures prompts that arrive at once."""
        return load.timed(self.llm.llm_engine, order["prompts"], sampling(order))

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    def add(self, order: dict[str, Any]) -> None:
        self.llm.llm_engine.add_request(order["id"], prompt(order), sampling(order))

    def step(self, order: dict[str, Any]) -> dict[str, Any]:
        """Runs one step of the engine, idle or not. Returns the requests that ended in it, and the engine's state."""
        core = self.llm.llm_engine.engine_core.engine_core
        outputs = []
        if self.llm.llm_engine.has_unfinished_requests():
            outputs = self.llm.llm_engine.step()
        elif core.scheduler.has_requests():
            core.step_fn()
        pool = core.scheduler.kv_cache_manager.block_pool
        return {
            "done": {output.request_id: answer(output) for output in outputs if output.finished},
            "free": pool.get_num_free_blocks(),
            "status": {request.request_id: request.status.name for request in core.scheduler.requests.values()},
        }

    def records(self, order: dict[str, Any]) -> list[str]:
        """Names of what the connector keeps of requests and copies."""
        return sorted(records.left(self.scheduler.connector._scheduler))

    def hold(self, order: dict[str, Any]) -> None:
        """While on, this engine's rank does not report written pages: stores wait for the report, however long."""
        from kvferry.rank import RankSession

        if order["on"]:
            self.wrote = RankSession.wrote
            RankSession.wrote = lambda *_given, **_named: None
        else:
            RankSession.wrote = self.wrote

    def pause(self, order: dict[str, Any]) -> None:
        """Pauses with a clear cache, as engines do before their weights change, and before they sleep."""
        self.llm.llm_engine.engine_core.engine_core.pause_scheduler(order["mode"], True)

    def resume(self, order: dict[str, Any]) -> None:
        self.llm.llm_engine.engine_core.engine_core.resume_scheduler()

    def hooks(self, order: dict[str, Any]) -> list[str]:
        """The hooks of the connector that can fail."""
        import kvferry.vllm

        return sorted(name for name, hook in vars(kvferry.vllm.KvferryConnector).items() if hasattr(hook, "guarded"))

    def mend(self, order: dict[str, Any]) -> None:
        """Resets both sides of the connector to the state without a failed hook."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        for connector in (self.scheduler.connector, get_kv_transfer_group()):
            connector.fault = ""
        self.scheduler.connector._scheduler.verification._given_up = False

    def verify(self, order: dict[str, Any]) -> None:
        """While off, pages are used as they are loaded."""
        verification = self.scheduler.connector._scheduler.verification
        if order["on"]:
            del verification._must_check
        else:
            verification._must_check = lambda copy: False

    def wipe(self, order: dict[str, Any]) -> None:
        """Writes zeros to the KV memory of an engine whose cache is empty: changed bytes may be NaN, which attention
        on the CPU takes from the unused rest of a page."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        for tensors, _ in get_kv_transfer_group()._rank._memory.tensors():
            for tensor in tensors:
                tensor.zero_()

    def verified(self, order: dict[str, Any]) -> list[int]:
        """Pages of loads that were right, that could not be verified, and that were wrong."""
        found = self.scheduler.connector._scheduler.verification
        return [found.verified_pages, found.unverified_pages, found.verify_mismatches]

    def fault(self, order: dict[str, Any]) -> None:
        """Makes the next call of this hook raise."""
        import kvferry.vllm

        hook = getattr(kvferry.vllm.KvferryConnector, order["hook"])
        sound = hook.__wrapped__

        def broken(*arguments: Any, **named: Any) -> Any:
            hook.__wrapped__ = sound
            raise LookupError("injected")

        hook.__wrapped__ = broken

    def faults(self, order: dict[str, Any]) -> list[str]:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return [connector.fault for connector in (self.scheduler.connector, get_kv_transfer_group())]

    # Groups of pages, as the connector has registered them.

    def groups(self, order: dict[str, Any]) -> list[str]:
        return [group.attention for group in self.scheduler.connector._scheduler._served.groups]

    def units(self, order: dict[str, Any]) -> dict[str, int]:
        """Tokens of the smallest page, and of the unit of hits, which depend on the processor for some models."""
        served = self.scheduler.connector._scheduler._served
        return {"page": min(group.page_tokens for group in served.groups), "hit": served.hit_tokens}

    def spoil(self, order: dict[str, Any]) -> None:
        """Changes the pages of this group that the next load brings, before its request runs."""
        from kvferry.vllm.loads import Loads

        loaded, self.spoiled_pages = Loads.over, 0

        def spoiling(loads: Any, tracked: Any, copy: Any, **named: Any) -> None:
            Loads.over = loaded
            for part in copy.parts:
                if part.group == order["group"] and copy.answer is not None:
                    self.spoiled_pages += flip(part.group, part.pages)
            loaded(loads, tracked, copy, **named)

        Loads.over = spoiling

    def spoiled(self, order: dict[str, Any]) -> int:
        return self.spoiled_pages

    def leave_out(self, order: dict[str, Any]) -> None:
        """Stores no page of this group; with None, of every group again."""
        from kvferry.served import StoreCursor

        if not hasattr(self, "to_store"):
            self.to_store = StoreCursor.to_store
        to_store = self.to_store

        def partly(*arguments: Any) -> Iterator[Any]:
            return (part for part in to_store(*arguments) if part.group != order["group"])

        StoreCursor.to_store = to_store if order["group"] is None else partly

    def fail_load(self, order: dict[str, Any]) -> None:
        """Names pages in the next load that no lookup has found: the leader refuses it."""
        from kvferry.served import Part, Served

        to_load = Served.to_load

        def refused(*arguments: Any) -> list[Any] | None:
            Served.to_load = to_load
            *others, last = to_load(*arguments) or []
            return [*others, Part(last.group, last.first_page + 100, last.pages)]

        Served.to_load = refused

    def abort(self, order: dict[str, Any]) -> None:
        self.llm.llm_engine.abort_request([order["id"]])


def answer(output: Any) -> dict[str, Any]:
    """Returns tokens, and for each the five best with their log-probabilities; JSON keeps every bit of a float."""
    (made,) = output.outputs
    logprobs = [sorted((token, one.logprob) for token, one in step.items()) for step in made.logprobs]
    return {"tokens": list(made.token_ids), "logprobs": logprobs, "cached": output.num_cached_tokens}


def flip(group: int, pages: list[int]) -> int:
    """Changes every number in these pages of the rank's memory, in any number type; returns how many pages."""
    import torch
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    for tensor in get_kv_transfer_group()._rank._memory._groups[group].tensors:
        for page in pages:
            content = tensor[page].view(torch.uint8)
            # Signs of numbers of two and of four bytes; no exponent changes.
            signs = torch.tensor([0, 0x80, 0, 0x80], dtype=torch.uint8).repeat(content.shape[-1] // 4)
            content.bitwise_xor_(signs)
    return len(pages)


def watch_connector() -> list[float]:
    """Measures the connector's calls that the engine's start waits for."""
    import kvferry.vllm

    spent: list[float] = []
    for name in ("__init__", "register_kv_caches"):
        original = getattr(kvferry.vllm.KvferryConnector, name)

        def timed(*arguments: Any, _original: Any = original, **named: Any) -> Any:
            begun = time.monotonic()
            try:
                return _original(*arguments, **named)
            finally:
                spent.append(time.monotonic() - begun)

        setattr(kvferry.vllm.KvferryConnector, name, timed)
    return spent


def lines() -> Iterator[str]:
    """Lines of standard input, until its end.

    Python runs signal handlers in the main thread. A signal that another thread receives, or that arrives just before
    the main thread blocks in a read, would wait for the next line: so each signal also wakes this wait.
    """
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    source, unread = sys.stdin.fileno(), b""
    while True:
        readable, _, _ = select.select([source, woken], [], [])
        if woken in readable:
            os.read(woken, 4096)
        if source in readable:
            more = os.read(source, 65536)
            if not more:
                return
            *complete, unread = (unread + more).split(b"\n")
            yield from (line.decode() for line in complete)


def main() -> None:
    with os.fdopen(int(sys.argv[1]), "w", buffering=1) as replies:
        given = lines()
        host = Host(json.loads(next(given)))
        print(json.dumps(host.started), file=replies)
        for line in given:
            order = json.loads(line)
            print(json.dumps(getattr(host, order["do"])(order)), file=replies)


if __name__ == "__main__":
    main()
