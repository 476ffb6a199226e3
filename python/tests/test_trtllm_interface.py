"""Tests of the connector for TensorRT-LLM without kvferry: the interface, settings, refusals, hashes, identities."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import trtllm_stubs
from trtllm_executor import args
from trtllm_stubs import NEW, OLD, connector, installed, interface


@pytest.fixture
def beside() -> Iterator[None]:
    with installed(interface()):
        yield


# The interface.


@pytest.mark.parametrize("path", [OLD, NEW])
def test_the_classes_are_derived_from_those_of_the_installed_interface(path: str) -> None:
    module = interface(path)
    with installed(module):
        found = connector()
        assert issubclass(found.Scheduler, module.KvCacheConnectorScheduler)
        assert issubclass(found.Worker, module.KvCacheConnectorWorker)
        assert connector("compat").INTERFACE.module == path
        assert not found.Scheduler.__abstractmethods__
        assert not found.Worker.__abstractmethods__
        connector("compat").check(connector("compat").INTERFACE)


def test_without_tensorrt_llm_the_import_names_both_modules() -> None:
    with (
        installed(None),
        pytest.raises(RuntimeError, match="TensorRT-LLM unknown is installed") as refused,
    ):
        connector()
    assert "\n" not in str(refused.value)
    assert "tensorrt_llm" in str(refused.value)


def without(name: str) -> Callable[[ModuleType], None]:
    def change(module: ModuleType) -> None:
        for cls in (module.KvCacheConnectorScheduler, module.KvCacheConnectorWorker):
            if name in vars(cls):
                delattr(cls, name)

    return change


def renamed(module: ModuleType) -> None:
    def get_finished(self: Any, saving: Any, loading: Any) -> None: ...

    module.KvCacheConnectorWorker.get_finished = get_finished


def one_more(module: ModuleType) -> None:
    cls = module.KvCacheConnectorScheduler
    cls.__abstractmethods__ = cls.__abstractmethods__ | {"recompute"}


def without_field(module: ModuleType) -> None:
    module.RequestData = type("RequestData", (), {"__dataclass_fields__": {"request_id": None}})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (without("request_finished"), "KvCacheConnectorScheduler.request_finished is missing"),
        (without("get_finished"), "KvCacheConnectorWorker.get_finished is missing"),
        (renamed, "KvCacheConnectorWorker.get_finished takes ('saving', 'loading'), known is ('finished_gen_req_ids'"),
        (one_more, "KvCacheConnectorScheduler.recompute must be written, and is unknown here"),
        (without_field, "RequestData.num_scheduled_tokens is missing"),
    ],
)
def test_an_interface_that_differs_is_refused_in_one_line(change: Any, text: str) -> None:
    module = interface()
    change(module)
    with installed(module):
        compat = connector("compat")
        with pytest.raises(RuntimeError) as refused:
            compat.check(compat.INTERFACE)
    assert text in str(refused.value)
    assert "Install a known TensorRT-LLM, or a kvferry that knows this one." in str(refused.value)
    assert "\n" not in str(refused.value)


def test_functions_of_all_ranks_that_differ_are_refused() -> None:
    def mpi_broadcast(root: int, obj: Any) -> Any: ...

    with installed(interface(), mpi_broadcast=mpi_broadcast):
        compat = connector("compat")
        assert compat.differences(compat.INTERFACE) == [
            "tensorrt_llm._utils.mpi_broadcast takes ('root', 'obj'), known is ('obj', 'root')"
        ]


@pytest.mark.parametrize(
    ("methods", "refused"),
    [
        ((), False),
        (("fit_token_budget",), True),
        (("fit_token_budget", "report_batch_to_connector"), False),
    ],
)
def test_a_manager_that_shrinks_steps_after_their_report_is_refused(methods: tuple[str, ...], refused: bool) -> None:
    manager = ModuleType("tensorrt_llm._torch.pyexecutor.resource_manager")
    manager.KVCacheManager = type("KVCacheManager", (), dict.fromkeys(methods, print))
    with installed(interface(), manager):
        compat = connector("compat")
        found = compat.differences(compat.INTERFACE)
    assert (
        found
        == ["KVCacheManager shrinks steps after it has reported them (report_batch_to_connector is missing)"][
            : int(refused)
        ]
    )


def test_an_interface_that_differs_starts_no_side(tmp_path: Path) -> None:
    module = interface()
    without("request_finished")(module)
    with installed(module):
        for cls in (connector().Scheduler, connector().Worker):
            with pytest.raises(RuntimeError, match="request_finished is missing"):
                cls(args(str(tmp_path)))


# Settings.


def test_settings_are_read_from_the_environment(beside: None) -> None:
    settings = connector("settings").Settings.read(
        {
            "KVFERRY_TRTLLM_SOCKET_DIR": "/run/kvf",
            "KVFERRY_TRTLLM_MODE": "load",
            "KVFERRY_TRTLLM_LOOKUP_BUDGET_MS": "7",
            "KVFERRY_TRTLLM_NAMESPACE": "a",
            "KVFERRY_G2": "8GiB",
            "PATH": "/bin",
        }
    )
    assert (settings.socket_dir, settings.mode, settings.lookup_budget_ms) == (Path("/run/kvf"), "load", 7)
    assert (settings.namespace, settings.weights, settings.store_hold_ms) == ("a", "", 2000)


def test_variables_of_a_service_with_the_prefix_are_no_settings(beside: None) -> None:
    links = {
        "KVFERRY_TRTLLM_SERVICE_HOST": "10.0.0.1",
        "KVFERRY_TRTLLM_SERVICE_PORT": "80",
        "KVFERRY_TRTLLM_SERVICE_PORT_HTTP": "80",
        "KVFERRY_TRTLLM_PORT": "tcp://10.0.0.1:80",
        "KVFERRY_TRTLLM_PORT_80_TCP": "tcp://[fd00::1]:80",
        "KVFERRY_TRTLLM_PORT_80_TCP_PROTO": "tcp",
        "KVFERRY_TRTLLM_PORT_80_TCP_PORT": "80",
        "KVFERRY_TRTLLM_PORT_80_TCP_ADDR": "fd00::1",
        "KVFERRY_TRTLLM_METRICS_SERVICE_HOST": "10.0.0.2",
    }
    assert connector("settings").Settings.read(links).mode == "both"
    for variable, value in [("KVFERRY_TRTLLM_PORT", "80"), ("KVFERRY_TRTLLM_SERVICE_HOST", "a host")]:
        with pytest.raises(ValueError, match="no such variable is known"):
            connector("settings").Settings.read({variable: value})


@pytest.mark.parametrize(
    ("environment", "directory"),
    [
        ({"KVFERRY_SOCKET_DIR": "/program"}, "/program"),
        ({"XDG_RUNTIME_DIR": "/run/user/7"}, "/run/user/7/kvferry"),
        ({}, f"/tmp/kvferry-{os.geteuid()}"),
        ({"KVFERRY_SOCKET_DIR": "/program", "KVFERRY_TRTLLM_SOCKET_DIR": "/own"}, "/own"),
    ],
)
def test_the_socket_directory_is_that_of_the_program(beside: None, environment: dict[str, str], directory: str) -> None:
    assert connector("settings").Settings.read(environment).socket_dir == Path(directory)


@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        ("KVFERRY_TRTLLM_MOD", "load", "no such variable is known: did you mean KVFERRY_TRTLLM_MODE?"),
        ("KVFERRY_TRTLLM_mode", "load", "did you mean KVFERRY_TRTLLM_MODE?"),
        ("KVFERRY_TRTLLM_XYZ", "1", "known are KVFERRY_TRTLLM_SOCKET_DIR, "),
        ("KVFERRY_TRTLLM_MODE", "all", "give one of both, load, store"),
        ("KVFERRY_TRTLLM_REPLICA", "64", "give a whole number from 0 to 63"),
        ("KVFERRY_TRTLLM_REPLICA", "-1", "give a whole number from 0 to 63"),
        ("KVFERRY_TRTLLM_REPLICA", "", "give a whole number from 0 to 63"),
        ("KVFERRY_TRTLLM_LOOKUP_BUDGET_MS", "0", "give a whole number from 1 to 1000"),
        ("KVFERRY_TRTLLM_LOAD_RETRY_MS", "1e3", "give a whole number from 100 to 600000"),
        ("KVFERRY_TRTLLM_LOAD_RETRY_MS", "9" * 5000, "give a whole number from 100 to 600000"),
        ("KVFERRY_TRTLLM_STORE_MB_MAX", "\u0663", "give a whole number from 1 to 1000000"),
        ("KVFERRY_TRTLLM_SOCKET_DIR", "here", "give an absolute path"),
        ("KVFERRY_SOCKET_DIR", "here", "give an absolute path"),
        ("KVFERRY_TRTLLM_SOCKET_DIR", "/" + "d" * 90, "give a path of at most 80 bytes"),
        ("KVFERRY_TRTLLM_NAMESPACE", "n" * 257, "give at most 256"),
    ],
)
def test_a_malformed_variable_is_refused_with_its_value_and_the_remedy(
    beside: None, variable: str, value: str, text: str
) -> None:
    with pytest.raises(ValueError, match=variable) as refused:
        connector("settings").Settings.read({variable: value})
    assert text in str(refused.value)


def test_a_wrong_variable_starts_no_side(beside: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_TRTLLM_MODE", "all")
    for cls in (connector().Scheduler, connector().Worker):
        with pytest.raises(ValueError, match="KVFERRY_TRTLLM_MODE is 'all'"):
            cls(args(str(tmp_path)))


# Features that are refused.


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2"),
        ({"context_parallel_size": 4}, "context_parallel_size is 4"),
        ({"max_beam_width": 4}, "max_beam_width is 4"),
        ({"enable_attention_dp": True}, "enable_attention_dp is set"),
        ({"speculative_config": SimpleNamespace(decoding_type="MTP")}, "speculative_config is set"),
        ({"sparse_attention_config": SimpleNamespace()}, "sparse_attention_config is set"),
        ({"cache_transceiver_config": SimpleNamespace()}, "cache_transceiver_config is set"),
        ({"enable_sleep": True}, "enable_sleep is set"),
        ({"ray_worker_extension_cls": "x.Y"}, "ray_worker_extension_cls is set"),
        ({"kv_cache_config": {"host_cache_size": 1 << 30}}, "kv_cache_config.host_cache_size is 1073741824"),
        ({"kv_cache_config": {"enable_block_reuse": False}}, "kv_cache_config.enable_block_reuse is False"),
        ({"kv_cache_config": {"max_attention_window": [512, 4096]}}, "kv_cache_config.max_attention_window is [512"),
        ({"kv_cache_config": {"sink_token_length": 4}}, "kv_cache_config.sink_token_length is 4"),
        ({"kv_cache_config": {"tokens_per_block": None}}, "kv_cache_config.tokens_per_block is None"),
        (
            {"scheduler_config": SimpleNamespace(capacity_scheduler_policy="MAX_UTILIZATION")},
            "scheduler_config.capacity_scheduler_policy is MAX_UTILIZATION",
        ),
    ],
)
def test_an_excluded_feature_is_refused_with_its_switch(
    beside: None, tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    for cls in (connector().Scheduler, connector().Worker):
        with pytest.raises(ValueError, match="kvferry cannot serve this engine") as refused:
            cls(args(str(tmp_path), **changes))
        assert text in str(refused.value)
        assert "\n" not in str(refused.value)


def test_an_engine_without_excluded_features_is_served(beside: None, tmp_path: Path) -> None:
    assert connector("refusals").refused(args(str(tmp_path))) == []


@pytest.mark.parametrize("shape", [(4, 2, 16), (4, 2, 2, 2, 4)])
def test_a_pool_of_another_shape_is_refused(beside: None, tmp_path: Path, shape: tuple[int, ...]) -> None:
    worker = connector().Worker(args(str(tmp_path)))
    with pytest.raises(RuntimeError, match="blocks, layers, 1 or 2, and elements"):
        worker.register_kv_caches(torch.zeros(shape))


def test_a_worker_of_rank_0_without_a_scheduler_is_refused(beside: None, tmp_path: Path) -> None:
    worker = connector().Worker(args(str(tmp_path)))
    with pytest.raises(RuntimeError, match="set connector_scheduler_class to Scheduler"):
        worker.register_kv_caches(torch.zeros(4, 2, 2, 16))


# Hashes. The expected values were computed with sha256sum.

SEED = "0247928dbc515351965ec305fb13fe9ac336735253b460fee3247f115cc00533"
PAGES = [
    "5ce52af0161f9d7e4c80dceb27c3e647741c6f8d582ffd4ec517b4480c3df5c8",
    "6dc473086e2a9d51fe3b5179ee3d639b654178658d1ea932bc2f80de2ac2e540",
]
SALTED_SEED = "e3c1e8b5bdde6861591ef48abf0b3136a263ec596c122a245439e786a6beed6f"
SALTED_PAGE = "294b3ad259f6e5eebd6a02280895ded8de7f18bce2f74a07d4a3fbd823ac8989"
TOKENS = [0, 1, 2, 0x7FFFFFFF]


def test_hashes_are_a_chain_of_sha256(beside: None) -> None:
    hashes = connector("hashes")
    seed = hashes.seed_of("m", "r", "float16, KV auto", 2)
    assert seed.hex() == SEED
    pages = hashes.PageHashes(seed, 2)
    pages.append(TOKENS)
    assert [each.hex() for each in pages.hashes] == PAGES
    salted = hashes.seed_of("m", "r", "float16, KV auto", 2, [2**64 - 1, "a"], "7 of start 00")
    assert salted.hex() == SALTED_SEED
    pages = hashes.PageHashes(salted, 2)
    pages.append(TOKENS[:3])
    assert [each.hex() for each in pages.hashes] == [SALTED_PAGE]


def test_hashes_do_not_depend_on_the_steps_in_which_tokens_come(beside: None) -> None:
    hashes = connector("hashes")
    for cut in range(len(TOKENS) + 1):
        pages = hashes.PageHashes(bytes.fromhex(SEED), 2)
        pages.append(TOKENS[:cut])
        assert pages.tokens == cut
        pages.append(TOKENS[cut:])
        assert [each.hex() for each in pages.hashes] == PAGES


def test_every_field_of_the_seed_counts(beside: None) -> None:
    fields = ["m", "r", "d", 2, [5, "a"], "1"]
    seeds = {connector("hashes").seed_of(*fields)}
    others = [(0, "n"), (1, None), (2, "e"), (3, 4), (4, [None, "a"]), (4, [5, "b"]), (5, None)]
    for at, other in others:
        seeds.add(connector("hashes").seed_of(*fields[:at], other, *fields[at + 1 :]))
    assert len(seeds) == len(others) + 1


@pytest.mark.parametrize(
    ("attributes", "why"),
    [
        ({}, ""),
        ({"multimodal_hashes": [], "is_dummy_request": False}, ""),
        ({"multimodal_hashes": [[1, 2]]}, "multimodal_hashes"),
        ({"multimodal_positions": [3]}, "multimodal_positions"),
        ({"prompt_embedding_table": object()}, "prompt_embedding_table"),
        ({"is_generation_only_request": True}, "is_generation_only_request"),
        ({"is_generation_only_request": lambda: True}, "is_generation_only_request"),
        ({"is_generation_only_request": lambda: False}, ""),
        ({"is_dummy_request": True}, "is_dummy_request"),
    ],
)
def test_requests_with_other_inputs_have_no_hashes(beside: None, attributes: dict[str, Any], why: str) -> None:
    assert connector("hashes").why_not_hashed(SimpleNamespace(**attributes)) == why


# Identities.


def identity(llm_args: Any, **environment: str) -> Any:
    settings = connector("settings").Settings.read({f"KVFERRY_TRTLLM_{key}": text for key, text in environment.items()})
    return connector("content").identity_of(llm_args, settings, b"s" * 16), settings


def namespace(llm_args: Any, **environment: str) -> bytes:
    found, settings = identity(llm_args, **environment)
    return found.namespace(settings)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


def test_engines_that_compute_the_same_share_a_namespace(beside: None, model: Path) -> None:
    found, _ = identity(args(str(model)))
    assert found.shared
    assert namespace(args(str(model))) == namespace(args(str(model)))
    other = args(str(model), max_batch_size=7, kv_cache_config={"free_gpu_memory_fraction": 0.5})
    assert namespace(args(str(model), max_batch_size=8)) == namespace(other)
    assert len(namespace(other)) == 32


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "bfloat16"},
        {"tensor_parallel_size": 2},
        {"quant_config": SimpleNamespace(quant_algo="FP8")},
        {"kv_cache_config": {"dtype": "fp8"}},
        {"kv_cache_config": {"tokens_per_block": 8}},
        {"an_unknown_argument": 1},
    ],
)
def test_engines_that_compute_otherwise_share_no_namespace(beside: None, model: Path, changes: dict[str, Any]) -> None:
    assert namespace(args(str(model))) != namespace(args(str(model), **changes))
    contents = {identity(llm_args)[0].content() for llm_args in (args(str(model)), args(str(model), **changes))}
    assert len(contents) == 2


def test_other_weights_at_a_path_and_other_namespaces_are_kept_apart(beside: None, model: Path) -> None:
    before = namespace(args(str(model)))
    assert namespace(args(str(model)), NAMESPACE="a") != before
    (model / "model.safetensors").write_bytes(b"other weights")
    assert namespace(args(str(model))) != before


@pytest.mark.parametrize(
    ("changes", "environment"),
    [({"load_format": "dummy"}, {}), ({"checkpoint_loader": object()}, {}), ({"model": "no/such"}, {})],
)
def test_unknown_weights_make_the_engine_private(
    beside: None, model: Path, changes: dict[str, Any], environment: dict[str, str]
) -> None:
    found, _ = identity(args(**{"model": str(model), **changes}))
    assert not found.shared
    assert f"of start {(b's' * 16).hex()}" in found.weights
    named, _ = identity(args(**{"model": str(model), **changes}), WEIGHTS="v1")
    assert named.shared


def test_files_that_are_newer_than_the_process_make_the_engine_private(
    beside: None, model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvferry.files.began_at", lambda: 0.0)
    found, _ = identity(args(str(model)))
    assert not found.shared
    connector("content").tell_unknown_weights(found)
    assert "KVFERRY_TRTLLM_WEIGHTS" in caplog.text


def test_a_snapshot_of_the_hub_is_named_by_its_commit(beside: None, tmp_path: Path) -> None:
    folder = tmp_path / "models--a--b" / "snapshots" / ("0" * 40)
    folder.mkdir(parents=True)
    found, _ = identity(args(str(folder)))
    assert (found.weights, found.shared) == (f"a/b at commit {'0' * 40}", True)


def test_content_is_one_short_line(beside: None, tmp_path: Path) -> None:
    content = identity(args(f"{tmp_path}/" + "m\n" * 2000, dtype="d" * 900))[0].content()
    assert len(content) <= 512
    assert b"\n" not in content


def test_a_hook_that_raises_is_kept_out_of_the_executor(
    beside: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KVFERRY_TRTLLM_SOCKET_DIR", str(tmp_path))
    scheduler = connector().Scheduler(args(str(tmp_path)))
    try:
        request = SimpleNamespace(request_id=1)
        assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
        assert "get_num_new_matched_tokens failed: requests run without the cache" in caplog.text
        assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
        assert scheduler.update_state_after_alloc(request, [1]) is None
        output = trtllm_stubs.SchedulerOutput([trtllm_stubs.RequestData(1, [1], [1], 0, 1)], [])
        assert scheduler.build_connector_meta(output).written_through > 0
        assert scheduler.request_finished(request, [1]) is False
    finally:
        scheduler.close()
