"""`kvferry.wire` against the table of messages, both ways. A mistake in either of them must show."""

import asyncio
import copy
import inspect
from collections.abc import Generator, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import plain_msgpack
import pytest
import torch
import wire_table

from kvferry import aio, limits, options, wire
from kvferry.admin import AdminClient
from kvferry.engine_client import EngineRequests
from kvferry.memory import Group, KvMemory, Place
from kvferry.served import Part
from kvferry.wire import Code, Kind

TABLE = wire_table.table()
BY_NAME = {kind["name"]: kind for kind in TABLE["kinds"]}
#: Roles that are played in Python.
ROLES = {"engine", "rank", "admin"}

#: Limits of the table, where Python names them.
LIMITS = {**limits.TABLE, "deadline_max_ms": options.DEADLINE_MS_MAX}
#: Limits of the table that Python does not name: `test_limits.py` has the reasons.
NOT_NAMED = {"byte_credits", "copies", "depth", "event_pages", "pairs", "request_credits", "small_body_bytes"}


def differences(table: dict[str, Any]) -> Iterator[str]:
    """Yields the differences between a table and `kvferry.wire`."""
    by_number = {kind["number"]: kind for kind in table["kinds"]}
    for kind in Kind:
        if kind not in by_number:
            yield f"kind {int(kind)}: kvferry.wire has {kind.name.lower()}, the table has no such number"
    for number, row in by_number.items():
        name, request = row["name"], row["answer"] is not None
        if request != wire.is_request(number):
            yield f"{name}: is_request of kvferry.wire says the other class"
        senders = set(row["said_by"])
        if row["stability"] != "public":
            continue
        if number not in Kind.__members__.values():
            yield f"{name}: kind {number} of the table is not in kvferry.wire"
            continue
        kind = Kind(number)
        if kind.name.lower() != name:
            yield f"{name}: kind {number} is {kind.name.lower()} in kvferry.wire"
        if request:
            answers = [each["number"] for each in table["kinds"] if each["name"] == row["answer"]]
            if answers != [number + 1]:
                yield f"{name}: its answer in the table is {answers}, clients wait for {number + 1}"
        sent, received = request and bool(senders & ROLES), not request and "server" in senders
        if number in (Kind.PING, Kind.PONG):
            # Both sides send them, without fields.
            pass
        elif sent != (kind in wire.KINDS.values()):
            yield f"{name}: sent by {sorted(senders)} in the table, {'no' if sent else 'a'} request of kvferry.wire"
        elif received != (kind in wire.BODIES):
            yield f"{name}: sent by {sorted(senders)} in the table, {'not ' * received}read by kvferry.wire"
        if kind in wire_table.BODIES:
            yield from wire_table.body_differences(name, row["body"], wire_table.BODIES[kind], sent=sent)
    codes = {error["number"]: error["name"] for error in table["errors"]}
    for number in sorted({*codes, *Code}):
        known = Code(number).name.lower() if number in Code.__members__.values() else None
        if codes.get(number) != known:
            yield f"error {number}: the table has {codes.get(number)}, kvferry.wire has {known}"
    for name in sorted({*LIMITS, *NOT_NAMED, *table["limits"]}):
        if name not in table["limits"] or name not in LIMITS.keys() | NOT_NAMED:
            yield f"limit {name}: decide in this test whether Python names it"
        elif name in LIMITS and LIMITS[name] != table["limits"][name]:
            yield f"limit {name}: {table['limits'][name]} in the table, {LIMITS[name]} in Python"
    if table["versions"]["newest"] != wire.VERSION or table["versions"]["oldest"] != wire.VERSION_MIN:
        yield f"versions: {table['versions']} in the table, {wire.VERSION_MIN} to {wire.VERSION} in kvferry.wire"


def test_python_has_the_kinds_fields_errors_and_limits_of_the_table() -> None:
    assert len(TABLE["kinds"]) > 40, "the table was not read"
    assert list(differences(TABLE)) == []


INTEGER = {"type": "integer", "format": "uint32"}

#: A registration as the program may publish it: kinds of handles are maps with one field each.
HANDLE = {
    "oneOf": [
        {
            "type": "object",
            "properties": {name: {"type": "string", "contentEncoding": "binary"}},
            "required": [name],
            "additionalProperties": False,
        }
        for name in ("ticket", "cuda_ipc")
    ]
}


