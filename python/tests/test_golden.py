"""The golden vectors, `schema/golden`, by Python alone: `kvferry.wire`, and a decoder that shares no code with it."""

import json
import struct
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import plain_msgpack
import pytest
import wire_table
from msgspec import inspect
from wire_table import BODIES, SCHEMA, Form

from kvferry import wire
from kvferry.wire import Kind

TABLE = wire_table.table()
ROWS = {kind["number"]: kind for kind in TABLE["kinds"]}
VERSIONS = range(TABLE["versions"]["oldest"], TABLE["versions"]["newest"] + 1)


class Vector(NamedTuple):
    version: int
    name: str
    header: bytes
    body: bytes

    @property
    def kind(self) -> int:
        return int.from_bytes(self.header[6:8], "big")


def read(path: Path, version: int) -> Vector:
    header, body = (bytes.fromhex(line) for line in path.read_text().splitlines())
    return Vector(version, path.stem, header, body)


VECTORS = [
    read(path, version) for version in VERSIONS for path in sorted((SCHEMA / "golden" / f"v{version}").glob("*.hex"))
]
KNOWN = [vector for vector in VECTORS if vector.kind in BODIES]


def named(vector: Vector) -> str:
    return f"v{vector.version}-{vector.name}"


def items(value: Any) -> Any:
    """A value of msgspec in the form of the plain decoder: maps as lists of pairs."""
    match value:
        case dict():
            return [(key, items(each)) for key, each in value.items()]
        case list():
            return [items(each) for each in value]
    return value


def test_every_kind_has_a_vector_in_every_version() -> None:
    for version in VERSIONS:
        assert {vector.kind for vector in VECTORS if vector.version == version} == set(ROWS)


@pytest.mark.parametrize("vector", VECTORS, ids=named)
def test_a_vector_is_read_and_its_bytes_are_written_again(vector: Vector) -> None:
    envelope = wire.read([vector.header, vector.body])
    assert (envelope.kind, envelope.correlation, envelope.epoch, envelope.required) == (vector.kind, 0x01020304, 7, 0)
    version = wire.HELLO_VERSION if vector.kind in (Kind.HELLO, Kind.WELCOME) else vector.version
    deadline_ms = 2000 if wire.is_request(vector.kind) else 0
    assert wire.header(version, vector.kind, 0x01020304, deadline_ms, 7) == vector.header
    generic = msgspec.msgpack.decode(vector.body)
    assert wire._encode(generic) == vector.body, "numbers, texts and lengths have their shortest forms"
    assert items(generic) == plain_msgpack.read(vector.body)


def ordered(value: Any) -> Any:
    """A value of the plain decoder, or of the JSON beside a vector, with the fields of maps in one order."""
    match value:
        case {"bin": str(text), **others} if not others:
            return bytes.fromhex(text)
        case dict():
            return sorted((key, ordered(each)) for key, each in value.items())
        case list() if value and all(isinstance(each, tuple) for each in value):
            return sorted((key, ordered(each)) for key, each in value)
        case list():
            return [ordered(each) for each in value]
    return value


@pytest.mark.parametrize("vector", VECTORS, ids=named)
def test_a_vector_says_what_the_json_beside_it_says(vector: Vector) -> None:
    said = json.loads((SCHEMA / "golden" / f"v{vector.version}" / f"{vector.name}.json").read_text())
    assert ordered(plain_msgpack.read(vector.body)) == ordered(said["body"])
    _, version, kind, identity, deadline_ms, _, _, epoch = struct.unpack(">4sHHQIHHQ", vector.header)
    header = {"version": version, "kind": kind, "id": identity, "deadline_ms": deadline_ms, "epoch": epoch}
    assert {key: value for key, value in said["header"].items() if key in header} == header
    assert not {key: value for key, value in said["header"].items() if key not in header and value}


def test_every_json_has_a_vector() -> None:
    twins = {(path.parent.name, path.stem) for path in (SCHEMA / "golden").glob("v*/*.json")}
    assert twins == {(f"v{vector.version}", vector.name) for vector in VECTORS}


@pytest.mark.parametrize("vector", VECTORS, ids=named)
def test_the_plain_decoder_reads_what_the_table_says(vector: Vector) -> None:
    schema = ROWS[vector.kind]["body"]
    found = list(
        wire_table.misfits(wire_table.of_schema(schema, schema.get("$defs", {})), plain_msgpack.read(vector.body))
    )
    assert found == []


def test_a_value_of_another_type_is_found() -> None:
    schema = ROWS[Kind.LOAD]["body"]
    form = wire_table.of_schema(schema, schema["$defs"])
    part = [("first_page", 0), ("pages", [1, [3, 2]]), ("count", 3)]
    good = [("slot", 1), ("parts", [part])]
    assert list(wire_table.misfits(form, good)) == []
    for bad in (
        [("slot", 1)],
        [("slot", b"1"), ("parts", [])],
        [*good, ("more", 1)],
        [("slot", 1), ("parts", [[("first_page", 0), ("pages", ["1"]), ("count", 1)]])],
        [("slot", 1), ("parts", [[("first_page", 0), ("pages", [1])]])],
        [("slot", 1), ("parts", [[("first_page", None), ("pages", []), ("count", 0)]])],
    ):
        assert list(wire_table.misfits(form, bad)), bad


