"""Events that the scripted leader and workers play, each at the n-th request of a kind."""

import collections
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

#: Which actions fit which requests. ``docs/contract.md`` describes them.
ACTIONS = {
    "hello": ("probe",),
    "lookup": ("late", "drop", "lose_answer", "drop_worker", "restart", "not_ready"),
    "load": ("late", "busy", "drop", "lose_answer", "drop_worker", "restart", "silent", "half", "fail"),
    "store": ("late", "busy", "drop", "lose_answer", "drop_worker", "restart", "silent"),
    "finish": ("late", "drop", "lose_answer", "drop_worker", "restart"),
}
#: Most events of one script.
EVENTS_MAX = 10_000


@dataclass(frozen=True)
class Event:
    """At the ``number``-th new request of the kind ``on``, counted from 1, do ``do``. ``ms``: of ``late``."""

    on: str
    number: int
    do: str
    ms: int = 300

    @classmethod
    def of(cls, entry: dict[str, Any]) -> "Event":
        """Reads an event from JSON.

        Raises:
            ValueError: naming the field, the value and the remedy.
        """
        on, do = entry.get("on"), entry.get("do")
        if on not in ACTIONS:
            raise ValueError(f"on is {on!r}: give one of {', '.join(ACTIONS)}")
        if do not in ACTIONS[on]:
            raise ValueError(f"do is {do!r}: at a {on}, give one of {', '.join(ACTIONS[on])}")
        number, ms = entry.get("number"), entry.get("ms", 300)
        if not isinstance(number, int) or number < 1:
            raise ValueError(f"number is {number!r}: give 1 for the first {on}, 2 for the second")
        if not isinstance(ms, int) or not 0 <= ms <= 60_000:
            raise ValueError(f"ms is {ms!r}: give 0 to 60000")
        if unknown := set(entry) - {"on", "number", "do", "ms"}:
            raise ValueError(f"{sorted(unknown)[0]} is unknown: an event has on, number, do and ms")
        return cls(on, number, do, ms)


#: Played without a script of the author's. Each event comes when the engine has sent enough requests.
DEFAULT = (
    Event("hello", 1, "probe"),
    Event("hello", 2, "probe"),
    Event("store", 2, "late"),
    Event("lookup", 3, "late", 100),
    Event("store", 3, "busy"),
    Event("load", 2, "late"),
    Event("load", 3, "half"),
    Event("store", 5, "drop"),
    Event("load", 4, "busy"),
    Event("lookup", 7, "drop"),
    Event("store", 7, "lose_answer"),
    Event("finish", 7, "drop_worker"),
    Event("finish", 9, "restart"),
)


class Script:
    """The events that are still to be played."""

    def __init__(self, events: Iterable[Event] = DEFAULT):
        self._counts: collections.Counter[str] = collections.Counter()
        self._events: dict[tuple[str, int], Event] = {}
        for event in events:
            self.add(event)

    @classmethod
    def read(cls, text: str) -> "Script":
        """Reads a script: one event a line, in JSON; empty lines and lines that begin with # are skipped.

        Raises:
            ValueError: naming the line, the field, the value and the remedy.
        """
        events = []
        for number, line in enumerate(text.splitlines(), 1):
            if not line.strip() or line.startswith("#"):
                continue
            try:
                events.append(Event.of(json.loads(line)))
            except (ValueError, AttributeError) as error:
                raise ValueError(f"line {number}: {error}") from error
        return cls(events)

    def add(self, event: Event) -> None:
        """Adds an event. Its number counts from the start, also if some of these requests were received already."""
        if len(self._events) >= EVENTS_MAX:
            raise ValueError(f"the script has {EVENTS_MAX} events, the most that wait")
        self._events[event.on, event.number] = event

    def next(self, kind: str) -> Event | None:
        """Counts a new request of this kind, and returns the event at it, if any."""
        self._counts[kind] += 1
        return self._events.pop((kind, self._counts[kind]), None)

    def received(self, kind: str) -> int:
        """Returns the number of new requests of this kind so far."""
        return self._counts[kind]

    def left(self) -> list[Event]:
        """Returns the events that were not played."""
        return list(self._events.values())
