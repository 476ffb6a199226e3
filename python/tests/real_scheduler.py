"""vLLM's own scheduler with the connector, a simulated leader, and no model: computed tokens are made up.

A step of :class:`Stepped` is a step of an engine with one rank: schedule, run, take the output.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import make_model
import torch
from daemon import TIMEOUT_S
from engine import PAGE_TOKENS, transfer_config
from test_scheduler import Leader
from vllm import SamplingParams
from vllm.config import LoggingConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import configure_logging_if_needed
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvferry.vllm.scheduler import SchedulerSide

# The first configuration of a process replaces the handlers of vLLM's loggers, including those that pytest installed.
configure_logging_if_needed(LoggingConfig())

#: Pause of vLLM's engine after a step that ran no model, in which other threads get Python's lock.
IDLE_PAUSE_S = 0.001


def engine_config(transfer: dict[str, Any] | None = None, **changes: Any) -> VllmConfig:
    """The configuration of an engine with the tiny model."""
    wanted = {
        "model": str(make_model.llama()),
        "dtype": "float32",
        "block_size": PAGE_TOKENS,
        "enable_prefix_caching": True,
        "max_model_len": 2048,
        "kv_transfer_config": transfer or transfer_config(Path("/nowhere"), verify=0),
        **changes,
    }
    return EngineArgs(**wanted).create_engine_config()


def memory(pages: int) -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=PAGE_TOKENS, num_kv_heads=4, head_size=32, dtype=torch.float32)
    return KVCacheConfig(pages, [], [KVCacheGroupSpec(["layer.0"], spec)])


@contextlib.contextmanager
def connecting(connect: Callable[..., Any]) -> Iterator[None]:
    """Connectors that are created meanwhile get the result of ``connect`` as their client."""
    before = SchedulerSide.__init__.__kwdefaults__["connect"]
    SchedulerSide.__init__.__kwdefaults__["connect"] = connect
    try:
        yield
    finally:
        SchedulerSide.__init__.__kwdefaults__["connect"] = before


class Stepped:
    """An engine of one rank without a model. See the module's docstring."""

    def __init__(
        self,
        *,
        pages: int = 64,
        config: VllmConfig | None = None,
        kv: KVCacheConfig | None = None,
        client: Callable[..., Any] = Leader,
        rank: Any = None,
    ):
        """``client``: what the connector talks to the leader with, by default a leader that the test scripts.

        ``rank``: replaces the connector's own rank.
        """
        self.config = config or engine_config()
        self.config.cache_config.num_gpu_blocks = pages
        kv = kv or memory(pages)
        page_tokens = kv.kv_cache_groups[0].kv_cache_spec.block_size
        made: list[Any] = []

        def connect(*arguments: Any, **named: Any) -> Any:
            if client is Leader:
                # A simulated leader has no requests that could be watched.
                named.pop("watch", None)
            made.append(client(*arguments, **named))
            return made[-1]

        with connecting(connect):
            with set_current_vllm_config(self.config):
                self.rank = rank or KVConnectorFactory.create_connector(self.config, KVConnectorRole.WORKER, kv)
            self.scheduler = Scheduler(
                self.config,
                kv,
                StructuredOutputManager(self.config),
                block_size=page_tokens,
                hash_block_size=page_tokens,
                log_stats=True,
            )
        self.connector = self.scheduler.connector
        #: None if the connector was declined.
        self.leader = made[0] if made else None
        hashing = get_hash_fn_by_name(self.config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hashing)
        self._hasher = get_request_block_hasher(page_tokens, hashing)
        self._names = itertools.count()
        #: Of steps that computed tokens.
        self._outputs: list[SchedulerOutput] = []
        #: The statistics of all steps.
        self.stats: list[SchedulerStats] = []

    def add(self, tokens: list[int], max_tokens: int = 4, lora: LoRARequest | None = None) -> Request:
        request = Request(
            f"r{next(self._names)}",
            tokens,
            SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            None,
            lora_request=lora,
            block_hasher=self._hasher,
        )
        self.scheduler.add_request(request)
        return request

    def step(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        if output.num_scheduled_tokens:
            self._outputs.append(output)
        results = self.scheduler.update_from_output(output, self._run(output))
        self.stats += [each.scheduler_stats for each in results.values() if each.scheduler_stats is not None]
        return output

    def _run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        rank = self.rank
        rank.bind_connector_metadata(output.kv_connector_metadata)
        rank.start_load_kv(None)
        rank.wait_for_save()
        results = rank.get_transfer_results(output.finished_req_ids)
        said = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=rank.get_block_ids_with_load_errors(),
            kv_connector_stats=rank.get_kv_connector_stats(),
            kv_connector_worker_meta=rank.build_connector_worker_meta(),
        )
        rank.clear_connector_metadata()
        names = list(output.num_scheduled_tokens)
        sampled = []
        for name in names:
            request = self.scheduler.requests[name]
            # A partial prefill yields no token.
            sampled.append([7] if request.num_computed_tokens >= request.num_tokens else [])
        return ModelRunnerOutput(names, {name: at for at, name in enumerate(names)}, sampled, kv_connector_output=said)

    def until_over(self, *requests: Request) -> Iterator[SchedulerOutput]:
        """Runs steps until all of these have ended; the test answers requests to the leader between the steps."""
        until = time.monotonic() + TIMEOUT_S
        while time.monotonic() < until:
            if all(RequestStatus.is_finished(request.status) for request in requests):
                return
            yield self.step()
        raise AssertionError([request.status.name for request in requests])

    def run(self, *requests: Request) -> None:
        """Runs steps until all of these have ended, as vLLM's engine does: with a pause after one that ran nothing."""
        for output in self.until_over(*requests):
            if not output.num_scheduled_tokens:
                time.sleep(IDLE_PAUSE_S)

    def scheduled(self, request: Request) -> list[int]:
        """Returns the number of tokens of a request that each step computed."""
        name = request.request_id
        return [output.num_scheduled_tokens[name] for output in self._outputs if name in output.num_scheduled_tokens]

    def free_pages(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
