"""A client of the leader that refuses, and shortens, requests of the connector for TensorRT-LLM."""

import random
from typing import Any

from kvferry import wire
from kvferry.client import Failure, PendingRequest
from kvferry.engine_client import EngineClient
from kvferry.served import Part
from kvferry.wire import Code

#: Errors of a leader that has examined the request: nothing of it runs.
REFUSALS = (Code.COPY_FAILED, Code.NOT_PINNED, Code.UNKNOWN_SLOT, Code.DEADLINE, Code.NOT_READY)


class Flaky:
    """Takes the place of a client. ``loads`` and ``stores`` are the probabilities of a refusal."""

    def __init__(self, client: EngineClient, draw: random.Random, *, loads: float = 0.0, stores: float = 0.0):
        self._client, self._draw = client, draw
        self.loads, self.stores = loads, stores
        self.refused = self.shortened = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def load(self, slot: int, parts: list[Part], **named: Any) -> PendingRequest:
        if self._draw.random() < self.loads:
            return self._refuse(wire.Load(slot, []), over=True)
        (part,) = parts
        if len(part.pages) > 1 and self._draw.random() < self.loads:
            # The leader may load a part of the pages.
            self.shortened += 1
            parts = [Part(0, part.first_page, part.pages[: self._draw.randint(1, len(part.pages) - 1)])]
        return self._client.load(slot, parts, **named)

    def store(self, slot: int, parts: list[Part], **named: Any) -> PendingRequest:
        if self._draw.random() < self.stores:
            return self._refuse(wire.Store(slot, []), over=True)
        return self._client.store(slot, parts, **named)

    def _refuse(self, message: Any, *, over: bool) -> PendingRequest:
        self.refused += 1
        pending = PendingRequest(self._client.draw(), message, 0.0, 0.0, None)
        code = self._draw.choice(REFUSALS)
        pending._end(None, Failure(code, "refused by the test", reported=True, over=over))
        return pending


def between(executor: Any, **probabilities: float) -> Flaky:
    """Puts a flaky client between an executor's connector and its leader."""
    side = executor.scheduler._side
    flaky = Flaky(side._client, executor.draw, **probabilities)
    side.loads._client = side.stores._client = flaky
    return flaky
