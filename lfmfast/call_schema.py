"""Values of tool calls brought to what a tool's JSON schema asks for, where nothing is lost by it.

- integer: ``"3"``, ``3.0`` and ``"3.0"`` are 3; number: ``"2.5"`` is 2.5;
- boolean: ``"true"`` and ``"False"`` in any case are true and false;
- null: ``"null"`` and ``"None"``, where the schema takes no string;
- string: a number is the text that was written, ``02134`` is ``"02134"``; so is a word without quotes;
- array, object: a string that holds one, as JSON or Python writes it;
- enum and const: a text that differs only in case from one of the values, and only from one;
- anyOf, oneOf, lists of types: a value that fits a branch stays; otherwise the first branch that it can be brought to.

A value that fits nothing stays as it is: checking arguments is up to the caller. None stays null even where the schema
has no null.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from lfmfast.call_text import CONSTANTS, Unreadable
from lfmfast.call_values import MAX_DEPTH, Bare, Number, Value, json_text, read_value, scalar

__all__ = ["Schema"]

_MAX_STEPS = 100_000  # schemas and listed values looked at for one argument
_MAX_HOPS = 32  # references that lead to references
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")


class _Endless(Exception):
    """There is too much to look at."""


class Schema:
    """JSON schema of a tool's parameters.

    Parameters
    ----------
    root
        The schema; anything but a mapping says nothing about any value.
    """

    def __init__(self, root: Any) -> None:
        self._root = root if isinstance(root, Mapping) else {}
        self._steps = 0
        top = self._resolved(self._root)
        properties = top.get("properties")
        self.properties: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
        """Schemas of the named arguments, in their order."""
        self._others = top.get("additionalProperties")

    def argument(self, name: str, value: Value) -> Value:
        """The value of the argument, as its schema asks for; as it is, if that takes too long to say."""
        self._steps = 0
        try:
            return self._brought(value, self.properties.get(name, self._others), 0)
        except _Endless:
            return value

    def fits(self, name: str, value: Value) -> bool:
        """Whether the value has a type that the argument may have."""
        self._steps = 0
        try:
            return self._fits(value, self.properties.get(name, self._others))
        except _Endless:
            return False

    def _resolved(self, schema: Any) -> Mapping[str, Any]:
        """The schema that local references lead to; an empty one for what isn't a schema, or lies elsewhere."""
        for _ in range(_MAX_HOPS):
            if not isinstance(schema, Mapping):
                return {}
            reference = schema.get("$ref")
            if not isinstance(reference, str):
                self._steps += 1 + len(_list(schema.get("enum")))
                return schema
            schema = self._at(reference)
        return {}

    def _at(self, reference: str) -> Any:
        if not reference.startswith("#"):
            return None
        found: Any = self._root
        for part in reference[1:].split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping):
                found = found.get(key)
            elif isinstance(found, (list, tuple)) and key.isdecimal() and len(key) < 5 and int(key) < len(found):
                found = found[int(key)]
            else:
                return None
        return found

    def _fits(self, value: Value, schema: Any) -> bool:
        schema = self._resolved(schema)
        if self._steps > _MAX_STEPS:
            raise _Endless
        branches = _branches(schema)
        if not (_has_type(value, _types(schema)) and _is_listed(value, schema)):
            return False
        if branches and not any(self._fits(value, branch) for branch in branches):
            return False
        required, properties = schema.get("required"), schema.get("properties")
        if not isinstance(value, dict):
            return True
        if isinstance(required, (list, tuple)) and not all(key in value for key in required if isinstance(key, str)):
            return False
        properties = properties if isinstance(properties, Mapping) else {}
        return all(_is_listed(value[key], self._resolved(properties[key])) for key in value if key in properties)

    def _brought(self, value: Value, schema: Any, depth: int) -> Value:
        """The value as the schema asks for, or as it is."""
        schema = self._resolved(schema)
        if self._steps > _MAX_STEPS:
            raise _Endless
        if depth > MAX_DEPTH:
            return value
        value = _listed(value, schema)
        types = _types(schema)
        if not _has_type(value, types):
            value = _converted(value, types)
        branches = _branches(schema)
        fitting = next((branch for branch in branches if self._fits(value, branch)), None)
        for branch in branches if fitting is None else [fitting]:
            brought = self._brought(value, branch, depth + 1)
            if self._fits(brought, branch):
                value = brought
                break
        for part in _list(schema.get("allOf")):
            value = self._brought(value, part, depth + 1)
        return self._items(value, schema, depth)

    def _items(self, value: Value, schema: Mapping[str, Any], depth: int) -> Value:
        if isinstance(value, list):
            first = _list(schema.get("prefixItems"))
            rest = schema.get("items")
            return [self._brought(v, first[i] if i < len(first) else rest, depth + 1) for i, v in enumerate(value)]
        if isinstance(value, dict):
            properties = schema.get("properties")
            properties = properties if isinstance(properties, Mapping) else {}
            others = schema.get("additionalProperties")
            return {key: self._brought(item, properties.get(key, others), depth + 1) for key, item in value.items()}
        return value


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else []


