"""Namespaces of an engine's pages: one for the model alone, one for each adapter.

vLLM puts an adapter's name and path into the hashes of its pages, but not the files at the path. vLLM reads the files
when the adapter is loaded, again after the adapter was evicted, and in every step for an adapter that is loaded in
place. An adapter whose files have changed therefore has unknown weights, and its pages are neither looked up nor
stored. vLLM may also have read the files long before the first request: if they changed since the engine began, the
namespace holds for this start of the engine and this adapter number alone.
"""

import hashlib
import logging
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry import files, hub
from kvferry.looks import Looks

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

logger = logging.getLogger("vllm.kvferry")

#: Most adapters that an engine may load until it ends. Every load under a new number counts, also if the files cannot
#: be checked; further ones are not cached. 16 MB with 1 KB each; 160 MB with paths of 4 KiB.
ADAPTERS_MAX = 16_384
#: Most adapter names and paths that are tracked as having pages on the device, until vLLM's prefix cache is reset;
#: 0.2 KB each. For further ones, pages of the device count as pages of other files.
ON_DEVICE_MAX = 65_536
#: Most namespaces of requests that are remembered, so that a reset can remove their pages; 0.3 KB each. Pages of
#: further ones are left behind, and evicted like others.
OF_REQUESTS_MAX = 4_096
#: Longest lag of file times behind the wall clock.
CLOCK_S = 1.0

#: Marks a name and path under which the device may have pages of several weights.
_MIXED = b""


@dataclass(eq=False)
class _Adapter:
    """An adapter that vLLM has loaded under one number. Paths are kept as digests."""

    #: Digest of the adapter's name and path.
    name: bytes
    #: Digest of the adapter's files at the first check; None before.
    files: bytes | None = None
    #: The adapter's text in namespaces, set by the first check of its files.
    text: str = ""
    #: Time since which requests compute pages while the files cannot be checked, in seconds of the wall clock; None
    #: after a successful check. vLLM may have read the files at any time from then on.
    unseen_since: float | None = None
    #: vLLM may have read other files than those of ``files``.
    unknown: bool = False


