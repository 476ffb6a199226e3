"""Every role sends every kind of message, well formed and in each wrong form, to a running leader and a running worker.

The rows come from ``schema/messages.json``, and the bodies from ``schema/golden``: a new kind is a new row. Each
request gets exactly one answer with the right code, each answer is dropped in silence, and what no message has closes
the connection. The counters that ``measure`` brings have as many errors and refused messages of each code.
"""

import contextlib
import json
import socket
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from daemon import PROGRAM, TIMEOUT_S, Daemon, environment, eventually, running
from raw_peer import MORE, Closed, RawPeer, Received, frame

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
FORBIDDEN = "error forbidden"
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


def wrong_types(name: str) -> Iterator[tuple[str, bytes]]:
    """The example with another type in each field; of an empty body, a list."""
    given = fields(name)
    if not given:
        yield "a list", b"\x90"
    for field in given:
        yield f"wrong type of {field}", msgspec.msgpack.encode({**given, field: [["no such type"]]})


def missing_fields(name: str) -> Iterator[tuple[str, bytes]]:
    """The example without each of its required fields."""
    given = fields(name)
    for field in BY_NAME[name]["body"].get("required", []):
        yield f"without {field}", msgspec.msgpack.encode({key: given[key] for key in given if key != field})


def too_deep(name: str) -> Iterator[tuple[str, bytes]]:
    """The example with an unknown field that is nested too deeply."""
    body = example(name)
    assert 0x80 <= body[0] < 0x8F, "a map with few fields"
    yield "too deep", bytes([body[0] + 1]) + body[1:] + TOO_DEEP


def trailing_bytes(name: str) -> Iterator[tuple[str, bytes]]:
    yield "trailing bytes", example(name) + b"\xc0"


#: Wrong forms of a body, and the answer to a request in that form.
WRONG = ((wrong_types, MALFORMED), (missing_fields, MALFORMED), (too_deep, LIMIT), (trailing_bytes, MALFORMED))


def wrong_forms(name: str) -> Iterator[tuple[str, bytes, str]]:
    """Every wrong form of a body: its name, the bytes, and the answer to a request."""
    for make, expected in WRONG:
        for form, body in make(name):
            yield form, body, expected


def code_of(outcome: str) -> str:
    return outcome.removeprefix("error ")


