"""Python types as JSON schemas, and values as JSON.

The schemas have only keywords that a grammar can enforce. Known are: str, int, float, bool, None, Any; Literal and Enum; list,
tuple, set, dict with str keys, and their abstract forms; unions; dataclasses, named tuples and TypedDicts, which are objects
here; datetime, date, time, UUID, Decimal and paths; classes with pydantic's `model_json_schema` and `model_validate`.
``Annotated`` gives a description (a string) and limits (what has attributes such as `ge`, `lt` or `max_length`, as pydantic's
``Field`` has).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import json
import math
import operator
import re
import types
import typing
from collections import abc, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date, datetime, time
from decimal import Decimal
from enum import Enum
from pathlib import Path, PurePath
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin
from uuid import UUID

from lfmfast import docstrings
from lfmfast.errors import ParameterError

__all__ = ["MISSING", "Field", "Schemas", "class_fields", "read_types", "to_json", "to_plain"]

MISSING: Any = inspect.Parameter.empty

SCALARS: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
SEQUENCES: dict[Any, Callable[[list[Any]], Any]] = {
    list: list, abc.Sequence: list, abc.MutableSequence: list, abc.Collection: list, abc.Iterable: list, tuple: tuple,
    set: set, abc.Set: set, abc.MutableSet: set, frozenset: frozenset, deque: deque,
}  # fmt: skip
MAPPINGS = (dict, abc.Mapping, abc.MutableMapping)
UNIONS = (Union, types.UnionType)


def _iso(text: str) -> str:
    """RFC 3339 as Python 3.10's fromisoformat() takes it."""
    text = re.sub(r"\.(\d+)", lambda match: "." + match[1][:6].ljust(6, "0"), text)
    return text[:-1] + "+00:00" if text.endswith(("Z", "z")) else text


# the schema, the JSON it takes, and what makes a value of it
CONVERTED: dict[Any, tuple[dict[str, Any], Any, Callable[[Any], Any]]] = {
    datetime: ({"type": "string", "format": "date-time"}, str, lambda text: datetime.fromisoformat(_iso(text))),
    date: ({"type": "string", "format": "date"}, str, date.fromisoformat),
    time: ({"type": "string", "format": "time"}, str, lambda text: time.fromisoformat(_iso(text))),
    UUID: ({"type": "string", "format": "uuid"}, str, UUID),
    Decimal: ({"type": "number"}, (int, float), lambda number: Decimal(str(number))),
    Path: ({"type": "string"}, str, Path),
    PurePath: ({"type": "string"}, str, PurePath),
}
# attribute of a note in Annotated: keyword by type, how it is told, the check
LIMITS: dict[str, tuple[dict[str, str], str, Callable[[Any, Any], bool]]] = {
    "ge": ({"": "minimum"}, "at least", operator.ge),
    "gt": ({"": "exclusiveMinimum"}, "more than", operator.gt),
    "le": ({"": "maximum"}, "at most", operator.le),
    "lt": ({"": "exclusiveMaximum"}, "less than", operator.lt),
    "multiple_of": ({"": "multipleOf"}, "a multiple of", lambda value, step: abs(math.remainder(value, step)) <= step * 1e-9),
    "min_length": ({"string": "minLength", "array": "minItems"}, "of length at least", lambda value, n: len(value) >= n),
    "max_length": ({"string": "maxLength", "array": "maxItems"}, "of length at most", lambda value, n: len(value) <= n),
}


class Field(NamedTuple):
    """A parameter of a function, or of a class that is an object in JSON."""

    name: str
    type: Any
    required: bool = True
    default: Any = MISSING
    description: str = ""


# --- looking at types ---


def read_types(annotations: Mapping[str, Any], names: dict[str, Any], where: str) -> dict[str, Any]:
    """`annotations` with what is text in them evaluated, where `names` are known."""

    def holder() -> None: ...

    holder.__annotations__ = dict(annotations)
    try:
        return typing.get_type_hints(holder, names, include_extras=True)
    except Exception as error:
        raise ParameterError(f"a type in {where} can't be read: {error}") from error


def class_fields(cls: Any) -> list[Field] | None:
    """The fields of a dataclass, named tuple or TypedDict; None for any other class."""
    is_dict = is_typed_dict(cls)
    if not is_dict and not dataclasses.is_dataclass(cls) and not (is_subclass(cls, tuple) and hasattr(cls, "_fields")):
        return None
    try:
        found = typing.get_type_hints(cls, include_extras=True)
    except Exception as error:
        raise ParameterError(f"a type in {cls.__name__} can't be read: {error}") from error
    said = docstrings.parse(vars(cls).get("__doc__")).parameters
    if is_dict:
        return [Field(name, kind, _is_required(cls, name, kind), MISSING, said.get(name, "")) for name, kind in found.items()]
    return [Field(name, found.get(name, given.annotation), given.default is MISSING, given.default, said.get(name, ""))
            for name, given in inspect.signature(cls).parameters.items()]  # fmt: skip


