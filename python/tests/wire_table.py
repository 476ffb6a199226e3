"""Compares `kvferry.wire` with the table of messages, `schema/messages.json`, field by field.

A difference is one line: the message, the field, and what each side has.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect

from kvferry import wire
from kvferry.wire import Kind

SCHEMA = Path(__file__).parents[2] / "schema"

#: The body of every kind that `kvferry.wire` knows.
BODIES: dict[int, type[msgspec.Struct]] = {
    **wire.BODIES,
    **{kind: body for body, kind in wire.KINDS.items()},
    Kind.PING: wire.Empty,
    Kind.PONG: wire.Empty,
}
#: Fields that hold an encoded body.
ENCODED = {(wire.NumberedStore, "store"): wire.Store}
#: Fields that Python fills without a type of its own: a test compares what is sent with the table.
UNTYPED = {"register.registration"}
#: Values of fields that are absent, where the table names none.
ZEROS = {"int": 0, "bool": False, "str": "", "bytes": b"", "list": [], "dict": {}}


class Form(NamedTuple):
    """A type: its name, those of its parts, its fields, and whether `None` is a value."""

    name: str
    of: tuple["Form", ...] = ()
    fields: dict[str, "Field"] | None = None
    optional: bool = False

    def __str__(self) -> str:
        inner = f" of {' or '.join(map(str, self.of))}" if self.of else ""
        return self.name + inner + (" or null" if self.optional else "")


class Field(NamedTuple):
    form: Form
    required: bool
    default: Any
    #: Left out of a message where it has its default.
    omitted: bool = False


def table() -> dict[str, Any]:
    return json.loads((SCHEMA / "messages.json").read_text())


def of_schema(node: dict[str, Any], definitions: dict[str, Any]) -> Form:
    """Reads a JSON Schema as the program publishes it."""
    if "$ref" in node:
        return of_schema(definitions[node["$ref"].rpartition("/")[2]], definitions)
    kinds = node.get("type")
    if node.get("contentEncoding") == "binary":
        return Form("bytes", optional=isinstance(kinds, list))
    if isinstance(kinds, list):
        (kind,) = [kind for kind in kinds if kind != "null"]
        return of_schema({**node, "type": kind}, definitions)._replace(optional="null" in kinds)
    if (choices := node.get("anyOf") or node.get("oneOf")) is not None:
        # The last choice of an enumeration is a word of a later version, which this one sends nowhere.
        known = [choice for choice in choices if choice.get("type") not in ("null", ["string", "object"])]
        optional = any(choice.get("type") == "null" for choice in choices)
        return _union([of_schema(choice, definitions) for choice in known], optional=optional)
    match kinds:
        case None:
            assert not {"properties", "items", "const"} & set(node), f"a schema of an unknown form: {node}"
            return Form("anything")
        case "integer" | "boolean" | "string":
            return Form({"integer": "int", "boolean": "bool", "string": "str"}[kinds])
        case "array" if "prefixItems" in node:
            return Form("list", (_union([of_schema(item, definitions) for item in node["prefixItems"]]),))
        case "array":
            return Form("list", (of_schema(node["items"], definitions),))
        case "object" if node.get("additionalProperties"):
            return Form("dict", (of_schema(node["additionalProperties"], definitions),))
        case "object":
            required = node.get("required", [])
            fields = {
                name: Field(
                    of_schema(field, definitions),
                    name in required,
                    _default(field.get("default", ...)),
                )
                for name, field in node.get("properties", {}).items()
            }
            return Form("map", fields=fields)
    raise AssertionError(f"a schema of an unknown form: {node}")


def _default(written: Any) -> Any:
    """A default; that of a binary field is written as in the JSON of golden vectors."""
    return bytes.fromhex(written["bin"]) if isinstance(written, dict) and "bin" in written else written


def of_python(found: inspect.Type) -> Form:
    """Reads a type of `kvferry.wire`."""
    match found:
        case inspect.IntType() | inspect.BoolType() | inspect.StrType() | inspect.BytesType():
            return Form(type(found).__name__.removesuffix("Type").lower())
        case inspect.ListType():
            return Form("list", (of_python(found.item_type),))
        case inspect.TupleType():
            return Form("list", (_union([of_python(item) for item in found.item_types]),))
        case inspect.DictType(value_type=inspect.AnyType()) | inspect.AnyType():
            return Form("anything")
        case inspect.DictType():
            return Form("dict", (of_python(found.value_type),))
        case inspect.UnionType():
            types = [each for each in found.types if not isinstance(each, inspect.NoneType)]
            # A word with content is of a later version, as in the schema.
            words = any(isinstance(each, inspect.StrType) for each in types)
            forms = [of_python(each) for each in types if not (words and isinstance(each, inspect.DictType))]
            return _union(forms, optional=found.includes_none)
        case inspect.StructType():
            omits = found.cls.__struct_config__.omit_defaults
            return Form("map", fields={field.encode_name: _field(found, field, omits) for field in found.fields})
    raise AssertionError(f"a type of an unknown form: {found}")


def _field(struct: inspect.StructType, field: inspect.Field, omits: bool) -> Field:
    encoded = ENCODED.get((struct.cls, field.name))
    form = of_python(inspect.type_info(encoded) if encoded is not None else field.type)
    default = field.default_factory() if field.default_factory is not inspect.NODEFAULT else field.default
    return Field(form, field.required, default, omits and not field.required)


def _union(forms: list[Form], *, optional: bool = False) -> Form:
    """A value of one of several forms; equal ones count once."""
    distinct = [form for number, form in enumerate(forms) if form not in forms[:number]]
    if len(distinct) == 1:
        return distinct[0]._replace(optional=optional or distinct[0].optional)
    return Form("one", tuple(sorted(distinct, key=str)), optional=optional)


def body_differences(name: str, schema: dict[str, Any], body: type[msgspec.Struct], *, sent: bool) -> Iterator[str]:
    """Yields the differences of one body. `sent`: Python encodes it; otherwise it reads it."""
    yield from _differences(name, of_schema(schema, schema.get("$defs", {})), of_python(inspect.type_info(body)), sent)


def _differences(where: str, schema: Form, python: Form, sent: bool) -> Iterator[str]:
    if where in UNTYPED and schema.fields is not None and python == Form("anything"):
        return
    if schema.fields is not None and python.fields is not None and schema.optional == python.optional:
        yield from _field_differences(where, schema.fields, python.fields, sent)
    elif python.name == "dict" and schema.fields is not None:
        # Numbers by name.
        for name, field in schema.fields.items():
            yield from _differences(f"{where}.{name}", field.form, python.of[0], sent)
    elif (schema.name, schema.optional, len(schema.of)) != (python.name, python.optional, len(python.of)):
        yield f"{where}: the table has {schema}, kvferry.wire has {python}"
    else:
        for one, other in zip(schema.of, python.of, strict=True):
            yield from _differences(f"{where}[]", one, other, sent)


def _field_differences(where: str, schema: dict[str, Field], python: dict[str, Field], sent: bool) -> Iterator[str]:
    for name in sorted({*schema, *python}):
        at = f"{where}.{name}"
        if name not in python:
            yield f"{at}: the table has {schema[name].form}, kvferry.wire has no such field"
        elif name not in schema:
            yield f"{at}: kvferry.wire has {python[name].form}, the table has no such field"
        else:
            one, other = schema[name], python[name]
            yield from _differences(at, one.form, other.form, sent)
            if sent and one.required and other.omitted:
                yield f"{at}: required in the table, left out by kvferry.wire where it is {other.default!r}"
            elif not sent and one.required != other.required:
                sides = ["optional", "required"]
                yield f"{at}: {sides[one.required]} in the table, {sides[other.required]} in kvferry.wire"
            if not one.required and not other.required:
                absent = _absent(one)
                if absent is not ... and absent != other.default:
                    yield f"{at}: absent means {absent!r} in the table, {other.default!r} in kvferry.wire"


def _absent(field: Field) -> Any:
    """The value of an absent field; `...` if the two sides state it in forms that cannot be compared."""
    form, default = field.form, field.default
    if form.optional and default in (..., None):
        return None
    if default is ...:
        return ZEROS.get(form.name, ...)
    if form.fields is not None:
        return ...
    return bytes(default) if form.name == "bytes" else default


def misfits(form: Form, value: Any, where: str = "body") -> Iterator[str]:
    """Yields the places at which a value of the plain decoder has another type than the table."""
    match form.name:
        case _ if value is None and form.optional:
            return
        case "anything":
            return
        case "one":
            if all(list(misfits(each, value, where)) for each in form.of):
                yield f"{where}: {value!r} is none of {form}"
        case "map":
            pairs = dict(value)
            assert form.fields is not None
            yield from (
                f"{where}.{name} is missing"
                for name, field in form.fields.items()
                if field.required and name not in pairs
            )
            for name, each in pairs.items():
                if name not in form.fields:
                    yield f"{where}.{name} is not in the table"
                else:
                    yield from misfits(form.fields[name].form, each, f"{where}.{name}")
        case "dict":
            for name, each in value:
                yield from misfits(form.of[0], each, f"{where}.{name}")
        case "list" if isinstance(value, list):
            for number, each in enumerate(value):
                yield from misfits(form.of[0], each, f"{where}[{number}]")
        case name:
            if type(value).__name__ != name:
                yield f"{where}: {value!r} is no {name}"
