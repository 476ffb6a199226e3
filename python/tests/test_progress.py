"""Tests of how a rank follows its device's progress: by marks in the timeline, or by checks of each pass."""

import itertools
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry import rank, wire
from kvferry.outbox import UNNEEDED_S, Outbox, Register, Written
from kvferry.progress import Progress
from kvferry.rank import RankSession
from kvferry.silence import Silence


class Device:
    """Memory of a device whose streams end when a test wants it."""

    def __init__(self, *, marks: bool = True):
        self.has_timeline = marks
        self.word = 0
        #: Marks that were submitted: stream and number.
        self.submitted: list[tuple[int, int]] = []
        self.refuses = False

    def mark(self, stream: int, through: int) -> None:
        if self.refuses:
            raise OSError("no")
        self.submitted.append((stream, through))

    def marked(self) -> int:
        return self.word

    def bind_thread(self) -> None:
        pass

    def hand_over(self, directory: Any) -> tuple[list[bytes], int, None]:
        return [], 0, None

    def describe(self, tickets: list[bytes], *, timeline: bool) -> dict[str, Any]:
        return {"timeline": timeline}

    served = True


class Client:
    link = 1
    features = wire.FEATURE_TIMELINE

    def __init__(self) -> None:
        self.pokes = 0
        self.requested: list[Any] = []

    def poke(self) -> None:
        self.pokes += 1

    def request(self, message: Any, *arguments: Any, until: Callable[[Any], None], **named: Any) -> None:
        self.requested.append(message)
        until(SimpleNamespace(failure=None, answer=None))


class Passes:
    """A session without a worker, whose passes end when a test wants it."""

    def __init__(self, device: Device):
        self.device = device
        self.over: dict[int, bool] = {}
        #: Passes for which an event was recorded.
        self.recorded: list[int] = []
        self.session = session = object.__new__(RankSession)
        session._memory, session._client = device, Client()  # type: ignore[assignment]
        session._lock, session._name, session._engine = threading.Lock(), "rank 0", b"e"
        session._announced, session._needed, session._armed = 0, 0, False
        session._closing, session._directory = False, None  # type: ignore[assignment]
        session._process, session._process_fd, session._process_killed = 0, None, False
        session._not_before = session._pause_s = 0.0
        session._silence, session._over = Silence(), []
        session._without_since, session._told_without, session._refusal = None, False, ""
        session._progress = Progress(device, session._lock)  # type: ignore[arg-type]
        session._outbox = self.outbox = Outbox(registered=True)
        self.now = time.monotonic()

    def wrote(self, number: int, stream: int = 70, **more: Any) -> None:
        def record() -> Callable[[], bool]:
            self.recorded.append(number)
            return lambda: self.over[number]

        self.over.setdefault(number, False)
        self.session.wrote(number, record, stream, **more)

    def look(self) -> int:
        """Checks the open passes; returns what is reported as written."""
        self.now += 1
        self.session._look_at_writing(self.now)
        return self.outbox.written

    def register(self, *, timeline: bool) -> None:
        """Registers with another worker."""
        self.session._client.features = wire.FEATURE_TIMELINE if timeline else 0
        self.outbox.lost()
        request = self.outbox.next()
        assert request == Register(0)
        assert self.session._message(request).registration == {"timeline": timeline}  # type: ignore[union-attr]
        self.outbox.answered(request, True)

    def sent(self) -> wire.Written | None:
        """The next report to the worker, which confirms it."""
        request = self.outbox.next()
        if request is None:
            return None
        message = self.session._message(request)
        self.outbox.answered(request, True)
        assert isinstance(message, wire.Written)
        return message


@pytest.fixture
def passes() -> Passes:
    return Passes(Device())


def test_no_event_is_recorded_for_a_pass_that_the_device_marks(passes: Passes) -> None:
    """A worker that reads the timeline is notified of stores only."""
    passes.wrote(5, needed=4)
    passes.wrote(6, needed=4)
    assert passes.device.submitted == [(70, 5), (70, 6)]
    assert passes.recorded == []
    assert passes.sent() == wire.Written(4, timeline=True)
    assert passes.sent() is None
    assert passes.session._progress.next_look() is None, "nothing is checked"


