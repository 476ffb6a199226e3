"""The namespace of an engine's pages, which changes when its weights may have changed."""

import hashlib
import secrets


class Namespaces:
    """The present namespace: shared with engines of the same description, or private to this engine."""

    def __init__(self, base: str, *, private: bool, prefix: str = ""):
        self._base = base
        self._prefix = prefix.encode()
        self._shared = not private
        #: The namespace of requests, 32 bytes after the prefix.
        self.present = self._prefix + _digest(base)
        if private:
            self.begin_private()

    def begin_private(self) -> list[bytes]:
        """Begins a new private namespace; returns the one that was left if no other engine can use it."""
        left = [] if self._shared else [self.present]
        self._shared = False
        self.present = self._prefix + _digest(f"{self._base}\nprivate={secrets.token_hex(16)}")
        return left


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(errors="backslashreplace"), digest_size=32).digest()
