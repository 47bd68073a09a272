"""Grammars for tool calls in LFM2's format: `[get_weather(city="Paris", days=3), get_time()]` between two control tokens.

Arguments come in any order, each at most once, the required ones always, the optional ones if the model likes; if there are
more than 64, in the schema's order, the required ones first. A value is what the tool's JSON schema allows, in JSON; True,
False, None and 'single quotes' count as well where Python would write them. Arguments that a schema doesn't declare can't be
given.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lfmfast.constraint import COMPACT_STYLE, Constraint, compiled
from lfmfast.errors import ParameterError
from lfmfast.json_schema import normalized

__all__ = ["answer_or_calls", "tool_constraint"]

#: Of which so many may come in any order: llguidance marks those that a call has by the bits of a number.
MAX_ARGUMENTS, MAX_FREE_ARGUMENTS = 200, 64
MAX_TOOLS = 512

_TOOL_NAME = re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)
_ARGUMENT_NAME = re.compile(r"(?!\d)[\w$][\w$.:/-]*")
# What the schema of `parameters` may have besides properties.
_PARAMETERS = {"type", "properties", "required", "additionalProperties", "$defs"}


def tool_constraint(tools: Sequence[Any], *, name: str | None = None, parallel: bool = True,
                    open: str = "<|tool_call_start|>", close: str = "<|tool_call_end|>", lazy: bool = False,
                    marked: bool = True) -> Constraint:  # fmt: skip
    """A grammar for calls of the given tools, with the tokens around them.

    Parameters
    ----------
    tools : sequence of mapping
        OpenAI's tool objects, or the `function` part of them alone.
    name : str, optional
        The only tool that may be called; by default any.
    parallel : bool
        Whether several calls may be made at a time; otherwise exactly one is.
    open, close : str
        What stands before and behind the list of calls.
    lazy : bool
        See `Constraint`.
    marked : bool
        Whether `open` and `close` are control tokens of the vocabulary. Otherwise they are plain text.

    Raises
    ------
    ParameterError
        For tools that are malformed, and for a schema that can't be enforced: with the tool, the argument and the keyword.
    """
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Iterable) or not tools:
        raise ParameterError(f"tools must be a list with something in it, not {type(tools).__name__}")
    if len(tools) > MAX_TOOLS:
        raise ParameterError(f"{len(tools):,} tools are too many for a grammar; the limit is {MAX_TOOLS}")
    functions = [_function(tool, at) for at, tool in enumerate(tools)]
    wanted = {f["name"]: f for f in functions if name is None or f["name"] == name}
    if name is not None and not wanted:
        raise ParameterError(f"there is no tool {name!r} (known: {', '.join(f['name'] for f in functions)[:500]})")
    lines = [_calls(function, f"t{at}") for at, function in enumerate(wanted.values())]
    one = " | ".join(f"t{at}" for at in range(len(lines)))
    edges = [text if marked and text else _quoted(text) for text in (open, close)]
    more = "(COMMA call)*" if parallel else ""
    head = f'start: {edges[0]} "[" call {more} "]" {edges[1]}\ncall: {one}\n'
    return compiled("the tools", "lark", head + "\n".join(lines) + "\nCOMMA: /, ?/\n", lazy=lazy)


def answer_or_calls(answer: Constraint, calls: Constraint | None, *, open: str = "<|tool_call_start|>",
                    close: str = "<|tool_call_end|>", marked: bool = True) -> Constraint:  # fmt: skip
    """A grammar for an answer of a form, or for tool calls in its place.

    Parameters
    ----------
    answer : Constraint
        Of the kind "json_schema".
    calls : Constraint, optional
        From `tool_constraint`; None is anything between `open` and `close`.
    open, close, marked
        See `tool_constraint`.
    """
    edges = [text if marked else _quoted(text) for text in (open, close)]
    rules = f"start: {edges[0]} /(?s:.*)/ {edges[1]}\n" if calls is None else calls.text
    head, begin, rest = rules.partition("start: ")
    assert begin and not head
    return compiled("the answer or its calls", "lark", f"start: answer | calls\nanswer: %json {answer.text}\ncalls: {rest}")


def _function(tool: Any, at: int) -> Mapping[str, Any]:
    """The `function` part of a tool, its name checked."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping):
        raise ParameterError(f"tools[{at}] must be an object with a function in it, not {type(tool).__name__}")
    name = function.get("name")
    if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
        raise ParameterError(f"tools[{at}]: the name {name!r:.80} can't be called; it takes letters, digits, '_', '.' and '-'")
    return function


