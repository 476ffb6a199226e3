"""Namespaces of an engine's pages: one for the model alone, one for each adapter."""

import hashlib
import secrets
from typing import TYPE_CHECKING

from kvferry.content import adapter_identity

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

#: Adapters whose files are remembered; of one more the oldest is looked at again. With paths of 4 KiB: 48 MiB.
ADAPTERS_MAX = 4096


class Namespaces:
    """Digests of what pages depend on. They can be left for private ones, which no other engine has."""

    def __init__(self, base: str, start: str):
        self._base = base
        self._start = start
        self._private = ""
        self._adapters: dict[tuple[int, str, str], str] = {}
        #: Digests that were given out, by adapter.
        self._digests: dict[str, bytes] = {}

    def of(self, lora: "LoRARequest | None") -> bytes:
        """32 bytes for requests with this adapter. Salts and multimodal inputs are in the hashes of pages."""
        adapter = self._adapter(lora) if lora else "no lora"
        digest = self._digests.get(adapter)
        if digest is None:
            text = "\n".join(filter(None, (self._base, self._private, adapter)))
            digest = hashlib.blake2b(text.encode(), digest_size=32).digest()
            if len(self._digests) > ADAPTERS_MAX:
                self._digests.pop(next(iter(self._digests)))
            self._digests[adapter] = digest
        return digest

    def _adapter(self, lora: "LoRARequest") -> str:
        """An adapter as vLLM has it: what lay in its folder when it was first used, or was loaded anew."""
        name = (lora.lora_int_id, lora.lora_name, lora.lora_path)
        if name not in self._adapters or lora.load_inplace:
            if len(self._adapters) >= ADAPTERS_MAX:
                self._adapters.pop(next(iter(self._adapters)))
            self._adapters[name] = f"lora={lora.lora_name!r}, {adapter_identity(lora.lora_path, self._start)}"
        return self._adapters[name]

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
