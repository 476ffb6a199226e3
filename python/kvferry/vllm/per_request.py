"""Settings of one request: ``kv_transfer_params`` ``{"kvferry": {...}}``."""

import logging
import time
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger("vllm.kvferry")

#: Longest ``namespace``, in characters.
NAMESPACE_MAX = 256
#: Shortest time between two warnings about settings that cannot be used.
_TELL_S = 60.0


@dataclass(frozen=True)
class PerRequest:
    """What kvferry may do for a request."""

    #: Whether pages are looked up and loaded.
    load: bool = True
    #: Whether pages are stored.
    store: bool = True
    #: Tokens from the first one on of which pages are stored; None: all.
    max_store_tokens: int | None = None
    #: Separates the pages of the request from those of other namespaces.
    namespace: str = ""

    @classmethod
    def read(cls, params: Any) -> "PerRequest":
        """Reads ``kv_transfer_params``.

        Raises:
            ValueError: naming the key, the value and the remedy.
        """
        given = params.get("kvferry") if isinstance(params, dict) else None
        if given is None:
            return _DEFAULT
        if not isinstance(given, dict):
            raise ValueError(f"kv_transfer_params: kvferry is {given!r}: give an object")
        for key in given:
            if key not in cls.__dataclass_fields__:
                known = ", ".join(cls.__dataclass_fields__)
                raise ValueError(f"kv_transfer_params: unknown key {key!r} of kvferry: known are {known}")
        for key in ("load", "store"):
            if not isinstance(given.get(key, True), bool):
                raise ValueError(f"kv_transfer_params: {key} of kvferry is {given[key]!r}: give true or false")
        tokens = given.get("max_store_tokens")
        if tokens is not None and (not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 0):
            raise ValueError(
                f"kv_transfer_params: max_store_tokens of kvferry is {tokens!r}: give a whole number, or leave it out"
            )
        namespace = given.get("namespace", "")
        if not isinstance(namespace, str) or len(namespace) > NAMESPACE_MAX:
            raise ValueError(
                f"kv_transfer_params: namespace of kvferry is {namespace!r}: give a text of at most {NAMESPACE_MAX} "
                "characters"
            )
        return cls(**given)


_DEFAULT = PerRequest()
#: For requests whose settings cannot be used: such a request runs without the cache.
_NOTHING = PerRequest(load=False, store=False)


class PerRequests:
    """Reads the settings of requests, and logs those that cannot be used."""

    def __init__(self) -> None:
        self._tell_at = 0.0

    def of(self, params: Any) -> PerRequest:
        """Returns the settings of a request. With settings that cannot be used, nothing is loaded or stored."""
        try:
            return PerRequest.read(params)
        except ValueError as error:
            if time.monotonic() >= self._tell_at:
                self._tell_at = time.monotonic() + _TELL_S
                logger.warning("kvferry: a request runs without the cache: %s", error)
            return _NOTHING