def stated(form: Form, value: Any) -> Any:
    """A value without fields that have their defaults, and with the others in the order of their names.

    The order of fields has no meaning, and an absent field has its default.
    """
    if form.fields is not None and value is not None:
        kept = [
            (name, stated(form.fields[name].form, each))
            for name, each in value
            if form.fields[name].required or each != items(form.fields[name].default)
        ]
        return sorted(kept)
    if form.name == "dict":
        return [(name, stated(form.of[0], each)) for name, each in value]
    if form.name == "list" and form.of[0].name != "one":
        return [stated(form.of[0], each) for each in value]
    return value


@pytest.mark.parametrize("vector", KNOWN, ids=named)
def test_the_body_of_a_vector_is_read_into_its_type_and_written_again(vector: Vector) -> None:
    kind = BODIES[vector.kind]
    body = msgspec.msgpack.decode(vector.body, type=kind)
    if vector.kind in wire.BODIES:
        assert wire.read([vector.header, vector.body]).body == body
    written = wire.body_of(body)
    before, after = plain_msgpack.read(vector.body), plain_msgpack.read(written)
    form = wire_table.of_python(inspect.type_info(kind))
    assert stated(form, after) == stated(form, before)
    if after == before:
        assert written == vector.body, "the same fields in the same order"


def test_most_vectors_are_written_with_the_same_bytes() -> None:
    """Others differ in the order of fields, and in fields with defaults that only one side writes."""
    same = [
        vector
        for vector in KNOWN
        if wire.body_of(msgspec.msgpack.decode(vector.body, type=BODIES[vector.kind])) == vector.body
    ]
    assert len(same) > len(KNOWN) / 2


@pytest.mark.parametrize("vector", KNOWN, ids=named)
def test_a_body_that_is_cut_is_not_read(vector: Vector) -> None:
    for length in range(len(vector.body)):
        with pytest.raises((msgspec.DecodeError, msgspec.ValidationError)):
            msgspec.msgpack.decode(vector.body[:length], type=BODIES[vector.kind])
        if vector.kind in wire.BODIES:
            with pytest.raises(wire.Malformed):
                wire.read([vector.header, vector.body[:length]])


def pages(list_of_pages: list[Any]) -> list[int]:
    """The pages of a list, each run counted out."""
    found: list[int] = []
    for item in list_of_pages:
        start, count = item if isinstance(item, list) else (item, 1)
        found += range(start, start + count)
    return found


def is_map(value: Any) -> bool:
    """The plain decoder returns a map as a list of its keys and values."""
    return isinstance(value, list) and any(isinstance(each, tuple) for each in value)


def page_by_page(value: Any, name: str = "") -> Any:
    """A value of the plain decoder in which the lists of pages of both versions have one form."""
    if name == "pages" and isinstance(value, list) and not any(is_map(each) for each in [value, *value]):
        return pages(value)
    if name == "pairs":
        both = [(source, target) if isinstance(source, list) else ([source], [target]) for source, target in value]
        return [pair for source, target in both for pair in zip(pages(source), pages(target), strict=True)]
    if isinstance(value, list):
        return [
            (each[0], page_by_page(each[1], each[0])) if isinstance(each, tuple) else page_by_page(each)
            for each in value
        ]
    return value


def test_versions_differ_only_in_the_form_of_lists_of_pages() -> None:
    old, new = ({vector.name: vector for vector in VECTORS if vector.version == version} for version in VERSIONS)
    differ = {name for name in old if old[name].body != new[name].body}
    assert {"load", "transfer"} <= differ
    for name in old.keys() | new.keys():
        before, after = (plain_msgpack.read(vectors[name].body) for vectors in (old, new))
        assert page_by_page(before) == page_by_page(after), name


def test_lists_of_pages_are_written_in_the_form_of_version_2() -> None:
    lists = 0
    for old, new in zip(*([each for each in KNOWN if each.version == version] for version in VERSIONS), strict=True):
        if new.kind in (Kind.LOAD, Kind.STORE):
            parts = [msgspec.msgpack.decode(each.body, type=BODIES[new.kind]).parts for each in (old, new)]
            for before, after in zip(*parts, strict=True):
                lists += 1
                assert wire.runs(before.pages) == after.pages
    assert lists >= 3


@pytest.mark.parametrize("vector", [each for each in KNOWN if each.version == 2], ids=named)
def test_version_1_is_written_from_version_2(vector: Vector) -> None:
    """`kvferry.wire` builds messages of version 2; the vector of version 1 has their pages one by one."""
    (old,) = [each for each in KNOWN if (each.version, each.name) == (1, vector.name)]
    if vector.kind in (Kind.LOAD, Kind.STORE):
        assert wire.one_by_one(vector.body) == old.body
    elif vector.kind != Kind.STORES:
        assert vector.body == old.body