def is_subclass(cls: Any, base: type) -> bool:
    return isinstance(cls, type) and issubclass(cls, base)


def is_typed_dict(cls: Any) -> bool:
    return is_subclass(cls, dict) and hasattr(cls, "__required_keys__")


def _mark(kind: Any) -> str:
    """Required, NotRequired or ReadOnly of `typing` or `typing_extensions`, if it is one of them."""
    name = repr(get_origin(kind)).rpartition(".")[2]
    return name if name in ("Required", "NotRequired", "ReadOnly") else ""


def _is_required(cls: Any, name: str, kind: Any) -> bool:
    # Texts hide the marks from __required_keys__.
    while mark := _mark(kind):
        if mark != "ReadOnly":
            return mark == "Required"
        kind = get_args(kind)[0]
    return name in cls.__required_keys__


def bare_type(kind: Any) -> tuple[Any, list[Any]]:
    """The type without what only surrounds it, and the notes of Annotated."""
    notes: list[Any] = []
    while True:
        if hasattr(kind, "__metadata__"):
            for note in kind.__metadata__:
                inner = getattr(note, "metadata", None)  # pydantic's Field has its limits there
                notes += [note, *(inner if isinstance(inner, list) else ())]
            kind = kind.__origin__
        elif isinstance(kind, typing.NewType):
            kind = kind.__supertype__
        elif isinstance(kind, TypeVar):
            kind = kind.__bound__ or (functools.reduce(operator.or_, kind.__constraints__) if kind.__constraints__ else Any)
        elif _mark(kind):
            kind = get_args(kind)[0]
        elif kind is None:
            kind = type(None)
        elif not isinstance(kind, abc.Hashable):
            raise _unknown(kind)
        else:
            return kind, notes


def is_alias(kind: Any) -> bool:
    """Made by a ``type`` statement."""
    return not isinstance(kind, type) and hasattr(kind, "__value__")


def is_model(kind: Any) -> bool:
    return isinstance(kind, type) and hasattr(kind, "model_json_schema") and hasattr(kind, "model_validate")


def _unknown(kind: Any) -> ParameterError:
    return ParameterError(f"the type {getattr(kind, '__name__', kind)!r} has no form in JSON that lfmfast knows")


