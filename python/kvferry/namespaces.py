"""Namespaces of an engine's pages: one for the model alone, one for each adapter.

vLLM puts an adapter's name and path into the hashes of its pages, and not what lies at the path. It reads the files
when the adapter is loaded, again whenever the adapter had to give way to others, and with every step where it is loaded
in place. So an adapter whose files have changed has unknown weights, and its pages are neither found nor stored. It may
also have read them long before the first request: files that changed since the engine began name this start alone, and
the number under which the adapter was loaded.
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

#: Adapters that an engine may load in its life, each start of one counted, with those whose files could not be looked
#: at; those beyond are not cached. With 1 KB for each: 16 MB; with paths of 4 KiB: 160 MB.
ADAPTERS_MAX = 16_384
#: Names and paths of adapters that the device may have pages of, until vLLM's prefix cache is reset; 0.2 KB each. With
#: more, pages of the device count as those of other files.
ON_DEVICE_MAX = 65_536
#: How far the clock of files may be behind the wall clock.
CLOCK_S = 1.0

#: The device may have pages of several weights under one name and path.
_MIXED = b""


@dataclass(eq=False)
class _Adapter:
    """An adapter that vLLM has loaded under one number. Paths are kept as digests."""

    #: Of its name and path.
    name: bytes
    #: Of its files, as they were seen first; None before.
    files: bytes | None = None
    #: What it is called in namespaces, once its files were seen.
    text: str = ""
    #: Since when requests compute pages while the files cannot be looked at, in seconds of the wall clock; None: they
    #: could be looked at last time. vLLM may have read them at any time from then on.
    unseen_since: float | None = None
    #: vLLM may have read other files than those.
    unknown: bool = False


class Namespaces:
    """Digests of what pages depend on. They can be left for private ones, which no other engine has.

    ``start`` names this start of the engine; ``options`` are those with which it applies adapters. ``declared``: the
    user promises that files are not changed once they were loaded.
    """

    def __init__(self, base: str, start: str, options: str = "", *, declared: bool = False):
        self._base = base
        self._start = start
        self._options = options
        self._declared = declared
        self._private = ""
        #: By number; no number is ever taken out, so that none is taken for a new one.
        self._adapters: dict[int, _Adapter] = {}
        #: Of which weights the device may have pages, by name and path: a digest of the adapter's files; before they
        #: were seen, the number under which it was loaded; or :data:`_MIXED`.
        self._on_device: dict[bytes, bytes | int] = {}
        #: Digests that were given out, by adapter: at most one for each, and one for the model.
        self._digests: dict[str, bytes] = {}
        self._told_full = False
        self._looks = Looks(hub.adapter)

    def next_step(self) -> None:
        """Files are looked at anew."""
        self._looks.next_step()

    def of(self, lora: "LoRARequest | None") -> bytes | None:
        """32 bytes for requests with this adapter; None when its weights are unknown.

        Looks at the adapter's files, once in a step, and waits for that :data:`kvferry.looks.LOOKS_S` at most.

        Salts and multimodal inputs are in the hashes of pages.
        """
        adapter = self._adapter(lora) if lora else "no lora"
        if adapter is None:
            return None
        digest = self._digests.get(adapter)
        if digest is None:
            text = "\n".join(filter(None, (self._base, self._private, adapter)))
            digest = _digest(text)
            self._digests[adapter] = digest
        return digest

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
        """The adapter of a request's number; None when its weights are unknown, or too many are remembered."""
        name = _name(lora)
        adapter = self._adapters.get(lora.lora_int_id)
        if adapter is None and len(self._adapters) < ADAPTERS_MAX:
            adapter = self._adapters[lora.lora_int_id] = _Adapter(name)
        elif adapter is None:
            self._tell_full()
        if adapter is not None and not adapter.unknown and (adapter.name != name or lora.load_inplace):
            # vLLM has either the one or the other now, or reads the files anew with each step.
            self._lose(adapter, lora)
        if adapter is None or adapter.unknown:
            self._on_device_is(name, _MIXED)
            return None
        return adapter

    def _lose(self, adapter: _Adapter, lora: "LoRARequest") -> None:
        """Marks a number as unknown: vLLM may have other weights under it, and pages of them on the device."""
        adapter.unknown = True
        self._on_device_is(adapter.name, _MIXED)
        logger.warning(
            "kvferry: the files of adapter %r in %s changed after it was loaded, or it is loaded in place: its "
            "requests run without the cache; unload it and load it again, from a new path",
            lora.lora_name,
            lora.lora_path,
        )

    def _computes(self, adapter: _Adapter, number: int) -> bool:
        """The device gets pages of an adapter. True if it may have others under that name and path from now on."""
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
        if not self._told_full:
            self._told_full = True
            logger.warning("kvferry: %d adapters were loaded: further ones run without the cache", ADAPTERS_MAX)

    def computes_unseen(self, lora: "LoRARequest | None") -> None:
        """A request of this adapter, whose files could not be looked at, computes pages of the device."""
        adapter = self._of_number(lora) if lora else None
        if lora is not None and adapter is not None:
            # The next look tells whether the files changed since.
            if adapter.unseen_since is None:
                adapter.unseen_since = time.time() - CLOCK_S
            self._computes(adapter, lora.lora_int_id)

    def device_is_old(self, lora: "LoRARequest | None") -> bool:
        """Whether the device may have pages, under this adapter's name and path, of other files than those of now.

        To be asked after :meth:`of` or :meth:`computes_unseen`.
        """
        if lora is None:
            return False
        of = self._on_device.get(_name(lora))
        if of is None:
            return len(self._on_device) >= ON_DEVICE_MAX
        return of == _MIXED

    def device_is_empty(self) -> None:
        """No request finds a page of before on the device any more."""
        self._on_device.clear()

    def leave(self) -> list[bytes]:
        """Makes all namespaces private and new; returns the digests that were given out before."""
        left = list(self._digests.values())
        self._private = f"private={secrets.token_hex(16)}"
        self._digests.clear()
        return left

    def share(self) -> None:
        """Goes back to the namespaces that other engines have too."""
        self._private = ""
        self._digests.clear()


def _name(lora: "LoRARequest") -> bytes:
    return _digest(f"{lora.lora_name!r} {lora.lora_path!r}")


def _shape(lora: "LoRARequest") -> str:
    return f"is_3d_lora_weight={getattr(lora, 'is_3d_lora_weight', None)}"


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(errors="backslashreplace"), digest_size=32).digest()
