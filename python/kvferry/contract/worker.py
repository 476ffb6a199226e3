"""The scripted worker of one rank: maps its memory, and knows what is written and abandoned."""

import contextlib
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kvferry import wire
from kvferry.contract import zmtp
from kvferry.contract.bodies import Hello
from kvferry.contract.pages import MappedMemory, Refused
from kvferry.contract.peers import Peer, Request, Session
from kvferry.contract.rules import Report
from kvferry.contract.server import Server
from kvferry.wire import Code, Error, Kind

if TYPE_CHECKING:
    from kvferry.contract.checks import Checks

#: Tickets that wait for a registration, and the time for which they do.
TICKETS_MAX = 16_448
TICKET_LIMIT_S = 30.0
_FDS_MAX = 253
_TICKET_BYTES = 16
#: Abandoned requests that are remembered; older ones are over, or ``abandoned_through`` covers them.
ABANDONED_MAX = 65_536


class Tickets:
    """Descriptors that ranks send to ``fds.sock``. For the server's thread."""

    def __init__(self, server: Server, path: Path):
        self._server = server
        self._path = path
        self._fds: dict[bytes, tuple[int, float]] = {}
        self._senders: set[socket.socket] = set()
        self._listener: socket.socket | None = None

    def listen(self) -> None:
        """Listens for senders."""
        self._listener = zmtp.listen(self._path)
        self._server.watch(self._listener, self._accept)

    def _accept(self) -> None:
        if self._listener is None:
            return
        with contextlib.suppress(OSError):
            sender, _ = self._listener.accept()
            sender.setblocking(False)
            self._senders.add(sender)
            self._server.watch(sender, lambda: self._receive(sender))

    def _receive(self, sender: socket.socket) -> None:
        try:
            names, fds, _, _ = socket.recv_fds(sender, _FDS_MAX * _TICKET_BYTES, _FDS_MAX)
        except OSError:
            names, fds = b"", []
        fits = names and len(names) == len(fds) * _TICKET_BYTES and len(self._fds) + len(fds) <= TICKETS_MAX
        if not fits:
            for fd in fds:
                os.close(fd)
            self._close(sender)
            return
        until = time.monotonic() + TICKET_LIMIT_S
        for at, fd in enumerate(fds):
            self._fds[names[at * _TICKET_BYTES : (at + 1) * _TICKET_BYTES]] = fd, until
        self._server.later(TICKET_LIMIT_S, self._expire)
        try:
            sender.send(b"\x01")
        except OSError:
            self._close(sender)

    def _close(self, sender: socket.socket) -> None:
        self._server.unwatch(sender)
        self._senders.discard(sender)
        sender.close()

    def _expire(self) -> None:
        now = time.monotonic()
        for name, (fd, until) in list(self._fds.items()):
            if until <= now:
                del self._fds[name]
                os.close(fd)

    def take(self, name: bytes) -> int | None:
        """Returns the descriptor of a ticket, once."""
        found = self._fds.pop(name, None)
        return found[0] if found else None

    def close(self) -> None:
        """Closes everything, after the server's thread has ended."""
        for fd, _ in self._fds.values():
            os.close(fd)
        for sender in self._senders:
            sender.close()
        if self._listener is not None:
            self._listener.close()
            self._path.unlink(missing_ok=True)