class Expected:
    """What a process must have counted since the begin, by code."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._before = measured(directory)
        #: Errors that were received.
        self.errors = Counter()
        #: Messages that were refused by their bytes, header, role or credits.
        self.refused = Counter()

    def received(self, outcome: str) -> None:
        self.errors.update(code_of(each) for each in outcome.split(", ") if each.startswith("error "))

    def check(self, row: str) -> None:
        after = measured(self._directory)
        for name, expected in (("errors", self.errors), ("refused_messages", self.refused)):
            before, counted = (numbers["connections"][name] for numbers in (self._before, after))
            grown = Counter({code: counted[code] - before[code] for code in counted})
            assert +grown == expected, f"{row}: {name} of {self._directory.name}"


def measured(directory: Path) -> dict[str, Any]:
    """The numbers of a leader or a worker."""
    with RawPeer.connect(directory) as peer:
        peer.hello("admin")
        answer = peer.ask(BY_NAME["measure"]["number"], b"\x80")
        assert outcome([answer]) == "measure_answer"
        return answer.body


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


def check_kind(side: Side, expected: Expected, name: str, is_request: bool, allowed: bool, role: str) -> None:
    """Sends one kind in every form."""
    number = BY_NAME[name]["number"]
    row = f"{role} sends {name}"

    def sends(form: str, body: bytes, answer: str, **header: int) -> None:
        found = side.replies(number, body, answered=answer != SILENCE, **header)
        assert found == answer, f"{row}, {form}: {found} instead of {answer}"
        expected.received(found)

    def refused(form: str, body: bytes, answer: str, **header: int) -> None:
        """The same of a message that is not carried out: an answer gets none, and is counted as well."""
        sends(form, body, answer if is_request else SILENCE, **header)
        expected.refused[code_of(answer)] += 1

    if not allowed:
        refused("as the example", example(name), FORBIDDEN)
        refused("with trailing bytes", example(name) + b"\xc0", FORBIDDEN)
        return
    if name == "hello":
        # A second hello on a connection.
        refused("as the example", example(name), "error invalid")
        return
    for form, body, answer in wrong_forms(name):
        refused(form, body, answer)
    if not is_request:
        sends("as the example", example(name), SILENCE)
        sends("of another epoch", example(name), SILENCE, epoch=side.epoch + 1)
        return
    answer = expected_answer(role, name)
    sends("as the example", example(name), answer)
    sends("with the shortest deadline", example(name), answer, deadline_ms=1)
    repeated = side.peer.send(number, example(name), epoch=side.epoch)
    first = outcome([side.peer.answer_to(repeated)])
    assert first == answer, f"{row}: {first}"
    expected.received(first)
    sends("under the same id again", example(name), answer, id=repeated)
    refused("with an unknown feature", example(name), "error unsupported", required=1)
    refused("in an unknown version", example(name), "error unsupported_version", version=9)


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
    peer.write(frame(MORE, head) + b"\x02" + (wire.BODY_BYTES_MAX + 1).to_bytes(8))
    assert ends(peer), f"{name} with a body of any length keeps its connection"


def check_unknown_kinds(side: Side, expected: Expected | None = None) -> None:
    found = [
        side.replies(UNKNOWN_REQUEST, b"\x80", answered=True),
        side.replies(UNKNOWN_REQUEST, b"no MessagePack", answered=True),
        side.replies(UNKNOWN_ANSWER, b"\x80", answered=False),
    ]
    assert found == [UNKNOWN_KIND, UNKNOWN_KIND, SILENCE]
    if expected is not None:
        expected.received(", ".join(found))
        expected.refused[code_of(UNKNOWN_KIND)] += len(found)


def check_server(directory: Path, role: str, receiver: str) -> None:
    """Everything that a client of this role sends."""
    for name, is_request, allowed in rows(role, receiver):
        expected = Expected(directory)
        with RawPeer.connect(directory) as peer:
            welcome = peer.hello(role, ENGINE)
            assert outcome([welcome]) == "welcome"
            side = Side(peer, welcome.epoch)
            check_kind(side, expected, name, is_request, allowed, role)
            check_unknown_kinds(side, expected)
            if name in FIRST_WORDS:
                long = b"\x81\xa1?\xc5\xff\xff" + bytes(0xFFFF)
                found = side.replies(BY_NAME[name]["number"], long, answered=is_request)
                assert found == (LIMIT if is_request else SILENCE), f"{name} with a long body: {found}"
                expected.received(found)
                expected.refused[code_of(LIMIT)] += 1
            check_too_long(peer, name)
            expected.refused[code_of(LIMIT)] += 1
        expected.check(f"{role} sends {name}")


def check_before_hello(directory: Path) -> None:
    """What a peer sends first, instead of its hello."""
    counted = Expected(directory)
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
            else:
                counted.refused["hello_first"] += 1
            assert found == expected, f"{name} before hello: {found}"
            counted.received(found)
    with RawPeer.connect(directory) as peer:
        hellos = [(form, peer.ask(wire.Kind.HELLO, body, version=1), code) for form, body, code in wrong_forms("hello")]
        hellos.append(("another role", peer.hello("astronaut"), "error invalid"))
        versions = peer.hello("engine", version_min=7, version_max=9)
        hellos.append(("later versions", versions, "error unsupported_version"))
        versions = peer.hello("engine", version_min=2, version_max=1)
        hellos.append(("the newest version first", versions, "error invalid"))
        for form, answer, code in hellos:
            assert outcome([answer]) == code, form
            counted.received(code)
            counted.refused[code_of(code)] += 1
    counted.check("before hello")


def check_byte_order(directory: Path) -> None:
    """A hello whose header is little-endian: the error names the byte order."""
    counted = Expected(directory)
    head = struct.pack("<4sHHQIHHQ", b"KVFY", wire.HELLO_VERSION, wire.Kind.HELLO, 7, 1000, 0, 0, 0)
    with RawPeer.connect(directory) as peer:
        peer.write(frame(MORE, head) + frame(0, example("hello")))
        answer = peer.receive()
        # The id is that of the request, in the order in which it came.
        assert (outcome([answer]), answer.id) == ("error hello_first", int.from_bytes((7).to_bytes(8, "little")))
        assert "version 256 and kind 256 have their bytes exchanged" in answer.body["message"]
        assert "big-endian" in answer.body["message"]
    counted.errors["hello_first"] += 1
    counted.refused["hello_first"] += 1
    counted.check("a header in another byte order")


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
            check_byte_order(directory)
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
            expected = Counter()
            for name, is_request, allowed in rows("server", "client"):
                check_order(side, expected, name, is_request, allowed)
            check_unknown_kinds(side)
            expected["unknown_kind"] += 2
            side.peer.close()
            # The worker connects again, and takes no order of the former epoch from its next leader.
            side = leader.accept(epoch + 1)
            for name in ("transfer", "cancel", "invalidate", "read_inventory", "flush_tier"):
                found = side.replies(BY_NAME[name]["number"], example(name), answered=True, epoch=epoch)
                assert found == "error stale_epoch", f"{name} of the former epoch: {found}"
                expected["stale_epoch"] += 1
            counted = measured(leader.socket_dir / "worker-0-0")["refused_orders"]
            assert +Counter(counted) == expected
            side.peer.close()
            assert worker.poll() is None, "the worker has ended"
        finally:
            worker.kill()
            worker.wait(TIMEOUT_S)


def check_order(side: Side, expected: Counter, name: str, is_request: bool, allowed: bool) -> None:
    number = BY_NAME[name]["number"]

    def sends(form: str, body: bytes, answer: str, **header: int) -> None:
        found = side.replies(number, body, answered=answer != SILENCE, **header)
        assert found == answer, f"a leader sends {name}, {form}: {found} instead of {answer}"
        if found.startswith("error "):
            expected[code_of(found)] += 1

    if not is_request:
        # An answer to no request is dropped unread.
        sends("as the example", example(name), SILENCE)
        sends("with trailing bytes", example(name) + b"\xc0", SILENCE)
        return
    if not allowed:
        sends("as the example", example(name), UNKNOWN_KIND)
        sends("with trailing bytes", example(name) + b"\xc0", UNKNOWN_KIND)
        return
    answer = ORDERS.get(name, BY_NAME[name]["answer"])
    if name != "ping":
        for form, body, wrong in wrong_forms(name):
            sends(form, body, wrong)
    sends("as the example", example(name), answer)
    repeated = side.peer.send(number, example(name), epoch=side.epoch)
    first = outcome([side.peer.answer_to(repeated)])
    assert first == answer, f"{name}: {first}"
    if first.startswith("error "):
        expected[code_of(first)] += 1
    sends("under the same id again", example(name), answer, id=repeated)
    if name != "ping":
        sends("in an unknown version", example(name), "error unsupported_version", version=9)
        sends("with an unknown feature", example(name), "error unsupported", required=1)
