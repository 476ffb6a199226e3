"""Tests of the description of SGLang's KV pools, of its interface and of what pages depend on, without SGLang."""

import abc
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import make_model
import pytest
import torch

from kvferry.memory import KvMemory, Place
from kvferry.sglang import content, interface, pools, supported, updates
from kvferry.sglang.namespaces import Namespaces
from kvferry.sglang.ranks import Ranks
from kvferry.sglang.settings import Settings

ROWS, TOKENS = 64 + 16, 16


class MHATokenToKVPool:
    """As SGLang's: keys and values of a layer are halves of one allocation."""

    __module__ = "sglang.srt.mem_cache.memory_pool"
    dtype = store_dtype = torch.float32
    page_size = TOKENS
    kv_cache_layout = "nhd"
    k_scale_buffer = None
    is_quantized_kv_cache = False
    post_capture_active = False

    def __init__(self, layers: int = 2):
        both = [torch.zeros(2, ROWS, 2, 8) for _ in range(layers)]
        self.k_buffer = [each[0] for each in both]
        self.v_buffer = [each[1] for each in both]
        self.renewed = 0

    def _init_data_ptrs_and_strides(self) -> None:
        self.renewed += 1


class MLATokenToKVPool:
    __module__ = "sglang.srt.mem_cache.memory_pool"
    dtype = store_dtype = torch.float32
    page_size = TOKENS
    kv_scale_buffer = None
    use_dsa = False

    def __init__(self) -> None:
        self.kv_buffer = [torch.zeros(ROWS, 1, 24) for _ in range(3)]
        self.data_ptrs = torch.zeros(3, dtype=torch.uint64)


class PageMajorMHATokenToKVPool(MHATokenToKVPool):
    __module__ = "sglang.srt.mem_cache.memory_pool"


def test_plain_pools_are_served_and_their_pages_are_token_slots() -> None:
    for pool, tensors in ((MHATokenToKVPool(), 4), (MLATokenToKVPool(), 3)):
        assert pools.why_not_served(pool, TOKENS) == ""
        group = pools.group_of(pool, TOKENS, 8)
        assert (len(group.tensors), group.device_pages, group.engine_page_tokens) == (tensors, ROWS // TOKENS, TOKENS)
        memory = KvMemory([group], Place(0, 1, 0, b"test"))
        pools.moved(pool)
        try:
            row = next(iter(pools._tensors(pool)))
            row[TOKENS * 3 + 5] = 7.0
            first = next(iter(group.tensors.values()))
            assert isinstance(first, torch.Tensor)
            assert first[3, 5].eq(7.0).all(), "the pool's tensors and the described ones are the same memory"
            (described,) = memory.describe([b"t" * 16] * len(memory._pieces))["groups"]
            heads = {"heads": {"kv_heads": 8, "head_axis": 2, "token_axis": 1}}
            whole = {"whole": {"token_axis": 1}}
            named = whole if isinstance(pool, MLATokenToKVPool) else heads
            assert [each["slices"] for each in described["tensors"]] == [named] * tensors
            if isinstance(pool, MLATokenToKVPool):
                assert pool.data_ptrs.tolist() == [each.data_ptr() for each in pool.kv_buffer]
                assert group.role == "latent"
            else:
                assert pool.renewed == 1
        finally:
            memory.close()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kv_cache_layout": "hnd"}, "layout 'hnd'"),
        ({"k_scale_buffer": [torch.zeros(1)]}, "scales"),
        ({"is_quantized_kv_cache": True}, "quantized"),
        ({"post_capture_active": True}, "capture"),
        ({"k_buffer": [], "v_buffer": []}, "no layers"),
    ],
)
def test_other_pools_are_named_with_the_reason(change: dict[str, Any], said: str) -> None:
    pool = MHATokenToKVPool()
    for name, value in change.items():
        setattr(pool, name, value)
    assert said in pools.why_not_served(pool, TOKENS)


