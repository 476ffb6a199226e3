"""What the scripted processes know of their clients: connections, engines, and requests without an answer."""

import collections
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from kvferry import wire
from kvferry.contract.bodies import Hello
from kvferry.contract.zmtp import ZmtpConnection
from kvferry.wire import Error

#: Answers of one engine that are kept for repeated requests.
ANSWERS_MAX = 4096
#: Connections of one endpoint; one more is closed.
CONNECTIONS_MAX = 64
#: Time without a hello after which a connection is closed, and time after which an engine that stays away is forgotten.
HELLO_LIMIT_S = 5.0
AWAY_S = 10.0
#: Longest deadline of a request, as the welcome says.
DEADLINE_MAX_S = 120.0
#: Heartbeats without a message after which a client counts as silent.
BEATS = 3


@dataclass(frozen=True)
class Settings:
    """Numbers of the welcome, and of the kvferry that is played."""

    ranks: int = 1
    heartbeat_ms: int = 500
    request_credits: int = 32
    byte_credits: int = 64 << 20
    #: Time between a copy and its answer, in which the pages of the copy must not change.
    settle_ms: int = 30
    #: Bytes of pages that are kept, all ranks together: further pages of stores are refused.
    stored_bytes_max: int = 1 << 30


@dataclass(eq=False)
class Session:
    """One engine or tool at one endpoint, over all its connections."""

    role: str
    engine: bytes
    process: int
    open: dict[int, "Request"] = field(default_factory=dict)
    answers: "collections.OrderedDict[int, tuple[int, bytes]]" = field(default_factory=collections.OrderedDict)
    #: The body of each request that was answered, refused as busy or lost by the script, to compare repeated ones.
    payloads: "collections.OrderedDict[int, bytes]" = field(default_factory=collections.OrderedDict)
    peers: "set[Peer]" = field(default_factory=set)
    away_since: float = 0.0


@dataclass(eq=False)
class Peer:
    """One connection."""

    endpoint: "Endpoint"
    connection: ZmtpConnection
    number: int
    opened_at: float
    received_at: float
    hello: Hello | None = None
    session: Session | None = None
    version: int = wire.HELLO_VERSION
    #: Bytes of each request that is not answered over this connection.
    outstanding: dict[int, int] = field(default_factory=dict)
    #: Requests of ours: kind, and when the answer is due.
    asked: dict[int, tuple[int, float]] = field(default_factory=dict)
    closed: bool = False


@dataclass(eq=False)
class Batch:
    """A ``stores`` message, and the results of its stores."""

    request: "Request"
    ids: list[int]
    results: dict[int, wire.StoreResult] = field(default_factory=dict)
    alone: bool = False


@dataclass(eq=False)
class Request:
    """One request that is not answered."""

    id: int
    kind: int
    session: Session
    peer: Peer
    number: int
    body: Any
    deadline: float
    payload: bytes
    batch: Batch | None = None
    #: The answer is held back by this many seconds.
    late_s: float = 0.0
    done: bool = False
    #: The id was received before, by the same leader.
    again: bool = False


class Service(Protocol):
    """What an endpoint does beyond its sessions."""

    roles: tuple[str, ...]
    kinds: ClassVar[dict[str, tuple[int, ...]]]
    #: Bits of ``features`` that welcome repeats.
    features: int
    #: Answers are kept over connections, for repeated requests.
    keeps_answers: bool

    def handle(self, request: Request) -> None:
        """Carries a request out, now or later; it is answered by :meth:`Server.answer`."""

    def admits(self, peer: Peer, hello: Hello) -> Error | None:
        """Returns why a peer is refused."""

    def left(self, session: Session) -> None:
        """Handles the end of the last connection of a session."""

    def forgotten(self, session: Session) -> None:
        """Handles a session that stayed away."""


@dataclass(eq=False)
class Endpoint:
    """The sockets of the leader, or of one worker."""

    name: str
    directory: Path
    service: Service
    listener: socket.socket | None = None
    peers: "set[Peer]" = field(default_factory=set)
    sessions: dict[tuple[str, bytes], Session] = field(default_factory=dict)