@pytest.mark.parametrize("change", [{"has_timeline": False}, {"refuses": True}])
def test_a_pass_without_a_mark_is_reported_when_its_event_is_over(passes: Passes, change: dict[str, bool]) -> None:
    vars(passes.device).update(change)
    passes.wrote(5, needed=4)
    passes.wrote(6, needed=4)
    assert passes.recorded == [5, 6]
    passes.over[6] = True
    assert passes.look() == 0, "in order"
    passes.over[5] = True
    assert passes.look() == 6
    assert passes.sent() == wire.Written(6)


def test_marked_passes_are_read_from_the_timeline_for_a_worker_that_does_not_read_it(passes: Passes) -> None:
    """The worker was replaced. Later passes have events, because this worker is notified of each."""
    passes.wrote(5)
    passes.wrote(6)
    assert passes.outbox.written == 6
    passes.register(timeline=False)
    assert passes.sent() is None, "nothing is known to be over"
    passes.wrote(7)
    assert (passes.recorded, passes.device.submitted) == ([7], [(70, 5), (70, 6)])
    passes.device.word, passes.over[7] = 5, True
    assert passes.look() == 0
    passes.device.word = 6
    assert passes.look() == 7
    assert passes.sent() == wire.Written(7)
    passes.wrote(8)
    assert (passes.recorded, passes.device.submitted) == ([7, 8], [(70, 5), (70, 6)])
    passes.over[8] = True
    assert passes.look() == 8
    assert passes.sent() == wire.Written(8)
    passes.register(timeline=True)
    passes.wrote(9)
    assert [passes.sent(), passes.sent()] == [wire.Written(9, timeline=True), None]
    assert passes.recorded == [7, 8]


def test_a_pass_that_was_marked_while_the_worker_was_replaced_is_not_reported_early(passes: Passes) -> None:
    """The engine's thread has submitted the mark, and takes the lock after the session's thread."""
    mark = passes.device.mark

    def replaced(stream: int, through: int) -> None:
        mark(stream, through)
        passes.register(timeline=False)

    passes.device.mark = replaced  # type: ignore[method-assign]
    passes.wrote(5)
    assert passes.sent() is None
    assert passes.look() == 0
    passes.device.word = 5
    assert passes.look() == 5
    assert passes.sent() == wire.Written(5)


def test_a_mark_of_one_stream_does_not_cover_another_stream(passes: Passes) -> None:
    """Two streams in turn: a mark of the second must not count as the end of the first one's work."""
    passes.wrote(1, 70)
    passes.wrote(2, 80)
    passes.wrote(3, 80)
    assert passes.device.submitted == [(70, 1)], "the first stream may still write"
    passes.over[2] = passes.over[3] = True
    assert passes.look() == 1, "the first pass is not over"
    passes.device.word = 1
    assert passes.look() == 3
    passes.wrote(4, 80)
    assert passes.device.submitted == [(70, 1), (80, 4)]


@pytest.mark.parametrize("timeline", [True, False])
def test_a_device_that_fails_is_a_fault_and_reports_no_later_pass(passes: Passes, timeline: bool) -> None:
    if timeline:
        passes.wrote(4)
        passes.register(timeline=False)
    else:
        passes.device.has_timeline = False
        passes.wrote(4)

    def broken(*_: Any) -> bool:
        raise RuntimeError("CUDA error: unspecified launch failure")

    passes.device.marked = broken  # type: ignore[method-assign]
    passes.over = {}
    assert passes.look() == 0
    assert passes.session.fault == "reading the progress of the device"
    passes.wrote(9)
    assert passes.session._announced == 4, "no later pass is announced"
    assert passes.look() == 0
    assert passes.sent() is None


def test_passes_that_are_over_before_one_fails_are_reported(passes: Passes) -> None:
    passes.device.has_timeline = False
    for number in (5, 6, 7):
        passes.wrote(number)
    passes.over = {5: True, 7: True}
    assert passes.look() == 5
    assert passes.session.fault
    assert passes.sent() == wire.Written(5)
    assert passes.outbox.next() is None


