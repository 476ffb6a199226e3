"""The tokens of pages, for KV events: only requests know them, while the leader knows pages by their hashes.

The scheduler's thread takes a :class:`Described` of each part of a request whose pages are stored or were found. The
thread of the events adds it to :class:`PageTokens`, which keeps the newest pages up to a limit.
"""

import math
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vllm.v1.request import Request

#: Most bytes of all pages' tokens, counted as below. Beyond that the pages that were described first are dropped: those
#: that move to another tier later are announced by their hash alone.
KNOWN_BYTES_MAX = 256 << 20
#: Bytes of a page in the map beside its tokens, of 4 bytes each, and its extra keys, whose texts are counted.
PAGE_OVERHEAD_BYTES = 480


class Lora(NamedTuple):
    """The adapter of a page."""

    number: int
    name: str


class PageContent(NamedTuple):
    """What a page contains, as an event describes it. Hashes are whole."""

    page_hash: bytes
    parent: bytes | None
    tokens: array
    lora: Lora | None
    extra_keys: tuple[Any, ...] | None


@dataclass(frozen=True)
class Described:
    """A part of a request, copied on the scheduler's thread. Positions are counted in units of the hashes."""

    #: The first unit whose tokens are here, and the hashes of the unit before it, if any, and of all units from it on.
    begin: int
    hashes: "list[bytes]"
    tokens: list[int]
    #: Pages that end after this unit are described.
    known: int
    lora: Lora | None
    #: For each page size: extra keys of the pages from ``begin`` on; None without any.
    extra_keys: dict[int, list[tuple[Any, ...] | None]] | None


def describe(request: "Request", known: int, through: int, sizes: "Sequence[int]", hash_tokens: int) -> Described:
    """Copies what describes the pages of a request that end in the units from ``known`` to ``through``.

    ``sizes``: the different page sizes of the engine's groups, in tokens.
    """
    aligned = math.lcm(*sizes) // hash_tokens
    begin = known // aligned * aligned
    lora = request.lora_request
    return Described(
        begin,
        request.block_hashes[max(begin - 1, 0) : through],
        list(request.all_token_ids[begin * hash_tokens : through * hash_tokens]),
        known,
        Lora(lora.adapter_id, lora.name) if lora else None,
        _extra_keys(request, begin * hash_tokens, through * hash_tokens, sizes),
    )


def _extra_keys(
    request: "Request", begin: int, end: int, sizes: "Sequence[int]"
) -> dict[int, list[tuple[Any, ...] | None]] | None:
    """Returns the extra keys of each page in a range of tokens, as vLLM computes them for its own events."""
    if not (request.lora_request or request.mm_features or request.cache_salt or request.prompt_embeds is not None):
        return None
    found = {}
    for size in sizes:
        keys, input_at = [], 0
        for at in range(begin, end - size + 1, size):
            of_page, input_at = generate_block_hash_extra_keys(request, at, at + size, input_at)
            keys.append(of_page)
        found[size] = keys
    return found


class PageTokens:
    """The contents of pages by page size and the last 16 bytes of the hash. For one thread."""

    def __init__(self, sizes: "Sequence[int]", hash_tokens: int):
        self._units = {size: size // hash_tokens for size in sizes}
        self._hash_tokens = hash_tokens
        self._pages: dict[tuple[int, bytes], PageContent] = {}
        self._bytes = 0
        #: Pages that were dropped because of :data:`KNOWN_BYTES_MAX`.
        self.dropped = 0

    def of(self, size: int, page_hash: bytes) -> PageContent | None:
        """Returns the content of a page; None if it is not known."""
        return self._pages.get((size, page_hash))

    def add(self, described: Described) -> "Iterator[tuple[int, bytes]]":
        """Adds the described pages. Yields size and hash of each that was not known."""
        before = described.begin > 0
        units = len(described.hashes) - before
        for size, length in self._units.items():
            keys = described.extra_keys[size] if described.extra_keys else None
            for at in range(units // length):
                end = (at + 1) * length
                if described.begin + end <= described.known:
                    continue
                page_hash = described.hashes[end - 1 + before]
                key = size, page_hash[-16:]
                if (content := self._pages.pop(key, None)) is not None:
                    # The page is the newest one again.
                    self._pages[key] = content
                    continue
                first = at * length
                parent = described.hashes[first - 1 + before] if first + before > 0 else None
                tokens = described.tokens[first * self._hash_tokens : end * self._hash_tokens]
                content = PageContent(page_hash, parent, array("I", tokens), described.lora, keys[at] if keys else None)
                self._pages[key] = content
                self._bytes += _bytes(content)
                yield key
        while self._bytes > KNOWN_BYTES_MAX:
            key = next(iter(self._pages))
            self._bytes -= _bytes(self._pages.pop(key))
            self.dropped += 1


def _bytes(content: PageContent) -> int:
    extra = len(repr(content.extra_keys)) if content.extra_keys else 0
    return PAGE_OVERHEAD_BYTES + 4 * len(content.tokens) + extra
