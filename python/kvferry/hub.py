"""Repositories of the Hugging Face Hub, as they lie in the local cache: a commit names what is in one for ever.

Asks no network.
"""

import os
import re

from kvferry import files

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SNAPSHOT = re.compile(r"models--([^/]+)/snapshots/([0-9a-f]{40})/?$")
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
#: Files of an adapter that vLLM reads.
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")


def commit_of(repository: str, revision: str | None, cache: str | None) -> str | None:
    """The commit that vLLM reads a model of this name from; None where that is not known."""
    if not _NAME.fullmatch(repository):
        return None
    # vLLM asks for the commit of a branch once, and keeps it with the branch's name.
    for commit in (getattr(revision, "resolved", None), revision):
        if commit is not None and _COMMIT.fullmatch(commit):
            return str(commit)
    folder = _snapshot(repository, revision, cache, whole=False)
    return os.path.basename(folder) if folder else None


def snapshot_at(path: str) -> tuple[str, str] | None:
    """Repository and commit of a snapshot in a cache of the Hub. vLLM has such a path where the Hub is offline."""
    found = _SNAPSHOT.search(path) if os.path.isdir(path) else None
    return (found[1].replace("--", "/"), found[2]) if found else None


def adapter(path: str) -> files.Local | None:
    """What lies at an adapter's path, or in the local cache of the Hub under that name; None for nothing.

    vLLM resolves a name on the Hub when it loads the adapter, which may be later than this: with a network, what lies
    in the cache may change at any time.
    """
    path = os.path.expanduser(path)
    # As vLLM does: what follows ".." in a relative path counts from the text before it.
    local = files.look(os.path.abspath(path) if not os.path.isabs(path) else path, ADAPTER_FILES)
    if local is not None or os.path.isabs(path) or os.path.exists(path):
        return local
    folder = _snapshot(path, None, None, whole=True)
    if folder is None:
        return None
    changed_at = files.UNKNOWN
    if _is_offline():
        try:
            branch = os.path.join(os.path.dirname(os.path.dirname(folder)), "refs", "main")
            changed_at = max(os.stat(branch).st_ctime, os.stat(folder).st_ctime)
        except OSError:
            pass
    return files.Local(f"{path} at commit {os.path.basename(folder)}", (), changed_at)


def _is_offline() -> bool:
    try:
        from huggingface_hub import constants
    except ImportError:
        return False
    return bool(constants.HF_HUB_OFFLINE)


def _snapshot(repository: str, revision: str | None, cache: str | None, *, whole: bool) -> str | None:
    """The folder of a repository's snapshot in the local cache, whose name is its commit.

    ``whole``: with all files of the repository. Of a model vLLM fetches those that it reads.
    """
    if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
        # Another hub, where names mean other models.
        return None
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        return None
    try:
        folder = snapshot_download(repository, revision=revision, cache_dir=cache, local_files_only=True)
    except Exception as error:
        # Whatever the library makes of a cache that it cannot read.
        folder = getattr(error, "snapshot_path", None)
        if whole or folder is None:
            return None
    return folder if _COMMIT.fullmatch(os.path.basename(folder)) else None
