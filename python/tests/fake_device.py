"""A simulated device: what each page of vLLM's pool holds, and a model that reads and writes pages like real layers.

The KV of a token is a number that stands for the token, all tokens before it, the group and the weights. The model
compares every page that a layer would read with what its tokens say, so that wrong bytes show at once. Pages of older
weights may be read after a reset that vLLM refused; what is computed from them counts as of :data:`MIXED` weights.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Any

from vllm.model_executor.layers.mamba.checkpoint import compute_mamba_prefill_checkpoints

from kvferry.served import NO_PAGE

#: What a page holds after a copy into it was stopped midway, after it was zeroed, and after a load of changed bytes.
TORN, ZEROS, SPOILED = "torn", "zeros", "spoiled"
#: The weights of tokens that were computed from pages of several weights; and the bits of the number.
MIXED, _BITS = 63, 6
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
    return [hash((mark, group)) << _BITS | weights for mark in marks]


def state_of(mark: int, group: int, weights: int) -> tuple:
    return "state", keys_of((mark,), group, weights)[0]


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
    ended: list[Name]
    weights: int
    #: Older weights must not be read.
    oldest: int


class Device:
    """The pages of one engine. ``weights`` counts the changes of the weights."""

    def __init__(self, groups: list[Group], hash_tokens: int, hit_tokens: int):
        self.groups = groups
        self.hash_tokens, self.hit_tokens = hash_tokens, hit_tokens
        self.weights = 0
        #: Steps that are scheduled from now on must not read older weights.
        self.oldest = self._oldest = 0
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
        self._oldest = work.oldest
        of = {run.name: work.weights for run in work.runs}
        for run in work.runs:
            for group in self.groups:
                if group.kind == "state":
                    self._take(run.name, of, self._move(group, run))
                elif group.kind == "scratch" and run.start % self.hit_tokens:
                    page = run.tables[group.number][0]
                    self._take(run.name, of, self._compare(group, run, 0, [self.pages.get(page)], run.start - 1))
        attending = [group for group in self.groups if group.kind in ("full", "window", "chunk")]
        before: dict[Name, int] = {}
        while before != of:
            before = dict(of)
            # A layer writes the KV of a whole step, and reads then: requests share pages within a step.
            for group, run in itertools.product(attending, work.runs):
                self._write(group, run, of[run.name])
            for group, run in itertools.product(attending, work.runs):
                self._take(run.name, of, self._read(group, run, work.weights))
        for run in work.runs:
            for group in self.groups:
                if group.kind == "state":
                    self._advance(group, run, of[run.name])
                elif group.kind == "scratch":
                    self.pages[run.tables[group.number][0]] = self._state(group, run, run.end, of[run.name])

    @staticmethod
    def _take(name: Name, of: dict[Name, int], read: set[int]) -> None:
        if read - {of[name]}:
            of[name] = MIXED

    def _compare(self, group: Group, run: Run, page: int, held: list[Any], first: int) -> set[int]:
        """Returns the weights of tokens that are read, or of a state, if these are the tokens from ``first`` on."""
        found = set()
        for at, each in enumerate(held):
            key = each[1] if isinstance(each, tuple) and group.kind in ("state", "scratch") else each
            wanted = run.sequence.keys(group.number, 0)[first + at] >> _BITS
            if not isinstance(key, int) or key >> _BITS != wanted:
                raise self._wrong(group, run, page, f"what is read of token {first + at} is not there")
            found.add(key & MIXED)
        if found and min(found) < self._oldest:
            raise self._wrong(group, run, page, f"it is of the weights {found}, older than {self._oldest}")
        return found

    def _wrong(self, group: Group, run: Run, page: int, why: str) -> Wrong:
        held = run.tables[group.number][page] if page < len(run.tables[group.number]) else None
        return Wrong(
            f"request {run.name} computes tokens {run.start} to {run.end} with {group.kind} page {page} "
            f"(page {held} of the pool, {self.pages.get(held or NO_PAGE)}): {why}"
        )

    def _read(self, group: Group, run: Run, weights: int) -> set[int]:
        table, size = run.tables[group.number], group.page_tokens
        keys = run.sequence.keys(group.number, weights)
        first = group.first_read(run.start)
        found = set()
        for page in range(first // size, math.ceil(run.start / size)):
            low, high = max(first, page * size), min(run.start, (page + 1) * size)
            held = self.pages.get(table[page]) if table[page] != NO_PAGE else None
            if not isinstance(held, list):
                raise self._wrong(group, run, page, f"tokens {low} to {high} are not there")
            held = held[low - page * size : high - page * size]
            found |= {weights} if held == keys[low:high] else self._compare(group, run, page, held, low)
        return found

    def _write(self, group: Group, run: Run, weights: int) -> None:
        table, size = run.tables[group.number], group.page_tokens
        keys = run.sequence.keys(group.number, weights)
        for page in range(run.start // size, math.ceil(run.end / size)):
            if table[page] == NO_PAGE:
                raise self._wrong(group, run, page, "no page to write to")
            held = self.pages.get(table[page])
            low, high = max(run.start, page * size), min(run.end, (page + 1) * size)
            # A new list: what was copied from the page before stays what it was.
            held = list(held) if isinstance(held, list) and len(held) == size else [0] * size
            held[low - page * size : high - page * size] = keys[low:high]
            self.pages[table[page]] = held

    def _move(self, group: Group, run: Run) -> set[int]:
        """Moves a running state to the last page of the table, and reads it, as vLLM does in mode ``align``."""
        table, size = run.tables[group.number], group.page_tokens
        before = self._columns.get(run.name, (run.start - 1) // size)
        column = self._columns[run.name] = math.ceil(run.end / size) - 1
        if table[column] == NO_PAGE:
            raise self._wrong(group, run, column, "no page for the state")
        if before not in (-1, column):
            self.pages[table[column]] = self.pages.get(table[before])
        return self._compare(group, run, before, [self.pages.get(table[column])], run.start - 1) if run.start else set()

    def _advance(self, group: Group, run: Run, weights: int) -> None:
        table, size = run.tables[group.number], group.page_tokens
        if group.checkpoints:
            offsets, columns = compute_mamba_prefill_checkpoints(
                [run.end], [run.end - run.start], self.hash_tokens, size, 1, False, self.hit_tokens
            )
            if offsets[0] and table[columns[0]] != NO_PAGE:
                self.pages[table[columns[0]]] = self._state(group, run, run.start + offsets[0], weights)
        self.pages[table[math.ceil(run.end / size) - 1]] = self._state(group, run, run.end, weights)

    def _state(self, group: Group, run: Run, tokens: int, weights: int) -> tuple:
        return state_of(run.sequence.marks[tokens - 1], group.number, weights)

    def expected(self, group: Group, marks: tuple[int, ...], weights: int) -> Any:
        """What a page of these tokens holds."""
        if group.kind == "state":
            return state_of(marks[-1], group.number, weights)
        return keys_of(marks, group.number, weights)
