"""A process with an SGLang engine that executes commands: one JSON object a line in, one a line out.

Usage: ``sglang_host.py REPLY_FD``; the first line has the engine's arguments.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch


def by_rows(product: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The product of each row of a matrix by itself.

    On some processors, the last bits of a row depend on the number of rows that are multiplied with it, which a hit
    changes.
    """

    def rows(matrix: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
        if matrix.dim() != 2 or len(matrix) < 2 or "out" in named:
            return product(matrix, *others, **named)
        return torch.cat([product(row, *others, **named) for row in matrix.split(1)])

    return rows


# SGLang starts its processes with this module, too.
torch.nn.functional.linear = by_rows(torch.nn.functional.linear)
torch.matmul = by_rows(torch.matmul)


class Host:
    """The engine, and the commands that it executes."""

    def __init__(self, arguments: dict[str, Any]):
        import sglang

        begun = time.monotonic()
        self.engine = sglang.Engine(**arguments)
        self.started = {"start_s": time.monotonic() - begun}

    def generate(self, order: dict[str, Any]) -> list[dict[str, Any]]:
        """Generates for all prompts at once."""
        from fastapi import HTTPException

        sampling = {"temperature": 0, "max_new_tokens": order["max_tokens"], "ignore_eos": True}
        prompts = order["prompts"]
        named: dict[str, Any] = {}
        if any("cache_salt" in prompt for prompt in prompts):
            named["cache_salt"] = [prompt.get("cache_salt", "") for prompt in prompts]
        try:
            outputs = self.engine.generate(
                input_ids=[prompt["tokens"] for prompt in prompts],
                sampling_params=sampling,
                return_logprob=True,
                top_logprobs_num=5,
                **named,
            )
        except ValueError as error:
            return [{"error": str(error)}]
        except HTTPException as error:
            return [{"error": error.detail, "status": error.status_code}]
        return [answer(output) for output in outputs]

    def flush(self, order: dict[str, Any]) -> bool:
        return bool(self.engine.flush_cache().success)

    def counters(self, order: dict[str, Any]) -> dict[str, float]:
        """The linker's counters on SGLang's Prometheus page, for an engine with ``enable_metrics``."""
        from prometheus_client import CollectorRegistry
        from prometheus_client.multiprocess import MultiProcessCollector

        registry = CollectorRegistry()
        MultiProcessCollector(registry)
        samples = (sample for metric in registry.collect() for sample in metric.samples)
        found = (sample for sample in samples if sample.name.startswith("sglang:kvferry_"))
        return {f"{sample.name}/{sample.labels['outcome']}": sample.value for sample in found}

    def decode(self, order: dict[str, Any]) -> list[Any]:
        """Decodes batches of KV events with SGLang's own classes, each as time, events and rank."""
        import msgspec
        from sglang.srt.disaggregation.kv_events import KVEventBatch

        decoder = msgspec.msgpack.Decoder(KVEventBatch)
        return [msgspec.to_builtins(decoder.decode(bytes.fromhex(payload))) for payload in order["payloads"]]

    def weights(self, order: dict[str, Any]) -> list[Any]:
        """Reads weights from another folder into the running engine."""
        done = self.engine.loop.run_until_complete(
            self.engine.tokenizer_manager.update_weights_from_disk(update(order["path"], order["flush"]), None)
        )
        return [bool(done[0]), done[1]]


def update(path: str, flush: bool) -> Any:
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

    return UpdateWeightFromDiskReqInput(model_path=path, flush_cache=flush)


def answer(output: dict[str, Any]) -> dict[str, Any]:
    """Returns tokens, and for each the five best with their log-probabilities; JSON keeps every bit of a float."""
    told = output["meta_info"]
    if told["finish_reason"].get("type") == "abort":
        return {"error": told["finish_reason"].get("message", ""), "status": told["finish_reason"].get("status_code")}
    logprobs = [sorted((token, logprob) for logprob, token, _ in step) for step in told["output_top_logprobs"]]
    return {
        "tokens": output["output_ids"],
        "logprobs": logprobs,
        "cached": told["cached_tokens"],
        "details": told.get("cached_tokens_details") or {},
    }


def main() -> None:
    with os.fdopen(int(sys.argv[1]), "w", buffering=1) as replies:
        host = Host(json.loads(sys.stdin.readline()))
        print(json.dumps(host.started), file=replies)
        for line in sys.stdin:
            order = json.loads(line)
            print(json.dumps(getattr(host, order["do"])(order)), file=replies)
    host.engine.shutdown()


if __name__ == "__main__":
    main()
