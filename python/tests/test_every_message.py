"""Every role sends every kind of message, well formed and in each wrong form, to a running leader and a running worker.

The rows come from ``schema/messages.json``, and the bodies from ``schema/golden``: a new kind is a new row. Each
request gets exactly one answer with the right code, each answer is dropped in silence, and what no message has closes
the connection.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from daemon import PROGRAM, TIMEOUT_S, Daemon, environment, eventually, running
from raw_peer import Closed, RawPeer, Received, frame

from kvferry import wire

SCHEMA = Path(__file__).parents[2] / "schema"
KINDS = json.loads((SCHEMA / "messages.json").read_text())["kinds"]
BY_NAME = {kind["name"]: kind for kind in KINDS}
ENGINE = b"t" * 16
UNKNOWN_REQUEST, UNKNOWN_ANSWER = 998, 999
#: Deeper than a body may be.
TOO_DEEP = b"\xa1?" + b"\x91" * 20 + b"\xc0"
#: The first words of a connection, which may be sent before the welcome and have shorter bodies.
FIRST_WORDS = ("hello", "ping", "pong")
MALFORMED = "error malformed"
LIMIT = "error limit"
UNKNOWN_KIND = "error unknown_kind"
SILENCE = "silence"

#: How a leader without an engine's memory, and a worker without a registration, answer the examples.
ANSWERS = {
    "lookup": "error not_ready",
    "load": "error not_ready",
    "store": "error not_ready",
    "stores": "stores_answer",
    "reset": "error invalid",
    "flush": "error invalid",
    "register": "error invalid",
    "written": "error invalid",
}


def example(name: str) -> bytes:
    """The body of the golden example of a kind; of a status, one without a second count, which is limited by time."""
    if name == "status":
        return msgspec.msgpack.encode({"check": False})
    text = (SCHEMA / f"golden/v2/{name}.hex").read_text()
    return bytes.fromhex("".join(text.split()[1:]))


def fields(name: str) -> dict[str, Any]:
    return msgspec.msgpack.decode(example(name))


def wrong_type(name: str) -> bytes | None:
    """The example with another type in its first field; of an empty body, a list."""
    given = fields(name)
    if not given:
        return b"\x90"
    first = next(iter(given))
    return msgspec.msgpack.encode({**given, first: [["no such type"]]})


def missing_field(name: str) -> bytes | None:
    """The example without its first required field; None if nothing is required."""
    required = BY_NAME[name]["body"].get("required")
    if not required:
        return None
    given = fields(name)
    return msgspec.msgpack.encode({key: value for key, value in given.items() if key != required[0]})


def too_deep(name: str) -> bytes:
    """The example with an unknown field that is nested too deeply."""
    body = example(name)
    assert 0x80 <= body[0] < 0x8F, "a map with few fields"
    return bytes([body[0] + 1]) + body[1:] + TOO_DEEP


#: Wrong forms of a body, and the answer to a request in that form.
WRONG = {
    "wrong type": (wrong_type, MALFORMED),
    "missing field": (missing_field, MALFORMED),
    "too deep": (too_deep, LIMIT),
    "trailing bytes": (lambda name: example(name) + b"\xc0", MALFORMED),
}


def outcome(answers: list[Received]) -> str:
    """One word for the answers to one message."""
    names = []
    for each in answers:
        name = next(kind["name"] for kind in KINDS if kind["number"] == each.kind)
        if each.kind == wire.Kind.ERROR:
            codes = json.loads((SCHEMA / "messages.json").read_text())["errors"]
            name = "error " + next(code["name"] for code in codes if code["number"] == each.body["code"])
            assert each.body["message"], "an error says what is wrong"
            assert "\n" not in each.body["message"]
        names.append(name)
    return ", ".join(names) or SILENCE


class Side:
    """One side of a conversation that is tested: sends messages, and collects everything that answers them."""

    def __init__(self, peer: RawPeer, epoch: int):
        self.peer = peer
        self.epoch = epoch

    def barrier(self) -> list[Received]:
        """Returns what was sent before the answer to the last request that the process's decisions answer."""
        return self.peer.answers_until_pong()

    def replies(self, kind: int, body: bytes, *, answered: bool, **header: int) -> str:
        """The outcome of one message: waits for its answer, if it has one, and then checks that there is no second."""
        id_ = self.peer.send(kind, body, **{"epoch": self.epoch, **header})
        answers = [self.peer.answer_to(id_)] if answered else []
        answers += [each for each in self.barrier() if each.id == id_]
        return outcome(answers)


