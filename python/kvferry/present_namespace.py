"""The namespace of an engine's pages, in a file of the socket directory: ``kvferry events`` follows it.

For engines whose events name no namespace, and whose pages are all in one at a time.
"""

import contextlib
import logging
import os
import time
from pathlib import Path

logger = logging.getLogger("kvferry")

#: Pause between two looks at the file.
LOOK_S = 2.0
#: Pause after a write that failed: the directory may not be there yet.
_AGAIN_S = 1.0


def path_of(socket_dir: Path, replica: int) -> Path:
    """The file of an engine."""
    return socket_dir / f"namespace-{replica}"


def write(socket_dir: Path, replica: int, namespace: bytes | None) -> None:
    """Replaces the namespace; None while the engine finds no page.

    Raises:
        OSError: the file cannot be written.
    """
    path = path_of(socket_dir, replica)
    new = path.with_name(f"{path.name}.{os.getpid()}")
    new.write_text((namespace or b"").hex() + "\n")
    new.replace(path)


class PresentNamespace:
    """Keeps the file up to date. For one thread."""

    def __init__(self, socket_dir: Path, replica: int):
        self._socket_dir, self._replica = socket_dir, replica
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
            if self._present() != (namespace or b""):
                write(self._socket_dir, self._replica, namespace)
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
            if self._shown and self._present() == self._shown:
                write(self._socket_dir, self._replica, None)

    def _present(self) -> bytes | None:
        """Returns what the file has; None without a file, or with one that is not ours."""
        try:
            return bytes.fromhex(path_of(self._socket_dir, self._replica).read_text())
        except (FileNotFoundError, ValueError):
            return None
