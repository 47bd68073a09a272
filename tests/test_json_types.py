"""Python types as JSON schemas, and JSON values as values of them."""

from __future__ import annotations

import collections
import json
import math
import sys
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
from datetime import date, datetime, time, timezone
from decimal import Decimal
from enum import Enum, IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Generic, Literal, NamedTuple, NewType, Optional, TypedDict, TypeVar, Union
from uuid import UUID

import numpy as np
import pydantic
import pytest
import typing_extensions

from lfmfast.constraint import from_json_schema
from lfmfast.errors import ParameterError
from lfmfast.json_types import Schemas, to_json
from lfmfast.json_values import convert
from lfmfast.tool_grammar import tool_constraint

T = TypeVar("T")
Celsius = NewType("Celsius", float)


class Unit(Enum):
    CELSIUS = "C"
    FAHRENHEIT = "F"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class Shape(Enum):
    SQUARE = (1, 1)
    WIDE = (2, 1)


class Mode(str, Enum):
    FAST = "fast"
    SLOW = "slow"


@dataclass
class Point:
    """A place.

    Attributes:
        x: To the right.
    """

    x: float
    y: Annotated[float, "Up."] = 0.0


@dataclass
class Plain:
    names: list[str] = field(default_factory=list)
    scale: int = 1


@dataclass
class Node:
    name: str
    children: list[Node] = field(default_factory=list)


@dataclass
class Box(Generic[T]):
    content: T


@dataclass
class Positive:
    n: int

    def __post_init__(self) -> None:
        if self.n < 0:
            raise ValueError(f"n must not be negative, and is {self.n}")


class Pair(NamedTuple):
    a: int
    b: str = "b"


class Movie(TypedDict, total=False):
    title: typing_extensions.Required[str]
    year: int


class Song(TypedDict):
    title: str
    year: typing_extensions.NotRequired[Annotated[int, "When."]]


class User(pydantic.BaseModel):
    name: str
    age: Annotated[int, pydantic.Field(ge=0)]


class Team(pydantic.BaseModel):
    lead: User
    members: list[User] = []


INT, STR, NUM, NULL = ({"type": name} for name in ("integer", "string", "number", "null"))
POINT = {"type": "object", "properties": {"x": {"type": "number", "description": "To the right."},
                                          "y": {"type": "number", "description": "Up.", "default": 0.0}},
         "required": ["x"], "additionalProperties": False, "description": "A place."}  # fmt: skip