def said(kind: dict[str, Any], role: str, receiver: str) -> bool:
    """Whether the table allows this role to send the kind to this receiver."""
    to = kind["said_to"]
    if role == "server":
        return role in kind["said_by"] and to in ("client", "peer")
    return role in kind["said_by"] and to in (receiver, "server", "peer")


def rows(role: str, receiver: str) -> Iterator[tuple[str, bool, bool]]:
    """Every kind, whether it is a request, and whether the role may send it."""
    for kind in KINDS:
        yield kind["name"], kind["answer"] is not None, said(kind, role, receiver)


def expected_answer(role: str, name: str) -> str:
    """The outcome of an example. The only seat of a worker is in use by the worker that runs."""
    if role == "worker" and name not in FIRST_WORDS:
        return "error not_ready"
    return ANSWERS.get(name, BY_NAME[name]["answer"])


def check_kind(side: Side, name: str, is_request: bool, allowed: bool, role: str) -> None:
    """Sends one kind in every form."""
    number = BY_NAME[name]["number"]
    row = f"{role} sends {name}"

    def sends(form: str, body: bytes, expected: str, **header: int) -> None:
        found = side.replies(number, body, answered=expected != SILENCE, **header)
        assert found == expected, f"{row}, {form}: {found} instead of {expected}"

    if not allowed:
        sends("as the example", example(name), UNKNOWN_KIND if is_request else SILENCE)
        sends("with trailing bytes", example(name) + b"\xc0", UNKNOWN_KIND if is_request else SILENCE)
        return
    if name == "hello":
        # A second hello on a connection.
        sends("as the example", example(name), "error invalid")
        return
    for form, (make, expected) in WRONG.items():
        body = make(name)
        if body is not None:
            sends(form, body, expected if is_request else SILENCE)
    if not is_request:
        sends("as the example", example(name), SILENCE)
        sends("of another epoch", example(name), SILENCE, epoch=side.epoch + 1)
        return
    expected = expected_answer(role, name)
    sends("as the example", example(name), expected)
    sends("with the shortest deadline", example(name), expected, deadline_ms=1)
    repeated = side.peer.send(number, example(name), epoch=side.epoch)
    first = side.peer.answer_to(repeated)
    assert outcome([first]) == expected, f"{row}: {outcome([first])}"
    sends("under the same id again", example(name), expected, id=repeated)
    sends("with an unknown feature", example(name), "error unsupported", required=1)
    sends("in an unknown version", example(name), "error unsupported_version", version=9)


def ends(peer: RawPeer) -> bool:
    """Reads until the other side closes the connection, within the deadline of the tests."""
    with contextlib.suppress(Closed, TimeoutError):
        while True:
            peer.receive()
    return peer.has_ended


def check_too_long(peer: RawPeer, name: str) -> None:
    """A length that no body has closes the connection before a byte of the body was sent."""
    number = BY_NAME[name]["number"]
    head = bytes.fromhex((SCHEMA / f"golden/v2/{name}.hex").read_text().split()[0])
    assert int.from_bytes(head[6:8]) == number
    peer.write(frame(1, head) + b"\x02" + (wire.BODY_BYTES_MAX + 1).to_bytes(8))
    assert ends(peer), f"{name} with a body of any length keeps its connection"


def check_unknown_kinds(side: Side) -> None:
    assert side.replies(UNKNOWN_REQUEST, b"\x80", answered=True) == UNKNOWN_KIND
    assert side.replies(UNKNOWN_REQUEST, b"no MessagePack", answered=True) == UNKNOWN_KIND
    assert side.replies(UNKNOWN_ANSWER, b"\x80", answered=False) == SILENCE


def check_server(directory: Path, role: str, receiver: str) -> None:
    """Everything that a client of this role sends."""
    for name, is_request, allowed in rows(role, receiver):
        with RawPeer.connect(directory) as peer:
            welcome = peer.hello(role, ENGINE)
            assert outcome([welcome]) == "welcome"
            side = Side(peer, welcome.epoch)
            check_kind(side, name, is_request, allowed, role)
            check_unknown_kinds(side)
            if name in FIRST_WORDS:
                long = b"\x81\xa1?\xc5\xff\xff" + bytes(0xFFFF)
                found = side.replies(BY_NAME[name]["number"], long, answered=is_request)
                assert found == (LIMIT if is_request else SILENCE), f"{name} with a long body: {found}"
            check_too_long(peer, name)


