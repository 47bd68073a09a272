"""Small builders of JSON schemas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["ANY", "BOOLEAN", "NULL", "STRING", "Schema", "array", "const", "either", "integer", "like", "number", "obj",
           "optional", "ref", "said"]  # fmt: skip

Schema = dict[str, Any]

ANY: Schema = {}
NULL: Schema = {"type": "null"}
BOOLEAN: Schema = {"type": "boolean"}
STRING: Schema = {"type": "string"}


def said(about: str, schema: Schema) -> Schema:
    """The schema with a description."""
    return {"description": about, **schema}


def _limited(kind: str, low: float | None, high: float | None) -> Schema:
    limits = {"minimum": low, "maximum": high}
    return {"type": kind, **{name: value for name, value in limits.items() if value is not None}}


def integer(low: int | None = None, high: int | None = None) -> Schema:
    return _limited("integer", low, high)


def number(low: float | None = None, high: float | None = None) -> Schema:
    return _limited("number", low, high)


def const(*values: str | float | bool | None) -> Schema:
    return {"const": values[0]} if len(values) == 1 else {"enum": list(values)}


def array(items: Schema, low: int | None = None, high: int | None = None) -> Schema:
    limits = {"minItems": low, "maxItems": high}
    return {"type": "array", "items": items, **{name: value for name, value in limits.items() if value is not None}}


def either(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def optional(schema: Schema) -> Schema:
    """The schema, or null: a field of a request that is null counts as absent."""
    if isinstance(schema.get("type"), str):
        return {**schema, "type": [schema["type"], "null"]}
    about = {"description": schema["description"]} if "description" in schema else {}
    inner = {name: value for name, value in schema.items() if name != "description"}
    return {**about, "anyOf": [*inner["anyOf"], NULL]} if list(inner) == ["anyOf"] else {**about, "anyOf": [inner, NULL]}


def obj(required: Mapping[str, Schema], others: Mapping[str, Schema] | None = None) -> Schema:
    """An object: the members that it has, and those that it may have."""
    found: Schema = {"type": "object", "properties": {**required, **(others or {})}}
    return {**found, "required": list(required)} if required else found


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def like(value: object) -> Schema:
    """The schema of values that have the form of this one."""
    if isinstance(value, Mapping):
        return obj({name: like(item) for name, item in value.items()})
    if isinstance(value, (list, tuple)):
        return array(like(value[0]) if value else ANY)
    for kind, schema in ((bool, BOOLEAN), (int, integer()), (float, number()), (str, STRING)):
        if isinstance(value, kind):
            return schema
    raise TypeError(f"no schema for {type(value).__name__}")
