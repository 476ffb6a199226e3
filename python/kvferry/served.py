"""Which pages of an engine's KV cache groups a load or a store names.

Layers of one kind form a group with a block table of its own. ``docs/adr/0024-groups-by-pure-rules.md`` has the rules:
a hit that ends at some token needs all pages of groups of full attention before it, the last pages of windows and
chunks, and one state. The leader decides where a hit ends; the rules here name the same pages of the engine.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

#: A block table's entry without a page. vLLM reserves the first page of its pool for it.
NO_PAGE = 0
#: Priorities of pages that are stored; those of 0 are evicted first.
PRIORITIES = range(8)


@dataclass(frozen=True)
class Part:
    """Pages of one group, from position ``first_page`` of the sequence on, and the engine's pages that hold them.

    ``priority`` is of stores, where the setting ``g2_policy`` has ``eviction=priority``: 0, evicted first, to 7. None
    counts as 4. Loads leave the priority of a page as it is.
    """

    group: int
    first_page: int
    pages: list[int]
    priority: int | None = None

    def __post_init__(self) -> None:
        if self.priority is not None and self.priority not in PRIORITIES:
            raise ValueError(f"priority is {self.priority!r}: give a number from 0 to {PRIORITIES[-1]}, or None")


@dataclass(frozen=True)
class ServedGroup:
    """A group as it is registered. ``table`` is its number among the engine's groups, which may be more."""

    table: int
    page_tokens: int
    #: Bytes of a page on one rank.
    page_bytes: int
    attention: str = "full"
    window_tokens: int = 0
    #: Draft layers use the group: a page that was just filled may still change.
    eagle: bool = False

    def needed(self, device: int, end: int) -> range:
        """Returns the pages to load for a hit that ends at token ``end``, without those before token ``device``."""
        last = end // self.page_tokens
        match self.attention:
            case "sliding_window":
                first = last - self._window_pages
            case "chunked_local":
                first = end // self.window_tokens * self.window_tokens // self.page_tokens
            case "state":
                return range(last - 1, last)
            case _:
                first = 0
        return range(min(max(first, device // self.page_tokens), last), last)

    def full(self, tokens: int) -> int:
        """Number of pages that are complete with ``tokens`` tokens, from the first one on."""
        # The drafter writes its part of the last page only when the page behind is computed.
        return max(tokens // self.page_tokens - self.eagle, 0)

    def serves(self, page: int, hit_tokens: int) -> bool:
        """Whether a hit can need a page of a window or a chunk. Hits end at multiples of ``hit_tokens``.

        True if the page is within the window, or the chunk, of the first such end after it. Groups with draft layers
        also need the page that follows an end.
        """
        begin = page * self.page_tokens
        end = -(-(begin + self.page_tokens) // hit_tokens) * hit_tokens
        if self.attention == "chunked_local":
            # A hit that ends with its chunk, or in a later one, needs no page of it.
            return end < (begin // self.window_tokens + 1) * self.window_tokens
        if self.eagle and begin > 0 and begin % hit_tokens == 0:
            return True
        return page >= end // self.page_tokens - max(self._window_pages, 1)

    @property
    def _window_pages(self) -> int:
        """Pages that hold the tokens of a window before the one that attends."""
        return -(-(self.window_tokens - 1) // self.page_tokens)


@dataclass(frozen=True)
class Served:
    """The groups that are registered, in the order of their registration.

    Hashes of the sequence are counted in units of ``hash_tokens``, and hits end at multiples of ``hit_tokens``.
    """

    groups: tuple[ServedGroup, ...]
    hash_tokens: int
    hit_tokens: int
    #: The engine has several groups, served or not: it accepts a load as a whole only.
    whole: bool = False

    def __post_init__(self) -> None:
        if not self.groups:
            raise ValueError("no group is served")

    @classmethod
    def one(cls, page_tokens: int, page_bytes: int) -> "Served":
        """A single group of full attention."""
        return cls((ServedGroup(0, page_tokens, page_bytes),), page_tokens, page_tokens)

    @property
    def looks_behind(self) -> bool:
        """Whether a lookup must name hashes beyond its limit: groups with draft layers need the page after the hit."""
        return any(group.eagle for group in self.groups)

    def to_load(self, tables: Sequence[Sequence[int]], device: int, end: int) -> list[Part] | None:
        """Returns what a load has to bring for a hit from token ``device`` to ``end``, in parts with pages only.

        None if the engine has no page at one of the positions.
        """
        parts = []
        for number, group in enumerate(self.groups):
            needed = group.needed(device, end)
            table = tables[group.table]
            pages = list(table[needed.start : needed.stop])
            if len(pages) < len(needed) or NO_PAGE in pages:
                return None
            if pages:
                parts.append(Part(number, needed.start, pages))
        return parts

    def rank_bytes(self, parts: Sequence[Part], pages: int | None = None) -> int:
        """Bytes of these pages on one rank: of all, or of the first ``pages``."""
        total = 0
        for part in parts:
            count = len(part.pages) if pages is None else min(len(part.pages), pages)
            total += count * self.groups[part.group].page_bytes
            pages = None if pages is None else pages - count
        return total


@dataclass
class StoreCursor:
    """The pages of one request that stores have named."""

    served: Served
    #: For each group, the first page for which no store was requested. Not used for states.
    next_page: list[int] = field(default_factory=list)
    #: ``next_page`` before the last load, whose pages no store has named; None without a load.
    before_load: list[int] | None = None

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begins with the first page of each group."""
        self.next_page = [0] * len(self.served.groups)
        self.before_load = None

    def skip(self, tokens: int) -> None:
        """Skips the pages that end with this token or before it."""
        for number, group in enumerate(self.served.groups):
            self.next_page[number] = max(self.next_page[number], tokens // group.page_tokens)
        self.before_load = None

    def is_behind(self, tokens: int) -> bool:
        """Whether :meth:`to_store` can yield a page that is complete with ``tokens`` tokens, other than a state."""
        return any(
            group.attention != "state" and self.next_page[number] < group.full(tokens)
            for number, group in enumerate(self.served.groups)
        )

    def to_store(
        self, tables: Sequence[Sequence[int]], tokens: int, states: Sequence[tuple[int, int, int]]
    ) -> Iterator[Part]:
        """Yields the pages that are complete with ``tokens`` tokens and were not named yet; :meth:`stored` names them.

        ``states`` are the states that the engine hands over: number of its group, page, and the token at which the
        state was taken. States are found by no other way, because engines move them.
        """
        for number, group in enumerate(self.served.groups):
            if group.attention == "state":
                yield from self._states(number, group, states, tokens)
                continue
            table = tables[group.table]
            yield from self._runs(number, group, table, self.next_page[number], min(group.full(tokens), len(table)))

    def _states(
        self, number: int, group: ServedGroup, states: Sequence[tuple[int, int, int]], tokens: int
    ) -> Iterator[Part]:
        for table, page, at in states:
            # States within a page are of no use to hits that end at pages.
            if table == group.table and page != NO_PAGE and at % group.page_tokens == 0 and 0 < at <= tokens:
                yield Part(number, at // group.page_tokens - 1, [page])

    def _runs(self, number: int, group: ServedGroup, table: Sequence[int], first: int, end: int) -> Iterator[Part]:
        """Yields consecutive pages that the engine has and that a hit can need."""
        if group.attention == "full":
            pages = list(table[first:end])
            if pages and NO_PAGE not in pages:
                yield Part(number, first, pages)
            return
        run: list[int] = []
        for page in range(first, end + 1):
            if page < end and table[page] != NO_PAGE and group.serves(page, self.served.hit_tokens):
                run.append(table[page])
            elif run:
                yield Part(number, page - len(run), run)
                run = []

    def stored(self, parts: Sequence[Part]) -> None:
        """Records that a store named these pages."""
        for part in parts:
            end = part.first_page + len(part.pages)
            self.next_page[part.group] = max(self.next_page[part.group], end)

    def loaded(self, parts: Sequence[Part]) -> None:
        """Records that a load brought these pages. kvferry may lack pages before them, which the engine had itself."""
        self.before_load = list(self.next_page)
        for part in parts:
            if part.first_page <= self.next_page[part.group]:
                self.stored([part])

    def leader_changed(self) -> None:
        """Names the pages of the last load again: the next leader may not have them."""
        if self.before_load is not None:
            self.next_page, self.before_load = self.before_load, None

    def not_stored(self, parts: Sequence[Part]) -> None:
        """Records that a store of these pages failed. States, and pages that the engine gave up since, are lost."""
        for part in parts:
            self.next_page[part.group] = min(self.next_page[part.group], part.first_page)
