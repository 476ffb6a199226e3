"""The namespace of an engine's pages, in a file of the socket directory: ``kvferry events`` follows it.

For engines whose events name no namespace, and whose pages are all in one at a time.
"""

import logging
import os
import time
from pathlib import Path

logger = logging.getLogger("kvferry")

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
        self._written: bytes | None = None
        self._not_before = 0.0
        self._told = False

    def show(self, namespace: bytes) -> float | None:
        """Writes the namespace if it has changed; returns when to call again after a failure."""
        if namespace == self._written:
            return None
        if time.monotonic() < self._not_before:
            return self._not_before
        try:
            write(self._socket_dir, self._replica, namespace)
        except OSError as error:
            self._not_before = time.monotonic() + _AGAIN_S
            if not self._told and not isinstance(error, FileNotFoundError):
                self._told = True
                logger.warning("kvferry: %s: kvferry events announces no pages in kvferry", error)
            return self._not_before
        self._written, self._told = namespace, False
        return None