def _calls(function: Mapping[str, Any], rule: str) -> str:
    """The rules for a call of one function, the first of them named `rule`."""
    try:
        arguments, required = _arguments(function.get("parameters"))
        if len(arguments) > MAX_ARGUMENTS:
            raise ParameterError(f"{len(arguments):,} arguments are too many for a grammar; the limit is {MAX_ARGUMENTS}")
        names = [n for n in arguments if n in required] + [n for n in arguments if n not in required]
        for name in names:
            if not _ARGUMENT_NAME.fullmatch(name):
                raise ParameterError(f"the argument name {name!r:.80} can't be written in a call")
        values = [f"{rule}_v{at}: {_value(name, arguments[name])}" for at, name in enumerate(names)]
    except ParameterError as error:
        raise ParameterError(f"tool {function['name']!r}: {error}") from None
    begin = _quoted(function["name"] + "(")
    if not names:
        return f'{rule}: {begin} ")"'
    given = [f"{_quoted(name + '=')} {rule}_v{at}" for at, name in enumerate(names)]
    if len(names) > MAX_FREE_ARGUMENTS:
        return "\n".join([_in_order(rule, begin, given, len(required)), *values])
    n, n_required = len(names), len(required)
    done = f" %if is_ones([0:{n_required}])" if n_required else ""
    alternatives = "\n  | ".join(f"{text} {rule}_rest::set_bit({at}) %if bit_clear({at})" for at, text in enumerate(given))
    return "\n".join([
        f"{rule}: {begin} ({rule}_next::0x0{'' if required else ' | ' + _quoted(')')})",
        f"{rule}_next::_: {alternatives}",
        f'{rule}_rest::_: ")"{done}\n  | COMMA {rule}_next::_' + ("" if n == 64 else f" %if bit_count_lt(_, {n})"),
        *values,
    ])  # fmt: skip


def _in_order(rule: str, begin: str, given: Sequence[str], n_required: int) -> str:
    """Rules for more arguments than there are bits: the required ones first, all in the order of the schema."""
    lines = [f'{rule}: {begin} {rule}_first0 ")"']
    for at, text in enumerate(given):
        # From the argument `at` on: as the first one that is written, or behind another.
        first, more = (f"{rule}_first{at + 1}", f"{rule}_more{at + 1}") if at + 1 < len(given) else ('""', '""')
        lines.append(f"{rule}_first{at}: {text} {more}" + (f" | {first}" if at >= n_required else ""))
        lines.append(f"{rule}_more{at}: COMMA {text} {more}" + (f" | {more}" if at >= n_required else ""))
    return "\n".join(lines)


