"""Checks of the values that a user gives to a connector. Each error names the key, the value and the remedy."""

import difflib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

#: Longest ``socket_dir``, in bytes: leaves room for the names of the sockets below it.
SOCKET_DIR_BYTES_MAX = 80
#: Longest start of namespaces, in bytes: a namespace has at most 1,024.
PREFIX_BYTES_MAX = 256
#: Longest deadline of a request; the leader cuts longer ones to this.
DEADLINE_MS_MAX = 120_000


def default_socket_dir() -> Path:
    """Returns the default ``socket_dir`` of ``kvferry up``."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "kvferry" if runtime else Path(f"/tmp/kvferry-{os.geteuid()}")


class Options:
    """The values that a user gave under one name, ``where``.

    Raises:
        ValueError: in each method, for a value that cannot be used.
    """

    def __init__(self, where: str, given: dict[str, Any], known: Sequence[str]):
        self._where = where
        self.values = dict(given)
        for key in given:
            if key not in known:
                near = difflib.get_close_matches(key, known, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
                raise ValueError(f"{where}: unknown key {key!r}: {hint}")

    def _refuse(self, name: str, remedy: str) -> ValueError:
        return ValueError(f"{self._where}: {name} is {self.values[name]!r}: {remedy}")

    def socket_dir(self) -> None:
        """Checks ``socket_dir``, and sets its default."""
        value = self.values.setdefault("socket_dir", default_socket_dir())
        if not isinstance(value, (str, Path)) or not Path(value).is_absolute():
            raise self._refuse("socket_dir", "give an absolute path")
        if len(os.fsencode(value)) > SOCKET_DIR_BYTES_MAX:
            raise ValueError(
                f"{self._where}: socket_dir is {value!r}, {len(os.fsencode(value))} bytes long: give a path of at most "
                f"{SOCKET_DIR_BYTES_MAX}"
            )
        self.values["socket_dir"] = Path(value)

    def texts(self, *names: str) -> None:
        """Checks texts."""
        for name in names:
            if not isinstance(self.values.get(name, ""), str):
                raise self._refuse(name, "give a text")

    def short_text(self, name: str) -> None:
        """Checks a text that is part of each namespace."""
        value = self.values.get(name, "")
        if not isinstance(value, str) or not value.isascii() or len(value) > PREFIX_BYTES_MAX:
            raise self._refuse(name, f"give a text of at most {PREFIX_BYTES_MAX} ASCII characters")

    def flags(self, *names: str) -> None:
        """Checks values that are true or false."""
        for name in names:
            if not isinstance(self.values.get(name, False), bool):
                raise self._refuse(name, "give true or false")

    def word(self, name: str, words: Sequence[str]) -> None:
        """Checks one of several words."""
        if self.values.get(name, words[0]) not in words:
            raise self._refuse(name, f"give one of {', '.join(words)}")

    def numbers(self, limits: Iterable[tuple[str, int, int]]) -> None:
        """Checks whole numbers: name, least and largest value."""
        for name, least, most in limits:
            value = self.values.get(name, least)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise self._refuse(name, f"give a whole number from {least} to {most}")
