"""Tool calls in the text of a model, read while it arrives.

LFM2 models write calls as Python does, ``[get_weather(city="Paris"), add(a=3, b=4)]``, or, when asked to, as JSON,
``[{"name": "add", "arguments": {"a": 3, "b": 4}}]``. What small models get wrong is read where only one meaning is left
(`lfmfast.call_text` and `lfmfast.call_values` say what of strings and literals):

- the brackets, a closing parenthesis at the end, commas between calls may be missing; code fences and tags stand around;
- arguments may have any name, also Python's keywords, and ``:`` for ``=``; ``**{...}`` gives several. The same argument
  twice is unreadable, unless the values are equal;
- arguments without names take those of the tool's schema in its order, where the values fit; else the call is unreadable;
- a JSON call may have ``parameters``, a text as ``arguments``, or none; it may stand in ``function``, as OpenAI has it;
- values are brought to the tool's schema (`lfmfast.call_schema`). Functions that no tool has are passed on;
- numbers keep their digits. What JSON has no number for, such as ``1e999`` and ``nan``, is kept as text.

A call that can't be read drops no other: reading goes on behind it. Expressions, f-strings with placeholders and bytes are
never guessed.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lfmfast.call_block import BlockReader
from lfmfast.call_schema import Schema
from lfmfast.call_text import NAME, QUOTES, WORD, Incomplete, Steps, Unreadable
from lfmfast.call_values import Bare, Value, json_text, read_value, scalar
from lfmfast.errors import ClosedError

__all__ = ["CallDelta", "CallParser", "ToolCall"]

_ALPHABET = string.ascii_letters + string.digits
_SPARE_WORK = 65_536  # characters that may be read again in vain, beside four times those of the text
_EMPTY = re.compile(r"\s*(?:\[\s*\]\s*)*")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model made."""

    id: str
    name: str
    arguments: str
    """A JSON object as text, with the arguments in the order in which they were written."""

    @property
    def parsed(self) -> dict[str, Any]:
        """The arguments."""
        arguments: dict[str, Any] = json.loads(self.arguments)
        return arguments