def test_subclasses_and_small_pages_are_not_served() -> None:
    assert "PageMajorMHATokenToKVPool" in pools.why_not_served(PageMajorMHATokenToKVPool(), TOKENS)
    assert "--page-size 16" in pools.why_not_served(MHATokenToKVPool(), 1)
    assert "SimpleNamespace" in pools.why_not_served(SimpleNamespace(), TOKENS)


def engine(**changes: Any) -> str:
    """Why an engine is not served: ``params`` and ``arguments`` are changes of SGLang's."""
    params = SimpleNamespace(
        **{
            "page_size": TOKENS,
            "pp_size": 1,
            "attn_cp_size": 1,
            "is_eagle": False,
            "mtp_draft_device_pools": (),
            "sidecar_draft_device_pools": (),
            **changes.get("params", {}),
        }
    )
    arguments = {"pp_size": 1, "dp_size": 1, "disaggregation_mode": "null", **changes.get("arguments", {})}
    components, multimodal = changes.get("components", ["FULL"]), changes.get("multimodal", False)
    return supported.why_not_served(arguments, params, components, multimodal=multimodal, pool=MHATokenToKVPool())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"components": ["FULL", "SWA"]}, "FULL, SWA"),
        ({"components": ["FULL", "MAMBA"]}, "FULL, MAMBA"),
        ({"arguments": {"pp_size": 2}}, "pipeline"),
        ({"arguments": {"attn_cp_size": 2}}, "context"),
        ({"arguments": {"dcp_size": 2}}, "decodes"),
        ({"arguments": {"dp_size": 2}}, "dp_size is 2"),
        ({"arguments": {"attn_dp_size": 2}}, "attention"),
        ({"arguments": {"disaggregation_mode": "prefill"}}, "'prefill'"),
        ({"arguments": {"enable_memory_saver": True}}, "sleeps"),
        ({"params": {"is_eagle": True}}, "draft"),
        ({"params": {"sidecar_draft_device_pools": (1,)}}, "draft"),
        ({"params": {"pp_size": 2}}, "pipeline"),
        ({"params": {"page_size": 1}}, "--page-size"),
        ({"multimodal": True}, "images"),
    ],
)
def test_engines_that_are_not_served_are_named_with_the_reason(change: dict[str, Any], said: str) -> None:
    assert engine() == ""
    assert said in engine(**change)


def test_slots_form_pages_only_if_they_are_whole_and_aligned() -> None:
    def slots(*pages: int) -> torch.Tensor:
        return torch.cat([torch.arange(page * TOKENS, (page + 1) * TOKENS) for page in pages])

    assert pools.pages_of(slots(3, 1, 4), 3, TOKENS) == [3, 1, 4]
    assert pools.pages_of(slots(3, 1), 3, TOKENS) is None
    assert pools.pages_of(slots(3, 1) + 1, 2, TOKENS) is None
    shuffled = slots(3, 1)
    shuffled[[4, 5]] = shuffled[[5, 4]]
    assert pools.pages_of(shuffled, 2, TOKENS) is None
    assert pools.pages_of(torch.zeros(0, dtype=torch.int64), 0, TOKENS) is None


# The interface.


class Known(abc.ABC):
    @abc.abstractmethod
    def lookup(self, rid: str, transfers: list[Any]) -> list[int]: ...
    @abc.abstractmethod
    def load(self, rid: str, transfers: list[Any]) -> bool: ...
    @abc.abstractmethod
    def start_layer_wise_loading(self) -> int: ...
    @abc.abstractmethod
    def finish_layer_wise_loading(self, counter_index: int) -> bool: ...
    @abc.abstractmethod
    def cancel_queued_load(self, rid: str) -> bool: ...
    @abc.abstractmethod
    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool: ...
    @abc.abstractmethod
    def num_completed_offloads(self) -> int: ...
    @abc.abstractmethod
    def pop_completed_offload(self) -> bool: ...
    @abc.abstractmethod
    def reset(self) -> None: ...
    @abc.abstractmethod
    def close(self) -> None: ...
    def record_offload_ready(self) -> list[Any]:
        return []


class Wrapper:
    match = load_back = offload_nodes = finish_loads = release_request = None