def test_the_pauses_between_checks_grow_with_the_duration_of_a_pass(passes: Passes) -> None:
    progress, begun = passes.session._progress, time.monotonic()
    passes.device.has_timeline = False
    passes.wrote(1)
    looks = []
    while (due := progress.next_look()) is not None and due < begun + 10:
        assert not progress.look(due - 0.001), "not yet"
        assert progress.next_look() == due
        looks.append(due - begun)
        progress.look(due)
    assert looks[0] == pytest.approx(0.005, abs=0.05)
    pauses = [later - earlier for earlier, later in itertools.pairwise(looks)]
    assert min(pauses) >= 0.0049
    assert max(pauses) <= 0.0501
    for at, pause in zip(looks, pauses, strict=False):
        assert pause <= max(at / 8 + 0.001, 0.0051), "a report is delayed by an eighth of the pass"
    assert len(looks) < 230
    passes.over[1] = True
    assert progress.look(begun + 20)
    assert progress.next_look() is None


def test_the_session_wakes_up_for_the_next_check(passes: Passes) -> None:
    passes.device.has_timeline = False
    session = passes.session
    session._fence = lambda now: None  # type: ignore[method-assign]
    session._link = 1
    assert session._turn() is None
    passes.wrote(1)
    assert session._turn() == session._progress.next_look()
    session._lose_sight()
    assert session._turn() is None, "after a fault nothing is checked"


def test_memory_of_the_host_is_written_at_once(passes: Passes) -> None:
    passes.session.wrote(3)
    assert passes.sent() == wire.Written(3)
    assert passes.outbox.next() is None
    assert Written(3).through == 3


def test_the_sessions_thread_is_woken_for_reports_that_something_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(rank, "time", SimpleNamespace(monotonic=lambda: clock.now))
    session = Passes(Device(marks=False)).session
    client: Any = session._client
    session._link = client.link
    session.wrote(1, needed=0)
    assert client.pokes == 1, "the thread has slept"
    session._turn()
    assert client.requested == [wire.Written(1)]
    for number in (2, 3):
        session.wrote(number, needed=0)
    assert client.pokes == 1, "the thread wakes by itself"
    clock.now += UNNEEDED_S / 2
    session.needs(2)
    assert client.pokes == 2, "a load waits"
    session._turn()
    assert client.requested[1:] == [wire.Written(3)]
    session.wrote(4, needed=0)
    wakes_at = session._turn()
    assert wakes_at == pytest.approx(clock.now + UNNEEDED_S)
    clock.now = wakes_at or 0.0
    assert session._turn() == pytest.approx(clock.now + UNNEEDED_S)
    assert client.requested[2:] == [wire.Written(4)]
    session.wrote(6, needed=5)
    assert client.pokes == 3, "a store waits"
    session._turn()
    assert client.requested[3:] == [wire.Written(6)]
    clock.now += 2 * UNNEEDED_S
    assert session._turn() is None
    session.wrote(7, needed=5)
    assert client.pokes == 4, "the thread sleeps without a deadline"


def test_a_rank_without_a_worker_logs_why_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(rank, "time", SimpleNamespace(monotonic=lambda: clock.now))
    passes = Passes(Device())
    session, client = passes.session, passes.session._client
    passes.outbox.lost()
    session._not_before = 1000.0
    session._link = 1
    monkeypatch.setattr(client, "listening", False, raising=False)
    monkeypatch.setattr(client, "problem", "/s/worker-3-0 does not exist", raising=False)
    assert session._turn() == 100.0 + rank.TELL_AFTER_S
    clock.now += rank.TELL_AFTER_S
    for _ in range(2):
        session._turn()
    assert caplog.text.count("no worker has the KV memory") == 1
    assert "/s/worker-3-0 does not exist" in caplog.text
    # A registration ends it; the next loss is told again, with the refusal of the worker that is there.
    passes.outbox.registered = True
    session._turn()
    passes.outbox.registered = False
    monkeypatch.setattr(client, "listening", True)
    session._refusal = "the device cannot be opened"
    assert session._turn() == clock.now + rank.TELL_AFTER_S
    clock.now += rank.TELL_AFTER_S
    session._turn()
    assert caplog.text.count("no worker has the KV memory") == 2
    assert "the device cannot be opened" in caplog.text
