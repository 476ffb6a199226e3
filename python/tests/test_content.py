"""Tests of the names of page contents: above all, of the weights."""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import snapshot_download
from huggingface_hub.errors import IncompleteSnapshotError

from kvferry import files, weights
from kvferry.vllm import content
from kvferry.vllm.namespaces import Namespaces
from kvferry.vllm.settings import Settings
from kvferry.weights import BRANCH_REST_S

COMMITS = ("a" * 40, "b" * 40)


class HfConfig:
    """The parts of a configuration that are used."""

    def __init__(self, commit: str | None = None, **values: Any):
        self._commit_hash = commit
        self._values = values

    def to_dict(self) -> dict[Any, Any]:
        return self._values


def config(model: str, *, instance: str = "i", commit: str | None = None, **changes: Any) -> Any:
    parts: dict[str, Any] = {
        "model": model,
        "model_weights": "",
        "revision": None,
        "hf_config": HfConfig(commit),
        "hf_config_path": None,
        "hf_overrides": {},
        "max_model_len": 1024,
        "multimodal_config": None,
        "dtype": "bfloat16",
        "quantization": None,
        "quantization_config": None,
        "seed": 0,
        "cache_dtype": "auto",
        "prefix_caching_hash_algo": "sha256",
        "load_format": "auto",
        "download_dir": None,
        "model_loader_extra_config": {},
        "engine_id": "e",
        "data_parallel_index": 0,
        "world_size": 1,
        **changes,
    }
    every = SimpleNamespace(**parts)
    return SimpleNamespace(
        model_config=every,
        cache_config=every,
        load_config=every,
        kv_transfer_config=every,
        parallel_config=every,
        attention_config="attention",
        instance_id=instance,
    )


def settings(**values: Any) -> Settings:
    return Settings(Path("/nowhere"), **values)


