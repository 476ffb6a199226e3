"""A small engine on kvferry's clients, with mistakes on purpose, for the tests of the contract suite.

Its KV of a page is a function of all tokens up to the end of the page. It runs one prompt at a time.
"""

import hashlib
import itertools
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from daemon import eventually

from kvferry import wire
from kvferry.client import PendingRequest
from kvferry.engine_client import EngineClient
from kvferry.memory import Group, KvMemory, Place
from kvferry.rank import RankSession
from kvferry.served import Part

PAGE_TOKENS = 4
PAGES = 32
WAIT_S = 10.0
_FLOATS = 256


def tokens(*words: str) -> list[int]:
    """A prompt of one page for each word."""
    return [token for word in words for token in hashlib.sha256(word.encode()).digest()[:PAGE_TOKENS]]


class ToyEngine:
    """``mistakes``: names of the planted mistakes. ``ids``: the first id of its requests.

    ``tails``: it stores the pages behind those that it has by a slot of their own, which names no page before them.
    ``works``: its ranks report work by numbers of their own, which stores name in ``after``. ``client``: the kind of
    client, for the calls of an engine.
    """

    def __init__(
        self,
        socket_dir: Path,
        *mistakes: str,
        model: str = "model",
        engine: bytes | None = None,
        ids: int | None = None,
        wait_s: float = WAIT_S,
        tails: bool = False,
        works: bool = False,
        client: Callable[..., Any] = EngineClient,
    ):
        self.mistakes = set(mistakes)
        self._tails = tails
        self._works = itertools.count(1) if works else None
        self.model = model
        self._wait_s = wait_s
        self._tensor = torch.zeros((PAGES, 1, PAGE_TOKENS, _FLOATS // PAGE_TOKENS))
        content = b"content" if "one_content" in self.mistakes else model.encode()
        place = Place(rank=0, tp_size=1, shard=0, content=content)
        memory = KvMemory([Group({"layer": self._tensor}, PAGE_TOKENS, PAGES)], place)
        self._memory = memory
        engine = engine or os.urandom(16)
        self._rank = RankSession(socket_dir / "worker-0-0", engine, 0, 0, memory, name="toy")
        first = time.time_ns() // 1000 if ids is None else ids
        self._client = client(socket_dir / "leader", engine, first_id=first, name="toy")
        self._client.start()
        self._slots = itertools.count(1)
        self._free = list(range(PAGES))
        self._given_up: set[int] = set()
        eventually("the memory is registered", lambda: self._rank.registered and self._client.listening, WAIT_S)

    def close(self) -> None:
        self._client.close()
        self._rank.close()

    # The model.

    def _kv(self, prompt: Sequence[int], page: int) -> torch.Tensor:
        seed = f"{self.model} {list(prompt[: (page + 1) * PAGE_TOKENS])}".encode()
        noise = np.frombuffer(hashlib.sha256(seed).digest() * (_FLOATS // 8), np.uint32)
        return torch.from_numpy((noise % 1000 + 1).astype(np.float32)).reshape(1, PAGE_TOKENS, -1)

    def hashes(self, prompt: Sequence[int], salt: str) -> list[bytes]:
        found, before = [], os.urandom(16) if "random_hashes" in self.mistakes else b""
        for at in range(0, len(prompt), PAGE_TOKENS):
            own = repr(list(prompt[at : at + PAGE_TOKENS])).encode()
            if "page_hashes" in self.mistakes:
                before = b""
            if "constant_hashes" in self.mistakes:
                own = b""
            before = hashlib.sha256(before + own).digest()
            found.append(before)
        return found

    # Requests.

    def _end(self, pending: PendingRequest) -> Any:
        """The answer, or None after a failure, when nothing of the request runs any longer."""
        assert pending.wait(WAIT_S), f"request {pending.id} does not end"
        failure = pending.failure
        if failure is None:
            return pending.answer
        if not failure.over and pending.kind in (wire.Kind.LOAD, wire.Kind.STORE):
            if "frees_on_busy" in self.mistakes or "writes_on_busy" in self.mistakes:
                return None
            self._rank.abandon([pending.id])

            def over() -> bool:
                self._given_up.update(self._rank.over())
                return pending.id in self._given_up

            eventually("the rank gives the pages back", over, WAIT_S)
        return None

    def _reported(self, through: int) -> None:
        """Waits until the worker knows what is written."""
        eventually("written is reported", lambda: self._rank._outbox.confirmed >= through, WAIT_S)

    def run(self, prompt: Sequence[int], salt: str = "", *, meanwhile: Callable[[], None] | None = None) -> int:
        """Computes a prompt; returns the number of loaded pages. ``meanwhile``: called before the finish."""
        count = len(prompt) // PAGE_TOKENS
        slot = next(self._slots)
        namespace = b"" if "one_namespace" in self.mistakes else f"{self.model} {salt}".encode()
        hashes = self.hashes(prompt, salt)
        eventually("a leader and a worker are there", lambda: self._rank.registered and self._client.listening, WAIT_S)
        # With "loads_before", the load also names pages that the lookup has not found, because they were left out.
        device = int("loads_before" in self.mistakes)
        lookup = self._client.lookup(slot, hashes, namespace=namespace, have_pages=device, timeout_s=self._wait_s)
        found = self._end(lookup)
        hit = found.hit_pages if isinstance(found, wire.LookupAnswer) else 0
        hit += device if hit else 0
        pages = [self._free.pop(0) for _ in range(count)]
        loaded = self._load(slot, pages, hit, count) if "ignores_hits" not in self.mistakes else 0
        for at in range(loaded):
            kept = torch.equal(self._tensor[pages[at]], self._kv(prompt, at))
            assert kept or self.mistakes, f"page {at} of {prompt} was loaded and is wrong"
        if self._tails:
            self._finish(slot)
            slot = next(self._slots)
            behind = 0 if "stores_what_failed" in self.mistakes else min(loaded, count - 1)
            self._client.lookup(
                slot, hashes[behind:], namespace=namespace, have_pages=count - behind, timeout_s=self._wait_s
            )
            self._compute_and_store(slot, prompt, pages, loaded, hit, before=behind)
        else:
            self._compute_and_store(slot, prompt, pages, loaded, hit)
        if meanwhile is not None:
            meanwhile()
        if "no_finish" not in self.mistakes:
            self._finish(slot)
        self._free += pages
        return loaded

    def _finish(self, slot: int) -> None:
        self._end(self._client.finish(slot, timeout_s=self._wait_s))

    def _load(self, slot: int, pages: list[int], hit: int, count: int) -> int:
        named = min(hit + 1, count) if "loads_more" in self.mistakes and hit else hit
        if not named:
            return 0
        after = 1 << 62 if "waits_for_nothing" in self.mistakes else 0
        parts = [Part(0, 0, pages[:named])]
        answer = self._end(self._client.load(slot, parts, after=after, timeout_s=self._wait_s))
        if "ignores_load_answer" in self.mistakes or "stores_what_failed" in self.mistakes:
            return hit
        return answer.pages if isinstance(answer, wire.LoadAnswer) else 0

    def _compute_and_store(
        self, slot: int, prompt: Sequence[int], pages: list[int], loaded: int, hit: int, *, before: int = 0
    ) -> None:
        """``before``: pages of the prompt before the first one of the slot."""
        count = len(pages)
        computed = range(loaded, count)

        def compute() -> None:
            for at in computed:
                self._tensor[pages[at]] = self._kv(prompt, at)

        if "written_early" not in self.mistakes:
            compute()
        first = min(loaded, count - 1) if "ignores_hits" not in self.mistakes else 0
        if "stores_what_failed" in self.mistakes:
            first = 0
        if hit < count or loaded < hit or "ignores_hits" in self.mistakes:
            more, more_from = (), 0
            if "other_hashes" in self.mistakes:
                more = [bytes(32) for _ in range(count)]
            # A correct engine stores its pages in two halves, so that two stores of a slot are open at a time.
            half = first + (count - first) // 2 if not self.mistakes else first
            parts = [Part(0, half - before, pages[half:])]
            work = next(self._works) if self._works else 0
            store = self._client.store(slot, parts, more=more, more_from=more_from, after=work, timeout_s=self._wait_s)
            again = None
            if half > first:
                parts = [Part(0, first - before, pages[first:half])]
                again = self._client.store(slot, parts, after=work, timeout_s=self._wait_s)
            if "store_twice" in self.mistakes:
                again = self._client.store(slot, parts, timeout_s=self._wait_s)
            self._rank.wrote(work or (again.id if again else store.id))
            if "written_early" in self.mistakes or "overwrites" in self.mistakes:
                self._reported(store.id)
                compute()
                if "overwrites" in self.mistakes:
                    self._tensor[pages[-1]] += 1000
            stored = self._end(store)
            if again is not None:
                self._end(again)
            if stored is None and "writes_on_busy" in self.mistakes:
                self._reported(work or store.id)
                self._tensor[pages[-1]] += 1000
            if stored is None and "frees_on_busy" in self.mistakes:
                # The pages are used for the next prompt.
                self._free = pages + self._free
                pages[:] = []
        elif "written_early" in self.mistakes:
            compute()
