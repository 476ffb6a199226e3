"""The namespace of an engine's pages, in a file of the socket directory: ``kvferry events`` follows it.

An engine whose events name no namespace, and whose pages are all in one at a time, writes it at its start, and again
when it begins to use another one.
"""

import os
from pathlib import Path


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
