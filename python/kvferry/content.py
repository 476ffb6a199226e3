"""Names what the bytes of a page depend on, beside the tokens before it: the weights above all.

Two texts come from here. The *namespace* of an engine keeps pages apart that were computed with anything else. The
*content* is its short form, one line for people, and goes into each registration of KV memory.

Weights that cannot be identified get a text of this start of the engine in their namespace: pages are then shared with
no other engine and with no later start, instead of being taken for those of other weights under the same name.
"""

import contextlib
import errno
import hashlib
import json
import logging
import math
import os
import re
import stat
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from kvferry import interface

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from kvferry.settings import Settings

logger = logging.getLogger("vllm.kvferry")

#: Longest content, in bytes: the names in it are cut, its digest never is.
CONTENT_BYTES_MAX = 512
_NAME_CHARACTERS_MAX = 200
#: Symbolic links on the way to a path, as Linux follows them.
LINKS_MAX = 40
#: Files of an adapter that vLLM reads.
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def start_of(config: "VllmConfig") -> bytes:
    """16 bytes that name this start of this engine, the same in all its processes."""
    index = config.parallel_config.data_parallel_index
    parts = (config.kv_transfer_config.engine_id, config.instance_id, index)
    return hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=16).digest()


def namespace_of(config: "VllmConfig", settings: "Settings") -> str:
    """Everything, beside the tokens and the memory's shape, on which the bytes of a page depend."""
    from vllm.platforms import current_platform

    model, cache = config.model_config, config.cache_config
    parts = {
        "vllm": interface.version(),
        **_weights_parts(config, settings),
        "config": sorted_json(model.hf_config.to_dict()),
        "config_path": model.hf_config_path,
        "overrides": model.hf_overrides,
        "max_model_len": model.max_model_len,
        "multimodal": model.multimodal_config,
        "hash": cache.prefix_caching_hash_algo,
        "platform": current_platform.get_device_name(),
        "attention": config.attention_config,
        "namespace": settings.namespace,
    }
    return "\n".join(f"{name}={described(value)}" for name, value in parts.items())


def content_of(config: "VllmConfig", settings: "Settings") -> str:
    """One line of at most :data:`CONTENT_BYTES_MAX` bytes that names model, revision, dtype and quantisation.

    It ends with a digest of everything that it names, so that names that had to be cut still differ. Weights that
    cannot be identified are named by their files or path alone: their namespace keeps their pages apart already, and
    engines whose content differs cannot stand beside each other at one leader.
    """
    model = config.model_config
    parts = _weights_parts(config, settings)
    if not weights_of(config, settings)[1]:
        local = local_identity(_path(config))
        parts["model"] = local.text if local else _path(config)
    digest = hashlib.blake2b(described(parts).encode(), digest_size=16).hexdigest()
    shown = (
        ("", _path(config)),
        ("revision ", model.revision or "default"),
        ("dtype ", described(model.dtype)),
        ("quantization ", described(model.quantization)),
        ("KV ", described(config.cache_config.cache_dtype)),
    )
    text = ", ".join(label + _cut(name) for label, name in shown)
    # A character takes up to 4 bytes.
    room = CONTENT_BYTES_MAX - len(digest) - 2
    return f"{text.encode()[:room].decode(errors='ignore')}, {digest}"


def _cut(text: str) -> str:
    one_line = " ".join(text.split())
    return one_line if len(one_line) <= _NAME_CHARACTERS_MAX else f"...{one_line[-_NAME_CHARACTERS_MAX:]}"


def _weights_parts(config: "VllmConfig", settings: "Settings") -> dict[str, Any]:
    model, load = config.model_config, config.load_config
    dummy = load.load_format == "dummy"
    weights, _ = weights_of(config, settings)
    return {
        "model": weights,
        "revision": model.revision,
        "dtype": model.dtype,
        "quantization": (model.quantization, model.quantization_config),
        "kv_cache_dtype": config.cache_config.cache_dtype,
        "loader": sorted_json(load.model_loader_extra_config),
        "dummy_weights": (model.seed, config.parallel_config.world_size) if dummy else None,
    }


def _path(config: "VllmConfig") -> str:
    # The second is a folder that is new with each start where the weights come from object storage.
    return config.model_config.model_weights or config.model_config.model


def weights_of(config: "VllmConfig", settings: "Settings") -> tuple[str, bool]:
    """Text that names the weights, and whether it is the same for every engine that has them.

    Without that the text is one of this start alone.
    """
    path, model = _path(config), config.model_config
    local = local_identity(path)
    if config.load_config.load_format == "dummy":
        return local.text if local else path, True
    if local is not None and (local.changed_at <= began_at() or settings.weights):
        # The files are looked at after they were loaded: those that changed meanwhile may not be the ones that were.
        return local.text, True
    if local is not None:
        return f"{path} of start {start_of(config).hex()}", False
    commit = hub_commit(path, model.revision, config.load_config.download_dir)
    # The configuration was read before the weights: a branch that has moved meanwhile may be either's.
    configured = getattr(model.hf_config, "_commit_hash", None)
    if commit is not None and configured in (None, commit):
        return f"{path} at commit {commit}", True
    if settings.weights:
        return f"{path} declared as {settings.weights!r}", True
    return f"{path} of start {start_of(config).hex()}", False


def began_at() -> float:
    """When this process began, in seconds of the wall clock: before it loaded any weights."""
    with open("/proc/self/stat") as file:
        # The name of the program may hold anything but its closing parenthesis.
        ticks = int(file.read().rpartition(")")[2].split()[19])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s


