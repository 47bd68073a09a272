"""What is checked of a normalised schema as a whole: that a reply comes to its end, and that compiling it does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["conjuncts", "has_end"]


def has_end(schema: Any, ending: set[str]) -> bool:
    """Whether some JSON of finite length may fit, if references lead to such only where they are in `ending`."""
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema and schema["$ref"].rpartition("/")[2] not in ending:
        return False
    if not all(has_end(part, ending) for part in schema.get("allOf", ())):
        return False
    if "anyOf" in schema and not any(has_end(part, ending) for part in schema["anyOf"]):
        return False
    kinds = schema.get("type", "null")
    if kinds == "object":
        values = schema.get("properties", {})
        return all(has_end(values.get(name, True), ending) for name in schema.get("required", ()))
    if kinds == "array":
        first, least = schema.get("prefixItems", []), schema.get("minItems", 0)
        needed = first[:least] + ([schema.get("items", True)] if least > len(first) else [])
        return all(has_end(part, ending) for part in needed)
    return True  # a scalar, or the choice of one


def conjuncts(schema: Any, definitions: Mapping[str, Any], done: dict[str, int]) -> int:
    """How many schemas allOf and references bring together at one place, at most: llguidance's work doubles with each.

    `done` keeps what is known of definitions.
    """
    if not isinstance(schema, Mapping):
        return 1
    below = [schema.get("items"), schema.get("additionalProperties"), *schema.get("prefixItems", ()), *schema.get("anyOf", ()),
             *schema.get("properties", {}).values(), *schema.get("patternProperties", {}).values()]  # fmt: skip
    count = max([1, *(conjuncts(part, definitions, done) for part in below if isinstance(part, Mapping))])
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if name not in done:
            done[name] = 1
            done[name] = conjuncts(definitions[name], definitions, done)
        count = max(count, done[name]) if schema.keys() <= {"$ref"} else count + done[name]
    return count + sum(conjuncts(part, definitions, done) for part in schema.get("allOf", ()))