def _arguments(parameters: Any) -> tuple[dict[str, dict[str, Any]], set[str]]:
    """The normalised schema of each argument, and the names of those that are required."""
    if parameters is None or parameters == {}:
        return {}, set()
    whole = normalized(parameters)
    if "$ref" in whole and not whole.keys() - {"$ref", "$defs"}:
        whole = {**whole["$defs"][whole["$ref"].rsplit("/", 1)[1]], "$defs": whole["$defs"]}
    if whole.get("type", "object") != "object":
        raise ParameterError(f"parameters must be the schema of an object, not of {whole['type']!r}")
    if others := sorted(whole.keys() - _PARAMETERS):
        raise ParameterError(f"{others[0]} at the top of parameters can't be enforced for a call")
    definitions = whole.get("$defs", {})
    arguments = dict(whole.get("properties", {}))
    for name in whole.get("required", ()):
        arguments.setdefault(name, whole.get("additionalProperties", True))
    required = set(whole.get("required", ()))
    for name in required:
        if arguments[name] is False:
            raise ParameterError(f"the argument {name!r} is required and its schema is false")
    complete = {}
    for name, schema in arguments.items():
        if schema is not False:
            complete[name] = {} if schema is True else _with_definitions(schema, definitions)
    return complete, required


def _with_definitions(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with those definitions that it needs."""
    needed: dict[str, Any] = {}
    todo: list[Any] = [schema]
    while todo:
        node = todo.pop()
        if isinstance(node, Mapping):
            reference = node.get("$ref")
            key = reference.rpartition("/")[2] if isinstance(reference, str) else ""
            if key in definitions and key not in needed:
                needed[key] = definitions[key]
                todo.append(definitions[key])
            todo += node.values()
        elif isinstance(node, list):
            todo += node
    return {**schema, "$defs": needed} if needed else dict(schema)


def _value(name: str, schema: Mapping[str, Any]) -> str:
    """The right side of the rule for the value of an argument."""
    text = json.dumps({**schema, "x-guidance": COMPACT_STYLE}, ensure_ascii=False)
    compiled(f"the argument {name!r}", "json_schema", text)  # alone, so that an error is where it belongs
    return " | ".join([f"%json {text}", *sorted(_python_spellings(schema, schema.get("$defs", {})))])


def _python_spellings(schema: Any, definitions: Mapping[str, Any], seen: frozenset[str] = frozenset()) -> set[str]:
    """Terminals for the values of a schema that Python spells otherwise than JSON; none where that is not plain to see."""
    if not isinstance(schema, Mapping):
        return _python_spellings({}, definitions) if schema is True else set()
    keys = schema.keys() - {"$defs"}
    if keys == {"$ref"}:
        key = schema["$ref"].rpartition("/")[2]
        return set() if key in seen else _python_spellings(definitions[key], definitions, seen | {key})
    if keys == {"anyOf"}:
        return set().union(*(_python_spellings(option, definitions, seen) for option in schema["anyOf"]))
    kinds = schema.get("type", ["null", "boolean", "string"])
    kinds = {kinds} if isinstance(kinds, str) else set(kinds)
    if keys - {"type"} in ({"enum"}, {"const"}):
        values = schema["enum"] if "enum" in keys else [schema["const"]]
        return {_quoted(_python(value)) for value in values if _KINDS.get(type(value)) in kinds}
    if keys & {"$ref", "allOf", "anyOf", "enum", "const"}:
        return set()
    spellings = {_quoted("None")} if "null" in kinds else set()
    spellings |= {_quoted("True"), _quoted("False")} if "boolean" in kinds else set()
    if "string" in kinds and not keys & {"pattern", "format"}:
        spellings.add(_single_quoted(schema.get("minLength", 0), schema.get("maxLength", "")))
    return spellings


_KINDS = {type(None): "null", bool: "boolean", str: "string"}


def _single_quoted(low: int, high: int | str) -> str:
    """A terminal for a string of so many characters."""
    return rf"/'([^'\\\x00-\x1F\x7F]|\\[nrtbf'\"\\]){{{low},{high}}}'/"


def _python(value: str | bool | None) -> str:
    """A value as Python writes it."""
    if not isinstance(value, str):
        return str(value)
    escaped = "".join(_ESCAPES.get(char, char) for char in value)
    return f"'{escaped}'"


_ESCAPES = {"\\": "\\\\", "'": "\\'", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}


def _quoted(text: str) -> str:
    """A text as a string of a grammar."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