@dataclass(frozen=True, slots=True)
class CallDelta:
    """What came new of a call: first its id and name, then pieces of the text of its arguments."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class _Tool:
    """Name and schema of a tool, whatever form it was given in."""

    def __init__(self, name: str, parameters: Any) -> None:
        self.name = name
        self.schema = Schema(parameters)

    @classmethod
    def of(cls, tool: Any) -> _Tool | None:
        if isinstance(tool, str):
            try:
                tool = json.loads(tool)
            except (ValueError, RecursionError):
                return None
        if isinstance(tool, Mapping) and isinstance(tool.get("function"), Mapping):
            tool = tool["function"]
        name = tool.get("name") if isinstance(tool, Mapping) else None
        return cls(name, tool.get("parameters", tool.get("input_schema"))) if isinstance(name, str) else None


class _Call:
    """A call while it is read."""

    def __init__(self, name: str, tool: _Tool | None) -> None:
        self.name = name
        self.schema = tool.schema if tool else Schema(None)
        self.known = tool is not None
        self.arguments: dict[str, str] = {}
        self.pieces: list[str] = []  # of the text of the arguments, one for each
        self._positional = 0

    def add(self, name: str, value: Value) -> None:
        if not name:
            raise Unreadable("an argument with an empty name")
        text = json_text(self.schema.argument(name, value))
        if name not in self.arguments:
            self.pieces.append(f"{', ' if self.arguments else '{'}{json_text(name)}: {text}")
        if self.arguments.setdefault(name, text) != text:
            raise Unreadable(f"argument {name[:40]!r} twice")

    def add_all(self, values: Value) -> None:
        if not isinstance(values, dict):
            raise Unreadable("** before what is no dict")
        for name, value in values.items():
            self.add(name, value)

    def add_positional(self, value: Value) -> None:
        """Takes a value without a name as the next argument of the schema."""
        names = list(self.schema.properties)
        if self._positional >= len(names) or self._positional < len(self.arguments):
            raise Unreadable("an argument without a name")
        name = names[self._positional]
        value = self.schema.argument(name, value)
        if self.schema.fits(name, value):
            self._positional += 1
            self.add(name, value)
        elif isinstance(value, dict) and not self.arguments and set(value) <= set(names):
            self.add_all(value)
        else:
            raise Unreadable("an argument without a name, of another type than the first that is missing")


class CallParser:
    """Reads what stands between the markers of a tool call.

    The result does not depend on how the text is cut into pieces, and no text raises an exception. Reading takes time
    in proportion to the length of the text.

    Parameters
    ----------
    tools
        Tools that the model was given, in OpenAI's form or bare; their schemas say how to read arguments in doubt.
    first_index
        Index of the first call, for a message with several pairs of markers.
    early
        Give pieces of a call as soon as an argument is complete and can't be read in another way. If the rest of such a call
        can't be read, its pieces stay without an end, and it is not among `calls`. Otherwise, and always of JSON calls, the
        pieces come together, and only of calls that are whole.

    Attributes
    ----------
    calls : list of ToolCall
        Calls that were read to their end.
    unread : list of str
        Text that could not be read, or that is no call. Complete after `close`.

    Examples
    --------
    >>> parser = CallParser()
    >>> deltas = parser.feed('[get_weather(city="Paris", days=+3)]') + parser.close()
    >>> parser.calls[0].name, parser.calls[0].parsed
    ('get_weather', {'city': 'Paris', 'days': 3})
    >>> [delta.arguments for delta in deltas]
    ['', '{"city": "Paris"', ', "days": 3', '}']
    """

    def __init__(self, tools: Iterable[Any] | None = None, first_index: int = 0, *, early: bool = True) -> None:
        self._tools = {tool.name: tool for tool in map(_Tool.of, tools or ()) if tool}
        self._early = early
        self._next_index = first_index
        self.calls: list[ToolCall] = []
        self.unread: list[str] = []
        self._reader = BlockReader()
        self._reader.names = self._tools or None
        self._deltas: list[CallDelta] = []
        self._all: list[str] = []  # the whole text, as long as it has no call
        self._junk: list[str] = []  # text that is no call, up to here
        self._wasted = 0  # characters that were read in vain
        self._announced: tuple[int, str] | None = None  # index and id of the call that is read, once they were given out
        self._n_sent = 0  # pieces of it that were given out
        self._steps = self._block()

    def feed(self, text: str) -> list[CallDelta]:
        """Reads more text; what came new of calls."""
        if self._reader.ended:
            raise ClosedError("the call parser was closed")
        if not self.calls:
            self._all.append(text)
        self._reader.add(text)
        return self._go_on()

    def close(self, cut: bool = False) -> list[CallDelta]:
        """Ends the text. ``cut``: the model had no room to go on, so a call without its closing parenthesis is no call."""
        if self._reader.ended:
            return []
        self._reader.ended = True
        self._reader.cut = cut
        deltas = self._go_on()
        if not self.calls:
            text = "".join(self._all)
            self.unread = [] if _EMPTY.fullmatch(text) else [text.strip()]
        return deltas

    def _go_on(self) -> list[CallDelta]:
        next(self._steps, None)
        deltas, self._deltas = self._deltas, []
        return deltas

    def _block(self) -> Steps[None]:
        """Reads calls, and what stands between them, to the end."""
        reader = self._reader
        first = True
        while True:
            reader.mark()
            c = yield from reader.between(first)
            gap = reader.marked()
            if not c:
                break
            reader.mark()
            if self._wasted > 4 * reader.position + _SPARE_WORK:
                is_call = yield from reader.rest()
            else:
                is_call = yield from self._item(c)
            if is_call or gap.strip():
                self._flush()
                gap = ""
            if not is_call:
                self._junk += [gap, reader.marked()]
            first = False
        self._flush()

    def _flush(self) -> None:
        text = "".join(self._junk).strip()
        self._junk.clear()
        if text:
            self.unread.append(text)

    def _item(self, c: str) -> Steps[bool]:
        """Reads a call, or passes over what is none; whether it was one."""
        reader = self._reader
        name, after, _ = yield from reader.look_name(0)
        if c == "{" or (name and after == "("):
            return (yield from self._try(c == "{"))
        if reader.depth:
            yield from self._pass_over()
        else:
            yield from reader.pass_line()
        return False

    def _try(self, is_object: bool) -> Steps[bool]:
        """Reads a call, in each of the ways in which strings in doubt can be read, until one fits."""
        reader = self._reader
        reader.json = is_object
        start = reader.position
        for reader.reading in range(3):
            reader.doubtful = False
            try:
                yield from (self._object() if is_object else self._call())
                return True
            except Unreadable as error:
                cut = reader.cut and isinstance(error, Incomplete)
            self._wasted += reader.position - start
            if cut:
                self._announced = None
                return (yield from reader.rest())
            reader.rewind()
            if not reader.doubtful:
                break
        self._announced = None
        yield from self._pass_over()
        return False

    # --- calls ---

    def _call(self) -> Steps[None]:
        """Reads a call as Python writes it."""
        reader = self._reader
        name = yield from reader.run(NAME)
        yield from reader.space(False)
        reader.at += 1
        call = _Call(name, self._tools.get(name))
        reader.parameters = call.schema.properties if call.known else None
        if self._early and (call.known or not self._tools):
            self._announce(call)
        while (c := (yield from reader.space())) != ")":
            if not c and reader.cut:
                raise Incomplete("a call without an end")
            if not c:
                break
            yield from self._argument(call, c)
            c = yield from reader.space()
            if c == ",":
                reader.at += 1
            elif c == "]" and (yield from reader.look(1))[0] == "" and not reader.cut:
                break
            elif c and c != ")":
                raise Unreadable(f"{c!r} after an argument")
            if self._announced and not reader.doubtful:
                self._send(call)
        yield from self._after_call()
        self._finish(call)

    def _after_call(self) -> Steps[None]:
        """Makes sure that what follows a call does not belong to it."""
        reader = self._reader
        while (yield from reader.char()) == ")":
            reader.at += 1
            if reader.doubtful:
                break
            yield from reader.space(False)  # one too many does no harm
        if not (reader.depth or reader.doubtful):
            return
        c = yield from reader.space()
        if c and not (c in ",;[]{<`|" or c.isalnum() or c == "_"):
            raise Unreadable(f"{c!r} after a call")

    def _argument(self, call: _Call, c: str) -> Steps[None]:
        reader = self._reader
        if c == "*":
            if (yield from reader.char(1)) != "*":
                raise Unreadable("an argument that begins with *")
            reader.at += 2
            call.add_all((yield from reader.value("call")))
            return
        value: Value
        if c in QUOTES or c in "[({+-" or c.isdigit():
            value = yield from reader.value("argument")
        else:
            word = yield from reader.run(WORD)
            prefix = (yield from reader.char()) in ("'", '"')
            value = (yield from reader.word_value(word, "argument")) if prefix else Bare(word)
        after = yield from reader.space()
        if after in ("=", ":") and isinstance(value, str):
            reader.at += 1
            if (yield from reader.char()) == "=":
                raise Unreadable("== in an argument")
            call.add(str(value), (yield from reader.value("call")))
        else:
            call.add_positional(scalar(value) if isinstance(value, Bare) else value)

    def _object(self) -> Steps[None]:
        """Reads a call as JSON writes it."""
        value = yield from self._reader.value("dict")
        name, arguments = _named(value)
        call = _Call(name, self._tools.get(name))
        call.add_all(arguments)
        self._finish(call)

    def _announce(self, call: _Call) -> None:
        if self._announced is None:
            self._announced = self._next_index, _new_id()
            self._next_index += 1
            self._n_sent = 0
            self._deltas.append(CallDelta(*self._announced, call.name))

    def _send(self, call: _Call) -> None:
        """Gives out the arguments that were not given out yet."""
        if self._announced:
            self._deltas += [CallDelta(self._announced[0], arguments=piece) for piece in call.pieces[self._n_sent :]]
            self._n_sent = len(call.pieces)

    def _finish(self, call: _Call) -> None:
        self._announce(call)
        self._send(call)
        if self._announced:
            index, identifier = self._announced
            end = "}" if call.pieces else "{}"
            self._deltas.append(CallDelta(index, arguments=end))
            self.calls.append(ToolCall(identifier, call.name, "".join(call.pieces) + end))
        self._announced = None

    def _pass_over(self) -> Steps[None]:
        """Passes over what can't be read, to where the next call may begin."""
        reader = self._reader
        start = reader.position
        if (yield from reader.skip()):
            return
        self._wasted += reader.position - start
        found = None if reader.cut else self._next_call().search(reader.marked(), 1)
        if found:
            reader.rewind()
            reader.at += found.start()

    def _next_call(self) -> re.Pattern[str]:
        """Where the text goes on with a call of a tool."""
        names = "|".join(re.escape(name) for name in sorted(self._tools, key=len, reverse=True))
        call = f"(?:{names or NAME.pattern[:-1] + '{1,256}'})" + r"\s{0,16}\("
        json_call = r"""\{\s{0,16}["'](?:name|function)["']"""
        return re.compile(rf"(?:(?<=\))|(?=[,;\]\n]))[\s,;\[\]]{{0,32}}(?:{call}|{json_call})")


def _new_id() -> str:
    return "call_" + "".join([_ALPHABET[byte % len(_ALPHABET)] for byte in secrets.token_bytes(24)])


def _named(value: Value) -> tuple[str, Value]:
    """Name and arguments of a call in JSON."""
    function = value.get("function") if isinstance(value, dict) else None
    if isinstance(function, dict):
        value = function
    if not isinstance(value, dict):
        raise Unreadable("no object")
    name = value.get("name", function)
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments = read_value(arguments) if arguments.strip() else None
    if not isinstance(name, str) or isinstance(name, Bare) or not name:
        raise Unreadable("an object without the name of a function")
    return name, {} if arguments is None else arguments
