"""Conversations in which the model calls Python functions: what :meth:`Chat.run_tools` does, and its parts."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lfmfast.errors import ParameterError, ToolRoundsError
from lfmfast.functions import acall, call, is_async, named, tool_of
from lfmfast.json_types import to_json
from lfmfast.model_file import check_int
from lfmfast.tool_calls import ToolCall
from lfmfast.types import Completion

if TYPE_CHECKING:
    from lfmfast.chat import Chat

__all__ = ["Functions", "OnCall", "Said", "arun_tools", "atool_message", "run_tools", "tool_message"]

Said = str | Sequence[Any] | Mapping[str, Any] | None
Functions = Mapping[str, Callable[..., Any]] | Iterable[Callable[..., Any]]
OnCall = Callable[[ToolCall], Any]

_log = logging.getLogger("lfmfast")


def tool_message(made: ToolCall, functions: Functions) -> dict[str, Any]:
    """Call the function that a model wants called, and give the message that answers it.

    The content is the function's result: text as it is, anything else as JSON. What goes wrong is told to the model: a
    function or an argument that doesn't exist, a value of the wrong type, an exception of the function (which is logged).

    Examples
    --------
    >>> def add(a: float, b: float) -> float:
    ...     return a + b
    >>> tool_message(ToolCall("c1", "add", '{"a": 3, "b": 4}'), [add])
    {'role': 'tool', 'tool_call_id': 'c1', 'content': '7'}
    >>> tool_message(ToolCall("c2", "add", '{"a": 3}'), [add])["content"]
    "Error: add needs argument 'b'; it takes a (a number), b (a number)"
    """
    known = named(functions)
    try:
        content = to_json(call(_function(made, known), made.parsed, name=made.name))
    except Exception as error:
        content = _told(made, error)
    return _message(made, content)


async def atool_message(made: ToolCall, functions: Functions) -> dict[str, Any]:
    """:func:`tool_message` for an event loop: async functions are awaited, and others run in a thread."""
    known = named(functions)
    try:
        content = to_json(await acall(_function(made, known), made.parsed, name=made.name))
    except Exception as error:
        content = _told(made, error)
    return _message(made, content)


def run_tools(chat: Chat, content: Said, functions: Functions, max_rounds: int, on_call: OnCall | None,
              options: dict[str, Any]) -> Completion:  # fmt: skip
    known = _offered(chat, functions, max_rounds)
    for name, function in [*known.items(), ("on_call", on_call)]:
        if function is not None and is_async(function):
            raise ParameterError(f"{name} is an async function: it needs arun_tools()")
    try:
        reply = chat.send(content, **options)
        for _ in range(max_rounds):
            if reply.finish_reason != "tool_calls":
                return reply
            for made in reply.tool_calls:
                said = on_call(made) if on_call is not None else None
                chat.add(tool_message(made, known) if said is None else _message(made, to_json(said)))
            reply = chat.send(None, **_later(options))
        return _last(reply, max_rounds)
    finally:
        _settle(chat)


async def arun_tools(chat: Chat, content: Said, functions: Functions, max_rounds: int, on_call: OnCall | None,
                     options: dict[str, Any]) -> Completion:  # fmt: skip
    known = _offered(chat, functions, max_rounds)

    async def answer(made: ToolCall) -> dict[str, Any]:
        said = on_call(made) if on_call is not None else None
        if inspect.isawaitable(said):
            said = await said
        return await atool_message(made, known) if said is None else _message(made, to_json(said))

    try:
        reply = await chat.asend(content, **options)
        for _ in range(max_rounds):
            if reply.finish_reason != "tool_calls":
                return reply
            answers = [asyncio.ensure_future(answer(made)) for made in reply.tool_calls]
            try:
                await asyncio.gather(*answers)
            finally:  # what was done is told, whatever became of the others
                for task in answers:
                    task.cancel()
                await asyncio.wait(answers)
                chat.add(*(task.result() for task in answers if not task.cancelled() and task.exception() is None))
            reply = await chat.asend(None, **_later(options))
        return _last(reply, max_rounds)
    finally:
        _settle(chat)


def _offered(chat: Chat, functions: Functions, max_rounds: int) -> dict[str, Callable[..., Any]]:
    """The functions by name; the chat's tools are theirs from here on."""
    check_int("max_rounds", max_rounds, 1)
    known = named(functions)
    tools = [tool_of(function, name=name) for name, function in known.items()]
    if tools != chat.tools:
        chat.tools = tools
    return known


def _function(made: ToolCall, known: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    if made.name not in known:
        raise ParameterError(f"there is no function {made.name!r}, only {', '.join(known) or 'none'}")
    return known[made.name]


def _told(made: ToolCall, error: Exception) -> str:
    is_the_models = isinstance(error, ParameterError)
    _log.warning("%s(%s) failed: %s", made.name, made.arguments, error, exc_info=None if is_the_models else error)
    return f"Error: {error}" if is_the_models else f"Error: {type(error).__name__}: {error}"


def _message(made: ToolCall, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": made.id, "content": content}


def _later(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the replies after the first one: a call that was asked for has been made."""
    later = {name: value for name, value in options.items() if name != "prefill"}
    if later.get("tool_choice") not in (None, "none"):
        later["tool_choice"] = "auto"
    return later


def _last(reply: Completion, max_rounds: int) -> Completion:
    if reply.finish_reason == "tool_calls":
        raise ToolRoundsError(f"the model called functions in {max_rounds + 1} replies one after the other; max_rounds is "
                              f"{max_rounds}", reply)  # fmt: skip
    return reply


def _settle(chat: Chat) -> None:
    """Answer the calls at the end of the history that have no answer, so that the conversation can go on."""
    answered = set()
    for message in reversed(chat.messages):
        if message["role"] != "tool":
            calls = message.get("tool_calls") or () if message["role"] == "assistant" else ()
            missing = [made["id"] for made in calls if made["id"] not in answered]
            chat.add(*({"role": "tool", "tool_call_id": id_, "content": "Error: not completed"} for id_ in missing))
            return
        answered.add(message.get("tool_call_id"))
