"""Whether two schemas exclude each other: where all parts of `oneOf` do, it is `anyOf`, which can be enforced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["exclusion"]

_KINDS = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


def exclusion(a: Any, b: Any, depth: int = 8) -> str | None:
    """How no value fits both schemas.

    Returns
    -------
    str or None
        Empty: none does, as they are. A name: none does once both require that property. None: some may, as far as
        types, fixed values and properties tell, `depth` levels down.
    """
    if a is False or b is False:
        return ""
    if not isinstance(a, Mapping) or not isinstance(b, Mapping):
        return None
    kinds = [_kinds(schema) for schema in (a, b)]
    if kinds[0] and kinds[1] and not kinds[0] & kinds[1]:
        return ""
    if _apart(a, b):
        return ""
    if kinds[0] is not None and kinds[1] is not None and kinds[0] & kinds[1] == {"object"}:
        first, second = (schema.get("properties", {}) for schema in (a, b))
        if isinstance(first, Mapping) and isinstance(second, Mapping) and depth:
            for name in first:
                if name in second and exclusion(first[name], second[name], depth - 1) == "":
                    return "" if any(name in _required(schema) for schema in (a, b)) else name
            if any(name not in known for known in _closed(b) for name in _required(a)):
                return ""
            if any(name not in known for known in _closed(a) for name in _required(b)):
                return ""
    return None


def _closed(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The properties of an object that can have no others; nothing for one that can."""
    is_closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    return [schema.get("properties", {})] if is_closed else []


def _required(schema: Mapping[str, Any]) -> list[Any]:
    required = schema.get("required", [])
    return required if isinstance(required, list) else []


def _kinds(schema: Mapping[str, Any]) -> set[str] | None:
    """The types that a value can have, whole numbers as numbers; None where they are not told."""
    kinds = schema.get("type")
    if isinstance(kinds, str):
        kinds = [kinds]
    if not isinstance(kinds, list):
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if not isinstance(values, list):
            return None
        kinds = [_KINDS.get(type(value), "object") for value in values]
    return {"number" if kind == "integer" else str(kind) for kind in kinds}


def _fixed(schema: Any) -> set[tuple[type, Any]] | None:
    """The values that are listed for it; None where there is no such list, or numbers with a point or nested values in it."""
    if not isinstance(schema, Mapping):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or not all(value is None or isinstance(value, (str, bool, int)) for value in values):
        return None
    return {(type(value), value) for value in values}


def _apart(a: Any, b: Any) -> bool:
    values = _fixed(a), _fixed(b)
    return values[0] is not None and values[1] is not None and not values[0] & values[1]
