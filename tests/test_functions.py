"""Functions as tools: their schemas, and calls with what a model gives."""

from __future__ import annotations

import asyncio
import functools
import json
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from enum import Enum
from typing import Annotated, Any

import pytest

from lfmfast import docstrings
from lfmfast.errors import ParameterError
from lfmfast.functions import acall, call, is_async, named, tool_of

INT = {"type": "integer"}


class Unit(Enum):
    CELSIUS = "C"
    FAHRENHEIT = "F"


@dataclass
class Point:
    """A place."""

    x: float
    y: float = 0.0


@dataclass
class Tree:
    branches: list[Tree]


def get_weather(city: str) -> dict[str, Any]:
    """Get the weather in a city."""
    return {"temperature": 21, "sky": f"sunny in {city}"}


def numpydoc(city: str, unit: Unit = Unit.CELSIUS, days: int | None = None, *, exact: bool = False) -> str:
    """Get the forecast.

    For some days.

    Parameters
    ----------
    city : str
        The city,
        in English.
    unit, other : {"C", "F"}, optional
        C or F.
    days
        How many: 1 to 7.

    Returns
    -------
    str
        All of it.
    """
    return f"{city} {unit.name} {days} {exact}"


def google(city: str, unit: Unit = Unit.CELSIUS, days: int | None = None, *, exact: bool = False) -> str:
    """Get the forecast.

    For some days.

    Args:
        city (str): The city,
            in English.
        unit (Literal["C", "F"], optional): C or F.
        days: How many: 1 to 7.

    Returns:
        str: All of it.
    """
    return f"{city} {unit.name} {days} {exact}"


def sphinx(city: str, unit: Unit = Unit.CELSIUS, days: int | None = None, *, exact: bool = False) -> str:
    """Get the forecast.

    For some days.

    :param str city: The city,
        in English.
    :param unit: C or F.
    :type unit: Unit
    :param days: How many: 1 to 7.
    :returns: All of it.
    """
    return f"{city} {unit.name} {days} {exact}"


def test_the_form_that_models_are_trained_with(reference: dict[str, Any]) -> None:
    def add(a: float, b: float) -> float:
        """Add two numbers."""
        return a + b

    assert [tool_of(get_weather), tool_of(add)] == reference["tools"]
    assert json.dumps(tool_of(get_weather)) == json.dumps(reference["tools"][0])  # the order too


@pytest.mark.parametrize("function", [numpydoc, google, sphinx])
def test_docstring_styles(function: Callable[..., str]) -> None:
    tool = tool_of(function)["function"]
    assert tool["name"] == function.__name__ and tool["description"] == "Get the forecast.\n\nFor some days."
    assert tool["parameters"] == {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "The city, in English."},
                       "unit": {"type": "string", "enum": ["C", "F"], "description": "C or F.", "default": "C"},
                       "days": {"type": ["integer", "null"], "description": "How many: 1 to 7."},
                       "exact": {"type": "boolean", "default": False}},
        "required": ["city"],
    }  # fmt: skip
    assert call(function, {"city": "Rome"}) == "Rome CELSIUS None False"
    assert call(function, {"exact": True, "unit": "F", "days": 3, "city": "Rome"}) == "Rome FAHRENHEIT 3 True"
    assert call(function, {"city": "Rome", "days": None}) == "Rome CELSIUS None False"


@pytest.mark.parametrize(("doc", "expected"), [
    (None, ("", {})),
    ("", ("", {})),
    ("One.\n\nNote: this is text.\nNote:\nthis too", ("One.\n\nNote: this is text.\nNote:\nthis too", {})),
    ("One.\n\nExamples\n--------\n>>> 1\n1\n\nParameters\n----------\na\n    A.\nb : int", ("One.", {"a": "A."})),
    ("One.\n\nExample:\n    f(1)\n\nArgs:\n    a: A.\n\n        More.\n    *b: B.\n    no entry",
     ("One.", {"a": "A. More.", "b": "B."})),
    ("One.\n\n:param int a: A.\n:param b:\n    B.\n:raises ValueError: never", ("One.", {"a": "A.", "b": "B."})),
    ("Parameters\n----------", ("", {})),
    ("Args:\n", ("Args:", {})),
    ("One: :func:`x` is\n:class:`y` of z", ("One: :func:`x` is\n:class:`y` of z", {})),
])  # fmt: skip
def test_docstrings(doc: str | None, expected: tuple[str, dict[str, str]]) -> None:
    assert docstrings.parse(doc) == expected


def test_name_and_description() -> None:
    tool = tool_of(get_weather, name="weather.now", description="It.")["function"]
    assert (tool["name"], tool["description"]) == ("weather.now", "It.")
    assert "description" not in tool_of(lambda: None, name="f")["function"]
    for name in ("", "1a", "a b", "ä", "a" * 65, 3):
        with pytest.raises(ParameterError, match="is no name for a tool"):
            tool_of(get_weather, name=name)  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="<lambda>"):
        tool_of(lambda: None)