def both(made: Any, **given: Any) -> tuple[str, str]:
    how = settings(**given)
    return content.namespace_of(made, how, content.weights_of(made, how)), content.content_of(made, how)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Creates a Hub cache with one repository. Its branch ``main`` is at the first commit, and counts as old."""
    monkeypatch.setattr(weights, "BRANCH_REST_S", 0.0)
    for commit in COMMITS:
        (tmp_path / "models--org--model" / "snapshots" / commit).mkdir(parents=True)
        (tmp_path / "models--org--model" / "snapshots" / commit / "config.json").write_text("{}")
    (tmp_path / "models--org--model" / "refs").mkdir()
    move(tmp_path, COMMITS[0])
    return tmp_path


def move(hub: Path, commit: str) -> None:
    (hub / "models--org--model" / "refs" / "main").write_text(commit)


def test_a_name_on_the_hub_is_identified_by_the_local_commit(hub: Path) -> None:
    """The branch moves between two starts of an engine: pages from before are not found after."""
    cached = {"download_dir": str(hub)}
    first = both(config("org/model", **cached))
    assert both(config("org/model", instance="another start", **cached)) == first
    move(hub, COMMITS[1])
    second = both(config("org/model", **cached))
    assert not set(first) & set(second)
    assert both(config("org/model", revision=COMMITS[0])) == first, "the way to the commit does not matter"
    assert both(config("org/model", revision=COMMITS[1])) == second
    assert content.weights_of(config("org/model", revision=COMMITS[0]), settings()).shared


def test_a_branch_that_moved_while_the_engine_started_is_not_trusted(hub: Path) -> None:
    cached = {"download_dir": str(hub)}
    assert content.weights_of(config("org/model", commit=COMMITS[0], **cached), settings()).shared
    assert not content.weights_of(config("org/model", commit=COMMITS[1], **cached), settings()).shared


def test_without_a_commit_of_the_configuration_the_branch_must_be_older_than_the_engine(
    hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = {"download_dir": str(hub)}
    branch = hub / "models--org--model" / "refs" / "main"
    monkeypatch.setattr(weights, "BRANCH_REST_S", BRANCH_REST_S)
    for seconds, shared in ((1.0, True), (-1.0, False)):
        began_at = branch.stat().st_ctime + BRANCH_REST_S + seconds
        monkeypatch.setattr("kvferry.files.began_at", lambda began_at=began_at: began_at)
        assert content.weights_of(config("org/model", **cached), settings()).shared == shared
    assert content.weights_of(config("org/model", revision=COMMITS[0], **cached), settings()).shared
    branch.unlink()
    assert not content.weights_of(config("org/model", **cached), settings()).shared


@pytest.mark.parametrize("model", ["org/unknown", "s3://bucket/model", "/nowhere/model", "org/repository:Q4"])
def test_weights_that_cannot_be_identified_are_private_to_this_start(
    model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cached = {"download_dir": str(tmp_path)}
    first = both(config(model, **cached))
    assert both(config(model, **cached)) == first, "all processes of an engine have the same text"
    again = both(config(model, instance="another start", **cached))
    assert again[0] != first[0]
    assert again[1] == first[1], "both may be replicas of one leader"
    content.tell_unknown_weights(config(model, **cached), content.weights_of(config(model, **cached), settings()))
    assert f"the weights of {model} cannot be identified" in caplog.text
    declared = both(config(model, **cached), weights="v1")
    assert both(config(model, instance="another start", **cached), weights="v1") == declared
    assert not set(both(config(model, **cached), weights="v2")) & set(declared)


def test_weights_from_object_storage_are_named_by_their_source(tmp_path: Path) -> None:
    made = config(str(tmp_path), model_weights="s3://bucket/model")
    assert content.weights_of(made, settings()).shared is False


def test_files_take_precedence_over_the_weights_setting(tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("one")
    first = both(config(str(tmp_path)), weights="v1")
    (tmp_path / "weights").write_text("another")
    assert not set(both(config(str(tmp_path)), weights="v1")) & set(first)


def test_random_weights_are_named_by_their_seed() -> None:
    dummy = {"load_format": "dummy"}
    first = both(config("org/model", **dummy))
    assert both(config("org/model", instance="another start", **dummy)) == first
    assert not set(both(config("org/model", seed=1, **dummy))) & set(first)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float16"},
        {"quantization": "fp8"},
        {"cache_dtype": "fp8_e5m2"},
        {"mamba_cache_dtype": "float16"},
        {"mamba_ssm_cache_dtype": "float16"},
        {"kv_cache_dtype_skip_layers": ["2"]},
        {"model_loader_extra_config": {"a": 1}},
    ],
)
def test_content_depends_on_how_weights_are_read(change: dict[str, Any], tmp_path: Path) -> None:
    assert not set(both(config(str(tmp_path)))) & set(both(config(str(tmp_path), **change)))


def test_content_is_one_short_line(tmp_path: Path) -> None:
    folder = tmp_path / "ö" / ("ü" * 100) / ("x\ny" * 60)
    folder.mkdir(parents=True)
    text = content.content_of(config(str(folder), revision="r" * 999), settings())
    assert len(text.encode()) <= content.CONTENT_BYTES_MAX
    assert "\n" not in text
    assert "bfloat16" in text
    other = content.content_of(config(str(folder), revision="s" + "r" * 998), settings())
    assert other.rsplit(", ", 1)[1] != text.rsplit(", ", 1)[1]


def test_a_configuration_with_keys_of_several_kinds() -> None:
    mixed = HfConfig(values={1: "a", "b": [{2: 3, "c": {4: 5, None: 6}}], "1": "d"})
    made = config("org/model", load_format="dummy")
    made.model_config.hf_config = mixed
    assert '"int 1": "a"' in both(made)[0]
    assert content.sorted_json({"b": 1, "a": 2}) == content.sorted_json({"a": 2, "b": 1})
    assert content.sorted_json({1: "x"}) != content.sorted_json({"1": "x"})


def test_descriptions_are_equal_in_every_process() -> None:
    assert content.described(text_of) == "<function text_of>"
    assert content.described({"a": 1}) == "{'a': 1}"


def test_a_folder_is_identified_by_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text(name)
    seen = {text_of(tmp_path / name) for name in ("a", "b")}
    monkeypatch.chdir(tmp_path / "a")
    seen.add(text_of("."))
    assert len(seen) == 2
    (tmp_path / "a" / "weights").write_text("other")
    (tmp_path / "a" / "nowhere").symlink_to("nothing")
    assert text_of(".") not in seen
    (tmp_path / "loop").symlink_to("loop")
    assert files.look(str(tmp_path / "loop")) is None


def test_a_file_is_identified_by_its_metadata(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_text("one")
    first = text_of(file)
    file.write_text("another")
    assert text_of(file) != first


def text_of(path: Path | str) -> str:
    found = files.look(str(path))
    assert found is not None
    return found.text()


def test_files_that_an_engine_writes_are_newer_than_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    began = files.began_at()
    (tmp_path / "weights").write_text("one")
    assert began < (tmp_path / "weights").stat().st_ctime
    assert abs(files.began_at() - began) < 1.0


def test_a_relative_link_is_resolved_from_its_own_folder(tmp_path: Path) -> None:
    (tmp_path / "shared" / "models" / "a").mkdir(parents=True)
    (tmp_path / "shared" / "models" / "a" / "weights").write_text("one")
    (tmp_path / "app" / "releases" / "5").mkdir(parents=True)
    (tmp_path / "app" / "current").symlink_to("releases/5")
    (tmp_path / "app" / "releases" / "5" / "models").symlink_to("../../../shared/models")
    assert text_of(tmp_path / "app" / "current" / "models" / "a") == text_of(tmp_path / "shared" / "models" / "a")


def test_the_path_after_a_link_is_resolved_from_the_links_target(tmp_path: Path) -> None:
    """``link/..`` is the parent of the link's target, not the folder that contains the link."""
    for where in (tmp_path, tmp_path / "far"):
        (where / "model").mkdir(parents=True)
        (where / "model" / "weights").write_text(str(where))
    (tmp_path / "far" / "below").mkdir()
    (tmp_path / "link").symlink_to("far/below")
    assert text_of(f"{tmp_path}/link/../model") == text_of(tmp_path / "far" / "model")
    found = files.look(f"{tmp_path}/link/../model")
    assert found is not None
    assert found.changed_at >= (tmp_path / "link").lstat().st_ctime


