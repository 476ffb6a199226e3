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
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvferry import outbox, wire
from kvferry.client import Client, Failure, PendingRequest
from kvferry.memory import KvMemory, Unsupported
from kvferry.silence import Silence, look_every
from kvferry.wire import Code

logger = logging.getLogger("vllm.kvferry")

#: Deadline of one request to a worker, which is then retried. A registration waits for the leader.
REQUEST_LIMIT_S = 30.0
#: Time after which a live worker is killed that does not give pages back: nothing else could make the pages safe. The
#: supervisor does so after 10 s, so that it must be gone, too. Time in which the rank's thread did not run does not
#: count: see :mod:`kvferry.silence`. Otherwise the kill comes within 36 s, or within 51 s if the worker's connections
#: come and go.
KILL_AFTER_S = 30.0

_PAUSE_FIRST_S = 0.05
#: Pause between two checks whether a device has finished its submitted work.
_WRITING_PAUSE_S = 0.0005
_PAUSE_MAX_S = 1.0
#: Newest marked passes that are kept, for a worker that does not read the device's timeline.
_MARKED_MAX = 256
#: Longest wait for a worker to unmap a device's memory.
_LET_GO_LIMIT_S = 3.0


def _at_once() -> bool:
    return True


class RankSession:
    """The session of one rank."""

    #: A permanent failure, after which copies through this rank end by their deadlines alone; empty without one.
    fault = ""

    def __init__(self, directory: Path, engine: bytes, rank: int, replica: int, memory: KvMemory):
        self._directory = directory
        self._engine = engine
        self._memory = memory
        self._lock = threading.Lock()
        self._outbox = outbox.Outbox()
        self._over: list[int] = []
        #: Numbers of passes that the device still runs, in order, each with a check whether it is over.
        self._writing: deque[tuple[int, Callable[[], bool]]] = deque()
        self._announced = 0
        #: Everything up to ``_known`` is written. ``_marked`` are the newest passes that the device marks in its
        #: timeline: number, and a check whether the pass is over.
        self._known = 0
        self._marked: deque[tuple[int, Callable[[], bool]]] = deque(maxlen=_MARKED_MAX)
        #: The stream of the last pass.
        self._stream: int | None = None
        #: Whether the worker reads the device's timeline.
        self._timeline = False
        self._closing = False
        self._link = 0
        self._pause_s = _PAUSE_FIRST_S
        self._not_before = 0.0
        self._complaint = ""
        #: Reasons that were logged for memory that is not served, each once.
        self._not_served: set[str] = set()
        #: The last process that received the memory: 0 before there was one, None when it cannot be seen; and its
        #: pidfd, which is readable once the process is dead.
        self._process: int | None = 0
        self._process_fd: int | None = None
        self._process_killed = False
        #: When each request was abandoned.
        self._abandoned_at: dict[int, float] = {}
        #: Tracks how long the worker has not given abandoned pages back.
        self._silence = Silence()
        features = wire.FEATURE_TIMELINE if memory.has_timeline else 0
        name = f"vLLM, rank {rank}"
        hello = wire.Hello(role="rank", engine=engine, rank=rank, replica=replica, name=name, features=features)
        self._name = f"rank {rank}"
        self._client = Client(directory, hello, first_id=1 << 63, turn=self._turn)
        self._client.start()

    # The engine's threads.

    def announces(self, through: int) -> bool:
        """Whether :meth:`wrote` would have something to report."""
        return through > self._announced and not self.fault and not self._closing

    def wrote(
        self,
        through: int,
        when: Callable[[], bool] | None = None,
        stream: int | None = None,
        *,
        stores: int | None = None,
    ) -> None:
        """Reports everything up to ``through`` as written: now, or once ``when``, which must not wait, returns True.

        With ``stream``, the calling thread's context is the device's, and the device itself marks in its timeline when
        the work that was submitted to the stream so far is over. The worker reads the timeline for loads, and is
        notified of stores only: up to ``stores``, by default ``through``.
        """
        if not self.announces(through):
            return
        self._announced = through
        marked = self._timeline and when is not None and stream is not None and self._mark(stream, through)
        with self._lock:
            if marked:
                self._marked.append((through, when or _at_once))
                self._outbox.wrote(through if stores is None else stores)
            elif when is None and not self._writing:
                self._known = through
                self._outbox.wrote(through)
            else:
                # Earlier passes are marked by the device. This one counts as written only when they are over, too.
                if not self._writing and self._marked:
                    self._writing.append(self._marked[-1])
                self._writing.append((through, when or _at_once))
        self._client.poke()

    def _mark(self, stream: int, through: int) -> bool:
        """Submits a mark to the device's timeline; False if there will be none.

        All streams share one timeline word, so a stream may write it only when no earlier pass runs on another stream.
        After a change of the stream nothing is marked until all passes before the change are known to be over.
        """
        changed = self._stream is not None and self._stream != stream
        self._stream = stream
        if changed or self._writing or not self._memory.has_timeline:
            return False
        try:
            self._memory.mark(stream, through)
        except OSError as error:
            logger.debug("kvferry: %s: the device cannot mark its progress: %s", self._name, error)
            return False
        return True

    def abandon(self, requests: list[int]) -> None:
        """Takes the pages of these requests back. :meth:`over` returns the requests once nothing is copied for them."""
        now = time.monotonic()
        with self._lock:
            self._outbox.abandon(requests)
            for request in requests:
                self._abandoned_at.setdefault(request, now)
        self._client.poke()

    def over(self) -> list[int]:
        """Returns abandoned requests for which nothing is copied any longer, each once."""
        with self._lock:
            over, self._over = self._over, []
            for request in over:
                self._abandoned_at.pop(request, None)
        return over

    @property
    def registered(self) -> bool:
        """Whether a worker has mapped all of this rank's memory."""
        return self._outbox.registered

    def close(self) -> None:
        """Closes the connection; the worker then unmaps the memory.

        A device's memory must not be freed before the worker has unmapped it: waits for that at most 3 s.
        """
        self._closing = True
        if self._memory.on_device:
            self._let_go()
        self._client.close()
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
        self._look_at_writing()
        with self._lock:
            if self._client.link != self._link:
                self._outbox.lost()
                self._link = self._client.link
                self._pause_s, self._not_before = _PAUSE_FIRST_S, 0.0
            self._fence(now)
            waiting = bool(self._outbox.abandoned)
            writing = bool(self._writing) and not self.fault
        wake = self._send_owed(now, waiting)
        if waiting and wake is not None:
            wake = min(wake, now + look_every(KILL_AFTER_S))
        return now + _WRITING_PAUSE_S if writing and (wake is None or wake > now + _WRITING_PAUSE_S) else wake

    def _look_at_writing(self) -> None:
        if not self._writing or self.fault:
            return
        try:
            self._memory.bind_thread()
            # The check runs without the lock, which the engine's threads take: only this thread removes entries.
            while self._writing and self._writing[0][1]():
                with self._lock:
                    self._known = self._writing.popleft()[0]
                    self._outbox.wrote(self._known)
        except Exception:
            self._lose_sight()

    def _lose_sight(self) -> None:
        """Records the current exception as a fault: the device's progress can no longer be read.

        Stores of the unfinished passes, and loads that wait for them, would end by their deadlines alone. The connector
        reads :attr:`fault` and requests no further stores and loads. Unfinished passes stay in the queue, so that no
        later one is marked or reported.
        """
        known, self.fault = self.fault, "reading the progress of the device"
        if not known:
            logger.exception(
                "kvferry: %s: the device reports no progress: requests run without the cache until the "
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
                rank_request = self._outbox.next()
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
            case outbox.Register(after):
                tickets, process, process_fd = self._memory.hand_over(self._directory)
                self._remember_process(process, process_fd)
                self._timeline = bool(self._client.features & wire.FEATURE_TIMELINE)
                if not self._timeline:
                    # The worker does not read the timeline, and must be notified of passes without stores, too.
                    with self._lock:
                        self._outbox.wrote(max((request for request, _ in self._marked), default=0))
                memory = self._memory.describe(tickets, timeline=self._timeline)
                return wire.Register(after, self._engine, memory, check_only=not self._memory.served)
            case outbox.Written():
                return self._written(rank_request)
            case outbox.Abandon(requests):
                return wire.Abandon(requests)

    def _written(self, rank_request: outbox.Written) -> wire.Written:
        if rank_request.through > self._known and self._timeline:
            return wire.Written(rank_request.through, timeline=True)
        if rank_request.through <= self._known:
            return wire.Written(rank_request.through)
        # The worker does not read the timeline: check here which marked passes are over.
        try:
            self._look_at_marked()
        except Exception:
            self._lose_sight()
            with self._lock:
                self._marked.clear()
                self._outbox.wrote_last(self._known)
        # The rest is reported later.
        rank_request.through = min(rank_request.through, self._known)
        if rank_request.through <= self._outbox.confirmed:
            raise OSError("the device has not written the pages yet")
        return wire.Written(rank_request.through)

    def _look_at_marked(self) -> None:
        self._memory.bind_thread()
        with self._lock:
            marked = list(self._marked)
        for request, is_over in marked:
            if not is_over():
                break
            self._known = max(self._known, request)
        with self._lock:
            while self._marked and self._marked[0][0] <= self._known:
                self._marked.popleft()

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
            self._over.extend(self._outbox.answered(rank_request, failure is None))
        if isinstance(rank_request, outbox.Register):
            not_served = answer.not_served if isinstance(answer, wire.Registered) else ""
            self._tell(failure, not_served)

    def _tell(self, failure: Failure | None, not_served: str) -> None:
        """Logs the result of a registration, each result once."""
        if not_served:
            if not_served not in self._not_served:
                self._not_served.add(not_served)
                logger.info("kvferry: %s: its worker copies nothing: %s", self._name, not_served)
        elif failure is None:
            if self._complaint != "fine":
                logger.info("kvferry: %s: its worker has the KV memory", self._name)
            self._complaint = "fine"
        elif failure.reported and not failure.retry and failure.message != self._complaint:
            self._complaint = failure.message
            logger.warning("kvferry: %s is refused, requests run without the cache: %s", self._name, failure.message)

    # Abandoned pages: a dead worker copies nothing.

    def _remember_process(self, process: int | None, process_fd: int | None) -> None:
        self._forget_process()
        if process != self._process:
            self._silence.end()
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
        given_up = self._silence.look(now, KILL_AFTER_S, self._link)
        if self._process_fd is None:
            if self._process == 0:
                self._over.extend(self._outbox.dead())
        elif self._process_is_dead():
            self._over.extend(self._outbox.dead())
        elif given_up and not self._process_killed:
            self._process_killed = True
            waited_s = now - min(self._abandoned_at[request] for request in self._outbox.abandoned)
            logger.error(
                "kvferry: worker %s gives no pages back for %.0f s and no process ends it: it is killed",
                self._process,
                waited_s,
            )
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process_fd, signal.SIGKILL)