# type, schema, JSON values with what they become
TYPES: list[tuple[Any, dict[str, Any], list[tuple[Any, Any]]]] = [
    (str, STR, [("", ""), ("é\n", "é\n")]),
    (int, INT, [(3, 3), (3.0, 3), (-(10**30), -(10**30))]),
    (float, NUM, [(1.5, 1.5), (2, 2)]),
    (bool, {"type": "boolean"}, [(True, True), (False, False)]),
    (None, NULL, [(None, None)]),
    (Any, {}, [(None, None), ([1, {"a": "b"}], [1, {"a": "b"}])]),
    (object, {}, [("x", "x")]),
    (Celsius, NUM, [(20.5, 20.5)]),
    (list, {"type": "array"}, [([1, "a"], [1, "a"])]),
    (list[int], {"type": "array", "items": INT}, [([], []), ([1, 2.0], [1, 2])]),
    (Sequence[str], {"type": "array", "items": STR}, [(["a"], ["a"])]),
    (Iterable[list[int]], {"type": "array", "items": {"type": "array", "items": INT}}, [([[1], []], [[1], []])]),
    (set[int], {"type": "array", "items": INT}, [([1, 1, 2], {1, 2})]),
    (frozenset[str], {"type": "array", "items": STR}, [(["a", "a"], frozenset("a"))]),
    (collections.deque[int], {"type": "array", "items": INT}, [([1], collections.deque([1]))]),
    (tuple, {"type": "array"}, [([1, "a"], (1, "a"))]),
    (tuple[int, ...], {"type": "array", "items": INT}, [([1, 2], (1, 2))]),
    (tuple[float, str], {"type": "array", "prefixItems": [NUM, STR], "minItems": 2, "maxItems": 2}, [([1, "a"], (1.0, "a"))]),
    (dict, {"type": "object"}, [({"a": 1}, {"a": 1})]),
    (dict[str, float], {"type": "object", "additionalProperties": NUM}, [({"a": 1}, {"a": 1.0})]),
    (Mapping[str, Any], {"type": "object"}, [({"a": None}, {"a": None})]),
    (typing.List[int], {"type": "array", "items": INT}, [([1], [1])]),  # noqa: UP006
    (typing.Dict[str, int], {"type": "object", "additionalProperties": INT}, [({"a": 1}, {"a": 1})]),  # noqa: UP006
    (Literal["a", "b"], {"type": "string", "enum": ["a", "b"]}, [("b", "b")]),
    (Literal[1, "a", None], {"enum": [1, "a", None]}, [(1, 1), ("a", "a"), (None, None), (1.0, 1)]),
    (Literal[Unit.CELSIUS], {"type": "string", "enum": ["C"]}, [("C", Unit.CELSIUS)]),
    (Literal[True, 1], {"enum": [True, 1]}, [(True, True), (1, 1)]),
    (Unit, {"type": "string", "enum": ["C", "F"]}, [("F", Unit.FAHRENHEIT)]),
    (Mode, {"type": "string", "enum": ["fast", "slow"]}, [("slow", Mode.SLOW)]),
    (Level, {"type": "integer", "enum": [1, 2]}, [(2, Level.HIGH)]),
    (Shape, {"type": "string", "enum": ["SQUARE", "WIDE"]}, [("WIDE", Shape.WIDE)]),
    (Optional[int], {"type": ["integer", "null"]}, [(None, None), (3, 3)]),  # noqa: UP045
    (int | None, {"type": ["integer", "null"]}, [(None, None), (3, 3)]),
    (Union[str, list[str]], {"anyOf": [STR, {"type": "array", "items": STR}]}, [("a", "a"), (["a"], ["a"])]),  # noqa: UP007
    (Optional[Unit], {"anyOf": [{"type": "string", "enum": ["C", "F"]}, NULL]}, [("C", Unit.CELSIUS), (None, None)]),  # noqa: UP045
    (list[int] | list[str], {"anyOf": [{"type": "array", "items": INT}, {"type": "array", "items": STR}]},
     [([1], [1]), (["a"], ["a"])]),
    (date | str, {"anyOf": [{"type": "string", "format": "date"}, STR]},
     [("2025-01-31", date(2025, 1, 31)), ("today", "today")]),
    (int | Any, {}, [("x", "x")]),
    (list[int] | Sequence[int], {"type": "array", "items": INT}, [([1], [1])]),
    (T, {}, [("x", "x")]),
    (TypeVar("B", bound=int), INT, [(1, 1)]),
    (TypeVar("C", int, str), {"type": ["integer", "string"]}, [(1, 1), ("a", "a")]),
    (Box[int], {"type": "object", "properties": {"content": {}}, "required": ["content"], "additionalProperties": False},
     [({"content": 1}, Box(1))]),
    (datetime, {"type": "string", "format": "date-time"},
     [("2025-01-31T12:30:00Z", datetime(2025, 1, 31, 12, 30, tzinfo=timezone.utc)),
      ("2025-01-31T12:30:00.5+00:00", datetime(2025, 1, 31, 12, 30, 0, 500000, timezone.utc)),
      ("2025-01-31T12:30:00.123456789Z", datetime(2025, 1, 31, 12, 30, 0, 123456, timezone.utc)),
      ("2025-01-31 12:30", datetime(2025, 1, 31, 12, 30))]),
    (date, {"type": "string", "format": "date"}, [("2025-01-31", date(2025, 1, 31))]),
    (time, {"type": "string", "format": "time"}, [("12:30:00Z", time(12, 30, tzinfo=timezone.utc)), ("12:30", time(12, 30))]),
    (UUID, {"type": "string", "format": "uuid"}, [("00000000-0000-0000-0000-00000000000a", UUID(int=10))]),
    (Decimal, NUM, [(0.1, Decimal("0.1")), (3, Decimal(3))]),
    (Path, STR, [("a/b", Path("a/b"))]),
    (Point, POINT, [({"x": 1}, Point(1.0)), ({"x": 1, "y": 2.5}, Point(1.0, 2.5))]),
    (Plain, {"type": "object", "additionalProperties": False,
             "properties": {"names": {"type": "array", "items": STR}, "scale": {"type": "integer", "default": 1}}},
     [({}, Plain()), ({"names": ["a"], "scale": 2}, Plain(["a"], 2))]),
    (Pair, {"type": "object", "properties": {"a": INT, "b": {"type": "string", "default": "b"}}, "required": ["a"],
            "additionalProperties": False}, [({"a": 1}, Pair(1))]),
    (Movie, {"type": "object", "properties": {"title": STR, "year": INT}, "required": ["title"], "additionalProperties": False},
     [({"title": "M"}, {"title": "M"}), ({"title": "M", "year": 1931.0}, {"title": "M", "year": 1931})]),
    (Song, {"type": "object", "properties": {"title": STR, "year": {"type": "integer", "description": "When."}},
            "required": ["title"], "additionalProperties": False}, [({"title": "M"}, {"title": "M"})]),
    (list[Point], {"type": "array", "items": POINT}, [([{"x": 1}, {"x": 2}], [Point(1.0), Point(2.0)])]),
    (typing_extensions.TypeAliasType("Ids", list[int]), {"type": "array", "items": INT}, [([1], [1])]),
    (Annotated[int, "How many."], {"type": "integer", "description": "How many."}, [(1, 1)]),
    (Annotated[int, pydantic.Field(ge=1, lt=10, description="Few.")],
     {"type": "integer", "minimum": 1, "exclusiveMaximum": 10, "description": "Few."}, [(1, 1), (9, 9)]),
    (Annotated[float, SimpleNamespace(gt=0, le=1, multiple_of=0.1)],
     {"type": "number", "exclusiveMinimum": 0, "maximum": 1, "multipleOf": 0.1}, [(0.3, 0.3), (1, 1)]),
    (Annotated[str, SimpleNamespace(min_length=1, max_length=2)], {"type": "string", "minLength": 1, "maxLength": 2},
     [("ab", "ab"), ("ä", "ä")]),
    (Annotated[list[str], SimpleNamespace(min_length=1)], {"type": "array", "items": STR, "minItems": 1}, [(["a"], ["a"])]),
    (Annotated[int | None, SimpleNamespace(ge=1)], {"type": ["integer", "null"], "minimum": 1}, [(None, None), (1, 1)]),
    (Annotated[int, typing_extensions.Doc("How many.")], {"type": "integer", "description": "How many."}, [(1, 1)]),
    (Annotated[int, object(), SimpleNamespace(metadata={"a": 1})], INT, [(1, 1)]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "schema", "values"), TYPES, ids=[str(case[0])[:60] for case in TYPES])