class Namespaces:
    """Digests of the model and adapters that pages depend on. :meth:`leave` replaces them by private ones.

    ``start`` names this start of the engine; ``options`` are those with which it applies adapters. ``declared``: the
    user promises that files do not change after they were loaded. Each namespace begins with ``prefix``.
    """

    def __init__(self, base: str, start: str, options: str = "", *, declared: bool = False, prefix: str = ""):
        self._base = base
        self._prefix = prefix.encode()
        self._start = start
        self._options = options
        self._declared = declared
        self._private = ""
        #: Adapters by number. Entries are never removed, so that a known number is never taken for a new one.
        self._adapters: dict[int, _Adapter] = {}
        #: The weights of which the device may have pages, by name and path: a digest of the adapter's files; before
        #: their first check, the adapter's number; or :data:`_MIXED`.
        self._on_device: dict[bytes, bytes | int] = {}
        #: Digests that were returned, by adapter and namespace of the request.
        self._digests: dict[tuple[str, str], bytes] = {}
        self._of_requests = 0
        #: Digests in which requests without a namespace of their own find pages now, by the adapter's name and path.
        #: How often they have changed.
        self._present: dict[bytes, bytes] = {}
        self.changes = 0
        self._logged_full = False
        self._looks = Looks(hub.adapter)

    def next_step(self) -> None:
        """Starts a step, in which files are checked again."""
        self._looks.next_step()

    def of(self, lora: "LoRARequest | None", own: str = "") -> bytes | None:
        """Returns the namespace of requests with this adapter, 32 bytes after the prefix; None for unknown weights.

        ``own`` is the request's own part. Checks the adapter's files once in a step, and waits for that
        :data:`kvferry.looks.LOOKS_S` at most.

        Salts and multimodal inputs are part of the page hashes, not of the namespace.
        """
        adapter = self._adapter(lora) if lora else "no lora"
        if adapter is None:
            return None
        digest = self._digests.get((adapter, own))
        if digest is None:
            request = f"request={own!r}" if own else ""
            text = "\n".join(filter(None, (self._base, self._private, adapter, request)))
            digest = self._prefix + _digest(text)
            if not own or self._of_requests < OF_REQUESTS_MAX:
                self._of_requests += bool(own)
                self._digests[adapter, own] = digest
        if not own:
            self._present_is(_name(lora) if lora else b"", digest)
        return digest

    @property
    def of_model(self) -> bytes | None:
        """The namespace in which requests without an adapter and a namespace of their own find pages now.

        None before the first of them. For any thread.
        """
        return self._present.get(b"")

    @property
    def present(self) -> list[bytes]:
        """The namespaces in which requests without a namespace of their own find pages now, of each adapter one.

        An adapter that is loaded again from other files has another namespace.
        """
        return list(self._present.values())

    def _present_is(self, name: bytes, digest: bytes | None) -> None:
        if self._present.get(name) == digest:
            return
        self.changes += 1
        if digest is None:
            del self._present[name]
        else:
            self._present[name] = digest

    def _adapter(self, lora: "LoRARequest") -> str | None:
        adapter = self._of_number(lora)
        found = self._looks.at(lora.lora_path) if adapter else None
        if adapter is None or found is None:
            return None
        text = f"{_shape(lora)}, {found.text(declared=self._declared)}"
        seen = _digest(text)
        if adapter.files is None:
            adapter.files, adapter.text = seen, self._text(lora, text, found.changed_at)
        unseen = adapter.unseen_since
        if seen != adapter.files or (unseen is not None and unseen <= found.changed_at < files.UNKNOWN):
            self._lose(adapter, lora)
            return None
        adapter.unseen_since = None
        if self._computes(adapter, lora.lora_int_id):
            logger.warning(
                "kvferry: adapter %r was loaded again from other files in %s: requests that begin with pages of the "
                "device under its name store nothing, until vLLM's prefix cache is reset",
                lora.lora_name,
                lora.lora_path,
            )
        return adapter.text

    def _of_number(self, lora: "LoRARequest") -> _Adapter | None:
        """Returns the adapter of a request; None when its weights are unknown, or too many adapters were loaded."""
        name = _name(lora)
        adapter = self._adapters.get(lora.lora_int_id)
        if adapter is None and len(self._adapters) < ADAPTERS_MAX:
            adapter = self._adapters[lora.lora_int_id] = _Adapter(name)
        elif adapter is None:
            self._tell_full()
        if adapter is not None and not adapter.unknown and (adapter.name != name or lora.load_inplace):
            # vLLM may have either of the two adapters now, or reads the files in each step.
            self._lose(adapter, lora)
        if adapter is None or adapter.unknown:
            self._on_device_is(name, _MIXED)
            return None
        return adapter

    def _lose(self, adapter: _Adapter, lora: "LoRARequest") -> None:
        """Marks an adapter as unknown: vLLM may have other weights under its number, and pages of them."""
        adapter.unknown = True
        self._present_is(adapter.name, None)
        self._on_device_is(adapter.name, _MIXED)
        logger.warning(
            "kvferry: the files of adapter %r in %s changed after it was loaded, or it is loaded in place: its "
            "requests run without the cache; unload it and load it again, from a new path",
            lora.lora_name,
            lora.lora_path,
        )

    def _computes(self, adapter: _Adapter, number: int) -> bool:
        """Records that the device gets pages of an adapter. True if this makes the pages under its name mixed."""
        of = adapter.files or number
        before = self._on_device.get(adapter.name)
        mixed = before not in (None, number, of)
        self._on_device_is(adapter.name, _MIXED if mixed else of)
        return mixed and before != _MIXED

    def _on_device_is(self, name: bytes, of: bytes | int) -> None:
        if name in self._on_device or len(self._on_device) < ON_DEVICE_MAX:
            self._on_device[name] = of

    def _text(self, lora: "LoRARequest", seen: str, changed_at: float) -> str:
        text = f"lora={lora.lora_name!r}, {self._options}, {seen}"
        if changed_at <= files.began_at() or (self._declared and changed_at < files.UNKNOWN):
            return text
        logger.info(
            "kvferry: adapter %r in %s is newer than this engine: its pages are shared with no other engine and no "
            'later start, unless "weights" in kv_connector_extra_config promises that its files do not change',
            lora.lora_name,
            lora.lora_path,
        )
        return f"{text} of start {self._start}, number {lora.lora_int_id}"

    def _tell_full(self) -> None:
        if not self._logged_full:
            self._logged_full = True
            logger.warning("kvferry: %d adapters were loaded: further ones run without the cache", ADAPTERS_MAX)

    def computes_unseen(self, lora: "LoRARequest | None") -> None:
        """Records that a request computes pages with this adapter while its files cannot be checked."""
        adapter = self._of_number(lora) if lora else None
        if lora is not None and adapter is not None:
            # The next check shows whether the files have changed since.
            if adapter.unseen_since is None:
                adapter.unseen_since = time.time() - CLOCK_S
            self._computes(adapter, lora.lora_int_id)

    def device_is_old(self, lora: "LoRARequest | None") -> bool:
        """Whether the device may have pages, under this adapter's name and path, of other files than the present ones.

        Must be called after :meth:`of` or :meth:`computes_unseen`.
        """
        if lora is None:
            return False
        of = self._on_device.get(_name(lora))
        if of is None:
            return len(self._on_device) >= ON_DEVICE_MAX
        return of == _MIXED

    def device_is_empty(self) -> None:
        """Records that no request can find an older page on the device."""
        self._on_device.clear()

    def leave(self) -> list[bytes]:
        """Replaces all namespaces by new private ones; returns the digests that were in use before."""
        left = list(self._digests.values())
        self._private = f"private={secrets.token_hex(16)}"
        self._begin_anew()
        return left

    def share(self) -> None:
        """Returns to the namespaces that are shared with other engines."""
        self._private = ""
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._digests.clear()
        self._of_requests = 0
        self._present.clear()
        self.changes += 1


def _name(lora: "LoRARequest") -> bytes:
    return _digest(f"{lora.lora_name!r} {lora.lora_path!r}")


def _shape(lora: "LoRARequest") -> str:
    return f"is_3d_lora_weight={getattr(lora, 'is_3d_lora_weight', None)}"


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(errors="backslashreplace"), digest_size=32).digest()
