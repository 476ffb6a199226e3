"""One rank's session with its worker: registers the KV memory, reports written pages, takes pages back.

The session runs on a thread of its own; the engine's threads queue work for it and never wait.
"""

import contextlib
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import msgspec

from kvferry import outbox, wire
from kvferry.client import Client, Failure, PendingRequest
from kvferry.memory import KvMemory, Unsupported
from kvferry.progress import Progress
from kvferry.silence import Silence, look_every
from kvferry.wire import Code

logger = logging.getLogger("kvferry")

#: Deadline of one request to a worker, which is then retried. A registration waits for the leader.
REQUEST_LIMIT_S = 30.0
#: Time after which a live worker is killed that does not give pages back: nothing else could make the pages safe. The
#: supervisor does so after 10 s, so that it must be gone, too. Time in which the rank's thread did not run does not
#: count: see :mod:`kvferry.silence`. Otherwise the kill comes within 36 s, or within 51 s if the worker's connections
#: come and go.
KILL_AFTER_S = 30.0

#: Time without a worker that has the memory after which the reason is logged.
TELL_AFTER_S = 5.0

_PAUSE_FIRST_S = 0.05
_PAUSE_MAX_S = 1.0
#: Longest wait for a worker to unmap a device's memory.
_LET_GO_LIMIT_S = 3.0


