"""The connector's class for TensorRT-LLM's scheduler, on rank 0: checks, and passes calls on."""

import atexit
from typing import Any

from kvferry.trtllm import compat, refusals
from kvferry.trtllm.content import identity_of, tell_unknown_weights
from kvferry.trtllm.guard import Faults, guarded
from kvferry.trtllm.metadata import StepMetadata
from kvferry.trtllm.settings import Settings
from kvferry.trtllm.shared import forget, shared_of
from kvferry.trtllm.side import SchedulerSide


class Scheduler(compat.INTERFACE.scheduler, Faults):  # type: ignore[misc, name-defined]
    """Looks pages up, and requests loads and stores. See ``docs/trtllm.md``."""

    def __init__(self, llm_args: Any):
        """Called by TensorRT-LLM on rank 0.

        Raises:
            ValueError: for a setting or an argument that cannot be used, with the remedy.
            RuntimeError: when the interface of the installed TensorRT-LLM differs from the known one.
        """
        compat.check(compat.INTERFACE)
        super().__init__(llm_args)
        settings = Settings.read()
        refusals.check(llm_args)
        self._shared = shared_of(llm_args)
        identity = identity_of(llm_args, settings, self._shared.engine)
        tell_unknown_weights(identity)
        self._side = self._shared.side = SchedulerSide(settings, identity, self._shared.engine)
        atexit.register(self.close)

    def close(self) -> None:
        """Closes the connection to the leader. TensorRT-LLM has no such call: it is made when the process ends."""
        atexit.unregister(self.close)
        self._side.close()
        forget(self._shared)

    def _nothing_matched(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    @guarded(instead=_nothing_matched, begins=True)
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Returns how many tokens behind the computed ones are loaded, and whether beside the batches: always."""
        tokens = self._side.matched_tokens(request, num_computed_tokens)
        return tokens, tokens > 0

    def _cannot_load(self, request: Any, block_ids: list[int]) -> None:
        self._side.cannot_load(int(request.request_id), self.fault)

    @guarded(instead=_cannot_load)
    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        """Starts the load, now that pages are allocated."""
        self._side.allocated(request, block_ids)

    def _bare_step(self, scheduler_output: Any) -> StepMetadata:
        return self._side.bare_step(scheduler_output)

    @guarded(instead=_bare_step, begins=True)
    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """Returns the metadata of a step for the ranks."""
        return self._side.step(scheduler_output)

    def _holds(self, request: Any, cache_block_ids: list[int]) -> bool:
        return self._side.holds(int(request.request_id))

    @guarded(instead=_holds)
    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        """Ends a request; True while a copy may still use its pages."""
        return self._side.finished(int(request.request_id))
