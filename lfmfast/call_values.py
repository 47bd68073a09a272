"""Literals as models write them in tool calls: Python's, JSON's and what lies between.

Read are strings, numbers, constants, lists, tuples and sets (both become lists) and dicts.
"""

from __future__ import annotations

import json
import math
import re
from typing import NamedTuple, Union

from lfmfast.call_text import CONSTANTS, QUOTES, WORD, Incomplete, Steps, T, TextReader, Unreadable

__all__ = ["CLOSERS", "MAX_DEPTH", "Bare", "Number", "Reader", "Value", "json_text", "read_value"]

MAX_DEPTH = 64  # lists and dicts inside each other


class Number(NamedTuple):
    """A finite number: as JSON text, and as it was written."""

    text: str
    written: str


class Bare(str):
    """A word without quotes that is no constant: a text where a schema asks for one, unreadable elsewhere."""

    __slots__ = ()


Value = Union[None, bool, str, Number, "list[Value]", "dict[str, Value]"]

_WHOLE = re.compile(r"[+-]?(?:0[xX](?:_?[0-9a-fA-F])+|0[oO](?:_?[0-7])+|0[bB](?:_?[01])+)")
_DECIMAL = re.compile(r"([+-]?)((?:\d(?:_?\d)*)?)(\.(?:\d(?:_?\d)*)?)?([eE][+-]?\d(?:_?\d)*)?", re.ASCII)
_NOT_FINITE = re.compile(r"[+-]?(?:nan|inf|infinity)", re.IGNORECASE)
_SURROGATE = re.compile("[\ud800-\udfff]")
CLOSERS = {"[": "]", "(": ")", "{": "}"}
_INSIDE = {"[": "list", "(": "tuple", "{": "brace"}


def json_text(value: Value) -> str:
    """A value as strict JSON text. Surrogates that stand alone are escaped."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "true" if value else "false"
    if isinstance(value, Number):
        return value.text
    if isinstance(value, Bare):
        raise Unreadable(f"{value[:40]!r} has no quotes")
    if isinstance(value, str):
        return _SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))
    if isinstance(value, dict):
        return "{" + ", ".join([f"{json_text(key)}: {json_text(item)}" for key, item in value.items()]) + "}"
    return "[" + ", ".join([json_text(item) for item in value]) + "]"


def read_value(text: str) -> Value:
    """The value that a text holds. Raises `Unreadable` for a text that isn't one literal."""
    reader = Reader()
    reader.add(text)
    reader.ended = reader.json = True
    value = _run(reader.value("list"))
    if _run(reader.space()):
        raise Unreadable("text after the value")
    return value


def _run(steps: Steps[T]) -> T:
    try:
        while True:
            next(steps)
    except StopIteration as done:
        result: T = done.value
        return result


def scalar(word: str) -> Value:
    """A word without quotes: a constant, a number, or a `Bare` word. A number that is not finite is kept as text."""
    if word in CONSTANTS:
        return CONSTANTS[word]
    text = ""
    if _WHOLE.fullmatch(word):
        text = str(int(word.replace("_", ""), 0))
    elif (found := _DECIMAL.fullmatch(word)) and (found[2] or len(found[3] or "") > 1):
        sign, whole, fraction, exponent = (part.replace("_", "") for part in found.groups(""))
        whole = whole.lstrip("0") or "0"
        text = whole + (fraction + "0" if fraction == "." else fraction) + exponent
        if sign == "-" and text != "0":
            text = "-" + text
    if text and math.isfinite(float(text)):
        return Number(text, word)
    return word if text or _NOT_FINITE.fullmatch(word) else Bare(word)


class _Open:
    """A list, tuple, set or dict that was not closed yet."""

    def __init__(self, opener: str) -> None:
        self.closer = CLOSERS[opener]
        self.inside = _INSIDE[opener]
        self.items: list[Value] = []
        self.pairs: dict[str, Value] | None = None
        self.key: str | None = None
        self.comma = False

    def name(self, value: Value) -> None:
        """Takes the value as the key of what follows."""
        if self.items or self.key is not None or isinstance(value, (list, dict)):
            raise Unreadable("no key of a dict")
        self.pairs = {} if self.pairs is None else self.pairs
        self.key = str(value) if isinstance(value, str) else json_text(value)

    def add(self, value: Value) -> None:
        if self.pairs is None:
            self.items.append(value)
        elif self.key is None:
            raise Unreadable("a value without a key")
        else:
            self.pairs[self.key] = value
            self.key = None
        self.comma = False

    def close(self) -> Value:
        if self.key is not None:
            raise Unreadable("a key without a value")
        if self.closer == "}" and not self.items:
            return self.pairs or {}
        if self.closer == ")" and len(self.items) == 1 and not self.comma:
            return self.items[0]
        return self.items


class Reader(TextReader):
    """The literals in a text that arrives in pieces."""

    def value(self, context: str) -> Steps[Value]:
        """Reads a value. ``context`` says where a string stands, and so what may follow it."""
        stack: list[_Open] = []
        while True:
            c = yield from self.space()
            if not c:
                raise Incomplete("no value")
            top = stack[-1] if stack else None
            if top and c == top.closer:
                self.at += 1
                stack.pop()
                value = top.close()
            elif c in CLOSERS:
                if len(stack) == MAX_DEPTH:
                    raise Unreadable(f"more than {MAX_DEPTH} lists and dicts inside each other")
                self.at += 1
                stack.append(_Open(c))
                continue
            else:
                inside = context if top is None else "dict" if top.key is not None else top.inside
                value = yield from self.literal(inside)
            while stack:
                c = yield from self.space()
                top = stack[-1]
                if not c:
                    raise Incomplete(f"no {top.closer}")
                if c not in (top.closer, ",", ":" if top.closer == "}" else ","):
                    raise Unreadable(f"{c!r} after a value")
                self.at += 1
                if c == ":":
                    top.name(value)
                    break
                top.add(value)
                if c == ",":
                    top.comma = True
                    break
                stack.pop()
                value = top.close()
            else:
                return value

    def literal(self, context: str) -> Steps[Value]:
        """Reads a string or a word."""
        c = yield from self.char()
        if c in QUOTES:
            return (yield from self.strings(context))
        return (yield from self.word_value((yield from self.run(WORD)), context))

    def word_value(self, word: str, context: str) -> Steps[Value]:
        """The value of a word that was read, or the string that it is the prefix of."""
        if not word:
            raise Unreadable("no value")
        c = yield from self.char()
        if c and c in QUOTES:
            return (yield from self.strings(context, word))
        if word in ("-", "+") and (yield from self.space()).isdigit():
            word += yield from self.run(WORD)
        return scalar(word)
