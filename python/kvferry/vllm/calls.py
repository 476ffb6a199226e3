"""Records vLLM's calls: for each hook of the scheduler's side, its arguments and its answer.

Block tables are recorded where vLLM allocates them, and by their changes in each step, as vLLM itself sends them to its
ranks. No token is recorded. ``docs/recording.md`` lists the fields.
"""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvferry.recording import Recorder
from kvferry.vllm.metadata import RankReport, StepMetadata

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvferry.served import Served
    from kvferry.vllm.settings import Settings


class Calls:
    """Records the hooks of one connector. For the scheduler's thread alone. Raises nothing."""

    def __init__(self, recorder: Recorder):
        self.recorder = recorder

    def called(self, hook: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> int:
        """Records a call before the hook runs; returns its number."""
        if not self.recorder.recording:
            return 0
        try:
            hashes: Sequence[bytes] = ()
            if hook == "on_new_request":
                hashes = [bytes(page) for page in _request_of(*arguments, **named).block_hashes]
            return self.recorder.called(hook, ARGUMENTS[hook](*arguments, **named), hashes)
        except Exception as error:
            self.recorder.fault(f"the arguments of {hook}: {error!r}")
            return 0

    def returned(self, call: int, hook: str, arguments: tuple[Any, ...], named: dict[str, Any], answer: Any) -> None:
        """Records the answer of a call."""
        if not self.recorder.recording:
            return
        try:
            if hook == "update_connector_output":
                answer = _update_connector_output(*arguments, **named)["loaded"]
            elif hook == "take_events":
                # The events themselves are vLLM's, and have tokens.
                answer = len(answer)
            elif hook == "get_external_cache_hit_sources":
                answer = [(source.name, tokens) for source, tokens in answer.items()]
            self.recorder.returned(call, _answer(answer))
        except Exception as error:
            self.recorder.fault(f"the answer of call {call}: {error!r}")


def record(
    settings: "Settings", served: "Served", *, engine: bytes, replica: int, namespace: str, ranks: int, version: str
) -> Calls:
    """Begins a recording in a new file.

    Raises:
        ValueError: when the file cannot be created, with the reason and the remedy.
    """
    groups = [
        {
            "attention": group.attention,
            "window_tokens": group.window_tokens,
            "eagle": group.eagle,
            "page_tokens": group.page_tokens,
            "page_bytes": group.page_bytes,
            "table": group.table,
        }
        for group in served.groups
    ]
    known = {name: value for name, value in vars(settings).items() if name != "socket_dir"}
    header = {
        "engine": engine,
        "replica": replica,
        "ranks": ranks,
        "namespace": namespace,
        "vllm": version,
        "begun_us": time.time_ns() // 1000,
        "hash_tokens": served.hash_tokens,
        "hit_tokens": served.hit_tokens,
        "groups": groups,
        "settings": known,
    }
    path = settings.record_path(replica, header["begun_us"])
    try:
        recorder = Recorder(path, bytes_max=settings.record_mb_max * 1_000_000, header=header)
    except OSError as error:
        raise ValueError(
            f"kv_connector_extra_config: record is {settings.record!r}, and {path} cannot be created: "
            f"{error.strerror or error}: name a file in a folder that this user can write to, or leave record out"
        ) from error
    return Calls(recorder)


def _request_of(request: "Request") -> "Request":
    return request


def _on_new_request(request: "Request") -> dict[str, Any]:
    lora = request.lora_request
    return {
        "request": request.request_id,
        "tokens": request.num_tokens,
        "prompt_tokens": request.num_prompt_tokens,
        "lora": lora.lora_name if lora is not None else None,
    }


def _get_num_new_matched_tokens(request: "Request", num_computed_tokens: int) -> dict[str, Any]:
    return {"request": request.request_id, "computed": num_computed_tokens, "hashes": len(request.block_hashes)}


def _update_state_after_alloc(request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> dict[str, Any]:
    return {"request": request.request_id, "tables": _tables(blocks.get_block_ids()), "external": num_external_tokens}


def _build_connector_meta(scheduler_output: "SchedulerOutput") -> dict[str, Any]:
    output = scheduler_output
    new, cached = output.scheduled_new_reqs, output.scheduled_cached_reqs
    changes = [(each.req_id, each.num_computed_tokens, True, each.block_ids) for each in new]
    for name, computed, pages in zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True):
        changes.append((name, computed, name in cached.resumed_req_ids, pages or ()))
    state = output.kv_connector_block_state
    return {
        "scheduled": output.num_scheduled_tokens,
        "changes": [(name, computed, anew, _tables(tables)) for name, computed, anew, tables in changes],
        "preempted": sorted(output.preempted_req_ids or ()),
        "finished": sorted(output.finished_req_ids),
        "zeroed": list(output.new_block_ids_to_zero or ()),
        "copied": len(output.kv_cache_block_copies or ()),
        "states": state.boundary_state_offloads if state is not None else {},
    }


def _update_connector_output(connector_output: "KVConnectorOutput") -> dict[str, Any]:
    output = connector_output
    return {
        "loaded": sorted(output.finished_recving or ()),
        "failed": sorted(output.failed_recving or ()),
        "failed_pages": sorted(output.invalid_block_ids or ()),
        "ranks": _answer(output.kv_connector_worker_meta),
    }


def _finished(request: "Request", block_ids: Sequence[Any]) -> dict[str, Any]:
    tables = block_ids if block_ids and not isinstance(block_ids[0], int) else (block_ids,)
    return {
        "request": request.request_id,
        "status": request.status.name,
        "computed": request.num_computed_tokens,
        "tokens": request.num_tokens,
        "tables": _tables(tables),
    }


def _bind_gpu_block_pool(gpu_block_pool: "BlockPool") -> dict[str, Any]:
    return {"pages": len(gpu_block_pool.blocks)}


def _sources(request: "Request", num_external_tokens: int) -> dict[str, Any]:
    return {"request": request.request_id, "external": num_external_tokens}


def _nothing() -> dict[str, Any]:
    return {}


#: The arguments of each hook of the scheduler's side, as they are recorded.
ARGUMENTS: dict[str, Callable[..., dict[str, Any]]] = {
    "bind_gpu_block_pool": _bind_gpu_block_pool,
    "on_new_request": _on_new_request,
    "get_num_new_matched_tokens": _get_num_new_matched_tokens,
    "update_state_after_alloc": _update_state_after_alloc,
    "build_connector_meta": _build_connector_meta,
    "update_connector_output": _update_connector_output,
    "request_finished": _finished,
    "request_finished_all_groups": _finished,
    "get_external_cache_hit_sources": _sources,
    "get_kv_connector_stats": _nothing,
    "has_pending_block_frees": _nothing,
    "has_pending_push_work": _nothing,
    "reset_cache": _nothing,
    "take_events": _nothing,
    # vLLM's own reset of its pages, which calls no hook.
    "reset_prefix_cache": _nothing,
    "shutdown": _nothing,
}


def _tables(tables: Sequence[Sequence[int]]) -> list[list[int]]:
    return [list(table) for table in tables]


def _answer(answer: Any) -> Any:
    if isinstance(answer, StepMetadata):
        return {
            "written_through": answer.written_through,
            "needed_before": answer.needed_before,
            "needed_through": answer.needed_through,
            "loaded": answer.loaded,
            "failed": answer.failed,
            "failed_pages": answer.failed_pages,
            "abandon": answer.abandon,
        }
    if isinstance(answer, RankReport):
        return {"over": answer.over, "fault": answer.fault, "stepped_through": answer.stepped_through}
    if answer is None or isinstance(answer, (bool, int, str, tuple, list)):
        return answer
    # Metadata of another connector, which shares the reports of the ranks.
    return type(answer).__name__
