"""Checks of slow files."""

import threading
import time

import pytest
from daemon import eventually

from kvferry.looks import Looks


def test_the_result_of_an_abandoned_check_is_not_used_for_another_path(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, looked = threading.Event(), []

    def look(path: str) -> str:
        looked.append(path)
        if path == "slow":
            assert goes_on.wait(60)
        return path

    monkeypatch.setattr("kvferry.looks.LOOKS_S", 0.01)
    looks = Looks(look)
    assert looks.at("slow") is None
    looks.next_step()
    assert looks.at("other") is None, "one check at a time"
    assert looked == ["slow"]
    goes_on.set()
    monkeypatch.setattr("kvferry.looks.LOOKS_S", 60.0)

    def answers() -> bool:
        looks.next_step()
        found = looks.at("other")
        assert found in (None, "other")
        return found == "other"

    eventually("checks run again", answers)


def test_all_checks_of_a_step_share_one_time_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty folders that take just less than the limit are not awaited one after another."""
    monkeypatch.setattr("kvferry.looks.LOOKS_S", 0.01)
    goes_on = threading.Event()
    looks: Looks[str] = Looks(lambda path: goes_on.wait(60) and path)
    assert [looks.at(str(number)) for number in range(20)] == [None] * 20
    goes_on.set()


def test_storage_that_is_a_little_too_slow_does_not_stop_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.looks.LOOKS_S", 0.01)
    monkeypatch.setattr("kvferry.looks.PAUSE_S", 60.0)
    goes_on, looked = threading.Event(), []
    looks: Looks[str] = Looks(lambda path: looked.append(path) or (goes_on.wait(60) and path))
    assert looks.at("slow") is None
    goes_on.set()
    eventually("the look is over", lambda: not looks._answers.empty())
    for _ in range(20):
        looks.next_step()
        assert looks.at("slow") is None
    assert looked == ["slow"], "it is left alone for a while"


def test_many_folders_of_a_fast_disk_do_not_count_as_a_slow_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that has used its time leaves the other folders to the next step."""
    monkeypatch.setattr("kvferry.looks.PAUSE_S", 60.0)
    looks: Looks[str] = Looks(lambda path: path)
    assert looks.at("one") == "one"
    looks._left_s = 0.0
    assert looks.at("two") is None
    looks.next_step()
    assert looks.at("two") == "two"


def test_several_folders_of_a_slow_disk_do_not_stop_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each folder takes more than half of a step's time, so that one check is always given up."""
    monkeypatch.setattr("kvferry.looks.PAUSE_S", 60.0)
    goes_on, looked = threading.Event(), []
    looks: Looks[str] = Looks(lambda path: looked.append(path) or ((path == "one" or goes_on.wait(60)) and path))
    assert looks.at("one") == "one"
    looks._left_s = 0.01
    assert looks.at("two") is None
    monkeypatch.setattr("kvferry.looks.LOOKS_S", 0.01)
    eventually("the check has taken too long", lambda: time.monotonic() - looks._requested_at > 0.01)
    goes_on.set()
    eventually("the look is over", lambda: not looks._answers.empty())
    for _ in range(20):
        looks.next_step()
        assert looks.at("one") is None
    assert looked == ["one", "two"], "it is left alone for a while"