def test_types(kind: Any, schema: dict[str, Any], values: list[tuple[Any, Any]]) -> None:
    schemas = Schemas()
    assert schemas.of(kind) == schema and not schemas.definitions
    check_enforceable(schema, {})
    for given, expected in values:
        found = convert(given, kind, "x")
        assert found == expected and type(found) is type(expected), given
    json.dumps(schema)


def check_enforceable(schema: dict[str, Any], definitions: dict[str, Any]) -> None:
    """As an answer, and as the type of an argument."""
    from_json_schema({**schema, "$defs": definitions})
    parameters = {"type": "object", "properties": {"a": schema, "b": schema}, "required": ["b"], "$defs": definitions}
    tool_constraint([{"name": "f", "parameters": parameters}])


# type, JSON value, what is told of it
WRONG: list[tuple[Any, Any, str]] = [
    (str, 3, "argument 'x' must be a string, not 3"),
    (int, "3", "argument 'x' must be an integer, not \"3\""),
    (int, 3.5, "must be an integer, not 3.5"),
    (int, True, "must be an integer, not true"),
    (int, math.nan, 'must be an integer, not "nan"'),
    (float, False, "must be a number, not false"),
    (float, None, "must be a number, not null"),
    (bool, 1, "must be true or false, not 1"),
    (list[int], {"a": 1}, 'must be a list, not {"a": 1}'),
    (list[int], [1, "a"], "argument 'x[1]' must be an integer, not \"a\""),
    (list[int], "abc", 'must be a list, not "abc"'),
    (tuple[int, int], [1], "must be a list of 2 values, not [1]"),
    (dict[str, list[int]], {"a": [1, None]}, "argument 'x.a[1]' must be an integer, not null"),
    (Literal["a", "b"], "c", 'must be one of "a", "b", not "c"'),
    (Literal["a"], ["a"], 'must be "a", not ["a"]'),
    (Literal[1], True, "must be 1, not true"),
    (Unit, "K", 'must be one of "C", "F", not "K"'),
    (int | None, "a", 'must be an integer, not "a"'),
    (int | str, [], "must be an integer or a string, not []"),
    (date, "31.1.2025", 'must be a date such as "2025-01-31", not "31.1.2025"'),
    (date, 20250131, 'must be a date such as "2025-01-31", not 20250131'),
    (datetime, "now", 'must be a time such as "2025-01-31T12:30:00Z", not "now"'),
    (UUID, "1", 'must be a UUID, not "1"'),
    (Decimal, True, "must be a number, not true"),
    (Point, {"x": "a"}, "argument 'x.x' must be a number, not \"a\""),
    (Point, {"z": 1}, "argument 'x' has no field 'z' and needs field 'x'; it takes x (a number), y (a number, optional)"),
    (Point, [1, 2], "argument 'x' must be an object, not [1, 2]"),
    (Song, {}, "argument 'x' needs field 'title'; it takes title (a string), year (an integer, optional)"),
    (Positive, {"n": -1}, "argument 'x': n must not be negative, and is -1"),
    (User, {"name": "Ada", "age": -1}, "argument 'x': age: Input should be"),
    (Annotated[int, SimpleNamespace(ge=1)], 0, "must be at least 1, not 0"),
    (Annotated[float, SimpleNamespace(multiple_of=0.1)], 0.35, "must be a multiple of 0.1, not 0.35"),
    (Annotated[str, SimpleNamespace(max_length=2)], "abc", 'must be of length at most 2, not "abc"'),
    (str, ["a" * 200], "a..."),
]


