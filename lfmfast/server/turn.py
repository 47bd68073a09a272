"""One answer to one conversation, for protocols whose bodies are translated into those of chat completions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from lfmfast.aio import AsyncStream
from lfmfast.params import SamplingParams
from lfmfast.server import completion
from lfmfast.server.conversation import read_conversation
from lfmfast.server.errors import ApiError, invalid
from lfmfast.server.fields import Generation, parse_generation
from lfmfast.server.sse import Answers
from lfmfast.server.state import ServerState

__all__ = ["Turn", "add_text", "begin_turn", "count_input", "function_choice", "get_text", "items_of", "json_format", "refuse",
           "refuse_part", "shown", "strictness"]  # fmt: skip


@dataclass(frozen=True)
class Turn:
    """An answer that the engine works on."""

    state: ServerState
    generation: Generation
    params: SamplingParams
    """With every field set."""
    answers: Answers

    @property
    def stream(self) -> AsyncStream:
        return self.answers.streams[0]

    def n_thought(self) -> int:
        """Tokens of the answer up to the end of its thoughts, which the model begins with."""
        tokens = self.stream.tokens
        if not self.stream.reasoning:
            return 0
        end = self.state.model.model.token_id("</think>")
        return tokens.index(end) + 1 if end in tokens else len(tokens)


def refuse(body: Mapping[str, Any], names: Iterable[str]) -> None:
    """400 for the first of these fields that the body sets."""
    for name in names:
        if body.get(name):
            raise invalid(f"'{name}' is not supported")


async def begin_turn(request: Request, state: ServerState, body: Mapping[str, Any]) -> Turn:
    """Begin the answer to a body that is already one of chat completions.

    Raises
    ------
    ApiError, LfmfastError
        It can't be begun.
    """
    model = state.model
    generation = parse_generation(body, state.settings, chat=True)
    conversation = read_conversation(body, state)
    for name, asked in (("n", generation.n > 1), ("logprobs", generation.n_probs >= 0)):
        if asked:
            raise invalid(f"'{name}' is not supported by this endpoint")
    params = generation.resolved(model.model)
    answers = Answers(request)
    async with answers.beginning():
        stream = model.stream(conversation.messages, **conversation.options(), **generation.options(params))
        settings = completion.settings_of(generation, params, model.model, conversation.reasoning_format)
        answers.add(stream, state.task(stream, prompt=conversation.messages, prompt_options=conversation.prompt_options(),
                                       params=settings, id_slot=generation.id_slot))  # fmt: skip
    return Turn(state, generation, params, answers)


async def count_input(state: ServerState, body: Mapping[str, Any]) -> int:
    """Tokens of the prompt that a body of chat completions makes."""
    conversation = read_conversation(body, state)
    return len(await asyncio.to_thread(conversation.encode, state.model.model))


def items_of(value: Any, where: str) -> list[dict[str, Any]]:
    """A list of objects, checked."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise invalid(f"'{where}' must be an array of objects")
    return value


def get_text(item: Mapping[str, Any], name: str, where: str) -> str:
    """A text that has to be there."""
    value = item.get(name)
    if not isinstance(value, str):
        raise invalid(f"'{where}.{name}' must be a string")
    return value


def strictness(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`strict` of a function, if it is true."""
    if not isinstance(tool.get("strict"), (bool, type(None))):
        raise invalid(f"'{where}.strict' must be true or false")
    return {"strict": True} if tool.get("strict") else {}


def json_format(form: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The `response_format` of a chat completion for one whose schema stands beside its type."""
    if not isinstance(form.get("schema"), (dict, bool)):
        raise invalid(f"'{where}.schema' must be an object")
    return {"type": "json_schema", "json_schema": {"schema": form["schema"]}}


def function_choice(name: str) -> dict[str, Any]:
    """The `tool_choice` of a chat completion that names a function."""
    return {"type": "function", "function": {"name": name}}


def refuse_part(kind: Any, where: str) -> ApiError:
    """400: a part of a message that is no text."""
    for name in ("image", "audio", "video"):
        if isinstance(kind, str) and name in kind:
            return invalid(f"{name} input is not supported: this model reads text only ('{where}' is of type '{kind}')")
    return invalid(f"'{where}' is of type {shown(kind)}, which is not supported")


def add_text(message: dict[str, Any], text: str) -> None:
    """Give a message one more text: the first is its content, several are parts of it."""
    content = message["content"]
    if not content:
        message["content"] = text
    else:
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        message["content"] = [*parts, {"type": "text", "text": text}]


def shown(value: Any) -> str:
    """A value that should have been a short text, for a message."""
    return repr(value[:40]) if isinstance(value, str) else "null" if value is None else "(no text)"
