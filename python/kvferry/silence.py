"""When a worker that does not give pages back is given up.

A clock alone does not tell: a thread whose process was stopped finds that all the time is over, and the worker's answer
may lie in its socket, or it has asked for nothing yet. So the time is cut into quarters, and a quarter counts only when
the thread ran through it. In the last one the question must have been out over the connection that there still is, or
there must be none; a worker whose connections come and go gets two quarters more, and no third.
"""

from dataclasses import dataclass

#: Quarters that count before a worker is given up.
LOOKS = 4
#: Quarters more while the question was not out over the present connection for a whole one.
LOOKS_MORE = 2


@dataclass
class Silence:
    """See the module. Plain data; not for several threads at a time.

    :meth:`look` is to be called at least every :func:`look_every` while pages are waited for. A gap of more than half a
    quarter is taken for a thread that stood still: what it had run through of its quarter does not count.
    """

    looks: int = 0
    #: When it was looked last, and when the present quarter is over; None while nothing is waited for.
    looked: float | None = None
    due: float = 0.0
    #: The connection over which the worker was asked last.
    asked_over: int = 0
    #: The connection of the last look that counted, 0 without one; None where the worker was not yet asked over it.
    looked_over: int | None = None

    def end(self) -> None:
        """The worker has answered, or is another one, or nothing is waited for: what comes next has the whole time."""
        self.looks, self.looked = 0, None
        self.asked_over, self.looked_over = 0, None

    def asked(self, link: int) -> None:
        """The worker was asked over this connection."""
        self.asked_over = link

    def look(self, now: float, after_s: float, link: int) -> bool:
        """Whether the worker is to be given up, after ``after_s``; ``link`` is the present connection, 0 without one.

        A thread that does not stand still sees that at most half a quarter late. With connections that come and go it
        takes two quarters more.
        """
        quarter_s = after_s / LOOKS
        stood_still = self.looked is None or now - self.looked > quarter_s / 2
        self.looked = now
        if stood_still:
            self.due = now + quarter_s
            return False
        if now < self.due:
            return False
        self.due += quarter_s
        self.looks += 1
        unanswered = link == self.looked_over
        self.looked_over = link if link in (0, self.asked_over) else None
        return self.looks >= LOOKS + (0 if unanswered else LOOKS_MORE)


def look_every(after_s: float) -> float:
    """Half of the longest gap between two looks that is not taken for standing still."""
    return after_s / LOOKS / 4
