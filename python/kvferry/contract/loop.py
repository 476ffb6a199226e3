"""One thread with sockets, timers, and calls of other threads."""

import contextlib
import heapq
import itertools
import os
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

#: Time between two ticks.
TICK_S = 0.02
#: Longest wait for the thread by another one.
CALL_LIMIT_S = 60.0


class Loop:
    """The thread, from :meth:`begin` to :meth:`end_loop`. Subclasses do their work in :meth:`_tick` and callbacks."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._timer_ids = itertools.count()
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wake, selectors.EVENT_READ, self._called)
        self._stopping = False
        #: An exception of the thread: a defect of these checks.
        self.fault: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="kvferry contract", daemon=True)

    # Methods for any thread.

    def begin(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def call(self, action: Callable[[], Any]) -> Any:
        """Runs an action on the thread, and returns its result.

        Raises:
            RuntimeError: the thread has failed, or does not answer within :data:`CALL_LIMIT_S`.
        """
        done = threading.Event()
        results: list[Any] = []
        failures: list[BaseException] = []

        def run() -> None:
            try:
                results.append(action())
            except BaseException as failure:
                failures.append(failure)
                raise
            finally:
                done.set()

        self._calls.put(run)
        os.eventfd_write(self._wake, 1)
        until = time.monotonic() + CALL_LIMIT_S
        while not done.wait(0.1):
            if not self._thread.is_alive() or time.monotonic() > until:
                raise RuntimeError(f"the thread of the contract's server does not answer: {self.fault!r}")
        if not results:
            raise RuntimeError(f"the call failed: {failures[0]!r}") from failures[0]
        return results[0]

    def end_loop(self) -> None:
        """Ends the thread."""
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(CALL_LIMIT_S)
        os.close(self._wake)

    # The thread.

    def watch(self, readable: socket.socket, action: Callable[[], None]) -> None:
        """Calls ``action`` whenever the socket is readable."""
        self._selector.register(readable, selectors.EVENT_READ, action)

    def unwatch(self, readable: socket.socket) -> None:
        """Ends :meth:`watch`."""
        self._selector.unregister(readable)

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Calls ``action`` after a delay."""
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._timer_ids), action))

    def _called(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while not self._calls.empty():
            self._calls.get()()

    def _run(self) -> None:
        try:
            next_tick = 0.0
            while not self._stopping:
                now = time.monotonic()
                if now >= next_tick:
                    self._tick(now)
                    next_tick = now + TICK_S
                while self._timers and self._timers[0][0] <= time.monotonic():
                    heapq.heappop(self._timers)[2]()
                until = min(next_tick, self._timers[0][0]) if self._timers else next_tick
                for key, _ in self._selector.select(max(until - time.monotonic(), 0.0)):
                    key.data()
        except BaseException as error:
            self.fault = error
            raise
        finally:
            self._ended()
            self._selector.close()

    def _tick(self, now: float) -> None:
        """Called every :data:`TICK_S`."""
        raise NotImplementedError

    def _ended(self) -> None:
        """Called at the end of the thread, also after an exception."""
        raise NotImplementedError
