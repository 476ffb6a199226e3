"""A second connector inside of vLLM's MultiConnector, which brings some prompts itself."""

import zlib
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fake_device import Device, Name, Sequence
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)

from kvferry.served import NO_PAGE


@dataclass
class Brought(KVConnectorMetadata):
    """Requests whose pages are written in this step: name, block tables, and the tokens from and to."""

    loads: list[tuple[Name, tuple[list[int], ...], int, int]] = field(default_factory=list)


class Neighbour(KVConnectorBase_V1, SupportsHMA):
    """Brings the prompts of one request in ``every``; none for 0."""

    every: ClassVar[int] = 0
    device: ClassVar[Device]
    sequences: ClassVar[dict[Name, Sequence]]

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self._matched: dict[str, tuple[int, int]] = {}
        self._step = Brought()
        self._finished: set[str] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        name, hit = request.request_id, self.device.hit_tokens
        if not self.every or zlib.crc32(name.encode()) % self.every or request.num_preemptions:
            return 0, False
        end = (request.num_tokens - 1) // hit * hit
        self._matched[name] = num_computed_tokens, end
        return max(end - num_computed_tokens, 0), end > num_computed_tokens

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            start, end = self._matched[request.request_id]
            assert end - start == num_external_tokens
            self._step.loads.append((request.request_id, blocks.get_block_ids(), start, end))

    def build_connector_meta(self, scheduler_output: Any) -> Brought:
        step, self._step = self._step, Brought()
        return step

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        self._matched.pop(request.request_id, None)
        return False, None

    request_finished = request_finished_all_groups

    # A rank.

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, *arguments: Any, **named: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        for name, tables, start, end in self._connector_metadata.loads:
            self._finished.add(name)
            for group in self.device.groups:
                if group.kind == "scratch":
                    continue
                for page in group.needed(end):
                    held = tables[group.number][page]
                    if group.kind == "state" or (page + 1) * group.page_tokens > start:
                        assert held != NO_PAGE
                        marks = self.sequences[name].marks[page * group.page_tokens : (page + 1) * group.page_tokens]
                        self.device.pages[held] = self.device.expected(group, tuple(marks), self.device.weights)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        finished, self._finished = self._finished, set()
        return KVConnectorTransferResults(finished_recving=finished)
