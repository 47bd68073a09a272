"""Chat messages and tools, checked and brought into the form that the native formatter takes.

With ``fix`` (the default everywhere) messages in OpenAI's form are made to fit; without it every function does what the
family's stock template does under transformers' rules, errors included. Fixed are:

- tool calls of the assistant, which the LFM2, LFM2.5-Instruct and LFM2-VL templates drop: written as the text that these
  models emit, ``[f(a="x", n=1)]`` with strings as in JSON and True, False, None as in Python;
- ``arguments`` given as JSON text, for which the other templates fail: parsed. An empty text or ``null`` means no arguments;
  text that isn't a JSON object stands between the parentheses as it is;
- ``tool_calls`` and ``thinking`` that are None, and empty ``tool_calls``: as if they weren't there;
- content None, or none at all for the assistant: ``""`` (stock: ``null``, or an error);
- content as a list of text parts (or strings): the texts joined, with nothing between where the template joins them itself,
  else by line breaks as in llama-server (stock LFM2 and LFM2.5-Instruct print the list as JSON). An image part is
  ``<image>`` where the template has that; any other part is an error (stock: printed as JSON);
- thoughts that come as ``reasoning_content``, ``reasoning`` or ``thinking``: the template's own field, or in the content, where
  the template looks for them;
- role ``developer``: ``system``;
- ``strict`` of a tool, which says how its calls are to be enforced: left out.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lfmfast.errors import TemplateError
from lfmfast.tool_calls import ToolCall

__all__ = [
    "FAMILIES",
    "Family",
    "NativeMessage",
    "assistant_message",
    "check_message",
    "check_messages",
    "check_tools",
    "join_texts",
    "native_message",
    "pythonic",
]

# role, content as text pieces with an image between two (None: no content), thinking, tool calls
NativeMessage = tuple[str, "tuple[str, ...] | None", "str | None", "str | None"]
_MISSING = object()


class Family(NamedTuple):
    """What a chat format needs of a message. ``number`` is lfmfast::chat_family."""

    name: str
    number: int
    switch: str = ""  # the template's own variable that keeps past thoughts
    thinking: tuple[str, ...] = ()  # keys of a message
    calls: Callable[[Any], str] | None = None  # how the template writes an argument; None: it drops tool calls
    images: bool = False  # writes <image> for an image part
    tools: bool = True


def to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _literal(value: Any) -> str:
    return to_json(value) if isinstance(value, (str, Mapping, list, tuple)) else str(value)


def _literal_8b(value: Any) -> str:
    return f"'{value}'" if isinstance(value, str) else to_json(value) if isinstance(value, Mapping) else str(value)


def _literal_2_6b(value: Any) -> str:
    if isinstance(value, str):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n").replace("\r", "\\r") + "'"
    return _literal(value)


def _literal_vl(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else to_json(value) if isinstance(value, Mapping) else str(value)


LFM2 = Family("lfm2", 0)
INSTRUCT = Family("lfm2.5-instruct", 1, "keep_past_thinking")
LFM25_8B = Family("lfm2.5-8b", 2, "preserve_thinking", ("thinking",), _literal_8b, images=True)
LFM25_2_6B = Family(
    "lfm2.5-2.6b", 3, "preserve_thinking", ("thinking", "reasoning", "reasoning_content"), _literal_2_6b, images=True
)
VL = Family("lfm2.5-vl", 4, "keep_past_thinking", ("thinking",), _literal_vl, images=True)
LFM2_VL = Family("lfm2-vl", 5, images=True, tools=False)
FAMILIES = (LFM2, INSTRUCT, LFM25_8B, LFM25_2_6B, VL, LFM2_VL)


def assistant_message(content: str, reasoning: str, calls: Iterable[ToolCall]) -> dict[str, Any]:
    """A reply as a message, as OpenAI's API has it; thoughts are in `reasoning_content`."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if functions := [{"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                     for call in calls]:  # fmt: skip
        message["tool_calls"] = functions
    return message


def check_messages(messages: Any) -> None:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise TemplateError(f"messages must be a list of dicts, not {type(messages).__name__}")
    if not messages:
        raise TemplateError("messages is empty: there is nothing to render")


def check_message(message: Any, index: int, fix: bool) -> str:
    """The role of a message, after a look at its shape."""
    if not isinstance(message, Mapping):
        raise TemplateError(f"messages[{index}] must be a dict, not {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        seen = f", not {role!r}" if "role" in message else ""
        raise TemplateError(f"messages[{index}] needs a role such as 'system', 'user', 'assistant' or 'tool'{seen}")
    return "system" if fix and role == "developer" else role


def check_tools(tools: Any, fix: bool) -> Sequence[Any]:
    """Tools as a sequence of dicts (bare, or wrapped as OpenAI does) or of texts; empty if there are none."""
    if tools is None:
        return ()
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence):
        raise TemplateError(f"tools must be a list of dicts, not {type(tools).__name__}")
    for i, tool in enumerate(tools):
        if not isinstance(tool, (str, Mapping)):
            raise TemplateError(f"tools[{i}] must be a dict, not {type(tool).__name__}")
    return [_told(tool) for tool in tools] if fix else tools


