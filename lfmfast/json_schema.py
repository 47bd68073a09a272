"""JSON schemas as llguidance enforces them: every keyword is enforced or refused by its name, none is ignored.

llguidance compiles a schema to a grammar and refuses most of what it can't express. This module stands before it and closes
the rest: keywords that it takes for unknown ones, values that it reads inexactly, references that it resolves differently, keys
spelt with escapes, and schemas that would exhaust its stack. What comes out has references to its own `$defs` only.

The reply may be narrower than the schema, never wider: properties come in the order of the schema, numbers under a bound have
no exponent, white space between items is limited. A key of a map may come twice, as JSON allows; the last one counts.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from lfmfast.ecma_pattern import translated
from lfmfast.errors import ParameterError
from lfmfast.schema_checks import conjuncts, has_end
from lfmfast.schema_choice import exclusion
from lfmfast.schema_formats import FORMATS

__all__ = ["normalized"]

#: Schemas in a schema, and how deep they nest, also through references: llguidance takes 10 KB of stack for each level.
MAX_SCHEMAS, MAX_DEPTH = 10_000, 96
#: Schemas that allOf brings together at one place, and pairs of parts of all oneOf.
MAX_CONJUNCTS, MAX_PAIRS = 16, 50_000
#: The largest minItems, maxItems, minLength, ... and the largest whole number that a double holds exactly.
MAX_COUNT, MAX_EXACT = 100_000, 2**53

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_ANNOTATIONS = {
    "$anchor", "$comment", "$defs", "$schema", "$vocabulary", "default", "definitions", "deprecated", "description",
    "discriminator", "enumNames", "example", "examples", "externalDocs", "id", "nullable", "propertyOrdering", "readOnly",
    "strict", "title", "writeOnly", "xml",
}  # fmt: skip
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_APPLICATORS = ("$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "dependencies")
_HANDLED = {
    "$ref", "$id", "type", "enum", "const", *_COUNTS, *_BOUNDS, "multipleOf", "pattern", "format", "contentEncoding",
    "contentMediaType", "items", "additionalItems", "prefixItems", "unevaluatedItems", "uniqueItems", "properties",
    "patternProperties", "additionalProperties", "unevaluatedProperties", "propertyNames", "required", "dependentRequired",
    "dependentSchemas", "dependencies", "allOf", "anyOf", "oneOf", "if", "then", "else", "minContains", "maxContains",
}  # fmt: skip
# Of the drafts 3 to 2020-12, and assertions that Ajv and OpenAPI add.
_REFUSED = {
    "$async", "$data", "$dynamicAnchor", "$dynamicRef", "$merge", "$patch", "$recursiveAnchor", "$recursiveRef", "contains",
    "contentSchema", "deepProperties", "deepRequired", "disallow", "divisibleBy", "exclusiveRange", "extends",
    "formatExclusiveMaximum", "formatExclusiveMinimum", "formatMaximum", "formatMinimum", "instanceof", "not",
    "patternRequired", "prohibited", "range", "regexp", "select", "switch", "transform", "typeof", "uniqueItemProperties",
}  # fmt: skip
# What llguidance writes as \u escapes only. Those are off: a key spelt with one would pass for an additional property.
_UNWRITABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")

Schema = Mapping[str, Any]


def normalized(schema: Any, document: Any = None) -> dict[str, Any]:
    """A schema that llguidance enforces exactly, or narrower.

    Parameters
    ----------
    schema : mapping or bool
        JSON Schema, draft 4 to 2020-12. References are followed inside `document` only.
    document : mapping, optional
        What `#` stands for in references; by default the schema itself.

    Raises
    ------
    ParameterError
        Naming the place and the keyword that is malformed or can't be enforced.
    """
    return _Normalizer(schema if document is None else document).run(schema)


def _show(value: object) -> str:
    text = repr(value)
    return f"{text[:60]}..." if len(text) > 63 else text


class _Normalizer:
    def __init__(self, document: Any) -> None:
        self._document = document
        self._defs: dict[str, Any] = {}  # finished and unfinished ones, by their names in the result
        self._names: dict[str, str] = {}  # where a reference leads -> name
        self._multiples: set[float] = set()
        self._n_schemas = self._n_pairs = 0
        self._path: list[str] = []

    def run(self, schema: Any) -> dict[str, Any]:
        out = self._schema(schema, 0)
        if isinstance(out, bool):
            out = {} if out else {"anyOf": []}
        self._check_ends()
        if (count := conjuncts(out, self._defs, {})) > MAX_CONJUNCTS:
            raise self._error(f"allOf brings {count} schemas together at one place; the limit is {MAX_CONJUNCTS}")
        return {**out, "$defs": self._defs} if self._defs else out

    def _error(self, message: str) -> ParameterError:
        return ParameterError(f"the JSON schema at #{''.join('/' + part for part in self._path)}: {message}")

    def _check_ends(self) -> None:
        """Refuse definitions that need themselves: a model that begins such a value never comes to its end."""
        ending: set[str] = set()
        while more := {name for name, schema in self._defs.items() if name not in ending and has_end(schema, ending)}:
            ending |= more
        for where, name in self._names.items():
            if name not in ending:
                self._path = where.split("/")[1:]
                raise self._error("no JSON of finite length fits it")

    # -- walking ------------------------------------------------------------------------------------------------------------

    def _schema(self, schema: Any, depth: int, *steps: str) -> dict[str, Any] | bool:
        """The schema below `steps` from here."""
        self._path += steps
        self._n_schemas += 1
        if self._n_schemas > MAX_SCHEMAS:
            raise self._error(f"more than {MAX_SCHEMAS:,} schemas in it, the limit")
        if depth > MAX_DEPTH:
            raise self._error(f"nested deeper than {MAX_DEPTH} schemas, references followed")
        if not isinstance(schema, (bool, Mapping)):
            raise self._error(f"a schema is an object or a boolean, not {_show(schema)}")
        out = schema if isinstance(schema, bool) else self._object(schema, depth)
        if steps:
            del self._path[-len(steps):]
        return out

    def _object(self, schema: Schema, depth: int) -> dict[str, Any]:
        self._check_keywords(schema)
        out: dict[str, Any] = {}
        more: list[Any] = []  # what is added to allOf
        # In this order llguidance compiles them too, so that the nesting through references is the one counted here.
        for part in (self._type, self._numbers, self._strings, self._counts):
            part(schema, out, more)
        self._array(schema, out, depth)
        self._properties(schema, out, more, depth)
        if "$ref" in schema:
            out["$ref"] = self._reference(schema["$ref"], depth)
        self._combined(schema, out, more, depth)
        if "const" in schema:
            out["const"] = self._value("const", schema["const"])
        if "enum" in schema:
            values = self._list("enum", schema["enum"])
            out["enum"] = [self._value("enum", value) for value in values]
        return out

    def _check_keywords(self, schema: Schema) -> None:
        for key in schema:
            if not isinstance(key, str):
                raise self._error(f"a keyword is a string, not {_show(key)}")
            if key in _REFUSED:
                raise self._error(f"{key} can't be enforced")
            if key not in _HANDLED and key not in _ANNOTATIONS and not key.startswith(("x-", "$")):
                close = difflib.get_close_matches(key, _HANDLED | _REFUSED, n=1, cutoff=0.84)
                if close:
                    raise self._error(f"there is no keyword {key!r}; did you mean {close[0]!r}?")
        if self._path and not str(schema.get("$id", "#")).startswith("#"):
            raise self._error("$id below the top changes what references mean, and can't be followed")

    # -- values and simple keywords -----------------------------------------------------------------------------------------

    def _list(self, name: str, value: Any) -> list[Any]:
        if isinstance(value, str) or not isinstance(value, Sequence) or not value:
            raise self._error(f"{name} must be a list with something in it, not {_show(value)}")
        return list(value)

    def _mapping(self, name: str, value: Any) -> Mapping[str, Any]:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise self._error(f"{name} must be an object, not {_show(value)}")
        return value

    def _names_of(self, name: str, value: Any) -> list[str]:
        if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(item, str) for item in value):
            raise self._error(f"{name} must be a list of names, not {_show(value)}")
        return [self._name(name, item) for item in dict.fromkeys(value)]

    def _name(self, keyword: str, text: str) -> str:
        """A key of an object."""
        if found := _UNWRITABLE.search(text):
            raise self._error(f"{keyword}: the name {_show(text)} has U+{ord(found[0]):04X}, which can't be enforced")
        return text

    def _number(self, name: str, value: Any) -> int | float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value in (math.inf, -math.inf) or value != value:
            raise self._error(f"{name} must be a number, not {_show(value)}")
        if isinstance(value, int) and abs(value) > MAX_EXACT:
            raise self._error(f"{name}: {_show(value)} is beyond 2**53, where whole numbers are no longer exact")
        return value

    def _value(self, keyword: str, value: Any, depth: int = 0) -> Any:
        """A value of const or enum."""
        if depth > MAX_DEPTH // 2:
            raise self._error(f"{keyword} is nested deeper than {MAX_DEPTH // 2}")
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            if found := _UNWRITABLE.search(value):
                raise self._error(f"{keyword}: {_show(value)} has U+{ord(found[0]):04X}, which can't be enforced")
            return value
        if isinstance(value, (int, float)):
            return self._number(keyword, value)
        if isinstance(value, Mapping):
            return {self._name(keyword, key): self._value(keyword, item, depth + 1)
                    for key, item in self._mapping(keyword, value).items()}
        if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
            return [self._value(keyword, item, depth + 1) for item in value]
        raise self._error(f"{keyword}: {_show(value)} ({type(value).__name__}) is no JSON value")

    def _type(self, schema: Schema, out: dict[str, Any], _: list[Any]) -> None:
        if "type" not in schema:
            return
        kinds = schema["type"]
        kinds = [kinds] if isinstance(kinds, str) else self._list("type", kinds)
        for kind in kinds:
            if kind not in TYPES:
                raise self._error(f"type: there is no {_show(kind)} (known: {', '.join(TYPES)})")
        kinds = [kind for kind in TYPES if kind in kinds]
        out["type"] = kinds[0] if len(kinds) == 1 else kinds

    def _numbers(self, schema: Schema, out: dict[str, Any], _: list[Any]) -> None:
        for name in _BOUNDS:
            if name not in schema:
                continue
            value = schema[name]
            if name.startswith("exclusive") and isinstance(value, bool):  # draft 4
                plain = name[9:].lower()
                if value and plain in schema:
                    out[name] = self._number(plain, schema[plain])
            else:
                out[name] = self._number(name, value)
        if "multipleOf" in schema:
            value = self._number("multipleOf", schema["multipleOf"])
            if value <= 0:
                raise self._error(f"multipleOf must be more than 0, not {_show(value)}")
            self._multiples.add(value)
            if math.prod(max(m, 1 / m) for m in self._multiples) > 2**31:  # llguidance multiplies them in 32 bits
                raise self._error("multipleOf: the product of all such values in the schema is over 2**31, the limit")
            out["multipleOf"] = value

    def _counts(self, schema: Schema, out: dict[str, Any], _: list[Any]) -> None:
        for name in _COUNTS:
            if name in schema:
                value = self._number(name, schema[name])
                if value != int(value) or not 0 <= value <= MAX_COUNT:
                    raise self._error(f"{name} must be a whole number from 0 to {MAX_COUNT:,}, not {_show(value)}")
                out[name] = int(value)
        for low, high in zip(_COUNTS[::2], _COUNTS[1::2], strict=True):
            if out.get(low, 0) > out.get(high, MAX_COUNT):
                raise self._error(f"{low} {out[low]} is more than {high} {out[high]}")

    def _strings(self, schema: Schema, out: dict[str, Any], more: list[Any]) -> None:
        if "pattern" in schema:
            out["pattern"] = self._pattern("pattern", schema["pattern"])
        known = {**({"format": schema["format"]} if "format" in schema else {}),
                 **({"contentEncoding": schema["contentEncoding"]} if "contentEncoding" in schema else {})}  # fmt: skip
        for keyword, name in known.items():
            enforced = FORMATS.get(name) if isinstance(name, str) else None
            if enforced is None or (keyword == "contentEncoding" and name != "base64"):
                raise self._error(f"{keyword}: {_show(name)} can't be enforced")
            if enforced.keys() & out.keys():
                more.append(dict(enforced))
            else:
                out |= enforced
        if schema.get("contentMediaType", "text/plain") != "text/plain":
            raise self._error(f"contentMediaType: {_show(schema['contentMediaType'])} can't be enforced")

    def _pattern(self, keyword: str, pattern: Any) -> str:
        if not isinstance(pattern, str):
            raise self._error(f"{keyword} must be a string, not {_show(pattern)}")
        try:
            return translated(pattern, keyword)
        except ParameterError as error:
            raise self._error(str(error)) from None

    # -- arrays and objects -------------------------------------------------------------------------------------------------

    def _array(self, schema: Schema, out: dict[str, Any], depth: int) -> None:
        unique = schema.get("uniqueItems", False)
        if unique is not False and not (unique is True and out.get("maxItems", 2) <= 1):
            raise self._error("uniqueItems can't be enforced")
        first, rest = schema.get("prefixItems"), schema.get("items")
        where = ("prefixItems", "items")
        if isinstance(rest, Sequence) and not isinstance(rest, str):  # until 2019-09
            if first is not None:
                raise self._error("items is a list, and there is prefixItems too")
            first, rest, where = rest, schema.get("additionalItems"), ("items", "additionalItems")
        if rest is None and "unevaluatedItems" in schema:
            rest, where = self._unevaluated("unevaluatedItems", schema), (where[0], "unevaluatedItems")
        if first is not None and (first := list(first) if isinstance(first, Sequence) else self._list(where[0], first)):
            out["prefixItems"] = [self._schema(item, depth + 1, where[0], str(n)) for n, item in enumerate(first)]
        if rest is not None:
            out["items"] = self._schema(rest, depth + 1, where[1])

    def _unevaluated(self, keyword: str, schema: Schema) -> Any:
        """The schema of what no other keyword looked at: simple where nothing stands beside it."""
        value = schema[keyword]
        if value is not True and value != {} and any(name in schema for name in _APPLICATORS):
            raise self._error(f"{keyword} can't be enforced beside {', '.join(n for n in _APPLICATORS if n in schema)}")
        return value

    def _properties(self, schema: Schema, out: dict[str, Any], more: list[Any], depth: int) -> None:
        for keyword, name in (("properties", self._name), ("patternProperties", self._pattern)):
            if keyword in schema:
                entries = self._mapping(keyword, schema[keyword]).items()
                out[keyword] = {name(keyword, key): self._schema(value, depth + 1, keyword, key) for key, value in entries}
        others = schema.get("additionalProperties")
        where = "additionalProperties"
        if others is None and "unevaluatedProperties" in schema:
            others, where = self._unevaluated("unevaluatedProperties", schema), "unevaluatedProperties"
        if others is not None:
            out["additionalProperties"] = self._schema(others, depth + 1, where)
        if "required" in schema:
            out["required"] = self._names_of("required", schema["required"])
        if "propertyNames" in schema:
            self._property_names(schema["propertyNames"], out)
        is_open = out.get("additionalProperties", True) is not False or out.get("patternProperties")
        if is_open and out.get("minProperties", 0) > len(out.get("required", ())) + 1:
            raise self._error("minProperties can't be enforced on a map, whose keys may come twice")
        self._dependencies(schema, more, depth)

    def _property_names(self, names: Any, out: dict[str, Any]) -> None:
        """Rewritten as properties or patternProperties, where there are none yet."""
        names = {} if names is True else names
        keys = set(self._mapping("propertyNames", names)) - _ANNOTATIONS - {"type"}
        if names.get("type", "string") != "string" or (keys and (out.keys() & {"properties", "patternProperties"})):
            raise self._error("propertyNames can't be enforced beside properties and patternProperties")
        value = out.get("additionalProperties", True)
        if keys == {"enum"} or keys == {"const"}:
            listed = names["enum"] if keys == {"enum"} else [names["const"]]
            out["properties"] = dict.fromkeys(self._names_of("propertyNames", listed), value)
        elif keys == {"pattern"}:
            out["patternProperties"] = {self._pattern("propertyNames: pattern", names["pattern"]): value}
        elif keys and keys <= {"minLength", "maxLength"}:
            counts: dict[str, Any] = {}
            self._counts(names, counts, [])
            low, high = counts.get("minLength", 0), counts.get("maxLength", "")
            out["patternProperties"] = {f"^(?s:.{{{low},{high}}})$": value}
        elif keys:
            raise self._error(f"propertyNames: {', '.join(sorted(keys))} can't be enforced")
        if keys:
            out["additionalProperties"] = False

    def _dependencies(self, schema: Schema, more: list[Any], depth: int) -> None:
        """`a` needs something: either there is no `a`, or there is `a` and what it needs."""
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            for name, needs in self._mapping(keyword, schema.get(keyword, {})).items():
                self._name(keyword, name)
                if keyword == "dependentRequired" or not isinstance(needs, (bool, Mapping)):
                    needed: dict[str, Any] = {"required": [name, *(n for n in self._names_of(keyword, needs) if n != name)]}
                else:
                    needed = {"required": [name], "allOf": [self._schema(needs, depth + 3, keyword, name)]}
                more.append({"anyOf": [{"properties": {name: False}}, needed]})

    # -- combinations and references ----------------------------------------------------------------------------------------

    def _combined(self, schema: Schema, out: dict[str, Any], more: list[Any], depth: int) -> None:
        if "if" in schema and ("then" in schema or "else" in schema):
            raise self._error("if can't be enforced")
        for keyword in ("allOf", "anyOf", "oneOf"):
            if keyword in schema:
                parts = self._list(keyword, schema[keyword])
                parts = self._one_of(parts) if keyword == "oneOf" else parts
                done = [self._schema(part, depth + 1, keyword, str(n)) for n, part in enumerate(parts)]
                if keyword != "oneOf":
                    out[keyword] = done
                elif "anyOf" in out:
                    more.append({"anyOf": done})
                else:
                    out["anyOf"] = done
        if more:
            out["allOf"] = [*more, *out.pop("allOf", [])]

    def _one_of(self, parts: list[Any]) -> list[Any]:
        """The parts of oneOf as parts of anyOf: they exclude each other, if need be once a property is a required one."""
        targets = [self._lookup(part["$ref"])[1] if _is_bare(part) else part for part in parts]
        needed: dict[int, list[str]] = {}
        self._n_pairs += len(parts) * (len(parts) - 1) // 2
        if self._n_pairs > MAX_PAIRS:
            raise self._error(f"oneOf: more than {MAX_PAIRS:,} pairs of parts to compare, the limit")
        for at, target in enumerate(targets):
            for n, other in enumerate(targets[at + 1:], at + 1):
                name = exclusion(target, other)
                if name is None:
                    raise self._error(f"oneOf can't be enforced: its parts {at} and {n} do not plainly exclude each other")
                if name:  # without it a value would fit both
                    needed.setdefault(at, []).append(name)
                    needed.setdefault(n, []).append(name)
        return [{**targets[at], "required": [*targets[at].get("required", ()), *needed[at]]} if at in needed else part
                for at, part in enumerate(parts)]  # fmt: skip

    def _reference(self, reference: Any, depth: int) -> str:
        where, target = self._lookup(reference)
        if where not in self._names:
            name = self._names[where] = str(len(self._names))
            self._defs[name] = None
            path, self._path = self._path, where.split("/")[1:]
            self._defs[name] = self._schema(target, depth + 1)
            self._path = path
        return f"#/$defs/{self._names[where]}"

    def _lookup(self, reference: Any) -> tuple[str, Any]:
        """Where a reference leads, and what is there. A reference to a bare reference leads on."""
        top = str(self._document.get("$id", "")).rstrip("#") if isinstance(self._document, Mapping) else ""
        seen: set[str] = set()
        while True:
            if not isinstance(reference, str):
                raise self._error(f"$ref must be a string, not {_show(reference)}")
            local = reference.removeprefix(top) if reference.startswith(top + "#") else reference
            if not local.startswith("#"):
                raise self._error(f"$ref: {_show(reference)} is not in this schema, and not fetched")
            where, target = self._find(unquote(local[1:]), reference)
            if where in seen:
                raise self._error(f"$ref: {_show(reference)} leads to itself")
            if not _is_bare(target):
                return where, target
            seen.add(where)
            reference = target["$ref"]

    def _find(self, pointer: str, reference: str) -> tuple[str, Any]:
        target = self._document
        if pointer and not pointer.startswith("/"):
            found = _anchored(self._document, pointer)
            if len(found) != 1:
                raise self._error(f"$ref: there is {'no' if not found else 'more than one'} anchor {_show(reference)}")
            return "/" + pointer, found[0]
        for part in pointer.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(target, Mapping) and key in target:
                target = target[key]
            elif isinstance(target, Sequence) and not isinstance(target, str) and key.isdecimal() and int(key) < len(target):
                target = target[int(key)]
            else:
                raise self._error(f"$ref: there is no {_show(reference)}")
        return pointer, target


def _is_bare(schema: Any) -> bool:
    """Whether it is a reference and nothing else that counts."""
    return isinstance(schema, Mapping) and "$ref" in schema and not schema.keys() - {"$ref"} - _ANNOTATIONS


def _anchored(document: Any, anchor: str) -> list[Any]:
    """What is called `anchor` in the document, data aside."""
    found, todo = [], [document]
    while todo:
        node = todo.pop()
        if isinstance(node, Mapping):
            if node.get("$anchor") == anchor or node.get("$id") == "#" + anchor:
                found.append(node)
            todo += [value for key, value in node.items() if key not in ("const", "default", "enum", "examples")]
        elif isinstance(node, (list, tuple)):
            todo += node
    return found