def described() -> Any:
    """What a rank sends of its memory, read by the plain decoder."""
    group = Group({"layer": torch.zeros((4, 1, 8, 4))}, engine_page_tokens=8, device_pages=4)
    memory = KvMemory([group], Place(rank=0, tp_size=1, shard=0, content=b"content"))
    try:
        body = wire.Register(0, b"e" * 16, memory.describe([b"t" * 16], timeline=False))
        return plain_msgpack.read(wire.body_of(body))
    finally:
        memory.close()


def test_a_registration_is_as_the_table_says() -> None:
    schema = BY_NAME["register"]["body"]
    assert list(wire_table.misfits(wire_table.of_schema(schema, schema.get("$defs", {})), described())) == []


def test_a_handle_that_differs_from_its_schema_is_found() -> None:
    form = wire_table.of_schema(HANDLE, {})
    assert list(wire_table.misfits(form, [("ticket", b"t" * 16)])) == []
    for handle in ([("ticket", "t")], [("path", b"t")], [("ticket", b""), ("cuda_ipc", b"")], []):
        assert list(wire_table.misfits(form, handle)), handle


def test_pairs_are_lists_of_numbers_on_both_sides() -> None:
    pair = {"type": "array", "prefixItems": [INTEGER, INTEGER], "minItems": 2, "maxItems": 2}
    schema = wire_table.of_schema({"type": "array", "items": pair}, {})
    for python in (list[tuple[int, int]], list[list[int]]):
        assert wire_table.of_python(msgspec.inspect.type_info(python)) == schema
    assert wire_table.of_python(msgspec.inspect.type_info(list[int])) != schema


def _field(message: str, *path: str) -> Any:
    """A change of a field's schema: sets or removes the last of `path`."""

    def change(table: dict[str, Any], value: Any = None) -> None:
        node = next(kind for kind in table["kinds"] if kind["name"] == message)["body"]
        for key in path[:-1]:
            node = node[key]
        if value is None:
            del node[path[-1]]
        else:
            node[path[-1]] = value

    return change


#: Mistakes in a table, and the difference that they must show.
MISTAKES = [
    (_field("lookup", "properties", "hashes"), None, "lookup.hashes: kvferry.wire has bytes, the table has no such"),
    (_field("lookup", "properties", "new"), INTEGER, "lookup.new: the table has int, kvferry.wire has no such field"),
    (_field("lookup", "properties", "hashes"), INTEGER, "lookup.hashes: the table has int, kvferry.wire has bytes"),
    (_field("load", "$defs", "PartBody", "properties", "more"), INTEGER, "load.parts[].more: the table has int"),
    (_field("stores", "$defs", "Store", "properties", "more"), INTEGER, "stores.stores[].store.more: the table"),
    (_field("error", "properties", "over", "default"), True, "error.over: absent means True in the table, False"),
    (_field("error", "required"), ["code"], "error.message: optional in the table, required in kvferry.wire"),
    (_field("welcome", "required"), ["features"], "welcome.features: required in the table, optional in"),
    (
        _field("reset", "required"),
        ["tier"],
        "reset.tier: required in the table, left out by kvferry.wire where it is 0",
    ),
    (_field("lookup", "properties", "limit_pages"), INTEGER, "the table has int, kvferry.wire has int or null"),
    (_field("abandon", "properties", "requests"), {"type": "array", "items": {"type": "string"}}, "requests[]: the"),
    (
        _field("load", "$defs", "PageItemSchema"),
        INTEGER,
        "load.parts[].pages[]: the table has int, kvferry.wire has one",
    ),
]


@pytest.mark.parametrize(("change", "value", "shown"), MISTAKES)
def test_a_field_that_differs_is_named_with_both_sides(change: Any, value: Any, shown: str) -> None:
    table = copy.deepcopy(TABLE)
    change(table, value)
    assert any(shown in text for text in differences(table)), list(differences(table))


