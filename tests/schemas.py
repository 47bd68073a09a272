"""Random JSON schemas, of the keywords that are enforced and a few that can't always be."""

from __future__ import annotations

from random import Random
from typing import Any

_NAMES = ("a", "b", "c", "kind", "x y", 'q"q', "é")
_VALUES = ("x", 'y"z', 1, 2.5, None, True, [1, "a"], {"a": 1}, "\n", -3)
_PATTERNS = ("^[a-z]+$", "a|b", "^x", r"\d{2,3}$", r"^(foo|bar)-\w*$", r"[^\s]", "^.$", r"\S\s\S", r"^[\d\-./]+$")
_FORMATS = ("date", "date-time", "email", "uuid", "ipv4", "ipv6", "uri", "hostname", "duration")


def random_schema(rng: Random) -> dict[str, Any]:
    """An object schema with definitions that refer to themselves."""
    following = {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}
    node = {"type": "object", "properties": {"next": following, "v": _schema(rng, 1)}}
    schema = _schema(rng, 3)
    return {**(schema if isinstance(schema, dict) else {}), "$defs": {"n": node}}


def _some(rng: Random, keywords: dict[str, Any], share: float = 0.5) -> dict[str, Any]:
    return {key: value for key, value in keywords.items() if rng.random() < share}


def _schema(rng: Random, depth: int) -> Any:
    draw = rng.random()
    if depth <= 0 or draw < 0.35:
        return _scalar(rng)
    if draw < 0.5:
        return {"type": "array", **_some(rng, {
            "items": _schema(rng, depth - 1), "minItems": rng.randint(0, 2), "maxItems": rng.randint(2, 4),
            "prefixItems": [_schema(rng, depth - 1) for _ in range(rng.randint(1, 2))]}, 0.6)}  # fmt: skip
    if draw < 0.85:
        return _object(rng, depth)
    if draw < 0.93:
        return {rng.choice(["anyOf", "oneOf"]): [_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
    if draw < 0.97:
        return {"allOf": [_schema(rng, depth - 1) for _ in range(2)]}
    return {"$ref": rng.choice(["#", "#/$defs/n"])}


def _object(rng: Random, depth: int) -> dict[str, Any]:
    names = rng.sample(_NAMES, rng.randint(0, 4))
    return {"type": "object", "properties": {name: _schema(rng, depth - 1) for name in names}, **_some(rng, {
        "required": rng.sample([*names, "zz"], rng.randint(0, len(names))),
        "additionalProperties": rng.choice([False, True, _schema(rng, depth - 1)]),
        "minProperties": rng.randint(0, 2), "maxProperties": rng.randint(2, 5),
        "patternProperties": {rng.choice(["^p_", "^[0-9]+$"]): _schema(rng, depth - 1)},
        "dependentRequired": {rng.choice(_NAMES): [rng.choice(_NAMES)]}}, 0.22)}  # fmt: skip


def _scalar(rng: Random) -> Any:
    kind = rng.randrange(9)
    if kind == 0:
        return {"type": "integer", **_some(rng, {"minimum": rng.randint(-300, 50), "maximum": rng.randint(51, 4000),
                                                 "multipleOf": rng.choice([2, 3, 7, 10])})}  # fmt: skip
    if kind == 1:
        return {"type": "number", **_some(rng, {
            "minimum": rng.choice([-3.5, 0, 0.25, -100.125]), "maximum": rng.choice([5, 7.5, 1000.001, 123]),
            "exclusiveMinimum": rng.choice([-4, 0.5]), "exclusiveMaximum": rng.choice([6.25, 100]),
            "multipleOf": rng.choice([0.5, 0.25, 0.1, 2])}, 0.3)}  # fmt: skip
    if kind == 2:
        return {"type": "string", **_some(rng, {"minLength": rng.randint(0, 3), "maxLength": rng.randint(3, 9)})}
    if kind == 3:
        return {"type": "string", "pattern": rng.choice(_PATTERNS),
                **_some(rng, {"minLength": rng.randint(0, 2), "maxLength": rng.randint(5, 9)}, 0.3)}  # fmt: skip
    if kind == 4:
        return {"enum": rng.sample(_VALUES, rng.randint(1, 5))}
    if kind == 5:
        return {"const": rng.choice(["k", 0, -1, 1.25, None, False, [], {"z": [1]}])}
    if kind == 6:
        return {"type": rng.choice(["null", "boolean"])}
    if kind == 7:
        return {"type": "string", "format": rng.choice(_FORMATS)}
    return rng.choice([{}, True, {"type": ["string", "null"]}, {"minimum": 3}])