def test_the_nearest_description_wins() -> None:
    def f(a: Annotated[int, "From the type."], b: Point, c: Point) -> None:
        """Do.

        Args:
            a: From the docstring.
            b: From the docstring.
        """

    properties = tool_of(f)["function"]["parameters"]["properties"]
    assert [p["description"] for p in properties.values()] == ["From the type.", "From the docstring.", "A place."]


def test_a_default_of_none_may_be_given() -> None:
    def f(a: int = None) -> int:  # type: ignore[assignment]  # noqa: RUF013
        return a

    assert tool_of(f)["function"]["parameters"] == {"type": "object", "properties": {"a": INT}}
    assert call(f, {}) is None and call(f, {"a": None}) is None and call(f, {"a": 1}) == 1


def test_defaults_that_are_no_json_are_not_shown() -> None:
    def f(a: Any = object(), b: Any = Point(1.0), c: Any = date(2025, 1, 31), d: Any = (1, {2}),  # noqa: B008
          e: float = math.inf) -> None: ...  # fmt: skip

    shown = tool_of(f)["function"]["parameters"]
    assert shown["properties"] == {"a": {}, "b": {"default": {"x": 1.0, "y": 0.0}}, "c": {"default": "2025-01-31"},
                                   "d": {"default": [1, [2]]}, "e": {"type": "number"}}  # fmt: skip
    assert "required" not in shown


class Clock:
    """Knows the time."""

    def __init__(self, zone: str) -> None:
        self.zone = zone

    def now(self, offset: Annotated[int, "Hours."] = 0) -> str:
        """Tell the time."""
        return f"{offset} in {self.zone}"

    @classmethod
    def kind(cls, of: Unit) -> str:
        return f"{cls.__name__} {of.name}"

    @staticmethod
    def add(a: int, b: int) -> int:
        return a + b

    def __call__(self, city: str) -> str:
        """Tell the time in a city."""
        return f"{city} {self.zone}"


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return "logged", function(*args, **kwargs)

    return wrapper


def test_kinds_of_callables() -> None:
    clock = Clock("UTC")
    tool = tool_of(clock.now)["function"]
    assert (tool["name"], tool["description"], list(tool["parameters"]["properties"])) == ("now", "Tell the time.", ["offset"])
    assert call(clock.now, {"offset": 2}) == "2 in UTC"
    assert call(clock.kind, {"of": "C"}) == "Clock CELSIUS" and call(Clock.kind, {"of": "F"}) == "Clock FAHRENHEIT"
    assert call(clock.add, {"a": 1, "b": 2}) == 3 and tool_of(Clock.add)["function"]["name"] == "add"
    tool = tool_of(clock)["function"]
    assert (tool["name"], tool["description"]) == ("Clock", "Tell the time in a city.")
    assert list(tool["parameters"]["properties"]) == ["city"]
    assert call(clock, {"city": "Rome"}) == "Rome UTC"
    tool = tool_of(logged(numpydoc))["function"]
    assert tool == tool_of(numpydoc)["function"]
    assert call(logged(numpydoc), {"city": "Rome", "unit": "F"}) == ("logged", "Rome FAHRENHEIT None False")
    tool = tool_of(Point)["function"]
    assert (tool["name"], tool["description"]) == ("Point", "A place.") and call(Point, {"x": 1}) == Point(1.0)
    assert tool_of(functools.lru_cache(get_weather)) == tool_of(get_weather)


def test_partial() -> None:
    bound = functools.partial(functools.partial(numpydoc, "Rome"), days=3)
    tool = tool_of(bound)["function"]
    assert (tool["name"], list(tool["parameters"]["properties"])) == ("numpydoc", ["unit", "exact"])
    assert tool["description"].startswith("Get the forecast.") and "required" not in tool["parameters"]
    assert call(bound, {"unit": "F"}) == "Rome FAHRENHEIT 3 False"
    with pytest.raises(ParameterError, match="numpydoc has no argument 'days'"):
        call(bound, {"days": 5})
    assert call(functools.partial(Clock("UTC").now, offset=1), {}) == "1 in UTC"


def test_positional_only_parameters() -> None:
    def f(a: int, b: int = 2, c: int = 3, /, d: int = 4, *, e: int = 5) -> list[int]:
        return [a, b, c, d, e]

    assert call(f, {"a": 1}) == [1, 2, 3, 4, 5]
    assert call(f, {"c": 7, "a": 1}) == [1, 2, 7, 4, 5]
    assert call(f, {"e": 9, "d": 8, "b": 6, "a": 1}) == [1, 6, 3, 8, 9]


