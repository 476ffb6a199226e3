"""Tests of `finish`, which is sent until the leader has confirmed it."""

import pytest
from test_scheduler import Engine, found, refused, request

from kvferry import finishes, wire
from kvferry.client import Failure
from kvferry.wire import Code


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(finishes, "AGAIN_PAUSE_S", 0.0)
    engine = Engine()
    found(engine, 0)
    return engine


def silence() -> Failure:
    return Failure(Code.DEADLINE, "no answer came in time", reported=False, retry=True)


def finish(engine: Engine, name: str) -> int:
    """Starts and finishes a request. Returns its slot."""
    asking = request(name, 9)
    engine.side.matched_tokens(asking, 0)
    engine.side.finished(asking)
    return engine.leader.last(wire.Finish).message.slot


def finished(engine: Engine) -> list[int]:
    return [asked.message.slot for asked in engine.leader.asked if isinstance(asked.message, wire.Finish)]


def test_a_finish_without_an_answer_is_retried_until_it_is_answered(engine: Engine) -> None:
    slot = finish(engine, "a")
    for times in (2, 3):
        engine.step()
        assert len(finished(engine)) == times - 1, "one request is in flight"
        engine.leader.last(wire.Finish).end(silence())
        engine.step()
        assert finished(engine) == [slot] * times
    engine.leader.last(wire.Finish).end(object())
    engine.step()
    assert len(finished(engine)) == 3


def test_a_finish_that_could_not_be_sent_is_sent_later(engine: Engine) -> None:
    """Sends requests without an answer until the limit of open requests is reached."""
    engine.leader.answers[wire.Finish] = Failure(Code.BUSY, "4096 questions", reported=False, retry=True, over=True)
    slots = [finish(engine, f"{number}") for number in range(5)]
    said = len(finished(engine))
    engine.step()
    assert len(finished(engine)) == said + 1, "the first refusal ends a turn"
    engine.leader.answers[wire.Finish] = object()
    said = len(finished(engine))
    engine.step()
    engine.step()
    assert sorted(finished(engine)[said:]) == slots
    said = len(finished(engine))
    engine.step()
    assert len(finished(engine)) == said


def test_retries_of_a_finish_have_a_pause(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
    monkeypatch.setattr(finishes, "AGAIN_PAUSE_S", 1000.0)
    finish(engine, "a")
    engine.leader.last(wire.Finish).end(silence())
    engine.step()
    engine.step()
    assert len(finished(engine)) == 1


def test_a_finish_that_cannot_succeed_is_not_retried(engine: Engine) -> None:
    finish(engine, "a")
    engine.leader.last(wire.Finish).end(refused(Code.UNKNOWN_SLOT))
    engine.step()
    finish(engine, "b")
    engine.leader.last(wire.Finish).end(silence())
    engine.leader.epoch += 1
    engine.step()
    engine.step()
    assert len(finished(engine)) == 2, "a new leader has no slots of the old one"


def test_a_finish_follows_a_lookup_that_is_sent_again_to_the_next_leader(engine: Engine) -> None:
    """The client repeats both over the new connection; the new leader opens the slot, and refuses the finish."""
    del engine.leader.answers[wire.Lookup]
    slot = finish(engine, "a")
    engine.leader.epoch += 1
    engine.leader.last(wire.Lookup).end(wire.LookupAnswer(0))
    engine.leader.last(wire.Finish).end(Failure(Code.NOT_READY, "reads inventories", reported=True, retry=True))
    engine.step()
    engine.step()
    assert finished(engine) == [slot] * 2


def test_owed_requests_are_bounded(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
    monkeypatch.setattr(finishes, "RETRIES_MAX", 6)
    monkeypatch.setattr(finishes, "AGAIN_AT_ONCE", 4)
    slots = [finish(engine, f"{number}") for number in range(8)]
    for asked in list(engine.leader.asked):
        if isinstance(asked.message, wire.Finish):
            asked.end(silence())
    engine.step()
    assert finished(engine)[8:] == slots[2:6]
    engine.leader.link = 0
    engine.leader.last(wire.Finish).end(silence())
    engine.step()
    assert len(finished(engine)) == 12, "no leader is connected"
    engine.leader.link = 1
    engine.step()
    assert finished(engine)[12:] == [slots[6]]
