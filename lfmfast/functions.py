"""Python functions as tools: how they are described to a model, and calls with what the model gave."""

from __future__ import annotations

import asyncio
import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from lfmfast import docstrings
from lfmfast.errors import ParameterError
from lfmfast.json_types import MISSING, Field, Schemas, class_fields, read_types
from lfmfast.json_values import convert_fields

__all__ = ["acall", "call", "is_async", "named", "tool_of"]

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")


class _Described(NamedTuple):
    fields: list[Field]
    n_positional: int  # of the fields, how many can't be given by name
    text: str


def tool_of(function: Callable[..., Any], *, name: str | None = None, description: str | None = None) -> dict[str, Any]:
    """The description of a function for a model, as OpenAI's API has it: from its signature, type hints and docstring.

    Parameters
    ----------
    function : callable
        A function, also an async one, a method, a `functools.partial` (what it has by name is not shown), an object with
        ``__call__``, or a dataclass. Each parameter needs a type hint; :mod:`lfmfast.json_types` lists the types. A
        parameter with a default may be left out by the model. ``Annotated[str, "The city."]`` describes a parameter, or
        the docstring does, in numpydoc, Google or Sphinx style.
    name : str, optional
        By default the function's own.
    description : str, optional
        By default what the docstring says before its first section.

    Returns
    -------
    dict
        ``{"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}``

    Raises
    ------
    ParameterError
        The function takes ``*args`` or ``**kwargs``, a parameter has no type hint or one that has no form in JSON, or the
        name is none.

    Examples
    --------
    >>> def add(a: float, b: float = 1) -> float:
    ...     "Add two numbers."
    ...     return a + b
    >>> tool_of(add)["function"]["parameters"]["properties"]
    {'a': {'type': 'number'}, 'b': {'type': 'number', 'default': 1}}
    """
    called = _name_of(function) if name is None else name
    if not isinstance(called, str) or not _NAME.fullmatch(called):
        raise ParameterError(f"{called!r} is no name for a tool: 1 to 64 of A-Z, a-z, 0-9, '_', '.' and '-', no digit first")
    fields, _, text = _described(function)
    schemas = Schemas()
    parameters = schemas.of_fields(fields)
    if schemas.definitions:
        parameters["$defs"] = schemas.definitions
    text = text if description is None else description
    said = {"description": text} if text else {}
    return {"type": "function", "function": {"name": called, **said, "parameters": parameters}}


def named(functions: Mapping[str, Callable[..., Any]] | Iterable[Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Functions by the names that a model calls them by."""
    if isinstance(functions, Mapping):
        return dict(functions)
    found: dict[str, Callable[..., Any]] = {}
    for function in functions:
        name = _name_of(function)
        if name in found:
            raise ParameterError(f"two functions are called {name!r}: give them as a dict, by different names")
        found[name] = function
    return found


def call(function: Callable[..., Any], arguments: Mapping[str, Any], *, name: str | None = None) -> Any:
    """Call a function with arguments as a model gives them: JSON values, which become what the type hints say.

    Raises
    ------
    ParameterError
        The arguments don't fit, or the function is an async one. The message says all that is wrong, and is meant for the
        model too: ``get_weather has no argument 'town' and needs argument 'city'; it takes city (a string)``.
    Exception
        What the function itself raises.

    Examples
    --------
    >>> from datetime import date
    >>> def weekday(day: date) -> str:
    ...     return f"{day:%A}"
    >>> call(weekday, {"day": "2000-01-01"})
    'Saturday'
    """
    args, kwargs = _bound(function, arguments, name)
    result = function(*args, **kwargs)
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()
        raise ParameterError(f"{name or _name_of(function)} is an async function: it needs acall(), or arun_tools()")
    return result


async def acall(function: Callable[..., Any], arguments: Mapping[str, Any], *, name: str | None = None) -> Any:
    """:func:`call` for an event loop: async functions are awaited, and others run in a thread."""
    args, kwargs = _bound(function, arguments, name)
    result = function(*args, **kwargs) if is_async(function) else await asyncio.to_thread(function, *args, **kwargs)
    return await result if inspect.isawaitable(result) else result


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a call gives a coroutine."""
    inner = _inner(function)
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)


def _inner(function: Any) -> Any:
    """Without partial()."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _name_of(function: Any) -> str:
    inner = _inner(function)
    return str(getattr(inner, "__name__", type(inner).__name__))


def _bound(function: Any, arguments: Mapping[str, Any], name: str | None) -> tuple[list[Any], dict[str, Any]]:
    fields, n_positional, _ = _described(function)
    values = convert_fields(arguments, fields, name or _name_of(function))
    n_given = max((i + 1 for i, field in enumerate(fields[:n_positional]) if field.name in values), default=0)
    return [values.pop(field.name, field.default) for field in fields[:n_given]], values


def _described(function: Any) -> _Described:
    if not callable(function):
        raise ParameterError(f"a tool must be a function, not {function!r}")
    name, inner = _name_of(function), _inner(function)
    source = inspect.unwrap(inner)
    if not isinstance(source, type) and not hasattr(source, "__name__"):
        source = inspect.unwrap(type(source).__call__)
    doc = inspect.getdoc(source) or ("" if source is inner else inspect.getdoc(inner)) or ""
    said = docstrings.parse("" if doc.startswith(f"{name}(") else doc)  # what dataclass() writes, and C functions have
    if isinstance(source, type) and source is function and (fields := class_fields(source)) is not None:
        return _Described(fields, 0, said.text)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise ParameterError(f"{name} can't be a tool: {error}") from error
    fixed = set(function.keywords) if isinstance(function, functools.partial) else set()
    given = [parameter for parameter in signature.parameters.values() if parameter.name not in fixed]
    for parameter in given:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ParameterError(f"{name} takes {parameter}: a tool needs named parameters (and a decorator functools.wraps)")
        if parameter.annotation is MISSING:
            raise ParameterError(f"parameter {parameter.name!r} of {name} has no type hint")
    module = sys.modules.get(getattr(source, "__module__", None) or "")
    names = getattr(source, "__globals__", None) or (vars(module) if module else {})
    generic = {parameter.__name__: parameter for parameter in getattr(source, "__type_params__", ())}
    types = read_types({parameter.name: parameter.annotation for parameter in given}, {**names, **generic}, name)
    fields = [Field(p.name, types[p.name], p.default is MISSING, p.default, said.parameters.get(p.name, "")) for p in given]
    return _Described(fields, sum(p.kind is p.POSITIONAL_ONLY for p in given), said.text)