def test_a_signature_of_its_own() -> None:
    """As decorators make it that take or add a parameter."""

    def f(**values: Any) -> dict[str, Any]:
        return values

    def like(n: list[Unit], unit: Unit = Unit.CELSIUS) -> None: ...

    import inspect

    f.__signature__ = inspect.signature(like)  # type: ignore[attr-defined]
    assert list(tool_of(f)["function"]["parameters"]["properties"]) == ["n", "unit"]
    assert call(f, {"n": ["F"]}) == {"n": [Unit.FAHRENHEIT]}


def test_types_that_only_the_function_knows() -> None:
    class Local(Enum):
        A = "a"

    def f(x: Local) -> None: ...

    f.__annotations__["x"] = Local
    assert call(lambda: 1, {}) == 1
    assert tool_of(f)["function"]["parameters"]["properties"]["x"]["enum"] == ["a"]

    def g(x: Missing) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(ParameterError, match=r"a type in g can't be read: name 'Missing'"):
        tool_of(g)


def not_wrapped(*args: Any, **kwargs: Any) -> None: ...


def not_named(**options: Any) -> None: ...


def no_hint(a: int, b) -> None: ...  # type: ignore[no-untyped-def]


@pytest.mark.parametrize(("function", "told"), [
    (not_wrapped, r"not_wrapped takes \*args.*functools.wraps"),
    (not_named, r"not_named takes \*\*options"),
    (no_hint, "parameter 'b' of no_hint has no type hint"),
    (Clock.now, "parameter 'self' of now has no type hint"),
    (math.hypot, "hypot"),
    (3, "must be a function, not 3"),
])  # fmt: skip
def test_functions_that_are_no_tools(function: Any, told: str) -> None:
    with pytest.raises(ParameterError, match=told):
        tool_of(function)
    with pytest.raises(ParameterError, match=told):
        call(function, {})


def test_definitions_stand_at_the_root() -> None:
    def grow(tree: Tree) -> int:
        return len(tree.branches)

    parameters = tool_of(grow)["function"]["parameters"]
    assert parameters["properties"] == {"tree": {"$ref": "#/$defs/Tree"}} and list(parameters["$defs"]) == ["Tree"]
    assert call(grow, {"tree": {"branches": [{"branches": []}]}}) == 1


# --- calls ---


def test_all_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(ParameterError) as caught:
        call(numpydoc, {"town": "Rome", "days": "3", "unit": 1})
    assert str(caught.value) == (
        "numpydoc has no argument 'town' and needs argument 'city'; it takes city (a string), "
        'unit (one of "C", "F", optional), days (an integer or null, optional), exact (true or false, optional); '
        "argument 'days' must be an integer, not \"3\"; argument 'unit' must be one of \"C\", \"F\", not 1"
    )
    with pytest.raises(ParameterError, match="time has no argument 'x'; it takes no arguments"):
        call(lambda: None, {"x": 1}, name="time")
    with pytest.raises(ParameterError, match=r"get_weather must be an object, not \[1\]|arguments"):
        call(get_weather, [1])  # type: ignore[arg-type]


def test_errors_of_the_function_pass() -> None:
    def divide(a: float, b: float) -> float:
        return a / b

    with pytest.raises(ZeroDivisionError):
        call(divide, {"a": 1, "b": 0})


def test_async_functions() -> None:
    async def double(n: int) -> int:
        await asyncio.sleep(0)
        return 2 * n

    class Doubler:
        async def __call__(self, n: int) -> int:
            return 2 * n

    def thread(n: int) -> str:
        return threading.current_thread().name * n

    async def main() -> None:
        assert await acall(double, {"n": 2}) == 4
        assert await acall(functools.partial(double), {"n": 3}) == 6
        assert await acall(Doubler(), {"n": 4}) == 8
        assert await acall(lambda: double(5), {}) == 10
        assert await acall(thread, {"n": 1}) != threading.current_thread().name
        with pytest.raises(ParameterError, match="double needs argument 'n'"):
            await acall(double, {})

    asyncio.run(main())
    assert tool_of(double)["function"]["parameters"]["properties"] == {"n": INT}
    assert all(map(is_async, (double, functools.partial(double), Doubler())))
    assert not any(map(is_async, (thread, Doubler, print)))
    with pytest.raises(ParameterError, match="double is an async function"):
        call(double, {"n": 1})


def test_named() -> None:
    assert named([get_weather, Clock("UTC")]).keys() == {"get_weather", "Clock"}
    assert named({"w": get_weather}) == {"w": get_weather}
    with pytest.raises(ParameterError, match="two functions are called 'get_weather'"):
        named([get_weather, functools.partial(get_weather)])


