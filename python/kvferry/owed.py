"""What a rank owes its worker: to register its memory, to say what is written, to take pages back.

Connections break and workers die; what is owed stays until a worker has confirmed it. A worker that is dead copies
nothing any more, and its successor, which nobody has told anything, says so at once.
"""

from dataclasses import dataclass, field

#: Requests that one ``abandon`` may name, by the limits of the wire; the others are said in the next one.
ABANDONED_MAX = 4096


@dataclass
class Register:
    """Use this group's memory; requests up to ``after`` are over."""

    after: int
    group: int = 0


@dataclass
class Written:
    """Stores up to this request may read their pages."""

    through: int


@dataclass
class Abandon:
    """Nothing may be copied for these requests any more."""

    requests: list[int]


Demand = Register | Written | Abandon


@dataclass
class Owed:
    """See the module. Plain data; not for several threads at a time."""

    #: Groups of the memory, and how many of them the worker has: one after another, each by itself.
    groups: int = 1
    registered_groups: int = 0
    asked: set[type] = field(default_factory=set)
    #: Everything up to this request is written, and what of it the worker has confirmed since the registration.
    written: int = 0
    confirmed: int = 0
    #: The highest request that was ever abandoned: the worker of a later registration must not copy for it.
    over: int = 0
    abandoned: set[int] = field(default_factory=set)

    @property
    def registered(self) -> bool:
        """Whether the worker has all of the memory."""
        return self.registered_groups == self.groups

    def lost(self) -> None:
        """The connection broke: the worker forgets the memory."""
        self.registered_groups = 0
        self.confirmed = 0
        self.asked.clear()

    def wrote(self, through: int) -> None:
        """The pages of stores up to this request are written."""
        self.written = max(self.written, through)

    def wrote_last(self, through: int) -> None:
        """Nothing behind this request will ever be known to be written."""
        self.written = min(self.written, through)

    def abandon(self, requests: list[int]) -> None:
        """The engine takes the pages of requests back."""
        self.over = max([self.over, *requests])
        self.abandoned.update(requests)

    def next(self) -> Demand | None:
        """What to ask now; at most one of a kind at a time."""
        if not self.registered and Register not in self.asked:
            self.asked.add(Register)
            return Register(self.over, self.registered_groups)
        # Not behind the registration, which may take as long as a leader is away.
        if self.abandoned and Abandon not in self.asked:
            self.asked.add(Abandon)
            return Abandon(sorted(self.abandoned)[:ABANDONED_MAX])
        if self.registered and self.written > self.confirmed and Written not in self.asked:
            self.asked.add(Written)
            return Written(self.written)
        return None

    def answered(self, demand: Demand, confirmed: bool) -> list[int]:
        """The worker confirmed, or did not: then it is asked again. Returns the requests that are over thereby."""
        self.asked.discard(type(demand))
        if not confirmed:
            return []
        match demand:
            case Register(group=group):
                self.registered_groups = group + 1
            case Written(through):
                self.confirmed = through
            case Abandon(requests):
                over = [request for request in requests if request in self.abandoned]
                self.abandoned.difference_update(over)
                return over
        return []

    def forgotten(self) -> None:
        """The worker says that it has no memory of this rank."""
        self.registered_groups = 0
        self.confirmed = 0

    def dead(self) -> list[int]:
        """The only process that could have copied is dead: returns the requests that are over thereby."""
        over = sorted(self.abandoned)
        self.abandoned.clear()
        return over
