"""Hashes of pages. TensorRT-LLM passes tokens alone to a connector, and its own hashes are too short to name KV.

The hash of a page is ``SHA-256(previous || tokens)``, with the tokens as 32-bit little-endian numbers. The hash before
the first page is the seed, ``SHA-256`` of a JSON list of everything else that the KV of a request depends on.
"""

import array
import hashlib
import itertools
import json
import sys
from collections.abc import Sequence
from typing import Any

#: First item of the list that a seed is made from; another one for each change of its form.
FORM = "kvferry trtllm 2"

#: Attributes of a request that hold inputs which are not tokens: its KV depends on more than the hashes cover.
OTHER_INPUTS = (
    "multimodal_hashes",
    "multimodal_positions",
    "multimodal_lengths",
    "multimodal_embedding",
    "multimodal_embeddings",
    "py_multimodal_data",
    "prompt_embedding_table",
    "mrope_rotary_cos_sin",
    "mrope_position_deltas",
    "encoder_tokens",
    "encoder_input_features",
    "cross_attention_mask",
    "skip_cross_attn_blocks",
)
#: Attributes with the salt of a request: one release has a number of it, another one its text.
SALTS = ("cache_salt_id", "cache_salt")
#: Flags of requests whose pages are neither looked up nor stored.
NOT_CACHED = ("is_generation_only_request", "is_dummy_request")


def seed_of(
    model: str,
    revision: str | None,
    dtype: str,
    page_tokens: int,
    salts: Sequence[int | str | None] = (),
    lora: str | None = None,
) -> bytes:
    """Returns the hash before the first page. ``lora`` names an adapter, None: a request without one."""
    fields = [FORM, model, revision, dtype, page_tokens, list(salts), lora]
    return hashlib.sha256(json.dumps(fields, separators=(",", ":")).encode()).digest()


def why_not_hashed(request: Any) -> str:
    """Returns why the pages of a request have no hashes; empty when they have."""
    for name in NOT_CACHED:
        flag = getattr(request, name, False)
        # The flags are properties of one class of requests, and methods of another.
        if flag() if callable(flag) else flag:
            return name
    for name in OTHER_INPUTS:
        value = getattr(request, name, None)
        if value is not None and not (isinstance(value, (list, tuple, dict)) and not value):
            return name
    return ""


class PageHashes:
    """The hashes of one sequence, which grows."""

    def __init__(self, seed: bytes, page_tokens: int):
        self._page_tokens = page_tokens
        self._last = seed
        #: Tokens after the last full page.
        self._rest: list[int] = []
        #: The hashes of the full pages, in order.
        self.hashes: list[bytes] = []

    @property
    def tokens(self) -> int:
        """Number of tokens of the sequence so far."""
        return len(self.hashes) * self._page_tokens + len(self._rest)

    def append(self, tokens: Sequence[int]) -> None:
        """Adds tokens at the end of the sequence.

        Raises:
            OverflowError: for a token that has no 32 bits without sign.
        """
        packed = array.array("I", itertools.chain(self._rest, tokens))
        full = len(packed) // self._page_tokens
        rest = packed[full * self._page_tokens :].tolist()
        if sys.byteorder == "big":
            packed.byteswap()
        data, width = memoryview(packed.tobytes()), 4 * self._page_tokens
        for page in range(full):
            self._last = hashlib.sha256(self._last + data[page * width : (page + 1) * width]).digest()
            self.hashes.append(self._last)
        self._rest = rest