def tell_unknown_weights(config: "VllmConfig", settings: "Settings") -> None:
    """Says why pages will not be shared, where that is so."""
    if not weights_of(config, settings)[1]:
        logger.warning(
            "kvferry: the weights of %s cannot be identified, or their files changed while the engine started: pages "
            "are shared with no other engine and with no later start; give a commit as the revision, or name the "
            'weights in kv_connector_extra_config: "weights"',
            _path(config),
        )


def adapter_files(path: str) -> "Local | None":
    """What lies at an adapter's path, or in the local cache of the Hub under that name; None for nothing.

    vLLM resolves a name on the Hub when it loads the adapter, which may be later than this: with a network, what lies
    in the cache may change at any time.
    """
    path = os.path.expanduser(path)
    local = local_identity(path, ADAPTER_FILES)
    if local is not None or os.path.isabs(path):
        return local
    folder = _hub_snapshot(path, None, None)
    if folder is None:
        return None
    changed_at = math.inf
    if _hub_is_offline():
        try:
            branch = os.path.join(os.path.dirname(os.path.dirname(folder)), "refs", "main")
            changed_at = max(os.stat(branch).st_ctime, os.stat(folder).st_ctime)
        except OSError:
            pass
    return Local(f"{path} at commit {os.path.basename(folder)}", changed_at)


def _hub_is_offline() -> bool:
    try:
        from huggingface_hub import constants
    except ImportError:
        return False
    return bool(constants.HF_HUB_OFFLINE)


def hub_commit(repository: str, revision: str | None, cache: str | None) -> str | None:
    """The commit of the Hub repository's snapshot in the local cache; None where there is none. Asks no network."""
    if revision is not None and _COMMIT.fullmatch(revision):
        return revision
    folder = _hub_snapshot(repository, revision, cache)
    return os.path.basename(folder) if folder else None


def _hub_snapshot(repository: str, revision: str | None, cache: str | None) -> str | None:
    """The folder of a repository's snapshot in the local cache, whose name is its commit."""
    if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
        # Another hub, where names mean other models.
        return None
    try:
        from huggingface_hub import snapshot_download

        folder = snapshot_download(repository, revision=revision, cache_dir=cache, local_files_only=True)
    except (ImportError, OSError, ValueError):
        return None
    return folder if _COMMIT.fullmatch(os.path.basename(folder)) else None


class Local(NamedTuple):
    """A file, or a folder and the files in it."""

    #: Real path, names, sizes and times of modification.
    text: str
    #: When one of them, the folder, or a symbolic link on the way was last changed or renamed, in seconds of the wall
    #: clock; infinite where that cannot be said.
    changed_at: float


def local_identity(path: str, names: tuple[str, ...] = ()) -> Local | None:
    """What lies at a path: of a folder all files, or those with these ``names``.

    None for what is neither file nor folder, or cannot be read.
    """
    real = os.path.realpath(path)
    try:
        changed_at = max(os.stat(real).st_ctime, _links_changed_at(path))
        if os.path.isfile(path):
            return Local(f"{real} {_file(os.path.basename(real), os.stat(real))}", changed_at)
        if not os.path.isdir(path):
            return None
        files = []
        for name in names or os.listdir(real):
            # A file may vanish meanwhile, or be a link to nowhere.
            with contextlib.suppress(FileNotFoundError, _LinkLoop):
                file = os.path.join(real, name)
                found = _stat(file)
                if stat.S_ISREG(found.st_mode):
                    files.append(_file(name, found))
                    # A link's own time counts beside that of the file.
                    changed_at = max(changed_at, found.st_ctime, os.lstat(file).st_ctime)
    except OSError:
        return None
    return Local(f"{real} {sorted(files)}", changed_at)


class _LinkLoop(OSError):
    """A symbolic link that leads to itself."""


def _stat(path: str) -> os.stat_result:
    try:
        return os.stat(path)
    except OSError as error:
        raise (_LinkLoop if error.errno == errno.ELOOP else type(error))(*error.args) from None


def _links_changed_at(path: str) -> float:
    """When the last of the symbolic links on the way to a path was made, 0 without one; infinite for too many."""
    newest, links, ways = 0.0, 0, [os.path.abspath(path)]
    while ways:
        part = ways.pop()
        while part != os.path.dirname(part):
            folder, found = os.path.dirname(part), os.lstat(part)
            if stat.S_ISLNK(found.st_mode):
                newest, links = max(newest, found.st_ctime), links + 1
                if links > LINKS_MAX:
                    return math.inf
                # There may be links on the way that it leads, too. Its target counts from where it really lies.
                ways.append(os.path.normpath(os.path.join(os.path.realpath(folder), os.readlink(part))))
            part = folder
    return newest


def _file(name: str, found: os.stat_result) -> tuple[str, int, int]:
    return name, found.st_size, found.st_mtime_ns


def sorted_json(value: Any) -> str:
    """JSON that does not depend on the order of keys, which may be of several types."""
    return json.dumps(_with_text_keys(value), default=described, sort_keys=True)


def _with_text_keys(value: Any) -> Any:
    """The same with keys that can be put in order; a number and a text of the same digits stay apart."""
    if isinstance(value, dict):
        return {
            key if isinstance(key, str) else f"{type(key).__name__} {key}": _with_text_keys(each)
            for key, each in value.items()
        }
    return [_with_text_keys(each) for each in value] if isinstance(value, (list, tuple)) else value


def described(value: Any) -> str:
    """A text that is the same in every process: without addresses of objects."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))