@dataclass
class Transfer:
    name: str
    device_indices: Any = None
    keys: Any = None


Params = type("Params", (), {"__dataclass_fields__": dict.fromkeys(interface._PARAMS)})
Checker = type("Checker", (), dict.fromkeys(interface.CHECKER_METHODS, len))
Updater = type("Updater", (), dict.fromkeys(interface.WEIGHT_METHODS, len))


def test_the_known_interface_has_no_difference_and_each_change_is_named() -> None:
    assert interface.differences(Known, Wrapper, Transfer, Params, Updater, Checker) == []
    assert interface.refusal([]) == ""

    class More(Known):
        @abc.abstractmethod
        def prefetch(self) -> None: ...
        @abc.abstractmethod
        def lookup(self, rid: str) -> list[int]: ...  # type: ignore[override]
        def reset(self) -> None: ...

    nothing = type("None_", (), {})
    found = interface.differences(More, type("Other", (), {}), Transfer, Params, nothing, nothing)
    text = interface.refusal(found)
    for said in (
        "More.prefetch must be written",
        "More.lookup takes ('rid',), known is ('rid', 'transfers')",
        "More.reset is not abstract",
        "Other.match is missing",
        "None_.update_weights_from_disk is missing",
        "None_._reset_tensors is missing",
        f"Install SGLang {interface.KNOWN_VERSION}",
    ):
        assert said in text
    assert interface.constructor_difference({"components": 1, "extra_config": 1, "forward_stream": 1}) == ""
    assert "components, more" in interface.constructor_difference({"components": 1, "more": 1})


def test_changes_of_weights_are_counted_once_each() -> None:
    class OneUpdater:
        def update_weights_from_disk(self, path: str) -> str:
            return f"from {path}"

    updates.watch(OneUpdater, ("update_weights_from_disk",))
    updates.watch(OneUpdater, ("update_weights_from_disk",))
    before = updates.count()
    assert OneUpdater().update_weights_from_disk("here") == "from here"
    assert updates.count() == before + 1


# What pages depend on.

CONFIG = SimpleNamespace(to_dict=lambda: {"hidden_size": 8, "_name_or_path": "x"}, _commit_hash=None)


def described(**changes: Any) -> tuple[str, str]:
    """Returns namespace and content of an engine; ``settings`` are those of the linker."""
    settings = Settings.read(changes.pop("settings", {}))
    start = changes.pop("start", "start 1")
    ranks, pool = changes.pop("ranks", 1), changes.pop("pool", MHATokenToKVPool())
    arguments = {"model_path": str(make_model.llama()), "load_format": "auto", "dtype": "float32", **changes}
    weights = content.of_weights(arguments, CONFIG, settings, start)
    named = content.namespace_of(arguments, CONFIG, settings, weights, start, ranks=ranks, pool=pool)
    return named, content.content_of(arguments, weights, ranks=ranks, pool=pool)


class HalfPool(MHATokenToKVPool):
    store_dtype = torch.float16


@pytest.mark.parametrize(
    "change",
    [
        {"model_path": str(make_model.llama(1))},
        {"dtype": "bfloat16"},
        {"quantization": "fp8"},
        {"kv_cache_dtype": "fp8_e5m2"},
        {"load_format": "dummy"},
        {"ranks": 2},
        {"pool": HalfPool()},
        {"settings": {"namespace": "mine"}},
        {"attention_backend": "triton"},
        {"model_loader_extra_config": "{}"},
        {"kt_weight_path": "/nowhere/int4"},
        {"forward_hooks": [{"name": "steer"}]},
        {"an_argument_of_a_later_version": 1},
    ],
)
def test_everything_that_pages_depend_on_is_in_the_namespace(change: dict[str, Any]) -> None:
    assert described() == described(start="start 2"), "files that are older than the engine name its weights"
    assert described(**change)[0] != described()[0]


@pytest.mark.parametrize("name", ["port", "log_level", "random_seed", "max_running_requests", "tokenizer_path"])
def test_arguments_that_change_no_page_are_not_in_the_namespace(name: str) -> None:
    assert described(**{name: "one"}) == described(**{name: "another"})


