"""Names the weights of an engine, and writes configurations as texts that are equal in every process.

Weights that cannot be identified get a name of this start of the engine: their pages are shared with no other engine
and with no later start, instead of being confused with those of other weights under the same name.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from kvferry import files, hub

_NAME_CHARACTERS_MAX = 200
#: Time for which a branch must have rested before this process began: another process of the engine, which began
#: earlier, may have resolved it, and a file server may have another clock.
BRANCH_REST_S = 600.0


class Weights(NamedTuple):
    """Texts that name the weights of an engine."""

    #: For namespaces.
    name: str
    #: For the content of a registration: weights that cannot be identified are named by their files or path alone.
    content: str
    #: Whether every engine with these weights has this name; otherwise the name holds for this start alone.
    shared: bool
    #: Path or name of the model, and its revision, for display.
    model: str
    revision: str | None


def identify(
    path: str,
    revision: str | None,
    *,
    dummy: bool,
    from_path: bool,
    cache: str | None,
    config_commit: str | None,
    declared: str,
    start: str,
) -> Weights:
    """Names the weights by the files at their path. Called after they were loaded.

    ``dummy``: the engine draws weights and reads none. ``from_path``: it reads only files at ``path``. ``cache``: the
    folder of the Hub's cache, None for the default. ``config_commit``: of the model's configuration, if known.
    ``declared``: the user's name for weights that cannot be identified. ``start`` names this start of the engine.
    """
    shown = str(revision) if revision is not None else None
    snapshot = hub.snapshot_at(path)
    local = files.look(path) if snapshot is None else None
    there = local.text(declared=True) if local else path
    if dummy:
        return Weights(there, there, True, path, shown)
    if snapshot is None and local is None and from_path:
        commit = hub.commit_of(path, revision, cache)
        # If the branch moved while the engine started, the weights may be those of either commit. The configuration was
        # read before the weights.
        if config_commit is not None:
            certain = config_commit == commit
        else:
            certain = hub.branch_changed_at(path, revision, cache) <= files.began_at() - BRANCH_REST_S
        if commit is not None and certain:
            snapshot = path, commit
    if snapshot is not None and from_path:
        repository, commit = snapshot
        # The name does not depend on the branch, or on whether the snapshot came from the cache alone.
        named = f"{repository} at commit {commit}"
        return Weights(named, named, True, repository, commit)
    if declared:
        named = f"{there} declared as {declared!r}"
        return Weights(named, there if local else named, True, path, shown)
    # Files that changed since the process began may not be those that were loaded.
    if from_path and local is not None and local.changed_at <= files.began_at():
        return Weights(local.text(), there, True, path, shown)
    return Weights(f"{path} of start {start}", there, False, path, shown)


def models_elsewhere(values: Any) -> Iterator[str]:
    """Yields other models in a configuration, whose weights are a part of this model's."""
    for name, value in values.items() if isinstance(values, dict) else ():
        if isinstance(value, str) and isinstance(name, str) and name.endswith("_model_id"):
            yield value
        yield from models_elsewhere(value)


def without_path(values: dict[Any, Any]) -> dict[Any, Any]:
    """Returns a configuration without the path that it was read from, which differs in offline mode of the Hub."""
    return {name: value for name, value in values.items() if name != "_name_or_path"}


def cut(text: str) -> str:
    """Returns a text in one line, without its beginning where it is long."""
    one_line = " ".join(text.split())
    return one_line if len(one_line) <= _NAME_CHARACTERS_MAX else f"...{one_line[-_NAME_CHARACTERS_MAX:]}"


def sorted_json(value: Any) -> str:
    """Returns JSON that does not depend on the order of keys, which may be of several types."""
    return json.dumps(_with_text_keys(value), default=described, sort_keys=True)


def _with_text_keys(value: Any) -> Any:
    """Returns the value with sortable text keys; a number and a text of the same digits stay distinct."""
    if isinstance(value, dict):
        return {
            key if isinstance(key, str) else f"{type(key).__name__} {key}": _with_text_keys(each)
            for key, each in value.items()
        }
    return [_with_text_keys(each) for each in value] if isinstance(value, (list, tuple)) else value


def described(value: Any) -> str:
    """Returns a text that is equal in every process: without addresses of objects."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))