class RankSession:
    """The session of one rank."""

    #: A permanent failure, after which copies through this rank end by their deadlines alone; empty without one.
    fault = ""

    def __init__(self, directory: Path, engine: bytes, rank: int, replica: int, memory: KvMemory, *, name: str = ""):
        """Begins the session. ``name``: of the engine's software, which operators see."""
        self._directory = directory
        self._engine = engine
        self._memory = memory
        self._lock = threading.Lock()
        self._outbox = outbox.Outbox()
        self._over: list[int] = []
        #: Set when there is a request in ``_over``.
        self._any_over = threading.Event()
        self._announced = 0
        self._needed = 0
        #: The session's thread wakes by itself when reports that nothing waits for are due.
        self._armed = False
        self._progress = Progress(memory, self._lock)
        self._closing = False
        self._link = 0
        self._pause_s = _PAUSE_FIRST_S
        self._not_before = 0.0
        self._complaint = ""
        #: Since when no worker has the memory, None while one has it; whether that was logged; and the last refusal.
        self._without_since: float | None = None
        self._told_without = False
        self._refusal = ""
        #: Reasons that were logged for memory that is not served, each once.
        self._not_served: set[str] = set()
        #: The last process that received the memory: 0 before there was one, None when it cannot be seen; and its
        #: pidfd, which is readable once the process is dead.
        self._process: int | None = 0
        self._process_fd: int | None = None
        self._process_killed = False
        #: That process may not be ended by this user.
        self._process_of_another = False
        #: When each request was abandoned.
        self._abandoned_at: dict[int, float] = {}
        #: Time after which the worker is killed that does not give the present abandoned pages back.
        self._kill_after_s = KILL_AFTER_S
        #: Tracks how long the worker has not given abandoned pages back.
        self._silence = Silence()
        features = wire.FEATURE_TIMELINE if memory.has_timeline else 0
        self._name = f"rank {rank}"
        shown = f"{name}, {self._name}" if name else self._name
        hello = wire.Hello(role="rank", engine=engine, rank=rank, replica=replica, name=shown, features=features)
        self._client = Client(directory, hello, first_id=1 << 63, turn=self._turn, at_end=self._at_end)
        self._client.start()

    # The engine's threads.

    def announces(self, through: int) -> bool:
        """Whether :meth:`wrote` would have something to report."""
        return through > self._announced and not self.fault and not self._closing

    def needs(self, through: int) -> None:
        """Records that stores and loads wait for work up to this number, and reports it at once if it is written."""
        if through <= self._needed:
            return
        self._needed = through
        with self._lock:
            self._outbox.needs(through)
            wake = self._outbox.reports_at_once
        if wake:
            self._client.poke()

    def wrote(
        self,
        through: int,
        record: Callable[[], Callable[[], bool]] | None = None,
        stream: int | None = None,
        *,
        needed: int | None = None,
    ) -> None:
        """Reports everything up to ``through`` as written: now, or once the device's work so far is over.

        Stores and loads wait for the report up to ``needed``, by default ``through``. The rest is reported at most
        :data:`kvferry.outbox.UNNEEDED_S` later, because each report wakes a thread of this process.

        ``stream`` is the device's, and the calling thread's context its context. The device itself then marks in its
        timeline when the work that was submitted to the stream so far is over. The worker reads the timeline for loads,
        and for stores of earlier work; it is notified only of what is needed. Where there is no mark, ``record`` is
        called, which must be given with ``stream``: it returns a check whether that work is over, which must not wait.
        """
        if not self.announces(through):
            return
        self._needed = max(self._needed, through if needed is None else needed)
        marked = self._progress.mark(stream, through)
        check = record() if record is not None and not marked else None
        # After what may raise, so that the call can be repeated.
        self._announced = through
        with self._lock:
            self._outbox.needs(self._needed)
            if self._progress.submitted(through, marked, check):
                self._outbox.wrote(min(self._needed, through) if marked else through)
                wake = self._outbox.reports_at_once or (self._outbox.reports_later and not self._armed)
            else:
                # The thread must learn of the check.
                wake = True
        if wake:
            self._client.poke()

    def abandon(self, requests: list[int], *, kill_after_s: float | None = None) -> None:
        """Takes the pages of these requests back. :meth:`over` returns the requests once nothing is copied for them.

        A worker that has not given them back ``kill_after_s`` later is killed; by default after :data:`KILL_AFTER_S`.
        A shorter time also holds for requests that were abandoned before and are not over.
        """
        now = time.monotonic()
        with self._lock:
            if not self._outbox.abandoned:
                self._kill_after_s = KILL_AFTER_S
            if kill_after_s is not None and kill_after_s < self._kill_after_s:
                self._kill_after_s = kill_after_s
                self._silence.again()
            self._outbox.abandon(requests)
            for request in requests:
                self._abandoned_at.setdefault(request, now)
        self._client.poke()

    def over(self) -> list[int]:
        """Returns abandoned requests for which nothing is copied any longer, each once."""
        with self._lock:
            over, self._over = self._over, []
            self._any_over.clear()
            for request in over:
                self._abandoned_at.pop(request, None)
        return over

    def wait_over(self, timeout_s: float) -> list[int]:
        """Returns like :meth:`over`; waits for a request at most ``timeout_s``."""
        self._any_over.wait(timeout_s)
        return self.over()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def registered(self) -> bool:
        """Whether a worker has mapped all of this rank's memory."""
        return self._outbox.registered

    def close(self) -> None:
        """Closes the connection; the worker then unmaps the memory.

        A device's memory must not be freed before the worker has unmapped it: waits for that at most 3 s, and then for
        the session's thread at most 2 s.
        """
        self._closing = True
        if self._memory.on_device:
            self._let_go()
        self._client.close()

    def _at_end(self) -> None:
        # On the client's thread, which may still hand these descriptors over when `close` has returned.
        self._memory.close()
        self._forget_process()

    def _let_go(self) -> None:
        until = time.monotonic() + _LET_GO_LIMIT_S
        why = ""
        while self._client.listening and (left_s := until - time.monotonic()) > 0:
            gone = self._client.request(wire.Unregister(), left_s, link=self._client.link)
            if gone.wait(left_s) and gone.failure is None:
                return
            why = str(gone.failure or "it does not answer")
            # The worker still opens the memory, or copies.
            time.sleep(min(_PAUSE_FIRST_S, max(until - time.monotonic(), 0.0)))
        if why:
            logger.warning("kvferry: %s: its worker may still have the KV memory: %s", self._name, why)

    # The client's thread.

    def _turn(self) -> float | None:
        now = time.monotonic()
        self._look_at_writing(now)
        with self._lock:
            if self._client.link != self._link:
                self._outbox.lost()
                most = self._client.limits.get("abandoned_requests", wire.ABANDONED_MAX)
                self._outbox.abandoned_max = max(min(most, wire.ABANDONED_MAX), 1)
                self._link = self._client.link
                self._pause_s, self._not_before = _PAUSE_FIRST_S, 0.0
            self._fence(now)
            waiting = bool(self._outbox.abandoned)
        wake = self._send_owed(now, waiting)
        if waiting and wake is not None:
            wake = min(wake, now + look_every(self._kill_after_s))
        with self._lock:
            report_at = self._outbox.report_at(now)
            self._armed = report_at is not None
        look = None if self.fault else self._progress.next_look()
        times = (wake, look, report_at, self._tell_without(now))
        return min((at for at in times if at is not None), default=None)

    def _tell_without(self, now: float) -> float | None:
        """Logs once that no worker has the memory for some time, and why; returns when that is due."""
        if self._outbox.registered or self._closing:
            self._without_since, self._told_without = None, False
            return None
        if self._without_since is None:
            self._without_since = now
        if self._told_without:
            return None
        if now < self._without_since + TELL_AFTER_S:
            return self._without_since + TELL_AFTER_S
        self._told_without = True
        why = self._refusal if self._client.listening else self._client.problem
        logger.warning(
            "kvferry: %s: no worker has the KV memory for %.0f s: %s: requests run without the cache meanwhile",
            self._name,
            TELL_AFTER_S,
            why or "its worker has not answered",
        )
        # Logs when one has it.
        self._complaint = ""
        return None

    def _look_at_writing(self, now: float) -> None:
        if self.fault:
            return
        try:
            more = self._progress.look(now)
        except Exception:
            self._lose_sight()
            more = True
        if more:
            with self._lock:
                self._outbox.wrote(self._progress.known)

    def _lose_sight(self) -> None:
        """Records the current exception as a fault: the device's progress can no longer be read.

        Stores of the unfinished passes, and loads that wait for them, would end by their deadlines alone. The connector
        reads :attr:`fault` and requests no further stores and loads. Unfinished passes stay in the queue, so that no
        later one is marked or reported.
        """
        known, self.fault = self.fault, "reading the progress of the device"
        if not known:
            logger.exception(
                "kvferry: %s: the device reports no progress: stores, and loads that wait for it, fail until the "
                "engine is started again",
                self._name,
            )

    def _send_owed(self, now: float, waiting: bool) -> float | None:
        if self._closing:
            return None
        if self._link == 0:
            return now + 0.2 if waiting else None
        while time.monotonic() >= self._not_before:
            with self._lock:
                rank_request = self._outbox.next(now)
            if rank_request is None:
                return now + 1.0 if waiting else None
            self._send(rank_request)
        return self._not_before

    def _send(self, rank_request: outbox.RankRequest) -> None:
        try:
            message = self._message(rank_request)
        except Unsupported as error:
            self._answered(rank_request, Failure(Code.INVALID, str(error), reported=True, retry=False))
            return
        except OSError as error:
            self._answered(rank_request, Failure(Code.NOT_READY, str(error), reported=True, retry=True))
            return

        def until(pending: PendingRequest) -> None:
            self._answered(rank_request, pending.failure, pending.answer)

        self._client.request(message, REQUEST_LIMIT_S, link=self._link, until=until)
        if isinstance(rank_request, outbox.Abandon):
            self._silence.requested(self._link)

    def _message(self, rank_request: outbox.RankRequest) -> wire.Register | wire.Written | wire.Abandon:
        match rank_request:
            case outbox.Register(abandoned_through):
                tickets, process, process_fd = self._memory.hand_over(self._directory)
                self._remember_process(process, process_fd)
                timeline = bool(self._client.features & wire.FEATURE_TIMELINE)
                with self._lock:
                    self._progress.worker(timeline)
                    if not timeline:
                        # Marks mean nothing to this worker: it is notified of passes that are known to be over.
                        self._outbox.wrote_last(self._progress.known)
                memory = self._memory.describe(tickets, timeline=timeline)
                return wire.Register(abandoned_through, self._engine, memory, check_only=not self._memory.served)
            case outbox.Written(through):
                return wire.Written(through, timeline=through > self._progress.known)
            case outbox.Abandon(requests):
                return wire.Abandon(requests)

    def _answered(
        self, rank_request: outbox.RankRequest, failure: Failure | None, answer: msgspec.Struct | None = None
    ) -> None:
        with self._lock:
            if failure is None:
                self._pause_s, self._not_before = _PAUSE_FIRST_S, 0.0
                if isinstance(rank_request, outbox.Abandon):
                    self._silence.end()
            else:
                if failure.code == Code.INVALID and not isinstance(rank_request, outbox.Register):
                    self._outbox.memory_dropped()
                self._not_before = time.monotonic() + self._pause_s
                self._pause_s = min(self._pause_s * 2, _PAUSE_MAX_S)
            not_served = answer.not_served if isinstance(answer, wire.Registered) else ""
            self._are_over(self._outbox.answered(rank_request, failure is None, serves=not not_served))
        if isinstance(rank_request, outbox.Register):
            self._tell(failure, not_served)

    def _are_over(self, requests: list[int]) -> None:
        """Records that nothing is copied for abandoned requests. The lock is held."""
        self._over.extend(requests)
        if self._over:
            self._any_over.set()

    def _tell(self, failure: Failure | None, not_served: str) -> None:
        """Logs the result of a registration, each result once."""
        self._refusal = failure.message if failure is not None else ""
        if not_served:
            if not_served not in self._not_served:
                self._not_served.add(not_served)
                logger.info("kvferry: %s: its worker copies nothing: %s", self._name, not_served)
        elif failure is None:
            if self._complaint != "fine":
                logger.info("kvferry: %s: its worker has the KV memory", self._name)
            self._complaint = "fine"
        elif _is_final(failure) and failure.message != self._complaint:
            self._complaint = failure.message
            logger.warning("kvferry: %s is refused, requests run without the cache: %s", self._name, failure.message)

    # Abandoned pages: a dead worker copies nothing.

    def _remember_process(self, process: int | None, process_fd: int | None) -> None:
        self._forget_process()
        if process != self._process:
            self._silence.end()
            self._process_of_another = False
        self._process, self._process_fd = process, process_fd

    def _forget_process(self) -> None:
        if self._process_fd is not None:
            os.close(self._process_fd)
        self._process_fd = None
        self._process_killed = False

    def _process_is_dead(self) -> bool:
        if self._process_fd is None:
            return False
        process = select.poll()
        process.register(self._process_fd, select.POLLIN)
        return bool(process.poll(0))

    def _fence(self, now: float) -> None:
        if not self._outbox.abandoned:
            self._silence.end()
            return
        given_up = self._silence.look(now, self._kill_after_s, self._link)
        if self._process_fd is None:
            if self._process == 0:
                self._are_over(self._outbox.dead())
        elif self._process_is_dead():
            self._are_over(self._outbox.dead())
        elif given_up and not self._process_killed and not self._process_of_another:
            # A request that was abandoned again after its end was read has no time here.
            waited_s = now - min(self._abandoned_at.get(request, now) for request in self._outbox.abandoned)
            self._kill(self._process_fd, waited_s)

    def _kill(self, process_fd: int, waited_s: float) -> None:
        why = f"worker {self._process} gives no pages back for {waited_s:.1f} s and no process ends it"
        try:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process_fd, signal.SIGKILL)
        except PermissionError:
            # The worker runs as another user: the setting `users`.
            self._process_of_another = True
            logger.error(
                "kvferry: %s, and user %d may not: its pages stay in use until it answers or ends: end it as its user",
                why,
                os.geteuid(),
            )
        else:
            self._process_killed = True
            logger.error("kvferry: %s: it is killed", why)


def _is_final(failure: Failure) -> bool:
    """Whether a request that is made again ends in the same way: its peer has refused it, or would refuse it."""
    return not failure.retry and (failure.reported or failure.code == Code.LIMIT)