def check_before_hello(directory: Path) -> None:
    """What a peer sends first, instead of its hello."""
    for kind in KINDS:
        name, is_request = kind["name"], kind["answer"] is not None
        if name == "hello":
            continue
        with RawPeer.connect(directory) as peer:
            side = Side(peer, 0)
            found = side.replies(kind["number"], example(name), answered=is_request)
            expected = "error hello_first" if is_request else SILENCE
            if name in FIRST_WORDS:
                expected = "pong" if is_request else SILENCE
            assert found == expected, f"{name} before hello: {found}"
    with RawPeer.connect(directory) as peer:
        for form, (make, expected) in WRONG.items():
            body = make("hello")
            assert body is not None
            answer = peer.ask(wire.Kind.HELLO, body, version=wire.HELLO_VERSION)
            assert outcome([answer]) == expected, form
        assert outcome([peer.hello("astronaut")]) == "error invalid"
        assert outcome([peer.hello("engine", version_min=7, version_max=9)]) == "error unsupported_version"


@contextlib.contextmanager
def other_process(directory: Path, role: str, engine: bytes) -> Iterator[int]:
    """A process that has a connection with this name, and sends pings; yields its id."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with RawPeer.connect(directory) as peer:
                peer.hello(role, engine)
                os.write(write, b"!")
                peer.socket.settimeout(0.2)
                while os.getppid() != 1:
                    peer.send(wire.Kind.PING, b"\x80")
                    with contextlib.suppress(TimeoutError):
                        peer.receive()
        finally:
            os._exit(0)
    try:
        os.close(write)
        assert os.read(read, 1) == b"!", "the other process is welcomed"
        yield child
    finally:
        os.close(read)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def check_anothers_name(daemon: Daemon) -> None:
    """Requests under the name of another process that lives are refused, and name that process."""
    leader = daemon.socket_dir / "leader"
    name = b"o" * 16
    with other_process(leader, "engine", name) as process, RawPeer.connect(leader) as peer:
        side = Side(peer, peer.hello("engine", name).epoch)
        for kind, is_request, allowed in rows("engine", "leader"):
            if not (is_request and allowed) or kind in FIRST_WORDS:
                continue
            answer = peer.ask(BY_NAME[kind]["number"], example(kind))
            assert outcome([answer]) == "error not_ready", f"{kind} under another's name: {answer.body}"
            assert str(process) in answer.body["message"], answer.body
            assert not answer.body.get("over"), "the other's copies may run"
            assert side.barrier() == []
    with RawPeer.connect(leader) as peer:
        peer.hello("worker", rank=0, replica=0)
        answer = peer.ask(BY_NAME["attach"]["number"], example("attach"))
        assert outcome([answer]) == "error not_ready"
        assert str(daemon.workers[0]) in answer.body["message"], answer.body


def counters(daemon: Daemon) -> dict[str, int]:
    return {name: count for name, count in daemon.status()["counters"].items() if name.startswith("refused_")}


def test_every_message_to_a_leader_and_to_a_worker() -> None:
    with running(ranks=1) as daemon:
        leader, worker = daemon.socket_dir / "leader", daemon.socket_dir / "worker-0-0"
        eventually("the worker listens", lambda: (worker / "kvferry.sock").exists())
        attached = lambda: daemon.status()["ranks"][0]["host_bytes"] > 0  # noqa: E731
        eventually("the worker is attached", attached)
        for directory, receiver, roles in (
            (leader, "leader", ("engine", "admin", "worker")),
            (worker, "worker", ("rank",)),
        ):
            check_before_hello(directory)
            for role in roles:
                check_server(directory, role, receiver)
        # The example, with the shortest deadline, and once more: the same request again is counted once. The two stores
        # of `stores` have ids of their own, which are the same in each message.
        counted = {name: count for name, count in counters(daemon).items() if count}
        assert counted == {
            "refused_lookups_not_ready": 3,
            "refused_loads_not_ready": 3,
            "refused_stores_not_ready": 3 + 2,
        }
        check_anothers_name(daemon)
        status = daemon.status("--check")
        assert status["contradiction"] == ""
        requests = status["requests"]
        assert (requests["open_requests"], requests["parked_requests"]) == (0, 0), requests


class PlayedLeader:
    """The leader of one worker, played by the test."""

    def __init__(self, folder: Path):
        self.socket_dir = folder / "s"
        directory = self.socket_dir / "leader"
        directory.mkdir(parents=True, mode=0o700)
        self.socket_dir.chmod(0o700)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(directory / "kvferry.sock"))
        self._listener.listen(4)
        self._listener.settimeout(TIMEOUT_S)

    def accept(self, epoch: int) -> Side:
        """Welcomes the worker and admits it without memory."""
        accepted, _ = self._listener.accept()
        peer = RawPeer(accepted, b"ROUTER")
        hello = peer.receive()
        assert (hello.kind, hello.body["role"]) == (wire.Kind.HELLO, "worker")
        welcome = msgspec.msgpack.encode(wire.Welcome(2, 1000, 1024, 64 << 20))
        peer.send(wire.Kind.WELCOME, welcome, id=hello.id, version=wire.HELLO_VERSION, epoch=epoch)
        for name, answer in (("attach", {"after": 0}), ("memory", {"after": 0})):
            number = BY_NAME[name]["number"]
            while (request := peer.receive()).kind != number:
                self._answer(peer, request, epoch)
            named = "attach" if name == "attach" else "number"
            body = msgspec.msgpack.encode({named: request.body[named], **answer})
            peer.send(number + 1, body, id=request.id, epoch=epoch)
        return PlayedSide(peer, epoch)

    @staticmethod
    def _answer(peer: RawPeer, request: Received, epoch: int) -> None:
        if request.kind == wire.Kind.PING:
            peer.send(wire.Kind.PONG, b"\x80", id=request.id, epoch=epoch)
        elif wire.is_request(request.kind):
            peer.send(request.kind + 1, b"\x80", id=request.id, epoch=epoch)


class PlayedSide(Side):
    """The side of a leader: what the worker sends by itself is answered meanwhile."""

    def barrier(self) -> list[Received]:
        ping = self.peer.send(wire.Kind.PING, b"\x80", epoch=self.epoch)
        answers = []
        while (received := self.peer.receive()).id != ping or received.kind != wire.Kind.PONG:
            if wire.is_request(received.kind):
                PlayedLeader._answer(self.peer, received, self.epoch)
            else:
                answers.append(received)
        return answers


#: How a worker without memory answers orders: docs/wire.md, "Every order is answered".
ORDERS = {
    "read_inventory": "error invalid",
    "flush_tier": "error invalid",
}


def test_every_order_to_a_worker() -> None:
    epoch = 5
    with tempfile.TemporaryDirectory(prefix="kvferry-") as folder:
        leader = PlayedLeader(Path(folder))
        command = [PROGRAM, "worker", "--rank", "0", "--g2", "64MiB", "--socket-dir", str(leader.socket_dir)]
        worker = subprocess.Popen(command, env=environment(), stdin=subprocess.DEVNULL)
        try:
            side = leader.accept(epoch)
            for name, is_request, allowed in rows("server", "client"):
                check_order(side, name, is_request, allowed)
            check_unknown_kinds(side)
            side.peer.close()
            # The worker connects again, and takes no order of the former epoch from its next leader.
            side = leader.accept(epoch + 1)
            for name in ("transfer", "cancel", "invalidate", "read_inventory", "flush_tier"):
                found = side.replies(BY_NAME[name]["number"], example(name), answered=True, epoch=epoch)
                assert found == "error stale_epoch", f"{name} of the former epoch: {found}"
            side.peer.close()
            assert worker.poll() is None, "the worker has ended"
        finally:
            worker.kill()
            worker.wait(TIMEOUT_S)


def check_order(side: Side, name: str, is_request: bool, allowed: bool) -> None:
    number = BY_NAME[name]["number"]

    def sends(form: str, body: bytes, expected: str, **header: int) -> None:
        found = side.replies(number, body, answered=expected != SILENCE, **header)
        assert found == expected, f"a leader sends {name}, {form}: {found} instead of {expected}"

    if not is_request:
        # An answer to no request is dropped unread.
        sends("as the example", example(name), SILENCE)
        sends("with trailing bytes", example(name) + b"\xc0", SILENCE)
        return
    if not allowed:
        sends("as the example", example(name), UNKNOWN_KIND)
        sends("with trailing bytes", example(name) + b"\xc0", UNKNOWN_KIND)
        return
    expected = ORDERS.get(name, BY_NAME[name]["answer"])
    if name != "ping":
        for form, (make, wrong) in WRONG.items():
            body = make(name)
            if body is not None:
                sends(form, body, wrong)
    sends("as the example", example(name), expected)
    repeated = side.peer.send(number, example(name), epoch=side.epoch)
    first = side.peer.answer_to(repeated)
    assert outcome([first]) == expected, f"{name}: {outcome([first])}"
    sends("under the same id again", example(name), expected, id=repeated)
    if name != "ping":
        sends("in an unknown version", example(name), "error unsupported_version", version=9)
        sends("with an unknown feature", example(name), "error unsupported", required=1)
