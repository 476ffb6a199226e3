"""A simulated device: what each page of vLLM's pool holds, and a model that reads and writes pages like real layers.

The KV of a token is a number that stands for the token, all tokens before it, the group and the weights. The model
compares every page that a layer would read with what its tokens say, so that wrong bytes show at once.
"""

import math
from dataclasses import dataclass, field
from typing import Any

from vllm.model_executor.layers.mamba.checkpoint import compute_mamba_prefill_checkpoints

from kvferry.served import NO_PAGE

#: What a page holds after a copy into it was stopped midway, and after it was zeroed.
TORN, ZEROS = "torn", "zeros"
#: Largest token, and the number of special ones.
TOKENS, SPECIAL = 40, 3
Tables = tuple[list[int], ...]


class Wrong(AssertionError):
    """A page does not hold what it must hold."""


class Name(str):
    """A request id whose hash is the same in each process, so that sets of such ids have one order."""

    __slots__ = ()

    def __hash__(self) -> int:
        return int(self[1:])


@dataclass(frozen=True)
class Group:
    """A group of vLLM's, by the number of its table."""

    number: int
    kind: str
    page_tokens: int
    #: Of a window or a chunk.
    tokens: int = 0
    #: States at the end of a prompt are written while a step passes them.
    checkpoints: bool = False

    def first_read(self, start: int) -> int:
        """The first earlier token that layers of this group read to compute the token ``start``."""
        match self.kind:
            case "full":
                return 0
            case "window":
                return max(start - self.tokens + 1, 0)
            case "chunk":
                return start // self.tokens * self.tokens
        raise ValueError(self.kind)

    def needed(self, end: int) -> range:
        """The pages that a hit up to ``end`` needs; written apart from ``kvferry.served``, to check it."""
        last = end // self.page_tokens
        if self.kind == "state":
            return range(last - 1, last)
        return range(self.first_read(end) // self.page_tokens, last)


class Sequence:
    """Tokens that a request has or will generate, which depend on the prompt alone."""

    def __init__(self, prompt: list[int], generated: int):
        self.tokens = list(prompt)
        self.marks: list[int] = []
        mark = 0
        for at in range(len(prompt) + generated):
            if at == len(self.tokens):
                self.tokens.append(mark % (TOKENS - SPECIAL) + SPECIAL)
            mark = hash((mark, self.tokens[at]))
            self.marks.append(mark)
        self._keys: dict[tuple[int, int], list[int]] = {}

    def keys(self, group: int, weights: int) -> list[int]:
        """The KV of each token in a group."""
        known = self._keys.get((group, weights))
        if known is None:
            known = self._keys[group, weights] = keys_of(self.marks, group, weights)
        return known


def keys_of(marks: list[int] | tuple[int, ...], group: int, weights: int) -> list[int]:
    return [hash((mark, group, weights)) for mark in marks]


def state_of(mark: int, group: int, weights: int) -> tuple:
    return "state", hash((mark, group, weights))


@dataclass
class Run:
    """What a step computes of one request, with the block tables that the ranks have by then."""

    name: Name
    sequence: Sequence
    start: int
    end: int
    tables: Tables
    #: The request began or was resumed with this step.
    fresh: bool


@dataclass
class Work:
    """A step."""

    runs: list[Run]
    zeroed: list[int]
    ended: list[Name] = field(default_factory=list)


class Device:
    """The pages of one engine. ``weights`` counts the changes of the weights."""

    def __init__(self, groups: list[Group], hash_tokens: int, hit_tokens: int):
        self.groups = groups
        self.hash_tokens, self.hit_tokens = hash_tokens, hit_tokens
        self.weights = 0
        self.pages: dict[int, Any] = {}
        #: The column of each request's running state.
        self._columns: dict[Name, int] = {}

    def do(self, work: Work) -> None:
        for page in work.zeroed:
            self.pages[page] = ZEROS
        for name in work.ended:
            self._columns.pop(name, None)
        for run in work.runs:
            if run.fresh:
                self._columns.pop(run.name, None)
        # A layer writes the KV of a whole step, and reads then: requests share pages within a step.
        attending = [group for group in self.groups if group.kind in ("full", "window", "chunk")]
        for run in work.runs:
            for group in attending:
                self._write(group, run)
        for run in work.runs:
            for group in self.groups:
                if group in attending:
                    self._read(group, run)
                elif group.kind == "state":
                    self._advance(group, run)
                else:
                    self._scratch(group, run)

    def _wrong(self, group: Group, run: Run, page: int, why: str) -> Wrong:
        held = run.tables[group.number][page] if page < len(run.tables[group.number]) else None
        return Wrong(
            f"request {run.name} computes tokens {run.start} to {run.end} with {group.kind} page {page} "
            f"(page {held} of the pool, {self.pages.get(held or NO_PAGE)}): {why}"
        )

    def _read(self, group: Group, run: Run) -> None:
        table, size = run.tables[group.number], group.page_tokens
        keys = run.sequence.keys(group.number, self.weights)
        first = group.first_read(run.start)
        for page in range(first // size, math.ceil(run.start / size)):
            low, high = max(first, page * size), min(run.start, (page + 1) * size)
            held = self.pages.get(table[page]) if table[page] != NO_PAGE else None
            if not isinstance(held, list) or held[low - page * size : high - page * size] != keys[low:high]:
                raise self._wrong(group, run, page, f"tokens {low} to {high} are not there")

    def _write(self, group: Group, run: Run) -> None:
        table, size = run.tables[group.number], group.page_tokens
        keys = run.sequence.keys(group.number, self.weights)
        for page in range(run.start // size, math.ceil(run.end / size)):
            if table[page] == NO_PAGE:
                raise self._wrong(group, run, page, "no page to write to")
            held = self.pages.get(table[page])
            low, high = max(run.start, page * size), min(run.end, (page + 1) * size)
            # A new list: what was copied from the page before stays what it was.
            held = list(held) if isinstance(held, list) and len(held) == size else [0] * size
            held[low - page * size : high - page * size] = keys[low:high]
            self.pages[table[page]] = held

    def _advance(self, group: Group, run: Run) -> None:
        """A recurrent layer, as vLLM runs it in mode ``align``: the state moves on to the last page of the table."""
        table, size = run.tables[group.number], group.page_tokens
        before = self._columns.get(run.name, (run.start - 1) // size)
        column = self._columns[run.name] = math.ceil(run.end / size) - 1
        if table[column] == NO_PAGE:
            raise self._wrong(group, run, column, "no page for the state")
        if before not in (-1, column):
            self.pages[table[column]] = self.pages.get(table[before])
        if run.start and self.pages.get(table[column]) != self._state(group, run, run.start):
            raise self._wrong(group, run, before, f"the state after {run.start} tokens is not there")
        if group.checkpoints:
            offsets, columns = compute_mamba_prefill_checkpoints(
                [run.end], [run.end - run.start], self.hash_tokens, size, 1, False, self.hit_tokens
            )
            if offsets[0] and table[columns[0]] != NO_PAGE:
                self.pages[table[columns[0]]] = self._state(group, run, run.start + offsets[0])
        self.pages[table[column]] = self._state(group, run, run.end)

    def _state(self, group: Group, run: Run, tokens: int) -> tuple:
        return state_of(run.sequence.marks[tokens - 1], group.number, self.weights)

    def _scratch(self, group: Group, run: Run) -> None:
        """Layers that need what is in their only page until a boundary is reached."""
        page = run.tables[group.number][0]
        if run.start % self.hit_tokens and self.pages.get(page) != self._state(group, run, run.start):
            raise self._wrong(group, run, 0, f"the scratch after {run.start} tokens is not there")
        self.pages[page] = self._state(group, run, run.end)

    def expected(self, group: Group, marks: tuple[int, ...], weights: int) -> Any:
        """What a page of these tokens holds."""
        if group.kind == "state":
            return state_of(marks[-1], group.number, weights)
        return keys_of(marks, group.number, weights)
