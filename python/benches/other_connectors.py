"""vLLM's own connectors for host memory, as far as they run without a GPU: the scheduler's side.

Their ranks copy on CUDA streams. :class:`StandIn` replaces the rank: no byte is copied, and each transfer is reported
as finished in the step after the one that ordered it.
"""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadWorkerMetadata

NAMES = {"offloading": "OffloadingConnector", "simple": "SimpleCPUOffloadConnector"}


def transfer_config(connector: str, memory_bytes: int) -> dict[str, Any]:
    return {
        "kv_connector": NAMES[connector],
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        # OffloadingConnector does not store generated pages by default; kvferry and SimpleCPUOffloadConnector do.
        "kv_connector_extra_config": {"cpu_bytes_to_use": memory_bytes, "offload_prompt_only": False},
    }


class StandIn:
    """A rank that copies nothing. The methods are those of vLLM's connectors that a step calls."""

    def __init__(self) -> None:
        #: Pages of all stores that have been ordered.
        self.stored_pages = 0
        #: Stores that the last step ordered, and stores that are reported in this step.
        self._stores, self._stored = set[int](), set[int]()
        #: Loads, with their requests. An event of SimpleCPUOffloadConnector has several.
        self._loads, self._loaded = dict[int, list[str]](), dict[int, list[str]]()

    def busy(self) -> bool:
        return bool(self._stores or self._loads)

    def bind_connector_metadata(self, metadata: Any) -> None:
        self._stored, self._loaded = self._stores, self._loads
        self._stores, self._loads = self._ordered(metadata)

    def _ordered(self, metadata: Any) -> tuple[set[int], dict[int, list[str]]]:
        """Returns the stores and the loads of a step."""
        raise NotImplementedError

    def start_load_kv(self, context: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_transfer_results(self, finished: set[str]) -> KVConnectorTransferResults:
        loaded = {request for requests in self._loaded.values() for request in requests}
        return KVConnectorTransferResults(finished_sending=set(), finished_recving=loaded)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set()

    def get_kv_connector_stats(self) -> None:
        return None

    def build_connector_worker_meta(self) -> Any:
        raise NotImplementedError

    def clear_connector_metadata(self) -> None:
        pass


class Offloading(StandIn):
    """Jobs, each of one request. The end of every job is reported by its number."""

    def _ordered(self, metadata: Any) -> tuple[set[int], dict[int, list[str]]]:
        self.stored_pages += sum(len(job.src_spec.block_ids) for job in metadata.store_jobs.values())
        return set(metadata.store_jobs), {number: [job.req_id] for number, job in metadata.load_jobs.items()}

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        ended = dict.fromkeys((*self._stored, *self._loaded), 1)
        return OffloadingWorkerMetadata(completed_jobs=ended) if ended else None


class Simple(StandIn):
    """At most one event of stores and one of loads in a step. The end of a load is reported by its requests only."""

    def _ordered(self, metadata: Any) -> tuple[set[int], dict[int, list[str]]]:
        self.stored_pages += len(metadata.store_gpu_blocks)
        load, store = metadata.load_event, metadata.store_event
        loads = {load: metadata.load_event_to_reqs[load]} if load >= 0 else {}
        return {store} if store >= 0 else set(), loads

    def build_connector_worker_meta(self) -> SimpleCPUOffloadWorkerMetadata | None:
        ended = dict.fromkeys(self._stored, 1)
        return SimpleCPUOffloadWorkerMetadata(completed_store_events=ended) if ended else None


STAND_INS: dict[str, type[StandIn]] = {"offloading": Offloading, "simple": Simple}