@pytest.mark.parametrize(
    ("name", "key", "value", "shown"),
    [
        ("lookup", "name", "find", "find: kind 16 is lookup in kvferry.wire"),
        ("lookup", "number", 98, "lookup: kind 98 of the table is not in kvferry.wire"),
        ("lookup", "answer", "load_answer", "lookup: its answer in the table is [19], clients wait for 17"),
        ("lookup", "answer", None, "lookup: is_request of kvferry.wire says the other class"),
        ("lookup", "said_by", ["worker"], "lookup: sent by ['worker'] in the table, a request of kvferry.wire"),
        ("lookup_answer", "said_by", ["engine"], "lookup_answer: sent by ['engine'] in the table, read by kvferry"),
        ("readiness", "stability", "public", "readiness: kind 58 of the table is not in kvferry.wire"),
    ],
)
def test_a_kind_that_differs_is_named(name: str, key: str, value: Any, shown: str) -> None:
    table = copy.deepcopy(TABLE)
    next(kind for kind in table["kinds"] if kind["name"] == name)[key] = value
    assert any(shown in text for text in differences(table)), list(differences(table))


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("errors", [], "error 1: the table has None, kvferry.wire has malformed"),
        ("limits", {**TABLE["limits"], "stores": 255}, "limit stores: 255 in the table, 256 in Python"),
        ("limits", {**TABLE["limits"], "new": 1}, "limit new: decide"),
        ("versions", {"newest": 3, "oldest": 1}, "versions: "),
        ("kinds", TABLE["kinds"][1:], "kind 1: kvferry.wire has hello, the table has no such number"),
    ],
)
def test_errors_limits_and_versions_that_differ_are_named(key: str, value: Any, shown: str) -> None:
    assert any(text.startswith(shown) for text in differences({**TABLE, key: value}))


class Sent:
    """Keeps the kinds of the requests that a client sends. For clients with a thread, and of an event loop."""

    def __init__(self) -> None:
        self.kinds: set[Kind] = set()

    def request(self, message: Any, timeout_s: float, **_: Any) -> Any:
        self.kinds.add(message.kind if hasattr(message, "kind") else wire.KINDS[type(message)])
        return Answered(expires=0.0, failure=None, wait=lambda *_: True, answer=SimpleNamespace(pages=0, before=""))


class Answered(SimpleNamespace):
    def __await__(self) -> Generator[Any, None, Any]:
        return self.answer
        yield


class SentByEngine(Sent, EngineRequests):
    pass


class SentByEngineInLoop(Sent, aio.EngineClient):
    pass


class SentByAdmin(Sent, AdminClient):
    pass


class SentByAdminInLoop(Sent, aio.AdminClient):
    pass


ARGUMENTS: dict[str, Any] = {
    "slot": 1,
    "hashes": [b"h" * 16],
    "parts": [Part(0, 0, [1])],
    "namespace": b"n",
    "filter_": "info",
    "resume": True,
    "timeout_s": 1.0,
}
#: Methods that are no requests.
OTHERS = {"close", "finds_tails"}


def sent_by(client: Any, source: type) -> Iterator[tuple[str, set[Kind]]]:
    """Calls every method of a client, and yields its name and the kinds that were sent."""
    for name, method in vars(source).items():
        if name.startswith("_") or name in OTHERS:
            continue
        client.kinds.clear()
        given = {key: ARGUMENTS[key] for key in inspect.signature(method).parameters if key in ARGUMENTS}
        answer = getattr(client, name)(**given)
        if inspect.iscoroutine(answer):
            asyncio.run(answer)
        yield name, set(client.kinds)


@pytest.mark.parametrize(
    ("role", "client", "source"),
    [
        ("engine", SentByEngine, EngineRequests),
        ("engine", SentByEngineInLoop, aio.EngineClient),
        ("admin", SentByAdmin, AdminClient),
        ("admin", SentByAdminInLoop, aio.AdminClient),
    ],
)
def test_each_client_sends_only_kinds_of_its_role(role: str, client: type, source: type) -> None:
    calls = dict(sent_by(client(), source))
    assert len(calls) == 7, calls
    for name, kinds in calls.items():
        assert len(kinds) == 1, f"{source.__name__}.{name} has sent {kinds}"
        for kind in kinds:
            assert role in BY_NAME[kind.name.lower()]["said_by"], f"{source.__name__}.{name} sends {kind.name}"


def test_every_request_of_python_is_one_of_a_role_of_python() -> None:
    for kind in wire.KINDS.values():
        assert ROLES & set(BY_NAME[kind.name.lower()]["said_by"]), f"no client of Python may send {kind.name}"
