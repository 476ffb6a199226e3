"""The namespace of an engine's pages, in a file of the socket directory: ``kvferry events`` follows it.

For engines whose events name no namespace, and whose pages are all in one at a time. A second line has the numbers of
the engine's groups of layers in its events, in the order of their registration, where they are not 0, 1, 2 and so on.
"""

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

logger = logging.getLogger("kvferry")

#: Pause after a write that failed: the directory may not be there yet.
_AGAIN_S = 1.0


def path_of(socket_dir: Path, replica: int) -> Path:
    """The file of an engine."""
    return socket_dir / f"namespace-{replica}"


def write(socket_dir: Path, replica: int, namespace: bytes | None, groups: Sequence[int] = ()) -> None:
    """Replaces the namespace; None while the engine finds no page. ``groups``: the engine's numbers of its groups.

    Raises:
        OSError: the file cannot be written.
    """
    path = path_of(socket_dir, replica)
    new = path.with_name(f"{path.name}.{os.getpid()}")
    lines = [(namespace or b"").hex()]
    if list(groups) != list(range(len(groups))):
        lines.append(",".join(map(str, groups)))
    new.write_text("".join(f"{line}\n" for line in lines))
    new.replace(path)


class PresentNamespace:
    """Keeps the file up to date. For one thread."""

    def __init__(self, socket_dir: Path, replica: int, groups: Sequence[int] = ()):
        self._socket_dir, self._replica, self._groups = socket_dir, replica, groups
        self._written: bytes | None = None
        self._not_before = 0.0
        self._told = False

    def show(self, namespace: bytes) -> float | None:
        """Writes the namespace if it has changed, or the file is gone; returns when to call again after a failure."""
        if namespace == self._written and path_of(self._socket_dir, self._replica).exists():
            return None
        if time.monotonic() < self._not_before:
            return self._not_before
        try:
            write(self._socket_dir, self._replica, namespace, self._groups)
        except OSError as error:
            self._not_before = time.monotonic() + _AGAIN_S
            if not self._told and not isinstance(error, FileNotFoundError):
                self._told = True
                logger.warning("kvferry: %s: kvferry events announces no pages in kvferry", error)
            return self._not_before
        self._written, self._told = namespace, False
        return None
