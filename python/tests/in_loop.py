"""Clients of an event loop behind the calls of the clients with a thread, so that both are tested by the same tests."""

import asyncio
import concurrent.futures
import contextlib
import functools
import inspect
import queue
import threading
from collections.abc import Callable
from typing import Any

TIMEOUT_S = 60.0


@functools.cache
def loop() -> asyncio.AbstractEventLoop:
    """The event loop of all these clients, on a thread of its own."""
    made = asyncio.new_event_loop()
    threading.Thread(target=made.run_forever, name="event loop of tests", daemon=True).start()
    return made


class InLoop:
    """A client of :mod:`kvferry.aio`. Its methods are called in the event loop; coroutines are waited for."""

    def __init__(self, made: Any):
        self._client = made
        #: Calls that the event loop waits for, without a turn for anything else, until a poke.
        self._held: queue.Queue[Callable[[], None] | None] | None = None

    @staticmethod
    def of(client: type) -> Callable[..., "InLoop"]:
        return lambda *args, **named: InLoop(client(*args, **named))

    def start(self) -> None:
        self._in_loop(self._client.__aenter__)

    def close(self) -> None:
        self._in_loop(self._client.close)

    def __enter__(self) -> "InLoop":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def poke(self) -> None:
        if self._held is not None:
            self._held.put(None)
            self._held = None

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._client, name)
        return functools.partial(self._in_loop, found) if inspect.ismethod(found) else found

    def _in_loop(self, call: Callable[..., Any], *args: Any, wake: bool = True, **named: Any) -> Any:
        if not wake and self._held is None:
            self._held = queue.Queue()
            loop().call_soon_threadsafe(self._hold, self._held)
        done: concurrent.futures.Future[Any] = concurrent.futures.Future()

        def run() -> None:
            try:
                done.set_result(call(*args, **named))
            except BaseException as error:
                done.set_exception(error)

        if self._held is not None:
            self._held.put(run)
        else:
            loop().call_soon_threadsafe(run)
        result = done.result(TIMEOUT_S)
        if inspect.iscoroutine(result):
            return asyncio.run_coroutine_threadsafe(result, loop()).result(TIMEOUT_S)
        return result

    @staticmethod
    def _hold(calls: "queue.Queue[Callable[[], None] | None]") -> None:
        with contextlib.suppress(queue.Empty):
            while (call := calls.get(timeout=TIMEOUT_S)) is not None:
                call()