def test_a_loop_of_links_leads_to_no_files(tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    assert files.look(str(tmp_path / "one")) is None
    assert text_of(tmp_path), "the entry is no weights file, and does not hide the others"


def test_weights_in_a_subfolder_are_part_of_the_name(tmp_path: Path) -> None:
    (tmp_path / "whisper").mkdir()
    (tmp_path / "whisper" / "model.safetensors").write_text("one")
    first = text_of(tmp_path)
    (tmp_path / "whisper" / "model.safetensors").write_text("another")
    assert text_of(tmp_path) != first


def test_a_clock_that_is_set_forward_makes_no_file_older_than_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    began, now = files.began_at(), time.time
    monkeypatch.setattr(time, "time", lambda: now() + 3600)
    assert files.began_at() == pytest.approx(began, abs=1)
    monkeypatch.setattr(time, "time", lambda: now() - 3600)
    assert files.began_at() == pytest.approx(began - 3600, abs=1)


def test_a_forked_process_has_its_own_start_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    reads, writes = os.pipe()
    now = time.time()
    if (child := os.fork()) == 0:
        os.write(writes, str(files.began_at()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    # The start time of a process has a resolution of 10 ms.
    assert float(os.read(reads, 64)) > now - 0.1 > files.began_at()


@pytest.mark.parametrize("load_format", ["ipc_cache", "tensorizer", "modelexpress", "npcache", "a plugin's"])
def test_weights_that_are_read_from_elsewhere_are_private_to_this_start(
    load_format: str, hub: Path, tmp_path: Path
) -> None:
    """A copy that a server on this machine holds may be of older files than those at the path."""
    (tmp_path / "weights").write_text("one")
    for model in (str(tmp_path), "org/model"):
        made = config(model, load_format=load_format, download_dir=str(hub))
        assert not content.weights_of(made, settings()).shared
        assert content.weights_of(made, settings(weights="v1")).shared


def test_a_model_made_of_other_models_is_private_to_this_start(tmp_path: Path) -> None:
    """Its folder lacks the weights of the other models, and its configuration does not name their commits."""
    for values, shared in (
        ({"text_model_id": None}, True),
        ({"text_model_id": "org/model"}, False),
        ({"audio_config": {"audio_model_id": "org/model"}}, False),
    ):
        made = config(str(tmp_path))
        made.model_config.hf_config = HfConfig(**values)
        assert content.weights_of(made, settings()).shared == shared


@pytest.mark.parametrize(
    "change", [{"load_format": "pt"}, {"ignore_patterns": ["original/*"]}, {"speculative_config": "/draft"}]
)
def test_pages_are_separated_by_the_files_that_are_read_of_a_folder(change: dict[str, Any], tmp_path: Path) -> None:
    if path := change.get("speculative_config"):
        draft = SimpleNamespace(model=str(tmp_path) + path, model_weights="", revision=None)
        change = {"speculative_config": SimpleNamespace(draft_model_config=draft)}
    one, other = config(str(tmp_path)), config(str(tmp_path), **change)
    other.speculative_config = change.get("speculative_config")
    assert both(one)[0] != both(other)[0]
    assert both(one)[1] == both(other)[1], "replicas need not agree on it"


def test_adapters_are_separated_by_the_options_that_apply_them(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("one")

    def named(**changes: Any) -> bytes | None:
        made = config("org/model")
        options = {"lora_dtype": "auto", "target_modules": None, "max_loras": 1, "max_cpu_loras": 1, **changes}
        made.lora_config = SimpleNamespace(**options)
        return Namespaces("base", "one", content.adapters_of(made)).of(adapter(str(tmp_path)))

    assert named() == named(max_loras=4, max_cpu_loras=8) is not None
    assert len({named(), named(target_modules=["o_proj"]), named(lora_dtype="float16"), named(unknown=True)}) == 4
    flat, solid = (Namespaces("base", "one") for _ in range(2))
    assert flat.of(adapter(str(tmp_path))) != solid.of(
        SimpleNamespace(**vars(adapter(str(tmp_path))), is_3d_lora_weight=True)
    )


def test_namespaces_begin_with_the_prefix_of_the_tenant(tmp_path: Path) -> None:
    plain, made = (Namespaces("base", "one", prefix=prefix) for prefix in ("", "tenant-a/"))
    for own in ("", "request"):
        without, found = plain.of(None, own), made.of(None, own)
        assert without is not None
        assert found == b"tenant-a/" + without
    before = made.of(None)
    made.leave()
    found = made.of(None)
    assert found != before
    assert found is not None
    assert found.startswith(b"tenant-a/")


def test_a_folder_without_adapter_files_is_no_adapter(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("one")
    assert Namespaces("base", "one", declared=True).of(adapter(str(tmp_path))) is None


def test_a_model_is_the_same_where_the_hub_is_offline(hub: Path) -> None:
    """In offline mode vLLM has the snapshot's folder in place of the name."""
    online = config("org/model", revision=Branch("main"))
    online.model_config.hf_config = HfConfig(COMMITS[1], _name_or_path="org/model", layers=1)
    offline = config(str(hub / "models--org--model" / "snapshots" / COMMITS[1]))
    offline.model_config.hf_config = HfConfig(_name_or_path=offline.model_config.model, layers=1)
    assert both(online) == both(offline)
    offline.model_config.hf_config = HfConfig(layers=2)
    assert both(online)[0] != both(offline)[0]


def test_the_weights_setting_covers_the_draft_model(tmp_path: Path) -> None:
    for name in ("model", "draft"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text("one")
    made = config(str(tmp_path / "model"))
    alone = both(made, weights="v1")[0]
    made.speculative_config = SimpleNamespace(draft_model_config=made.model_config)
    assert both(made, weights="v1")[0] == alone, "the method drafts tokens without a model"
    draft = SimpleNamespace(model=str(tmp_path / "draft"), model_weights="", revision=None)
    made.speculative_config = SimpleNamespace(draft_model_config=draft)
    first = [both(made, weights="v1")[0], both(made)[0]]
    (tmp_path / "draft" / "weights").chmod(0o600)
    again = [both(made, weights="v1")[0], both(made)[0]]
    assert [one == other for one, other in zip(first, again, strict=True)] == [True, False]
    draft.model = "org/model"
    assert both(made)[0] not in (*first, *again)


def test_draft_layers_are_named_by_their_own_commit(hub: Path) -> None:
    """vLLM reads draft layers at the draft model's revision, which may differ from the model's."""
    made = config("org/model", revision=COMMITS[0], download_dir=str(hub))
    seen = set()
    for revision in (COMMITS[0], COMMITS[1], None):
        draft = SimpleNamespace(model="org/model", model_weights="", revision=revision)
        made.speculative_config = SimpleNamespace(draft_model_config=draft)
        seen.add(both(made)[0])
    move(hub, COMMITS[1])
    seen.add(both(made)[0])
    assert len(seen) == 3


def test_a_path_in_object_storage_is_no_snapshot() -> None:
    made = config(f"s3://bucket/models--org--model/snapshots/{COMMITS[0]}", load_format="runai_streamer")
    assert not content.weights_of(made, settings()).shared


class Branch(str):
    """The branch's commit was requested by vLLM."""

    resolved = COMMITS[1]


def test_the_commit_is_the_one_that_vllm_requested(hub: Path) -> None:
    made = config("org/model", revision=Branch("main"), download_dir=str(hub))
    assert COMMITS[1] in content.weights_of(made, settings()).name
    elsewhere = config("s3://bucket/model", revision=COMMITS[0], download_dir=str(hub))
    assert not content.weights_of(elsewhere, settings()).shared, "the commit belongs to another repository"


def test_a_model_of_which_vllm_fetched_what_it_reads_has_a_commit(hub: Path) -> None:
    """The Hub library reports missing files; an adapter may need any of them."""
    repository = hub / "models--org--model"
    (repository / "trees").mkdir()
    listed = {name: {"size": 2, "blob_id": "0" * 40} for name in ("config.json", "README.md")}
    (repository / "trees" / f"{COMMITS[0]}.json").write_text(json.dumps({"format_version": 1, "files": listed}))
    with pytest.raises(IncompleteSnapshotError):
        snapshot_download("org/model", cache_dir=str(hub), local_files_only=True)
    assert COMMITS[0] in content.weights_of(config("org/model", download_dir=str(hub)), settings()).name


def changed_by(change: str, folder: Path) -> None:
    """Changes the contents of ``folder / "model"``, a link to ``v1``, and keeps modification times."""
    match change:
        case "a file is written over":
            file = folder / "v1" / "weights"
            times = (file.stat().st_atime_ns, file.stat().st_mtime_ns)
            file.write_text("two")
            os.utime(file, ns=times)
        case "a link that a file leads over is made anew":
            (folder / "store" / "current").unlink()
            (folder / "store" / "current").symlink_to("2")
        case "a file is renamed":
            (folder / "v2" / "weights").rename(folder / "v1" / "weights")
        case "the folder is renamed":
            (folder / "v1").rename(folder / "old")
            (folder / "v2").rename(folder / "v1")
        case "a link in the folder is made anew":
            (folder / "v1" / "weights").unlink()
            (folder / "v1" / "weights").symlink_to("../v2/weights")
        case "a link on the way is made anew":
            (folder / "model").unlink()
            (folder / "model").symlink_to("v2")
        case "a link that it leads over is made anew":
            (folder / "model").unlink()
            (folder / "model").symlink_to(folder / "link" / "v1")


@pytest.mark.parametrize(
    "change",
    [
        "a file is written over",
        "a file is renamed",
        "the folder is renamed",
        "a link in the folder is made anew",
        "a link on the way is made anew",
        "a link that it leads over is made anew",
        "a link that a file leads over is made anew",
    ],
)
def test_files_that_change_while_an_engine_starts_are_not_trusted(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are checked after the weights were loaded."""
    for name in ("v1", "v2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text("one")
    for name in ("1", "2"):
        (tmp_path / "store" / name).mkdir(parents=True)
        (tmp_path / "store" / name / "more").write_text("one")
    (tmp_path / "store" / "current").symlink_to("1")
    (tmp_path / "v1" / "more").symlink_to("../store/current/more")
    (tmp_path / "link").symlink_to(".")
    (tmp_path / "model").symlink_to("link/v1")
    model = str(tmp_path / "model")
    began = time.time()
    monkeypatch.setattr(files, "began_at", lambda: began)
    first = content.weights_of(config(model), settings())
    assert first.shared
    # The file clock has a resolution of a few milliseconds.
    while not (tmp_path / "clock").exists() or (tmp_path / "clock").stat().st_ctime <= began:
        (tmp_path / "clock").write_text("")
    changed_by(change, tmp_path)
    seen = content.weights_of(config(model), settings())
    assert not seen.shared
    assert content.weights_of(config(model, instance="another start"), settings()).name != seen.name
    declared = content.weights_of(config(model), settings(weights="v1"))
    assert declared.shared, "the user promises that they do not change"
    named = content.content_of(config(model), settings())
    monkeypatch.setattr(files, "began_at", lambda: time.time() + 60)
    assert content.weights_of(config(model), settings(weights="v1")) == declared
    assert content.content_of(config(model), settings()) == named, "both may be replicas of one leader"
    later = content.weights_of(config(model), settings())
    assert later.shared
    same = change == "a link that it leads over is made anew"
    assert (later.name == first.name) == same, "the next start has other weights than the first"
    assert content.weights_of(config(model, load_format="dummy"), settings()).shared, "made from the seed"


def adapter(path: str) -> Any:
    return SimpleNamespace(lora_int_id=1, lora_name="one", lora_path=path, load_inplace=False)


def test_an_adapter_on_the_hub_is_private_to_this_start_unless_the_hub_is_offline(
    hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM resolves the name later, and the branch may have moved by then."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    for offline, shared in ((False, False), (True, True)):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
        first, again = (Namespaces("base", start).of(adapter("org/model")) for start in ("one", "two"))
        assert (first == again) == shared
    one = Namespaces("base", "one")
    first = one.of(adapter("org/model"))
    move(hub, COMMITS[1])
    assert Namespaces("base", "one").of(adapter("org/model")) != first
    one.next_step()
    assert one.of(adapter("org/model")) is None, "vLLM may have read the adapter again"
    monkeypatch.setattr(files, "began_at", lambda: 0.0)
    moved, again = (Namespaces("base", start).of(adapter("org/model")) for start in ("one", "two"))
    assert moved != again, "the adapter may have been loaded before the branch moved"
    assert Namespaces("base", "one").of(adapter("org/unknown")) is None


def test_an_adapter_newer_than_the_engine_is_private_to_this_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM may have loaded the adapter long before its first request, and its files may have changed in between."""
    (tmp_path / "adapter_config.json").write_text("one")
    older = Namespaces("base", "one").of(adapter(str(tmp_path)))
    monkeypatch.setattr(files, "began_at", lambda: 0.0)
    first, again = (Namespaces("base", start).of(adapter(str(tmp_path))) for start in ("one", "two"))
    assert len({older, first, again}) == 3
    one = Namespaces("base", "one")
    one.of(adapter(str(tmp_path)))
    again = SimpleNamespace(lora_int_id=2, lora_name="one", lora_path=str(tmp_path), load_inplace=False)
    assert one.of(again) not in (None, first), "the files may have changed between the loads"
    declared = {Namespaces("base", start, declared=True).of(adapter(str(tmp_path))) for start in ("one", "two")}
    assert len(declared) == 1, "the user promises that files do not change once they were loaded"


def test_private_namespaces_belong_to_one_engine() -> None:
    one, two = Namespaces("base", "one"), Namespaces("base", "two")
    shared = one.of(None)
    assert two.of(None) == shared
    assert one.leave() == [shared]
    private = one.of(None)
    two.leave()
    assert len({shared, private, two.of(None)}) == 3
    assert one.leave() == [private]
    assert one.of(None) not in (shared, private)
    one.share()
    assert one.of(None) == shared


def test_engines_that_verify_other_pages_share_none() -> None:
    """A page whose checksum was not recorded would look wrong."""
    made = config("/nowhere/model")
    found = [content.content_of(made, settings(verify=percent)) for percent in (0, 1, 100)]
    assert len(set(found)) == 3
    assert found[0] == content.content_of(made, settings())
    assert "verify" not in found[0]
    assert "verify 100" in found[2]