def _told(tool: Any) -> Any:
    """A tool without what isn't for the model."""
    if not isinstance(tool, Mapping):
        return tool
    if isinstance(function := tool.get("function"), Mapping):
        return {**tool, "function": _told(function)} if "strict" in function else tool
    return {name: value for name, value in tool.items() if name != "strict"} if "strict" in tool else tool


def tools_text(tools: Sequence[Any], family: Family) -> str:
    """``[{...}, {...}]``, or "" without tools. A tool given as text stays as it is, except in the VL format."""
    if not tools or not family.tools:
        return ""
    texts = []
    for i, tool in enumerate(tools):
        try:
            texts.append(tool if isinstance(tool, str) and family is not VL else to_json(tool))
        except (TypeError, ValueError, RecursionError) as error:
            raise TemplateError(f"tools[{i}] can't be written as JSON: {error}") from error
    return f"[{', '.join(texts)}]"


def native_message(message: Any, index: int, family: Family, fix: bool) -> NativeMessage:
    """A message for the native formatter."""
    role = check_message(message, index, fix)
    content = message.get("content", _MISSING)
    pieces = (content,) if isinstance(content, str) else _content(content, f"messages[{index}]", role, family, fix)
    if role != "assistant":
        return role, pieces, None, None
    if fix and family.switch and not family.thinking and pieces and (thought := _reasoning(message)):
        # The template knows thoughts in the content only, and strips them there.
        pieces = pieces if "</think>" in pieces[0] else (f"<think>{thought}</think>{pieces[0]}", *pieces[1:])
    return role, pieces, _thinking(message, index, family, fix), _calls(message, index, family, fix)


def native_system(message: Any, family: Family, fix: bool, has_tools: bool) -> tuple[str, ...]:
    """The content of a system message that is rendered in the head."""
    content = message.get("content", _MISSING)
    if not fix and family in (LFM2, INSTRUCT) and not isinstance(content, str):
        if has_tools or not (content is _MISSING or content is None or content == []):
            raise TemplateError(f"messages[0].content must be a string, not {_kind(content)}")
        return ("",)
    return (content,) if isinstance(content, str) else _content(content, "messages[0]", "system", family, fix) or ("",)


def _kind(content: object) -> str:
    return "missing" if content is _MISSING else "None" if content is None else type(content).__name__


def _content(content: Any, where: str, role: str, family: Family, fix: bool) -> tuple[str, ...] | None:
    if isinstance(content, (list, tuple)):
        return _parts(content, f"{where}.content", family) if fix else _stock_parts(content, f"{where}.content", family)
    if content is not None and content is not _MISSING:
        raise TemplateError(f"{where}.content must be a string, None or a list of parts, not {type(content).__name__}")
    missing = content is _MISSING
    if fix:
        if missing and role != "assistant":
            raise TemplateError(f"{where} has no content")
        return ("",)
    if family in (LFM2, INSTRUCT) and not missing:
        return ("null",)
    if family is VL and missing:
        return None
    if family is LFM25_2_6B or (family is LFM25_8B and (missing or role != "assistant")) or (family is LFM2_VL and missing):
        return ("",)
    raise TemplateError(f"{where}.content must be a string, not {_kind(content)}")


def join_texts(texts: Sequence[str], joint: str = "\n") -> str:
    """The texts of a message's parts as one, as llama-server joins them."""
    return joint.join(itertools.dropwhile(lambda text: not text, texts))


def _parts(parts: Sequence[Any], where: str, family: Family) -> tuple[str, ...]:
    pieces: list[list[str]] = [[]]
    for i, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(part, str):
            pieces[-1].append(part)
        elif kind == "text":
            if not isinstance(part.get("text"), str):
                raise TemplateError(f"{where}[{i}].text must be a string, not {type(part.get('text')).__name__}")
            pieces[-1].append(part["text"])
        elif kind == "image" and family.images:
            pieces.append([])
        else:
            seen = f"has type {kind!r}" if isinstance(part, Mapping) else f"is a {type(part).__name__}"
            raise TemplateError(f"{where}[{i}] {seen}: this model takes parts of type 'text'{family.images * ' or image'}")
    return tuple("".join(texts) if family.images else join_texts(texts) for texts in pieces)


