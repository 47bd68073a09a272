"""JSON values as values of Python types: the way back from :mod:`lfmfast.json_types`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Literal, get_args, get_origin

from lfmfast.errors import ParameterError
from lfmfast.json_types import (
    CONVERTED,
    LIMITS,
    MAPPINGS,
    SCALARS,
    SEQUENCES,
    UNIONS,
    Field,
    Schemas,
    bare_type,
    class_fields,
    is_alias,
    is_model,
    is_subclass,
    is_typed_dict,
    limits,
    options,
    to_json,
)

__all__ = ["convert", "convert_fields"]

_TOLD = {"string": "a string", "integer": "an integer", "number": "a number", "boolean": "true or false", "array": "a list",
         "object": "an object", "date-time": 'a time such as "2025-01-31T12:30:00Z"', "date": 'a date such as "2025-01-31"',
         "time": 'a time such as "12:30:00Z"', "uuid": "a UUID"}  # fmt: skip

def convert(value: Any, kind: Any, path: str) -> Any:
    """A JSON value as a value of the type `kind`.

    Raises
    ------
    ParameterError
        It is none: the message names `path`, what is expected and what is there.
    """
    inner, notes = bare_type(kind)
    result = _convert_bare(value, inner, path)
    for name, limit in limits(notes):
        _, told, is_within = LIMITS[name]
        try:
            fits = is_within(result, limit)
        except TypeError:  # the limit is for another type of a union
            continue
        if not fits:
            raise _wrong(path, f"{told} {limit}", value)
    return result


def convert_fields(values: Any, fields: Sequence[Field], owner: str, path: str = "") -> dict[str, Any]:
    """The values of `fields` in a JSON object. The message of its ParameterError has all that is wrong."""
    noun = "field" if path else "argument"
    if not isinstance(values, Mapping):
        raise ParameterError(f"{owner} must be an object, not {_shown(values)}")
    known = {field.name: field for field in fields}
    unknown = [name for name in values if name not in known]
    missing = [field.name for field in fields if field.required and field.name not in values]
    problems, found = [], {}
    if unknown or missing:
        both = (("has no", unknown), ("needs", missing))
        said = [f"{verb} {noun} {', '.join(map(repr, names))}" for verb, names in both if names]
        takes = ", ".join(f"{f.name} ({_told(Schemas().of(f.type))}{'' if f.required else ', optional'})" for f in fields)
        problems.append(f"{owner} {' and '.join(said)}; it takes {takes or f'no {noun}s'}")
    for name, value in values.items():
        try:
            if name in known:
                inside = f"{path}.{name}" if path else name
                is_default = value is None and known[name].default is None
                found[name] = None if is_default else convert(value, known[name].type, inside)
        except ParameterError as error:
            problems.append(str(error))
    if problems:
        raise ParameterError("; ".join(problems))
    return found


def _convert_bare(value: Any, kind: Any, path: str) -> Any:
    origin, args = get_origin(kind) or kind, get_args(kind)
    if origin in (Any, object):
        return value
    if is_alias(kind):
        return convert(value, kind.__value__, path)
    if origin in UNIONS:
        return _convert_union(value, args, path)
    if origin is Literal or is_subclass(kind, Enum):
        for option, member in options(kind):
            if isinstance(value, bool) == isinstance(option, bool) and value == option:
                return member
    elif origin in SCALARS:
        accepted = (int, float) if origin is float else origin  # an int will do for a float, as type checkers have it
        if isinstance(value, accepted) and (origin is bool or not isinstance(value, bool)):
            return value
        if origin is int and isinstance(value, float) and value.is_integer():
            return int(value)
    elif origin in CONVERTED:
        _, accepted, make = CONVERTED[origin]
        if isinstance(value, accepted) and not isinstance(value, bool):
            try:
                return make(value)
            except (ValueError, ArithmeticError):
                pass
    elif origin in SEQUENCES and isinstance(value, list):
        if origin is not tuple or not args or args[-1] is ...:
            return SEQUENCES[origin]([convert(item, args[0] if args else Any, f"{path}[{i}]") for i, item in enumerate(value)])
        if len(value) == len(args):
            return tuple(convert(item, arg, f"{path}[{i}]") for i, (item, arg) in enumerate(zip(value, args, strict=True)))
        raise _wrong(path, f"a list of {len(args)} values", value)
    elif origin in MAPPINGS and isinstance(value, Mapping):
        return {key: convert(item, args[1] if args else Any, f"{path}.{key}") for key, item in value.items()}
    elif is_model(kind):
        return _made(lambda: kind.model_validate(value), path)
    elif (fields := class_fields(origin)) is not None:
        found = convert_fields(value, fields, f"argument {path!r}", path)
        return found if is_typed_dict(origin) else _made(lambda: origin(**found), path)
    raise _wrong(path, _told(Schemas().of(kind)), value)


def _convert_union(value: Any, args: Sequence[Any], path: str) -> Any:
    """By the first type that takes the value."""
    errors = []
    for arg in args:
        try:
            return convert(value, arg, path)
        except ParameterError as error:
            if bare_type(arg)[0] is not type(None):
                errors.append(error)
    raise errors[0] if len(errors) == 1 else _wrong(path, " or ".join(_told(Schemas().of(arg)) for arg in args), value)


def _made(make: Callable[[], Any], path: str) -> Any:
    try:
        return make()
    except (TypeError, ValueError) as error:
        said = str(error)
        if hasattr(error, "errors"):  # pydantic's
            said = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise ParameterError(f"argument {path!r}: {said}") from error


def _wrong(path: str, told: str, value: Any) -> ParameterError:
    return ParameterError(f"argument {path!r} must be {told}, not {_shown(value)}")


def _shown(value: Any) -> str:
    text = to_json(value) if not isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _told(schema: Mapping[str, Any]) -> str:
    """A schema in words."""
    if "enum" in schema:
        values = [json.dumps(value, ensure_ascii=False) for value in schema["enum"]]
        return values[0] if len(values) == 1 else f"one of {', '.join(values)}"
    if "anyOf" in schema:
        return " or ".join(map(_told, schema["anyOf"]))
    kind = schema.get("format", schema.get("type", "object" if "$ref" in schema else "any value"))
    return " or ".join(_TOLD.get(name, name) for name in ([kind] if isinstance(kind, str) else kind))


