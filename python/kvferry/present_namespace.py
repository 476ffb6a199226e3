"""The namespace of an engine's pages, in a file of the socket directory: ``kvferry events`` follows it.

For engines whose events name no namespace, and whose pages are all in one at a time. A second line has the numbers of
the engine's groups of layers in its events, in the order of their registration, where they are not 0, 1, 2 and so on.
"""

import contextlib
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

logger = logging.getLogger("kvferry")

#: Pause between two looks at the file.
LOOK_S = 2.0
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
    # Other users may pass through the directory.
    new.touch(mode=0o600)
    new.write_text(_text(namespace, groups))
    new.replace(path)


def _text(namespace: bytes | None, groups: Sequence[int]) -> str:
    lines = [(namespace or b"").hex()]
    if list(groups) != list(range(len(groups))):
        lines.append(",".join(map(str, groups)))
    return "".join(f"{line}\n" for line in lines)


class PresentNamespace:
    """Keeps the file up to date. For one thread."""

    def __init__(self, socket_dir: Path, replica: int, groups: Sequence[int] = ()):
        self._socket_dir, self._replica, self._groups = socket_dir, replica, groups
        self._shown: bytes | None = None
        self._look_at = 0.0
        self._told = False

    def show(self, namespace: bytes | None) -> float:
        """Writes the namespace, None while the engine finds no page; returns when to call again.

        For an engine that the leader has welcomed: another one with the same replica would show pages that the first
        one does not find. Looks from time to time whether the file is still there.
        """
        now = time.monotonic()
        if namespace == self._shown and now < self._look_at:
            return self._look_at
        self._shown, self._look_at = namespace, now + LOOK_S
        try:
            if self._present() != _text(namespace, self._groups):
                write(self._socket_dir, self._replica, namespace, self._groups)
        except OSError as error:
            self._look_at = now + _AGAIN_S
            if not self._told and not isinstance(error, FileNotFoundError):
                self._told = True
                logger.warning("kvferry: %s: kvferry events announces no pages in kvferry", error)
            return self._look_at
        self._told = False
        return self._look_at

    def close(self) -> None:
        """Shows that the engine finds no page any longer, unless the file is another engine's by now."""
        with contextlib.suppress(OSError):
            if self._shown and self._present() == _text(self._shown, self._groups):
                write(self._socket_dir, self._replica, None, self._groups)

    def _present(self) -> str | None:
        """Returns what the file has; None without a file."""
        try:
            return path_of(self._socket_dir, self._replica).read_text(errors="replace")
        except FileNotFoundError:
            return None