def test_files_of_arguments_are_identified_like_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scales = tmp_path / "scales.json"
    scales.write_text("1")
    named = {"quantization_param_path": str(scales)}
    monkeypatch.setattr(content.files, "began_at", lambda: scales.stat().st_ctime - 1)
    assert described(**named)[0] != described(**named, start="start 2")[0], "it changed since the engine began"
    monkeypatch.setattr(content.files, "began_at", lambda: scales.stat().st_ctime)
    first = described(**named)[0]
    assert first == described(**named, start="start 2")[0]
    scales.write_text("22")
    monkeypatch.setattr(content.files, "began_at", lambda: scales.stat().st_ctime)
    assert first != described(**named)[0]
    # A relative path, without a separator, and a path in JSON.
    monkeypatch.chdir(tmp_path)
    for each in ({"quantization_param_path": "scales.json"}, {"model_loader_extra_config": '{"file": "scales.json"}'}):
        before = described(**each)[0]
        scales.write_text(scales.read_text() + "3")
        monkeypatch.setattr(content.files, "began_at", lambda: scales.stat().st_ctime)
        assert described(**each)[0] != before, each
    gone = {"quantization_param_path": str(tmp_path / "gone.json")}
    assert described(**gone)[0] != described(**gone, start="start 2")[0]
    # Who names the weights promises them, as far as names, sizes and times do not contradict.
    declared = {**named, "settings": {"weights": "mine"}}
    assert described(**declared)[0] == described(**declared, start="start 2")[0]


def test_weights_that_cannot_be_identified_are_of_this_start_alone(tmp_path: Path) -> None:
    for change in ({"model_path": "nobody/nothing"}, {"load_format": "remote"}, {"weight_cache_mode": "client"}):
        assert described(**change)[0] != described(**change, start="start 2")[0]
        declared = {"settings": {"weights": "mine"}, **change}
        assert described(**declared)[0] == described(**declared, start="start 2")[0]


def test_the_content_is_one_short_line() -> None:
    _, text = described(model_path=f"/{'ä' * 600}", dtype="d" * 600)
    assert len(text.encode()) <= content.CONTENT_BYTES_MAX
    assert "\n" not in text


def test_private_namespaces_differ_each_time() -> None:
    one, same = Namespaces("base", private=False), Namespaces("base", private=False)
    assert one.present == same.present
    assert Namespaces("base", private=True).present != Namespaces("base", private=True).present
    prefixed = Namespaces("base", private=False, prefix="tenant-a/")
    assert prefixed.present == b"tenant-a/" + one.present
    prefixed.begin_private()
    assert prefixed.present.startswith(b"tenant-a/")
    assert prefixed.present != b"tenant-a/" + one.present
    shared = one.present
    assert one.begin_private() == [], "other engines may use the shared one"
    private = one.present
    assert private != shared
    assert one.begin_private() == [private]


# What ranks agree on.


RANK = """
import json, sys
import torch.distributed as dist
from kvferry.sglang.ranks import Ranks
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
ranks = Ranks(dist.group.WORLD)
assert (ranks.size, ranks.rank) == (2, rank)
print(json.dumps([
    ranks.all(True),
    ranks.all(rank == 0),
    ranks.same([1, 2, 3]),
    ranks.same([1, rank]),
    ranks.of_first([10 + rank, 20 + rank]),
    ranks.list_of_first([5, 6, 7] if rank == 0 else []),
    ranks.list_of_first([]),
]))
dist.destroy_process_group()
"""


def test_ranks_agree_over_a_group(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RANK]
    started = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "group")], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    results = [json.loads(process.communicate(timeout=120)[0].splitlines()[-1]) for process in started]
    assert results[0] == results[1] == [True, False, True, False, [10, 20], [5, 6, 7], []]


def test_one_rank_waits_for_nothing() -> None:
    ranks = Ranks()
    assert (ranks.size, ranks.rank) == (1, 0)
    assert ranks.all(True)
    assert not ranks.all(False)
    assert ranks.same([1])
    assert ranks.list_of_first([4]) == [4]