def _stock_parts(parts: Sequence[Any], where: str, family: Family) -> tuple[str, ...]:
    if family in (LFM2, INSTRUCT):
        return (to_json(parts),)
    pieces = [""]
    for i, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "image":
            pieces.append("")
        elif kind == "text" and family is LFM25_2_6B:
            pieces[-1] += str(part.get("text") or "")
        elif kind == "text" and family is LFM2_VL:
            pieces[-1] += str(part.get("text", ""))
        elif kind == "text":
            if not isinstance(part.get("text"), str):
                raise TemplateError(f"{where}[{i}].text must be a string, not {type(part.get('text')).__name__}")
            pieces[-1] += part["text"]
        elif family is LFM25_2_6B and isinstance(part, str):
            pieces[-1] += part
        elif family is not LFM2_VL:
            pieces[-1] += to_json(part)
    return tuple(pieces)


def _reasoning(message: Mapping[str, Any]) -> str | None:
    """The thoughts of a message, whatever a client calls them."""
    return next((text for key in LFM25_2_6B.thinking if isinstance(text := message.get(key), str) and text), None)


def _thinking(message: Mapping[str, Any], index: int, family: Family, fix: bool) -> str | None:
    if not family.thinking:
        return None
    if family is LFM25_2_6B:
        text = next((message[key] for key in family.thinking if message.get(key)), None)
        return text if isinstance(text, str) else None
    if fix and message.get("thinking") is None:
        return _reasoning(message)
    text = message.get("thinking", _MISSING)
    if text is _MISSING or (fix and text is None):
        return None
    if not isinstance(text, str):
        raise TemplateError(f"messages[{index}].thinking must be a string, not {type(text).__name__}")
    return text


def _calls(message: Mapping[str, Any], index: int, family: Family, fix: bool) -> str | None:
    calls = message.get("tool_calls", _MISSING)
    if calls is _MISSING or (not calls and (fix or family is LFM25_2_6B)) or (family.calls is None and not fix):
        return None
    literal = family.calls or _literal
    texts = [_call(*call, literal) for call in _read_calls(calls, f"messages[{index}].tool_calls", family, fix)]
    return f"[{', '.join(texts)}]"


def pythonic(message: Mapping[str, Any], index: int) -> str | None:
    """The tool calls of a message as LFM2 models write them, without the control tokens around; None if there are none."""
    return _calls(message, index, LFM2, True)


def _call(name: str, arguments: Any, where: str, literal: Callable[[Any], str]) -> str:
    if isinstance(arguments, str):
        return f"{name}({arguments})"
    for key, value in arguments.items():
        if not (isinstance(key, str) and isinstance(value, (str, int, float, Mapping, list, tuple, type(None)))):
            raise TemplateError(f"{where}.arguments must be data as in JSON, not {key!r}: {type(value).__name__}")
    try:
        return f"{name}({', '.join([key + '=' + literal(value) for key, value in arguments.items()])})"
    except (TypeError, ValueError, RecursionError) as error:
        raise TemplateError(f"{where}.arguments can't be written: {error}") from error


def _read_calls(calls: Any, where: str, family: Family, fix: bool) -> Iterator[tuple[str, Any, str]]:
    if not isinstance(calls, (list, tuple)):
        raise TemplateError(f"{where} must be a list, not {type(calls).__name__}")
    for i, call in enumerate(calls):
        bare = fix or family is LFM25_2_6B
        function = (call.get("function", call) if bare else call.get("function")) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise TemplateError(f"{where}[{i}] needs a function with a name and arguments")
        name = function.get("name")
        if not isinstance(name, str):
            raise TemplateError(f"{where}[{i}].function.name must be a string, not {type(name).__name__}")
        arguments = function.get("arguments")
        if fix:
            arguments = parse_arguments(arguments)
            if not isinstance(arguments, (str, Mapping)):
                raise TemplateError(f"{where}[{i}].function.arguments must be a dict or JSON text, not {_kind(arguments)}")
        elif family is LFM25_2_6B:
            if isinstance(arguments, str) and arguments.strip() not in ("", "{}", "null"):
                raise TemplateError(f"{where}[{i}].function.arguments must be a dict, not JSON text")
            arguments = arguments if isinstance(arguments, Mapping) else {}
        elif not isinstance(arguments, Mapping):
            raise TemplateError(f"{where}[{i}].function.arguments must be a dict, not {_kind(arguments)}")
        yield name, arguments, f"{where}[{i}].function"


def parse_arguments(arguments: Any) -> Any:
    """Arguments as a mapping where they are one; JSON text that isn't an object stays text."""
    if arguments is None:
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return arguments
    return {} if value is None else value if isinstance(value, dict) else arguments
