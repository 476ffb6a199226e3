"""Decides when a worker that does not give pages back is given up.

A clock alone is not enough: a thread whose process was stopped sees the whole time elapsed, although the worker's
answer may wait in its socket, or no request was sent yet. The time is therefore split into quarters, and a quarter
counts only if the thread ran through it. In the last one the request must have been sent over the connection that still
exists, or there must be no connection. A worker whose connections come and go gets two quarters more, and no third.
"""

from dataclasses import dataclass

#: Quarters that count before a worker is given up.
LOOKS = 4
#: Additional quarters while the request was not out over the present connection for a whole one.
LOOKS_MORE = 2
#: Gap between two looks that a thread on a busy machine may have: only a longer one can count as a thread not running.
STALL_S = 0.25


@dataclass
class Silence:
    """The time that a worker has not answered. Plain data; not thread-safe.

    :meth:`look` must be called at least every :func:`look_every` while pages are awaited. A gap of more than half a
    quarter, and of more than :data:`STALL_S`, means that the thread did not run: the elapsed part of the present
    quarter does not count.
    """

    looks: int = 0
    #: Time of the last :meth:`look` (None while no pages are awaited), and of the present quarter's end.
    looked: float | None = None
    due: float = 0.0
    #: The connection over which the last request was sent.
    requested_over: int = 0
    #: The connection at the end of the last quarter, 0 without one; None if no request was sent over it by then.
    looked_over: int | None = None

    def end(self) -> None:
        """Starts over: the worker has answered, was replaced, or no pages are awaited."""
        self.looks, self.looked = 0, None
        self.requested_over, self.looked_over = 0, None

    def again(self) -> None:
        """Begins to count again, for another time: the last request is still unanswered."""
        self.looks, self.looked, self.looked_over = 0, None, None

    def requested(self, link: int) -> None:
        """Records that a request was sent over this connection."""
        self.requested_over = link

    def look(self, now: float, after_s: float, link: int) -> bool:
        """Whether the worker is given up, after ``after_s``; ``link`` is the present connection, 0 without one.

        In a thread that keeps running, the result is at most half a quarter late. With connections that come and go it
        takes two quarters more.
        """
        quarter_s = after_s / LOOKS
        stood_still = self.looked is None or now - self.looked > max(quarter_s / 2, STALL_S)
        self.looked = now
        if stood_still:
            self.due = now + quarter_s
            return False
        if now < self.due:
            return False
        self.due += quarter_s
        self.looks += 1
        unanswered = link == self.looked_over
        self.looked_over = link if link in (0, self.requested_over) else None
        return self.looks >= LOOKS + (0 if unanswered else LOOKS_MORE)


def look_every(after_s: float) -> float:
    """Longest interval between calls of :meth:`Silence.look`: half of the gap that counts as a thread not running."""
    return after_s / LOOKS / 4