def limits(notes: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    for note in notes:
        for name in LIMITS:
            limit = getattr(note, name, None)
            if isinstance(limit, (int, float)) and not isinstance(limit, bool):
                yield name, limit


def options(kind: Any) -> list[tuple[Any, Any]]:
    """JSON value and value of each member of an Enum or Literal. Members that are no JSON go by their names."""
    members = list(get_args(kind) if get_origin(kind) is Literal else kind)
    if all(isinstance(_enum_value(member), (str, int, float, type(None))) for member in members):
        return [(_enum_value(member), member) for member in members]
    if get_origin(kind) is Literal:
        raise _unknown(kind)
    return [(member.name, member) for member in members]


def _enum_value(member: Any) -> Any:
    return member.value if isinstance(member, Enum) else member


# --- schemas ---


class Schemas:
    """Makes the schemas of types. `definitions` has those of recursive classes, for ``$defs`` at the root."""

    def __init__(self) -> None:
        self.definitions: dict[str, Any] = {}
        self._open: list[Any] = []
        self._names: dict[Any, str] = {}

    def of(self, kind: Any, description: str = "") -> dict[str, Any]:
        """The schema of a type. A description in the type itself comes before `description`, and that before its class's."""
        bare, notes = bare_type(kind)
        schema = self._of_bare(bare)
        for name, limit in limits(notes):
            for type_, keyword in LIMITS[name][0].items():
                if not type_ or type_ in schema.get("type", ()):
                    schema[keyword] = limit
        said = [note if isinstance(note, str) else getattr(note, "documentation", None) or getattr(note, "description", None)
                for note in notes]  # fmt: skip
        text = next((text for text in (*said, description) if isinstance(text, str) and text), None)
        return {**schema, "description": text} if text else schema

    def of_fields(self, fields: Sequence[Field]) -> dict[str, Any]:
        """The schema of an object with these fields."""
        properties = {}
        for field in fields:
            schema = self.of(field.type, field.description)
            if field.default is not MISSING and field.default is not None:  # None: not given
                with contextlib.suppress(TypeError):  # no JSON, such as the mark of a default_factory
                    schema["default"] = to_plain(field.default)
            properties[field.name] = schema
        required = [field.name for field in fields if field.required]
        return {"type": "object", "properties": properties, **({"required": required} if required else {})}

    def _of_bare(self, kind: Any) -> dict[str, Any]:
        origin, args = get_origin(kind) or kind, get_args(kind)
        if origin in (Any, object):
            return {}
        if origin in SCALARS:
            return {"type": SCALARS[origin]}
        if origin in CONVERTED:
            return dict(CONVERTED[origin][0])
        if is_alias(kind):
            return self._once(kind, lambda: self.of(kind.__value__))
        if origin in UNIONS:
            return self._of_union(args)
        if origin is Literal or is_subclass(kind, Enum):
            values = [value for value, _ in options(kind)]
            types_ = {SCALARS[type(value)] for value in values if type(value) in SCALARS}
            return {**({"type": types_.pop()} if len(types_) == 1 else {}), "enum": values}
        if origin is tuple and args and args[-1] is not ...:
            parts = [self.of(arg) for arg in args]
            return {"type": "array", "prefixItems": parts, "minItems": len(parts), "maxItems": len(parts)}
        if origin in SEQUENCES:
            return {"type": "array", **self._inside("items", args[:1])}
        if origin in MAPPINGS:
            if args and bare_type(args[0])[0] not in (str, Any):
                raise ParameterError(f"the keys of {kind} must be str, because keys are strings in JSON")
            return {"type": "object", **self._inside("additionalProperties", args[1:])}
        if is_model(kind):
            return self._of_model(kind)
        if (fields := class_fields(origin)) is not None:
            return self._once(origin, lambda: self._of_class(origin, fields))
        raise _unknown(kind)

    def _inside(self, keyword: str, args: Sequence[Any]) -> dict[str, Any]:
        schema = self.of(args[0]) if args else {}
        return {keyword: schema} if schema else {}

    def _of_union(self, args: Sequence[Any]) -> dict[str, Any]:
        schemas: list[dict[str, Any]] = []
        for arg in args:
            if (schema := self.of(arg)) not in schemas:
                schemas.append(schema)
        if {} in schemas:
            return {}
        if len(schemas) == 1:
            return schemas[0]
        return {"type": [s["type"] for s in schemas]} if all(s.keys() == {"type"} for s in schemas) else {"anyOf": schemas}

    def _of_class(self, cls: Any, fields: Sequence[Field]) -> dict[str, Any]:
        schema = {**self.of_fields(fields), "additionalProperties": False}
        doc = vars(cls).get("__doc__") or ""
        text = "" if doc.startswith(f"{cls.__name__}(") else docstrings.parse(doc).text  # not what dataclass() writes
        return {**schema, "description": text} if text else schema

    def _of_model(self, model: Any) -> dict[str, Any]:
        schema = dict(model.model_json_schema())
        for name, definition in schema.pop("$defs", {}).items():
            if name in self._names.values() or self.definitions.setdefault(name, definition) != definition:
                raise ParameterError(f"two different classes are called {name!r}")
        return schema

    def _once(self, kind: Any, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """In place, but for what contains itself: that is a definition."""
        if kind in self._open and kind not in self._names:
            taken = {*self.definitions, *self._names.values()}
            name = kind.__name__
            while name in taken:
                name += "_"
            self._names[kind] = name
        if kind not in self._names:
            self._open.append(kind)
            schema = make()
            self._open.remove(kind)
            if kind not in self._names:
                return schema
            self.definitions[self._names[kind]] = schema
        return {"$ref": f"#/$defs/{self._names[kind]}"}


# --- values ---


def to_json(value: Any) -> str:
    """A value as JSON text; a string as it is. What has no form in JSON is the text that ``str`` makes of it."""
    is_text = isinstance(value, str) and not isinstance(value, Enum)
    return value if is_text else json.dumps(to_plain(value, str), ensure_ascii=False)


def to_plain(value: Any, otherwise: Callable[[Any], Any] | None = None) -> Any:
    """A value as dicts, lists, strings, numbers, True, False and None.

    Raises
    ------
    TypeError
        Something in it has no such form, and there is no `otherwise` to make it.
    """
    if isinstance(value, Enum):
        return next(plain for plain, member in options(type(value)) if member is value)
    if value is None or isinstance(value, (bool, str, int)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name), otherwise) for field in dataclasses.fields(value)}
    if hasattr(value, "model_dump"):  # pydantic's
        return value.model_dump(mode="json")
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {str(_enum_value(key)): to_plain(item, otherwise) for key, item in value.items()}
    if isinstance(value, (list, tuple, abc.Set, deque)):
        return [to_plain(item, otherwise) for item in value]
    if isinstance(value, (date, time)):
        return value.isoformat()
    if isinstance(value, (UUID, PurePath)):
        return str(value)
    if isinstance(value, Decimal):
        return float(value)
    if hasattr(value, "tolist"):  # NumPy's arrays and numbers
        return to_plain(value.tolist(), otherwise)
    if otherwise is None:
        raise TypeError(f"a {type(value).__name__} has no form in JSON")
    return otherwise(value)