@pytest.mark.parametrize(("kind", "value", "told"), WRONG, ids=[str(case[0])[:60] for case in WRONG])
def test_wrong_values(kind: Any, value: Any, told: str) -> None:
    with pytest.raises(ParameterError) as caught:
        convert(value, kind, "x")
    assert told in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize("kind", [complex, bytes, Callable[[int], int], list[complex], dict[int, str], Literal[b"a"], "x", [1]])
def test_types_without_a_form_in_json(kind: Any) -> None:
    with pytest.raises(ParameterError, match=r"no form in JSON|keys"):
        Schemas().of(kind)


def test_a_class_that_contains_itself() -> None:
    schemas = Schemas()
    properties = {"tree": schemas.of(Node), "more": schemas.of(Node | None)}
    assert properties == {"tree": {"$ref": "#/$defs/Node"}, "more": {"anyOf": [{"$ref": "#/$defs/Node"}, NULL]}}
    assert schemas.definitions["Node"]["properties"]["children"] == {"type": "array", "items": {"$ref": "#/$defs/Node"}}
    for schema in properties.values():
        check_enforceable(schema, schemas.definitions)
    assert convert({"name": "a", "children": [{"name": "b"}]}, Node, "x") == Node("a", [Node("b")])
    with pytest.raises(ParameterError, match=r"'x.children\[0\].name' must be a string, not 3"):
        convert({"name": "a", "children": [{"name": 3}]}, Node, "x")


