"""Test that the transfers for SGLang keep the contract, without SGLang: ``test_sglang.py`` has the engine."""

import hashlib
import itertools

import numpy as np
import pytest
import torch
from contract_engine import tokens
from contract_run import Run, scripted
from daemon import eventually
from test_sglang_transfers import PAGES, OneRank

from kvferry.contract.peers import Settings
from kvferry.contract.script import DEFAULT, Event, Script
from kvferry.sglang import breaker, offloads

#: Rules that SGLang's transfers never exercises, and why.
NEVER = {"one-store-of-a-page": "each slot has one store"}
PAGE_TOKENS = 16
_FLOATS = 16 * 8


def words(*names: str) -> list[int]:
    """A prompt of one page for each name, and a token of the next page."""
    return [token for name in names for token in tokens(*(f"{name} {part}" for part in range(4)))] + [1]


class Linked:
    """An engine that calls the transfers of one rank as SGLang's scheduler calls its linker.

    Its own cache keeps every page until it is flushed. A lookup names the pages behind those, and an offload those that
    it lacked.
    """

    def __init__(self, run: Run):
        self.one = OneRank(run, load_timeout_ms=1000)  # type: ignore[arg-type]
        eventually("the rank is registered", lambda: self.one.session.registered)
        eventually("the leader is connected", lambda: self.one.leader._client.listening)
        self._requests = itertools.count(1)
        self._free = list(range(PAGES))
        #: Pages of the own cache, by hash.
        self._cached: dict[str, int] = {}
        self._offloads = 0
        self.loaded = self.failed = 0

    @staticmethod
    def _hashes(prompt: list[int], salt: str) -> list[str]:
        found, last = [], salt.encode()
        for at in range(len(prompt) // PAGE_TOKENS):
            last = hashlib.sha256(last + bytes(prompt[at * PAGE_TOKENS : (at + 1) * PAGE_TOKENS])).digest()
            found.append(last.hex())
        return found

    @staticmethod
    def _kv(page_hash: str) -> torch.Tensor:
        """The KV of a page depends on all that its hash covers."""
        noise = np.frombuffer(bytes.fromhex(page_hash) * (_FLOATS // 8), np.uint32)
        return torch.from_numpy((noise % 1000 + 1).astype(np.float32)).reshape(16, 8)

    def _take(self, count: int) -> list[int]:
        """Takes pages, those that were given back last first."""
        return [self._free.pop() for _ in range(count)]

    def begin(self, prompt: list[int], salt: str = "") -> None:
        """Computes a prompt, loads what there is, and begins to store the rest."""
        request, names = f"r{next(self._requests)}", self._hashes(prompt, salt)
        own = next((at for at, name in enumerate(names) if name not in self._cached), len(names))
        transfers = self.one.transfers
        self.step()
        found = len(transfers.find(request, names[own:])) if own < len(names) else 0
        if found:
            named, pages = names[own : own + found], self._take(found)
            if transfers.load(request, named, pages):
                assert transfers.start_batch() >= 0
                for name, page in zip(named, pages, strict=True):
                    assert torch.equal(self.one.tensor[page], self._kv(name)), f"page {page} was loaded and is wrong"
                self._cached.update(zip(named, pages, strict=True))
                own += found
                self.loaded += found
            else:
                self.failed += found
                self._free += reversed(pages)
        if own == len(names):
            return
        pages = self._take(len(names) - own)
        for name, page in zip(names[own:], pages, strict=True):
            self.one.tensor[page] = self._kv(name)
            self._cached[name] = page
        self._offloads += transfers.offload(names[own:], pages)

    def step(self) -> None:
        """Takes the results of offloads, as SGLang does once in each step."""
        for _ in range(self.one.transfers.ended_offloads()):
            self.one.transfers.take_offload()
            self._offloads -= 1

    def rest(self) -> None:
        """Waits until nothing is stored."""
        eventually("offloads end", lambda: self.step() or not self._offloads)

    def flush(self) -> None:
        """Empties the own cache."""
        self.rest()
        self._free += self._cached.values()
        self._cached.clear()


def test_the_transfers_for_sglang_keep_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breaker, "PAUSE_FIRST_S", 0.1)
    monkeypatch.setattr(offloads, "PAUSE_S", 0.1)
    script = Script([*DEFAULT, Event("finish", 12, "drop"), Event("load", 7, "fail")])
    with scripted(script, Settings(request_credits=3, heartbeat_ms=1000)) as run:
        engine = Linked(run)
        try:

            def alone(name: str, prompt: list[int], salt: str = "") -> None:
                engine.flush()
                with run.declared(name, f"salt {salt}", prompt):
                    engine.begin(prompt, salt)
                    engine.rest()

            def play(number: int) -> None:
                a, b, c, d, x = (f"{name} {number}" for name in "abcdx")
                for at, prompt in enumerate((words(a, b, c), words(x, b, c), words(a, b, c))):
                    alone(f"prompt {number}.{at}", prompt)
                # Lookups and offloads of tails, behind what the own cache has.
                for prompt in (words(a, b, d), words(a, b, c, d), words(a, b, c, d, x), words(x, b, d)):
                    engine.begin(prompt)
                engine.flush()

            for salt in ("one", "two"):
                alone(f"salt {salt}", words("s", "t"), salt)
            run.rounds(play, NEVER)
            assert engine.loaded > 5
            assert engine.failed > 0
            eventually("nothing is owed", lambda: engine.step() or not run.kvferry.waits())
            run.report = run.kvferry.stop()
        finally:
            engine.one.close()
    assert run.broken == {}
    assert run.not_exercised == set(NEVER)
