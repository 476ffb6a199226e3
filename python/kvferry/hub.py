"""Repositories of the Hugging Face Hub in the local cache. A commit names an immutable content of a repository.

Makes no network requests.
"""

import os
import re

from kvferry import files

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SNAPSHOT = re.compile(r"models--([^/]+)/snapshots/([0-9a-f]{40})/?$")
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
#: Variables with which engines read from ModelScope.
_MODELSCOPE = ("VLLM_USE_MODELSCOPE", "SGLANG_USE_MODELSCOPE")
#: Names of the files that vLLM reads of an adapter.
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")


def commit_of(repository: str, revision: str | None, cache: str | None) -> str | None:
    """Returns the commit from which vLLM reads a model of this name; None if it is not known."""
    if not _NAME.fullmatch(repository):
        return None
    if (commit := _commit_in(revision)) is not None:
        return commit
    folder = _snapshot(repository, revision, cache, whole=False)
    return os.path.basename(folder) if folder else None


def _commit_in(revision: str | None) -> str | None:
    # vLLM resolves a branch to a commit once, and keeps the commit with the branch's name.
    for commit in (getattr(revision, "resolved", None), revision):
        if commit is not None and _COMMIT.fullmatch(commit):
            return str(commit)
    return None


def branch_changed_at(repository: str, revision: str | None, cache: str | None) -> float:
    """Returns when the local cache learned the commit of a branch, in seconds of the wall clock.

    0 for a revision that is a commit, and :data:`kvferry.files.UNKNOWN` if it is not known.
    """
    if _commit_in(revision) is not None:
        return 0.0
    folder = _snapshot(repository, revision, cache, whole=False)
    try:
        found = os.stat(os.path.join(os.path.dirname(os.path.dirname(folder or "")), "refs", revision or "main"))
    except OSError:
        return files.UNKNOWN
    return found.st_ctime


def snapshot_at(path: str) -> tuple[str, str] | None:
    """Returns repository and commit of a snapshot folder in a Hub cache. vLLM uses such a path in offline mode."""
    found = _SNAPSHOT.search(path) if os.path.isdir(path) else None
    return (found[1].replace("--", "/"), found[2]) if found else None


def adapter(path: str) -> files.Local | None:
    """Looks up an adapter at a path, or in the local Hub cache under that name; None if there is none.

    vLLM resolves a name on the Hub when it loads the adapter, which may be later than this call: unless the Hub is
    offline, the cache may change at any time.
    """
    path = os.path.expanduser(path)
    # As in vLLM, ".." in a relative path is resolved in the text, without following links.
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
    """Returns the folder of a repository's snapshot in the local cache. Its name is the commit.

    ``whole``: only a snapshot with all files of the repository. Of a model, vLLM fetches only files that it reads.
    """
    if any(os.environ.get(name, "").lower() in ("1", "true") for name in _MODELSCOPE):
        # ModelScope is another hub, where the same name may be another model.
        return None
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        return None
    try:
        folder = snapshot_download(repository, revision=revision, cache_dir=cache, local_files_only=True)
    except Exception as error:
        # The library raises various exceptions for a cache that it cannot read.
        folder = getattr(error, "snapshot_path", None)
        if whole or folder is None:
            return None
    return folder if _COMMIT.fullmatch(os.path.basename(folder)) else None
