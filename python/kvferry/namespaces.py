"""Namespaces of an engine's pages: one for the model alone, one for each adapter.

vLLM puts an adapter's name and path into the hashes of its pages, and not what lies at the path. It reads the files
when the adapter is loaded, again whenever the adapter had to give way to others, and with every step where it is loaded
in place. So an adapter whose files have changed has unknown weights, and its pages are neither found nor stored. It may
also have read them long before the first request: files that changed since the engine began name this start alone, and
the number under which the adapter was loaded.
"""

import hashlib
import logging
import math
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
#: Digests that are remembered for a reset, 0.1 KB each; of one more the oldest is left to be evicted.
DIGESTS_MAX = 4096


@dataclass(eq=False)
class _OnDevice:
    """An adapter that the device may have pages of, under one name and path."""

    #: The files of whose weights these are; None before they were seen.
    files: bytes | None
    #: There may be pages of other files as well.
    mixed: bool = False
    #: The number under which it was loaded when pages were computed before its files were seen; None: there are none.
    unseen: int | None = None


@dataclass(eq=False)
class _Adapter:
    """An adapter that vLLM has loaded under one number, by digests of its name and path, and of its files."""

    name: bytes
    files: bytes
    #: What it is called in namespaces.
    text: str
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
        self._adapters: dict[int, _Adapter] = {}
        #: Of which files the device may have pages, by name and path.
        self._on_device: dict[bytes, _OnDevice] = {}
        #: Since when requests of a number compute pages while the files cannot be looked at, in seconds of the wall
        #: clock: vLLM may have read the files at any time from then on.
        #: With the name under which they came, empty for several or one that is loaded in place.
        self._unseen: dict[int, tuple[bytes, float]] = {}
        #: More were unseen than are remembered: any new number may be one of them.
        self._forgot_unseen = False
        #: Digests that were given out, by adapter.
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
            if len(self._digests) >= DIGESTS_MAX:
                self._digests.pop(next(iter(self._digests)))
            self._digests[adapter] = digest
        return digest

    def _adapter(self, lora: "LoRARequest") -> str | None:
        name, known = _name(lora), self._adapters.get(lora.lora_int_id)
        device = self._device(name)
        if known is not None and known.unknown:
            device.mixed = True
            return None
        found = self._looks.at(lora.lora_path)
        if found is None:
            return None
        text = f"{_shape(lora)}, {found.text(declared=self._declared)}"
        seen = _digest(text)
        if known is None:
            if self._forgot_unseen or len(self._adapters) + len(self._unseen) >= ADAPTERS_MAX:
                self._tell_full()
                return None
            known = self._adapters[lora.lora_int_id] = _Adapter(name, seen, self._text(lora, text, found.changed_at))
        unseen_name, unseen_since = self._unseen.pop(lora.lora_int_id, (name, math.inf))
        changed = unseen_name != name or unseen_since <= found.changed_at < files.UNKNOWN
        if changed or lora.load_inplace or (name, seen) != (known.name, known.files):
            known.unknown = device.mixed = True
            logger.warning(
                "kvferry: the files of adapter %r in %s changed after it was loaded, or it is loaded in place: its "
                "requests run without the cache; unload it and load it again, from a new path",
                lora.lora_name,
                lora.lora_path,
            )
            return None
        if not device.mixed and (device.files not in (None, seen) or device.unseen not in (None, lora.lora_int_id)):
            device.mixed = True
            logger.warning(
                "kvferry: adapter %r was loaded again from other files in %s: requests that begin with pages of the "
                "device under its name store nothing, until vLLM's prefix cache is reset",
                lora.lora_name,
                lora.lora_path,
            )
        device.files, device.unseen = seen, None
        return known.text

    def _device(self, name: bytes) -> _OnDevice:
        """What the device may have under this name and path."""
        if name in self._on_device:
            return self._on_device[name]
        if len(self._on_device) >= ON_DEVICE_MAX:
            return _OnDevice(None, mixed=True)
        return self._on_device.setdefault(name, _OnDevice(None))

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
        if lora is None:
            return
        name, number = _name(lora), lora.lora_int_id
        device, known = self._device(name), self._adapters.get(number)
        alone = device.unseen in (None, number)
        if known is not None and known.unknown:
            device.mixed = True
            return
        if known is not None and (known.name != name or lora.load_inplace):
            # vLLM has either the one or the other now.
            known.unknown = device.mixed = True
        elif known is None and alone:
            device.unseen = number
        elif known is not None and alone and device.files in (None, known.files):
            device.files = known.files
        else:
            device.mixed = True
        # The next look tells whether the files changed since.
        before, since = self._unseen.get(number, (name, time.time() - CLOCK_S))
        if number in self._unseen or len(self._adapters) + len(self._unseen) < ADAPTERS_MAX:
            self._unseen[number] = b"" if before != name or lora.load_inplace else name, since
        elif known is not None:
            known.unknown = True
        else:
            self._forgot_unseen = True

    def known(self, lora: "LoRARequest | None") -> bool:
        """Whether the weights of an adapter were known when it was last looked at."""
        if lora is None:
            return True
        adapter = self._adapters.get(lora.lora_int_id)
        return adapter is not None and not adapter.unknown and adapter.name == _name(lora)

    def device_is_old(self, lora: "LoRARequest | None") -> bool:
        """Whether the device may have pages, under this adapter's name and path, of other files than those of now."""
        if lora is None:
            return False
        device = self._device(_name(lora))
        return device.mixed or device.unseen not in (None, lora.lora_int_id)

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