class Worker:
    """The service of one rank's worker."""

    roles = ("rank",)
    features = 0
    #: The end of a rank's connection ends what its registration began.
    keeps_answers = False
    kinds: ClassVar[dict[str, tuple[int, ...]]] = {"rank": (Kind.REGISTER, Kind.WRITTEN, Kind.ABANDON, Kind.UNREGISTER)}

    def __init__(self, server: Server, report: Report, checks: "Checks", rank: int, ranks: int, tickets: Tickets):
        self._server, self._report, self._checks = server, report, checks
        self.rank, self.ranks = rank, ranks
        self._tickets = tickets
        #: The mapped memory that is served, the engine and the session that registered it.
        self.memory: MappedMemory | None = None
        self.engine = b""
        self._session: Session | None = None
        #: What the rank has reported as written since its registration, and what it has abandoned.
        self.written = 0
        self.over_through = 0
        self.abandoned: dict[int, None] = {}
        #: Called when something may go on: the memory, what is written, what is abandoned.
        self.changed: Callable[[], None] = lambda: None
        self.lost: Callable[[], None] = lambda: None
        self.peers_of_other_ranks: Callable[[], list[Worker]] = list

    def admits(self, peer: Peer, hello: Hello) -> Error | None:
        """Refuses a rank of another worker."""
        if hello.rank != self.rank or hello.replica != 0:
            text = (
                f"rank is {hello.rank} of replica {hello.replica}: this is the worker of rank {self.rank} of replica 0"
            )
            return Error(Code.INVALID, text)
        return None

    def gives_up(self, request: int, engine: bytes) -> bool:
        """Whether nothing is copied for a request of this engine on this rank, now or later."""
        return request in self.abandoned or (engine == self.engine and request <= self.over_through)

    def handle(self, request: Request) -> None:
        """Carries out a request of the rank."""
        match request.kind:
            case Kind.REGISTER:
                self._register(request)
            case Kind.WRITTEN:
                self._written(request)
            case Kind.ABANDON:
                self._abandon(request)
            case Kind.UNREGISTER:
                self._drop_memory()
                self._server.answer(request, wire.Empty())

    def _register(self, request: Request) -> None:
        body = request.body
        holder = self._session
        if holder is not None and holder.peers and holder is not request.session:
            text = f"the memory of rank {self.rank} is in use by process {holder.process}: end it, or wait for its end"
            self._server.answer(request, Error(Code.NOT_READY, text, retry=True))
            return
        try:
            memory = MappedMemory(body.registration, self._tickets.take)
        except Refused as refused:
            if refused.rule:
                self._report.broken(refused.rule, str(refused), request.number)
            else:
                self._report.note(str(refused))
            code = Code.NOT_READY if refused.rule == "registration-proven" else Code.INVALID
            self._server.answer(request, Error(code, str(refused), retry=code is Code.NOT_READY))
            return
        if (why := self._differs(memory)) is not None:
            memory.close()
            self._server.answer(request, why)
            return
        self._checks.registered(request, self, memory)
        not_served = ""
        if len(memory.groups) != 1 or memory.groups[0].attention != "full":
            not_served = f"{len(memory.groups)} groups, or another attention than full: these checks serve one group"
            self._report.note(f"the memory is not served: {not_served}")
        page_bytes = memory.groups[0].page_bytes
        pages = self._server.settings.stored_bytes_max // self.ranks // page_bytes
        if body.check_only or not_served:
            memory.close()
        else:
            self._drop_memory()
            self.memory, self.engine, self._session = memory, body.engine, request.session
            self.over_through, self.written = body.abandoned_through, 0
        self._server.answer(request, wire.Registered(pages, page_bytes, not_served))
        self._checks.gave_up(self)
        self.changed()

    def _differs(self, memory: MappedMemory) -> Error | None:
        if (memory.rank, memory.ranks) != (self.rank, self.ranks):
            text = (
                f"rank {memory.rank} of tp_size {memory.ranks}: this is rank {self.rank} of {self.ranks}: give --ranks"
            )
            return Error(Code.INVALID, text)
        for other in self.peers_of_other_ranks():
            if other is self or other.memory is None:
                continue
            if other.memory.content != memory.content:
                text = f"content of rank {self.rank} differs from that of rank {other.rank}: all ranks send the same"
                self._report.broken("content-given", text)
                return Error(Code.RANK_DISAGREES, text)
        return None

    def _written(self, request: Request) -> None:
        if self.memory is None or request.session is not self._session:
            text = f"rank {self.rank} has registered no memory: send register first"
            self._server.answer(request, Error(Code.INVALID, text))
            return
        self.written = max(self.written, request.body.through)
        self._checks.wrote(self, request)
        self._server.answer(request, wire.Empty())
        self.changed()

    def _abandon(self, request: Request) -> None:
        for each in request.body.requests:
            self.abandoned[each] = None
        while len(self.abandoned) > ABANDONED_MAX:
            del self.abandoned[next(iter(self.abandoned))]
        self.changed()
        self._server.answer(request, wire.Empty())
        self._checks.gave_up(self)

    def left(self, session: Session) -> None:
        """Unmaps the memory of a rank whose connection has ended."""
        if session is self._session:
            self._drop_memory()

    def forgotten(self, session: Session) -> None:
        """Nothing more is kept."""

    def _drop_memory(self) -> None:
        if self.memory is not None:
            memory, self.memory, self._session = self.memory, None, None
            self.lost()
            memory.close()

    def probe(self) -> dict[str, Any]:
        """Returns the state for a status."""
        return {"rank": self.rank, "attached": self.memory is not None, "pid": os.getpid()}