def test_definitions_of_two_classes_of_one_name() -> None:
    other = make_dataclass("Node", [("next", "Node | None")], namespace={"__module__": __name__})
    other.__annotations__["next"] = other | None
    schemas = Schemas()
    assert schemas.of(tuple[Node, other])["prefixItems"] == [{"$ref": "#/$defs/Node"}, {"$ref": "#/$defs/Node_"}]
    assert schemas.definitions["Node_"]["properties"] == {"next": {"anyOf": [{"$ref": "#/$defs/Node_"}, NULL]}}


@pytest.mark.skipif(sys.version_info < (3, 12), reason="the type statement came with Python 3.12")
def test_a_type_that_contains_itself() -> None:
    names: dict[str, Any] = {}
    exec("type Json = dict[str, Json] | list[Json] | int", names)
    schemas = Schemas()
    assert schemas.of(names["Json"]) == {"$ref": "#/$defs/Json"}
    assert schemas.definitions["Json"]["anyOf"][1] == {"type": "array", "items": {"$ref": "#/$defs/Json"}}
    check_enforceable({"$ref": "#/$defs/Json"}, schemas.definitions)
    assert convert({"a": [1, {}]}, names["Json"], "x") == {"a": [1, {}]}
    with pytest.raises(ParameterError, match="'x' must be an object or a list or an integer, not \"a\""):
        convert("a", names["Json"], "x")


def test_pydantic_models() -> None:
    schemas = Schemas()
    schema = schemas.of(list[Team])
    assert set(schemas.definitions) == {"User"}
    check_enforceable(schema, schemas.definitions)
    team = convert([{"lead": {"name": "Ada", "age": 36}}], list[Team], "x")
    assert team == [Team(lead=User(name="Ada", age=36))]
    assert to_json(team) == '[{"lead": {"name": "Ada", "age": 36}, "members": []}]'
    with pytest.raises(ParameterError) as caught:
        convert([{"lead": {"age": -1}}], list[Team], "x")
    assert str(caught.value) == ("argument 'x[0]': lead.name: Field required; "
                                 "lead.age: Input should be greater than or equal to 0")


@pytest.mark.parametrize(("value", "text"), [
    ("as it is", "as it is"),
    (None, "null"),
    (True, "true"),
    (3.5, "3.5"),
    ({"a": [1, (2, 3)], 4: {5}}, '{"a": [1, [2, 3]], "4": [5]}'),
    ("é", "é"),
    (["é"], '["é"]'),
    (Unit.CELSIUS, '"C"'),
    (Mode.FAST, '"fast"'),
    (Shape.WIDE, '"WIDE"'),
    ({Unit.CELSIUS: 1}, '{"C": 1}'),
    (Node("a", [Node("b")]), '{"name": "a", "children": [{"name": "b", "children": []}]}'),
    (Pair(1), '{"a": 1, "b": "b"}'),
    (datetime(2025, 1, 31, 12), '"2025-01-31T12:00:00"'),
    (Decimal("1.5"), "1.5"),
    ([Path("a/b"), UUID(int=10)], '["a/b", "00000000-0000-0000-0000-00000000000a"]'),
    (np.float32(0.5), "0.5"),
    (np.arange(3), "[0, 1, 2]"),
    (User(name="Ada", age=36), '{"name": "Ada", "age": 36}'),
    (1 + 2j, '"(1+2j)"'),
    ([math.inf, -math.inf], '["inf", "-inf"]'),
])  # fmt: skip
def test_results_as_json(value: Any, text: str) -> None:
    assert to_json(value) == text