def _branches(schema: Mapping[str, Any]) -> list[Any]:
    return _list(schema.get("anyOf")) or _list(schema.get("oneOf"))


def _types(schema: Mapping[str, Any]) -> list[str]:
    """Types that the schema names; empty if any will do."""
    types = schema.get("type")
    if isinstance(types, str):
        types = [types]
    elif not types and "properties" in schema:
        types = ["object"]
    return [name for name in _list(types) if name in _TYPES]


def _type(value: Value) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, Number):
        return "integer" if re.fullmatch(r"-?\d+", value.text) else "number"
    return "object" if isinstance(value, dict) else "array" if isinstance(value, list) else "string"


def _has_type(value: Value, types: list[str]) -> bool:
    if isinstance(value, Bare):
        return False
    kind = _type(value)
    return not types or kind in types or (kind == "integer" and "number" in types)


def _listed_values(schema: Mapping[str, Any]) -> list[Any] | None:
    """Values of enum or const, as they stand in the schema; None if the schema has neither."""
    if "const" in schema:
        return [schema["const"]]
    return _list(schema["enum"]) if "enum" in schema else None


def _is_listed(value: Value, schema: Mapping[str, Any]) -> bool:
    listed = _listed_values(schema)
    return listed is None or _same(value) in [_given(item) for item in listed]


def _same(value: Value) -> str:
    """A text that equal values share."""
    try:
        return _given(json.loads(json_text(value)))
    except Unreadable:
        return ""


def _given(item: Any) -> str:
    try:
        return json.dumps(int(item) if isinstance(item, float) and item.is_integer() else item, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        return ""


def _listed(value: Value, schema: Mapping[str, Any]) -> Value:
    """The one listed value that a text, a number or a constant stands for."""
    listed = _listed_values(schema)
    if listed is None or isinstance(value, (list, dict)) or _is_listed(value, schema):
        return value
    text = value.written if isinstance(value, Number) else value if isinstance(value, str) else json_text(value)
    texts = [item if isinstance(item, str) else _given(item) for item in listed if isinstance(item, (str, int, float))]
    found = {item for item in texts if item == text} or {item for item in texts if item.casefold() == text.casefold()}
    if len(found) != 1:
        return value
    name = found.pop()
    return name if name in [item for item in listed if isinstance(item, str)] else scalar(name)


def _converted(value: Value, types: list[str]) -> Value:
    """The value in the first of the types that it can have."""
    for name in types:
        found = _as(value, name)
        if found is not value:
            return found
    return value


def _as(value: Value, name: str) -> Value:
    """The value in the type, or the same object."""
    if name == "string":
        is_word = isinstance(value, Bare) and any(c.isalnum() for c in value)
        return value.written if isinstance(value, Number) else str(value) if is_word else value
    if name in ("integer", "number"):
        number = scalar(value.strip()) if isinstance(value, str) else value
        if not isinstance(number, Number):
            return value
        return (_integer(number) or value) if name == "integer" else number
    if not isinstance(value, str):
        return value
    if name in ("boolean", "null"):
        constants = [v for k, v in CONSTANTS.items() if k.casefold() == value.strip().casefold()]
        return constants[0] if constants and (constants[0] is None) == (name == "null") else value
    if value.strip()[:1] not in (("[", "(") if name == "array" else ("{",)):
        return value
    try:
        held = read_value(value)
    except Unreadable:
        return value
    return held if _type(held) == name else value


def _integer(number: Number) -> Number | None:
    """The number as an integer, if it is one that is exact as a float too."""
    if _type(number) == "integer":
        return number
    exact = float(number.text)
    return Number(str(int(exact)), number.written) if exact.is_integer() and abs(exact) < 2**53 else None
