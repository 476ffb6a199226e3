"""Requests, copies and slots of :mod:`fake_leader`, and a clock that takes no time."""

from dataclasses import dataclass, field
from typing import Any

from fake_device import Group

from kvferry.client import Failure
from kvferry.wire import Code


class Clock:
    """Takes the place of the module ``time``."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    time = monotonic

    def time_ns(self) -> int:
        return int(self.now * 1e9)

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Asked:
    """A request of the scheduler's side, as :class:`kvferry.client.PendingRequest`."""

    def __init__(self, leader: Any, number: int, message: Any, deadline: float, expires: float, until: Any):
        self.id, self.message, self.until = number, message, until
        self.deadline, self.expires = deadline, expires
        self.answer: Any = None
        self.failure: Failure | None = None
        self.done = False
        self.queued_s, self.took_s = 0.0, 0.0
        self._leader = leader

    def wait(self, timeout_s: float) -> bool:
        self._leader.wait(timeout_s)
        return self.done

    def end(self, answer: Any) -> None:
        assert not self.done
        self.failure, self.answer = (answer, None) if isinstance(answer, Failure) else (None, answer)
        self.done = True
        if self.until is not None:
            self.until(self)


@dataclass(eq=False)
class Copy:
    """A load or a store, from its request until nothing is copied for it."""

    asked: Asked
    store: bool
    #: Group, page of the sequence, and page of the pool.
    pages: list[tuple[Group, int, int]]
    after: int
    #: How the leader ends the copy: ``done``, ``part``, ``failed``, ``unknown`` (without its end), ``lost`` (never).
    fate: str
    #: Of the leader that the client knew.
    epoch: int
    #: What a load writes, or what the pages of a store must hold; and under which keys a store publishes them.
    contents: list[Any] = field(default_factory=list)
    keys: list[tuple[bytes, int, bytes]] = field(default_factory=list)
    namespace: bytes = b""
    began: bool = False
    #: Ranks that were told to stop, and whether nothing of the copy runs any longer, and none will.
    stopped: set[int] = field(default_factory=set)
    over: bool = False
    cancelled: bool = False
    #: Indices of pages that the load brings with other contents than those that were stored.
    spoiled: set[int] = field(default_factory=set)

    @property
    def device_pages(self) -> list[int]:
        return [page for _, _, page in self.pages]


@dataclass
class Slot:
    namespace: bytes
    hashes: list[bytes]
    #: What the last lookup found, by group and page, its end, and until when the pages are held.
    pins: dict[tuple[int, int], Any] = field(default_factory=dict)
    device_pages: int = 0
    end: int = 0
    held_until: float = 0.0


def refused(code: int) -> Failure:
    retry = code in (Code.COPY_FAILED, Code.BUSY)
    return Failure(code, "refused", reported=True, retry=retry, over=True)
